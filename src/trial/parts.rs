//! Parts of a model that bear quantization less than their size suggests, with their measured shares.

use crate::catalogue::{Role, layer_part};
use crate::convert::quantize::candidates::Subject;
use crate::convert::quantize::weights::Tensor;
use crate::quant::metrics::nine_digits;
use serde::Serialize;

/// Share of the costs above which a part is worth a warning, and by how much it must exceed the share of the weights.
const NOTABLE: f64 = 0.05;
const TIMES: f64 = 2.0;

/// A kind of tensors and its shares. A tensor may belong to several kinds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PartShare {
    /// The kind in words.
    pub part: &'static str,
    /// Share of the weights whose storage a plan chooses.
    pub weights: f64,
    /// Share of the costs if all tensors have the scheme with which each was measured alone.
    pub costs: f64,
}

impl PartShare {
    /// Returns true if the part bears quantization much less than its size suggests.
    pub fn is_notable(&self) -> bool {
        self.costs >= NOTABLE && self.costs >= TIMES * self.weights
    }
}

/// Condition of a tensor of a kind; the last argument is the number of the last layer.
type Belongs = fn(&Tensor, Option<u64>) -> bool;

const KINDS: [(&str, Belongs); 8] = [
    ("the embedding, which is also the output matrix", |t, _| t.is_tied),
    ("the embedding", |t, _| t.role == Role::Embedding && !t.is_tied),
    ("the output matrix", |t, _| t.role == Role::LmHead),
    ("routers", |t, _| t.role == Role::Router),
    ("experts", |t, _| t.role == Role::Experts),
    ("output projections of recurrent mixers", |t, _| t.role == Role::Mixer && t.name.contains(".out_proj.")),
    ("the first layer", |t, _| layer_of(t) == Some(0)),
    ("the last layer", |t, last| last.is_some_and(|last| last > 0) && layer_of(t) == last),
];

fn layer_of(tensor: &Tensor) -> Option<u64> {
    layer_part(&tensor.name)?.0.parse().ok()
}

/// Returns the shares of all kinds that the model has; `subjects` are tensors with the costs of their candidates.
pub fn shares<'a>(subjects: impl Iterator<Item = (&'a Subject, &'a Vec<f64>)>) -> Vec<PartShare> {
    let measured: Vec<(&Tensor, f64)> = subjects
        .map(|(subject, costs)| {
            let candidate = subject.measured().and_then(|m| subject.candidates.iter().position(|c| c == m));
            (&subject.tensor, candidate.map_or(0.0, |i| costs[i]))
        })
        .collect();
    let last = measured.iter().filter_map(|(tensor, _)| layer_of(tensor)).max();
    let sum = |wanted: &dyn Fn(&Tensor) -> bool| {
        let own = measured.iter().filter(|(tensor, _)| wanted(tensor));
        own.fold((0.0, 0.0), |(weights, costs), (tensor, cost)| (weights + tensor.elements() as f64, costs + cost))
    };
    let all = sum(&|_| true);
    let share = |(part, belongs): (&'static str, Belongs)| {
        let own = sum(&|tensor| belongs(tensor, last));
        let [weights, costs] = [own.0 / all.0, own.1 / all.1].map(|share| if share.is_finite() { share } else { 0.0 });
        (own.0 > 0.0).then(|| PartShare { part, weights: nine_digits(weights), costs: nine_digits(costs) })
    };
    KINDS.into_iter().filter_map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::quantize::candidates::{AS_IT_IS, Candidate, choices};

    #[test]
    fn parts_have_their_shares_of_weights_and_costs() {
        let q4_0 = choices().find(|quant| quant.spec == crate::scheme::QuantSpec::Q4_0);
        let subject = |name: &str, rows: usize| Subject {
            tensor: Tensor::float(name, &[rows, 32], name.contains("embed")),
            candidates: vec![Candidate { quant: q4_0, error: 0.1 }, AS_IT_IS],
        };
        let subjects = [
            (subject("model.embed_tokens.weight", 32), vec![6.0, 0.0]),
            (subject("model.layers.0.mlp.up_proj.weight", 48), vec![1.5, 0.0]),
            (subject("model.layers.1.mlp.up_proj.weight", 48), vec![2.5, 0.0]),
        ];
        let found = shares(subjects.iter().map(|(subject, costs)| (subject, costs)));
        let shown: Vec<_> = found.iter().map(|part| (part.part, part.weights, part.costs, part.is_notable())).collect();
        assert_eq!(
            shown,
            [
                ("the embedding, which is also the output matrix", 0.25, 0.6, true),
                ("the first layer", 0.375, 0.15, false),
                ("the last layer", 0.375, 0.25, false),
            ]
        );
        assert!(shares([].iter().map(|(subject, costs): &(Subject, Vec<f64>)| (subject, costs))).is_empty());
    }
}
