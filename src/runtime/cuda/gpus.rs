//! Which layers run on which GPU, and the way of the residual stream through them: the CPU has the first layers (none, if all fit),
//! the devices the others in order, the last of them the output matrix.

use super::context::Context;
use super::driver::{DeviceInfo, Driver};
use super::kv::{self, Page, Pool};
use super::ops;
use super::part::{Answer, Part, Step};
use super::weights::layer_bytes;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model_config::{Mlp, ModelConfig};
use crate::progress;
use crate::runtime::cpu::Arithmetic;
use crate::runtime::kv::{KvLayout, PAGE};
use crate::runtime::weights::Weights;
use std::ops::Range;
use std::time::Duration;

/// Where layers are to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Devices {
    /// On the CPU.
    #[default]
    Cpu,
    /// On the first GPU if there is one that can be used, otherwise on the CPU.
    Auto,
    /// On these GPUs: bit `n` stands for device `n`.
    Cuda(u64),
}

/// How much of a model goes to GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offload {
    /// Where to.
    pub devices: Devices,
    /// How many layers, the last ones; `None` = as many as fit.
    pub layers: Option<usize>,
}

/// What is to be brought to GPUs.
pub struct Source<'a> {
    /// Dimensions and flags.
    pub config: &'a ModelConfig,
    /// Bound tensors.
    pub weights: &'a Weights,
    /// Type and sizes of the cache.
    pub kv: KvLayout,
    /// What products are computed in.
    pub arithmetic: Arithmetic,
    /// Positions that caches must have room for.
    pub positions: usize,
    /// Most rows of a step.
    pub rows: usize,
}

/// Layers on GPUs.
#[derive(Debug)]
pub struct Gpus {
    parts: Vec<Part>,
    hidden: Vec<f32>,
    cuda: String,
}

/// A device in use, for reports.
#[derive(Debug, Clone)]
pub struct Used {
    /// What it is.
    pub info: DeviceInfo,
    /// Which layers it computes.
    pub layers: Range<usize>,
    /// Bytes of its memory that are taken, by this program and others.
    pub taken: u64,
}

/// Device memory that is left alone: the driver's own needs, and what other programs start to use.
const MARGIN: u64 = 512 << 20;

/// GPUs that were found.
#[derive(Debug)]
pub struct Found {
    driver: Driver,
    infos: Vec<DeviceInfo>,
}

impl Offload {
    /// Looks for the devices. `Err` within: everything runs on the CPU, and why, if that is not what was asked for.
    ///
    /// # Errors
    /// A device was asked for by its number and cannot be used.
    pub fn find(&self) -> Result<std::result::Result<Found, Option<String>>> {
        let find = |mask: u64| {
            let driver = Driver::open()?;
            let numbers = (0..64).filter(|n| mask >> n & 1 == 1);
            let infos = numbers.map(|n| driver.device(n)).collect::<Result<Vec<_>>>()?;
            Ok(Found { driver, infos })
        };
        match self.devices {
            Devices::Cpu => Ok(Err(None)),
            Devices::Cuda(mask) => find(mask).map(Ok),
            Devices::Auto => Ok(find(1).map_err(|e: Error| Some(e.to_string()))),
        }
    }
}

impl Gpus {
    /// Brings layers to devices. `Err` within: `offload` leaves the choice open, and why the CPU has to compute.
    ///
    /// # Errors
    /// A device was asked for by its number and cannot be used, or there is no room.
    pub fn open(
        found: Found,
        offload: &Offload,
        source: &Source<'_>,
    ) -> Result<std::result::Result<Gpus, Option<String>>> {
        match Gpus::with(&found.driver, found.infos, offload.layers, source) {
            Ok(gpus) => Ok(Ok(gpus)),
            Err(e) if offload.devices == Devices::Auto && !e.is_interrupt() => Ok(Err(Some(e.to_string()))),
            Err(e) => Err(e),
        }
    }

    fn with(driver: &Driver, infos: Vec<DeviceInfo>, layers: Option<usize>, source: &Source<'_>) -> Result<Gpus> {
        kv::kind(source.kv.kind)?;
        ops::check(source.config, source.rows)?;
        let contexts = infos.into_iter().map(Context::open).collect::<Result<Vec<_>>>()?;
        let free = contexts.iter().map(|context| Ok(context.memory()?.0)).collect::<Result<Vec<_>>>()?;
        let plan = plan(source, &free, layers)?;
        let layers_of =
            |range: &Range<usize>| source.weights.layers[range.clone()].iter().map(layer_bytes).sum::<u64>();
        let bytes = plan.iter().map(layers_of).sum::<u64>() + source.weights.lm_head.nbytes() as u64;
        let bar = progress::bytes("to the GPU", bytes);
        let mut parts = Vec::new();
        for (context, layers) in contexts.iter().zip(plan).filter(|(_, layers)| !layers.is_empty()) {
            progress::detail(1, || {
                let (info, count) = (&context.info, source.config.n_layers);
                format!("cuda:{} {}: layers {} to {} of {count}", info.ordinal, info.name, layers.start, layers.end)
            });
            parts.push(Part::new(context, source, layers, &bar)?);
        }
        bar.finish_and_clear();
        Ok(Gpus { parts, hidden: Vec::new(), cuda: driver.cuda_version() })
    }

    /// The first layer that a device computes; the ones before it are the CPU's.
    pub fn first_layer(&self) -> usize {
        self.parts[0].layers().start
    }

    /// An empty cache.
    pub fn new_pages(&self) -> Vec<Vec<Page>> {
        vec![Vec::new(); self.parts.len()]
    }

    /// True for caches that were made for these devices and hold no page of others.
    pub fn own(&self, pages: &[Vec<Page>]) -> bool {
        let fits = |(part, pages): (&Part, &Vec<Page>)| pages.iter().all(|page| page.is_of(part.pool()));
        pages.len() == self.parts.len() && self.parts.iter().zip(pages).all(fits)
    }

    /// Makes room for `len` positions, of which those from `written` on will be written.
    ///
    /// # Errors
    /// There is none.
    pub fn grow(&self, pages: &mut [Vec<Page>], written: usize, len: usize) -> Result<()> {
        for (part, pages) in self.parts.iter().zip(pages) {
            part.context().enter()?;
            part.pool().grow(pages, written, len)?;
        }
        Ok(())
    }

    /// Takes the residual stream of `step` (whose pages are ignored) through all devices; what is wanted comes out.
    /// `pages` are those of each sequence, by part.
    ///
    /// # Errors
    /// The user interrupted, or a driver refuses.
    pub fn run(&mut self, step: &Step<'_>, pages: &[&[Vec<Page>]], answer: &mut Answer<'_>) -> Result<()> {
        for i in 0..self.parts.len() {
            interrupt::check()?;
            let pages: Vec<&[Page]> = pages.iter().map(|parts| parts[i].as_slice()).collect();
            let mut hidden = std::mem::take(&mut self.hidden);
            let done = match i {
                0 => self.parts[i].run(&Step { pages: &pages, ..*step }, &mut hidden, answer),
                _ => {
                    let x = std::mem::take(&mut hidden);
                    let done = self.parts[i].run(&Step { x: &x, pages: &pages, ..*step }, &mut hidden, answer);
                    if hidden.is_empty() {
                        hidden = x;
                    }
                    done
                }
            };
            self.hidden = hidden;
            done?;
        }
        Ok(())
    }

    /// How long devices computed since the last call.
    pub fn take_busy(&mut self) -> Duration {
        self.parts.iter_mut().map(Part::take_busy).sum()
    }

    /// The version of CUDA that the driver is of.
    pub fn cuda_version(&self) -> &str {
        &self.cuda
    }

    /// The devices in use.
    pub fn used(&self) -> Vec<Used> {
        let used = |part: &Part| {
            let taken = part.context().memory().map_or(0, |(free, total)| total - free);
            Used { info: part.context().info.clone(), layers: part.layers(), taken }
        };
        self.parts.iter().map(used).collect()
    }
}

/// Which layers each device gets: `asked` in all, or as many as fit, the last ones, about as many for each device.
///
/// # Errors
/// They do not fit, or none does.
fn plan(source: &Source<'_>, free: &[u64], asked: Option<usize>) -> Result<Vec<Range<usize>>> {
    let layers = source.config.n_layers;
    let wanted = asked.unwrap_or(layers).min(layers);
    if wanted == 0 {
        return Err(Error::usage("--gpu-layers 0 leaves nothing to the GPU").help("use --device cpu"));
    }
    let kv = Pool::page_bytes(&KvLayout { layers: 1, ..source.kv }) as u64 * source.positions.div_ceil(PAGE) as u64;
    let cost = |layer: usize| layer_bytes(&source.weights.layers[layer]) + kv;
    let head = source.weights.lm_head.nbytes() as u64;
    let fixed = scratch_bytes(source) + MARGIN;
    let mut ranges = vec![layers..layers; free.len()];
    let mut end = layers;
    for (device, free) in free.iter().enumerate().rev() {
        let share = (wanted - (layers - end)).div_ceil(device + 1);
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
    if placed == wanted || placed > 0 && asked.is_none() {
        return Ok(ranges);
    }
    let needed = (layers - wanted..layers).map(cost).sum::<u64>() + head + fixed * free.len() as u64;
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let found = format!(
        "{wanted} layers need {:.1} GB of device memory ({:.1} GB of it for keys and values of {} tokens), {:.1} GB are free",
        gb(needed),
        gb(kv * wanted as u64),
        source.positions,
        gb(free.iter().sum())
    );
    Err(Error::new(crate::error::Cause::OutOfMemory(found))
        .help("leave more layers to the CPU with --gpu-layers N, or use a shorter context (--ctx)"))
}

/// Bytes of working memory of a part, about.
fn scratch_bytes(source: &Source<'_>) -> u64 {
    let c = source.config;
    let (q, kv) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
    let mlp = match c.mlp {
        Mlp::Dense { intermediate, .. } => 4 * intermediate,
        Mlp::Moe { top_k, intermediate, .. } => top_k * (4 * intermediate + c.hidden),
    };
    let per_row = 4 * (4 * c.hidden + 3 * q + 2 * kv + mlp);
    (per_row * source.rows + 8 * 64 * c.vocab) as u64
}
