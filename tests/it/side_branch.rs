//! Tests a side branch: layers that add a normalized projection of the residual stream.

use crate::common::{all_logits, fixture};
use crate::cuda::on_gpu;
use crate::golden::fp32;
use iec::adapter::{Adapter, Change, LowRank};
use iec::catalogue::LayerTensor;
use iec::convert::pack::{PackOptions, pack};
use iec::dtype::DType;
use iec::iebin::IebinReader;
use iec::rng::Rng;
use iec::runtime::adapters::AdapterSet;
use iec::runtime::calibrate;
use iec::runtime::{Engine, EngineOptions};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Packs the fixture with a side branch whose projections have numbers of this spread.
fn packed(out: &Path, spread: f64) -> PathBuf {
    let (source, mut rng) = (fixture("llama-gqa"), Rng::new(7));
    let dir = out.join(format!("hf-{spread}"));
    std::fs::create_dir(&dir).unwrap();
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    config["side_branch"] = true.into();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let (layers, hidden) = (config["num_hidden_layers"].as_u64().unwrap(), config["hidden_size"].as_u64().unwrap());
    let shards =
        [1, 2].map(|part| std::fs::read(source.join(format!("model-0000{part}-of-00002.safetensors"))).unwrap());
    let plain = shards.each_ref().map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    let mut added = BTreeMap::new();
    for layer in 0..layers {
        let mut add = |name: &str, shape: &[usize], mean: f64, spread: f64| {
            let value = |_| ((mean + spread * rng.next_normal()) as f32).to_le_bytes();
            let data: Vec<u8> = (0..shape.iter().product::<usize>()).flat_map(value).collect();
            added.insert(format!("model.layers.{layer}.{name}.weight"), (shape.to_vec(), data));
        };
        let hidden = hidden as usize;
        add("side_norm", &[hidden], 1.0, 0.1);
        add("side_proj", &[hidden, hidden], 0.0, spread);
        add("side_post_norm", &[hidden], 1.0, 0.1);
    }
    let mut tensors: BTreeMap<String, TensorView<'_>> = plain.iter().flat_map(SafeTensors::tensors).collect();
    for (name, (shape, data)) in &added {
        tensors.insert(name.clone(), TensorView::new(Dtype::F32, shape.clone(), data).unwrap());
    }
    serialize_to_file(tensors, None, &dir.join("model.safetensors")).unwrap();
    let out_dir = out.join(format!("pack-{spread}"));
    pack(&PackOptions { hf_dir: dir, out_dir: out_dir.clone(), ..PackOptions::default() }).unwrap();
    out_dir
}

fn open(pack: &Path, options: EngineOptions) -> Engine {
    Engine::open(&IebinReader::open(pack).unwrap(), &options).unwrap()
}

fn farthest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn a_side_branch_is_computed_on_both_devices_with_adapters_and_calibrated() {
    let dir = tempfile::tempdir().unwrap();
    let text: Vec<u32> = (0..40).map(|i| 1 + i * 7 % 200).collect();
    let original = all_logits(&mut crate::golden::Case::fixture("llama-gqa").engine(fp32()), &text);
    assert_eq!(all_logits(&mut open(&packed(dir.path(), 0.0), fp32()), &text), original, "a branch of zeros");
    let pack = packed(dir.path(), 0.2);
    let (mut cpu, mut gpu) = (open(&pack, fp32()), open(&pack, on_gpu(fp32())));
    let plain = all_logits(&mut cpu, &text);
    assert!(farthest(&plain, &original) > 0.1 && farthest(&plain, &all_logits(&mut gpu, &text)) < 1e-3);
    let (hidden, mut rng) = (cpu.config().hidden, Rng::new(9));
    let mut numbers = || (0..2 * hidden).map(|_| (0.3 * rng.next_normal()) as f32).collect::<Vec<f32>>();
    let low_rank = LowRank { rank: 2, scale: 0.5, a: numbers(), b: numbers(), dtype: DType::F32, int8: [None, None] };
    let change = Change { low_rank: Some(low_rank), ..Change::default() };
    let changes = BTreeMap::from([("model.layers.1.side_proj.weight".to_string(), vec![change])]);
    let adapter = Adapter { hash: "side".into(), changes };
    let adapted = [&mut cpu, &mut gpu].map(|engine| {
        let bound = engine.adapter_binder().bind(&adapter).unwrap();
        engine.set_adapters(AdapterSet::new([(bound, 1.0)]).unwrap());
        all_logits(engine, &text)
    });
    assert!(farthest(&adapted[0], &plain) > 1e-2 && farthest(&adapted[0], &adapted[1]) < 1e-3);
    assert!(calibrate::sites(cpu.config(), false).iter().any(|(_, shape)| shape.name == "layers.1.side"));
    assert_eq!(LayerTensor::of("side_proj.weight").unwrap().gguf, "side_proj.weight");
}
