//! `iec run --plan`: the memory that a model needs, as a table or JSON.

use crate::console;
use iec::error::{Error, Result};
use iec::report::table::Table;
use iec::session::plan::MemoryPlan;
use iec::units::human_bytes;

/// Prints the plan on stdout.
///
/// # Errors
/// The plan does not fit even if mapped weights are read from the disk at every token (exit code 4), or stdout cannot
/// be written to.
pub fn print(plan: &MemoryPlan, json: bool) -> Result<()> {
    if json {
        console::print_json(plan)?;
    } else {
        console::print(format_args!("{}\n{}\n", table(plan), verdict(plan)))?;
    }
    match plan.fits_without_weights {
        true => Ok(()),
        false => Err(Error::refused("this model does not fit into the memory that is left").help(advice(plan))),
    }
}

fn table(plan: &MemoryPlan) -> Table {
    let (ctx, kv, batch) = (plan.ctx, &plan.kv, plan.batch);
    let kv_cache = match plan.kv_pool_bytes {
        Some(_) => format!("KV cache: pages of --kv-memory in {kv}"),
        None => format!("KV cache: {batch} x {ctx} tokens in {kv}"),
    };
    let rows = [
        ("weights, mapped".to_string(), plan.weights_mapped_bytes),
        (format!("weights, converted for {}", plan.precision), plan.weights_owned_bytes),
        (kv_cache, plan.kv_bytes),
        ("buffers and logits".to_string(), plan.scratch_bytes),
        ("program and tokenizer".to_string(), plan.process_bytes),
        ("sum".to_string(), plan.total_bytes),
    ];
    let cache = (plan.prefix_cache_bytes > 0).then(|| {
        ("prefix cache of several prompts, while no text needs the memory".to_string(), plan.prefix_cache_bytes)
    });
    let left = plan.left_bytes.map(|left| ("left on this machine or in this container".to_string(), left));
    Table::of(
        rows.into_iter().chain(cache).chain(left),
        &[("memory", &|(what, _)| what.clone()), (">bytes", &|(_, n)| human_bytes(*n))],
    )
}

fn verdict(plan: &MemoryPlan) -> String {
    let verdict = match (plan.left_bytes, plan.fits, plan.fits_without_weights) {
        (None, ..) => "the system does not say how much memory is left",
        (_, true, _) => "it fits on the CPU",
        (_, _, true) => "it runs on the CPU, but weights will be read from the disk again at every token",
        _ => "it does not fit on the CPU",
    };
    // The error of a plan that does not fit gives the advice as its help.
    if plan.left_bytes.is_some() && plan.fits_without_weights {
        format!("{verdict}\n{}", advice(plan))
    } else {
        verdict.into()
    }
}

/// Says what would fit.
fn advice(plan: &MemoryPlan) -> String {
    let MemoryPlan { largest_ctx, largest_ctx_int8, largest_batch, batch, .. } = plan;
    match (*largest_ctx_int8, *largest_batch) {
        (0, 0) => return "no context fits beside the weights: use a pack with fewer bits per weight".into(),
        (0, _) => return format!("no context fits with --batch {batch}; largest batch: {largest_batch}"),
        _ => {}
    }
    let int8 = if plan.kv == "int8" { String::new() } else { format!(" (--ctx {largest_ctx_int8} with --kv int8)") };
    format!("largest context with --batch {batch}: --ctx {largest_ctx}{int8}; largest batch: {largest_batch}")
}
