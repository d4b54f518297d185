//! Fields of `config.json` that only some of the newer families have.

use super::config::{Dimensions, LOG_MULTIPLIER, ROPE_FREQS, SIGMOID, UNIT_NORMS, Writer};
use super::family::{LogitScale, Unrotated};
use crate::convert::source::gguf::value::{Value as Meta, required};
use crate::error::{Error, Result};
use crate::model_config::QkNorm;
use serde_json::{Value, json};

impl Writer<'_> {
    /// Writes the fields of the family.
    ///
    /// # Errors
    /// A key is missing, has the wrong type, or has a value that this program does not support.
    pub(super) fn family_fields(&mut self, model: &Dimensions) -> Result<()> {
        let family = self.family;
        if family.factor_keys {
            let usual = 1.0 / (model.head_dim as f64).sqrt();
            for (field, leaf, usual) in [
                ("attention_multiplier", "attention.scale", usual),
                ("embedding_multiplier", "embedding_scale", 1.0),
                ("residual_multiplier", "residual_scale", 1.0),
            ] {
                // llama.cpp takes 0 for an absent key.
                let given = self.number_opt(leaf)?.filter(|factor| *factor != 0.0);
                self.put(field, given.unwrap_or(usual));
            }
        }
        let unit_norms = self.family.qk_norm == [QkNorm::Unit];
        let field = match family.logit_scale {
            LogitScale::None => None,
            LogitScale::Divisor => Some("logits_scaling"),
            LogitScale::Factor if unit_norms => Some("output_multiplier"),
            LogitScale::Factor => Some("logit_scale"),
        };
        if let Some(field) = field {
            self.put(field, required(&self.key("logit_scale"), self.number_opt("logit_scale")?)?);
        }
        if family.unrotated == Unrotated::EveryFourth {
            self.put("no_rope_layer_interval", 4);
        }
        if unit_norms {
            self.unit_norms(model)?;
        }
        if let Some(beta) = self.number_opt("attention.temperature_scale")?.filter(|beta| *beta != 0.0) {
            let steps = match family.is_latent() {
                true => self.count("attention.temperature_length")?,
                false => match self.count_opt("rope.scaling.original_context_length")? {
                    Some(original) => original,
                    None => self.count("context_length")?,
                },
            };
            self.put("llama_4_scaling_beta", beta);
            self.put("original_max_position_embeddings", steps);
        }
        if family.is_latent() {
            self.latent(model)?;
        }
        if family.qk_norm.len() > 1 {
            self.put("use_qk_norm", self.tensor("blk.0.attn_q_norm.weight").is_some());
        }
        if family.has_layer_sizes() {
            self.layer_sizes(model)?;
        }
        if family.has_delta_nets() {
            self.delta_nets(model)?;
        }
        Ok(())
    }

    /// Writes the layers with a recurrent mixer of this kind, which have no key/value heads, and those of the others.
    fn recurrent_layers(&mut self, layers: usize, mixer: &str) -> Result<()> {
        let heads = self.counts("attention.head_count_kv", layers)?;
        let mut others = heads.iter().filter(|heads| **heads > 0);
        let usual = others.next().copied().unwrap_or(1);
        if others.any(|heads| *heads != usual) {
            let found = format!("found {heads:?}, expected 0 for recurrent layers and one number for the others");
            return Err(Error::unsupported(found).tensor(self.key("attention.head_count_kv")));
        }
        let kind = |heads: &usize| if *heads > 0 { "full_attention" } else { mixer };
        self.put("layer_types", heads.iter().map(kind).collect::<Vec<_>>());
        self.put("num_key_value_heads", usual);
        Ok(())
    }

    /// Writes the layers with Mamba-2, and their sizes.
    pub(super) fn mamba(&mut self, layers: usize) -> Result<()> {
        self.recurrent_layers(layers, "mamba")?;
        let (heads, width) = self.heads_of_values()?;
        self.put("mamba_n_heads", heads);
        self.put("mamba_d_head", width);
        self.put("mamba_n_groups", self.count("ssm.group_count")?);
        self.put("mamba_d_state", self.count("ssm.state_size")?);
        self.put("mamba_d_conv", self.count("ssm.conv_kernel")?);
        self.put("mamba_conv_bias", self.has_conv_bias());
        // As in llama.cpp, an absent key means that attention rotates.
        let rotates = self.gguf.metadata.flag_opt(&self.key("rope.scaling.finetuned"))?.unwrap_or(true);
        self.put("position_embedding_type", if rotates { "rope" } else { "nope" });
        Ok(())
    }

    /// Writes the block of each layer of Nemotron-H, and the sizes of Mamba-2. As in llama.cpp, a layer with key/value
    /// heads is attention, and another one with a width of an MLP is an MLP or experts.
    pub(super) fn single_blocks(&mut self, layers: usize, has_experts: bool) -> Result<()> {
        self.recurrent_layers(layers, "mamba")?;
        let heads = self.counts("attention.head_count_kv", layers)?;
        let widths = self.counts("feed_forward_length", layers)?;
        let block = |(heads, width): (&usize, &usize)| match (*heads > 0, *width > 0) {
            (true, _) => '*',
            (false, true) if has_experts => 'E',
            (false, true) => '-',
            (false, false) => 'M',
        };
        self.put("hybrid_override_pattern", heads.iter().zip(&widths).map(block).collect::<String>());
        let (heads, width) = self.heads_of_values()?;
        self.put("mamba_num_heads", heads);
        self.put("mamba_head_dim", width);
        self.put("n_groups", self.count("ssm.group_count")?);
        self.put("ssm_state_size", self.count("ssm.state_size")?);
        self.put("conv_kernel", self.count("ssm.conv_kernel")?);
        self.put("use_conv_bias", self.has_conv_bias());
        let eps = "attention.layer_norm_rms_epsilon";
        self.put("layer_norm_epsilon", required(&self.key(eps), self.number_opt(eps)?)?);
        Ok(())
    }

    /// Writes the MLPs or the experts of Nemotron-H.
    pub(super) fn mlp_of_single_blocks(&mut self, model: &Dimensions) -> Result<()> {
        if model.experts == 0 {
            let widths = self.counts("feed_forward_length", model.layers)?;
            let mut others = widths.iter().filter(|width| **width > 0);
            let usual = others.next().copied().unwrap_or(1);
            if others.any(|width| *width != usual) {
                let found = format!("found {widths:?}, expected one width for all MLPs");
                return Err(Error::unsupported(found).tensor(self.key("feed_forward_length")));
            }
            self.put("intermediate_size", usual);
            return Ok(());
        }
        self.put("n_routed_experts", model.experts);
        self.put("num_experts_per_tok", self.count("expert_used_count")?);
        self.put("moe_intermediate_size", self.count("expert_feed_forward_length")?);
        let shared = self.count_opt("expert_shared_feed_forward_length")?.filter(|width| *width > 0);
        self.put("n_shared_experts", usize::from(shared.is_some()));
        self.put("moe_shared_expert_intermediate_size", shared.unwrap_or(0));
        self.put("norm_topk_prob", self.gguf.metadata.flag_opt(&self.key("expert_weights_norm"))?.unwrap_or(false));
        let scale = self.number_opt("expert_weights_scale")?.filter(|scale| *scale != 0.0);
        self.put("routed_scaling_factor", scale.unwrap_or(1.0));
        self.put("moe_latent_size", self.count_opt("moe_latent_size")?.unwrap_or(0));
        for (field, leaf) in [("n_group", "expert_group_count"), ("topk_group", "expert_group_used_count")] {
            self.put(field, self.count_opt(leaf)?.unwrap_or(1));
        }
        Ok(())
    }

    /// Returns the number and the width of the value heads of Mamba-2 or of gated delta nets.
    fn heads_of_values(&self) -> Result<(usize, usize)> {
        let (heads, values) = (self.count("ssm.time_step_rank")?, self.count("ssm.inner_size")?);
        if heads == 0 || !values.is_multiple_of(heads) {
            let found = format!("found {values}, expected a multiple of {heads} heads");
            return Err(Error::corrupt(found).tensor(self.key("ssm.inner_size")));
        }
        Ok((heads, values / heads))
    }

    fn has_conv_bias(&self) -> bool {
        self.gguf.tensors.iter().any(|tensor| tensor.name.ends_with(".ssm_conv1d.bias"))
    }

    /// Writes the layers with gated short convolutions, and the sizes that other fields of the family hold.
    pub(super) fn convolutions(&mut self, layers: usize) -> Result<()> {
        self.recurrent_layers(layers, "conv")?;
        self.put("conv_L_cache", self.count("shortconv.l_cache")?);
        self.put("block_auto_adjust_ff_dim", false);
        let eps = "attention.layer_norm_rms_epsilon";
        self.put("norm_eps", required(&self.key(eps), self.number_opt(eps)?)?);
        Ok(())
    }

    /// Writes the layers with gated delta nets, and their sizes.
    fn delta_nets(&mut self, model: &Dimensions) -> Result<()> {
        let key = self.key("attention.recurrent_layers");
        let interval = self.count_opt("full_attention_interval")?.unwrap_or(4).max(1);
        let listed = self.gguf.metadata.get(&key).and_then(Meta::numbers);
        let recurrent: Vec<bool> = match listed {
            Some(flags) => flags
                .map(|flag| flag.as_bool())
                .collect::<Option<_>>()
                .ok_or_else(|| Error::corrupt("found another type, expected a list of booleans").tensor(&key))?,
            None => (1..=model.layers).map(|number| !number.is_multiple_of(interval)).collect(),
        };
        // Layers that predict further tokens may be listed behind those of the model.
        let Some(recurrent) = recurrent.get(..model.layers) else {
            let found = format!("found {} entries, expected one for each of {} layers", recurrent.len(), model.layers);
            return Err(Error::corrupt(found).tensor(key));
        };
        let kind = |recurrent: &bool| if *recurrent { "linear_attention" } else { "full_attention" };
        self.put("layer_types", recurrent.iter().map(kind).collect::<Vec<_>>());
        let (heads, width) = self.heads_of_values()?;
        self.put("linear_num_key_heads", self.count("ssm.group_count")?);
        self.put("linear_num_value_heads", heads);
        self.put("linear_key_head_dim", self.count("ssm.state_size")?);
        self.put("linear_value_head_dim", width);
        self.put("linear_conv_kernel_dim", self.count("ssm.conv_kernel")?);
        Ok(())
    }

    /// Writes the sizes of latent attention.
    fn latent(&mut self, model: &Dimensions) -> Result<()> {
        let rotated = self.count("rope.dimension_count")?;
        let value = match self.count_opt("attention.value_length_mla")?.filter(|width| *width > 0) {
            Some(width) => width,
            None => self.count("attention.value_length")?,
        };
        let Some(nope) = model.head_dim.checked_sub(rotated) else {
            let found = format!("found {rotated}, expected at most the head size {}", model.head_dim);
            return Err(Error::corrupt(found).tensor(self.key("rope.dimension_count")));
        };
        // Files of DeepSeek-V2-Lite may have a rank that llama.cpp does not read.
        let has_rank = self.tensor("blk.0.attn_q_a.weight").is_some();
        let q_rank = self.count_opt("attention.q_lora_rank")?.filter(|_| has_rank);
        self.put("q_lora_rank", json!(q_rank));
        self.put("kv_lora_rank", self.count("attention.kv_lora_rank")?);
        self.put("qk_nope_head_dim", nope);
        self.put("qk_rope_head_dim", rotated);
        self.put("v_head_dim", value);
        Ok(())
    }

    /// Adds the factors of YaRN's scores in latent attention, where llama.cpp scales neither cos nor sin.
    pub(super) fn latent_yarn(&self, yarn: &mut Value) -> Result<()> {
        let Some(tenth) = self.number_opt(LOG_MULTIPLIER)?.filter(|number| *number != 0.0) else {
            return Err(Error::unsupported("missing; found YaRN without the growth of its scores")
                .tensor(self.key(LOG_MULTIPLIER)));
        };
        // The key holds a tenth of the number; the rounding undoes that of the division.
        let mscale = (tenth * 1e8).round() / 1e7;
        yarn["mscale"] = json!(mscale);
        yarn["mscale_all_dim"] = json!(mscale);
        Ok(())
    }

    /// Writes the feed-forward part of families with experts beside a dense MLP, or with layers of different widths.
    pub(super) fn deep_mlp(&mut self, model: &Dimensions) -> Result<()> {
        if self.family.has_layer_sizes() {
            return self.mlp_of_sizes(model);
        }
        self.put("intermediate_size", self.count("feed_forward_length")?);
        self.put("moe_intermediate_size", self.count("expert_feed_forward_length")?);
        self.put("n_routed_experts", model.experts);
        self.put("num_experts_per_tok", self.count("expert_used_count")?);
        self.put("n_shared_experts", self.count_opt("expert_shared_count")?.unwrap_or(0));
        self.put("first_k_dense_replace", self.count_opt("leading_dense_block_count")?.unwrap_or(0));
        // As in llama.cpp, 0 stands for no factor.
        let scale = self.number_opt("expert_weights_scale")?.filter(|scale| *scale != 0.0);
        self.put("routed_scaling_factor", scale.unwrap_or(1.0));
        let normalized = self.gguf.metadata.flag_opt(&self.key("expert_weights_norm"))?.unwrap_or(false);
        self.put("norm_topk_prob", normalized);
        let groups = self.count_opt("expert_group_count")?.unwrap_or(1).max(1);
        self.put("n_group", groups);
        self.put("topk_group", self.count_opt("expert_group_used_count")?.unwrap_or(1).max(1));
        if !self.family.is_latent() {
            return Ok(());
        }
        let has_bias = self.gguf.tensors.iter().any(|tensor| tensor.name.ends_with(".exp_probs_b.bias"));
        let sigmoid = match self.count_opt("expert_gating_func")?.filter(|function| *function > 0) {
            Some(function) => function == SIGMOID as usize,
            None => has_bias,
        };
        match (sigmoid, normalized) {
            (true, _) => self.class("DeepseekV3ForCausalLM"),
            (false, true) => self.class("Mistral4ForCausalLM"),
            (false, false) => {
                self.class("DeepseekV2ForCausalLM");
                self.put("topk_method", if groups > 1 { "group_limited_greedy" } else { "greedy" });
            }
        }
        Ok(())
    }

    /// Reads the factor of queries from norms that a file has only to hold it.
    fn unit_norms(&mut self, model: &Dimensions) -> Result<()> {
        let mut factor = None;
        for layer in 0..model.layers {
            for (number, leaf) in UNIT_NORMS.into_iter().enumerate() {
                let name = format!("blk.{layer}.{leaf}");
                let weights = self.factors(&name)?;
                let first = if number == 0 { *factor.get_or_insert(weights[0]) } else { 1.0 };
                if weights.iter().any(|weight| *weight != first) {
                    let found = format!("found other weights than {first}, expected the same everywhere");
                    return Err(Error::unsupported(found).tensor(name));
                }
            }
        }
        // The shortest decimal form is the number of the original configuration.
        let factor: f64 = factor.map_or(1.0, |factor| factor.to_string().parse().unwrap_or(1.0));
        self.put("qk_scale_factor", factor);
        // An absent field means another cap.
        if self.number_opt("final_logit_softcapping")?.is_none() {
            self.put("final_logit_softcapping", Value::Null);
        }
        let rotated = |width: &Value| if width == "sliding_attention" { 1.0 } else { 0.0 };
        let theta = self.number_opt("rope.freq_base")?.unwrap_or(10_000.0);
        let types = self.field("layer_types").as_array().cloned().unwrap_or_default();
        let thetas: Vec<f64> = types.iter().map(|kind| theta * rotated(kind)).collect();
        self.put("layer_rope_theta", thetas);
        Ok(())
    }

    /// Returns the counts of a key, one for each layer.
    fn counts(&self, leaf: &str, layers: usize) -> Result<Vec<usize>> {
        let key = self.key(leaf);
        let listed = match self.gguf.metadata.get(&key).and_then(crate::convert::source::gguf::value::Value::list_len) {
            None => return Ok(vec![self.count(leaf)?; layers]),
            Some(_) => self.gguf.metadata.integers_opt(&key)?.unwrap_or_default(),
        };
        let counts: Option<Vec<usize>> = listed.iter().map(|count| usize::try_from(*count).ok()).collect();
        counts.filter(|counts| counts.len() == layers).ok_or_else(|| {
            Error::corrupt(format!("found {} numbers, expected a count for each of {layers} layers", listed.len()))
                .tensor(key)
        })
    }

    /// Writes the feed-forward part of Gemma 4.
    fn mlp_of_sizes(&mut self, model: &Dimensions) -> Result<()> {
        let widths = self.counts("feed_forward_length", model.layers)?;
        let shared = self.count_opt("attention.shared_kv_layers")?.unwrap_or(0);
        let first = widths.first().copied().unwrap_or(0);
        let owners = model.layers.saturating_sub(shared);
        let twice = first.saturating_mul(2);
        let is_wide = shared > 0 && widths[owners..].iter().all(|width| *width == twice);
        let rest = if is_wide { twice } else { first };
        if widths[..owners].iter().any(|width| *width != first) || widths[owners..].iter().any(|width| *width != rest) {
            let found =
                format!("found {widths:?}, expected one width, or the double in layers that share keys and values");
            return Err(Error::unsupported(found).tensor(self.key("feed_forward_length")));
        }
        self.put("intermediate_size", first);
        self.put("use_double_wide_mlp", is_wide);
        self.put("enable_moe_block", model.experts > 0);
        if model.experts > 0 {
            self.put("num_experts", model.experts);
            self.put("top_k_experts", self.count("expert_used_count")?);
            self.put("moe_intermediate_size", self.count("expert_feed_forward_length")?);
        }
        Ok(())
    }

    /// Writes the sizes of Gemma 4's layers, which depend on whether they have a window.
    fn layer_sizes(&mut self, model: &Dimensions) -> Result<()> {
        let types = self.field("layer_types").as_array().cloned().unwrap_or_default();
        let heads = self.counts("attention.head_count_kv", model.layers)?;
        let of_kind = |windowed: bool| {
            let kind = if windowed { "sliding_attention" } else { "full_attention" };
            (0..model.layers).filter(|layer| types.get(*layer).is_some_and(|found| found == kind)).collect::<Vec<_>>()
        };
        let (local, global) = (of_kind(true), of_kind(false));
        for layers in [&local, &global] {
            if layers.iter().any(|layer| heads[*layer] != heads[layers[0]]) {
                let found = format!("found {heads:?}, expected one number for each type of layers");
                return Err(Error::unsupported(found).tensor(self.key("attention.head_count_kv")));
            }
        }
        let of_first = |layers: &[usize]| layers.first().map(|layer| heads[*layer]);
        let own = of_first(&local).or(of_first(&global)).unwrap_or(0);
        let values = global.first().map(|layer| format!("blk.{layer}.attn_v.weight"));
        let keys_are_values = values.is_some_and(|name| self.tensor(&name).is_none());
        if of_first(&global).is_some_and(|heads| heads != own) && !keys_are_values {
            return Err(Error::unsupported("found layers with different numbers of heads and values of their own")
                .tensor(self.key("attention.head_count_kv")));
        }
        self.put("num_key_value_heads", own);
        self.put("num_global_key_value_heads", json!(of_first(&global)));
        self.put("attention_k_eq_v", keys_are_values);
        let head_dim = self.count("attention.key_length")?;
        self.put("global_head_dim", head_dim);
        self.put("num_kv_shared_layers", self.count_opt("attention.shared_kv_layers")?.unwrap_or(0));
        let width = self.count_opt("embedding_length_per_layer_input")?.unwrap_or(0);
        self.put("hidden_size_per_layer_input", width);
        if width > 0 {
            self.put("vocab_size_per_layer_input", self.field("vocab_size").clone());
        }
        self.turning_pairs(head_dim)
    }

    /// Writes the share of the pairs that turn; the frequencies of the others are divided by a very large number.
    fn turning_pairs(&mut self, head_dim: usize) -> Result<()> {
        let factors = self.factors(ROPE_FREQS)?;
        let turning = factors.iter().take_while(|factor| **factor == 1.0).count();
        if factors.len() != head_dim / 2 || factors[turning..].iter().any(|factor| *factor < 1e20) {
            let found = "found other factors than 1 for the first pairs and very large ones for the rest";
            return Err(Error::unsupported(found).tensor(ROPE_FREQS));
        }
        let pairs = head_dim as f64 / 2.0;
        let share = turning as f64 / pairs;
        // The share is multiplied by the number of pairs and rounded down again.
        let is_exact = (share * pairs) as usize == turning;
        self.put("partial_rotary_factor", if is_exact { share } else { (turning as f64 + 0.5) / pairs });
        Ok(())
    }
}
