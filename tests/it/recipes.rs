//! Tests the recipes in `manifests/`: each applies to the checkpoints of its family and stores their tensors as
//! documented.

use crate::common::{fixture, iec};
use serde_json::Value;
use std::path::Path;

/// `(part of a tensor's name, expected storage)`. `kept` stands for the source's type and an empty string for any.
/// The first match counts, and each pair must match a tensor.
type Expected = &'static [(&'static str, &'static str)];

const QWEN: Expected = &[
    ("embed_tokens", "int6/32"),
    ("k_proj.weight", "int8/32"),
    ("v_proj.weight", "int8/32"),
    ("_proj.weight", "q4_0"),
    ("norm", "kept"),
];

/// Recipe, fixture of its family, and expected storage of the tensors.
const CASES: &[(&str, &str, Expected)] = &[
    (
        "llama-3",
        "llama3-rope-tied",
        &[
            ("embed_tokens", "int6/32"),
            ("layers.0.mlp.down_proj", "int8/32"),
            ("layers.1.mlp.down_proj", "int8/32"),
            ("v_proj", "int6/32"),
            ("_proj", "q4_0"),
            ("norm", "kept"),
        ],
    ),
    (
        "llama-3",
        "llama-gqa",
        &[("embed_tokens", "int6/32"), ("lm_head", "int6/32"), ("layers.2.mlp.down_proj", "q4_0"), ("", "")],
    ),
    ("qwen", "qwen2", QWEN),
    ("qwen", "qwen3", QWEN),
    ("qwen", "qwen3", &[("lm_head", "int6/32")]),
    (
        "qwen3-moe",
        "qwen3moe",
        &[
            ("embed_tokens", "int6/32"),
            ("lm_head", "int6/32"),
            ("router", "kept"),
            ("self_attn.q_proj.weight", "int8/32"),
            ("self_attn.v_proj.weight", "int8/32"),
            ("experts.gate_up_proj", "q4_0"),
            ("experts.down_proj", "q4_0"),
            ("norm", "kept"),
        ],
    ),
    (
        "qwen3-moe",
        "qwen3moe-dense",
        &[
            ("layers.1.mlp.gate_proj.weight", "q4_0"),
            ("layers.1.mlp.down_proj.weight", "q4_0"),
            ("layers.0.mlp.experts.down_proj", "q4_0"),
            ("", ""),
        ],
    ),
    (
        "gpt-oss-20b",
        "gptoss-mxfp4",
        &[
            ("experts.gate_up_proj_bias", ""),
            ("experts.gate_up_proj", "mxfp4"),
            ("experts.down_proj", ""),
            ("_proj.weight", "q4_0"),
            ("lm_head", "q4_0"),
            ("embed_tokens", "kept"),
            ("router.weight", "kept"),
        ],
    ),
    (
        "tinyllama-1.1b",
        "llama-gqa",
        &[("_proj", "q4_0"), ("lm_head", "int8/row"), ("embed_tokens", "kept"), ("norm", "kept")],
    ),
];

#[test]
fn recipes_do_what_they_say_with_the_checkpoints_they_are_for() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (recipe, model, expected) in CASES {
        let mut pack = iec();
        pack.args(["pack", "--dry-run", "--json", "--hf-dir"]).arg(fixture(model)).args(["--out-dir", "nowhere"]);
        let output = pack.arg("--q4-map").arg(root.join(format!("manifests/{recipe}.json"))).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{recipe}: {}", String::from_utf8_lossy(&output.stderr));
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        let mut seen = vec![false; expected.len()];
        for tensor in plan["tensors"].as_array().unwrap() {
            let (name, stored) = (tensor["name"].as_str().unwrap(), tensor["stored"].as_str().unwrap());
            let Some(i) = expected.iter().position(|(part, _)| name.contains(part)) else { continue };
            seen[i] = true;
            let right = match expected[i].1 {
                "kept" => tensor["source"].as_str().unwrap(),
                stored => stored,
            };
            assert!(right.is_empty() || stored == right, "{recipe} with {model}: {name} is {stored}, not {right}");
        }
        assert!(seen.iter().all(|seen| *seen), "{recipe} with {model}: {seen:?}");
    }
}
