//! Tests of the sampler as a whole.

use super::*;
use proptest::prelude::*;

const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, 3.0, -4.0];

fn drawn(sampling: Sampling, logits: &[f32], draws: usize) -> Vec<usize> {
    let mut sampler = Sampler::new(sampling, 0);
    let mut counts = vec![0; logits.len()];
    for _ in 0..draws {
        counts[sampler.sample(logits).unwrap() as usize] += 1;
    }
    counts
}

fn warm() -> Sampling {
    Sampling { temperature: 1.0, ..Sampling::default() }
}

#[test]
fn greedy_takes_the_largest_and_of_equals_the_lowest_id() {
    assert_eq!(Sampler::new(Sampling::default(), 0).sample(&LOGITS).unwrap(), 1);
    assert_eq!(drawn(Sampling { top_k: 1, ..warm() }, &LOGITS, 50)[1], 50);
}

#[test]
fn draws_follow_the_softmax_of_the_scaled_logits() {
    let temperature = 1.7;
    let draws = 40_000;
    let counts = drawn(Sampling { temperature, ..warm() }, &LOGITS, draws);
    let weights: Vec<f64> = LOGITS.iter().map(|l| (f64::from(*l) / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    for (count, weight) in counts.iter().zip(&weights) {
        let p = weight / total;
        let deviation = (draws as f64 * p * (1.0 - p)).sqrt();
        assert!((*count as f64 - draws as f64 * p).abs() < 5.0 * deviation, "{counts:?}");
    }
}

#[test]
fn filters_keep_what_transformers_keeps() {
    // Probabilities 0.5, 0.25, 0.125, 0.125.
    let logits = [8f32, 4.0, 2.0, 2.0].map(f32::ln);
    struct Case {
        sampling: Sampling,
        kept: &'static [usize],
    }
    let cases = [
        Case { sampling: Sampling { top_k: 2, ..warm() }, kept: &[0, 1] },
        Case { sampling: Sampling { top_k: 3, ..warm() }, kept: &[0, 1, 2] },
        Case { sampling: Sampling { top_p: 0.7, ..warm() }, kept: &[0, 1] },
        Case { sampling: Sampling { top_p: 0.8, ..warm() }, kept: &[0, 1, 2] },
        Case { sampling: Sampling { top_p: 0.1, ..warm() }, kept: &[0] },
        Case { sampling: Sampling { min_p: 0.4, ..warm() }, kept: &[0, 1] },
        Case { sampling: Sampling { min_p: 1.0, ..warm() }, kept: &[0] },
        // After top-k the rest is 2/3 and 1/3: top-p 0.6 keeps one.
        Case { sampling: Sampling { top_k: 2, top_p: 0.6, ..warm() }, kept: &[0] },
    ];
    for case in cases {
        let counts = drawn(case.sampling.clone(), &logits, 3000);
        let kept: Vec<usize> = (0..4).filter(|i| counts[*i] > 0).collect();
        assert_eq!(kept, case.kept, "{:?}", case.sampling);
    }
}

#[test]
fn the_repetition_penalty_lowers_what_was_seen_also_when_greedy() {
    let penalised = Sampling { repeat_penalty: 2.0, ..Sampling::default() };
    let mut sampler = Sampler::new(penalised.clone(), 0);
    sampler.observe(&[1, 3, 999_999]);
    assert_eq!(sampler.sample(&LOGITS).unwrap(), 2);
    let mut sampler = Sampler::new(penalised, 0);
    sampler.observe(&[1]);
    // Negative logits are multiplied: -1 becomes -2.
    assert_eq!(sampler.sample(&[-1.5, -1.0]).unwrap(), 0);
}

#[test]
fn the_same_seed_draws_the_same_and_another_index_differs() {
    let draw = |seed, index| {
        let mut sampler = Sampler::new(Sampling { seed, ..warm() }, index);
        (0..64).map(|_| sampler.sample(&LOGITS).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(draw(5, 1), draw(5, 1));
    assert_ne!(draw(5, 1), draw(5, 2));
}

#[test]
fn logprobs_are_the_log_softmax_most_likely_first() {
    let (chosen, top) = candidates(&LOGITS, 0, 3);
    let total: f64 = LOGITS.iter().map(|l| f64::from(*l).exp()).sum();
    assert!((chosen.logprob - (1.0 - total.ln())).abs() < 1e-12);
    assert_eq!(top.iter().map(|c| c.id).collect::<Vec<_>>(), [1, 3, 2]);
    assert_eq!(candidates(&LOGITS, 0, 99).1.len(), 5);
    assert!(candidates(&LOGITS, 0, 0).1.is_empty());
}

#[test]
fn logits_that_are_no_numbers_are_an_error() {
    for bad in [f32::NAN, f32::INFINITY] {
        assert!(Sampler::new(warm(), 0).sample(&[0.0, bad]).unwrap_err().to_string().contains("token 1"));
    }
}

#[test]
fn parameters_out_of_range_are_named() {
    let cases = [
        (Sampling { temperature: -1.0, ..warm() }, "temperature"),
        (Sampling { temperature: f64::NAN, ..warm() }, "temperature"),
        (Sampling { top_p: 0.0, ..warm() }, "top-p"),
        (Sampling { min_p: 1.5, ..warm() }, "min-p"),
        (Sampling { repeat_penalty: 0.0, ..warm() }, "repeat-penalty"),
    ];
    for (sampling, name) in cases {
        assert!(sampling.validate().unwrap_err().to_string().contains(name));
    }
}

proptest! {
    #[test]
    fn top_k_of_one_is_greedy(logits in prop::collection::vec(-30f32..30.0, 1..50), seed: u64, temperature in 0.01f64..5.0) {
        let sampling = Sampling { top_k: 1, temperature, seed, ..Sampling::default() };
        prop_assert_eq!(Sampler::new(sampling, 0).sample(&logits).unwrap(), argmax(&logits));
    }

    #[test]
    fn a_drawn_token_always_has_probability(
        logits in prop::collection::vec(prop_oneof![-500f32..500.0, Just(f32::NEG_INFINITY)], 1..40),
        seed: u64, top_p in 0.05f64..=1.0, min_p in 0f64..=1.0, top_k in 0usize..50,
    ) {
        prop_assume!(logits.iter().any(|l| l.is_finite()));
        let sampling = Sampling { top_k, top_p, min_p, seed, ..warm() };
        let id = Sampler::new(sampling, 0).sample(&logits).unwrap();
        prop_assert!(logits[id as usize].is_finite());
    }
}

/// Returns a sampling with every stage in effect.
fn everything() -> Sampling {
    Sampling {
        temperature: 0.9,
        top_k: 30,
        top_p: 0.95,
        min_p: 0.01,
        typical_p: 0.97,
        xtc: Xtc { probability: 0.5, threshold: 0.1 },
        repeat_penalty: 1.2,
        presence_penalty: 0.1,
        frequency_penalty: 0.1,
        repeat_last_n: Some(8),
        dry: Dry { multiplier: 0.8, ..Dry::default() },
        logit_bias: [(1, 2.0), (2, f64::NEG_INFINITY)].into(),
        banned: [vec![3], vec![4, 5]].into(),
        ..Sampling::default()
    }
}

#[test]
fn a_stage_whose_parameter_cannot_act_is_an_error() {
    let order = Order::parse("top_k,temperature").unwrap();
    let mirostat = Some(Mirostat { version: Version::Two, tau: 5.0, eta: 0.1 });
    let cases = [
        (Sampling { order: order.clone(), top_p: 0.9, ..warm() }, "top_p"),
        (Sampling { order: order.clone(), repeat_penalty: 1.1, ..warm() }, "penalties"),
        (Sampling { order: Order::parse("top_k").unwrap(), temperature: 0.5, ..warm() }, "temperature"),
        (Sampling { mirostat, top_k: 40, ..warm() }, "--mirostat"),
        (Sampling { mirostat, xtc: Xtc { probability: 0.5, threshold: 0.1 }, ..warm() }, "--mirostat"),
    ];
    for (sampling, said) in cases {
        assert!(sampling.validate().unwrap_err().to_string().contains(said), "{sampling:?}");
    }
    assert!(Sampling { order, top_k: 5, temperature: 0.5, ..Sampling::default() }.validate().is_ok());
    assert!(Sampling { mirostat, repeat_penalty: 1.1, ..warm() }.validate().is_ok());
    assert!(everything().validate().is_ok());
}

#[test]
fn parameters_of_the_new_stages_out_of_range_are_named() {
    let dry = |multiplier, base| Dry { multiplier, base, ..Dry::default() };
    let xtc = |probability, threshold| Xtc { probability, threshold };
    let mirostat = |tau, eta| Some(Mirostat { version: Version::One, tau, eta });
    let cases = [
        (Sampling { typical_p: 0.0, ..warm() }, "typical"),
        (Sampling { presence_penalty: f64::INFINITY, ..warm() }, "presence-penalty"),
        (Sampling { frequency_penalty: f64::NAN, ..warm() }, "frequency-penalty"),
        (Sampling { dry: dry(-1.0, 2.0), ..warm() }, "dry-multiplier"),
        (Sampling { dry: dry(1.0, 0.9), ..warm() }, "dry-base"),
        (Sampling { xtc: xtc(1.1, 0.1), ..warm() }, "xtc-probability"),
        (Sampling { xtc: xtc(0.1, -0.1), ..warm() }, "xtc-threshold"),
        (Sampling { mirostat: mirostat(f64::NAN, 0.1), ..warm() }, "mirostat-tau"),
        (Sampling { mirostat: mirostat(5.0, -0.1), ..warm() }, "mirostat-eta"),
        (Sampling { logit_bias: [(7, f64::INFINITY)].into(), ..warm() }, "token 7"),
        (Sampling { banned: [vec![]].into(), ..warm() }, "empty"),
    ];
    for (sampling, name) in cases {
        let error = sampling.validate().unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn biases_and_bans_decide_also_when_greedy() {
    let greedy = |sampling: Sampling, text: &[u32]| {
        let mut sampler = Sampler::new(sampling, 0);
        sampler.observe(text);
        sampler.sample(&LOGITS)
    };
    let bias = |list: &[(u32, f64)]| Sampling { logit_bias: list.into(), ..Sampling::default() };
    assert_eq!(greedy(bias(&[(4, 7.5)]), &[]).unwrap(), 4);
    assert_eq!(greedy(bias(&[(1, f64::NEG_INFINITY), (3, -2.5)]), &[]).unwrap(), 2);
    let banned = Sampling { banned: [vec![1], vec![0, 3]].into(), ..Sampling::default() };
    assert_eq!(greedy(banned.clone(), &[0]).unwrap(), 2);
    assert_eq!(greedy(banned, &[0, 2]).unwrap(), 3);
    let all = Sampling { banned: (0..5).map(|id| vec![id]).collect(), ..Sampling::default() };
    assert!(greedy(all, &[]).unwrap_err().to_string().contains("no token"));
    assert!(Sampler::new(Sampling::default(), 0).sample(&[f32::NEG_INFINITY; 3]).is_err());
}

#[test]
fn a_penalty_ends_with_its_window() {
    let sampling = Sampling { presence_penalty: 9.0, repeat_last_n: Some(2), ..Sampling::default() };
    let mut sampler = Sampler::new(sampling, 0);
    let chosen: Vec<u32> = (0..6)
        .map(|_| {
            let id = sampler.sample(&LOGITS).unwrap();
            sampler.observe(&[id]);
            id
        })
        .collect();
    assert_eq!(chosen, [1, 3, 2, 1, 3, 2]);
}

#[test]
fn penalties_count_the_prompt_or_not() {
    struct Case {
        sampling: Sampling,
        chosen: [u32; 3],
    }
    // The prompt has the most likely token, 1; token 3 is the next one.
    let presence = Sampling { presence_penalty: 9.0, ..Sampling::default() };
    let frequency = Sampling { frequency_penalty: 9.0, ..Sampling::default() };
    let of_answer = |sampling: &Sampling| Sampling { counted: Counted::Answer, ..sampling.clone() };
    let repetition = Sampling { repeat_penalty: 99.0, ..Sampling::default() };
    let cases = [
        Case { sampling: of_answer(&presence), chosen: [1, 3, 2] },
        Case { sampling: of_answer(&frequency), chosen: [1, 3, 2] },
        Case { sampling: presence, chosen: [3, 2, 0] },
        Case { sampling: frequency, chosen: [3, 2, 0] },
        Case { sampling: of_answer(&repetition), chosen: [3, 2, 0] },
        Case { sampling: repetition, chosen: [3, 2, 0] },
    ];
    for Case { sampling, chosen } in cases {
        let mut sampler = Sampler::new(sampling.clone(), 0);
        sampler.observe_prompt(&[4, 1]);
        let found = [(); 3].map(|()| {
            let id = sampler.sample(&LOGITS).unwrap();
            sampler.observe(&[id]);
            id
        });
        assert_eq!(found, chosen, "{sampling:?}");
    }
}

#[test]
fn bans_of_a_model_stay_beside_those_of_a_request() {
    let of_model =
        Sampling { logit_bias: [(1, f64::NEG_INFINITY)].into(), banned: [vec![3]].into(), ..Sampling::default() };
    let mut sampling = Sampling { logit_bias: [(0, 2.0)].into(), banned: [vec![4]].into(), ..Sampling::default() };
    for _ in 0..2 {
        sampling.add_bans(&of_model);
        assert_eq!(sampling.logit_bias.to_vec(), [(0, 2.0), (1, f64::NEG_INFINITY)]);
        assert_eq!(sampling.banned.to_vec(), [vec![4], vec![3]]);
    }
    assert_eq!(Sampler::new(sampling, 0).sample(&LOGITS).unwrap(), 0);
}

#[test]
fn a_stage_that_is_turned_off_has_no_effect() {
    let all = Sampling {
        temperature: 0.5,
        top_k: 2,
        top_p: 0.5,
        min_p: 0.1,
        typical_p: 0.5,
        xtc: Xtc { probability: 0.5, threshold: 0.1 },
        presence_penalty: 1.0,
        dry: Dry { multiplier: 1.0, ..Dry::default() },
        order: Order::parse("penalties").unwrap(),
        ..Sampling::default()
    };
    for stage in Order::default().stages().iter().filter(|stage| **stage != Stage::Penalties) {
        assert!(all.excluded().contains(stage), "{stage:?}");
        let mut changed = all.clone();
        changed.turn_off(*stage);
        assert!(!changed.excluded().contains(stage), "{stage:?}");
    }
    let mut penalized = Sampling { order: Order::parse("dry").unwrap(), presence_penalty: 1.0, ..Sampling::default() };
    assert_eq!(penalized.excluded(), [Stage::Penalties]);
    penalized.turn_off(Stage::Penalties);
    assert!(penalized.validate().is_ok());
}

#[test]
fn the_order_of_stages_matters() {
    // Probabilities 0.5, 0.3, 0.2: a high temperature before min-p makes all similar.
    let logits = [0.5f32, 0.3, 0.2].map(f32::ln);
    let of = |list: &str| Sampling {
        temperature: 4.0,
        min_p: 0.7,
        order: Order::parse(list).unwrap(),
        ..Sampling::default()
    };
    assert!(drawn(of("temperature,min_p"), &logits, 300).iter().all(|count| *count > 0));
    assert_eq!(drawn(of("min_p,temperature"), &logits, 300), [300, 0, 0]);
}

#[test]
fn the_largest_logits_suffice_only_where_top_k_comes_first() {
    let suffices = |sampling: Sampling| Sampler::new(sampling, 0).suffices();
    let cold = Sampling::default;
    assert_eq!(suffices(cold()), Some(1));
    assert_eq!(suffices(Sampling { logit_bias: [(1, 0.5)].into(), ..cold() }), None);
    assert_eq!(suffices(Sampling { top_k: 9, top_p: 0.5, ..warm() }), Some(9));
    assert_eq!(suffices(Sampling { top_k: 9, banned: [vec![1]].into(), ..warm() }), None);
    let order = Order::parse("top_p,top_k").unwrap();
    assert_eq!(suffices(Sampling { top_k: 9, top_p: 0.5, order: order.clone(), ..warm() }), None);
    assert_eq!(suffices(Sampling { top_k: 9, order, ..warm() }), Some(9));
    let mirostat = Some(Mirostat { version: Version::Two, tau: 5.0, eta: 0.1 });
    assert_eq!(suffices(Sampling { mirostat, ..warm() }), None);
}

proptest! {
    #[test]
    fn the_largest_logits_give_the_same_tokens_as_all(
        logits in prop::collection::vec(-9f32..9.0, 1..60), top_k in 1usize..70, seed: u64, draws in 1usize..5,
    ) {
        let sampling =
            Sampling { top_k, seed, dry: Dry::default(), repeat_penalty: 1.0, presence_penalty: 0.0, frequency_penalty: 0.0,
                logit_bias: [].into(), banned: [].into(), ..everything() };
        let mut best: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
        best.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let (mut all, mut few) = (Sampler::new(sampling.clone(), 0), Sampler::new(sampling, 0));
        prop_assert_eq!(few.suffices(), Some(top_k));
        best.truncate(top_k);
        for _ in 0..draws {
            prop_assert_eq!(all.sample(&logits).unwrap(), few.sample_best(&best).unwrap());
        }
    }

    #[test]
    fn a_chosen_token_is_possible_in_any_order_of_stages(
        logits in prop::collection::vec(prop_oneof![-500f32..500.0, Just(f32::NEG_INFINITY), Just(f32::MAX)], 6..40),
        text in prop::collection::vec(0u32..50, 0..30), order in Just(vec![0, 1, 2, 3, 4, 5, 6, 7]).prop_shuffle(),
        seed: u64, temperature in prop_oneof![Just(0.0), Just(1e-300), 0.1f64..9.0], mirostat in 0u8..3,
    ) {
        let names = ["penalties", "dry", "temperature", "top_k", "top_p", "min_p", "typ_p", "xtc"];
        let order = Order::parse(&order.iter().map(|i| names[*i]).collect::<Vec<_>>().join(",")).unwrap();
        let plain = Sampling { top_k: 0, top_p: 1.0, min_p: 0.0, typical_p: 1.0, xtc: Xtc::default(), ..everything() };
        let sampling = match mirostat {
            0 => everything(),
            1 => Sampling { mirostat: Some(Mirostat { version: Version::One, tau: 4.0, eta: 0.2 }), ..plain },
            _ => Sampling { mirostat: Some(Mirostat { version: Version::Two, tau: 4.0, eta: 0.2 }), ..plain },
        };
        let mut sampler = Sampler::new(Sampling { order, seed, temperature, ..sampling }, 0);
        sampler.observe(&text);
        for _ in 0..4 {
            let last = sampler.text.last().copied();
            let banned = |id: u32| id == 2 || id == 3 || (id == 5 && last == Some(4));
            match sampler.sample(&logits) {
                Ok(id) => {
                    prop_assert!(logits[id as usize].is_finite() && !banned(id));
                    sampler.observe(&[id]);
                }
                Err(_) => prop_assert!((0u32..).zip(&logits).all(|(id, l)| !l.is_finite() || banned(id))),
            }
            prop_assert!(sampler.mu.is_finite());
            prop_assert!(sampler.pool.entries().iter().all(|entry| entry.p.is_finite() && entry.logit.is_finite()));
        }
    }

    #[test]
    fn any_list_of_samplers_is_read_or_refused(list in ".{0,40}") {
        let _ = Order::parse(&list);
    }
}
