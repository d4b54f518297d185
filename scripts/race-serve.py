#!/usr/bin/env python3
"""Measures `iec serve` beside llama-server under the same loads, on one machine.

    scripts/race-serve.py --pack DIR [--gguf FILE] [--iec BIN] [--server LLAMA_SERVER] [--rounds N] [--threads N]
                          [ROW...]

DIR is a pack, FILE the same model, made by `iec export-gguf`; without it only iec is measured. Prompts are lists of
random token ids, answers are greedy and do not end early. Each round runs every row with both servers, one after the
other, in alternating order; every run starts its server anew. The client shares the processor with the server, so it
parses nothing: it notes when events arrive. Prints a Markdown table with the medians of the rounds, and the ratio of
iec to llama-server. Rows:

    closed       16 clients that each send one request after the other: tokens of answers per second
    adapters     the same, each client with one of four adapters (rank 16, q and v); needs --adapters
    one          1 client: time to the first token (TTFT) and between tokens (ITL), medians
    poisson      arrivals at random, at 60 % of the closed-loop rate of each server itself: TTFT p50, p99, ITL p99
    poisson-iec  the same at 60 % of the rate of iec for both
    long         a prompt of --long tokens beside a stream: largest pause of the stream
    head         32 prompts with a common beginning of --head tokens: TTFT of the first and of the others, and the
                 tokens that were computed for prompts, relative to the fewest possible
    overload     three times the closed-loop rate of each server for --seconds: tokens per second of the answers that
                 came in the last three quarters, TTFT p99 of all answers, refused requests, memory

Only the standard library is needed; --adapters also needs numpy, safetensors and gguf from PyPI.
scripts/build-llama-cpp.sh builds llama-server.
"""

import argparse
import asyncio
import json
import os
import random
import re
import runpy
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

CLIENTS = 16
ADAPTERS = 4
ROWS = ["closed", "adapters", "one", "poisson", "poisson-iec", "long", "head", "overload"]
# Bars for the ratio of iec to llama-server, by row and measure.
BARS = {
    ("closed", "tokens/s"): ">= 2.2",
    ("adapters", "tokens/s"): ">= 3",
    ("one", "TTFT p50, ms"): "<= 0.5",
    ("one", "ITL p50, ms"): "<= 0.9",
    ("poisson", "TTFT p50, ms"): "<= 0.5",
    ("poisson", "TTFT p99, ms"): "<= 0.5",
    ("poisson", "ITL p99, ms"): "<= 0.5",
    ("poisson-iec", "TTFT p99, ms"): "<= 0.25",
    ("long", "largest pause, ms"): "<= 0.1 (0.5 of its best -b)",
}


class Program:
    """A server in a process of its own, with the adapters of pairs (PEFT directory, GGUF file)."""

    def __init__(self, args, name, adapters):
        self.name, threads = name, str(args.threads)
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        if name == "iec":
            command = [
                args.iec,
                "serve",
                args.pack,
                "--port",
                str(self.port),
                "--threads",
                threads,
                "--max-seqs",
                str(CLIENTS),
                *[f"--lora=a{number}={peft}" for number, (peft, _) in enumerate(adapters)],
                *args.iec_option,
            ]
        else:
            command = [
                args.server,
                "-m",
                args.gguf,
                "-np",
                str(CLIENTS),
                "--kv-unified",
                "-fa",
                "on",
                "-c",
                str(args.context),
                "-t",
                threads,
                "-tb",
                threads,
                "--port",
                str(self.port),
                "--metrics",
                *(["--lora", ",".join(file for _, file in adapters), "--lora-init-without-apply"] if adapters else []),
                *args.llama_option,
            ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 120
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health")
                return
            except OSError:
                if self.process.poll() is not None:
                    sys.exit(f"{name} ended before it was ready: {' '.join(command)}")
                time.sleep(0.1)
        self.close()
        sys.exit(f"{name} was not ready after two minutes")

    def request(self, ids, new, adapter=None):
        """Returns the bytes of a request, with the number of its adapter."""
        if self.name == "iec":
            path, body = "/v1/completions", {"prompt": ids, "max_tokens": new}
            chosen = {"model": f"a{adapter}"}
        else:
            path, body = "/completion", {"prompt": ids, "n_predict": new, "cache_prompt": True}
            chosen = {"lora": [{"id": adapter, "scale": 1.0}]}
        body |= {} if adapter is None else chosen
        body = json.dumps(body | {"stream": True, "temperature": 0, "ignore_eos": True})
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
        return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()

    def prefilled(self):
        """Returns the tokens of prompts that were computed so far."""
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics").read().decode()

        def total(name):
            return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M))

        if self.name == "iec":
            return total("vllm:prompt_tokens_total") - total("vllm:prompt_tokens_cached_total")
        return total("llamacpp:prompt_tokens_total")

    def peak(self):
        """Returns the largest resident memory so far in MiB."""
        with open(f"/proc/{self.process.pid}/status") as status:
            return int(re.search(r"VmHWM:\s+(\d+)", status.read()).group(1)) / 1024

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Answer:
    """Times of an answer: when it was asked for, and when its tokens came."""

    def __init__(self):
        self.begin, self.tokens, self.end, self.status = time.monotonic(), [], None, 0

    @property
    def first(self):
        return self.tokens[0] - self.begin

    @property
    def gaps(self):
        return [late - early for early, late in zip(self.tokens, self.tokens[1:])]


async def ask(program, ids, new, on_token=None, adapter=None):
    """Sends a request and notes when its events come."""
    answer = Answer()
    reader, writer = await asyncio.open_connection("127.0.0.1", program.port)
    try:
        writer.write(program.request(ids, new, adapter))
        rest = b""
        while data := await reader.read(1 << 16):
            now = time.monotonic()
            if not answer.status:
                answer.status = int(data[9:12])
            # An event may begin in one piece and end in the next.
            data = rest + data
            count = data.count(b"data: ")
            rest = data[-5:] if not data.endswith(b"data: ") else b""
            # Servers add events without a token at the end.
            answer.tokens += [now] * min(count, new - len(answer.tokens))
            if on_token and count:
                on_token(len(answer.tokens))
        answer.end = time.monotonic()
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answer


class Load:
    """Loads for one server, with the sizes of the command line."""

    def __init__(self, args, program, rates, seed):
        self.args, self.program, self.rates, self.rng = args, program, rates, random.Random(seed)

    def ids(self, count):
        return [self.rng.randrange(3, self.args.vocab) for _ in range(count)]

    def one(self, adapter=None):
        return ask(self.program, self.ids(self.args.prompt), self.args.new, adapter=adapter)

    async def warm_up(self):
        await ask(self.program, self.ids(8), 4)

    async def clients(self, adapters):
        """Runs a client for each adapter, all at the same time; returns the answers per second."""

        async def client(adapter):
            return [await self.one(adapter) for _ in range(self.args.per_client)]

        begin = time.monotonic()
        lists = await asyncio.gather(*map(client, adapters))
        seconds = time.monotonic() - begin
        return len(check([answer for answers in lists for answer in answers], self.args.new)) / seconds

    async def closed(self):
        rate = self.rates[self.program.name] = await self.clients([None] * CLIENTS)
        return {"tokens/s": rate * self.args.new}

    async def adapters(self):
        rate = await self.clients([number % ADAPTERS for number in range(CLIENTS)])
        return {"tokens/s": rate * self.args.new}

    async def single(self):
        answers = check([await self.one() for _ in range(self.args.requests)], self.args.new)
        return times(answers, {"TTFT p50, ms": (0.5, "first"), "ITL p50, ms": (0.5, "gaps")})

    async def arrivals(self, rate, seconds=None, count=None):
        """Sends requests at random times; returns the tasks."""
        tasks, begin = [], time.monotonic()
        at = 0.0
        while (count is None or len(tasks) < count) and (seconds is None or at < seconds):
            at += self.rng.expovariate(rate)
            await asyncio.sleep(max(0, begin + at - time.monotonic()))
            tasks.append(asyncio.create_task(self.one()))
        return tasks

    async def poisson(self, of):
        tasks = await self.arrivals(0.6 * self.rates[of], count=self.args.requests * 4)
        answers = check(await asyncio.gather(*tasks), self.args.new)
        return times(
            answers, {"TTFT p50, ms": (0.5, "first"), "TTFT p99, ms": (0.99, "first"), "ITL p99, ms": (0.99, "gaps")}
        )

    async def long(self):
        sent = asyncio.Event()
        stream = asyncio.create_task(
            ask(
                self.program,
                self.ids(self.args.prompt),
                self.args.new * 4,
                lambda count: sent.set() if count >= self.args.new else None,
            )
        )
        await sent.wait()
        at = time.monotonic()
        await ask(self.program, self.ids(self.args.long), 1)
        answer = check([await stream], self.args.new * 4)[0]
        pauses = [late - early for early, late in zip(answer.tokens, answer.tokens[1:]) if late > at]
        return {"largest pause, ms": 1000 * max(pauses, default=float("nan"))}

    async def head(self):
        head, before = self.ids(self.args.head), self.program.prefilled()
        answers = [await ask(self.program, head + self.ids(self.args.tail), 1) for _ in range(32)]
        first = [1000 * answer.first for answer in check(answers, 1)]
        ideal = self.args.head + 32 * self.args.tail
        warm = statistics.median(first[1:])
        return {
            "cold TTFT, ms": first[0],
            "warm TTFT p50, ms": warm,
            "warm / cold": warm / first[0],
            "computed / fewest tokens": (self.program.prefilled() - before) / ideal,
        }

    async def overload(self):
        begin = time.monotonic()
        tasks = await self.arrivals(3 * self.rates[self.program.name], seconds=self.args.seconds)
        now = time.monotonic()
        done = [task.result() for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        complete = [answer for answer in done if answer.status == 200 and len(answer.tokens) >= 0.9 * self.args.new]
        refused = sum(answer.status in (429, 503) for answer in done)
        capacity = self.rates[self.program.name] * self.args.new
        # The first answers are late while the batch fills.
        late = [answer for answer in complete if answer.end >= begin + (now - begin) / 4]
        goodput = len(late) * self.args.new / (0.75 * (now - begin))
        return times(complete, {"TTFT p99, ms": (0.99, "first")}) | {
            "goodput, tokens/s": goodput,
            "goodput / capacity": goodput / capacity,
            "sent": len(tasks),
            "refused": refused,
            "memory, MiB": self.program.peak(),
        }

    async def run(self, row):
        await self.warm_up()
        name = self.program.name
        if row in ("poisson", "poisson-iec", "overload") and name not in self.rates:
            await self.closed()
        work = {
            "closed": self.closed,
            "adapters": self.adapters,
            "one": self.single,
            "poisson": lambda: self.poisson(name),
            "poisson-iec": lambda: self.poisson("iec"),
            "long": self.long,
            "head": self.head,
            "overload": self.overload,
        }[row]
        return await work()


def check(answers, new):
    """Returns the answers, all of which must be complete: a token that ends within a character has no event."""
    wrong = [answer for answer in answers if answer.status != 200 or len(answer.tokens) < 0.9 * new]
    if wrong:
        statuses = {(answer.status, len(answer.tokens)) for answer in wrong}
        sys.exit(f"{len(wrong)} of {len(answers)} answers are not complete; statuses and tokens: {statuses}")
    return answers


def times(answers, wanted):
    """Returns quantiles of TTFT (`first`) or ITL (`gaps`) in milliseconds."""
    values = {
        "first": sorted(answer.first for answer in answers),
        "gaps": sorted(gap for answer in answers for gap in answer.gaps),
    }

    def quantile(part, kind):
        found = values[kind]
        return 1000 * found[min(len(found) - 1, int(part * len(found)))] if found else float("nan")

    return {name: quantile(*how) for name, how in wanted.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", required=True)
    parser.add_argument("--gguf")
    parser.add_argument("--iec", default="target/release/iec")
    parser.add_argument("--iec-option", action="append", default=[], help="an option for iec serve, as --iec-option=X")
    parser.add_argument("--server", default="target/llama.cpp/bin/llama-server")
    parser.add_argument("--llama-option", action="append", default=[], help="an option for llama-server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--context", type=int, default=16384, help="-c of llama-server: tokens of all sequences")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--long", type=int, default=2048, help="tokens of the long prompt")
    parser.add_argument("--head", type=int, default=1024, help="tokens of the common beginning")
    parser.add_argument("--tail", type=int, default=64, help="tokens behind the common beginning")
    parser.add_argument("--per-client", type=int, default=4, help="requests of a client of the closed loop")
    parser.add_argument(
        "--requests", type=int, default=10, help="requests of 1 client; Poisson sends four times as many"
    )
    parser.add_argument("--seconds", type=float, default=60, help="length of the overload")
    parser.add_argument("--adapters", metavar="DIR", help="directory of the adapters, which are made once")
    parser.add_argument("--json", action="store_true", help="also print each measurement as a JSON line on stderr")
    parser.add_argument("row", nargs="*", metavar="ROW", help=", ".join(ROWS))
    args = parser.parse_args()
    unknown = [row for row in args.row if row not in ROWS]
    if unknown:
        parser.error(f"there is no row {', '.join(unknown)}")
    rows = args.row or [row for row in ROWS if row != "adapters" or args.adapters]
    if "adapters" in rows and not args.adapters:
        parser.error("the row adapters needs --adapters")
    with open(os.path.join(args.pack, "config.json")) as file:
        config = json.load(file)
    args.vocab = (config.get("text_config") or config)["vocab_size"]
    args.adapter_files = make_adapters(args.adapters, config) if "adapters" in rows else []
    race(args, rows)


def make_adapters(directory, config):
    """Returns pairs of a PEFT directory and a GGUF file, those of race-adapters.py."""
    os.makedirs(directory, exist_ok=True)
    make = runpy.run_path(os.path.join(os.path.dirname(__file__), "race-adapters.py"))["make_adapter"]
    return [make(directory, config, seed, 16, ["q_proj", "v_proj"]) for seed in range(ADAPTERS)]


def race(args, rows):
    names = ["iec", "llama-server"] if args.gguf else ["iec"]
    found, rates = {}, {}
    for number in range(args.rounds):
        for row in rows:
            # The rate of iec must be known first where both get it.
            for name in names if number % 2 == 0 or row == "poisson-iec" else names[::-1]:
                if row == "poisson-iec" and "iec" not in rates:
                    measure(args, "iec", "closed", rates, number)
                for measure_name, value in measure(args, name, row, rates, number).items():
                    found.setdefault((row, measure_name), {}).setdefault(name, []).append(value)
    print("| load | measure | iec | llama-server | iec / llama-server | bar |")
    print("|---|---|---|---|---|---|")
    for (row, measure_name), values in found.items():
        medians = [
            statistics.median(values[name]) if name in values else float("nan") for name in ("iec", "llama-server")
        ]
        ratio = medians[0] / medians[1] if medians[1] else float("nan")
        bar = BARS.get((row, measure_name), "")
        print(f"| {row} | {measure_name} | {medians[0]:.4g} | {medians[1]:.4g} | {ratio:.3f} | {bar} |")


def measure(args, name, row, rates, seed):
    """Runs a row on a new server."""
    program = Program(args, name, args.adapter_files if row == "adapters" else [])
    try:
        values = asyncio.run(Load(args, program, rates, seed).run(row))
    finally:
        program.close()
    if args.json:
        print(json.dumps({"row": row, "program": name, "round": seed} | values), file=sys.stderr, flush=True)
    return values


main()
