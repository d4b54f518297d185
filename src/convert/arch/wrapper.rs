//! Wrappers: checkpoints of models for images, video or sound with a language model inside.
//!
//! A wrapper's `config.json` has the fields of its language model in `text_config`, or beside those of the other parts
//! (Qwen2-VL). Its weights have names of their own and the tensors of the other parts, which are left out.

use super::fields::Fields;
use super::view::View;
use crate::error::Result;
use serde::Serialize;

/// Names of the tensors of a language model inside a wrapper.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Naming {
    /// `model.layers.…` and `lm_head.weight`, as without a wrapper.
    #[default]
    Plain,
    /// `model.language_model.layers.…` and `lm_head.weight`.
    Inside,
    /// `language_model.model.layers.…` and `language_model.lm_head.weight`.
    Outside,
}

/// Beginnings of the names of other parts, after an optional `model.`.
const PARTS: [&str; 11] = [
    "visual",
    "vision_tower",
    "vision_model",
    "vision_embedder",
    "audio_embedder",
    "vision_adapter",
    "vision_projection",
    "audio_tower",
    "multi_modal_projector",
    "embed_vision",
    "embed_audio",
];
/// Part that predicts several tokens ahead (multi-token prediction), and the beginning of its canonical names.
const MTP: &str = "mtp";

/// Kind of tensors that do not belong to the language model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PartKind {
    /// Part for images, video or sound.
    Tower,
    /// Multi-token prediction.
    Prediction,
    /// Keys and values of layers that read those of other layers.
    Unread,
}

impl PartKind {
    /// Returns the kind in words.
    pub fn words(self) -> &'static str {
        match self {
            PartKind::Tower => "images or sound",
            PartKind::Prediction => "multi-token prediction",
            PartKind::Unread => "keys and values that no layer reads",
        }
    }
}

/// Tensors of a checkpoint that do not belong to the language model.
#[derive(Debug, Clone, Copy, Default)]
pub struct LeftOut {
    is_wrapper: bool,
    /// First and end of the layers behind those of the model, which predict further tokens.
    mtp_layers: [usize; 2],
    /// First and end of the layers that read keys and values of earlier ones, but may have tensors for their own.
    sharing_layers: [usize; 2],
}

/// Returns the fields of the language model: `text_config`, or the configuration itself.
///
/// # Errors
/// `text_config` is no object.
pub fn text_fields<'a>(config: &Fields<'a>) -> Result<Fields<'a>> {
    Ok(config.object_opt("text_config")?.unwrap_or(*config))
}

impl Naming {
    /// Finds out how the tensors of a checkpoint are named.
    pub fn of<'a>(mut names: impl Iterator<Item = &'a str>) -> Naming {
        let other = |name: &str| match name {
            name if name.starts_with("model.language_model.") => Some(Naming::Inside),
            name if name.starts_with("language_model.") => Some(Naming::Outside),
            _ => None,
        };
        names.find_map(other).unwrap_or_default()
    }

    /// Returns the naming that checkpoints with this configuration usually have.
    ///
    /// # Errors
    /// A field has the wrong type.
    pub fn usual(config: &Fields) -> Result<Naming> {
        Ok(match (config.object_opt("text_config")?, config.word_opt("model_type")?) {
            (None, _) => Naming::Plain,
            (_, Some("gemma3" | "mistral3" | "llava")) => Naming::Outside,
            _ => Naming::Inside,
        })
    }

    /// Returns a name of the plain model as it is in the checkpoint. Multi-token prediction is outside the language
    /// model.
    pub fn name(self, plain: &str) -> String {
        match self {
            _ if plain.strip_prefix(MTP).is_some_and(|rest| rest.starts_with('.')) => plain.to_string(),
            Naming::Plain => plain.to_string(),
            Naming::Outside => format!("language_model.{plain}"),
            Naming::Inside => match plain.strip_prefix("model.") {
                Some(rest) => format!("model.language_model.{rest}"),
                None => plain.to_string(),
            },
        }
    }

    /// Returns a view with the names of this checkpoint.
    pub fn view(self, view: View) -> View {
        view.renamed(&|name| self.name(name))
    }
}

impl LeftOut {
    /// Reads which tensors a checkpoint with this configuration may have besides those of the language model.
    ///
    /// # Errors
    /// A field has the wrong type.
    pub fn of(config: &Fields) -> Result<LeftOut> {
        let text = text_fields(config)?;
        let classes = config.words_opt("architectures")?.unwrap_or_default();
        let is_wrapper = ["text_config", "vision_config"].iter().any(|key| config.get(key).is_some())
            || classes.iter().any(|class| class.ends_with("ForConditionalGeneration"));
        let layers = text.count_opt("num_hidden_layers")?.unwrap_or(0);
        let more = text.count_opt("num_nextn_predict_layers")?.or(text.count_opt("num_mtp_modules")?).unwrap_or(0);
        let sharing = text.count_opt("num_kv_shared_layers")?.unwrap_or(0);
        Ok(LeftOut {
            is_wrapper,
            mtp_layers: [layers, layers.saturating_add(more)],
            sharing_layers: [layers.saturating_sub(sharing), layers],
        })
    }

    /// Returns the part that a tensor of the source belongs to, if it is not the language model.
    pub fn part(&self, name: &str) -> Option<(PartKind, String)> {
        let first = first_part(name)?;
        if first == MTP {
            return Some((PartKind::Prediction, first.to_string()));
        }
        if let Some(tower) = tower(name).filter(|_| self.is_wrapper) {
            return Some((PartKind::Tower, tower.to_string()));
        }
        let (layer, rest) = layer_of(name)?;
        let is_in = |[from, to]: [usize; 2]| (from..to).contains(&layer);
        let is_unused = ["k_proj", "v_proj", "k_norm"].iter().any(|leaf| rest == format!("self_attn.{leaf}.weight"));
        let kind = match is_in(self.mtp_layers) {
            true => Some(PartKind::Prediction),
            false => (is_in(self.sharing_layers) && is_unused).then_some(PartKind::Unread),
        };
        kind.map(|kind| (kind, format!("layers.{layer}")))
    }

    /// Returns the canonical name of a tensor that predicts further tokens: `mtp.rest`, where layers behind those of
    /// the model count from 0.
    pub fn prediction_name(&self, source: &str) -> Option<String> {
        match self.part(source)? {
            (PartKind::Prediction, part) if part == MTP => Some(source.to_string()),
            (PartKind::Prediction, _) => {
                let (layer, rest) = layer_of(source)?;
                Some(format!("{MTP}.layers.{}.{rest}", layer - self.mtp_layers[0]))
            }
            _ => None,
        }
    }

    /// Returns the name in the source of a tensor with the canonical name that [`LeftOut::prediction_name`] gives.
    pub fn prediction_source(&self, canonical: &str, naming: Naming) -> String {
        let [first, end] = self.mtp_layers;
        let of_layer = canonical.strip_prefix(MTP).and_then(|rest| layer_of(rest.strip_prefix('.')?));
        match of_layer.and_then(|(layer, rest)| Some((first.checked_add(layer)?, rest))) {
            Some((layer, rest)) if layer < end => naming.name(&format!("model.layers.{layer}.{rest}")),
            _ => canonical.to_string(),
        }
    }
}

/// Returns the part for images, video or sound that a tensor or module of a wrapper belongs to, if it is in one.
pub fn tower(name: &str) -> Option<&str> {
    first_part(name).filter(|first| PARTS.contains(first))
}

/// Returns the first part of a name, after an optional `model.`.
fn first_part(name: &str) -> Option<&str> {
    Some(name.strip_prefix("model.").unwrap_or(name).split_once('.')?.0)
}

/// Splits the name of a tensor of a layer, in any naming, into the number of the layer and the rest.
fn layer_of(name: &str) -> Option<(usize, &str)> {
    let inner = name.strip_prefix("model.").unwrap_or(name);
    let inner = inner.strip_prefix("language_model.").unwrap_or(inner);
    let (layer, rest) = inner.strip_prefix("model.").unwrap_or(inner).strip_prefix("layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names_follow_the_checkpoint() {
        for (found, naming, layer, head) in [
            ("model.embed_tokens.weight", Naming::Plain, "model.layers.0.x", "lm_head.weight"),
            ("model.language_model.norm.weight", Naming::Inside, "model.language_model.layers.0.x", "lm_head.weight"),
            (
                "language_model.model.norm.weight",
                Naming::Outside,
                "language_model.model.layers.0.x",
                "language_model.lm_head.weight",
            ),
        ] {
            assert_eq!(Naming::of(["visual.x", found].into_iter()), naming);
            assert_eq!([naming.name("model.layers.0.x"), naming.name("lm_head.weight")], [layer, head]);
        }
    }

    #[test]
    fn only_parts_of_wrappers_and_layers_that_predict_further_tokens_are_left_out() {
        let left_out = |config: serde_json::Value| LeftOut::of(&Fields::new(config.as_object().unwrap())).unwrap();
        let wrapper = left_out(json!({"text_config": {"num_hidden_layers": 3}}));
        let deep = left_out(json!({"num_hidden_layers": 3, "num_nextn_predict_layers": 2}));
        for (name, of_wrapper, of_deep) in [
            ("model.visual.blocks.0.x", Some("visual"), None),
            ("vision_tower.x.weight", Some("vision_tower"), None),
            ("mtp.fc.weight", Some("mtp"), Some("mtp")),
            ("model.layers.3.eh_proj.weight", None, Some("layers.3")),
            ("model.layers.4.mlp.x.weight", None, Some("layers.4")),
            ("model.layers.5.mlp.x.weight", None, None),
            ("model.layers.2.mlp.x.weight", None, None),
            ("model.language_model.visual.x", None, None),
            ("lm_head", None, None),
        ] {
            let found = [wrapper.part(name), deep.part(name)].map(|part| part.map(|(_, part)| part));
            assert_eq!(found.each_ref().map(Option::as_deref), [of_wrapper, of_deep], "{name}");
        }
    }

    #[test]
    fn names_of_further_tokens_lead_back_to_the_source() {
        let left_out = |config: serde_json::Value| LeftOut::of(&Fields::new(config.as_object().unwrap())).unwrap();
        let deep = left_out(json!({"num_hidden_layers": 3, "num_nextn_predict_layers": 2}));
        let plain = left_out(json!({"num_hidden_layers": 3}));
        for (left_out, naming, source, canonical) in [
            (&deep, Naming::Plain, "model.layers.4.eh_proj.weight", Some("mtp.layers.1.eh_proj.weight")),
            (&deep, Naming::Inside, "model.language_model.layers.3.x", Some("mtp.layers.0.x")),
            (&deep, Naming::Outside, "language_model.model.layers.3.x", Some("mtp.layers.0.x")),
            (&plain, Naming::Inside, "mtp.layers.0.x", Some("mtp.layers.0.x")),
            (&plain, Naming::Plain, "mtp.fc.weight", Some("mtp.fc.weight")),
            (&deep, Naming::Plain, "model.layers.2.x", None),
            (&plain, Naming::Plain, "visual.x", None),
        ] {
            assert_eq!(left_out.prediction_name(source).as_deref(), canonical, "{source}");
            let back = canonical.map(|canonical| left_out.prediction_source(canonical, naming));
            assert_eq!(back.as_deref(), canonical.map(|_| source), "{source}");
        }
    }
}
