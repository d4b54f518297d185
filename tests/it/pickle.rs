//! Tests checkpoints written by `torch.save`: they are read without conversion, and nothing in them is executed.

use crate::checkpoint::{copy_of, load};
use crate::common::{fixture, iec};
use crate::torch_file::{Parts, Pickle, archive, one_tensor, state_dict, zip};
use half::{bf16, f16};
use iec::convert::source::shard::list;
use iec::convert::source::source_tensor::SourceTensor;
use iec::dtype::DType;
use iec::error::{Error, Result};
use proptest::prelude::*;
use serde_json::{Map, json};
use std::path::Path;
use std::time::{Duration, Instant};

fn tensors(bytes: &[u8]) -> Result<Vec<SourceTensor>> {
    list(&bytes, 0).map(|listing| listing.tensors)
}

fn golden(name: &str) -> Vec<u8> {
    std::fs::read(fixture("torch").join(name)).unwrap()
}

fn refusal(bytes: &[u8]) -> Error {
    tensors(bytes).expect_err("a file that must be refused")
}

/// Encodes `value` in each type as tests/reference/torch_files.py does.
fn element(dtype: DType, value: i64) -> Vec<u8> {
    match dtype {
        DType::F32 => (value as f32).to_le_bytes().to_vec(),
        DType::F64 => (value as f64).to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(value as f32).to_le_bytes().to_vec(),
        // The script truncates to bf16 instead of rounding.
        DType::BF16 => bf16::from_bits(((value as f32).to_bits() >> 16) as u16).to_le_bytes().to_vec(),
        DType::I64 => value.to_le_bytes().to_vec(),
        DType::I32 => (value as i32).to_le_bytes().to_vec(),
        DType::I16 => (value as i16).to_le_bytes().to_vec(),
        DType::I8 => vec![(value % 100) as u8],
        DType::U8 => vec![(value % 250) as u8],
        DType::Bool => vec![u8::from(value % 2 == 1)],
        other => unreachable!("torch files of the tests have no {other}"),
    }
}

#[test]
fn every_container_and_protocol_gives_the_same_tensors() {
    let expected: [(&str, DType, &[usize]); 18] = [
        ("types.FloatStorage", DType::F32, &[2, 3]),
        ("types.DoubleStorage", DType::F64, &[2, 3]),
        ("types.HalfStorage", DType::F16, &[2, 3]),
        ("types.BFloat16Storage", DType::BF16, &[2, 3]),
        ("types.LongStorage", DType::I64, &[2, 3]),
        ("types.IntStorage", DType::I32, &[2, 3]),
        ("types.ShortStorage", DType::I16, &[2, 3]),
        ("types.CharStorage", DType::I8, &[2, 3]),
        ("types.ByteStorage", DType::U8, &[2, 3]),
        ("types.BoolStorage", DType::Bool, &[2, 3]),
        ("transposed", DType::F32, &[3, 4]),
        ("shared.first", DType::F16, &[4]),
        ("shared.second", DType::F16, &[2, 2]),
        ("gaps", DType::I64, &[5, 1]),
        ("scalar", DType::F32, &[]),
        ("empty", DType::F32, &[0, 8]),
        ("old", DType::F32, &[2]),
        ("", DType::F32, &[]),
    ];
    for file in ["zip.bin", "protocol4.bin", "protocol5_zip64.bin", "legacy.bin", "wrapped.bin"] {
        let bytes = golden(file);
        let found = tensors(&bytes).unwrap();
        assert_eq!(found.len(), 17, "{file}");
        for (number, (name, dtype, shape)) in expected[..17].iter().enumerate() {
            let tensor = found.iter().find(|t| t.name == *name).unwrap_or_else(|| panic!("{file} {name}"));
            assert_eq!((tensor.dtype, tensor.shape.as_slice()), (*dtype, *shape), "{file} {name}");
            let count: i64 = shape.iter().product::<usize>() as i64;
            let values: Vec<u8> = (0..count).flat_map(|i| element(*dtype, (number as i64 + 1) * 100 + i)).collect();
            let mut out = vec![0xee; tensor.nbytes];
            tensor.read(&bytes.as_slice(), 0, &mut out).unwrap();
            assert_eq!(out, values, "{file} {name}");
            assert_eq!(tensor.strides.is_some(), matches!(*name, "transposed" | "gaps"), "{file} {name}");
        }
    }
}

#[test]
fn untyped_storages_have_the_type_of_their_tensors() {
    let bytes = golden("untyped.bin");
    let found = tensors(&bytes).unwrap();
    assert_eq!((found[0].dtype, found[0].shape.as_slice()), (DType::I32, &[2, 2][..]));
    let mut out = vec![0; 16];
    found[0].read(&bytes.as_slice(), 0, &mut out).unwrap();
    assert_eq!(out, (102..106).flat_map(|v| element(DType::I32, v)).collect::<Vec<_>>());
}

/// Packs a checkpoint and returns the bytes of the pack's data file.
fn packed(source: &Path) -> Vec<u8> {
    let out = tempfile::tempdir().unwrap();
    iec().arg("pack").arg("--hf-dir").arg(source).arg("--out-dir").arg(out.path()).assert().success();
    std::fs::read(out.path().join("model.ie.bin")).unwrap()
}

fn remove_safetensors(dir: &Path) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().contains(".safetensors") {
            std::fs::remove_file(path).unwrap();
        }
    }
}

#[test]
fn a_pickled_checkpoint_packs_to_the_same_bytes_as_safetensors() {
    for name in ["llama-gqa", "gptoss-mxfp4", "gptoss-bf16"] {
        let expected = packed(&fixture(name));
        let dir = copy_of(name);
        let all = load(dir.path());
        let single = dir.path().join("pytorch_model.bin");
        std::fs::write(&single, state_dict(&all)).unwrap();
        assert!(packed(&single) == expected, "{name}: the file itself, although safetensors lie beside it");
        remove_safetensors(dir.path());
        assert!(packed(dir.path()) == expected, "{name}: one file");

        std::fs::remove_file(single).unwrap();
        let mut halves = [all.clone(), all.clone()];
        let mut map = Map::new();
        for (i, tensor) in all.keys().enumerate() {
            halves[1 - i % 2].remove(tensor);
            map.insert(tensor.clone(), format!("pytorch_model-0000{}-of-00002.bin", i % 2 + 1).into());
        }
        for (i, half) in halves.iter().enumerate() {
            let file = dir.path().join(format!("pytorch_model-0000{}-of-00002.bin", i + 1));
            std::fs::write(file, state_dict(half)).unwrap();
        }
        let index = json!({"metadata": {}, "weight_map": map}).to_string();
        std::fs::write(dir.path().join("pytorch_model.bin.index.json"), index).unwrap();
        assert!(packed(dir.path()) == expected, "{name}: sharded");
    }
}

/// Returns the positions of `needle`.
fn positions(bytes: &[u8], needle: &[u8]) -> Vec<usize> {
    (0..bytes.len()).filter(|at| bytes[*at..].starts_with(needle)).collect()
}

#[test]
fn a_flipped_bit_in_a_storage_is_found_by_its_checksum_and_named() {
    let dir = copy_of("stories260k");
    let good = state_dict(&load(dir.path()));
    remove_safetensors(dir.path());
    let mut bad = good.clone();
    let (name, inside) = ("m/data/5", 40);
    let local = positions(&good, name.as_bytes())[0];
    bad[local + name.len() + inside] ^= 1;
    let file = dir.path().join("pytorch_model.bin");
    for (command, out) in [
        (&["pack", "--out-dir"][..], "p"),
        (&["q4", "--out-dir"], "q"),
        (&["ptq", "--bits", "8", "--out"], "m.json"),
        (&["verify-source"], ""),
    ] {
        let run = |bytes: &[u8]| {
            let outputs = tempfile::tempdir().unwrap();
            std::fs::write(&file, bytes).unwrap();
            let mut iec = iec();
            iec.args(command);
            if !out.is_empty() {
                iec.arg(outputs.path().join(out));
            }
            let output = iec.arg("--hf-dir").arg(dir.path()).output().unwrap();
            (output.status.code(), String::from_utf8(output.stderr).unwrap(), outputs.path().join(out).is_file())
        };
        let (code, said, complete) = run(&bad);
        let words = ["pytorch_model.bin", name, "found the CRC-32"];
        assert!(code == Some(4) && words.iter().all(|word| said.contains(word)), "{command:?}: {code:?} {said}");
        assert!(!complete, "{command:?}");
        let (code, said, _) = run(&good);
        assert_eq!(code, Some(0), "{command:?}: {said}");
    }
}

#[test]
fn archives_without_checksums_and_with_those_of_their_directory_only_are_read() {
    let dir = copy_of("stories260k");
    let good = state_dict(&load(dir.path()));
    remove_safetensors(dir.path());
    // Entries that were written before their length was known have a flag, and no checksum in their local header.
    let mut streamed = good.clone();
    for at in positions(&good, b"PK\x03\x04") {
        streamed[at + 6] |= 8;
        streamed[at + 14..at + 18].fill(0);
    }
    let mut unchecked = streamed.clone();
    for at in positions(&good, b"PK\x01\x02") {
        unchecked[at + 16..at + 20].fill(0);
    }
    let expected = packed(&fixture("stories260k"));
    for bytes in [good, streamed, unchecked] {
        std::fs::write(dir.path().join("pytorch_model.bin"), bytes).unwrap();
        assert!(packed(dir.path()) == expected);
    }
}

#[test]
fn every_other_callable_is_refused_by_name_and_nothing_runs() {
    let dir = tempfile::tempdir().unwrap();
    let victim = dir.path().join("victim");
    for (module, name) in
        [("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch._utils", "_rebuild_qtensor"), ("posix", "")]
    {
        let command = format!("touch {}", victim.display());
        let pickle = Pickle::new().global(module, name).text(&command).op(b"\x85R").end();
        let error = refusal(&archive(pickle, &[]));
        assert!(error.to_string().contains(&format!("`{module}.{name}`")), "{error}");
        assert!(error.help_text().is_some_and(|help| help.contains("state_dict")));
        let protocol4 = Pickle::new().text(module).text(name).op(b"\x93)R").end();
        assert!(refusal(&archive(protocol4, &[])).to_string().contains(&format!("`{module}.{name}`")));
    }
    assert!(!victim.exists());
}

#[test]
fn every_way_to_break_a_tensor_is_refused() {
    let mut failures = Vec::new();
    let max = i64::MAX;
    let cases: &[(&str, Parts, &str)] = &[
        ("past the storage", (0, &[5], &[1]), "does not fit a storage of 16 bytes"),
        ("offset past the storage", (4, &[1], &[1]), "does not fit"),
        ("strides past the storage", (0, &[2, 2], &[3, 1]), "does not fit"),
        ("repeated elements", (0, &[1000], &[0]), "does not fit"),
        ("overlapping rows", (0, &[3, 3], &[0, 1]), "does not fit"),
        ("negative size", (0, &[-4], &[1]), "the size is -4"),
        ("negative offset", (-1, &[4], &[1]), "the storage offset is -1"),
        ("negative stride", (0, &[4], &[-1]), "the stride is -1"),
        ("overflowing shape", (0, &[max, max], &[1, 1]), "overflows"),
        ("overflowing strides", (0, &[2, 2], &[max, max]), "overflows"),
        ("overflowing offset", (max, &[1], &[1]), "overflows"),
        ("unequal ranks", (0, &[2, 2], &[1]), "2 sizes, but 1 strides"),
        ("many axes", (0, &[1; 40], &[1; 40]), "40 axes"),
    ];
    for (what, parts, message) in cases {
        match tensors(&one_tensor(*parts)) {
            Err(e) if e.to_string().contains(message) => {}
            other => failures.push(format!("{what}: {other:?}")),
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(tensors(&one_tensor((1, &[3], &[1]))).is_ok() && tensors(&one_tensor((0, &[max, 0], &[1, 1]))).is_ok());
}

#[test]
fn what_is_no_state_dict_is_refused() {
    let tensor = |pickle: &mut Pickle| {
        pickle.tensor("FloatStorage", "0", 4, (0, &[4], &[1]));
    };
    let mut twice = Pickle::new();
    twice.op(b"}(");
    for _ in 0..2 {
        twice.text("w");
        tensor(&mut twice);
    }
    let mut mixed = Pickle::new();
    mixed.op(b"}(").text("w");
    tensor(&mut mixed);
    mixed.text("step").int(3);
    let mut bare = Pickle::new();
    tensor(&mut bare);
    let storages = [("0".to_string(), vec![0; 16])];
    for (pickle, message) in [
        (twice.op(b"u").end(), "w: found this key twice"),
        (mixed.op(b"u").end(), "step: found a value of the state dict that is not a tensor"),
        (bare.end(), "no dictionary"),
        (Pickle::new().op(b"}").end(), "a dictionary without tensors"),
        (Pickle::new().op(b"}").int(1).op(b"a").end(), "no list"),
        (Pickle::new().op(b"0").end(), "empty stack"),
        (Pickle::new().op(b"(0").end(), "empty stack"),
        (Pickle::new().op(b"h\x07").end(), "no value in memo slot 7"),
        (Pickle::new().op(b"t").end(), "no mark"),
        (Pickle::new().op(b"X\xff\xff\xff\xff").end(), "4294967295 bytes of text"),
        (Pickle::new().op(b"i").end(), "opcode 0x69"),
        (Pickle::new().op(b"}").0.clone(), "ends too early"),
        (vec![0x80, 9], "protocol 9"),
        (Pickle::new().op(b"}").text("w").tensor("FloatStorage", "1", 4, (0, &[4], &[1])).op(b"s").end(), "data/1"),
        (Pickle::new().op(b"}").text("w").tensor("FloatStorage", "0", 5, (0, &[4], &[1])).op(b"s").end(), "16 bytes"),
    ] {
        let error = refusal(&archive(pickle, &storages));
        assert!(error.to_string().contains(message), "{error}, expected {message}");
    }
}

#[test]
fn metadata_that_changes_the_meaning_of_a_tensor_is_refused() {
    let file = |metadata: &[u8]| {
        let good = Pickle::new().op(b"}").text("w").tensor("FloatStorage", "0", 4, (0, &[4], &[1])).0.clone();
        // The call ends in `tR`; the tuple of arguments gets one more element.
        let mut pickle = Pickle(good[..good.len() - 2].to_vec());
        archive(pickle.op(metadata).op(b"tRs").end(), &[("0".into(), vec![0; 16])])
    };
    for harmless in [&b"N"[..], b"}"] {
        assert!(tensors(&file(harmless)).is_ok());
    }
    let negated = [b"}X\x03\x00\x00\x00neg".as_slice(), b"\x88s"].concat();
    assert!(refusal(&file(&negated)).to_string().contains("metadata"));
}

#[test]
fn containers_that_lie_are_refused() {
    let good = golden("zip.bin");
    let entry = |name: &str, data: &[u8]| (name.to_string(), data.to_vec());
    let pickle = Pickle::new().op(b"}").end();
    let mut past = one_tensor((0, &[4], &[1]));
    // This makes the last entry of the zip directory larger than the file.
    let at = past.windows(4).rposition(|w| w == b"PK\x01\x02").unwrap() + 20;
    past[at..at + 8].copy_from_slice(&[[0xff, 0, 0, 0], [0xff, 0, 0, 0]].concat());
    for (bytes, message) in [
        (golden("compressed.bin"), "compressed"),
        (golden("big_endian.bin"), "byte order `big`"),
        (good[..good.len() - 30].to_vec(), "no directory"),
        (zip(&[entry("m/other", b"")]), "without data.pkl"),
        (zip(&[entry("a/data.pkl", &pickle), entry("b/data.pkl", &pickle)]), "two files data.pkl"),
        (zip(&[entry("m/data.pkl", &pickle), entry("m/data.pkl", &pickle)]), "two entries named"),
        (past, "reach past"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n".to_vec(), "Git LFS pointer"),
        (b"hello, this is no file of weights at all".to_vec(), "length of the header"),
    ] {
        let error = refusal(&bytes);
        assert!(error.to_string().contains(message) && error.help_text().is_some(), "{error}, expected {message}");
    }
    let legacy = golden("legacy.bin");
    for cut in [15, 40, 300, legacy.len() - 1] {
        assert!(tensors(&legacy[..cut]).is_err(), "{cut}");
    }
    assert!(refusal(&[legacy, vec![0]].concat()).to_string().contains("1 bytes after"));
}

#[test]
fn hostile_programs_end_soon() {
    let deep: Vec<u8> = [b")".to_vec(), vec![0x85; 1 << 20]].concat();
    // A long list that is converted to dictionaries and tuples many times.
    let mut copies = b"](".to_vec();
    copies.extend(b"))\x86".repeat(1 << 16));
    copies.extend(b"eq\x00");
    copies.extend(b"ccollections\nOrderedDict\nh\x00\x85R".repeat(1 << 12));
    let keys = [b"X\x00\x00\x10\x00".to_vec(), vec![b'k'; 1 << 20], b"q\x01".to_vec()].concat();
    let mut storages = keys;
    for _ in 0..1 << 14 {
        storages.extend(b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nh\x01Nh\x00tQ".map(|b| b));
    }
    for (what, program) in
        [("nesting", deep), ("copies", copies), ("storages", storages), ("marks", vec![b'('; 1 << 20])]
    {
        let start = Instant::now();
        assert!(tensors(&archive(Pickle::new().op(&program).end(), &[])).is_err(), "{what}");
        assert!(start.elapsed() < Duration::from_secs(5), "{what}");
    }
}

proptest! {
    #[test]
    fn a_damaged_file_never_panics_and_accepted_tensors_can_be_read(
        file in prop::sample::select(vec!["zip.bin", "protocol4.bin", "protocol5_zip64.bin", "legacy.bin", "untyped.bin"]),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in prop::option::weighted(0.1, any::<prop::sample::Index>()),
    ) {
        let mut bytes = golden(file);
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        for tensor in tensors(&bytes).unwrap_or_default() {
            let mut out = vec![0; tensor.nbytes];
            tensor.read(&bytes.as_slice(), 0, &mut out).unwrap();
        }
    }

    #[test]
    fn a_random_program_never_panics(
        program in prop::collection::vec(
            prop::sample::select(b"(02])}tRQbsuaeqhNKMJXUc\x85\x86\x87\x88\x89\x93\x94\x8a\x8c\x00\x01\x02\n.".to_vec()), 0..200),
    ) {
        let _ = tensors(&archive(Pickle::new().op(&program).end(), &[]));
        let legacy = [&golden("legacy.bin")[..15], &program].concat();
        let _ = tensors(&legacy);
    }
}
