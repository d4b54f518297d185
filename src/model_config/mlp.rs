//! Description of the feed-forward part of a layer: a dense MLP, or a mixture of experts.

use super::{DIM_LIMIT, is_default, one};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// The feed-forward part of a layer.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Mlp {
    /// `down(act(gate(x)) * up(x))`, or `down(act(up(x)))` with an activation without a gate.
    Dense {
        intermediate: usize,
        activation: Activation,
        #[serde(default)]
        bias: bool,
    },
    /// Mixture of experts: a router selects the `top_k` largest of `experts` logits.
    Moe {
        experts: usize,
        top_k: usize,
        intermediate: usize,
        activation: Activation,
        #[serde(default)]
        bias: bool,
        #[serde(default)]
        router_bias: bool,
        #[serde(default)]
        router_softmax: RouterSoftmax,
        /// Further properties of the choice of experts.
        #[serde(default, skip_serializing_if = "is_default")]
        selection: Selection,
        /// An MLP that computes every token, whose output is added to that of the experts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        shared: Option<SharedExpert>,
        /// Width of the vectors that experts read and write, if the model projects its own to narrower ones for them
        /// and back (Nemotron 3 Super).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        latent: Option<usize>,
    },
}

/// Properties of the choice of experts. The default is that of the plain mixture: the largest logits win.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Selection {
    /// Scores are sigmoids of the logits instead of a softmax. With [`RouterSoftmax::Chosen`], the weights of the
    /// chosen experts are their scores divided by the sum of these.
    #[serde(default)]
    pub sigmoid: bool,
    /// The model has a number for each expert that is added to its score for the choice, but not for its weight.
    #[serde(default)]
    pub bias: bool,
    /// Groups of experts of which only some are searched.
    #[serde(default)]
    pub groups: Option<ExpertGroups>,
    /// Factor of the weights.
    #[serde(default = "one")]
    pub scale: f32,
    /// The model has a factor for the weight of each expert.
    #[serde(default)]
    pub factors: bool,
}

impl Default for Selection {
    fn default() -> Selection {
        Selection { sigmoid: false, bias: false, groups: None, scale: 1.0, factors: false }
    }
}

/// Division of the experts into consecutive groups of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertGroups {
    /// Number of groups.
    pub count: usize,
    /// Number of groups with the largest scores, in which experts are chosen.
    pub chosen: usize,
    /// Score of a group: the sum of this many largest scores of its experts, 1 or 2.
    pub best: usize,
}

/// An MLP without biases beside the experts, with their activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedExpert {
    /// Number of rows of the gate matrix and of the up matrix.
    pub intermediate: usize,
    /// MLP and experts have norms of their own for their inputs and outputs, and the router reads the residual stream
    /// divided by its root mean square, times factors (Gemma 4).
    #[serde(default)]
    pub norms: bool,
    /// The output of the MLP is multiplied by the sigmoid of a product of its input and a vector.
    #[serde(default, skip_serializing_if = "is_default")]
    pub gate: bool,
}

/// Set of router logits over which the softmax for the weights of the selected experts is taken.
///
/// Softmax over all logits, followed by selection and by division by the sum of the selected probabilities (Mixtral,
/// Qwen3-MoE with `norm_topk_prob`), equals softmax over the selected logits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RouterSoftmax {
    /// Softmax over the selected experts: their weights sum to one.
    #[default]
    Chosen,
    /// Softmax over all experts: the weights of the selected ones sum to less than one.
    All,
}

/// Function that combines the outputs of the gate and up matrices.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Activation {
    /// silu(gate) * up
    Silu,
    /// gelu(gate) * up with the tanh approximation of gelu.
    GeluTanh,
    /// gpt-oss: gate clamped from above, up clamped on both sides, `(up + 1) * gate * sigmoid(alpha * gate)`.
    SwigluOai { alpha: f32, limit: f32 },
    /// `relu(up)^2`, without a gate matrix (Nemotron-H).
    Relu2,
}

impl Activation {
    /// Returns true if MLPs with this activation have a gate matrix.
    pub fn is_gated(self) -> bool {
        self != Activation::Relu2
    }
}

impl Mlp {
    /// Returns the activation.
    pub fn activation(&self) -> Activation {
        let (Mlp::Dense { activation, .. } | Mlp::Moe { activation, .. }) = *self;
        activation
    }

    /// Checks sizes and activation; `name` is the field they were read from.
    pub(super) fn validate(&self, name: &str) -> Result<()> {
        let (intermediate, activation) = match *self {
            Mlp::Dense { intermediate, activation, .. } => (intermediate, activation),
            Mlp::Moe { experts, top_k, intermediate, activation, selection, shared, latent, .. } => {
                selection.validate(name, experts, top_k)?;
                let has_norms = shared.is_some_and(|shared| shared.norms);
                if let Some(width) = latent.filter(|width| has_norms || !(1..=DIM_LIMIT).contains(width)) {
                    let found = format!("found {width}, expected 1 to {DIM_LIMIT}, and no norms of experts");
                    return Err(Error::corrupt(found).tensor(format!("{name}.latent")));
                }
                if let Some(SharedExpert { intermediate, .. }) = shared
                    && (intermediate == 0 || intermediate > DIM_LIMIT)
                {
                    let found = format!("found {intermediate}, expected 1 to {DIM_LIMIT}");
                    return Err(Error::corrupt(found).tensor(format!("{name}.shared.intermediate")));
                }
                if experts == 0 || experts > 65_536 || top_k == 0 || top_k > experts {
                    return Err(Error::corrupt(format!(
                        "found {top_k} of {experts} experts per token, expected at least 1 and at most all of up to \
                         65536 experts"
                    ))
                    .tensor(format!("{name}.top_k")));
                }
                (intermediate, activation)
            }
        };
        if let Activation::SwigluOai { alpha, limit } = activation
            && !(alpha.is_finite() && limit.is_finite() && limit > 0.0)
        {
            let found = format!("found alpha {alpha} and limit {limit}, expected finite numbers and a positive limit");
            return Err(Error::corrupt(found).tensor(format!("{name}.activation")));
        }
        if intermediate == 0 || intermediate > DIM_LIMIT {
            let found = format!("found {intermediate}, expected 1 to {DIM_LIMIT}");
            return Err(Error::corrupt(found).tensor(format!("{name}.intermediate")));
        }
        Ok(())
    }
}

impl Selection {
    /// Checks the factor and the groups of `experts` experts, of which `top_k` are chosen.
    pub(super) fn validate(&self, name: &str, experts: usize, top_k: usize) -> Result<()> {
        if !self.scale.is_finite() {
            let found = format!("found {}, expected a finite number", self.scale);
            return Err(Error::corrupt(found).tensor(format!("{name}.selection.scale")));
        }
        let Some(ExpertGroups { count, chosen, best }) = self.groups else { return Ok(()) };
        let size = experts.checked_div(count).unwrap_or(0);
        let fits = (1..=2).contains(&best) && size >= best && (1..=count).contains(&chosen);
        if !fits || !experts.is_multiple_of(count) || chosen * size < top_k {
            let found = format!(
                "found {chosen} of {count} groups for {top_k} of {experts} experts, expected groups of one size that \
                 hold enough experts"
            );
            return Err(Error::corrupt(found).tensor(format!("{name}.selection.groups")));
        }
        Ok(())
    }
}
