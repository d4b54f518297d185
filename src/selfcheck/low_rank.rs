//! Checks the changes of products by adapters: one and several adapters of the same rows, rows without any, factors of
//! every type, experts, and matrices in place of those of the model. A row must have the same bits in any launch.

use super::mixture::{Routed, Rule, sorted};
use super::products::{Bias, Operand};
use super::random::{Store, normals};
use super::rig::{Case, EPS, Expected, Rig, rounding, split};
use crate::dtype::{DType, decode_floats, encode_floats};
use crate::error::Result;
use crate::model_config::RouterSoftmax;
use crate::runtime::cuda::adapters::ChangePlan;
use crate::runtime::cuda::args::{Adapted, Change};
use crate::runtime::cuda::array::{Acts, Array, Forms};
use crate::runtime::cuda::kind::Kind;
use crate::runtime::cuda::low_rank::{LowRank, Rows};
use crate::runtime::cuda::multiply::Product;
use crate::runtime::cuda::weights::How;
use std::ops::Range;

/// Change of a matrix, on the host and on the device.
struct Factors {
    change: Change,
    /// A: `(rank, cols)`.
    a: Vec<f32>,
    /// B: `(rank, rows)`.
    b: Vec<f32>,
    gain: Vec<f32>,
    add: Vec<f32>,
    _memory: Vec<Array<u8>>,
}

/// An adapter: for each product its changes, one per expert.
struct Adapter {
    changes: Vec<Vec<Factors>>,
    table: Array<Change>,
    _experts: Vec<Array<Change>>,
}

/// Rows that use some adapters with factors.
struct Use<'a> {
    rows: Range<usize>,
    adapters: Vec<(&'a Adapter, f32)>,
}

/// Products with their initial outputs, and the activations that they read.
struct LowRankTask<'a> {
    operands: &'a [Operand],
    /// Outputs before the changes, `(n, rows)` for each product.
    before: Vec<Vec<f32>>,
    acts: Acts,
    /// Activations as they are read: `(inputs, cols)`.
    x: Vec<f64>,
}

impl Factors {
    fn new(rig: &mut Rig<'_>, kind: Kind, [rank, rows, cols]: [usize; 3]) -> Result<Factors> {
        let dtype = [DType::F32, DType::F16, DType::BF16][kind as usize];
        let mut memory = Vec::new();
        let mut floats = |rig: &mut Rig<'_>, dtype: DType, len: usize| -> Result<(Vec<f32>, u64)> {
            let (mut bytes, mut values) = (Vec::new(), vec![0.0; len]);
            encode_floats(dtype, &normals(&mut rig.rng, len, 0.3), &mut bytes)?;
            decode_floats(dtype, &bytes, &mut values)?;
            let array = rig.array(&bytes)?;
            let address = array.view().address();
            memory.push(array);
            Ok((values, address))
        };
        let (a, a_address) = floats(rig, dtype, rank * cols)?;
        let (b, b_address) = floats(rig, dtype, rank * rows)?;
        let (gain, gain_address) = floats(rig, DType::F32, rows)?;
        let (add, add_address) = floats(rig, DType::F32, rows)?;
        // Half of the changes have vectors.
        let has = u64::from(rank % 2 == 0);
        let change = Change {
            a: a_address,
            b: b_address,
            gain: has * gain_address,
            add: has * add_address,
            rank: rank as u32,
            a_kind: kind as u32,
            b_kind: kind as u32,
            scale: 0.7,
            add_scales: u32::from(rank % 4 == 0),
            ..Change::default()
        };
        Ok(Factors { change, a, b, gain, add, _memory: memory })
    }

    /// Returns the product of a row of A, and the sum of its magnitudes.
    fn input(&self, k: usize, x: &[f64]) -> (f64, f64) {
        super::rig::sum(self.a[k * x.len()..][..x.len()].iter().zip(x).map(|(a, x)| f64::from(*a) * x))
    }

    /// Changes an expected output.
    fn apply(&self, factor: f32, x: &[f64], row: usize, (mut value, mut magnitude): (f64, f64)) -> (f64, f64) {
        let rows = self.gain.len();
        let scale = f64::from(self.change.scale * factor);
        for k in 0..self.change.rank as usize {
            let ((h, size), b) = (self.input(k, x), f64::from(self.b[k * rows + row]));
            (value, magnitude) = (value + scale * b * h, magnitude + (scale * b).abs() * size);
        }
        if self.change.gain != 0 {
            let gain = f64::from(self.gain[row]);
            (value, magnitude) = (value * gain, magnitude * gain.abs());
        }
        if self.change.add != 0 {
            let add = f64::from(self.add[row]) * if self.change.add_scales == 1 { f64::from(factor) } else { 1.0 };
            (value, magnitude) = (value + add, magnitude + add.abs());
        }
        (value, magnitude)
    }
}

impl Adapter {
    /// Makes random changes of the products with these operands, which have no more ranks than `rank`.
    fn new(rig: &mut Rig<'_>, kind: Kind, rank: usize, operands: &[Operand]) -> Result<Adapter> {
        let (mut changes, mut table, mut experts) = (Vec::new(), Vec::new(), Vec::new());
        for operand in operands {
            let matrix = &operand.linear.matrix;
            let shape = [rank, matrix.rows(), matrix.cols()];
            let own = (0..matrix.count).map(|_| Factors::new(rig, kind, shape)).collect::<Result<Vec<_>>>()?;
            let all: Vec<Change> = own.iter().map(|factors| factors.change).collect();
            if matrix.count == 1 {
                table.push(all[0]);
            } else {
                let all = rig.array(&all)?;
                table.push(Change { experts: all.view().address(), ..Change::default() });
                experts.push(all);
            }
            changes.push(own);
        }
        Ok(Adapter { changes, table: rig.array(&table)?, _experts: experts })
    }
}

/// Returns the entries of some rows, with one that is unused.
fn entries(uses: &[Use<'_>]) -> Vec<Adapted> {
    let mut entries = Vec::new();
    for Use { rows, adapters } in uses {
        entries.extend(adapters.iter().enumerate().map(|(part, (adapter, factor))| Adapted {
            changes: adapter.table.view().address(),
            first: rows.start as u32,
            count: rows.len() as u32,
            part: part as u32,
            parts: if part == 0 { adapters.len() as u32 } else { 0 },
            factor: *factor,
            unused: 0,
        }));
    }
    entries.push(Adapted::default());
    entries
}

impl<'a> LowRankTask<'a> {
    fn new(
        rig: &mut Rig<'_>,
        operands: &'a [Operand],
        forms: Forms,
        [n, inputs]: [usize; 2],
    ) -> Result<LowRankTask<'a>> {
        let cols = operands[0].linear.matrix.cols();
        let values = normals(&mut rig.rng, inputs * cols, 1.0);
        let acts = rig.acts(forms, &values, cols)?;
        let read = |value: &f32| match split(*value) {
            _ if forms.f32 => f64::from(*value),
            (hi, lo) => f64::from(hi) + if forms.lo { f64::from(lo) } else { 0.0 },
        };
        let x = values.iter().map(read).collect();
        let before =
            operands.iter().map(|operand| normals(&mut rig.rng, n * operand.linear.matrix.rows(), 1.0)).collect();
        Ok(LowRankTask { operands, before, acts, x })
    }

    /// Launches the changes of the outputs `before`, and returns the outputs.
    fn launch(
        &self,
        rig: &Rig<'_>,
        uses: &[Use<'_>],
        before: &[Vec<f32>],
        (rows, most): (Rows<'_>, usize),
    ) -> Result<Vec<Vec<f32>>> {
        let entries = entries(uses);
        let parts = uses.iter().map(|one| one.adapters.len()).max().unwrap_or(1);
        let plan = ChangePlan { slots: entries.len(), parts, rank: 48, ..ChangePlan::default() };
        let results = rig.unwritten::<f32>(self.operands.len() * parts * most * plan.rank)?;
        let outputs = before.iter().map(|y| rig.array(y)).collect::<Result<Vec<_>>>()?;
        let product = |(operand, y): (&'a Operand, &Array<f32>)| -> Product<'a> { (&operand.linear, y.view()) };
        let products: Vec<Product<'_>> = self.operands.iter().zip(&outputs).map(product).collect();
        let adapted = rig.array(&entries)?;
        rig.ops.low_rank(&LowRank {
            plan,
            adapted: adapted.view(),
            index: 0,
            products: &products,
            x: &self.acts,
            rows,
            results: results.view(),
        })?;
        outputs.iter().map(Array::read).collect()
    }

    /// Compares an output of a product: row `i` of the outputs belongs to the given row of the batch, input and expert.
    fn compare(
        &self,
        rig: &mut Rig<'_>,
        case: &Case,
        uses: &[Use<'_>],
        (product, found): (usize, &[f32]),
        place: impl Fn(usize) -> [usize; 3],
    ) {
        let matrix = &self.operands[product].linear.matrix;
        let (rows, cols) = (matrix.rows(), matrix.cols());
        rig.compare(case, rows, found, |i| {
            let [row, input, expert] = place(i / rows);
            let x = &self.x[input * cols..][..cols];
            let before = f64::from(self.before[product][i]);
            let own = uses.iter().filter(|one| one.rows.contains(&row)).flat_map(|one| &one.adapters);
            let mut changed = false;
            let (value, magnitude) = own.fold((before, before.abs()), |sum, (adapter, factor)| {
                changed = true;
                adapter.changes[product][expert].apply(*factor, x, i % rows, sum)
            });
            let tolerance = (rounding(cols) + rounding(48) + 8.0 * EPS) * magnitude;
            Expected { value, tolerance: if changed { tolerance } else { 0.0 } }
        });
    }
}

/// Forms of activations that products leave for adapters.
const FORMS: [Forms; 3] = [
    Forms { f32: true, hi: true, lo: false },
    Forms { f32: false, hi: true, lo: false },
    Forms { f32: false, hi: true, lo: true },
];

/// Checks the changes of products by adapters.
pub fn check(rig: &mut Rig<'_>) -> Result<()> {
    let float = Store::Plain(DType::F32);
    for (i, kind) in [Kind::F32, Kind::F16, Kind::Bf16].into_iter().enumerate() {
        let shapes: &[(&[usize], usize)] = &[(&[20], 33), (&[70, 17, 130], 96), (&[40, 129], 2052), (&[16], 1030)];
        for (j, (widths, cols)) in shapes.iter().enumerate().skip(if rig.quick { 2 } else { 0 }) {
            let mut operand = |rows: &usize| Operand::new(rig, float, [1, *rows, *cols], Bias::None);
            let operands = widths.iter().map(&mut operand).collect::<Result<Vec<_>>>()?;
            let batches: &[usize] = if rig.quick { &[1, 21] } else { &[1, 3, 9, 21, 70] };
            for n in batches {
                plain(rig, kind, &operands, FORMS[(i + j) % 3], *n)?;
            }
        }
        experts(rig, kind, FORMS[i])?;
    }
    Ok(())
}

/// Checks products whose outputs begin with a later row of the inputs.
fn plain(rig: &mut Rig<'_>, kind: Kind, operands: &[Operand], forms: Forms, n: usize) -> Result<()> {
    let from = n % 3;
    let matrix = &operands[0].linear.matrix;
    let shape = format!("{} products of {} columns, {n} rows, {forms:?}", operands.len(), matrix.cols());
    let case = rig.begin(format!("changes by adapters, {}", kind.name()), shape)?;
    let mut adapter = |rank| Adapter::new(rig, kind, rank, operands);
    let adapters = [adapter(8)?, adapter(3)?, adapter(1)?, adapter(48)?];
    let half = n / 2 + 1;
    let uses = [
        Use { rows: 0..half, adapters: vec![(&adapters[0], 1.0), (&adapters[1], -0.5)] },
        // The last row has no adapters if there are many.
        Use { rows: half..n - n / 9, adapters: vec![(&adapters[2], 2.0)] },
        Use { rows: n..n + from, adapters: vec![(&adapters[3], 1.0)] },
    ];
    let task = LowRankTask::new(rig, operands, forms, [n, n + from])?;
    let found = task.launch(rig, &uses, &task.before, (Rows::Batch(from..n + from), n))?;
    for (product, found) in found.iter().enumerate() {
        task.compare(rig, &case, &uses, (product, found), |i| [i + from, i + from, 0]);
    }
    // Each row alone.
    for row in [0, n / 2, n - 1] {
        let of = |values: &Vec<f32>| values[values.len() / n * row..][..values.len() / n].to_vec();
        let before: Vec<Vec<f32>> = task.before.iter().map(of).collect();
        let place = row + from;
        let own = uses.iter().filter(|one| one.rows.contains(&place));
        let own: Vec<Use<'_>> = own.map(|one| Use { rows: place..place + 1, adapters: one.adapters.clone() }).collect();
        rig.count(&case)?;
        let alone = task.launch(rig, &own, &before, (Rows::Batch(place..place + 1), 1))?;
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (alone, found) in alone.iter().zip(&found) {
            rig.same(&case, &format!("bits of row {row} alone, column"), &bits(alone), &bits(&of(found)));
        }
    }
    replaced(rig, &case, kind, &task, from..n + from)
}

/// Checks matrices in place of those of the model, for all rows but the first.
fn replaced(rig: &mut Rig<'_>, case: &Case, kind: Kind, task: &LowRankTask<'_>, rows: Range<usize>) -> Result<()> {
    let operand = &task.operands[0];
    let (height, cols) = (operand.linear.matrix.rows(), operand.linear.matrix.cols());
    let matrix = Factors::new(rig, kind, [height, 1, cols])?;
    let table = rig.array(&[Change { b: 0, gain: 0, add: 0, ..matrix.change }])?;
    let (first, count) = (rows.start as u32 + 1, rows.len() as u32 - 1);
    let entry = Adapted { changes: table.view().address(), first, count, parts: 1, factor: 1.0, ..Adapted::default() };
    let (adapted, y, results) = (rig.array(&[entry])?, rig.array(&task.before[0])?, rig.unwritten(0)?);
    rig.count(case)?;
    rig.ops.replace(&LowRank {
        plan: ChangePlan { slots: 1, parts: 1, ..ChangePlan::default() },
        adapted: adapted.view(),
        index: 0,
        products: &[(&operand.linear, y.view())],
        x: &task.acts,
        rows: Rows::Batch(rows.clone()),
        results: results.view(),
    })?;
    rig.compare(case, height, &y.read()?, |i| match i / height {
        0 => Expected::exact(task.before[0][i]),
        row => {
            let (value, magnitude) = matrix.input(i % height, &task.x[(row + rows.start) * cols..][..cols]);
            Expected { value, tolerance: rounding(cols) * magnitude }
        }
    });
    Ok(())
}

/// Checks changes of experts by two adapters, of which one has ranks that are no multiple of a block.
fn experts(rig: &mut Rig<'_>, kind: Kind, forms: Forms) -> Result<()> {
    const EXPERTS: usize = 5;
    const TOP_K: usize = 2;
    const COLS: usize = 48;
    let float = Store::Plain(DType::F32);
    let stack = [Operand::new(rig, float, [EXPERTS, 70, COLS], Bias::None)?];
    let router = Operand::router(rig, float, EXPERTS, COLS)?;
    let adapters = [Adapter::new(rig, kind, 10, &stack)?, Adapter::new(rig, kind, 4, &stack)?];
    let batches: &[usize] = if rig.quick { &[2, 40] } else { &[1, 2, 15, 40, 130] };
    for n in batches.iter().copied() {
        let x = normals(&mut rig.rng, n * COLS, 1.0);
        let acts = rig.acts(How::Float.forms(), &x, COLS)?;
        let routed = Routed::new(rig, &router, &acts, TOP_K, &Rule::plain(RouterSoftmax::Chosen))?;
        let grouped = routed.grouped();
        let mut choices = routed.choices()?;
        let (_, row_of) = sorted(&choices, TOP_K);
        choices.sort_unstable();
        let half = n / 2;
        let uses = [
            Use { rows: 0..half, adapters: vec![(&adapters[0], 1.0), (&adapters[1], 0.5)] },
            Use { rows: half..n - n / 9, adapters: vec![(&adapters[1], 2.0)] },
        ];
        for gather in [true, false] {
            let shape = format!("{n} rows, shares of {}, gathered {gather}, {forms:?}", grouped.share_rows);
            let case = rig.begin(format!("changes of experts by adapters, {}", kind.name()), shape)?;
            let task = LowRankTask::new(rig, &stack, forms, [grouped.pairs, if gather { n } else { grouped.pairs }])?;
            let found = task.launch(rig, &uses, &task.before, (Rows::Pairs(&grouped, gather), grouped.pairs))?;
            task.compare(rig, &case, &uses, (0, &found[0]), |pair| {
                let row = row_of[pair] as usize;
                [row, if gather { row } else { pair }, choices[pair] as usize]
            });
        }
    }
    Ok(())
}
