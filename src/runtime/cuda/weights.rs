//! Weights of some layers on a device, in the layout of the pack file.

use super::args;
use super::array::{Array, Forms};
use super::context::{Buffer, Context, Mark, Pinned};
use super::kind::Kind;
use crate::catalogue::Target;
use crate::dtype::DType;
use crate::error::{Cause, Error, Result};
use crate::interrupt;
use crate::model_config::ModelConfig;
use crate::progress::ProgressBar;
use crate::runtime::cpu::{Arithmetic, Form, MatrixStore};
use crate::runtime::kv::KvLayout;
use crate::runtime::layer::transfer::Transfer;
use crate::runtime::layer::{Layer, Storage};
use crate::runtime::weights::{Host, Linear, Weight, Weights};
use crate::scheme::{BLOCK, CodeMap, CodeTable, Minimum, QuantSpec, ScaleType};
use std::f32::consts::LOG2_E;
use std::sync::Arc;

/// Maximum number of bytes per transfer.
const PIECE: usize = 16 << 20;

/// Uploader that copies through pinned memory: while one piece is transferred, the next one is read from the file.
pub struct Uploader<'a> {
    /// Target device.
    pub context: &'a Arc<Context>,
    pieces: [(Pinned, Option<Mark>); 2],
    next: usize,
    bar: &'a ProgressBar,
}

impl<'a> Uploader<'a> {
    /// Creates an uploader for a device; `bar` counts the copied bytes.
    ///
    /// # Errors
    /// There is not enough pinned memory.
    pub fn new(context: &'a Arc<Context>, bar: &'a ProgressBar) -> Result<Uploader<'a>> {
        let piece = || Ok::<_, Error>((context.alloc_pinned(PIECE)?, None));
        Ok(Uploader { context, pieces: [piece()?, piece()?], next: 0, bar })
    }

    /// Starts copying bytes to an offset of a buffer.
    ///
    /// # Errors
    /// The driver reports an error, or the user interrupted.
    pub fn copy(&mut self, to: &Buffer, offset: usize, bytes: &[u8]) -> Result<()> {
        for (i, part) in bytes.chunks(PIECE).enumerate() {
            interrupt::check()?;
            let (pinned, sent) = &mut self.pieces[self.next];
            if let Some(sent) = sent.take() {
                sent.wait()?;
            }
            pinned.bytes_mut()[..part.len()].copy_from_slice(part);
            to.copy_from(offset + i * PIECE, pinned, part.len())?;
            *sent = Some(self.context.mark()?);
            self.next = 1 - self.next;
            self.bar.inc(part.len() as u64);
        }
        Ok(())
    }

    /// Copies f32 values to a new array on the device.
    ///
    /// # Errors
    /// There is not enough device memory, or the driver reports an error.
    pub fn vector(&mut self, values: &[f32]) -> Result<Array<f32>> {
        let array = Array::new(self.context, values.len())?;
        self.copy(array.buffer(), 0, bytemuck::cast_slice(values))?;
        Ok(array)
    }
}

/// A matrix, or a stack of matrices of one shape, on the device.
#[derive(Debug)]
pub struct DeviceMatrix {
    /// Memory that `args` points to.
    _memory: Buffer,
    /// Arguments for kernels.
    pub args: args::Matrix,
    /// Number of matrices in the stack.
    pub count: usize,
    /// Layout of the elements.
    pub kind: Kind,
}

impl DeviceMatrix {
    /// Returns the number of rows (output features) of each matrix.
    pub fn rows(&self) -> usize {
        self.args.rows as usize
    }

    /// Returns the number of columns (input features).
    pub fn cols(&self) -> usize {
        self.args.cols as usize
    }

    /// Copies matrices of one shape and storage format to the device, one after the other.
    ///
    /// # Errors
    /// The matrices are too large or differ, a weight cannot be read, or there is not enough device memory.
    pub fn upload(uploader: &mut Uploader<'_>, stack: &[&Weight]) -> Result<DeviceMatrix> {
        let first = stack.first().expect("a stack has matrices");
        let (store, bytes) = (first.store(), first.nbytes());
        let (kind, mut args) = describe(store, first.rows(), first.cols())?;
        // Kernels read 16 bytes at once, so each matrix is aligned.
        let stride = bytes.next_multiple_of(256);
        let whole = stride.checked_mul(stack.len()).ok_or_else(|| {
            let found = format!("found {} matrices of {bytes} bytes, which exceed the address space", stack.len());
            Error::new(Cause::OutOfMemory(found))
        })?;
        let memory = uploader.context.alloc(whole)?;
        for (i, weight) in stack.iter().enumerate() {
            let held = weight.hold()?;
            if held.store != store || held.data.len() != bytes {
                return Err(Error::unsupported("experts of different shapes or schemes are not supported on a GPU")
                    .help("use --device cpu"));
            }
            uploader.copy(&memory, i * stride, &held.data)?;
            held.check()?;
        }
        (args.data, args.stride) = (memory.address(), stride as u64);
        Ok(DeviceMatrix { _memory: memory, args, count: stack.len(), kind })
    }
}

/// Returns the layout of a matrix and its arguments for kernels, without the address.
fn describe(store: MatrixStore, rows: usize, cols: usize) -> Result<(Kind, args::Matrix)> {
    let number = |n: usize| {
        u32::try_from(n).map_err(|_| {
            Error::unsupported(format!("found a matrix of {rows} x {cols}, expected sizes below 2^32 for a GPU"))
                .help("use --device cpu")
        })
    };
    let mut args = args::Matrix {
        rows: number(rows)?,
        cols: number(cols)?,
        blocks: number(cols.div_ceil(BLOCK))?,
        ..args::Matrix::default()
    };
    let kind = match store {
        MatrixStore::Plain(DType::F32) => Kind::F32,
        MatrixStore::Plain(DType::F16) => Kind::F16,
        MatrixStore::Plain(_) => Kind::Bf16,
        MatrixStore::Tiled(layout) => {
            let minimum = layout.spec.minimum();
            args.scale_kind = match layout.spec.scale_dtype {
                ScaleType::F16 => 0,
                ScaleType::F32 => 1,
                ScaleType::E8m0 => 2,
                ScaleType::I8 if minimum == Minimum::None => 3,
                ScaleType::I8 => 4,
                ScaleType::E4m3 => 5,
                ScaleType::I8Row => 6,
            };
            args.minimum = match minimum {
                Minimum::None => 0,
                Minimum::F16 => 1,
                Minimum::U8 => 2,
                Minimum::Nibble => 3,
            };
            args.codes = match layout.spec.code_map() {
                CodeMap::Biased(bias) => u32::from(bias),
                CodeMap::Unsigned | CodeMap::Affine | CodeMap::Bytes => 0,
                CodeMap::Table(CodeTable::Iq4Nl) => 253,
                CodeMap::Table(CodeTable::E2m1) => 254,
                CodeMap::E4m3 => 255,
                CodeMap::Trellis(trellis) if trellis.bits == 2 => 251,
                CodeMap::Trellis(_) => 252,
            };
            args.group_blocks = number(layout.group_blocks)?;
            args.block_groups = number(layout.block_groups)?;
            args.zeros_offset = number(layout.zeros_offset)?;
            args.supers_offset = number(layout.supers_offset)?;
            args.codes_offset = number(layout.codes_offset)?;
            args.block_bytes = number(layout.block_bytes)?;
            args.tile_bytes = number(layout.tile_bytes)?;
            kind_of(layout.spec)
        }
    };
    args.kind = kind as u32;
    Ok((kind, args))
}

/// Returns the kind of tiles.
fn kind_of(spec: QuantSpec) -> Kind {
    let (two_levels, minimum) = (spec.has_two_levels(), spec.minimum());
    let of_row = spec.scale_dtype == ScaleType::I8Row;
    match (spec.code_map(), spec.scheme.bits()) {
        (CodeMap::Trellis(_), 2) => Kind::T2,
        (CodeMap::Trellis(_), _) => Kind::T3,
        (CodeMap::E4m3, _) => Kind::Fp8,
        (CodeMap::Bytes, _) => Kind::Int8,
        (CodeMap::Affine, _) => Kind::Int4Affine,
        (CodeMap::Table(CodeTable::E2m1), _) if two_levels => Kind::Nvfp4,
        (CodeMap::Table(CodeTable::E2m1), _) => Kind::Mxfp4,
        (CodeMap::Table(CodeTable::Iq4Nl), _) if of_row => Kind::Nl4Row,
        (CodeMap::Table(CodeTable::Iq4Nl), _) if two_levels => Kind::Iq4Xs,
        (CodeMap::Table(CodeTable::Iq4Nl), _) => Kind::Nl4,
        (CodeMap::Biased(_), 3) => Kind::Q3K,
        (CodeMap::Biased(_), 4) if of_row => Kind::Int4Row,
        (CodeMap::Biased(_), 4) => Kind::Int4,
        (CodeMap::Biased(_), 5) => Kind::Int5,
        (CodeMap::Biased(_), _) if two_levels && !of_row => Kind::Q6K,
        (CodeMap::Biased(_), _) => Kind::Int6,
        (CodeMap::Unsigned, 2) => Kind::Q2K,
        (CodeMap::Unsigned, 4) if minimum == Minimum::F16 => Kind::Q4_1,
        (CodeMap::Unsigned, 4) => Kind::Q4K,
        (CodeMap::Unsigned, _) if minimum == Minimum::F16 => Kind::Q5_1,
        (CodeMap::Unsigned, _) => Kind::Q5K,
    }
}

/// Arithmetic of the kernels that multiply with a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// f32 activations and multiplications.
    Float,
    /// Tensor cores, with activations rounded to bf16 (one pass) or split into the sum of two bf16 numbers (two
    /// passes).
    Tensor {
        /// Number of passes: 1 or 2.
        passes: u32,
    },
}

impl How {
    /// Selects the kernels for a storage format, with the same roundings as on the CPU or finer ones.
    pub fn new(store: MatrixStore, arithmetic: Arithmetic, tensor_cores: bool) -> How {
        let float = arithmetic == Arithmetic::Float || store == MatrixStore::Plain(DType::F32);
        if float || !tensor_cores {
            return How::Float;
        }
        let coarse = matches!(store.form(arithmetic), Form::Bf16 | Form::Int8);
        How::Tensor { passes: if coarse { 1 } else { 2 } }
    }

    /// Returns the forms in which the kernels read activations.
    pub fn forms(self) -> Forms {
        match self {
            How::Float => Forms { f32: true, ..Forms::default() },
            How::Tensor { passes } => Forms { f32: false, hi: true, lo: passes == 2 },
        }
    }
}

/// A matrix with its optional bias and the arithmetic of its products.
#[derive(Debug)]
pub struct DeviceLinear {
    pub matrix: DeviceMatrix,
    /// Bias, if any: `(count, rows)`.
    pub bias: Option<Array<f32>>,
    pub how: How,
    /// Layer of the model and target of adapters that may change the matrix.
    pub target: Option<(usize, Target)>,
}

impl DeviceLinear {
    /// Copies a stack of matrices and their biases.
    ///
    /// # Errors
    /// The same as for [`DeviceMatrix::upload`].
    pub fn upload(uploader: &mut Uploader<'_>, stack: &[&Linear], arithmetic: Arithmetic) -> Result<DeviceLinear> {
        let matrices: Vec<&Weight> = stack.iter().map(|linear| &linear.matrix).collect();
        let biases: Vec<f32> = stack.iter().filter_map(|linear| linear.bias.as_deref()).flatten().copied().collect();
        let bias = if biases.is_empty() { None } else { Some(uploader.vector(&biases)?) };
        Ok(DeviceLinear {
            bias,
            target: stack[0].target(),
            ..DeviceLinear::without_bias(uploader, &matrices, arithmetic)?
        })
    }

    /// Copies a stack of matrices.
    ///
    /// # Errors
    /// The same as for [`DeviceMatrix::upload`].
    pub fn without_bias(
        uploader: &mut Uploader<'_>,
        stack: &[&Weight],
        arithmetic: Arithmetic,
    ) -> Result<DeviceLinear> {
        let how = How::new(stack[0].store(), arithmetic, uploader.context.info.has_tensor_cores());
        Ok(DeviceLinear { matrix: DeviceMatrix::upload(uploader, stack)?, bias: None, how, target: None })
    }
}

/// Marker for weights in the memory of a device.
#[derive(Debug)]
pub struct OnDevice;

impl Storage for OnDevice {
    type Matrix = DeviceLinear;
    type Stack = DeviceLinear;
    type Vector = Array<f32>;
}

/// Model to upload to GPUs, and the sizes that its execution needs.
pub struct UploadSource<'a> {
    /// Dimensions and flags of the model.
    pub config: &'a ModelConfig,
    /// Tensors of the model on the host.
    pub weights: &'a Weights,
    /// Element type and sizes of the KV cache.
    pub kv: KvLayout,
    /// Arithmetic in which products are computed.
    pub arithmetic: Arithmetic,
    /// Number of positions that caches must have room for.
    pub positions: usize,
    /// Largest number of KV pages, if their memory has a budget.
    pub kv_pages: Option<usize>,
    /// Maximum number of rows per step.
    pub rows: usize,
}

/// Copies a layer to the device.
///
/// # Errors
/// The same as for [`DeviceMatrix::upload`].
pub fn upload(uploader: &mut Uploader<'_>, layer: &Layer<Host>, arithmetic: Arithmetic) -> Result<Layer<OnDevice>> {
    layer.transfer(&mut Upload { uploader, arithmetic })
}

/// Copies the weights of a layer.
struct Upload<'u, 'c> {
    uploader: &'u mut Uploader<'c>,
    arithmetic: Arithmetic,
}

impl Transfer<'_, Host, OnDevice> for Upload<'_, '_> {
    fn matrix(&mut self, linear: &Linear) -> Result<DeviceLinear> {
        // Choosing experts is a step function, so the inputs are not rounded; the product is cheap anyway.
        let arithmetic = if linear.is_router() { Arithmetic::Float } else { self.arithmetic };
        DeviceLinear::upload(self.uploader, &[linear], arithmetic)
    }

    fn stack(&mut self, stack: &Vec<Linear>) -> Result<DeviceLinear> {
        DeviceLinear::upload(self.uploader, &stack.iter().collect::<Vec<_>>(), self.arithmetic)
    }

    fn vector(&mut self, values: &Vec<f32>) -> Result<Array<f32>> {
        self.uploader.vector(values)
    }

    fn sinks(&mut self, sinks: &Vec<f32>) -> Result<Array<f32>> {
        // Kernels compute powers of two instead of powers of e.
        self.uploader.vector(&sinks.iter().map(|sink| sink * LOG2_E).collect::<Vec<_>>())
    }
}

/// Returns the bytes that a layer takes on a device.
pub fn layer_bytes(layer: &Layer<Host>) -> u64 {
    layer.linears().map(linear_bytes).sum()
}

/// Returns the bytes that a matrix and its bias take on a device.
pub fn linear_bytes(linear: &Linear) -> u64 {
    let bias = linear.bias.as_ref().map_or(0, |bias| size_of_val(bias.as_slice()));
    linear.matrix.nbytes() as u64 + bias as u64
}
