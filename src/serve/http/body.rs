//! Reading the body of a request: within a time, at a least rate, and within the room for all bodies.

use crate::api::error::{ApiError, ApiResult, ApiStatus};
use crate::serve::app::{App, unavailable};
use crate::serve::bodies::{BodyRoom, Taken};
use crate::serve::caller::Caller;
use axum::extract::Request;
use http_body::Body as _;
use std::pin::Pin;
use std::time::{Duration, Instant};

/// Time in which a body must come, besides the time for its bytes.
const BODY_TIME: Duration = Duration::from_secs(20);
/// Bytes that extend the time by a second: the least rate of a long body.
const BYTES_PER_SECOND: u64 = 64 << 10;
/// Time to wait for room.
const ROOM_TIME: Duration = Duration::from_secs(10);
/// Time after which room is looked for again, because other bodies have become old enough to give way.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Reads the whole body of a request. Its bytes are counted until the room is dropped, after the request was prepared.
///
/// # Errors
/// It is too long, comes too slowly, or bodies of other requests take all the room.
pub async fn read_body(app: &App, caller: &Caller, request: Request) -> ApiResult<(Vec<u8>, BodyRoom)> {
    let most = app.settings.max_body.0;
    let length = request.headers().get("content-length").and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > most) {
        return Err(too_long(most));
    }
    let begin = Instant::now();
    let is_only = app.tenants().keys.list().len() == 1;
    let room = app.bodies.begin(caller.key().1, is_only, begin).ok_or_else(busy)?;
    let (mut body, mut bytes) = (request.into_body(), Vec::new());
    loop {
        let late = begin + BODY_TIME + Duration::from_secs(bytes.len() as u64 / BYTES_PER_SECOND);
        let frame = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
        let frame = tokio::select! {
            frame = tokio::time::timeout_at(late.into(), frame) => frame,
            () = room.evicted() => return Err(gave_way()),
        };
        let data = match frame {
            Err(_) => return Err(slow("too slowly")),
            Ok(None) => break,
            Ok(Some(Err(_))) => return Err(ApiError::invalid("the body ended early")),
            Ok(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
        };
        if (bytes.len() + data.len()) as u64 > most {
            return Err(too_long(most));
        }
        take(app, &room, data.len() as u64).await?;
        bytes.extend_from_slice(&data);
    }
    room.finish();
    Ok((bytes, room))
}

/// Waits for room for bytes that have arrived.
async fn take(app: &App, room: &BodyRoom, bytes: u64) -> ApiResult<()> {
    let end = Instant::now() + ROOM_TIME;
    loop {
        let freed = app.bodies.freed();
        match room.take(bytes, Instant::now()) {
            Taken::Yes => return Ok(()),
            Taken::Evicted => return Err(gave_way()),
            Taken::Full if Instant::now() >= end => return Err(busy()),
            Taken::Full => drop(tokio::time::timeout(LOOK_AGAIN, freed).await),
        }
    }
}

fn too_long(most: u64) -> ApiError {
    let message = format!("the body is longer than {most} bytes (--max-body)");
    ApiError::new(ApiStatus::PAYLOAD_TOO_LARGE, message).code("request_too_large")
}

fn slow(how: &str) -> ApiError {
    ApiError::new(ApiStatus::REQUEST_TIMEOUT, format!("the body came {how}"))
}

fn gave_way() -> ApiError {
    slow("so slowly that it gave way to those of other requests")
}

fn busy() -> ApiError {
    unavailable("too many requests are being read", "busy", 5)
}
