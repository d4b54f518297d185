//! Endpoints that generate text.

use super::body::read_body;
use super::respond::{self, Ignored};
use super::stream::StreamBody;
use crate::api::body::{Body, FieldNames};
use crate::api::error::{ApiError, ApiResult, ApiStatus};
use crate::api::form::{Events, Form};
use crate::api::job::{Job, Named, ReadJob};
use crate::api::prepare::{self, Plan, Prepared};
use crate::host::model::{Arrival, Ticket};
use crate::host::reply::Reply;
use crate::rng::random;
use crate::serve::app::{App, Target};
use crate::serve::caller::Caller;
use crate::serve::log::Record;
use axum::Extension;
use axum::extract::{Request, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Time in which a constraint must be compiled and prompts encoded.
const PREPARE_TIME: Duration = Duration::from_secs(2);
/// Time between two attempts to find room for the adapters of a request.
const ROOM_TIME: Duration = Duration::from_millis(50);
/// Bits that a seed of the server leaves out, so that clients whose numbers are doubles can send it back, and the seeds
/// of the other answers, too.
const UNNEEDED_SEED_BITS: u32 = 12;
/// Longest deadline.
const LONGEST_DEADLINE: Duration = Duration::from_secs(24 * 3600);

/// Handler of an endpoint.
type Handler = Pin<Box<dyn Future<Output = Response> + Send>>;

/// Returns the handler of an endpoint whose requests `read` reads.
pub fn endpoint(
    read: ReadJob,
) -> impl Fn(State<Arc<App>>, Extension<Caller>, Request) -> Handler + Clone + Send + Sync + 'static {
    move |State(app), Extension(caller), request| {
        Box::pin(async move {
            let mut record = Record::new(&app, &caller, &request);
            let answered = answer(&app, &caller, request, read, &mut record).await;
            answered.inspect_err(|error| record.fail(error)).into_response()
        })
    }
}

/// A request that was handed to the engine, with the form of its answer and the number of its texts.
struct Started {
    ticket: Ticket,
    form: Box<dyn Form>,
    texts: usize,
    is_stream: bool,
    /// Seed that the server chose.
    seed: Option<u64>,
    ignored: Ignored,
    names: FieldNames,
}

async fn answer(
    app: &Arc<App>,
    caller: &Caller,
    request: Request,
    read: ReadJob,
    record: &mut Record,
) -> ApiResult<Response> {
    let Started { mut ticket, mut form, texts, is_stream, seed, ignored, names } =
        start(app, caller, request, read, record).await?;
    match ticket.inlet.receive().await {
        Some(Reply::Queued) => {}
        Some(Reply::Refused(refusal)) => return Err(names.shown(ApiError::of_refusal(&refusal))),
        _ => return Err(app.engine_ended()),
    }
    let mut response = match is_stream {
        true => stream(ticket, form, texts, std::mem::take(record)),
        false => {
            collect(app, &mut ticket, form.as_mut(), texts, record).await?;
            record.finish(form.as_ref());
            respond::json(StatusCode::OK, &form.body())
        }
    };
    if let Some(seed) = seed {
        respond::set(&mut response, "x-iec-seed", &seed.to_string());
    }
    Ok(ignored.shown_in(response))
}

/// Reads a request, encodes its prompts and hands it to the engine.
async fn start(
    app: &Arc<App>,
    caller: &Caller,
    request: Request,
    read: ReadJob,
    record: &mut Record,
) -> ApiResult<Started> {
    let arrived = Instant::now();
    let deadline = deadline(request.headers(), arrived)?;
    let (bytes, room) = read_body(app, caller, request).await?;
    let mut body = Body::parse(&bytes)?;
    drop(bytes);
    let model = body.text("model")?;
    let job = read(&mut body, &app.limits).and_then(|job| job.check().map(|()| job));
    let job = job.map_err(|e| body.names.shown(e))?;
    let names = body.names.clone();
    let mut ignored = Ignored::read(app, body).map_err(|e| names.shown(e))?;
    let (key, key_id) = caller.key();
    let named = job.settings.sampling.adapters.clone().unwrap_or_default();
    let target = app.target(key, model.as_deref(), &named).await?;
    record.model(&target);
    if let Some(time) = job.keep_alive {
        target.lease.keep(time);
    }
    let (own_seed, is_stream) = (job.settings.seed, job.settings.stream);
    let seed = own_seed.unwrap_or_else(|| random() >> UNNEEDED_SEED_BITS);
    let owner = key.cache_owner().map(String::from);
    let (mut prepared, plan, id, form) =
        prepare_job(app, job, &target, seed, owner).await.map_err(|e| names.shown(e))?;
    drop(room);
    ignored.extend(std::mem::take(&mut prepared.ignored));
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let form = form(Named { id: app.new_id(id), model: target.shown, created }, &plan, &mut prepared);
    let texts = prepared.choices.len();
    record.prompt(prepared.prompts.iter().map(Vec::len).sum());
    let adapters = target.adapters.into_iter().map(|(name, _)| name).collect();
    let key_name = key.name.as_str().into();
    let choices = prepared.choices;
    let mut ticket = target.model.submit(|ticket, outlet| Arrival {
        ticket,
        choices,
        key: key_id,
        key_name,
        adapters,
        deadline,
        arrived,
        outlet,
    });
    ticket.lease = Some(target.lease);
    Ok(Started { ticket, form, texts, is_stream, seed: own_seed.is_none().then_some(seed), ignored, names })
}

/// Parts of a request that was prepared: requests for the engine, plan, beginning of the id, form.
type Ready = (Prepared, Plan, &'static str, crate::api::job::MakeForm);

/// Encodes the prompts of a request on another thread. Waits if there is no room for its adapters.
async fn prepare_job(app: &App, job: Job, target: &Target, seed: u64, owner: Option<String>) -> ApiResult<Ready> {
    let Job { sources, settings, max_tokens, logprobs, score, echo, texts, id, form, .. } = job;
    let facts = target.facts.clone();
    let adapters = target.adapters.clone();
    let plan = Plan { settings, facts, max_tokens, logprobs, score, echo, texts, adapters, owner, seed };
    let work = Arc::new((sources, plan));
    let begin = Instant::now();
    loop {
        let shared = work.clone();
        let encoded = target.model.encode(move |encoder| prepare::prepare(encoder, &shared.0, &shared.1));
        let prepared = match tokio::time::timeout(PREPARE_TIME, encoded).await {
            Ok(Some(prepared)) => prepared?,
            Ok(None) => return Err(app.engine_ended()),
            Err(_) => {
                let message = format!("the request took more than {} s to prepare", PREPARE_TIME.as_secs());
                return Err(ApiError::invalid(message).code("too_complex"));
            }
        };
        match prepared {
            Some(prepared) => {
                let (_, plan) = Arc::try_unwrap(work).map_err(|_| app.engine_ended())?;
                return Ok((prepared, plan, id, form));
            }
            None if begin.elapsed() > app.settings.queue_timeout => {
                let message = "the memory for adapters (--lora-memory) is in use by other requests";
                let error = ApiError::new(ApiStatus::TOO_MANY_REQUESTS, message).code("no_adapter_memory");
                return Err(ApiError { retry_after: Some(5), ..error });
            }
            None => tokio::time::sleep(ROOM_TIME).await,
        }
    }
}

/// Reads the header with the largest number of milliseconds that the request may take.
fn deadline(headers: &HeaderMap, arrived: Instant) -> ApiResult<Option<Instant>> {
    let Some(value) = headers.get("x-iec-deadline-ms") else { return Ok(None) };
    let time = value.to_str().ok().and_then(|text| text.parse().ok()).map(Duration::from_millis);
    match time.filter(|time| *time <= LONGEST_DEADLINE) {
        Some(time) => Ok(Some(arrived + time)),
        None => Err(ApiError::field("x-iec-deadline-ms", "expected a number of milliseconds of at most a day")),
    }
}

/// Takes all messages about a request.
async fn collect(
    app: &App,
    ticket: &mut Ticket,
    form: &mut dyn Form,
    mut texts: usize,
    record: &mut Record,
) -> ApiResult<()> {
    let mut events = Events::new(false);
    while texts > 0 {
        match ticket.inlet.receive().await {
            Some(Reply::Queued) => {}
            Some(Reply::Token(token)) => form.token(token, &mut events),
            Some(Reply::Done(done)) => {
                record.choice(&done);
                form.done(*done, &mut events)?;
                texts -= 1;
            }
            Some(Reply::Refused(refusal)) => return Err(ApiError::of_refusal(&refusal)),
            None => return Err(app.engine_ended()),
        }
    }
    Ok(())
}

fn stream(ticket: Ticket, form: Box<dyn Form>, texts: usize, record: Record) -> Response {
    let media_type = HeaderValue::from_static(form.framing().media_type());
    let body = axum::body::Body::new(StreamBody::new(ticket, form, texts, record));
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, media_type);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that collect a response would hold a stream back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
