"""Load from wrk, haproxy and aiperf."""

import json
import pathlib
import re
import shutil
import subprocess
import threading
import time

from server import Skip, check, events

BODY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{body}'
local wrong = 0
function response(status) if status ~= 200 then wrong = wrong + 1 end end
"""


def need(program):
    if not shutil.which(program):
        raise Skip(f"{program} is not installed")


def run_wrk(context, url, connections, seconds):
    """Sends completions with wrk; returns the number of requests. wrk counts statuses other than 2xx and 3xx."""
    script = context.work / "wrk.lua"
    script.write_text(SCRIPT.replace("{body}", json.dumps(BODY)))
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s", "-s", str(script), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
    check(done.returncode == 0, f"wrk: {done.stderr}")
    problems = re.findall(r"(?:Socket errors|Non-2xx).*", done.stdout)
    check(not problems, f"wrk: {problems}")
    return int(re.search(r"(\d+) requests in", done.stdout).group(1))


def wrk(context):
    need("wrk")
    server = context.serve("--model", f"story={context.story()}", "--max-queue", "1000")
    probes = subprocess.run(["wrk", "-t1", "-c16", "-d3s", server.url + "/health"], capture_output=True, text=True)
    check("Non-2xx" not in probes.stdout and "Socket errors" not in probes.stdout, probes.stdout)
    probes = int(re.search(r"(\d+) requests in", probes.stdout).group(1))
    before = server.metric("vllm:request_success_total")
    sent = run_wrk(context, server.url + "/v1/completions", 32, 8)
    server.wait_until_idle()
    served = server.metric("vllm:request_success_total") - before
    check(served >= sent, f"wrk counted {sent} answers, the server {served}")
    return f"{probes} probes in 3 s; {sent} completions over 32 connections in 8 s, no error"


CONFIG = """
global
    maxconn 256
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend front
    bind 127.0.0.1:{port}
    default_backend servers
backend servers
    balance leastconn
    option httpchk GET /health
    server a {a} check inter 500ms
    server b {b} check inter 500ms
"""


def free_port():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def haproxy(context):
    """Sends requests through haproxy to two servers, of which one shuts down under load: no request fails."""
    program = shutil.which("haproxy") or "/usr/sbin/haproxy"
    if not pathlib.Path(program).exists():
        raise Skip("haproxy is not installed")
    need("wrk")
    options = ["--model", f"story={context.story()}", "--max-queue", "1000", "--drain-delay", "3s", "--threads", "1"]
    a, b = context.serve(*options), context.serve(*options)
    port = free_port()
    path = context.work / "haproxy.cfg"
    path.write_text(CONFIG.format(port=port, a=f"{a.host}:{a.port}", b=f"{b.host}:{b.port}"))
    proxy = subprocess.Popen(
        [program, "-db", "-f", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + 20
        while True:
            try:
                subprocess.run(["curl", "-fsS", f"http://127.0.0.1:{port}/health"], check=True, capture_output=True)
                break
            except subprocess.CalledProcessError:
                check(proxy.poll() is None and time.monotonic() < end, "haproxy found no server")
                time.sleep(0.2)
        stream = subprocess.run(
            ["curl", "-fsSN", f"http://127.0.0.1:{port}/v1/completions", "-d", json.dumps(BODY | {"stream": True})],
            capture_output=True,
            text=True,
        )
        check(events(stream.stdout), f"a stream through haproxy: {stream.stderr}")
        ended = []
        stopper = threading.Timer(3, lambda: ended.append(a.stop()))
        stopper.start()
        sent = run_wrk(context, f"http://127.0.0.1:{port}/v1/completions", 8, 10)
        stopper.join()
        check(ended == [0], f"the drained server ended with {ended}")
    finally:
        proxy.terminate()
        proxy.wait()
    return f"{sent} completions over two servers, of which one was shut down after 3 s, no error"


def aiperf(context):
    """Compares the latencies that aiperf measures with those of /metrics."""
    program = context.options.aiperf or shutil.which("aiperf")
    if not program or not pathlib.Path(program).exists():
        raise Skip("aiperf is not installed")
    pack = context.story()
    # Fewer slots than clients: requests wait in the server, so that the time of the clients themselves is small beside.
    server = context.serve("--model", f"story={pack}", "--prefix-cache", "off", "--max-seqs", "2")
    home = context.work / "aiperf"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    environment = context.environment | {"HF_HOME": str(home / "hf"), "AIPERF_SERVICE_REGISTRATION_TIMEOUT": "120"}
    common = [
        "profile",
        "--model",
        "story",
        "--url",
        server.url,
        "--endpoint-type",
        "completions",
        "--streaming",
        "--tokenizer",
        pack,
        "--isl",
        "256",
        "--isl-stddev",
        "0",
        "--osl",
        "256",
        "--osl-stddev",
        "0",
        "--extra-inputs",
        "ignore_eos:true",
        "--ui",
        "none",
        "--random-seed",
        "1",
        "--use-server-token-count",
    ]
    results = []
    for name, how in (("concurrency", ["--concurrency", "16"]), ("rate", ["--request-rate", "10"])):
        before = latencies(server)
        command = [program, *common, *how, "--request-count", "80", "--artifact-dir", home / name]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=400, env=environment, cwd=home
        )
        (home / f"{name}.txt").write_text(done.stdout + done.stderr)
        files = list((home / name).rglob("profile_export_aiperf.json"))
        check(done.returncode == 0 and files, f"aiperf: {(done.stdout + done.stderr)[-1500:]}")
        results.append(compare(json.loads(files[0].read_text()), before, latencies(server), name))
    return "; ".join(results)


def latencies(server):
    """Returns sum and number of each histogram of latencies."""
    found = server.metrics()
    pairs = {}
    for name in ("time_to_first_token", "inter_token_latency"):
        parts = [
            sum(value for sample, value in found.items() if sample.startswith(f"vllm:{name}_seconds_{part}{{"))
            for part in ("sum", "count")
        ]
        pairs[name] = parts
    return pairs


def compare(report, before, after, name):
    """Compares means of a report of aiperf in milliseconds with the metrics meanwhile."""
    errors = (report.get("error_request_count") or {}).get("avg", 0)
    check(not errors and not report.get("error_summary"), f"{name}: errors: {report.get('error_summary')}")
    words = [f"{name}: {report['request_count']['avg']:.0f} requests, 0 errors"]
    for metric in ("time_to_first_token", "inter_token_latency"):
        total, count = (late - early for late, early in zip(after[metric], before[metric]))
        own, theirs = 1000 * total / count, report[metric]["avg"]
        # A client that shares the processor with the server sees an event some milliseconds late.
        near = abs(own - theirs) <= max(0.05 * own, {"time_to_first_token": 10, "inter_token_latency": 0.5}[metric])
        words.append(f"{metric} {theirs:.2f} ms, in /metrics {own:.2f} ms")
        check(near, f"{name}: {metric}: aiperf {theirs:.3f} ms, /metrics {own:.3f} ms")
    return ", ".join(words)
