//! The options that say which model runs and how, shared by the commands that generate.

use crate::dedup_args::DedupArgs;
use crate::device_args::DeviceArgs;
use crate::global::Global;
use crate::tuning::TuningArgs;
use clap::ValueEnum;
use iec::convert::gguf::Gguf;
use iec::error::{Cause, Context, Error, Result};
use iec::iebin::reader::{NAME_A_PACK, read_description};
use iec::iebin::{Description, IebinReader, JSON_NAME};
use iec::runtime::speculate::Speculator;
use iec::runtime::text::{Tokenizer, tokenizer};
use iec::runtime::{Engine, EngineOptions, KvType, Precision};
use iec::units::human_bytes;
use std::path::{Path, PathBuf};

/// Which model, in which precision, where.
#[derive(Debug, clap::Args)]
pub struct ModelArgs {
    /// Directory of the pack [env: IE_MODEL_DIR, too] [default: the current directory, if it holds a pack]
    #[arg(long, value_name = "DIR", env = "MODEL_DIR")]
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
    /// fp32, bf16, fp16, int8w, int8, int4w, int4, or auto: what the pack holds, fastest path
    /// [env: IE_PRECISION, then PRECISION] [default: auto]
    #[arg(long, value_name = "P", value_parser = parse_precision)]
    precision: Option<Asked>,
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
    ctx: Option<usize>,
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
struct Asked(Option<Precision>);

/// Where guesses of the next tokens come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Speculate {
    /// Token by token
    Off,
    /// That the text repeats itself
    Ngram,
    /// What the small model of --draft-model-dir says
    Draft,
}

fn parse_precision(text: &str) -> std::result::Result<Asked, String> {
    match text.to_ascii_lowercase().as_str() {
        "auto" => Ok(Asked(None)),
        name => name.parse().map(|p| Asked(Some(p))).map_err(|e: Error| format!("{e} or auto")),
    }
}

/// A non-empty environment variable.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// A model ready to generate.
pub struct Model {
    /// Computes.
    pub engine: Engine,
    /// Guesses ahead.
    pub speculator: Speculator,
    /// The opened pack.
    pub reader: IebinReader,
    /// `None` only where the pack has none and the caller can do without.
    pub tokenizer: Option<Tokenizer>,
    /// What reports call it.
    pub name: String,
    /// How it was to be tuned.
    pub tuning: TuningArgs,
}

impl Model {
    /// Says with --verbose what became of weights that are rebuilt.
    pub fn tell_rebuilds(&self) {
        let Some(rebuilds) = self.engine.rebuilds() else { return };
        iec::progress::detail(1, || {
            format!(
                "{}: rebuilt {} matrices of {}, let {} go again, kept {} at most",
                self.name,
                rebuilds.matrices,
                human_bytes(rebuilds.bytes),
                rebuilds.evicted,
                human_bytes(rebuilds.peak_bytes)
            )
        });
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// There is none.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or_else(|| {
            Error::new(Cause::Model(format!("the pack has no {}", tokenizer::FILE_NAME)))
                .at(&self.reader.dir)
                .help("name one with --tokenizer FILE")
        })
    }
}

impl ModelArgs {
    /// The model directory named by flag or variables.
    pub fn named_dir(&self) -> Option<PathBuf> {
        let flag = self.model_dir.clone().filter(|dir| !dir.as_os_str().is_empty());
        flag.or_else(|| variable("IE_MODEL_DIR").map(PathBuf::from))
    }

    /// The context asked for.
    pub fn ctx(&self) -> Option<usize> {
        self.ctx
    }

    /// Asks for `precision` where nobody asked for any and the pack can serve it.
    pub fn prefer(&mut self, precision: Precision) -> Result<()> {
        if self.precision.is_none() && self.precision()?.is_none() {
            let served = Precision::resolve(Some(precision), &self.open_reader()?).ok();
            self.precision = served.map(|precision| Asked(Some(precision)));
        }
        Ok(())
    }

    /// Opens the pack without its weights being used.
    pub fn open_reader(&self) -> Result<IebinReader> {
        let json = self.description()?;
        let description = read_description(&json).map_err(Error::while_opening_model)?;
        self.reader_of(description, &json)
    }

    /// The pack of a description, deduplicated or not.
    fn reader_of(&self, description: Description, json: &Path) -> Result<IebinReader> {
        (self.dedup.open(description, json, self.model_bin.as_deref()))
            .help(NAME_A_PACK)
            .map_err(Error::while_opening_model)
    }

    /// Opens the tokenizer alone.
    pub fn open_tokenizer(&self) -> Result<Tokenizer> {
        let path = match &self.tokenizer {
            Some(path) => path.clone(),
            None => self.description()?.with_file_name(tokenizer::FILE_NAME),
        };
        Tokenizer::open(&path).map_err(Error::while_opening_model)
    }

    /// Opens the model these options name; `guesses` where none of them says how to guess.
    ///
    /// # Errors
    /// Exit code 3 when there is no valid model, 5 when it cannot run as asked.
    pub fn open(&self, global: &Global, guesses: Speculate) -> Result<Model> {
        self.device.offload()?;
        let json = self.description()?;
        if let Some(file) = json.parent().filter(|path| Gguf::is_at(path)) {
            let help = format!("make a pack of it: `iec import-gguf {} --out-dir DIR`", file.display());
            return Err(Error::new(Cause::Model("is a GGUF file".into())).at(file).help(help));
        }
        let name = json.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        self.open_json(&json, name.display().to_string(), global, guesses)
    }

    /// Opens the description `json`, with these options for everything else.
    pub fn open_json(&self, json: &Path, name: String, global: &Global, guesses: Speculate) -> Result<Model> {
        let description = read_description(json).map_err(Error::while_opening_model)?;
        if description.is_older() {
            return Err(to_be_converted(json));
        }
        let reader = self.reader_of(description, json)?;
        let tokenizer = match &self.tokenizer {
            Some(path) => Some(path.clone()),
            None => Some(reader.dir.join(tokenizer::FILE_NAME)).filter(|path| path.exists()),
        };
        let options = EngineOptions {
            precision: self.precision()?,
            threads: global.threads()?,
            context: self.ctx,
            kv: self.kv,
            residency: self.tuning.residency(),
            affinity: self.tuning.affinity(),
            numa: self.tuning.numa(),
            offload: self.device.offload()?,
            ..EngineOptions::default()
        };
        self.tuning.tell_what_is_useless(global);
        self.dedup.tell_what_is_useless(&reader, global);
        let engine = Engine::open(&reader, &options).map_err(Error::while_opening_model)?;
        self.device.tell(&engine, global);
        // On this thread: the heap of another grows in steps of a page, 1400 calls that each wait for all page faults.
        let tokenizer = tokenizer.map(|path| Tokenizer::open(&path)).transpose().map_err(Error::while_opening_model)?;
        let speculator = self.speculator(&engine, tokenizer.as_ref(), guesses)?;
        iec::progress::detail(1, || {
            format!(
                "{name}: {} in {}, {} threads with {}, context {} in {}, {:.1} MB of weights per token",
                engine.config().architecture,
                engine.precision(),
                engine.threads(),
                engine.isa(),
                engine.context(),
                engine.kv_type(),
                engine.weight_bytes_per_token() as f64 / 1e6
            )
        });
        Ok(Model { engine, speculator, reader, tokenizer, name, tuning: self.tuning.clone() })
    }

    fn speculator(&self, engine: &Engine, tokenizer: Option<&Tokenizer>, default: Speculate) -> Result<Speculator> {
        match (self.speculate, &self.draft_model_dir) {
            (None | Some(Speculate::Draft), Some(dir)) => {
                let small = open_draft(dir, tokenizer, engine.threads()).map_err(Error::while_opening_model)?;
                Ok(Speculator::draft(small, engine))
            }
            (Some(_), Some(_)) => Err(Error::usage("--draft-model-dir has no use without --speculate draft")
                .help("leave one of the two options out")),
            (how, None) => match how.unwrap_or(default) {
                Speculate::Off => Ok(Speculator::off()),
                Speculate::Ngram => Ok(Speculator::ngram()),
                Speculate::Draft => Err(Error::usage("--speculate draft without a small model")
                    .help("name its pack with --draft-model-dir DIR")),
            },
        }
    }

    fn description(&self) -> Result<PathBuf> {
        if let Some(json) = &self.model_json {
            return Ok(json.clone());
        }
        match self.named_dir() {
            Some(dir) => Ok(dir.join(JSON_NAME)),
            None if Path::new(JSON_NAME).exists() => Ok(PathBuf::from(JSON_NAME)),
            None => Err(Error::new(Cause::Model(format!("no model named, and no {JSON_NAME} in this directory")))
                .help("name a pack with --model-dir DIR or MODEL_DIR")),
        }
    }

    /// The flag, IE_PRECISION, then PRECISION.
    fn precision(&self) -> Result<Option<Precision>> {
        if let Some(Asked(precision)) = self.precision {
            return Ok(precision);
        }
        for name in ["IE_PRECISION", "PRECISION"] {
            if let Some(text) = variable(name) {
                return parse_precision(&text).map(|asked| asked.0).map_err(|e| Error::usage(format!("{name}: {e}")));
            }
        }
        Ok(None)
    }
}

/// Opens a model that guesses for one with this tokenizer.
fn open_draft(dir: &Path, tokenizer: Option<&Tokenizer>, threads: usize) -> Result<Engine> {
    let reader = DedupArgs::default().open_pack(dir).help(NAME_A_PACK)?;
    let path = dir.join(tokenizer::FILE_NAME);
    if let Some(tokenizer) = tokenizer
        && !Tokenizer::open(&path)?.has_tokens_of(tokenizer)
    {
        let found = "other tokens than the model's; its guesses would mean something else";
        return Err(Error::usage(found).at(&path).help("choose a small model of the same family"));
    }
    Engine::open(&reader, &EngineOptions { threads, ..EngineOptions::default() })
}

/// A pack of an older program holds a checkpoint's tensors and no description of the model.
fn to_be_converted(json: &Path) -> Error {
    let dir = json.parent().unwrap_or(Path::new(""));
    let old = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let new = match dir.file_name() {
        Some(name) => dir.with_file_name(format!("{}-iec", name.to_string_lossy())),
        None => PathBuf::from("../converted"),
    };
    let config = if dir.join("config.json").exists() { "" } else { " --config CONFIG_JSON" };
    Error::new(Cause::Model("a pack of an older program, which does not describe its model".into()))
        .at(json)
        .help(format!("convert it once: iec pack --hf-dir {}{config} --out-dir {}", shell_word(old), shell_word(&new)))
}

/// A path as a shell reads it back.
fn shell_word(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = text.chars().all(|c| c.is_alphanumeric() || "_./-".contains(c));
    if plain { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}
