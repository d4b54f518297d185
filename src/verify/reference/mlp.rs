//! Feed-forward part of a layer: a dense MLP, experts selected by a router, or both side by side.

use super::config::Activation;
use super::experts::Experts;
use super::linear::{Linear, WeightSource};
use super::norm::{Norm, silu};
use crate::error::Result;
use candle_core::Tensor;

pub(super) enum Mlp<'a> {
    Dense(Dense<'a>),
    Experts(Box<Experts<'a>>),
    Beside(Box<Beside<'a>>),
}

/// Dense MLP: `down(act(gate(x)) * up(x))`, or `down(act(up(x)))`.
pub(super) struct Dense<'a> {
    pub source: WeightSource<'a>,
    pub gate: Option<Linear>,
    pub up: Linear,
    pub down: Linear,
}

/// Experts beside a dense MLP, as in Gemma 4. The router and the experts read the hidden state before the norm that the
/// MLP reads.
pub(super) struct Beside<'a> {
    source: WeightSource<'a>,
    dense: Dense<'a>,
    experts: Experts<'a>,
    /// Norm of the output of the dense MLP.
    after_dense: Norm,
    before_experts: Norm,
    after_experts: Norm,
    /// Factors of the router's input: `(hidden)`.
    router_scale: Tensor,
}

impl<'a> Mlp<'a> {
    pub fn load(source: WeightSource<'a>) -> Result<Mlp<'a>> {
        let config = source.config;
        if config.routing.count == 0 || config.layers[source.index].dense {
            return Ok(Mlp::Dense(Dense::load(source, "mlp")?));
        }
        match source.has("router.proj.weight") {
            true => Ok(Mlp::Beside(Box::new(Beside::load(source)?))),
            false => Ok(Mlp::Experts(Box::new(Experts::load(source)?))),
        }
    }

    /// Computes the output `(tokens, hidden)` from the normalized hidden state `x` and from the hidden state itself.
    pub fn forward(&self, x: &Tensor, hidden: &Tensor) -> Result<Tensor> {
        match self {
            Mlp::Dense(dense) => Ok(dense.forward(x)?),
            Mlp::Experts(experts) => experts.forward(x, x),
            Mlp::Beside(beside) => beside.forward(x, hidden),
        }
    }
}

impl<'a> Dense<'a> {
    /// Reads `mlp`, which adapters know by the name `canonical`.
    pub fn load(source: WeightSource<'a>, canonical: &str) -> Result<Dense<'a>> {
        let changed = |linear, name: &str| source.changed(linear, &format!("{canonical}.{name}"));
        // Granite 4 has other names, also where every token passes this MLP beside experts.
        let of_granite = source.has("shared_mlp.input_linear.weight");
        let fused = if of_granite { "shared_mlp.input_linear" } else { "mlp.gate_up_proj" };
        let down = if of_granite { "shared_mlp.output_linear" } else { "mlp.down_proj" };
        let (gate, up) = if source.has(&format!("{fused}.weight")) {
            let both = source.plain(fused)?;
            let half = both.weight.dim(0)? / 2;
            (Some(both.rows(0, half)?), both.rows(half, half)?)
        } else {
            let gate = (source.config.activation != Activation::Relu2).then(|| source.plain("mlp.gate_proj"));
            (gate.transpose()?, source.plain("mlp.up_proj")?)
        };
        Ok(Dense {
            source,
            gate: gate.map(|gate| changed(gate, "gate_proj")).transpose()?,
            up: changed(up, "up_proj")?,
            down: changed(source.plain(down)?, "down_proj")?,
        })
    }

    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let up = self.source.round(self.up.forward(x)?)?;
        let gate = match &self.gate {
            Some(gate) => self.source.round(gate.forward(x)?)?,
            None => up.clone(),
        };
        let inner = gated(self.source.config.activation, &gate, &up)?;
        self.source.round(self.down.forward(&self.source.round(inner)?)?)
    }
}

/// Returns `up` multiplied by the activation of `gate`.
pub(super) fn gated(activation: Activation, gate: &Tensor, up: &Tensor) -> candle_core::Result<Tensor> {
    match activation {
        Activation::Silu => silu(gate, 1.0)? * up,
        Activation::GeluTanh => gate.gelu()? * up,
        Activation::Clamped(limit) => {
            let gate = gate.minimum(limit)?;
            let up = up.clamp(-limit, limit)?;
            (up + 1.0)? * silu(&gate, 1.702)?
        }
        Activation::Relu2 => up.relu()?.sqr(),
    }
}

impl<'a> Beside<'a> {
    fn load(source: WeightSource<'a>) -> Result<Beside<'a>> {
        let norm = |name: &str| source.norm(name, source.config.norms.eps);
        Ok(Beside {
            source,
            dense: Dense::load(source, "mlp.shared_experts")?,
            experts: Experts::load(source)?,
            after_dense: norm("post_feedforward_layernorm_1")?,
            before_experts: norm("pre_feedforward_layernorm_2")?,
            after_experts: norm("post_feedforward_layernorm_2")?,
            router_scale: source.get("router.scale")?,
        })
    }

    fn forward(&self, x: &Tensor, hidden: &Tensor) -> Result<Tensor> {
        let round = |x: candle_core::Result<Tensor>| x.and_then(|x| self.source.round(x));
        let dense = round(self.after_dense.forward(&self.dense.forward(x)?))?;
        let routed = round(Norm::unit(self.source.config.norms.eps).forward(hidden))?;
        let routed = round(routed.broadcast_mul(&self.router_scale))?;
        let routed = round(routed * (hidden.dim(1)? as f64).powf(-0.5))?;
        let experts = self.experts.forward(&round(self.before_experts.forward(hidden))?, &routed)?;
        let experts = round(self.after_experts.forward(&experts))?;
        Ok(round(dense + experts)?)
    }
}
