//! Options that select the model, its precision and its KV cache, shared by the commands that generate.

use crate::device_args::DeviceArgs;
use crate::global::{Global, non_empty_variable};
use crate::names::offering;
use crate::pack_arg::first_named;
use crate::tuning::TuningArgs;
use clap::ValueEnum;
use clap::builder::FalseyValueParser;
use iec::error::{Cause, Error, Result};
use iec::files;
use iec::generate::text::Tokenizer;
use iec::iebin::{self, IebinReader, JSON_NAME};
use iec::models::embedded;
use iec::models::{FoundModel, Places, Resolved, resolve};
use iec::output::Inputs;
use iec::runtime::device::{Devices, Offload};
use iec::runtime::{AttentionKernel, EngineOptions, KvType, Precision};
use iec::session::adapters::AdapterPrecision;
use iec::session::dedup::{DedupOptions, StoreUse};
use iec::session::plan::MemoryPlan;
use iec::session::template::RenderProcess;
use iec::session::{Session, SessionOptions, Speculation};
use iec::units::{human_bytes, parse_count};
use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Options that name the model, its precision and its device.
#[derive(Debug, clap::Args)]
pub struct ModelArgs {
    /// Pack, checkpoint directory, GGUF file, or ORG/NAME of a downloaded model. A model that is not a pack is packed
    /// into the cache (IEC_CACHE) at its first use [default: the pack in the current directory; without one, run, chat,
    /// bench and serve use the embedded model]
    #[arg(id = "pack", value_name = "MODEL", index = 1)]
    word: Option<PathBuf>,
    /// The model, as an option instead of the first argument
    #[arg(long, value_name = "MODEL", env = "MODEL_DIR")]
    model_dir: Option<PathBuf>,
    /// Description of the pack to use instead of model.ie.json in --model-dir
    #[arg(long, value_name = "FILE")]
    pub model_json: Option<PathBuf>,
    /// Weights to use instead of the file that the description names
    #[arg(long, value_name = "FILE")]
    model_bin: Option<PathBuf>,
    /// Tokenizer to use instead of the pack's tokenizer.json
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Compare every tensor of the pack with its recorded hash before the model is used (exit code 4 if one differs).
    /// Without it, the weights are not compared; see `iec verify --hashes`
    #[arg(long, env = "IE_CHECK", value_parser = FalseyValueParser::new())]
    check: bool,
    /// fp32, bf16, fp16, int8w, int8, int4w, int4, or auto (the fastest one for the weights of the pack)
    /// [default: auto]
    #[arg(long, value_name = "P", env = "IE_PRECISION", hide_possible_values = true)]
    #[arg(value_parser = offering(PRECISIONS, parse_precision))]
    precision: Option<PrecisionOrAuto>,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Speculative decoding: draft several tokens and verify them in one step. The text stays the same; drafting stops
    /// while it is not faster [default: auto for run, chat and serve and with --draft-model-dir, off for other
    /// commands]
    #[arg(long, value_enum, value_name = "HOW")]
    speculate: Option<Speculate>,
    /// Small model with the same vocabulary that drafts tokens
    #[arg(long, value_name = "MODEL")]
    draft_model_dir: Option<PathBuf>,
    /// Longest context in tokens, at most that of the model [default: that of the model]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub ctx: Option<usize>,
    /// Type of the KV cache: f32, f16, bf16, int8 (with a scale per 32 values; half the memory of
    /// bf16), fp8 (e4m3 with a scale per head) or int4 (rotated by a Hadamard matrix, with a scale
    /// per 64 values; a quarter) [default: f32 for fp32, bf16 for int4 and int8, f16 otherwise]
    #[arg(long, value_name = "TYPE", hide_possible_values = true)]
    #[arg(value_parser = offering(&["f32", "f16", "bf16", "int8", "fp8", "int4"], str::parse::<KvType>))]
    kv: Option<KvType>,
    /// Memory for the KV cache of all texts on all devices. Without --ctx, the context is lowered to what it holds of
    /// one text; texts that need more end the command with exit code 6 [default: what the devices have left]
    #[arg(long, value_name = "SIZE", value_parser = iec::units::parse_size)]
    kv_memory: Option<u64>,
    /// Implementation of attention on the CPU: fast, or reference (its definition in f64, slow), to find out whether a
    /// difference comes from attention; reference implies --device cpu
    #[arg(long, value_name = "KERNEL", default_value = "fast", hide_possible_values = true)]
    #[arg(value_parser = offering(&["fast", "reference"], str::parse::<AttentionKernel>))]
    attention: AttentionKernel,
    /// Adapter (LoRA, DoRA) in a directory of PEFT, by the name that prompts files use, with a scale; repeatable, all
    /// are added for prompts that choose none
    #[arg(long, value_name = "NAME=DIR[:SCALE]")]
    pub lora: Vec<iec::session::adapters::AdapterSource>,
    /// Number type of adapters: auto, or int8 with a scale per row (half the memory; refused for an adapter whose rows
    /// have a cosine below 0.9995 to the original) [default: auto, the type of the file or that of --precision]
    #[arg(long, value_name = "TYPE", hide_possible_values = true)]
    #[arg(value_parser = offering(&["auto", "int8"], str::parse::<AdapterPrecision>))]
    adapter_precision: Option<AdapterPrecision>,
    /// Memory for adapters. If it does not hold all of --lora, each is loaded when a prompt needs it, and the least
    /// recently used ones leave [default: all are in memory]
    #[arg(long, value_name = "SIZE", value_parser = iec::units::parse_size)]
    lora_memory: Option<u64>,
    #[command(flatten)]
    dedup: DedupArgs,
    #[command(flatten)]
    tuning: TuningArgs,
    /// Pack of the model, once it is found or made.
    #[arg(skip)]
    pack: OnceCell<Resolved>,
    /// Pack of the draft model.
    #[arg(skip)]
    draft_pack: OnceCell<Resolved>,
}

/// Words of `--precision`.
const PRECISIONS: &[&str] = &["auto", "fp32", "bf16", "fp16", "int8w", "int8", "int4w", "int4"];

/// Value of `--precision`; `None` for `auto`.
#[derive(Debug, Clone, Copy)]
struct PrecisionOrAuto(Option<Precision>);

/// Source of draft tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Speculate {
    /// For each text what saves the most time: ngram, and draft if a small model is named or else mtp if the pack has
    /// such layers; nothing where none of them saves time
    Auto,
    /// No speculative decoding
    Off,
    /// Prompt lookup: draft tokens from earlier occurrences of the same n-gram, in the text and in earlier texts
    Ngram,
    /// Small model of --draft-model-dir
    Draft,
    /// Layer of multi-token prediction in the pack (`iec pack --with-mtp`)
    Mtp,
}

fn parse_precision(text: &str) -> std::result::Result<PrecisionOrAuto, String> {
    match text.to_ascii_lowercase().as_str() {
        "auto" => Ok(PrecisionOrAuto(None)),
        name => name.parse().map(|p| PrecisionOrAuto(Some(p))).map_err(|e: Error| format!("{e} or auto")),
    }
}

/// A model that is to be opened, on any thread.
#[derive(Debug)]
pub struct Opener {
    pack: PathBuf,
    options: SessionOptions,
    notes: Notes,
    /// Directory of the embedded model, whose files must live until its template and sampling were read.
    _home: Option<TempDir>,
}

impl Opener {
    /// Opens the model.
    ///
    /// # Errors
    /// The same as for [`ModelArgs::open`].
    pub fn open(&self) -> Result<Session> {
        Session::open(&self.pack, &self.options).map(|session| self.notes.print(session))
    }
}

/// Options that notes about an opened model depend on.
#[derive(Debug)]
struct Notes {
    /// Whether an option bounds the context.
    is_bounded: bool,
    kv_memory: Option<u64>,
    check: bool,
    device: DeviceArgs,
    global: Global,
}

impl Notes {
    /// Prints notes about the device of the model and its adapters, and whether the gate refused its quantization.
    fn print(&self, session: Session) -> Session {
        let global = &self.global;
        if session.reader.description.quality.as_ref().is_some_and(|quality| quality.refused) {
            global.note(format!(
                "note: {}: the gate refused the quantization of this pack; `iec inspect` shows why",
                session.name
            ));
        }
        let (context, longest) = (session.engine.context(), session.engine.config().max_context);
        if context < longest && !self.is_bounded {
            let memory = match self.kv_memory {
                Some(budget) => format!("--kv-memory {}", human_bytes(budget)),
                None => "the memory of the GPU".to_string(),
            };
            global.note(format!("note: {memory} holds a context of {context} tokens, not {longest}"));
        }
        if self.check
            && let Some(name) = session.reader.added_template()
        {
            global.note(format_args!("note: {name} was added to the pack, which does not record it"));
        }
        session.adapters.notes().iter().for_each(|note| global.note(format_args!("note: {note}")));
        self.device.note(&session.engine, global);
        session
    }
}

impl ModelArgs {
    /// Returns true if an option or a variable names the model, or the current directory holds one.
    pub fn is_named(&self) -> Result<bool> {
        Ok(self.model_json.is_some()
            || self.model_bin.is_some()
            || first_named([&self.word, &self.model_dir]).is_some()
            || files::exists(Path::new(JSON_NAME))?)
    }

    /// Returns the files and packs that the command reads, which outputs must not replace.
    pub fn inputs(&self) -> Inputs {
        self.inputs_of(self.named().ok())
    }

    /// Returns the files of [`ModelArgs::inputs`] and those of another model.
    pub fn inputs_with(&self, other: &Path) -> Inputs {
        self.inputs_of(self.named().ok().into_iter().chain([other.to_path_buf()]))
    }

    fn inputs_of(&self, models: impl IntoIterator<Item = PathBuf>) -> Inputs {
        let named = [&self.model_json, &self.model_bin, &self.tokenizer].into_iter().flatten();
        let models = models.into_iter().chain(self.draft_model_dir.clone());
        let places = Places::of(&non_empty_variable);
        // A model that cannot be found is reported when it is opened.
        models.fold(Inputs::default().files(named), |inputs, model| {
            match places.as_ref().map(|places| FoundModel::find(&model, places)) {
                Ok(Ok(source)) => source.add_to(inputs),
                _ => inputs.packs([model], &iebin::members()),
            }
        })
    }

    /// Opens the model; `speculation` is used if no option names one.
    ///
    /// # Errors
    /// Exit code 3 if there is no valid model, 4 if `iec eval --kv-gate` found that the type of --kv is worse, 5 if the
    /// model cannot run with these options.
    pub fn open(&self, global: &Global, speculation: Speculation) -> Result<Session> {
        self.note_prompts_ahead(global);
        self.open_with(&self.options(global, speculation)?, global)
    }

    /// Finds the model for answers to users, or the embedded one if none is named: with what saves time if no option
    /// names a speculation.
    ///
    /// # Errors
    /// There is no such model, or options contradict each other.
    pub fn to_answer(&self, global: &Global) -> Result<Opener> {
        let (options, notes) = (self.options(global, Speculation::Auto(None))?, self.notes(global));
        if self.is_named()? {
            return Ok(Opener { pack: self.path()?.to_path_buf(), options, notes, _home: None });
        }
        global.note("note: no model named; using the embedded one, which tells stories");
        let home = tempfile::tempdir()?;
        let options = SessionOptions { name: Some(embedded::NAME.into()), ..options };
        Ok(Opener { pack: embedded::pack_into(home.path())?, options, notes, _home: Some(home) })
    }

    /// Prints a note if --prefetch has a number, in a command that does not encode prompts ahead.
    pub fn note_prompts_ahead(&self, global: &Global) {
        self.tuning.note_prompts_ahead(global);
    }

    /// Returns the largest number of prompts that are encoded before they are computed.
    pub fn prompts_ahead(&self) -> usize {
        self.tuning.prompts_ahead()
    }

    /// Opens the model with the KV cache that it has without --kv.
    pub fn open_with_default_kv(&self, global: &Global) -> Result<Session> {
        let options = self.options(global, Speculation::Off)?;
        let engine = EngineOptions { kv: None, ..options.engine };
        self.open_with(&SessionOptions { engine, ..options }, global)
    }

    /// Finds another model, for these options except those that belong to the model that they name.
    ///
    /// # Errors
    /// There is no such model, or options contradict each other.
    pub fn other_to_answer(&self, model: &Path, global: &Global) -> Result<Opener> {
        self.other(model, global, Speculation::Auto(None))
    }

    /// Finds another model like [`ModelArgs::other_to_answer`]; `speculation` is used if no option names one.
    pub fn other(&self, model: &Path, global: &Global, speculation: Speculation) -> Result<Opener> {
        let found = resolve(model, self.precision.and_then(|asked| asked.0), &Places::of(&non_empty_variable)?)?;
        let options = self.options(global, speculation)?;
        let speculation = match options.speculation {
            Speculation::Draft(_) | Speculation::Auto(Some(_)) => Speculation::Auto(None),
            other => other,
        };
        let name = found.record.as_ref().map(|record| record.shown_source().to_string());
        let (weights, tokenizer, adapters) = (None, None, Vec::new());
        let options = SessionOptions { weights, tokenizer, name, speculation, adapters, ..options };
        Ok(Opener { pack: found.pack, options, notes: self.notes(global), _home: None })
    }

    /// Opens the model to measure the effect of --kv, even if it was found to be worse.
    pub fn open_to_measure_kv(&self, global: &Global) -> Result<Session> {
        self.open_with(&SessionOptions { measures_kv: true, ..self.options(global, Speculation::Off)? }, global)
    }

    /// Opens the model, whose adapters are used together.
    fn open_with(&self, options: &SessionOptions, global: &Global) -> Result<Session> {
        let session = self.notes(global).print(Session::open(self.path()?, options)?);
        session.adapters.together()?;
        Ok(session)
    }

    /// Plans the memory of the model with `batch` sequences, without reading weights.
    ///
    /// # Errors
    /// The same as for [`ModelArgs::open`]; a GPU or a draft model is named.
    pub fn plan(&self, global: &Global, batch: usize) -> Result<MemoryPlan> {
        let options = self.options(global, Speculation::Off)?;
        if self.is_named()? {
            return options.plan(self.path()?, batch);
        }
        global.note("note: no model named; planning for the embedded one");
        let home = tempfile::tempdir()?;
        options.plan(&embedded::pack_into(home.path())?, batch)
    }

    /// Opens the model without speculation; `precision` is used if no option names one and the pack supports it.
    pub fn open_preferring(&self, precision: Precision, global: &Global) -> Result<Session> {
        let mut options = self.options(global, Speculation::Off)?;
        if self.precision.is_none() {
            options.prefer(precision, self.path()?)?;
        }
        self.open_with(&options, global)
    }

    /// Opens the embedded model.
    pub fn open_embedded(&self, global: &Global) -> Result<Session> {
        Ok(self.notes(global).print(embedded::open_session(&self.options(global, Speculation::Off)?)?))
    }

    fn notes(&self, global: &Global) -> Notes {
        let (is_bounded, kv_memory, check) = (self.ctx.is_some(), self.kv_memory, self.check);
        Notes { is_bounded, kv_memory, check, device: self.device.clone(), global: global.clone() }
    }

    /// Opens the pack without an engine for its weights.
    pub fn open_reader(&self) -> Result<IebinReader> {
        self.pack_options()?.open_pack(self.path()?)
    }

    /// Opens the tokenizer alone.
    pub fn open_tokenizer(&self) -> Result<Tokenizer> {
        self.pack_options()?.open_tokenizer(self.path()?)
    }

    /// Returns the type of the KV cache, if an option names one.
    #[cfg(feature = "serve")]
    pub fn kv(&self) -> Option<KvType> {
        self.kv
    }

    /// Returns the memory for the KV cache, if an option limits it.
    #[cfg(feature = "serve")]
    pub fn kv_memory(&self) -> Option<u64> {
        self.kv_memory
    }

    /// Returns the memory for adapters, if an option limits it.
    #[cfg(feature = "serve")]
    pub fn lora_memory(&self) -> Option<u64> {
        self.lora_memory
    }

    /// Returns what the options name as the model.
    pub fn named(&self) -> Result<PathBuf> {
        match self.model_json.as_deref().or(first_named([&self.word, &self.model_dir])) {
            Some(path) => Ok(path.to_path_buf()),
            None if files::exists(Path::new(JSON_NAME))? => Ok(PathBuf::from(JSON_NAME)),
            None => Err(Error::new(Cause::Model(format!("no model named, and no {JSON_NAME} in this directory")))
                .help("name a pack, a checkpoint, a GGUF file or ORG/NAME after the command, or with MODEL_DIR")),
        }
    }

    /// Returns the path of the pack: its description or its directory. Makes the pack if the model is none.
    fn path(&self) -> Result<&Path> {
        Ok(&self.pack()?.pack)
    }

    fn pack(&self) -> Result<&Resolved> {
        match self.pack.get() {
            Some(found) => Ok(found),
            None => found_once(&self.pack, &self.named()?, self.precision.and_then(|asked| asked.0)),
        }
    }

    /// Returns the name of the model for people if it is not the path of its pack.
    fn shown_name(&self) -> Result<Option<String>> {
        match self.is_named()? {
            true => Ok(self.pack()?.record.as_ref().map(|record| record.shown_source().to_string())),
            false => Ok(None),
        }
    }

    /// Returns the options for the library that opening a pack needs.
    fn pack_options(&self) -> Result<SessionOptions> {
        Ok(SessionOptions {
            weights: self.model_bin.clone(),
            tokenizer: self.tokenizer.clone(),
            check: self.check,
            dedup: self.dedup.options()?,
            ..SessionOptions::default()
        })
    }

    /// Converts these arguments to the library's options of a session.
    fn options(&self, global: &Global, speculation: Speculation) -> Result<SessionOptions> {
        let of_adapters =
            [("--lora-memory", self.lora_memory.is_some()), ("--adapter-precision", self.adapter_precision.is_some())];
        if let Some((name, _)) = of_adapters.iter().find(|(_, given)| *given && self.lora.is_empty()) {
            return Err(Error::usage(format!("{name} has no effect without --lora"))
                .help("name an adapter with --lora, or leave it out"));
        }
        self.options_to_serve(global, speculation)
    }

    /// Converts these arguments to the library's options of a session whose adapters may come later.
    pub fn options_to_serve(&self, global: &Global, speculation: Speculation) -> Result<SessionOptions> {
        self.tuning.note_options_without_effect(global);
        Ok(SessionOptions {
            name: self.shown_name()?,
            engine: EngineOptions {
                precision: self.precision.and_then(|asked| asked.0),
                threads: global.threads(),
                context: self.ctx,
                kv: self.kv,
                kv_memory: self.kv_memory,
                attention: self.attention,
                residency: self.tuning.residency(),
                affinity: self.tuning.affinity,
                numa: self.tuning.numa,
                offload: self.offload()?,
                ..EngineOptions::default()
            },
            speculation: self.speculation(speculation)?,
            adapters: self.lora.clone(),
            adapter_precision: self.adapter_precision.unwrap_or_default(),
            adapter_memory: self.lora_memory,
            template_process: Some(RenderProcess::of_program(&std::env::current_exe()?)),
            ..self.pack_options()?
        })
    }

    /// Returns the GPUs to use: none by default with the reference of attention, which the CPU computes.
    fn offload(&self) -> Result<Offload> {
        let offload = self.device.offload()?;
        match self.attention {
            AttentionKernel::Reference if offload.devices == Devices::Auto => {
                Ok(Offload { devices: Devices::Cpu, layers: None })
            }
            _ => Ok(offload),
        }
    }

    fn speculation(&self, default: Speculation) -> Result<Speculation> {
        match (self.speculate, &self.draft_model_dir) {
            (speculate @ (None | Some(Speculate::Auto | Speculate::Draft)), Some(model)) => {
                let pack = found_once(&self.draft_pack, model, None)?.pack.clone();
                Ok(match speculate {
                    Some(Speculate::Draft) => Speculation::Draft(pack),
                    _ => Speculation::Auto(Some(pack)),
                })
            }
            (Some(_), Some(_)) => Err(Error::usage("--draft-model-dir needs --speculate auto or draft")
                .help("leave one of the two options out")),
            (None, None) => Ok(default),
            (Some(Speculate::Auto), None) => Ok(Speculation::Auto(None)),
            (Some(Speculate::Mtp), None) => Ok(Speculation::Mtp),
            (Some(Speculate::Off), None) => Ok(Speculation::Off),
            (Some(Speculate::Ngram), None) => Ok(Speculation::Ngram),
            (Some(Speculate::Draft), None) => {
                Err(Error::usage("--speculate draft needs a small model")
                    .help("name its pack with --draft-model-dir DIR"))
            }
        }
    }
}

/// Finds or makes the pack of a model, and keeps it in `cell`.
fn found_once<'a>(cell: &'a OnceCell<Resolved>, model: &Path, precision: Option<Precision>) -> Result<&'a Resolved> {
    let found = resolve(model, precision, &Places::of(&non_empty_variable)?)?;
    Ok(cell.get_or_init(|| found))
}

/// Options for packs whose weights are read from the files of `iec dedup`.
#[derive(Debug, clap::Args)]
struct DedupArgs {
    /// Read the weights from the files model.dedup.*: auto: if model.ie.bin is missing; on or 1: always; off or 0:
    /// never; DIR: from the files in this directory instead of the pack's
    #[arg(
        help_heading = "Deduplicated packs",
        long,
        value_name = "auto|on|off|DIR",
        env = "IE_DEDUP",
        default_value = "auto",
        hide_default_value = true
    )]
    dedup: StoreUse,
    /// Memory limit in MiB for rebuilt weights; weights beyond it are rebuilt at each use [default: 7/8 of the memory
    /// that the machine or container has left]. Weights that kernels read in their stored form do not count
    #[arg(help_heading = "Deduplicated packs", long, value_name = "N", env = "IE_DEDUP_CACHE_MB")]
    dedup_cache_mb: Option<u64>,
    /// Rebuild this many bytes of weights before the first token, in the order of their use, and keep them
    #[arg(
        help_heading = "Deduplicated packs",
        long,
        value_name = "BYTES",
        env = "IE_DEDUP_HOT_BYTES",
        value_parser = iec::units::parse_size
    )]
    dedup_hot_bytes: Option<u64>,
    /// Rebuild these tensors before the first token and keep them: names with commas between, or @FILE with one per
    /// line
    #[arg(help_heading = "Deduplicated packs", long, value_name = "NAMES", env = "IE_DEDUP_HOT_LIST")]
    dedup_hot_list: Option<String>,
    /// Check every stored byte against its checksum before the first token (exit code 3 if one is wrong). Without it,
    /// weights are checked when they are rebuilt; weights that kernels read in their stored form are not checked
    #[arg(help_heading = "Deduplicated packs", long, env = "IE_DEDUP_STRICT", value_parser = FalseyValueParser::new())]
    dedup_strict: bool,
    /// For scripts of the predecessor: `none` has the effect of --dedup off; `lossless`, which is everything that
    /// `iec dedup` writes, has no effect
    #[arg(
        help_heading = "Deduplicated packs",
        long,
        value_enum,
        value_name = "POLICY",
        env = "IE_DEDUP_POLICY",
        default_value = "lossless"
    )]
    dedup_policy: Policy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Policy {
    Lossless,
    None,
}

impl DedupArgs {
    fn options(&self) -> Result<DedupOptions> {
        let store = match (self.dedup_policy, &self.dedup) {
            (Policy::Lossless, store) => store.clone(),
            (Policy::None, StoreUse::Auto | StoreUse::Never) => StoreUse::Never,
            (Policy::None, StoreUse::Always | StoreUse::Dir(_)) => {
                let found = "--dedup contradicts --dedup-policy none (IE_DEDUP_POLICY)";
                return Err(Error::usage(found).help("leave one of the two out"));
            }
        };
        Ok(DedupOptions {
            store,
            cache_bytes: self.dedup_cache_mb.map(|mb| mb.saturating_mul(1 << 20)),
            hot_bytes: self.dedup_hot_bytes,
            hot_list: self.dedup_hot_list.clone(),
            strict: self.dedup_strict,
        })
    }
}
