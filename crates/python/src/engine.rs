//! The engine.

use crate::errors::{of_parts, raise};
use crate::matrix::Matrix;
use crate::stream::NativeStream;
use crate::wait::{Owner, detached, waited};
use engine::{AdapterOptions, Engine, OpenOptions, Pooling, Request, RequestKind};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

/// An opened model.
#[pyclass(frozen, module = "iec._iec")]
pub struct NativeEngine {
    engine: RwLock<Option<Engine>>,
    owner: Owner,
}

impl NativeEngine {
    fn get(&self, py: Python<'_>) -> PyResult<Engine> {
        self.owner.check(py)?;
        let engine = self.engine.read().unwrap_or_else(PoisonError::into_inner).clone();
        engine.ok_or_else(|| of_parts(py, 5, "engine", "the engine is closed", Some("open the model again")))
    }
}

impl Drop for NativeEngine {
    /// In a forked process, the engine is not freed: its threads, for which that would wait, are not there.
    fn drop(&mut self) {
        if !self.owner.is_here() {
            std::mem::forget(self.engine.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

fn request(py: Python<'_>, is_chat: bool, json: &str) -> PyResult<Request> {
    let kind = if is_chat { RequestKind::Chat } else { RequestKind::Completion };
    Request::from_json(kind, json).map_err(|e| raise(py, &e))
}

fn json(py: Python<'_>, value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(|e| of_parts(py, 5, "engine", &e.to_string(), None))
}

#[pymethods]
impl NativeEngine {
    /// Opens a model; without a path, the embedded one.
    #[new]
    fn new(py: Python<'_>, path: Option<PathBuf>, options: &str, program: Option<PathBuf>) -> PyResult<NativeEngine> {
        let options = OpenOptions::from_json(options).and_then(|options| {
            let mut options = options.with_caches(&|name| std::env::var_os(name))?;
            options.program = options.program.take().or(program);
            Ok(options)
        });
        let options = options.map_err(|e| raise(py, &e))?;
        let engine = crate::convert::watched(py, None, move || match path {
            Some(path) => Engine::open(path, &options),
            None => Engine::open_embedded(&options),
        })?;
        Ok(NativeEngine { engine: RwLock::new(Some(engine)), owner: Owner::this() })
    }

    /// Finishes all requests, at the longest for `seconds`, and frees the model.
    fn close(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        if !self.owner.is_here() {
            return Ok(());
        }
        let engine = self.engine.write().unwrap_or_else(PoisonError::into_inner).take();
        let time = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        engine.map_or(Ok(()), |engine| waited(py, move || engine.close(time)))
    }

    /// Begins to answer a request.
    fn stream(&self, py: Python<'_>, is_chat: bool, json: &str) -> PyResult<NativeStream> {
        let (engine, request) = (self.get(py)?, request(py, is_chat, json)?);
        waited(py, move || engine.stream(&request)).map(NativeStream::new)
    }

    /// Encodes a text.
    fn tokenize(&self, py: Python<'_>, text: String, special: bool) -> PyResult<Vec<u32>> {
        let engine = self.get(py)?;
        waited(py, move || engine.tokenize(&text, special))
    }

    /// Decodes token ids.
    fn detokenize(&self, py: Python<'_>, ids: Vec<u32>, skip_special: bool) -> PyResult<String> {
        let engine = self.get(py)?;
        waited(py, move || engine.detokenize(&ids, skip_special))
    }

    /// Returns the token ids of the prompt that a request has.
    fn prompt_ids(&self, py: Python<'_>, is_chat: bool, json: &str) -> PyResult<Vec<u32>> {
        let (engine, request) = (self.get(py)?, request(py, is_chat, json)?);
        waited(py, move || engine.prompt_ids(&request))
    }

    /// Computes the logits behind each token.
    fn logits(&self, py: Python<'_>, ids: Vec<u32>) -> PyResult<Matrix> {
        let engine = self.get(py)?;
        waited(py, move || engine.logits(&ids)).map(Matrix::of)
    }

    /// Computes the output of the final norm for each token.
    fn hidden_states(&self, py: Python<'_>, ids: Vec<u32>) -> PyResult<Matrix> {
        let engine = self.get(py)?;
        waited(py, move || engine.hidden_states(&ids)).map(Matrix::of)
    }

    /// Computes the vector of a text.
    fn embed(&self, py: Python<'_>, text: String, pooling: &str) -> PyResult<Matrix> {
        let engine = self.get(py)?;
        let pooling: Pooling = pooling.parse().map_err(|e| raise(py, &e))?;
        waited(py, move || engine.embed(&text, pooling)).map(Matrix::of_vector)
    }

    /// Loads an adapter.
    fn load_adapter(&self, py: Python<'_>, name: String, path: PathBuf, scale: f32) -> PyResult<()> {
        let (engine, mut adapter) = (self.get(py)?, AdapterOptions::new(name, path));
        adapter.scale = scale;
        waited(py, move || engine.load_adapter(&adapter))
    }

    /// Removes an adapter.
    fn unload_adapter(&self, py: Python<'_>, name: String) -> PyResult<()> {
        let engine = self.get(py)?;
        waited(py, move || engine.unload_adapter(&name))
    }

    /// Returns the names of adapters.
    fn adapters(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let engine = self.get(py)?;
        waited(py, move || engine.adapters())
    }

    /// Returns the counters as JSON.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        json(py, &self.get(py)?.metrics())
    }

    /// Returns the counters in the text format of Prometheus.
    fn prometheus(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.get(py)?.prometheus())
    }

    /// Describes the model as JSON.
    fn describe(&self, py: Python<'_>) -> PyResult<String> {
        let engine = self.get(py)?;
        let description = detached(py, || engine.description())?;
        json(py, &description)
    }
}
