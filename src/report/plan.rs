//! Formats a plan of `ptq --target-bpw`, `--target-size` or `--target-kl` as a table and in one line.

use super::table::Table;
use crate::manifest::plan::{Plan, Target, Yardstick};
use crate::units::{decimals, human_bytes};

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
    };
    let measure = match plan.yardstick {
        Yardstick::Divergence => "divergence in nats per token",
        Yardstick::Outputs => "weighted sum of the outputs' relative squared errors",
        Yardstick::Weights => "weighted sum of the weights' relative squared errors",
    };
    let mut text = format!("{bits} bits per weight, {bytes}, within {asked}; {measure} {:.3e}", plan.predicted);
    if let Some(measured) = plan.measured {
        text += &format!(" expected, {measured:.3e} measured");
    }
    if let Some(uniform) = plan.uniform {
        let bits = decimals(uniform.bits_per_weight, 3);
        text += &format!(" ({:.3e} expected with q4_0 throughout, at {bits} bits)", uniform.predicted);
    }
    text
}
