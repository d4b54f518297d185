//! Assigns layers to GPUs: the CPU computes the first layers (none, if all fit), and the devices compute the others
//! in order. The last device also has the output matrix.

use super::context::{Context, MARGIN};
use super::driver::Driver;
use super::kv::{self, Pool};
use super::ops;
use super::part::{CudaPart, SPARE_STATES};
use super::states::StateLayout;
use super::weights::{UploadSource, layer_bytes, linear_bytes};
use crate::error::{Error, Result};
use crate::model_config::{Heads, Mlp, ModelConfig, Recurrent};
use crate::progress;
use crate::runtime::device::{DeviceInfo, Devices, Parts};
use crate::runtime::kv::PAGE;
use std::ops::Range;

/// Result of the search for GPUs.
#[derive(Debug)]
pub enum Search {
    /// GPUs to use.
    Found(Vec<DeviceInfo>),
    /// No GPU: everything runs on the CPU.
    None {
        /// Reason why no GPU is usable, if the request was [`Devices::Auto`].
        why: Option<String>,
    },
}

/// Searches for the requested devices.
///
/// # Errors
/// A device that was requested by its number cannot be used.
pub fn search(devices: Devices) -> Result<Search> {
    let find = |mask: u64| {
        let driver = Driver::open()?;
        (0..64).filter(|n| mask >> n & 1 == 1).map(|n| driver.device(n)).collect::<Result<Vec<_>>>()
    };
    match devices {
        Devices::Cpu => Ok(Search::None { why: None }),
        Devices::Cuda(mask) => find(mask).map(Search::Found),
        Devices::Auto => Ok(find(1).map_or_else(|e| Search::None { why: Some(e.to_string()) }, Search::Found)),
    }
}

/// The GPUs of this machine.
#[derive(Debug)]
pub struct GpuList {
    /// CUDA version of the driver.
    pub driver: String,
    /// Each GPU with the free bytes of its memory, if the driver reports them, or the reason why it cannot be used.
    pub gpus: Vec<Result<(DeviceInfo, Option<u64>)>>,
}

/// Lists the GPUs of this machine.
///
/// # Errors
/// There is no driver, or it finds no GPU.
pub fn list_gpus() -> Result<GpuList> {
    let driver = Driver::open()?;
    let free = |info: &DeviceInfo| Context::open(info.clone()).and_then(|context| context.memory()).ok();
    let describe = |info: DeviceInfo| {
        let free = free(&info).map(|(free, _)| free);
        (info, free)
    };
    let gpus = (0..driver.devices()).map(|number| driver.device(number).map(describe)).collect();
    Ok(GpuList { driver: driver.cuda_version(), gpus })
}

/// Uploads layers to the devices and returns the parts: the last `layers` layers of the model, or as many as fit.
///
/// # Errors
/// A device cannot be used, or there is not enough device memory.
pub fn parts(devices: Vec<DeviceInfo>, layers: Option<usize>, source: &UploadSource<'_>) -> Result<Parts> {
    kv::kind(source.kv.kind)?;
    ops::check(source.config, source.rows)?;
    let contexts = devices.into_iter().map(Context::open).collect::<Result<Vec<_>>>()?;
    let free = contexts.iter().map(|context| Ok(context.memory()?.0)).collect::<Result<Vec<_>>>()?;
    let plan = plan(source, &free, layers)?;
    let layers_of = |range: &Range<usize>| source.weights.layers[range.clone()].iter().map(layer_bytes).sum::<u64>();
    let bytes = plan.iter().map(layers_of).sum::<u64>() + source.weights.lm_head.nbytes() as u64;
    let bar = progress::bytes("to the GPU", bytes);
    let mut parts = Parts::new();
    for (context, layers) in contexts.iter().zip(plan).filter(|(_, layers)| !layers.is_empty()) {
        progress::detail(1, || {
            let (info, count) = (&context.info, source.config.n_layers);
            format!("cuda:{} {}: layers {} to {} of {count}", info.ordinal, info.name, layers.start, layers.end)
        });
        parts.push(Box::new(CudaPart::new(context, source, layers, &bar)?));
    }
    Ok(parts)
}

/// Returns the layers of each device: the last `asked` layers of the model, or as many as fit, in about equal shares.
///
/// # Errors
/// The requested layers do not fit, or no layer fits.
fn plan(source: &UploadSource<'_>, free: &[u64], asked: Option<usize>) -> Result<Vec<Range<usize>>> {
    let layers = source.config.n_layers;
    let wanted = asked.unwrap_or(layers).min(layers);
    if wanted == 0 {
        return Err(Error::usage("--gpu-layers: found 0, expected at least 1").help("use --device cpu"));
    }
    let whole = indivisible(source.config);
    if let Some(field) = whole.filter(|_| wanted < layers) {
        let found = format!("--gpu-layers: found {wanted}, but `{field}` takes all {layers} layers to one device");
        return Err(Error::usage(found).help("leave --gpu-layers out, or use --device cpu"));
    }
    let pages = source.positions.div_ceil(PAGE) as u64;
    let kv = |layers: Range<usize>| Pool::page_bytes(&source.kv.part(layers)) as u64 * pages;
    let states = |layer: usize| SPARE_STATES * StateLayout::of(source.config, layer..layer + 1).bytes() as u64;
    let cost = |layer: usize| layer_bytes(&source.weights.layers[layer]) + kv(layer..layer + 1) + states(layer);
    let head = source.weights.lm_head.nbytes() as u64;
    let inputs = source.weights.per_layer.as_ref().map_or(0, |weights| linear_bytes(&weights.projection));
    let fixed = scratch_bytes(source) + inputs + MARGIN;
    let mut ranges = vec![layers..layers; free.len()];
    let mut end = layers;
    for (device, free) in free.iter().enumerate().rev() {
        let left = wanted - (layers - end);
        let share = if whole.is_some() { left } else { left.div_ceil(device + 1) };
        let mut room = free.saturating_sub(fixed).saturating_sub(if end == layers { head } else { 0 });
        let mut start = end;
        while end - start < share && start > 0 && cost(start - 1) <= room {
            room -= cost(start - 1);
            start -= 1;
        }
        ranges[device] = start..end;
        end = start;
    }
    let placed = layers - end;
    let is_placed = |range: &Range<usize>| range.len() == layers;
    let fits = if whole.is_some() { ranges.iter().any(is_placed) } else { placed > 0 };
    if fits && (placed == wanted || asked.is_none()) {
        return Ok(ranges);
    }
    let needed = (layers - wanted..layers).map(cost).sum::<u64>() + head + fixed * free.len() as u64;
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let found = format!(
        "{wanted} layers need {:.1} GB of device memory ({:.1} GB of it for keys and values of {} tokens), {:.1} GB are free",
        gb(needed),
        gb(kv(layers - wanted..layers)),
        source.positions,
        gb(free.iter().sum())
    );
    let help = match whole {
        Some(_) => "use a shorter context (--ctx), a smaller --kv-memory, or --device cpu",
        None => "leave more layers to the CPU with --gpu-layers N, or lower --ctx or --kv-memory",
    };
    Err(Error::new(crate::error::Cause::OutOfMemory(found)).help(help))
}

/// Returns the field of a property because of which one device has to compute all layers, if there is one.
fn indivisible(config: &ModelConfig) -> Option<&'static str> {
    let fields = [
        ("per_layer_input", config.per_layer_input.is_some()),
        ("recurrent", config.recurrent.is_some()),
        ("mlp_layers", config.mlp_layers.is_some()),
        ("exceptions.kv_from", config.layers().any(|layer| layer.kv_from().is_some())),
    ];
    fields.into_iter().find(|(_, found)| *found).map(|(field, _)| field)
}

/// Estimates the bytes of working memory of a part.
fn scratch_bytes(source: &UploadSource<'_>) -> u64 {
    let c = source.config;
    let largest = |size: fn(Heads) -> usize| c.heads().map(size).max().unwrap_or(0);
    let q = largest(|heads| heads.n_heads * heads.head_dim.max(heads.value_dim));
    let kv = largest(|heads| heads.n_kv_heads * (heads.head_dim + heads.value_dim));
    let mlp = |mlp| match mlp {
        Mlp::Dense { intermediate, .. } => 4 * intermediate,
        Mlp::Moe { top_k, intermediate, shared, .. } => {
            top_k * (4 * intermediate + c.hidden) + shared.map_or(0, |shared| 4 * shared.intermediate + c.hidden)
        }
    };
    let mlp: usize = c.mlps().map(mlp).sum();
    let inputs = c.per_layer_input.map_or(0, |input| 3 * input.width * c.n_layers);
    let latent = c.attention.latent.map_or(0, |latent| {
        let rank = latent.kv_rank + latent.rope + latent.q_rank.unwrap_or(0);
        3 * rank + c.n_heads * (latent.nope + latent.value)
    });
    let recurrent = c.recurrent.as_ref().map_or(0, |recurrent| match recurrent.mixer {
        Recurrent::ShortConv(_) => 3 * c.hidden,
        Recurrent::GatedDeltaNet(net) => net.channels() + 3 * net.values() + 2 * net.value_heads,
        Recurrent::Mamba2(mamba) => mamba.channels() + 3 * mamba.values() + mamba.heads,
    });
    let per_row = 4 * (5 * c.hidden + 4 * q + kv + mlp + inputs + latent + recurrent);
    (per_row * source.rows + 8 * 64 * c.vocab) as u64
}
