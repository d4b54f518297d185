//! Requests to an [`Engine`](super::Engine).

use crate::error::{Error, Result};
use crate::generate::text::Message;
use serde_json::{Map, Value, json};

/// Kind of a request, which decides about its fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// Continues texts: the fields of `/v1/completions`.
    Completion,
    /// Answers a conversation: the fields of `/v1/chat/completions`.
    Chat,
}

/// A request for text. Its fields have the names and meanings of the server's API (`iec serve`), which are those of
/// OpenAI and vLLM; [`Request::field`] sets any of them. A field that is unknown, or has a wrong value, is an error of
/// the call that takes the request.
///
/// ```
/// use iec::Request;
/// let story = Request::text("Once upon a time").max_tokens(32).temperature(0.8).seed(7);
/// let answer = Request::chat([("system", "Be brief."), ("user", "Why is the sky blue?")]).field("top_k", 40);
/// ```
#[derive(Debug, Clone)]
pub struct Request {
    kind: RequestKind,
    fields: Map<String, Value>,
}

impl Request {
    /// Creates a request to continue a text.
    pub fn text(prompt: impl Into<String>) -> Request {
        Request::with(RequestKind::Completion, "prompt", prompt.into().into())
    }

    /// Creates a request to continue several texts, each on its own. Choices of the first prompt come first.
    pub fn texts<T: Into<String>>(prompts: impl IntoIterator<Item = T>) -> Request {
        let prompts: Vec<String> = prompts.into_iter().map(Into::into).collect();
        Request::with(RequestKind::Completion, "prompt", json!(prompts))
    }

    /// Creates a request to continue tokens.
    pub fn ids(prompt: &[u32]) -> Request {
        Request::with(RequestKind::Completion, "prompt", json!(prompt))
    }

    /// Creates a request to answer a conversation of pairs of a role and a text. The roles are `system`, `user` and
    /// `assistant`.
    pub fn chat<R: Into<String>, T: Into<String>>(messages: impl IntoIterator<Item = (R, T)>) -> Request {
        let message = |(role, text): (R, T)| json!({"role": role.into(), "content": text.into()});
        Request::with(RequestKind::Chat, "messages", messages.into_iter().map(message).collect())
    }

    /// Creates a request to answer a conversation with calls of tools, their results or reasoning.
    pub fn messages(messages: &[Message]) -> Request {
        Request::with(RequestKind::Chat, "messages", json!(messages))
    }

    /// Reads a request from a JSON object, as the server's endpoints take it.
    ///
    /// # Errors
    /// The text is no JSON object.
    pub fn from_json(kind: RequestKind, text: &str) -> Result<Request> {
        let fields =
            serde_json::from_str(text).map_err(|e| Error::usage(format!("the request is no JSON object: {e}")))?;
        Ok(Request { kind, fields })
    }

    fn with(kind: RequestKind, name: &str, value: Value) -> Request {
        Request { kind, fields: Map::from_iter([(name.to_string(), value)]) }
    }

    /// Sets a field of the server's API.
    pub fn field(mut self, name: &str, value: impl Into<Value>) -> Request {
        self.fields.insert(name.into(), value.into());
        self
    }

    /// Sets the largest number of tokens of an answer: by default 16 for texts, and what the context holds for
    /// conversations.
    pub fn max_tokens(self, tokens: usize) -> Request {
        self.field("max_tokens", tokens)
    }

    /// Sets the temperature; 0 selects the most likely token of each step.
    pub fn temperature(self, temperature: f64) -> Request {
        self.field("temperature", temperature)
    }

    /// Limits sampling to the most likely tokens that together have this probability.
    pub fn top_p(self, top_p: f64) -> Request {
        self.field("top_p", top_p)
    }

    /// Limits sampling to this number of most likely tokens.
    pub fn top_k(self, top_k: usize) -> Request {
        self.field("top_k", top_k)
    }

    /// Sets the seed. The same engine, seed and request give the same bits.
    pub fn seed(self, seed: u64) -> Request {
        self.field("seed", seed)
    }

    /// Sets the texts that end an answer.
    pub fn stop<T: Into<String>>(self, stop: impl IntoIterator<Item = T>) -> Request {
        self.field("stop", stop.into_iter().map(Into::into).collect::<Vec<String>>())
    }

    /// Sets the number of answers to each prompt.
    pub fn n(self, n: usize) -> Request {
        self.field("n", n)
    }

    /// Asks for the log-probability of each token, and for those of this number of most likely tokens at its place.
    pub fn logprobs(self, top: usize) -> Request {
        match self.kind {
            RequestKind::Completion => self.field("logprobs", top),
            RequestKind::Chat => self.field("logprobs", true).field("top_logprobs", top),
        }
    }

    /// Asks for an answer that is JSON and follows a schema.
    pub fn json_schema(self, schema: Value) -> Request {
        self.field("structured_outputs", json!({"json": schema}))
    }

    /// Applies an adapter that was loaded, with a scale.
    pub fn adapter(mut self, name: &str, scale: f32) -> Request {
        let adapter = json!({"name": name, "scale": scale});
        match self.fields.get_mut("adapters").and_then(Value::as_array_mut) {
            Some(adapters) => adapters.push(adapter),
            None => _ = self.fields.insert("adapters".into(), json!([adapter])),
        }
        self
    }

    /// Returns the kind.
    pub fn kind(&self) -> RequestKind {
        self.kind
    }

    /// Returns true unless the field `stream` is false.
    pub(super) fn is_stream(&self) -> bool {
        self.fields.get("stream") != Some(&Value::Bool(false))
    }

    /// Returns the JSON object.
    pub fn to_json(&self) -> String {
        Value::Object(self.fields.clone()).to_string()
    }
}
