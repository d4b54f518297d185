//! Makes the messages and the service of `src/serve/grpc` from their `.proto` files. The first argument is the directory
//! of the `.proto` files, the second one that of the results: a Rust file for each package, and `descriptors.bin`, which
//! clients get by reflection.

use prost::Message;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(from), Some(to)) = (arguments.next(), arguments.next()) else { return Err("expected two directories".into()) };
    let mut descriptors = protox::compile(["vllm_engine.proto"], [from])?;
    descriptors.file.iter_mut().for_each(|file| file.source_code_info = None);
    std::fs::write(to.join("descriptors.bin"), descriptors.encode_to_vec())?;
    let makes = tonic_prost_build::configure().build_client(false).disable_comments(["."]).out_dir(to);
    makes.compile_fds(descriptors)?;
    Ok(())
}
