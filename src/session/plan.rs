//! Memory plan of a session: what a model needs, what the machine or the container has left, and what would fit.

use super::adapters::AdapterPrecision;
use super::memory::peak_bytes;
use super::{SessionOptions, Speculation};
use crate::convert::adapter;
use crate::error::{Error, Result};
use crate::resources::memory_left;
use crate::runtime::device::Devices;
use crate::runtime::kv::PAGE;
use crate::runtime::needs::Needs;
use crate::runtime::prefix_cache_bytes;
use crate::runtime::{KvType, Precision};
use serde::Serialize;
use std::path::Path;

/// Memory that a session needs, in bytes.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryPlan {
    /// Precision of the computation.
    pub precision: String,
    /// Element type of the KV cache.
    pub kv: String,
    /// Device of the plan: always `cpu`.
    pub device: &'static str,
    /// Longest sequence in tokens.
    pub ctx: usize,
    /// Number of sequences that are decoded together.
    pub batch: usize,
    /// Weights that are read from the mapped file; the system can drop them and read them again.
    pub weights_mapped_bytes: u64,
    /// Weights that are converted or rebuilt and stay in memory, and the factors of adapters.
    pub weights_owned_bytes: u64,
    /// KV cache of all sequences at full length, or the pages of the budget if there is one.
    pub kv_bytes: u64,
    /// Pages of the budget for the KV cache, if there is one.
    pub kv_pool_bytes: Option<u64>,
    /// Largest size of the prefix cache of several prompts; 0 if it is part of the budget. It is not part of the sum,
    /// because texts that need memory get its pages.
    pub prefix_cache_bytes: u64,
    /// Buffers of a step, and logits.
    pub scratch_bytes: u64,
    /// Peak memory of this process when the plan was made: the program and the tokenizer.
    pub process_bytes: u64,
    /// Sum of all of them.
    pub total_bytes: u64,
    /// Memory that the machine or the container has left; absent where the system does not say.
    pub left_bytes: Option<u64>,
    /// True if everything fits.
    pub fits: bool,
    /// True if everything but the mapped weights fits. The model then runs, and reads weights from the disk again at
    /// every token.
    pub fits_without_weights: bool,
    /// Largest context that fits, with the chosen type of the KV cache; 0 if none does.
    pub largest_ctx: usize,
    /// Largest context that fits with an int8 KV cache.
    pub largest_ctx_int8: usize,
    /// Largest number of sequences of this context that fit.
    pub largest_batch: usize,
}

/// Largest batch that a plan proposes.
const MOST_SEQUENCES: u64 = 1 << 16;

impl SessionOptions {
    /// Plans the memory of a session with `batch` sequences for the pack at `path`. The description and the tokenizer
    /// are read, but no weight.
    ///
    /// # Errors
    /// There is no valid pack, the options do not suit it, or they name a GPU or a draft model, whose memory is not
    /// planned.
    pub fn plan(&self, path: &Path, batch: usize) -> Result<MemoryPlan> {
        if matches!(self.engine.offload.devices, Devices::Cuda(_)) {
            return Err(Error::engine("a memory plan is made for the CPU only")
                .help("leave --device cuda out; `iec devices` shows the memory of GPUs"));
        }
        if matches!(self.speculation, Speculation::Draft(_) | Speculation::Auto(Some(_))) {
            return Err(Error::usage("a memory plan does not include a draft model").help("plan each pack alone"));
        }
        let reader = self.open_pack(path)?;
        self.check_kv(&reader)?;
        let mut needs = Needs::of(&reader, &self.engine)?;
        let mut of_adapters = 0;
        for source in &self.adapters {
            let numbers = adapter::describe(&source.dir)?.parameters;
            let bytes = match (self.adapter_precision, needs.precision) {
                (AdapterPrecision::Int8, _) => 1,
                (AdapterPrecision::Auto, Precision::Fp32) => 4,
                (AdapterPrecision::Auto, _) => 2,
            };
            of_adapters += numbers * bytes;
        }
        needs.weights.owned += self.adapter_memory.map_or(of_adapters, |limit| limit.min(of_adapters));
        // It is part of the memory of the process.
        let _tokenizer = self.open_tokenizer(path).ok();
        Ok(MemoryPlan::new(&needs, batch.max(1), peak_bytes().unwrap_or(0), memory_left()))
    }
}

impl MemoryPlan {
    fn new(needs: &Needs, batch: usize, process_bytes: u64, left_bytes: Option<u64>) -> MemoryPlan {
        let of_sequences = needs.kv_bytes(needs.kv, needs.context).saturating_mul(batch as u64);
        let kv_bytes = needs.kv_pool.unwrap_or(of_sequences);
        let scratch_bytes = needs.scratch_bytes(needs.context, batch);
        // Memory that the process already holds is not part of `left_bytes`.
        let fixed = needs.weights.owned.saturating_add(scratch_bytes);
        let new = fixed.saturating_add(kv_bytes);
        let left = left_bytes.unwrap_or(u64::MAX);
        let room = left.saturating_sub(needs.weights.owned).saturating_sub(needs.weights.mapped);
        let fits = |kind: KvType, context: usize, batch: u64| {
            let kv = needs.kv_bytes(kind, context).saturating_mul(batch);
            let pages = needs.kv_pool.unwrap_or(kv);
            kv <= pages && pages.saturating_add(needs.scratch_bytes(context, batch as usize)) <= room
        };
        // Whole pages, unless the context is that of the model.
        let largest_ctx = |kind: KvType| {
            let pages = needs.max_context().div_ceil(PAGE) as u64;
            let most = largest(pages, |pages| fits(kind, tokens(pages, needs), batch as u64));
            tokens(most, needs)
        };
        MemoryPlan {
            precision: needs.precision.to_string(),
            kv: needs.kv.to_string(),
            device: "cpu",
            ctx: needs.context,
            batch,
            weights_mapped_bytes: needs.weights.mapped,
            weights_owned_bytes: needs.weights.owned,
            kv_bytes,
            kv_pool_bytes: needs.kv_pool,
            prefix_cache_bytes: match needs.kv_pool {
                Some(_) => 0,
                None => prefix_cache_bytes(left_bytes.map(|left| left.saturating_sub(needs.weights.owned))),
            },
            scratch_bytes,
            process_bytes,
            total_bytes: new.saturating_add(needs.weights.mapped).saturating_add(process_bytes),
            left_bytes,
            fits: new.saturating_add(needs.weights.mapped) <= left,
            fits_without_weights: new <= left,
            largest_ctx: largest_ctx(needs.kv),
            largest_ctx_int8: largest_ctx(KvType::Int8),
            largest_batch: largest(MOST_SEQUENCES, |batch| fits(needs.kv, needs.context, batch)) as usize,
        }
    }
}

/// Returns the tokens of a number of pages, at most the context of the model.
fn tokens(pages: u64, needs: &Needs) -> usize {
    pages.saturating_mul(PAGE as u64).min(needs.max_context() as u64) as usize
}

/// Returns the largest number up to `most` that fits; 0 if none does. If a number fits, so do all smaller ones.
fn largest(most: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::pack::{PackOptions, pack};
    use crate::runtime::EngineOptions;

    fn needs(context: usize) -> Needs {
        let dir = tempfile::tempdir().unwrap();
        let hf_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/stories260k");
        pack(&PackOptions { hf_dir, out_dir: dir.path().into(), ..PackOptions::default() }).unwrap();
        let reader = crate::iebin::IebinReader::open(dir.path()).unwrap();
        Needs::of(&reader, &EngineOptions { context: Some(context), ..EngineOptions::default() }).unwrap()
    }

    #[test]
    fn what_fits_grows_with_the_memory_that_is_left_and_is_tight() {
        let needs = needs(512);
        let plan = |batch, left| MemoryPlan::new(&needs, batch, 1 << 20, Some(left));
        let roomy = plan(1, 1 << 40);
        assert!(roomy.fits && roomy.largest_ctx == 512 && roomy.largest_batch > 1000, "{roomy:?}");
        let exact = roomy.total_bytes - roomy.process_bytes;
        assert!(plan(1, exact).fits && plan(1, exact).largest_batch == 1);
        let less = plan(1, exact - 1);
        assert!(!less.fits && less.fits_without_weights, "{less:?}");
        assert_eq!((less.largest_ctx, less.largest_batch), (384, 0), "{less:?}");
        assert_eq!(less.largest_ctx_int8, 512, "{less:?}");
        let none = plan(1, 0);
        assert!(!none.fits_without_weights && none.largest_ctx == 0 && none.largest_batch == 0, "{none:?}");
        assert!(plan(8, 1 << 40).kv_bytes == 8 * roomy.kv_bytes);
        // What is proposed fits, and a little more does not.
        for left in [exact, exact + (3 << 20), exact + (100 << 20)] {
            let plan = plan(1, left);
            let with = |batch, context| MemoryPlan::new(&self::needs(context), batch, 1 << 20, Some(left)).fits;
            assert!(with(plan.largest_batch, 512) && !with(plan.largest_batch + 1, 512), "{plan:?}");
            assert!(with(1, plan.largest_ctx));
        }
        // A pool of three sequences takes its budget whatever the batch is, and no larger batch is promised.
        let mut pooled = self::needs(512);
        pooled.kv_pool = Some(3 * roomy.kv_bytes);
        for batch in [1, 2] {
            let plan = MemoryPlan::new(&pooled, batch, 1 << 20, Some(1 << 40));
            assert_eq!((plan.kv_bytes, plan.largest_batch), (3 * roomy.kv_bytes, 3), "{plan:?}");
            assert_eq!(
                plan.total_bytes,
                roomy.total_bytes - roomy.kv_bytes + plan.kv_bytes + plan.scratch_bytes - roomy.scratch_bytes
            );
        }
        let unknown = MemoryPlan::new(&needs, 1, 0, None);
        assert!(unknown.fits && unknown.left_bytes.is_none());
    }
}
