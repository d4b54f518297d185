//! Bit allocation under a budget: each tensor has options, each with a size and a cost. The result is one option per
//! tensor that fits the budget, with nearly the least total cost.
//!
//! Only options on the lower convex hull of (bytes, cost) of a tensor can be optimal for a price per byte (Lagrange
//! multiplier). Starting at the smallest sizes and always taking the step that saves most per byte passes through
//! exactly these optima. When the next step does not fit, smaller ones fill the remaining bytes, so the cost of the
//! result exceeds the optimum by at most one step.

/// Option for the storage of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Size in bytes.
    pub bytes: u64,
    /// Cost, not negative.
    pub cost: f64,
}

/// Returns the total size of the smallest choices.
pub fn smallest(tensors: &[Vec<Choice>]) -> u64 {
    tensors.iter().filter_map(|choices| choices.iter().map(|choice| choice.bytes).min()).sum()
}

/// Returns the index of the choice for each tensor, or `None` when the smallest choices exceed `budget`. Tensors
/// without choices get index 0.
pub fn spend(tensors: &[Vec<Choice>], budget: u64) -> Option<Vec<usize>> {
    let mut left = budget.checked_sub(smallest(tensors))?;
    let (hulls, steps) = steps(tensors);
    let mut reached = vec![0; tensors.len()];
    for step in steps {
        if reached[step.tensor] == step.at && step.bytes <= left {
            reached[step.tensor] += 1;
            left -= step.bytes;
        }
    }
    let mut chosen: Vec<usize> =
        hulls.iter().zip(reached).map(|(hull, at)| hull.get(at).copied().unwrap_or(0)).collect();
    while let Some((tensor, choice)) = best_that_fits(tensors, &chosen, left) {
        left -= tensors[tensor][choice].bytes - tensors[tensor][chosen[tensor]].bytes;
        chosen[tensor] = choice;
    }
    Some(chosen)
}

/// Returns the index of the choice for each tensor with which the total cost is at most `most`, with nearly the fewest
/// bytes; `None` when no choices cost so little. Tensors without choices get index 0.
pub fn reach(tensors: &[Vec<Choice>], most: f64) -> Option<Vec<usize>> {
    let (hulls, steps) = steps(tensors);
    let at = |reached: &[usize]| -> Vec<usize> {
        hulls.iter().zip(reached).map(|(hull, at)| hull.get(*at).copied().unwrap_or(0)).collect()
    };
    let mut reached = vec![0; tensors.len()];
    // Costs are added anew in the order of the tensors, so that the result has the cost that its parts have.
    let total = |chosen: &[usize]| -> f64 {
        tensors.iter().zip(chosen).filter_map(|(choices, i)| choices.get(*i)).map(|choice| choice.cost).sum()
    };
    let mut steps = steps.into_iter();
    loop {
        let chosen = at(&reached);
        if total(&chosen) <= most {
            return Some(chosen);
        }
        let step = steps.next()?;
        reached[step.tensor] = step.at + 1;
        if total(&at(&reached)) <= most {
            // A smaller step than the last one may suffice.
            let fewest = changes(tensors, &chosen).filter(|(tensor, choice)| {
                let mut other = chosen.clone();
                other[*tensor] = *choice;
                total(&other) <= most
            });
            let bytes = |(tensor, choice): &(usize, usize)| {
                tensors[*tensor][*choice].bytes.saturating_sub(tensors[*tensor][chosen[*tensor]].bytes)
            };
            let (tensor, choice) = fewest.min_by_key(bytes)?;
            let mut chosen = chosen;
            chosen[tensor] = choice;
            return Some(chosen);
        }
    }
}

/// Returns all changes of a single tensor that cost less: the tensor and its choice.
fn changes<'a>(tensors: &'a [Vec<Choice>], chosen: &'a [usize]) -> impl Iterator<Item = (usize, usize)> + 'a {
    tensors.iter().zip(chosen).enumerate().flat_map(|(tensor, (choices, now))| {
        let less = |choice: &Choice| choices.get(*now).is_some_and(|now| choice.cost < now.cost);
        choices.iter().enumerate().filter(move |(_, choice)| less(choice)).map(move |(i, _)| (tensor, i))
    })
}

/// Returns the hull of each tensor, and the steps on all hulls by what they save per byte, most first. Within a tensor
/// they are in the order of the hull.
fn steps(tensors: &[Vec<Choice>]) -> (Vec<Vec<usize>>, Vec<HullStep>) {
    let hulls: Vec<Vec<usize>> = tensors.iter().map(|choices| hull(choices)).collect();
    let mut steps: Vec<HullStep> = Vec::new();
    for (tensor, hull) in hulls.iter().enumerate() {
        steps.extend(hull.windows(2).enumerate().map(|(at, pair)| HullStep::new(tensor, at, &tensors[tensor], pair)));
    }
    // Within a tensor the slopes decrease, so sorting keeps its steps in order.
    steps.sort_by(|a, b| b.slope.total_cmp(&a.slope).then((a.tensor, a.at).cmp(&(b.tensor, b.at))));
    (hulls, steps)
}

/// Returns the single change (tensor, choice) that saves most within the remaining bytes.
fn best_that_fits(tensors: &[Vec<Choice>], chosen: &[usize], left: u64) -> Option<(usize, usize)> {
    let mut best: Option<(f64, usize, usize)> = None;
    for (tensor, (choices, chosen)) in tensors.iter().zip(chosen).enumerate() {
        let Some(now) = choices.get(*chosen) else { continue };
        for (i, choice) in choices.iter().enumerate() {
            let fits = choice.bytes >= now.bytes && choice.bytes - now.bytes <= left;
            let saved = now.cost - choice.cost;
            if fits && saved > 0.0 && best.is_none_or(|(most, ..)| saved > most) {
                best = Some((saved, tensor, i));
            }
        }
    }
    best.map(|(_, tensor, choice)| (tensor, choice))
}

/// Step from one corner of a hull to the next.
struct HullStep {
    tensor: usize,
    at: usize,
    bytes: u64,
    /// Cost saved per byte.
    slope: f64,
}

impl HullStep {
    fn new(tensor: usize, at: usize, choices: &[Choice], pair: &[usize]) -> HullStep {
        let (from, to) = (choices[pair[0]], choices[pair[1]]);
        HullStep { tensor, at, bytes: to.bytes - from.bytes, slope: slope(from, to) }
    }
}

fn slope(from: Choice, to: Choice) -> f64 {
    (from.cost - to.cost) / (to.bytes - from.bytes) as f64
}

/// Returns the indices of the choices on the lower convex hull: sizes increase, costs decrease, and each step saves
/// less per byte than the previous one.
fn hull(choices: &[Choice]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..choices.len()).collect();
    order.sort_by(|a, b| {
        let (x, y) = (choices[*a], choices[*b]);
        x.bytes.cmp(&y.bytes).then(x.cost.total_cmp(&y.cost)).then(a.cmp(b))
    });
    let mut hull: Vec<usize> = Vec::new();
    for i in order {
        if hull.last().is_some_and(|last| choices[i].cost >= choices[*last].cost) {
            continue;
        }
        while let [.., a, b] = hull[..] {
            if slope(choices[a], choices[b]) > slope(choices[b], choices[i]) {
                break;
            }
            hull.pop();
        }
        hull.push(i);
    }
    hull
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    fn choice(bytes: u64, cost: f64) -> Choice {
        Choice { bytes, cost }
    }

    #[test]
    fn bits_go_where_they_save_most() {
        // The second tensor is four times as sensitive; the third gains nothing from more bytes.
        let of = |cost: f64| vec![choice(4, cost), choice(8, cost / 256.0), choice(16, 0.0)];
        let tensors = [of(1.0), of(4.0), vec![choice(4, 0.5), choice(8, 0.5)], vec![]];
        assert_eq!(smallest(&tensors), 12);
        assert_eq!(spend(&tensors, 11), None);
        for (budget, expected) in [(12, [0, 0, 0, 0]), (16, [0, 1, 0, 0]), (20, [1, 1, 0, 0]), (1000, [2, 2, 0, 0])] {
            assert_eq!(spend(&tensors, budget).unwrap(), expected, "{budget}");
        }
    }

    #[test]
    fn choices_that_are_larger_and_worse_are_never_taken() {
        let tensors = [vec![choice(5, 1.0), choice(4, 3.0), choice(6, 1.5), choice(8, 0.9), choice(9, 0.0)]];
        assert_eq!(hull(&tensors[0]), [1, 0, 4]);
        // The choice of 8 bytes is above the hull, but it is the best one that fits.
        assert_eq!(spend(&tensors, 8), Some(vec![3]));
        assert_eq!(spend(&tensors, 7), Some(vec![0]));
    }

    /// Returns the least cost over all combinations, or `None` when none fits.
    fn exhaustive(tensors: &[Vec<Choice>], budget: u64) -> Option<f64> {
        let Some((first, rest)) = tensors.split_first() else { return Some(0.0) };
        let each = first.iter().filter(|c| c.bytes <= budget);
        each.filter_map(|c| Some(c.cost + exhaustive(rest, budget - c.bytes)?)).min_by(f64::total_cmp)
    }

    #[test]
    fn a_cost_is_reached_with_few_bytes() {
        let mut rng = Rng::new(8);
        let mut below = |n: u64| rng.next_u64() % n;
        for case in 0..500 {
            let tensors: Vec<Vec<Choice>> = (0..1 + below(4))
                .map(|_| (0..1 + below(5)).map(|_| choice(1 + below(40), below(1000) as f64)).collect())
                .collect();
            let most = below(1500) as f64;
            let taken = |chosen: &[usize]| -> Vec<Choice> {
                tensors.iter().zip(chosen).map(|(choices, i)| choices[*i]).collect()
            };
            let cost = |chosen: &[usize]| taken(chosen).iter().map(|c| c.cost).sum::<f64>();
            let bytes = |chosen: &[usize]| taken(chosen).iter().map(|c| c.bytes).sum::<u64>();
            let least: f64 = tensors.iter().map(|t| t.iter().map(|c| c.cost).fold(f64::INFINITY, f64::min)).sum();
            let Some(found) = reach(&tensors, most) else {
                assert!(least > most, "case {case}");
                continue;
            };
            assert!(cost(&found) <= most, "case {case}");
            // The fewest bytes with which some combination costs so little.
            let best = (0..=bytes(&found)).find(|budget| exhaustive(&tensors, *budget).is_some_and(|c| c <= most));
            let step = tensors.iter().flatten().map(|c| c.bytes).max().unwrap();
            assert!(bytes(&found) <= best.unwrap() + step, "case {case}: {} {best:?}", bytes(&found));
        }
        assert_eq!(reach(&[vec![], vec![choice(4, 2.0), choice(8, 0.5)]], 1.0), Some(vec![0, 1]));
    }

    #[test]
    fn the_result_fits_and_is_within_one_step_of_the_best() {
        let mut rng = Rng::new(7);
        let mut below = |n: u64| rng.next_u64() % n;
        for case in 0..500 {
            let tensors: Vec<Vec<Choice>> = (0..1 + below(5))
                .map(|_| (0..1 + below(5)).map(|_| choice(1 + below(40), below(1000) as f64)).collect())
                .collect();
            let budget = below(150);
            let (found, best) = (spend(&tensors, budget), exhaustive(&tensors, budget));
            assert_eq!(found.is_some(), best.is_some(), "case {case}");
            let (Some(found), Some(best)) = (found, best) else { continue };
            let chosen = || tensors.iter().zip(&found).map(|(choices, i)| choices[*i]);
            assert!(chosen().map(|c| c.bytes).sum::<u64>() <= budget, "case {case}");
            let spread = |choices: &Vec<Choice>| {
                let costs = || choices.iter().map(|c| c.cost);
                costs().fold(0.0, f64::max) - costs().fold(f64::INFINITY, f64::min)
            };
            let step = tensors.iter().map(spread).fold(0.0, f64::max);
            assert!(chosen().map(|c| c.cost).sum::<f64>() <= best + step, "case {case}");
        }
    }
}
