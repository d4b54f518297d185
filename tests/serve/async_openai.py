"""The Rust client crate async-openai: builds the program in the directory async-openai and runs its parts."""

import shutil
import subprocess

from clients import key_file
from server import PATIENCE, ROOT, Skip, check

PROJECT = ROOT / "tests/serve/async-openai"


def build(context):
    """Returns the program; the first build takes a minute and needs crates.io."""
    if not shutil.which("cargo"):
        raise Skip("cargo is missing")
    target = context.work / "async-openai"
    command = ["cargo", "build", "--locked", "--release", "--quiet", "--manifest-path", PROJECT / "Cargo.toml"]
    done = subprocess.run([*command, "--target-dir", target], capture_output=True, text=True, timeout=900)
    check(done.returncode == 0, f"cargo build failed: {done.stderr[-2000:]}")
    return target / "release/iec-async-openai"


def run(program, part, server):
    done = subprocess.run([program, part, server.url], capture_output=True, text=True, timeout=PATIENCE)
    check(done.returncode == 0, f"{part}: {done.stderr[-2000:]}")


def cancel(program, server):
    """Lets the program drop streams; their requests end while it still runs."""
    before = server.metric("iec_cancelled_total")
    with subprocess.Popen([program, "cancel", server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            check(process.stdout.readline() == b"dropped\n", "the streams were dropped")
            server.wait_until_idle()
            check(process.poll() is None, "the program still runs")
        finally:
            process.stdin.close()
    check(server.metric("iec_cancelled_total") == before + 4, "four requests were cancelled")


def async_openai(context):
    program = build(context)
    model = ("--model", f"story={context.story()}")
    server = context.serve(*model)
    run(program, "endpoints", server)
    cancel(program, server)
    run(program, "errors", context.serve(*model, "--api-key-file", key_file(context, ("free", ""))))
    small = context.serve(*model, "--max-seqs", "1", "--max-queue", "1")
    run(program, "retries", small)
    refused = small.metric("vllm:admission_rejections_total")
    check(refused > 0, "the queue was full at some time")
    return f"endpoints, 6 errors, 4 cancelled, 4 requests of a queue of 1 repeated {refused:.0f} refusals"
