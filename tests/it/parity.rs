//! Tests that every kernel of every instruction set available on this machine gives the same bits as the scalar
//! kernels, for every shape, every code and any number of threads.

use crate::common::{iec, packed};
use half::f16;
use iec::dtype::DType;
use iec::mapped::Bytes;
use iec::rng::Rng;
use iec::runtime::cpu::{
    Acts, Arithmetic, Cpu, Form, GROUP, Job, Matrix, MatrixStore, Q16Group, SumType, WeightedSum, scalar,
};
use iec::scheme::{BLOCK, Granularity, Minimum, QuantSpec, ScaleType, Scheme, TileLayout};
use proptest::prelude::*;

const ROWS: [usize; 5] = [1, 15, 16, 17, 33];
const COLS: [usize; 8] = [1, 31, 32, 33, 80, 255, 256, 2880];
const TOKENS: [usize; 8] = [0, 1, 2, 3, 5, 8, 17, 67];

fn spec(scheme: Scheme, granularity: Granularity, symmetric: bool, scale_dtype: ScaleType) -> QuantSpec {
    QuantSpec { scheme, granularity, symmetric, scale_dtype }
}

/// Returns every storage format of matrices that kernels distinguish.
fn stores(rows: usize, cols: usize) -> Vec<MatrixStore> {
    let tiled = |spec| MatrixStore::Tiled(TileLayout::new(spec, rows, cols).unwrap());
    vec![
        MatrixStore::Plain(DType::F32),
        MatrixStore::Plain(DType::F16),
        MatrixStore::Plain(DType::BF16),
        tiled(QuantSpec::Q4_0),
        tiled(QuantSpec::MXFP4),
        tiled(QuantSpec::usual(Scheme::Nl4)),
        tiled(spec(Scheme::Nl4, Granularity::Group(32), true, ScaleType::I8Row)),
        tiled(spec(Scheme::Int4, Granularity::Group(32), true, ScaleType::I8Row)),
        tiled(spec(Scheme::Int6, Granularity::Group(32), true, ScaleType::I8Row)),
        tiled(QuantSpec::usual(Scheme::T2)),
        tiled(QuantSpec::usual(Scheme::T3)),
        tiled(spec(Scheme::T2, Granularity::Group(64), true, ScaleType::I8Row)),
        tiled(spec(Scheme::T3, Granularity::Group(32), true, ScaleType::I8Row)),
        tiled(spec(Scheme::Int4, Granularity::Group(64), true, ScaleType::F16)),
        tiled(spec(Scheme::Int4, Granularity::Row, true, ScaleType::F32)),
        tiled(spec(Scheme::Int4, Granularity::Group(128), false, ScaleType::F16)),
        tiled(spec(Scheme::Int4, Granularity::Group(32), false, ScaleType::F32)),
        tiled(spec(Scheme::Int8, Granularity::Group(32), true, ScaleType::F16)),
        tiled(spec(Scheme::Int8, Granularity::Row, true, ScaleType::F32)),
        tiled(QuantSpec::usual(Scheme::Int5)),
        tiled(spec(Scheme::Int5, Granularity::Row, true, ScaleType::F32)),
        tiled(spec(Scheme::Int6, Granularity::Group(64), true, ScaleType::F16)),
        tiled(QuantSpec::usual(Scheme::Q4_1)),
        tiled(QuantSpec::usual(Scheme::Q5_1)),
        tiled(QuantSpec::usual(Scheme::Q2K)),
        tiled(QuantSpec::usual(Scheme::Q3K)),
        tiled(QuantSpec::usual(Scheme::Q4K)),
        tiled(QuantSpec::usual(Scheme::Q5K)),
        tiled(QuantSpec::usual(Scheme::Q6K)),
        tiled(QuantSpec::usual(Scheme::Iq4Xs)),
        tiled(QuantSpec::usual(Scheme::Nvfp4)),
        tiled(spec(Scheme::Fp8, Granularity::Group(128), true, ScaleType::F32)),
        tiled(spec(Scheme::Fp8, Granularity::Row, true, ScaleType::F16)),
        tiled(spec(Scheme::Fp8, Granularity::Group(32), true, ScaleType::E8m0)),
    ]
}

/// Returns a random value: mostly of ordinary size, sometimes a zero of either sign, a denormal, a tiny or a large
/// value.
fn value(rng: &mut Rng) -> f32 {
    let v = rng.next_normal() as f32;
    match rng.next_u64() % 40 {
        0 => 0.0,
        1 => -0.0,
        2 => v * 1e-41,
        3 => v * 1e-30,
        4 => v * 1e4,
        _ => v,
    }
}

/// Returns random values, with equal chance either all of ordinary size or of all kinds (see [`value`]).
fn values(rng: &mut Rng, count: usize) -> Vec<f32> {
    let tame = rng.next_u64().is_multiple_of(2);
    (0..count).map(|_| if tame { rng.next_normal() as f32 } else { value(rng) }).collect()
}

/// Builds a matrix of random codes and random scales that are not NaN: zero, denormal, negative, and for E8M0 the
/// ends of its range.
fn matrix(rng: &mut Rng, rows: usize, cols: usize, store: MatrixStore) -> Matrix {
    let mut bytes = Vec::new();
    match store {
        MatrixStore::Plain(dtype) => {
            let values = values(rng, rows * cols);
            iec::dtype::encode_floats(dtype, &values, &mut bytes).unwrap();
        }
        MatrixStore::Tiled(layout) => {
            bytes.extend((0..layout.nbytes()).map(|_| (rng.next_u64() >> 24) as u8));
            for tile in bytes.chunks_exact_mut(layout.tile_bytes) {
                scales(rng, layout.spec.scale_dtype, &mut tile[..layout.zeros_offset]);
                if layout.spec.minimum() == Minimum::F16 {
                    scales(rng, ScaleType::F16, &mut tile[layout.zeros_offset..layout.supers_offset]);
                }
                let supers = if layout.spec.scale_dtype.is_of_row() { ScaleType::F32 } else { ScaleType::F16 };
                scales(rng, supers, &mut tile[layout.supers_offset..layout.codes_offset]);
            }
        }
    }
    Matrix::new(rows, cols, store, Bytes::copied(&bytes)).unwrap()
}

fn scales(rng: &mut Rng, dtype: ScaleType, out: &mut [u8]) {
    for scale in out.chunks_exact_mut(dtype.size()) {
        match dtype {
            ScaleType::F16 => scale.copy_from_slice(&f16::from_f32(value(rng) * 0.01).to_le_bytes()),
            ScaleType::F32 => scale.copy_from_slice(&(value(rng) * 0.01).to_le_bytes()),
            ScaleType::E8m0 => {
                scale[0] = match rng.next_u64() % 20 {
                    0 => [0, 1, 2, 253][(rng.next_u64() % 4) as usize],
                    _ => 110 + (rng.next_u64() % 20) as u8,
                }
            }
            ScaleType::I8 | ScaleType::E4m3 | ScaleType::I8Row => {}
        }
    }
}

fn plain_acts(rng: &mut Rng, n: usize, k: usize) -> Acts {
    let mut rows = values(rng, n * k);
    if let Some(block) = rows.chunks_mut(BLOCK).nth(1) {
        block.fill(0.0);
    }
    let mut acts = Acts::default();
    acts.set(n, k, &rows);
    acts
}

/// Returns every arithmetic for which this store has a kernel of its own.
fn arithmetics(store: MatrixStore) -> Vec<Arithmetic> {
    let special = [Arithmetic::Bf16, Arithmetic::Int16, Arithmetic::Int8].into_iter();
    let special = special.filter(|arithmetic| store.form(*arithmetic) != store.form(Arithmetic::Float));
    std::iter::once(Arithmetic::Float).chain(special).collect()
}

/// Returns random activations, prepared for all arithmetics.
fn acts(rng: &mut Rng, n: usize, k: usize) -> Acts {
    let mut acts = plain_acts(rng, n, k);
    round(&mut acts);
    acts
}

fn round(acts: &mut Acts) {
    let law = Cpu::with_isa(1, Some("scalar")).unwrap();
    [Form::Bf16, Form::Int16, Form::Int8].into_iter().for_each(|form| law.prepare(acts, form));
}

fn product(cpu: &Cpu, matrix: &Matrix, bias: Option<&[f32]>, x: &Acts, arithmetic: Arithmetic) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.n() * matrix.rows];
    cpu.matmul(&mut [Job::new(matrix, bias, x, &mut y)], arithmetic);
    y
}

/// Describes the first difference in bits; NaN equals NaN.
fn difference(a: &[f32], b: &[f32]) -> Option<String> {
    assert_eq!(a.len(), b.len());
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    let at = a.iter().zip(b).position(|(a, b)| !same(*a, *b))?;
    Some(format!("element {at}: {:e} is not {:e}", a[at], b[at]))
}

fn others() -> Vec<Cpu> {
    let names = Cpu::isas().into_iter().filter(|name| *name != "scalar");
    names.map(|name| Cpu::with_isa(1, Some(name)).unwrap()).collect()
}

/// Compares all instruction sets on one matrix and returns descriptions of the differences.
fn compare(rng: &mut Rng, shape: (usize, usize, usize), store: MatrixStore, fast: &[Cpu]) -> Vec<String> {
    let (rows, cols, n) = shape;
    let law = Cpu::with_isa(1, Some("scalar")).unwrap();
    let matrix = matrix(rng, rows, cols, store);
    let x = acts(rng, n, cols);
    let bias: Option<Vec<f32>> = rng.next_u64().is_multiple_of(2).then(|| (0..rows).map(|_| value(rng)).collect());
    let mut failures = Vec::new();
    for arithmetic in arithmetics(store) {
        let want = product(&law, &matrix, bias.as_deref(), &x, arithmetic);
        for cpu in fast {
            let found = product(cpu, &matrix, bias.as_deref(), &x, arithmetic);
            if let Some(what) = difference(&found, &want) {
                failures.push(format!("{} {arithmetic:?} {rows}x{cols} n={n} {store:?}: {what}", cpu.isa()));
            }
        }
    }
    failures
}

#[test]
fn every_instruction_set_gives_the_scalar_bits_for_every_shape_and_store() {
    let fast = others();
    let mut rng = Rng::new(1);
    let mut failures = Vec::new();
    for (rows, cols) in ROWS.into_iter().flat_map(|rows| COLS.map(|cols| (rows, cols))) {
        for n in TOKENS.into_iter().filter(|n| rows * cols * n <= 200_000) {
            for store in stores(rows, cols) {
                failures.extend(compare(&mut rng, (rows, cols, n), store, &fast));
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{} failures, the first:\n{}",
        failures.len(),
        failures[..10.min(failures.len())].join("\n")
    );
}

#[test]
fn several_panels_with_columns_in_pieces_are_the_scalar_bits() {
    let fast = others();
    let mut rng = Rng::new(11);
    for shape in [(33, 1300, 4), (49, 1184, 13), (70, 1100, 25), (70, 2080, 64), (70, 1056, 97)] {
        for store in stores(shape.0, shape.1) {
            assert_eq!(compare(&mut rng, shape, store, &fast), Vec::<String>::new());
        }
    }
}

#[test]
fn the_largest_codes_and_activations_do_not_saturate() {
    let (rows, cols) = (17, 256);
    let law = Cpu::with_isa(1, Some("scalar")).unwrap();
    for store in stores(rows, cols) {
        let MatrixStore::Tiled(layout) = store else { continue };
        for code in [0x00, 0x07, 0x70, 0x77, 0x7F, 0x80, 0x81, 0x88, 0xF0, 0xFF] {
            let mut bytes = vec![code; layout.nbytes()];
            for tile in bytes.chunks_exact_mut(layout.tile_bytes) {
                let (scales, rest) = tile.split_at_mut(layout.zeros_offset);
                // The largest distance of a code from its zero point.
                rest[..layout.codes_offset - layout.zeros_offset].fill(!code & 15);
                let supers =
                    &mut rest[layout.supers_offset - layout.zeros_offset..layout.codes_offset - layout.zeros_offset];
                match layout.spec.scale_dtype {
                    dtype if dtype.is_of_row() => supers.as_chunks_mut().0.fill(1f32.to_le_bytes()),
                    _ => supers.as_chunks_mut().0.fill(f16::ONE.to_le_bytes()),
                }
                match layout.spec.scale_dtype {
                    ScaleType::F16 => scales.as_chunks_mut().0.fill(f16::ONE.to_le_bytes()),
                    ScaleType::F32 => scales.as_chunks_mut().0.fill(1f32.to_le_bytes()),
                    ScaleType::E8m0 => scales.fill(127),
                    ScaleType::I8 | ScaleType::E4m3 | ScaleType::I8Row => scales.fill(code),
                }
            }
            let matrix = Matrix::new(rows, cols, store, Bytes::copied(&bytes)).unwrap();
            let signs =
                |n: usize| (0..n * cols).map(|i| if i / cols % 3 > i % 2 { 1.0 } else { -1.0 }).collect::<Vec<_>>();
            for n in [1, 3, 7, 20] {
                let mut x = Acts::default();
                x.set(n, cols, &signs(n));
                round(&mut x);
                for arithmetic in arithmetics(store) {
                    let want = product(&law, &matrix, None, &x, arithmetic);
                    for cpu in others() {
                        let found = product(&cpu, &matrix, None, &x, arithmetic);
                        let at = format!("{} {arithmetic:?} {code:#x} n={n} {store:?}", cpu.isa());
                        assert_eq!(difference(&found, &want), None, "{at}");
                    }
                }
            }
        }
    }
}

#[test]
fn nothing_depends_on_the_number_of_threads_or_the_company_in_a_batch() {
    let mut rng = Rng::new(2);
    let (rows, cols) = (1000, 320);
    for isa in Cpu::isas() {
        for store in stores(rows, cols) {
            let matrix = matrix(&mut rng, rows, cols, store);
            let x = acts(&mut rng, 3, cols);
            let mut first = Acts::default();
            first.set(1, cols, &x.row(0)[..cols]);
            round(&mut first);
            for arithmetic in arithmetics(store) {
                let want = product(&Cpu::with_isa(1, Some(isa)).unwrap(), &matrix, None, &x, arithmetic);
                for threads in 1..=5 {
                    let cpu = Cpu::with_isa(threads, Some(isa)).unwrap();
                    let found = product(&cpu, &matrix, None, &x, arithmetic);
                    assert_eq!(difference(&found, &want), None, "{isa} {threads} threads {store:?}");
                    let alone = product(&cpu, &matrix, None, &first, arithmetic);
                    assert_eq!(difference(&alone, &want[..rows]), None, "{isa} {threads} threads alone {store:?}");
                }
            }
        }
    }
}

#[test]
fn many_jobs_of_different_sizes_in_one_region_are_the_products_one_by_one() {
    let mut rng = Rng::new(3);
    let shapes = [(16, 32, 1), (300, 64, 5), (1, 2880, 2), (40, 96, 0), (2000, 128, 3)];
    let matrices: Vec<Matrix> =
        shapes.map(|(rows, cols, _)| matrix(&mut rng, rows, cols, stores(rows, cols)[rows % 11])).into();
    let inputs: Vec<Acts> = shapes.map(|(_, cols, n)| acts(&mut rng, n, cols)).into();
    let one = Cpu::with_isa(1, None).unwrap();
    for threads in 1..=5 {
        let cpu = Cpu::with_isa(threads, None).unwrap();
        let mut outputs: Vec<Vec<f32>> = shapes.map(|(rows, _, n)| vec![f32::NAN; rows * n]).into();
        let jobs = matrices.iter().zip(&inputs).zip(&mut outputs);
        let mut jobs: Vec<Job<'_>> = jobs.map(|((matrix, x), y)| Job::new(matrix, None, x, y)).collect();
        cpu.matmul(&mut jobs, Arithmetic::Float);
        for ((matrix, x), y) in matrices.iter().zip(&inputs).zip(&outputs) {
            assert_eq!(difference(y, &product(&one, matrix, None, x, Arithmetic::Float)), None);
        }
    }
}

#[test]
fn a_product_of_some_tokens_and_one_of_gathered_tokens_are_those_of_the_tokens_alone() {
    let mut rng = Rng::new(4);
    let (rows, cols, n) = (40, 160, 29);
    for (index, store) in stores(rows, cols).into_iter().enumerate() {
        let matrix = matrix(&mut rng, rows, cols, store);
        let x = acts(&mut rng, n, cols);
        for isa in Cpu::isas() {
            let cpu = Cpu::with_isa(2, Some(isa)).unwrap();
            for arithmetic in [Arithmetic::Float, Arithmetic::Int16, Arithmetic::Bf16, Arithmetic::Int8] {
                let all = product(&cpu, &matrix, None, &x, arithmetic);
                for tokens in [0..0, 0..1, 3..4, 5..29, 14..29] {
                    let mut y = vec![f32::NAN; tokens.len() * rows];
                    let job = Job { tokens: tokens.clone(), ..Job::new(&matrix, None, &x, &mut y) };
                    cpu.matmul(&mut [job], arithmetic);
                    let expected = &all[tokens.start * rows..tokens.end * rows];
                    assert_eq!(difference(&y, expected), None, "{index} {isa}");
                    let mut y: Vec<f32> = (0..y.len()).map(|i| i as f32).collect();
                    let sum: Vec<f32> = y.iter().zip(expected).map(|(y, x)| y + 0.7 * x).collect();
                    let job = Job { tokens, added: Some(0.7), ..Job::new(&matrix, None, &x, &mut y) };
                    cpu.matmul(&mut [job], arithmetic);
                    assert_eq!(difference(&y, &sum), None, "{index} {isa}");
                }
                let (chosen, mut gathered) = ([28u32, 3, 3, 0, 17], Acts::default());
                gathered.gather(&cpu, &x, &chosen, &[matrix.store.form(arithmetic)]);
                let alone: Vec<f32> = chosen.iter().flat_map(|t| &all[*t as usize * rows..][..rows]).copied().collect();
                assert_eq!(
                    difference(&product(&cpu, &matrix, None, &gathered, arithmetic), &alone),
                    None,
                    "{index} {isa}"
                );
            }
        }
    }
}

#[test]
#[should_panic(expected = "without their F32 form")]
fn gathered_tokens_have_no_other_form() {
    let cpu = Cpu::new(1).unwrap();
    let (x, mut gathered) = (acts(&mut Rng::new(5), 2, 32), Acts::default());
    gathered.gather(&cpu, &x, &[1], &[Form::Int8]);
    let matrix = matrix(&mut Rng::new(5), 16, 32, MatrixStore::Plain(DType::F32));
    product(&cpu, &matrix, None, &gathered, Arithmetic::Float);
}

#[test]
fn quantized_activations_are_the_same_for_hostile_values_too() {
    let mut rng = Rng::new(4);
    let ties = |i: usize| (i as f32 - 64.0) / 2.0 + if i == 127 { 95.5 } else { 0.0 };
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-45, -0.0, 127.5];
    for case in 0..3000 {
        let mut values: Vec<f32> = (0..2 * GROUP).map(|_| value(&mut rng)).collect();
        match case % 3 {
            0 => values[..GROUP].iter_mut().enumerate().for_each(|(i, v)| *v = ties(i)),
            1 => (0..case % 5)
                .for_each(|_| values[rng.next_u64() as usize % (2 * GROUP)] = special[rng.next_u64() as usize % 8]),
            _ => {}
        }
        let mut want = Acts::default();
        want.set(1, values.len(), &values);
        round(&mut want);
        for cpu in others() {
            let mut found = Acts::default();
            found.set(1, values.len(), &values);
            [Form::Int16, Form::Int8].into_iter().for_each(|form| cpu.prepare(&mut found, form));
            for (a, b) in found.row_q16(0).iter().zip(want.row_q16(0)) {
                assert_eq!((a.codes, a.scale.to_bits()), (b.codes, b.scale.to_bits()), "{values:?}");
            }
            for (a, b) in found.row_q8(0).iter().zip(want.row_q8(0)) {
                assert_eq!((a.codes, a.starts, a.start), (b.codes, b.starts, b.start), "{values:?}");
                assert_eq!(a.scale.to_bits(), b.scale.to_bits(), "{values:?}");
                assert!(!a.codes.contains(&-128));
            }
        }
    }
}

#[test]
fn activations_of_16_bits_are_the_nearest_multiples_of_the_largest_over_32767() {
    let mut rng = Rng::new(8);
    let mut acts = plain_acts(&mut rng, 3, 300);
    round(&mut acts);
    for row in 0..3 {
        for (group, values) in acts.row_q16(row).iter().zip(acts.row(row)[..300].chunks(GROUP)) {
            let largest = values.iter().fold(0f32, |max, v| max.max(v.abs()));
            assert!((group.scale * 32767.0 - largest).abs() <= largest * 1e-6);
            for (p, code) in group.codes.iter().enumerate() {
                let value = values.get(Q16Group::place(p)).copied().unwrap_or(0.0);
                let error = (f64::from(*code) * f64::from(group.scale) - f64::from(value)).abs();
                assert!(error <= 0.501 * f64::from(group.scale), "{value} as {code} times {}", group.scale);
            }
        }
    }
}

#[test]
fn bf16_products_near_the_least_normal_number_are_the_scalar_bits() {
    let mut rng = Rng::new(6);
    let mut failures = Vec::new();
    for case in 0..2000 {
        // Values have few mantissa bits so that sums cancel; products are around 2^-126, some below.
        let exponent = -50 - (case % 40);
        let few = |rng: &mut Rng, exponent: i32| {
            let digits = (rng.next_u64() % 17) as f32 - 8.0;
            digits * 2f32.powi(exponent + (rng.next_u64() % 3) as i32)
        };
        let (rows, cols, n) = (5, 70, 7);
        let mut bytes = Vec::new();
        let weights: Vec<f32> = (0..rows * cols).map(|_| few(&mut rng, exponent)).collect();
        iec::dtype::encode_floats(DType::BF16, &weights, &mut bytes).unwrap();
        let matrix = Matrix::new(rows, cols, MatrixStore::Plain(DType::BF16), Bytes::copied(&bytes)).unwrap();
        let mut x = Acts::default();
        x.set(n, cols, &(0..n * cols).map(|_| few(&mut rng, -60)).collect::<Vec<_>>());
        round(&mut x);
        let law = product(&Cpu::with_isa(1, Some("scalar")).unwrap(), &matrix, None, &x, Arithmetic::Bf16);
        for cpu in others() {
            let found = product(&cpu, &matrix, None, &x, Arithmetic::Bf16);
            failures.extend(difference(&found, &law).map(|what| format!("{} 2^{exponent}: {what}", cpu.isa())));
        }
    }
    assert!(failures.is_empty(), "{} failures, the first: {:?}", failures.len(), failures.first());
}

#[test]
fn activations_are_rounded_to_the_nearest_bf16() {
    let mut rng = Rng::new(7);
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-45, -0.0, 1e-40];
    let random = (0..100_000).map(|_| f32::from_bits(rng.next_u64() as u32));
    for value in special.into_iter().chain(random) {
        let (found, want) = (scalar::to_bf16(value), half::bf16::from_f32(value));
        assert!(found == want.to_bits() || value.is_nan() && half::bf16::from_bits(found).is_nan(), "{value:e}");
    }
}

#[test]
fn mixes_of_vectors_are_the_scalar_bits_for_every_shape_and_type() {
    let mut rng = Rng::new(5);
    let law = Cpu::with_isa(1, Some("scalar")).unwrap();
    for case in 0..600 {
        let (steps, rows, vectors) = (case % 67, 1 + case % 11, 1 + case / 11 % 9);
        for kind in [SumType::F32, SumType::F16, SumType::Bf16] {
            let bytes = kind.vector_bytes();
            // Layout of the values: the vectors of a step are contiguous, or the steps of a vector are.
            let (step, vector) = if case % 2 == 0 { (vectors * bytes, bytes) } else { (bytes, steps.max(1) * bytes) };
            let word = |rng: &mut Rng, halves: bool| match (kind, halves) {
                (SumType::Bf16, _) => pair_of_bf16(rng),
                (SumType::F16, true) => (0..2).fold(0, |w, _| w << 16 | u32::from(f16::from_f32(value(rng)).to_bits())),
                _ => value(rng).to_bits(),
            };
            let len = steps.max(1) * vectors * bytes;
            let values: Vec<u8> = (0..len / 4).flat_map(|_| word(&mut rng, true).to_le_bytes()).collect();
            let weight_row = steps + case % 3;
            let weights: Vec<u32> = (0..rows * weight_row).map(|_| word(&mut rng, false)).collect();
            let mix = WeightedSum {
                values: &values,
                step,
                steps,
                vector,
                vectors,
                weights: &weights,
                weight_row,
                rows,
                next: &values,
            };
            let run = |cpu: &Cpu| {
                let out_row = 16 * vectors + case % 5;
                let mut out = vec![f32::NAN; rows * out_row];
                cpu.weighted_sum(kind, &mix, &mut out, out_row);
                out.chunks(out_row).flat_map(|row| row[..16 * vectors].to_vec()).collect::<Vec<_>>()
            };
            let want = run(&law);
            for cpu in others() {
                assert_eq!(difference(&run(&cpu), &want), None, "{} {kind:?} {rows} x {vectors} x {steps}", cpu.isa());
            }
        }
    }
}

/// Returns two bf16 numbers of very different magnitudes, including zeros, but none between zero and 2^-56: see
/// [`SumType::Bf16`].
fn pair_of_bf16(rng: &mut Rng) -> u32 {
    let mut bf16 = || {
        let bits = rng.next_u64();
        let exponent = 127 - 56 + (bits >> 8) as u32 % 90;
        if bits.is_multiple_of(9) { 0 } else { (bits as u32 & 0x807f) | exponent << 7 }
    };
    bf16() | bf16() << 16
}

#[test]
fn whole_models_give_the_same_logits_with_every_instruction_set() {
    let cases = [
        ("llama-gqa", "fp32", "f32"),
        ("llama-gqa", "fp16", "f16"),
        ("llama-gqa", "fp32", "bf16"),
        ("llama-gqa", "fp32", "int8"),
        ("gptoss-mxfp4", "int4", "bf16"),
    ];
    for (fixture, precision, kv) in cases {
        let pack = packed(fixture);
        let traces = Cpu::isas().into_iter().map(|isa| {
            let trace = pack.path().join(isa);
            let flags = ["--prompt", "The same bits", "--max-new", "12", "--logprobs", "5", "--precision", precision];
            let flags = flags.into_iter().chain(["--kv", kv]);
            let mut command = iec();
            command.env("IEC_ISA", isa).arg("run").args(flags).arg("--model-dir").arg(pack.path());
            command.arg("--trace-ids").arg(&trace).assert().success();
            (isa, std::fs::read_to_string(&trace).unwrap())
        });
        let traces: Vec<(&str, String)> = traces.collect();
        assert!(traces[0].1.contains("topk_logits"));
        for (isa, trace) in &traces {
            assert_eq!(trace, &traces[0].1, "{isa} and {}: {fixture} {precision} {kv}", traces[0].0);
        }
    }
}

#[test]
fn an_instruction_set_that_does_not_exist_is_an_engine_error() {
    let pack = packed("llama-gqa");
    let mut command = iec();
    let command = command.env("IEC_ISA", "mmx").args(["run", "--prompt", "x", "--model-dir"]).arg(pack.path());
    let stderr = String::from_utf8(command.assert().code(5).get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("`mmx`") && stderr.contains("scalar"), "{stderr}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn any_shape_gives_the_scalar_bits(
        rows in 1usize..80, cols in 1usize..300, n in 0usize..20, store in 0usize..11, seed: u64
    ) {
        let failures = compare(&mut Rng::new(seed), (rows, cols, n), stores(rows, cols)[store], &others());
        prop_assert!(failures.is_empty(), "{failures:?}");
    }
}
