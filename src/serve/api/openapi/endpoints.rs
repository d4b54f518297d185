//! Endpoints of the server, one row for each.

/// An endpoint.
#[derive(Debug)]
pub struct Endpoint {
    /// Path, with the names of variable parts in braces.
    pub path: &'static str,
    /// Method in lower case.
    pub method: &'static str,
    /// Group of the endpoint.
    pub tag: &'static str,
    /// Summary of what the endpoint does.
    pub summary: &'static str,
    /// Scope that an API key needs; `None` = no key is needed.
    pub scope: Option<&'static str>,
    /// Schema of the body of requests.
    pub body: Option<&'static str>,
    /// Body of the answer.
    pub answer: Answer,
    /// Statuses of errors.
    pub errors: &'static [u16],
}

/// Body of an answer.
#[derive(Debug, Clone, Copy)]
pub enum Answer {
    /// No body. The status alone tells whether requests are served.
    Probe,
    /// No body.
    Empty,
    /// A JSON object of this schema.
    Json(&'static str),
    /// A text of this media type.
    Text(&'static str),
    /// A JSON object of the first schema, or a stream of objects of the second.
    Generated(&'static str, &'static str),
}

/// API that the objects of errors follow.
#[derive(Debug, Clone, Copy)]
pub enum Style {
    /// That of OpenAI.
    OpenAi,
    /// That of Anthropic.
    Anthropic,
}

impl Style {
    /// Returns the name of the schema of an error.
    pub fn schema(self) -> &'static str {
        match self {
            Style::OpenAi => "Error",
            Style::Anthropic => "AnthropicError",
        }
    }

    /// Returns the name of the response for a status.
    pub fn response(self, status: u16) -> String {
        format!("{}{status}", self.schema())
    }
}

impl Endpoint {
    /// Returns the name of the operation: method and path.
    pub fn id(&self) -> String {
        let words = self.path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        let words: Vec<&str> = std::iter::once(self.method).chain(words).collect();
        if words.len() == 1 { format!("{}_page", self.method) } else { words.join("_") }
    }

    /// Returns true if the endpoint generates text.
    pub fn generates(&self) -> bool {
        matches!(self.answer, Answer::Generated(..))
    }
}

/// Statuses of errors, with their meaning.
pub const ERRORS: &[(u16, &str)] = &[
    (400, "A field is wrong, which `param` names, or the body is not valid."),
    (401, "There is no valid API key."),
    (403, "The key, the name of the host or the origin may not do this."),
    (404, "There is no such model or adapter."),
    (408, "The body did not come in time."),
    (409, "The adapter exists already or is in use."),
    (413, "The body is too long."),
    (429, "A limit of the key is reached, or the queue is full."),
    (500, "The engine failed."),
    (501, "Not implemented."),
    (503, "The model is loading, or the server is shutting down."),
    (504, "The deadline of the request passed."),
];

/// Errors of endpoints that generate text.
const GENERATE: &[u16] = &[400, 401, 403, 404, 408, 413, 429, 500, 503, 504];
/// Errors of other endpoints with a body that need a model.
const TOKENS: &[u16] = &[400, 401, 403, 404, 408, 413, 500, 503];
/// Errors of endpoints without a body.
const READ: &[u16] = &[401, 403];

const fn get(
    path: &'static str,
    scope: Option<&'static str>,
    answer: Answer,
    errors: &'static [u16],
    summary: &'static str,
) -> Endpoint {
    Endpoint { path, method: "get", tag: "server", summary, scope, body: None, answer, errors }
}

const fn post(
    path: &'static str,
    tag: &'static str,
    body: &'static str,
    answer: Answer,
    errors: &'static [u16],
    summary: &'static str,
) -> Endpoint {
    Endpoint { path, method: "post", tag, summary, scope: Some("infer"), body: Some(body), answer, errors }
}

/// All endpoints.
pub const ENDPOINTS: &[Endpoint] = &[
    post(
        "/v1/completions",
        "text",
        "CompletionRequest",
        Answer::Generated("Completion", "Completion"),
        GENERATE,
        "Continues texts or token ids.",
    ),
    post(
        "/v1/chat/completions",
        "text",
        "ChatRequest",
        Answer::Generated("ChatCompletion", "ChatCompletionChunk"),
        GENERATE,
        "Answers a conversation.",
    ),
    post(
        "/v1/responses",
        "text",
        "ResponsesRequest",
        Answer::Generated("Response", "ResponseEvent"),
        GENERATE,
        "Answers a conversation, in the Responses API of OpenAI without stored state.",
    ),
    post(
        "/v1/responses/input_tokens",
        "tokens",
        "ResponsesRequest",
        Answer::Json("InputTokens"),
        TOKENS,
        "Counts the tokens of a conversation, in the Responses API of OpenAI.",
    ),
    post(
        "/v1/messages",
        "text",
        "MessagesRequest",
        Answer::Generated("Message", "MessageEvent"),
        GENERATE,
        "Answers a conversation, in the API of Anthropic.",
    ),
    post(
        "/v1/messages/count_tokens",
        "tokens",
        "CountTokensRequest",
        Answer::Json("TokenCount"),
        TOKENS,
        "Counts the tokens of a conversation, in the API of Anthropic.",
    ),
    Endpoint {
        body: None,
        ..post("/v1/embeddings", "text", "", Answer::Empty, &[401, 403, 501], "Is not implemented: the answer is 501.")
    },
    post("/tokenize", "tokens", "TokenizeRequest", Answer::Json("Tokens"), TOKENS, "Encodes a text or a conversation."),
    post("/detokenize", "tokens", "DetokenizeRequest", Answer::Json("Text"), TOKENS, "Decodes tokens."),
    Endpoint {
        tag: "tokens",
        ..get(
            "/tokenizer_info",
            Some("infer"),
            Answer::Json("TokenizerInfo"),
            &[400, 401, 403, 404, 503],
            "Shows the configuration of the tokenizer, with the chat template.",
        )
    },
    get("/v1/models", Some("infer"), Answer::Json("Models"), READ, "Lists models and adapters."),
    get("/v1/models/{id}", Some("infer"), Answer::Json("Model"), &[401, 403, 404], "Shows a model or an adapter."),
    Endpoint {
        scope: Some("admin"),
        ..post(
            "/v1/load_lora_adapter",
            "adapters",
            "LoadAdapterRequest",
            Answer::Text("text/plain"),
            &[400, 401, 403, 404, 408, 409, 413, 500, 503],
            "Loads an adapter. The answer comes when requests can use it.",
        )
    },
    Endpoint {
        scope: Some("admin"),
        ..post(
            "/v1/unload_lora_adapter",
            "adapters",
            "UnloadAdapterRequest",
            Answer::Text("text/plain"),
            &[400, 401, 403, 404, 408, 409, 413, 500, 503],
            "Unloads an adapter that no request uses.",
        )
    },
    Endpoint {
        tag: "adapters",
        ..get("/v1/lora_adapters", Some("admin"), Answer::Json("Adapters"), READ, "Lists the adapters.")
    },
    get("/metrics", Some("metrics"), Answer::Text("text/plain"), READ, "Shows the metrics for Prometheus."),
    get("/load", Some("metrics"), Answer::Json("Load"), READ, "Tells how many requests are served."),
    get("/livez", None, Answer::Empty, &[503], "Tells whether the process is alive."),
    get("/health", None, Answer::Probe, &[], "Tells whether requests are served."),
    get("/readyz", None, Answer::Probe, &[], "Tells whether requests are served."),
    get("/version", None, Answer::Json("Version"), &[403], "Tells the version of the program."),
    get("/openapi.json", None, Answer::Json("Document"), &[403], "Shows this description."),
    get("/", None, Answer::Text("text/html"), &[403], "Shows a page to talk with the model."),
];
