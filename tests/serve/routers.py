"""Routers in front of a server."""

import http.client
import json
import pathlib
import socket
import subprocess
import time

from server import PATIENCE, Skip, check


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def ask(port, path, body):
    """Returns the status and the text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST" if body else "GET", path, body and json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def smg(context):
    """SMG renders the template, encodes and decodes; the server computes tokens over gRPC."""
    program = context.options.smg
    if not program or not pathlib.Path(program).is_file():
        raise Skip("smg is not installed")
    if "grpc" not in context.iec("--version", "-v").partition("features: ")[2].partition(" (left out")[0]:
        raise Skip("this build has no gRPC; build it with --features grpc")
    pack = context.story()
    server = context.serve(pack, "--grpc-port", "0")
    port, log = free_port(), open(context.work / "smg.log", "w")
    command = [program, "launch", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-urls", server.grpc, "--model-path", str(pack)]
    router = subprocess.Popen(command, stdout=log, stderr=log, env=context.environment)
    try:
        body = {"model": "story", "messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 12}
        body |= {"temperature": 0}
        status, text, end = 0, "", time.monotonic() + PATIENCE
        # The router answers before it knows its servers.
        while status != 200:
            check(router.poll() is None and time.monotonic() < end, f"smg: status {status}, {text[:500]}")
            time.sleep(0.5)
            try:
                status, text = ask(port, "/v1/chat/completions", body)
            except OSError:
                pass
        expected = server.ask("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        answer = json.loads(text)
        found = answer["choices"][0]["message"]["content"]
        check(found == expected, f"smg answers {found!r}, the server {expected!r}")
        check(answer["usage"]["completion_tokens"] == 12, f"usage of smg: {answer['usage']}")
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        _, text = ask(port, "/v1/chat/completions", streamed)
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        check("".join(deltas) == expected, f"smg streams {''.join(deltas)!r}, the server answers {expected!r}")
        usage = [event["usage"] for event in events if event.get("usage")]
        check(usage and usage[-1]["completion_tokens"] == 12, f"usage of a stream of smg: {usage}")
        schema = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]}
        schema["additionalProperties"] = False
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        status, text = ask(port, "/v1/chat/completions", body | {"response_format": form, "max_tokens": 40})
        check(status == 200, f"smg with a schema: status {status}, {text[:500]}")
        found = json.loads(json.loads(text)["choices"][0]["message"]["content"])
        check(found.get("a") in ("x", "yz"), f"smg with a schema answers {found}")
    finally:
        router.terminate()
        router.wait()
        log.close()
    return f"a chat through the router, whole and in {len(events)} events, and with a schema"
