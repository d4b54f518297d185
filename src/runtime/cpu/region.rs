//! Parallel region: divides a list of matrix products among threads into contiguous pieces of equal cost. Each thread
//! reads the weights of its piece in the order of memory.
//!
//! The unit of work is 16 rows (a tile, or 16 plain rows). All units of all jobs form one sequence, weighted by cost,
//! and thread `t` of `T` has the t-th piece of equal cost. So a thread reads one range of each matrix, until its
//! piece is done and it takes units from other threads ([`super::pieces`]). It computes the units that it takes in
//! rectangles of the size that the kernel prefers. No result depends on the division.
#![allow(unsafe_code)]

use super::acts::Acts;
use super::generic::plain::STRIPE;
use super::kernels::{Kernel, KernelTable, MAX_OUT, MAX_PANEL_OUT, Out, PlainFn, Rectangle};
use super::matrix::{Arithmetic, Matrix, MatrixStore};
use super::packed::{Packed, Rows};
use super::panel::{Ahead, Panel, PanelKernel, Turn};
use super::pieces::Pieces;
use super::sink::Sink;

use crate::scheme::TILE_ROWS;
use std::cell::RefCell;
use std::ops::Range;

thread_local! {
    /// Buffers into which this thread unpacks tiles.
    static PANELS: RefCell<Vec<Panel>> = RefCell::default();
    /// Buffer into which this thread unpacks plain rows.
    static ROWS: RefCell<Rows> = RefCell::default();
}

/// Bytes of plain weights that stay in the second-level cache while they are multiplied by all columns.
const CACHED_WEIGHT_BYTES: usize = 512 << 10;

/// Number of f32 activations that stay in the second-level cache together with a panel.
const CACHED_ACTS: usize = 128 << 10;

/// One product of a parallel region: `y = x * matrix^T + bias`, or `y += added * x * matrix^T`.
#[derive(Debug)]
pub struct Job<'a> {
    /// Weights.
    pub matrix: &'a Matrix,
    /// Bias that is added to every row of the result: `(rows)`.
    pub bias: Option<&'a [f32]>,
    /// Inputs: `(n, cols)`, in the form that [`MatrixStore::form`] returns.
    pub x: &'a Acts,
    /// Rows of `x` that take part.
    pub tokens: Range<usize>,
    /// Outputs: `(tokens, rows)`, row-major, overwritten unless `added`.
    pub y: &'a mut [f32],
    /// Factor of the product if it is added to the outputs, without a bias.
    pub added: Option<f32>,
}

impl<'a> Job<'a> {
    /// Makes the product of all rows of `x`.
    pub fn new(matrix: &'a Matrix, bias: Option<&'a [f32]>, x: &'a Acts, y: &'a mut [f32]) -> Job<'a> {
        Job { matrix, bias, x, tokens: 0..x.n(), y, added: None }
    }
}

/// Kernel that computes a product.
enum ProductKernel {
    Plain(PlainFn),
    Tiles(Kernel),
}

/// One product whose shapes are checked and whose units can be divided among threads.
pub(super) struct Task<'a> {
    matrix: &'a Matrix,
    x: &'a Acts,
    /// Rows (tokens) of `x` that take part.
    tokens: Range<usize>,
    sink: Sink<'a>,
    run: ProductKernel,
    /// Number of units of 16 rows; the last may be shorter.
    pub units: usize,
    /// Cost of a unit: the bytes to read, plus `cols` for the arithmetic of each token.
    pub unit_cost: usize,
}

// SAFETY: the pointer of the sink is the only field that is not Send and Sync by itself. It comes from the exclusive
// borrow of a `Job` that the task keeps for its lifetime, and threads write disjoint rows of it: `run` writes only
// the rows of its units, and the caller gives each unit to one thread.
unsafe impl Send for Task<'_> {}
// SAFETY: the same reasons as for `Send`.
unsafe impl Sync for Task<'_> {}

impl<'a> Task<'a> {
    /// Checks that the parts of a job agree, and selects its kernel.
    ///
    /// # Panics
    /// The shapes of the job do not agree, or the activations lack the form that the matrix needs.
    pub(super) fn new(job: &'a mut Job<'_>, table: &KernelTable, arithmetic: Arithmetic) -> Task<'a> {
        let (matrix, x) = (job.matrix, job.x);
        let n = job.tokens.len();
        assert!(
            job.tokens.start <= job.tokens.end && job.tokens.end <= x.n(),
            "tokens that the activations do not have"
        );
        assert_eq!((matrix.cols, job.y.len()), (x.k(), n * matrix.rows), "a product whose shapes do not agree");
        assert!(job.bias.is_none_or(|bias| bias.len() == matrix.rows), "a bias that does not fit the matrix");
        assert!(job.added.is_none() || job.bias.is_none(), "a product that is added, with a bias");
        assert!(matrix.is_consistent(), "a matrix whose payload does not fit its store");
        let form = matrix.store.form(arithmetic);
        assert!(x.has(form), "activations without their {form:?} form");
        let units = matrix.rows.div_ceil(TILE_ROWS);
        let unit_bytes = matrix.nbytes() / units.max(1);
        Task {
            matrix,
            x,
            tokens: job.tokens.clone(),
            sink: Sink {
                y: job.y.as_mut_ptr(),
                rows: matrix.rows,
                first: job.tokens.start,
                bias: job.bias,
                added: job.added,
            },
            run: match matrix.store {
                MatrixStore::Plain(_) => ProductKernel::Plain(table.plain(form)),
                MatrixStore::Tiled(_) => ProductKernel::Tiles(table.tile(form)),
            },
            units,
            unit_cost: (unit_bytes + matrix.cols * n).max(1),
        }
    }

    /// Returns the cost of the whole product; 0 without tokens.
    pub(super) fn cost(&self) -> usize {
        if self.tokens.is_empty() { 0 } else { self.units * self.unit_cost }
    }

    /// Returns the number of units that are worth computing together: 8 if there are enough columns to compute whole
    /// panels of tiles or blocks of plain rows, otherwise 1.
    fn grain(&self) -> u32 {
        let few = match &self.run {
            ProductKernel::Plain(_) => self.tokens.len() <= 1,
            ProductKernel::Tiles(kernel) => self.panel(kernel).is_none(),
        };
        if few { 1 } else { 8 }
    }

    /// Returns the kernel that unpacks weights once for all columns, if there are enough columns for this to be
    /// faster.
    fn panel(&self, kernel: &Kernel) -> Option<PanelKernel> {
        kernel.panel.filter(|panel| self.tokens.len() >= panel.least_cols)
    }

    /// Computes the rows of these units for all tokens.
    ///
    /// # Safety
    /// * `units` lies inside `0..self.units`, and no other thread computes any of them at the same time.
    /// * The CPU has the instruction set of the table given to [`Task::new`].
    pub(super) unsafe fn run(&self, units: Range<usize>) {
        match &self.run {
            // SAFETY: `plain` requires the same as this function; `new` has checked form and shapes.
            ProductKernel::Plain(run) => unsafe { self.plain(*run, units) },
            // SAFETY: `tiles` requires the same as this function; `new` has checked form and shapes.
            ProductKernel::Tiles(kernel) => unsafe { self.tiles(kernel, units) },
        }
    }

    /// Returns the rectangle of these items (rows or tiles) and all tokens.
    fn part(&self, item: usize, items: usize) -> Rectangle<'a> {
        let (col, cols) = (self.tokens.start, self.tokens.len());
        Rectangle { matrix: self.matrix, x: self.x, item, items, col, cols, near: false, next: &[] }
    }

    /// # Safety
    /// Same as [`Task::run`], for a plain matrix.
    unsafe fn plain(&self, run: PlainFn, units: Range<usize>) {
        let rows = units.start * TILE_ROWS..(units.end * TILE_ROWS).min(self.matrix.rows);
        if let Some(packed) = &self.matrix.packed {
            // SAFETY: `packed` requires the same as this function.
            return ROWS.with_borrow_mut(|memory| unsafe { self.packed(run, packed, rows, memory) });
        }
        let row_bytes = self.matrix.data.len() / self.matrix.rows.max(1);
        let block = (CACHED_WEIGHT_BYTES / row_bytes.max(1)).next_multiple_of(STRIPE).max(STRIPE);
        for item in rows.clone().step_by(block) {
            let items = block.min(rows.end - item);
            let part = self.part(item, items);
            // SAFETY: the caller guarantees the instruction set and that no other thread writes these rows; the part
            // lies inside the matrix and the activations.
            unsafe { run(&part, &self.sink) };
        }
    }

    /// Computes rows like [`Task::plain`], for a packed matrix, whose rows are first unpacked into `memory`.
    ///
    /// # Safety
    /// Same as [`Task::plain`].
    unsafe fn packed(&self, run: PlainFn, packed: &Packed, rows: Range<usize>, memory: &mut Rows) {
        let n = self.tokens.len();
        let step = Packed::panel_rows(self.matrix.cols, n, CACHED_WEIGHT_BYTES);
        for item in rows.clone().step_by(step) {
            let items = step.min(rows.end - item);
            let matrix = memory.unpack(self.matrix, packed, item, items);
            let part = Rectangle { matrix, near: true, ..self.part(0, items) };
            // SAFETY: the caller guarantees the instruction set and that no other thread writes these rows; the part
            // is all rows that were unpacked, and row 0 of the sink is the first of them.
            unsafe { run(&part, &self.sink.starting_at(item)) };
        }
    }

    /// # Safety
    /// Same as [`Task::run`], for a tiled matrix.
    unsafe fn tiles(&self, kernel: &Kernel, units: Range<usize>) {
        let (n, mut units) = (self.tokens.len(), units);
        if let Some(panel) = self.panel(kernel) {
            let whole = units.start..units.end - units.len() % panel.items;
            units.start = whole.end;
            // SAFETY: `panels` requires the same as this function; `whole` consists of whole panels.
            PANELS.with_borrow_mut(|memory| unsafe { self.panels(&panel, whole, memory) });
        }
        let step = kernel.items(n);
        let mut out = Out([0.0; MAX_OUT]);
        for item in units.clone().step_by(step) {
            let items = step.min(units.end - item);
            for (col, cols) in pieces(n, kernel.cols) {
                let part = Rectangle { col: self.tokens.start + col, cols, ..self.part(item, items) };
                // SAFETY: the caller guarantees the instruction set and that no other thread computes these units; the
                // part lies inside the matrix and the activations.
                unsafe { self.tile_part(&part, &mut out.0, |out| (kernel.run)(&part, out)) };
            }
        }
    }

    /// Computes units like [`Task::tiles`], with weights that are unpacked once. As many panels as the cache holds
    /// are multiplied by the same few columns, one after the other, while the packed weights of the next panels are
    /// prefetched.
    ///
    /// # Safety
    /// Same as [`Task::tiles`]; the units are whole panels.
    unsafe fn panels(&self, kernel: &PanelKernel, units: Range<usize>, panels: &mut Vec<Panel>) {
        let mut out = Out([0.0; MAX_PANEL_OUT]);
        // If the activations are few, they stay in the cache as a whole. Then one panel at a time is better, because
        // it stays there, too.
        let k = self.matrix.cols;
        let at_once = if self.tokens.len() * k > CACHED_ACTS { kernel.at_once(k) } else { 1 };
        for first in units.clone().step_by(at_once * kernel.items) {
            let count = at_once.min((units.end - first) / kernel.items);
            panels.resize_with(panels.len().max(count), Panel::default);
            let ahead = Ahead::behind(&self.part(first, count * kernel.items), count);
            let mut done = 0;
            for (col, cols) in pieces(self.tokens.len(), kernel.cols) {
                let turn = if col == 0 { Turn::First } else { Turn::Again };
                for (i, panel) in panels[..count].iter_mut().enumerate() {
                    let next = ahead.share(done..done + cols);
                    done += cols;
                    let part = self.part(first + i * kernel.items, kernel.items);
                    let part = Rectangle { col: self.tokens.start + col, cols, next, ..part };
                    // SAFETY: the caller guarantees the instruction set and that no other thread computes these
                    // units; the part lies inside the matrix and the activations, and the first turn unpacks the panel
                    // from the same items.
                    unsafe { self.tile_part(&part, &mut out.0, |out| (kernel.run)(&part, panel, turn, out)) };
                }
            }
        }
    }

    /// Calls a kernel, which writes its sums to `out`, and stores them in the sink.
    ///
    /// # Safety
    /// Same as [`Task::run`], for the tiles of the part.
    unsafe fn tile_part(&self, part: &Rectangle<'_>, out: &mut [f32], sums: impl FnOnce(&mut [f32])) {
        let width = part.items * TILE_ROWS;
        sums(&mut out[..width * part.cols]);
        let row = part.item * TILE_ROWS;
        let rows = width.min(self.matrix.rows - row);
        for (c, sums) in out.chunks_exact(width).take(part.cols).enumerate() {
            // SAFETY: the rows lie inside the outputs, and the caller guarantees that no other thread writes them.
            unsafe { self.sink.put(part.col + c, row, &sums[..rows]) };
        }
    }
}

/// Divides `0..n` into pieces of nearly equal size, at most `most`, and returns their starts and lengths.
fn pieces(n: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = n.div_ceil(most);
    (0..count).map(move |i| (n * i / count, n * (i + 1) / count - n * i / count))
}

/// A list of tasks, divided among threads.
pub(super) struct Region<'a> {
    tasks: Vec<Task<'a>>,
    pieces: Pieces,
}

impl<'a> Region<'a> {
    /// Gives each thread a piece of equal cost of the sequence of all units.
    ///
    /// # Panics
    /// There are more than 2^32 units, each of which has at least 16 bytes.
    pub(super) fn new(tasks: Vec<Task<'a>>, threads: usize) -> Region<'a> {
        let total: usize = tasks.iter().map(Task::cost).sum();
        let border = |t| if t == threads { total } else { total / threads * t };
        let unit = |t| u32::try_from(units_before(&tasks, border(t))).expect("fewer than 2^32 units");
        let grain = tasks.iter().map(Task::grain).max().unwrap_or(1);
        let pieces = Pieces::new((0..threads).map(|t| unit(t)..unit(t + 1)), grain);
        Region { tasks, pieces }
    }

    /// Computes the units of thread `t`, then units of other threads until none is left.
    ///
    /// # Safety
    /// The CPU has the instruction set of the table given to [`Task::new`].
    pub(super) unsafe fn run(&self, t: usize) {
        while let Some(units) = self.pieces.next(t) {
            let (from, until) = (units.start as usize, units.end as usize);
            let mut first = 0;
            for task in self.tasks.iter().filter(|task| task.cost() > 0) {
                let inside = |unit: usize| unit.saturating_sub(first).min(task.units);
                // SAFETY: the range lies inside the task, each unit is given out once, and the caller guarantees the
                // instruction set.
                unsafe { task.run(inside(from)..inside(until)) };
                first += task.units;
            }
        }
    }
}

/// Returns how many units in the sequence of all tasks start before this cost.
fn units_before(tasks: &[Task<'_>], cost: usize) -> usize {
    let (mut start, mut units) = (0, 0);
    for task in tasks.iter().filter(|task| task.cost() > 0) {
        units += cost.saturating_sub(start).div_ceil(task.unit_cost).min(task.units);
        start += task.cost();
    }
    units
}
