//! Matrices of the reference, and where the parts of a layer read them.

use super::adapters::{ALL, Adapters, LowRank};
use super::config::Config;
use super::norm::Norm;
use super::weights::Weights;
use crate::error::Result;
use crate::verify::dtype::RefDtype;
use candle_core::Tensor;

/// Matrix `(out, in)` with its bias, if the checkpoint has one, and its changes by adapters.
pub(super) struct Linear {
    pub weight: Tensor,
    pub bias: Option<Tensor>,
    pub low_rank: Vec<LowRank>,
    /// Factors of the outputs without bias: `(out)`.
    pub gain: Option<Tensor>,
}

impl Linear {
    /// Makes a matrix that no adapter changes.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Linear {
        Linear { weight, bias, low_rank: Vec::new(), gain: None }
    }

    pub fn load(weights: &Weights, name: &str, dtype: RefDtype) -> Result<Linear> {
        let bias = weights.find(&format!("{name}.bias"), dtype)?;
        Ok(Linear::new(weights.get(&format!("{name}.weight"), dtype)?, bias))
    }

    /// Multiplies `(tokens, in)`; returns `(tokens, out)`.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut y = x.matmul(&self.weight.t()?)?;
        for change in &self.low_rank {
            y = (y + change.product(x)?)?;
        }
        if let Some(gain) = &self.gain {
            y = y.broadcast_mul(gain)?;
        }
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }

    /// Returns a run of rows without changes by adapters.
    pub fn rows(&self, first: usize, count: usize) -> candle_core::Result<Linear> {
        let bias = self.bias.as_ref().map(|b| b.narrow(0, first, count)).transpose()?;
        Ok(Linear::new(self.weight.narrow(0, first, count)?, bias))
    }
}

/// Place from which the parts of a layer read their weights.
#[derive(Clone, Copy)]
pub(super) struct WeightSource<'a> {
    pub config: &'a Config,
    pub weights: &'a Weights,
    pub adapters: &'a Adapters,
    /// Index of the layer.
    pub index: usize,
    pub dtype: RefDtype,
}

impl WeightSource<'_> {
    /// Returns the name by which adapters know a tensor of the layer.
    pub fn name(&self, part: &str) -> String {
        format!("model.layers.{}.{part}", self.index)
    }

    /// Returns the name of a tensor of the layer in the checkpoint.
    pub fn stored(&self, part: &str) -> String {
        self.name(&self.config.family.stored(part, self.config.norms.places))
    }

    pub fn has(&self, part: &str) -> bool {
        self.weights.has(&self.stored(part))
    }

    /// Reads a matrix and changes it by the adapters.
    pub fn linear(&self, part: &str) -> Result<Linear> {
        self.linear_as(part, part)
    }

    /// Reads a matrix that adapters know by the name `canonical`.
    pub fn linear_as(&self, part: &str, canonical: &str) -> Result<Linear> {
        self.changed(self.plain(part)?, canonical)
    }

    /// Reads a matrix as it is in the checkpoint.
    pub fn plain(&self, part: &str) -> Result<Linear> {
        Linear::load(self.weights, &self.stored(part), self.dtype)
    }

    /// Changes a matrix by the adapters.
    pub fn changed(&self, linear: Linear, canonical: &str) -> Result<Linear> {
        self.adapters.change(linear, &self.name(&format!("{canonical}.weight")), ALL)
    }

    pub fn get(&self, part: &str) -> Result<Tensor> {
        self.weights.get(&self.stored(part), self.dtype)
    }

    pub fn find(&self, part: &str) -> Result<Option<Tensor>> {
        self.weights.find(&self.stored(part), self.dtype)
    }

    /// Reads a norm of the kind that the layers have.
    pub fn norm(&self, part: &str, eps: f64) -> Result<Norm> {
        Ok(Norm::new(self.get(&format!("{part}.weight"))?, self.config.norms.kind, eps))
    }

    /// Rounds a result to the type of the reference.
    pub fn round(&self, x: Tensor) -> candle_core::Result<Tensor> {
        self.dtype.round(x)
    }
}
