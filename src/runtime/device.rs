//! Interface between the engine and the devices: a [`DevicePart`] computes consecutive layers of a model on one
//! device.
//!
//! The engine holds a list of parts in the order of layers. A [`Step`] passes through all of them: each part replaces
//! the residual stream by the output of its last layer, and the last part, which holds the output matrix, returns the
//! [`Answer`]. What a part keeps of a sequence is an opaque [`Cache`].

use super::adapters::Group;
use super::observe::ObserverRef;
use super::profile::Profile;
use super::state::{Cache, StatePool};
use crate::error::Result;
use crate::model_config::ModelConfig;
use std::fmt::Debug;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

/// Consecutive layers of a model on one device, with the output matrix if the last layer is among them.
pub trait DevicePart: Debug + Send + Sync {
    /// Describes the part for reports.
    fn info(&self) -> PartInfo;

    /// Creates the cache of an empty sequence.
    ///
    /// # Errors
    /// The keys and values of one page do not fit the address space.
    fn new_cache(&self) -> Result<Cache>;

    /// Returns the memory from which the caches take theirs.
    fn pool(&self) -> Box<dyn StatePool>;

    /// Returns true when this part can use the cache: this part created it, or, on the CPU, a part with the same layout
    /// of keys and values did.
    fn owns(&self, cache: &Cache) -> bool;

    /// Makes room for positions `positions` of a sequence; the next step writes all of them. Memory that clones of the
    /// sequence share is copied here or when it is written.
    ///
    /// # Errors
    /// There is not enough memory; the cache keeps its contents.
    fn grow(&self, cache: &mut Cache, positions: Range<usize>) -> Result<()>;

    /// Computes the layers of this part for all rows of a step. The last part writes the answer for the wanted rows.
    ///
    /// # Errors
    /// The user interrupted, a weight cannot be read, or the device fails; the caller rewinds the sequences.
    fn run(&mut self, step: Step<'_>, answer: Answer<'_>) -> Result<()>;

    /// Returns true if the part supports [`Answer::Hidden`].
    fn finds_hidden(&self) -> bool {
        false
    }

    /// Returns the largest `k` for which the part supports [`Answer::Best`]; 0 if it only returns whole rows of
    /// logits.
    fn most_best(&self) -> usize;

    /// Returns for how long the device itself was computing since the last call; zero for the CPU.
    fn take_busy(&mut self) -> Duration;
}

/// The parts of a model in the order of layers; the last part has the output matrix.
pub type Parts = Vec<Box<dyn DevicePart>>;

/// Consecutive tokens of one sequence in a batch.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// Index of the sequence.
    pub sequence: usize,
    /// First row in the batch.
    pub first: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Position of the first token.
    pub position: usize,
}

/// One pass of some rows through the layers of a part.
pub struct Step<'a> {
    /// The residual stream `(n, hidden)`. A part that is not the last replaces it by the output of its last layer.
    pub x: &'a mut Vec<f32>,
    /// Embeddings of the further inputs of all layers, `(n, layers * width)`; empty if the model has none.
    pub further: &'a [f32],
    /// Rows that a layer of multi-token prediction reads beside the embeddings `x`, `(n, hidden)`; empty for other
    /// models.
    pub previous: &'a [f32],
    /// Cosines and sines of each row, one table `(n, rotary_dim)` per kind of rotation.
    pub angles: &'a [Vec<f32>],
    /// Sequence and position of each row.
    pub runs: &'a [Run],
    /// Adapters of the rows that have any.
    pub groups: &'a [Group],
    /// Rows whose logits are wanted, ascending.
    pub wanted: &'a [usize],
    /// First layer to compute; `x` is the residual stream at its input.
    pub first_layer: usize,
    /// Data that this part holds for each sequence.
    pub caches: Vec<&'a mut Cache>,
    /// Stopwatch for the stages of the step.
    pub profile: &'a mut Profile,
    /// Observer of activations, if any; only the CPU supports one.
    pub observer: ObserverRef<'a>,
}

/// Result of a step for its wanted rows.
pub enum Answer<'a> {
    /// No result: the step only fills the caches or serves an observer.
    Nothing,
    /// All logits: `(rows, vocab)`.
    Logits(&'a mut [f32]),
    /// All logits of the wanted rows, and the output of the final norm for all rows of the step, wanted or not; see
    /// [`DevicePart::finds_hidden`].
    Hidden {
        /// Logits: `(rows, vocab)`.
        logits: &'a mut [f32],
        /// Output of the final norm: `(n, hidden)`.
        hidden: &'a mut [f32],
    },
    /// The `k` largest logits of each row with their tokens, the largest first, appended row by row.
    Best(usize, &'a mut Vec<Vec<(u32, f32)>>),
}

impl Answer<'_> {
    /// Returns the answer for the wanted rows `wanted` only, of the rows `rows`.
    pub fn rows(&mut self, wanted: Range<usize>, rows: Range<usize>, config: &ModelConfig) -> Answer<'_> {
        let (of_vocab, of_hidden) = (
            (wanted.start * config.vocab..wanted.end * config.vocab),
            (rows.start * config.hidden..rows.end * config.hidden),
        );
        match self {
            Answer::Nothing => Answer::Nothing,
            Answer::Logits(logits) => Answer::Logits(&mut logits[of_vocab]),
            Answer::Hidden { logits, hidden } => {
                Answer::Hidden { logits: &mut logits[of_vocab], hidden: &mut hidden[of_hidden] }
            }
            Answer::Best(k, best) => Answer::Best(*k, best),
        }
    }
}

/// Devices on which layers are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Devices {
    /// On the CPU.
    #[default]
    Cpu,
    /// On the first GPU if there is a usable one, otherwise on the CPU.
    Auto,
    /// On these GPUs: if bit `n` is set, on device `n`.
    Cuda(u64),
}

impl FromStr for Devices {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Devices, String> {
        if let Some(numbers) = text.strip_prefix("cuda:") {
            let bit = |number: &str| number.parse().ok().and_then(|n| 1u64.checked_shl(n));
            let mask = numbers.split(',').try_fold(0, |mask, number| Some(mask | bit(number)?));
            return mask
                .map(Devices::Cuda)
                .ok_or_else(|| format!("`{numbers}`: expected numbers of GPUs, as in cuda:0,1"));
        }
        match text {
            "auto" => Ok(Devices::Auto),
            "cpu" => Ok(Devices::Cpu),
            "cuda" => Ok(Devices::Cuda(1)),
            _ => Err("expected auto, cpu, cuda or cuda:N".into()),
        }
    }
}

/// Devices to use, and how many layers are computed on GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offload {
    /// The devices.
    pub devices: Devices,
    /// Number of layers on GPUs, counted from the last layer; `None` = as many as fit.
    pub layers: Option<usize>,
}

/// Description of a part for reports.
#[derive(Debug, Clone)]
pub struct PartInfo {
    /// Layers of the model that the part computes.
    pub layers: Range<usize>,
    /// The accelerator that computes these layers; `None` for the CPU.
    pub device: Option<DeviceInfo>,
    /// Bytes of the accelerator's memory in use by this program and others.
    pub memory_taken: u64,
}

/// Properties of an accelerator.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    /// Kind of device, such as `cuda` in `cuda:0`.
    pub kind: &'static str,
    /// Device number, from 0.
    pub ordinal: usize,
    /// Product name.
    pub name: String,
    /// Version of the driver API.
    pub driver: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Maximum dynamic shared memory per block in bytes.
    pub shared: u32,
}

impl DeviceInfo {
    /// Returns true if bf16 products run on tensor cores.
    pub fn has_tensor_cores(&self) -> bool {
        self.capability >= (8, 0)
    }

    /// Returns true for the simulated driver of the tests, whose speed is meaningless.
    pub fn is_simulated(&self) -> bool {
        self.name.to_lowercase().contains("simulated")
    }
}

/// Returns the names of the devices of a list of parts, such as `cpu`, `cuda:0,1` or `cpu+cuda:0`.
pub fn names(parts: &[PartInfo]) -> String {
    let mut names = String::new();
    let mut last = None;
    for part in parts {
        let kind = part.device.as_ref().map(|device| device.kind);
        match &part.device {
            Some(device) if last == Some(kind) => names += &format!(",{}", device.ordinal),
            Some(device) => names += &format!("+{}:{}", device.kind, device.ordinal),
            None if last == Some(None) => {}
            None => names += "+cpu",
        }
        last = Some(kind);
    }
    names.split_off(1.min(names.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_one_kind_are_named_once() {
        let part = |device: Option<(&'static str, usize)>| {
            let device = device.map(|(kind, ordinal)| DeviceInfo {
                kind,
                ordinal,
                name: String::new(),
                driver: String::new(),
                capability: (8, 0),
                multiprocessors: 1,
                memory: 0,
                shared: 0,
            });
            PartInfo { layers: 0..1, device, memory_taken: 0 }
        };
        let cases: [(&[_], &str); 4] = [
            (&[None, None], "cpu"),
            (&[None, Some(("cuda", 0))], "cpu+cuda:0"),
            (&[Some(("cuda", 0)), Some(("cuda", 2))], "cuda:0,2"),
            (&[Some(("cuda", 1)), Some(("ze", 0))], "cuda:1+ze:0"),
        ];
        for (parts, expected) in cases {
            assert_eq!(names(&parts.iter().copied().map(part).collect::<Vec<_>>()), expected);
        }
    }
}
