//! Routing of a mixture of experts: chooses the experts of a token and their weights.

use super::ops::exp;
use crate::model_config::RouterSoftmax;

/// Writes the experts with the `choices.len()` largest logits and their softmax weights to `choices`, the largest
/// first; of equal logits, that of the lower index first.
///
/// NaN logits count as the smallest, so that a broken model yields NaN instead of a crash.
pub fn route(logits: &[f32], softmax: RouterSoftmax, choices: &mut [(u32, f32)]) {
    let better = |a: f32, b: f32| a > b || b.is_nan() && !a.is_nan();
    let mut taken = 0;
    for (expert, logit) in logits.iter().enumerate() {
        let place = choices[..taken].partition_point(|(_, other)| !better(*logit, *other));
        if place == choices.len() {
            continue;
        }
        taken = (taken + 1).min(choices.len());
        choices[place..taken].rotate_right(1);
        choices[place] = (expert as u32, *logit);
    }
    let top = choices[0].1;
    choices.iter_mut().for_each(|(_, weight)| *weight = exp(*weight - top));
    let sum: f32 = match softmax {
        RouterSoftmax::Chosen => choices.iter().map(|(_, weight)| weight).sum(),
        RouterSoftmax::All => logits.iter().map(|logit| exp(logit - top)).sum(),
    };
    choices.iter_mut().for_each(|(_, weight)| *weight /= sum);
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
    fn a_broken_router_gives_nan_not_a_crash() {
        let mut choices = [(9, 0.0); 2];
        route(&[f32::NAN, 1.0, f32::NAN], RouterSoftmax::Chosen, &mut choices);
        assert_eq!(choices[0].0, 1);
    }
}
