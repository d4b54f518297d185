//! Writes calibration statistics site by site, and reuses the sites that an interrupted run has written.

use super::{Description, FORMAT, SiteShape};
use crate::calibration::sums::{self, Sums};
use crate::error::{Context, Result};
use crate::output::AtomicFile;
use crate::sha256::{Digest, Sha256, hex};
use serde_json::{Map, json};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

/// Writer of a statistics file, site by site.
pub struct CalibrationWriter {
    file: AtomicFile,
    hash: Sha256,
    sites: std::vec::IntoIter<SiteShape>,
}

impl CalibrationWriter {
    /// Creates the file and writes its header; [`CalibrationWriter::put`] must add the sites in the order of `sites`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &Path, description: &Description, sites: Vec<SiteShape>) -> Result<CalibrationWriter> {
        CalibrationWriter::begin(AtomicFile::create(path)?, description, sites)
    }

    /// Writes the header into `file`; see [`CalibrationWriter::create`]. The bytes after the header may be those of
    /// an earlier run ([`CalibrationWriter::take_over`]).
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn begin(file: AtomicFile, description: &Description, sites: Vec<SiteShape>) -> Result<CalibrationWriter> {
        let description = serde_json::to_string(description).expect("plain data always serializes");
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": FORMAT, "description": description}));
        let mut end = 0u64;
        let mut tensor = |name: String, dtype: &str, shape: Vec<u64>, bytes: u64| {
            header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes]}));
            end += bytes;
        };
        sites
            .iter()
            .flat_map(SiteShape::tensors)
            .for_each(|(name, dtype, shape, bytes)| tensor(name, dtype, shape, bytes));
        tensor("seal".into(), "U8", vec![32], 32);
        let mut header = serde_json::to_vec(&header).expect("plain data always serializes");
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut writer = CalibrationWriter { file, hash: Sha256::new(), sites: sites.into_iter() };
        writer.write(&(header.len() as u64).to_le_bytes())?;
        writer.write(&header)?;
        Ok(writer)
    }

    /// Returns the hash of all bytes written so far.
    pub fn hash(&self) -> String {
        hex(self.hash.clone())
    }

    /// Keeps the bytes of the next `count` sites that an earlier run wrote, if all bytes up to their end have this
    /// hash. Returns false otherwise; these sites must then be written again.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn take_over(&mut self, count: usize, hash: &str) -> Result<bool> {
        let path = self.file.path().to_path_buf();
        let next = self.sites.as_slice().iter().take(count);
        let mut left: u64 = next.map(SiteShape::nbytes).sum();
        let mut file = self.file.file();
        let start = file.stream_position().at(&path)?;
        let (mut found, mut buffer) = (self.hash.clone(), vec![0; 1 << 20]);
        while left > 0 {
            let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let n = file.read(&mut buffer[..most]).at(&path)?;
            if n == 0 {
                break;
            }
            found.update(&buffer[..n]);
            left -= n as u64;
        }
        let same = left == 0 && hex(found.clone()) == hash;
        if same {
            self.hash = found;
            self.sites.by_ref().take(count).for_each(drop);
        } else {
            file.seek(SeekFrom::Start(start)).at(&path)?;
        }
        Ok(same)
    }

    /// Writes the sums of the next site, of both halves, and its correction as it is stored.
    ///
    /// # Errors
    /// The sums cannot be written.
    ///
    /// # Panics
    /// The sums or the correction have another shape than announced.
    pub fn put(&mut self, halves: [&Sums; 2], correction: &[u8]) -> Result<()> {
        let site = self.sites.next().expect("as many sites as were announced");
        assert_eq!(correction.len(), 2 * site.correction_rows * site.cols);
        let expected = (site.matrices, site.cols, site.products);
        for sums in halves {
            assert_eq!(expected, (sums.counts.len(), sums.cols, sums.products.is_some()));
        }
        for numbers in halves.map(|sums| &sums.counts).into_iter().chain(halves.map(|sums| &sums.squares)) {
            sums::write_doubles(numbers, |bytes| self.write(bytes))?;
        }
        halves
            .iter()
            .flat_map(|sums| &sums.products)
            .try_for_each(|products| sums::write_floats(products, |bytes| self.write(bytes)))?;
        self.write(correction)
    }

    /// Seals the file, gives it its final name, and returns the seal.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn finish(mut self) -> Result<String> {
        assert!(self.sites.next().is_none(), "every site that was announced is there");
        let hash = std::mem::take(&mut self.hash);
        self.write(&hash.clone().finalize())?;
        let mut file = self.file.file();
        let end = file.stream_position().at(self.file.path())?;
        file.set_len(end).at(self.file.path())?;
        self.file.commit()?;
        Ok(hex(hash))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        let path = self.file.path().to_path_buf();
        self.file.write_all(bytes).at(path)
    }
}
