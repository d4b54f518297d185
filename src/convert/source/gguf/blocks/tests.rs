//! Compares decoded blocks with an independent implementation (tests/reference/make_gguf.py), and
//! packs and unpacks codes.

use super::*;
use crate::convert::source::gguf::Gguf;
use crate::quant::block::tile::{get_row, put_row};
use crate::scheme::Granularity;
use crate::sha256::{Digest, Sha256, hex};
use proptest::prelude::*;
use std::path::Path;

#[test]
fn every_type_decodes_to_the_bits_of_the_reference() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf/blocks.gguf");
    let gguf = Gguf::open(&path).unwrap();
    let mut failures = Vec::new();
    let mut types = 0;
    for expected in gguf.tensors.iter().filter(|t| t.name.ends_with(".values")) {
        let name = expected.name.trim_end_matches(".values");
        let tensor = gguf.tensors.iter().find(|t| t.name == name).unwrap();
        assert_eq!((tensor.kind.to_string().as_str(), &tensor.shape), (name, &expected.shape));
        let (ours, theirs) = (gguf.floats(tensor).unwrap(), gguf.floats(expected).unwrap());
        // The sign of a zero is not compared: the reference does not define it for zero times a negative scale.
        let wrong = ours.iter().zip(&theirs).position(|(a, b)| a.to_bits() != b.to_bits() && (*a != 0.0 || *b != 0.0));
        if let Some(i) = wrong {
            failures.push(format!("{name}: element {i} is {}, expected {}", ours[i], theirs[i]));
        }
        types += 1;
    }
    assert!(failures.is_empty(), "{failures:#?}");
    assert_eq!(types, 13);
}

#[test]
fn types_that_cannot_be_decoded_are_refused_by_name() {
    let refused = check_supported(GgmlType::I16).unwrap_err();
    assert!(refused.to_string().contains("I16") && refused.help_text().unwrap().contains("Q4_K"));
    assert!(check_supported(GgmlType::Q8_1).unwrap_err().to_string().contains("activations"));
    assert!(dequantize(GgmlType::Q8_K, &[0; 292], &mut [0.0; 256]).is_err());
}

#[test]
fn a_nan_exponent_of_mxfp4_is_refused() {
    let layout = TileLayout::new(QuantSpec::MXFP4, 1, 32).unwrap();
    let mut row = CodedRow::new(&layout);
    assert!(to_row(GgmlType::MXFP4, &[254; 17], &mut row).is_ok());
    assert!(to_row(GgmlType::MXFP4, &[255; 17], &mut row).is_err());
}

#[test]
fn scales_and_minimums_that_are_no_numbers_are_refused() {
    // The last byte of each fp16 number of a block.
    for (kind, ends) in [
        (GgmlType::Q8_0, vec![1]),
        (GgmlType::Q4_1, vec![1, 3]),
        (GgmlType::Q4_K, vec![1, 3]),
        (GgmlType::Q6_K, vec![209]),
    ] {
        let layout = TileLayout::new(scheme(kind).unwrap(), 1, kind.block()).unwrap();
        let mut row = CodedRow::new(&layout);
        let block = vec![0; kind.block_bytes()];
        assert!(to_row(kind, &block, &mut row).is_ok());
        for end in ends {
            for high in [0x7c, 0x7e, 0xfc] {
                let mut damaged = block.clone();
                damaged[end] = high;
                assert!(to_row(kind, &damaged, &mut row).is_err(), "{kind}: byte {end} is {high:#x}");
            }
        }
    }
}

/// Types without a file in the repository: SHA-256 of the floats that the Python package `gguf` decodes from 8 blocks,
/// whose byte i is `i * i * 31 + i * 7 + i / 256`, without the upper two bits of the f16 scale of TQ1_0.
#[test]
fn blocks_of_a_fixed_pattern_decode_to_the_bits_of_the_reference() {
    let cases = [
        (GgmlType::TQ1_0, "eeeb1bead11c97833d0e9ce4930a5026edbd5622aa597567f1ed79402755ff2d"),
        (GgmlType::NVFP4, "84dd5b9a53f88ef7acb762e67bbd6a110ce3fe7a4fecdf085eb64465eb69e996"),
    ];
    for (kind, expected) in cases {
        let mut raw: Vec<u8> = (0..8 * kind.block_bytes()).map(|i| (i * i * 31 + i * 7 + i / 256) as u8).collect();
        if kind == GgmlType::TQ1_0 {
            raw.chunks_mut(kind.block_bytes()).for_each(|block| block[53] &= 0x3f);
        }
        let mut out = vec![0.0; 8 * kind.block()];
        dequantize(kind, &raw, &mut out).unwrap();
        let bytes: Vec<u8> = out.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(hex(Sha256::new_with_prefix(&bytes)), expected, "{kind}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_without_a_panic(raw in prop::collection::vec(any::<u8>(), 292)) {
        for kind in GgmlType::all() {
            let mut out = vec![0.0; kind.block()];
            let decoded = dequantize(kind, &raw[..kind.block_bytes()], &mut out);
            prop_assert_eq!(decoded.is_ok(), check_supported(kind).is_ok());
        }
    }

    #[test]
    fn blocks_with_a_scheme_of_ours_keep_every_bit_and_mean_the_same(
        kind in prop::sample::select(vec![
            GgmlType::Q4_0, GgmlType::Q4_1, GgmlType::Q5_0, GgmlType::Q5_1, GgmlType::Q8_0, GgmlType::IQ4_NL,
            GgmlType::MXFP4, GgmlType::Q2_K, GgmlType::Q3_K, GgmlType::Q4_K, GgmlType::Q5_K, GgmlType::Q6_K,
            GgmlType::IQ4_XS, GgmlType::NVFP4,
        ]),
        mut raw in prop::collection::vec(any::<u8>(), 210 * 3),
    ) {
        let (size, width) = (kind.block_bytes(), 3 * kind.block());
        raw.truncate(3 * size);
        raw.chunks_mut(size).for_each(|block| match kind {
            GgmlType::MXFP4 => block[0] = block[0].min(254),
            GgmlType::NVFP4 => block[..4].iter_mut().for_each(|scale| *scale = (*scale & 0x7f).min(0x7e)),
            // The exponent bits are limited so that the numbers are finite: the first two, and the last two.
            _ => [1, 3, size - 1, size - 3].into_iter().for_each(|at| block[at] &= 0x3f),
        });
        let layout = TileLayout::new(scheme(kind).unwrap(), 1, width).unwrap();
        prop_assert_eq!(twin(&layout.spec), Some(kind));
        let mut row = CodedRow::new(&layout);
        to_row(kind, &raw, &mut row).unwrap();
        let mut back = vec![0; raw.len()];
        from_row(kind, &layout, &row, &mut back);
        prop_assert_eq!(&back, &raw);
        let mut tile = vec![0; layout.tile_bytes];
        put_row(&layout, &mut tile, 7, &row);
        let mut again = CodedRow::new(&layout);
        get_row(&layout, &tile, 7, &mut again);
        prop_assert_eq!(&again, &row);
        let (mut ours, mut theirs) = (vec![0.0; width], vec![0.0; width]);
        row.dequantize(&layout, &mut ours);
        dequantize(kind, &raw, &mut theirs).unwrap();
        prop_assert_eq!(ours, theirs);
    }

    #[test]
    fn integers_of_six_bits_are_bytes_of_q8_0(codes in prop::collection::vec(0u8..64, 64)) {
        let layout = TileLayout::new(QuantSpec::usual(Scheme::Int6), 1, 64).unwrap();
        let mut row = CodedRow::new(&layout);
        row.codes.copy_from_slice(&codes);
        row.scales.copy_from_slice(&[0x00, 0x3c, 0x66, 0x2e]);
        let mut raw = vec![0; 2 * 34];
        from_row(twin(&layout.spec).unwrap(), &layout, &row, &mut raw);
        let (mut ours, mut theirs) = ([0.0; 64], [0.0; 64]);
        row.dequantize(&layout, &mut ours);
        dequantize(GgmlType::Q8_0, &raw, &mut theirs).unwrap();
        prop_assert_eq!(ours, theirs);
    }

    #[test]
    fn a_scale_that_spans_blocks_is_repeated_in_each(codes in prop::collection::vec(0u8..16, 128)) {
        let spec = QuantSpec {
            scheme: Scheme::Int4, granularity: Granularity::Group(64), symmetric: true, scale_dtype: ScaleType::F16,
        };
        let layout = TileLayout::new(spec, 1, 128).unwrap();
        let mut row = CodedRow::new(&layout);
        row.codes.copy_from_slice(&codes);
        row.scales.copy_from_slice(&[0x00, 0x3c, 0x66, 0x2e]);
        let mut raw = vec![0; 4 * 18];
        from_row(GgmlType::Q4_0, &layout, &row, &mut raw);
        let (mut ours, mut theirs) = ([0.0; 128], [0.0; 128]);
        row.dequantize(&layout, &mut ours);
        dequantize(GgmlType::Q4_0, &raw, &mut theirs).unwrap();
        prop_assert_eq!(ours, theirs);
    }
}
