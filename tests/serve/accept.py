#!/usr/bin/env python3
"""Checks a server with the clients and tools that people use. `scripts/serve-accept.sh` installs them and runs this.

Each part prints one line: `ok NAME: ...`, `skipped NAME: ...` or `FAILED NAME: ...`. The exit code is 1 if one failed.
"""

import argparse
import os
import pathlib
import sys
import time
import traceback

import agent_clients
import async_openai
import browser
import clients
import evaluation
import load
import monitoring
import node_clients
import routers
import schemas
import soak
from server import ROOT, Context, Failure, Skip

PARTS = {
    "openai": clients.openai,
    "openai-errors": clients.openai_errors,
    "anthropic": clients.anthropic,
    "async-openai": async_openai.async_openai,
    "adapters": clients.adapters,
    "instructor": agent_clients.instructor,
    "agents-sdk": agent_clients.agents_sdk,
    "langgraph": agent_clients.langgraph,
    "ai-sdk": node_clients.ai_sdk,
    "ollama": node_clients.ollama,
    "openai-browser": node_clients.openai_browser,
    "mcp": node_clients.mcp,
    "lm-eval": evaluation.lm_eval,
    "schemathesis": schemas.schemathesis,
    "jsonschema": schemas.constrained,
    "prometheus": monitoring.prometheus,
    "wrk": load.wrk,
    "haproxy": load.haproxy,
    "smg": routers.smg,
    "chromium": browser.chromium,
    "aiperf": load.aiperf,
}
# Parts that run only when their option asks for them.
LONG = {"soak": soak.soak, "overload": soak.overload}


def run(name, part, context):
    """Runs a part; returns False if it failed."""
    begin = time.monotonic()
    try:
        text, word = part(context), "ok"
    except Skip as e:
        text, word = str(e), "skipped"
    except Failure as e:
        text, word = str(e), "FAILED"
    except Exception as e:  # A mistake of a client counts as a failure of its part; the others still run.
        traceback.print_exc()
        text, word = f"{type(e).__name__}: {str(e)[:500]}", "FAILED"
    finally:
        context.close()
    print(f"{word} {name}: {text} ({time.monotonic() - begin:.0f} s)", flush=True)
    return word != "FAILED"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iec", default=str(ROOT / "target/release/iec"), help="the program under test")
    parser.add_argument("--work", required=True, help="directory for packs, logs and programs")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this part only; repeatable")
    parser.add_argument("--full", action="store_true", help="300 schemas, and more examples of schemathesis")
    parser.add_argument("--schemas", type=int, help="number of schemas (60, with --full 300)")
    parser.add_argument("--examples", type=int, help="examples of schemathesis per endpoint (15, with --full 100)")
    parser.add_argument("--soak", type=float, default=0, metavar="MINUTES", help="minutes of mixed load")
    parser.add_argument(
        "--rss-slope",
        type=float,
        default=1.0,
        metavar="MIB",
        help="largest growth of memory in MiB per minute in the soak (1)",
    )
    parser.add_argument(
        "--overload", type=float, default=0, metavar="SECONDS", help="seconds of three times the capacity"
    )
    parser.add_argument("--aiperf", help="the program aiperf")
    parser.add_argument("--agents", metavar="PYTHON", help="a Python with instructor, openai-agents and langgraph")
    parser.add_argument("--smg", metavar="PROGRAM", help="the router SMG")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    options = parser.parse_args()
    options.schemas = options.schemas or (300 if options.full else 60)
    options.examples = options.examples or (100 if options.full else 15)
    if options.list:
        print("\n".join([*PARTS, *LONG]))
        return
    if not pathlib.Path(options.iec).is_file():
        sys.exit(f"{options.iec} is missing; build it with `cargo build --release` or name it with --iec")
    unknown = [name for name in options.only if name not in PARTS | LONG]
    if unknown:
        sys.exit(f"there is no part {', '.join(unknown)}; the parts are {', '.join(PARTS | LONG)}")
    asked = [name for name, value in (("soak", options.soak), ("overload", options.overload)) if value]
    names = options.only or [*PARTS, *asked]
    options.soak = options.soak or 2
    options.overload = options.overload or 30
    # Clients must not send to a proxy, nor ask servers of models or telemetry.
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        os.environ.pop(name, None)
    context = Context(options)
    failed = [name for name in names if not run(name, (PARTS | LONG)[name], context)]
    print(f"{len(names) - len(failed)} of {len(names)} parts without failures", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
