//! Bodies that do not come: they must not stand in the way of other requests.

use super::client::{Response, Server};
use iec::serve::keys::digest_of;
use serde_json::json;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

/// Opens requests whose bodies are announced and do not come, or only their beginning.
fn open_requests(server: &Server, key: &str, count: usize) -> Vec<TcpStream> {
    let announced = [
        "Transfer-Encoding: chunked\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n5\r\n{\"pro",
        "Content-Length: 8388608\r\n\r\n",
        "Content-Length: 8388608\r\n\r\n{\"prompt\": \"",
    ];
    let paths = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/load_lora_adapter"];
    let open = |i: usize| {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        let (path, rest) = (paths[i / 4 % 4], announced[i % 4]);
        let head = format!("POST {path} HTTP/1.1\r\nHost: {}\r\nx-api-key: {key}\r\n{rest}", server.address);
        stream.write_all(head.as_bytes()).unwrap();
        stream
    };
    (0..count).map(open).collect()
}

/// Returns true if nothing has come from the server.
fn is_waiting(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    matches!((&*stream).read(&mut [0]), Err(e) if e.kind() == ErrorKind::WouldBlock)
}

#[test]
fn bodies_that_do_not_come_keep_no_request_waiting() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("keys.toml");
    let key = |name: &str| format!("[[key]]\nname = \"{name}\"\nsha256 = \"{}\"\nconcurrent = 2\n", digest_of(name));
    std::fs::write(&file, key("mallory") + &key("victim")).unwrap();
    let file = file.display().to_string();
    for options in [&[][..], &["--api-key-file", &file]] {
        let server = Server::start(options);
        let open = open_requests(&server, "mallory", 256);
        // Their headers have been read before a later request is answered.
        for key in ["victim", "mallory"] {
            let body = json!({"prompt": "x".repeat(100), "max_tokens": 0, "echo": true}).to_string();
            let answer = server.send("POST", "/v1/completions", &[("x-api-key", key)], &body);
            assert_eq!(answer.status, 200, "{options:?} {key}: {}", answer.body);
        }
        let waiting = open.iter().filter(|stream| is_waiting(stream)).count();
        // A quarter of them needs a scope that the key has not.
        let expected = if options.is_empty() { 250 } else { 186 };
        assert!(waiting > expected, "{options:?}: the answers came while {waiting} requests were open");
    }
}

#[test]
fn a_body_that_comes_in_pieces_is_read() {
    let server = Server::start(&[]);
    let mut stream = TcpStream::connect(&server.address).unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n",
        server.address
    );
    stream.write_all(head.as_bytes()).unwrap();
    for piece in json!({"prompt": "Once", "max_tokens": 1}).to_string().as_bytes().chunks(7) {
        stream.write_all(format!("{:x}\r\n", piece.len()).as_bytes()).unwrap();
        stream.write_all(&[piece, b"\r\n"].concat()).unwrap();
        stream.flush().unwrap();
    }
    stream.write_all(b"0\r\n\r\n").unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let answer = Response::parse(&bytes);
    assert_eq!(answer.status, 200, "{}", answer.body);
}

#[test]
fn headers_that_decide_about_access_are_there_once() {
    let server = Server::spawn(&[], &[("IEC_API_KEY", "secret")]);
    server.wait_until_ready();
    let host = server.address.clone();
    let ask = |target: &str, headers: &str| {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        let head = format!("GET {target} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        Response::parse(&bytes).status
    };
    struct Case(&'static str, String, u16);
    let own = format!("Host: {host}\r\nx-api-key: secret\r\n");
    let cases = [
        Case("/v1/models", own.clone(), 200),
        Case("/v1/models", format!("{own}Host: evil.example\r\n"), 400),
        Case("/v1/models", format!("Host: evil.example\r\n{own}"), 400),
        Case("/v1/models", format!("{own}Host: {host}\r\n"), 400),
        Case("/livez", format!("{own}Host: {host}\r\n"), 400),
        Case("/v1/models", "x-api-key: secret\r\n".into(), 400),
        Case("/v1/models", format!("{own}x-api-key: other\r\n"), 400),
        Case("/v1/models", format!("{own}Authorization: Bearer a\r\nAuthorization: Bearer b\r\n"), 400),
        Case("/v1/models", format!("{own}Origin: http://{host}\r\nOrigin: http://evil.example\r\n"), 400),
        Case("http://evil.example/v1/models", own.clone(), 400),
    ];
    let found = cases.iter().map(|Case(target, headers, status)| (target, headers, ask(target, headers), *status));
    let failures: Vec<_> = found.filter(|(.., found, status)| found != status).collect();
    assert!(failures.is_empty(), "{failures:#?}");
    assert_eq!(ask(&format!("http://{host}/v1/models"), &own), 200, "the form for proxies");
}
