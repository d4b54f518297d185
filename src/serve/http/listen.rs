//! Sockets of the server, and the loop that takes connections.

use crate::error::{Cause, Context, Error, Result};
use crate::resources::open_files;
use crate::serve::config::ServeSettings;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::net::{SocketAddr, TcpListener as StdTcpListener};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// Time in which the headers of a request must come.
pub const HEADER_TIME: Duration = Duration::from_secs(10);
/// Largest size of the headers of a request in bytes.
pub const HEADER_BYTES: usize = 16 << 10;
/// Largest number of connections.
const MOST_CONNECTIONS: u64 = 4096;
/// Number of open files that connections leave for other things: models, adapters, processes for templates.
const OTHER_FILES: u64 = 256;
/// Time to wait after the system refused a connection, such as for want of file descriptors.
pub const REFUSED_TIME: Duration = Duration::from_millis(50);

/// Places at which the server listens.
#[derive(Debug, Clone)]
pub struct Address {
    /// Address of the TCP socket.
    pub tcp: SocketAddr,
    /// Path of the Unix socket.
    pub unix: Option<PathBuf>,
    /// Address of the TCP socket of gRPC.
    pub grpc: Option<SocketAddr>,
}

/// Open sockets.
#[derive(Debug)]
pub struct Listeners {
    tcp: StdTcpListener,
    unix: Option<(StdUnixListener, PathBuf)>,
    grpc: Option<StdTcpListener>,
}

/// Removes the Unix socket of a server that ends.
impl Drop for Listeners {
    fn drop(&mut self) {
        if let Some((_, path)) = &self.unix {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Listeners {
    /// Opens the sockets.
    ///
    /// # Errors
    /// An address is in use, or the system refuses it.
    pub fn open(settings: &ServeSettings) -> Result<Listeners> {
        let tcp = open_tcp(&settings.host, settings.port, "--port")?;
        let unix = settings.unix.as_deref().map(open_unix).transpose()?;
        let grpc = settings.grpc_port.map(|port| open_tcp(&settings.host, port, "--grpc-port")).transpose()?;
        Ok(Listeners { tcp, unix, grpc })
    }

    /// Returns the places.
    ///
    /// # Errors
    /// The system does not tell the address.
    pub fn address(&self) -> Result<Address> {
        let unix = self.unix.as_ref().map(|(_, path)| path.clone());
        let grpc = self.grpc.as_ref().map(StdTcpListener::local_addr).transpose()?;
        Ok(Address { tcp: self.tcp.local_addr()?, unix, grpc })
    }

    /// Returns the socket of gRPC, if there is one.
    #[cfg(feature = "grpc")]
    pub fn grpc(&self) -> Option<&StdTcpListener> {
        self.grpc.as_ref()
    }

    /// Takes connections until `stop` is true, then lets those finish that are answering, at most for `patience`.
    ///
    /// # Errors
    /// A socket cannot be used.
    pub async fn serve(&self, router: Router, mut stop: watch::Receiver<bool>, patience: Duration) -> Result<()> {
        let tcp = TcpListener::from_std(self.tcp.try_clone()?)?;
        let unix = match &self.unix {
            Some((unix, _)) => Some(UnixListener::from_std(unix.try_clone()?)?),
            None => None,
        };
        let places = Arc::new(Semaphore::new(most_connections()));
        let mut connections = JoinSet::new();
        while !*stop.borrow() {
            let Ok(place) = places.clone().acquire_owned().await else { break };
            tokio::select! {
                accepted = tcp.accept() => match accepted {
                    Ok((stream, _)) => {
                        // Tokens are small, and each is wanted at once.
                        let _ = stream.set_nodelay(true);
                        connections.spawn(connection(stream, router.clone(), stop.clone(), place));
                    }
                    Err(_) => tokio::time::sleep(REFUSED_TIME).await,
                },
                accepted = accept_unix(unix.as_ref()) => match accepted {
                    Ok(stream) => _ = connections.spawn(connection(stream, router.clone(), stop.clone(), place)),
                    Err(_) => tokio::time::sleep(REFUSED_TIME).await,
                },
                _ = stop.changed() => {}
            }
            while connections.try_join_next().is_some() {}
        }
        let _ = tokio::time::timeout(patience, async { while connections.join_next().await.is_some() {} }).await;
        Ok(())
    }
}

/// Opens a TCP socket; `option` is the one that names its port.
fn open_tcp(host: &str, port: u16, option: &str) -> Result<StdTcpListener> {
    let refused = |e: std::io::Error| {
        Error::new(Cause::Io(e))
            .at(format!("{host}:{port}"))
            .help(format!("choose another {option} (0 = any free one), or end the process that uses it"))
    };
    // An address of IPv6 may be given with or without brackets.
    let inner = host.trim_start_matches('[').trim_end_matches(']');
    let tcp = StdTcpListener::bind((inner, port)).map_err(refused)?;
    tcp.set_nonblocking(true)?;
    Ok(tcp)
}

/// Returns the number of connections for which the limit of open files suffices.
pub fn most_connections() -> usize {
    let files = open_files().unwrap_or(u64::MAX);
    files.saturating_sub(OTHER_FILES).max(files / 4).clamp(1, MOST_CONNECTIONS) as usize
}

async fn accept_unix(listener: Option<&UnixListener>) -> std::io::Result<tokio::net::UnixStream> {
    match listener {
        Some(listener) => listener.accept().await.map(|(stream, _)| stream),
        None => std::future::pending().await,
    }
}

/// Opens a Unix socket that only its owner can use. A socket of a process that has ended is replaced.
fn open_unix(path: &Path) -> Result<(StdUnixListener, PathBuf)> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if is_socket && std::os::unix::net::UnixStream::connect(path).is_err() {
        std::fs::remove_file(path).at(path)?;
    }
    let listener = StdUnixListener::bind(path).at(path).help("choose another path with --unix")?;
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).at(path)?;
    listener.set_nonblocking(true)?;
    Ok((listener, path.to_path_buf()))
}

/// Serves one connection until it is closed.
async fn connection<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    router: Router,
    mut stop: watch::Receiver<bool>,
    _place: tokio::sync::OwnedSemaphorePermit,
) {
    let service = TowerToHyperService::new(router);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(HEADER_BYTES)
        .serve_connection(TokioIo::new(stream), service);
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
