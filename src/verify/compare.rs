//! Compares two predictions of the next token, and counts them as the same, a tie, or different.
//!
//! Rounding in a different order causes small numerical noise, up to [`Rules::logits_tol`]. If the two best tokens are
//! closer than that noise, their order is not significant; such steps are counted as ties. Larger differences are
//! mismatches.

use serde::Serialize;

/// Rules by which predictions count as equal.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rules {
    /// Number of the most likely tokens that both predictions must share, in any order.
    pub topk: usize,
    /// Largest accepted difference of logits.
    pub logits_tol: f32,
}

/// Available logits of a step.
#[derive(Debug, Clone, Copy)]
pub enum Scores<'a> {
    /// Logits of the whole vocabulary.
    All(&'a [f32]),
    /// Logits of some tokens, the most likely first; possibly empty.
    Some(&'a [(u32, f32)]),
}

impl Scores<'_> {
    fn of(&self, id: u32) -> Option<f32> {
        match self {
            Scores::All(logits) => logits.get(id as usize).copied(),
            Scores::Some(list) => list.iter().find(|(other, _)| *other == id).map(|(_, logit)| *logit),
        }
    }

    /// Returns the `k` most likely tokens with their logits, the most likely first. Equal logits are ordered by id.
    pub fn top(&self, k: usize) -> Vec<(u32, f32)> {
        let mut list: Vec<(u32, f32)> = match self {
            Scores::All(logits) => (0..).zip(logits.iter().copied()).collect(),
            Scores::Some(list) => list.to_vec(),
        };
        let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if k < list.len() {
            list.select_nth_unstable_by(k, order);
            list.truncate(k);
        }
        list.sort_by(order);
        list
    }

    /// Returns the most likely token.
    pub fn best(&self) -> Option<u32> {
        self.top(1).first().map(|(id, _)| *id)
    }
}

/// One step with both predictions.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// Index of the prompt.
    pub prompt: usize,
    /// Index of the step in its text, from 0.
    pub step: usize,
    /// Position of the token in the text.
    pub position: usize,
    /// Token chosen by the model under test, with its logits.
    pub ours: (u32, Scores<'a>),
    /// Token chosen by the reference, with its logits.
    pub theirs: (u32, Scores<'a>),
}

/// Kind of a difference.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DifferenceKind {
    /// The prompt has different tokens.
    #[default]
    PromptIds,
    /// A different token was chosen.
    NextId,
    /// A token is among the most likely ones of one prediction only.
    Topk,
    /// A logit differs by more than the tolerance.
    Logits,
}

/// Difference with the details needed to explain it.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Mismatch {
    /// Kind of the difference.
    pub kind: DifferenceKind,
    /// Index of the prompt.
    pub prompt_index: usize,
    /// Index of the step; for [`DifferenceKind::PromptIds`], index of the first token of the prompt that differs.
    pub step: usize,
    /// Position of the token in the text.
    pub position: usize,
    /// Token chosen by the model under test, or the token whose logit differs.
    pub id: Option<u32>,
    /// Token chosen by the reference.
    pub expected_id: Option<u32>,
    /// Logit of `id` in the model under test.
    pub logit: Option<f32>,
    /// Logit of `id` in the reference.
    pub expected_logit: Option<f32>,
    /// Logit of `expected_id` in the reference.
    pub expected_id_logit: Option<f32>,
    /// Difference of the two predictions. For [`DifferenceKind::NextId`], the logit of `expected_id` minus that of
    /// `id`, both in the reference if it has them; for [`DifferenceKind::Logits`], the difference of `logit` and
    /// `expected_logit`; for [`DifferenceKind::Topk`], how far the logit of `id` is below that of the least likely of
    /// the reference's most likely tokens.
    pub margin: Option<f32>,
}

/// Accumulated results of all compared steps. Each step counts in exactly one of `same`, `ties`, `other_tokens` and
/// `other_logits`.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Comparison {
    /// Number of compared steps.
    pub steps: usize,
    /// Number of steps with the same token and no difference beyond the noise.
    pub same: usize,
    /// Number of steps with a different token, but no difference beyond the noise.
    pub ties: usize,
    /// Number of steps with a different token and a difference beyond the noise.
    pub other_tokens: usize,
    /// Number of steps with the same token or a tie, but a rank or a logit that differs beyond the noise.
    pub other_logits: usize,
    /// Largest difference of a logit.
    pub max_logit_difference: f32,
    /// First difference beyond the noise.
    pub first_mismatch: Option<Mismatch>,
}

impl Comparison {
    /// Adds the tokens of a prompt; returns true when the model under test and the reference have the same ones.
    pub fn prompt(&mut self, prompt: usize, ours: &[u32], theirs: &[u32]) -> bool {
        let same = ours == theirs;
        if !same && self.first_mismatch.is_none() {
            let at = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
            self.first_mismatch = Some(Mismatch {
                kind: DifferenceKind::PromptIds,
                prompt_index: prompt,
                step: at,
                position: at,
                id: ours.get(at).copied(),
                expected_id: theirs.get(at).copied(),
                ..Mismatch::default()
            });
        }
        same
    }

    /// Compares the two predictions of a step and adds the result.
    pub fn step(&mut self, step: &Step<'_>, rules: &Rules) {
        let ((ours_id, ours), (theirs_id, theirs)) = (step.ours, step.theirs);
        self.steps += 1;
        let (apart, worst) = furthest(&ours, &theirs);
        // A NaN difference counts as infinite.
        self.max_logit_difference = self.max_logit_difference.max(apart);
        let ids = (ours_id != theirs_id).then(|| {
            let margin = difference(theirs.of(theirs_id), theirs.of(ours_id))
                .or_else(|| difference(ours.of(ours_id), ours.of(theirs_id)));
            (DifferenceKind::NextId, ours_id, margin)
        });
        let ranks = outranked(&ours, &theirs, rules.topk).map(|(id, margin)| (DifferenceKind::Topk, id, Some(margin)));
        let beyond = |found: &(DifferenceKind, u32, Option<f32>)| {
            found.2.is_none_or(|margin| margin.is_nan() || margin > rules.logits_tol)
        };
        let logits = (apart > rules.logits_tol).then_some((DifferenceKind::Logits, worst, Some(apart)));
        let first = [ids, ranks, logits].into_iter().flatten().find(beyond);
        let class = match first {
            None if ours_id == theirs_id => &mut self.same,
            None => &mut self.ties,
            Some((DifferenceKind::NextId, ..)) => &mut self.other_tokens,
            Some(_) => &mut self.other_logits,
        };
        *class += 1;
        let Some((kind, id, margin)) = first else { return };
        self.first_mismatch.get_or_insert_with(|| Mismatch {
            kind,
            prompt_index: step.prompt,
            step: step.step,
            position: step.position,
            id: Some(id),
            expected_id: Some(theirs_id),
            logit: ours.of(id),
            expected_logit: theirs.of(id),
            expected_id_logit: theirs.of(theirs_id),
            margin,
        });
    }

    /// Returns the share of steps with the same chosen token, ties included.
    pub fn agreement(&self) -> f64 {
        if self.steps == 0 { 1.0 } else { (self.steps - self.other_tokens) as f64 / self.steps as f64 }
    }

    /// Returns the number of steps with a difference beyond the noise.
    pub fn differing(&self) -> usize {
        self.other_tokens + self.other_logits
    }

    /// Adds the results of another comparison.
    pub fn merge(&mut self, other: Comparison) {
        self.steps += other.steps;
        self.same += other.same;
        self.ties += other.ties;
        self.other_tokens += other.other_tokens;
        self.other_logits += other.other_logits;
        self.max_logit_difference = self.max_logit_difference.max(other.max_logit_difference);
        self.first_mismatch = self.first_mismatch.take().or(other.first_mismatch);
    }
}

impl Mismatch {
    /// Explains the difference as text for users; `spell` formats a token.
    pub fn explain(&self, spell: impl Fn(u32) -> String) -> String {
        let show = |id: Option<u32>| id.map_or("nothing".into(), |id| format!("{id} {}", spell(id)));
        let number = |v: Option<f32>| v.map_or("unknown".into(), |v| format!("{v:.5}"));
        let place = format!("prompt {} step {} (position {})", self.prompt_index, self.step, self.position);
        let (id, expected) = (show(self.id), show(self.expected_id));
        let [own, reference, best, margin] =
            [self.logit, self.expected_logit, self.expected_id_logit, self.margin].map(number);
        match self.kind {
            DifferenceKind::PromptIds => {
                format!("prompt {} token {}: found {id}, expected {expected}", self.prompt_index, self.position)
            }
            DifferenceKind::NextId => format!(
                "{place}: chose {id}, expected {expected}; the reference gives them the logits {reference} and {best}, \
                 a margin of {margin}"
            ),
            DifferenceKind::Topk => format!(
                "{place}: found {id} among the most likely tokens with the logit {own}; the reference gives it \
                 {reference}, which is {margin} below the last of its most likely tokens"
            ),
            DifferenceKind::Logits => {
                format!("{place}: token {id} has the logit {own}, expected {reference}: a difference of {margin}")
            }
        }
    }
}

fn difference(a: Option<f32>, b: Option<f32>) -> Option<f32> {
    Some(a? - b?)
}

/// Returns the largest difference of a logit that both predictions have, and its token.
fn furthest(ours: &Scores<'_>, theirs: &Scores<'_>) -> (f32, u32) {
    let apart = |a: f32, b: f32| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() };
    let mut worst = (0.0, 0);
    let mut look = |id: u32, a: f32, b: f32| {
        if apart(a, b) > worst.0 {
            worst = (apart(a, b), id);
        }
    };
    match (ours, theirs) {
        (Scores::All(a), Scores::All(b)) => (0..).zip(a.iter().zip(*b)).for_each(|(id, (a, b))| look(id, *a, *b)),
        (Scores::Some(list), full) | (full, Scores::Some(list)) => {
            list.iter().for_each(|(id, a)| full.of(*id).into_iter().for_each(|b| look(*id, *a, b)));
        }
    }
    worst
}

/// Returns the token among the `k` most likely ones of the model under test (`ours`) that is not among the `k` most
/// likely ones of the reference (`theirs`), and how far its logit is below the least of those. If there are several
/// such tokens, returns the one that is furthest below. Returns `None` if both sets are equal or differ in size.
fn outranked(ours: &Scores<'_>, theirs: &Scores<'_>, k: usize) -> Option<(u32, f32)> {
    let (mine, others) = (ours.top(k), theirs.top(k));
    let last = others.last().filter(|_| mine.len() == others.len())?.1;
    let below = |id: u32| theirs.of(id).map_or(f32::NEG_INFINITY, |logit| logit);
    // A partial list of the reference lacks the logits of other tokens, so the logit of the model under test is used.
    let full = matches!(theirs, Scores::All(_));
    mine.iter()
        .filter(|(id, _)| others.iter().all(|(other, _)| other != id))
        .map(|(id, logit)| (*id, if full { last - below(*id) } else { logit - last }))
        .max_by(|a, b| a.1.total_cmp(&b.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules { topk: 2, logits_tol: 0.01 };

    fn compared(ours: &[f32], theirs: &[f32]) -> Comparison {
        let (a, b) = (Scores::All(ours), Scores::All(theirs));
        let mut comparison = Comparison::default();
        let step =
            Step { prompt: 1, step: 2, position: 9, ours: (a.best().unwrap(), a), theirs: (b.best().unwrap(), b) };
        comparison.step(&step, &RULES);
        comparison
    }

    #[test]
    fn a_difference_within_the_noise_is_a_tie() {
        let found = compared(&[1.0, 1.004, 0.0], &[1.004, 1.0, 0.0]);
        assert_eq!((found.ties, found.same, found.differing(), found.first_mismatch), (1, 0, 0, None));
        let same = compared(&[1.0, 2.0, 0.0], &[1.0, 2.005, 0.0]);
        assert_eq!((same.ties, same.same, same.differing()), (0, 1, 0));
        // The rank of the second most likely token may be a tie, too.
        assert_eq!(compared(&[0.001, 2.0, 0.0], &[0.0, 2.0, 0.001]).differing(), 0);
    }

    #[test]
    fn a_difference_beyond_the_noise_is_explained() {
        let found = compared(&[1.0, 2.0, 0.0], &[1.5, 1.0, 0.0]);
        let mismatch = found.first_mismatch.clone().unwrap();
        assert_eq!((mismatch.kind, mismatch.id, mismatch.expected_id), (DifferenceKind::NextId, Some(1), Some(0)));
        assert_eq!((mismatch.margin, found.max_logit_difference, found.other_tokens), (Some(0.5), 1.0, 1));
        let text = mismatch.explain(|id| format!("`{id}`"));
        assert!(text.contains("prompt 1 step 2 (position 9): chose 1 `1`, expected 0 `0`"), "{text}");
        let logits = compared(&[1.0, 2.0, -9.0], &[1.0, 2.0, -8.0]);
        assert_eq!((logits.other_tokens, logits.other_logits, logits.same, logits.agreement()), (0, 1, 0, 1.0));
        assert_eq!(logits.first_mismatch.unwrap().kind, DifferenceKind::Logits);
        let ranks = compared(&[0.0, 2.0, 1.0], &[0.5, 2.0, 0.0]);
        assert_eq!(ranks.first_mismatch.unwrap().kind, DifferenceKind::Topk);
        assert_eq!(compared(&[f32::NAN, 1.0, 0.0], &[0.0, 1.0, 0.0]).differing(), 1);
    }

    #[test]
    fn lists_of_a_few_tokens_are_compared_as_far_as_they_go() {
        let mut found = Comparison::default();
        let full = [0.0, 3.0, 2.0, 1.0];
        let mut step = Step {
            prompt: 0,
            step: 0,
            position: 3,
            ours: (1, Scores::All(&full)),
            theirs: (1, Scores::Some(&[(1, 3.001), (2, 2.0)])),
        };
        found.step(&step, &RULES);
        assert_eq!((found.differing(), found.same), (0, 1));
        step.theirs = (1, Scores::Some(&[]));
        found.step(&step, &RULES);
        // Without logits of the reference, our logits determine the margin between the two tokens.
        step.theirs = (2, Scores::Some(&[]));
        found.step(&step, &RULES);
        assert_eq!(found.first_mismatch.as_ref().unwrap().margin, Some(1.0));
        assert_eq!((found.steps, found.same, found.other_tokens), (3, 2, 1));
    }

    #[test]
    fn the_first_token_of_a_prompt_that_differs_is_named() {
        let mut found = Comparison::default();
        assert!(found.prompt(0, &[1, 2], &[1, 2]));
        assert!(!found.prompt(1, &[1, 2], &[1, 2, 3]));
        let mismatch = found.first_mismatch.unwrap();
        assert_eq!((mismatch.position, mismatch.id, mismatch.expected_id), (2, None, Some(3)));
    }
}
