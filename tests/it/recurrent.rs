//! A device part with a state that cannot be cut: it wraps a part of the CPU device and adds to the logits what it
//! remembers of all tokens, as recurrent layers do. It knows its state only at multiples of [`BLOCK`] positions, where
//! it was marked, and where it is. A text that was continued from a wrong state has other logits.

use iec::error::Result;
use iec::iebin::IebinReader;
use iec::runtime::device::{Answer, DevicePart, PartInfo, Step};
use iec::runtime::open::OpenedModel;
use iec::runtime::state::{Cache, PageCounts, PartCache, Piece, PieceMemory, StatePool};
use iec::runtime::{Engine, EngineOptions};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Distance of the positions at which the part keeps its state.
const BLOCK: usize = 64;

/// Opens an engine whose first layers have an ordinary part and whose last layers have a recurrent one.
pub fn engine(reader: &IebinReader, options: &EngineOptions) -> Engine {
    let mut model = OpenedModel::open(reader, options).unwrap();
    let layers = model.parts[0].info().layers.end;
    let (first, last) = (model.cpu_part(0..layers / 2).unwrap(), model.cpu_part(layers / 2..layers).unwrap());
    model.parts = vec![first, Box::new(Recurrent { part: last })];
    Engine::new(model)
}

#[derive(Debug)]
struct Recurrent {
    part: Box<dyn DevicePart>,
}

/// Hash of all rows of the residual stream up to a position.
#[derive(Debug, Clone, Copy, Default)]
struct Memory {
    positions: usize,
    hash: u64,
}

impl Memory {
    fn read(&mut self, row: &[f32]) {
        self.positions += 1;
        for x in row {
            self.hash = (self.hash ^ u64::from(x.to_bits())).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
        }
    }

    fn bytes(&self) -> [u8; 16] {
        let [positions, hash] = [self.positions as u64, self.hash].map(u64::to_le_bytes);
        [positions, hash].concat().try_into().unwrap()
    }
}

#[derive(Debug, Clone)]
struct RecurrentCache {
    /// Keys and values of the wrapped part.
    cache: Cache,
    now: Memory,
    /// Earlier states that are still known.
    kept: Vec<Memory>,
    mark: Memory,
}

#[derive(Debug)]
struct Snapshot([u8; 16]);

impl PieceMemory for Snapshot {
    fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        Ok(Cow::Borrowed(&self.0))
    }
}

impl PartCache for RecurrentCache {
    fn clone_cache(&self) -> Cache {
        Cache::new(self.clone())
    }

    fn mark(&mut self) {
        self.mark = self.now;
    }

    fn rewind(&mut self, len: usize) -> usize {
        let known = self.kept.iter().chain([&self.mark, &self.now]).filter(|memory| memory.positions <= len);
        self.now = known.max_by_key(|memory| memory.positions).copied().unwrap_or_default();
        let reached = self.now.positions;
        self.kept.retain(|memory| memory.positions <= reached);
        if self.mark.positions > reached {
            self.mark = Memory::default();
        }
        assert_eq!(self.cache.contents_mut().rewind(reached), reached);
        reached
    }

    fn pages(&self) -> Vec<Piece> {
        self.cache.contents().pages()
    }

    fn snapshot(&self) -> Option<Piece> {
        Some(Piece::new(Arc::new(Snapshot(self.now.bytes()))))
    }

    fn adopt(&mut self, pages: Vec<Piece>, snapshot: Option<Piece>, len: usize) {
        let Snapshot(bytes) = *snapshot.expect("the state of a text has a snapshot").memory::<Snapshot>();
        let [positions, hash] = [0, 8].map(|at| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()));
        assert_eq!(positions as usize, len, "a snapshot after other positions");
        self.cache.contents_mut().adopt(pages, None, len);
        (self.now, self.kept) = (Memory { positions: len, hash }, Vec::new());
        self.mark = Memory::default();
    }
}

#[derive(Debug)]
struct RecurrentPool(Box<dyn StatePool>);

impl StatePool for RecurrentPool {
    fn page_bytes(&self) -> u64 {
        self.0.page_bytes()
    }

    fn snapshot_bytes(&self) -> u64 {
        size_of::<Snapshot>() as u64
    }

    fn most(&self) -> Option<usize> {
        self.0.most()
    }

    fn counts(&self) -> PageCounts {
        self.0.counts()
    }

    fn memory_left(&self) -> Option<u64> {
        self.0.memory_left()
    }

    fn restore(&self, bytes: &[u8]) -> Result<Piece> {
        match bytes.try_into() {
            Ok(bytes) => Ok(Piece::new(Arc::new(Snapshot(bytes)))),
            Err(_) => self.0.restore(bytes),
        }
    }
}

impl DevicePart for Recurrent {
    fn info(&self) -> PartInfo {
        self.part.info()
    }

    fn new_cache(&self) -> Result<Cache> {
        let (cache, now) = (self.part.new_cache()?, Memory::default());
        Ok(Cache::new(RecurrentCache { cache, now, kept: Vec::new(), mark: now }))
    }

    fn pool(&self) -> Box<dyn StatePool> {
        Box::new(RecurrentPool(self.part.pool()))
    }

    fn owns(&self, cache: &Cache) -> bool {
        cache.get::<RecurrentCache>().is_some_and(|recurrent| self.part.owns(&recurrent.cache))
    }

    fn grow(&self, cache: &mut Cache, positions: Range<usize>) -> Result<()> {
        let recurrent = cache.get_mut::<RecurrentCache>();
        assert_eq!(recurrent.now.positions, positions.start, "the next step writes the next position");
        self.part.grow(&mut recurrent.cache, positions)
    }

    fn run(&mut self, step: Step<'_>, mut answer: Answer<'_>) -> Result<()> {
        let (hidden, wanted) = (step.x.len() / step.runs.iter().map(|run| run.tokens).sum::<usize>(), step.wanted);
        let mut caches: Vec<&mut RecurrentCache> = step.caches.into_iter().map(Cache::get_mut).collect();
        let mut after = Vec::new();
        for run in step.runs {
            let RecurrentCache { now, kept, .. } = &mut *caches[run.sequence];
            for row in step.x[run.first * hidden..].chunks_exact(hidden).take(run.tokens) {
                now.read(row);
                after.push(*now);
                kept.extend((now.positions % BLOCK == 0).then_some(*now));
            }
        }
        let caches = caches.into_iter().map(|recurrent| &mut recurrent.cache).collect();
        let rows = match &answer {
            Answer::Logits(logits) => logits.len() / wanted.len().max(1),
            _ => 0,
        };
        let inner = match &mut answer {
            Answer::Logits(logits) => Answer::Logits(logits),
            _ => Answer::Nothing,
        };
        self.part.run(Step { caches, ..step }, inner)?;
        if let Answer::Logits(logits) = answer {
            for (row, logits) in wanted.iter().zip(logits.chunks_exact_mut(rows.max(1))) {
                let hash = after[*row].hash;
                logits[hash as usize % rows] += (hash >> 40) as f32 / 4e6;
            }
        }
        Ok(())
    }

    fn most_best(&self) -> usize {
        0
    }

    fn take_busy(&mut self) -> Duration {
        self.part.take_busy()
    }
}
