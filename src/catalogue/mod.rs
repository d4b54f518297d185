//! Catalogue of the tensors of a model: canonical name, shape, role, adapter target and calibration site of each
//! tensor, in one row.
//!
//! Canonical names are those of Hugging Face's Llama and gpt-oss; converters map every other naming onto them. The rows
//! of a layer ([`LAYER`]) follow from the configuration of the model and of the layer, so one list serves all layers.
//! Conversion takes from it the tensors that a model must have, the runtime their shapes and the matrices that adapters
//! change, calibration the inputs that matrices share, and quantization the roles. The independent reference of
//! `iec verify` does not use it.
//!
//! ```text
//! model.embed_tokens.weight                                  (vocab, hidden)
//! model.layers.N.input_layernorm.weight                      (hidden)
//! model.layers.N.self_attn.{q,k,v,o}_proj.{weight,bias}      (out, in) / (out)
//! model.layers.N.self_attn.{q,k}_norm.weight                 (head_dim); one norm for all heads; or (heads * head_dim)
//! model.layers.N.self_attn.gate_proj.weight                  (heads * head_dim, hidden) or (heads, hidden); gate of
//!                                                            the heads' outputs
//! model.layers.N.self_attn.{q_a,q_b,kv_b}_proj.weight, .kv_a_proj_with_mqa.weight, .{q_a,kv_a}_layernorm.weight
//!                                                            latent attention, see [`crate::model_config::Latent`]
//! model.layers.N.self_attn.sinks                             (n_heads)
//! model.layers.N.conv.{in,out}_proj.{weight,bias}            (out, in) / (out); gated short convolution in place of
//! model.layers.N.conv.conv.{weight,bias}                     attention: (hidden, 1, width) / (hidden)
//! model.layers.N.linear_attn.{q,k,v,z,b,a,out}_proj.weight   gated delta net, see
//! model.layers.N.linear_attn.conv1d.weight, .norm.weight     [`crate::model_config::GatedDeltaNet`]
//! model.layers.N.linear_attn.{A_log or A,dt_bias}            (value_heads)
//! model.layers.N.mamba.{z,x,b,c,dt,out}_proj.{weight,bias}   Mamba-2, see [`crate::model_config::Mamba2`]
//! model.layers.N.mamba.conv1d.{weight,bias}, .norm.weight    (channels, 1, width), (values)
//! model.layers.N.mamba.{A_log,dt_bias,D}                     (heads)
//! model.layers.N.post_attention_layernorm.weight             (hidden); norm of the MLP's input; with post norms: of
//!                                                            attention's output, and the next two exist, too:
//! model.layers.N.{pre,post}_feedforward_layernorm.weight     (hidden); input and output of the MLP
//! model.layers.N.mlp.{gate,up,down}_proj.{weight,bias}       (out, in) / (out)
//! model.layers.N.mlp.router.{weight,bias}                    (experts, hidden) / (experts)
//! model.layers.N.mlp.router.selection_bias                   (experts); added to scores for the choice of experts
//! model.layers.N.mlp.shared_experts.{gate,up,down}_proj.weight   (out, in); an MLP beside the experts
//! model.layers.N.mlp.latent_{down,up}_proj.weight            (out, in); to narrower vectors for the experts, and back
//! model.layers.N.mlp.experts.{gate_up,down}_proj             (experts, out, in); gate and up rows alternate; `up_proj`
//! model.layers.N.mlp.experts.{gate_up,down}_proj_bias        (experts, out)      where there are no gates
//! model.layers.N.mlp.{experts.pre,experts.post,shared_experts.post}_layernorm.weight   (hidden)
//! model.layers.N.mlp.router.{input_scale,expert_scale}       (hidden) / (experts)
//! model.layers.N.{per_layer_input_gate,per_layer_projection}.weight, .post_per_layer_input_norm.weight,
//! model.{embed_tokens_per_layer,per_layer_model_projection,per_layer_projection_norm}.weight
//!                                                            further inputs of layers (Gemma 4 E2B and E4B)
//! model.layers.N.layer_scalar                                (1); factor at the end of the layer
//! model.norm.weight                                          (hidden)
//! lm_head.weight                                             (vocab, hidden); absent if the embedding is used instead
//! mtp.layers.N.{enorm,hnorm}.weight                          (hidden); multi-token prediction: norms of the embedding
//! mtp.layers.N.eh_proj.weight                                (hidden, 2 hidden)      and of what the model computed
//! mtp.layers.N.*                                             tensors of a decoder layer
//! mtp.layers.N.norm.weight                                   (hidden)
//! mtp.*                                                      other tensors of multi-token prediction, kept only
//! ```

mod layer;
pub mod prediction;
mod role;

pub use layer::LAYER;
pub use role::Role;

use crate::model_config::{LayerConfig, ModelConfig, PerLayerInput};

/// Beginning of the names of tensors of layers, before the number of the layer.
const LAYERS: &str = "model.layers.";

/// A tensor that layers may have.
#[derive(Debug)]
pub struct LayerTensor {
    /// Name behind that of the layer: `self_attn.q_proj.weight`.
    pub name: &'static str,
    /// Name in GGUF behind that of the layer: `attn_q.weight`. It is empty where the tensor is two tensors in GGUF, or
    /// has another name in each family.
    pub gguf: &'static str,
    /// Role in the model.
    pub role: Role,
    /// Target of adapters, for matrices that they may change.
    pub target: Option<Target>,
    /// Inputs of which calibration collects statistics, for matrices that read such.
    pub input: Option<LayerInput>,
    shape: fn(&ModelConfig, &LayerConfig) -> Option<Vec<usize>>,
}

impl LayerTensor {
    /// Finds the row of a name behind that of the layer.
    pub fn of(name: &str) -> Option<&'static LayerTensor> {
        LAYER.iter().find(|tensor| tensor.name == name)
    }

    /// Returns the shape in a layer, linear layers as `(out, in)`; `None` if the layer has no such tensor.
    pub fn shape(&self, model: &ModelConfig, layer: &LayerConfig) -> Option<Vec<usize>> {
        (self.shape)(model, layer)
    }
}

/// A tensor that models may have outside their layers.
#[derive(Debug)]
pub struct ModelTensor {
    /// Canonical name.
    pub name: &'static str,
    /// Role in the model.
    pub role: Role,
    /// Whether a forward pass needs it after the layers.
    pub is_after_layers: bool,
    shape: fn(&ModelConfig) -> Option<Vec<usize>>,
}

impl ModelTensor {
    /// Finds the row of a name.
    pub fn of(name: &str) -> Option<&'static ModelTensor> {
        MODEL.iter().find(|tensor| tensor.name == name)
    }

    /// Returns the shape; `None` if the model has no such tensor.
    pub fn shape(&self, model: &ModelConfig) -> Option<Vec<usize>> {
        (self.shape)(model)
    }
}

/// Embedding of the tokens.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Norm before the output matrix.
pub const FINAL_NORM: &str = "model.norm.weight";
/// Output matrix, where it is not the embedding.
pub const LM_HEAD: &str = "lm_head.weight";
/// Embedding of the further inputs of all layers.
pub const FURTHER_EMBEDDING: &str = "model.embed_tokens_per_layer.weight";
/// Projection of the embedding to the further inputs of all layers.
pub const FURTHER_PROJECTION: &str = "model.per_layer_model_projection.weight";
/// Norm of the projection, layer by layer.
pub const FURTHER_NORM: &str = "model.per_layer_projection_norm.weight";

/// Tensors outside the layers, in the order in which a forward pass needs them. The embedding of further inputs belongs
/// to Gemma 4 E2B and E4B.
pub const MODEL: &[ModelTensor] = &[
    ModelTensor {
        name: EMBEDDING,
        role: Role::Embedding,
        is_after_layers: false,
        shape: |model| Some(vec![model.vocab, model.hidden]),
    },
    ModelTensor {
        name: FURTHER_EMBEDDING,
        role: Role::Embedding,
        is_after_layers: false,
        shape: |model| model.per_layer_input.map(|input| vec![input.vocab, further_width(model, input)]),
    },
    ModelTensor {
        name: FURTHER_PROJECTION,
        role: Role::Other,
        is_after_layers: false,
        shape: |model| model.per_layer_input.map(|input| vec![further_width(model, input), model.hidden]),
    },
    ModelTensor {
        name: FURTHER_NORM,
        role: Role::Norm,
        is_after_layers: false,
        shape: |model| model.per_layer_input.map(|input| vec![input.width]),
    },
    ModelTensor { name: FINAL_NORM, role: Role::Norm, is_after_layers: true, shape: |model| Some(vec![model.hidden]) },
    ModelTensor {
        name: LM_HEAD,
        role: Role::LmHead,
        is_after_layers: true,
        shape: |model| (!model.tied_embeddings).then(|| vec![model.vocab, model.hidden]),
    },
];

/// Returns the width of the further inputs of all layers together.
fn further_width(model: &ModelConfig, input: PerLayerInput) -> usize {
    input.width.saturating_mul(model.n_layers)
}

/// Returns all tensors of a model, names and shapes, in the order in which a forward pass needs them, then those of its
/// layers of multi-token prediction.
pub fn tensors(model: &ModelConfig) -> impl Iterator<Item = (String, Vec<usize>)> {
    let outside = |after| {
        let tensors = MODEL.iter().filter(move |tensor| tensor.is_after_layers == after);
        tensors.filter_map(|tensor| Some((tensor.name.to_string(), tensor.shape(model)?)))
    };
    let of_layers = (0..model.n_layers).flat_map(move |n| {
        let layer = model.layer(n);
        LAYER.iter().filter_map(move |tensor| Some((name_in_layer(n, tensor.name), tensor.shape(model, &layer)?)))
    });
    outside(false).chain(of_layers).chain(outside(true)).chain(prediction::tensors(model))
}

/// Returns the canonical name of a tensor of layer `n`.
pub fn name_in_layer(n: usize, name: &str) -> String {
    format!("{LAYERS}{n}.{name}")
}

/// Splits `model.layers.N.rest` into N and rest.
pub fn layer_part(canonical: &str) -> Option<(&str, &str)> {
    canonical.strip_prefix(LAYERS)?.split_once('.')
}

/// Matrices of a layer that an adapter may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Query projection, also that of the vectors of queries in latent attention.
    Q,
    /// Key projection.
    K,
    /// Value projection.
    V,
    /// Output projection of attention.
    O,
    /// Gate of the MLP.
    Gate,
    /// Up projection of the MLP.
    Up,
    /// Down projection of the MLP.
    Down,
    /// Router of the experts.
    Router,
    /// Gate of the attention output.
    OutputGate,
    /// Gate of the MLP beside experts.
    SharedGate,
    /// Up projection of the MLP beside experts.
    SharedUp,
    /// Down projection of the MLP beside experts.
    SharedDown,
    /// Projection to the vector of queries in latent attention.
    QLatent,
    /// Projection to the vector of keys and values in latent attention.
    KvLatent,
    /// Projection from this vector to keys and values, where it is multiplied as a whole.
    KvHeads,
    /// Gate of the further input of a layer.
    InputGate,
    /// Projection of the further input of a layer.
    InputProjection,
    /// Gate of the output of the MLP beside experts.
    SharedOutputGate,
    /// Input projection of a recurrent mixer.
    MixerInput,
    /// Projection to the rates of a gated delta net.
    MixerRate,
    /// Projection to the decays of a gated delta net.
    MixerDecay,
    /// Output projection of a recurrent mixer.
    MixerOutput,
    /// Projection to the vector that experts read, where it is narrower than the residual stream.
    LatentDown,
    /// Projection of the output of such experts.
    LatentUp,
}

impl Target {
    /// All targets.
    pub const ALL: [Target; 24] = [
        Target::Q,
        Target::K,
        Target::V,
        Target::O,
        Target::Gate,
        Target::Up,
        Target::Down,
        Target::Router,
        Target::OutputGate,
        Target::SharedGate,
        Target::SharedUp,
        Target::SharedDown,
        Target::QLatent,
        Target::KvLatent,
        Target::KvHeads,
        Target::InputGate,
        Target::InputProjection,
        Target::SharedOutputGate,
        Target::MixerInput,
        Target::MixerRate,
        Target::MixerDecay,
        Target::MixerOutput,
        Target::LatentDown,
        Target::LatentUp,
    ];
}

/// Inputs within a layer that share one set of statistics.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerInput {
    /// Normalized input of the q, k and v projections, or of those of a recurrent mixer.
    Attention,
    /// Output of attention before the o projection, or of a recurrent mixer before its output projection.
    AttentionOutput,
    /// Normalized input of the gate and up projections.
    Mlp,
    /// Input of the down projection, after the activation function.
    MlpMiddle,
    /// Normalized input of each expert, for the tokens routed to it.
    Experts,
    /// Input of each expert's down projection, after the activation function.
    ExpertsMiddle,
    /// Normalized input of the output matrix.
    LmHead,
}

impl LayerInput {
    /// Returns the name in files of calibration statistics.
    pub fn name(self) -> &'static str {
        match self {
            LayerInput::Attention => "attention",
            LayerInput::AttentionOutput => "attention_output",
            LayerInput::Mlp => "mlp",
            LayerInput::MlpMiddle => "mlp_middle",
            LayerInput::Experts => "experts",
            LayerInput::ExpertsMiddle => "experts_middle",
            LayerInput::LmHead => "lm_head",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_targets_are_unique() {
        for (i, tensor) in LAYER.iter().enumerate() {
            assert!(LAYER[..i].iter().all(|other| other.name != tensor.name), "{}", tensor.name);
        }
        // A target is one matrix of a layer. Queries come from one of two matrices.
        let mut targets: Vec<usize> = LAYER.iter().filter_map(|tensor| Some(tensor.target? as usize)).collect();
        targets.sort_unstable();
        targets.dedup();
        assert_eq!(targets, Target::ALL.map(|target| target as usize));
    }

    #[test]
    fn only_matrices_have_targets_and_inputs() {
        for tensor in LAYER.iter().filter(|tensor| tensor.target.is_some() || tensor.input.is_some()) {
            let is_matrix = tensor.name.ends_with("_proj.weight")
                || ["mqa.weight", "_proj", "router.weight", "_gate.weight", "projection.weight"]
                    .iter()
                    .any(|end| tensor.name.ends_with(end));
            assert!(is_matrix, "{}", tensor.name);
        }
    }
}
