"""Metrics and the dashboard, with promtool and a real Prometheus."""

import shutil
import subprocess
import threading

from server import ROOT, Skip, check


def prometheus(context):
    """Runs scripts/check-dashboard.sh beside a load that moves every panel."""
    for program in ("prometheus", "promtool"):
        if not shutil.which(program):
            raise Skip(f"{program} is not installed")
    adapter = context.adapters() / "r8-qv"
    server = context.serve(
        "--model",
        f"llama={context.llama()}",
        "--lora",
        f"tuned={adapter}",
        "--max-seqs",
        "2",
        "--max-queue",
        "4",
        "--state-dir",
        context.work / "state",
    )
    stop = threading.Event()

    def ask(number):
        while not stop.is_set():
            body = {
                "model": ["llama", "tuned"][number % 2],
                "prompt": f"Once upon a time there was {number % 3} dog",
                "max_tokens": 120,
                "ignore_eos": True,
                "stream": number % 2 == 0,
            }
            try:
                # Full queues and cancelled requests are panels of their own.
                server.request("POST", "/v1/completions", body, timeout=0.05 if number == 0 else 60)
            except OSError:
                pass

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    try:
        command = [ROOT / "scripts/check-dashboard.sh", server.url + "/metrics", "--seconds", "12"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    finally:
        stop.set()
        [thread.join() for thread in threads]
    check(done.returncode == 0, f"check-dashboard.sh: {done.stderr[-1500:]}")
    server.wait_until_idle()
    return (done.stdout.strip().splitlines() or ["every panel shows something"])[-1]
