//! The service of vLLM's engine.

use super::answer::{AnswerStream, Texts};
use super::flush;
use super::info;
use super::proto::smg::grpc::common::{
    FlushCacheRequest, FlushCacheResponse, GetTokenizerRequest, KvEventBatch, ProfileResponse, StartProfileRequest,
    StopProfileRequest, SubscribeKvEventsRequest,
};
use super::proto::vllm::grpc::engine::vllm_engine_server::VllmEngine;
use super::proto::vllm::grpc::engine::{
    AbortRequest, AbortResponse, EmbedRequest, EmbedResponse, GenerateRequest, GetLoadsRequest, GetLoadsResponse,
    GetModelInfoRequest, GetModelInfoResponse, GetServerInfoRequest, GetServerInfoResponse, HealthCheckRequest,
    HealthCheckResponse,
};
use super::request::{names_of, read};
use super::running::{Entry, Running};
use super::status::{late, status_of};
use super::tokenizer::{self, Chunks};
use crate::api::error::{ApiError, ApiResult};
use crate::host::reply::Reply;
use crate::serve::app::{App, Target};
use crate::serve::bodies::BodyRoom;
use crate::serve::caller::Caller;
use crate::serve::log::Record;
use crate::serve::submit;
use axum::http::HeaderMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tonic::codegen::tokio_stream::Empty;
use tonic::metadata::MetadataValue;
use tonic::{Extensions, Request, Response, Status};

/// Path of the method that generates texts, for the log.
const GENERATE: &str = "/vllm.grpc.engine.VllmEngine/Generate";
/// Metadata with the name of the model or adapter, for servers that have several.
const MODEL: &str = "x-iec-model";
/// Longest deadline; a later one is none.
const LONGEST_DEADLINE: Duration = Duration::from_secs(24 * 3600);

/// The service.
pub struct Engine {
    app: Arc<App>,
    running: Arc<Running>,
    started: Instant,
    /// Milliseconds from 1970 to the last call that asked for texts.
    last_call: AtomicU64,
}

impl Engine {
    /// Creates the service.
    pub fn new(app: Arc<App>) -> Engine {
        Engine { app, running: Arc::default(), started: Instant::now(), last_call: AtomicU64::new(0) }
    }

    /// Finds the model that the metadata of a call name, or the only one. It is loaded if need be.
    async fn target(&self, caller: &Caller, headers: &HeaderMap) -> ApiResult<Target> {
        let name = headers.get(MODEL).and_then(|name| name.to_str().ok());
        self.app.target(caller.key().0, name, &[]).await
    }

    /// Finds the model of a call that asks about it.
    async fn target_of<T>(&self, request: Request<T>) -> Result<Target, Status> {
        let (metadata, extensions, _) = request.into_parts();
        let found = self.target(&caller_of(&extensions)?, &metadata.into_headers()).await;
        found.map_err(|error| status_of(&error))
    }

    /// Reads a call, encodes its prompt and hands it to the engine. The second value is a seed that the server chose.
    async fn start(
        &self,
        call: &mut Call,
        message: GenerateRequest,
        entry: &mut Entry,
    ) -> ApiResult<Option<(crate::host::model::Ticket, Texts, Option<u64>)>> {
        let arrived = Instant::now();
        let deadline = deadline(&call.headers, arrived)?;
        let Call { headers, caller, room, record } = call;
        let names = names_of(&message);
        let work = async {
            let scored = message.sampling_params.as_ref().and_then(|params| params.prompt_logprobs);
            let wanted = read(message, &self.app.limits)?;
            let target = self.target(caller, headers).await?;
            record.model(&target);
            let ready = submit::prepare(&self.app, caller, wanted, target).await?;
            drop(room.take());
            record.prompt(ready.prompt_tokens());
            let texts = Texts::new(&ready, scored.and_then(|most| usize::try_from(most).ok()));
            let seed = ready.own_seed;
            let mut ticket = ready.submit(caller, arrived, deadline);
            match ticket.inlet.receive().await {
                Some(Reply::Queued) => Ok(Some((ticket, texts, seed))),
                Some(Reply::Refused(refusal)) => Err(ApiError::of_refusal(&refusal)),
                _ => Err(self.app.engine_ended()),
            }
        };
        let started = tokio::select! {
            started = work => started,
            () = until(deadline) => Err(late()),
            () = entry.aborted() => Ok(None),
        };
        started.map_err(|error| names.shown(error))
    }
}

/// Parts of a call besides its message.
struct Call {
    headers: HeaderMap,
    caller: Caller,
    /// Room that the message takes until its prompt is encoded.
    room: Option<Arc<BodyRoom>>,
    record: Record,
}

/// Returns the sender of a call.
fn caller_of(extensions: &Extensions) -> Result<Caller, Status> {
    extensions.get::<Caller>().cloned().ok_or_else(|| Status::internal("the call was not checked"))
}

/// Waits for a deadline, if there is one.
async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

/// Reads the deadline of a call: a number of at most 8 digits and its unit, in `grpc-timeout`.
fn deadline(headers: &HeaderMap, arrived: Instant) -> ApiResult<Option<Instant>> {
    let Some(value) = headers.get("grpc-timeout") else { return Ok(None) };
    let wrong = || ApiError::field("grpc-timeout", "expected 1 to 8 digits and one of H, M, S, m, u and n");
    let text = value.to_str().map_err(|_| wrong())?;
    let digits = text.strip_suffix(['H', 'M', 'S', 'm', 'u', 'n']).ok_or_else(wrong)?;
    let is_number = (1..=8).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit());
    let count: u64 = digits.parse().ok().filter(|_| is_number).ok_or_else(wrong)?;
    let time = match text.as_bytes()[digits.len()] {
        b'H' => Duration::from_secs(count * 3600),
        b'M' => Duration::from_secs(count * 60),
        b'S' => Duration::from_secs(count),
        b'm' => Duration::from_millis(count),
        b'u' => Duration::from_micros(count),
        _ => Duration::from_nanos(count),
    };
    Ok(Some(time).filter(|time| *time <= LONGEST_DEADLINE).map(|time| arrived + time))
}

/// Builds the status of a method that this server does not have.
fn missing(why: &str) -> Status {
    Status::unimplemented(why)
}

#[tonic::async_trait]
impl VllmEngine for Engine {
    type GenerateStream = AnswerStream;
    type GetTokenizerStream = Chunks;
    type SubscribeKvEventsStream = Empty<Result<KvEventBatch, Status>>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<AnswerStream>, Status> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_call.store(now.as_millis() as u64, Ordering::Relaxed);
        let (metadata, mut extensions, message) = request.into_parts();
        let (headers, caller) = (metadata.into_headers(), caller_of(&extensions)?);
        let record = Record::new(&self.app, &caller, GENERATE, &headers);
        let mut call = Call { headers, caller, room: extensions.remove::<Arc<BodyRoom>>(), record };
        let id = if message.request_id.is_empty() { &call.caller.id } else { &message.request_id };
        let entered = self.running.enter(&call.caller.key().0.name, id);
        let count = message.sampling_params.as_ref().map_or(1, |params| params.n.max(1) as usize);
        let started = match entered {
            Ok(mut entry) => self.start(&mut call, message, &mut entry).await.map(|started| (started, entry)),
            Err(error) => Err(error),
        };
        match started {
            Ok((Some((ticket, texts, seed)), entry)) => {
                let mut response = Response::new(AnswerStream::new(ticket, texts, call.record, entry));
                if let Some(seed) = seed {
                    response.metadata_mut().insert("x-iec-seed", MetadataValue::from(seed));
                }
                Ok(response)
            }
            Ok((None, entry)) => {
                Ok(Response::new(AnswerStream::aborted(count.min(self.app.limits.max_n), call.record, entry)))
            }
            Err(error) => {
                call.record.fail(&error);
                Err(status_of(&error))
            }
        }
    }

    async fn abort(&self, request: Request<AbortRequest>) -> Result<Response<AbortResponse>, Status> {
        let caller = caller_of(request.extensions())?;
        let key = &caller.key().0.name;
        request.get_ref().request_ids.iter().for_each(|id| self.running.abort(key, id));
        Ok(Response::new(AbortResponse {}))
    }

    async fn health_check(
        &self,
        _request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let healthy = self.app.is_ready();
        let message = if healthy { "requests are served" } else { "requests are not served now" };
        Ok(Response::new(HealthCheckResponse { healthy, message: message.into() }))
    }

    async fn get_model_info(
        &self,
        request: Request<GetModelInfoRequest>,
    ) -> Result<Response<GetModelInfoResponse>, Status> {
        let target = self.target_of(request).await?;
        Ok(Response::new(info::model(&target)))
    }

    async fn get_server_info(
        &self,
        _request: Request<GetServerInfoRequest>,
    ) -> Result<Response<GetServerInfoResponse>, Status> {
        let last = self.last_call.load(Ordering::Relaxed) as f64 / 1e3;
        Ok(Response::new(info::server(&self.app, self.started.elapsed(), last)))
    }

    async fn get_loads(&self, _request: Request<GetLoadsRequest>) -> Result<Response<GetLoadsResponse>, Status> {
        Ok(Response::new(info::loads(&self.app)))
    }

    async fn get_tokenizer(&self, request: Request<GetTokenizerRequest>) -> Result<Response<Chunks>, Status> {
        let target = self.target_of(request).await?;
        let chunks = tokenizer::chunks(target.facts.clone()).await;
        chunks.map(Response::new).map_err(|error| status_of(&error))
    }

    async fn flush_cache(&self, request: Request<FlushCacheRequest>) -> Result<Response<FlushCacheResponse>, Status> {
        let caller = caller_of(request.extensions())?;
        let flushed = flush::flush(&self.app, &caller, request.get_ref().timeout_s).await;
        flushed.map(Response::new).map_err(|error| status_of(&error))
    }

    async fn embed(&self, _request: Request<EmbedRequest>) -> Result<Response<EmbedResponse>, Status> {
        Err(missing("no model family of this server is trained for embeddings"))
    }

    async fn start_profile(&self, _request: Request<StartProfileRequest>) -> Result<Response<ProfileResponse>, Status> {
        Err(missing("this server has no profiler; GET /metrics over HTTP shows the time of each stage"))
    }

    async fn stop_profile(&self, _request: Request<StopProfileRequest>) -> Result<Response<ProfileResponse>, Status> {
        Err(missing("this server has no profiler; GET /metrics over HTTP shows the time of each stage"))
    }

    async fn subscribe_kv_events(
        &self,
        _request: Request<SubscribeKvEventsRequest>,
    ) -> Result<Response<Self::SubscribeKvEventsStream>, Status> {
        Err(missing("this server does not publish the pages of its prefix cache"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_have_a_number_and_a_unit() {
        let arrived = Instant::now();
        let of = |text: &str| {
            let headers = [("grpc-timeout".parse().unwrap(), text.parse().unwrap())].into_iter().collect();
            deadline(&headers, arrived).map(|found| found.map(|found| (found - arrived).as_millis()))
        };
        for (text, expected) in [("5S", Some(5000)), ("250m", Some(250)), ("2M", Some(120_000)), ("99999999H", None)] {
            assert_eq!(of(text), Ok(expected), "{text}");
        }
        for text in ["", "S", "5", "5s", "-5S", "123456789S", "+5S"] {
            assert_eq!(of(text).unwrap_err().param.as_deref(), Some("grpc-timeout"), "{text}");
        }
        assert_eq!(deadline(&HeaderMap::new(), arrived), Ok(None));
    }
}
