//! `iec serve`: serves models over HTTP.

use crate::console::{self, LogForm};
use crate::global::{Global, listen_for_hang_up, non_empty_variable};
use crate::model::ModelArgs;
use crate::models_dir::{self, Found};
use crate::names::offering;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};
use iec::error::{Cause, Error, Result, Signal};
use iec::host::LogLine;
use iec::host::lease::Planned;
use iec::host::model;
use iec::interrupt;
use iec::models::embedded;
use iec::models::{Description, ModelKind, Places, Resolved, resolve};
use iec::resources::memory_left;
use iec::serve::config::{Given, LogFormat, ModelSource, SETTINGS, ServeSettings, Setting, Size};
use iec::serve::keys::Keys;
use iec::serve::{self, Address, Reload, Reloaded, Server, ServerSignal};
use iec::session::chat_templates::TemplateChoice;
use iec::session::plan::MemoryPlan;
use iec::session::{Session, SessionOptions, Speculation};
use serde_json::json;
use std::ffi::OsStr;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tempfile::TempDir;

/// Heading of the options of the server in the help.
const HEADING: &str = "Server";
/// Settings that options of the model have, too.
const OF_MODEL: [&str; 4] = ["ctx", "kv", "kv-memory", "lora-memory"];
/// Divisor of the free memory that gives the default of --kv-memory for a model that is loaded on request.
const ON_REQUEST_SHARE: u64 = 8;
/// Smallest default of --kv-memory in bytes.
const LEAST_KV: u64 = 64 << 20;

/// Arguments of `iec serve`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Each setting of the server has an environment variable (IEC_ and its name, such as IEC_MAX_SEQS) and a line in the \
file of --config (max-seqs = 16). An option wins over a variable, a variable over the file.\n\n\
SIGTERM and Ctrl-C finish the requests that run and end the server; a second one ends it at once. SIGHUP reads the \
keys and adapters again.\n\n\
Examples:\n  \
iec serve\n  \
iec serve packs/tinyllama --port 8000\n  \
iec serve --model small=packs/tinyllama --model large=packs/gpt-oss --api-key-file keys.toml --host 0.0.0.0")]
// Other commands compare hashes with --check.
#[command(mut_arg("check", |arg| arg.long("check-hashes")))]
pub struct Args {
    /// Serve the model in DIR by this name; repeatable, in place of MODEL
    #[arg(help_heading = HEADING, long = "model", value_name = "NAME=MODEL")]
    #[arg(conflicts_with_all = ["pack", "model_dir", "model_json"])]
    models: Vec<ModelSource>,
    /// Read settings from a file
    #[arg(help_heading = HEADING, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the settings and the memory that the models need as JSON, and do not serve (exit code 6 if it does not
    /// fit)
    #[arg(help_heading = HEADING, long = "check", id = "check_only")]
    check: bool,
    /// Print errors as JSON on stdout; the address and the result of --check are JSON in any case
    #[arg(help_heading = HEADING, long)]
    pub json: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    settings: SettingArgs,
}

/// Options of the settings of the server.
#[derive(Debug)]
struct SettingArgs(Given);

fn offered() -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter().filter(|setting| !OF_MODEL.contains(&setting.name().as_str()))
}

impl clap::Args for SettingArgs {
    fn augment_args(command: Command) -> Command {
        offered().fold(command, |command, setting| {
            // The parser keeps names for the whole run.
            let name: &'static str = setting.name().leak();
            let variable: &'static str = setting.variable().leak();
            let default = (setting.default)().map_or(String::new(), |text| format!(" [default: {text}]"));
            let arg = Arg::new(name).long(name).env(variable).hide_env_values(true).help_heading(HEADING);
            let arg = arg.help(format!("{}{default}", setting.help()));
            command.arg(match value_name(setting) {
                Some(value) if setting.is_list => arg.value_name(value).action(ArgAction::Append),
                Some(value) => {
                    let parser = offering(words(value), move |text: &str| checked(name, text));
                    arg.value_name(value).hide_possible_values(true).value_parser(parser)
                }
                None => arg.action(ArgAction::SetTrue).value_parser(clap::builder::FalseyValueParser::new()),
            })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        SettingArgs::augment_args(command)
    }
}

/// Returns the name of the value of an option; `None` for a switch. A switch that is on by default takes a value, since
/// it could not be turned off otherwise.
fn value_name(setting: &Setting) -> Option<&'static str> {
    setting.value_name.or_else(|| (setting.default)().map(|_| "on|off"))
}

/// Returns the words of a setting whose values have this name, if they are fixed.
fn words(value_name: &str) -> &'static [&'static str] {
    match value_name {
        "on|off" => &["on", "off"],
        "FORMAT" => &["text", "json"],
        _ => &[],
    }
}

/// Checks the text of a setting.
fn checked(name: &str, text: &str) -> std::result::Result<String, String> {
    Given::default().set(name, text).map(|()| text.to_string())
}

impl FromArgMatches for SettingArgs {
    fn from_arg_matches(matches: &ArgMatches) -> std::result::Result<SettingArgs, clap::Error> {
        let mut given = Given::default();
        for setting in offered() {
            let name = setting.name();
            let texts: Vec<String> = match value_name(setting) {
                Some(_) => matches.get_many::<String>(&name).into_iter().flatten().cloned().collect(),
                None if matches.get_flag(&name) => vec!["true".into()],
                None => Vec::new(),
            };
            for text in texts {
                let wrong = |why: String| {
                    clap::Error::raw(clap::error::ErrorKind::ValueValidation, format!("--{name}: {why}\n"))
                };
                given.set(&name, &text).map_err(wrong)?;
            }
        }
        Ok(SettingArgs(given))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> std::result::Result<(), clap::Error> {
        *self = SettingArgs::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let settings = args.settings()?;
    console::log_notes(match settings.log {
        LogFormat::Json => LogForm::Json,
        LogFormat::Text => LogForm::Text,
    });
    let keys = read_keys(&settings, global)?;
    settings.check_host(!keys.is_open())?;
    #[cfg(feature = "otel")]
    let traces = serve::TraceOptions::of(settings.otlp_endpoint.as_deref(), &non_empty_variable)?;
    let models = args.models(&settings, global)?;
    if args.check {
        return check(&settings, &models);
    }
    let (sender, signals) = serve::signals();
    let seen = AtomicBool::new(false);
    interrupt::handle(move |signal| {
        let ends = !matches!(signal, Signal::HangUp);
        if ends && seen.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(Signal::Interrupt.exit_code()));
        }
        sender.send(match signal {
            Signal::Terminate => ServerSignal::Terminate,
            Signal::Interrupt => ServerSignal::Interrupt,
            Signal::HangUp => ServerSignal::Reload,
        });
    });
    listen_for_hang_up();
    let ended = serve::run(Server {
        reload: args.reload(),
        log: log_line(global),
        announce: Box::new(announce),
        models: models.into_iter().map(|model| model.served(settings.max_seqs)).collect(),
        keys,
        settings,
        notify: non_empty_variable("NOTIFY_SOCKET"),
        signals,
        #[cfg(feature = "otel")]
        traces,
    })?;
    match ended.cut {
        true => Err(Error::new(Cause::Io(std::io::Error::other("requests were ended before they were complete")))
            .help("raise --drain-timeout")),
        false => Ok(()),
    }
}

/// Prints where the server listens: for programs as JSON, on a terminal as text.
fn announce(address: &Address) -> Result<()> {
    let http = format!("http://{}", address.tcp);
    let grpc = address.grpc.map(|address| format!("grpc://{address}"));
    if std::io::stdout().is_terminal() {
        let grpc = grpc.map_or(String::new(), |grpc| format!(" and {grpc}"));
        let unix = address.unix.as_ref().map_or(String::new(), |path| format!(" and {}", path.display()));
        return console::print_line(format_args!("listening on {http}{unix}{grpc}; Ctrl-C ends the server"));
    }
    console::print_json(&json!({"event": "listening", "http": http, "unix": address.unix, "grpc": grpc}))
}

/// Returns the receiver of log lines.
fn log_line(global: &Global) -> LogLine {
    let is_quiet = global.quiet;
    Arc::new(move |line: &str| {
        if !is_quiet {
            console::note(line);
        }
    })
}

/// Reads the keys that the settings or the environment name.
fn read_keys(settings: &ServeSettings, global: &Global) -> Result<Keys> {
    if let Some(path) = &settings.api_key_file {
        let file = Keys::read(path)?;
        if let Some(warning) = file.warning {
            global.note(format_args!("note: {warning}"));
        }
        return Ok(file.keys);
    }
    match non_empty_variable("IEC_API_KEY") {
        Some(secret) if !settings.no_auth => Keys::of_secret(&secret.to_string_lossy()),
        _ => Ok(Keys::open()),
    }
}

/// Prints settings and memory.
fn check(settings: &ServeSettings, models: &[Served]) -> Result<()> {
    let mut plans = Vec::new();
    let (at_start, on_request): (Vec<&Served>, Vec<&Served>) = models.iter().partition(|model| !model.on_request);
    for model in at_start {
        plans.push((model.name.as_str(), model.plan(settings.max_seqs)?));
    }
    let needed: u64 = plans.iter().map(|(_, plan)| plan.total_bytes).sum();
    let left = memory_left();
    let listed = plans.iter().map(|(name, plan)| json!({"name": name, "plan": plan}));
    let listed: Vec<_> =
        listed.chain(on_request.iter().map(|model| json!({"name": model.name, "plan": null}))).collect();
    let fits = left.is_none_or(|left| needed <= left);
    let mut object = settings.to_json();
    object["models"] = json!(listed);
    console::print_json(&json!({
        "settings": object, "total_bytes": needed, "left_bytes": left, "fits": fits
    }))?;
    match fits {
        true => Ok(()),
        false => Err(Error::new(Cause::OutOfMemory(format!(
            "the models need {needed} bytes, but the machine or container has {} left",
            left.unwrap_or(0)
        )))
        .help("lower --kv-memory, --max-seqs or --ctx, or serve fewer models")),
    }
}

/// A model to serve.
struct Served {
    name: String,
    /// Path or name of the model; `None` = the embedded one.
    spec: Option<PathBuf>,
    places: Places,
    options: SessionOptions,
    template: TemplateChoice,
    /// Whether it is loaded when a request names it.
    on_request: bool,
    /// Keeps the pack from being removed while it is served.
    held: Mutex<Held>,
}

/// Values that keep a pack in its place.
#[derive(Default)]
struct Held {
    /// Use of an entry of the cache.
    found: Option<Resolved>,
    /// Directory of the embedded model.
    embedded: Option<(TempDir, PathBuf)>,
}

impl Served {
    /// Returns the model with the function that opens it.
    fn served(self, sequences: usize) -> model::Served {
        let model = Arc::new(self);
        let (name, template, on_request) = (model.name.clone(), model.template.clone(), model.on_request);
        let planned = model.clone();
        model::Served {
            name,
            template,
            on_request,
            plan: Some(Box::new(move || planned.planned(sequences))),
            open: Box::new(move || Session::open(&model.pack()?, &model.options)),
        }
    }

    /// Returns the memory that the model needs; `None` if it must be packed first, or runs on a GPU.
    fn planned(&self, sequences: usize) -> Option<Planned> {
        let path = match &self.spec {
            Some(spec) => {
                let found = Description::of(spec, &self.places).ok()?;
                let is_packed = found.kind == ModelKind::Pack || found.entry.is_some();
                is_packed.then_some(found.path)?
            }
            None => self.pack().ok()?,
        };
        let plan = self.options.plan(&path, sequences).ok()?;
        let bytes = plan.total_bytes.saturating_sub(plan.process_bytes);
        Some(Planned { bytes, without_weights: bytes.saturating_sub(plan.weights_mapped_bytes) })
    }

    /// Finds or makes the pack.
    fn pack(&self) -> Result<PathBuf> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        match (&self.spec, &held.embedded) {
            (Some(spec), _) => {
                let found = resolve(spec, self.options.engine.precision, &self.places)?;
                Ok(held.found.insert(found).pack.clone())
            }
            (None, Some((_, pack))) => Ok(pack.clone()),
            (None, None) => {
                let home = tempfile::tempdir()?;
                let pack = embedded::pack_into(home.path())?;
                held.embedded = Some((home, pack.clone()));
                Ok(pack)
            }
        }
    }

    fn plan(&self, sequences: usize) -> Result<MemoryPlan> {
        self.options.plan(&self.pack()?, sequences)
    }
}

impl Args {
    /// Returns the effective settings.
    fn settings(&self) -> Result<ServeSettings> {
        let mut given = Given::default();
        for name in OF_MODEL {
            let variable = format!("IEC_{}", name.replace('-', "_").to_uppercase());
            if let Some(text) = non_empty_variable(&variable) {
                given.set(name, &text.to_string_lossy()).map_err(|e| Error::usage(format!("{variable}: {e}")))?;
            }
        }
        let of_model = Given {
            ctx: self.model.ctx,
            kv: self.model.kv(),
            kv_memory: self.model.kv_memory().map(Size),
            lora_memory: self.model.lora_memory().map(Size),
            models: Some(self.models.clone()).filter(|models| !models.is_empty()),
            loras: Some(self.model.lora.clone()).filter(|loras| !loras.is_empty()),
            ..Given::default()
        };
        let file = self.config.as_deref().map(Given::read).transpose()?.unwrap_or_default();
        Given::merge(of_model.or(self.settings.0.clone()).or(given), file)
    }

    /// Returns the function that reads keys and adapters again.
    fn reload(&self) -> Reload {
        let loras = Some(self.model.lora.clone()).filter(|loras| !loras.is_empty());
        let (config, given) = (self.config.clone(), Given { loras, ..self.settings.0.clone() });
        Box::new(move || {
            let file = config.as_deref().map(Given::read).transpose()?.unwrap_or_default();
            let given = given.clone().or(file);
            let keys = given.api_key_file.map(|path| Keys::read(&path)).transpose()?.map(|file| file.keys);
            Ok(Reloaded { keys, loras: given.loras.unwrap_or_default() })
        })
    }

    /// Returns the models to serve.
    fn models(&self, settings: &ServeSettings, global: &Global) -> Result<Vec<Served>> {
        let places = Places::of(&non_empty_variable)?;
        let named = self.named(settings, &places, global)?;
        if named.len() > 1 && !settings.loras.is_empty() {
            return Err(Error::usage("found --lora with several models, expected one")
                .help("load adapters with POST /v1/load_lora_adapter and its field base_model_name"));
        }
        let options = self.model.options_to_serve(global, Speculation::Auto(None))?;
        let served = |named: Named| {
            let mut options =
                SessionOptions { name: Some(named.name.clone()), adapters: settings.loras.clone(), ..options.clone() };
            options.adapter_memory = Some(settings.lora_memory.0);
            options.engine.context = settings.ctx;
            options.engine.kv = settings.kv;
            options.engine.kv_memory = settings.kv_memory.map(|size| size.0);
            options.engine.host_kv_memory = Some(named.kv_memory);
            options.engine.prefill_chunk = settings.max_step_tokens as usize;
            Served {
                options,
                name: named.name,
                spec: named.spec,
                template: named.template.or_else(|| settings.chat_template.clone()).unwrap_or_default(),
                on_request: named.on_request,
                places: places.clone(),
                held: Mutex::default(),
            }
        };
        Ok(named.into_iter().map(served).collect())
    }

    /// Returns the names and places of the models to serve: those of the settings and of --models-dir, otherwise the
    /// one of the command line, otherwise the embedded one.
    fn named(&self, settings: &ServeSettings, places: &Places, global: &Global) -> Result<Vec<Named>> {
        let mut named: Vec<Named> = Vec::new();
        for ModelSource { name, path, chat_template } in settings.models.clone() {
            let name = name.unwrap_or_else(|| name_of(&path));
            named.push(Named { name, spec: Some(path), template: chat_template, ..Named::default() });
        }
        if named.is_empty() && self.model.is_named()? {
            let spec = self.model.named()?;
            named.push(Named { name: name_of(&spec), spec: Some(spec), ..Named::default() });
        }
        if named.is_empty() && settings.models_dir.is_none() {
            global.note("note: no model named; serving the embedded one, which tells stories");
            let name = embedded::NAME.rsplit(':').next().unwrap_or_default().into();
            named.push(Named { name, ..Named::default() });
        }
        let free = memory_left().unwrap_or(0);
        let at_start = named.len().max(1) as u64;
        named.iter_mut().for_each(|model| model.kv_memory = (free / 2 / at_start).max(LEAST_KV));
        if let Some(dir) = &settings.models_dir {
            for Found { name, path } in models_dir::scan(dir, places, |line| global.note(format!("note: {line}")))? {
                if named.iter().any(|model| model.name == name) {
                    return Err(Error::usage(format!("model `{name}`: found the name twice, expected it once")).at(dir));
                }
                // Several of them shall fit into memory at the same time.
                let kv_memory = (free / ON_REQUEST_SHARE).max(LEAST_KV);
                named.push(Named { name, spec: Some(path), template: None, on_request: true, kv_memory });
            }
        }
        Ok(named)
    }
}

/// Name and place of a model to serve.
#[derive(Debug, Default)]
struct Named {
    name: String,
    /// Path or name of the model; `None` = the embedded one.
    spec: Option<PathBuf>,
    template: Option<TemplateChoice>,
    /// Whether it is loaded when a request names it.
    on_request: bool,
    /// Default of --kv-memory in bytes.
    kv_memory: u64,
}

/// Returns the name by which requests refer to a model: the last part of its path, without the end of a GGUF file, or
/// the name of a model of the Hub.
fn name_of(spec: &Path) -> String {
    let full = spec.canonicalize().unwrap_or_else(|_| spec.to_path_buf());
    let text = |name: &OsStr| name.to_string_lossy().into_owned();
    let name = match full.extension().and_then(OsStr::to_str) {
        Some("json") => full.parent().and_then(Path::file_name).map(text),
        Some("gguf") => full.file_stem().map(text),
        _ => full.file_name().map(text),
    };
    name.unwrap_or_else(|| "model".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Args as _;

    fn given(arguments: &[&str]) -> std::result::Result<Given, clap::Error> {
        let command = SettingArgs::augment_args(Command::new("serve"));
        let matches = command.try_get_matches_from(std::iter::once("serve").chain(arguments.iter().copied()))?;
        SettingArgs::from_arg_matches(&matches).map(|settings| settings.0)
    }

    #[test]
    fn a_switch_that_is_on_by_default_can_be_turned_off() {
        for (arguments, expected) in [
            (vec!["--prefix-cache", "off"], Some(false)),
            (vec!["--prefix-cache=on", "--no-auth"], Some(true)),
            (vec!["--no-auth"], None),
        ] {
            let given = given(&arguments).unwrap();
            assert_eq!(given.prefix_cache, expected, "{arguments:?}");
        }
        assert!(given(&["--prefix-cache", "perhaps"]).is_err());
        assert!(given(&["--no-auth", "off"]).is_err(), "a switch that is off by default takes no value");
    }
}
