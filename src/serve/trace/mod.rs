//! OpenTelemetry traces: a span for each request, with spans for queue, prefill and decode of each of its choices.
//!
//! A span is collected with the log line of its request ([`super::log::Record`]) and put into a bounded queue when the
//! request ends. A thread takes the queue every second and posts it to a collector: OTLP over HTTP in its JSON
//! encoding. Requests never wait for it; without a collector, their spans are dropped. Spans hold names, counts and
//! times, never texts and keys.

mod context;
mod export;
mod otlp;

pub use export::Exporter;

use crate::api::answer::Usage;
use crate::error::{Error, Result};
use crate::host::reply::Done;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Uri};
use context::{Sampler, SpanId, TraceId, TraceParent, new_span_id, new_trace_id};
use export::Queue;
use std::ffi::OsString;
use std::time::{Instant, SystemTime};

/// Path of traces on a collector.
const PATH: &str = "/v1/traces";
/// Largest number of choices of a request that have spans.
const MOST_CHOICES: usize = 64;

/// Lookup of environment variables; returns `None` when a variable is unset or empty.
pub type Variables<'a> = dyn Fn(&str) -> Option<OsString> + 'a;

/// Collector of traces, and the choice of requests to trace.
#[derive(Debug, Clone)]
pub struct TraceOptions {
    /// Address to which traces are posted.
    url: String,
    /// Name of this server.
    service: String,
    /// Headers of the posts. Their values are not shown.
    headers: HeaderMap,
    sampler: Sampler,
}

impl TraceOptions {
    /// Reads the options from the setting `otlp-endpoint` and the environment variables of OpenTelemetry. Returns
    /// `None` if neither names a collector.
    ///
    /// # Errors
    /// A variable has a value that is not valid or not supported.
    pub fn of(endpoint: Option<&str>, variables: &Variables<'_>) -> Result<Option<TraceOptions>> {
        let text = |name: &str| match variables(name).map(OsString::into_string) {
            Some(Ok(text)) => Ok(Some(text)),
            Some(Err(_)) => Err(Error::usage(format!("{name}: found a value that is not UTF-8"))),
            None => Ok(None),
        };
        let url = match (endpoint, text("OTEL_EXPORTER_OTLP_ENDPOINT")?) {
            (Some(endpoint), _) => url_of(endpoint).map_err(|why| Error::usage(format!("otlp-endpoint: {why}")))?,
            (None, Some(endpoint)) => {
                url_of(&endpoint).map_err(|why| Error::usage(format!("OTEL_EXPORTER_OTLP_ENDPOINT: {why}")))?
            }
            (None, None) => return Ok(None),
        };
        // Collectors take both encodings of HTTP at the same address, but gRPC at another.
        if let Some(protocol) = text("OTEL_EXPORTER_OTLP_PROTOCOL")?.filter(|name| !name.starts_with("http/")) {
            let message = format!("OTEL_EXPORTER_OTLP_PROTOCOL: found `{protocol}`, expected http/json");
            return Err(Error::usage(message).help("name the HTTP port of the collector, which is often 4318"));
        }
        let (sampler, argument) = (text("OTEL_TRACES_SAMPLER")?, text("OTEL_TRACES_SAMPLER_ARG")?);
        Ok(Some(TraceOptions {
            url,
            service: text("OTEL_SERVICE_NAME")?.unwrap_or_else(|| "iec".into()),
            headers: headers_of(&text("OTEL_EXPORTER_OTLP_HEADERS")?.unwrap_or_default())?,
            sampler: Sampler::of(sampler.as_deref(), argument.as_deref())?,
        }))
    }
}

/// Returns the address of traces on a collector whose address is `endpoint`.
///
/// # Errors
/// The endpoint is not an address of HTTP, or has parts that belong elsewhere.
pub fn url_of(endpoint: &str) -> std::result::Result<String, String> {
    let wrong = || "expected an address like http://127.0.0.1:4318".to_string();
    let uri: Uri = endpoint.parse().map_err(|_| wrong())?;
    let authority = uri.authority().ok_or_else(wrong)?.as_str();
    if authority.contains('@') {
        // It would be shown where settings are printed.
        return Err("found a user name; set OTEL_EXPORTER_OTLP_HEADERS instead".into());
    }
    match uri.scheme_str() {
        Some("http" | "https") if uri.query().is_none() => Ok(format!("{}{PATH}", endpoint.trim_end_matches('/'))),
        _ => Err(wrong()),
    }
}

/// Parses headers: `name=value,name=value`, with percent-encoded values.
fn headers_of(text: &str) -> Result<HeaderMap> {
    // The error shows no value, because it may be a password.
    let wrong = || Error::usage("OTEL_EXPORTER_OTLP_HEADERS: expected NAME=VALUE,NAME=VALUE");
    let mut headers = HeaderMap::new();
    for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').ok_or_else(wrong)?;
        let name: HeaderName = name.trim().parse().map_err(|_| wrong())?;
        let value = percent_decoded(value.trim()).ok_or_else(wrong)?;
        let mut value = HeaderValue::from_bytes(&value).map_err(|_| wrong())?;
        value.set_sensitive(true);
        headers.append(name, value);
    }
    Ok(headers)
}

fn percent_decoded(text: &str) -> Option<Vec<u8>> {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let digits = part.get(..2).filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend(&part.as_bytes()[2..]);
    }
    Some(bytes)
}

/// Tracer of a server.
pub struct Tracer {
    options: TraceOptions,
    queue: Queue,
}

impl Tracer {
    /// Creates a tracer. [`Exporter::start`] sends what it collects.
    pub fn new(options: TraceOptions) -> Tracer {
        Tracer { options, queue: Queue::default() }
    }

    /// Begins the span of a request; `None` if the request is not traced.
    pub fn begin(&self, headers: &HeaderMap, begin: Instant) -> Option<Span> {
        let parent = TraceParent::of(headers);
        let trace = parent.map_or_else(new_trace_id, |parent| parent.trace);
        let is_sampled = parent.map_or_else(|| self.options.sampler.samples(&trace), |parent| parent.is_sampled);
        let time = SystemTime::now().checked_sub(begin.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH);
        let parent = parent.map(|parent| parent.span);
        is_sampled.then(|| Span { trace, id: new_span_id(), parent, begin, time, choices: Vec::new() })
    }

    /// Queues the span of a request that has ended.
    pub fn end(&self, finished: Finished) {
        self.queue.push(finished);
    }
}

/// Span of a request that runs.
#[derive(Debug, Clone)]
pub struct Span {
    trace: TraceId,
    id: SpanId,
    /// Span of the client.
    parent: Option<SpanId>,
    begin: Instant,
    /// Time of `begin` on the clock of the system.
    time: SystemTime,
    choices: Vec<ChoiceTimes>,
}

/// Begin and end.
type Interval = (Instant, Instant);

/// Times of a choice of a request.
#[derive(Debug, Clone)]
struct ChoiceTimes {
    number: usize,
    /// Time before it first entered the batch.
    queue: Interval,
    /// Time from there to its first token; `None` if it never entered the batch.
    prefill: Option<Interval>,
    /// Time from its first token to its last; `None` without tokens.
    decode: Option<Interval>,
}

impl Span {
    /// Adds the times of a choice that has ended.
    pub fn choice(&mut self, done: &Done) {
        if self.choices.len() >= MOST_CHOICES {
            return;
        }
        let (marks, end) = (&done.completion.marks, Instant::now());
        let first = marks.first().copied();
        self.choices.push(ChoiceTimes {
            number: done.choice,
            queue: (done.arrived, done.admitted.unwrap_or(end)),
            prefill: done.admitted.map(|admitted| (admitted, first.unwrap_or(end))),
            decode: first.zip(marks.last().copied()),
        });
    }
}

/// A request that has ended.
#[derive(Debug, Clone)]
pub struct Finished {
    /// Its span.
    pub span: Span,
    /// Time of its end.
    pub end: Instant,
    /// Name of the request.
    pub id: String,
    /// Name of the key.
    pub key: String,
    /// Path of the endpoint.
    pub endpoint: String,
    /// Name of the model; empty if the request named none that exists.
    pub model: String,
    /// Status of HTTP.
    pub status: u16,
    /// Reason why the answer ended, or code of the error.
    pub finish: String,
    /// Numbers of tokens.
    pub usage: Usage,
}

#[cfg(test)]
mod tests;
