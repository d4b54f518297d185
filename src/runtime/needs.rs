//! Memory that a model needs on the CPU, computed before anything is loaded, by the functions that allocate it later.

use super::forward::states::StateLayout;
use super::kv::{KvLayout, KvType, PAGE};
use super::open::{EngineOptions, NumberTypes};
use super::precision::Precision;
use super::weights::HeldBytes;
use crate::error::Result;
use crate::iebin::IebinReader;
use crate::model_config::{Mixer, Mlp, ModelConfig, Recurrent};

/// Memory of a model with given options.
#[derive(Debug)]
pub struct Needs {
    /// Number types.
    pub precision: Precision,
    /// Length in tokens of the longest sequence.
    pub context: usize,
    /// Type of cached keys and values.
    pub kv: KvType,
    /// Bytes of the pool of KV pages, if it has a budget.
    pub kv_pool: Option<u64>,
    /// Bytes of the weights.
    pub weights: HeldBytes,
    config: ModelConfig,
    prefill_chunk: usize,
    kv_layout: KvLayout,
    states: StateLayout,
}

impl Needs {
    /// Computes the memory that the model of a pack needs with these options. No weight is read.
    ///
    /// # Errors
    /// The options do not suit the pack, as for [`super::Engine::open`].
    pub fn of(reader: &IebinReader, options: &EngineOptions) -> Result<Needs> {
        let NumberTypes { config, precision, context, kv_layout, kv_pages, convert } =
            NumberTypes::new(reader, options, false)?;
        Ok(Needs {
            precision,
            context,
            kv: kv_layout.kind,
            kv_pool: kv_pages.map(|pages| kv_layout.bytes(PAGE).saturating_mul(pages as u64)),
            weights: HeldBytes::of(reader, &config, convert, precision.arithmetic())?,
            prefill_chunk: options.prefill_chunk.max(1),
            states: StateLayout::of(&config, 0..config.n_layers),
            config,
            kv_layout,
        })
    }

    /// Returns the largest context of the model.
    pub fn max_context(&self) -> usize {
        self.config.max_context
    }

    /// Returns the bytes of the KV cache of one sequence of `tokens` tokens with elements of type `kind`, and those of
    /// its recurrent layers.
    pub fn kv_bytes(&self, kind: KvType, tokens: usize) -> u64 {
        self.kv_layout.with_kind(kind).bytes(tokens).saturating_add(self.states.text_bytes() as u64)
    }

    /// Returns the bytes of the buffers of a step and of the logits of `sequences` sequences of `context` tokens.
    pub fn scratch_bytes(&self, context: usize, sequences: usize) -> u64 {
        let rows = self.prefill_chunk.min(context).max(sequences);
        scratch_bytes(&self.config, rows) + (2 * size_of::<f32>() * self.config.vocab * sequences) as u64
    }
}

/// Returns the bytes of the buffers for `rows` rows of a step: the residual stream, normalized inputs, queries, keys,
/// values and the results of attention and MLP.
pub(super) fn scratch_bytes(c: &ModelConfig, rows: usize) -> u64 {
    let widths = |mixer: Mixer| match mixer {
        // Queries and results of all heads as wide as the vector that is kept, and the same by heads.
        Mixer::Latent(heads, latent) => (5 * heads.n_heads + 3) * (latent.kv_rank + latent.rope),
        // Projections and inputs of the convolution, and its output.
        Mixer::Recurrent(Recurrent::ShortConv(_)) => 5 * c.hidden,
        // Projections, and the output before and after its norm.
        Mixer::Recurrent(Recurrent::GatedDeltaNet(net)) => net.channels() + 3 * net.values() + 2 * net.value_heads,
        Mixer::Recurrent(Recurrent::Mamba2(mamba)) => mamba.channels() + 3 * mamba.values() + mamba.heads,
        Mixer::Attention(heads) => (3 * heads.n_heads + 2 * heads.n_kv_heads) * heads.head_dim,
    };
    let attention = c.layers().filter_map(|layer| layer.mixer).map(widths).max().unwrap_or(0);
    let further = c.per_layer_input.map_or(0, |input| 2 * input.width * c.n_layers);
    let mlp = |mlp: Mlp| match mlp {
        Mlp::Dense { intermediate, .. } => 4 * intermediate,
        Mlp::Moe { top_k, intermediate, .. } => top_k * (4 * intermediate + c.hidden),
    };
    let mlp = c.mlps().map(mlp).max().unwrap_or(0);
    (size_of::<f32>() * (4 * c.hidden + attention + mlp + further) * rows) as u64
}
