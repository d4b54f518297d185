//! Socket of gRPC, and the loop that takes its connections.
//!
//! Clients speak HTTP/2 from the first byte (no TLS, no upgrade). Browsers cannot do that, so that calls need none of
//! the checks of `Host` and `Origin` that keep pages out of the HTTP server.

use super::services::router;
use crate::error::Result;
use crate::serve::app::App;
use crate::serve::http::listen::{HEADER_BYTES, HEADER_TIME, REFUSED_TIME, most_connections};
use axum::Router;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::net::TcpListener as StdTcpListener;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

/// Divisor of the number of connections of HTTP that gives the number of connections of gRPC, each of which carries
/// many calls.
const SHARE: usize = 8;
/// Largest number of calls of a connection at the same time. A router sends all its calls over one connection.
const MOST_CALLS: u32 = 4096;
/// Bytes of messages that a connection, and a call, may send ahead of their readers.
const WINDOW: u32 = 256 << 10;
/// Time without a frame after which the client must answer a ping, and time for the answer.
const PING_TIME: Duration = Duration::from_secs(20);

/// Takes connections until `stop` is true, then lets those finish that are answering, at most for `patience`. Without
/// a socket, there is nothing to do.
///
/// # Errors
/// The socket cannot be used.
pub async fn serve(
    app: Arc<App>,
    socket: Option<&StdTcpListener>,
    mut stop: watch::Receiver<bool>,
    patience: Duration,
) -> Result<()> {
    let Some(socket) = socket else { return Ok(()) };
    let (tcp, router) = (TcpListener::from_std(socket.try_clone()?)?, router(app));
    let places = Arc::new(Semaphore::new((most_connections() / SHARE).max(1)));
    let mut connections = JoinSet::new();
    while !*stop.borrow() {
        tokio::select! {
            accepted = accept(&tcp, &places) => match accepted {
                Ok((stream, place)) => _ = connections.spawn(connection(stream, router.clone(), stop.clone(), place)),
                Err(_) => tokio::time::sleep(REFUSED_TIME).await,
            },
            _ = stop.changed() => {}
        }
        while connections.try_join_next().is_some() {}
    }
    let _ = tokio::time::timeout(patience, async { while connections.join_next().await.is_some() {} }).await;
    Ok(())
}

/// Waits for a place, then for a connection.
async fn accept(tcp: &TcpListener, places: &Arc<Semaphore>) -> std::io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let place = places.clone().acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, _) = tcp.accept().await?;
    // Tokens are small, and each is wanted at once.
    let _ = stream.set_nodelay(true);
    Ok((stream, place))
}

/// Serves one connection until it is closed.
async fn connection(stream: TcpStream, router: Router, mut stop: watch::Receiver<bool>, _place: OwnedSemaphorePermit) {
    // A connection on which nothing ever comes must not keep its place.
    let begun = tokio::time::timeout(HEADER_TIME, stream.peek(&mut [0])).await;
    if !matches!(begun, Ok(Ok(1))) {
        return;
    }
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_TIME)
        .keep_alive_timeout(PING_TIME)
        .initial_connection_window_size(WINDOW)
        .initial_stream_window_size(WINDOW)
        .max_concurrent_streams(MOST_CALLS)
        .max_header_list_size(HEADER_BYTES as u32)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => {}
        _ = stop.changed() => {
            connection.as_mut().graceful_shutdown();
            // The client may close the connection before it got an answer.
            let _ = connection.await;
        }
    }
}
