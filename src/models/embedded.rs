//! The model that is embedded in this library: stories260K, trained on TinyStories, as a Hugging Face checkpoint of
//! one megabyte.

use crate::convert::pack::{PackOptions, pack};
use crate::error::{Context, Result};
use crate::output::write_atomically;
use crate::session::{Session, SessionOptions};
use std::path::{Path, PathBuf};

/// Name of the model in reports.
pub const NAME: &str = "embedded:stories260k";

/// Chat template of the model. It was trained on stories and not on conversations: it continues the messages, one per
/// line, as the text of a story.
const CHAT_TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}{{ message.content }}\
     {% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}";

/// Files of the checkpoint: name and contents.
const FILES: &[(&str, &[u8])] = &[
    ("chat_template.jinja", CHAT_TEMPLATE.as_bytes()),
    ("config.json", include_bytes!("../../assets/stories260k/config.json")),
    ("generation_config.json", include_bytes!("../../assets/stories260k/generation_config.json")),
    ("tokenizer.json", include_bytes!("../../assets/stories260k/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../assets/stories260k/tokenizer_config.json")),
    ("model.safetensors", include_bytes!("../../assets/stories260k/model.safetensors")),
];

/// Opens the model for text generation.
///
/// # Errors
/// Its files cannot be written into the directory for temporary files, or the engine cannot run it with these options.
pub fn open_session(options: &SessionOptions) -> Result<Session> {
    let home = tempfile::tempdir()?;
    let packed = pack_into(home.path())?;
    let name = options.name.clone().or_else(|| Some(NAME.into()));
    // The weights stay mapped after their file is removed with the directory.
    Session::open(&packed, &SessionOptions { name, ..options.clone() })
}

/// Packs the model into `dir`, which exists, and returns the directory of the pack.
///
/// # Errors
/// A file cannot be written.
pub fn pack_into(dir: &Path) -> Result<PathBuf> {
    let (checkpoint, packed) = (dir.join("checkpoint"), dir.join("pack"));
    write_to(&checkpoint)?;
    pack(&PackOptions { hf_dir: checkpoint, out_dir: packed.clone(), ..PackOptions::default() })?;
    Ok(packed)
}

/// Writes the checkpoint into `dir`, which is created if missing.
pub fn write_to(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).at(dir)?;
    FILES.iter().try_for_each(|(name, bytes)| write_atomically(&dir.join(name), bytes))
}
