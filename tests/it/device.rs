//! Tests the device interface with a third device: a recorder that wraps parts of the CPU device. The engine opens it
//! like any other device and computes the golden values with it, and the recorder receives every step.

use crate::common::all_logits;
use crate::golden::{Case, Difference, compare, fp32, packed};
use iec::error::Result;
use iec::iebin::IebinReader;
use iec::runtime::device::{Answer, DevicePart, PartInfo, Step};
use iec::runtime::open::OpenedModel;
use iec::runtime::state::{Cache, PartCache, Piece, StatePool};
use iec::runtime::{Engine, Feed, Want};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Step as received by a part.
#[derive(Debug, Clone, PartialEq)]
struct Recorded {
    layers: Range<usize>,
    /// Number of rows; `wanted` lists those whose logits are requested.
    rows: usize,
    wanted: Vec<usize>,
    /// Index, first position and number of tokens of each sequence.
    runs: Vec<(usize, usize, usize)>,
}

type Log = Arc<Mutex<Vec<Recorded>>>;

/// Device part that records the steps of another part.
#[derive(Debug)]
struct Recorder {
    part: Box<dyn DevicePart>,
    log: Log,
}

/// KV cache of the recorder's own type.
#[derive(Debug, Clone)]
struct Wrapped {
    cache: Cache,
}

impl PartCache for Wrapped {
    fn clone_cache(&self) -> Cache {
        Cache::new(self.clone())
    }

    fn mark(&mut self) {
        self.cache.contents_mut().mark();
    }

    fn rewind(&mut self, len: usize) -> usize {
        self.cache.contents_mut().rewind(len)
    }

    fn pages(&self) -> Vec<Piece> {
        self.cache.contents().pages()
    }

    fn snapshot(&self) -> Option<Piece> {
        self.cache.contents().snapshot()
    }

    fn adopt(&mut self, pages: Vec<Piece>, snapshot: Option<Piece>, len: usize) {
        self.cache.contents_mut().adopt(pages, snapshot, len);
    }
}

impl DevicePart for Recorder {
    fn info(&self) -> PartInfo {
        self.part.info()
    }

    fn new_cache(&self) -> Result<Cache> {
        Ok(Cache::new(Wrapped { cache: self.part.new_cache()? }))
    }

    fn pool(&self) -> Box<dyn StatePool> {
        self.part.pool()
    }

    fn owns(&self, cache: &Cache) -> bool {
        cache.get::<Wrapped>().is_some_and(|wrapped| self.part.owns(&wrapped.cache))
    }

    fn grow(&self, cache: &mut Cache, positions: Range<usize>) -> Result<()> {
        self.part.grow(&mut cache.get_mut::<Wrapped>().cache, positions)
    }

    fn run(&mut self, step: Step<'_>, answer: Answer<'_>) -> Result<()> {
        self.log.lock().unwrap().push(Recorded {
            layers: self.part.info().layers,
            rows: step.runs.iter().map(|run| run.tokens).sum(),
            wanted: step.wanted.to_vec(),
            runs: step.runs.iter().map(|run| (run.sequence, run.position, run.tokens)).collect(),
        });
        let caches = step.caches.into_iter().map(|cache| &mut cache.get_mut::<Wrapped>().cache).collect();
        self.part.run(Step { caches, ..step }, answer)
    }

    fn most_best(&self) -> usize {
        self.part.most_best()
    }

    fn take_busy(&mut self) -> Duration {
        self.part.take_busy()
    }
}

/// Opens an engine whose layers are divided among `parts` recorders.
fn recorded(case: &Case, parts: usize) -> (Engine, Log) {
    let reader = IebinReader::open(&packed(case.name, &case.hf_dir)).unwrap();
    let mut model = OpenedModel::open(&reader, &fp32()).unwrap();
    let (log, layers) = (Log::default(), model.parts[0].info().layers.end);
    let bounds = (0..=parts).map(|i| i * layers / parts).collect::<Vec<_>>();
    let ranges = bounds.windows(2).map(|bounds| bounds[0]..bounds[1]);
    model.parts = ranges
        .map(|layers| -> Box<dyn DevicePart> {
            Box::new(Recorder { part: model.cpu_part(layers).unwrap(), log: log.clone() })
        })
        .collect();
    (Engine::new(model), log)
}

#[test]
fn the_golden_values_come_out_of_a_third_device() {
    let mut failures = Vec::new();
    for (i, case) in Case::all().iter().enumerate() {
        let (mut engine, log) = recorded(case, 1 + i % 3);
        for (i, prompt) in case.prompts().iter().enumerate() {
            let Difference { logit, wrong_ids, compared } = compare(&mut engine, prompt, 0.0);
            if logit > 1e-3 || !wrong_ids.is_empty() || compared == 0 {
                failures.push(format!("{} prompt {i}: logits off by {logit}, ids differ at {wrong_ids:?}", case.name));
            }
        }
        assert!(!log.lock().unwrap().is_empty());
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn layers_in_several_parts_give_the_same_bits_and_every_part_gets_every_step() {
    for name in ["gemma2", "gptoss-trained", "phi3"] {
        let case = Case::fixture(name);
        let text: Vec<u32> = (0..70).map(|i| 1 + i * 7 % 200).collect();
        let expected = all_logits(&mut case.engine(fp32()), &text);
        let (mut engine, log) = recorded(&case, 2);
        let (mut a, mut logits) = (engine.new_sequence().unwrap(), Vec::new());
        engine.forward(&mut [Feed { sequence: &mut a, tokens: &text[..50], want: Want::Last }], &mut logits).unwrap();
        // A clone continues, is truncated, and is then processed together with the original.
        let mut b = a.clone();
        engine.forward(&mut [Feed { sequence: &mut b, tokens: &[3; 9], want: Want::Last }], &mut logits).unwrap();
        b.truncate(50);
        let mut feeds = [
            Feed { sequence: &mut a, tokens: &text[50..], want: Want::All },
            Feed { sequence: &mut b, tokens: &text[50..60], want: Want::All },
        ];
        engine.forward(&mut feeds, &mut logits).unwrap();
        let vocab = engine.config().vocab;
        let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&logits[..20 * vocab]), bits(&expected[50 * vocab..]), "{name}");
        assert_eq!(bits(&logits[20 * vocab..]), bits(&expected[50 * vocab..60 * vocab]), "{name}");
        let log = log.lock().unwrap();
        let (first, second): (Vec<_>, Vec<_>) = log.iter().partition(|step| step.layers.start == 0);
        assert_eq!(first.len(), 3, "{name}");
        for (first, second) in first.into_iter().zip(second) {
            let layers = second.layers.clone();
            assert_eq!(Recorded { layers, ..first.clone() }, *second, "{name}");
        }
        let last = log.last().unwrap();
        assert_eq!((last.rows, &last.wanted, &last.runs), (30, &(0..30).collect(), &vec![(0, 50, 20), (1, 50, 10)]));
    }
}

#[test]
fn a_sequence_of_other_parts_is_refused() {
    let case = Case::fixture("llama-gqa");
    let (mut engine, _) = recorded(&case, 1);
    for mut sequence in [case.engine(fp32()).new_sequence().unwrap(), recorded(&case, 2).0.new_sequence().unwrap()] {
        let error = engine
            .forward(&mut [Feed { sequence: &mut sequence, tokens: &[1], want: Want::Last }], &mut Vec::new())
            .unwrap_err();
        assert!(error.to_string().contains("another shape"), "{error}");
    }
}
