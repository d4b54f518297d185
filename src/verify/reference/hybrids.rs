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
