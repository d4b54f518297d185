//! Routing of a mixture of experts: chooses the experts of a token and their weights.

use super::ops::{exp, sigmoid};
use crate::model_config::{ExpertGroups, RouterSoftmax, Selection};

/// Added to the sum of the scores of the chosen experts before they are divided by it, as in `transformers`.
const LEAST_SUM: f32 = 1e-20;

/// Chooses experts as `selection` says, and writes them with their weights to `choices`, the best first. `bias` holds
/// the numbers that are added to the scores for the choice; `scores` is room for as many numbers as there are experts.
pub fn select(
    logits: &[f32],
    softmax: RouterSoftmax,
    selection: &Selection,
    bias: Option<&[f32]>,
    scores: &mut [f32],
    choices: &mut [(u32, f32)],
) {
    if !selection.sigmoid && selection.groups.is_none() && !selection.bias && selection.scale == 1.0 {
        return route(logits, softmax, choices);
    }
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let all: f32 = if selection.sigmoid { 1.0 } else { logits.iter().map(|logit| exp(logit - top)).sum() };
    let weight = |logit: f32| if selection.sigmoid { sigmoid(logit) } else { exp(logit - top) / all };
    for (i, (score, logit)) in scores.iter_mut().zip(logits).enumerate() {
        *score = weight(*logit) + bias.map_or(0.0, |bias| bias[i]);
    }
    if let Some(groups) = selection.groups {
        leave_best_groups(scores, groups);
    }
    largest(scores, choices);
    choices.iter_mut().for_each(|(expert, score)| *score = weight(logits[*expert as usize]));
    let sum = match softmax {
        RouterSoftmax::Chosen => choices.iter().map(|(_, weight)| weight).sum::<f32>() + LEAST_SUM,
        RouterSoftmax::All => 1.0,
    };
    choices.iter_mut().for_each(|(_, weight)| *weight = *weight / sum * selection.scale);
}

/// Replaces the scores of the experts outside the best groups by minus infinity.
fn leave_best_groups(scores: &mut [f32], groups: ExpertGroups) {
    let size = scores.len() / groups.count;
    let score = |group: &[f32]| {
        let mut best = [(0, 0.0); 2];
        largest(group, &mut best[..groups.best]);
        best[..groups.best].iter().map(|(_, score)| score).sum::<f32>()
    };
    let of_groups: Vec<f32> = scores.chunks_exact(size).map(score).collect();
    let mut chosen = vec![(0, 0.0); groups.chosen];
    largest(&of_groups, &mut chosen);
    for (group, scores) in scores.chunks_exact_mut(size).enumerate() {
        if !chosen.iter().any(|(chosen, _)| *chosen as usize == group) {
            scores.fill(f32::NEG_INFINITY);
        }
    }
}

/// Writes the experts with the `choices.len()` largest logits and their softmax weights to `choices`, the largest
/// first; of equal logits, that of the lower index first.
///
/// NaN logits count as the smallest, so that a broken model yields NaN instead of a crash.
pub fn route(logits: &[f32], softmax: RouterSoftmax, choices: &mut [(u32, f32)]) {
    largest(logits, choices);
    let top = choices[0].1;
    choices.iter_mut().for_each(|(_, weight)| *weight = exp(*weight - top));
    let sum: f32 = match softmax {
        RouterSoftmax::Chosen => choices.iter().map(|(_, weight)| weight).sum(),
        RouterSoftmax::All => logits.iter().map(|logit| exp(logit - top)).sum(),
    };
    choices.iter_mut().for_each(|(_, weight)| *weight /= sum);
}

/// Writes the indices of the `choices.len()` largest numbers with the numbers to `choices`, the largest first; of equal
/// ones, that of the lower index first. NaN counts as the smallest.
fn largest(numbers: &[f32], choices: &mut [(u32, f32)]) {
    let better = |a: f32, b: f32| a > b || b.is_nan() && !a.is_nan();
    let mut taken = 0;
    for (index, number) in numbers.iter().enumerate() {
        let place = choices[..taken].partition_point(|(_, other)| !better(*number, *other));
        if place == choices.len() {
            continue;
        }
        taken = (taken + 1).min(choices.len());
        choices[place..taken].rotate_right(1);
        choices[place] = (index as u32, *number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_logits_win_and_ties_go_to_the_lower_index() {
        let mut choices = [(0, 0.0); 3];
        route(&[1.0, 3.0, 2.0, 3.0, -1.0], RouterSoftmax::Chosen, &mut choices);
        assert_eq!(choices.map(|(e, _)| e), [1, 3, 2]);
        let weights = choices.map(|(_, w)| w);
        assert_eq!(weights[0], weights[1]);
        assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert!((weights[2] / weights[0] - (-1f32).exp()).abs() < 1e-6);
    }

    #[test]
    fn a_softmax_over_all_leaves_the_others_their_share() {
        let logits = [1.0, 3.0, 2.0, 3.0, -1.0];
        let mut choices = [(0, 0.0); 2];
        route(&logits, RouterSoftmax::All, &mut choices);
        let sum: f32 = logits.iter().map(|l| l.exp()).sum();
        assert_eq!(choices.map(|(e, _)| e), [1, 3]);
        assert!(choices.iter().all(|(_, w)| (w - 3f32.exp() / sum).abs() < 1e-6));
    }

    #[test]
    fn experts_are_chosen_in_the_best_groups_by_biased_scores_and_weighed_without_bias() {
        let logits = [0.0f32, 2.0, 1.5, 1.4, -1.0, 3.0, 0.5, 0.4];
        let score = |x: f32| 1.0 / (1.0 + (-x).exp());
        let bias = [0.0, 0.0, 0.0, 0.0, 0.0, -0.9, 0.3, 0.3];
        let selection = |count, chosen, best| Selection {
            sigmoid: true,
            bias: true,
            groups: Some(ExpertGroups { count, chosen, best }),
            scale: 2.5,
            factors: false,
        };
        let choose = |selection: Selection, softmax| {
            let (mut scores, mut choices) = ([0.0; 8], [(0, 0.0); 3]);
            select(&logits, softmax, &selection, Some(&bias), &mut scores, &mut choices);
            choices
        };
        // Groups of two: their sums are 1.38, 1.63, 0.32 and 1.82, so the second and the last are searched.
        let found = choose(selection(4, 2, 2), RouterSoftmax::Chosen);
        assert_eq!(found.map(|(expert, _)| expert), [6, 7, 2]);
        let sum = score(0.5) + score(0.4) + score(1.5);
        assert!(found.iter().all(|(e, w)| (w - 2.5 * score(logits[*e as usize]) / sum).abs() < 1e-6));
        // By their largest scores alone, the first group is searched instead of the second.
        let found = choose(selection(4, 2, 1), RouterSoftmax::All);
        assert_eq!(found.map(|(expert, _)| expert), [6, 7, 1]);
        assert!(found.iter().all(|(e, w)| (w - 2.5 * score(logits[*e as usize])).abs() < 1e-6));
        // Without groups and bias, with a softmax over all.
        let plain = Selection { scale: 2.0, ..Selection::default() };
        let (mut scores, mut choices) = ([0.0; 8], [(0, 0.0); 2]);
        select(&logits, RouterSoftmax::All, &plain, None, &mut scores, &mut choices);
        let all: f32 = logits.iter().map(|x| x.exp()).sum();
        assert_eq!(choices.map(|(expert, _)| expert), [5, 1]);
        assert!(choices.iter().all(|(e, w)| (w - 2.0 * logits[*e as usize].exp() / all).abs() < 1e-6));
    }

    #[test]
    fn a_broken_router_gives_nan_not_a_crash() {
        let mut choices = [(9, 0.0); 2];
        route(&[f32::NAN, 1.0, f32::NAN], RouterSoftmax::Chosen, &mut choices);
        assert_eq!(choices[0].0, 1);
    }
}
