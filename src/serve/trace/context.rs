//! Trace context of a request: the header `traceparent` of W3C Trace Context, and the choice of requests to trace.

use crate::error::{Error, Result};
use crate::rng::random;
use axum::http::HeaderMap;

/// Id of a trace.
pub type TraceId = [u8; 16];
/// Id of a span.
pub type SpanId = [u8; 8];

/// Place in a trace at which a request belongs, as its client gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace.
    pub trace: TraceId,
    /// Span of the client.
    pub span: SpanId,
    /// Whether the client sends its own spans of this trace.
    pub is_sampled: bool,
}

impl TraceParent {
    /// Reads the header. One that is repeated or not valid counts as absent, as the standard demands.
    pub fn of(headers: &HeaderMap) -> Option<TraceParent> {
        let mut values = headers.get_all("traceparent").iter();
        match (values.next(), values.next()) {
            (Some(value), None) => TraceParent::parse(value.to_str().ok()?),
            _ => None,
        }
    }

    /// Parses the value of the header: version, trace, span and flags in lowercase hexadecimal digits, with hyphens
    /// between them. Versions after 00 may add fields.
    pub fn parse(text: &str) -> Option<TraceParent> {
        let mut fields = text.splitn(5, '-');
        let [version] = bytes_of(fields.next()?)?;
        let trace: TraceId = bytes_of(fields.next()?)?;
        let span: SpanId = bytes_of(fields.next()?)?;
        let [flags] = bytes_of(fields.next()?)?;
        let is_version = match version {
            0x00 => fields.next().is_none(),
            _ => version != 0xff,
        };
        let is_valid = is_version && trace != [0; 16] && span != [0; 8];
        is_valid.then_some(TraceParent { trace, span, is_sampled: flags & 1 != 0 })
    }
}

/// Parses lowercase hexadecimal digits, two for each byte.
fn bytes_of<const BYTES: usize>(text: &str) -> Option<[u8; BYTES]> {
    let digit = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; BYTES];
    if text.len() != 2 * BYTES {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

/// Returns an id of a span that no other span has.
pub fn new_span_id() -> SpanId {
    random().max(1).to_be_bytes()
}

/// Returns an id of a trace that no other trace has.
pub fn new_trace_id() -> TraceId {
    (u128::from(random()) << 64 | u128::from(random().max(1))).to_be_bytes()
}

/// Choice of requests to trace among those whose client does not choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    /// A trace is sampled if the last 63 bits of its id are below this number.
    below: u64,
}

impl Sampler {
    /// Samples this share of the traces, 0 to 1.
    fn of_ratio(ratio: f64) -> Sampler {
        Sampler { below: (ratio * (1u64 << 63) as f64) as u64 }
    }

    /// Reads the name of a sampler of OpenTelemetry and its argument. Names with and without `parentbased_` have the
    /// same meaning, because the choice of a client always counts.
    ///
    /// # Errors
    /// There is no such sampler, or its argument is not a number from 0 to 1.
    pub fn of(name: Option<&str>, argument: Option<&str>) -> Result<Sampler> {
        let name = name.unwrap_or("always_on");
        match name.strip_prefix("parentbased_").unwrap_or(name) {
            "always_on" => Ok(Sampler::of_ratio(1.0)),
            "always_off" => Ok(Sampler::of_ratio(0.0)),
            "traceidratio" => {
                let text = argument.unwrap_or("1");
                let ratio = text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
                ratio.map(Sampler::of_ratio).ok_or_else(|| {
                    Error::usage(format!("OTEL_TRACES_SAMPLER_ARG: found `{text}`, expected a number from 0 to 1"))
                })
            }
            _ => Err(Error::usage(format!(
                "OTEL_TRACES_SAMPLER: found `{name}`, expected always_on, always_off or traceidratio"
            ))),
        }
    }

    /// Returns true if a trace is sampled that begins here.
    pub fn samples(self, trace: &TraceId) -> bool {
        let end = u128::from_be_bytes(*trace) as u64;
        end >> 1 < self.below
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VALID: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_valid_header_gives_trace_span_and_flag() {
        let parent = TraceParent::parse(VALID).unwrap();
        assert_eq!((parent.trace[0], parent.trace[15], parent.span[0], parent.span[7]), (0x0a, 0x9c, 0xb7, 0x31));
        assert!(parent.is_sampled);
        for (flags, is_sampled) in [("00", false), ("02", false), ("03", true), ("ff", true)] {
            let text = format!("{}{flags}", &VALID[..53]);
            assert_eq!(TraceParent::parse(&text).map(|parent| parent.is_sampled), Some(is_sampled), "{text}");
        }
    }

    #[test]
    fn later_versions_may_add_fields_and_version_00_may_not() {
        let of = |version: &str, end: &str| TraceParent::parse(&format!("{version}{}{end}", &VALID[2..]));
        assert_eq!(of("01", ""), of("00", ""));
        assert_eq!(of("cc", "-what-ever"), of("00", ""));
        assert_eq!((of("00", "-"), of("00", "-00"), of("cc", "x"), of("ff", "")), (None, None, None, None));
    }

    #[test]
    fn wrong_headers_count_as_absent() {
        let zero_trace = format!("00-{:032}-b7ad6b7169203331-01", 0);
        let zero_span = format!("{}{:016}-01", &VALID[..36], 0);
        let upper = VALID.to_uppercase();
        for text in ["", "00", "-", "---", "0-1-2-3", &zero_trace, &zero_span, &upper, &VALID[1..], &VALID[..54]] {
            assert_eq!(TraceParent::parse(text), None, "{text}");
        }
        let mut headers = HeaderMap::new();
        assert_eq!(TraceParent::of(&headers), None);
        headers.append("traceparent", VALID.parse().unwrap());
        assert_eq!(TraceParent::of(&headers), TraceParent::parse(VALID));
        headers.append("traceparent", VALID.parse().unwrap());
        assert_eq!(TraceParent::of(&headers), None, "found twice");
    }

    #[test]
    fn samplers_are_those_of_the_standard_variables() {
        let trace = |end: u64| (u128::from(end) | 1 << 100).to_be_bytes();
        let sampled = |name: Option<&str>, argument: Option<&str>| {
            let sampler = Sampler::of(name, argument).unwrap();
            [0, 1 << 62, u64::MAX / 2, u64::MAX].map(|end| sampler.samples(&trace(end)))
        };
        assert_eq!(sampled(None, None), [true; 4]);
        assert_eq!(sampled(Some("parentbased_always_on"), None), [true; 4]);
        assert_eq!(sampled(Some("always_off"), None), [false; 4]);
        assert_eq!(sampled(Some("parentbased_traceidratio"), None), [true; 4]);
        assert_eq!(sampled(Some("traceidratio"), Some("0.5")), [true, true, true, false]);
        assert_eq!(sampled(Some("traceidratio"), Some("0.3")), [true, true, false, false]);
        for (name, argument) in [("jaeger_remote", ""), ("traceidratio", "2"), ("traceidratio", "NaN")] {
            assert!(Sampler::of(Some(name), Some(argument)).is_err(), "{name} {argument}");
        }
    }

    proptest! {
        #[test]
        fn every_context_survives_as_a_header(trace in any::<u128>(), span in any::<u64>(), flags in any::<u8>()) {
            let parsed = TraceParent::parse(&format!("00-{trace:032x}-{span:016x}-{flags:02x}"));
            let expected = TraceParent {
                trace: trace.to_be_bytes(), span: span.to_be_bytes(), is_sampled: flags % 2 == 1,
            };
            prop_assert_eq!(parsed, Some(expected).filter(|_| trace != 0 && span != 0));
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in "\\PC*|[0-9a-f-]{0,60}") {
            // What is accepted has at least the length of version 00, and no other digits than lowercase ones.
            if TraceParent::parse(&text).is_some() {
                prop_assert!(text.len() >= 55);
                prop_assert!(text[..55].bytes().all(|b| b"0123456789abcdef-".contains(&b)));
            }
        }

        #[test]
        fn one_changed_byte_never_panics_and_only_digits_are_accepted(at in 0usize..55, byte in 0u8..128) {
            let mut text = VALID.as_bytes().to_vec();
            text[at] = byte;
            let text = String::from_utf8(text).unwrap();
            let is_hyphen = [2, 35, 52].contains(&at);
            let fits = if is_hyphen { byte == b'-' } else { b"0123456789abcdef".contains(&byte) };
            // `00-ff` and `ff-` aside, every digit is valid.
            let is_version_ff = text.starts_with("ff");
            prop_assert_eq!(TraceParent::parse(&text).is_some(), fits && !is_version_ff);
        }
    }
}
