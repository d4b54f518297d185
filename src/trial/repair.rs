//! Repairs a model that a gate rejects: the tensors that cause the most divergence for their size get more bits, and
//! the model is measured again.

use super::{Blame, TaskTrial, Trial, WINDOWS};
use crate::convert::quantize::entry::{stored_as, stored_bits};
use crate::convert::quantize::ptq::Measured;
use crate::convert::quantize::weights::Tensor;
use crate::error::Result;
use crate::manifest::TensorEntry;
use crate::progress;
use crate::provenance::{Figures, Gate, Promotion, TaskEvidence};

/// Factor by which the divergence of a tensor decreases with each additional bit: errors are halved, and the
/// divergence is proportional to their square.
const LEFT_PER_BIT: f64 = 0.25;
/// Safety factor for the share of the divergence that promotions should remove.
const MARGIN: f64 = 1.05;

/// Function that returns an entry with more bits for a tensor, or `None` when there is none.
pub type Promote<'a> = dyn Fn(&Tensor, &TensorEntry) -> Result<Option<TensorEntry>> + 'a;

/// Conditions of a repair.
pub struct RepairOptions<'a> {
    /// Thresholds for the outputs of the model.
    pub gate: &'a Gate,
    /// Function that gives a tensor more bits.
    pub promote: &'a Promote<'a>,
    /// Largest number of bits per weight of the whole pack.
    pub most_bits: Option<f64>,
    /// Files of questions that the gate asks, if there are any.
    pub tasks: Option<&'a TaskTrial<'a>>,
}

/// Measures the model that `measured` describes. If the gate rejects it, promotes tensors until the gate passes, no
/// promotion is left, or a further one would exceed the largest number of bits. The divergences on the text choose the
/// tensors. Stores the evidence in the document. Returns the divergence that each tensor causes alone, the worst first,
/// or nothing if the gate passed at once.
///
/// # Errors
/// The same as for [`Trial::measure`] and [`TaskTrial::measure`].
pub fn repair(trial: &mut Trial<'_>, measured: &mut Measured, options: &RepairOptions<'_>) -> Result<Vec<Blame>> {
    let RepairOptions { gate, promote, most_bits, tasks } = options;
    let (mut suspects, mut promoted): (Option<Vec<Suspect>>, Vec<Promotion>) = (None, Vec::new());
    loop {
        let mut evidence = trial.measure(&measured.document)?;
        evidence.objections = gate.objections_to_answers(&evidence.figures);
        let (kl, bits) = (evidence.figures.kl, evidence.bits_per_weight);
        progress::detail(1, || format!("divergence {kl:.5} at {bits:.3} bits per weight"));
        measured.document.task_evidence = tasks.map_or_else(|| Ok(Vec::new()), TaskTrial::measure)?;
        let tasks = &measured.document.task_evidence;
        let is_refused = !evidence.objections.is_empty() || tasks.iter().any(|task| task.objection.is_some());
        let mut steps = Vec::new();
        if is_refused {
            if suspects.is_none() {
                suspects = Some(
                    trial.blame(WINDOWS, None)?.into_iter().map(|blame| Suspect { left: blame.kl, blame }).collect(),
                );
            }
            let aim = Aim {
                share: MARGIN * excess(gate, &evidence.figures, tasks),
                room: most_bits.map_or(f64::INFINITY, |most| (most - bits) * trial.packs.weights() as f64),
            };
            steps = choose(measured, suspects.as_deref_mut().unwrap_or_default(), promote, aim)?;
        }
        if steps.is_empty() {
            measured.document.refused |= is_refused;
            evidence.promoted = promoted;
            measured.document.evidence = Some(evidence);
            return Ok(suspects.unwrap_or_default().into_iter().map(|suspect| suspect.blame).collect());
        }
        for (entry, promotion) in steps {
            measured.document.tensors.insert(promotion.tensor.clone(), entry);
            promoted.push(promotion);
        }
    }
}

/// Tensor with the divergence that it causes alone, and the part of it that remains after promotions.
struct Suspect {
    blame: Blame,
    left: f64,
}

/// Limits of a round of promotions.
struct Aim {
    /// Share of the total divergence that should be removed.
    share: f64,
    /// Number of additional bits that may be used.
    room: f64,
}

/// Promotes the tensors that cause the most divergence for their size, within the limits of `aim`. Returns the new
/// entries with a record of each promotion; an empty list if no promotion is possible.
fn choose(
    measured: &Measured,
    suspects: &mut [Suspect],
    promote: &Promote<'_>,
    mut aim: Aim,
) -> Result<Vec<(TensorEntry, Promotion)>> {
    let mut to_go = aim.share * suspects.iter().map(|suspect| suspect.left).sum::<f64>();
    let tensor = |name: &str| measured.tensors.iter().find(|tensor| tensor.name == name);
    let mut order: Vec<(&mut Suspect, &Tensor)> =
        suspects.iter_mut().filter_map(|s| tensor(&s.blame.tensor).map(|tensor| (s, tensor))).collect();
    let density = |(suspect, tensor): &(&mut Suspect, &Tensor)| suspect.left / tensor.elements() as f64;
    order.sort_by(|a, b| density(b).total_cmp(&density(a)));
    let mut steps = Vec::new();
    for (suspect, tensor) in order {
        if to_go <= 0.0 {
            break;
        }
        let entry = &measured.document.tensors[&tensor.name];
        let Some(better) = promote(tensor, entry)? else { continue };
        let more = (stored_bits(tensor, &better)? - stored_bits(tensor, entry)?) * tensor.elements() as f64;
        if more > aim.room {
            continue;
        }
        aim.room -= more;
        to_go -= suspect.left;
        let [before, after] = [entry, &better].map(|entry| entry.quant.map_or(16, |quant| quant.spec.scheme.bits()));
        suspect.left *= LEFT_PER_BIT.powi(after as i32 - before as i32);
        let [from, to] = [entry, &better].map(|entry| stored_as(tensor, entry));
        steps.push((better, Promotion { tensor: tensor.name.clone(), kl: suspect.blame.kl, from, to }));
    }
    Ok(steps)
}

/// Returns the share of the divergence that must be removed. Perplexity is assumed to rise with the divergence,
/// disagreement and drops of accuracy with its square root.
fn excess(gate: &Gate, figures: &Figures, tasks: &[TaskEvidence]) -> f64 {
    let over = |bound: Option<f64>, found: f64| {
        bound.map_or(0.0, |bound| if found > bound { 1.0 - bound / found } else { 0.0 })
    };
    let squared = |agreement: f64| (1.0 - agreement).powi(2);
    let shares = [
        over(gate.kl, figures.kl),
        over(gate.perplexity_rise, figures.perplexity_ratio - 1.0),
        over(gate.top1.map(squared), squared(figures.top1_agreement)),
    ];
    let pairs = gate.tasks.iter().zip(tasks).filter(|(_, found)| found.objection.is_some());
    let drops = pairs.map(|(bound, found)| over(Some(bound.largest_drop.powi(2)), found.difference.powi(2)));
    shares.into_iter().chain(drops).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_strictest_threshold_says_how_much_has_to_go() {
        let figures = Figures {
            kl: 0.02,
            kl_stderr: 0.0,
            kl_p99: 0.0,
            perplexity: 6.0,
            perplexity_ratio: 1.02,
            perplexity_ratio_stderr: 0.0,
            top1_agreement: 0.9,
        };
        let with = |options: &[&str]| {
            let mut gate = Gate::default();
            options.iter().for_each(|option| gate.set(option).unwrap());
            excess(&gate, &figures, &[])
        };
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        close(with(&[]), 0.0);
        close(with(&["kl=0.03", "top1=80%"]), 0.0);
        close(with(&["kl=0.015"]), 0.25);
        close(with(&["kl=0.015", "ppl=+1%"]), 0.5);
        close(with(&["top1=95%", "ppl=+1%"]), 0.75);
    }
}
