"""The description of the API and answers with schemas, checked by programs that share no code with the server."""

import concurrent.futures
import json
import pathlib
import random
import re
import subprocess
import sys

from jsonschema.validators import validator_for
from server import check


def schemathesis(context):
    """Sends requests made from /openapi.json, right and wrong ones: no answer is a failure of the server."""
    server = context.serve(context.llama(), "--adapter-dir", context.adapters(), "--queue-timeout", "20s")
    program = pathlib.Path(sys.executable).with_name("schemathesis")
    skipped = ["/v1/embeddings", "/api/embed", *missing(server)]
    command = [
        program,
        "run",
        server.url + "/openapi.json",
        "--max-examples",
        context.options.examples,
        "--phases",
        "examples,coverage,fuzzing",
        "--checks",
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        # A short deadline is answered with 504, as it should.
        "-H",
        "x-iec-deadline-ms: 60000",
        "--request-timeout",
        "60",
        "--seed",
        "1",
        "--no-color",
        "--continue-on-failure",
        "--max-time",
        "600" if context.options.full else "150",
    ]
    command += [word for path in skipped for word in ("--exclude-path", path)]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=900, cwd=context.work, env=context.environment
    )
    (context.work / "schemathesis.txt").write_text(done.stdout + done.stderr)
    server.wait_until_idle()
    check(server.process.poll() is None, "the server ended")
    summary = " ".join(line.strip() for line in done.stdout.splitlines() if re.search(r"generated|Tested|cases", line))
    check(done.returncode == 0, f"see {context.work}/schemathesis.txt: {done.stdout[-1500:]}")
    examples = context.options.examples
    return f"at most {examples} examples per endpoint, without {', '.join(skipped)}: {summary[-200:]}"


def missing(server):
    """Returns the paths that are described but that this build does not have."""
    paths = json.loads(server.get("/openapi.json"))["paths"]
    posts = [path for path, methods in paths.items() if "post" in methods]
    return [path for path in posts if '"code":"not_found"' in server.request("POST", path, {})[2]]


def constrained(context):
    """Asks for answers with random schemas, with and without streams, and validates them."""
    server = context.serve("--model", f"story={context.story()}", "--max-queue", "1000")
    count, rng = context.options.schemas, random.Random(42)
    jobs = [(number, schema_of(rng, 3)) for number in range(count)]

    def one(job):
        number, schema = job
        shape = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        # A schema whose answers cannot be long ends by itself; the limit shows where one does not.
        body = {"prompt": "Once", "max_tokens": 1500, "temperature": 1, "seed": number, "response_format": shape}
        choice = server.ask("/v1/completions", body)["choices"][0]
        if choice["finish_reason"] == "length":
            return "long"
        kind = validator_for(schema)
        kind.check_schema(schema)
        try:
            error = next(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(json.loads(choice["text"])), None)
        except ValueError as e:
            error = e
        return None if error is None else f"schema {json.dumps(schema)}, answer {choice['text']!r}: {error}"

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, jobs))
    wrong = [result for result in results if result not in (None, "long")]
    check(not wrong, f"{len(wrong)} of {count} answers are not valid, for example: {wrong[:1]}")
    cut = results.count("long")
    check(cut <= count // 20, f"{cut} of {count} answers did not end within 1500 tokens")
    return f"{count - cut} of {count} answers are valid, {cut} did not end within the limit of tokens"


def schema_of(rng, depth):
    """Returns a random schema whose answers are short."""
    leaves = [
        lambda: {"type": "integer", "minimum": rng.randint(-9, 0), "maximum": rng.randint(1, 999)},
        lambda: {"type": "number", "minimum": 0, "maximum": rng.randint(1, 9), "multipleOf": 0.5},
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 9)},
        lambda: {"type": "string", "pattern": rng.choice(["^[a-f0-9]{4}$", "^(yes|no)$", "^[A-Z][a-z]{1,5}$"])},
        lambda: {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])},
        lambda: {
            "enum": rng.sample(["red", "green", 7, None, True, {"a": [1]}, "\u00e9\U0001f600"], rng.randint(1, 4))
        },
        lambda: {"const": rng.choice(["x", 3, [1, 2], {"k": "v"}])},
    ]
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(leaves)()
    kind = rng.choice(["object", "object", "array", "tuple", "anyOf", "ref"])
    if kind == "object":
        names = rng.sample(["name", "age", "tags", "pos", "a b", "\u00fc", "id"], rng.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: schema_of(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(1, len(names))),
            "additionalProperties": False,
        }
    if kind == "array":
        return {
            "type": "array",
            "items": schema_of(rng, depth - 1),
            "minItems": rng.randint(0, 2),
            "maxItems": rng.randint(2, 4),
        }
    if kind == "tuple":
        parts = [schema_of(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    if kind == "anyOf":
        return {"anyOf": [schema_of(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    return (
        {
            "$defs": {"part": schema_of(rng, 0)},
            "type": "object",
            "required": ["one"],
            "additionalProperties": False,
            "properties": {"one": {"$ref": "#/$defs/part"}, "two": {"$ref": "#/$defs/part"}},
        }
        if depth == 3
        else schema_of(rng, 0)
    )
