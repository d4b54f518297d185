//! HTTP client of the Hub: lists the files of a revision, requests their hashes, and downloads them from any position.

use super::super::hash::HashKind;
use super::super::{RepoSpec, Variables, cache};
use super::Remote;
use crate::error::{Error, Result};
use crate::files;
use serde::Deserialize;
use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body, RequestBuilder, typestate::WithoutBody};

const ENDPOINT: &str = "https://huggingface.co";
/// Maximum length in bytes of the list of files of a revision.
const INFO_LIMIT: u64 = 64 << 20;
const MAX_REDIRECTS: usize = 5;

/// Description of a revision on the Hub.
#[derive(Debug, Deserialize)]
pub(super) struct Info {
    /// Commit of the revision.
    pub(super) sha: String,
    /// Files of the revision.
    pub(super) siblings: Vec<Sibling>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Sibling {
    pub(super) rfilename: String,
}

/// HTTP client of one Hub server.
pub(super) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

/// Error of a request; `transient` is true when a retry may succeed.
pub(super) struct Failure {
    pub(super) error: Error,
    pub(super) transient: bool,
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        failure.error
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure { error, transient: false }
    }
}

impl Client {
    /// Makes a client for the Hub at `HF_ENDPOINT`, with the token from `HF_TOKEN` or from the file that
    /// `hf auth login` writes.
    pub(super) fn new(variables: &Variables<'_>) -> Result<Client> {
        let variable = |name: &str| variables(name).and_then(|value| value.into_string().ok());
        if variable("HF_HUB_OFFLINE")
            .is_some_and(|v| matches!(v.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"))
        {
            return Err(Error::usage("HF_HUB_OFFLINE is set, so nothing is downloaded").help("unset it to download"));
        }
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        let stored = || {
            let path = variable("HF_TOKEN_PATH").map(PathBuf::from);
            files::read_to_string(&path.or_else(|| Some(cache::home(variables)?.join("token")))?).ok()
        };
        let token = variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN")).or_else(stored);
        let agent = Agent::config_builder()
            .user_agent(concat!("iec/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(Duration::from_secs(20)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)))
            .build();
        Ok(Client {
            agent: agent.into(),
            endpoint: endpoint.trim_end_matches('/').to_string(),
            token: token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty()),
        })
    }

    /// Requests the commit and files of a revision.
    pub(super) fn info(&self, spec: &RepoSpec) -> Result<Info> {
        let url = format!("{}/api/models/{}/revision/{}", self.endpoint, spec.id, quoted(&spec.revision, false));
        let mut response = self.send(self.agent.get(&url), &spec.to_string())?;
        let bytes = response.body_mut().with_config().limit(INFO_LIMIT).read_to_vec();
        let bytes = bytes.map_err(|e| Error::from(failure(e, &url)))?;
        serde_json::from_slice(&bytes).map_err(|e| {
            Error::corrupt(format!("{url}: found another response, expected a list of files ({e})"))
                .help("check HF_ENDPOINT: the server must answer as huggingface.co does")
        })
    }

    /// Requests the hash and size of a file.
    pub(super) fn describe(&self, id: &str, commit: &str, name: &str) -> Result<Remote> {
        let url = format!("{}/{id}/resolve/{commit}/{}", self.endpoint, quoted(name, true));
        let mut at = url.clone();
        for _ in 0..MAX_REDIRECTS {
            // Large files are redirected to a storage server that does not report the hash, so the
            // first response is used.
            let request = self.agent.head(&at).config().max_redirects(0).max_redirects_will_error(false).build();
            let response = self.send(request, name)?;
            let header = |name: &str| header(&response, name);
            match header("location").and_then(|to| self.own(to)) {
                Some(to) if response.status().is_redirection() && header("x-linked-etag").is_none() => at = to,
                _ => {
                    let etag = header("x-linked-etag").or_else(|| header("etag")).unwrap_or_default();
                    let etag = etag.trim_start_matches("W/").trim_matches('"').to_string();
                    let nbytes =
                        header("x-linked-size").or_else(|| header("content-length")).and_then(|n| n.parse().ok());
                    return match (HashKind::of(&etag), nbytes) {
                        (Some(_), Some(nbytes)) => Ok(Remote { name: name.to_string(), url, etag, nbytes }),
                        _ => Err(Error::unsupported("found a response without the hash or the size of the file")
                            .tensor(name)
                            .help("check HF_ENDPOINT: the server must send the headers of huggingface.co")),
                    };
                }
            }
        }
        Err(Error::corrupt(format!("found more than {MAX_REDIRECTS} redirects"))
            .tensor(name)
            .help("check HF_ENDPOINT: the server redirects in a circle"))
    }

    /// Requests the bytes of a file from position `from` on. Returns a reader and its start position, which is 0 when
    /// the server sends the whole file.
    pub(super) fn open(&self, remote: &Remote, from: u64) -> std::result::Result<(u64, impl Read + use<>), Failure> {
        let mut request = self.agent.get(&remote.url);
        if from > 0 {
            request = request.header("Range", format!("bytes={from}-"));
        }
        let response = self.send(request, &remote.name)?;
        let range = header(&response, "content-range").unwrap_or_default();
        let start = match response.status() {
            StatusCode::PARTIAL_CONTENT if range.starts_with(&format!("bytes {from}-")) => from,
            StatusCode::PARTIAL_CONTENT => {
                let found = format!("{}: found the range `{range:.60}`, expected bytes from {from} on", remote.url);
                return Err(Error::corrupt(found).into());
            }
            _ => 0,
        };
        // The limit is one byte more than the expected size, which suffices to detect a file that is too long.
        Ok((start, response.into_body().into_with_config().limit(remote.nbytes - start + 1).reader()))
    }

    fn send(
        &self,
        mut request: RequestBuilder<WithoutBody>,
        what: &str,
    ) -> std::result::Result<Response<Body>, Failure> {
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let response = request.call().map_err(|e| failure(e, &self.endpoint))?;
        let status = response.status();
        if status.is_success() || status.is_redirection() {
            return Ok(response);
        }
        Err(self.refusal(status, header(&response, "x-error-code").unwrap_or_default(), what))
    }

    fn refusal(&self, status: StatusCode, code: &str, what: &str) -> Failure {
        let server = &self.endpoint;
        let (said, help) = match (status.as_u16(), code) {
            (403, _) | (401, "GatedRepo") => (
                "access is restricted".to_string(),
                format!(
                    "accept the terms on the model's page at {server}, then set HF_TOKEN to a token of that account"
                ),
            ),
            (401, _) => (
                "does not exist, or is private".into(),
                "check the spelling; for a private repository set HF_TOKEN or run `hf auth login`".into(),
            ),
            (404, "RevisionNotFound") => {
                ("has no such revision".into(), format!("see the branches and tags on {server}"))
            }
            (404, _) => ("does not exist".into(), format!("check the spelling; models are listed at {server}/models")),
            (408 | 429 | 500..=599, _) => {
                let busy = answer(format!("{server}: {what}: the server answers {status}"));
                return Failure { error: busy.help("try again later; what was downloaded is kept"), transient: true };
            }
            _ => (format!("the server answers {status}"), "try again later; what was downloaded is kept".into()),
        };
        answer(format!("{server}: {what}: {said} ({})", status.as_u16())).help(help).into()
    }

    /// Returns the absolute URL of a redirect that stays on this server.
    fn own(&self, location: &str) -> Option<String> {
        if location.starts_with('/') && !location.starts_with("//") {
            return Some(format!("{}{location}", self.endpoint));
        }
        let rest = location.strip_prefix(&self.endpoint)?;
        rest.starts_with('/').then(|| location.to_string())
    }
}

/// Makes an error from a message of the server or the network.
fn answer(words: String) -> Error {
    std::io::Error::other(words).into()
}

/// Returns a header of a response, if it is text.
fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

fn failure(error: ureq::Error, url: &str) -> Failure {
    use ureq::Error::{ConnectionFailed, Io, Protocol, Timeout};
    let transient = matches!(error, Io(_) | Timeout(_) | ConnectionFailed | Protocol(_));
    let error = answer(format!("{url}: {error}"))
        .help("check the network (HF_ENDPOINT, HTTPS_PROXY) and run the same command again; it continues");
    Failure { error, transient }
}

/// Percent-encodes a path, or one segment of it.
fn quoted(text: &str, keep_slash: bool) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~".contains(&b) || (keep_slash && b == b'/');
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}
