//! Tests of the description of models.

use super::*;

fn model() -> ModelConfig {
    serde_json::from_value(serde_json::json!({
        "architecture": "x", "hidden": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16,
        "vocab": 100, "max_context": 64, "norm_eps": 1e-6, "logit_softcap": null, "local_rope": null,
        "rope": {"theta": 1e4, "rotary_dim": null, "scaling": {"type": "none"}},
        "attention": {"softcap": null, "scale": 0.25, "qk_norm": true},
        "mlp": {"kind": "dense", "intermediate": 8, "activation": {"name": "silu"}},
        "tied_embeddings": true, "bos": null,
    }))
    .unwrap()
}

#[test]
fn a_plain_model_is_written_without_the_fields_of_newer_families() {
    let model = model();
    model.validate().unwrap();
    assert_eq!((model.attention.qk_norm, model.extensions().next()), (QkNorm::Head, None));
    let written = serde_json::to_value(&model).unwrap();
    assert_eq!(written["attention"]["qk_norm"], true);
    for field in ["exceptions", "pre_norms", "norm_kind", "logit_scale", "per_layer_input"] {
        assert!(written.get(field).is_none(), "{field}");
    }
    for norm in [QkNorm::None, QkNorm::Head, QkNorm::All, QkNorm::Unit] {
        let text = serde_json::to_string(&norm).unwrap();
        assert_eq!(serde_json::from_str::<QkNorm>(&text).unwrap(), norm, "{text}");
    }
}

#[test]
fn impossible_layers_are_refused_by_name() {
    let exception = |layers: &[usize]| LayerException { layers: layers.to_vec(), ..LayerException::default() };
    let with = |change: &dyn Fn(&mut ModelConfig)| {
        let mut model = model();
        change(&mut model);
        model.validate().unwrap_err()
    };
    let exceptions = |list: Vec<LayerException>| with(&|model| model.exceptions = list.clone());
    let reads = |layer, owner| LayerException { kv_from: Some(owner), ..exception(&[layer]) };
    for (error, field, why) in [
        (exceptions(vec![exception(&[4])]), "exceptions", "layer 4"),
        (exceptions(vec![exception(&[1, 2]), exception(&[2])]), "exceptions", "layer 2 twice"),
        (exceptions(vec![exception(&[2, 1])]), "exceptions", "ascending order"),
        (exceptions(vec![exception(&[]); 65]), "exceptions", "at most 64"),
        (with(&|model| model.n_layers = 1 << 20), "n_layers", "1 to 10000"),
        (exceptions(vec![reads(1, 1)]), "exceptions.kv_from", "an earlier layer"),
        (exceptions(vec![reads(1, 3)]), "exceptions.kv_from", "an earlier layer"),
        (exceptions(vec![reads(1, 0), reads(2, 1)]), "exceptions.kv_from", "no keys and values"),
        (
            exceptions(vec![reads(3, 0), LayerException { head_dim: Some(32), ..exception(&[0]) }]),
            "exceptions.kv_from",
            "of its sizes",
        ),
        (
            exceptions(vec![LayerException { n_kv_heads: Some(3), ..exception(&[0]) }]),
            "exceptions.n_kv_heads",
            "do not divide",
        ),
        (
            exceptions(vec![LayerException { head_dim: Some(1 << 31), ..exception(&[0]) }]),
            "exceptions.head_dim",
            "even number",
        ),
        (exceptions(vec![LayerException { head_dim: Some(8), ..exception(&[0]) }]), "rope", "several sizes"),
        (
            exceptions(vec![LayerException { intermediate: Some(0), ..exception(&[0]) }]),
            "exceptions.intermediate.intermediate",
            "found 0",
        ),
        (with(&|model| model.pre_norms = false), "pre_norms", "without norms"),
        (with(&|model| (model.parallel, model.post_norms) = (true, true)), "parallel", "norms after the blocks"),
        (with(&|model| model.residual_scale = f32::NAN), "residual_scale", "finite"),
        (
            with(&|model| {
                let latent = Latent { q_rank: None, kv_rank: 8, nope: 8, rope: 4, value: 8, norm_eps: 1e-6 };
                model.attention.latent = Some(latent);
            }),
            "attention.latent.nope",
            "the head size 16",
        ),
    ] {
        assert_eq!(error.tensor_name(), Some(field), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[test]
fn a_limit_that_cannot_clamp_is_refused() {
    for (limit, good) in [(7.0, true), (0.0, false), (-7.0, false), (f32::INFINITY, false), (f32::NAN, false)] {
        let activation = Activation::SwigluOai { alpha: 1.702, limit };
        assert_eq!(Mlp::Dense { intermediate: 8, activation, bias: false }.validate("mlp").is_ok(), good, "{limit}");
    }
}

/// Description as packs contained it before the first fields with defaults were added.
const FIRST: &str = r#"{"architecture": "LlamaForCausalLM", "hidden": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2,
    "head_dim": 16, "vocab": 512, "max_context": 512, "norm_eps": 1e-5, "rope": {"theta": 10000.0,
    "scaling": {"type": "none"}}, "attention": {"scale": 0.25}, "mlp": {"kind": "moe", "experts": 4, "top_k": 2,
    "intermediate": 64, "activation": {"name": "silu"}}, "tied_embeddings": true}"#;

#[test]
fn a_description_without_the_later_fields_is_a_plain_model() {
    let model: ModelConfig = serde_json::from_str(FIRST).unwrap();
    model.validate().unwrap();
    assert_eq!(model.dense_layers, None);
    assert!(!serde_json::to_string(&model).unwrap().contains("dense_layers"));
    assert_eq!((model.embedding_scale, model.norm_plus_one, model.post_norms), (1.0, false, false));
    assert_eq!((model.local_rope, model.logit_softcap, model.rope.rotary_dim), (None, None, None));
    assert_eq!((model.attention.softcap, model.attention.qk_norm), (None, QkNorm::None));
    assert!(matches!(model.mlp, Mlp::Moe { router_softmax: RouterSoftmax::Chosen, .. }));
}

#[test]
fn layers_are_dense_as_listed_and_a_wrong_list_is_refused() {
    let mut model: ModelConfig = serde_json::from_str(FIRST).unwrap();
    model.n_layers = 3;
    let dense = |layers: &[usize]| Some(DenseLayers { layers: layers.to_vec(), intermediate: 96 });
    model.dense_layers = dense(&[1]);
    model.validate().unwrap();
    let expected = Mlp::Dense { intermediate: 96, activation: Activation::Silu, bias: false };
    assert_eq!([0, 1, 2].map(|layer| model.layer(layer).mlp), [model.mlp, expected, model.mlp].map(Some));
    assert_eq!(model.mlps().collect::<Vec<_>>(), [model.mlp, expected]);
    let text = serde_json::to_string(&model).unwrap();
    assert_eq!(serde_json::from_str::<ModelConfig>(&text).unwrap(), model);
    for (layers, complaint) in [
        (&[][..], "empty"),
        (&[3], "layer 3, expected numbers below 3"),
        (&[0, usize::MAX], "expected numbers below 3"),
        (&[1, 1], "1 follows 1"),
        (&[1, 0], "0 follows 1"),
        (&[0, 1, 2], "leaves none"),
    ] {
        model.dense_layers = dense(layers);
        let error = model.validate().unwrap_err();
        assert_eq!(error.tensor_name(), Some("dense_layers.layers"));
        assert!(error.to_string().contains(complaint), "{layers:?}: {error}");
    }
    for intermediate in [0, DIM_LIMIT + 1] {
        model.dense_layers = Some(DenseLayers { layers: vec![1], intermediate });
        assert_eq!(model.validate().unwrap_err().tensor_name(), Some("dense_layers.intermediate"));
    }
    model.dense_layers = dense(&[1]);
    model.mlp = expected;
    assert_eq!(model.validate().unwrap_err().tensor_name(), Some("dense_layers"));
}

#[test]
fn a_field_that_may_change_the_model_is_not_ignored() {
    for (place, with) in [
        (r#""hidden""#, r#""residual_gain": 0.5, "hidden""#),
        (r#""scale""#, r#""alibi": true, "scale""#),
        (r#""theta""#, r#""twist": 2, "theta""#),
        (r#""kind": "moe""#, r#""kind": "moe", "split": 1"#),
    ] {
        let error = serde_json::from_str::<ModelConfig>(&FIRST.replacen(place, with, 1)).unwrap_err();
        assert!(error.to_string().contains("unknown field"), "{with}: {error}");
    }
}

#[test]
fn impossible_recurrent_layers_are_refused_by_name() {
    let net = GatedDeltaNet {
        key_heads: 2,
        value_heads: 4,
        key_dim: 16,
        value_dim: 8,
        width: 4,
        tiled: false,
        decay_factors: false,
    };
    let with = |layers: &[usize], mixer| {
        let recurrent = Some(RecurrentLayers { layers: layers.to_vec(), mixer });
        ModelConfig { recurrent, ..model() }.validate()
    };
    let delta = |net| with(&[0, 2], Recurrent::GatedDeltaNet(net));
    delta(net).unwrap();
    assert_eq!((net.keys(), net.values(), net.channels(), net.per_key()), (32, 32, 96, 2));
    let heads = |net: GatedDeltaNet| [0, 1].map(|key| [0, 1].map(|index| net.value_head(key, index)));
    assert_eq!(heads(net), [[0, 1], [2, 3]]);
    assert_eq!(heads(GatedDeltaNet { tiled: true, ..net }), [[0, 2], [1, 3]]);
    let huge = GatedDeltaNet { value_heads: 1024, key_dim: 1024, value_dim: 1024, ..net };
    let conv = |width| with(&[1], Recurrent::ShortConv(ShortConv { width, bias: false }));
    for (result, field, why) in [
        (delta(GatedDeltaNet { key_heads: 0, ..net }), "mixer.key_heads", "found 0"),
        (delta(GatedDeltaNet { key_heads: 3, ..net }), "mixer.value_heads", "a multiple of 3"),
        (delta(GatedDeltaNet { value_heads: usize::MAX, ..net }), "mixer.value_heads", "1 to 1024"),
        (delta(GatedDeltaNet { key_dim: 1025, ..net }), "mixer.key_dim", "1 to 1024"),
        (delta(GatedDeltaNet { value_dim: 0, ..net }), "mixer.value_dim", "found 0"),
        (delta(GatedDeltaNet { width: 65, ..net }), "mixer.width", "1 to 64"),
        (delta(huge), "mixer", "2147483648 numbers"),
        (conv(0), "mixer.width", "1 to 64"),
        (with(&[], Recurrent::GatedDeltaNet(net)), "layers", "at least one layer"),
        (with(&[2, 1], Recurrent::GatedDeltaNet(net)), "layers", "ascending order"),
        (with(&[4], Recurrent::GatedDeltaNet(net)), "layers", "layer 4"),
        (with(&[0, 1, 2, 3], Recurrent::GatedDeltaNet(net)), "layers", "at least one with attention"),
    ] {
        let error = result.unwrap_err();
        assert_eq!(error.tensor_name(), Some(&*format!("recurrent.{field}")), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[test]
fn impossible_lists_of_layers_without_mixers_are_refused_by_name() {
    let with = |layers: &[usize]| ModelConfig { mlp_layers: Some(layers.to_vec()), ..model() };
    let conv = Recurrent::ShortConv(ShortConv { width: 3, bias: false });
    let recurrent = |layers: &[usize]| Some(RecurrentLayers { layers: layers.to_vec(), mixer: conv });
    let one = ModelConfig { recurrent: recurrent(&[2]), ..with(&[0, 1]) };
    one.validate().unwrap();
    let text = serde_json::to_string(&one).unwrap();
    assert_eq!(serde_json::from_str::<ModelConfig>(&text).unwrap(), one);
    for (model, why) in [
        (with(&[1, 0]), "ascending order"),
        (with(&[1, 1]), "ascending order"),
        (with(&[4]), "layer 4"),
        (with(&[0, 1, 2, 3]), "at least one"),
        (ModelConfig { recurrent: recurrent(&[1]), ..with(&[0, 1]) }, "has a recurrent mixer"),
        (ModelConfig { parallel: true, ..with(&[0]) }, "parallel blocks"),
        (ModelConfig { post_norms: true, ..with(&[0]) }, "post norms"),
    ] {
        let error = model.validate().unwrap_err();
        assert_eq!(error.tensor_name(), Some("mlp_layers"), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    }
}
