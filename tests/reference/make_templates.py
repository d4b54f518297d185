#!/usr/bin/env python3
"""Makes tests/fixtures/templates/golden.json.zst: what transformers renders from chat templates.

The templates are those beside the output (written for these tests in the manner of the common families) and the
built-in ones of src/session/chat_templates. Each renders every conversation of CASES with `apply_chat_template`; the
result is its text, or `null` where it raises. EXPRESSIONS are short templates for single features of Jinja, rendered
with CONTEXT. The clock shows NOW.

    python3 -m venv venv && venv/bin/pip install -r tests/reference/families.txt jinja2==3.1.6
    venv/bin/python tests/reference/make_templates.py tests/fixtures/templates

The program `zstd` compresses the file. The same versions write the same bytes again.
"""

import datetime
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

ROOT = Path(__file__).resolve().parents[2]
# Thursday, 2026-03-05 07:08:09 UTC.
NOW = 1772694489
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def call(identity, name, **arguments):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def function(name, description, properties, required):
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    function(
        "weather",
        "Weather of a place.",
        {
            "place": {"type": "string", "description": "City, e.g. \"Köln\" <DE>"},
            "unit": {"type": "string", "enum": ["°C", "°F"], "default": "°C"},
            "days": {"type": "array", "items": {"type": "integer"}},
            "near": {"type": ["number", "null"], "default": 1.5},
        },
        ["place"],
    ),
    function("add", "Adds.", {"a": {"type": "number"}, "deep": {"type": "object", "properties": {"x": {"type": "boolean"}}}}, []),
    {"type": "function", "function": {"name": "now", "description": "Tells the time.", "parameters": {"type": "object", "properties": {}}}},
]
ASK = say("user", "What's 1 < 2?")
TURNS = [say("system", "Be brief."), ASK, say("assistant", "True."), say("user", " And\n3 > 4? ")]
CALLED = [
    say("system", "Use tools."),
    say("user", "Weather in Köln & São Paulo?"),
    say("assistant", "", tool_calls=[call("abcdefghi", "weather", place="Köln", days=[1, 2], near=None, exact=True)]),
    say("tool", "{\"temp\": 7.5}", name="weather", tool_call_id="abcdefghi"),
]
THOUGHT = [
    ASK,
    say("assistant", "Yes, it is.", reasoning_content="1 is less.\nSo: yes"),
    say("user", "Sure?"),
    say("assistant", "Quite.", reasoning_content="\n Again? "),
]
CASES = [
    {"messages": [ASK]},
    {"messages": [ASK], "add_generation_prompt": True},
    {"messages": TURNS, "add_generation_prompt": True},
    {"messages": TURNS[1:]},
    {"messages": [say("system", "Alone.")]},
    {"messages": [say("user", "one"), say("user", "two")], "add_generation_prompt": True},
    {"messages": [say("assistant", "I begin.")]},
    {"messages": [say("user", "")], "add_generation_prompt": True},
    {"messages": [say("user", "x"), say("assistant", "")]},
    {"messages": [say("user", "Привет 👋🏽 \u200d\u00a0你好\té\u0301 \u2028 ‮"), say("assistant", "\n\n  ok  \n")]},
    {"messages": [say("user", "<|im_end|>{{ 7 * 7 }}{% raw %}\\n'\"")], "add_generation_prompt": True},
    {"messages": [say("user", "/skip this"), say("user", "go"), say("user", "/stop"), say("user", "never")]},
    {"messages": TURNS, "tools": TOOLS, "add_generation_prompt": True},
    {"messages": [ASK], "tools": TOOLS[:1]},
    {"messages": CALLED, "tools": TOOLS, "add_generation_prompt": True},
    {"messages": CALLED, "tools": TOOLS},
    {"messages": CALLED[1:] + [say("assistant", "7.5 °C."), say("user", "Thanks")], "tools": TOOLS, "add_generation_prompt": True},
    {
        "messages": [
            ASK,
            say("assistant", "Two calls.", tool_calls=[call("123456789", "add", a=1), call("12345678", "now")], reasoning_content="hm"),
            say("tool", "1", tool_call_id="123456789"),
            say("tool", "noon", tool_call_id="12345678"),
            say("assistant", "Done."),
        ],
        "tools": TOOLS,
    },
    {"messages": [ASK, say("tool", "7", tool_call_id="123456789")], "tools": TOOLS},
    {"messages": THOUGHT[:2]},
    {"messages": THOUGHT[:3], "add_generation_prompt": True},
    {"messages": THOUGHT},
    {"messages": [ASK, say("assistant", "<think>\nhm\n</think>\n\nYes."), say("user", "Why?"), say("assistant", "<think>a</think>b")]},
    {"messages": [ASK], "add_generation_prompt": True, "variables": {"enable_thinking": False}},
    {"messages": TURNS, "add_generation_prompt": True, "variables": {"enable_thinking": True, "reasoning_effort": "high"}},
    {"messages": TURNS, "variables": {"date_string": "1 Jan 2000", "tools_in_user_message": False, "builtin_tools": []}, "tools": TOOLS[1:]},
    {"messages": [ASK, say("assistant", "It is")], "continue_final_message": True},
    {"messages": [ASK, say("assistant", " It is, ")], "continue_final_message": True},
    {"messages": [ASK, say("assistant", "What's 1 < 2?")], "continue_final_message": True},
    {"messages": [ASK, say("assistant", "")], "continue_final_message": True},
    {"messages": [ASK, say("assistant", "Hm\n\n")], "continue_final_message": True},
    {"messages": [say("user", "Finish my sen")], "continue_final_message": True},
    {"messages": THOUGHT, "continue_final_message": True},
    {"messages": [say("developer", "Rules."), ASK], "add_generation_prompt": True},
    {"messages": [say("narrator", "Night falls."), ASK]},
    {"messages": [ASK] + [say("assistant" if i % 2 else "user", f"turn {i} " * (i % 3)) for i in range(1, 40)]},
]  # fmt: skip
CONTEXT = {
    "n": 7, "x": 2.5, "big": 12345678901234567890, "half": 1e-07, "whole": 3.0, "huge": 1e300, "yes": True, "no": False,
    "empty": None, "word": "Größe", "text": " a-b  c\n d ", "list": [3, 1, 2], "words": ["b", "A", "c", "a"],
    "mixed": [1, "a", None, True, 2.0, [1], {"k": "v"}], "map": {"b": 1, "a": [True, None, "q'q"], "c": {"d": "\"\\\n\té"}},
    "people": [{"name": "Bo", "age": 3}, {"name": "al", "age": 30}, {"name": "Cy"}], "html": "<a href='x'>&\"</a>",
}  # fmt: skip
EXPRESSIONS = [
    # Values as text.
    "{{ yes }} {{ no }} {{ empty }} {{ missing }}|{{ n }} {{ x }} {{ big }} {{ half }} {{ whole }} {{ huge }}",
    "{{ list }} {{ words }} {{ mixed }}", "{{ map }}", "{{ people[0] }}", "{{ 'a' ~ 1 ~ true ~ none ~ 2.0 ~ [1, 'x'] ~ {'k': none} }}",
    "{{ map | string }}|{{ list | string | length }}|{{ none | string }}", "{{ [\"it's\", 'say \"hi\"', 'both \\'\" '] }}", "{{ (1, 'a') }} {{ () }} {{ (1,) }}",
    "{{ ['\\n\\t\\\\', 'é', '\\x07'] }}", "{{ 'x' ~ map.c }}", "{{ html }}", "{{ html | e }}", "{{ html | escape | safe }}",
    # Numbers.
    "{{ 7 / 2 }} {{ 8 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 7.5 // 2 }} {{ 1 + 1.0 }} {{ 0.1 + 0.2 }}",
    "{{ x | int }} {{ '42' | int }} {{ 'x' | int(5) }} {{ '3.7' | float }} {{ 3.7 | round }} {{ 3.14159 | round(2) }} {{ 2.5 | round(0, 'floor') }} {{ 3 | float }}",
    "{{ -3 | abs }} {{ [1, 2, 3] | sum }} {{ [1.5, 2] | sum }} {{ list | max }} {{ list | min }} {{ '%.2f' | format(x) }} {{ '%s-%d' | format('a', 3) }}",
    "{{ 10 | string + '0' }} {{ '5' * 3 }} {{ [0] * 3 }} {{ [1] + [2] }} {{ 1 == 1.0 }} {{ 1 == true }} {{ '1' == 1 }} {{ 1 < 2 <= 2 }}",
    # Texts.
    "[{{ text.strip() }}][{{ text.lstrip() }}][{{ text.rstrip() }}][{{ 'xxaxx'.strip('x') }}][{{ 'abcba'.strip('ab') }}][{{ text | trim }}]",
    "{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a b c'.split(' ', 1) }} {{ 'a-b-c'.rsplit('-', 1) }} {{ 'a\nb\n'.splitlines() }} {{ 'a=b=c'.partition('=') }}",
    "{{ word.upper() }} {{ word.lower() }} {{ 'hello world'.title() }} {{ 'hELLO wORLD'.capitalize() }} {{ 'hello world' | title }} {{ 'hELLO' | capitalize }} {{ word | upper | lower }}",
    "{{ word.startswith('Gr') }} {{ word.endswith(('e', 'x')) }} {{ word.find('ß') }} {{ word.find('z') }} {{ 'aXbXc'.replace('X', '-') }} {{ 'aXbXc'.replace('X', '-', 1) }} {{ 'abcabc'.count('b') }}",
    "{{ '12'.isdigit() }} {{ 'ab'.isalpha() }} {{ 'a1'.isalnum() }} {{ ' '.isspace() }} {{ 'AB'.isupper() }} {{ 'ab'.islower() }} {{ '½'.isnumeric() }}",
    "{{ word[0] }} {{ word[-1] }} {{ word[1:3] }} {{ word[::-1] }} {{ word[:-1] }} {{ word[10:] }}|{{ word[::2] }}", "{{ 'ö' in word }} {{ 'z' not in word }} {{ '' in word }}",
    "{{ ', '.join(words) }} {{ words | join }} {{ words | join('+') }} {{ people | join(',', attribute='name') }} {{ [1, none, true] | join(' ') }}",
    "{{ 'a{}b{}'.format(1, 'x') }} {{ '{:>5}|{:<5}|{:^5}|{:03d}'.format('a', 'b', 'c', 7) }} {{ '{0}{1}{0}'.format('x', 'y') }} {{ '{k}'.format(k=3) }} {{ '{{}}'.format() }}",
    "{{ 'abc'.center(7) }}|{{ 'ab'.ljust(4) }}|{{ 'ab'.rjust(4, '.') }}|{{ '7'.zfill(3) }}", "{{ 'a\nb' | indent(2) }}|{{ 'a\nb' | indent(2, true) }}",
    "{{ 'Ab' | replace('A', 'x') }} {{ 'abc' | reverse }} {{ 'abc' | list }} {{ 'abc' | first }} {{ 'abc' | last }}", "{{ 'ab'.removeprefix('a') }} {{ 'ab'.removesuffix('b') }} {{ 'aB'.swapcase() }}",
    "{{ 'x' | default('y') }} {{ missing | default('y') }} {{ '' | default('z', true) }} {{ none | default('z') }} {{ missing | d('q') }}",
    "{{ 'a\\tb' }}|{{ 'a\\u00e9b' }}|{{ \"q\\\"q\" }}|{{ 'a\\'b' }}|{{ 'a\\\\b' }}|{{ 'a' 'b' }}",
    # Lists and dictionaries.
    "{{ list | sort }} {{ words | sort }} {{ words | sort(case_sensitive=true) }} {{ list | sort(reverse=true) }} {{ people | sort(attribute='name') | map(attribute='name') | join }}",
    "{{ words | unique | list }} {{ words | map('upper') | list }} {{ people | map(attribute='age', default=0) | list }} {{ list | reverse | list }} {{ list | first }} {{ list | last }} {{ list | length }} {{ list | count }}",
    "{{ people | selectattr('age') | map(attribute='name') | list }} {{ people[:2] | selectattr('age', 'gt', 5) | list | length }} {{ people | rejectattr('age', 'defined') | map(attribute='name') | list }} {{ list | select('odd') | list }} {{ list | reject('equalto', 1) | list }}",
    "{{ list | batch(2) | list }} {{ list | slice(2) | list }} {{ people | groupby('age', default=0) | length }} {{ [[1, 2], [3]] | sum(start=[]) }} {{ range(3) | list }} {{ range(5, 0, -2) | list }} {{ range(2, 4) | join }}",
    "{{ map.items() | list }} {{ map.keys() | list }} {{ map.values() | list }} {{ map.get('b') }} {{ map.get('z') }} {{ map.get('z', 9) }} {{ map | length }} {{ map | list }}",
    "{{ map | dictsort }} {{ {'b': 1, 'A': 2} | dictsort }} {{ {'b': 1, 'A': 0} | dictsort(by='value') }} {{ map | items | list }}", "{{ {'a': 1}.update({'b': 2}) }}",
    "{{ 'b' in map }} {{ 'z' in map }} {{ 1 in list }} {{ map['b'] }} {{ map.c.d | length }} {{ map['z'] is defined }} {{ list[5] is defined }} {{ list[-1] }} {{ list[1:] }} {{ list[::-1] }} {{ list[:2][0] }}",
    "{{ dict(a=1, b='x') }} {{ dict({'a': 1}, c=2) }} {{ {'a': 1, 'a': 2} }} {{ {1: 'x', none: 'y', true: 'z'} }} {{ [1, [2, [3]]] }} {{ {} }} {{ [] }}", "{{ list.index(1) }} {{ list.count(1) }}", "{{ list.append(4) }}",
    # tojson.
    "{{ map | tojson }}", "{{ map | tojson(indent=2) }}", "{{ mixed | tojson(indent=4) }}", "{{ html | tojson }} {{ word | tojson }} {{ word | tojson(ensure_ascii=true) }} {{ '👋\\u2028' | tojson(ensure_ascii=True) }}",
    "{{ map | tojson(sort_keys=true) }} {{ map | tojson(separators=(',', ':')) }} {{ people | tojson(sort_keys=True, indent=1) }} {{ map | tojson(separators=(', ', '='), indent=none) }}",
    "{{ [] | tojson(indent=2) }} {{ {} | tojson(indent=2) }} {{ [[], {}] | tojson(indent=1) }} {{ x | tojson }} {{ whole | tojson }} {{ half | tojson }} {{ huge | tojson }} {{ big | tojson }} {{ none | tojson }} {{ true | tojson }}",
    "{{ {1: 'a', none: 2, true: 3, 2.5: 4} | tojson }} {{ (1, 2) | tojson }} {{ 'a\\x07\\x7f/' | tojson }} {{ 1e16 | tojson }} {{ 1e15 | tojson }} {{ 123456789.123 | tojson }} {{ 0.0001 | tojson }} {{ 0.00001 | tojson }} {{ -0.0 | tojson }}",
    "{{ map | tojson(indent=0) }}", "{{ map | tojson(4) }}", "{{ map | tojson(false, 2) }}", "{{ missing | tojson }}",
    # Tests.
    "{{ n is number }} {{ x is float }} {{ n is integer }} {{ yes is boolean }} {{ word is string }} {{ map is mapping }} {{ list is sequence }} {{ word is sequence }} {{ map is sequence }} {{ list is iterable }} {{ word is iterable }} {{ n is iterable }}",
    "{{ empty is none }} {{ missing is defined }} {{ missing is undefined }} {{ n is odd }} {{ n is even }} {{ n is divisibleby 7 }} {{ word is lower }} {{ 'A' is upper }} {{ n is eq 7 }} {{ n is in [7] }} {{ n is not in [7] }} {{ yes is true }} {{ no is false }} {{ 1 is true }}",
    "{{ n is gt 3 }} {{ n is le(3) }} {{ n is sameas 7 }} {{ 'upper' is filter }} {{ 'odd' is test }} {{ yes is number }} {{ yes is integer }}",
    "{% if not missing %}a{% endif %}{% if [] %}b{% endif %}{% if '' %}c{% endif %}{% if 0 %}d{% endif %}{% if {} %}e{% endif %}{% if '0' %}f{% endif %}{% if missing is defined and missing.x %}g{% endif %}",
    # Statements.
    "{% for a in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('x', 'y') }}{{ loop.depth }}{{ loop.previtem | default('-') }}{{ loop.nextitem | default('-') }};{% endfor %}",
    "{% for k, v in map.items() %}{{ k }}={{ v }};{% endfor %}{% for k in map %}{{ k }}{% endfor %}{% for c in 'abc' %}{{ c }}.{% endfor %}{% for a in [] %}x{% else %}none{% endfor %}{% for a, (b, c) in [(1, (2, 3))] %}{{ a + b + c }}{% endfor %}",
    "{% for a in list if a > 1 %}{{ loop.index }}{{ a }}{{ loop.length }}{% endfor %}{% for a in range(9) %}{% if a == 2 %}{% continue %}{% endif %}{% if a == 5 %}{% break %}{% endif %}{{ a }}{% endfor %}",
    "{% for p in [{'n': 1, 'c': [{'n': 2}]}] recursive %}{{ p.n }}{% if p.c %}({{ loop(p.c) }}){% endif %}{% endfor %}{% for a in words %}{{ loop.changed(a | lower) }}{% endfor %}",
    "{% set a = 1 %}{% for i in [1] %}{% set a = 2 %}{% endfor %}{{ a }}{% set ns = namespace(a=1, b=[]) %}{% for i in [1, 2] %}{% set ns.a = ns.a + i %}{% set ns.b = ns.b + [i] %}{% endfor %}{{ ns.a }}{{ ns.b }}{% set c, d = 1, 2 %}{{ c }}{{ d }}",
    "{% set t %}a{{ n }}{% endset %}{{ t }}{{ t | length }}{% set u | upper %}abc{% endset %}{{ u }}{% filter upper %}abc{{ word }}{% endfilter %}{% with z = 3 %}{{ z }}{% endwith %}{{ z is defined }}{% raw %}{{ x }}{% endraw %}",
    "{% macro f(a, b=2, c='x') %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ f(1) }}{{ f(1, c=3) }}{{ f(1, 2, 3) }}{{ f() }}", "{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}",
    "{% macro g(a) %}<{{ caller(a) }}>{% endmacro %}{% call(z) g(3) %}{{ z }}!{% endcall %}{% macro h() %}{{ 'x' if not caller }}{% endmacro %}{{ f is defined }}{{ h.name }}{{ h() | length }}",
    "{{ 'a' if yes }}{{ 'b' if no }}{{ 'c' if no else 'd' }}{{ yes and 'x' }}{{ no or 'y' }}{{ not yes }}{{ (no and 1) or 0 }}{{ [] or 'e' }}{{ 'p' and [] }}",
    "{% if n == 7 %}a{% elif n == 8 %}b{% else %}c{% endif %}{% if n is defined and n > 3 and word %}d{% endif %}{% if 'x' in {'x': 0} and not 'y' in 'x' %}e{% endif %}", "{% generation %}a{% endgeneration %}{%- generation -%} b {%- endgeneration -%} c",
    # White space.
    "a\n  {% if yes %}\n  b\n  {% endif %}\n  c", "a {%- if yes %} b {% endif -%}\n c", "  {%+ if yes %}x{% endif +%}\ny", "a\n{# comment #}\nb\n  {#- c -#}\n  d", "{{ 'a' }}\n\n{{- 'b' }}  \n{{ 'c' -}}  \n d\n", "a\n\n", "\n\na", "{% for i in range(2) %}\n    {{ i }}\n{% endfor %}\nend\n",
    "line1\r\nline2\r{{ n }}\r\n", "{% set a = 1 %}   \nb", "\t{% set a = 1 %}\tb", "{{ n }}{% if yes %}\n\n{% endif %}x",
    # Functions and failures.
    "{{ strftime_now('%Y-%m-%d %H:%M:%S') }} {{ strftime_now('%d %b %Y') }} {{ strftime_now('%A, %B %-d, %y %j %I:%M %p') }} {{ strftime_now('%e|%a|%F|%T|%%') }} {{ strftime_now('%D %R %u %w %h %-m/%-I [%Z%z]') }}",
    "{{ raise_exception('no') }}", "{% if no %}{{ raise_exception('no') }}{% endif %}ok", "{{ missing.x }}", "{{ missing.x.y }}", "{{ map.zz }}|{{ map.zz is none }}|{{ map['zz'] }}", "{{ map.zz.y }}", "{{ missing + 1 }}", "{{ 'a' + 1 }}", "{{ [] + 'a' }}", "{{ missing | upper }}|{{ missing | length }}|{{ missing | list }}",
    "{{ missing() }}", "{{ none.x }}|", "{{ none + 'a' }}", "{{ n.x }}|{{ n.x is defined }}", "{{ word.nothing() }}", "{{ 1 / 0 }}", "{{ n | nothing }}", "{{ n is nothing }}", "{% for i in 5 %}{% endfor %}", "{% for i in missing %}x{% else %}y{% endfor %}", "{{ map | sort }}",
    "{{ '' | first }}|{{ [] | last }}|{{ [] | max }}|{{ [] | first is defined }}", "{{ none | length }}", "{{ n | length }}", "{{ none | int }}", "{{ '5' | int + 1 }} {{ x | string ~ '!' }}", "{% set _ = map.update({'q': 1}) %}{{ map.q }}", "{{ namespace(a=1) is defined }}",
    "{{ range is defined }} {{ dict is defined }} {{ loop is defined }} {{ caller is defined }} {{ tools is defined }} {{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ bos_token }} {{ unk_token is defined }}",
    "{{ messages | length }}{{ messages[0].role }}{{ messages[0]['content'] }}{{ messages[0].name is defined }}{{ messages[0].keys() | list }}{{ messages[0].get('x') is none }}{{ messages[-1] == messages[0] }}", "{{ messages[0] }}", "{{ messages | tojson }}", "{{ messages | map(attribute='role') | unique | join(',') }}", "{% if messages[0].content is string and messages[0].tool_calls is not defined %}ok{% endif %}",
]  # fmt: skip


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, datetime.timezone.utc).replace(tzinfo=None)


def main():
    chat_template_utils.datetime = Clock
    out = Path(sys.argv[1])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    paths = sorted((ROOT / "tests/fixtures/templates").glob("*.jinja"))
    paths += sorted((ROOT / "src/session/chat_templates").glob("*.jinja"))

    def rendered(template, case):
        options = {name: case.get(name, False) for name in ("add_generation_prompt", "continue_final_message")}
        variables = case.get("variables", {})
        try:
            return tokenizer.apply_chat_template(
                case["messages"], tools=case.get("tools"), chat_template=template, tokenize=False, **options, **variables
            )
        except Exception:  # Whatever is raised, there is no prompt.
            return None

    templates = {str(path.relative_to(ROOT)): [rendered(path.read_text(), case) for case in CASES] for path in paths}
    of_context = {"messages": [ASK], "variables": CONTEXT, "add_generation_prompt": True}
    golden = {
        "versions": {name: version(name) for name in ("transformers", "jinja2", "tokenizers")},
        "now": NOW, "tokens": TOKENS, "cases": CASES, "templates": templates, "context": CONTEXT,
        "expressions": [[source, rendered(source, of_context)] for source in EXPRESSIONS],
    }  # fmt: skip
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
    to = str(out / "golden.json.zst")
    subprocess.run(["zstd", "-q", "-f", "-19", "-o", to], input=text.encode(), check=True)
    count = [text for texts in templates.values() for text in texts]
    print(f"{len(count)} renderings, {count.count(None)} refused; {len(EXPRESSIONS)} expressions")


if __name__ == "__main__":
    main()
