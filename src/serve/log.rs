//! Log of requests: one line when a request ends, without its text and without keys. Traces are made from the same
//! values.

use super::app::{App, Target};
use super::caller::Caller;
use super::config::LogFormat;
use crate::api::answer::Usage;
use crate::api::error::ApiError;
use crate::host::reply::Done;
use axum::http::HeaderMap;
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;

/// Line of the log about a request. It is written when this value is dropped.
#[derive(Default)]
pub struct Record {
    /// `None` once the record was handed on.
    app: Option<Arc<App>>,
    id: String,
    key: String,
    endpoint: String,
    model: String,
    usage: Usage,
    begin: Option<Instant>,
    status: u16,
    finish: String,
    /// Trace of the request.
    #[cfg(feature = "otel")]
    span: Option<super::trace::Span>,
}

impl Record {
    /// Creates the record of a request to an endpoint, which is the path of a URL. Its headers may name a trace.
    #[cfg_attr(not(feature = "otel"), expect(unused_variables, reason = "only traces read headers"))]
    pub fn new(app: &Arc<App>, caller: &Caller, endpoint: &str, headers: &HeaderMap) -> Record {
        let mut record = Record::default();
        record.app = Some(app.clone());
        record.id.clone_from(&caller.id);
        record.key.clone_from(&caller.key().0.name);
        record.endpoint = endpoint.into();
        let begin = Instant::now();
        record.begin = Some(begin);
        #[cfg(feature = "otel")]
        {
            record.span = app.tracer.as_ref().and_then(|tracer| tracer.begin(headers, begin));
        }
        // The status of a request whose client left, by the convention of nginx.
        (record.status, record.finish) = (499, "disconnected".into());
        record
    }

    /// Sets the model.
    pub fn model(&mut self, target: &Target) {
        self.model.clone_from(&target.shown);
    }

    /// Sets the number of tokens of the prompts.
    pub fn prompt(&mut self, tokens: usize) {
        self.usage.prompt = tokens;
    }

    /// Records the end of a choice.
    #[cfg_attr(
        not(feature = "otel"),
        expect(unused_variables, clippy::unused_self, reason = "only traces have choices")
    )]
    pub fn choice(&mut self, done: &Done) {
        #[cfg(feature = "otel")]
        if let Some(span) = &mut self.span {
            span.choice(done);
        }
    }

    /// Records an error.
    pub fn fail(&mut self, error: &ApiError) {
        self.status = error.status.as_u16();
        self.finish = error.code.unwrap_or("error").into();
    }

    /// Records the end of an answer, and the reason why its first text ended.
    pub fn finish(&mut self, usage: Usage, finish: &str) {
        (self.status, self.usage) = (200, usage);
        self.finish = finish.into();
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let Some(app) = self.app.take() else { return };
        let seconds = self.begin.map_or(0.0, |begin| begin.elapsed().as_secs_f64());
        let Usage { prompt, generated, cached } = self.usage;
        let line = match app.settings.log {
            LogFormat::Json => json!({
                "event": "request",
                "id": self.id,
                "key": self.key,
                "endpoint": self.endpoint,
                "model": self.model,
                "status": self.status,
                "finish": self.finish,
                "prompt_tokens": prompt,
                "cached_tokens": cached,
                "completion_tokens": generated,
                "seconds": (seconds * 1e4).round() / 1e4,
            })
            .to_string(),
            LogFormat::Text => format!(
                "{} {} {} {} {} prompt {prompt} cached {cached} generated {generated} {seconds:.3} s {}",
                self.id, self.key, self.endpoint, self.model, self.status, self.finish
            ),
        };
        // A name from outside may hold control characters.
        (app.log)(&line.replace(char::is_control, "?"));
        #[cfg(feature = "otel")]
        if let (Some(tracer), Some(span)) = (&app.tracer, self.span.take()) {
            tracer.end(super::trace::Finished {
                span,
                end: Instant::now(),
                id: std::mem::take(&mut self.id),
                key: std::mem::take(&mut self.key),
                endpoint: std::mem::take(&mut self.endpoint),
                model: std::mem::take(&mut self.model),
                status: self.status,
                finish: std::mem::take(&mut self.finish),
                usage: self.usage,
            });
        }
    }
}
