//! Options that select the device a model is computed on.

use crate::global::Global;
use crate::names::offering;
use iec::error::{Error, Result};
use iec::runtime::Engine;
use iec::runtime::device::{Devices, Offload};

/// CPU or GPUs.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DeviceArgs {
    /// Device that computes: auto, cpu, cuda or cuda:N (cuda:N,M... for several GPUs; IEC_ISA=amx, avx512, avxvnni,
    /// avx2, neon or scalar forces the CPU's instruction set) [default: auto, the first GPU that can be used]
    #[arg(long, value_name = "DEVICE", env = "IEC_DEVICE", hide_possible_values = true)]
    #[arg(value_parser = offering(&["auto", "cpu", "cuda"], parse_device))]
    device: Option<Device>,
    /// Number of layers that run on GPUs (the last ones of the model; the CPU computes the rest, and all of them with
    /// 0), or auto: as many as fit
    #[arg(long, value_name = "N", hide_possible_values = true, value_parser = offering(&["auto"], parse_layers))]
    gpu_layers: Option<Layers>,
}

/// Value of `--device`; `None` for Level Zero, which is not supported.
#[derive(Debug, Clone, Copy)]
struct Device(Option<Devices>);

/// Value of `--gpu-layers`; `None` for `auto`.
#[derive(Debug, Clone, Copy)]
struct Layers(Option<usize>);

fn parse_device(text: &str) -> std::result::Result<Device, String> {
    let word = text.to_ascii_lowercase();
    match word.as_str() {
        "ze" => Ok(Device(None)),
        word => word.parse().map(|devices| Device(Some(devices))),
    }
}

fn parse_layers(text: &str) -> std::result::Result<Layers, String> {
    match text {
        "auto" => Ok(Layers(None)),
        number => number.parse().map(|n| Layers(Some(n))).map_err(|_| "expected a number or auto".into()),
    }
}

impl DeviceArgs {
    /// Returns the GPUs to use and the number of layers that they compute.
    ///
    /// # Errors
    /// Exit code 5 for devices that are not supported, 2 where options contradict each other.
    pub fn offload(&self) -> Result<Offload> {
        let layers = self.gpu_layers.and_then(|layers| layers.0);
        match self.device.unwrap_or(Device(Some(Devices::Auto))).0 {
            Some(_) if layers == Some(0) => Ok(Offload { devices: Devices::Cpu, layers: None }),
            Some(Devices::Cpu) if self.gpu_layers.is_some() => {
                Err(Error::usage("--gpu-layers cannot be used with --device cpu")
                    .help("leave one of the two out; the variable IEC_DEVICE sets --device, too"))
            }
            Some(devices) => Ok(Offload { devices, layers }),
            None => Err(Error::engine("device `ze` (Level Zero) is not supported")
                .help("docs/decisions/0010 says why; use --device cpu")),
        }
    }

    /// Prints a note if a model that should run on a GPU runs elsewhere, or only some of its layers run there.
    pub fn note(&self, engine: &Engine, global: &Global) {
        let layers = engine.config().n_layers;
        let fit: usize = engine.parts().iter().filter(|part| part.device.is_some()).map(|part| part.layers.len()).sum();
        match engine.without_gpu() {
            None if fit > 0 && fit < layers && self.gpu_layers.is_none() => {
                global.note(format!("{fit} of {layers} layers fit the GPU; the CPU computes the others"));
            }
            Some(why) if self.device.is_some() || self.gpu_layers.is_some() => {
                global.note(format!("the CPU computes: {why}"))
            }
            Some(why) => iec::progress::detail(1, || format!("no GPU is used: {why}")),
            None => {}
        }
    }
}
