//! `iec verify --hf-dir` and `--trace`: every step of every text.

use super::report::Report;
use super::{Args, tokens};
use crate::model::Model;
use iec::error::{Error, Result};
#[cfg(feature = "reference")]
use iec::interrupt;
use iec::progress;
use iec::runtime::generate::{Options, Request, generate};
use iec::runtime::speculate::Speculator;
use iec::runtime::{Engine, Feed, Want};
use iec::verify::trace::{TracedStep, TracedText};
use iec::verify::{Comparison, RefDtype, Rules, Scores, Step, Trace};
#[cfg(feature = "reference")]
use iec::verify::{Reference, Text};
use std::path::Path;

/// Prompts decoded together.
const BATCH: usize = 8;

/// Compares and fills the report.
pub fn run(args: &Args, model: &mut Model, trace: Option<Trace>, report: &mut Report) -> Result<()> {
    let rules = args.rules(model)?;
    let (percent, exact) = args.agreement(model)?;
    report.about(model, args.hf_dir.as_deref(), args.ref_dtype() == RefDtype::Bf16, rules, percent, exact);
    let traced = trace.is_some();
    let texts = match trace {
        Some(trace) => trace.texts,
        None => generated(args, model)?,
    };
    let checkpoint = args.hf_dir.as_deref().map(tokens::open).transpose()?;
    for text in &texts {
        // A trace says which tokens the prompt has; without one, the checkpoint's tokenizer does.
        let theirs = match &checkpoint {
            Some(tokenizer) => tokenizer.encode(&text.prompt)?,
            None => text.ids.clone(),
        };
        let ours = model.tokenizer()?.encode(&text.prompt)?;
        report.prompt(text.index, &text.prompt, if traced { text.ids.clone() } else { ours.clone() }, theirs.clone());
        if traced && ours != theirs {
            report.prompt(text.index, &text.prompt, ours, theirs);
        }
    }
    if traced && args.hf_dir.is_none() {
        against_trace(model, &texts, &rules, report)?;
    } else if let Some(dir) = &args.hf_dir {
        against_reference(args, dir, model, &texts, &rules, report)?;
    }
    if let Some(tokenizer) = &model.tokenizer {
        report.spell(tokenizer);
    }
    Ok(())
}

/// What the pack makes of the prompts, greedily.
fn generated(args: &Args, model: &mut Model) -> Result<Vec<TracedText>> {
    let prompts = args.prompts()?;
    let mut texts = Vec::with_capacity(prompts.len());
    let mut requests = Vec::with_capacity(prompts.len());
    for (index, prompt) in prompts.into_iter().enumerate() {
        let ids = model.tokenizer()?.encode(&prompt)?;
        requests.push(Request { ids: ids.clone(), max_new: args.max_new, ..Request::default() });
        texts.push(TracedText { index, prompt, ids, steps: Vec::new() });
    }
    let options = Options { tokenizer: None, batch: BATCH, eos: &[], show_special: false, keep_sessions: false };
    generate(&mut model.engine, &mut Speculator::off(), requests, &options, |event| {
        texts[event.request].steps.push(TracedStep { id: event.id, top: Vec::new() });
        Ok(())
    })?;
    Ok(texts)
}

/// The logits of the pack behind the prompt and behind each generated token but the last: `(steps, vocab)`.
fn own_logits(engine: &mut Engine, text: &TracedText, logits: &mut Vec<f32>) -> Result<()> {
    let mut sequence = engine.new_sequence()?;
    let ids = whole(text);
    let (before, asked) = ids.split_at(text.ids.len() - 1);
    if !before.is_empty() {
        engine.forward(&mut [Feed { sequence: &mut sequence, tokens: before }], Want::Last, logits)?;
    }
    engine.forward(&mut [Feed { sequence: &mut sequence, tokens: asked }], Want::All, logits)
}

/// The prompt and what was generated, without the last token, which nothing follows.
fn whole(text: &TracedText) -> Vec<u32> {
    let steps = text.steps.iter().map(|step| step.id);
    let mut ids: Vec<u32> = text.ids.iter().copied().chain(steps).collect();
    if !text.steps.is_empty() {
        ids.pop();
    }
    ids
}

/// The pack against a trace: at each of its steps, what would the pack have said?
fn against_trace(model: &mut Model, texts: &[TracedText], rules: &Rules, report: &mut Report) -> Result<()> {
    let vocab = model.engine.config().vocab;
    let bar = progress::items("texts", texts.len() as u64);
    let mut logits = Vec::new();
    for text in texts.iter().filter(|text| !text.steps.is_empty()) {
        own_logits(&mut model.engine, text, &mut logits)?;
        let mut found = Comparison::default();
        for (step, (row, traced)) in logits.chunks_exact(vocab).zip(&text.steps).enumerate() {
            let ours = Scores::All(row);
            let theirs = (traced.id, Scores::Some(&traced.top));
            found.step(&at(text, step, (ours.best().unwrap_or(0), ours), theirs), rules);
        }
        report.text(text.index, found);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}

/// Builds without candle have no other opinion.
#[cfg(not(feature = "reference"))]
fn against_reference(_: &Args, _: &Path, _: &mut Model, _: &[TracedText], _: &Rules, _: &mut Report) -> Result<()> {
    Err(Error::engine("this build has no reference to run checkpoints with")
        .help("build it with its default features, or compare with a --trace made elsewhere"))
}

/// The pack, or a trace, against the reference.
#[cfg(feature = "reference")]
fn against_reference(
    args: &Args,
    dir: &Path,
    model: &mut Model,
    texts: &[TracedText],
    rules: &Rules,
    report: &mut Report,
) -> Result<()> {
    let reference = Reference::open(dir, args.ref_dtype())?;
    let traced = args.trace.is_some();
    let (vocab, expected) = (model.engine.config().vocab, reference.vocab());
    if vocab != expected {
        let found = format!("a vocabulary of {vocab}, the checkpoint has {expected}");
        return Err(Error::refused(found).at(&model.name).help("the pack was made of another checkpoint"));
    }
    let texts: Vec<&TracedText> = texts.iter().filter(|text| !text.steps.is_empty()).collect();
    let asked: Vec<Text> = texts.iter().map(|text| Text { ids: whole(text), from: text.ids.len() - 1 }).collect();
    let bar = progress::items("layers", reference.layers() as u64);
    let mut own = Vec::new();
    reference.logits(
        &asked,
        || {
            bar.inc(1);
            interrupt::check()
        },
        |index, logits| {
            let text = texts[index];
            own_logits(&mut model.engine, text, &mut own)?;
            let mut found = Comparison::default();
            let rows = logits.chunks_exact(vocab).zip(own.chunks_exact(vocab));
            for (step, ((theirs, ours), said)) in rows.zip(&text.steps).enumerate() {
                let theirs = Scores::All(theirs);
                let best = theirs.best().unwrap_or(0);
                if traced {
                    found.step(&at(text, step, (said.id, Scores::Some(&said.top)), (best, theirs)), rules);
                }
                let own = Scores::All(ours);
                let id = if traced { own.best().unwrap_or(0) } else { said.id };
                found.step(&at(text, step, (id, own), (best, theirs)), rules);
            }
            report.text(text.index, found);
            Ok(())
        },
    )?;
    bar.finish_and_clear();
    Ok(())
}

fn at<'a>(text: &TracedText, step: usize, ours: (u32, Scores<'a>), theirs: (u32, Scores<'a>)) -> Step<'a> {
    Step { prompt: text.index, step, position: text.ids.len() + step, ours, theirs }
}
