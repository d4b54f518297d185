"""Long mixed load and overload: memory, pages and answers stay as they were."""

import http.client
import json
import random
import signal
import socket
import statistics
import threading
import time

from server import check

# Growth of memory before this part of the time is that of caches that fill.
WARM = 0.5
# Growth in MiB that is no slope, however short the time.
SMALL = 1.0


def text_of(context, pack, adapter, prompt):
    """Returns the text that `iec run` gives."""
    more = ["--lora", f"x={adapter}"] if adapter else []
    line = context.iec(
        "run",
        pack,
        "-p",
        prompt,
        "-n",
        24,
        "--temperature",
        "0",
        "--ignore-eos",
        "--json",
        "--precision",
        "fp32",
        "--raw",
        *more,
    ).splitlines()[-1]
    return json.loads(line)["text"]


class Mixed:
    """Clients of many kinds that send until told to stop."""

    def __init__(self, server, expected):
        self.server, self.expected = server, expected
        self.stop, self.pause = threading.Event(), threading.Event()
        self.counts, self.problems, self.lock = {}, [], threading.Lock()

    def count(self, kind):
        with self.lock:
            self.counts[kind] = self.counts.get(kind, 0) + 1

    def problem(self, text):
        with self.lock:
            self.problems.append(text)

    def loop(self, kind, work, seed):
        rng = random.Random(seed)
        while not self.stop.is_set():
            if self.pause.is_set():
                time.sleep(0.05)
                continue
            try:
                work(rng)
                self.count(kind)
            except OSError:
                # The server restarts, and refuses connections meanwhile.
                time.sleep(0.05)
            except http.client.HTTPException as e:
                self.problem(f"{kind}: an answer was cut: {type(e).__name__} {e}")

    def answer(self, rng):
        """Asks for an answer and compares it with that of a run alone."""
        model, prompt = rng.choice(list(self.expected))
        body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        status, _, text = self.server.request("POST", "/v1/completions", body)
        if status == 200:
            found = json.loads(text)["choices"][0]["text"]
            if found != self.expected[model, prompt]:
                self.problem(f"{model}, {prompt!r}: found {found!r}, expected {self.expected[model, prompt]!r}")
        elif status not in (404, 429, 503):
            self.problem(f"status {status}: {text[:200]}")

    def wrong(self, rng):
        """Sends a request that is wrong."""
        body = rng.choice(
            [
                '{"prompt": ',
                '{"prompt": 1}',
                '{"prompt": "x", "n": 99}',
                "[]",
                '{"prompt": [99999999]}',
                '{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}',
                '{"prompt": "x", "structured_outputs": {"regex": "("}}',
                '{"prompt": "' + "x" * 50000 + '"}',
            ]
        )
        status, _, text = self.server.request("POST", "/v1/completions", body)
        if status not in (400, 503):
            self.problem(f"a wrong request got the status {status}: {text[:200]}")

    def cancel(self, rng):
        """Closes a connection before or while the answer comes."""
        body = json.dumps(
            {
                "prompt": "Once upon " * rng.randint(1, 40),
                "max_tokens": 300,
                "ignore_eos": True,
                "stream": rng.random() < 0.7,
                "n": rng.randint(1, 3),
            }
        )
        with socket.create_connection((self.server.host, self.server.port), timeout=10) as one:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.server.host}:{self.server.port}\r\n"
            one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()[: rng.choice([60, 10_000])])
            one.settimeout(rng.choice([0.01, 0.05, 0.3]))
            try:
                one.recv(rng.choice([1, 4096]))
            except TimeoutError:
                pass
            # A reset in place of an orderly end, as of a client that was killed.
            if rng.random() < 0.5:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")

    def adapter(self, rng):
        """Loads an adapter, uses it, unloads it."""
        name = f"temporary-{rng.randint(0, 3)}"
        load = {"lora_name": name, "lora_path": "r8-qv"}
        status, _, text = self.server.request("POST", "/v1/load_lora_adapter", load)
        if status not in (200, 409, 429, 503):
            self.problem(f"loading an adapter: status {status}: {text[:200]}")
        body = {"model": name, "prompt": "One day", "max_tokens": 4, "temperature": 0}
        self.server.request("POST", "/v1/completions", body)
        status, _, text = self.server.request("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if status not in (200, 404, 409, 503):
            self.problem(f"unloading an adapter: status {status}: {text[:200]}")

    def start(self):
        kinds = [("answers", self.answer)] * 4 + [("cancelled", self.cancel)] * 2 + [("wrong", self.wrong)]
        kinds += [("adapters", self.adapter)] * 2
        self.threads = [threading.Thread(target=self.loop, args=(*kind, seed)) for seed, kind in enumerate(kinds)]
        [thread.start() for thread in self.threads]

    def end(self):
        self.stop.set()
        [thread.join() for thread in self.threads]


def slope(points):
    """Returns the slope of a line through points in MiB per minute after the caches are full, and the growth in MiB."""
    begin, end = points[0][0], points[-1][0]
    late = [(at, rss) for at, rss in points if at >= begin + WARM * (end - begin)]
    times, values = [at / 60 for at, _ in late], [rss for _, rss in late]
    found = statistics.linear_regression(times, values).slope
    return found, found * (times[-1] - times[0])


def soak(context):
    pack, tuned = context.llama(), context.adapters() / "r16-all"
    prompts = ["The quick brown fox", "Once upon a time", "One day " * 20]
    expected = {}
    for model, adapter in (("llama", None), ("tuned", tuned)):
        for prompt in prompts:
            expected[model, prompt] = text_of(context, pack, adapter, prompt)
    options = [
        "--model",
        f"llama={pack}",
        "--lora",
        f"tuned={tuned}",
        "--adapter-dir",
        context.adapters(),
        "--precision",
        "fp32",
        "--state-dir",
        context.work / "soak-state",
        "--kv-memory",
        "32M",
        "--max-queue",
        "64",
    ]
    seconds = context.options.soak * 60
    # Short rounds end with a restart under load; the last one is long enough to see whether memory grows.
    rounds = max(2, round(seconds / 300))
    lengths = [0.4 * seconds / (rounds - 1)] * (rounds - 1) + [0.6 * seconds]
    counts, peak = {}, 0.0
    for number, length in enumerate(lengths):
        server = context.serve(*options)
        mixed, points, begin = Mixed(server, expected), [], time.monotonic()
        mixed.start()
        while time.monotonic() - begin < length:
            time.sleep(0.5)
            check(server.process.poll() is None, f"the server ended: {server.log()}")
            points.append((time.monotonic() - begin, server.rss()))
        if number + 1 < rounds:
            # A restart under load: requests that run are finished.
            mixed.pause.set()
            server.signal(signal.SIGTERM)
            check(server.end() == 0, f"the server ended with {server.process.returncode}: {server.log()}")
            mixed.end()
        else:
            mixed.end()
            server.wait_until_idle()
            check(server.stop() == 0, "the server ended with another exit code than 0")
        check(not mixed.problems, f"{len(mixed.problems)} problems, for example {mixed.problems[:3]}")
        peak = max(peak, *(rss for _, rss in points))
        counts = {kind: counts.get(kind, 0) + mixed.counts.get(kind, 0) for kind in counts | mixed.counts}
    rise, growth = slope(points)
    text = (
        f"{counts}, {rounds - 1} restarts under load, memory at most {peak:.0f} MiB, in the last "
        f"{WARM * lengths[-1] / 60:.1f} minutes {rise:+.2f} MiB per minute"
    )
    check(rise <= context.options.rss_slope or growth <= SMALL, f"memory grows: {text}")
    return text


def overload(context):
    """Measures the capacity in a closed loop, then sends three times as much as that."""
    server = context.serve(
        "--model", f"story={context.story()}", "--max-queue", "64", "--queue-timeout", "5s", "--max-seqs", "8"
    )
    seconds = context.options.overload
    body = {
        "prompt": "Once upon a time there was a little girl",
        "max_tokens": 1024,
        "temperature": 0,
        "ignore_eos": True,
    }
    capacity = closed_loop(server, body, 16, max(5, seconds / 4))
    before = server.rss()
    statuses, slowest, lock, threads = {}, [0.0], threading.Lock(), []

    def one():
        begin = time.monotonic()
        try:
            status = server.request("POST", "/v1/completions", body)[0]
        except OSError as e:
            status = type(e).__name__
        with lock:
            statuses[status] = statuses.get(status, 0) + 1
            slowest[0] = max(slowest[0], time.monotonic() - begin)

    begin, interval, peak = time.monotonic(), 1 / (3 * capacity), before
    served = server.metric("vllm:generation_tokens_total")
    for number in range(int(seconds * 3 * capacity)):
        time.sleep(max(0, begin + number * interval - time.monotonic()))
        thread = threading.Thread(target=one)
        thread.start()
        threads.append(thread)
        if number % 50 == 0:
            peak = max(peak, server.rss())
    took = time.monotonic() - begin
    goodput = (server.metric("vllm:generation_tokens_total") - served) / 1024 / took
    [thread.join() for thread in threads]
    server.wait_until_idle()
    text = (
        f"capacity {capacity:.1f} requests/s, goodput {goodput:.1f} under three times as many, "
        f"statuses {statuses}, slowest answer {slowest[0]:.1f} s, "
        f"memory {before:.0f} MiB before, at most {peak:.0f} MiB"
    )
    check(set(statuses) <= {200, 429}, f"other statuses than 200 and 429: {text}")
    check(statuses.get(429, 0) > 0, f"nothing was refused: {text}")
    check(goodput >= 0.95 * capacity, f"goodput is less than 0.95 of the capacity: {text}")
    check(peak <= before + 64, f"memory grew by more than 64 MiB: {text}")
    return text


def closed_loop(server, body, clients, seconds):
    """Returns requests per second of clients that each send one after the other."""
    end, counts = time.monotonic() + seconds, [0] * clients

    def one(number):
        while time.monotonic() < end:
            server.ask("/v1/completions", body)
            counts[number] += 1

    begin = time.monotonic()
    threads = [threading.Thread(target=one, args=(number,)) for number in range(clients)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return sum(counts) / (time.monotonic() - begin)
