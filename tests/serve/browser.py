"""The page of the server in Chromium, driven by the DevTools protocol."""

import json
import shutil
import subprocess
import time
import urllib.request

import websocket
from server import Skip, check


class Page:
    """A page of a headless Chromium."""

    def __init__(self, context):
        program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if not program:
            raise Skip("chromium is not installed")
        profile = context.work / "chromium"
        shutil.rmtree(profile, ignore_errors=True)
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--remote-allow-origins=*",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self.log = open(context.work / "chromium.log", "w")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        port_file, end = profile / "DevToolsActivePort", time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().strip()):
            check(self.process.poll() is None and time.monotonic() < end, "chromium did not start")
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        pages = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
        address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
        self.socket = websocket.create_connection(address, timeout=60)
        self.number, self.problems = 0, []

    def call(self, method, **parameters):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(message["params"]["exceptionDetails"].get("text", "exception"))
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.problems.append(message["params"]["entry"]["text"])
            if message.get("id") == self.number:
                check("error" not in message, f"{method}: {message.get('error')}")
                return message["result"]

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        check("exceptionDetails" not in result, f"{expression}: {result}")
        return result["result"].get("value")

    def wait_for(self, what, expression, seconds=30):
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            check(time.monotonic() < end, f"{what} did not come within {seconds} s; problems: {self.problems}")
            time.sleep(0.05)

    def type_and_send(self, text):
        self.evaluate("document.getElementById('text').focus()")
        self.call("Input.insertText", text=text)
        self.wait_for("a button that can be pressed", "!document.getElementById('send').disabled")
        self.evaluate("document.getElementById('send').click()")

    def close(self):
        self.socket.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


TEXT = "document.getElementById('log').innerText"
LABEL = "document.getElementById('send').getAttribute('aria-label')"


def set_tokens(page, count):
    """Sets the largest number of tokens in the settings of the page."""
    page.evaluate(
        f"(() => {{ const e = document.getElementById('set-max_tokens'); e.value = '{count}'; "
        "e.dispatchEvent(new Event('input', {bubbles: true})); "
        "e.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


# A conversation as the page stores it. Its answer has formulas, one of them unknown, and lists of three kinds.
ANSWER = r"""Inline \(a^2\) and *emphasis \(b*c\)*, $5 and $6, `\(code\)`, unknown \(\unknown{a}\).

\[
x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}
\]

$$\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$$

1. one
2. two
- dash
* star
"""
STORED = [
    {
        "id": "stored",
        "title": "Formulas",
        "time": 1,
        "messages": [{"role": "user", "content": "Show formulas"}, {"role": "assistant", "content": ANSWER}],
    }
]


def check_stored(page):
    """Opens a stored conversation, and changes between the versions of an answer and of a question."""
    page.evaluate(
        f"localStorage.setItem('iec.chats', {json.dumps(json.dumps(STORED))}); "
        "sessionStorage.setItem('iec.open', 'stored')"
    )
    page.call("Page.reload")
    page.wait_for("the conversation that was open", "document.querySelectorAll('#log article').length === 2")
    found = page.evaluate(
        "(() => { const of = q => [...document.querySelectorAll('#log .md ' + q)]; "
        "return [of('math').length, of('.tex').map(e => e.textContent), "
        "[...document.querySelectorAll('#log .md > :is(ol, ul)')].map(e => e.localName), "
        "of('em math').length, of('p')[0].textContent.includes('$5 and $6'), of('code').map(e => e.textContent)]; })()"
    )
    check(
        found == [4, ["\\(\\unknown{a}\\)"], ["ol", "ul", "ul"], 1, True, ["\\(code\\)"]],
        f"formulas and lists: {found}",
    )
    articles = "[...document.querySelectorAll('#log article')].map(e => e.querySelector('.bubble, .md').innerText)"
    before = page.evaluate(articles)
    press = "document.querySelectorAll('#log article')[{}].querySelector('[title=\"{}\"]').click()".format
    page.evaluate(press(0, "Edit and ask again"))
    page.evaluate("document.getElementById('cancel-edit').click()")
    check(page.evaluate(articles) == before, "a cancelled edit changes nothing")
    set_tokens(page, 8)
    page.evaluate(press(1, "Answer again"))
    done = f"{LABEL} === 'Send' && document.querySelector('#log .versions')?.innerText.includes('2/2')"
    page.wait_for("a second version", done)
    page.evaluate(press(1, "Version before"))
    check(page.evaluate(articles) == before, "the former answer is kept")


def chromium(context):
    server = context.serve("--model", f"story={context.story()}", "--threads", "1")
    page = Page(context)
    try:
        for domain in ("Page", "Runtime", "Log"):
            page.call(domain + ".enable")
        page.call("Page.navigate", url=server.url + "/")
        page.wait_for("the name of the model", "document.getElementById('model')?.innerText.includes('story')")
        set_tokens(page, 40)
        page.type_and_send("Once upon a time")
        page.wait_for("the end of an answer", f"{LABEL} === 'Send' && {TEXT}.length > 60")
        first = page.evaluate(TEXT)
        set_tokens(page, 1900)
        page.type_and_send("One day")
        page.wait_for("a button that stops", f"{LABEL} === 'Stop'")
        length = len(page.evaluate(TEXT))
        page.wait_for("a growing answer", f"{TEXT}.length > {length + 20}")
        cancelled = server.metric("iec_cancelled_total")
        page.evaluate("document.getElementById('send').click()")
        page.wait_for("the button to send", f"{LABEL} === 'Send'")
        server.wait_until_idle()
        check(server.metric("iec_cancelled_total") == cancelled + 1, "the stopped request was cancelled")
        check(page.evaluate(TEXT).startswith(first[:40]), "the first answer is still shown")
        check_stored(page)
        check(not page.problems, f"errors of the page: {page.problems}")
    finally:
        page.close()
    return "the page sent, streamed and stopped an answer, showed formulas and kept versions, without an error"
