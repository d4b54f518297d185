//! Table of the routes of the server. Each row has the paths of an endpoint, the permission that its requests need, the
//! API that its errors follow, its description for `/openapi.json`, and its handler. A request therefore reaches no
//! handler without the checks of its row.

use super::{adapters, check, generate, info, models, ollama, slots, tokens};
use crate::api::style::Style;
use crate::api::{anthropic, infill, job, ollama as ollama_api, responses};
use crate::serve::app::App;
use crate::serve::keys::Scope;
use crate::serve::openapi::{Access, AnswerBody, Endpoint};
use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{MethodFilter, MethodRouter, any, on};
use std::sync::Arc;

/// An endpoint with its handler.
pub struct Route {
    /// Description.
    pub endpoint: Endpoint,
    /// Further paths of the endpoint, as clients use them whose base address lacks `/v1`.
    pub aliases: &'static [&'static str],
    /// Builds the handler for the method of the endpoint.
    handler: fn(MethodFilter) -> MethodRouter<Arc<App>>,
}

/// Builds the routes of the server.
pub fn router(app: Arc<App>) -> Router {
    let checked = |handler: MethodRouter<Arc<App>>, access, style| {
        handler.layer(from_fn_with_state(check::Gate { app: app.clone(), access, style }, check::check))
    };
    let mut router = Router::new();
    for Route { endpoint, aliases, handler } in ROUTES {
        let method = if endpoint.method == "get" { MethodFilter::GET } else { MethodFilter::POST };
        for path in std::iter::once(&endpoint.path).chain(*aliases) {
            let handler = handler(method).fallback(info::wrong_method);
            // Names of models may have slashes.
            router = router.route(&path.replace("{id}", "{*id}"), checked(handler, endpoint.access, endpoint.style));
        }
    }
    for (path, style) in [("/v1/messages/{*rest}", Style::Anthropic), ("/api/{*rest}", Style::Ollama)] {
        router = router.route(path, checked(any(info::unknown), INFER, style));
    }
    router.fallback(checked(any(info::unknown), INFER, Style::OpenAi)).with_state(app.clone())
}

/// Returns the descriptions of all endpoints.
pub fn endpoints() -> impl Iterator<Item = &'static Endpoint> {
    ROUTES.iter().map(|route| &route.endpoint)
}

/// Errors of endpoints that generate text.
const GENERATE: &[u16] = &[400, 401, 403, 404, 408, 413, 429, 500, 503, 504];
/// Errors of other endpoints with a body that need a model.
const TOKENS: &[u16] = &[400, 401, 403, 404, 408, 413, 500, 503];
/// Errors of endpoints without a body.
const READ: &[u16] = &[401, 403];
/// Errors of endpoints that load and unload adapters.
const ADAPTERS: &[u16] = &[400, 401, 403, 404, 408, 409, 413, 500, 503];
/// Permission to use models.
const INFER: Access = Access::Key(Scope::Infer);

type Handler = fn(MethodFilter) -> MethodRouter<Arc<App>>;

const fn get(
    path: &'static str,
    access: Access,
    answer: AnswerBody,
    errors: &'static [u16],
    summary: &'static str,
    handler: Handler,
) -> Route {
    let (method, tag, style) = ("get", "server", Style::OpenAi);
    let endpoint = Endpoint { path, method, tag, summary, access, style, body: None, answer, errors };
    Route { endpoint, aliases: &[], handler }
}

const fn post(
    path: &'static str,
    body: &'static str,
    answer: AnswerBody,
    errors: &'static [u16],
    summary: &'static str,
    handler: Handler,
) -> Route {
    let (method, tag, style, body) = ("post", "text", Style::OpenAi, Some(body));
    let endpoint = Endpoint { path, method, tag, summary, access: INFER, style, body, answer, errors };
    Route { endpoint, aliases: &[], handler }
}

impl Route {
    /// Sets the group of the endpoint.
    const fn tag(self, tag: &'static str) -> Route {
        Route { endpoint: Endpoint { tag, ..self.endpoint }, ..self }
    }

    /// Sets the permission that requests need.
    const fn access(self, access: Access) -> Route {
        Route { endpoint: Endpoint { access, ..self.endpoint }, ..self }
    }

    /// Sets the API that errors follow.
    const fn style(self, style: Style) -> Route {
        Route { endpoint: Endpoint { style, ..self.endpoint }, ..self }
    }

    /// Leaves the body of requests out of the description.
    const fn without_body(self) -> Route {
        Route { endpoint: Endpoint { body: None, ..self.endpoint }, ..self }
    }

    /// Sets further paths.
    const fn also(self, aliases: &'static [&'static str]) -> Route {
        Route { aliases, ..self }
    }
}

/// All routes.
pub const ROUTES: &[Route] = &[
    post(
        "/v1/completions",
        "CompletionRequest",
        AnswerBody::Generated("Completion", "Completion"),
        GENERATE,
        "Continues texts or token ids.",
        |method| on(method, generate::endpoint(job::completions)),
    )
    .also(&["/completions"]),
    post(
        "/v1/chat/completions",
        "ChatRequest",
        AnswerBody::Generated("ChatCompletion", "ChatCompletionChunk"),
        GENERATE,
        "Answers a conversation.",
        |method| on(method, generate::endpoint(job::chat)),
    )
    .also(&["/chat/completions"]),
    post(
        "/v1/responses",
        "ResponsesRequest",
        AnswerBody::Generated("Response", "ResponseEvent"),
        GENERATE,
        "Answers a conversation, in the Responses API of OpenAI without stored state.",
        |method| on(method, generate::endpoint(responses::read)),
    )
    .also(&["/responses"]),
    post(
        "/v1/responses/input_tokens",
        "ResponsesRequest",
        AnswerBody::Json("InputTokens"),
        TOKENS,
        "Counts the tokens of a conversation, in the Responses API of OpenAI.",
        |method| on(method, tokens::count_input),
    )
    .tag("tokens")
    .also(&["/responses/input_tokens"]),
    post(
        "/v1/messages",
        "MessagesRequest",
        AnswerBody::Generated("Message", "MessageEvent"),
        GENERATE,
        "Answers a conversation, in the API of Anthropic.",
        |method| on(method, generate::endpoint(anthropic::read)),
    )
    .style(Style::Anthropic)
    .also(&["/messages"]),
    post(
        "/v1/messages/count_tokens",
        "CountTokensRequest",
        AnswerBody::Json("TokenCount"),
        TOKENS,
        "Counts the tokens of a conversation, in the API of Anthropic.",
        |method| on(method, tokens::count),
    )
    .tag("tokens")
    .style(Style::Anthropic)
    .also(&["/messages/count_tokens"]),
    post(
        "/infill",
        "InfillRequest",
        AnswerBody::Generated("InfillAnswer", "InfillAnswer"),
        GENERATE,
        "Fills the gap between two texts, for models with tokens for it.",
        |method| on(method, generate::endpoint(infill::read)),
    ),
    post(
        "/apply-template",
        "ChatRequest",
        AnswerBody::Json("Text"),
        TOKENS,
        "Renders a conversation as the prompt that the model gets.",
        |method| on(method, tokens::apply_template),
    )
    .tag("tokens"),
    get(
        "/props",
        INFER,
        AnswerBody::Json("Props"),
        &[400, 401, 403, 404, 503],
        "Tells the context, the defaults and the chat template of a model.",
        |method| on(method, slots::props),
    ),
    get(
        "/slots",
        Access::Key(Scope::Metrics),
        AnswerBody::Json("Slots"),
        &[400, 401, 403, 404, 500, 503],
        "Tells how far the requests are that a model computes.",
        |method| on(method, slots::slots),
    ),
    post(
        "/api/chat",
        "OllamaChatRequest",
        AnswerBody::Lines("OllamaChat"),
        GENERATE,
        "Answers a conversation, in the API of ollama.",
        |method| on(method, generate::endpoint(ollama_api::chat)),
    )
    .style(Style::Ollama),
    post(
        "/api/generate",
        "OllamaGenerateRequest",
        AnswerBody::Lines("OllamaText"),
        GENERATE,
        "Answers a text, in the API of ollama.",
        |method| on(method, generate::endpoint(ollama_api::generate)),
    )
    .style(Style::Ollama),
    post("/api/show", "OllamaShowRequest", AnswerBody::Json("OllamaModel"), TOKENS, "Describes a model.", |method| {
        on(method, ollama::show)
    })
    .tag("ollama")
    .style(Style::Ollama),
    get("/api/tags", INFER, AnswerBody::Json("OllamaModels"), READ, "Lists models and adapters.", |method| {
        on(method, ollama::tags)
    })
    .tag("ollama")
    .style(Style::Ollama),
    get("/api/ps", INFER, AnswerBody::Json("OllamaModels"), READ, "Lists the models that are loaded.", |method| {
        on(method, ollama::running)
    })
    .tag("ollama")
    .style(Style::Ollama),
    get(
        "/api/version",
        Access::Open,
        AnswerBody::Json("Version"),
        &[403],
        "Tells the version of the program.",
        |method| on(method, ollama::version),
    )
    .tag("ollama")
    .style(Style::Ollama),
    post("/api/embed", "", AnswerBody::Empty, &[401, 403, 501], "Is not implemented: the answer is 501.", |method| {
        on(method, info::embeddings)
    })
    .without_body()
    .tag("ollama")
    .style(Style::Ollama)
    .also(&["/api/embeddings"]),
    post(
        "/v1/embeddings",
        "",
        AnswerBody::Empty,
        &[401, 403, 501],
        "Is not implemented: the answer is 501.",
        |method| on(method, info::embeddings),
    )
    .without_body()
    .also(&["/embeddings"]),
    post(
        "/tokenize",
        "TokenizeRequest",
        AnswerBody::Json("Tokens"),
        TOKENS,
        "Encodes a text or a conversation.",
        |method| on(method, tokens::tokenize),
    )
    .tag("tokens"),
    post("/detokenize", "DetokenizeRequest", AnswerBody::Json("Text"), TOKENS, "Decodes tokens.", |method| {
        on(method, tokens::detokenize)
    })
    .tag("tokens"),
    get(
        "/tokenizer_info",
        INFER,
        AnswerBody::Json("TokenizerInfo"),
        &[400, 401, 403, 404, 503],
        "Shows the configuration of the tokenizer, with the chat template.",
        |method| on(method, tokens::info),
    )
    .tag("tokens"),
    get("/v1/models", INFER, AnswerBody::Json("Models"), &[400, 401, 403], "Lists models and adapters.", |method| {
        on(method, models::list)
    })
    .style(Style::ByHeader)
    .also(&["/models"]),
    get(
        "/v1/models/{id}",
        INFER,
        AnswerBody::Json("Model"),
        &[401, 403, 404],
        "Shows a model or an adapter.",
        |method| on(method, models::show),
    )
    .style(Style::ByHeader)
    .also(&["/models/{id}"]),
    post(
        "/v1/load_lora_adapter",
        "LoadAdapterRequest",
        AnswerBody::Text("text/plain"),
        ADAPTERS,
        "Loads an adapter. The answer comes when requests can use it.",
        |method| on(method, adapters::load),
    )
    .tag("adapters")
    .access(Access::Key(Scope::Admin)),
    post(
        "/v1/unload_lora_adapter",
        "UnloadAdapterRequest",
        AnswerBody::Text("text/plain"),
        ADAPTERS,
        "Unloads an adapter that no request uses.",
        |method| on(method, adapters::unload),
    )
    .tag("adapters")
    .access(Access::Key(Scope::Admin)),
    get(
        "/v1/lora_adapters",
        Access::Key(Scope::Admin),
        AnswerBody::Json("Adapters"),
        READ,
        "Lists the adapters.",
        |method| on(method, adapters::list),
    )
    .tag("adapters"),
    get(
        "/metrics",
        Access::Key(Scope::Metrics),
        AnswerBody::Text("text/plain"),
        READ,
        "Shows the metrics for Prometheus.",
        |method| on(method, info::metrics),
    ),
    get(
        "/load",
        Access::Key(Scope::Metrics),
        AnswerBody::Json("Load"),
        READ,
        "Tells how many requests are served.",
        |method| on(method, info::load),
    ),
    get("/livez", Access::Probe, AnswerBody::Empty, &[503], "Tells whether the process is alive.", |method| {
        on(method, info::alive)
    }),
    get("/health", Access::Probe, AnswerBody::Probe, &[], "Tells whether requests are served.", |method| {
        on(method, info::health)
    })
    .also(&["/v1/health", "/ping"]),
    get("/readyz", Access::Probe, AnswerBody::Probe, &[], "Tells whether requests are served.", |method| {
        on(method, info::health)
    }),
    get("/version", Access::Open, AnswerBody::Json("Version"), &[403], "Tells the version of the program.", |method| {
        on(method, info::version)
    }),
    get("/openapi.json", Access::Open, AnswerBody::Json("Document"), &[403], "Shows this description.", |method| {
        on(method, info::openapi)
    }),
    get("/", Access::Open, AnswerBody::Text("text/html"), &[403], "Shows a page to talk with the model.", |method| {
        on(method, info::page)
    }),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::metrics::Metrics;
    use crate::serve::config::ServeSettings;
    use crate::serve::keys::Keys;
    use std::collections::BTreeSet;

    #[test]
    fn no_path_has_two_rows_and_the_router_takes_all() {
        let paths: Vec<&str> = ROUTES
            .iter()
            .flat_map(|route| std::iter::once(&route.endpoint.path).chain(route.aliases))
            .copied()
            .collect();
        assert_eq!(paths.iter().collect::<BTreeSet<_>>().len(), paths.len(), "{paths:?}");
        let (settings, metrics) = (ServeSettings::default(), Arc::new(Metrics::new()));
        let app = App::new(settings, Vec::new(), Keys::open(), metrics, None, Arc::new(|_| {}));
        drop(router(Arc::new(app)));
    }

    #[test]
    fn endpoints_that_change_adapters_or_show_use_need_their_scopes() {
        let access = |path: &str| ROUTES.iter().find(|route| route.endpoint.path == path).unwrap().endpoint.access;
        for path in ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/lora_adapters"] {
            assert_eq!(access(path), Access::Key(Scope::Admin), "{path}");
        }
        for path in ["/metrics", "/load", "/slots"] {
            assert_eq!(access(path), Access::Key(Scope::Metrics), "{path}");
        }
        let open = ["/livez", "/health", "/readyz", "/version", "/api/version", "/openapi.json", "/"];
        for Route { endpoint, .. } in ROUTES {
            let is_open = !matches!(endpoint.access, Access::Key(_));
            assert_eq!(is_open, open.contains(&endpoint.path), "{}", endpoint.path);
        }
    }
}
