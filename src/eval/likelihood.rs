//! Log-likelihood of continuations of a context, as used by multiple-choice tasks and lm-evaluation-harness.

use crate::error::{Error, Result};
use crate::generate::score::log_sum_exp;
use crate::runtime::{Engine, Feed, Sequence, Want};
use serde::Serialize;

/// Largest number of positions whose logits, `(positions, vocab)`, are held at once.
const ROWS: usize = 256;

/// Context and a possible continuation.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Context tokens, at least one.
    pub context: Vec<u32>,
    /// Tokens to be scored, at least one.
    pub continuation: Vec<u32>,
}

/// Likelihood of a continuation.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Likelihood {
    /// Natural logarithm of the probability of all tokens of the continuation.
    pub logprob: f64,
    /// True if greedy decoding would generate the continuation.
    pub is_greedy: bool,
    /// Number of tokens of the continuation.
    pub tokens: usize,
    /// True if the context was too long and its beginning was dropped.
    pub truncated: bool,
}

impl Likelihood {
    /// Returns the score of an empty continuation.
    pub(super) fn none() -> Likelihood {
        Likelihood { is_greedy: true, ..Likelihood::default() }
    }

    /// Adds the token `next` of the continuation; `row` holds the logits at the position before it.
    fn add(&mut self, row: &[f32], next: u32) {
        let logit = row[next as usize];
        self.logprob += f64::from(logit) - log_sum_exp(row);
        self.is_greedy &= row.iter().take(next as usize).all(|v| *v < logit) && row.iter().all(|v| *v <= logit);
        self.tokens += 1;
    }

    /// Returns the likelihood of this text followed by the next one.
    pub fn and(self, next: Likelihood) -> Likelihood {
        Likelihood {
            logprob: self.logprob + next.logprob,
            is_greedy: self.is_greedy && next.is_greedy,
            tokens: self.tokens + next.tokens,
            truncated: self.truncated || next.truncated,
        }
    }
}

/// Divides a text of any length into requests that score each of its tokens once and fit a context of `len` tokens. The
/// context of the first request is `first`; that of each later one is as many preceding tokens as fit.
pub fn rolling(first: &[u32], text: &[u32], len: usize) -> Vec<Request> {
    let mut requests = Vec::new();
    let mut done = 0;
    while done < text.len() {
        // All tokens but the last are fed, and they fit the context.
        let room = if done == 0 { (len + 1).saturating_sub(first.len()).max(1) } else { len };
        let end = (done + room).min(text.len());
        let context = match done {
            0 => first.to_vec(),
            _ => text[(end - 1).saturating_sub(len)..done].to_vec(),
        };
        requests.push(Request { context, continuation: text[done..end].to_vec() });
        done = end;
    }
    requests
}

/// Scores all requests and calls `each` with the results in order. Consecutive requests with the same context process
/// it once and are batched.
///
/// # Errors
/// A request is empty or longer than the context allows, a token is not in the vocabulary, or `each` fails.
pub fn likelihoods(
    engine: &mut Engine,
    requests: &[Request],
    mut each: impl FnMut(Likelihood) -> Result<()>,
) -> Result<()> {
    let mut rest = requests;
    while let Some(first) = rest.first() {
        let same = rest.iter().take_while(|request| request.context == first.context).count();
        let (group, others) = rest.split_at(same);
        rest = others;
        group.iter().try_for_each(|request| check(request, engine))?;
        // The logits for a continuation begin at the last token of the context. A context that is too long loses its
        // beginning.
        let longest = group.iter().map(|request| request.continuation.len()).max().unwrap_or(0);
        let kept = first.context.len().min((engine.context() + 1).saturating_sub(longest));
        let context = &first.context[first.context.len() - kept..];
        let truncated = kept < first.context.len();
        let (last, before) = context.split_last().ok_or_else(|| Error::usage("found a context without tokens"))?;
        let mut sequence = engine.new_sequence()?;
        let mut logits = Vec::new();
        if !before.is_empty() {
            engine
                .forward(&mut [Feed { sequence: &mut sequence, tokens: before, want: Want::Nothing }], &mut logits)?;
        }
        let mut group = group;
        while !group.is_empty() {
            let (batch, later) = group.split_at(fitting(group));
            group = later;
            for found in together(engine, &sequence, *last, batch)? {
                each(Likelihood { truncated, ..found })?;
            }
        }
    }
    Ok(())
}

/// Returns the number of requests at the beginning of `group` that are scored in one call: as many as fit into
/// [`ROWS`], at least one.
fn fitting(group: &[Request]) -> usize {
    let mut rows = 0;
    let fits = |request: &&Request| {
        rows += request.continuation.len();
        rows <= ROWS
    };
    group.iter().take_while(fits).count().max(1)
}

/// Scores continuations of one context in one batch; the sequence `read` has read the context except its last token,
/// `last`.
fn together(engine: &mut Engine, read: &Sequence, last: u32, batch: &[Request]) -> Result<Vec<Likelihood>> {
    let vocab = engine.config().vocab;
    let inputs: Vec<Vec<u32>> = (batch.iter())
        .map(|request| [&[last], &request.continuation[..request.continuation.len() - 1]].concat())
        .collect();
    let mut sequences: Vec<Sequence> = batch.iter().map(|_| read.clone()).collect();
    let mut found: Vec<Likelihood> = batch.iter().map(|_| Likelihood::none()).collect();
    let longest = inputs.iter().map(Vec::len).max().unwrap_or(0);
    // A single continuation may be longer than the limit of rows.
    for begin in (0..longest).step_by(ROWS) {
        let mut feeds = Vec::with_capacity(batch.len());
        for (sequence, input) in sequences.iter_mut().zip(&inputs) {
            feeds.push(Feed {
                sequence,
                tokens: &input[begin.min(input.len())..(begin + ROWS).min(input.len())],
                want: Want::All,
            });
        }
        let mut logits = Vec::new();
        engine.forward(&mut feeds, &mut logits)?;
        let mut rows = logits.chunks_exact(vocab);
        for (request, found) in batch.iter().zip(&mut found) {
            let targets = request.continuation.iter().skip(begin).take(ROWS);
            targets.zip(rows.by_ref()).for_each(|(next, row)| found.add(row, *next));
        }
    }
    Ok(found)
}

fn check(request: &Request, engine: &Engine) -> Result<()> {
    if request.context.is_empty() || request.continuation.is_empty() {
        return Err(Error::usage("found a context or a continuation without tokens, expected at least one in each"));
    }
    if request.continuation.len() > engine.context() {
        let found =
            format!("found {} tokens to score, expected at most {}", request.continuation.len(), engine.context());
        return Err(Error::usage(found).help(
            "use a longer context (--ctx), or leave the request's `context` empty to score it in several windows",
        ));
    }
    let vocab = engine.config().vocab;
    match request.context.iter().chain(&request.continuation).find(|id| **id as usize >= vocab) {
        Some(id) => Err(Error::usage(format!("token {id} is outside the model's vocabulary of {vocab}"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_of_a_long_text_is_scored_once_with_as_much_before_it_as_fits() {
        let text: Vec<u32> = (10..20).collect();
        let requests = rolling(&[1], &text, 4);
        assert_eq!(requests[0], Request { context: vec![1], continuation: vec![10, 11, 12, 13] });
        assert_eq!(requests[1], Request { context: vec![13], continuation: vec![14, 15, 16, 17] });
        assert_eq!(requests[2], Request { context: vec![15, 16, 17], continuation: vec![18, 19] });
        let scored: Vec<u32> = requests.iter().flat_map(|r| r.continuation.clone()).collect();
        assert_eq!(scored, text);
        let fits = |r: &Request| r.context.len() + r.continuation.len() - 1 <= 4;
        assert!(requests.iter().all(fits));
        let two = rolling(&[1, 2], &text, 4);
        assert_eq!(two[0], Request { context: vec![1, 2], continuation: vec![10, 11, 12] });
        assert!(two.iter().all(fits) && two.iter().map(|r| r.continuation.len()).sum::<usize>() == text.len());
    }

    #[test]
    fn a_continuation_is_greedy_when_each_token_is_the_first_among_the_best() {
        let mut found = Likelihood::none();
        found.add(&[0.0, 0.0], 0);
        assert!(found.is_greedy && (found.logprob + 2f64.ln()).abs() < 1e-12);
        found.add(&[0.0, 0.0], 1);
        assert!(!found.is_greedy && found.tokens == 2);
    }

    #[test]
    fn requests_are_batched_by_rows() {
        let request = |n: usize| Request { context: vec![1], continuation: vec![1; n] };
        assert_eq!(fitting(&[request(200), request(56), request(1)]), 2);
        assert_eq!(fitting(&[request(1000), request(1)]), 1);
    }
}
