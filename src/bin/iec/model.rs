//! The options that say which model runs and how, shared by the commands that generate.

use crate::device_args::DeviceArgs;
use crate::global::Global;
use crate::tuning::TuningArgs;
use clap::ValueEnum;
use clap::builder::FalseyValueParser;
use iec::error::{Cause, Error, Result};
use iec::iebin::{self, IebinReader, JSON_NAME};
use iec::output::Inputs;
use iec::runtime::text::Tokenizer;
use iec::runtime::{EngineOptions, KvType, Precision};
use iec::session::dedup::{DedupOptions, StoreUse};
use iec::session::template::RenderProcess;
use iec::session::{Session, SessionOptions, Speculation};
use std::path::{Path, PathBuf};

/// Which model, in which precision, where.
#[derive(Debug, clap::Args)]
pub struct ModelArgs {
    /// Directory of the pack [default: the current directory, if it holds a pack]
    #[arg(long, alias = "model", value_name = "DIR", env = "MODEL_DIR")]
    pub model_dir: Option<PathBuf>,
    /// Description of the pack, instead of model.ie.json in --model-dir
    #[arg(long, value_name = "FILE")]
    pub model_json: Option<PathBuf>,
    /// Weights of the pack, instead of the file the description names
    #[arg(long, value_name = "FILE")]
    model_bin: Option<PathBuf>,
    /// Tokenizer, instead of tokenizer.json beside the description
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// fp32, bf16, fp16, int8w, int8, int4w, int4, or auto: what the pack holds, fastest path [default: auto]
    #[arg(long, value_name = "P", env = "IE_PRECISION", value_parser = parse_precision)]
    precision: Option<PrecisionOrAuto>,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Guess tokens and verify several in one step; the text stays the same, and guessing stops where it does not pay
    /// [default: draft with --draft-model-dir, otherwise ngram for run and off for bench]
    #[arg(long, value_enum, value_name = "HOW")]
    speculate: Option<Speculate>,
    /// Pack of a small model with the same tokens, for --speculate draft (which this implies)
    #[arg(long, value_name = "DIR")]
    draft_model_dir: Option<PathBuf>,
    /// Longest context in tokens, at most what the model was made for [default: that]
    #[arg(long, value_name = "N")]
    pub ctx: Option<usize>,
    /// What cached keys and values are held as: f32, f16, bf16 or int8 (with a scale per 32 values; half the memory of
    /// bf16) [default: f32 for fp32, bf16 for int4 and int8, f16 otherwise]
    #[arg(long, value_name = "TYPE")]
    kv: Option<KvType>,
    #[command(flatten)]
    dedup: DedupArgs,
    #[command(flatten)]
    tuning: TuningArgs,
}

/// `auto` is `None`.
#[derive(Debug, Clone, Copy)]
struct PrecisionOrAuto(Option<Precision>);

/// Where draft tokens come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Speculate {
    /// Token by token
    Off,
    /// That the text repeats itself
    Ngram,
    /// What the small model of --draft-model-dir says
    Draft,
}

fn parse_precision(text: &str) -> std::result::Result<PrecisionOrAuto, String> {
    match text.to_ascii_lowercase().as_str() {
        "auto" => Ok(PrecisionOrAuto(None)),
        name => name.parse().map(|p| PrecisionOrAuto(Some(p))).map_err(|e: Error| format!("{e} or auto")),
    }
}

impl ModelArgs {
    /// True where an option or a variable names the model, or the current directory holds one.
    pub fn is_named(&self) -> bool {
        self.model_json.is_some() || self.named_dir().is_some() || Path::new(JSON_NAME).exists()
    }

    /// Files and packs that the command reads, which outputs must not replace.
    pub fn inputs(&self) -> Inputs {
        let beside = self.path().ok().map(|path| if path.is_dir() { path } else { path.with_file_name("") });
        let named = [&self.model_json, &self.model_bin, &self.tokenizer].into_iter().flatten();
        Inputs::default().files(named).packs(beside.into_iter().chain(self.draft_model_dir.clone()), &iebin::members())
    }

    /// Opens the model; `speculation` where no option says how.
    ///
    /// # Errors
    /// Exit code 3 when there is no valid model, 5 when it cannot run as asked.
    pub fn open(&self, global: &Global, speculation: Speculation) -> Result<Session> {
        self.noted(Session::open(&self.path()?, &self.options(global, speculation)?)?, global)
    }

    /// Opens the model in `precision` where no option says which and the pack can serve it, without speculation.
    pub fn open_preferring(&self, precision: Precision, global: &Global) -> Result<Session> {
        let mut options = self.options(global, Speculation::Off)?;
        if self.precision.is_none() {
            options.prefer(precision, &self.path()?)?;
        }
        self.noted(Session::open(&self.path()?, &options)?, global)
    }

    /// Opens the embedded model.
    pub fn open_embedded(&self, global: &Global) -> Result<Session> {
        self.noted(Session::open_embedded(&self.options(global, Speculation::Off)?)?, global)
    }

    /// Notes where the model of this session runs, and whether the gate of its quantization refused it.
    fn noted(&self, session: Session, global: &Global) -> Result<Session> {
        if session.reader.description.quality.as_ref().is_some_and(|quality| quality.refused) {
            global.note(format!(
                "note: {}: the gate refused the quantization of this pack; `iec inspect` shows why",
                session.name
            ));
        }
        self.device.note(&session.engine, global);
        Ok(session)
    }

    /// Opens the pack without its weights being used.
    pub fn open_reader(&self) -> Result<IebinReader> {
        self.pack_options()?.open_pack(&self.path()?)
    }

    /// Opens the tokenizer alone.
    pub fn open_tokenizer(&self) -> Result<Tokenizer> {
        self.pack_options()?.open_tokenizer(&self.path()?)
    }

    /// The pack: its description or its directory.
    fn path(&self) -> Result<PathBuf> {
        match self.model_json.clone().or_else(|| self.named_dir()) {
            Some(path) => Ok(path),
            None if Path::new(JSON_NAME).exists() => Ok(PathBuf::from(JSON_NAME)),
            None => Err(Error::new(Cause::Model(format!("no model named, and no {JSON_NAME} in this directory")))
                .help("name a pack with --model-dir DIR or MODEL_DIR")),
        }
    }

    /// Returns the directory of `--model-dir`, if it is given and not empty.
    fn named_dir(&self) -> Option<PathBuf> {
        self.model_dir.clone().filter(|dir| !dir.as_os_str().is_empty())
    }

    /// What opening a pack needs.
    fn pack_options(&self) -> Result<SessionOptions> {
        Ok(SessionOptions {
            weights: self.model_bin.clone(),
            tokenizer: self.tokenizer.clone(),
            dedup: self.dedup.options()?,
            ..SessionOptions::default()
        })
    }

    /// These options as the library takes them.
    fn options(&self, global: &Global, speculation: Speculation) -> Result<SessionOptions> {
        self.tuning.note_options_without_effect(global);
        Ok(SessionOptions {
            engine: EngineOptions {
                precision: self.precision.and_then(|asked| asked.0),
                threads: global.threads(),
                context: self.ctx,
                kv: self.kv,
                residency: self.tuning.residency(),
                affinity: self.tuning.affinity,
                numa: self.tuning.numa,
                offload: self.device.offload()?,
                ..EngineOptions::default()
            },
            speculation: self.speculation(speculation)?,
            template_process: Some(RenderProcess {
                program: std::env::current_exe()?,
                arguments: vec![crate::RENDER_TEMPLATE.into()],
            }),
            ..self.pack_options()?
        })
    }

    fn speculation(&self, default: Speculation) -> Result<Speculation> {
        match (self.speculate, &self.draft_model_dir) {
            (None | Some(Speculate::Draft), Some(dir)) => Ok(Speculation::Draft(dir.clone())),
            (Some(_), Some(_)) => Err(Error::usage("--draft-model-dir has no use without --speculate draft")
                .help("leave one of the two options out")),
            (None, None) => Ok(default),
            (Some(Speculate::Off), None) => Ok(Speculation::Off),
            (Some(Speculate::Ngram), None) => Ok(Speculation::Ngram),
            (Some(Speculate::Draft), None) => Err(Error::usage("--speculate draft without a small model")
                .help("name its pack with --draft-model-dir DIR")),
        }
    }
}

/// Where weights come from if not from the binary.
#[derive(Debug, clap::Args)]
struct DedupArgs {
    /// Run from the files model.dedup.*: auto where the binary is gone, 1 or on always, 0 or off never; or the
    /// directory they lie in, if it is not the pack's
    #[arg(
        help_heading = "Deduplicated packs",
        long,
        value_name = "auto|on|off|DIR",
        env = "IE_DEDUP",
        default_value = "auto",
        hide_default_value = true
    )]
    dedup: StoreUse,
    /// Most MiB of weights that are kept in memory once they are rebuilt; others are rebuilt each time [default: no
    /// limit]. Weights that are computed with as they are stored do not count
    #[arg(help_heading = "Deduplicated packs", long, value_name = "N", env = "IE_DEDUP_CACHE_MB")]
    dedup_cache_mb: Option<u64>,
    /// Rebuild so many bytes of weights before the first token, in the order of their use, and keep them
    #[arg(help_heading = "Deduplicated packs", long, value_name = "BYTES", env = "IE_DEDUP_HOT_BYTES", value_parser = iec::units::parse_size)]
    dedup_hot_bytes: Option<u64>,
    /// Rebuild these tensors before the first token and keep them: names with commas between, or @FILE with one per
    /// line
    #[arg(help_heading = "Deduplicated packs", long, value_name = "NAMES", env = "IE_DEDUP_HOT_LIST")]
    dedup_hot_list: Option<String>,
    /// Compare every byte that is stored with its checksum before the first token (exit code 3 if one is wrong).
    /// Without, weights are compared when they are rebuilt, and not where they are computed with as they are stored
    #[arg(help_heading = "Deduplicated packs", long, env = "IE_DEDUP_STRICT", value_parser = FalseyValueParser::new())]
    dedup_strict: bool,
    /// What may be run: lossless: all that `iec dedup` writes; none: only binaries, as --dedup off
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
                let found = "--dedup asks for what --dedup-policy none (IE_DEDUP_POLICY) forbids";
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
