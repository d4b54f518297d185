//! `iec sign`: signs a pack with a key from a file, or makes such a key.

use crate::global::Global;
use crate::pack_arg::PackArg;
use iec::error::{Context, Error, Result};
use iec::files;
use iec::iebin;
use iec::output::{Inputs, Rules, Target};
use iec::session::dedup::DedupOptions;
use iec::signature::{self, PrivateKey};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec sign --new-key maker.pem
  iec sign packs/tinyllama --key maker.pem
  iec verify packs/tinyllama --key maker.pem.pub
  openssl genpkey -algorithm ed25519 -out maker.pem

The signature file has the layout of OpenSSF model signing. It contains the SHA-256 of every file that decides the
answers of the pack: description, weights, tokenizer, configuration and chat template. A pack whose files differ from
their recorded hashes is not signed. Keys are PEM files of Ed25519,
ECDSA P-256 or P-384. The tool `model_signing` can check signatures that were made
with ECDSA keys.")]
pub struct Args {
    #[command(flatten)]
    pack: PackArg,
    /// Private key (PKCS #8 in PEM, not encrypted)
    #[arg(long, value_name = "FILE", required_unless_present = "new_key")]
    key: Option<PathBuf>,
    /// Signature file to write [default: model.sig in the directory of the pack]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace the signature file if it is there
    #[arg(long)]
    overwrite: bool,
    /// Make a new Ed25519 key and sign nothing: the private key in FILE, readable only by its owner, and the public key
    /// in FILE.pub. A key that is there is never replaced
    #[arg(long, value_name = "FILE", conflicts_with_all = ["key", "out", "overwrite"])]
    new_key: Option<PathBuf>,
    /// Print a summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    if let Some(path) = &args.new_key {
        if let Some(pack) = args.pack.on_command_line() {
            return Err(Error::usage("--new-key: found a pack, which this option does not sign").at(pack).help(
                format!(
                    "make the key first with `iec sign --new-key {0}`, then sign with `iec sign {1} --key {0}`",
                    path.display(),
                    pack.display()
                ),
            ));
        }
        return new_key(path, &args, global);
    }
    let Some(key) = &args.key else { unreachable!("clap requires it without --new-key") };
    let dir = &args.pack.dir()?;
    let out = args.out.clone().unwrap_or_else(|| dir.join(signature::FILE_NAME));
    let inputs = Inputs::default().files([key]).packs([dir], &iebin::members());
    let target = Target::check(&out, Rules { inputs: &inputs, overwrite: args.overwrite, stdout: !args.json })?;
    let key = PrivateKey::open(key)?;
    let reader = DedupOptions::default().open_pack(dir).map_err(Error::while_opening_model)?;
    let (text, signature) = signature::sign(&reader, &key)?;
    target.write(&text)?;
    let (files, algorithm, digest) = (signature.files, signature.algorithm, &signature.key_sha256);
    let words = format!("signed {files} files with the {algorithm} key {digest}: {}", target.path().display());
    global.summarize(words, args.json, &json!({"out": out, "signature": signature}))
}

/// Makes a key. If only the private file exists, an earlier run was interrupted, and its public file is written.
/// Existing keys are never replaced: two files cannot change at the same moment, and the signatures of a lost key are
/// worthless.
fn new_key(path: &Path, args: &Args, global: &Global) -> Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".pub");
    let beside = PathBuf::from(beside);
    if files::exists(&beside)? {
        return Err(Error::usage("exists already").at(&beside).help("choose another name; a key is never replaced"));
    }
    let rules = Rules { inputs: &Inputs::default(), overwrite: false, stdout: false };
    let public = Target::check(&beside, rules)?;
    let key = match path.symlink_metadata() {
        Ok(found) if found.is_file() => PrivateKey::open(path)?,
        _ => write_key(path, &Target::check(path, rules)?)?,
    };
    public.write(key.public().to_pem().as_bytes())?;
    let digest = key.public().fingerprint();
    let words = format!(
        "made the key {digest}: keep {} secret and give {} to those who check your packs",
        path.display(),
        beside.display()
    );
    global.summarize(words, args.json, &json!({"private_key": path, "public_key": beside, "key_sha256": digest}))
}

fn write_key(path: &Path, target: &Target) -> Result<PrivateKey> {
    let (key, text) = PrivateKey::generate()?;
    let mut file = target.create_private()?;
    file.write_all(text.as_bytes()).at(path)?;
    file.commit()?;
    Ok(key)
}
