//! Opens a model: chooses the number types, the device of each layer, and the time at which weights are loaded.

use super::attention::AttentionKernel;
use super::cpu::Cpu;
use super::cpu::place::{Affinity, Numa, Placement, allowed_processors};
use super::cpu::topology::{SYSTEM_ROOT, Topology};
use super::cuda::gpus::{self, Search, search};
pub use super::cuda::gpus::{GpuList, list_gpus};
use super::cuda::weights::UploadSource;
use super::device::{DevicePart, Devices, Offload, Parts};
use super::forward::states::{CpuPool, StateLayout};
use super::forward::{CpuPart, Model};
use super::kv::{KvLayout, KvType, MAX_HEAD, PAGE, PagePool, pages_within};
use super::layer::{LatentAttention, Operation};
use super::per_head::PerHead;
use super::precision::Precision;
use super::residency::{Residency, read_whole};
use super::weights::{BindForm, Host, Weights};
use crate::dtype::DType;
use crate::error::{Cause, Context, Error, Result};
use crate::iebin::{IebinReader, JSON_NAME};
use crate::interrupt;
use crate::mapped;
use crate::model_config::ModelConfig;
use crate::resources::memory_left;
use crate::units::human_bytes;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Default number of tokens computed at once during prefill.
pub const PREFILL_CHUNK: usize = 512;

/// Number of positions for which room is left in GPU memory for the KV cache when layers are assigned to GPUs and the
/// caller sets no context length; the model's maximum would often leave no room for layers.
const USUAL_CONTEXT: usize = 4096;

/// Options for opening an engine.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Precision of the run; `None` = the fastest that the pack supports.
    pub precision: Option<Precision>,
    /// Number of threads, including the caller's.
    pub threads: usize,
    /// Longest sequence in tokens; `None` = the model's maximum.
    pub context: Option<usize>,
    /// Element type of the KV cache; `None` = that of [`Precision::kv_type`].
    pub kv: Option<KvType>,
    /// Largest number of bytes of the KV pages of all sequences on all devices; `None` = what the devices have left.
    pub kv_memory: Option<u64>,
    /// The same for the KV pages on the CPU, if `kv_memory` is `None`.
    pub host_kv_memory: Option<u64>,
    /// Implementation of attention. Only for the CPU.
    pub attention: AttentionKernel,
    /// Largest number of tokens computed at once. It bounds the memory of a prefill and does not change the results.
    pub prefill_chunk: usize,
    /// When weights are loaded into memory.
    pub residency: Residency,
    /// Binding of threads to processors.
    pub affinity: Affinity,
    /// NUMA nodes on which threads run and weights are placed.
    pub numa: Numa,
    /// Devices, and the number of layers that run on GPUs.
    pub offload: Offload,
    /// True if [`Engine::exchange`](super::Engine::exchange) is to replace matrices. Only for the CPU.
    pub exchanged: bool,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            precision: None,
            threads: 1,
            context: None,
            kv: None,
            kv_memory: None,
            host_kv_memory: None,
            attention: AttentionKernel::default(),
            prefill_chunk: PREFILL_CHUNK,
            residency: Residency::default(),
            affinity: Affinity::default(),
            numa: Numa::default(),
            offload: Offload::default(),
            exchanged: false,
        }
    }
}

/// Number types and context that follow from the options and the description of a pack, before weights are bound.
pub(super) struct NumberTypes {
    pub config: ModelConfig,
    pub precision: Precision,
    /// Length in tokens of the longest sequence.
    pub context: usize,
    pub kv_layout: KvLayout,
    /// Largest number of KV pages, if their memory has a budget.
    pub kv_pages: Option<usize>,
    /// Float type that float matrices are converted to, if they are.
    pub convert: Option<DType>,
}

impl NumberTypes {
    /// Chooses the number types and the context. `on_gpu` is true if a GPU computes some layers.
    ///
    /// # Errors
    /// The pack does not describe a model or does not support the precision, or the context is longer than the model's
    /// maximum.
    pub(super) fn new(reader: &IebinReader, options: &EngineOptions, on_gpu: bool) -> Result<NumberTypes> {
        let json = reader.dir.join(JSON_NAME);
        if reader.description.adapter.is_some() {
            return Err(Error::usage("found the pack of an adapter, expected that of a model")
                .at(&json)
                .help("name the pack of the model, and the adapter with --lora"));
        }
        let config = (reader.description.model.clone()).ok_or_else(|| {
            Error::corrupt("found no description of the model to run")
                .tensor("model")
                .at(&json)
                .help("make the pack again with `iec pack`")
        })?;
        let precision = Precision::resolve(options.precision, reader)?;
        let kv_layout = KvLayout::of(&config, options.kv.unwrap_or(precision.kv_type()));
        // A GPU keeps the keys and values of all heads, without the padding that the CPU gives them.
        let page = match on_gpu {
            true => KvLayout::expanded(&config, kv_layout.kind).bytes(PAGE).max(kv_layout.bytes(PAGE)),
            false => kv_layout.bytes(PAGE),
        };
        let budget = options.kv_memory.or(options.host_kv_memory.filter(|_| !on_gpu));
        let kv_pages = budget.map(|budget| pages_within(page, budget)).transpose()?;
        let context = context(options, &config, kv_pages, page)?;
        let sizes = kv_layout.layers().iter().flat_map(|layer| [layer.heads.key, layer.heads.value]);
        if let Some(size) = sizes.max().filter(|size| *size > MAX_HEAD) {
            let found = format!("found heads of {size} values, expected at most {MAX_HEAD}");
            return Err(Error::engine(found).tensor("head_dim").at(&json));
        }
        kv_layout.check().map_err(|e| e.at(&json))?;
        // Without a requested precision, float weights keep the types that the pack holds, even if they are mixed.
        let convert = options.precision.and_then(Precision::float_dtype);
        Ok(NumberTypes { config, precision, context, kv_layout, kv_pages, convert })
    }
}

/// An opened model, from which an engine is created: bound tensors and layers placed on devices.
#[derive(Debug)]
pub struct OpenedModel {
    pub(super) config: ModelConfig,
    pub(super) weights: Arc<Weights>,
    /// The device parts, which together compute all layers.
    pub parts: Parts,
    pub(super) cpu: Arc<Cpu>,
    pub(super) placement: Placement,
    pub(super) precision: Precision,
    /// Float type that float matrices are converted to, if they are.
    convert: Option<DType>,
    pub(super) kv_layout: KvLayout,
    pub(super) context: usize,
    pub(super) prefill_chunk: usize,
    kv_pages: Option<usize>,
    host_kv_memory: Option<u64>,
    pub(super) attention: AttentionKernel,
    /// Whether KV pages are locked in memory, like the weights.
    kv_locked: bool,
    /// Reason why no GPU is in use although [`Devices::Auto`] was requested.
    pub(super) without_gpu: Option<String>,
}

impl OpenedModel {
    /// Binds the tensors of a pack, starts the threads and initializes the devices.
    ///
    /// # Errors
    /// The pack lacks a description or tensors or does not support the precision, or the context is longer than the
    /// model's maximum.
    pub fn open(reader: &IebinReader, options: &EngineOptions) -> Result<OpenedModel> {
        let gpus = search(options.offload.devices)?;
        let on_gpu = matches!(gpus, Search::Found(_));
        let NumberTypes { config, precision, context, kv_layout, kv_pages, convert } =
            NumberTypes::new(reader, options, on_gpu)?;
        let (cpu, placement) = start_threads(options)?;
        check_kv_memory(options.kv_memory.or(options.host_kv_memory).filter(|_| !on_gpu))?;
        if options.attention == AttentionKernel::Reference && on_gpu {
            return Err(
                Error::usage("--attention reference computes on the CPU, not on a GPU").help("use --device cpu")
            );
        }
        // Matrices that the CPU reads in the compressed form of a deduplicated pack have no plain bytes in memory that
        // could be copied to a GPU.
        let form = BindForm { in_place: cpu.unpacks() && !on_gpu, exchanged: options.exchanged };
        let weights = Arc::new(Weights::bind(reader, &config, convert, form)?);
        let positions = options.context.unwrap_or(context.min(USUAL_CONTEXT));
        let source = UploadSource {
            config: &config,
            weights: &weights,
            kv: KvLayout::expanded(&config, kv_layout.kind),
            arithmetic: precision.arithmetic(),
            positions: kv_pages.map_or(positions, |pages| pages.saturating_mul(PAGE)),
            kv_pages,
            rows: options.prefill_chunk.clamp(1, PREFILL_CHUNK),
        };
        let (gpu_parts, without_gpu) = offload(gpus, options.offload, &source)?;
        bring_into_memory(reader, &weights, options.residency)?;
        let most_rows = if gpu_parts.is_empty() { usize::MAX } else { PREFILL_CHUNK };
        let cpu_layers = gpu_parts.first().map_or(config.n_layers, |part| part.info().layers.start);
        let mut model = OpenedModel {
            config,
            weights,
            parts: Vec::new(),
            cpu: Arc::new(cpu),
            placement,
            precision,
            convert,
            kv_layout,
            context,
            prefill_chunk: options.prefill_chunk.clamp(1, most_rows),
            kv_pages,
            host_kv_memory: options.host_kv_memory,
            attention: options.attention,
            kv_locked: options.residency == Residency::Locked,
            without_gpu,
        };
        if cpu_layers > 0 || gpu_parts.is_empty() {
            model.parts.push(model.cpu_part(0..cpu_layers)?);
        }
        model.parts.extend(gpu_parts);
        if options.context.is_none() {
            let pages = model.parts.iter().filter_map(|part| part.pool().most()).min();
            model.context = pages.map_or(context, |pages| context.min(pages.saturating_mul(PAGE)));
        }
        Ok(model)
    }

    /// Opens layer `number` of multi-token prediction as a model of one layer on the CPU, which shares the threads, the
    /// embedding and the output matrix of this model, and has as many KV pages at most.
    ///
    /// # Errors
    /// Tensors are missing or have the wrong shape, or a page does not fit the address space or the budget.
    pub(super) fn open_prediction(&self, reader: &IebinReader, number: usize) -> Result<OpenedModel> {
        let config = self.config.of_prediction();
        let weights = Weights::bind_prediction(reader, &config, self.convert, &self.weights, number)?;
        let kv_layout = KvLayout::of(&config, self.kv_layout.kind);
        let mut model = OpenedModel {
            config,
            weights: Arc::new(weights),
            parts: Vec::new(),
            cpu: self.cpu.clone(),
            placement: self.placement.clone(),
            kv_layout,
            without_gpu: None,
            ..*self
        };
        model.parts.push(model.cpu_part(0..1)?);
        Ok(model)
    }

    /// Creates a part that computes the given layers on the CPU, with a pool of KV pages of its own.
    ///
    /// # Errors
    /// A page does not fit the address space or the budget.
    pub fn cpu_part(&self, layers: Range<usize>) -> Result<Box<dyn DevicePart>> {
        let arithmetic = self.precision.arithmetic();
        let kv_layout = self.kv_layout.part(layers.clone());
        let on_host = || self.host_kv_memory.map(|budget| pages_within(kv_layout.bytes(PAGE), budget)).transpose();
        let kv_pages = self.kv_pages.map_or_else(on_host, |pages| Ok(Some(pages)))?;
        let per_head = self.per_head(layers.clone())?;
        let mut forms = self.weights.forms(arithmetic);
        forms.extend(per_head.iter().flat_map(|layer| layer.forms(arithmetic)));
        forms.sort_unstable();
        forms.dedup();
        Ok(Box::new(CpuPart::new(Model {
            config: self.config.clone(),
            weights: self.weights.clone(),
            pool: CpuPool {
                pages: PagePool::placed(kv_layout.clone(), kv_pages, self.kv_locked)?,
                states: StateLayout::of(&self.config, layers.clone()),
            },
            kv_layout,
            cpu: self.cpu.clone(),
            attention: self.attention,
            arithmetic,
            forms,
            per_head,
            layers,
        })))
    }

    /// Divides the matrices of layers with latent attention into those of heads; returns none for other models.
    fn per_head(&self, layers: Range<usize>) -> Result<Vec<PerHead>> {
        let blocks = self.weights.layers[layers].iter().flat_map(|layer| &layer.blocks);
        let latent = blocks.filter_map(|block| match &block.operation {
            Operation::Latent(op) => Some(op),
            _ => None,
        });
        let per_head = |op: &LatentAttention<Host>| {
            interrupt::check()?;
            PerHead::new(&op.kv_b.matrix, &op.latent, self.precision.arithmetic())
        };
        latent.map(per_head).collect()
    }
}

/// Checks that a budget for KV pages on the CPU can be kept.
fn check_kv_memory(budget: Option<u64>) -> Result<()> {
    let Some(budget) = budget else { return Ok(()) };
    if let Some(left) = memory_left().filter(|left| *left < budget) {
        let found = format!("--kv-memory: found {}, but {} of memory are left", human_bytes(budget), human_bytes(left));
        return Err(Error::new(Cause::OutOfMemory(found)).help("choose a smaller --kv-memory"));
    }
    Ok(())
}

/// Returns the length in tokens of the longest sequence that an engine accepts: that of the options, or that of the
/// model, or as much of it as the budget for KV pages holds. A page has `page` bytes.
fn context(options: &EngineOptions, config: &ModelConfig, kv_pages: Option<usize>, page: u64) -> Result<usize> {
    let room = kv_pages.map_or(usize::MAX, |pages| pages.saturating_mul(PAGE));
    if let Some(context) = options.context.filter(|context| *context > room && *context <= config.max_context) {
        let needed = human_bytes(page.saturating_mul(context.div_ceil(PAGE) as u64));
        let budget = human_bytes(options.kv_memory.or(options.host_kv_memory).unwrap_or(0));
        let found = format!("--ctx: {context} tokens need {needed} of KV cache, but --kv-memory is {budget}");
        return Err(
            Error::new(Cause::OutOfMemory(found)).help(format!("raise --kv-memory, or use --ctx {room} or less"))
        );
    }
    let context = options.context.unwrap_or(config.max_context.min(room));
    if context == 0 || context > config.max_context {
        let found = format!("--ctx: found {context} tokens, expected 1 to {}", config.max_context);
        let error = if context == 0 { Error::usage(found) } else { Error::engine(found) };
        let most = config.max_context;
        return Err(error.help(format!("leave --ctx out for the {most} tokens of the model, or give a smaller number")));
    }
    Ok(context)
}

fn start_threads(options: &EngineOptions) -> Result<(Cpu, Placement)> {
    let (allowed, threads) = (allowed_processors(), options.threads.max(1));
    let topology = Topology::probe(Path::new(SYSTEM_ROOT));
    let placement = Placement::plan(&topology, &allowed, options.affinity, options.numa, threads)?;
    placement.take_memory()?;
    Ok((Cpu::placed(threads, &placement)?, placement))
}

/// Copies layers to the GPUs that were found, if any. The second value is the reason why the CPU computes all layers
/// although [`Devices::Auto`] was requested.
fn offload(gpus: Search, offload: Offload, source: &UploadSource<'_>) -> Result<(Parts, Option<String>)> {
    let devices = match gpus {
        Search::Found(devices) => devices,
        Search::None { why } => return Ok((Vec::new(), why)),
    };
    match gpus::parts(devices, offload.layers, source) {
        Ok(parts) => Ok((parts, None)),
        Err(e) if offload.devices == Devices::Auto && !e.is_interrupt() => Ok((Vec::new(), Some(e.to_string()))),
        Err(e) => Err(e),
    }
}

/// Reads, rebuilds and locks weights before the first token, as the options require.
fn bring_into_memory(reader: &IebinReader, weights: &Weights, residency: Residency) -> Result<()> {
    match residency {
        Residency::OnDemand => {}
        Residency::NoReadAhead => reader.files().iter().for_each(|file| file.stop_read_ahead()),
        Residency::Whole | Residency::Locked => reader.files().iter().try_for_each(read_whole)?,
    }
    if let Some((_, keep)) = reader.rebuilt() {
        weights.rebuild(keep, residency)?;
    }
    if residency == Residency::Locked {
        let locked = reader.files().iter().try_for_each(|file| file.lock()).and_then(|()| weights.lock());
        locked.help("raise the limit of locked memory (`ulimit -l`), or leave out --pin")?;
    }
    if matches!(residency, Residency::OnDemand | Residency::Whole) {
        mapped::into_huge_pages(reader.files());
    }
    Ok(())
}
