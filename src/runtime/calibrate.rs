//! Calibration: collects statistics of matrix inputs while a model reads texts ([`crate::calibration`]).
//!
//! Each window is read as a text of its own, so windows could be read in any order. They are read in the order of the
//! text, and all sums are added in that order, so the same texts give the same bytes with any number of threads. The
//! memory of the products `X^T X` grows with the square of the input channels. If the products of all layers exceed the
//! allowed memory, the texts are read several times, each time for the next layers.

use super::engine::Engine;
use super::observe::Observer;
use crate::calibration::file::SiteShape;
use crate::calibration::panel::Panels;
use crate::calibration::{Half, Site, Sums};
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
    /// the statistics ([`Half`]).
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
        self.tokens_of(self.windows.len())
    }

    /// Returns the number of tokens in the first `windows` windows.
    pub fn tokens_of(&self, windows: usize) -> usize {
        self.windows.iter().take(windows).map(Vec::len).sum()
    }
}

/// Selection of the statistics to collect.
#[derive(Debug, Clone, Copy)]
pub struct Gather {
    /// True to collect the products `X^T X` in addition to the sums of squares.
    pub products: bool,
    /// Bytes that the products collected at once may take; those of one layer are always collected together.
    pub memory: u64,
}

/// Returns the sites of a model (each is the common input of one or more matrices) in the order in which their
/// statistics are collected and stored.
pub fn sites(config: &ModelConfig, products: bool) -> Vec<(Site, SiteShape)> {
    let shape = |layer, part, matrices, cols| {
        let site = Site { layer, part };
        (site, SiteShape { name: site.to_string(), matrices, cols, products })
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
        bytes[site.layer] += if gather.products { Sums::product_bytes(shape.cols) } else { 0 };
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

/// One pass over the texts: the sums so far for the matrix inputs of some layers.
#[derive(Debug)]
pub struct Gathering {
    sites: Vec<(Site, SiteShape)>,
    /// Sums by site; inputs of other sites are ignored.
    sums: BTreeMap<Site, Sums>,
    /// Layers of this pass; later layers are not computed.
    layers: Range<usize>,
    /// Buffers for the products `X^T X`.
    panels: Panels,
    /// Number of windows read so far.
    windows: usize,
}

impl Observer for Gathering {
    fn stream(&mut self, _: usize, _: &[f32]) {}

    fn inputs(&mut self, site: Site, matrix: usize, rows: &mut dyn ExactSizeIterator<Item = &'_ [f32]>) {
        let half = if self.windows.is_multiple_of(2) { Half::First } else { Half::Second };
        if let Some(sums) = self.sums.get_mut(&site) {
            sums.add(half, matrix, rows, &mut self.panels);
        }
    }

    fn end(&self) -> usize {
        self.layers.end
    }

    fn is_large(&self) -> bool {
        self.sums.values().any(|sums| sums.products.is_some())
    }
}

impl Gathering {
    /// Creates an empty pass over the given layers.
    pub fn new(config: &ModelConfig, gather: Gather, layers: Range<usize>) -> Gathering {
        let mut sites = sites(config, gather.products);
        sites.retain(|(site, _)| layers.contains(&site.layer));
        let empty = |(site, shape): &(Site, SiteShape)| (*site, Sums::new(shape.matrices, shape.cols, shape.products));
        let sums = sites.iter().map(empty).collect();
        Gathering { sites, sums, layers, panels: Panels::default(), windows: 0 }
    }

    /// Returns the sites of this pass in the order in which they are stored.
    pub fn sites(&self) -> impl ExactSizeIterator<Item = &SiteShape> {
        self.sites.iter().map(|(_, shape)| shape)
    }

    /// Returns the sums in the order of [`Gathering::sites`].
    pub fn sums(&self) -> impl Iterator<Item = &Sums> {
        self.sites.iter().filter_map(|(site, _)| self.sums.get(site))
    }

    /// Returns the number of windows read so far.
    pub fn windows(&self) -> usize {
        self.windows
    }

    /// Continues an earlier run: `sums` are its sums over the first `windows` windows, in the order of
    /// [`Gathering::sites`].
    pub fn go_on(&mut self, windows: usize, sums: Vec<Sums>) {
        self.sums = self.sites.iter().map(|(site, _)| *site).zip(sums).collect();
        self.windows = windows;
    }

    /// Reads the next window and returns its number of tokens, or `None` after the last one.
    ///
    /// # Errors
    /// The engine fails, the sums are NaN or infinite after the last window, or the user interrupts. The sums may then
    /// include part of a window and must not be used.
    pub fn read(&mut self, engine: &mut Engine, windows: &Windows) -> Result<Option<usize>> {
        interrupt::check()?;
        let Some(window) = windows.windows.get(self.windows) else { return Ok(None) };
        engine.observe(window, self)?;
        self.windows += 1;
        if self.windows == windows.windows.len() {
            self.check()?;
        }
        Ok(Some(window.len()))
    }

    fn check(&self) -> Result<()> {
        let damaged = |sums: &Sums| sums.squares.iter().flatten().any(|x| !x.is_finite());
        match self.sites().zip(self.sums()).find(|(_, sums)| damaged(sums)) {
            Some((shape, _)) => Err(Error::corrupt("found inputs that are NaN or infinite")
                .tensor(&shape.name)
                .help("collect from a pack made with --dtype fp32; if the error stays, the weights are damaged")),
            None => Ok(()),
        }
    }
}
