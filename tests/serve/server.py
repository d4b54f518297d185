"""A server under test, its packs, and a small HTTP client."""

import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 90

# Continues the story of the messages; describes tools in the format of Hermes.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> "
    '<tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>{% endif %}'
    "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% endif %}{% if not loop.last %} {% endif %}{% endfor %}"
)


class Failure(Exception):
    """A check that did not hold."""


class Skip(Exception):
    """A part that cannot run here, and why."""


def check(condition, message):
    if not condition:
        raise Failure(message)


class Context:
    """What all parts share: options, binary, working directory and packs."""

    def __init__(self, options):
        self.options = options
        self.work = pathlib.Path(options.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.work),
            "IEC_DEVICE": "cpu",
            "IEC_CACHE": str(self.work / "cache"),
        }
        self.servers = []

    def iec(self, *arguments, **more):
        """Runs the program and returns its output."""
        command = [self.options.iec, *map(str, arguments)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=600, **more)
        check(done.returncode == 0, f"iec {' '.join(command[1:])} failed: {done.stderr[-2000:]}")
        return done.stdout

    def pack(self, name, source, template=None, **fields):
        """Packs a checkpoint with other fields of its config.json, once; returns the directory."""
        target = self.work / "packs" / name
        if target.exists():
            return target
        copy = self.work / "sources" / name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | fields))
        if template:
            (copy / "chat_template.jinja").write_text(template)
        self.iec("pack", "--overwrite", "--hf-dir", copy, "--out-dir", target)
        return target

    def story(self):
        """Returns a pack of the embedded model with a chat template and a context of 2048 tokens."""
        return self.pack("story", ROOT / "assets/stories260k", TEMPLATE, max_position_embeddings=2048)

    def llama(self):
        """Returns a pack of the model for which there are adapters."""
        return self.pack("llama", ROOT / "tests/fixtures/llama-gqa", TEMPLATE)

    def adapters(self):
        """Returns the directory of the adapters."""
        return ROOT / "tests/fixtures/lora-llama-gqa"

    def serve(self, *options, environment=None):
        """Starts a server and waits until it is ready."""
        server = Server(self, [str(option) for option in options], environment or {})
        self.servers.append(server)
        server.wait_until_ready()
        return server

    def close(self):
        for server in self.servers:
            server.kill()
        self.servers.clear()


class Server:
    """`iec serve` in a process of its own."""

    def __init__(self, context, options, environment, port="0"):
        self.log_path = context.work / f"server-{time.monotonic_ns()}.log"
        self.log_file = open(self.log_path, "w")
        command = [context.options.iec, "serve", "--port", port, *options]
        # Without a limit the KV cache would take half of the memory of the machine, which other servers need too.
        if "--kv-memory" not in options:
            command += ["--kv-memory", "256M"]
        self.process = subprocess.Popen(
            command,
            env=context.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.log_file,
            text=True,
        )
        line = self.process.stdout.readline()
        check(line.startswith("{"), f"the server did not start: {line}{self.log()}")
        self.url, self.grpc = json.loads(line)["http"], json.loads(line)["grpc"]
        self.host, port = self.url.removeprefix("http://").rsplit(":", 1)
        self.port = int(port)

    def log(self):
        return self.log_path.read_text()[-3000:]

    def wait_until_ready(self):
        end = time.monotonic() + PATIENCE
        while self.request("GET", "/health")[0] != 200:
            check(self.process.poll() is None, f"the server ended: {self.log()}")
            check(time.monotonic() < end, f"the server was not ready after {PATIENCE} s: {self.log()}")
            time.sleep(0.05)

    def request(self, method, path, body=None, headers=None, timeout=PATIENCE):
        """Returns status, headers and body of an answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            text = json.dumps(body) if isinstance(body, (dict, list)) else body
            connection.request(method, path, text, {"Content-Type": "application/json"} | (headers or {}))
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read().decode()
        finally:
            connection.close()

    def get(self, path):
        return self.request("GET", path)[2]

    def ask(self, path, body):
        """Sends an object and returns that of the answer."""
        status, _, text = self.request("POST", path, body)
        check(status == 200, f"{path} {str(body)[:300]}: status {status}, {text[:500]}")
        return json.loads(text)

    def complete(self, prompt, **fields):
        """Returns the text of a greedy completion."""
        body = {"prompt": prompt, "temperature": 0} | fields
        return self.ask("/v1/completions", body)["choices"][0]["text"]

    def metrics(self):
        """Returns all samples of the metrics by their name and labels."""
        lines = [line.rpartition(" ") for line in self.get("/metrics").splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines if name}

    def metric(self, name, **labels):
        """Returns the sum of the samples of a name with these labels."""

        def fits(sample):
            found, _, rest = sample.partition("{")
            return found == name and all(f'{key}="{value}"' in rest for key, value in labels.items())

        return sum(value for sample, value in self.metrics().items() if fits(sample))

    def wait_for(self, what, condition, seconds=20):
        end = time.monotonic() + seconds
        while not condition():
            check(time.monotonic() < end, f"{what} did not come within {seconds} s")
            time.sleep(0.05)

    def wait_until_idle(self):
        """Waits until no request runs and all pages are free or cached."""
        self.wait_for(
            "an idle server with no used page",
            lambda: (
                self.metric("vllm:num_requests_running") == 0
                and self.metric("vllm:num_requests_waiting") == 0
                and self.metric("iec_kv_pages", state="used") == 0
            ),
        )

    def rss(self):
        """Returns the resident memory in MiB."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) / 1024

    def signal(self, number):
        self.process.send_signal(number)

    def end(self, seconds=PATIENCE):
        """Waits for the end of the process and returns its exit code."""
        try:
            return self.process.wait(seconds)
        finally:
            self.log_file.close()

    def stop(self):
        self.signal(signal.SIGTERM)
        return self.end()

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        if not self.log_file.closed:
            self.log_file.close()


def events(text):
    """Returns the objects of a stream of OpenAI's API."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    check(data and data[-1] == "[DONE]", f"the stream has no end: {text[-300:]}")
    return [json.loads(line) for line in data[:-1]]
