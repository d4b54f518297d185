//! AMX kernel for int8 activations of many columns; all other products use the AVX-512 kernels.
//!
//! AMX has eight tile registers of 16 rows of 64 bytes, and an instruction that multiplies two of them: `tdpbssd` adds
//! to each of 16 x 16 sums of 32 bits the products of up to 64 pairs of bytes. One operand is a row of bytes per token,
//! as [`Q8Group`] stores them. The other has the four bytes of a word for 16 rows of weights in each line, as panels
//! store them. The sums are integers and therefore exact, so the results have the bits of [`super::scalar`].
//!
//! A step of the kernel multiplies one group of activations of up to 16 tokens by the two tiles of a panel. The sums go
//! through memory, since no instruction moves them from a tile register to a vector register. While the tiles of a step
//! are multiplied, the sums of the step before are multiplied by their scales, which uses other parts of the core.
//!
//! The instructions are written as assembler, because their intrinsics are not stable. Source: Intel 64 and IA-32
//! Architectures Software Developer's Manual, volume 1, chapter 18.
#![allow(unsafe_code)]

use super::acts::{GROUP_BLOCKS, Line, Q8Group};
use super::avx512::{Avx512, TABLE_BF16};
use super::generic::{Codes, Isa, NextTiles, Packed, Piece, Routine, byte_quarter, byte_zeros};
use super::kernels::{Kernel, KernelTable, Rectangle, Tiles, kind, with_kind};
use super::panel::{Panel, PanelKernel, Turn};
use crate::scheme::TILE_ROWS;
use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _MM_HINT_T0, _mm_prefetch};
use std::sync::OnceLock;

type Avx = Avx512<true>;

/// Tiles of weights of a panel.
const TILES: usize = 2;
/// Largest number of columns of a product: the lines of two tile registers.
const COLS: usize = 32;
/// Shares of the next weights that are prefetched in a step.
const SHARES: usize = 4;
/// Lines of a block of a panel: one for each word of activations and each tile of weights.
const BLOCK_LINES: usize = 8 * TILES;

pub(super) const TABLE: KernelTable = KernelTable {
    name: "amx",
    detected,
    tile_int8: Kernel {
        panel: Some(PanelKernel { items: TILES, cols: COLS, least_cols: 12, weight_bytes: 1, cached: 512 << 10, run }),
        ..TABLE_BF16.tile_int8
    },
    ..TABLE_BF16
};

/// Returns true when the processor has AMX with int8 products and the system lets this process use it.
fn detected() -> bool {
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    (TABLE_BF16.detected)() && *PERMITTED.get_or_init(|| has_int8_tiles() && permitted())
}

/// Reads the bits AMX-TILE and AMX-INT8 of the processor.
fn has_int8_tiles() -> bool {
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & (TILE | INT8) == TILE | INT8
}

/// Asks Linux for the state of the tile registers, which it saves only for processes that asked.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: this request reads and writes no memory of the process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

/// Returns false, as other systems are not known to permit AMX in this way.
#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Weights as signed bytes without an offset.
#[derive(Clone, Copy)]
struct Signed;

impl Codes for Signed {
    type Quarter<I: Isa> = [I::Int; 2];
    const VECTORS: usize = 8;

    #[inline(always)]
    unsafe fn zeros<I: Isa, const KIND: u8>(isa: I, piece: &Piece<'_>, group: usize) -> I::Int {
        // SAFETY: `byte_zeros` requires the same as this function.
        unsafe { byte_zeros::<I, KIND>(isa, 0, piece, group) }
    }

    #[inline(always)]
    unsafe fn quarter<I: Isa, const KIND: u8>(
        isa: I,
        piece: &Piece<'_>,
        block: usize,
        i: usize,
        zeros: I::Int,
    ) -> [I::Int; 2] {
        // SAFETY: `byte_quarter` requires the same as this function.
        unsafe { byte_quarter::<I, KIND>(isa, 0, piece, (block, i), zeros) }
    }

    #[inline(always)]
    fn word(i: usize, s: usize) -> usize {
        i + 4 * s
    }
}

/// # Safety
/// Same as [`PanelKernel::run`].
unsafe fn run(part: &Rectangle<'_>, panel: &mut Panel, turn: Turn, out: &mut [f32]) {
    let layout = part.layout();
    if kind::has_minimum(kind::of(layout)) || kind::halves(kind::of(layout)) > 1 {
        // SAFETY: the caller guarantees the same.
        return unsafe { without_tiles(part, panel, turn, out) };
    }
    let tiles = Tiles::of(part);
    let (groups, run) = (layout.blocks.div_ceil(GROUP_BLOCKS), tiles.run_blocks());
    if groups == 0 {
        return out.fill(0.0);
    }
    if turn == Turn::First {
        // Blocks after the last one, which fill up its group, are multiplied by activations and scales of zero.
        panel.codes.resize(groups * GROUP_BLOCKS * BLOCK_LINES, Line::default());
        panel.scales.resize(groups * (GROUP_BLOCKS / run) * TILES, Line::default());
        panel.scales[layout.blocks.div_ceil(run) * TILES..].fill(Line::default());
    }
    // The registers of activations may overlap, as the second one takes the last tokens.
    let registers = part.cols.div_ceil(TILE_ROWS);
    let tokens = part.cols.div_ceil(registers);
    // SAFETY: the caller guarantees AMX; the panel has the lines of all groups, and the registers of activations lie
    // inside the columns of the part.
    unsafe {
        Configuration::new(tokens, if run == 1 { 32 } else { 64 }).load();
        match turn {
            Turn::First if kind::is_rare(kind::of(layout)) => {
                with_kind!(@ layout, KIND, sized(part, panel, Fill::<KIND> { tiles }, (registers, tokens), out),
                    XS4 INT5 INT6);
            }
            Turn::First => with_kind!(layout, KIND, {
                let source = Fill::<KIND> { tiles };
                sized(part, panel, source, (registers, tokens), out);
            }),
            Turn::Again => sized(part, panel, Filled, (registers, tokens), out),
        }
        release();
    }
}

/// Computes a product of weights with minimums or with scales for halves of blocks by the AVX-512 kernel, which has
/// fewer columns in one call.
///
/// # Safety
/// Same as [`PanelKernel::run`].
unsafe fn without_tiles(part: &Rectangle<'_>, panel: &mut Panel, turn: Turn, out: &mut [f32]) {
    let PanelKernel { cols, run, .. } = TABLE_BF16.tile_int8.panel.expect("AVX-512 has panels");
    let pieces = part.cols.div_ceil(cols).max(1);
    let start = |piece: usize| part.cols * piece / pieces;
    for piece in 0..pieces {
        let (from, until) = (start(piece), start(piece + 1));
        let next = if piece == 0 { part.next } else { &[] };
        let columns = Rectangle { col: part.col + from, cols: until - from, next, ..*part };
        let turn = if piece == 0 { turn } else { Turn::Again };
        let out = &mut out[from * part.items * TILE_ROWS..until * part.items * TILE_ROWS];
        // SAFETY: the caller guarantees the same for all columns.
        unsafe { run(&columns, panel, turn, out) };
    }
}

/// # Safety
/// Same as [`run`], with the configuration loaded and a panel that has the lines of all groups.
unsafe fn sized(
    part: &Rectangle<'_>,
    panel: &mut Panel,
    source: impl CodeSource,
    shape: (usize, usize),
    out: &mut [f32],
) {
    let (registers, tokens) = shape;
    // SAFETY: the caller guarantees the same.
    unsafe {
        match Tiles::of(part).run_blocks() {
            1 => Avx::enter(Product::<_, 1> { part, panel, source, registers, tokens, out }),
            2 => Avx::enter(Product::<_, 2> { part, panel, source, registers, tokens, out }),
            _ => Avx::enter(Product::<_, GROUP_BLOCKS> { part, panel, source, registers, tokens, out }),
        }
    }
}

/// Source of the codes of a panel.
trait CodeSource: Copy {
    /// Makes sure that the lines of this group are in the panel.
    ///
    /// # Safety
    /// The panel has lines for the group.
    unsafe fn group<I: Isa>(self, isa: I, panel: &mut Panel, group: usize);
}

/// The panel has been unpacked before.
#[derive(Clone, Copy)]
struct Filled;

impl CodeSource for Filled {
    #[inline(always)]
    unsafe fn group<I: Isa>(self, _isa: I, _panel: &mut Panel, _group: usize) {}
}

/// Groups are unpacked shortly before they are multiplied, when they are still in the first-level cache.
#[derive(Clone, Copy)]
struct Fill<'a, const KIND: u8> {
    tiles: Tiles<'a>,
}

impl<const KIND: u8> CodeSource for Fill<'_, KIND> {
    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, panel: &mut Panel, group: usize) {
        let (layout, run) = (self.tiles.layout, self.tiles.run_blocks());
        let until = ((group + 1) * GROUP_BLOCKS).min(layout.blocks);
        for from in (group * GROUP_BLOCKS..until).step_by(run) {
            let scales = &mut panel.scales[from / run * TILES..][..TILES];
            // SAFETY: the tiles have these blocks and their scales, and the panel has lines for them.
            unsafe {
                let packed =
                    Packed::<I, TILES>::of::<Signed, KIND>(isa, &self.tiles, from / layout.group_blocks, scales);
                for block in from..(from + run).min(until) {
                    let codes = &mut panel.codes[block * BLOCK_LINES..][..BLOCK_LINES];
                    for quarter in 0..4 {
                        packed.quarter::<Signed, KIND>(isa, block, quarter, codes);
                    }
                }
            }
        }
    }
}

/// Lines of the integer sums of a tile register: one for each token.
const SUM: usize = 16;
/// Integer sums of a step: those of run `r` and tile `n` of weights start at line `(r * TILES + n) * SUM`.
type Sums = [Line; GROUP_BLOCKS * TILES * SUM];

/// A step: a group of activations of the tokens of a register.
#[derive(Clone, Copy)]
struct AmxStep<'a> {
    group: usize,
    /// First token, counted from the first column of the part.
    token: usize,
    /// Number of tokens that the register before has, too, and that are left to it.
    done: usize,
    /// The group of the first token; rows of groups lie one after the other.
    x: &'a Q8Group,
}

/// Product of a panel with the columns of a part, in runs of `RUN` blocks.
struct Product<'a, S, const RUN: usize> {
    part: &'a Rectangle<'a>,
    panel: &'a mut Panel,
    source: S,
    /// Number of registers that hold all tokens.
    registers: usize,
    /// Tokens of a register.
    tokens: usize,
    out: &'a mut [f32],
}

impl<S: CodeSource, const RUN: usize> Routine for Product<'_, S, RUN> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Product { part, panel, source, registers, tokens, out } = self;
        let groups = part.layout().blocks.div_ceil(GROUP_BLOCKS);
        let stride = groups * size_of::<Q8Group>();
        let mut next = NextTiles::of(part, groups * registers * SHARES);
        let mut sums = std::mem::take(&mut panel.sums);
        sums.resize(2 * size_of::<Sums>() / size_of::<Line>(), Line::default());
        let mut last = None;
        let ahead = if registers == 1 { 2 } else { 1 } * size_of::<Q8Group>();
        for i in 0..groups * registers {
            let (group, register) = (i / registers, i % registers);
            let token = (register * tokens).min(part.cols - tokens);
            let x = &part.x.row_q8(part.col + token)[group];
            let step = AmxStep { group, token, done: register * tokens - token, x };
            let [even, odd] = sums.as_chunks_mut().0 else { unreachable!("two times the sums of a step") };
            let (to, from): (&mut Sums, &Sums) = if i % 2 == 0 { (even, odd) } else { (odd, even) };
            // SAFETY: the panel has lines for all groups, and the register lies inside the columns.
            unsafe {
                if register == 0 {
                    if group == 0 {
                        source.group(isa, panel, 0);
                    }
                    if group + 1 < groups {
                        source.group(isa, panel, group + 1);
                    }
                }
                let mut before = Scaling::<RUN> { step: last, panel, sums: from, stride, tokens, ahead, out };
                match RUN {
                    1 => by_blocks(isa, &step, panel, stride, to, &mut before, &mut next),
                    2 => by_pairs(isa, &step, panel, stride, to, &mut before, &mut next),
                    _ => by_groups(isa, &step, panel, stride, to, &mut before, &mut next),
                }
            }
            last = Some(step);
        }
        let from: &Sums = &sums.as_chunks().0[(groups * registers + 1) % 2];
        // SAFETY: the sums are those of the last step.
        unsafe { Scaling::<RUN> { step: last, panel, sums: from, stride, tokens, ahead, out }.add(isa, 0, 1) };
        panel.sums = sums;
    }
}

/// The sums of a step, which are multiplied by their scales and added to the results.
struct Scaling<'a, const RUN: usize> {
    /// The step; none before the first one.
    step: Option<AmxStep<'a>>,
    panel: &'a Panel,
    sums: &'a Sums,
    /// Bytes between the groups of consecutive tokens.
    stride: usize,
    tokens: usize,
    /// Distance in bytes at which activations are prefetched: to those of the same tokens in the step after the next.
    ahead: usize,
    out: &'a mut [f32],
}

impl<const RUN: usize> Scaling<'_, RUN> {
    /// Adds part `part` of `parts` parts of the tokens.
    ///
    /// # Safety
    /// The panel has the scales of the group, and the tokens lie inside the activations and the results.
    #[inline(always)]
    unsafe fn add<I: Isa>(&mut self, isa: I, part: usize, parts: usize) {
        let Some(step) = self.step else { return };
        let runs = GROUP_BLOCKS / RUN;
        let lines: &[Line] = &self.panel.scales[step.group * runs * TILES..][..runs * TILES];
        let mut scales = [[isa.splat_f32(0.0); TILES]; GROUP_BLOCKS];
        for r in 0..runs {
            for n in 0..TILES {
                // SAFETY: a line is a vector.
                scales[r][n] = isa.as_f32(unsafe { isa.load(lines[r * TILES + n].0.as_ptr().cast()) });
            }
        }
        let from = (self.tokens * part / parts).max(step.done);
        for t in from..self.tokens * (part + 1) / parts {
            // SAFETY: the caller guarantees the tokens, whose groups lie `stride` bytes apart.
            let x = unsafe { (&raw const *step.x).byte_add(t * self.stride) };
            // SAFETY: a group of activations lies there.
            let scale = isa.splat_f32(unsafe { (*x).scale });
            prefetch_group(x.wrapping_byte_add(self.ahead));
            let out = &mut self.out[(step.token + t) * TILES * TILE_ROWS..][..TILES * TILE_ROWS];
            for n in 0..TILES {
                let mut total = isa.splat_f32(0.0);
                // SAFETY: sums and results are whole vectors.
                unsafe {
                    for r in 0..runs {
                        let sum = isa.load(self.sums.as_ptr().add((r * TILES + n) * SUM + t).cast());
                        total = isa.fma(isa.to_f32(sum), scales[r][n], total);
                    }
                    let to = out.as_mut_ptr().add(n * TILE_ROWS);
                    let so_far = if step.group == 0 { isa.splat_f32(0.0) } else { isa.as_f32(isa.load(to.cast())) };
                    isa.store(to, isa.fma(total, scale, so_far));
                }
            }
        }
    }
}

/// Prefetches a group of activations into the first-level cache; the address need not be valid.
#[inline(always)]
fn prefetch_group(x: *const Q8Group) {
    for line in 0..size_of::<Q8Group>() / 64 {
        // SAFETY: prefetching has no effect but on caches, at any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(x.cast::<i8>().wrapping_add(64 * line)) };
    }
}

/// Multiplies a step whose runs are single blocks. The sums of two blocks are in registers at a time; they are stored
/// two products later, as a product takes three times as long as it takes to start one.
///
/// # Safety
/// The configuration is loaded, the panel has the lines of the group, and the activations have the group of all tokens.
#[inline(always)]
unsafe fn by_blocks<I: Isa, const RUN: usize>(
    isa: I,
    step: &AmxStep<'_>,
    panel: &Panel,
    stride: usize,
    sums: &mut Sums,
    before: &mut Scaling<'_, RUN>,
    next: &mut NextTiles,
) {
    let (a, b) = operands(step, panel);
    // SAFETY: a block has 32 bytes of activations, and 8 words of weights; the caller guarantees the rest.
    unsafe {
        first_product::<0, 4, 6>(a, stride, b);
        product::<1, 4, 7>(b.add(1));
        next.ask(isa);
        first_product::<2, 5, 6>(a.add(32), stride, b.add(BLOCK_LINES));
        store::<0>(sums, 0);
        before.add(isa, 0, 4);
        product::<3, 5, 7>(b.add(BLOCK_LINES + 1));
        store::<1>(sums, 1);
        next.ask(isa);
        first_product::<0, 4, 6>(a.add(64), stride, b.add(2 * BLOCK_LINES));
        store::<2>(sums, 2);
        before.add(isa, 1, 4);
        product::<1, 4, 7>(b.add(2 * BLOCK_LINES + 1));
        store::<3>(sums, 3);
        next.ask(isa);
        first_product::<2, 5, 6>(a.add(96), stride, b.add(3 * BLOCK_LINES));
        store::<0>(sums, 4);
        before.add(isa, 2, 4);
        product::<3, 5, 7>(b.add(3 * BLOCK_LINES + 1));
        store::<1>(sums, 5);
        next.ask(isa);
        before.add(isa, 3, 4);
        store::<2>(sums, 6);
        store::<3>(sums, 7);
    }
}

/// Multiplies a step whose runs are pairs of blocks.
///
/// # Safety
/// Same as [`by_blocks`].
#[inline(always)]
unsafe fn by_pairs<I: Isa, const RUN: usize>(
    isa: I,
    step: &AmxStep<'_>,
    panel: &Panel,
    stride: usize,
    sums: &mut Sums,
    before: &mut Scaling<'_, RUN>,
    next: &mut NextTiles,
) {
    let (a, b) = operands(step, panel);
    // SAFETY: two blocks have 64 bytes of activations, and 16 words of weights; the caller guarantees the rest.
    unsafe {
        first_product::<0, 4, 6>(a, stride, b);
        product::<1, 4, 7>(b.add(1));
        before.add(isa, 0, 4);
        next.ask(isa);
        first_product::<2, 5, 6>(a.add(64), stride, b.add(2 * BLOCK_LINES));
        before.add(isa, 1, 4);
        next.ask(isa);
        store::<0>(sums, 0);
        product::<3, 5, 7>(b.add(2 * BLOCK_LINES + 1));
        before.add(isa, 2, 4);
        next.ask(isa);
        store::<1>(sums, 1);
        before.add(isa, 3, 4);
        next.ask(isa);
        store::<2>(sums, 2);
        store::<3>(sums, 3);
    }
}

/// Multiplies a step whose group is one run.
///
/// # Safety
/// Same as [`by_blocks`].
#[inline(always)]
unsafe fn by_groups<I: Isa, const RUN: usize>(
    isa: I,
    step: &AmxStep<'_>,
    panel: &Panel,
    stride: usize,
    sums: &mut Sums,
    before: &mut Scaling<'_, RUN>,
    next: &mut NextTiles,
) {
    let (a, b) = operands(step, panel);
    // SAFETY: two blocks have 64 bytes of activations, and 16 words of weights; the caller guarantees the rest.
    unsafe {
        first_product::<0, 4, 6>(a, stride, b);
        product::<1, 4, 7>(b.add(1));
        before.add(isa, 0, 2);
        next.ask(isa);
        next.ask(isa);
        load::<5>(a.add(64), stride);
        load::<6>(b.add(2 * BLOCK_LINES).cast(), LINES_APART);
        dot::<0, 5, 6>();
        load::<7>(b.add(2 * BLOCK_LINES + 1).cast(), LINES_APART);
        dot::<1, 5, 7>();
        before.add(isa, 1, 2);
        next.ask(isa);
        next.ask(isa);
        store::<0>(sums, 0);
        store::<1>(sums, 1);
    }
}

/// Bytes between the lines of consecutive words of a tile of weights.
const LINES_APART: usize = TILES * size_of::<Line>();

/// Returns the start of the activations of a step, and of the weights of its group.
#[inline(always)]
fn operands(step: &AmxStep<'_>, panel: &Panel) -> (*const u8, *const Line) {
    let lines = &panel.codes[step.group * GROUP_BLOCKS * BLOCK_LINES..][..GROUP_BLOCKS * BLOCK_LINES];
    (step.x.codes.as_ptr().cast(), lines.as_ptr())
}

/// Loads register `A` of activations, and sets sums `C` to its product with weights, which go through register `B`.
///
/// # Safety
/// The configuration is loaded; the registers lie inside the activations and the panel.
#[inline(always)]
unsafe fn first_product<const C: u8, const A: u8, const B: u8>(a: *const u8, stride: usize, b: *const Line) {
    // SAFETY: the caller guarantees the same.
    unsafe {
        load::<A>(a, stride);
        product::<C, A, B>(b);
    }
}

/// Sets sums `C` to the product of register `A` with weights, which go through register `B`.
///
/// # Safety
/// Same as [`first_product`].
#[inline(always)]
unsafe fn product<const C: u8, const A: u8, const B: u8>(b: *const Line) {
    static ZERO: Line = Line([0.0; 16]);
    // SAFETY: the caller guarantees the configuration and the weights; a stride of 0 reads the same line for each row.
    unsafe {
        // `tilezero` would make the product wait until the one before has ended.
        load::<C>((&raw const ZERO).cast(), 0);
        load::<B>(b.cast(), LINES_APART);
        dot::<C, A, B>();
    }
}

/// Loads tile register `T`, with `stride` bytes between its rows.
///
/// # Safety
/// The configuration is loaded, and the rows are readable.
#[inline(always)]
unsafe fn load<const T: u8>(from: *const u8, stride: usize) {
    // SAFETY: the caller guarantees the configuration and the rows. The compiler neither uses tile registers nor keeps
    // anything in them, because this crate is compiled without that feature; so they are left alone between the
    // assembler blocks of this module.
    unsafe {
        asm!("tileloadd tmm{t}, [{from} + {stride}]", t = const T, from = in(reg) from, stride = in(reg) stride,
             options(nostack, preserves_flags, readonly));
    }
}

/// Adds to the sums in tile register `C` the products of `A` and `B`.
///
/// # Safety
/// The configuration is loaded.
#[inline(always)]
unsafe fn dot<const C: u8, const A: u8, const B: u8>() {
    // SAFETY: the caller guarantees the configuration, in which the shapes of the registers agree.
    unsafe {
        asm!("tdpbssd tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
             options(nostack, preserves_flags, nomem));
    }
}

/// Stores the sums in tile register `T`, which are number `i` of a step.
///
/// # Safety
/// The configuration is loaded.
#[inline(always)]
unsafe fn store<const T: u8>(sums: &mut Sums, i: usize) {
    let to = &mut sums[i * SUM..][..SUM];
    // SAFETY: the caller guarantees the configuration, by which a register of sums has at most 16 rows of a line.
    unsafe {
        asm!("tilestored [{to} + {stride}], tmm{t}", t = const T, to = in(reg) to.as_mut_ptr(),
             stride = in(reg) size_of::<Line>(), options(nostack, preserves_flags));
    }
}

/// Shapes of the tile registers, in the format of `ldtilecfg`: 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Configuration {
    /// Returns the shapes for so many tokens and so many columns of K, which is 32 or 64.
    fn new(tokens: usize, k: u8) -> Configuration {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        row_bytes[..8].copy_from_slice(&[64, 64, 64, 64, k.into(), k.into(), 64, 64]);
        rows[..6].fill(tokens as u8);
        rows[6..8].fill(k / 4);
        Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    }

    /// Loads the configuration, which sets all registers to zero.
    ///
    /// # Safety
    /// The processor has AMX, the system lets this process use it, and there are 1 to 16 tokens.
    unsafe fn load(&self) {
        // SAFETY: the caller guarantees AMX; `self` is 64 bytes in the format of the instruction.
        unsafe { asm!("ldtilecfg [{}]", in(reg) self, options(nostack, preserves_flags, readonly)) };
    }
}

/// Marks the tile registers as unused, so that the system need not save them.
///
/// # Safety
/// The processor has AMX.
unsafe fn release() {
    // SAFETY: the caller guarantees AMX.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
}
