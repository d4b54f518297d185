//! Rows of the families with recurrent layers.

use super::config::{NormKind, Places, QkNorm};
use super::families::Row;
use super::family::Family;
use super::rules::{Dense, PairRule, Rotates, Share, Slides};

pub(super) const LFM2: Row = Row {
    names: &["Lfm2ForCausalLM", "lfm2"],
    family: Family::Lfm2,
    norms: (NormKind::Rms, Places::Before, QkNorm::Head),
    rotation: (Share::Whole, PairRule::Halves),
    is_latent: false,
    is_tied: true,
    theta: 1e6,
    eps: 1e-5,
    heads: (Some(8), None),
    window: None,
    slides: Slides::Nowhere,
    rotates: Rotates::Everywhere,
    dense: Dense::Nowhere,
    activation: ("hidden_act", "silu"),
};

pub(super) const LFM2_MOE: Row = Row {
    names: &["Lfm2MoeForCausalLM", "lfm2_moe"],
    family: Family::Lfm2Moe,
    norms: (NormKind::Rms, Places::Before, QkNorm::Head),
    rotation: (Share::Whole, PairRule::Halves),
    is_latent: false,
    is_tied: true,
    theta: 1e6,
    eps: 1e-5,
    heads: (Some(8), None),
    window: None,
    slides: Slides::Nowhere,
    rotates: Rotates::Everywhere,
    dense: Dense::FirstOf("num_dense_layers", 2),
    activation: ("hidden_act", "silu"),
};

pub(super) const LFM3: Row = Row {
    names: &["Lfm3ForCausalLM", "lfm3"],
    family: Family::Lfm3,
    norms: (NormKind::Rms, Places::Around, QkNorm::Head),
    rotation: (Share::Given(1.0), PairRule::Halves),
    is_latent: false,
    is_tied: true,
    theta: 1e6,
    eps: 1e-5,
    heads: (Some(8), None),
    window: None,
    slides: Slides::Nowhere,
    rotates: Rotates::Everywhere,
    dense: Dense::Nowhere,
    activation: ("hidden_act", "silu"),
};

pub(super) const QWEN3_5: Row = Row {
    names: &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "qwen3_5_text"],
    family: Family::Qwen3_5,
    norms: (NormKind::RmsOnePlus, Places::Before, QkNorm::Head),
    rotation: (Share::Given(0.25), PairRule::Halves),
    is_latent: false,
    is_tied: false,
    theta: 10_000.0,
    eps: 1e-6,
    heads: (Some(4), Some(256)),
    window: None,
    slides: Slides::Nowhere,
    rotates: Rotates::Everywhere,
    dense: Dense::Nowhere,
    activation: ("hidden_act", "silu"),
};

pub(super) const QWEN3_5_MOE: Row = Row {
    names: &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"],
    family: Family::Qwen3_5Moe,
    norms: (NormKind::RmsOnePlus, Places::Before, QkNorm::Head),
    rotation: (Share::Given(0.25), PairRule::Halves),
    is_latent: false,
    is_tied: false,
    theta: 10_000.0,
    eps: 1e-6,
    heads: (Some(2), Some(256)),
    window: None,
    slides: Slides::Nowhere,
    rotates: Rotates::Everywhere,
    dense: Dense::Nowhere,
    activation: ("hidden_act", "silu"),
};

pub(super) const QWEN3_NEXT: Row = Row {
    names: &["Qwen3NextForCausalLM", "qwen3_next"],
    family: Family::Qwen3Next,
    norms: (NormKind::RmsOnePlus, Places::Before, QkNorm::Head),
    rotation: (Share::Given(0.25), PairRule::Halves),
    is_latent: false,
    is_tied: false,
    theta: 10_000.0,
    eps: 1e-6,
    heads: (Some(2), Some(256)),
    window: None,
    slides: Slides::Nowhere,
    rotates: Rotates::Everywhere,
    dense: Dense::ListedOrByStep,
    activation: ("hidden_act", "silu"),
};

pub(super) const NEMOTRON_H: Row = Row {
    names: &["NemotronHForCausalLM", "nemotron_h"],
    family: Family::NemotronH,
    norms: (NormKind::Rms, Places::Before, QkNorm::None),
    rotation: (Share::Whole, PairRule::Halves),
    is_latent: false,
    is_tied: false,
    theta: 10_000.0,
    eps: 1e-5,
    heads: (Some(8), Some(128)),
    window: None,
    slides: Slides::Nowhere,
    rotates: Rotates::Nowhere,
    dense: Dense::InPattern,
    activation: ("mlp_hidden_act", "relu2"),
};

pub(super) const GRANITE_HYBRID: Row = Row {
    names: &["GraniteMoeHybridForCausalLM", "granitemoehybrid"],
    family: Family::GraniteHybrid,
    norms: (NormKind::Rms, Places::Before, QkNorm::None),
    rotation: (Share::Whole, PairRule::Halves),
    is_latent: false,
    is_tied: false,
    theta: 10_000.0,
    eps: 1e-6,
    heads: (None, None),
    window: None,
    slides: Slides::Nowhere,
    rotates: Rotates::IfSaid,
    dense: Dense::Nowhere,
    activation: ("hidden_act", "silu"),
};
