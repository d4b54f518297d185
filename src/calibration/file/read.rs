//! Reads calibration statistics. The header and the seal are checked when a file is opened; the statistics of a
//! matrix are averaged on request.

use super::{Description, FORMAT, SiteShape};
use crate::calibration::{Half, Site, Sums};
use crate::error::{Context, Error, Result};
use crate::mapped::MappedFile;
use crate::sha256::{Digest, Sha256, hex};
use crate::strict_json;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Largest accepted header in bytes.
const HEADER_LIMIT: u64 = 16 << 20;
/// Largest accepted number of input channels or matrices; more than any model has, and small enough that sizes cannot
/// overflow.
const MOST: u64 = 1 << 20;
/// Number of rows of the layer's average that are added to the statistics of each expert. An expert that the text
/// rarely or never selects thus gets average statistics.
const PRIOR_ROWS: f64 = 16.0;

/// Number of bytes that are hashed before their pages are released.
const HASHED: usize = 64 << 20;

/// Opened statistics file whose header has been validated.
#[derive(Debug)]
pub struct Calibration {
    map: Arc<MappedFile>,
    description: Description,
    seal: String,
    /// Sites in file order, each with the offset of its first byte.
    sites: Vec<(SiteShape, usize)>,
    by_name: BTreeMap<String, usize>,
}

/// Mean statistics of the inputs of a matrix over the collected rows.
#[derive(Debug, Clone, PartialEq)]
pub struct InputMeans {
    /// Mean square of each input channel.
    pub squares: Vec<f32>,
    /// Mean products, `(cols, cols)`; only the upper triangle is filled.
    pub products: Option<Vec<f32>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl Calibration {
    /// Opens a file and checks its seal.
    ///
    /// # Errors
    /// The file is missing, has another format, or is truncated or damaged.
    pub fn open(path: &Path) -> Result<Calibration> {
        let map = MappedFile::open(path)?;
        Calibration::parse(map).at(path).help("name a file that `iec calib` wrote; if it is one, make it again")
    }

    fn parse(map: Arc<MappedFile>) -> Result<Calibration> {
        let bytes = map.bytes();
        let (start, header) = header(bytes)?;
        let (description, tensors) = describe(&header)?;
        let by_name: BTreeMap<&str, &RawTensor> =
            tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut sites = Vec::new();
        let mut at = start as u64;
        let mut next = tensors.iter().peekable();
        while let Some((name, tensor)) = next.peek() {
            if name == "seal" {
                break;
            }
            let site = name.strip_suffix(".counts").filter(|_| tensor.dtype == "F64");
            let site = site.ok_or_else(|| {
                Error::corrupt("found another tensor, expected `SITE.counts` of type F64").tensor(name.as_str())
            })?;
            let shape = site_shape(site, |leaf| by_name.get(format!("{site}.{leaf}").as_str()).copied())?;
            let first = at;
            for (name, dtype, dims, bytes) in shape.tensors() {
                let found = next.next().filter(|(found, _)| *found == name).map(|(_, tensor)| tensor);
                let right = found.is_some_and(|t| {
                    let offsets = (at - start as u64, at - start as u64 + bytes);
                    t.dtype == dtype && t.shape == dims && t.data_offsets == offsets
                });
                if !right {
                    let found =
                        format!("found another tensor, type, shape or position here, expected {dtype} {dims:?}");
                    return Err(Error::corrupt(found).tensor(name));
                }
                at += bytes;
            }
            sites.push((shape, first as usize));
        }
        let seal = &[("seal".to_string(), 32u64)];
        let found: Vec<(String, u64)> =
            next.map(|(n, t)| (n.clone(), t.data_offsets.1.saturating_sub(t.data_offsets.0))).collect();
        if found != seal || bytes.len() as u64 != at + 32 {
            let found = format!("found {} bytes, expected {} with a hash at the end", bytes.len(), at + 32);
            return Err(Error::corrupt(found));
        }
        let (body, seal) = bytes.split_at(at as usize);
        let hash = hash_and_release(&map, body);
        if hash.clone().finalize()[..] != *seal {
            return Err(Error::corrupt("the file is damaged: its bytes do not have the recorded hash"));
        }
        let by_name = sites.iter().enumerate().map(|(i, (site, _))| (site.name.clone(), i)).collect();
        Ok(Calibration { map, description, seal: hex(hash), sites, by_name })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// Returns the origin of the sums.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the seal of the file, the SHA-256 of all bytes before it, in hex.
    pub fn seal(&self) -> &str {
        &self.seal
    }

    /// Returns the sites in file order.
    pub fn sites(&self) -> impl Iterator<Item = &SiteShape> {
        self.sites.iter().map(|(site, _)| site)
    }

    /// Returns the number of rows collected for each matrix of a site; empty for an unknown site.
    pub fn counts(&self, site: &str) -> Vec<f64> {
        let Some((shape, start)) = self.by_name.get(site).map(|i| &self.sites[*i]) else { return Vec::new() };
        let counts = doubles(&self.map.bytes()[*start..start + 16 * shape.matrices]);
        let (first, second) = counts.split_at(shape.matrices);
        first.iter().zip(second).map(|(a, b)| a + b).collect()
    }

    /// Returns all sums of a site, one for each half, or `None` for an unknown site.
    pub fn sums(&self, site: &str) -> Option<[Sums; 2]> {
        let (shape, start) = self.sites.get(*self.by_name.get(site)?)?;
        let (n, cols) = (shape.matrices, shape.cols);
        let mut at = *start;
        let mut floats = |count: usize| {
            at += 8 * count;
            doubles(&self.map.bytes()[at - 8 * count..at])
        };
        let counts = [floats(n), floats(n)];
        let squares = [floats(n * cols), floats(n * cols)];
        let triangle = cols * (cols + 1) / 2;
        let products = [0, 1].map(|half| {
            shape.products.then(|| {
                let bytes = self.map.bytes()[at + half * 4 * triangle..][..4 * triangle].as_chunks::<4>().0;
                bytes.iter().map(|x| f32::from_le_bytes(*x)).collect()
            })
        });
        let mut parts = counts.into_iter().zip(squares).zip(products);
        let mut half = || parts.next().map(|((counts, squares), products)| Sums { cols, counts, squares, products });
        Some([half()?, half()?])
    }

    /// Returns the mean input statistics of matrix number `matrix` of the tensor with this canonical name, over the
    /// windows of one half or of both. Returns `None` if the tensor has no site. Products are included only if
    /// `products` is true.
    ///
    /// # Errors
    /// The file was made for another shape, or no row was collected.
    pub fn inputs(
        &self,
        tensor: &str,
        (count, cols): (usize, usize),
        matrix: usize,
        half: Option<Half>,
        products: bool,
    ) -> Result<Option<InputMeans>> {
        let Some(index) = Site::name_of_tensor(tensor).and_then(|site| self.by_name.get(&site)) else {
            return Ok(None);
        };
        let (shape, start) = (&self.sites[*index].0, self.sites[*index].1);
        if (shape.matrices, shape.cols) != (count, cols) {
            let found = format!(
                "found statistics of {} matrices with {} inputs, expected {count} with {cols}",
                shape.matrices, shape.cols
            );
            return Err(Error::usage(found)
                .tensor(tensor)
                .help("make the statistics from this model with `iec calib`"));
        }
        let halves = half.map_or(0..2, |half| half as usize..half as usize + 1);
        let bytes = self.map.bytes();
        let (squares_at, products_at) = (start + 16 * count, start + 16 * count * (1 + cols));
        let (mut rows, mut seen) = (0.0, 0.0);
        let (mut all, mut own) = (vec![0f64; cols], vec![0f64; cols]);
        let wanted = halves.start * count..halves.end * count;
        for (i, n) in wanted.clone().zip(doubles(&bytes[start + 8 * wanted.start..start + 8 * wanted.end])) {
            let squares = doubles(&bytes[squares_at + 8 * i * cols..][..8 * cols]);
            rows += n;
            all.iter_mut().zip(&squares).for_each(|(sum, x)| *sum += x);
            if i % count == matrix {
                seen += n;
                own.iter_mut().zip(&squares).for_each(|(sum, x)| *sum += x);
            }
        }
        if !(rows > 0.0 && rows.is_finite()) {
            return Err(Error::corrupt("found no recorded inputs, expected at least one")
                .tensor(tensor)
                .help("make the statistics again with `iec calib` and a text of at least two windows"));
        }
        let prior = if count == 1 { 0.0 } else { PRIOR_ROWS };
        let mean = |own: f64, all: f64| ((own + prior * all / rows) / (seen + prior)) as f32;
        let squares: Vec<f32> = own.iter().zip(&all).map(|(own, all)| mean(*own, *all)).collect();
        if squares.iter().any(|x| !x.is_finite() || *x < 0.0) {
            return Err(Error::corrupt("found a mean square that is negative or not finite")
                .tensor(tensor)
                .help("make the statistics again with `iec calib`"));
        }
        let products = (products && shape.products).then(|| {
            let mut mean = vec![0f32; cols * cols];
            halves.for_each(|half| self.add_products(shape, products_at, half, (1.0 / rows) as f32, &mut mean));
            self.map.release_range(products_at..products_at + 4 * cols * (cols + 1));
            mean
        });
        Ok(Some(InputMeans { squares, products }))
    }

    /// Adds the correction of the tensor with this canonical name to some of its rows, if the file has one. `rows` is
    /// the number of rows of the whole tensor, `values` holds those from `first` on.
    ///
    /// # Errors
    /// The correction has another shape.
    pub fn correct(&self, tensor: &str, [rows, cols]: [usize; 2], first: usize, values: &mut [f32]) -> Result<()> {
        let Some(site) = Site::name_of_tensor(tensor) else { return Ok(()) };
        let Some((shape, bytes)) = self.correction(&site) else { return Ok(()) };
        if (shape.correction_rows, shape.cols) != (rows, cols) {
            let found = format!(
                "found a correction of {} x {} weights, expected {rows} x {cols}",
                shape.correction_rows, shape.cols
            );
            return Err(Error::usage(found)
                .tensor(tensor)
                .help("make the statistics from this model with `iec calib --quantized`"));
        }
        let bytes = bytes[2 * first * cols..][..2 * values.len()].as_chunks::<2>().0;
        values.iter_mut().zip(bytes).for_each(|(x, bytes)| *x += half::bf16::from_le_bytes(*bytes).to_f32());
        Ok(())
    }

    /// Returns the shape of a site and its correction, if it has one.
    pub fn correction(&self, site: &str) -> Option<(&SiteShape, &[u8])> {
        let (shape, start) = self.sites.get(*self.by_name.get(site)?)?;
        let length = 2 * shape.correction_rows * shape.cols;
        let end = start + shape.nbytes() as usize;
        (length > 0).then(|| (shape, &self.map.bytes()[end - length..end]))
    }

    /// Adds the triangle of products of a half, multiplied by `scale`, to the upper triangle of a matrix.
    fn add_products(&self, shape: &SiteShape, at: usize, half: usize, scale: f32, out: &mut [f32]) {
        let (cols, triangle) = (shape.cols, shape.cols * (shape.cols + 1) / 2);
        let mut bytes = self.map.bytes()[at + half * 4 * triangle..][..4 * triangle].as_chunks::<4>().0;
        for (i, row) in out.chunks_exact_mut(cols).enumerate() {
            let (now, later) = bytes.split_at(cols - i);
            row[i..].iter_mut().zip(now).for_each(|(out, x)| *out += scale * f32::from_le_bytes(*x));
            bytes = later;
        }
    }
}

/// Hashes the first bytes of a file and releases the pages that were hashed, because the products of a large model
/// take gigabytes.
fn hash_and_release(map: &MappedFile, bytes: &[u8]) -> Sha256 {
    let mut hash = Sha256::new();
    for (i, piece) in bytes.chunks(HASHED).enumerate() {
        hash.update(piece);
        map.release_range(i * HASHED..i * HASHED + piece.len());
    }
    hash
}

/// Returns the dimensions of a site; `tensor` returns one of its tensors by the end of the name.
fn site_shape<'a>(site: &str, tensor: impl Fn(&str) -> Option<&'a RawTensor>) -> Result<SiteShape> {
    let size = |leaf: &str, dim: usize| tensor(leaf)?.shape.get(dim).copied().filter(|n| (1..=MOST).contains(n));
    let (Some(matrices), Some(cols)) = (size("counts", 1), size("squares", 2)) else {
        return Err(Error::corrupt("found no counts and squares of a valid shape, expected both").tensor(site));
    };
    let correction_rows = match tensor("correction") {
        Some(_) => size("correction", 0).ok_or_else(|| {
            Error::corrupt("found a correction without a valid shape, expected [rows, cols]").tensor(site)
        })?,
        None => 0,
    };
    Ok(SiteShape {
        name: site.to_string(),
        matrices: matrices as usize,
        cols: cols as usize,
        products: tensor("products").is_some(),
        correction_rows: correction_rows as usize,
    })
}

fn doubles(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<8>().0.iter().map(|x| f64::from_le_bytes(*x)).collect()
}

/// Parses the header; returns the offset of the data and the header.
fn header(bytes: &[u8]) -> Result<(usize, Map<String, Value>)> {
    let length = bytes.first_chunk::<8>().map(|word| u64::from_le_bytes(*word));
    let length = length.filter(|n| *n <= HEADER_LIMIT && *n <= bytes.len() as u64 - 8);
    let Some(length) = length else {
        return Err(Error::corrupt("not a statistics file of `iec calib`: the header is damaged"));
    };
    let range: Range<usize> = 8..8 + length as usize;
    match strict_json::parse(&bytes[range.clone()])? {
        Value::Object(map) => Ok((range.end, map)),
        _ => Err(Error::corrupt("not a statistics file of `iec calib`: the header is not a JSON object")),
    }
}

/// Parses the description and the tensors, which are returned in file order.
fn describe(header: &Map<String, Value>) -> Result<(Description, Vec<(String, RawTensor)>)> {
    let metadata = |key: &str| header.get("__metadata__").and_then(|m| m.get(key)).and_then(Value::as_str);
    match metadata("format") {
        Some(FORMAT) => {}
        Some(other) => return Err(Error::unsupported(format!("found format `{other}`, expected `{FORMAT}`"))),
        None => return Err(Error::corrupt("not a statistics file of `iec calib`: the field `format` is missing")),
    }
    let description = strict_json::parse(metadata("description").unwrap_or_default().as_bytes())
        .and_then(|value| Description::deserialize(value).map_err(|e| Error::corrupt(e.to_string())))
        .tensor("description")?;
    let mut tensors = Vec::new();
    for (name, value) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let tensor = RawTensor::deserialize(value).map_err(|e| Error::corrupt(e.to_string())).tensor(name.as_str())?;
        tensors.push((name.clone(), tensor));
    }
    tensors.sort_by_key(|(_, tensor)| tensor.data_offsets);
    Ok((description, tensors))
}
