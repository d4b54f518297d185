//! Gated short convolution: `output(C * conv(B * x))` for the projections B, C and x of the input.

use super::{Model, Walk, product};
use crate::error::Result;
use crate::runtime::layer::ShortConv;
use crate::runtime::weights::Host;
use crate::simd::Kernel;

/// Buffers of short convolutions.
#[derive(Debug, Default)]
pub(super) struct ConvScratch {
    /// B, C and x of each row: `(n, 3 * hidden)`.
    projected: Vec<f32>,
    /// For each run of rows, `B * x` of the positions before it and of its rows: `(width - 1 + tokens, hidden)`.
    windows: Vec<f32>,
}

impl Model {
    /// Projects all rows, and writes `C * conv(B * x)` of them to the input of the output projection.
    pub(super) fn convolve(&self, index: usize, op: &ShortConv<Host>, w: &mut Walk<'_>) -> Result<()> {
        let (s, hidden, reach) = (&mut *w.scratch, self.config.hidden, op.width - 1);
        let n = s.normed.n();
        s.conv.projected.resize(n * 3 * hidden, 0.0);
        let projection = product(&op.input, &s.normed, &mut s.conv.projected, &s.groups);
        self.compute(vec![projection], &mut w.step)?;
        s.conv.windows.clear();
        // First row of the window of each row.
        let mut starts = Vec::with_capacity(n);
        for run in &s.runs {
            let window = &mut w.states[run.sequence].layer(index - self.layers.start).window;
            window.read(&mut s.conv.windows);
            let first = s.conv.windows.len();
            starts.extend((0..run.tokens).map(|i| first / hidden - reach + i));
            let rows = &s.conv.projected[run.first * 3 * hidden..][..run.tokens * 3 * hidden];
            for row in rows.chunks_exact(3 * hidden) {
                s.conv.windows.extend(row[..hidden].iter().zip(&row[2 * hidden..]).map(|(b, x)| b * x));
            }
            window.push(run.tokens, &s.conv.windows[first..]);
        }
        s.attention.attended.reset(n, hidden);
        let (out, stride) = s.attention.attended.rows_mut();
        let (projected, windows) = (&s.conv.projected, &s.conv.windows);
        self.cpu.for_rows(out, stride, |i, out| {
            let gate = &projected[(3 * i + 1) * hidden..][..hidden];
            let window = &windows[starts[i] * hidden..][..op.width * hidden];
            let (kernel, bias, out) = (&op.kernel, op.bias.as_deref(), &mut out[..hidden]);
            self.cpu.level().run(Convolve { window, kernel, bias, gate, out });
        });
        Ok(())
    }
}

/// Convolution of one position, times its gate; products are added from the oldest position on.
struct Convolve<'a> {
    /// Inputs: `(width, hidden)`.
    window: &'a [f32],
    /// Factors: `(width, hidden)`.
    kernel: &'a [f32],
    bias: Option<&'a [f32]>,
    gate: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Convolve<'_> {
    #[inline(always)]
    fn run(self) {
        let hidden = self.out.len();
        self.out.fill(0.0);
        for (inputs, factors) in self.window.chunks_exact(hidden).zip(self.kernel.chunks_exact(hidden)) {
            for i in 0..hidden {
                self.out[i] += inputs[i] * factors[i];
            }
        }
        for i in 0..hidden {
            let bias = self.bias.map_or(0.0, |bias| bias[i]);
            self.out[i] = (self.out[i] + bias) * self.gate[i];
        }
    }
}
