//! The device memory that the walk works in, and the end of the model.

use super::args::Share;
use super::array::{Acts, Array, Forms};
use super::best::Best;
use super::context::Context;
use super::gpus::Source;
use super::multiply;
use super::ops;
use super::part::{LOGIT_ROWS, MOST_BEST};
use super::weights::{DeviceLayer, DeviceLinear, DeviceMlp, How, Uploader};
use crate::error::Result;
use crate::model_config::Mlp;
use std::sync::Arc;

/// The end of the model.
#[derive(Debug)]
pub struct Head {
    pub norm: Array<f32>,
    pub lm_head: DeviceLinear,
    /// `(LOGIT_ROWS, vocab)`.
    pub logits: Array<f32>,
    pub best: Best,
}

/// Device memory that is reused from layer to layer; `n` is the most rows of a step.
#[derive(Debug)]
pub struct Scratch {
    /// Normed inputs: `(n, hidden)`.
    pub normed: Acts,
    pub q: Array<f32>,
    pub k: Array<f32>,
    pub v: Array<f32>,
    /// `(n, n_heads * head_dim)`.
    pub attended: Acts,
    /// Partial results of attention.
    pub partial: Array<f32>,
    /// `(n, hidden)`.
    pub branch: Array<f32>,
    /// `(n, intermediate)`, or `(n * top_k, 2 * intermediate)`.
    pub gate: Array<f32>,
    /// `(n, intermediate)`.
    pub up: Array<f32>,
    /// `(n, intermediate)` or `(n * top_k, intermediate)`.
    pub middle: Acts,
    pub experts: Option<ExpertScratch>,
}

/// What a mixture needs more.
#[derive(Debug)]
pub struct ExpertScratch {
    /// `(n, experts)`.
    pub logits: Array<f32>,
    /// `(n, top_k)`.
    pub experts_of: Array<u32>,
    /// `(n, top_k)`.
    pub weights: Array<f32>,
    pub slots: Array<u32>,
    pub inputs: Array<u32>,
    pub shares: Array<Share>,
    pub count: Array<u32>,
    /// `(n * top_k, hidden)`.
    pub outputs: Array<f32>,
}

impl Head {
    /// Brings it to a device.
    ///
    /// # Errors
    /// There is no room, or the driver refuses.
    pub fn upload(uploader: &mut Uploader<'_>, source: &Source<'_>) -> Result<Head> {
        let Source { config, weights, arithmetic, .. } = *source;
        let context = uploader.context();
        Ok(Head {
            norm: uploader.vector(&weights.final_norm)?,
            logits: Array::new(context, LOGIT_ROWS * config.vocab)?,
            best: Best::new(context, LOGIT_ROWS, config.vocab, MOST_BEST)?,
            lm_head: DeviceLinear::without_bias(uploader, &[&weights.lm_head], arithmetic)?,
        })
    }
}

impl Scratch {
    /// Room for the steps of these layers.
    ///
    /// # Errors
    /// There is none.
    pub fn new(
        source: &Source<'_>,
        context: &Arc<Context>,
        layers: &[DeviceLayer],
        head: Option<&Head>,
        partial: usize,
    ) -> Result<Scratch> {
        let Source { config: c, rows, .. } = *source;
        let forms = |pick: &dyn Fn(&DeviceLayer) -> Vec<How>| {
            let hows = layers.iter().flat_map(pick);
            hows.fold(Forms::default(), |forms, how| forms.and(how.forms()))
        };
        let inputs = |layer: &DeviceLayer| {
            let mlp = match &layer.mlp {
                DeviceMlp::Dense { gate, up, .. } => [gate.how, up.how],
                DeviceMlp::Moe { router, gate_up, .. } => [router.how, gate_up.how],
            };
            [layer.q.how, layer.k.how, layer.v.how].into_iter().chain(mlp).collect()
        };
        let down = |layer: &DeviceLayer| match &layer.mlp {
            DeviceMlp::Dense { down, .. } | DeviceMlp::Moe { down, .. } => vec![down.how],
        };
        let (q, kv) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
        let (gate, up, middle, experts) = match c.mlp {
            Mlp::Dense { intermediate, .. } => (rows * intermediate, rows * intermediate, (rows, intermediate), None),
            Mlp::Moe { experts, top_k, intermediate, .. } => {
                let pairs = rows * top_k;
                let scratch = ExpertScratch::new(context, rows, experts, top_k, c.hidden)?;
                (pairs * 2 * intermediate, 0, (pairs, intermediate), Some(scratch))
            }
        };
        let normed = head.map_or(forms(&inputs), |head| forms(&inputs).and(head.lm_head.how.forms()));
        Ok(Scratch {
            normed: Acts::new(context, normed, rows, c.hidden)?,
            q: Array::new(context, rows * q)?,
            k: Array::new(context, rows * kv)?,
            v: Array::new(context, rows * kv)?,
            attended: Acts::new(context, forms(&|layer| vec![layer.o.how]), rows, q)?,
            partial: Array::new(context, partial)?,
            branch: Array::new(context, rows * c.hidden)?,
            gate: Array::new(context, gate)?,
            up: Array::new(context, up)?,
            middle: Acts::new(context, forms(&down), middle.0, middle.1)?,
            experts,
        })
    }
}

impl ExpertScratch {
    fn new(context: &Arc<Context>, rows: usize, experts: usize, top_k: usize, hidden: usize) -> Result<ExpertScratch> {
        let pairs = rows * top_k;
        Ok(ExpertScratch {
            logits: Array::new(context, rows * experts)?,
            experts_of: Array::new(context, pairs)?,
            weights: Array::new(context, pairs)?,
            slots: Array::new(context, pairs)?,
            inputs: Array::new(context, pairs)?,
            shares: Array::new(context, ops::most_shares(pairs, experts, multiply::FEW))?,
            count: Array::new(context, 1)?,
            outputs: Array::new(context, pairs * hidden)?,
        })
    }
}
