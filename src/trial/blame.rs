//! Which tensor hurts? The float model is run again and again with one tensor quantized.
//!
//! Errors of different tensors are nearly independent, so what they do to the divergence nearly adds up; a tensor alone
//! among floats is measured without the noise of all the others.

use super::{Packs, Trial, open_reader};
use crate::error::{Context, Result};
use crate::eval::divergence;
use crate::iebin::reader::read_description;
use crate::iebin::{BIN_NAME, Description, EntryJson, IebinReader, JSON_NAME, QUANT_ALIGNMENT};
use crate::progress;
use crate::runtime::Precision;
use std::fs::File;
use std::io::{Seek, SeekFrom};

/// Windows read for each tensor: enough to rank them, and no more, as there are many.
const WINDOWS: usize = 2;
/// Both payload files, one behind the other.
const BOTH: &str = "both.bin";

/// How much a tensor hurts.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Blame {
    /// Its name.
    pub tensor: String,
    /// Mean divergence of a model in which only this tensor is quantized, in nats per token.
    pub kl: f64,
}

impl Trial<'_> {
    /// What each quantized tensor of the model that was measured last does on its own, the worst first.
    ///
    /// # Errors
    /// The disk is full, or an engine fails.
    pub fn blame(&mut self) -> Result<Vec<Blame>> {
        let dir = self.packs.dir();
        let float = read_description(&self.packs.float().join(JSON_NAME))?;
        let quantized = read_description(&self.packs.quantized().join(JSON_NAME))?;
        let behind = concatenate(self.packs)?;
        let windows = self.windows.first(WINDOWS);
        let suspects: Vec<(usize, &EntryJson)> = (float.tensors.iter().enumerate())
            .filter(|(_, entry)| entry.quant.is_none())
            .filter_map(|(i, entry)| Some((i, quantized.tensors.iter().find(|q| q.name == entry.name)?)))
            .filter(|(_, entry)| entry.quant.is_some())
            .collect();
        let bar = progress::items("tensors", suspects.len() as u64);
        let mut blame = Vec::new();
        for (i, suspect) in suspects {
            let mut mixed = Description { weights_bin: BOTH.into(), total_bytes: None, ..float.clone() };
            mixed.tensors[i] = EntryJson { offset: suspect.offset + behind, ..suspect.clone() };
            let reader = IebinReader::open_described(mixed, &dir.join(JSON_NAME), None)?;
            let bits = suspect.quant.as_ref().map_or(4, |quant| quant.bits);
            let precision = if bits <= 4 { Precision::Int4w } else { Precision::Int8w };
            let mut engine = open_reader(&reader, Some(precision), self.question.threads)?;
            let found = divergence(&mut engine, &mut self.reference, &windows)?;
            blame.push(Blame { tensor: suspect.name.clone(), kl: found.kl.value });
            bar.inc(1);
        }
        bar.finish_and_clear();
        blame.sort_by(|a, b| b.kl.total_cmp(&a.kl).then_with(|| a.tensor.cmp(&b.tensor)));
        Ok(blame)
    }
}

/// Puts both payload files into one; returns where the second begins.
fn concatenate(packs: &Packs) -> Result<u64> {
    let path = packs.dir().join(BOTH);
    let mut out = File::create(&path).at(&path)?;
    let mut behind = 0;
    for pack in [packs.float(), packs.quantized()] {
        behind = out.stream_position().at(&path)?.next_multiple_of(QUANT_ALIGNMENT as u64);
        out.seek(SeekFrom::Start(behind)).at(&path)?;
        let from = pack.join(BIN_NAME);
        std::io::copy(&mut File::open(&from).at(&from)?, &mut out).at(&from)?;
    }
    Ok(behind)
}
