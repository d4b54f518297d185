//! Adapters of the server: those of its settings, and those that clients load.

use super::app::{Adapter, App};
use super::state::set_aside;
use crate::api::error::{ApiError, ApiResult, ApiStatus};
use crate::convert::adapter;
use crate::error::{Cause, Context, Error, Result};
use crate::files;
use crate::host::model::Model;
use crate::output::{Inputs, Rules, Target as OutputTarget};
use crate::resources::is_exhausted;
use crate::session::Encoder;
use crate::session::adapters::{AdapterSource, check_name};
use crate::strict_json;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Name of the file in `--state-dir` that lists the adapters which clients loaded.
const STATE_NAME: &str = "adapters.json";
/// Value of `format` in that file.
const FORMAT: &str = "iec_adapters_v1";
/// Largest accepted file in bytes.
const FILE_LIMIT: u64 = 4 << 20;
/// Time to wait for room for an adapter.
const ROOM_TIME: Duration = Duration::from_secs(10);

/// Loads an adapter for a client.
///
/// # Errors
/// Loading is off, the name or the path is not allowed, there are too many adapters, or the files are not valid.
pub async fn load(app: &App, model: &Arc<Model>, name: &str, path: &str, in_place: bool) -> ApiResult<()> {
    // Two requests at the same time must not both find a name or the last place free.
    let _one = app.adapter_loads.lock().await;
    let (root, dir) = allowed_dir(app, path)?;
    check_name(name).map_err(|e| ApiError::field("lora_name", e))?;
    let source = AdapterSource { name: name.into(), dir, scale: 1.0, root: Some(root) };
    if app.models.iter().any(|model| model.name == name) {
        return Err(ApiError::field("lora_name", "a model has this name"));
    }
    let known = app.adapters().get(name).cloned();
    if known.is_some() && !in_place {
        let message = format!("there is an adapter `{name}` already; `load_inplace` replaces it");
        return Err(ApiError { status: ApiStatus::CONFLICT, ..ApiError::field("lora_name", message) });
    }
    if known.is_none() && app.adapters().len() >= app.settings.max_adapters {
        let message = format!("there are {} adapters already (--max-adapters)", app.settings.max_adapters);
        return Err(ApiError { status: ApiStatus::CONFLICT, ..ApiError::field("lora_name", message) });
    }
    if let Some(adapter) = &known
        && adapter.model != model.number
    {
        return Err(ApiError::field("lora_name", "an adapter of another model has this name"));
    }
    let (rank, replaces, added) = (app.settings.max_lora_rank, known.is_some(), source.clone());
    let done = model.encode(move |encoder| register(encoder, &added, rank, replaces)).await;
    done.unwrap_or_else(|| Err(app.engine_ended()))?;
    app.adapters().insert(name.into(), Adapter { model: model.number, source, created: now() });
    app.keep_adapters(model);
    remember(app);
    Ok(())
}

/// Unloads an adapter.
///
/// # Errors
/// There is none of this name, or requests use it.
pub async fn unload(app: &App, name: &str) -> ApiResult<()> {
    let unknown = || unknown(name);
    let number = app.adapters().get(name).ok_or_else(unknown)?.model;
    let model = app.models.get(number).ok_or_else(unknown)?;
    let _lease = app.lease(model).await?;
    let removed = name.to_string();
    let remove = move |encoder: &Encoder<'_>| match encoder.adapters().has(&removed) {
        true => encoder.adapters().remove(&removed),
        false => Ok(()),
    };
    let done = model.encode(remove).await;
    let done = done.unwrap_or_else(|| Err(Error::engine("the engine ended before the request")));
    done.map_err(|e| ApiError { status: ApiStatus::CONFLICT, ..ApiError::of_field("lora_name", &e) })?;
    app.adapters().remove(name);
    app.keep_adapters(model);
    remember(app);
    Ok(())
}

/// Builds the error for an adapter that does not exist, or that the key of the request may not use.
pub fn unknown(name: &str) -> ApiError {
    let error = ApiError::field("lora_name", format!("there is no adapter `{name}`"));
    ApiError { status: ApiStatus::NOT_FOUND, ..error }
}

/// Checks an adapter, adds it to those of a model, and reads its factors into memory.
///
/// # Errors
/// Its files are not valid, its rank is too large, or there is no room for it.
pub fn register(encoder: &Encoder<'_>, source: &AdapterSource, rank: usize, replaces: bool) -> ApiResult<()> {
    source.check_links().map_err(|e| of_path(&e))?;
    let found = adapter::describe(&source.dir).map_err(|e| of_path(&e))?.rank;
    if found > rank {
        let message = format!("the adapter has rank {found}, expected at most {rank} (--max-lora-rank)");
        return Err(ApiError::field("lora_path", message));
    }
    let adapters = encoder.adapters();
    // A model that was opened again may have lost an adapter whose files were gone.
    let replaces = replaces && adapters.has(&source.name);
    if !replaces {
        adapters.add(source.clone()).map_err(|e| of_path(&e))?;
    }
    let begin = Instant::now();
    loop {
        let loaded = match replaces {
            true => adapters.replace(source.clone()),
            false => adapters.set(&[(source.name.clone(), 1.0)]).map(|set| set.is_some()),
        };
        match loaded {
            Ok(true) => return Ok(()),
            Ok(false) if begin.elapsed() < ROOM_TIME => std::thread::sleep(Duration::from_millis(20)),
            failed => {
                if !replaces {
                    let _ = adapters.remove(&source.name);
                }
                return Err(refused(failed.err()));
            }
        }
    }
}

/// Converts an error about the files of an adapter. The client named them, so a missing file is a wrong request.
fn of_path(error: &Error) -> ApiError {
    let of_field = ApiError::of_field("lora_path", error);
    match error.cause() {
        Cause::Io(e) if !is_exhausted(e) => ApiError { status: ApiStatus::BAD_REQUEST, ..of_field },
        _ => of_field,
    }
}

/// Builds the error for an adapter that was not loaded; without a reason, for want of room.
fn refused(why: Option<Error>) -> ApiError {
    let no_room = || Cause::OutOfMemory("the memory for adapters (--lora-memory) is in use by requests".into());
    let error = why.unwrap_or_else(|| Error::new(no_room()));
    match error.cause() {
        Cause::Usage(found) if found.ends_with("is in use") => {
            ApiError { status: ApiStatus::CONFLICT, ..ApiError::of_field("lora_name", &error) }
        }
        _ => of_path(&error),
    }
}

/// Returns the directory for adapters, and the directory that a client names if it lies in there.
fn allowed_dir(app: &App, path: &str) -> ApiResult<(PathBuf, PathBuf)> {
    let Some(root) = &app.settings.adapter_dir else {
        let message = "this server loads no adapters while it runs; start it with --adapter-dir DIR";
        return Err(ApiError::new(ApiStatus::FORBIDDEN, message).code("adapters_off"));
    };
    let outside = || ApiError::field("lora_path", "expected a directory within --adapter-dir");
    let root = root.canonicalize().map_err(|_| outside())?;
    // A relative path begins in the directory for adapters. Links are followed before the comparison.
    let dir = root.join(path).canonicalize().map_err(|_| outside())?;
    match dir.starts_with(&root) && dir != root && files::is_dir(&dir).unwrap_or(false) {
        true => Ok((root, dir)),
        false => Err(outside()),
    }
}

/// Writes the list of adapters that were loaded from `--adapter-dir`, for the next start.
fn remember(app: &App) {
    if let Some(state) = &app.settings.state_dir
        && let Err(e) = save(app, &state.join(STATE_NAME))
    {
        (app.log)(&format!("the list of adapters was not saved: {e}"));
    }
}

fn save(app: &App, path: &Path) -> Result<()> {
    let listed: Vec<Value> = (app.adapters().iter())
        .filter(|(_, adapter)| !app.listed().contains(&adapter.source))
        .map(|(name, adapter)| {
            let model = &app.models[adapter.model].name;
            json!({"name": name, "dir": adapter.source.dir, "model": model})
        })
        .collect();
    let inputs = Inputs::default();
    let target = OutputTarget::check(path, Rules { inputs: &inputs, overwrite: true, stdout: false })?;
    let mut out = target.create_private()?;
    let text = json!({"format": FORMAT, "adapters": listed}).to_string();
    out.write_all(text.as_bytes()).at(path)?;
    out.commit()
}

/// Adapter of the list of an earlier run: name, path and name of the model.
type Remembered = (String, String, String);

/// Reads the list of adapters that clients loaded before.
fn remembered(path: &Path) -> Result<Vec<Remembered>> {
    if !files::exists(path)? {
        return Ok(Vec::new());
    }
    let file = strict_json::parse(&files::read_limited(path, FILE_LIMIT)?).at(path)?;
    if file["format"].as_str() != Some(FORMAT) {
        return Err(Error::corrupt(format!("found another format than {FORMAT}"))
            .at(path)
            .help("remove the file; clients then load their adapters again"));
    }
    let text = |entry: &Value, name: &str| entry[name].as_str().map(String::from);
    let entry = |entry: &Value| Some((text(entry, "name")?, text(entry, "dir")?, text(entry, "model")?));
    Ok(file["adapters"].as_array().into_iter().flatten().filter_map(entry).collect())
}

/// Lists the adapters of the settings, which the engine loads at its start, and loads those of an earlier run.
pub async fn restore(app: &Arc<App>) {
    let Some(state) = &app.settings.state_dir else { return };
    match remembered(&state.join(STATE_NAME)) {
        Err(e) => set_aside(&state.join(STATE_NAME), &e, "clients load their adapters again", &*app.log),
        Ok(list) => {
            for (name, dir, base) in list {
                let Some(model) = app.models.iter().find(|model| model.name == base) else { continue };
                if app.adapters().contains_key(&name) {
                    continue;
                }
                let listed = match model.is_on_request() {
                    true => list_remembered(app, model, name.clone(), &dir),
                    false => load(app, model, &name, &dir, false).await,
                };
                if let Err(e) = listed {
                    (app.log)(&format!("adapter `{name}` of an earlier run was not loaded: {}", e.message));
                }
            }
        }
    }
}

/// Lists an adapter of an earlier run, which is loaded together with its model.
///
/// # Errors
/// Its directory does not lie in that for adapters any more.
fn list_remembered(app: &App, model: &Model, name: String, path: &str) -> ApiResult<()> {
    let (root, dir) = allowed_dir(app, path)?;
    let source = AdapterSource { name: name.clone(), dir, scale: 1.0, root: Some(root) };
    app.adapters().insert(name, Adapter { model: model.number, source, created: now() });
    app.keep_adapters(model);
    Ok(())
}

/// Replaces the adapters of the settings: loads new ones, then unloads those that are not listed any more and that no
/// request uses.
///
/// # Errors
/// A new adapter cannot be loaded; no adapter has changed then.
pub async fn replace(app: &App, loras: Vec<AdapterSource>) -> std::result::Result<(), String> {
    let _one = app.adapter_loads.lock().await;
    let model = &app.models[0];
    let is_same = loras == *app.listed();
    let _lease = match is_same {
        true => None,
        false => Some(app.lease(model).await.map_err(|e| e.message)?),
    };
    let known = |source: &AdapterSource| app.adapters().values().any(|adapter| adapter.source == *source);
    let new: Vec<AdapterSource> = loras.iter().filter(|source| !known(source)).cloned().collect();
    for (at, source) in new.iter().enumerate() {
        let name = source.name.clone();
        let taken = app.adapters().contains_key(&name) || app.models.iter().any(|model| model.name == name);
        let (rank, added) = (app.settings.max_lora_rank, source.clone());
        let done = match taken {
            true => Err(ApiError::invalid("the name is in use; give the changed adapter another one")),
            false => {
                let done = model.encode(move |encoder| register(encoder, &added, rank, false)).await;
                done.unwrap_or_else(|| Err(app.engine_ended()))
            }
        };
        if let Err(e) = done {
            for undone in new[..at].iter().map(|source| source.name.clone()) {
                let _ = model.encode(move |encoder| encoder.adapters().remove(&undone)).await;
            }
            return Err(format!("adapter `{name}`: {}", e.message));
        }
    }
    let former = app.set_listed(loras.clone());
    for source in former.into_iter().filter(|source| !loras.contains(source)) {
        if let Err(e) = unload(app, &source.name).await {
            (app.log)(&format!("adapter `{}` was not unloaded: {}", source.name, e.message));
        }
    }
    for source in new {
        let adapter = Adapter { model: model.number, source: source.clone(), created: now() };
        app.adapters().insert(source.name, adapter);
    }
    app.keep_adapters(model);
    Ok(())
}

/// Lists the adapters of the settings, with which the model is opened.
///
/// # Errors
/// There are too many, or the rank of one is too large.
pub fn list_settings(app: &App) -> Result<()> {
    let (found, most) = (app.settings.loras.len(), app.settings.max_adapters);
    if found > most {
        return Err(
            Error::usage(format!("found {found} adapters, expected at most {most}")).help("raise --max-adapters")
        );
    }
    for source in &app.settings.loras {
        let (rank, most) = (adapter::describe(&source.dir)?.rank, app.settings.max_lora_rank);
        if rank > most {
            let found = format!("found an adapter of rank {rank}, expected at most {most}");
            return Err(Error::usage(found).at(&source.dir).help("raise --max-lora-rank"));
        }
        let adapter = Adapter { model: 0, source: source.clone(), created: now() };
        app.adapters().insert(source.name.clone(), adapter);
    }
    Ok(())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
