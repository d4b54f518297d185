//! A small client of gRPC over frames of HTTP/2, which shares no code with the server but the messages.

use crate::serve::client::Server;
use axum::body::Bytes;
use axum::http::{HeaderMap, Request};
use h2::client::SendRequest;
use prost::Message;
use std::future::Future;
use std::marker::PhantomData;
use std::time::Duration;

/// Messages of `smg.grpc.common`.
pub mod smg {
    pub mod grpc {
        #[allow(clippy::all, clippy::pedantic, dead_code)]
        pub mod common {
            include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/serve/grpc/generated/smg.grpc.common.rs"));
        }
    }
}

/// Messages of `vllm.grpc.engine`.
pub mod vllm {
    pub mod grpc {
        #[allow(clippy::all, clippy::pedantic, dead_code)]
        pub mod engine {
            include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/serve/grpc/generated/vllm.grpc.engine.rs"));
        }
    }
}

/// Beginning of the paths of the methods of the engine.
pub const ENGINE: &str = "/vllm.grpc.engine.VllmEngine";

/// Runs a future to its end, at most for a minute.
pub fn run<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), work).await.expect("an answer in time") })
}

/// A connection.
pub struct Channel {
    sender: SendRequest<Bytes>,
    authority: String,
}

/// An answer that is being received.
pub struct Stream<A> {
    pub headers: HeaderMap,
    body: h2::RecvStream,
    bytes: Vec<u8>,
    answers: PhantomData<A>,
}

/// End of a call.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub message: String,
    /// Headers and trailers.
    pub metadata: HeaderMap,
}

impl Ended {
    fn of(metadata: HeaderMap) -> Ended {
        let text = |name: &str| metadata.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let message = text("grpc-message").replace("%20", " ").replace("%60", "`");
        Ended { code: text("grpc-status").parse().unwrap_or(-1), message, metadata }
    }

    /// Returns a value of the metadata.
    pub fn text(&self, name: &str) -> &str {
        self.metadata.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

impl Channel {
    /// Connects to a server.
    pub async fn open(server: &Server) -> Channel {
        let authority = server.grpc.clone().expect("a server with --grpc-port");
        let stream = tokio::net::TcpStream::connect(&authority).await.unwrap();
        // The window of most clients. It also bounds how many small frames may wait for a test that does not read them.
        let mut builder = h2::client::Builder::new();
        builder.initial_connection_window_size(5 << 20);
        let (sender, connection) = builder.handshake::<_, Bytes>(stream).await.unwrap();
        tokio::spawn(async { drop(connection.await) });
        Channel { sender, authority }
    }

    /// Begins a call of a method with one message.
    pub async fn begin<A>(&self, path: &str, metadata: &[(&str, &str)], message: &impl Message) -> Stream<A> {
        self.begin_raw(path, metadata, framed(&message.encode_to_vec())).await
    }

    /// Begins a call with these bytes.
    pub async fn begin_raw<A>(&self, path: &str, metadata: &[(&str, &str)], bytes: Vec<u8>) -> Stream<A> {
        let mut request = Request::post(format!("http://{}{path}", self.authority));
        request = request.header("content-type", "application/grpc").header("te", "trailers");
        for (name, value) in metadata {
            request = request.header(*name, *value);
        }
        let mut sender = self.sender.clone().ready().await.unwrap();
        let (response, mut body) = sender.send_request(request.body(()).unwrap(), false).unwrap();
        body.send_data(bytes.into(), true).unwrap();
        let (parts, body) = response.await.unwrap().into_parts();
        Stream { headers: parts.headers, body, bytes: Vec::new(), answers: PhantomData }
    }

    /// Calls a method, and returns all messages of its answer.
    pub async fn call<A: Message + Default>(
        &self,
        method: &str,
        metadata: &[(&str, &str)],
        message: &impl Message,
    ) -> (Vec<A>, Ended) {
        let mut stream = self.begin(&format!("{ENGINE}/{method}"), metadata, message).await;
        let mut all = Vec::new();
        while let Some(message) = stream.next().await {
            all.push(message);
        }
        (all, stream.end().await)
    }
}

impl<A: Message + Default> Stream<A> {
    /// Returns the next message.
    pub async fn next(&mut self) -> Option<A> {
        loop {
            if self.bytes.len() >= 5 {
                let length = u32::from_be_bytes(self.bytes[1..5].try_into().unwrap()) as usize;
                if self.bytes.len() >= 5 + length {
                    let message = A::decode(&self.bytes[5..5 + length]).unwrap();
                    self.bytes.drain(..5 + length);
                    return Some(message);
                }
            }
            let data = self.body.data().await?.unwrap();
            self.body.flow_control().release_capacity(data.len()).unwrap();
            self.bytes.extend_from_slice(&data);
        }
    }

    /// Waits for the end.
    pub async fn end(mut self) -> Ended {
        while self.next().await.is_some() {}
        let trailers = self.body.trailers().await.unwrap();
        let mut metadata = self.headers;
        metadata.extend(trailers.unwrap_or_default());
        Ended::of(metadata)
    }
}

/// Returns a message with its length before it.
pub fn framed(message: &[u8]) -> Vec<u8> {
    [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat()
}
