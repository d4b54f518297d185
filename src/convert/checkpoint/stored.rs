//! Models whose tensors have canonical names and rows already: packs of this program, and GGUF files.
//!
//! [`Checkpoint`](super::Checkpoint) offers them like the tensors of a checkpoint, so that every conversion reads them.
//! A tensor of codes in a scheme of packs is a matrix of tiles here, of which tiles are copied and rows decoded. A
//! tensor of a GGUF file whose type has no scheme is a matrix of f32.

use super::{BoundView, CanonicalTensor};
use crate::catalogue::Role;
use crate::convert::arch::{ExpectedTensor, expected_tensors};
use crate::convert::companions::{self, Companions, TOKENIZER};
use crate::convert::executor::Task;
use crate::convert::gguf::import::plan::{GgufModel, ImportedTensor};
use crate::convert::json::read_limited;
use crate::convert::pack_input;
use crate::convert::rows::{Form, Put, RowSource, RowStack, RowTarget};
use crate::convert::source::gguf::blocks;
use crate::convert::source::read_at::InputFile;
use crate::dtype::DType;
use crate::error::{Cause, Context, Error, Result};
use crate::files;
use crate::iebin::{self, Entry, IebinReader, Store, TOKENIZER_SOURCES, stored_bytes};
use crate::model_config::ModelConfig;
use crate::scheme::{QuantSpec, TILE_ROWS, TileLayout};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Advice for a pack whose tensors are not those of its model.
const DAMAGED: &str = "the pack is damaged, or another program made it; make it again from its checkpoint";

/// Opened pack or GGUF file, whose tensors are those of its model.
#[derive(Debug)]
pub(super) enum Stored {
    /// A pack, and its binary as a file.
    Pack { reader: Box<IebinReader>, config: Box<ModelConfig>, binary: InputFile },
    /// A GGUF file with the plan of its tensors.
    Gguf { model: Box<GgufModel>, items: Vec<ImportedTensor> },
}

impl Stored {
    /// Opens the pack that `json` describes.
    ///
    /// # Errors
    /// It is the pack of an adapter, a file is missing or damaged, or its tensors are not those of its model.
    pub fn open_pack(json: &Path) -> Result<Stored> {
        let reader = IebinReader::open_files(json, None).map_err(Error::while_opening_model)?;
        if reader.description.adapter.is_some() {
            return Err(Error::usage("found the pack of an adapter, expected a model")
                .at(json)
                .help("name the model; `iec run MODEL --lora PACK` uses the adapter"));
        }
        let Some(config) = reader.description.model.clone() else {
            return Err(Error::new(Cause::Model("found no description of the model".into())).at(json).help(DAMAGED));
        };
        check_tensors(&reader, &config).at(json).help(DAMAGED).map_err(Error::while_opening_model)?;
        reader.check_files().map_err(Error::while_opening_model)?;
        let binary = InputFile::open(reader.bin()?.path())?;
        Ok(Stored::Pack { reader: Box::new(reader), config: Box::new(config), binary })
    }

    /// Opens a GGUF file, of a split model its first file.
    ///
    /// # Errors
    /// The file is damaged, or its family or a type is not supported.
    pub fn open_gguf(file: &Path) -> Result<Stored> {
        let model = GgufModel::open(file)?;
        let items = model.plan(None).at(file)?;
        Ok(Stored::Gguf { model: Box::new(model), items })
    }

    pub fn config(&self) -> &ModelConfig {
        match self {
            Stored::Pack { config, .. } => config,
            Stored::Gguf { model, .. } => &model.config,
        }
    }

    /// Returns the weight files.
    pub fn files(&self) -> &[InputFile] {
        match self {
            Stored::Pack { binary, .. } => std::slice::from_ref(binary),
            Stored::Gguf { model, .. } => model.gguf.files(),
        }
    }

    /// Returns the opened pack, if it is one.
    pub fn pack(&self) -> Option<&IebinReader> {
        match self {
            Stored::Pack { reader, .. } => Some(reader),
            Stored::Gguf { .. } => None,
        }
    }

    /// Lists the tensors in the order of the pack or of the model.
    pub fn tensors(self: &Arc<Stored>) -> Vec<CanonicalTensor> {
        let tensor = |item: usize, name: &str, shape: &[usize], store: Store| CanonicalTensor {
            name: name.to_string(),
            shape: shape.to_vec(),
            store,
            source: BoundView::Stored { model: self.clone(), item },
        };
        match &**self {
            Stored::Pack { reader, .. } => {
                let entries = reader.entries().iter().enumerate();
                entries.map(|(i, e)| tensor(i, &e.name, &e.shape, e.store)).collect()
            }
            Stored::Gguf { items, .. } => {
                let planned = items.iter().map(|item| &item.planned).enumerate();
                planned.map(|(i, p)| tensor(i, &p.name, &p.shape, p.store)).collect()
            }
        }
    }

    fn store(&self, item: usize) -> Store {
        match self {
            Stored::Pack { reader, .. } => reader.entries()[item].store,
            Stored::Gguf { items, .. } => items[item].planned.store,
        }
    }

    /// Returns the entry of a tensor of a pack.
    pub fn entry(&self, item: usize) -> Option<&Entry> {
        self.pack().map(|reader| &reader.entries()[item])
    }

    /// Returns the scheme of a tensor of codes; `None` for floats.
    pub fn scheme(&self, item: usize) -> Option<QuantSpec> {
        match self.store(item) {
            Store::Tiled(spec) => Some(spec),
            Store::Plain(_) => None,
        }
    }

    /// Returns true for a tensor that is quantized in the source, whether or not a scheme of packs holds its codes.
    pub fn is_coded(&self, item: usize) -> bool {
        match self {
            Stored::Pack { .. } => self.scheme(item).is_some(),
            Stored::Gguf { items, .. } => blocks::plain(items[item].kind()).is_none(),
        }
    }

    /// Returns the name of the form of a tensor in the source.
    pub fn form(&self, item: usize) -> String {
        match self {
            Stored::Pack { .. } => self.store(item).name().to_string(),
            Stored::Gguf { items, .. } => items[item].kind().to_string(),
        }
    }

    /// Returns the position of a tensor: index of the file and offset.
    pub fn position(&self, item: usize) -> (usize, u64) {
        match self {
            Stored::Pack { reader, .. } => (0, reader.entries()[item].offset as u64),
            Stored::Gguf { model, items } => model.position(&items[item]),
        }
    }

    /// Returns the size of a tensor in the source in bytes.
    pub fn bytes(&self, item: usize) -> u64 {
        match self {
            Stored::Pack { reader, .. } => reader.entries()[item].nbytes as u64,
            Stored::Gguf { items, .. } => {
                let ImportedTensor { planned, .. } = &items[item];
                let kind = items[item].kind();
                let elements = planned.shape.iter().product::<usize>() as u64;
                match planned.store {
                    Store::Tiled(_) => stored_bytes(planned.store, &planned.shape).unwrap_or_default() as u64,
                    Store::Plain(_) => elements / kind.block() as u64 * kind.block_bytes() as u64,
                }
            }
        }
    }

    /// Passes rows of a matrix to `put` in the form `form`: floats, or the scheme in which the source holds the tensor.
    /// Tiles begin with the first of these rows.
    ///
    /// # Errors
    /// Data is damaged, reading fails, or `put` fails.
    pub fn read(
        &self,
        item: usize,
        form: Form,
        (matrix, rows): (usize, Range<usize>),
        put: &mut Put<'_>,
    ) -> Result<()> {
        match self {
            Stored::Pack { reader, .. } => read_entry(reader, &reader.entries()[item], form, (matrix, rows), put),
            Stored::Gguf { model, items } => {
                let item = &items[item];
                let shape = &item.planned.shape;
                if shape.len() < 2 {
                    return model.read(item, form, (0..1, 0..item.stack().rows), put);
                }
                // Vectors of a stack are matrices of one column for GGUF, and rows of a matrix here.
                let first = matrix * shape[shape.len() - 2] + rows.start;
                match item.is_vector() {
                    true => model.read(item, form, (first..first + rows.len(), 0..item.stack().rows), put),
                    false => model.read(item, form, (matrix..matrix + 1, rows), put),
                }
            }
        }
    }

    /// Reads rows of a matrix in the type of its floats into `out`, which has exactly their length; codes are decoded
    /// to f32.
    ///
    /// # Errors
    /// The same as for [`Stored::read`].
    pub fn read_floats(&self, item: usize, rows: (usize, Range<usize>), out: &mut [u8]) -> Result<()> {
        let dtype = match self.store(item) {
            Store::Plain(dtype) => dtype,
            Store::Tiled(_) => DType::F32,
        };
        let mut rest = out;
        self.read(item, Form::Plain(dtype), rows, &mut |bytes| {
            let (now, after) = std::mem::take(&mut rest).split_at_mut(bytes.len());
            now.copy_from_slice(bytes);
            rest = after;
            Ok(())
        })
    }

    /// Returns the task that compares a payload of a pack with its recorded hash; `None` if there is none.
    pub fn check_task(&self, item: usize) -> Option<Task<'_>> {
        let reader = self.pack()?;
        pack_input::check_task(reader, &reader.entries()[item])
    }

    /// Reads the files that belong to the weights; `tokenizer` replaces the tokenizer.json.
    ///
    /// # Errors
    /// A file is damaged, or the tokenizer of a GGUF file is not supported.
    pub fn companions(&self, tokenizer: Option<&Path>) -> Result<Companions> {
        let reader = match self {
            Stored::Gguf { model, .. } => return model.companions(tokenizer).at(model.gguf.files()[0].path()),
            Stored::Pack { reader, .. } => reader,
        };
        let mut copied = Vec::new();
        for name in companions::NAMES.iter().copied() {
            let path = match tokenizer {
                Some(path) if name == TOKENIZER => path.to_path_buf(),
                Some(_) if TOKENIZER_SOURCES.contains(&name) => continue,
                _ => reader.path(name),
            };
            if files::exists(&path)? {
                let bytes = read_limited(&path)?;
                companions::check(name, &bytes, self.config().vocab).at(&path)?;
                copied.push((name, bytes));
            }
        }
        let made_from = if tokenizer.is_some() { Vec::new() } else { reader.description.tokenizer_from.clone() };
        Ok(Companions::copied(copied, made_from))
    }
}

/// Checks that a pack has the tensors of its model and no others but those of multi-token prediction.
fn check_tensors(reader: &IebinReader, config: &ModelConfig) -> Result<()> {
    let layers = config.n_layers.saturating_add(config.prediction_layers);
    if layers > reader.entries().len() {
        let found = format!("found {layers} layers, but only {} tensors", reader.entries().len());
        return Err(Error::corrupt(found));
    }
    let expected = expected_tensors(config);
    let by_name: HashMap<&str, &ExpectedTensor> = expected.iter().map(|tensor| (&*tensor.name, tensor)).collect();
    for entry in reader.entries() {
        match by_name.get(&*entry.name) {
            Some(tensor) if tensor.shape == entry.shape => {}
            Some(tensor) => {
                let found = format!("found shape {:?}, expected {:?} for this model", entry.shape, tensor.shape);
                return Err(Error::corrupt(found).tensor(&entry.name));
            }
            None if Role::of(&entry.name) == Role::Prediction => {}
            None => {
                return Err(
                    Error::corrupt(format!("unexpected tensor for {}", config.architecture)).tensor(&entry.name)
                );
            }
        }
    }
    match expected.iter().find(|tensor| reader.get(&tensor.name).is_none()) {
        Some(tensor) => {
            Err(Error::corrupt(format!("found no such tensor, expected shape {:?}", tensor.shape)).tensor(&tensor.name))
        }
        None => Ok(()),
    }
}

/// Passes rows of a matrix of a pack to `put`.
fn read_entry(
    reader: &IebinReader,
    entry: &Entry,
    form: Form,
    (matrix, rows): (usize, Range<usize>),
    put: &mut Put<'_>,
) -> Result<()> {
    // A vector is one row; shapes were checked when the pack was opened.
    let (count, all, cols) = iebin::matrices(&entry.shape).unwrap_or((1, 1, entry.elements()));
    let read = |at: usize, out: &mut [u8]| reader.read(entry, at, out);
    if let Form::Tiles(spec) = form {
        let layout = TileLayout::new(spec, all, cols)?;
        let tiles = rows.start / TILE_ROWS..rows.end.div_ceil(TILE_ROWS);
        let mut bytes = vec![0; tiles.len() * layout.tile_bytes];
        read(matrix * layout.nbytes() + tiles.start * layout.tile_bytes, &mut bytes)?;
        return put(&bytes);
    }
    let mut source = RowSource::new(&entry.name, entry.store.into(), RowStack { count, rows: all, cols }, read)?;
    let target = RowTarget { form, matrices: matrix..matrix + 1, rows: rows.len(), cols, add: 0.0, columns: None };
    target.fill(std::slice::from_mut(&mut source), |row| (0, rows.start + row), put)
}
