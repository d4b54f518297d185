//! Products with the factors of adapters: before, together with and after those with the matrices of the model.

use super::{Changed, Factor};
use crate::runtime::cpu::{Acts, Arithmetic, Cpu, Job, LowRankInputJob, LowRankJob, Matrix};

/// Number of rows whose outputs are changed at once: all of B and these outputs fit into the second-level cache.
const TOGETHER: usize = 16;

/// Results of the factors A of the changes of some products.
pub struct Factors<'a> {
    changed: Vec<(usize, Changed<'a>)>,
    /// Results of A for each of them: `(rows, rank)`.
    results: Vec<Vec<f32>>,
}

/// Product with a factor B in int8, its scale and its inputs.
type Int8Product<'a> = (&'a Matrix, f32, Acts);

impl<'a> Factors<'a> {
    /// Lists the changes of products.
    pub fn of<'b>(products: impl Iterator<Item = &'b [Changed<'a>]>) -> Factors<'a>
    where
        'a: 'b,
    {
        let changed: Vec<(usize, Changed<'a>)> =
            products.enumerate().flat_map(|(i, changed)| changed.iter().map(move |one| (i, one.clone()))).collect();
        let result = |(_, one): &(usize, Changed<'a>)| vec![0.0; one.change.rank() * one.rows.len()];
        Factors { results: changed.iter().map(result).collect(), changed }
    }

    /// Computes the products with A in floats, and returns those with A in int8, which are computed in one region with
    /// the base products. `inputs` are those of the products.
    pub fn begin<'s>(&'s mut self, cpu: &Cpu, arithmetic: Arithmetic, inputs: &[&'s Acts]) -> Vec<Job<'s>> {
        let (mut floats, mut jobs, mut wide) = (Vec::new(), Vec::new(), Vec::new());
        for ((product, one), h) in self.changed.iter().zip(&mut self.results) {
            let (x, tokens) = (inputs[*product], one.rows.clone());
            match one.change.low_rank.as_ref().map(|low_rank| &low_rank.a) {
                Some(Factor::Floats(a)) => floats.push(LowRankInputJob { a, x, tokens, h }),
                Some(Factor::Int8(matrix)) => {
                    // The inputs of matrices of floats have no integer form, but always that of f32.
                    let list = if x.has(matrix.store.form(arithmetic)) { &mut jobs } else { &mut wide };
                    list.push(Job { matrix, bias: None, x, tokens, y: h, added: None });
                }
                None => {}
            }
        }
        if !floats.is_empty() {
            cpu.low_rank_inputs(&mut floats);
        }
        if !wide.is_empty() {
            cpu.matmul(&mut wide, Arithmetic::Float);
        }
        jobs
    }

    /// Changes the results of the products: for each its input, the first row of the input that it has multiplied, and
    /// its output. Changes of the same rows follow one another, those by a factor B in int8 before all others.
    pub fn finish<'b>(
        self,
        cpu: &Cpu,
        arithmetic: Arithmetic,
        products: impl Iterator<Item = (&'b Acts, usize, &'b mut [f32])>,
    ) {
        if self.changed.is_empty() {
            return;
        }
        let mut products: Vec<_> = products.collect();
        for (product, one) in &self.changed {
            let (x, first, y) = &mut products[*product];
            if let Some(matrix) = one.change.replaced() {
                let y = one.outputs(*first, y);
                // Inputs always have their f32 form.
                let job = Job { matrix, bias: None, x, tokens: one.rows.clone(), y, added: None };
                cpu.matmul(&mut [job], Arithmetic::Float);
            }
        }
        let mut outputs = self.outputs(cpu, arithmetic, products.into_iter().map(|(_, first, y)| (first, y)));
        for round in 0..outputs.iter().map(|(int8, _)| int8.len()).max().unwrap_or(0) {
            let jobs = outputs.iter_mut().filter_map(|(int8, job)| Some((int8.get(round)?, &mut *job.y)));
            let jobs = jobs.flat_map(|((matrix, scale, x), y)| {
                y.chunks_mut(TOGETHER * matrix.rows).enumerate().map(move |(i, y)| {
                    let first = i * TOGETHER;
                    let tokens = first..first + y.len() / matrix.rows;
                    Job { matrix, bias: None, x, tokens, y, added: Some(*scale) }
                })
            });
            cpu.matmul(&mut jobs.collect::<Vec<_>>(), arithmetic);
        }
        let mut jobs: Vec<_> = outputs.into_iter().map(|(_, job)| job).filter(|job| !job.parts.is_empty()).collect();
        if !jobs.is_empty() {
            cpu.add_low_rank(&mut jobs);
        }
    }

    /// Returns the changes of each group of rows, with their part of the outputs of a product.
    fn outputs<'s>(
        &'s self,
        cpu: &Cpu,
        arithmetic: Arithmetic,
        products: impl Iterator<Item = (usize, &'s mut [f32])>,
    ) -> Vec<(Vec<Int8Product<'s>>, LowRankJob<'s>)> {
        // Changes of the same rows by several adapters follow one another.
        let same = |a: &(usize, Changed<'_>), b: &(usize, Changed<'_>)| (a.0, &a.1.rows) == (b.0, &b.1.rows);
        let (mut all, mut results) = (Vec::new(), &self.results[..]);
        let mut products = products.enumerate();
        let (mut number, mut rest, mut at) = (usize::MAX, &mut [] as &mut [f32], 0);
        for group in self.changed.chunk_by(same) {
            let (product, Changed { rows, change, .. }) = &group[0];
            while number != *product {
                let (next, (first, y)) = products.next().expect("changes in the order of the products");
                (number, rest, at) = (next, y, first);
            }
            let (_, after) = std::mem::take(&mut rest).split_at_mut((rows.start - at) * change.rows);
            let (y, after) = after.split_at_mut(rows.len() * change.rows);
            (rest, at) = (after, rows.end);
            let (own, others) = results.split_at(group.len());
            results = others;
            let changes = || group.iter().map(|(_, one)| one).zip(own);
            let int8 = changes().filter_map(|(one, h)| {
                let (matrix, scale) = one.change.int8_b()?;
                let mut x = Acts::default();
                x.set(rows.len(), matrix.cols, h);
                cpu.prepare(&mut x, matrix.store.form(arithmetic));
                Some((matrix, scale * one.factor, x))
            });
            let int8 = int8.collect();
            let parts = changes().filter_map(|(one, h)| one.change.part(one.factor, h)).collect();
            all.push((int8, LowRankJob { parts, rows: change.rows, y }));
        }
        all
    }
}

impl Changed<'_> {
    /// Returns the outputs of these rows of a product whose first row is `first`.
    fn outputs<'y>(&self, first: usize, y: &'y mut [f32]) -> &'y mut [f32] {
        &mut y[(self.rows.start - first) * self.change.rows..][..self.rows.len() * self.change.rows]
    }
}
