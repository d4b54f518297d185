//! Perplexity and divergence of a model, as a table and as JSON.

use super::table::Table;
use crate::eval::stats::Mean;
use crate::eval::{Divergence, DraftQuality, Perplexity};
use crate::runtime::Precision;
use serde_json::{Value, json};

/// Returns the comparison with a reference model as JSON.
pub fn reference(found: &Divergence, model: &str, precision: Precision) -> Value {
    let mut ratio = json!(found.perplexity_ratio);
    ratio["ci95"] = json!(found.perplexity_ratio_ci95);
    json!({
        "model": model,
        "precision": precision.name(),
        "perplexity": found.reference,
        "perplexity_ratio": ratio,
        "kl": {
            "mean": found.kl.value, "stderr": found.kl.stderr, "median": found.kl_spread.median,
            "p90": found.kl_spread.p90, "p95": found.kl_spread.p95, "p99": found.kl_spread.p99,
            "p999": found.kl_spread.p999, "max": found.kl_spread.max,
        },
        "top1_agreement": found.top1_agreement,
        "delta_p": found.delta_p,
        "rms_delta_p": found.rms_delta_p,
    })
}

/// Returns a table of the measured values with their standard errors; `layers` are those of multi-token prediction.
pub fn table(own: &Perplexity, divergence: Option<&Divergence>, layers: &[DraftQuality]) -> Table {
    let mut table = Table::new(&["figure", ">value", ">± standard error"]);
    let percent = |mean: Mean| mean.map(|v| 100.0 * v, 100.0);
    let mut row = |name: &str, mean: Mean, digits: usize, unit: &str| {
        table.row([name.into(), format!("{:.digits$}{unit}", mean.value), format!("{:.digits$}{unit}", mean.stderr)]);
    };
    row("perplexity", own.perplexity, 4, "");
    if let Some(found) = divergence {
        row("perplexity of the reference", found.reference.perplexity, 4, "");
        row("ratio of perplexities", found.perplexity_ratio, 5, "");
        row("mean KL divergence", found.kl, 6, "");
        row("same most likely token", percent(found.top1_agreement), 2, " %");
        row("mean difference of p", percent(found.delta_p), 3, " %");
        row("root mean square of this difference", percent(found.rms_delta_p), 3, " %");
        let [low, high] = found.perplexity_ratio_ci95;
        table.row(["95 % interval of the ratio".into(), format!("{low:.5} to {high:.5}"), String::new()]);
        let spread = found.kl_spread;
        for (name, value) in [
            ("median KL divergence", spread.median),
            ("90 % of KL divergences below", spread.p90),
            ("99 % of KL divergences below", spread.p99),
            ("largest KL divergence", spread.max),
        ] {
            table.row([name.into(), format!("{value:.6}"), String::new()]);
        }
    } else {
        table.row(["95 % interval".into(), format!("{:.4} to {:.4}", own.ci95[0], own.ci95[1]), String::new()]);
    }
    for (number, layer) in layers.iter().enumerate() {
        let of = if layers.len() > 1 { format!(" (layer {number})") } else { String::new() };
        let (perplexity, accepted) = (layer.perplexity.perplexity, percent(layer.accepted));
        for (name, mean, digits, unit) in [
            ("perplexity by multi-token prediction", perplexity, 4, ""),
            ("first drafts that the model accepts", accepted, 2, " %"),
        ] {
            let [value, error] = [mean.value, mean.stderr].map(|x| format!("{x:.digits$}{unit}"));
            table.row([format!("{name}{of}"), value, error]);
        }
    }
    table
}
