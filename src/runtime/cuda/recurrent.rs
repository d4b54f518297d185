//! Launches of recurrent mixers: gated short convolution, gated delta net, Mamba-2.

use super::args;
use super::array::{Acts, View};
use super::context::Launch;
use super::ops::{GRID, Ops};
use crate::error::Result;

/// Most positions that the convolution kernels read, including the present one.
pub const CONV_WIDTH: usize = 8;
/// Largest key of the kernel of linear attention.
pub const LINEAR_KEY: usize = 256;
/// Values of a head that a thread block of this kernel computes.
const LINEAR_SPAN: usize = 16;
/// Columns of a thread block of the convolution kernels.
const CONV_SPAN: usize = 128;

/// Memory of a recurrent layer in the state of a text, in numbers from its beginning on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatePlace {
    /// Last inputs of the convolution: `(width - 1, channels)`.
    pub window: usize,
    /// Matrices of the heads: `(value heads, value_dim, key_dim)`.
    pub matrix: usize,
}

/// Factors of a convolution over all its channels.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// Factors: `(width, channels)`.
    pub factors: View<f32>,
    /// Bias, if any: `(channels)`.
    pub bias: Option<View<f32>>,
    pub channels: usize,
    pub width: usize,
}

/// Heads of linear attention.
#[derive(Clone, Copy)]
pub struct LinearHeads {
    pub key_heads: usize,
    /// Value heads that read one key head.
    pub per_key: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Whether value heads that read one key head are `key_heads` apart.
    pub tiled: bool,
}

/// Arguments of linear attention.
pub struct Linear {
    pub heads: LinearHeads,
    /// Queries and keys `(n, key_heads * key_dim)`, and values `(n, value heads * value_dim)`, after the convolution.
    pub qkv: [View<f32>; 3],
    /// Projection to the decays: `(n, value heads)`.
    pub decays: View<f32>,
    /// Projection to the rates of the delta rule, `(n, value heads)`; `None` for Mamba-2.
    pub rates: Option<View<f32>>,
    /// Factors of the logarithms of the decays, and numbers that are added before the softplus: `(value heads)`.
    pub decay: [View<f32>; 2],
    /// Shares of the values in the output, if any: `(value heads)`.
    pub skip: Option<View<f32>>,
    pub out: View<f32>,
}

/// Arguments of the norm of the output.
pub struct GatedNorm<'a> {
    pub x: View<f32>,
    pub gate: View<f32>,
    /// Factors: of a group, or with `gate_first` of all columns.
    pub weight: View<f32>,
    pub out: &'a Acts,
    pub n: usize,
    /// Columns that are normalized together.
    pub group: usize,
    /// Whether the gate comes before the norm.
    pub gate_first: bool,
    pub eps: f32,
}

impl LinearHeads {
    fn value_heads(&self) -> usize {
        self.key_heads * self.per_key
    }
}

impl Ops {
    /// Replaces a projection of `columns` columns, whose channels begin with `first`, by the SiLU of its convolution.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn convolve(
        &self,
        x: View<f32>,
        kernel: Kernel,
        [first, columns]: [usize; 2],
        runs: View<args::StateRun>,
        place: StatePlace,
    ) -> Result<()> {
        assert!(first + columns <= kernel.channels);
        let args = args::Conv { first: first as u32, ..conv(x, kernel, columns, runs, place) };
        self.start("convolve", conv_launch(columns, runs), &args)
    }

    /// Computes `C * conv(B * x)` for rows of B, C and x.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn short_conv(
        &self,
        x: View<f32>,
        kernel: Kernel,
        runs: View<args::StateRun>,
        place: StatePlace,
        out: &Acts,
    ) -> Result<()> {
        assert!(out.width == kernel.channels && x.len() >= 3 * kernel.channels);
        let args = args::Conv { out: out.args(), ..conv(x, kernel, kernel.channels, runs, place) };
        self.start("short_conv", conv_launch(kernel.channels, runs), &args)
    }

    /// Computes linear attention of the runs, and their states.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn linear_attention(&self, task: &Linear, runs: View<args::StateRun>, place: StatePlace) -> Result<()> {
        let (heads, [q, k, v]) = (task.heads, task.qkv);
        let value_heads = heads.value_heads();
        assert!(heads.key_dim <= LINEAR_KEY && value_heads <= GRID && (1..=GRID).contains(&runs.len()));
        assert!(task.decay.iter().chain(&task.skip).all(|vector| vector.len() == value_heads));
        assert!(q.len() >= heads.key_heads * heads.key_dim && k.len() >= heads.key_heads * heads.key_dim);
        assert!(v.len() >= value_heads * heads.value_dim && task.out.len() >= value_heads * heads.value_dim);
        let args = args::LinearAttention {
            q: q.address(),
            k: k.address(),
            v: v.address(),
            decays: task.decays.address(),
            rates: task.rates.map_or(0, View::address),
            decay: task.decay[0].address(),
            decay_bias: task.decay[1].address(),
            skip: task.skip.map_or(0, View::address),
            out: task.out.address(),
            runs: runs.address(),
            offset: place.matrix as u64,
            key_heads: heads.key_heads as u32,
            per_key: heads.per_key as u32,
            key_dim: heads.key_dim as u32,
            value_dim: heads.value_dim as u32,
            tiled: heads.tiled.into(),
            unused: 0,
        };
        let grid = [heads.value_dim.div_ceil(LINEAR_SPAN) as u32, value_heads as u32, runs.len() as u32];
        self.start("linear_attention", Launch { grid, block: 128, shared: 0 }, &args)
    }

    /// Normalizes the output of heads and multiplies it by its gate.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn gated_norm(&self, task: &GatedNorm<'_>) -> Result<()> {
        let (n, width) = (task.n, task.out.width);
        assert!(task.x.len() >= n * width && task.gate.len() >= n * width && task.out.rows >= n && n <= GRID);
        assert!(width.is_multiple_of(task.group));
        assert_eq!(task.weight.len(), if task.gate_first { width } else { task.group });
        let args = args::GatedNorm {
            x: task.x.address(),
            gate: task.gate.address(),
            weight: task.weight.address(),
            out: task.out.args(),
            n: n as u32,
            width: width as u32,
            group: task.group as u32,
            gate_first: task.gate_first.into(),
            eps: task.eps,
            unused: 0,
        };
        let grid = [(width / task.group) as u32, n as u32, 1];
        self.start("gated_norm", Launch { grid, block: 128, shared: 0 }, &args)
    }
}

/// Returns the arguments of a convolution of `columns` channels from the first on, without output.
fn conv(x: View<f32>, kernel: Kernel, columns: usize, runs: View<args::StateRun>, place: StatePlace) -> args::Conv {
    let Kernel { factors, bias, channels, width } = kernel;
    assert!(width <= CONV_WIDTH && factors.len() == width * channels && x.len() >= columns);
    assert!(bias.is_none_or(|bias| bias.len() == channels));
    args::Conv {
        x: x.address(),
        kernel: factors.address(),
        bias: bias.map_or(0, View::address),
        runs: runs.address(),
        out: args::Acts::default(),
        offset: place.window as u64,
        channels: channels as u32,
        first: 0,
        columns: columns as u32,
        width: width as u32,
    }
}

fn conv_launch(columns: usize, runs: View<args::StateRun>) -> Launch {
    assert!((1..=GRID).contains(&runs.len()));
    Launch { grid: [columns.div_ceil(CONV_SPAN) as u32, runs.len() as u32, 1], block: CONV_SPAN as u32, shared: 0 }
}
