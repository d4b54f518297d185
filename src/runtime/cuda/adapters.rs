//! Adapters on a device. The factors of an adapter are uploaded when a step uses it for the first time, and leave with
//! the next step after the adapter was dropped.
//!
//! Each adapter has a table with the changes of all matrices of the device. A step names the table of each adapter and
//! the rows that use it ([`args::Adapted`]), so that recorded graphs stay valid whichever adapters a step uses.

use super::args::{self, Adapted};
use super::array::{Array, View};
use super::context::{Buffer, Context};
use super::kind::Kind;
use super::ops::GRID;
use super::scratch::LOGIT_ROWS;
use super::weights::Uploader;
use crate::catalogue::Target;
use crate::dtype::{DType, encode_floats};
use crate::error::{Error, Result};
use crate::progress::ProgressBar;
use crate::runtime::adapters::{BoundAdapter, BoundChange, Group};
use crate::runtime::cpu::{Matrix, MatrixStore};
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

/// Number of columns of a layer: those of all targets, then both matrices of experts.
const COLUMNS: usize = Target::ALL.len() + 2;
/// Alignment in bytes of factors.
const ALIGN: usize = 256;

/// Product that adapters may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdaptedProduct {
    /// A target of a layer, counted from the first layer of the device.
    Target(usize, Target),
    /// The first or second matrix of the experts of such a layer.
    Experts(usize, usize),
    /// The output matrix.
    Head,
    /// The output matrix, in place of which an adapter has another.
    Replaced,
    /// The projection to the further inputs of all layers.
    Further,
}

impl AdaptedProduct {
    /// Returns the number of the column among those of a layer and of the model.
    fn column(self) -> usize {
        match self {
            AdaptedProduct::Target(_, target) => target as usize,
            AdaptedProduct::Experts(_, matrix) => Target::ALL.len() + matrix,
            AdaptedProduct::Head => COLUMNS,
            AdaptedProduct::Replaced => COLUMNS + 1,
            AdaptedProduct::Further => COLUMNS + 2,
        }
    }

    /// Returns the index of the change in the table of an adapter with this number of layers.
    fn index(self, layers: usize) -> usize {
        match self {
            AdaptedProduct::Target(layer, _) | AdaptedProduct::Experts(layer, _) => layer * COLUMNS + self.column(),
            AdaptedProduct::Head | AdaptedProduct::Replaced | AdaptedProduct::Further => {
                (layers - 1) * COLUMNS + self.column()
            }
        }
    }
}

/// Shape of the changes of a step; part of its plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ChangePlan {
    /// Number of entries, a power of two; 0 = no adapter changes a product.
    pub slots: usize,
    /// Largest number of adapters of a row.
    pub parts: usize,
    /// Largest rank, a multiple of 16; 0 = only gains and added numbers.
    pub rank: usize,
    /// Bit for each column that some adapter changes.
    pub columns: u32,
}

impl ChangePlan {
    /// Returns true if an adapter changes one of `count` products that begin with this place.
    pub fn has(&self, first: AdaptedProduct, count: usize) -> bool {
        self.columns >> first.column() & ((1 << count) - 1) != 0
    }
}

/// An adapter on the device.
#[derive(Debug)]
struct DeviceAdapter {
    of: Weak<BoundAdapter>,
    /// Changes of all matrices, followed by those of experts.
    table: Array<args::Change>,
    /// Memory that the table points to.
    _factors: Vec<Buffer>,
    /// Largest rank.
    rank: usize,
    /// Bit for each column with a change.
    columns: u32,
}

/// Adapters of one device.
#[derive(Debug)]
pub struct DeviceAdapters {
    /// Layers of the model that the device computes.
    layers: Range<usize>,
    /// Whether the device has the output matrix.
    has_head: bool,
    /// Largest number of rows of h that a launch computes per row of a step.
    per_row: usize,
    /// Adapters by their hash.
    all: HashMap<String, DeviceAdapter>,
    /// Results of A; grows with the largest step.
    results: Option<Array<f32>>,
}

/// Changes of a step by adapters.
#[derive(Debug, Default)]
pub struct StepChanges {
    pub plan: ChangePlan,
    /// Entries for all rows, for the wanted rows, and for the wanted rows whose output matrix is replaced:
    /// `(3, slots)`.
    pub entries: Vec<Adapted>,
    /// Whether memory moved, so that recorded graphs are invalid.
    pub moved: bool,
}

impl DeviceAdapters {
    /// Creates the adapters of a device that computes these layers with up to `top_k` experts per row.
    pub fn new(layers: Range<usize>, has_head: bool, top_k: usize) -> DeviceAdapters {
        DeviceAdapters { layers, has_head, per_row: top_k.max(3), all: HashMap::new(), results: None }
    }

    /// Releases adapters that were dropped, uploads those that the groups use, and describes the changes of a step of
    /// `rows` rows. The device must be idle.
    ///
    /// # Errors
    /// A change is not supported on a GPU, or there is not enough device memory.
    pub fn prepare(
        &mut self,
        context: &Arc<Context>,
        groups: &[Group],
        wanted: &[usize],
        rows: usize,
    ) -> Result<StepChanges> {
        self.all.retain(|_, adapter| adapter.of.strong_count() > 0);
        let mut plan = ChangePlan::default();
        for (adapter, _) in groups.iter().flat_map(|group| group.set.adapters()) {
            if !self.all.contains_key(&adapter.hash) {
                let uploaded = DeviceAdapter::upload(context, adapter, &self.layers, self.has_head)?;
                self.all.insert(adapter.hash.clone(), uploaded);
            }
            let DeviceAdapter { rank, columns, .. } = &self.all[&adapter.hash];
            (plan.rank, plan.columns) = (plan.rank.max(rank.next_multiple_of(16)), plan.columns | columns);
        }
        if plan.columns == 0 {
            return Ok(StepChanges::default());
        }
        plan.parts = groups.iter().map(|group| group.set.adapters().len()).max().unwrap_or(0);
        plan.slots = groups.iter().map(|group| group.set.adapters().len()).sum::<usize>().next_power_of_two();
        if 3 * plan.slots > GRID {
            let found = format!("found {} texts with adapters in a step, which are too many for a GPU", groups.len());
            return Err(Error::engine(found).help("use a smaller --batch"));
        }
        let wanted = |row: usize| wanted.partition_point(|wanted| *wanted < row);
        let of_wanted = |group: &Group| wanted(group.rows.start)..wanted(group.rows.end);
        let mut entries = self.entries(&plan, groups, |group| group.rows.clone());
        entries.extend(self.entries(&plan, groups, of_wanted));
        let mut replaced = self.entries(&plan, groups, of_wanted);
        self.keep_last_replaced(groups, &mut replaced);
        entries.extend(replaced);
        let len = plan.parts * plan.rank * (rows * self.per_row).max(LOGIT_ROWS);
        let moved = self.results.as_ref().is_none_or(|results| results.view().len() < len);
        if moved {
            self.results = None;
            self.results = Some(Array::new(context, len.next_power_of_two())?);
        }
        Ok(StepChanges { plan, entries, moved })
    }

    /// Returns the memory for results of A; [`DeviceAdapters::prepare`] has made it.
    pub fn results(&self) -> View<f32> {
        self.results.as_ref().expect("made for a step with adapters").view()
    }

    /// Returns the index of a change in the tables.
    pub fn index(&self, place: AdaptedProduct) -> usize {
        place.index(self.layers.len())
    }

    /// Returns an entry for each adapter of each group, padded to whole slots.
    fn entries(&self, plan: &ChangePlan, groups: &[Group], rows: impl Fn(&Group) -> Range<usize>) -> Vec<Adapted> {
        let mut entries = Vec::with_capacity(plan.slots);
        for group in groups {
            let (rows, adapters) = (rows(group), group.set.adapters());
            entries.extend(adapters.iter().enumerate().map(|(part, (adapter, factor))| Adapted {
                changes: self.all[&adapter.hash].table.view().address(),
                first: rows.start as u32,
                count: rows.len() as u32,
                part: part as u32,
                parts: if part == 0 { adapters.len() as u32 } else { 0 },
                factor: *factor,
                unused: 0,
            }));
        }
        entries.resize(plan.slots, Adapted::default());
        entries
    }

    /// Empties all entries but that of the last adapter of each group that replaces the output matrix.
    fn keep_last_replaced(&self, groups: &[Group], entries: &mut [Adapted]) {
        let mut entries = entries.iter_mut();
        for group in groups {
            let replaces =
                |(adapter, _): &(Arc<BoundAdapter>, f32)| self.all[&adapter.hash].has(AdaptedProduct::Replaced);
            let last = group.set.adapters().iter().rposition(replaces);
            let own = entries.by_ref().take(group.set.adapters().len()).enumerate();
            own.filter(|(part, _)| Some(*part) != last).for_each(|(_, entry)| entry.count = 0);
        }
    }
}

impl DeviceAdapter {
    fn has(&self, place: AdaptedProduct) -> bool {
        self.columns >> place.column() & 1 == 1
    }

    /// Copies the changes of some layers to a device, with those of the output matrix if the device has it, and of the
    /// projection to the further inputs, which every device of such a model has.
    fn upload(
        context: &Arc<Context>,
        adapter: &Arc<BoundAdapter>,
        layers: &Range<usize>,
        has_head: bool,
    ) -> Result<DeviceAdapter> {
        let bar = ProgressBar::hidden();
        let mut uploader = Uploader::new(context, &bar)?;
        let mut packs: Vec<Pack> = layers
            .clone()
            .into_par_iter()
            .map(|layer| Pack::of_layer(adapter, layer, layers))
            .collect::<Result<_>>()?;
        let head = adapter.lm_head.as_ref().filter(|_| has_head);
        for (place, change) in [(AdaptedProduct::Head, head), (AdaptedProduct::Further, adapter.further.as_ref())] {
            if let Some(change) = change {
                let mut pack = Pack::new();
                pack.put_at(place, place.index(layers.len()), change)?;
                packs.push(pack);
            }
        }
        let mut table = vec![args::Change::default(); AdaptedProduct::Further.index(layers.len()) + 1];
        let (mut factors, mut rank, mut columns) = (Vec::new(), 0, 0);
        for pack in packs.into_iter().filter(|pack| pack.columns != 0) {
            (rank, columns) = (pack.rank.max(rank), columns | pack.columns);
            let memory = context.alloc(pack.bytes.len())?;
            uploader.copy(&memory, 0, &pack.bytes)?;
            pack.enter(memory.address(), &mut table);
            factors.push(memory);
        }
        if let Some(matrix) = head.and_then(|change| change.replaced()) {
            let (memory, change) = upload_matrix(&mut uploader, matrix)?;
            table[AdaptedProduct::Replaced.index(layers.len())] = change;
            columns |= 1 << AdaptedProduct::Replaced.column();
            factors.push(memory);
        }
        let of_device = Array::<args::Change>::new(context, table.len())?;
        let start = of_device.view().address();
        // Until now, `experts` is the index of the first of them.
        table.iter_mut().filter(|change| change.experts != 0).for_each(|change| {
            change.experts = start + change.experts * size_of::<args::Change>() as u64;
        });
        uploader.copy(of_device.buffer(), 0, bytemuck::cast_slice(&table))?;
        Ok(DeviceAdapter { of: Arc::downgrade(adapter), table: of_device, _factors: factors, rank, columns })
    }
}

/// Copies a matrix that replaces that of the model, as an A whose rank is the number of its rows.
fn upload_matrix(uploader: &mut Uploader<'_>, matrix: &Matrix) -> Result<(Buffer, args::Change)> {
    let MatrixStore::Plain(dtype) = matrix.store else {
        return Err(Error::unsupported("quantized output matrices of adapters are not supported on a GPU")
            .tensor("lm_head.weight")
            .help("use --device cpu"));
    };
    let memory = uploader.context.alloc(matrix.data.len())?;
    uploader.copy(&memory, 0, &matrix.data)?;
    let (a, rank, a_kind) = (memory.address(), matrix.rows as u32, kind(dtype) as u32);
    Ok((memory, args::Change { a, rank, a_kind, ..args::Change::default() }))
}

/// Returns the kind of floats stored row by row.
fn kind(dtype: DType) -> Kind {
    match dtype {
        DType::F32 => Kind::F32,
        DType::F16 => Kind::F16,
        _ => Kind::Bf16,
    }
}

/// Changes of a layer or of the output matrix, to be copied to a device at once.
struct Pack {
    /// Factors, gains and added numbers. The first [`ALIGN`] bytes are unused, so that the offset 0 means none.
    bytes: Vec<u8>,
    /// Changes by their index in the table; addresses are offsets into `bytes`.
    changes: Vec<(usize, args::Change)>,
    /// Changes of stacks of experts, likewise.
    experts: Vec<(usize, Vec<args::Change>)>,
    rank: usize,
    columns: u32,
}

impl Pack {
    fn new() -> Pack {
        Pack { bytes: vec![0; ALIGN], changes: Vec::new(), experts: Vec::new(), rank: 0, columns: 0 }
    }

    /// Packs the changes of layer `layer` of the model for a device that computes `layers`.
    fn of_layer(adapter: &BoundAdapter, layer: usize, layers: &Range<usize>) -> Result<Pack> {
        let mut pack = Pack::new();
        let own = layer - layers.start;
        for target in Target::ALL {
            let place = AdaptedProduct::Target(own, target);
            if let Some(change) = adapter.of_target(layer, target) {
                pack.put_at(place, place.index(layers.len()), change).map_err(|e| tell(e, layer))?;
            }
        }
        for matrix in [0, 1] {
            let changes = adapter.of_experts(layer, matrix);
            if changes.iter().any(Option::is_some) {
                let place = AdaptedProduct::Experts(own, matrix);
                let change = |change: &Option<BoundChange>| match change {
                    None => Ok(args::Change::default()),
                    Some(change) => pack.put(place, change),
                };
                let stack = changes.iter().map(change).collect::<Result<Vec<_>>>().map_err(|e| tell(e, layer))?;
                pack.experts.push((place.index(layers.len()), stack));
            }
        }
        Ok(pack)
    }

    fn put_at(&mut self, place: AdaptedProduct, index: usize, change: &BoundChange) -> Result<()> {
        let change = self.put(place, change)?;
        self.changes.push((index, change));
        Ok(())
    }

    fn put(&mut self, place: AdaptedProduct, change: &BoundChange) -> Result<args::Change> {
        let plain = change.plain();
        if plain.replaced.is_some() && place != AdaptedProduct::Head {
            return Err(Error::unsupported(
                "an adapter with whole matrices in place of those of a layer is not \
                                           supported on a GPU",
            )
            .help("use --device cpu"));
        }
        self.columns |= 1 << place.column();
        let mut out = args::Change { add_scales: plain.add_scales.into(), ..args::Change::default() };
        if let Some(factors) = &plain.factors {
            (out.a, out.a_kind) = self.floats(&factors.a)?;
            (out.b, out.b_kind) = self.floats(&factors.b)?;
            (out.rank, out.scale) = (factors.rank as u32, factors.scale);
            self.rank = self.rank.max(factors.rank);
        }
        out.gain = plain.gain.map_or(0, |gain| self.append(bytemuck::cast_slice(gain)));
        out.add = plain.add.map_or(0, |add| self.append(bytemuck::cast_slice(add)));
        Ok(out)
    }

    fn floats(&mut self, (values, dtype): &(Vec<f32>, DType)) -> Result<(u64, u32)> {
        if u32::try_from(values.len()).is_err() {
            return Err(Error::unsupported("factors with more than 2^32 numbers are not supported on a GPU")
                .help("use --device cpu"));
        }
        let at = self.append(&[]);
        encode_floats(*dtype, values, &mut self.bytes)?;
        Ok((at, kind(*dtype) as u32))
    }

    /// Appends bytes at an aligned offset, and returns the offset.
    fn append(&mut self, bytes: &[u8]) -> u64 {
        let at = self.bytes.len().next_multiple_of(ALIGN);
        self.bytes.resize(at, 0);
        self.bytes.extend_from_slice(bytes);
        at as u64
    }

    /// Enters the changes into a table after the bytes were copied to address `start`.
    fn enter(self, start: u64, table: &mut Vec<args::Change>) {
        let placed = |mut change: args::Change| {
            for address in [&mut change.a, &mut change.b, &mut change.gain, &mut change.add] {
                *address += if *address == 0 { 0 } else { start };
            }
            change
        };
        self.changes.into_iter().for_each(|(index, change)| table[index] = placed(change));
        for (index, stack) in self.experts {
            table[index].experts = table.len() as u64;
            table.extend(stack.into_iter().map(placed));
        }
    }
}

/// Adds the number of a layer to an error.
fn tell(error: Error, layer: usize) -> Error {
    error.tensor(format!("model.layers.{layer}"))
}
