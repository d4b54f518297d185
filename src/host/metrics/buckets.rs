//! Upper bounds of the histograms' buckets. They are those of vLLM, so that dashboards, autoscalers and alerts made for
//! it show the same quantiles; finer ones are added where a CPU with a small model would fall below the first bound.

/// Time to first token: 1 ms to 2560 s.
pub(super) const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];

/// Time between tokens: vLLM's 10 ms to 80 s, and 1, 2.5 and 5 ms.
pub(super) const BETWEEN_TOKENS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
];

/// Latency of a request and of its phases: 0.3 s to 7680 s.
pub(super) const LATENCY: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];

/// Tokens of a step: powers of two up to 16384.
pub(super) const STEP_TOKENS: &[f64] =
    &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

/// Time of a step and of its stages: 100 us to 30 s. The default target of a step, 200 ms, is a bound.
pub(super) const STEP: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1.0, 2.5, 5.0,
    10.0, 30.0,
];

/// Tokens of a request, 1, 2, 5, 10 and so on; [`tokens_up_to`] cuts them at the model's context.
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6,
    1e7,
];

/// Returns the bounds for the tokens of a request of a model with this context, at least one.
pub(super) fn tokens_up_to(max_model_len: usize) -> &'static [f64] {
    let bounds = TOKENS.partition_point(|bound| *bound <= max_model_len as f64);
    &TOKENS[..bounds.max(1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_rise_and_have_the_ends_that_the_comments_name() {
        let lists = [FIRST_TOKEN, BETWEEN_TOKENS, LATENCY, STEP_TOKENS, STEP, TOKENS];
        assert!(lists.iter().all(|list| list.windows(2).all(|pair| pair[0] < pair[1])));
        let ends = lists.map(|list| (list[0], list[list.len() - 1]));
        let expected = [(0.001, 2560.0), (0.001, 80.0), (0.3, 7680.0), (1.0, 16384.0), (0.0001, 30.0), (1.0, 1e7)];
        assert_eq!(ends, expected);
        assert_eq!(tokens_up_to(100), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!((tokens_up_to(1999).last(), tokens_up_to(0)), (Some(&1000.0), &[1.0][..]));
    }
}
