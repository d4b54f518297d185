//! Endpoints that generate text.

use super::body::read_body;
use super::respond::{self, Ignored};
use super::stream::StreamBody;
use crate::api::body::{Body, FieldNames};
use crate::api::error::{ApiError, ApiResult};
use crate::api::form::{Events, Form};
use crate::api::job::{Job, Named, ReadJob};
use crate::host::model::Ticket;
use crate::host::reply::Reply;
use crate::serve::app::App;
use crate::serve::caller::Caller;
use crate::serve::log::Record;
use crate::serve::submit;
use axum::Extension;
use axum::extract::{Request, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

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
            let mut record = Record::new(&app, &caller, request.uri().path(), request.headers());
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
            record.finish(form.usage(), form.finish());
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
    let job = read(&mut body, &app.limits).and_then(|job| job.wanted.check().map(|()| job));
    let job = job.map_err(|e| body.names.shown(e))?;
    let names = body.names.clone();
    let mut ignored = Ignored::read(app, body).map_err(|e| names.shown(e))?;
    let named = job.wanted.settings.sampling.adapters.clone().unwrap_or_default();
    let target = app.target(caller.key().0, model.as_deref(), &named).await?;
    record.model(&target);
    if let Some(time) = job.keep_alive {
        target.lease.keep(time);
    }
    let (is_stream, shown) = (job.wanted.settings.stream, target.shown.clone());
    let Job { wanted, id, form, .. } = job;
    let mut ready = submit::prepare(app, caller, wanted, target).await.map_err(|e| names.shown(e))?;
    drop(room);
    ignored.extend(std::mem::take(&mut ready.prepared.ignored));
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let form = form(Named { id: app.new_id(id), model: shown, created }, &ready.plan, &mut ready.prepared);
    let texts = ready.prepared.choices.len();
    record.prompt(ready.prompt_tokens());
    let seed = ready.own_seed;
    let ticket = ready.submit(caller, arrived, deadline);
    Ok(Started { ticket, form, texts, is_stream, seed, ignored, names })
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
