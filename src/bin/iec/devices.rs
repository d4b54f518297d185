//! `iec devices`: lists GPUs and compares the results of their kernels with those of the CPU.

use crate::console;
use crate::global::Global;
use iec::error::{Error, Result};
use iec::report::table::Table;
use iec::runtime::device::DeviceInfo;
use iec::runtime::open::{GpuList, list_gpus};
use iec::selfcheck::{self, CheckOptions, Report};
use iec::units::human_bytes;
use serde_json::{Value, json};

/// Arguments of `iec devices`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec devices
  iec devices --check
  iec devices --check --device cuda:1 --json

--check runs every kernel of `iec run --device cuda` on random numbers and odd shapes, and compares the results with
those of the CPU. The worst error is relative to the largest error that rounding may cause: more than 1 is wrong. Then
--check measures the speed of copies, matrix products and attention. All this takes about a minute. Exit code 4 if a
kernel is wrong, 5 if there is no GPU to check.")]
pub struct Args {
    /// Compare every kernel with the CPU, and measure the speed
    #[arg(long)]
    check: bool,
    /// The GPU to check: cuda or cuda:N [default: cuda:0]
    #[arg(long, value_name = "DEVICE", value_parser = parse_device, requires = "check")]
    device: Option<usize>,
    /// With --check: check fewer shapes, and measure no speed
    #[arg(long, requires = "check")]
    quick: bool,
    /// Print the report as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

fn parse_device(text: &str) -> std::result::Result<usize, String> {
    let word = text.to_ascii_lowercase();
    let number = match word.strip_prefix("cuda") {
        Some("") => Some(0),
        Some(rest) => rest.strip_prefix(':').and_then(|number| number.parse().ok()),
        None => None,
    };
    number.ok_or_else(|| "expected cuda or cuda:N".into())
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    match args.check {
        true => check(&args, global),
        false => list(args.json, global),
    }
}

/// Lists the GPUs; a machine without GPUs is no error.
fn list(json: bool, global: &Global) -> Result<()> {
    let GpuList { driver, gpus } = match list_gpus() {
        Ok(list) => list,
        Err(why) => {
            return match json {
                true => console::print_json(&json!({"cuda": Value::Null, "devices": [], "reason": why.to_string()})),
                false => console::print_line(format_args!("no usable GPU: {why}")),
            };
        }
    };
    if json {
        let device = |(number, found): (usize, &Result<(DeviceInfo, Option<u64>)>)| match found {
            Ok((info, free)) => describe(info, *free),
            Err(why) => json!({"number": number, "usable": false, "reason": why.to_string()}),
        };
        let devices: Vec<Value> = gpus.iter().enumerate().map(device).collect();
        return console::print_json(&json!({"cuda": driver, "devices": devices}));
    }
    let mut table = Table::new(&[">number", "name", ">capability", ">multiprocessors", ">memory", ">free"]);
    for (number, found) in gpus.iter().enumerate() {
        let cells = match found {
            Ok((info, free)) => [
                info.name.clone(),
                capability(info),
                info.multiprocessors.to_string(),
                human_bytes(info.memory),
                free.map_or("?".into(), human_bytes),
            ],
            Err(_) => ["cannot be used", "-", "-", "-", "-"].map(String::from),
        };
        table.row([number.to_string()].into_iter().chain(cells));
    }
    console::print(&table)?;
    gpus.iter().filter_map(|found| found.as_ref().err()).try_for_each(console::print_line)?;
    global.note(format_args!("the driver supports CUDA {driver}; select a GPU with --device cuda:N"));
    Ok(())
}

fn capability(info: &DeviceInfo) -> String {
    format!("{}.{}", info.capability.0, info.capability.1)
}

fn describe(info: &DeviceInfo, free: Option<u64>) -> Value {
    json!({
        "number": info.ordinal,
        "usable": true,
        "name": info.name,
        "capability": capability(info),
        "multiprocessors": info.multiprocessors,
        "memory_bytes": info.memory,
        "memory_free_bytes": free,
        "simulated": info.is_simulated(),
    })
}

fn check(args: &Args, global: &Global) -> Result<()> {
    let report = selfcheck::run(args.device.unwrap_or(0), CheckOptions { quick: args.quick })?;
    let failed: Vec<&str> = report.failed().map(|kernel| kernel.kernel.as_str()).collect();
    if args.json {
        let mut line = json!({
            "ok": failed.is_empty(),
            "cuda": report.device.driver,
            "device": describe(&report.device, None),
        });
        if let (Value::Object(line), Value::Object(rest)) = (&mut line, json!(report)) {
            line.extend(rest);
        }
        console::print_json(&line)?;
    } else {
        print(&report)?;
    }
    let kernels = report.kernels.len();
    match failed.first() {
        Some(first) => Err(Error::refused(format!(
            "{} of {kernels} kernels gave wrong results, the first is {first}",
            failed.len()
        ))
        .help("use --device cpu, and report the GPU, its driver and the output of this command")),
        None => {
            global.note(format_args!(
                "{}: {kernels} kernels give the results of the CPU; {:.0} s",
                report.device.name, report.seconds
            ));
            Ok(())
        }
    }
}

fn print(report: &Report) -> Result<()> {
    let mut table = Table::new(&["kernel", ">cases", ">worst error", "result"]);
    for kernel in &report.kernels {
        let result = if kernel.ok { "ok" } else { "FAILED" };
        table.row([kernel.kernel.clone(), kernel.cases.to_string(), format!("{:.3}", kernel.worst), result.into()]);
    }
    console::print(&table)?;
    for kernel in report.failed() {
        let failure = kernel.failure.as_deref().unwrap_or_default();
        console::print_line(format_args!("\nFAILED  {}\n        {failure}", kernel.kernel))?;
    }
    if report.measurements.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(&["measured", ">time", ">GB/s", ">TFLOPS"]);
    let number = |number: Option<f64>| number.map_or(String::new(), |number| format!("{number:.0}"));
    for measured in &report.measurements {
        let time = format!("{:.1} µs", measured.seconds * 1e6);
        table.row([measured.what.clone(), time, number(measured.gb_per_s), number(measured.tflops)]);
    }
    console::print(format_args!("\n{table}"))
}
