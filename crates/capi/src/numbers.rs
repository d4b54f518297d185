//! Logits, hidden states, embeddings and log-probabilities.

use crate::border::{call_with, matrix_out, put, slice, text};
use crate::error::Failure;
use crate::types::{IEC_POOLING_LAST, IEC_POOLING_MEAN, IEC_USAGE, iec_engine, iec_matrix, iec_str};
use engine::{Matrix, Pooling};

/// # Safety
/// `out` is null or valid for a write.
unsafe fn put_matrix(out: *mut iec_matrix, matrix: Matrix) -> Result<(), Failure> {
    let columns = matrix.columns();
    // SAFETY: the caller's duty.
    unsafe { put(out, "out", || Ok(matrix_out(matrix.into_values(), columns))) }
}

/// Computes the logits behind each of `length` tokens: a row per token, a column per token of the vocabulary. Free
/// `out` with iec_matrix_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_logits(
    engine: *const iec_engine,
    ids: *const u32,
    length: usize,
    out: *mut iec_matrix,
) -> i32 {
    // SAFETY: the caller's duty.
    unsafe { call_with(engine, |handle| put_matrix(out, handle.engine.logits(slice(ids, length, "ids")?)?)) }
}

/// Computes the output of the final norm for each of `length` tokens: a row per token. Free `out` with
/// iec_matrix_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_hidden_states(
    engine: *const iec_engine,
    ids: *const u32,
    length: usize,
    out: *mut iec_matrix,
) -> i32 {
    // SAFETY: the caller's duty.
    unsafe { call_with(engine, |handle| put_matrix(out, handle.engine.hidden_states(slice(ids, length, "ids")?)?)) }
}

/// Computes a vector of length 1 for a text, as a matrix of one row. `pooling` is IEC_POOLING_LAST or IEC_POOLING_MEAN.
/// Free `out` with iec_matrix_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_embed(
    engine: *const iec_engine,
    input: iec_str,
    pooling: i32,
    out: *mut iec_matrix,
) -> i32 {
    // SAFETY: the caller's duty.
    unsafe {
        call_with(engine, |handle| {
            let pooling = match pooling {
                IEC_POOLING_LAST => Pooling::Last,
                IEC_POOLING_MEAN => Pooling::Mean,
                other => return Err(Failure::new(IEC_USAGE, format!("pooling: found {other}"))),
            };
            let vector = handle.engine.embed(text(input, "input")?, pooling)?;
            let columns = vector.len();
            put(out, "out", || Ok(matrix_out(vector, columns)))
        })
    }
}

/// Computes the log-probability of each of `length` tokens behind those before it. `out` has room for `length` numbers;
/// the first becomes NaN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_score(engine: *const iec_engine, ids: *const u32, length: usize, out: *mut f64) -> i32 {
    // SAFETY: the caller's duty.
    unsafe {
        call_with(engine, |handle| {
            let scores = handle.engine.score(slice(ids, length, "ids")?, 0)?;
            put(out, "out", || Ok(f64::NAN))?;
            for (at, score) in scores.iter().enumerate().take(length.saturating_sub(1)) {
                out.add(at + 1).write(score.logprob.unwrap_or(f64::NAN));
            }
            Ok(())
        })
    }
}
