//! Device memory with an element type and a length, so that launches can check their arguments.

use super::args;
use super::context::{Buffer, Context, Pinned};
use crate::error::{Cause, Error, Result};
use crate::scheme::BLOCK;
use std::marker::PhantomData;
use std::sync::Arc;

/// An array of elements in device memory.
#[derive(Debug)]
pub struct Array<T> {
    buffer: Buffer,
    len: usize,
    element: PhantomData<T>,
}

/// A part of an [`Array`] or a [`Buffer`]. It does not own the memory, which must outlive the launches that use it.
#[derive(Debug)]
pub struct View<T> {
    address: u64,
    len: usize,
    element: PhantomData<T>,
}

impl<T> Clone for View<T> {
    fn clone(&self) -> View<T> {
        *self
    }
}

impl<T> Copy for View<T> {}

impl<T> View<T> {
    /// Returns the device address of the first element.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Returns the number of elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// Returns a view of `len` elements from element `first` on.
    ///
    /// # Panics
    /// The range exceeds the view.
    pub fn part(self, first: usize, len: usize) -> View<T> {
        assert!(first <= self.len && len <= self.len - first, "a part beyond its view");
        View { address: self.address + (first * size_of::<T>()) as u64, len, element: PhantomData }
    }
}

impl<T> Array<T> {
    /// Allocates `len` elements with arbitrary contents.
    ///
    /// # Errors
    /// There is not enough device memory.
    pub fn new(context: &Arc<Context>, len: usize) -> Result<Array<T>> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| {
            let found = format!("found {len} elements of {} bytes, which exceed the address space", size_of::<T>());
            Error::new(Cause::OutOfMemory(found))
        })?;
        Ok(Array { buffer: context.alloc(bytes)?, len, element: PhantomData })
    }

    /// Returns the memory of the elements.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Returns a view of all elements.
    pub fn view(&self) -> View<T> {
        View { address: self.buffer.address(), len: self.len, element: PhantomData }
    }
}

impl<T: bytemuck::Pod> Array<T> {
    /// Copies `values` to a new array.
    ///
    /// # Errors
    /// There is not enough device memory, or the driver reports an error.
    pub fn copied(context: &Arc<Context>, values: &[T]) -> Result<Array<T>> {
        let array = Array::new(context, values.len())?;
        array.buffer.write(bytemuck::cast_slice(values))?;
        Ok(array)
    }

    /// Waits until all work is done and returns the elements.
    ///
    /// # Errors
    /// The driver reports an error, or earlier work failed.
    pub fn read(&self) -> Result<Vec<T>> {
        let bytes = self.buffer.read()?;
        let mut values = vec![T::zeroed(); self.len];
        bytemuck::cast_slice_mut(&mut values).copy_from_slice(&bytes[..self.len * size_of::<T>()]);
        Ok(values)
    }

    /// Starts copying the first `len` elements to pinned memory, after the first `first` elements there.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn copy_to(&self, to: &mut Pinned, first: usize, len: usize) -> Result<()> {
        self.buffer.copy_to(to, first * size_of::<T>(), 0, len * size_of::<T>())
    }
}

impl Buffer {
    /// Returns a view of `len` elements from byte `offset` on.
    ///
    /// # Panics
    /// The range exceeds the buffer, or it is not aligned.
    pub fn view<T>(&self, offset: usize, len: usize) -> View<T> {
        assert!(offset.is_multiple_of(align_of::<T>()), "an aligned view");
        let fits = len.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(offset));
        assert!(fits.is_some_and(|end| end <= self.len()), "a view beyond its buffer");
        View { address: self.address() + offset as u64, len, element: PhantomData }
    }
}

/// Forms in which products read activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Forms {
    /// Unrounded, in f32.
    pub f32: bool,
    /// Rounded to bf16.
    pub hi: bool,
    /// Remainder of the rounding to bf16, rounded to bf16 again.
    pub lo: bool,
}

impl Forms {
    /// Returns the forms that at least one of the two contains.
    pub fn and(self, other: Forms) -> Forms {
        Forms { f32: self.f32 || other.f32, hi: self.hi || other.hi, lo: self.lo || other.lo }
    }
}

/// Activations `(rows, width)` in the forms that are wanted.
#[derive(Debug)]
pub struct Acts {
    pub f32: Option<Array<f32>>,
    pub hi: Option<Array<u16>>,
    pub lo: Option<Array<u16>>,
    pub rows: usize,
    pub width: usize,
}

impl Acts {
    /// Allocates memory for `rows` rows.
    ///
    /// # Errors
    /// There is not enough device memory.
    pub fn new(context: &Arc<Context>, forms: Forms, rows: usize, width: usize) -> Result<Acts> {
        let half = rows * width.next_multiple_of(BLOCK);
        Ok(Acts {
            f32: forms.f32.then(|| Array::new(context, rows * width)).transpose()?,
            hi: forms.hi.then(|| Array::new(context, half)).transpose()?,
            lo: forms.lo.then(|| Array::new(context, half)).transpose()?,
            rows,
            width,
        })
    }

    /// Returns the addresses and strides for kernels.
    pub fn args(&self) -> args::Acts {
        args::Acts {
            f32: self.f32.as_ref().map_or(0, |array| array.view().address()),
            hi: self.hi.as_ref().map_or(0, |array| array.view().address()),
            lo: self.lo.as_ref().map_or(0, |array| array.view().address()),
            stride: self.width as u32,
            half_stride: self.width.next_multiple_of(BLOCK) as u32,
        }
    }
}
