//! Recipes: manifests of rules that are part of the program, so that a model can be quantized without a file of rules.
//!
//! A recipe for any family names the matrices of attention, MLP and experts by their canonical names. One for a single
//! model also names the matrices that measurements of this model have shown to be sensitive.

use crate::error::{Error, Result};

/// A manifest of rules with a name.
#[derive(Debug, Clone, Copy)]
pub struct Recipe {
    /// Name on the command line, and of the file in `manifests/` without its extension.
    pub name: &'static str,
    /// Description in one line.
    pub about: &'static str,
    /// Bits per weight of most matrices.
    pub bits: u32,
    /// Manifest in JSON.
    pub text: &'static str,
}

/// Creates a row of [`RECIPES`] from the file in `manifests/` with the name of the recipe.
macro_rules! recipe {
    ($name:literal, $bits:literal, $about:literal) => {
        Recipe {
            name: $name,
            about: $about,
            bits: $bits,
            text: include_str!(concat!("../../manifests/", $name, ".json")),
        }
    };
}

/// All recipes. Those with bits in their names have so many per weight in a model whose embedding and output matrix are
/// an eighth of the weights.
pub static RECIPES: [Recipe; 19] = [
    recipe!("int4", 4, "q4_0 for all matrices of the layers; embedding and output matrix in int8"),
    recipe!("int4-head8", 4, "q4_0; output matrix in int8 with a scale per row; embedding as it is"),
    recipe!("nl4", 4, "IQ4_NL instead of q4_0: the size of int4, smaller error"),
    recipe!("nl4-row", 4, "nl4 with scales of a byte (4.25 bits); embedding and output matrix in int6"),
    recipe!("nl4-mixed", 4, "nl4; down projections in int5, v_proj, embedding and output matrix in int6"),
    recipe!("int5", 5, "int5 with a scale per 32 weights; embedding and output matrix in int8"),
    recipe!("int6", 6, "int6 with a scale per 32 weights; embedding and output matrix in int8"),
    recipe!("int8", 8, "int8 with a scale per row; embedding and output matrix per 32 weights"),
    recipe!("bits-2.7", 2, "t2; k, v, o and down projections in t3, embedding and output matrix in nl4"),
    recipe!("bits-3.2", 3, "t3; embedding and output matrix in nl4"),
    recipe!("bits-3.65", 3, "t3; k, v and down projections in nl4, embedding and output matrix in int5"),
    recipe!("bits-4.2", 4, "nl4-row with up projections in t3"),
    recipe!("bits-4.5", 4, "nl4-row with v_proj in int5"),
    recipe!("bits-5.0", 4, "nl4-row with v_proj and down projections in int6"),
    recipe!("tinyllama-1.1b", 4, "TinyLlama: int4, and the output matrix in int8"),
    recipe!("llama-3", 4, "Llama 3: int4; first down projections in int8, v_proj and embedding in int6"),
    recipe!("qwen", 4, "Qwen2 and Qwen3: int4; k_proj and v_proj in int8, embedding in int6"),
    recipe!("qwen3-moe", 4, "Qwen3-MoE: experts in int4, attention in int8, embedding in int6"),
    recipe!("gpt-oss-20b", 4, "gpt-oss: attention and output matrix in int4; experts stay in MXFP4"),
];

/// JSON Schema of manifests.
pub const SCHEMA: &str = include_str!("../../manifests/q4_manifest.schema.json");

/// Returns the recipe with this name.
///
/// # Errors
/// No recipe has this name.
pub fn named(name: &str) -> Result<&'static Recipe> {
    RECIPES.iter().find(|recipe| recipe.name == name).ok_or_else(|| {
        let names = RECIPES.map(|recipe| recipe.name).join(", ");
        Error::usage(format!("recipe `{name}`: found no such recipe, expected one of {names}")).help(
            "`iec recipes` describes them; `iec recipes NAME` prints one; a changed copy can be given to --q4-map",
        )
    })
}

/// Returns the recipe that a number of bits per weight stands for.
///
/// # Errors
/// No recipe has this number of bits.
pub fn of_bits(bits: u32) -> Result<&'static Recipe> {
    RECIPES.iter().find(|recipe| recipe.name == format!("int{bits}")).ok_or_else(|| {
        Error::usage(format!("--bits: found {bits}, expected 4, 5, 6 or 8"))
            .help("`iec recipes` lists all recipes; name one with --recipe")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Manifest;
    use crate::scheme::Granularity;
    use std::path::Path;

    const ATTENTION: &str = "model.layers.0.self_attn.q_proj.weight";
    const EXPERTS: &str = "model.layers.11.mlp.experts.gate_up_proj";

    fn bits(recipe: &Recipe, name: &str) -> Option<u32> {
        let manifest = Manifest::parse(recipe.text.as_bytes(), Path::new("")).unwrap();
        manifest.decide(name, &[64, 64]).unwrap().map(|decision| decision.quant.spec.scheme.bits())
    }

    #[test]
    fn every_recipe_is_a_file_of_the_repository_and_the_reverse() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests");
        let files = std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
        let mut files: Vec<String> = files
            .filter_map(|name| name.strip_suffix(".json").map(String::from))
            .filter(|name| !name.ends_with(".schema"))
            .collect();
        files.sort();
        let mut names = RECIPES.map(|recipe| recipe.name.to_string());
        names.sort();
        assert_eq!(files, names);
    }

    #[test]
    fn recipes_for_any_family_quantize_the_matrices_of_layers_and_no_router() {
        for recipe in &RECIPES[..14] {
            let has = |name: &str| bits(recipe, name);
            assert_eq!((has(ATTENTION), has(EXPERTS)), (Some(recipe.bits), Some(recipe.bits)), "{}", recipe.name);
            let mixers = ["conv.in_proj", "conv.out_proj", "linear_attn.q_proj", "linear_attn.z_proj", "mamba.b_proj"];
            for matrix in mixers.map(|matrix| format!("model.layers.0.{matrix}.weight")) {
                assert_eq!(has(&matrix), Some(recipe.bits), "{}: {matrix}", recipe.name);
            }
            for mixer in ["linear_attn", "mamba"] {
                let output = has(&format!("model.layers.0.{mixer}.out_proj.weight"));
                let expected = match recipe.name {
                    "bits-2.7" | "bits-3.2" => 4,
                    "bits-3.65" => 6,
                    _ if recipe.bits == 4 => 6,
                    _ => recipe.bits,
                };
                assert_eq!(output, Some(expected), "{}: {mixer}", recipe.name);
            }
            for part in [
                "conv.conv.weight",
                "linear_attn.a_proj.weight",
                "linear_attn.conv1d.weight",
                "mamba.dt_proj.weight",
                "mamba.D",
            ] {
                assert_eq!(has(&format!("model.layers.0.{part}")), None, "{}: {part}", recipe.name);
            }
            for name in
                ["model.layers.0.mlp.router.weight", "model.layers.0.self_attn.q_proj.bias", "model.norm.weight"]
            {
                assert_eq!(has(name), None, "{}: {name}", recipe.name);
            }
        }
        for name in ["int4", "nl4", "int5", "int6", "int8"] {
            for outer in ["lm_head.weight", "model.embed_tokens.weight", "model.embed_tokens_per_layer.weight"] {
                assert_eq!(bits(named(name).unwrap(), outer), Some(8), "{name}: {outer}");
            }
        }
        let head8 = named("int4-head8").unwrap();
        assert_eq!([bits(head8, "lm_head.weight"), bits(head8, "model.embed_tokens.weight")], [Some(8), None]);
        let mixed = named("nl4-mixed").unwrap();
        for (name, expected) in [
            ("model.layers.3.mlp.down_proj.weight", 5),
            ("model.layers.3.mlp.experts.down_proj", 5),
            ("model.layers.3.self_attn.v_proj.weight", 6),
            ("model.embed_tokens.weight", 6),
        ] {
            assert_eq!(bits(mixed, name), Some(expected), "{name}");
        }
    }

    #[test]
    fn a_number_of_bits_stands_for_the_plain_recipe() {
        for (count, name) in [(4, "int4"), (5, "int5"), (6, "int6"), (8, "int8")] {
            assert_eq!(of_bits(count).unwrap().name, name);
        }
        let int8 = Manifest::parse(of_bits(8).unwrap().text.as_bytes(), Path::new("")).unwrap();
        assert_eq!(int8.decide(ATTENTION, &[64, 64]).unwrap().unwrap().quant.spec.granularity, Granularity::Row);
        assert!(of_bits(3).is_err_and(|e| e.cause().exit_code() == 2));
        assert!(named("int3").is_err_and(|e| e.to_string().contains("int4-head8")));
    }
}
