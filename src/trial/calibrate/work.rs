//! Reads the texts of a calibration shard by shard, and adds the sums of all shards up or stores those of a part.
//!
//! A run of the whole job keeps in memory the sums of the current shard and the total of the current half. The total of
//! the first half waits in a temporary file until the second half is complete, so this takes as much memory as the sums
//! of both halves. A part keeps only the sums of the current shard. Products of input channels decide how many layers
//! fit into the memory of one pass over the texts.
//!
//! Without products, every run stores the sums of each shard, and within a shard saves them periodically. With
//! products, which are large, only parts store them; an interrupted run of the whole job goes on with the next pass.

use super::store::{ShardLayout, ShardStore, StoredSums, read, task};
use super::{Calibrated, CalibrationOptions};
use crate::calibration::file::{Description, SiteShape};
use crate::calibration::shards::half_of;
use crate::calibration::{Calibration, CalibrationWriter, Half, Sums};
use crate::error::{Context, Error, Result};
use crate::interrupt;
use crate::job::{Job, Part, Share, deal};
use crate::output::AtomicFile;
use crate::progress;
use crate::runtime::Engine;
use crate::runtime::calibrate::{self, Gather, Gathering, Windows};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::PathBuf;

/// Least number of bytes of inputs that are summed between two saves, as a multiple of the bytes that a save writes.
const SAVED_SHARE: u64 = 256;

/// Calibration run: all passes over its windows.
pub(super) struct Work<'a> {
    job: &'a Job,
    engine: Engine,
    windows: Windows,
    options: &'a CalibrationOptions,
    description: Description,
    gather: Gather,
    layout: ShardLayout,
}

/// Shard and its number of tokens.
type ShardTokens = (usize, usize);

impl<'a> Work<'a> {
    /// Creates a run.
    ///
    /// # Errors
    /// The sums are larger than a file can be.
    pub fn new(
        job: &'a Job,
        engine: Engine,
        windows: Windows,
        options: &'a CalibrationOptions,
        description: Description,
    ) -> Result<Work<'a>> {
        let held = if options.run.share.part().is_some() { 1 } else { 2 };
        let gather = Gather { products: options.hessian, memory: options.memory, held };
        let layout = ShardLayout::new(engine.config(), options.hessian)?;
        Ok(Work { job, engine, windows, options, description, gather, layout })
    }

    /// Collects the sums of this run. Writes the statistics unless the run is one of several parts.
    ///
    /// # Errors
    /// The engine fails, a file cannot be read or written, or parts to be merged are missing or damaged.
    pub fn run(mut self) -> Result<Calibrated> {
        let part = self.options.run.share.part();
        let shards = self.shards_of(part);
        let passes = calibrate::passes(self.engine.config(), self.gather);
        let known = match part {
            Some(_) => self.collect_part(&shards, &passes)?,
            None => self.collect_whole(&shards, &passes)?,
        };
        Ok(Calibrated {
            part,
            shards: shards.len(),
            tokens: tokens_of(&shards, &passes),
            known,
            part_bytes: part.map_or(0, |_| self.layout.shard_bytes() * shards.len() as u64),
            description: self.description,
        })
    }

    /// Returns the shards of a part, or all of them.
    fn shards_of(&self, part: Option<Part>) -> Vec<ShardTokens> {
        let all = self.windows.shards();
        let Some(part) = part else { return all };
        let dealt = deal_shards(&all, part.count);
        all.into_iter().zip(dealt).filter(|(_, number)| *number == part.number).map(|(shard, _)| shard).collect()
    }

    /// Collects and stores the sums of a part; returns the number of tokens that an earlier run had processed.
    fn collect_part(&mut self, shards: &[ShardTokens], passes: &[Range<usize>]) -> Result<u64> {
        let (job, bar) = (self.job, progress::items("calibrating", tokens_of(shards, passes)));
        let store = ShardStore::open(job, &self.layout, shards.iter().map(|(shard, _)| *shard))?;
        job.keep(&[store.file()], || {
            let mut known = 0;
            for layers in passes {
                let mut gathering = Gathering::new(self.engine.config(), self.gather, layers.clone());
                for shard in shards {
                    known += self.obtain(&mut gathering, *shard, Some(&store), &bar)?;
                }
            }
            Ok(known)
        })
    }

    /// Collects all sums, or merges those of parts, and writes the statistics. Returns the number of tokens that an
    /// earlier run or parts had processed.
    fn collect_whole(&mut self, shards: &[ShardTokens], passes: &[Range<usize>]) -> Result<u64> {
        let (job, products, out) = (self.job, self.gather.products, &self.options.out);
        if self.is_merge() {
            self.refuse_missing(shards)?;
        }
        let store = match products || self.is_merge() {
            true => None,
            false => Some(ShardStore::open(job, &self.layout, shards.iter().map(|(shard, _)| *shard))?),
        };
        let path = job.own_path("statistics");
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path).at(&path)?;
        let data = file.try_clone().at(&path)?;
        let file = AtomicFile::resumable(file, &path, out)?.overwrite(self.options.overwrite);
        let sites = calibrate::sites(self.engine.config(), products).into_iter().map(|(_, shape)| shape);
        let mut writer = CalibrationWriter::begin(file, &self.description, sites.collect())?;
        let synced: Vec<&File> = std::iter::once(&data).chain(store.as_ref().map(ShardStore::file)).collect();
        let bar = progress::items("calibrating", tokens_of(shards, passes));
        let known = job.keep(&synced, || {
            let passes = passes.iter().map(|layers| self.pass(layers, shards, &mut writer, store.as_ref(), &bar));
            passes.sum::<Result<u64>>()
        })?;
        interrupt::check()?;
        job.commit_begins()?;
        writer.finish()?;
        Ok(known)
    }

    /// Collects and writes the sums of some layers, unless an interrupted run has written them. Returns the number of
    /// tokens that had been processed before.
    fn pass(
        &mut self,
        layers: &Range<usize>,
        shards: &[ShardTokens],
        writer: &mut CalibrationWriter,
        store: Option<&ShardStore>,
        bar: &progress::ProgressBar,
    ) -> Result<u64> {
        let task = format!("layers {} to {}", layers.start, layers.end - 1);
        let mut gathering = Gathering::new(self.engine.config(), self.gather, layers.clone());
        if let Some(found) = self.job.found::<String>(&task).next()
            && writer.take_over(gathering.sites().len(), &found.result)?
        {
            let tokens = self.windows.tokens() as u64;
            bar.skip(tokens);
            return Ok(tokens);
        }
        let (mut total, mut known) = (gathering.empty_sums(), 0);
        let (mut half, mut first) = (Half::First, tempfile::tempfile_in(self.job.dir()).at(self.job.dir())?);
        for shard in shards {
            if half_of(shard.0) != half {
                half = Half::Second;
                total.iter().try_for_each(|sums| sums.write(|bytes| first.write_all(bytes).at(self.job.dir())))?;
                total.iter_mut().for_each(Sums::clear);
            }
            known += self.obtain(&mut gathering, *shard, store, bar)?;
            total.iter_mut().zip(gathering.sums()).for_each(|(total, sums)| total.plus(sums));
        }
        first.seek(SeekFrom::Start(0)).at(self.job.dir())?;
        for layer in layers.clone() {
            for sums in gathering.of_layer_mut(layer) {
                sums.read(|bytes| first.read_exact(bytes).at(self.job.dir()))?;
            }
        }
        gathering.sums().iter().zip(&total).try_for_each(|(first, second)| writer.put([first, second], &[]))?;
        self.job.record(&task, &writer.hash(), gathering.sites().map(SiteShape::nbytes).sum())?;
        Ok(known)
    }

    /// Makes `gathering` hold the sums of a shard: reads stored ones, or processes the windows and stores the sums.
    /// Returns the number of tokens that had been processed before.
    fn obtain(
        &mut self,
        gathering: &mut Gathering,
        (shard, tokens): ShardTokens,
        store: Option<&ShardStore>,
        bar: &progress::ProgressBar,
    ) -> Result<u64> {
        interrupt::check()?;
        match read(self.job, &self.layout, gathering, shard)? {
            StoredSums::Read => {
                gathering.check()?;
                bar.skip(tokens as u64);
                return Ok(tokens as u64);
            }
            StoredSums::Damaged(part) if self.is_merge() => return Err(Job::damaged(part).at(self.job.dir())),
            StoredSums::Missing if self.is_merge() => return Err(self.missing()),
            StoredSums::Damaged(_) | StoredSums::Missing => {}
        }
        gathering.begin(shard);
        let known = self.restore(gathering, shard);
        bar.skip(known);
        self.read_windows(gathering, shard, bar)?;
        store.map_or(Ok(()), |store| store.put(self.job, &self.layout, gathering, shard))?;
        Ok(known)
    }

    /// Processes the remaining windows of a shard, and saves the sums periodically.
    fn read_windows(&mut self, gathering: &mut Gathering, shard: usize, bar: &progress::ProgressBar) -> Result<()> {
        let size: u64 = gathering.sites().map(SiteShape::nbytes).sum();
        // A token activates only a few experts of a mixture; the estimate only needs to keep the cost of saving
        // small.
        let each: u64 = gathering.sites().map(|site| 4 * site.cols as u64).sum();
        let (every, mut summed) = (self.options.run.pace.bytes.max(SAVED_SHARE.saturating_mul(size)), 0);
        while let Some(tokens) = gathering.read(&mut self.engine, &self.windows)? {
            bar.inc(tokens as u64);
            summed += each * tokens as u64;
            if summed >= every && !self.gather.products {
                self.save(gathering, shard)?;
                summed = 0;
            }
        }
        Ok(())
    }

    /// Saves the sums of a shard in a file of statistics whose name includes the number of processed windows, and
    /// removes the sums saved before. The other half in the file is empty.
    fn save(&self, gathering: &Gathering, shard: usize) -> Result<()> {
        let before = self.saved("");
        let sites: Vec<SiteShape> = gathering.sites().cloned().collect();
        let bytes = sites.iter().map(SiteShape::nbytes).sum();
        let path = self.job.own_path(&format!("{SAVED}{}{}", saved_name(shard), gathering.windows()));
        let mut writer = CalibrationWriter::create(&path, &self.description, sites)?;
        for (site, sums) in gathering.sites().zip(gathering.sums()) {
            let empty = Sums::new(site.matrices, site.cols, site.products);
            let halves = match half_of(shard) {
                Half::First => [sums, &empty],
                Half::Second => [&empty, sums],
            };
            writer.put(halves, &[])?;
        }
        writer.finish()?;
        for (_, older) in before.into_iter().filter(|(_, older)| *older != path) {
            std::fs::remove_file(&older).at(&older)?;
        }
        // A record in the journal keeps the job's directory when the run is interrupted; the sums are found by their
        // file name.
        self.job.record(&format!("windows of shard {shard}"), &gathering.windows(), bytes)
    }

    /// Returns the files of saved sums of this run whose names continue with `name`, each with the rest of its name.
    fn saved(&self, name: &str) -> Vec<(String, PathBuf)> {
        let prefix = self.job.own_path(&format!("{SAVED}{name}"));
        let prefix = prefix.file_name().unwrap_or_default().to_string_lossy();
        let entries = std::fs::read_dir(self.job.dir()).into_iter().flatten().flatten();
        let rest = |entry: std::fs::DirEntry| {
            Some((entry.file_name().to_str()?.strip_prefix(&*prefix)?.to_string(), entry.path()))
        };
        entries.filter_map(rest).collect()
    }

    /// Restores saved sums of a shard; returns the number of tokens they cover.
    fn restore(&self, gathering: &mut Gathering, shard: usize) -> u64 {
        let saved = self.saved(&saved_name(shard)).into_iter();
        let mut saved: Vec<(usize, PathBuf)> =
            saved.filter_map(|(rest, path)| Some((rest.parse().ok()?, path))).collect();
        saved.sort_by(|a, b| b.cmp(a));
        for (windows, path) in saved {
            // Incomplete files fail the check of the hash at their end (the seal) and are skipped.
            let Ok(saved) = Calibration::open(&path) else { continue };
            if *saved.description() == self.description && saved.sites().eq(gathering.sites()) {
                let sums = gathering.sites().filter_map(|site| saved.sums(&site.name));
                let sums: Vec<Sums> = sums
                    .map(|[first, second]| match half_of(shard) {
                        Half::First => first,
                        Half::Second => second,
                    })
                    .collect();
                gathering.go_on(shard, windows, sums);
                return self.windows.tokens_of(shard, windows) as u64;
            }
        }
        0
    }

    fn is_merge(&self) -> bool {
        matches!(self.options.run.share, Share::Merge(_))
    }

    /// Fails unless all sums are recorded; the error lists the parts that lack sums.
    fn refuse_missing(&self, shards: &[ShardTokens]) -> Result<()> {
        let is_there = |name: &String| self.job.found::<Value>(name).next().is_some();
        let layers = |shard: usize| (0..self.layout.layers()).map(move |layer| task(shard, layer));
        if shards.iter().all(|(shard, _)| layers(*shard).all(|name| is_there(&name))) {
            return Ok(());
        }
        Err(self.missing())
    }

    fn missing(&self) -> Error {
        let shards = self.windows.shards();
        self.job.missing(|count| {
            let dealt = shards.iter().zip(deal_shards(&shards, count));
            let layers = 0..self.layout.layers();
            dealt.flat_map(|((shard, _), part)| layers.clone().map(move |layer| (task(*shard, layer), part))).collect()
        })
    }
}

/// Prefix of the names of files with saved sums.
const SAVED: &str = "shard-";

fn saved_name(shard: usize) -> String {
    format!("{shard}.windows-")
}

/// Returns the number of the part of each shard.
fn deal_shards(shards: &[ShardTokens], count: usize) -> Vec<usize> {
    deal(&shards.iter().map(|(_, tokens)| *tokens as u64).collect::<Vec<_>>(), count)
}

/// Returns the number of tokens that all passes read together.
fn tokens_of(shards: &[ShardTokens], passes: &[Range<usize>]) -> u64 {
    shards.iter().map(|(_, tokens)| *tokens as u64).sum::<u64>() * passes.len() as u64
}
