//! Protection against web pages: which `Host` and `Origin` headers are accepted.
//!
//! A page in a browser can send requests to a server on the same machine or network. Two rules keep it out:
//!
//! * CORS: a page reads an answer only if the server names the origin of the page, which it does for listed ones.
//! * DNS rebinding: an attacker can give the name of their page the address of this server, after which the browser
//!   regards both as one origin. The `Host` header then has the attacker's name. A server therefore accepts its own
//!   names only. The header cannot have an address in this attack, because names are what is rebound.
//!
//! Its own names are also the name of its machine and those by which containers reach the machine. No page has these:
//! the first one belongs to the machine, and `.internal` is reserved for names that no registry gives away.
//!
//! A server with keys on a network may have any name (of a service, of a load balancer): requests need a key there,
//! which a page does not have. A server on the loopback interface, or without keys, accepts only names that it knows.

use super::config::ServeSettings;
use crate::files;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

/// Names by which containers of Docker and Podman reach the machine on which they run.
const FOR_CONTAINERS: [&str; 2] = ["host.docker.internal", "host.containers.internal"];
/// File with the name of the machine.
const MACHINE_NAME: &str = "/proc/sys/kernel/hostname";
/// Longest name of a host.
const LONGEST_HOST: usize = 253;

/// Rule that decides which `Host` headers are accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPolicy {
    /// True if every name is accepted.
    any: bool,
    /// True if every address is accepted.
    any_address: bool,
    /// Names and addresses of the interface and of `--allowed-host`, in lower case.
    listed: Vec<String>,
}

impl HostPolicy {
    /// Returns the rule for a server on this machine.
    pub fn of(settings: &ServeSettings, has_keys: bool) -> HostPolicy {
        let name = files::read_text(Path::new(MACHINE_NAME), LONGEST_HOST as u64 + 1).unwrap_or_default();
        HostPolicy::on_machine(settings, has_keys, name.trim())
    }

    /// Returns the rule for a server on the machine with this name, which is empty if it is not known.
    fn on_machine(settings: &ServeSettings, has_keys: bool, machine: &str) -> HostPolicy {
        let on_network = !is_loopback(&settings.host);
        let mut listed: Vec<String> =
            settings.allowed_host.iter().map(|host| unbracketed(host).to_ascii_lowercase()).collect();
        listed.push(unbracketed(&settings.host).to_ascii_lowercase());
        listed.extend(FOR_CONTAINERS.map(String::from));
        if !machine.is_empty() {
            // The second one is the name in the local network (multicast DNS).
            listed.extend([machine.to_ascii_lowercase(), format!("{}.local", machine.to_ascii_lowercase())]);
        }
        HostPolicy {
            any: settings.allowed_host.iter().any(|host| host == "*") || on_network && has_keys,
            any_address: on_network,
            listed,
        }
    }

    /// Returns true if a request with this `Host` header is accepted. The port does not matter.
    pub fn allows(&self, host_header: &str) -> bool {
        let Some(host) = host_of(host_header) else { return false };
        if self.any || is_loopback(host) {
            return true;
        }
        let is_address = unbracketed(host).parse::<IpAddr>().is_ok();
        is_address && self.any_address
            || self.listed.iter().any(|listed| unbracketed(host).eq_ignore_ascii_case(listed))
    }
}

/// Returns true if pages of an origin may read answers: the list has the origin, in upper or lower case, or `*`.
pub fn cors_allowed(origin: &str, list: &[String]) -> bool {
    let same = |listed: &String| listed.trim_end_matches('/').eq_ignore_ascii_case(origin);
    list.iter().any(|listed| listed == "*" || is_origin(origin) && same(listed))
}

/// Returns true if a text is a name or an address without a port. An IPv6 address may have brackets.
pub(super) fn is_host(text: &str) -> bool {
    let is_name = |text: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        (1..=LONGEST_HOST).contains(&text.len()) && text.chars().all(allowed)
    };
    is_name(text) || unbracketed(text).parse::<Ipv6Addr>().is_ok()
}

/// Returns true if a name or an address is one of the loopback interface, which other machines do not reach.
pub(super) fn is_loopback(host: &str) -> bool {
    match unbracketed(host).parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}

/// Returns true if a text is an origin: a scheme and a host with or without a port, and nothing behind them.
pub(super) fn is_origin(text: &str) -> bool {
    let text = text.strip_suffix('/').unwrap_or(text);
    let Some((scheme, host)) = text.split_once("://") else { return false };
    let allowed = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    !scheme.is_empty() && scheme.chars().all(allowed) && host_of(host).is_some()
}

/// Returns the host of a `Host` header, with its brackets if it has any, without the port.
fn host_of(header: &str) -> Option<&str> {
    let header = header.trim();
    let end = match header.starts_with('[') {
        true => header.find(']')? + 1,
        false => header.find(':').unwrap_or(header.len()),
    };
    let (host, port) = header.split_at(end);
    let has_port = port.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok());
    ((port.is_empty() || has_port) && is_host(host)).then_some(host)
}

/// Removes the brackets around an IPv6 address.
fn unbracketed(host: &str) -> &str {
    host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn policy(host: &str, allowed: &[&str], has_keys: bool) -> HostPolicy {
        let allowed_host = allowed.iter().map(|host| host.to_string()).collect();
        let settings = ServeSettings { host: host.into(), allowed_host, ..ServeSettings::default() };
        HostPolicy::on_machine(&settings, has_keys, "Desk")
    }

    #[test]
    fn a_server_on_the_loopback_interface_accepts_its_own_names_only() {
        for has_keys in [false, true] {
            let policy = policy("127.0.0.1", &["chat.example"], has_keys);
            for host in ["localhost", "LocalHost:8080", "127.0.0.1:1", "[::1]:8080", "[::1]", "Chat.Example:99"] {
                assert!(policy.allows(host), "{host}");
            }
            let refused = ["", "evil.example", "localhost.evil.example", "192.168.0.1", "127.0.0.1.evil", "evil:8080"];
            for host in refused.into_iter().chain(["localhost:x", "localhost:80:80", "[::1", "a b", "user@localhost"]) {
                assert!(!policy.allows(host), "{host}");
            }
        }
    }

    #[test]
    fn the_names_of_the_machine_and_those_for_containers_are_accepted() {
        for host in ["127.0.0.1", "0.0.0.0"] {
            let policy = policy(host, &[], false);
            for name in ["desk:8080", "DESK", "desk.local", "host.docker.internal:8080", "host.containers.internal"] {
                assert!(policy.allows(name), "{host}: {name}");
            }
            for name in ["desk.example", "docker.internal", "x.host.docker.internal", "host.docker.internal.example"] {
                assert!(!policy.allows(name), "{host}: {name}");
            }
        }
        let settings = ServeSettings::default();
        assert!(!HostPolicy::on_machine(&settings, false, "").allows("desk"), "a machine without a known name");
    }

    #[test]
    fn a_server_on_a_network_accepts_addresses_and_with_keys_all_names() {
        let open = policy("0.0.0.0", &[], false);
        assert!(open.allows("10.0.0.7:8080") && open.allows("[fe80::1]:80") && open.allows("localhost"));
        assert!(!open.allows("iec.default.svc"));
        let with_keys = policy("0.0.0.0", &[], true);
        assert!(with_keys.allows("iec.default.svc:8080") && !with_keys.allows("a b"));
        let named = policy("gpu.example", &[], false);
        assert!(named.allows("GPU.example:80") && !named.allows("other.example"));
        assert!(policy("127.0.0.1", &["*"], false).allows("any.example"));
        assert!(policy("[::1]", &[], false).allows("[::1]:80"));
    }

    #[test]
    fn origins_are_listed_or_all_are_accepted() {
        let list = ["https://chat.example".to_string(), "http://localhost:3000/".to_string()];
        struct Case(&'static str, bool);
        let cases = [
            Case("https://chat.example", true),
            Case("HTTPS://Chat.Example", true),
            Case("http://localhost:3000", true),
            Case("http://chat.example", false),
            Case("https://chat.example:444", false),
            Case("https://chat.example.evil", false),
            Case("https://evil/https://chat.example", false),
            Case("null", false),
            Case("", false),
        ];
        for Case(origin, allowed) in cases {
            assert_eq!(cors_allowed(origin, &list), allowed, "{origin}");
        }
        assert!(cors_allowed("https://any.example", &["*".to_string()]) && !cors_allowed("https://chat.example", &[]));
    }

    #[test]
    fn an_origin_has_a_scheme_and_a_host_only() {
        for text in ["https://a.example", "http://[::1]:80", "app://x", "http://a:1/"] {
            assert!(is_origin(text), "{text}");
        }
        for text in ["*", "a.example", "https://", "https://a/b", "https://a:b", "://a", "https://a?x", "null"] {
            assert!(!is_origin(text), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_header_is_accepted_or_refused(header: String, origin: String) {
            let _ = policy("127.0.0.1", &[], false).allows(&header);
            let listed = [origin.clone()];
            let expected = is_origin(&origin) && !origin.ends_with('/') || origin == "*";
            prop_assert_eq!(cors_allowed(&origin, &listed), expected);
        }

        #[test]
        fn names_of_other_servers_are_refused_with_any_port(name in "[a-z]{1,9}\\.[a-z]{2,9}", port: u16) {
            prop_assume!(name != "x.example");
            let policy = policy("127.0.0.1", &["x.example"], false);
            let (with_port, own) = (format!("{name}:{port}"), format!("x.example:{port}"));
            prop_assert!(!policy.allows(&name) && !policy.allows(&with_port) && policy.allows(&own));
        }
    }
}
