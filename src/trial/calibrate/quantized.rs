//! Calibration along a quantized model: the statistics of the inputs that each matrix sees after all matrices before it
//! were quantized, and corrections of the matrices whose outputs are added to the residual stream.
//!
//! Quantized alone, each matrix adds its own error to the outputs of the model. Here two engines read the same windows
//! layer by layer, one with the weights of the model, one with those that a manifest quantizes. Where they differ at
//! the input of a matrix, the matrix is fitted to what it really reads. The output matrix of attention and that of the
//! MLP can even undo differences that have already happened: they are quantized towards weights W' that add to the
//! quantized stream what is missing in it. With x the inputs of the matrix in the quantized model and e the difference
//! of both residual streams behind the block, while the matrix has its own weights W, the least squares are `W' = W +
//! (sum e x^T) (sum x x^T + damping)^-1`.
//!
//! Sources: QEP (arXiv 2504.09629) and GPTAQ (arXiv 2504.02692) fit to the inputs of the quantized model; the
//! correction here takes the difference of the residual stream instead of that of the inputs.

use super::{Calibrated, CalibrationOptions, Opened};
use crate::calibration::file::{Description, SiteShape};
use crate::calibration::panel::{Panels, factor, solve, triangle_rows};
use crate::calibration::{Calibration, CalibrationWriter, Site, Sums};
use crate::catalogue::{EMBEDDING, LayerInput, layer_part};
use crate::convert::quantize::weights::{Tensor, Weights};
use crate::dtype::{DType, encode_floats};
use crate::error::{Context, Error, Result};
use crate::interrupt;
use crate::job::Job;
use crate::manifest::Manifest;
use crate::model_config::ModelConfig;
use crate::output::AtomicFile;
use crate::progress;
use crate::quant_spec::{Method, TensorQuant};
use crate::runtime::calibrate::{self, Windows};
use crate::runtime::layer_look::LayerLook;
use crate::runtime::{Engine, EngineOptions};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Damping of the corrections as a share of the mean of the diagonal.
const DAMPING: f32 = 0.1;

/// A window in both models: the residual streams at the input of the current layer.
struct Streams {
    float: Vec<f32>,
    quantized: Vec<f32>,
}

/// Calibration along a quantized model.
pub(super) struct Along<'a> {
    job: &'a Job,
    options: &'a CalibrationOptions,
    weights: Weights,
    tensors: Vec<Tensor>,
    /// Quantization of the tensors that the manifest quantizes anew.
    quants: BTreeMap<String, TensorQuant>,
    description: Description,
    windows: Windows,
    float: Engine,
    quantized: Engine,
    /// Streams of each window.
    streams: Vec<Streams>,
}

impl<'a> Along<'a> {
    /// Opens the model twice.
    ///
    /// # Errors
    /// The model cannot be opened, its layers read more than the residual stream, or the manifest quantizes nothing.
    pub fn new(
        job: &'a Job,
        options: &'a CalibrationOptions,
        opened: Opened,
        manifest: &Manifest,
    ) -> Result<Along<'a>> {
        let Opened { reader, engine_options, engine: float, windows, description } = opened;
        refuse_unsupported(float.config())?;
        let quantized = Engine::open(&reader, &EngineOptions { exchanged: true, ..engine_options })?;
        let weights = options.model.weights()?;
        let tensors = weights.tensors();
        let document = manifest.document();
        // Codes of the source and recovered ones stay as they are.
        let quant = |tensor: &Tensor| {
            let quant = document.tensors.get(&tensor.name)?.quant?;
            (quant.method != Method::Exact && !tensor.is_coded).then(|| (tensor.name.clone(), quant))
        };
        let quants: BTreeMap<String, TensorQuant> = tensors.iter().filter_map(quant).collect();
        if quants.is_empty() {
            return Err(Error::usage("found a manifest without a tensor of this model that it quantizes")
                .at(options.quantized.as_deref().unwrap_or(Path::new("")))
                .help("name a manifest that `iec ptq` wrote for this model"));
        }
        let description = Description { quantized: Some(document.decisions_hash()), ..description };
        let streams = Vec::new();
        Ok(Along { job, options, weights, tensors, quants, description, windows, float, quantized, streams })
    }

    /// Collects all statistics and writes them.
    ///
    /// # Errors
    /// An engine fails, a tensor cannot be quantized as the manifest says, or a file cannot be read or written.
    pub fn run(mut self) -> Result<Calibrated> {
        let job = self.job;
        job.keep(&[], || self.collect_all())?;
        let out = AtomicFile::create(&self.options.out)?.overwrite(self.options.overwrite);
        job.commit_begins()?;
        self.write(out)?;
        let tokens = self.windows.tokens() as u64;
        let shards = self.windows.shards().len();
        Ok(Calibrated { description: self.description, part: None, shards, tokens, known: 0, part_bytes: 0 })
    }

    fn collect_all(&mut self) -> Result<()> {
        let layers = self.float.config().n_layers;
        let tokens = self.windows.tokens() as u64;
        let bar = progress::items("calibrating along the quantized model", tokens * (layers as u64 + 1));
        self.begin()?;
        for layer in 0..layers {
            let sites = self.sites_of(layer)?;
            for (site, block) in &sites {
                let of_experts = sites.iter().any(|(site, other)| other == block && is_of_experts(site.part));
                self.site(*site, *block, !of_experts && self.adds_plainly(*site))?;
            }
            self.advance(layer)?;
            bar.inc(tokens);
        }
        self.site(Site::lm_head(layers), 0, false)?;
        bar.inc(tokens);
        Ok(())
    }

    /// Returns true if one quantized matrix reads the site, whose output is added to the residual stream as it is.
    fn adds_plainly(&self, site: Site) -> bool {
        let adds = matches!(site.part, LayerInput::AttentionOutput | LayerInput::MlpMiddle);
        adds && !self.float.config().post_norms && self.readers(site).len() == 1
    }

    /// Returns the names of the quantized tensors that read a site.
    fn readers(&self, site: Site) -> Vec<String> {
        let own = site.to_string();
        self.quants.keys().filter(|name| Site::name_of_tensor(name).as_ref() == Some(&own)).cloned().collect()
    }

    /// Computes the residual streams at the input of the first layer.
    fn begin(&mut self) -> Result<()> {
        self.quantize_tensor(EMBEDDING, None)?;
        for window in self.windows.all() {
            interrupt::check()?;
            let float = LayerLook::embeddings(&mut self.float, window)?;
            let quantized = LayerLook::embeddings(&mut self.quantized, window)?;
            self.streams.push(Streams { float, quantized });
        }
        Ok(())
    }

    /// Returns the sites of a layer in the order of the computation, each with the number of its block.
    fn sites_of(&mut self, layer: usize) -> Result<Vec<(Site, usize)>> {
        let window = self.windows.all().next().expect("two windows at least");
        let input = self.streams[0].quantized.clone();
        Ok(LayerLook::at(&mut self.quantized, window, layer, input, None)?.sites)
    }

    /// Collects the statistics of a site, unless an interrupted run has, and quantizes the matrices that read it.
    fn site(&mut self, site: Site, block: usize, corrected: bool) -> Result<()> {
        let path = self.path(site);
        let known = Calibration::open(&path).ok().filter(|known| *known.description() == self.description);
        let known = match known {
            Some(known) => known,
            None => {
                let (shape, halves, correction) = self.collect(site, block, corrected)?;
                let mut writer = CalibrationWriter::create(&path, &self.description, vec![shape])?;
                writer.put([&halves[0], &halves[1]], &correction)?;
                writer.finish()?;
                self.job.record("site", &site.to_string(), 0)?;
                Calibration::open(&path)?
            }
        };
        // Nothing comes after the output matrix.
        let readers = if site.part == LayerInput::LmHead { Vec::new() } else { self.readers(site) };
        readers.iter().try_for_each(|name| self.quantize_tensor(name, Some(&known)))
    }

    /// Computes the sums of the inputs of a site in the quantized model, and the correction of the matrix that reads
    /// them; the correction is empty if there is none.
    fn collect(&mut self, site: Site, block: usize, corrected: bool) -> Result<(SiteShape, [Sums; 2], Vec<u8>)> {
        let config = self.float.config();
        let (hidden, scale) = (config.hidden, 1.0 / config.residual_scale);
        let sites = calibrate::sites(config, true).into_iter();
        let (_, shape) = sites.clone().find(|(other, _)| *other == site).ok_or_else(|| {
            Error::engine(format!("found inputs of `{site}`, which the catalogue of tensors does not list"))
        })?;
        // A row of differences and inputs, whose products hold those of the inputs and those of both.
        let before = if corrected { hidden } else { 0 };
        let mut joint = [(); 2].map(|()| Sums::new(shape.matrices, before + shape.cols, true));
        let mut panels = Panels::default();
        for (i, window) in self.windows.all().enumerate() {
            interrupt::check()?;
            let streams = &self.streams[i];
            let look = LayerLook::at(&mut self.quantized, window, site.layer, streams.quantized.clone(), Some(site))?;
            let sums = &mut joint[i % 2];
            if !corrected {
                for (matrix, rows) in &look.rows {
                    sums.add(*matrix, &mut rows.chunks_exact(shape.cols), &mut panels);
                }
                continue;
            }
            let float = LayerLook::at(&mut self.float, window, site.layer, streams.float.clone(), None)?;
            let rows = joint_rows(&float.blocks[block], &look.blocks[block], &look.rows[0].1, hidden);
            sums.add(0, &mut rows.chunks_exact(before + shape.cols), &mut panels);
        }
        if !corrected {
            return Ok((shape, joint, Vec::new()));
        }
        let correction = correction(&joint, hidden, scale).unwrap_or_default();
        let correction_rows = if correction.is_empty() { 0 } else { hidden };
        Ok((SiteShape { correction_rows, ..shape }, joint.map(|sums| sums.from_channel(hidden)), correction))
    }

    /// Quantizes a tensor as a pack does, and gives the second engine the result.
    fn quantize_tensor(&mut self, name: &str, calibration: Option<&Calibration>) -> Result<()> {
        let tensor = self.tensors.iter().find(|tensor| tensor.name == name);
        let Some((tensor, quant)) = tensor.zip(self.quants.get(name)) else { return Ok(()) };
        for matrix in 0..tensor.matrices()?.0 {
            let values = self.weights.quantized(tensor, *quant, calibration, matrix).tensor(name)?;
            self.quantized.exchange(name, matrix, Some(&values))?;
        }
        Ok(())
    }

    /// Computes the residual streams behind a layer in both models, and takes its quantized matrices back.
    fn advance(&mut self, layer: usize) -> Result<()> {
        for (i, window) in self.windows.all().enumerate() {
            interrupt::check()?;
            let Streams { float, quantized } = &mut self.streams[i];
            for (engine, stream) in [(&mut self.float, float), (&mut self.quantized, quantized)] {
                let look = LayerLook::at(engine, window, layer, std::mem::take(stream), None)?;
                *stream = look.blocks.into_iter().next_back().unwrap_or(look.input);
            }
        }
        let is_own = |name: &str| layer_part(name).is_some_and(|(number, _)| number == layer.to_string());
        for tensor in
            self.tensors.iter().filter(|tensor| is_own(&tensor.name) && self.quants.contains_key(&tensor.name))
        {
            (0..tensor.matrices()?.0).try_for_each(|matrix| self.quantized.exchange(&tensor.name, matrix, None))?;
        }
        Ok(())
    }

    fn path(&self, site: Site) -> PathBuf {
        self.job.dir().join(format!("site-{site}"))
    }

    /// Joins the statistics of all sites in one file.
    fn write(&self, out: AtomicFile) -> Result<()> {
        let sites = calibrate::sites(self.float.config(), true);
        let parts = sites.iter().map(|(site, _)| Calibration::open(&self.path(*site)));
        let parts: Vec<Calibration> = parts.collect::<Result<_>>()?;
        let shapes = parts.iter().flat_map(Calibration::sites).cloned().collect();
        let mut writer = CalibrationWriter::begin(out, &self.description, shapes)?;
        for (part, (site, _)) in parts.iter().zip(&sites) {
            let site = site.to_string();
            let [first, second] = part.sums(&site).ok_or_else(|| {
                Error::corrupt(format!("found no statistics of `{site}`, expected those of an interrupted run"))
                    .at(part.path())
                    .help("remove this file, and run the same command again")
            })?;
            writer.put([&first, &second], part.correction(&site).map_or(&[], |(_, bytes)| bytes))?;
        }
        writer.finish().map(drop)
    }
}

fn is_of_experts(part: LayerInput) -> bool {
    matches!(part, LayerInput::Experts | LayerInput::ExpertsMiddle)
}

/// Refuses models whose layers read more than the residual stream, or compute with matrices in other forms.
fn refuse_unsupported(config: &ModelConfig) -> Result<()> {
    let found = if config.attention.latent.is_some() {
        "latent attention"
    } else if config.per_layer_input.is_some() {
        "further inputs of each layer"
    } else if config.layer_scalars {
        "a factor at the end of each layer"
    } else {
        return Ok(());
    };
    Err(Error::unsupported(format!("found a model with {found}, which --quantized does not support"))
        .help("collect statistics without --quantized"))
}

/// Returns rows of the differences of both streams, `(tokens, hidden)`, each followed by its row of inputs.
fn joint_rows(float: &[f32], quantized: &[f32], inputs: &[f32], hidden: usize) -> Vec<f32> {
    let tokens = float.len() / hidden;
    let cols = inputs.len() / tokens.max(1);
    let mut rows = Vec::with_capacity(tokens * (hidden + cols));
    let streams = float.chunks_exact(hidden).zip(quantized.chunks_exact(hidden));
    for ((float, quantized), inputs) in streams.zip(inputs.chunks_exact(cols)) {
        rows.extend(float.iter().zip(quantized).map(|(float, quantized)| float - quantized));
        rows.extend_from_slice(inputs);
    }
    rows
}

/// Solves for the correction of a matrix, `(hidden, cols)`, rounded to BF16; `None` if the inputs are all zero.
fn correction(joint: &[Sums; 2], hidden: usize, scale: f32) -> Option<Vec<u8>> {
    let all = joint[0].cols;
    let cols = all - hidden;
    let (mut differences, mut products) = (vec![0f32; hidden * cols], vec![0f32; cols * cols]);
    for sums in joint {
        let mut triangle = sums.products.clone()?;
        for (i, row) in triangle_rows(&mut triangle, all).into_iter().enumerate() {
            let to = if i < hidden {
                &mut differences[i * cols..][..cols]
            } else {
                &mut products[(i - hidden) * (cols + 1)..][..all - i]
            };
            let from = &row[row.len() - to.len()..];
            to.iter_mut().zip(from).for_each(|(to, x)| *to += x);
        }
    }
    let mean = (0..cols).map(|i| f64::from(products[i * (cols + 1)])).sum::<f64>() / cols as f64;
    let damping = DAMPING * mean as f32;
    (0..cols).for_each(|i| products[i * (cols + 1)] += damping);
    if !(mean > 0.0 && factor(&mut products, cols)) {
        return None;
    }
    solve(&products, cols, &mut differences);
    differences.iter_mut().for_each(|x| *x *= scale);
    let mut bytes = Vec::new();
    encode_floats(DType::BF16, &differences, &mut bytes).ok()?;
    differences.iter().all(|x| x.is_finite()).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::decode_floats;
    use crate::rng::Rng;

    #[test]
    fn a_correction_is_what_is_missing_in_the_stream_as_a_function_of_the_inputs() {
        let (hidden, cols, tokens, mut rng) = (5, 37, 400, Rng::new(3));
        let mut normal = |n: usize| -> Vec<f32> { (0..n).map(|_| rng.next_normal() as f32).collect() };
        let (missing, inputs, stream) = (normal(hidden * cols), normal(tokens * cols), normal(tokens * hidden));
        let product = |row: &[f32], x: &[f32]| row.iter().zip(x).map(|(a, b)| a * b).sum::<f32>();
        let float: Vec<f32> = stream
            .iter()
            .enumerate()
            .map(|(i, r)| r + product(&missing[i % hidden * cols..][..cols], &inputs[i / hidden * cols..][..cols]))
            .collect();
        let rows = joint_rows(&float, &stream, &inputs, hidden);
        let mut joint = [(); 2].map(|()| Sums::new(1, hidden + cols, true));
        for (i, row) in rows.chunks_exact(hidden + cols).enumerate() {
            joint[i % 2].add(0, &mut std::iter::once(row), &mut Panels::default());
        }
        let bytes = correction(&joint, hidden, 2.0).unwrap();
        let mut found = vec![0f32; hidden * cols];
        decode_floats(DType::BF16, &bytes, &mut found).unwrap();
        for (found, missing) in found.iter().zip(&missing) {
            // The damping of a tenth makes the correction smaller.
            assert!((found - 2.0 * missing / 1.1).abs() < 0.35, "{found} {missing}");
        }
        let inputs_alone = joint[0].from_channel(hidden);
        assert_eq!((inputs_alone.cols, inputs_alone.counts[0]), (cols, tokens as f64 / 2.0));
        let mut expected = Sums::new(1, cols, true);
        let half: Vec<f32> =
            rows.chunks_exact(hidden + cols).step_by(2).flat_map(|row| &row[hidden..]).copied().collect();
        half.chunks_exact(cols).for_each(|row| expected.add(0, &mut std::iter::once(row), &mut Panels::default()));
        assert_eq!(inputs_alone, expected);
        assert_eq!(correction(&[Sums::new(1, 9, true), Sums::new(1, 9, true)], 4, 1.0), None);
    }
}
