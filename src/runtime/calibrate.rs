//! Calibration: collects statistics of matrix inputs while a model reads texts ([`crate::calibration`]).
//!
//! Each window is read as a text of its own, so windows can be read in any order. They are read shard by shard
//! ([`crate::calibration::shards`]), and all sums of a shard are added in the order of the text, so the same texts give
//! the same bytes with any number of threads. The memory of the products `X^T X` grows with the square of the input
//! channels. If the products of all layers exceed the allowed memory, the texts are read several times, each time for
//! the next layers.

use super::engine::Engine;
use super::observe::Observer;
use crate::calibration::file::SiteShape;
use crate::calibration::panel::Panels;
use crate::calibration::shards::{SHARDS, windows_of};
use crate::calibration::{Site, Sums};
use crate::catalogue::{LAYER, LayerInput};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model_config::ModelConfig;
use std::collections::BTreeMap;
use std::ops::Range;

/// Texts cut into windows, each of which is read separately.
pub struct Windows {
    windows: Vec<Vec<u32>>,
}

impl Windows {
    /// Cuts each text into consecutive pieces and puts `prefix` in front of each, so that windows have `window` tokens.
    /// A shorter rest of a text is dropped.
    ///
    /// # Errors
    /// The prefix fills the window, or all texts together give fewer than two windows: one is needed for each half of
    /// the statistics ([`crate::calibration::Half`]).
    pub fn new(texts: &[Vec<u32>], prefix: &[u32], window: usize) -> Result<Windows> {
        let piece = window.checked_sub(prefix.len()).filter(|piece| *piece > 0);
        let piece = piece.ok_or_else(|| {
            let found = format!("found a window of {window} tokens, expected more than {}", prefix.len());
            Error::usage(found).help("give a larger --window; the tokenizer begins every text with special tokens")
        })?;
        let pieces = texts.iter().flat_map(|text| text.chunks_exact(piece));
        let windows: Vec<Vec<u32>> = pieces.map(|piece| [prefix, piece].concat()).collect();
        if windows.len() < 2 {
            let tokens: usize = texts.iter().map(Vec::len).sum();
            let found = format!("found {tokens} tokens, expected at least two windows of {window}");
            return Err(Error::usage(found).help("give a longer --text, or a smaller --window"));
        }
        Ok(Windows { windows })
    }

    /// Returns the number of tokens read in one pass.
    pub fn tokens(&self) -> usize {
        self.windows.iter().map(Vec::len).sum()
    }

    /// Returns the number of tokens in the first `windows` windows of a shard.
    pub fn tokens_of(&self, shard: usize, windows: usize) -> usize {
        self.of_shard(shard).take(windows).map(<[u32]>::len).sum()
    }

    /// Returns the shards that have windows, in order, each with its number of tokens.
    pub fn shards(&self) -> Vec<(usize, usize)> {
        let all = (0..SHARDS).map(|shard| (shard, self.tokens_of(shard, usize::MAX)));
        all.filter(|(_, tokens)| *tokens > 0).collect()
    }

    /// Returns all windows in the order of the texts.
    pub fn all(&self) -> impl ExactSizeIterator<Item = &[u32]> {
        self.windows.iter().map(Vec::as_slice)
    }

    fn of_shard(&self, shard: usize) -> impl ExactSizeIterator<Item = &[u32]> {
        windows_of(shard, self.windows.len()).map(|window| &*self.windows[window])
    }
}

/// Selection of the statistics to collect.
#[derive(Debug, Clone, Copy)]
pub struct Gather {
    /// True to collect the products `X^T X` in addition to the sums of squares.
    pub products: bool,
    /// Bytes that the products collected at once may take; those of one layer are always collected together.
    pub memory: u64,
    /// Number of sums per site that are in memory at once: those of a shard, and the total of a half if it is computed.
    pub held: u64,
}

/// Returns the sites of a model (each is the common input of one or more matrices) in the order in which their
/// statistics are collected and stored.
pub fn sites(config: &ModelConfig, products: bool) -> Vec<(Site, SiteShape)> {
    let shape = |layer, part, matrices, cols| {
        let site = Site { layer, part };
        (site, SiteShape { name: site.to_string(), matrices, cols, products, correction_rows: 0 })
    };
    let layer = |layer| {
        let (mut sites, described) = (Vec::<(Site, SiteShape)>::new(), config.layer(layer));
        let inputs = LAYER.iter().filter_map(|tensor| Some((tensor.input?, tensor.shape(config, &described)?)));
        for (part, dims) in inputs {
            if sites.iter().all(|(site, _)| site.part != part) {
                let matrices = dims[..dims.len() - 2].iter().product();
                sites.push(shape(layer, part, matrices, dims[dims.len() - 1]));
            }
        }
        sites
    };
    let mut all: Vec<_> = (0..config.n_layers).flat_map(layer).collect();
    all.push(shape(config.n_layers, LayerInput::LmHead, 1, config.hidden));
    all
}

/// Returns the layers of each pass over the texts (the output matrix counts as one layer).
pub fn passes(config: &ModelConfig, gather: Gather) -> Vec<Range<usize>> {
    let mut bytes = vec![0u64; config.n_layers + 1];
    for (site, shape) in sites(config, gather.products) {
        bytes[site.layer] += if gather.products { gather.held * Sums::product_bytes(shape.cols) } else { 0 };
    }
    let mut passes: Vec<Range<usize>> = Vec::new();
    let mut held = 0;
    for (layer, bytes) in bytes.into_iter().enumerate() {
        match passes.last_mut() {
            Some(pass) if held + bytes <= gather.memory => {
                pass.end = layer + 1;
                held += bytes;
            }
            _ => {
                passes.push(layer..layer + 1);
                held = bytes;
            }
        }
    }
    passes
}

/// One pass over the texts for the matrix inputs of some layers: the sums so far of one shard.
#[derive(Debug)]
pub struct Gathering {
    sites: Vec<(Site, SiteShape)>,
    /// Sums in the order of `sites`.
    sums: Vec<Sums>,
    /// True while nothing was added to `sums`; their pages are then not in memory yet.
    is_empty: bool,
    /// Index of each site; inputs of other sites are ignored.
    by_site: BTreeMap<Site, usize>,
    /// Layers of this pass; later layers are not computed.
    layers: Range<usize>,
    /// Buffers for the products `X^T X`.
    panels: Panels,
    /// Shard that is read.
    shard: usize,
    /// Number of windows of the shard read so far.
    windows: usize,
}

impl Observer for Gathering {
    fn stream(&mut self, _: usize, _: &[f32]) {}

    fn inputs(&mut self, site: Site, matrix: usize, rows: &mut dyn ExactSizeIterator<Item = &'_ [f32]>) {
        if let Some(index) = self.by_site.get(&site) {
            self.is_empty = false;
            self.sums[*index].add(matrix, rows, &mut self.panels);
        }
    }

    fn end(&self) -> usize {
        self.layers.end
    }

    fn is_large(&self) -> bool {
        self.sums.iter().any(|sums| sums.products.is_some())
    }
}

impl Gathering {
    /// Creates an empty pass over the given layers.
    pub fn new(config: &ModelConfig, gather: Gather, layers: Range<usize>) -> Gathering {
        let mut sites = sites(config, gather.products);
        sites.retain(|(site, _)| layers.contains(&site.layer));
        let by_site = sites.iter().enumerate().map(|(i, (site, _))| (*site, i)).collect();
        let (sums, panels) = (Vec::new(), Panels::default());
        let mut gathering = Gathering { sites, sums, is_empty: true, by_site, layers, panels, shard: 0, windows: 0 };
        gathering.sums = gathering.empty_sums();
        gathering
    }

    /// Returns empty sums in the order of [`Gathering::sites`].
    pub fn empty_sums(&self) -> Vec<Sums> {
        self.sites().map(|site| Sums::new(site.matrices, site.cols, site.products)).collect()
    }

    /// Returns the layers of this pass.
    pub fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    /// Returns the sites of this pass in the order in which they are stored.
    pub fn sites(&self) -> impl ExactSizeIterator<Item = &SiteShape> {
        self.sites.iter().map(|(_, shape)| shape)
    }

    /// Returns the sums of the shard in the order of [`Gathering::sites`].
    pub fn sums(&self) -> &[Sums] {
        &self.sums
    }

    /// Returns the sums of the sites of a layer, in order.
    pub fn of_layer(&self, layer: usize) -> impl Iterator<Item = &Sums> {
        self.sites.iter().zip(&self.sums).filter(move |((site, _), _)| site.layer == layer).map(|(_, sums)| sums)
    }

    /// Returns the sums of the sites of a layer, in order, to be replaced by stored ones.
    pub fn of_layer_mut(&mut self, layer: usize) -> impl Iterator<Item = &mut Sums> {
        self.is_empty = false;
        let all = self.sites.iter().zip(&mut self.sums);
        all.filter(move |((site, _), _)| site.layer == layer).map(|(_, sums)| sums)
    }

    /// Returns the number of windows of the shard read so far.
    pub fn windows(&self) -> usize {
        self.windows
    }

    /// Begins to read a shard.
    pub fn begin(&mut self, shard: usize) {
        if !std::mem::replace(&mut self.is_empty, true) {
            self.sums.iter_mut().for_each(Sums::clear);
        }
        (self.shard, self.windows) = (shard, 0);
    }

    /// Continues an earlier run in a shard: `sums` are its sums over the first `windows` windows, in the order of
    /// [`Gathering::sites`].
    pub fn go_on(&mut self, shard: usize, windows: usize, sums: Vec<Sums>) {
        (self.shard, self.windows, self.sums, self.is_empty) = (shard, windows, sums, false);
    }

    /// Reads the next window of the shard and returns its number of tokens, or `None` after the last one.
    ///
    /// # Errors
    /// The engine fails, the sums are NaN or infinite after the last window, or the user interrupts. The sums may then
    /// include part of a window and must not be used.
    pub fn read(&mut self, engine: &mut Engine, windows: &Windows) -> Result<Option<usize>> {
        interrupt::check()?;
        let mut rest = windows.of_shard(self.shard).skip(self.windows);
        let Some(window) = rest.next() else { return Ok(None) };
        engine.observe(window, self)?;
        self.windows += 1;
        if rest.len() == 0 {
            self.check()?;
        }
        Ok(Some(window.len()))
    }

    /// Fails if the sums of a site are NaN or infinite.
    ///
    /// # Errors
    /// The inputs of a matrix were NaN or infinite, or their squares.
    pub fn check(&self) -> Result<()> {
        let damaged = |sums: &Sums| sums.squares.iter().any(|x| !x.is_finite());
        match self.sites().zip(&self.sums).find(|(_, sums)| damaged(sums)) {
            Some((shape, _)) => Err(Error::corrupt("found inputs that are NaN or infinite")
                .tensor(&shape.name)
                .help("collect from a pack made with --dtype fp32; if the error stays, the weights are damaged")),
            None => Ok(()),
        }
    }
}
