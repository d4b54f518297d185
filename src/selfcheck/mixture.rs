//! Mixtures of experts: the router's product, who chooses whom, with what weight, and in which order experts compute.

use super::products::{Both, Given, dot, widened};
use super::random::{Store, normals};
use super::rig::{Case, EPS, Expected, Rig};
use crate::dtype::DType;
use crate::error::Result;
use crate::model_config::RouterSoftmax;
use crate::progress::ProgressBar;
use crate::runtime::cuda::args::Share;
use crate::runtime::cuda::array::{Acts, Array};
use crate::runtime::cuda::multiply;
use crate::runtime::cuda::ops::{Chosen, Grouped, most_shares};
use crate::runtime::cuda::weights::{How, Uploader};
use crate::runtime::moe::route;
use crate::scheme::QuantSpec;

/// What a router is.
pub struct Router {
    both: Both,
    weights: Vec<f64>,
    experts: usize,
}

/// What routing writes.
pub struct Routed {
    logits: Array<f32>,
    experts_of: Array<u32>,
    weights: Array<f32>,
    slots: Array<u32>,
    inputs: Array<u32>,
    shares: Array<Share>,
    count: Array<u32>,
    pairs: usize,
    experts: usize,
    top_k: usize,
}

impl Router {
    /// One for whom half of the rows choose the same expert, and none the last one.
    pub fn new(
        rig: &mut Rig,
        uploader: &mut Uploader<'_>,
        store: Store,
        experts: usize,
        cols: usize,
    ) -> Result<Router> {
        let mut bias = normals(&mut rig.rng, experts, 0.5);
        bias[experts / 2] += 4.0;
        bias[experts - 1] = -200.0;
        if experts > 20 {
            bias[3] = f32::NAN;
        }
        let both = Both::new(rig, uploader, store, experts, cols, Given::Bias(bias))?;
        let weights = widened(&both.weight, cols)?;
        Ok(Router { both, weights, experts })
    }

    /// Routes rows of `x`.
    pub fn route(&self, rig: &Rig, x: &Acts, n: usize, top_k: usize, softmax: RouterSoftmax) -> Result<Routed> {
        let routed = Routed::new(rig, n, self.experts, top_k)?;
        let product = (&self.both.linear, routed.logits.view());
        rig.ops.route(product, x, &routed.grouped(), softmax == RouterSoftmax::All)?;
        Ok(routed)
    }
}

impl Routed {
    fn new(rig: &Rig, n: usize, experts: usize, top_k: usize) -> Result<Routed> {
        let pairs = n * top_k;
        let garbage = vec![u32::MAX; pairs];
        let shares = most_shares(pairs, experts, multiply::share_rows(pairs, experts));
        Ok(Routed {
            logits: rig.unwritten(n * experts)?,
            experts_of: rig.array(&garbage)?,
            weights: rig.unwritten(pairs)?,
            slots: rig.array(&garbage)?,
            inputs: rig.array(&garbage)?,
            shares: rig.array(&vec![Share::default(); shares])?,
            count: rig.array(&[u32::MAX])?,
            pairs,
            experts,
            top_k,
        })
    }

    /// What launches are told.
    pub fn grouped(&self) -> Grouped {
        Grouped {
            experts_of: self.experts_of.view(),
            chosen: Chosen { slots: self.slots.view(), weights: self.weights.view(), top_k: self.top_k },
            inputs: self.inputs.view(),
            shares: self.shares.view(),
            count: self.count.view(),
            pairs: self.pairs,
            experts: self.experts,
            share_rows: multiply::share_rows(self.pairs, self.experts),
        }
    }

    /// The choices of all rows, by row.
    pub fn choices(&self) -> Result<Vec<u32>> {
        self.experts_of.read()
    }

    /// Compares all that follows from the logits with what the CPU makes of them.
    fn compare(&self, rig: &mut Rig, case: &Case<'_>, softmax: RouterSoftmax) -> Result<()> {
        let logits = self.logits.read()?;
        let mut choices = vec![(0, 0.0); self.pairs];
        for (logits, choices) in logits.chunks_exact(self.experts).zip(choices.chunks_exact_mut(self.top_k)) {
            route(logits, softmax, choices);
        }
        let chosen: Vec<u32> = choices.iter().map(|(expert, _)| *expert).collect();
        rig.same(case, "choice", &self.experts_of.read()?, &chosen);
        let weights = self.weights.read()?;
        rig.compare(case, self.top_k, &weights, |i| {
            let value = f64::from(choices[i].1);
            // Two exponentials, and a sum of positive numbers.
            Expected { value, tolerance: 32.0 * EPS * value + 1e-36 }
        });
        let (slots, rows) = sorted(&chosen, self.top_k);
        rig.same(case, "slot", &self.slots.read()?, &slots);
        rig.same(case, "row of a sorted pair", &self.inputs.read()?, &rows);
        let shares = shares(&chosen, self.experts, self.grouped().share_rows);
        let count = self.count.read()?[0] as usize;
        let plain = |share: &Share| [share.expert, share.first, share.count];
        let found: Vec<[u32; 3]> = self.shares.read()?.iter().take(count).map(plain).collect();
        rig.same(case, "share", &found, &shares);
        Ok(())
    }
}

/// The order of pairs, stable by expert: where each went, and the row of each that is sorted.
pub fn sorted(choices: &[u32], top_k: usize) -> (Vec<u32>, Vec<u32>) {
    let mut order: Vec<usize> = (0..choices.len()).collect();
    order.sort_by_key(|pair| choices[*pair]);
    let mut slots = vec![0; choices.len()];
    order.iter().enumerate().for_each(|(slot, pair)| slots[*pair] = slot as u32);
    (slots, order.iter().map(|pair| (pair / top_k) as u32).collect())
}

/// The rows of each expert in pieces: expert, first, count.
fn shares(choices: &[u32], experts: usize, share_rows: usize) -> Vec<[u32; 3]> {
    let mut counts = vec![0; experts];
    choices.iter().for_each(|choice| counts[*choice as usize] += 1);
    let mut shares = Vec::new();
    let mut first = 0;
    for (expert, mut left) in counts.into_iter().enumerate() {
        while left > 0 {
            let count = share_rows.min(left);
            shares.push([expert as u32, first as u32, count as u32]);
            (first, left) = (first + count, left - count);
        }
    }
    shares
}

/// Checks it.
pub fn check(rig: &mut Rig) -> Result<()> {
    let bar = ProgressBar::hidden();
    let context = rig.context.clone();
    let mut uploader = Uploader::new(&context, &bar)?;
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16].map(Store::Plain);
    let shapes = [
        (f32, 4, 48, 2),
        (f16, 8, 54, 1),
        (bf16, 8, 2880, 8),
        (bf16, 32, 2880, 4),
        (Store::Tiles(QuantSpec::Q4_0), 128, 80, 8),
        (bf16, 1000, 45, 32),
        (f32, 1024, 32, 3),
    ];
    let rows: &[usize] = if rig.quick { &[1, 33] } else { &[1, 2, 8, 9, 33, 130, 509] };
    for (i, (store, experts, cols, top_k)) in shapes.into_iter().enumerate() {
        let router = Router::new(rig, &mut uploader, store, experts, cols)?;
        for (j, &n) in rows.iter().enumerate() {
            if n * cols > 300_000 {
                continue;
            }
            let softmax = [RouterSoftmax::Chosen, RouterSoftmax::All][(i + j) % 2];
            choose(rig, (store, &router, cols), n, top_k, softmax)?;
        }
    }
    Ok(())
}

fn choose(
    rig: &mut Rig,
    (store, router, cols): (Store, &Router, usize),
    n: usize,
    top_k: usize,
    softmax: RouterSoftmax,
) -> Result<()> {
    let experts = router.experts;
    let one = n <= 8 && matches!(store, Store::Plain(_));
    let shape = format!("{} of {experts} x {cols}, {n} rows, {top_k} experts each, {softmax:?}", store.name());
    let case = Case { kernel: if one { "router" } else { "route and group" }, shape: &shape };
    rig.begin(case.kernel)?;
    let mut x = normals(&mut rig.rng, n * cols, 1.0);
    if n > 2 {
        // Ties of all experts but for their biases, and rows that are no numbers.
        x[cols..2 * cols].fill(0.0);
        x[2 * cols] = f32::NAN;
    }
    let acts = rig.acts(How::Float.forms(), &x, n, cols)?;
    let routed = router.route(rig, &acts, n, top_k, softmax)?;
    let bias = router.both.bias.as_deref().unwrap_or_default();
    let x: Vec<f64> = x.into_iter().map(f64::from).collect();
    rig.compare(&case, experts, &routed.logits.read()?, |i| {
        let (row, expert) = (i / experts, i % experts);
        dot(&router.weights[expert * cols..][..cols], &x[row * cols..][..cols], bias[expert])
    });
    routed.compare(rig, &case, softmax)
}
