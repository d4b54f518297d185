//! Decodes matrices that are packed here bit by bit, for widths and layouts that no fixture has.

use super::*;
use crate::convert::json::read_object;
use crate::convert::source::layout::Layout;
use crate::quant::block::CodedRow;
use crate::rng::Rng;
use crate::scheme::{Granularity, QuantSpec, ScaleType, Scheme, TileLayout};
use serde_json::{Value, json};
use std::path::Path;

/// Tensor of a file: name, type, shape, bytes.
type Tensor = (String, &'static str, Vec<usize>, Vec<u8>);

fn tensor(name: &str, dtype: &'static str, shape: &[usize], bytes: Vec<u8>) -> Tensor {
    (name.to_string(), dtype, shape.to_vec(), bytes)
}

/// Writes a checkpoint with a configuration, files beside it, and tensors.
fn write(config: &Value, beside: &[(&str, Value)], tensors: &[Tensor]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    for (name, content) in [("config.json", config)].into_iter().chain(beside.iter().map(|(n, c)| (*n, c))) {
        std::fs::write(dir.path().join(name), content.to_string()).unwrap();
    }
    dir
}

fn open(dir: &Path) -> Result<(Shards, Published)> {
    let layout = Layout::find(dir)?;
    let shards = Shards::open_layout(&layout)?;
    let path = dir.join("config.json");
    let config = read_object(&path)?;
    let source = Source { config: &config, path: &path, layout: &layout };
    Published::open(&source, &shards, &|_| false).map(|published| (shards, published))
}

/// Packs codes into a dense little-endian bit stream of whole words.
fn stream(codes: impl IntoIterator<Item = u8>, bits: u32) -> Vec<u8> {
    let (mut words, mut at) = (Vec::<u32>::new(), 0);
    for code in codes {
        for b in 0..bits {
            if at / 32 == words.len() {
                words.push(0);
            }
            words[at / 32] |= u32::from(code >> b & 1) << (at % 32);
            at += 1;
        }
    }
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Exchanges lines and columns of a matrix of 32-bit words.
fn transposed(words: &[u8], lines: usize) -> Vec<u8> {
    let columns = words.len() / 4 / lines;
    let word = |i: usize, j: usize| words[(i * columns + j) * 4..][..4].to_vec();
    (0..columns).flat_map(|j| (0..lines).flat_map(move |i| word(i, j))).collect()
}

/// Random matrix of codes with a scale and a zero point for each group of a row.
struct Matrix {
    rows: usize,
    cols: usize,
    group: usize,
    bits: u32,
    codes: Vec<u8>,
    zeros: Vec<u8>,
    scales: Vec<f32>,
}

impl Matrix {
    fn random([rows, cols, group]: [usize; 3], bits: u32, zero: Option<u8>) -> Matrix {
        let mut rng = Rng::new(u64::from(bits));
        let groups = rows * (cols / group);
        let mut code = || (rng.next_u64() & ((1 << bits) - 1)) as u8;
        let codes = (0..rows * cols).map(|_| code()).collect();
        let zeros = (0..groups).map(|_| zero.unwrap_or_else(&mut code)).collect();
        let scales = (0..groups).map(|_| (rng.next_u64() % 500) as f32 / 1024.0).collect();
        Matrix { rows, cols, group, bits, codes, zeros, scales }
    }

    fn groups(&self) -> usize {
        self.cols / self.group
    }

    fn row(&self, row: usize) -> &[u8] {
        &self.codes[row * self.cols..][..self.cols]
    }

    /// Returns `(code - zero - add) * scale`, or `code * scale + offset` for `offset` of a group.
    fn values(&self, value: impl Fn(u8, usize) -> f32) -> Vec<f32> {
        let group = |i: usize| i / self.cols * self.groups() + i % self.cols / self.group;
        self.codes.iter().enumerate().map(|(i, code)| value(*code, group(i))).collect()
    }

    fn integers(&self, add: i32) -> Vec<f32> {
        self.values(|code, g| (i32::from(code) - i32::from(self.zeros[g]) - add) as f32 * self.scales[g])
    }

    /// Returns the scales, or other numbers of groups, as F32 in the order `(rows, groups)`.
    fn floats(&self) -> Vec<u8> {
        self.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect()
    }

    /// Returns the zero points of each group as a stream along the rows.
    fn zero_streams(&self) -> Vec<u8> {
        let column = |g: usize| (0..self.rows).map(move |row| self.zeros[row * self.groups() + g]);
        (0..self.groups()).flat_map(|g| stream(column(g), self.bits)).collect()
    }
}

/// Checks the exact values of `M.weight`, all at once and a few rows at a time, and those of the kept codes.
fn check(what: &str, dir: &Path, expected: &[f32], kept: Option<Scheme>) {
    let (shards, published) = open(dir).unwrap_or_else(|e| panic!("{what}: {e}"));
    let coded = published.get("M.weight").unwrap_or_else(|| panic!("{what}: {:?}", published.matrices.keys()));
    let (rows, cols) = coded.matrix();
    for step in [rows, 5, 1] {
        let mut found = vec![f32::NAN; rows * cols];
        for (number, chunk) in found.chunks_mut(step * cols).enumerate() {
            let first = number * step;
            coded.read_rows(&shards, 0, first..first + chunk.len() / cols, chunk).unwrap();
        }
        assert!(found == expected, "{what}, {step} rows at a time");
    }
    let native = coded.native(&shards).unwrap();
    assert_eq!(native.ok().map(|native| native.spec.scheme), kept, "{what}");
    let Ok(native) = native else { return };
    let layout = TileLayout::new(native.spec, rows, cols).unwrap();
    let mut found = vec![f32::NAN; rows * cols];
    for first in (0..rows).step_by(7) {
        let range = first..rows.min(first + 7);
        let put = |row: usize, coded: &CodedRow| {
            coded.dequantize(&layout, &mut found[(first + row) * cols..][..cols]);
        };
        coded.read_codes(&native, &shards, (0, range), put).unwrap();
    }
    assert!(found == expected, "{what}: the codes mean other values");
}

#[test]
fn gptq_of_every_width_and_version_decodes() {
    for (bits, zero, format, kept) in [
        (2, None, "gptq_v2", Some(Scheme::Int4)),
        (3, None, "gptq", Some(Scheme::Int4)),
        (3, Some(3), "gptq", Some(Scheme::Int4)),
        (4, Some(7), "gptq", Some(Scheme::Int4)),
        (4, None, "gptq", None),
        (4, None, "gptq_v2", Some(Scheme::Int4)),
        (8, Some(127), "gptq", Some(Scheme::Int8)),
        (8, None, "gptq_v2", None),
    ] {
        let m = Matrix::random([32, 64, 32], bits, zero);
        let add = i32::from(format == "gptq");
        let columns: Vec<u8> = (0..m.rows).flat_map(|row| stream(m.row(row).iter().copied(), bits)).collect();
        let tensors = [
            tensor("M.qweight", "I32", &[64 * bits as usize / 32, 32], transposed(&columns, 32)),
            tensor("M.qzeros", "I32", &[2, bits as usize], m.zero_streams()),
            tensor("M.scales", "F32", &[2, 32], transposed(&m.floats(), 32)),
        ];
        let config = json!({"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 32,
            "checkpoint_format": format, "dynamic": {"-:other": {}, "+:M": {"bits": bits}}}});
        let dir = write(&config, &[], &tensors);
        check(&format!("{bits} bits {zero:?} {format}"), dir.path(), &m.integers(add), kept);
    }
}

#[test]
fn settings_beside_the_configuration_are_found() {
    let m = Matrix::random([16, 64, 64], 4, None);
    let order = [0, 2, 4, 6, 1, 3, 5, 7];
    let words = |code: &dyn Fn(usize) -> u8| {
        let word = |c: usize| (0..8).fold(0u32, |w, i| w | u32::from(code(8 * c + order[i])) << (4 * i));
        [word(0).to_le_bytes(), word(1).to_le_bytes()].concat()
    };
    let tensors = [
        tensor("M.qweight", "I32", &[64, 2], (0..64).flat_map(|k| words(&|o| m.row(o)[k])).collect()),
        tensor("M.qzeros", "I32", &[1, 2], words(&|o| m.zeros[o])),
        tensor("M.scales", "F32", &[1, 16], m.floats()),
    ];
    let settings = json!({"zero_point": true, "q_group_size": 64, "w_bit": 4, "version": "GEMM"});
    let dir = write(&json!({}), &[("quant_config.json", settings)], &tensors);
    check("AWQ beside", dir.path(), &m.integers(0), Some(Scheme::Int4));

    let tensors = [
        tensor("M.weight", "F8_E4M3", &[2, 32], vec![0x38; 64]),
        tensor("M.weight_scale", "U8", &[2, 1], vec![127, 128]),
        tensor("M.input_scale", "F32", &[], vec![0; 4]),
    ];
    let settings = json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MXFP8"}});
    let dir = write(&json!({}), &[("hf_quant_config.json", settings)], &tensors);
    check("ModelOpt beside", dir.path(), &[[1.0; 32], [2.0; 32]].concat(), Some(Scheme::Fp8));
    let (_, published) = open(dir.path()).unwrap();
    assert!(published.has_activation_scales() && published.explains("M.input_scale") && !published.explains("N.x"));
}

#[test]
fn compressed_tensors_of_every_width_and_packing_decode() {
    for (bits, words, zero, kept) in [
        (3, false, None, Some(Scheme::Int4)),
        (3, true, Some(4), Some(Scheme::Int4)),
        (5, true, Some(16), Some(Scheme::Int5)),
        (6, false, Some(32), Some(Scheme::Int6)),
        (6, false, None, None),
        (8, false, Some(128), Some(Scheme::Int8)),
    ] {
        let m = Matrix::random([9, 320, 64], bits, zero);
        let whole = (32 / bits) as usize;
        let word = |codes: &[u8]| codes.iter().rev().fold(0u32, |word, code| word << bits | u32::from(*code));
        let row = |row: usize| match words {
            true => m.row(row).chunks(whole).flat_map(|codes| word(codes).to_le_bytes()).collect::<Vec<_>>(),
            false => stream(m.row(row).iter().copied(), bits),
        };
        let packed: Vec<u8> = (0..9).flat_map(row).collect();
        let shape = [9u64, 320].map(u64::to_le_bytes).concat();
        let mut tensors = vec![
            tensor("M.weight_packed", "I32", &[9, packed.len() / 36], packed),
            tensor("M.weight_scale", "F32", &[9, 5], m.floats()),
            tensor("M.weight_shape", "I64", &[2], shape),
        ];
        if zero.is_none() {
            let streams = m.zero_streams();
            let lines = (9 * bits as usize).div_ceil(32);
            tensors.push(tensor("M.weight_zero_point", "I32", &[lines, 5], transposed(&streams, 5)));
        }
        let other = json!({"targets": ["re:N.*"], "weights": {"num_bits": 4, "group_size": 32}});
        let own = json!({"targets": ["re:.*M$"], "weights": {"num_bits": bits, "group_size": 64}});
        let config = json!({"quantization_config": {"quant_method": "compressed-tensors",
            "config_groups": {"group_0": other, "group_1": own}, "ignore": ["re:.*M"]}});
        let dir = write(&config, &[], &tensors);
        check(&format!("{bits} bits, whole words {words}"), dir.path(), &m.integers(0), kept);
    }
}

#[test]
fn mlx_of_every_width_decodes() {
    for bits in [2, 3, 4, 5, 6, 8] {
        let m = Matrix::random([5, 96, 32], bits, Some(0));
        let rows: Vec<u8> = (0..5).flat_map(|row| stream(m.row(row).iter().copied(), bits)).collect();
        let tensors = [
            tensor("M.weight", "U32", &[5, 3 * bits as usize], rows),
            tensor("M.scales", "F32", &[5, 3], m.floats()),
            tensor("M.biases", "F32", &[5, 3], m.floats()),
        ];
        let config = json!({"model_type": "llama",
            "quantization": {"bits": 7, "group_size": 64, "M": {"bits": bits, "group_size": 32}, "N": false}});
        let refused = open(write(&config, &[], &tensors).path()).unwrap_err().to_string();
        assert!(refused.contains("7"), "{refused}");
        let config = json!({"model_type": "llama",
            "quantization": {"bits": 4, "group_size": 64, "M": {"bits": bits, "group_size": 32}, "N": false}});
        let expected = m.values(|code, g| f32::from(code) * m.scales[g] + m.scales[g]);
        check(&format!("{bits} bits"), write(&config, &[], &tensors).path(), &expected, None);
    }
}

#[test]
fn stacks_of_experts_have_blocks_of_their_own() {
    let codes: Vec<u8> = (0..2 * 3 * 4).map(|i| 0x38 + i % 8).collect();
    let scales: Vec<u8> = (0..2 * 2 * 2u8).map(|i| 127 + i).collect();
    let tensors = [
        tensor("experts.up", "F8_E4M3", &[2, 3, 4], codes),
        tensor("experts.up_scale_inv", "F8_E8M0", &[2, 2, 2], scales),
    ];
    let settings = json!({"quant_method": "fp8", "weight_block_size": [2, 3], "scale_fmt": "ue8m0"});
    let dir = write(&json!({"quantization_config": settings}), &[], &tensors);
    let (shards, published) = open(dir.path()).unwrap();
    let coded = published.get("experts.up").unwrap();
    let mut row = [0.0; 4];
    coded.read_rows(&shards, 1, 2..3, &mut row).unwrap();
    // Row 5 of all has codes 0x38 + 4 to 0x38 + 7, in blocks 6 and 7.
    assert_eq!(row, [1.5 * 64.0, 1.625 * 64.0, 1.75 * 64.0, 1.875 * 128.0]);
}

#[test]
fn blocks_of_bitsandbytes_run_over_the_ends_of_rows() {
    let map: Vec<f32> = (0..16).map(|i| (i as f32 - 8.0) / 8.0).collect();
    let absmax: Vec<f32> = (0..3).map(|i| 1.0 + i as f32).collect();
    let bytes = |numbers: &[f32]| numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
    let codes: Vec<u8> = (0..39u8).map(|i| i.wrapping_mul(7)).collect();
    let state = json!({"quant_type": "fp4", "blocksize": 32, "dtype": "float32", "shape": [6, 13]}).to_string();
    let tensors = [
        tensor("M.weight", "BF16", &[39, 1], [&codes[..], &[0; 39]].concat()),
        tensor("M.weight.absmax", "F32", &[3], bytes(&absmax)),
        tensor("M.weight.quant_map", "F32", &[16], bytes(&map)),
        tensor("M.weight.quant_state.bitsandbytes__fp4", "U8", &[state.len()], state.into_bytes()),
    ];
    let config = json!({"quantization_config": {"quant_method": "bitsandbytes"}});
    assert!(open(write(&config, &[], &tensors).path()).unwrap_err().to_string().contains("expected"));
    let [(name, ..), rest @ ..] = tensors;
    let tensors = [&[tensor(&name, "U8", &[39, 1], codes.clone())], &rest[..]].concat();
    let value = |i: usize| map[usize::from(codes[i / 2] >> (4 * (1 - i % 2)) & 15)] * absmax[i / 32];
    let expected: Vec<f32> = (0..78).map(value).collect();
    check("fp4", write(&config, &[], &tensors).path(), &expected, None);
}

#[test]
fn codes_of_matrices_of_different_kinds_have_one_scheme_where_one_holds_both() {
    let spec = |symmetric, scale_dtype| QuantSpec {
        scheme: Scheme::Int4,
        granularity: Granularity::Row,
        symmetric,
        scale_dtype,
    };
    let config = |method: &str| json!({"quantization_config": {"quant_method": method, "bits": 4, "group_size": 32}});
    let of = |zero: Option<u8>, dtype: &'static str, scale: &[u8]| {
        let m = Matrix::random([8, 32, 32], 4, zero);
        let columns: Vec<u8> = (0..8).flat_map(|row| stream(m.row(row).iter().copied(), 4)).collect();
        let tensors = [
            tensor("M.qweight", "I32", &[4, 8], transposed(&columns, 8)),
            tensor("M.qzeros", "I32", &[1, 1], m.zero_streams()),
            tensor("M.scales", dtype, &[1, 8], scale.repeat(8)),
        ];
        let mut config = config("gptq");
        config["quantization_config"]["checkpoint_format"] = json!("gptq_v2");
        let dir = write(&config, &[], &tensors);
        let (shards, published) = open(dir.path()).unwrap();
        published.get("M.weight").unwrap().native(&shards).unwrap().unwrap()
    };
    let symmetric = of(Some(8), "F16", &[0, 0x3C]);
    let affine = of(None, "BF16", &[0x80, 0x3F]);
    assert_eq!(symmetric.spec, spec(true, ScaleType::F16));
    assert_eq!(affine.spec, spec(false, ScaleType::F32));
    assert_eq!(symmetric.merged(&affine).map(|native| native.spec), Some(spec(false, ScaleType::F32)));
}

#[test]
fn a_scale_of_zero_needs_codes_of_zero() {
    for (code, is_refused) in [(0, false), (0x80, false), (1, true)] {
        let mut codes = vec![0x38; 64];
        codes[32..].fill(code);
        let scales = [1f32, 0.0].iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let tensors =
            [tensor("M.weight", "F8_E4M3", &[2, 32], codes), tensor("M.weight_scale", "F32", &[2, 1], scales)];
        let weights = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
        let groups = json!({"group_0": {"targets": ["re:.*"], "weights": weights}});
        let config = json!({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}});
        let dir = write(&config, &[], &tensors);
        let (shards, published) = open(dir.path()).unwrap();
        let coded = published.get("M.weight").unwrap();
        let read = coded.read_rows(&shards, 0, 0..2, &mut [0.0; 64]);
        assert_eq!(read.is_err(), is_refused, "{code}: {read:?}");
    }
}
