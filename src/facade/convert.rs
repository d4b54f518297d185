//! Conversions: packing, quantization, and what tells about packs. Each does what the command of the program with the
//! same name does, with options of the same names.

use crate::convert::pack::{self as packing, PackOptions, PackSummary};
use crate::convert::quantize::judge::OnFailure;
use crate::convert::quantize::select::{OuterStorage, SelectionOptions};
use crate::error::{Error, Result};
use crate::iebin::IebinReader;
use crate::iebin::tensor_map::differing_payloads;
use crate::inspect as inspection;
use crate::job::RunOptions;
use crate::manifest::Keep;
use crate::manifest::plan::AskedTargets;
use crate::manifest::recipes::{self, Recipe};
use crate::output::{self, Inputs, Rules};
use crate::provenance::Gate;
use crate::quant_spec::QuantFields;
use crate::report::quantization;
use crate::runtime::cpu::place::physical_cores;
use crate::scheme::Scheme;
use crate::signature::{self, PublicKey};
use crate::task::{self, Progress, Task};
use crate::trial::ModelSource;
use crate::trial::one_step::OneStep;
use crate::trial::ptq::{Budget, Ptq, PtqOptions, TextWindows};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;

/// Calls `observer` with the progress of `work`, a conversion or the opening of a model. The observer returns false to
/// cancel the work, which then fails with [`Cause::Interrupted`](crate::Cause::Interrupted) and leaves nothing
/// half-written.
///
/// ```no_run
/// let request = iec::PackRequest::new("models/tinyllama", "packs/tinyllama");
/// let summary = iec::with_progress(|progress| { println!("{progress:?}"); true }, || iec::pack(&request))?;
/// # Ok::<(), iec::Error>(())
/// ```
pub fn with_progress<T>(
    observer: impl Fn(Progress<'_>) -> bool + Send + Sync + 'static,
    work: impl FnOnce() -> T,
) -> T {
    task::run(Some(Task::new(Box::new(observer))), work)
}

/// Options of [`pack()`].
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct PackRequest {
    /// A Hugging Face checkpoint (directory or weight file), a pack, or a GGUF file.
    pub model: PathBuf,
    /// Directory of the new pack; created if it is missing.
    pub out_dir: PathBuf,
    /// Quantizes with the recipe of 4, 5, 6 or 8 bits.
    pub bits: Option<u32>,
    /// Quantizes as the recipe of this name says.
    pub recipe: Option<String>,
    /// Manifest that says which tensors are quantized and how.
    pub q4_map: Option<PathBuf>,
    /// Statistics of activations (`iec calib`).
    pub calib: Option<PathBuf>,
    /// Limits that each quantized matrix must meet, such as `cosine=0.99`.
    pub gate: Vec<String>,
    /// Type of matrices that fail the gate: `fp16`, `bf16`, `int6` or `int8`; `None` = the pack is refused.
    pub keep_failing: Option<String>,
    /// A tokenizer.json that replaces the model's.
    pub tokenizer: Option<PathBuf>,
    /// Whether the layers of multi-token prediction are kept.
    pub with_mtp: bool,
    /// Whether a pack that is there is replaced.
    pub overwrite: bool,
    /// Number of threads; 0 = one per physical core.
    pub threads: usize,
}

impl PackRequest {
    /// Packs `model` into `out_dir` as it is.
    pub fn new(model: impl Into<PathBuf>, out_dir: impl Into<PathBuf>) -> PackRequest {
        PackRequest { model: model.into(), out_dir: out_dir.into(), ..PackRequest::default() }
    }

    fn options(&self) -> PackOptions {
        PackOptions {
            hf_dir: self.model.clone(),
            out_dir: self.out_dir.clone(),
            manifest: self.q4_map.clone(),
            calibration: self.calib.clone(),
            tokenizer: self.tokenizer.clone(),
            with_mtp: self.with_mtp,
            overwrite: self.overwrite,
            ..PackOptions::default()
        }
    }

    fn recipe(&self) -> Result<Option<&'static Recipe>> {
        match (&self.recipe, self.bits, &self.q4_map) {
            (None, None, _) => Ok(None),
            (Some(name), None, None) => recipes::named(name).map(Some),
            (None, Some(bits), None) => recipes::of_bits(bits).map(Some),
            _ => Err(Error::usage("found several of bits, recipe and q4_map, expected one of them")),
        }
    }
}

/// Packs a model, and quantizes it if the request says so.
///
/// ```
/// # let home = tempfile::tempdir()?;
/// # let (model, pack) = (home.path().join("model"), home.path().join("pack"));
/// # iec::models::embedded::write_to(&model)?;
/// let summary = iec::pack(&iec::PackRequest::new(&model, &pack))?;
/// assert_eq!(summary.tensors, 47);
/// let engine = iec::Engine::open(&pack, &iec::OpenOptions::default())?;
/// # Ok::<(), iec::Error>(())
/// ```
///
/// # Errors
/// The model is damaged or not supported, a gate refuses its quantization, or the pack cannot be written. Nothing is
/// left half-written, and the same call continues work that was interrupted.
pub fn pack(request: &PackRequest) -> Result<PackSummary> {
    let pack = request.options();
    let Some(recipe) = request.recipe()? else {
        if !request.gate.is_empty() || request.keep_failing.is_some() {
            return Err(Error::usage("gate and keep_failing need bits or recipe"));
        }
        return packing::pack(&pack);
    };
    OneStep {
        pack,
        recipe,
        embedding: OuterStorage::Chosen,
        lm_head: OuterStorage::Chosen,
        gate: gate(Gate::default(), &request.gate)?,
        on_failure: on_failure(request.keep_failing.as_deref())?,
        threads: threads(request.threads),
    }
    .run(|_| Ok(()))
}

/// Options of [`quantize`].
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct QuantizeRequest {
    /// A Hugging Face checkpoint, a pack, or a GGUF file.
    pub model: PathBuf,
    /// Manifest to write.
    pub out: PathBuf,
    /// Bits of each stored code: 2, 3, 4, 5, 6 or 8.
    pub bits: Option<u32>,
    /// Quantization scheme, such as `nl4`; `None` = that of the bits.
    pub scheme: Option<Scheme>,
    /// Manifest whose rules select the tensors and their schemes.
    pub rules: Option<PathBuf>,
    /// Patterns (regular expressions) of the tensors to quantize; empty = by their role.
    pub include: Vec<String>,
    /// Patterns of tensors that are not quantized.
    pub exclude: Vec<String>,
    /// Largest number of bits per weight of the whole pack. Schemes are chosen for the smallest error.
    pub target_bpw: Option<f64>,
    /// Largest number of bytes of the weights of the whole pack.
    pub target_size: Option<u64>,
    /// Largest expected divergence in nats per token on `plan_text`. The smallest such pack is chosen.
    pub target_kl: Option<f64>,
    /// Least number of tokens per second that one text decodes on this machine, as measured. Schemes are chosen for the
    /// smallest error.
    pub target_speed: Option<f64>,
    /// Text on which the error of each tensor is measured for a budget.
    pub plan_text: Option<PathBuf>,
    /// Statistics of activations (`iec calib`).
    pub calib: Option<PathBuf>,
    /// Limits that the quantized model must meet: `cosine=X`, `kl=NATS`, `ppl=+X%`, `top1=X%`.
    pub gate: Vec<String>,
    /// Text for the limits `kl`, `ppl` and `top1`.
    pub gate_text: Option<PathBuf>,
    /// Type of matrices that fail the gate; see [`PackRequest::keep_failing`].
    pub keep_failing: Option<String>,
    /// Whether the manifest is written, marked as refused, if a gate refuses it.
    pub force: bool,
    /// Whether a manifest that is there is replaced.
    pub overwrite: bool,
    /// Number of threads; 0 = one per physical core.
    pub threads: usize,
}

impl QuantizeRequest {
    /// Measures the quantization of `model`, and writes its manifest to `out`.
    pub fn new(model: impl Into<PathBuf>, out: impl Into<PathBuf>) -> QuantizeRequest {
        QuantizeRequest { model: model.into(), out: out.into(), ..QuantizeRequest::default() }
    }

    fn budget(&self) -> Result<Option<Budget>> {
        let text = self.plan_text.clone().map(|text| TextWindows { text, windows: Some(crate::trial::WINDOWS) });
        let asked = AskedTargets {
            bits_per_weight: self.target_bpw,
            bytes: self.target_size,
            divergence: self.target_kl,
            speed: self.target_speed,
        };
        let Some(target) = asked.target(|name| name.replace('-', "_"))? else {
            return match text {
                Some(_) => Err(Error::usage("plan_text needs target_bpw, target_size, target_kl or target_speed")),
                None => Ok(None),
            };
        };
        if self.target_kl.is_some() && text.is_none() {
            return Err(Error::usage("target_kl needs plan_text"));
        }
        if self.bits.is_some() || self.scheme.is_some() || self.rules.is_some() {
            return Err(Error::usage("a budget chooses the schemes itself; leave out bits, scheme and rules"));
        }
        Ok(Some(Budget { target, text, bandwidth: None }))
    }

    fn options(&self, out: PathBuf) -> Result<PtqOptions> {
        let budget = self.budget()?;
        let fields = QuantFields { bits: self.bits, scheme: self.scheme, ..QuantFields::default() };
        // With a budget, the bounds on the cosine of each tensor apply only if they are set.
        let default = if budget.is_some() { Gate::WITHOUT_COSINES } else { Gate::default() };
        Ok(PtqOptions {
            model: ModelSource { path: self.model.clone(), config: None },
            out,
            selection: SelectionOptions {
                fields,
                include: self.include.clone(),
                exclude: self.exclude.clone(),
                ..SelectionOptions::default()
            },
            rules: self.rules.clone(),
            calibration: self.calib.clone(),
            gate: gate(default, &self.gate)?,
            gate_text: self.gate_text.clone().map(|text| TextWindows { text, windows: None }),
            on_failure: on_failure(self.keep_failing.as_deref())?,
            max_bits: None,
            budget,
            force: self.force,
            pack: false,
            shown_tensor: None,
            threads: threads(self.threads),
            run: RunOptions::default(),
        })
    }
}

/// Quantizes a model on trial, measures the error of each matrix, and writes a manifest for [`pack()`]. Returns the
/// summary of `iec ptq --json`.
///
/// # Errors
/// The model is damaged or not supported, a gate refuses the quantization
/// ([`Cause::Refused`](crate::Cause::Refused); nothing is written), or the manifest cannot be written.
pub fn quantize(request: &QuantizeRequest) -> Result<Value> {
    let files = [&request.rules, &request.calib, &request.gate_text, &request.plan_text];
    let tasks: Vec<_> = gate(Gate::default(), &request.gate)?.tasks.into_iter().map(|task| task.path).collect();
    let inputs = Inputs::default().files(files.into_iter().flatten().chain(&tasks));
    let rules = Rules { inputs: &inputs, overwrite: request.overwrite, stdout: false };
    let out = output::Target::check(&request.out, rules)?;
    let ptq = Ptq::open(request.options(out.work_path())?)?;
    let quantized = ptq.quantize()?;
    out.write(&quantized.manifest()?)?;
    let summary = quantization::json(&quantized.measured, &request.out, &quantized.blame)?;
    serde_json::to_value(summary).map_err(|e| Error::engine(format!("the summary: {e}")))
}

/// Options of [`inspect`].
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct InspectRequest {
    /// A pack, a checkpoint, a weight file, a manifest or an adapter.
    pub path: PathBuf,
    /// Whether every tensor is listed.
    pub tensors: bool,
    /// Whether all weights are read, and statistics of their values computed.
    pub stats: bool,
}

impl InspectRequest {
    /// Describes what lies at a path.
    pub fn new(path: impl Into<PathBuf>) -> InspectRequest {
        InspectRequest { path: path.into(), ..InspectRequest::default() }
    }
}

/// Describes a pack, a checkpoint, a weight file, a manifest or an adapter: the object of `iec inspect --json`.
///
/// # Errors
/// The path has no known format, or the file breaks the rules of its format.
pub fn inspect(request: &InspectRequest) -> Result<Value> {
    let InspectRequest { path, tensors, stats } = request.clone();
    let text = inspection::describe(&inspection::Options { path, tensors, stats, strict: false, json: true })?;
    serde_json::from_str(&text).map_err(|e| Error::engine(format!("the description: {e}")))
}

/// Options of [`verify`].
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct VerifyRequest {
    /// The pack.
    pub pack: PathBuf,
    /// Public key (PEM) of its maker. The signature of the pack is checked with it.
    pub key: Option<PathBuf>,
}

impl VerifyRequest {
    /// Compares the files of a pack with their recorded hashes.
    pub fn new(pack: impl Into<PathBuf>) -> VerifyRequest {
        VerifyRequest { pack: pack.into(), ..VerifyRequest::default() }
    }
}

/// Result of [`verify`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct VerifySummary {
    /// Number of tensors that were compared.
    pub tensors: usize,
    /// Descriptions of tensors and files that differ; empty if the pack is as it was made.
    pub differences: Vec<String>,
}

/// Compares every tensor and file of a pack with its recorded hash, and checks its signature if a key is given.
///
/// # Errors
/// The pack cannot be read, or its signature is not valid.
pub fn verify(request: &VerifyRequest) -> Result<VerifySummary> {
    let reader = IebinReader::open(&request.pack)?;
    if let Some(key) = &request.key {
        let path = reader.dir.join(signature::FILE_NAME);
        signature::verify(&reader, &PublicKey::open(key)?, &path)?;
    }
    let differences = differing_payloads(&reader)?.iter().map(Error::to_string).collect();
    Ok(VerifySummary { tensors: reader.entries().len(), differences })
}

fn threads(asked: usize) -> usize {
    if asked == 0 { physical_cores() } else { asked }
}

fn gate(mut gate: Gate, limits: &[String]) -> Result<Gate> {
    limits.iter().try_for_each(|limit| gate.set(limit)).map(|()| gate)
}

fn on_failure(name: Option<&str>) -> Result<OnFailure> {
    match name {
        None => Ok(OnFailure::Refuse),
        Some("fp16") => Ok(OnFailure::Keep(Keep::Fp16)),
        Some("bf16") => Ok(OnFailure::Keep(Keep::Bf16)),
        Some("int6") => Ok(OnFailure::Quantize(Scheme::Int6)),
        Some("int8") => Ok(OnFailure::Quantize(Scheme::Int8)),
        Some(name) => Err(Error::usage(format!("keep_failing: found `{name}`, expected fp16, bf16, int6 or int8"))),
    }
}
