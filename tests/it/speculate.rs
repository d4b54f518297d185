//! Tests speculative decoding: every family generates the same tokens with and without it; its options; and its
//! report.

use crate::common::{FIXTURES, fixture, golden, iec, packed, packed_as};
use iec::generate::sampler::{Dry, Mirostat, Order, Sampling, Version, Xtc};
use iec::generate::speculate::Speculator;
use iec::generate::{Completion, Options, Request, generate};
use iec::iebin::IebinReader;
use iec::runtime::{Engine, EngineOptions};
use serde_json::Value;

fn open(name: &str) -> Engine {
    let reader = IebinReader::open(&packed_as(name, &fixture(name), &[])).unwrap();
    Engine::open(&reader, &EngineOptions::default()).unwrap()
}

fn complete(engine: &mut Engine, speculator: &mut Speculator, ids: &[u32], max_new: usize) -> Completion {
    let request = Request { ids: ids.to_vec(), max_new, keep_prefix: true, ..Request::default() };
    let options = Options { tokenizer: None, batch: 1, eos: &[], ..Options::default() };
    generate(engine, None, speculator, vec![request], &options, |_| Ok(())).unwrap().completions.remove(0)
}

#[test]
fn every_family_says_the_same_with_and_without_guesses() {
    for name in FIXTURES {
        let (mut engine, prompt) = (open(name), &golden(name)["prompts"][0]["ids"]);
        let prompt: Vec<u32> = prompt.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let plain = complete(&mut engine, &mut Speculator::off(), &prompt, 48);
        let mut small = Speculator::draft(open(name), &engine).always(5);
        for speculator in [&mut Speculator::ngram(), &mut Speculator::ngram().always(9), &mut small] {
            let guessed = complete(&mut engine, speculator, &prompt, 48);
            assert_eq!(guessed.ids, plain.ids, "{name}");
            assert!(guessed.drafts.total().accepted <= guessed.drafts.total().tokens);
        }
    }
}

/// Returns samplings that together use every stage, with state in random numbers, in the text and in Mirostat's `mu`.
fn samplings() -> Vec<Sampling> {
    let drawn = Sampling { temperature: 0.6, seed: 11, ..Sampling::default() };
    let mirostat = |version| Some(Mirostat { version, tau: 1.5, eta: 0.3 });
    vec![
        Sampling { frequency_penalty: 3.0, presence_penalty: 2.0, repeat_last_n: Some(40), ..Sampling::default() },
        Sampling { dry: Dry { multiplier: 9.0, allowed_length: 1, ..Dry::default() }, ..Sampling::default() },
        Sampling { logit_bias: [(5, 1.0)].into(), banned: [vec![12], vec![6, 13]].into(), ..Sampling::default() },
        Sampling { typical_p: 0.8, top_k: 20, ..drawn.clone() },
        Sampling { xtc: Xtc { probability: 0.4, threshold: 0.05 }, ..drawn.clone() },
        Sampling { mirostat: mirostat(Version::One), repeat_penalty: 1.1, ..drawn.clone() },
        Sampling { mirostat: mirostat(Version::Two), ..drawn.clone() },
        Sampling { min_p: 0.1, top_p: 0.9, order: Order::parse("min_p,temperature,top_p").unwrap(), ..drawn },
    ]
}

#[test]
fn every_sampler_chooses_the_same_with_and_without_draft_tokens() {
    let mut engine = open("stories260k");
    let prompt: Vec<u32> = (0..24).map(|i| 5 + 7 * (i % 4)).collect();
    let said = |engine: &mut Engine, speculator: &mut Speculator, batch: usize, sampling: &Sampling| {
        let request = |n: u32| Request {
            ids: prompt[n as usize..].to_vec(),
            max_new: 40,
            sampling: sampling.clone(),
            ..Request::default()
        };
        let options = Options { batch, ..Options::default() };
        let outcome = generate(engine, None, speculator, (0..3).map(request).collect(), &options, |_| Ok(())).unwrap();
        let accepted: usize = outcome.completions.iter().map(|done| done.drafts.total().accepted).sum();
        let drafted: usize = outcome.completions.iter().map(|done| done.drafts.total().tokens).sum();
        (outcome.completions.into_iter().map(|done| done.ids).collect::<Vec<_>>(), accepted, drafted)
    };
    let (mut kept, mut refused) = (0, 0);
    for sampling in samplings() {
        sampling.validate().unwrap();
        let (plain, ..) = said(&mut engine, &mut Speculator::off(), 1, &sampling);
        let small = Speculator::draft(open("stories260k"), &engine);
        for mut speculator in [Speculator::ngram().always(6), small.always(5)] {
            for batch in [1, 3] {
                let (ids, accepted, drafted) = said(&mut engine, &mut speculator, batch, &sampling);
                assert_eq!(ids, plain, "{sampling:?}, batch {batch}");
                (kept, refused) = (kept + accepted, refused + drafted - accepted);
            }
        }
    }
    assert!(kept > 0 && refused > 0, "{kept} draft tokens were accepted, {refused} refused");
}

#[test]
fn a_text_ends_where_it_would_have_without_guesses() {
    let mut engine = open("stories260k");
    let prompt = [1, 403, 407, 261, 378];
    let plain = complete(&mut engine, &mut Speculator::off(), &prompt, 64).ids;
    for max_new in 1..20 {
        let mut small = Speculator::draft(open("stories260k"), &engine).always(7);
        let done = complete(&mut engine, &mut small, &prompt, max_new);
        assert_eq!(done.ids, plain[..max_new]);
        // The last token is not fed to the model, the same as without draft tokens.
        let prefix = done.prefix.unwrap();
        let request =
            Request { ids: [&prompt[..], &done.ids].concat(), max_new: 5, prefix: Some(prefix), ..Request::default() };
        let options = Options {
            tokenizer: None,
            batch: 1,
            eos: &plain[max_new..=max_new],
            show_special: false,
            ..Options::default()
        };
        let outcome =
            generate(&mut engine, None, &mut Speculator::ngram().always(3), vec![request], &options, |_| Ok(()))
                .unwrap();
        let next = &outcome.completions[0];
        assert_eq!((&next.ids[..], next.reused_tokens), (&plain[max_new..=max_new], prompt.len() + max_new - 1));
    }
    let reader = IebinReader::open(&packed_as("stories260k", &fixture("stories260k"), &[])).unwrap();
    let options = EngineOptions { context: Some(20), ..EngineOptions::default() };
    let mut narrow = Engine::open(&reader, &options).unwrap();
    let full = complete(&mut narrow, &mut Speculator::off(), &prompt, 64);
    let guessed = complete(&mut narrow, &mut Speculator::ngram().always(9), &prompt, 64);
    assert_eq!((guessed.ids.len(), guessed.ids, guessed.finish), (16, full.ids, full.finish));
}

#[test]
fn the_options_say_how_to_guess_and_the_line_what_came_of_it() {
    let (pack, other) = (packed("stories260k"), packed("llama-gqa"));
    let run = |options: &[&str]| {
        let mut command = iec();
        command.args(["run", "--json", "--max-new", "96", "--prompt", "a a a a a a a a a a"]).args(options);
        command.arg("--model-dir").arg(pack.path()).assert()
    };
    let line =
        |options: &[&str]| -> Value { serde_json::from_slice(&run(options).success().get_output().stdout).unwrap() };
    let plain = line(&["--speculate", "off"]);
    assert_eq!(plain["tokens_drafted"], 0);
    let same = ["--draft-model-dir", pack.path().to_str().unwrap()];
    let draft = [&same[..], &["--speculate", "draft"]].concat();
    let auto = [&same[..], &["--speculate", "auto"]].concat();
    for options in [&["--speculate", "ngram"][..], &["--speculate", "auto"], &[], &same, &draft, &auto] {
        let guessed = line(options);
        assert_eq!(guessed["tokens"], plain["tokens"], "{options:?}");
        assert!(guessed["tokens_accepted"].as_u64() <= guessed["tokens_drafted"].as_u64());
    }
    let other = other.path().to_str().unwrap();
    for (options, code, complaint) in [
        (&["--speculate", "draft"][..], 2, "--draft-model-dir"),
        (&["--speculate", "ngram", "--draft-model-dir", other], 2, "needs --speculate auto or draft"),
        (&["--speculate", "mtp"], 2, "without layers of multi-token prediction"),
        (&["--draft-model-dir", other], 2, "other tokens"),
        (&["--draft-model-dir", "/nowhere"], 3, "/nowhere"),
    ] {
        let failed = run(options).code(code);
        let stderr = String::from_utf8(failed.get_output().stderr.clone()).unwrap();
        assert!(stderr.contains(complaint) && stderr.contains("help:"), "{options:?}: {stderr}");
    }
}
