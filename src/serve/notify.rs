//! Messages to systemd about the state of the server (`sd_notify`).

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends a message to the socket that `NOTIFY_SOCKET` names. A name that begins with `@` is abstract.
///
/// # Errors
/// The socket cannot be reached.
pub fn notify(socket: &OsStr, message: &str) -> std::io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_reaches_sockets_with_and_without_a_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let abstract_name = format!("iec-notify-{}", std::process::id());
        let of_path = UnixDatagram::bind(&path).unwrap();
        let of_name = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&abstract_name).unwrap()).unwrap();
        for (socket, name) in [(of_path, path.into_os_string()), (of_name, format!("@{abstract_name}").into())] {
            notify(&name, "READY=1").unwrap();
            let mut buffer = [0; 32];
            let count = socket.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..count], b"READY=1");
        }
        assert!(notify(OsStr::new("/no/such/socket"), "READY=1").is_err());
    }
}
