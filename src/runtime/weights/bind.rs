//! Binding: finds the tensors of a pack that the model configuration requires and assigns them to the layers.

use super::rebuilt::Rebuilt;
use super::rebuilt::cache::Cache;
use super::{BindForm, Exchange, Host, JoinWeights, Linear, PerLayerWeights, Shape, Weight, Weights, take};
use crate::catalogue::{
    EMBEDDING, FINAL_NORM, FURTHER_EMBEDDING, FURTHER_NORM, FURTHER_PROJECTION, LM_HEAD, LayerTensor, ModelTensor,
    Role, name_in_layer, prediction,
};
use crate::dtype::{DType, decode_floats};
use crate::error::{Context, Error, Result};
use crate::iebin::{Entry, IebinReader, Store};
use crate::interrupt;
use crate::model_config::{
    self as config, Activation, Heads, Latent, LayerConfig, Mixer, ModelConfig, QkNorm, Recurrent,
};
use crate::runtime::cpu::{Matrix, MatrixStore};
use crate::runtime::layer::{
    Attention, AttentionShape, Block, BlockInput, DeltaNet, LatentAttention, Layer, Mamba, MixtureNorms, Mlp, Moe,
    Operation, ShortConv, TokenInput,
};
use crate::windowed::Windowed;
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::sync::Arc;

/// A pack and the names of the tensors bound so far.
pub(super) struct Binder<'a> {
    reader: &'a IebinReader,
    convert: Option<DType>,
    bound: RefCell<HashSet<String>>,
    cache: Option<Arc<Cache>>,
    form: BindForm,
    /// Bytes of further tensors that may become hot, see [`Keep::hot_bytes`](crate::iebin::rebuild::Keep::hot_bytes).
    hot_bytes_left: Cell<u64>,
}

impl<'a> Binder<'a> {
    /// Creates a binder that has bound nothing yet.
    pub(super) fn new(reader: &'a IebinReader, convert: Option<DType>, form: BindForm) -> Binder<'a> {
        let keep = reader.rebuilt().map(|(_, keep)| keep);
        Binder {
            reader,
            convert,
            bound: RefCell::default(),
            cache: keep.map(|keep| Arc::new(Cache::new(keep.limit))),
            form,
            hot_bytes_left: Cell::new(keep.map_or(0, |keep| keep.hot_bytes)),
        }
    }

    /// Binds every tensor of the model.
    pub(super) fn model(&self, c: &ModelConfig) -> Result<Weights> {
        let shape = |name| ModelTensor::of(name).and_then(|tensor| tensor.shape(c));
        let matrix = |name| match shape(name) {
            Some(shape) => self.matrix(name, shape[0], shape[1]).map(Some),
            None => Ok(None),
        };
        let absent = |name| Error::corrupt("found a description without this tensor").tensor(name);
        let norm = |name| {
            let shape = shape(name).ok_or_else(|| absent(name))?;
            if name == FINAL_NORM && c.plain_final_norm {
                self.floats(name, &shape)
            } else {
                self.norm(c, name, &shape)
            }
        };
        let embedding = matrix(EMBEDDING)?.ok_or_else(|| absent(EMBEDDING))?;
        let per_layer = match (matrix(FURTHER_EMBEDDING)?, matrix(FURTHER_PROJECTION)?) {
            (Some(embedding), Some(projection)) => Some(PerLayerWeights {
                embedding,
                projection: Linear { matrix: projection, bias: None, identity: None },
                norm: norm(FURTHER_NORM)?,
            }),
            _ => None,
        };
        let layers = (0..c.n_layers).map(|n| LayerBinder::new(self, c, n).layer()).collect::<Result<Vec<_>>>()?;
        let final_norm = norm(FINAL_NORM)?;
        let lm_head = matrix(LM_HEAD)?.unwrap_or_else(|| embedding.clone());
        self.refuse_leftovers()?;
        Ok(Weights { embedding, per_layer, join: None, layers, final_norm, lm_head, cache: self.cache.clone() })
    }

    /// Binds the tensors of a layer of multi-token prediction, see [`Weights::bind_prediction`].
    pub(super) fn prediction(&self, c: &ModelConfig, main: &Weights, number: usize) -> Result<Weights> {
        let norm = |leaf| self.norm(c, &prediction::name(number, leaf), &[c.hidden]);
        let projection = self.matrix(&prediction::name(number, prediction::PROJECTION), c.hidden, 2 * c.hidden)?;
        let join = JoinWeights {
            embedding_norm: norm(prediction::EMBEDDING_NORM)?,
            hidden_norm: norm(prediction::HIDDEN_NORM)?,
            projection: Linear { matrix: projection, bias: None, identity: None },
        };
        let layer = LayerBinder { prefix: prediction::name(number, ""), ..LayerBinder::new(self, c, 0) };
        Ok(Weights {
            embedding: main.embedding.clone(),
            per_layer: None,
            join: Some(join),
            layers: vec![layer.layer()?],
            final_norm: norm(prediction::OUTPUT_NORM)?,
            lm_head: main.lm_head.clone(),
            cache: self.cache.clone(),
        })
    }

    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Weight> {
        let entry = self.entry(name, &[rows, cols])?;
        let mut matrices = self.bind_matrices(entry, [1, rows, cols]).tensor(name)?;
        Ok(matrices.remove(0))
    }

    /// Binds the matrices of a tensor, which all have the same size.
    fn bind_matrices(&self, entry: &Entry, [matrices, rows, cols]: [usize; 3]) -> Result<Vec<Weight>> {
        let shape = Shape::new(entry.store, rows, cols, self.convert)?;
        let each = entry.nbytes / matrices;
        let range = |i: usize| i * each..(i + 1) * each;
        let Some((source, cache)) = self.reader.rebuilt().map(|(source, _)| source).zip(self.cache.as_ref()) else {
            let payload = self.reader.payload(entry)?;
            let own = |matrix| match self.form.exchanged {
                true => Weight::Exchanged(Arc::new(Exchange::new(matrix))),
                false => Weight::Here(matrix),
            };
            return (0..matrices).map(|i| shape.matrix(payload.slice(range(i))).map(own)).collect();
        };
        let tensor = self.reader.position(&entry.name).expect("an entry of this reader");
        let name: Arc<str> = entry.name.as_str().into();
        let hot = self.is_hot(entry);
        let bind = |i| {
            if !hot && let Some(numbers) = self.windowed(shape, || source.windowed(tensor, range(i))) {
                return Matrix::windowed(rows, cols, numbers).map(Weight::Here);
            }
            Rebuilt::new(&name, shape, (tensor, i), range(i), source.clone(), cache.clone()).map(Weight::Rebuilt)
        };
        (0..matrices).map(bind).collect()
    }

    /// Returns the compressed numbers of a matrix if kernels can and should read it in that form.
    fn windowed(&self, shape: Shape, numbers: impl FnOnce() -> Option<Windowed>) -> Option<Windowed> {
        let plain = shape.from.is_none() && shape.store == MatrixStore::Plain(DType::BF16);
        if plain && self.form.in_place { numbers() } else { None }
    }

    /// Returns true for hot tensors, which are rebuilt before the first token and always kept. It must be called for
    /// tensors in the order of their use, because it also counts down the bytes that are left for hot tensors.
    fn is_hot(&self, entry: &Entry) -> bool {
        let Some((_, keep)) = self.reader.rebuilt() else { return false };
        if keep.hot.contains(&entry.name) {
            return true;
        }
        if entry.name == EMBEDDING {
            return false;
        }
        let mut left = self.hot_bytes_left.get();
        let fits = take(&mut left, entry.nbytes);
        self.hot_bytes_left.set(left);
        fits
    }

    /// Returns the factors of a norm.
    fn norm(&self, c: &ModelConfig, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let mut weight = self.floats(name, shape)?;
        if c.norm_plus_one {
            weight.iter_mut().for_each(|w| *w += 1.0);
        }
        Ok(weight)
    }

    fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let entry = self.entry(name, shape)?;
        let Store::Plain(dtype) = entry.store else {
            return Err(Error::unsupported("found quantized codes, expected floats").tensor(name));
        };
        let mut values = vec![0.0; entry.elements()];
        decode_floats(dtype, &self.reader.payload(entry)?, &mut values).tensor(name)?;
        Ok(values)
    }

    fn entry(&self, name: &str, shape: &[usize]) -> Result<&Entry> {
        let Some(entry) = self.reader.get(name) else {
            return Err(Error::corrupt(format!("found no such tensor, expected one of shape {shape:?}")).tensor(name));
        };
        if entry.shape != shape {
            return Err(Error::corrupt(format!("found shape {:?}, expected {shape:?}", entry.shape)).tensor(name));
        }
        self.bound.borrow_mut().insert(name.to_string());
        Ok(entry)
    }

    /// Returns an error if the pack has a tensor that the model does not use, because ignoring it would silently run a
    /// different model. Only rotary frequencies, which are computed, and the tensors of multi-token prediction are
    /// ignored.
    fn refuse_leftovers(&self) -> Result<()> {
        let bound = self.bound.borrow();
        let harmless = |name: &str| name.ends_with("rotary_emb.inv_freq") || Role::of(name) == Role::Prediction;
        match self.reader.entries().iter().find(|e| !bound.contains(&e.name) && !harmless(&e.name)) {
            Some(extra) => {
                Err(Error::unsupported("found a tensor that the described model does not use").tensor(&extra.name))
            }
            None => Ok(()),
        }
    }
}

/// Binds the tensors of one layer, whose names and shapes are those of the catalogue.
struct LayerBinder<'b, 'a> {
    binder: &'b Binder<'a>,
    model: &'b ModelConfig,
    layer: LayerConfig,
    n: usize,
    /// Beginning of the names of its tensors.
    prefix: String,
}

impl<'b, 'a> LayerBinder<'b, 'a> {
    fn new(binder: &'b Binder<'a>, model: &'b ModelConfig, n: usize) -> LayerBinder<'b, 'a> {
        LayerBinder { binder, model, layer: model.layer(n), n, prefix: name_in_layer(n, "") }
    }

    /// Returns the name of a tensor of the layer.
    fn name(&self, leaf: &str) -> String {
        format!("{}{leaf}", self.prefix)
    }

    fn layer(&self) -> Result<Layer<Host>> {
        interrupt::check()?;
        let c = self.model;
        let input = |name: &str| Ok::<_, Error>(self.norm_if(name)?.map_or(BlockInput::Stream, BlockInput::Normed));
        let post_norm = |name: &str| if c.post_norms { self.norm_if(name) } else { Ok(None) };
        // In models with post norms, `post_attention` is one of them; in others, it is the norm before the MLP.
        let mlp_input = match (c.parallel, c.post_norms) {
            (true, _) => BlockInput::Previous,
            (false, true) => input("pre_feedforward_layernorm.weight")?,
            (false, false) => input("post_attention_layernorm.weight")?,
        };
        let mixer = |mixer| {
            Ok::<_, Error>(match mixer {
                Mixer::Attention(heads) => Operation::Attention(self.attention(&heads)?),
                Mixer::Latent(heads, latent) => Operation::Latent(self.latent_attention(&heads, latent)?),
                Mixer::Recurrent(Recurrent::ShortConv(conv)) => Operation::ShortConv(self.short_conv(conv)?),
                Mixer::Recurrent(Recurrent::GatedDeltaNet(sizes)) => Operation::DeltaNet(self.delta_net(sizes)?),
                Mixer::Recurrent(Recurrent::Mamba2(sizes)) => Operation::Mamba(self.mamba(sizes)?),
            })
        };
        let mut blocks = Vec::new();
        if let Some(config) = self.layer.mixer {
            blocks.push(Block {
                input: input("input_layernorm.weight")?,
                operation: mixer(config)?,
                post_norm: post_norm("post_attention_layernorm.weight")?,
            });
        }
        if let Some(config) = self.layer.mlp {
            blocks.push(Block {
                input: mlp_input,
                operation: self.mlp(config)?,
                post_norm: post_norm("post_feedforward_layernorm.weight")?,
            });
        }
        if let Some(gate) = self.linear_if("per_layer_input_gate")? {
            blocks.push(Block {
                input: BlockInput::Stream,
                operation: Operation::Input(TokenInput { gate, projection: self.linear("per_layer_projection")? }),
                post_norm: self.norm_if("post_per_layer_input_norm.weight")?,
            });
        }
        Ok(Layer { blocks, scalar: self.vector_if("layer_scalar")?.map(|values| values[0]) })
    }

    /// Returns the sizes and variants of attention.
    fn attention_shape(&self, heads: &Heads) -> AttentionShape {
        let c = self.model;
        let Heads { n_heads, n_kv_heads, head_dim, value_dim, window, rotary, kv_from, .. } = *heads;
        AttentionShape {
            n_heads,
            n_kv_heads,
            head_dim,
            value_dim,
            kv_from,
            rotary,
            pairs: c.ropes().nth(rotary.unwrap_or(0)).map(|rope| rope.pairs).unwrap_or_default(),
            position_scale: c.attention.position_scale,
            window,
            scale: c.attention.scale,
            softcap: c.attention.softcap,
        }
    }

    fn latent_attention(&self, heads: &Heads, latent: Latent) -> Result<LatentAttention<Host>> {
        let (q_a, q) = match self.linear_if("self_attn.q_a_proj")? {
            Some(q_a) => {
                let norm = self.vector("self_attn.q_a_layernorm.weight")?;
                (Some((q_a, norm)), self.linear("self_attn.q_b_proj")?)
            }
            None => (None, self.linear("self_attn.q_proj")?),
        };
        Ok(LatentAttention {
            shape: self.attention_shape(heads),
            latent,
            q_a,
            q,
            kv_a: self.linear("self_attn.kv_a_proj_with_mqa")?,
            kv_norm: self.vector("self_attn.kv_a_layernorm.weight")?,
            kv_b: self.linear("self_attn.kv_b_proj")?,
            o: self.linear("self_attn.o_proj")?,
        })
    }

    fn short_conv(&self, config::ShortConv { width, .. }: config::ShortConv) -> Result<ShortConv<Host>> {
        Ok(ShortConv {
            width,
            input: self.linear("conv.in_proj")?,
            kernel: self.convolution("conv.conv.weight", width)?,
            bias: self.vector_if("conv.conv.bias")?,
            output: self.linear("conv.out_proj")?,
        })
    }

    fn delta_net(&self, sizes: config::GatedDeltaNet) -> Result<DeltaNet<Host>> {
        let linear = |leaf: &str| self.linear(&format!("linear_attn.{leaf}_proj"));
        Ok(DeltaNet {
            sizes,
            q: linear("q")?,
            k: linear("k")?,
            v: linear("v")?,
            z: linear("z")?,
            b: linear("b")?,
            a: linear("a")?,
            kernel: self.convolution("linear_attn.conv1d.weight", sizes.width)?,
            decay: self.decay("linear_attn")?,
            decay_bias: self.vector("linear_attn.dt_bias")?,
            norm: self.vector("linear_attn.norm.weight")?,
            output: linear("out")?,
        })
    }

    fn mamba(&self, sizes: config::Mamba2) -> Result<Mamba<Host>> {
        let linear = |leaf: &str| self.linear(&format!("mamba.{leaf}_proj"));
        Ok(Mamba {
            sizes,
            z: linear("z")?,
            x: linear("x")?,
            b: linear("b")?,
            c: linear("c")?,
            dt: linear("dt")?,
            kernel: self.convolution("mamba.conv1d.weight", sizes.width)?,
            bias: self.vector_if("mamba.conv1d.bias")?,
            decay: self.decay("mamba")?,
            decay_bias: self.vector("mamba.dt_bias")?,
            skip: self.vector("mamba.D")?,
            norm: self.vector("mamba.norm.weight")?,
            output: linear("out")?,
        })
    }

    /// Returns the factors of the logarithms of the decays of a mixer, which some packs have as logarithms.
    fn decay(&self, mixer: &str) -> Result<Vec<f32>> {
        match self.vector_if(&format!("{mixer}.A"))? {
            Some(factors) => Ok(factors),
            None => Ok(self.vector(&format!("{mixer}.A_log"))?.into_iter().map(|log| -log.exp()).collect()),
        }
    }

    /// Returns the factors of a convolution, which the pack has channel by channel, as `(width, channels)`.
    fn convolution(&self, name: &str, width: usize) -> Result<Vec<f32>> {
        let by_channel = self.vector(name)?;
        Ok((0..width).flat_map(|at| by_channel.iter().skip(at).step_by(width).copied()).collect())
    }

    fn attention(&self, heads: &Heads) -> Result<Attention<Host>> {
        let (attention, head_dim) = (&self.model.attention, heads.head_dim);
        let q_norm = self.norm_if("self_attn.q_norm.weight")?;
        Ok(Attention {
            shape: self.attention_shape(heads),
            sinks: self.vector_if("self_attn.sinks")?,
            head_norms: match (attention.qk_norm, q_norm) {
                (QkNorm::Unit, _) => Some([vec![1.0; head_dim], vec![1.0; head_dim]]),
                (_, Some(q_norm)) => Some([q_norm, self.norm_if("self_attn.k_norm.weight")?.unwrap_or_default()]),
                (_, None) => None,
            },
            gate: self.linear_if("self_attn.gate_proj")?,
            q: self.linear("self_attn.q_proj")?,
            k: self.linear_if("self_attn.k_proj")?,
            v: self.linear_if("self_attn.v_proj")?,
            value_norm: attention.value_norm.then(|| vec![1.0; head_dim]),
            o: self.linear("self_attn.o_proj")?,
        })
    }

    fn mlp(&self, mlp: config::Mlp) -> Result<Operation<Host>> {
        let dense = |prefix: &str, activation: Activation, intermediate| -> Result<Mlp<Host>> {
            let linear = |leaf: &str| self.linear(&format!("{prefix}.{leaf}"));
            let gate = self.linear_if(&format!("{prefix}.gate_proj"))?;
            Ok(Mlp { activation, intermediate, gate, up: linear("up_proj")?, down: linear("down_proj")? })
        };
        Ok(match mlp {
            config::Mlp::Dense { intermediate, activation, .. } => {
                Operation::Mlp(dense("mlp", activation, intermediate)?)
            }
            config::Mlp::Moe {
                experts, top_k, intermediate, activation, router_softmax, selection, shared, ..
            } => {
                let shared = shared.map(|shared| dense("mlp.shared_experts", activation, shared.intermediate));
                Operation::Moe(Moe {
                    activation,
                    intermediate,
                    experts,
                    top_k,
                    softmax: router_softmax,
                    selection,
                    selection_bias: self.vector_if("mlp.router.selection_bias")?,
                    factors: self.vector_if("mlp.router.expert_scale")?,
                    norms: self.mixture_norms()?,
                    shared: shared.transpose()?,
                    latent: match self.linear_if("mlp.latent_down_proj")? {
                        Some(down) => Some([down, self.linear("mlp.latent_up_proj")?]),
                        None => None,
                    },
                    shared_gate: self.linear_if("mlp.router.shared_expert_gate")?,
                    router: self.linear("mlp.router")?,
                    gate_up: self.experts(if activation.is_gated() {
                        "mlp.experts.gate_up_proj"
                    } else {
                        "mlp.experts.up_proj"
                    })?,
                    down: self.experts("mlp.experts.down_proj")?,
                })
            }
        })
    }

    /// Binds the norms of an MLP and of the experts beside it, if they have their own.
    fn mixture_norms(&self) -> Result<Option<MixtureNorms<Vec<f32>>>> {
        let Some(mut router_input) = self.vector_if("mlp.router.input_scale")? else { return Ok(None) };
        router_input.iter_mut().for_each(|x| *x /= (self.model.hidden as f32).sqrt());
        let norm = |name: &str| Ok::<_, Error>(self.norm_if(name)?.unwrap_or_default());
        Ok(Some(MixtureNorms {
            mlp_output: norm("mlp.shared_experts.post_layernorm.weight")?,
            router_input,
            expert_input: norm("mlp.experts.pre_layernorm.weight")?,
            expert_output: norm("mlp.experts.post_layernorm.weight")?,
        }))
    }

    /// Returns the row of the catalogue and the shape of a tensor; `None` if the layer has no such tensor.
    fn find(&self, name: &str) -> Option<(&'static LayerTensor, Vec<usize>)> {
        let tensor = LayerTensor::of(name)?;
        Some((tensor, tensor.shape(self.model, &self.layer)?))
    }

    fn linear(&self, prefix: &str) -> Result<Linear> {
        self.linear_if(prefix)?.ok_or_else(|| self.absent(prefix))
    }

    fn linear_if(&self, prefix: &str) -> Result<Option<Linear>> {
        let name = format!("{prefix}.weight");
        let Some((tensor, shape)) = self.find(&name) else { return Ok(None) };
        let matrix = self.binder.matrix(&self.name(&name), shape[0], shape[1])?;
        let bias = self.vector_if(&format!("{prefix}.bias"))?;
        Ok(Some(Linear { matrix, bias, identity: Some((self.n, tensor)) }))
    }

    /// Binds the matrices of all experts; their biases are in the tensor `<name>_bias`.
    fn experts(&self, name: &str) -> Result<Vec<Linear>> {
        let (tensor, shape) = self.find(name).ok_or_else(|| self.absent(name))?;
        let bias_name = format!("{name}_bias");
        let biases = match self.find(&bias_name) {
            Some((_, shape)) => Some(self.binder.floats(&self.name(&bias_name), &shape)?),
            None => None,
        };
        let name = self.name(name);
        let entry = self.binder.entry(&name, &shape)?;
        let rows = shape[1];
        let matrices = self.binder.bind_matrices(entry, [shape[0], rows, shape[2]]).tensor(&name)?;
        let bias = |e: usize| biases.as_ref().map(|b| b[e * rows..][..rows].to_vec());
        let linear = |(e, matrix)| Linear { matrix, bias: bias(e), identity: Some((self.n, tensor)) };
        Ok(matrices.into_iter().enumerate().map(linear).collect())
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>> {
        self.vector_if(name)?.ok_or_else(|| self.absent(name))
    }

    fn vector_if(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some((_, shape)) = self.find(name) else { return Ok(None) };
        self.binder.floats(&self.name(name), &shape).map(Some)
    }

    /// Binds the factors of a norm, if the layer has it.
    fn norm_if(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some((_, shape)) = self.find(name) else { return Ok(None) };
        self.binder.norm(self.model, &self.name(name), &shape).map(Some)
    }

    /// Builds the error for a tensor that the description of the layer excludes and its operation needs.
    fn absent(&self, name: &str) -> Error {
        Error::corrupt("found a description without this tensor, which its layer needs").tensor(self.name(name))
    }
}
