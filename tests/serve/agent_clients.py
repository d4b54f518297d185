"""Libraries that build on OpenAI's client: instructor, the Agents SDK, langgraph. They run in a Python of their own."""

import subprocess

import node_clients
from server import ROOT, Skip, check

SCRIPT = ROOT / "tests/serve/agent_program.py"


def run(context, part):
    python = context.options.agents
    if not python:
        raise Skip("the libraries are not installed")
    server = node_clients.both(context)
    command = [python, SCRIPT, part, server.url]
    environment = context.environment | {"OPENAI_AGENTS_DISABLE_TRACING": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    check(done.returncode == 0, f"{part}: {done.stderr[-2000:]}")
    return done.stdout.strip()


def instructor(context):
    return run(context, "instructor")


def agents_sdk(context):
    return run(context, "agents-sdk")


def langgraph(context):
    return run(context, "langgraph")
