//! Property tests of every codec on random shapes: bijections, error bounds, and agreement with the scalar kernel.

use super::*;
use crate::quant::Quantizer;
use crate::quant_spec::{Method, TensorQuant};
use crate::runtime::cpu::scalar::tile_block;
use crate::scheme::{CodeMap, CodeTable, Granularity, PlainScale, SCHEMES, Scheme, SchemeInfo, TILE_ROWS};
use proptest::prelude::*;

fn specs() -> impl Strategy<Value = QuantSpec> {
    let granularity = prop_oneof![
        prop_oneof![Just(32u32), Just(64), Just(128), Just(256)].prop_map(Granularity::Group),
        Just(Granularity::Row),
        Just(Granularity::Tensor),
    ];
    let rows = SCHEMES.iter().filter(|row| row.scheme.has_encoder() && row.scale_dtype != ScaleType::I8Row);
    let rows = prop::sample::select(rows.collect::<Vec<_>>());
    (rows, granularity, any::<bool>(), any::<bool>()).prop_map(|(row, granularity, affine, single)| match row {
        row if row.is_block_format => QuantSpec::usual(row.scheme),
        row => QuantSpec {
            scheme: row.scheme,
            granularity,
            symmetric: !(affine && row.may_be_affine),
            scale_dtype: if single { ScaleType::F32 } else { ScaleType::F16 },
        },
    })
}

/// Returns specifications whose scales are multiples of a number of their row, which canonical bytes do not hold.
fn specs_of_rows() -> impl Strategy<Value = QuantSpec> {
    let sizes = SCHEMES.iter().flat_map(|row| row.row_scaled.iter().map(|size| (row.scheme, *size)));
    prop::sample::select(sizes.collect::<Vec<_>>())
        .prop_map(|(scheme, size)| QuantSpec { granularity: Granularity::Group(size), ..of_row(scheme) })
}

fn of_row(scheme: Scheme) -> QuantSpec {
    QuantSpec { scale_dtype: ScaleType::I8Row, ..QuantSpec::usual(scheme) }
}

fn matrices() -> impl Strategy<Value = (QuantSpec, usize, usize, Vec<f32>)> {
    matrices_of(specs())
}

fn matrices_of(specs: impl Strategy<Value = QuantSpec>) -> impl Strategy<Value = (QuantSpec, usize, usize, Vec<f32>)> {
    (specs, 1usize..36, 1usize..150).prop_flat_map(|(spec, rows, cols)| {
        let values = prop::collection::vec(prop_oneof![4 => -2.0f32..2.0, 1 => Just(0.0f32)], rows * cols);
        (Just(spec), Just(rows), Just(cols), values)
    })
}

/// Returns the squared error of a whole matrix under a method.
fn total_error(spec: QuantSpec, method: Method, rows: usize, cols: usize, values: &[f32]) -> f64 {
    let (layout, tiles) = encode_with(spec, method, rows, cols, values);
    let mut decoded = vec![f32::NAN; rows * cols];
    tile::dequantize_rows(&layout, &tiles, 0..rows, &mut decoded);
    values.iter().zip(&decoded).map(|(x, y)| f64::from(x - y).powi(2)).sum()
}

fn encode(spec: QuantSpec, rows: usize, cols: usize, values: &[f32]) -> (TileLayout, Vec<u8>) {
    encode_with(spec, Method::Rtn, rows, cols, values)
}

fn encode_with(spec: QuantSpec, method: Method, rows: usize, cols: usize, values: &[f32]) -> (TileLayout, Vec<u8>) {
    let quant = TensorQuant { spec, method, clamp: None, percentile: None };
    let mut q = Quantizer::new(quant, rows, cols).unwrap();
    if q.needs_observation() {
        q.observe(values).unwrap();
    }
    let mut tiles = vec![0xAA; q.layout().nbytes()];
    q.encode_tiles(values, &mut tiles).unwrap();
    (*q.layout(), tiles)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tiles_and_canonical_bytes_are_permutations_of_each_other((spec, rows, cols, values) in matrices()) {
        let (layout, tiles) = encode(spec, rows, cols, &values);
        let (mut codes, mut scales, mut zeros) = (Vec::new(), Vec::new(), Vec::new());
        tile::canonical_from_tiles(&layout, &tiles, &mut codes, &mut scales, &mut zeros);
        prop_assert_eq!((codes.len(), scales.len(), zeros.len()), layout.canonical_sizes(rows));
        let mut back = vec![0x55; layout.nbytes()];
        tile::tiles_from_canonical(&layout, &codes, &scales, &zeros, rows, &mut back).unwrap();
        // A tensor-wide scale is repeated only for the rows of the matrix, so these bytes are restored exactly, too.
        prop_assert_eq!(back, tiles);
    }

    #[test]
    fn canonical_codes_of_a_row_are_read_back((spec, rows, cols, values) in matrices_of(specs_of_rows())) {
        let (layout, tiles) = encode(spec, rows, cols, &values);
        let mut row = CodedRow::new(&layout);
        tile::get_row(&layout, &tiles, 0, &mut row);
        let mut packed = vec![0; layout.canonical_sizes(1).0];
        pack_codes(&layout, &row, &mut packed);
        let mut back = CodedRow { codes: vec![0xAA; row.codes.len()], ..row.clone() };
        unpack_codes(&layout, &packed, &mut back);
        prop_assert_eq!(&back.codes[..cols], &row.codes[..cols]);
        let mut tile = tiles[..layout.tile_bytes].to_vec();
        tile::put_row(&layout, &mut tile, 0, &row);
        prop_assert_eq!(&tile[..], &tiles[..layout.tile_bytes]);
    }

    #[test]
    fn decoding_agrees_with_the_scalar_kernel(
        (spec, rows, cols, values) in matrices_of(prop_oneof![4 => specs(), 1 => specs_of_rows()]),
    ) {
        let (layout, tiles) = encode(spec, rows, cols, &values);
        let mut decoded = vec![f32::NAN; rows * cols];
        tile::dequantize_rows(&layout, &tiles, 0..rows, &mut decoded);
        for row in 0..layout.tiles * TILE_ROWS {
            let tile = &tiles[row / TILE_ROWS * layout.tile_bytes..];
            for block in 0..layout.blocks {
                let (integers, [factors, _]) = tile_block(&layout, tile, row % TILE_ROWS, block);
                for (k, value) in integers.iter().enumerate() {
                    let (value, column) = (factors.weight(*value), block * BLOCK + k);
                    let real = row < rows && column < cols;
                    let expected = if real { decoded[row * cols + column] } else { 0.0 };
                    // These have no code of zero for padding columns, which are multiplied by activations of zero.
                    let has_zero = spec.code_map() != CodeMap::Table(CodeTable::Iq4Nl) && spec.trellis().is_none();
                    if row < rows && !real && !has_zero {
                        continue;
                    }
                    prop_assert_eq!(value, expected, "row {} column {}", row, column);
                }
            }
        }
    }

    #[test]
    fn searching_never_costs_accuracy((spec, rows, cols, values) in matrices()) {
        let spec = if spec.scale_dtype == ScaleType::E8m0 { QuantSpec::Q4_0 } else { spec };
        let plain = total_error(spec, Method::Rtn, rows, cols, &values);
        let searched = total_error(spec, Method::Search, rows, cols, &values);
        // Errors inside the search are summed in f32.
        prop_assert!(searched <= plain * 1.000_01, "{searched} against {plain}");
    }

    #[test]
    fn columns_that_do_not_exist_have_no_say_in_the_scale(value in -2f32..2.0) {
        let spec = QuantSpec::usual(Scheme::Nl4);
        let plain = total_error(spec, Method::Rtn, 1, 1, &[value]);
        prop_assert!(total_error(spec, Method::Search, 1, 1, &[value]) <= plain * 1.000_01);
    }

    #[test]
    fn no_weight_is_further_than_half_a_step_from_its_code((spec, rows, cols, values) in matrices()) {
        let (layout, tiles) = encode(spec, rows, cols, &values);
        let mut decoded = vec![f32::NAN; rows * cols];
        tile::dequantize_rows(&layout, &tiles, 0..rows, &mut decoded);
        for (i, (x, y)) in values.iter().zip(&decoded).enumerate() {
            let (row, block) = (i / cols, i % cols / BLOCK);
            let tile = &tiles[row / TILE_ROWS * layout.tile_bytes..];
            let scale = tile_block(&layout, tile, row % TILE_ROWS, block).1[0].scale.abs();
            let bound = match spec.code_map() {
                // A value of the opposite sign to the peak may saturate at code 7 instead of 8, half a step further.
                CodeMap::Biased(_) if spec.scheme.info().plain_scale == PlainScale::SignedPeak => scale * 1.01,
                // Half of the widest step, or the difference of the magnitudes of the lowest (-127) and the highest
                // value (113).
                CodeMap::Table(CodeTable::Iq4Nl) => scale * 14.1,
                // Steps of E2M1 grow to 2 at the top, and values from 6 to 8 saturate; this scale applies to doubled
                // values.
                CodeMap::Table(CodeTable::E2m1) => (scale * 2.0).max(x.abs() * 0.25),
                // Rounding an fp16 scale may move the extreme beyond the last code by 2^-11 of its value; an affine
                // zero point is rounded, too, which may add half a step at the ends.
                _ => scale * if spec.symmetric { 0.5 } else { 1.0 } + x.abs() * 1e-3 + 1e-7,
            };
            prop_assert!((x - y).abs() <= bound, "{x} became {y}, scale {scale}");
        }
    }
}

#[test]
fn scales_of_rows_cost_next_to_nothing() {
    let mut rng = crate::rng::Rng::new(3);
    let (rows, cols) = (33, 416);
    // Groups of different sizes, as in trained models.
    let sizes: Vec<f64> = (0..rows * cols / BLOCK).map(|_| (0.3 * rng.next_normal()).exp()).collect();
    let values: Vec<f32> = (0..rows * cols).map(|i| (rng.next_normal() * sizes[i / BLOCK]) as f32).collect();
    let may_have_others = |row: &&SchemeInfo| !row.row_scaled.is_empty() && row.scale_dtype != ScaleType::I8Row;
    for scheme in SCHEMES.iter().filter(may_have_others).map(|row| row.scheme) {
        // Scales of plain choices are rounded up. With more codes, a searched scale fits the peak of its group more closely.
        let searched = if scheme.bits() == 6 { 1.03 } else { 1.015 };
        for (method, most) in [(Method::Rtn, 1.06), (Method::Search, searched)] {
            let error = |spec| total_error(spec, method, rows, cols, &values);
            let (half, of_row) = (error(QuantSpec::usual(scheme)), error(of_row(scheme)));
            assert!(of_row < most * half, "{}: {of_row} against {half}", scheme.name());
        }
    }
    // Rows of zeros, and groups that are tiny beside another one.
    let mut row = [0f32; 64];
    for peak in [0.0, 1.0] {
        row[40] = peak;
        row[3] = peak * 1e-6;
        let (layout, tiles) = encode(of_row(Scheme::Nl4), 1, 64, &row);
        let mut decoded = [f32::NAN; 64];
        tile::dequantize_rows(&layout, &tiles, 0..1, &mut decoded);
        assert!((decoded[40] - peak).abs() < 0.02 && decoded[3].abs() < 1e-4 * peak + 1e-30, "{decoded:?}");
    }
    let affine = QuantSpec { symmetric: false, ..of_row(Scheme::Int4) };
    let wide = QuantSpec { granularity: Granularity::Group(64), ..of_row(Scheme::Int4) };
    let half = QuantSpec { scale_dtype: ScaleType::F16, ..QuantSpec::usual(Scheme::T3) };
    let rows = QuantSpec { granularity: Granularity::Row, ..QuantSpec::usual(Scheme::T2) };
    for wrong in [of_row(Scheme::Q4_0), of_row(Scheme::Int8), of_row(Scheme::Iq4Xs), affine, wide, half, rows] {
        assert!(wrong.validate().is_err(), "{wrong:?}");
    }
}

#[test]
fn wrong_lengths_and_wild_zero_points_are_refused() {
    let affine = QuantSpec {
        scheme: Scheme::Int4,
        granularity: Granularity::Row,
        symmetric: false,
        scale_dtype: ScaleType::F16,
    };
    let layout = TileLayout::new(affine, 2, 32).unwrap();
    let mut out = vec![0; layout.nbytes()];
    let mut go =
        |codes: usize, zeros: &[u8]| tile::tiles_from_canonical(&layout, &vec![0; codes], &[0; 4], zeros, 2, &mut out);
    assert!(go(32, &[0, 15]).is_ok());
    assert!(go(31, &[0, 15]).is_err());
    assert!(go(32, &[0]).is_err());
    assert!(go(32, &[0, 16]).is_err());
}

#[test]
fn a_nan_exponent_in_mxfp4_is_refused() {
    let layout = TileLayout::new(QuantSpec::MXFP4, 1, 32).unwrap();
    let mut out = vec![0; layout.nbytes()];
    assert!(tile::tiles_from_canonical(&layout, &[0; 16], &[254], &[], 1, &mut out).is_ok());
    assert!(tile::tiles_from_canonical(&layout, &[0; 16], &[255], &[], 1, &mut out).is_err());
}

#[test]
fn weights_that_are_no_numbers_or_overflow_fp16_scales_are_refused() {
    let quant = TensorQuant { spec: QuantSpec::Q4_0, method: Method::Rtn, clamp: None, percentile: None };
    let q = Quantizer::new(quant, 1, 32).unwrap();
    let mut out = vec![0; q.layout().nbytes()];
    let mut values = [0.5f32; 32];
    for bad in [f32::NAN, f32::INFINITY, -f32::INFINITY, 1e6] {
        values[7] = bad;
        assert!(q.encode_tiles(&values, &mut out).is_err(), "{bad}");
    }
    values[7] = -5e5;
    assert!(q.encode_tiles(&values, &mut out).is_ok());
}

#[test]
fn runs_of_columns_move_with_their_scales() {
    let values: Vec<f32> = (0..128).map(|i| (i as f32 * 0.37).sin() * (1 + i / 32) as f32).collect();
    let affine = QuantSpec { symmetric: false, ..QuantSpec::usual(Scheme::Int4) };
    for (spec, width) in [(QuantSpec::usual(Scheme::Q4_0), 32), (QuantSpec::usual(Scheme::Q4_0), 64), (affine, 32)] {
        let spec = QuantSpec { granularity: Granularity::Group(32), ..spec };
        let order: Vec<usize> = (0..128 / width).rev().collect();
        let moved: Vec<f32> = order.iter().flat_map(|run| &values[run * width..][..width]).copied().collect();
        let row = |values: &[f32]| {
            let (layout, tiles) = encode(spec, 1, 128, values);
            let mut row = CodedRow::new(&layout);
            tile::get_row(&layout, &tiles, 0, &mut row);
            (layout, row)
        };
        let (layout, of_values) = row(&values);
        assert!(CodedRow::has_movable_runs(&layout, width) && !CodedRow::has_movable_runs(&layout, 16));
        assert_eq!(of_values.with_runs(&layout, width, &order), row(&moved).1);
    }
}
