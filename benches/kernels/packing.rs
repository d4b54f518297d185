//! Benchmarks quantization, as `iec pack` does it, in millions of weights per second on one thread.

use super::count::{self, counting};
use super::{best, values};
use iec::quant::Quantizer;
use iec::quant_spec::{Method, TensorQuant};
use iec::runtime::cpu::Cpu;
use iec::scheme::{Granularity, QuantSpec, ScaleType, Scheme, TileLayout};

/// Runs the measurements whose names match the filter, or all if it is empty.
pub fn measure(cpu: &Cpu, filter: &[String]) {
    let int = |scheme, granularity| QuantSpec { scheme, granularity, symmetric: true, scale_dtype: ScaleType::F16 };
    let nl4 = QuantSpec { scheme: Scheme::Nl4, ..QuantSpec::Q4_0 };
    for (name, spec, method) in [
        ("pack q4_0 rtn", QuantSpec::Q4_0, Method::Rtn),
        ("pack q4_0 search", QuantSpec::Q4_0, Method::Search),
        ("pack nl4 rtn", nl4, Method::Rtn),
        ("pack mxfp4 rtn", QuantSpec::MXFP4, Method::Rtn),
        ("pack int4 g128 rtn", int(Scheme::Int4, Granularity::Group(128)), Method::Rtn),
        ("pack int8 row rtn", int(Scheme::Int8, Granularity::Row), Method::Rtn),
    ] {
        if filter.is_empty() || filter.iter().any(|f| name.contains(f.as_str())) {
            one(cpu, name, TensorQuant { spec, method, clamp: None, percentile: None });
        }
    }
}

fn one(cpu: &Cpu, name: &str, quant: TensorQuant) {
    let (rows, cols) = (64, 2048);
    let quantizer = Quantizer::new(quant, rows, cols).expect("a supported scheme");
    let layout = TileLayout::new(quant.spec, rows, cols).expect("a layout");
    let (weights, mut tiles) = (values(rows * cols), vec![0; layout.nbytes()]);
    let seconds = best(cpu, 10, || quantizer.encode_tiles(&weights, &mut tiles).expect("finite weights"));
    match counting() {
        true => count::print(name, rows * cols),
        false => println!("{name:<34} {:>10.1} million weights/s", (rows * cols) as f64 / seconds / 1e6),
    }
}
