//! Tests the tile format with an independent decoder, written from docs/FORMAT.md alone and without code of the
//! crate: for packs of every scheme it gets the weights that `iec unpack` writes and that the runtime's own decoder
//! returns.

use crate::checkpoint::load;
use crate::common::{fixture, iec};
use iec::iebin::{IebinReader, Store};
use iec::quant::block::tile::dequantize_rows;
use iec::scheme::TileLayout;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Decodes IEEE half precision by its definition.
fn half(bytes: &[u8]) -> f32 {
    let word = u16::from_le_bytes([bytes[0], bytes[1]]);
    let (exponent, fraction) = (i32::from(word >> 10 & 31), f64::from(word & 1023));
    let size = match exponent {
        0 => fraction * 2f64.powi(-24),
        _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
    };
    (if word >> 15 == 1 { -size } else { size }) as f32
}

/// Returns the table of a trellis as the document prints it.
fn table_of(scheme: &str) -> Vec<i8> {
    let document = include_str!("../../docs/FORMAT.md");
    let heading = if scheme == "t2" { "The table of `t2` has" } else { "and that of `t3`:" };
    let printed = document.split(heading).nth(1).unwrap().split("```").nth(1).unwrap();
    let table: Vec<i8> = printed.split_whitespace().map(|number| number.parse().unwrap()).collect();
    assert_eq!(table.len(), 64, "{scheme}");
    table
}

/// Tensor with its entry in the description.
struct Described<'a> {
    quant: &'a Value,
    rows: usize,
    cols: usize,
    payload: &'a [u8],
}

impl Described<'_> {
    fn at_64(bytes: usize) -> usize {
        bytes.div_ceil(64) * 64
    }

    fn scale(&self, bytes: &[u8], i: usize) -> f32 {
        match self.quant["scale_dtype"].as_str().unwrap() {
            "f16" => half(&bytes[2 * i..]),
            "f32" => f32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().unwrap()),
            "e8m0" => 2f64.powi(i32::from(bytes[i]) - 127) as f32,
            "i8_row" => f32::from(bytes[i] as i8),
            other => panic!("{other}"),
        }
    }

    /// Returns the stored code at a row and column of a block.
    fn code(bits: usize, block: &[u8], row: usize, column: usize) -> u8 {
        if bits == 8 {
            return block[64 * (column / 4) + 4 * row + column % 4];
        }
        let low = column % 16;
        let nibble = block[64 * (low / 4) + 4 * row + low % 4] >> (4 * (column / 16)) & 15;
        let more = bits - 4;
        if more == 0 {
            return nibble;
        }
        let (field, high) = (column / 4, &block[256..]);
        let byte = high[64 * (field * more / 8) + 4 * row + column % 4];
        nibble | (byte >> (field * more % 8) & ((1 << more) - 1)) << 4
    }

    /// Returns the index of a weight in the table of a trellis.
    fn index(bits: usize, block: &[u8], row: usize, column: usize) -> usize {
        let stream: Vec<u8> = (0..bits).map(|vector| block[64 * vector + 4 * row + column % 4]).collect();
        let bit = |i: usize| usize::from(stream[i % (8 * bits) / 8] >> (i % 8) & 1);
        (0..6).map(|i| bit(column / 4 * bits + i) << i).sum()
    }

    fn decode(&self) -> Vec<f32> {
        let (rows, cols) = (self.rows, self.cols);
        let width = self.quant["group_size"].as_u64().map_or(cols, |n| n as usize);
        let groups = cols.div_ceil(width);
        let scale_bytes = match self.quant["scale_dtype"].as_str().unwrap() {
            "f16" => 2,
            "f32" => 4,
            _ => 1,
        };
        let symmetric = self.quant["symmetric"].as_bool().unwrap();
        let zeros_at = Self::at_64(groups * 16 * scale_bytes);
        let supers_at = zeros_at + if symmetric { 0 } else { Self::at_64(groups * 16) };
        let by_row = self.quant["scale_dtype"] == "i8_row";
        let codes_at = supers_at + if by_row { 64 } else { 0 };
        let bits = self.quant["bits"].as_u64().unwrap() as usize;
        let blocks = cols.div_ceil(32);
        let tile_bytes = codes_at + blocks * 64 * bits;
        assert_eq!(self.quant["tile_bytes"], tile_bytes);
        assert_eq!(self.payload.len(), rows.div_ceil(16) * tile_bytes);
        let scheme = self.quant["scheme"].as_str().unwrap();
        let trellis = scheme.starts_with('t').then(|| table_of(scheme));
        let mut values = vec![f32::NAN; rows * cols];
        for (i, value) in values.iter_mut().enumerate() {
            let (row, column) = (i / cols, i % cols);
            let (tile, r) = (&self.payload[row / 16 * tile_bytes..], row % 16);
            let group = 16 * (column / width) + r;
            let block = &tile[codes_at + column / 32 * 64 * bits..];
            let code = if trellis.is_some() { 0 } else { Self::code(bits, block, r, column % 32) };
            let number = match scheme {
                "t2" | "t3" => f32::from(trellis.as_ref().unwrap()[Self::index(bits, block, r, column % 32)]),
                "int8" => f32::from(code as i8),
                "nl4" => {
                    let table = [-127i8, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
                    f32::from(table[usize::from(code)])
                }
                "mxfp4" => {
                    let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
                    if code >= 8 { -size } else { size }
                }
                _ if symmetric => f32::from(code) - self.quant["zero_point"].as_u64().unwrap() as f32,
                _ => f32::from(code) - f32::from(tile[zeros_at + group]),
            };
            let of_row = if by_row {
                f32::from_le_bytes(tile[supers_at + 4 * r..supers_at + 4 * r + 4].try_into().unwrap())
            } else {
                1.0
            };
            *value = number * (self.scale(tile, group) * of_row);
        }
        values
    }
}

/// Returns rules in which each scheme, scale type and granularity occurs.
fn rules() -> Value {
    let in_layer = |layer: usize, fields: Value| {
        let mut rule = fields;
        rule["include"] = json!(format!(r"layers\.{layer}\..*_proj"));
        rule
    };
    json!({"version": 1, "rules": [
        {"include": r"layers\.0\.self_attn", "scheme": "t3"},
        in_layer(0, json!({"scheme": "q4_0"})),
        {"include": r"layers\.1\.mlp\.down", "scheme": "t2", "group_size": 32},
        {"include": r"layers\.1\.mlp\.up", "scheme": "t3", "group_size": 64},
        in_layer(1, json!({"scheme": "int4", "group_size": 64, "symmetric": false})),
        {"include": r"layers\.2\.self_attn", "scheme": "int8", "group_size": 32},
        in_layer(2, json!({"scheme": "int8", "scale_dtype": "f32"})),
        {"include": r"layers\.3\.self_attn\.[qk]", "scheme": "nl4", "scale_dtype": "i8_row"},
        {"include": r"layers\.3\.mlp\.down", "scheme": "int5", "scale_dtype": "i8_row"},
        in_layer(3, json!({"scheme": "mxfp4"})),
        {"include": r"layers\.4\.self_attn\.[qk]", "scheme": "nl4"},
        {"include": r"layers\.4\.self_attn", "scheme": "int5"},
        in_layer(4, json!({"scheme": "int6", "group_size": 128})),
        {"include": "embed_tokens", "scheme": "int4", "group_size": "tensor"}
    ]})
}

#[test]
fn tiles_decode_by_the_book_to_what_unpack_and_the_runtime_read() {
    let dir = TempDir::new().unwrap();
    let [rules_file, pack, back] = ["rules.json", "pack", "back"].map(|name| dir.path().join(name));
    std::fs::write(&rules_file, rules().to_string()).unwrap();
    let mut command = iec();
    command.arg("pack").arg("--hf-dir").arg(fixture("stories260k")).arg("--q4-map").arg(&rules_file);
    command.arg("--out-dir").arg(&pack).assert().success();
    iec().arg("unpack").arg("--model-dir").arg(&pack).arg("--out-dir").arg(&back).assert().success();
    let unpacked = load(&back);
    let reader = IebinReader::open(&pack).unwrap();
    let description: Value = serde_json::from_slice(&std::fs::read(pack.join("model.ie.json")).unwrap()).unwrap();
    let bin = std::fs::read(pack.join("model.ie.bin")).unwrap();
    let mut schemes = std::collections::BTreeSet::new();
    for tensor in description["tensors"].as_array().unwrap().iter().filter(|t| !t["quant"].is_null()) {
        let name = tensor["name"].as_str().unwrap();
        let number = |field: &Value| field.as_u64().unwrap() as usize;
        let (offset, nbytes) = (number(&tensor["offset"]), number(&tensor["nbytes"]));
        let (rows, cols) = (number(&tensor["shape"][0]), number(&tensor["shape"][1]));
        let described = Described { quant: &tensor["quant"], rows, cols, payload: &bin[offset..offset + nbytes] };
        let values = described.decode();
        let bytes = &unpacked[name].bytes;
        assert_eq!(bytes.len(), 4 * values.len(), "{name}");
        let written = bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()));
        assert!(values.iter().copied().eq(written), "{name}: unpack");
        let entry = reader.get(name).unwrap();
        let Store::Tiled(spec) = entry.store else { panic!("{name} is quantized") };
        let layout = TileLayout::new(spec, rows, cols).unwrap();
        let mut own = vec![0f32; rows * cols];
        dequantize_rows(&layout, &reader.payload(entry).unwrap(), 0..rows, &mut own);
        assert!(values == own, "{name}: the crate's decoder");
        schemes.insert(tensor["quant"]["scheme"].as_str().unwrap().to_string());
    }
    assert_eq!(
        schemes.into_iter().collect::<Vec<_>>(),
        ["int4", "int5", "int6", "int8", "mxfp4", "nl4", "q4_0", "t2", "t3"]
    );
}
