//! Measures generation speed: tokens per second, latencies, reuse of the KV cache, acceptance of draft tokens,
//! memory.

use super::memory::peak_bytes;
use super::usage::Usage;
use super::{Generation, Session};
use crate::generate::Completion;
use crate::generate::speculate::{DraftCount, DraftCounts};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Measurements of one or several generations. The JSON names are those of the JSON line of `iec bench`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Metrics {
    /// Number of generated tokens of all texts.
    #[serde(skip)]
    pub tokens_generated: usize,
    /// Seconds from the first request to the last token, including the time spent in the caller's per-token callback.
    pub wall_time_s: f64,
    /// Seconds of the steps that read prompts, including the first generated token of each text.
    pub prefill_time_s: f64,
    /// Seconds of the steps that generate tokens.
    pub decode_time_s: f64,
    /// Mean seconds from the start of a request in the batch to its first token.
    pub ttft_s: f64,
    /// Generated tokens per second of wall time.
    pub tps_true: f64,
    /// Generated tokens, except the first of each text, per second of decode time.
    pub tps_decode: f64,
    /// Prompt tokens that were computed, per second of prefill time.
    pub tps_prefill: f64,
    /// Median time between consecutive tokens of a text in milliseconds; `None` if no text has two tokens.
    pub latency_p50_ms: Option<f64>,
    /// 95th percentile of the time between consecutive tokens in milliseconds.
    pub latency_p95_ms: Option<f64>,
    /// 99th percentile of the time between consecutive tokens in milliseconds.
    pub latency_p99_ms: Option<f64>,
    /// Peak resident memory of the process in units of 10^6 bytes; `None` if the system does not report it.
    pub rss_peak_mb: Option<f64>,
    /// Processor time, page faults and context switches of the process during `wall_time_s`; absent if the system does
    /// not report them.
    #[serde(flatten)]
    pub usage: Option<Usage>,
    /// Prompt tokens whose keys and values were already in the KV cache.
    pub kv_hits: usize,
    /// Prompt tokens that were computed.
    pub kv_misses: usize,
    /// Draft tokens that were verified.
    pub tokens_drafted: usize,
    /// Draft tokens that were accepted.
    pub tokens_accepted: usize,
    /// The same numbers of each drafter that drafted, by its name in `--speculate`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub drafters: BTreeMap<&'static str, DraftCount>,
    /// Bytes of weights that one token needs.
    #[serde(skip)]
    pub weights_bytes_per_token: u64,
    /// `weights_bytes_per_token` times `tps_decode`, in 10^9 bytes per second.
    #[serde(skip)]
    pub effective_bandwidth_gbps: f64,
}

impl Metrics {
    /// Computes the metrics of the generations of a session and samples the peak memory.
    pub fn new(session: &Session, generations: &[Generation]) -> Metrics {
        let all = generations.iter().flat_map(|one| &one.outcome.completions);
        let all: Vec<&Completion> = all.filter(|done| done.error.is_none()).collect();
        let sum = |time: fn(&Generation) -> Duration| generations.iter().map(time).sum::<Duration>().as_secs_f64();
        let count = |number: fn(&Completion) -> usize| all.iter().map(|done| number(done)).sum::<usize>();
        let mut drafts = DraftCounts::default();
        all.iter().for_each(|done| drafts.add(&done.drafts));
        let tokens_generated = count(|done| done.ids.len());
        let kv_misses = count(|done| done.prompt_tokens - done.reused_tokens);
        let (wall_time_s, prefill_time_s) = (sum(|one| one.wall), sum(|one| one.outcome.prefill_time));
        let decode_time_s = sum(|one| one.outcome.decode_time);
        let tps_decode = rate(count(|done| done.ids.len().saturating_sub(1)), decode_time_s);
        let latencies = Latencies::new(all.iter().flat_map(|done| latencies_ms(done)).collect());
        let weights_bytes_per_token = session.engine.weight_bytes_per_token();
        Metrics {
            tokens_generated,
            wall_time_s,
            prefill_time_s,
            decode_time_s,
            ttft_s: all.iter().map(|done| done.prefill_time().as_secs_f64()).sum::<f64>() / all.len().max(1) as f64,
            tps_true: rate(tokens_generated, wall_time_s),
            tps_decode,
            tps_prefill: rate(kv_misses, prefill_time_s),
            latency_p50_ms: latencies.percentile(50),
            latency_p95_ms: latencies.percentile(95),
            latency_p99_ms: latencies.percentile(99),
            rss_peak_mb: peak_bytes().map(|bytes| bytes as f64 / 1e6),
            usage: generations.iter().filter_map(|one| one.usage).reduce(|sum, usage| sum.plus(&usage)),
            kv_hits: count(|done| done.reused_tokens),
            kv_misses,
            drafters: drafts.each().filter(|(_, n)| n.drafts > 0).map(|(drafter, n)| (drafter.name(), n)).collect(),
            tokens_drafted: drafts.total().tokens,
            tokens_accepted: drafts.total().accepted,
            weights_bytes_per_token,
            effective_bandwidth_gbps: weights_bytes_per_token as f64 * tps_decode / 1e9,
        }
    }
}

/// Returns tokens per second; 0 when no time was spent.
pub fn rate(tokens: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}

/// Returns the times between consecutive tokens of a text in milliseconds, in order.
pub fn latencies_ms(done: &Completion) -> impl Iterator<Item = f64> {
    done.marks.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3)
}

/// Latencies in milliseconds, ascending.
#[derive(Debug, Clone)]
pub struct Latencies(Vec<f64>);

impl Latencies {
    /// Sorts the latencies.
    pub fn new(mut milliseconds: Vec<f64>) -> Latencies {
        milliseconds.sort_by(f64::total_cmp);
        Latencies(milliseconds)
    }

    /// Returns the smallest latency that at least `percent` of all latencies do not exceed (nearest rank); `None`
    /// without latencies.
    pub fn percentile(&self, percent: usize) -> Option<f64> {
        let rank = (self.0.len() * percent).div_ceil(100).max(1);
        self.0.get(rank - 1).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_latencies_that_occurred() {
        let latencies = Latencies((1..=200).map(f64::from).collect());
        let found = [50, 95, 99, 100].map(|percent| latencies.percentile(percent).unwrap());
        assert_eq!(found, [100.0, 190.0, 198.0, 200.0]);
        assert_eq!(Latencies(vec![7.0]).percentile(50), Some(7.0));
        assert_eq!(Latencies(vec![]).percentile(50), None);
    }
}
