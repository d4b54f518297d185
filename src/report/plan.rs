//! Formats a plan of `ptq --target-bpw`, `--target-size`, `--target-kl` or `--target-speed` as a table, in one line,
//! and as a page with the best packs of all sizes.

use super::html::charts::{Mark, trade_off};
use super::html::{self, Page, escape, section, table as html_table};
use super::table::Table;
use crate::manifest::plan::{Plan, Target, Yardstick};
use crate::trial::budget::{CurvePoint, Outlook};
use crate::units::{decimals, human_bytes, percentage};

/// Returns the plan as a table with one row per tensor.
pub fn table(plan: &Plan) -> Table {
    let cost = match plan.yardstick {
        Yardstick::Divergence => ">divergence",
        Yardstick::Outputs => ">error² of outputs",
        Yardstick::Weights => ">error² of weights",
    };
    let mut table = Table::new(&["tensor", "stored as", ">bits/weight", cost]);
    for (name, tensor) in &plan.tensors {
        table.row([name.clone(), tensor.stored.clone(), format!("{:.3}", tensor.bits), format!("{:.3e}", tensor.cost)]);
    }
    table
}

/// Returns one line with the target of the plan, the size it reaches, and the expected error.
pub fn describe(plan: &Plan) -> String {
    let (bits, bytes) = (decimals(plan.bits_per_weight, 3), human_bytes(plan.bytes));
    let asked = match plan.target {
        Target::BitsPerWeight(bits) if bits.abs() < 1e3 => format!("{bits} bits per weight"),
        Target::BitsPerWeight(bits) => format!("{} bits per weight", decimals(bits, 3)),
        Target::Bytes(bytes) => format!("{} ({bytes} bytes)", human_bytes(bytes)),
        Target::Divergence(kl) => format!("a divergence of {kl}"),
        Target::Speed(speed) => format!("a target of {speed} tokens per second"),
    };
    let measure = measure(plan.yardstick);
    let mut text = format!("{bits} bits per weight, {bytes}, within {asked}; {measure} {:.3e}", plan.predicted);
    if let Some(measured) = plan.measured {
        text += &format!(" expected, {measured:.3e} measured");
    }
    if let Some(uniform) = plan.uniform {
        let bits = decimals(uniform.bits_per_weight, 3);
        text += &format!(" ({:.3e} expected with q4_0 throughout, at {bits} bits)", uniform.predicted);
    }
    if let Some(speed) = &plan.speed {
        text += &format!("; {:.1} tokens per second expected", speed.tokens_per_second);
    }
    text
}

/// Returns the yardstick in words.
fn measure(yardstick: Yardstick) -> &'static str {
    match yardstick {
        Yardstick::Divergence => "divergence in nats per token",
        Yardstick::Outputs => "weighted sum of the outputs' relative squared errors",
        Yardstick::Weights => "weighted sum of the weights' relative squared errors",
    }
}

/// Returns a line for each part of the model that bears quantization much less than its size suggests.
pub fn warnings(outlook: &Outlook) -> Vec<String> {
    let what = match outlook.plan.yardstick {
        Yardstick::Divergence => "divergence",
        Yardstick::Outputs | Yardstick::Weights => "weighted error",
    };
    let notable = outlook.parts.iter().filter(|part| part.is_notable());
    let line = |part: &str, costs: f64, weights: f64| {
        let [costs, weights] = [costs, weights].map(|share| percentage(share, 1.0));
        format!("note: with equal bits, {part} would cause {costs} of the {what} with {weights} of the weights")
    };
    notable.map(|part| line(part.part, part.costs, part.weights)).collect()
}

/// Returns a page with the best packs of all sizes: their divergence and speed over bits per weight.
pub fn page(model: &str, outlook: &Outlook) -> String {
    let plan = &outlook.plan;
    let tile = |name: &str, value: &str, note: &str| {
        format!("<div><h3>{}</h3><b>{}</b><small>{}</small></div>\n", escape(name), escape(value), escape(note))
    };
    let tiles = [
        tile("bits per weight", &decimals(plan.bits_per_weight, 3), "of the whole pack"),
        tile("size", &human_bytes(plan.bytes), "of model.ie.bin"),
        tile("expected", &format!("{:.3e}", plan.predicted), measure(plan.yardstick)),
        tile("speed", &format!("{:.1}", outlook.tokens_per_second), "tokens per second, products with weights alone"),
    ];
    let chart = |value: fn(&CurvePoint) -> f64, own: f64, uniform: Option<f64>, unit: &str, logarithmic: bool| {
        let points: Vec<_> = outlook.curve.iter().map(|point| (point.bits_per_weight, value(point))).collect();
        let mut marks = vec![Mark { name: "plan", at: (plan.bits_per_weight, own) }];
        let uniform = plan.uniform.zip(uniform);
        marks.extend(uniform.map(|(u, value)| Mark { name: "q4_0", at: (u.bits_per_weight, value) }));
        trade_off(&points, &marks, ("bits per weight", unit), logarithmic)
    };
    let uniform = plan.uniform.map(|uniform| uniform.predicted);
    let parts = outlook.parts.iter().map(|part| {
        let [weights, costs] = [part.weights, part.costs].map(|share| percentage(share, 1.0));
        let part_name = part.part.trim_start_matches("the ");
        if part.is_notable() {
            [format!("{part_name} (sensitive)"), weights, costs]
        } else {
            [part_name.into(), weights, costs]
        }
    });
    let tensors = plan.tensors.iter().map(|(name, tensor)| {
        [name.clone(), tensor.stored.clone(), format!("{:.3}", tensor.bits), format!("{:.3e}", tensor.cost)]
    });
    let body = [
        format!("<div class=\"tiles\">{}</div>\n", tiles.concat()),
        section("Expected error", &chart(|p| p.predicted, plan.predicted, uniform, measure(plan.yardstick), true)),
        section("Speed", &chart(|p| p.tokens_per_second, outlook.tokens_per_second, None, "tokens per second", false)),
        section("Parts with equal bits", &html_table(&["part", "weights", "error"], parts)),
        section("The plan", &html_table(&["tensor", "stored as", "bits per weight", "cost"], tensors)),
    ];
    html::document(&Page {
        command: "ptq --dry-run",
        title: model,
        facts: &[&describe(plan)],
        body: &body.concat(),
        footer: "",
    })
}
