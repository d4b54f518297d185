//! Reads `adapter_config.json` of the PEFT library.
//!
//! Every field is either honoured, without effect on inference, or refused if it is set: no field is dropped silently.
//! Which modules are changed, the tensors say; fields about that are not needed. Their ranks must be those of the
//! configuration, as in PEFT: if they differ, one of the two files belongs to another adapter.

use super::CONFIG;
use crate::convert::arch::Fields;
use crate::error::{Context, Error, Result};
use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};

/// Fields that are read.
const READ: &[&str] = &[
    "peft_type",
    "r",
    "rank_pattern",
    "lora_alpha",
    "use_rslora",
    "alpha_pattern",
    "use_dora",
    "lora_bias",
    "bias",
    "target_parameters",
    "init_lora_weights",
    "peft_version",
];

/// Fields without effect on a trained adapter: they describe training, or say what the tensors show as well.
const INERT: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "modules_to_save",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// Initializations after which the base model is another one, unless the adapter was converted.
const OTHER_BASE: &[&str] = &["pissa", "olora", "loftq", "corda", "lora_ga", "mica"];

/// Largest rank.
const LARGEST_RANK: u64 = 1 << 16;

/// Largest number of patterns of a field that are more than names, and memory in bytes of a compiled one.
const PATTERNS: usize = 64;
const PATTERN_BYTES: usize = 1 << 16;

/// Pattern of module names. A key of PEFT matches the end of a name, from its beginning or from a dot on.
#[derive(Debug)]
enum Pattern {
    /// A name, in which a dot matches any character.
    Name(String),
    Regex(Regex),
}

impl Pattern {
    fn new(key: &str) -> Result<Pattern> {
        if key.chars().all(|c| c.is_ascii_alphanumeric() || "_.".contains(c)) {
            return Ok(Pattern::Name(key.to_string()));
        }
        let regex = RegexBuilder::new(&format!(r"^(?:.*\.)?(?:{key})$")).size_limit(PATTERN_BYTES).build();
        let refused =
            |e| Error::unsupported(format!("the key `{key:.60}` is no regular expression that is supported: {e}"));
        regex.map(Pattern::Regex).map_err(refused)
    }

    fn matches(&self, name: &str) -> bool {
        match self {
            Pattern::Regex(regex) => regex.is_match(name),
            Pattern::Name(key) => {
                let start = name.len().checked_sub(key.len());
                let same = |start: usize| name.bytes().skip(start).zip(key.bytes()).all(|(a, b)| b == b'.' || a == b);
                start.is_some_and(|start| (start == 0 || name.as_bytes()[start - 1] == b'.') && same(start))
            }
        }
    }
}

/// Fields of `adapter_config.json` that change the computation.
#[derive(Debug)]
pub(super) struct AdapterConfig {
    /// Rank of the factors, and the ranks of modules whose names match patterns; the first match counts. `None` if the
    /// tensors alone say it.
    ranks: Option<(usize, Vec<(Pattern, usize)>)>,
    /// Numerator of the scale, and those of modules whose names match patterns.
    alpha: f64,
    alphas: Vec<(Pattern, f64)>,
    /// Whether the scale is `alpha / sqrt(rank)`, not `alpha / rank`.
    rslora: bool,
    pub dora: bool,
    pub lora_bias: bool,
    /// Names of parameters that are no modules: experts and routers.
    pub parameters: Vec<String>,
    /// Scale of every module in place of that of alpha and rank.
    fixed_scale: Option<f32>,
    /// Whether the version of PEFT, if it is known, is before 0.19.
    pub before_0_19: bool,
}

impl AdapterConfig {
    /// Reads the text of the file.
    ///
    /// # Errors
    /// The text is no JSON object, or a field is unknown or has a value that is not supported; the message names it.
    pub fn parse(text: &[u8]) -> Result<AdapterConfig> {
        let Value::Object(map) = crate::strict_json::parse_python(text)? else {
            return Err(Error::corrupt("expected a JSON object"));
        };
        let fields = Fields::new(&map);
        refuse(&fields, &map)?;
        let version = fields.word_opt("peft_version")?.unwrap_or("0.0");
        let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
        Ok(AdapterConfig {
            ranks: Some((
                fields.get("r").map_or(Ok(8), |value| rank_of(value, "r"))?,
                patterns(&fields, "rank_pattern", |rank| rank_of(rank, "rank_pattern"))?,
            )),
            alpha: checked_alpha(fields.number_opt("lora_alpha")?.unwrap_or(8.0), "lora_alpha")?,
            alphas: patterns(&fields, "alpha_pattern", |alpha| {
                checked_alpha(alpha.as_f64().unwrap_or(f64::NAN), "alpha_pattern")
            })?,
            rslora: fields.flag("use_rslora", false)?,
            dora: fields.flag("use_dora", false)?,
            lora_bias: fields.flag("lora_bias", false)?,
            parameters: fields
                .words_opt("target_parameters")?
                .unwrap_or_default()
                .into_iter()
                .map(String::from)
                .collect(),
            fixed_scale: None,
            before_0_19: (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < (0, 19),
        })
    }

    /// Returns the settings of plain low-rank factors with one scale.
    pub fn with_scale(scale: f32) -> AdapterConfig {
        AdapterConfig {
            ranks: None,
            alpha: 0.0,
            alphas: Vec::new(),
            rslora: false,
            dora: false,
            lora_bias: false,
            parameters: Vec::new(),
            fixed_scale: Some(scale),
            before_0_19: false,
        }
    }

    /// Returns the name of the method.
    pub fn method(&self) -> &'static str {
        match (self.dora, self.rslora) {
            (true, _) => "DoRA",
            (false, true) => "rsLoRA",
            (false, false) => "LoRA",
        }
    }

    /// Returns the name that patterns match for a module: that of its weight, if this was trained as a parameter.
    pub fn key(&self, module: &str) -> String {
        let weight = format!("{module}.weight");
        let is_named =
            |end: &String| weight.strip_suffix(end.as_str()).is_some_and(|s| s.is_empty() || s.ends_with('.'));
        if self.parameters.iter().any(is_named) { weight } else { module.to_string() }
    }

    /// Checks the rank of the factors of a module or parameter.
    ///
    /// # Errors
    /// The configuration states another one.
    pub fn check_rank(&self, name: &str, found: usize) -> Result<()> {
        let Some((all, patterns)) = &self.ranks else { return Ok(()) };
        let expected = first_match(patterns, name).unwrap_or(*all);
        if found == expected {
            return Ok(());
        }
        let found = format!("found factors of rank {found}, expected {expected} (r, rank_pattern in {CONFIG})");
        Err(Error::corrupt(found).tensor(name).help("the two files are of different adapters; save the adapter again"))
    }

    /// Returns the factor of the product of the factors of a module or parameter.
    pub fn scale(&self, name: &str, rank: usize) -> f32 {
        if let Some(scale) = self.fixed_scale {
            return scale;
        }
        let alpha = first_match(&self.alphas, name).unwrap_or(self.alpha);
        (if self.rslora { alpha / (rank as f64).sqrt() } else { alpha / rank as f64 }) as f32
    }
}

/// Returns the value of the first pattern that matches a name.
fn first_match<T: Copy>(patterns: &[(Pattern, T)], name: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| pattern.matches(name)).map(|(_, value)| *value)
}

/// Reads an object from patterns of module names to values.
fn patterns<T>(fields: &Fields<'_>, field: &str, read: impl Fn(&Value) -> Result<T>) -> Result<Vec<(Pattern, T)>> {
    let entries = match fields.get(field) {
        None => return Ok(Vec::new()),
        Some(Value::Object(entries)) => entries,
        Some(_) => return Err(fields.wrong(field, "an object")),
    };
    let mut all = Vec::new();
    for (key, value) in entries {
        all.push((Pattern::new(key).tensor(field)?, read(value)?));
        if all.iter().filter(|(pattern, _)| matches!(pattern, Pattern::Regex(_))).count() > PATTERNS {
            let found = format!("found more than {PATTERNS} regular expressions");
            return Err(Error::unsupported(found).tensor(field));
        }
    }
    Ok(all)
}

fn rank_of(value: &Value, field: &str) -> Result<usize> {
    let rank = value.as_u64().filter(|rank| (1..=LARGEST_RANK).contains(rank));
    rank.and_then(|rank| usize::try_from(rank).ok()).ok_or_else(|| {
        Error::corrupt(format!("found {value:.40}, expected a whole number from 1 to {LARGEST_RANK}")).tensor(field)
    })
}

/// Checks a numerator of a scale, which is computed in f64 and used as f32.
fn checked_alpha(alpha: f64, field: &str) -> Result<f64> {
    if (alpha as f32).is_finite() {
        Ok(alpha)
    } else {
        Err(Error::corrupt(format!("found {alpha}, expected a number that f32 can hold")).tensor(field))
    }
}

/// Refuses fields that change the computation in a way that is not supported.
fn refuse(fields: &Fields<'_>, map: &Map<String, Value>) -> Result<()> {
    if fields.word_opt("peft_type")? != Some("LORA") {
        return Err(fields.unsupported("peft_type", "only LORA is supported, which includes DoRA and rsLoRA"));
    }
    if !["none", "lora_only", "all"].contains(&fields.word_opt("bias")?.unwrap_or("none")) {
        return Err(fields.wrong("bias", "none, lora_only or all"));
    }
    if let Some(Value::String(init)) = fields.get("init_lora_weights")
        && OTHER_BASE.iter().any(|name| init.to_lowercase().starts_with(name))
    {
        return Err(fields.unsupported(
            "init_lora_weights",
            "the base model was changed before the training; convert the adapter with \
             `save_pretrained(path_initial_model_for_weight_conversion=...)` of PEFT",
        ));
    }
    let known = |name: &str| READ.contains(&name) || INERT.contains(&name);
    match map.iter().find(|(name, value)| !known(name) && !is_neutral(value)) {
        Some((name, _)) => Err(fields.unsupported(name, "an adapter with this field computes something else")),
        None => Ok(()),
    }
}

/// Returns true for the value of a field that is not used.
fn is_neutral(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(more: &str) -> Result<AdapterConfig> {
        AdapterConfig::parse(format!(r#"{{"peft_type": "LORA", "r": 8, "lora_alpha": 16{more}}}"#).as_bytes())
    }

    #[test]
    fn the_first_pattern_that_matches_gives_alpha() {
        let config = parse(r#", "alpha_pattern": {"layers.1.*q_proj": 4, "q_proj": 2, "^model.layers.0.v_proj": 6}"#);
        let config = config.unwrap();
        let scale = |name: &str| config.scale(name, 4);
        assert_eq!(scale("model.layers.1.self_attn.q_proj"), 1.0);
        assert_eq!(scale("model.layers.0.self_attn.q_proj"), 0.5);
        assert_eq!((scale("model.layers.0.v_proj"), scale("model.layers.0.xq_proj")), (1.5, 4.0));
        assert_eq!(parse(r#", "use_rslora": true"#).unwrap().scale("q_proj", 4), 8.0);
    }

    #[test]
    fn a_weight_that_was_trained_as_a_parameter_is_matched_by_its_own_name() {
        let config =
            parse(r#", "target_parameters": ["mlp.gate.weight"], "rank_pattern": {"gate.weight": 2}"#).unwrap();
        assert_eq!(config.key("model.layers.0.mlp.gate"), "model.layers.0.mlp.gate.weight");
        assert_eq!(config.key("model.layers.0.xmlp.gate"), "model.layers.0.xmlp.gate");
        assert!(config.check_rank(&config.key("model.layers.0.mlp.gate"), 2).is_ok());
    }

    #[test]
    fn ranks_are_those_of_the_configuration() {
        let config = parse(r#", "rank_pattern": {"layers.1.*q_proj": 4, "q_proj": 2}"#).unwrap();
        struct Case(&'static str, usize, bool);
        for Case(name, rank, fits) in [
            Case("model.layers.0.self_attn.k_proj", 8, true),
            Case("model.layers.0.self_attn.k_proj", 16, false),
            Case("model.layers.1.self_attn.q_proj", 4, true),
            Case("model.layers.1.self_attn.q_proj", 8, false),
            Case("model.layers.0.self_attn.q_proj", 2, true),
            Case("model.layers.0.self_attn.q_proj", 4, false),
        ] {
            let checked = config.check_rank(name, rank);
            assert_eq!(checked.is_ok(), fits, "{name} {rank}: {checked:?}");
        }
        for rank in ["0", "-1", "1.5", "8.0", "65537", "18446744073709551616", "\"8\"", "true", "[8]", "1e400"] {
            let text = format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": 16}}"#);
            let error = AdapterConfig::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("expected a whole number") || rank == "1e400", "{rank}: {error}");
        }
        let by_default = AdapterConfig::parse(br#"{"peft_type": "LORA"}"#).unwrap();
        assert!(by_default.check_rank("x", 8).is_ok() && by_default.check_rank("x", 4).is_err());
    }

    #[test]
    fn what_is_not_computed_is_refused_by_name() {
        for (more, said) in [
            (r#", "use_qalora": true"#, "use_qalora"),
            (r#", "layer_replication": [[0, 2]]"#, "layer_replication"),
            (r#", "trainable_token_indices": [1]"#, "trainable_token_indices"),
            (r#", "ensure_weight_tying": true"#, "ensure_weight_tying"),
            (r#", "a_new_method": {"x": 1}"#, "a_new_method"),
            (r#", "init_lora_weights": "pissa_niter_4""#, "init_lora_weights"),
            (r#", "bias": "some""#, "bias"),
            (r#", "alpha_pattern": {"(?=a)": 1}"#, "alpha_pattern"),
            (r#", "lora_alpha": 3"#, "lora_alpha"),
            (r#", "alpha_pattern": {"q_proj": 1e39}"#, "alpha_pattern"),
            (r#", "alpha_pattern": {"q_proj": "8"}"#, "alpha_pattern"),
            (r#", "rank_pattern": {"q_proj": 0}"#, "rank_pattern"),
            (r#", "rank_pattern": {"q_proj": 4.0}"#, "rank_pattern"),
            (r#", "rank_pattern": {"(?=a)": 1}"#, "rank_pattern"),
            (r#", "rank_pattern": [4]"#, "rank_pattern"),
        ] {
            let message = parse(more).unwrap_err().to_string();
            assert!(message.contains(said), "{more}: {message}");
        }
        assert!(parse(r#", "use_qalora": false, "arrow_config": null, "a_new_list": []"#).is_ok());
        assert!(AdapterConfig::parse(br#"{"peft_type": "IA3"}"#).unwrap_err().to_string().contains("IA3"));
    }
}
