"""Clients of npm: the AI SDK, ollama, the OpenAI library in a browser, and the tool lists of public MCP servers."""

import http.server
import json
import shutil
import subprocess
import threading

import browser
import known
from jsonschema import Draft202012Validator
from server import ROOT, TEMPLATE, Failure, Skip, check

SOURCES = ROOT / "tests/serve/node"


def node(context, script, *arguments, timeout=300):
    """Runs a script of the directory `node` beside its packages; returns what it prints."""
    directory = context.work.parent / "node"
    if not (directory / "installed").exists() or not shutil.which("node"):
        raise Skip("node or the packages of npm are not installed")
    shutil.copy(SOURCES / script, directory)
    command = ["node", script, *arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=timeout)
    check(done.returncode == 0, f"{script}: {done.stderr[-2000:]}")
    return done.stdout


def weather(context):
    """Returns a checkpoint that calls get_weather, then answers."""
    target = context.work / "weather"
    known.weather(target)
    return target


def both(context, *options):
    """Starts a server with the model of known text and the one that tells stories."""
    models = ("--model", f"weather={weather(context)}", "--model", f"story={context.story()}")
    return context.serve(*models, *options)


def ai_sdk(context):
    return node(context, "ai-sdk.mjs", both(context).url).strip()


def ollama(context):
    return node(context, "ollama.mjs", both(context).url).strip()


def openai_browser(context):
    directory = context.work.parent / "node"
    if not (directory / "installed").exists():
        raise Skip("the packages of npm are not installed")
    shutil.copy(SOURCES / "browser.mjs", directory)
    site = context.work / "site"
    site.mkdir(exist_ok=True)
    command = ["node_modules/.bin/esbuild", "browser.mjs", "--bundle", "--format=iife", f"--outfile={site}/page.js"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)
    check(done.returncode == 0, f"esbuild: {done.stderr[-1000:]}")
    (site / "index.html").write_text('<!doctype html><title>page</title><script src="page.js"></script>')

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(site))

        def log_message(self, *_):
            pass

    pages = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    try:
        answers = {}
        origin = f"http://127.0.0.1:{pages.server_port}"
        for allowed in ("*", origin):
            server = both(context, "--cors-origin", allowed)
            page = browser.Page(context)
            try:
                page.call("Page.enable")
                page.call("Page.navigate", url=origin + "/")
                page.wait_for("the library", "typeof window.check === 'function'")
                answers[allowed] = page.evaluate(f"window.check({json.dumps(server.url)})")
            finally:
                page.close()
    finally:
        pages.shutdown()
    for found in answers.values():
        texts = [found["whole"], found["streamed"], found["response"]]
        check(texts == [known.WEATHER_ANSWER] * 3 and found["refused"] == "404", f"answers in the browser: {found}")
    return "models, chat, a stream, a response and an error, for any origin and for one"


def mcp(context):
    """Every tool of public MCP servers, as their lists are: an answer, and a forced call with valid arguments."""
    lists = json.loads(node(context, "mcp-tools.mjs"))
    check(len(lists) >= 12, f"only {len(lists)} MCP servers listed their tools: {', '.join(lists)}")
    long = context.pack("long-story", ROOT / "assets/stories260k", TEMPLATE, max_position_embeddings=32768)
    server, calls, cut = context.serve("--model", f"weather={weather(context)}", "--model", f"story={long}"), 0, 0
    everything = []
    for name, found in lists.items():
        tools = [function(tool) for tool in found]
        everything += [dict(tool, function=dict(tool["function"], name=f"{name}.{tool['function']['name']}"[:64])) for tool in tools]
        for more in ({}, {"stream": False, "tool_choice": "auto", "parallel_tool_calls": True}):
            ask(server, tools, more | {"model": "weather", "max_tokens": 100})
        for tool, described in zip(tools, found):
            named = {"type": "function", "function": {"name": tool["function"]["name"]}}
            choice = ask(server, [tool], {"model": "story", "tool_choice": named, "max_tokens": 400})["choices"][0]
            written = choice["message"].get("tool_calls") or []
            if choice["finish_reason"] == "length":
                cut += 1
                continue
            check(len(written) == 1, f"{name}.{tool['function']['name']}: expected one call, found {choice}")
            arguments = json.loads(written[0]["function"]["arguments"])
            check(isinstance(arguments, dict), f"{name}: arguments {arguments}")
            errors = [e.message for e in Draft202012Validator(described["inputSchema"]).iter_errors(arguments)]
            # What a grammar cannot enforce is named in the header of the answer, and not checked here.
            check(not errors or choice["ignored"], f"{name}.{tool['function']['name']}: {arguments}: {errors[:2]}")
            calls += 1
    ask(server, everything[:100], {"model": "weather", "max_tokens": 100})
    # A model of stories does not end a text that a schema leaves open.
    check(calls >= len(lists), f"{calls} calls were complete, {cut} were cut off")
    return f"{len(lists)} servers, {len(everything)} tools, {calls} forced calls that are valid, {cut} cut off at 400 tokens"


def function(tool):
    fields = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["inputSchema"]}
    return {"type": "function", "function": fields}


def ask(server, tools, more):
    body = {"messages": [{"role": "user", "content": "Once upon a time"}], "temperature": 0, "tools": tools} | more
    status, headers, text = server.request("POST", "/v1/chat/completions", body)
    if status != 200:
        raise Failure(f"{[tool['function']['name'] for tool in tools]}: status {status}, {text[:600]}")
    answer = json.loads(text)
    for choice in answer["choices"]:
        choice["ignored"] = headers.get("x-iec-ignored")
    return answer
