//! A server under test, and a small HTTP client.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest time to wait for anything.
const PATIENCE: Duration = Duration::from_secs(60);
/// Template with which the embedded model continues a story.
pub const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if not loop.last %} {% endif %}\
                            {% endfor %}";

/// Returns a directory with a pack of the embedded model that has a chat template, and contexts of `context` tokens.
pub fn story_pack(context: usize) -> tempfile::TempDir {
    let fields = serde_json::json!({"max_position_embeddings": context});
    let home = crate::common::packed_with("stories260k", "config.json", fields);
    std::fs::write(home.path().join("pack/chat_template.jinja"), TEMPLATE).unwrap();
    home
}

/// `iec serve` in a process of its own.
pub struct Server {
    child: Child,
    /// Host and port.
    pub address: String,
    /// Host and port of gRPC.
    pub grpc: Option<String>,
    log: Arc<Mutex<String>>,
    /// Thread that reads the log until the process ends.
    reader: JoinHandle<()>,
}

impl Server {
    /// Starts a server with these options, and waits until it answers requests.
    pub fn start(options: &[&str]) -> Server {
        let server = Server::spawn(options, &[]);
        server.wait_until_ready();
        server
    }

    /// Starts a server with these options and environment variables, and waits until its socket is open.
    pub fn spawn(options: &[&str], variables: &[(&str, &str)]) -> Server {
        Server::spawn_by(Command::new(assert_cmd::cargo::cargo_bin("iec")), options, variables)
    }

    /// Starts a server by a shell that runs `script` before, and waits until it answers requests.
    pub fn start_after(script: &str, options: &[&str]) -> Server {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{script}; exec \"$@\""), "sh"]).arg(assert_cmd::cargo::cargo_bin("iec"));
        let server = Server::spawn_by(shell, options, &[]);
        server.wait_until_ready();
        server
    }

    /// Starts a server by a command that gets its arguments.
    fn spawn_by(mut command: Command, options: &[&str], variables: &[(&str, &str)]) -> Server {
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("IEC_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
        command.envs([("IEC_DEVICE", "cpu"), ("HOME", "/nonexistent")]).envs(variables.iter().copied());
        command.args(["serve", "--port", "0", "--threads", "1", "--kv-memory", "64M"]).args(options);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let log = Arc::<Mutex<String>>::default();
        let (mut stderr, lines) = (child.stderr.take().unwrap(), log.clone());
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = stderr.read(&mut buffer) {
                *lines.lock().unwrap() += &String::from_utf8_lossy(&buffer[..count]);
            }
        });
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let listening: Value = serde_json::from_str(&line).unwrap_or_else(|_| {
            std::thread::sleep(Duration::from_millis(100));
            panic!("{line}{}", log.lock().unwrap())
        });
        assert_eq!(listening["event"], "listening");
        let address = listening["http"].as_str().unwrap().strip_prefix("http://").unwrap().to_string();
        let grpc = listening["grpc"].as_str().and_then(|url| url.strip_prefix("grpc://")).map(String::from);
        Server { child, address, grpc, log, reader }
    }

    /// Waits until all models are loaded.
    pub fn wait_until_ready(&self) {
        self.wait("readiness", || self.get("/health").status == 200);
    }

    /// Waits until a condition holds.
    pub fn wait(&self, what: &str, condition: impl Fn() -> bool) {
        let begin = Instant::now();
        while !condition() {
            assert!(begin.elapsed() < PATIENCE, "{what} did not come: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns what the server wrote to stderr so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Sends a signal: `TERM`, `INT` or `HUP`.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status();
        assert!(sent.unwrap().success());
    }

    /// Waits until the process has ended and its log is complete.
    pub fn end(&mut self) -> ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap()
                && self.reader.is_finished()
            {
                return status;
            }
            assert!(begin.elapsed() < PATIENCE, "the server did not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends a request without a body.
    pub fn get(&self, path: &str) -> Response {
        self.send("GET", path, &[], "")
    }

    /// Sends a JSON object.
    pub fn post(&self, path: &str, body: &Value) -> Response {
        self.send("POST", path, &[], &body.to_string())
    }

    /// Sends a JSON object, and returns that of the answer.
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body);
        assert_eq!(response.status, 200, "{body}: {}", response.body);
        response.json()
    }

    /// Sends a request with headers.
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Response {
        let mut stream = self.begin(method, path, headers, body);
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        Response::parse(&bytes)
    }

    /// Sends a request, and returns the connection without waiting for the answer.
    pub fn begin(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut head = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
        let has_host = headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host"));
        if !has_host {
            head += &format!("Host: {}\r\n", self.address);
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("Content-Length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).unwrap();
        // A server may refuse a long body before it has read all of it.
        let _ = stream.write_all(body.as_bytes());
        stream
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An answer.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Response {
    pub fn parse(bytes: &[u8]) -> Response {
        let text = String::from_utf8_lossy(bytes);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
        let body = if chunked { unchunked(body.as_bytes()) } else { body.to_string() };
        Response { status, head: head.to_string(), body }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// Returns the value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// Returns the objects of a stream, which ends with `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        let mut data: Vec<&str> = self.body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{}", self.body);
        data.into_iter().map(|text| serde_json::from_str(text).unwrap()).collect()
    }
}

fn unchunked(mut rest: &[u8]) -> String {
    let mut all = Vec::new();
    while let Some(end) = rest.windows(2).position(|pair| pair == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap().trim(), 16).unwrap_or(0);
        let begin = end + 2;
        let end = (begin + size).min(rest.len());
        all.extend(&rest[begin..end]);
        if size == 0 {
            break;
        }
        rest = rest.get(end + 2..).unwrap_or_default();
    }
    String::from_utf8(all).unwrap()
}
