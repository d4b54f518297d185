//! Benchmarks the CPU kernels and relates each to the limits of this machine, which are measured in the same run.
//!
//! Run with `cargo bench --bench kernels [-- FILTER]`. `IEC_THREADS` sets the number of threads (default: all) and
//! `IEC_ISA` the instruction set. For each kernel and number of tokens, it prints the GB/s of weights read, the GOP/s,
//! and the larger of two fractions: the GB/s of the read bandwidth, and the GOP/s of the peak of the arithmetic that
//! the kernel uses. Each number is the best of several rounds. The filter `limits` prints the machine's limits and no
//! kernel; `scripts/race.sh` reads them. The filter `count` prints no times: see [`count`].
#![allow(unsafe_code, missing_docs, clippy::disallowed_methods, clippy::print_stdout, clippy::print_stderr)]

#[path = "kernels/adapters.rs"]
mod adapters;
#[path = "kernels/between.rs"]
mod between;
#[path = "kernels/count.rs"]
mod count;
#[path = "kernels/packing.rs"]
mod packing;

use count::{counted, counting};
use iec::dtype::DType;
use iec::mapped::Bytes;
use iec::rng::Rng;
use iec::runtime::cpu::{Acts, Arithmetic, Cpu, Form, ISA_VARIABLE, Job, Matrix, MatrixStore};
use iec::scheme::{Granularity, QuantSpec, ScaleType, Scheme, TileLayout};
use std::hint::black_box;
use std::time::Instant;

/// Bytes of weights per measurement, far more than the caches hold.
const WORKING_SET: usize = 400 << 20;
/// Numbers of tokens of the batched measurements.
const TOKENS: [usize; 6] = [2, 4, 8, 16, 32, 512];

fn main() {
    let filter: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let threads = std::env::var("IEC_THREADS").ok().and_then(|t| t.parse().ok());
    let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let isa = std::env::var(ISA_VARIABLE).ok().filter(|name| !name.is_empty());
    let cpu = Cpu::with_isa(threads, isa.as_deref()).expect("threads and a known IEC_ISA");
    if filter.iter().any(|f| f == "count") {
        count::start();
        return measure_all(&cpu, &filter[1..], &Peaks::default());
    }
    let peaks = Peaks::measure(&cpu);
    println!("{} on {} threads", cpu.isa(), cpu.threads());
    println!(
        "read bandwidth {:.1} GB/s, f32 fma {:.0} GFLOP/s, bf16 {:.0} GFLOP/s, int8 {:.0} GOP/s, int16 {:.0} GOP/s",
        peaks.read, peaks.fma, peaks.bf16, peaks.int8, peaks.int16
    );
    if filter.iter().any(|f| f == "limits") {
        return;
    }
    println!("empty region {:.2} us", region_us(&cpu));
    println!("{:<26} {:>5} {:>9} {:>9} {:>7}", "kernel (2048 x 2048)", "n", "GB/s", "GOP/s", "of limit");
    measure_all(&cpu, &filter, &peaks);
    adapters::measure(&cpu, &filter);
}

fn measure_all(cpu: &Cpu, filter: &[String], peaks: &Peaks) {
    for (name, store, arithmetic) in kernels() {
        if filter.is_empty() || filter.iter().any(|f| name.contains(f.as_str())) {
            measure(cpu, name, store, arithmetic, peaks);
        }
    }
    if filter.is_empty() || !counting() {
        [Form::Bf16, Form::Int16, Form::Int8].into_iter().for_each(|form| prepare(cpu, form));
    }
    between::measure(cpu, filter);
    packing::measure(cpu, filter);
}

/// Name, function from rows and columns to the storage format of the matrix, and arithmetic.
type Case = (&'static str, fn(usize, usize) -> MatrixStore, Arithmetic);

fn kernels() -> Vec<Case> {
    fn tiled(spec: QuantSpec, rows: usize, cols: usize) -> MatrixStore {
        MatrixStore::Tiled(TileLayout::new(spec, rows, cols).expect("a layout"))
    }
    const fn int(scheme: Scheme, granularity: Granularity, symmetric: bool) -> QuantSpec {
        QuantSpec { scheme, granularity, symmetric, scale_dtype: ScaleType::F16 }
    }
    const fn bytes(scheme: Scheme, group: u32) -> QuantSpec {
        QuantSpec { scale_dtype: ScaleType::I8Row, ..int(scheme, Granularity::Group(group), true) }
    }
    const NL4: QuantSpec = QuantSpec { scheme: Scheme::Nl4, ..QuantSpec::Q4_0 };
    use Arithmetic::{Bf16, Float, Int8, Int16};
    vec![
        ("f32 x f32", |_, _| MatrixStore::Plain(DType::F32), Float),
        ("f16 x f32", |_, _| MatrixStore::Plain(DType::F16), Float),
        ("bf16 x f32", |_, _| MatrixStore::Plain(DType::BF16), Float),
        ("bf16 x bf16", |_, _| MatrixStore::Plain(DType::BF16), Bf16),
        ("q4_0 x int16", |r, c| tiled(QuantSpec::Q4_0, r, c), Int16),
        ("q4_0 x int8", |r, c| tiled(QuantSpec::Q4_0, r, c), Int8),
        ("int4 g128 affine x int16", |r, c| tiled(int(Scheme::Int4, Granularity::Group(128), false), r, c), Int16),
        ("int4 g128 affine x int8", |r, c| tiled(int(Scheme::Int4, Granularity::Group(128), false), r, c), Int8),
        ("nl4 x int16", |r, c| tiled(NL4, r, c), Int16),
        ("nl4 x int8", |r, c| tiled(NL4, r, c), Int8),
        ("mxfp4 x int16", |r, c| tiled(QuantSpec::MXFP4, r, c), Int16),
        ("mxfp4 x int8", |r, c| tiled(QuantSpec::MXFP4, r, c), Int8),
        ("t2 i8_row x int8", |r, c| tiled(bytes(Scheme::T2, 128), r, c), Int8),
        ("t3 i8_row x int8", |r, c| tiled(bytes(Scheme::T3, 128), r, c), Int8),
        ("nl4 i8_row x int8", |r, c| tiled(bytes(Scheme::Nl4, 32), r, c), Int8),
        ("int4 i8_row x int8", |r, c| tiled(bytes(Scheme::Int4, 32), r, c), Int8),
        ("int5 i8_row x int8", |r, c| tiled(bytes(Scheme::Int5, 32), r, c), Int8),
        ("int6 i8_row x int8", |r, c| tiled(bytes(Scheme::Int6, 32), r, c), Int8),
        ("int8 row x int16", |r, c| tiled(int(Scheme::Int8, Granularity::Row, true), r, c), Int16),
        ("int8 row x int8", |r, c| tiled(int(Scheme::Int8, Granularity::Row, true), r, c), Int8),
    ]
}

/// Returns the seconds of the fastest of `rounds` calls: with one thread its CPU time, which other processes disturb
/// less, otherwise the elapsed time.
fn best(cpu: &Cpu, rounds: usize, mut f: impl FnMut()) -> f64 {
    if counting() {
        f();
        counted(&mut f);
        return 0.0;
    }
    let mut best = f64::MAX;
    for _ in 0..rounds {
        let start = now(cpu);
        f();
        best = best.min(now(cpu) - start);
    }
    best
}

fn values(count: usize) -> Vec<f32> {
    let mut rng = Rng::new(1);
    (0..count).map(|_| rng.next_normal() as f32).collect()
}

fn now(cpu: &Cpu) -> f64 {
    #[cfg(unix)]
    if cpu.threads() == 1 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the pointer refers to a local variable of the right type.
        let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
        assert_eq!(failed, 0, "every unix has this clock");
        return time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9;
    }
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_secs_f64()
}

fn measure(cpu: &Cpu, name: &str, store: fn(usize, usize) -> MatrixStore, arithmetic: Arithmetic, peaks: &Peaks) {
    let (rows, cols) = if counting() { (64, 2048) } else { (2048, 2048) };
    let one = bytes_of(store(rows, cols), rows, cols);
    let all = in_huge_pages(&one, if counting() { 1 } else { WORKING_SET.div_ceil(one.len()) });
    let matrices: Vec<Matrix> = (0..all.len() / one.len())
        .map(|i| Matrix::new(rows, cols, store(rows, cols), all.slice(i * one.len()..(i + 1) * one.len())))
        .collect::<Result<_, _>>()
        .expect("matrices");
    let counted = |n: &usize| [1, 2, 4, 16].contains(n);
    for n in std::iter::once(1).chain(TOKENS).filter(|n| counted(n) || !counting()) {
        let mut x = Acts::default();
        x.set(n, cols, &values(n * cols));
        [Form::Bf16, Form::Int16, Form::Int8].into_iter().for_each(|form| cpu.prepare(&mut x, form));
        let mut y = vec![0f32; n * rows];
        let used = if n == 1 { &matrices[..] } else { &matrices[..(256 / n).max(4).min(matrices.len())] };
        let seconds = best(cpu, 5, || {
            for matrix in used {
                cpu.matmul(&mut [Job::new(matrix, None, &x, &mut y)], arithmetic);
            }
        });
        if counting() {
            count::print(&format!("{name} n={n}"), rows * cols * n);
            continue;
        }
        let gb = used.len() as f64 * one.len() as f64 / seconds / 1e9;
        let gop = used.len() as f64 * 2.0 * (n * rows * cols) as f64 / seconds / 1e9;
        let peak = match store(rows, cols).form(arithmetic) {
            Form::F32 => peaks.fma,
            Form::Bf16 => peaks.bf16,
            Form::Int16 => peaks.int16,
            Form::Int8 => peaks.int8,
        };
        let limit = (gb / peaks.read).max(gop / peak);
        println!("{name:<26} {n:>5} {gb:>9.1} {gop:>9.0} {:>6.0}%", 100.0 * limit);
    }
}

/// Returns copies of some bytes one after the other, in huge pages like the weights of a pack.
fn in_huge_pages(one: &[u8], count: usize) -> Bytes {
    let fill = |all: &mut [u8]| {
        all.chunks_exact_mut(one.len()).for_each(|copy| copy.copy_from_slice(one));
        Ok(())
    };
    Bytes::build(one.len() * count, fill).expect("memory")
}

fn bytes_of(store: MatrixStore, rows: usize, cols: usize) -> Vec<u8> {
    let mut rng = Rng::new(7);
    let mut bytes = Vec::new();
    match store {
        MatrixStore::Plain(dtype) => {
            let values: Vec<f32> = (0..rows * cols).map(|_| rng.next_normal() as f32).collect();
            iec::dtype::encode_floats(dtype, &values, &mut bytes).expect("a float type");
        }
        MatrixStore::Tiled(layout) => {
            bytes = (0..layout.nbytes()).map(|_| (rng.next_u64() >> 9) as u8).collect();
            for tile in bytes.chunks_exact_mut(layout.tile_bytes) {
                // Scales of ordinary size: 2^-7 as a half, and as an exponent byte.
                let scales = &mut tile[..layout.zeros_offset];
                match layout.spec.scale_dtype {
                    ScaleType::E8m0 => scales.fill(120),
                    _ => scales.as_chunks_mut::<2>().0.fill([0x00, 0x20]),
                }
            }
        }
    }
    bytes
}

fn prepare(cpu: &Cpu, form: Form) {
    let (n, k) = if counting() { (1, 2048) } else { (512, 2048) };
    let floats = values(n * k);
    let mut x = Acts::default();
    let seconds = best(cpu, 20, || {
        x.set(n, k, &floats);
        cpu.prepare(&mut x, form);
    });
    if counting() {
        return count::print(&format!("activations to {form:?}"), n * k);
    }
    println!(
        "{form:?} from 512 x 2048: {:.0} us, {:.1} GB/s of floats",
        seconds * 1e6,
        (4 * n * k) as f64 / seconds / 1e9
    );
}

fn region_us(cpu: &Cpu) -> f64 {
    let mut each = vec![0u8; cpu.threads()];
    best(cpu, 20, || (0..500).for_each(|_| cpu.for_chunks(&mut each, 1, |i, part| part[0] = i as u8))) / 500.0 * 1e6
}

/// Measured limits of the machine with all threads of the engine.
#[derive(Default)]
struct Peaks {
    /// GB/s that all threads together read from memory, each in one sequential stream.
    read: f64,
    /// GFLOP/s of fused multiply-adds on registers.
    fma: f64,
    /// GFLOP/s of bf16 dot products on registers.
    bf16: f64,
    /// GOP/s of 8-bit dot products on registers.
    int8: f64,
    /// GOP/s of 16-bit dot products on registers.
    int16: f64,
}

impl Peaks {
    fn measure(cpu: &Cpu) -> Peaks {
        let threads = cpu.threads();
        let memory = in_huge_pages(&[1; 4096], WORKING_SET / 4096);
        let memory: &[u64] = bytemuck::cast_slice(&memory);
        let part = memory.len() / threads;
        let mut sums = vec![0u64; threads];
        let read = best(cpu, 8, || {
            cpu.for_chunks(&mut sums, 1, |t, sum| sum[0] = read_all(&memory[t * part..][..part]));
        });
        black_box(&sums);
        let rounds = 2_000_000;
        let per_second = |peak: fn(usize) -> f64| {
            let mut operations = vec![0f64; threads];
            let seconds = best(cpu, 5, || cpu.for_chunks(&mut operations, 1, |_, o| o[0] = peak(rounds)));
            operations.iter().sum::<f64>() / seconds / 1e9
        };
        let [fma, bf16, int8, int16] = peaks(cpu.isa()).map(per_second);
        Peaks { read: (part * threads * 8) as f64 / read / 1e9, fma, bf16, int8, int16 }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    #[target_feature(enable = "avx512f")]
    pub fn read(memory: &[u64]) -> u64 {
        let mut sums = [_mm512_setzero_si512(); 8];
        for chunk in memory.as_chunks::<64>().0 {
            for (sum, line) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
                // SAFETY: 64 readable bytes.
                *sum = _mm512_add_epi64(*sum, unsafe { _mm512_loadu_si512(line.as_ptr().cast()) });
            }
        }
        sums.iter().map(|s| _mm512_reduce_add_epi64(*s) as u64).fold(0, u64::wrapping_add)
    }

    /// Defines a function that applies an instruction to 12 registers repeatedly and returns the number of
    /// operations.
    macro_rules! peak {
        ($name:ident, $features:literal, $operations:literal, $ones:expr, |$sum:ident, $a:ident, $b:ident| $step:expr) => {
            #[target_feature(enable = $features)]
            pub fn $name(rounds: usize) -> f64 {
                let ($a, $b) = (black_box($ones), black_box($ones));
                let mut sums = [$a; 12];
                for _ in 0..rounds {
                    for $sum in &mut sums {
                        *$sum = $step;
                    }
                }
                black_box(sums);
                rounds as f64 * 12.0 * $operations
            }
        };
    }

    peak!(fma_512, "avx512f", 32.0, _mm512_set1_ps(1.0), |s, a, b| _mm512_fmadd_ps(*s, a, b));
    peak!(bf16_512, "avx512f,avx512bf16", 64.0, _mm512_set1_epi16(0x3F80), |s, a, b| {
        // SAFETY: both types are 64 bytes without invalid values.
        let pairs = |v| unsafe { std::mem::transmute::<__m512i, __m512bh>(v) };
        _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(*s), pairs(a), pairs(b)))
    });
    peak!(int8_512, "avx512f,avx512vnni", 128.0, _mm512_set1_epi8(1), |s, a, b| _mm512_dpbusd_epi32(*s, a, b));
    peak!(int16_512, "avx512f,avx512vnni", 64.0, _mm512_set1_epi16(1), |s, a, b| _mm512_dpwssd_epi32(*s, a, b));
    peak!(fma_256, "avx2,fma", 16.0, _mm256_set1_ps(1.0), |s, a, b| _mm256_fmadd_ps(*s, a, b));
    peak!(int8_vnni_256, "avx2,avxvnni", 64.0, _mm256_set1_epi8(1), |s, a, b| _mm256_dpbusd_avx_epi32(*s, a, b));
    // Without the addition of the products to the sums, which runs in parallel.
    peak!(int8_256, "avx2", 64.0, _mm256_set1_epi8(1), |s, _a, b| _mm256_maddubs_epi16(*s, b));
    peak!(int16_256, "avx2", 32.0, _mm256_set1_epi16(1), |s, _a, b| _mm256_madd_epi16(*s, b));
}

fn read_all(memory: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU supports AVX-512F, as checked above.
        return unsafe { x86::read(memory) };
    }
    memory.iter().fold(0, |sum, v| sum.wrapping_add(*v))
}

/// Returns the functions that measure the peaks of an instruction set: f32, bf16 (emulated by two fused multiply-adds
/// where there is no bf16 instruction), int8 and int16. For AMX they are those of vector instructions.
#[allow(clippy::type_complexity)]
fn peaks(isa: &str) -> [fn(usize) -> f64; 4] {
    // SAFETY: the engine has checked that the CPU supports the instruction set it names and the features that this
    // implies.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        match isa {
            "amx" | "avx512bf16" => {
                return [|n| x86::fma_512(n), |n| x86::bf16_512(n), |n| x86::int8_512(n), |n| x86::int16_512(n)];
            }
            "avx512" => return [|n| x86::fma_512(n), |n| x86::fma_512(n), |n| x86::int8_512(n), |n| x86::int16_512(n)],
            "avxvnni" => {
                return [|n| x86::fma_256(n), |n| x86::fma_256(n), |n| x86::int8_vnni_256(n), |n| x86::int16_256(n)];
            }
            "avx2" => return [|n| x86::fma_256(n), |n| x86::fma_256(n), |n| x86::int8_256(n), |n| x86::int16_256(n)],
            _ => {}
        }
    }
    let _ = isa;
    [generic_peak; 4]
}

/// Measures plain float code, for instruction sets without a specific measurement, and returns the number of
/// operations.
fn generic_peak(rounds: usize) -> f64 {
    let (a, b) = (black_box(0.5f32), black_box(0.25));
    let mut sums = [a; 32];
    for _ in 0..rounds {
        sums.iter_mut().for_each(|s| *s = *s * a + b);
    }
    black_box(sums);
    rounds as f64 * 64.0
}
