//! Rights of keys: the one place that decides for all endpoints which models and adapters a request may name.
//!
//! A key without `models` may name everything. A key with `models` may name exactly what it lists, in each field that
//! names a model or an adapter (`model`, `adapters`, `base_model_name`, `lora_name`). Everything else does not exist
//! for it: lists do not show it, and the error is that for a name that nothing has.
//!
//! * The entry of a model does not include its adapters: each needs an entry of its own.
//! * The entry of an adapter does not include its model. A key without the model cannot get the answers of the model by
//!   subtracting the adapter: it may add adapters in the field `adapters`, with scales that are not negative.
//! * A request without a name gets the only model that the key may use. If it may use none, it gets the only adapter.

use super::app::{Adapter, App, Target};
use super::keys::Key;
use crate::api::error::{ApiError, ApiResult, ApiStatus};
use crate::host::lease::Lease;
use crate::host::model::Model;
use std::sync::Arc;

/// A model or an adapter that a key may use.
#[derive(Debug, Clone)]
pub struct Usable {
    /// Name by which requests refer to it.
    pub name: String,
    /// The model; that which it changes for an adapter.
    pub model: Arc<Model>,
    /// The adapter; `None` for a model itself.
    pub adapter: Option<Adapter>,
}

impl Usable {
    /// Returns the name of the model of an adapter, if the key may use it, too.
    pub fn parent(&self, key: &Key) -> Option<&str> {
        self.adapter.as_ref().map(|_| self.model.name.as_str()).filter(|name| key.may_use_model(name))
    }
}

impl App {
    /// Returns all that a key may use: models, each followed by its adapters.
    pub fn usable(&self, key: &Key) -> Vec<Usable> {
        let adapters = self.adapters().clone();
        let mut all = Vec::new();
        for model in &self.models {
            all.push(Usable { name: model.name.clone(), model: model.clone(), adapter: None });
            let own = adapters.iter().filter(|(_, adapter)| adapter.model == model.number);
            all.extend(own.map(|(name, adapter)| Usable {
                name: name.clone(),
                model: model.clone(),
                adapter: Some(adapter.clone()),
            }));
        }
        all.retain(|usable| key.may_use_model(&usable.name));
        all
    }

    /// Finds a model or an adapter that a key may use.
    pub fn usable_as(&self, key: &Key, name: &str) -> Option<Usable> {
        if !key.may_use_model(name) {
            return None;
        }
        if let Some(model) = self.models.iter().find(|model| model.name == name) {
            return Some(Usable { name: name.into(), model: model.clone(), adapter: None });
        }
        let adapter = self.adapters().get(name)?.clone();
        Some(Usable { name: name.into(), model: self.models.get(adapter.model)?.clone(), adapter: Some(adapter) })
    }

    /// Finds what a request names in its field `model`, with the adapters of its field `adapters`.
    ///
    /// # Errors
    /// There is no such model or adapter, the key may not use it, or the model does not become ready.
    pub async fn target(&self, key: &Key, name: Option<&str>, adapters: &[(String, f32)]) -> ApiResult<Target> {
        let given = name.filter(|name| !name.is_empty());
        // Clients of ollama add the tag to names without one.
        let tagged = |name: &str| self.usable_as(key, name.strip_suffix(":latest")?);
        let Usable { name, model, adapter } = match given {
            Some(name) => {
                let found = self.usable_as(key, name).or_else(|| tagged(name));
                found.ok_or_else(|| unknown_model("model", name))?
            }
            None => self.only(key, "model")?,
        };
        for (name, scale) in adapters {
            self.check_adapter(key, &model, name, *scale)?;
        }
        let (facts, lease) = self.lease(&model).await?;
        let own = adapter.map(|_| (name.clone(), 1.0));
        let shown = given.map_or(name, String::from);
        let adapters = own.into_iter().chain(adapters.iter().cloned()).collect();
        Ok(Target { model, facts, adapters, shown, lease })
    }

    /// Finds the model for which a request loads the adapter `adapter`.
    ///
    /// # Errors
    /// There is no such model, the key may not use it or the name of the adapter, or the model is not ready.
    pub async fn adapter_target(&self, key: &Key, base: Option<&str>, adapter: &str) -> ApiResult<(Arc<Model>, Lease)> {
        let field = "base_model_name";
        let usable = match base.filter(|base| !base.is_empty()) {
            Some(base) => self.usable_as(key, base).ok_or_else(|| unknown_model(field, base))?,
            None => self.only(key, field)?,
        };
        if usable.adapter.is_some() {
            return Err(ApiError::field(field, "found an adapter, expected a model; GET /v1/models lists them"));
        }
        if !key.may_use_model(adapter) {
            let message = format!("the API key may not use the name `{adapter}`; add it to `models` of the key");
            let error = ApiError::field("lora_name", message);
            return Err(ApiError { status: ApiStatus::FORBIDDEN, ..error }.code("insufficient_scope"));
        }
        let (_, lease) = self.lease(&usable.model).await?;
        Ok((usable.model, lease))
    }

    /// Returns what a request without a name gets; `field` is the field that would have had it.
    fn only(&self, key: &Key, field: &str) -> ApiResult<Usable> {
        let (mut models, mut adapters): (Vec<_>, Vec<_>) =
            self.usable(key).into_iter().partition(|usable| usable.adapter.is_none());
        let found = if models.is_empty() { &mut adapters } else { &mut models };
        match found.len() {
            0 => Err(unknown(field, "there is no model that the API key may use")),
            1 => Ok(found.swap_remove(0)),
            _ => Err(ApiError::field(field, "found none, expected the name of a model; GET /v1/models lists them")),
        }
    }

    fn check_adapter(&self, key: &Key, model: &Arc<Model>, name: &str, scale: f32) -> ApiResult<()> {
        let usable = self.usable_as(key, name).filter(|usable| usable.adapter.is_some());
        if usable.is_none_or(|usable| usable.model.number != model.number) {
            let message = format!("there is no adapter `{name}` of this model; GET /v1/models lists them");
            return Err(ApiError::field("adapters", message));
        }
        // A negative scale would take away the adapter that the request names as its model.
        match scale >= 0.0 || key.may_use_model(&model.name) {
            true => Ok(()),
            false => Err(ApiError::field("adapters", "the API key may use scales of at least 0 only")),
        }
    }
}

fn unknown_model(field: &str, name: &str) -> ApiError {
    unknown(field, &format!("there is no model `{name}`; GET /v1/models lists them"))
}

fn unknown(field: &str, message: &str) -> ApiError {
    ApiError { status: ApiStatus::NOT_FOUND, ..ApiError::field(field, message) }.code("model_not_found")
}
