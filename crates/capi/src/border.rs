//! Pointers of a caller, panics and results: the border that every function crosses.

use crate::error::{Failure, keep};
use crate::types::{
    IEC_ENGINE, IEC_REENTERED, IEC_USAGE, iec_engine, iec_ids, iec_matrix, iec_metrics, iec_open_options, iec_request,
    iec_str, iec_string,
};
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

thread_local! {
    /// Engines whose callbacks run on this thread: a callback may use another engine, which has callbacks, too.
    static CALLING: RefCell<Vec<*const iec_engine>> = const { RefCell::new(Vec::new()) };
}

/// Does the work of a function without an engine. A panic becomes a failure.
pub(crate) fn call(work: impl FnOnce() -> Result<(), Failure>) -> i32 {
    keep(without_panics(work), None)
}

/// Does the work of a function with an engine, unless a callback of the same engine calls it.
///
/// # Safety
/// `engine` is null or an engine that is not destroyed before this returns.
pub(crate) unsafe fn call_with(
    engine: *const iec_engine,
    work: impl FnOnce(&iec_engine) -> Result<(), Failure>,
) -> i32 {
    // SAFETY: the caller's duty.
    let Some(found) = (unsafe { shared(engine) }) else {
        return keep(Err(Failure::new(IEC_USAGE, "the engine is null")), None);
    };
    if is_calling(engine) {
        let message = "a callback called a function with the engine that called it";
        return keep(Err(Failure::new(IEC_REENTERED, message)), None);
    }
    keep(without_panics(|| work(found)), Some(found))
}

/// Marks that a callback of the engine runs on this thread.
pub(crate) fn in_callback<T>(engine: &iec_engine, callback: impl FnOnce() -> T) -> T {
    CALLING.with_borrow_mut(|calling| calling.push(engine));
    let result = callback();
    CALLING.with_borrow_mut(|calling| calling.pop());
    result
}

/// Returns true if a callback of the engine runs on this thread.
pub(crate) fn is_calling(engine: *const iec_engine) -> bool {
    // At the end of a thread, when its variables are gone, no callback runs on it.
    CALLING.try_with(|calling| calling.borrow().contains(&engine)).unwrap_or(false)
}

fn without_panics(work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(Failure::new(IEC_ENGINE, format!("a function panicked: {}", text.unwrap_or("without a message"))))
    })
}

/// Returns what a pointer points to; `None` for null.
///
/// # Safety
/// The pointer is null or valid for reads for as long as the result is used.
pub(crate) unsafe fn shared<'a, T>(pointer: *const T) -> Option<&'a T> {
    // SAFETY: the caller's duty.
    unsafe { pointer.as_ref() }
}

/// Returns the text of a caller.
///
/// # Safety
/// `data` points to `length` bytes that nothing changes for as long as the result is used, or `length` is 0.
pub(crate) unsafe fn text<'a>(text: iec_str, name: &str) -> Result<&'a str, Failure> {
    if text.length == 0 {
        return Ok("");
    }
    // SAFETY: the caller's duty.
    let bytes = unsafe { slice(text.data.cast::<u8>(), text.length, name) }?;
    std::str::from_utf8(bytes).map_err(|e| Failure::new(IEC_USAGE, format!("{name}: found no UTF-8: {e}")))
}

/// Returns the elements of a caller.
///
/// # Safety
/// `data` points to `length` elements that nothing changes for as long as the result is used, or `length` is 0.
pub(crate) unsafe fn slice<'a, T>(data: *const T, length: usize, name: &str) -> Result<&'a [T], Failure> {
    match (length, data.is_null()) {
        (0, _) => Ok(&[]),
        (_, true) => Err(Failure::new(IEC_USAGE, format!("{name}: found null with length {length}"))),
        (_, false) if length > isize::MAX as usize / size_of::<T>() => {
            Err(Failure::new(IEC_USAGE, format!("{name}: found length {length}")))
        }
        // SAFETY: neither null nor longer than an object can be; the rest is the caller's duty.
        (_, false) => Ok(unsafe { std::slice::from_raw_parts(data, length) }),
    }
}

/// Writes a result for the caller, which is made only if there is a place for it: no result is lost.
///
/// # Safety
/// `out` is null or valid for a write.
pub(crate) unsafe fn put<T>(out: *mut T, name: &str, make: impl FnOnce() -> Result<T, Failure>) -> Result<(), Failure> {
    if out.is_null() {
        return Err(Failure::new(IEC_USAGE, format!("{name}: found null, expected a place for the result")));
    }
    let value = make()?;
    // SAFETY: not null; the rest is the caller's duty.
    unsafe { out.write(value) };
    Ok(())
}

/// Structs that begin with their size, and for which zeros are valid.
///
/// # Safety
/// All bytes may be zero, and the first field is `struct_size: usize`.
pub(crate) unsafe trait Sized {}
// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Sized for iec_open_options {}
// SAFETY: numbers and pointers, of which the first is the size; no function is null.
unsafe impl Sized for iec_request {}
// SAFETY: numbers, of which the first is the size.
unsafe impl Sized for iec_metrics {}

/// Reads a struct of a caller who may have been compiled with an earlier or a later version of it: fields that the
/// caller does not know are zero, and fields that this library does not know must be zero.
///
/// # Safety
/// `pointer` is null or points to as many bytes as its first field says.
pub(crate) unsafe fn sized<T: Sized + Copy>(pointer: *const T, name: &str) -> Result<Option<T>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: every such struct begins with its size.
    let size = unsafe { pointer.cast::<usize>().read() };
    if !(size_of::<usize>()..=4096).contains(&size) {
        return Err(Failure::new(IEC_USAGE, format!("{name}: found the struct_size {size}; set it to sizeof")));
    }
    let bytes = pointer.cast::<u8>();
    // SAFETY: the caller's duty; at most `size` bytes are read.
    let unknown = unsafe { std::slice::from_raw_parts(bytes, size) }.get(size_of::<T>()..).unwrap_or_default();
    if unknown.iter().any(|byte| *byte != 0) {
        return Err(Failure::new(IEC_USAGE, format!("{name}: found a field that this version of the library lacks")));
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: both have this many bytes, and zeros are valid for what is not copied.
    unsafe {
        ptr::copy_nonoverlapping(bytes, value.as_mut_ptr().cast::<u8>(), size.min(size_of::<T>()));
        Ok(Some(value.assume_init()))
    }
}

/// Writes as much of a struct as the caller knows; its size stays.
///
/// # Safety
/// `out` is null or points to as many bytes as its first field says.
pub(crate) unsafe fn put_sized<T: Sized + Copy>(out: *mut T, value: &T, name: &str) -> Result<(), Failure> {
    // SAFETY: the caller's duty.
    let before = unsafe { sized(out, name) }?;
    if before.is_none() {
        return Err(Failure::new(IEC_USAGE, format!("{name}: found null, expected a place for the result")));
    }
    let first = size_of::<usize>();
    // SAFETY: the struct has the bytes that its size says, which was checked above.
    unsafe {
        let size = out.cast::<usize>().read().min(size_of::<T>());
        let (from, to) = (ptr::from_ref(value).cast::<u8>(), out.cast::<u8>());
        ptr::copy_nonoverlapping(from.add(first), to.add(first), size - first);
    }
    Ok(())
}

/// Text of this library as the handle of a caller.
pub(crate) fn borrowed(text: &str) -> iec_str {
    iec_str { data: text.as_ptr().cast(), length: text.len() }
}

/// Hands a text to the caller.
pub(crate) fn string_out(text: String) -> iec_string {
    let length = text.len();
    let mut bytes = text.into_bytes();
    bytes.push(0);
    iec_string { data: Box::into_raw(bytes.into_boxed_slice()).cast(), length }
}

/// Hands token ids to the caller.
pub(crate) fn ids_out(ids: Vec<u32>) -> iec_ids {
    let length = ids.len();
    iec_ids { data: Box::into_raw(ids.into_boxed_slice()).cast(), length }
}

/// Hands rows to the caller.
pub(crate) fn matrix_out(values: Vec<f32>, columns: usize) -> iec_matrix {
    let rows = values.len() / columns.max(1);
    iec_matrix { values: Box::into_raw(values.into_boxed_slice()).cast(), rows, columns }
}

/// Frees a text of the library. A null `data` is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_string_free(string: iec_string) {
    // SAFETY: `string_out` made it of a box of this length.
    unsafe { free(string.data.cast::<u8>(), string.length + 1) };
}

/// Frees token ids of the library. A null `data` is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_ids_free(ids: iec_ids) {
    // SAFETY: `ids_out` made them of a box of this length.
    unsafe { free(ids.data, ids.length) };
}

/// Frees rows of the library. A null `values` is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_matrix_free(matrix: iec_matrix) {
    // SAFETY: `matrix_out` made it of a box of this length.
    unsafe { free(matrix.values, matrix.rows * matrix.columns) };
}

/// Frees a box of elements.
///
/// # Safety
/// `data` is null, or `Box::into_raw` returned it for a slice of `length` elements.
unsafe fn free<T>(data: *mut T, length: usize) {
    if !data.is_null() {
        // SAFETY: the caller's duty.
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(data, length)) });
    }
}
