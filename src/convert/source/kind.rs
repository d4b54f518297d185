//! Says what a path holds that a conversion reads: a Hugging Face checkpoint, a pack, or a GGUF file.

use super::layout::Layout;
use super::{foreign, gguf, older_pack};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::{self, JSON_NAME};
use crate::output::{Inputs, refuse_within};
use std::path::{Path, PathBuf};

/// Model at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceKind {
    /// Hugging Face checkpoint: a directory, a weight file, or a pack of an older program.
    Checkpoint(PathBuf),
    /// Pack, with the path of its description.
    Pack(PathBuf),
    /// GGUF file; of a split model its first file.
    Gguf(PathBuf),
}

impl SourceKind {
    /// Determines what is at `path`. A directory with weights of a checkpoint is one, whatever else it holds; otherwise
    /// a pack takes precedence over the only GGUF file. A missing path counts as a checkpoint, whose opening reports
    /// the error.
    ///
    /// # Errors
    /// It is a file of another format, or the system cannot tell what it is.
    pub fn of(path: &Path) -> Result<SourceKind> {
        let checkpoint = || SourceKind::Checkpoint(path.to_path_buf());
        match files::find(path)? {
            Some(found) if found.is_dir() => {}
            Some(_) => return SourceKind::of_file(path),
            None => return Ok(checkpoint()),
        }
        if Layout::find(path).is_ok() {
            return Ok(checkpoint());
        }
        let description = path.join(JSON_NAME);
        if files::is_file(&description)? {
            return Ok(SourceKind::Pack(description));
        }
        Ok(match &gguf::files_in(path)?[..] {
            [only] => SourceKind::Gguf(only.clone()),
            _ => checkpoint(),
        })
    }

    fn of_file(path: &Path) -> Result<SourceKind> {
        if gguf::Gguf::is_at(path) {
            return Ok(SourceKind::Gguf(path.to_path_buf()));
        }
        if path.file_name().is_some_and(|name| name == JSON_NAME) && !older_pack::is_description(path)? {
            return Ok(SourceKind::Pack(path.to_path_buf()));
        }
        foreign::refuse(path)?;
        Ok(SourceKind::Checkpoint(path.to_path_buf()))
    }

    /// Adds the files of the model to those that outputs of a command must not replace.
    pub fn add_to(&self, inputs: Inputs) -> Inputs {
        match self {
            SourceKind::Checkpoint(path) => inputs.checkpoints([path]),
            SourceKind::Pack(json) => inputs.packs([json.with_file_name("")], &iebin::members()),
            SourceKind::Gguf(file) => inputs.files(gguf::parts_of(file)),
        }
    }

    /// Fails if files with these names in `out_dir` would replace files of the model, or lie in a checkpoint.
    ///
    /// # Errors
    /// They would.
    pub(in crate::convert) fn refuse_output(&self, out_dir: &Path, names: &[&str]) -> Result<()> {
        match self {
            SourceKind::Checkpoint(path) => refuse_within(path, out_dir).help("choose another --out-dir"),
            SourceKind::Pack(_) | SourceKind::Gguf(_) => {
                let allowed = self.add_to(Inputs::default()).refuse_members(out_dir, names);
                allowed.map_err(|e| Error::usage(e.cause().to_string()).at(out_dir).help("choose another --out-dir"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_a_checkpoint_a_pack_or_a_gguf_file() {
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str| home.path().join(name);
        for (file, text) in [
            ("checkpoint/model.safetensors", "x"),
            ("pack/model.ie.json", r#"{"created_by": "iec", "tensors": []}"#),
            ("older/model.ie.json", r#"{"tensors": []}"#),
            ("both/model.ie.json", r#"{"created_by": "iec", "tensors": []}"#),
            ("both/model.safetensors", "x"),
            ("one/m-00001-of-00002.gguf", "GGUF"),
            ("one/m-00002-of-00002.gguf", "GGUF"),
            ("two/a.gguf", "GGUF"),
            ("two/b.gguf", "GGUF"),
        ] {
            std::fs::create_dir_all(at(file).parent().unwrap()).unwrap();
            std::fs::write(at(file), text).unwrap();
        }
        let checkpoint = |name: &str| SourceKind::Checkpoint(at(name));
        let cases = [
            ("checkpoint", checkpoint("checkpoint")),
            ("checkpoint/model.safetensors", checkpoint("checkpoint/model.safetensors")),
            ("pack", SourceKind::Pack(at("pack/model.ie.json"))),
            ("pack/model.ie.json", SourceKind::Pack(at("pack/model.ie.json"))),
            ("older", checkpoint("older")),
            ("older/model.ie.json", checkpoint("older/model.ie.json")),
            ("both", checkpoint("both")),
            ("one", SourceKind::Gguf(at("one/m-00001-of-00002.gguf"))),
            ("two", checkpoint("two")),
            ("two/b.gguf", SourceKind::Gguf(at("two/b.gguf"))),
            ("missing", checkpoint("missing")),
        ];
        let wrong: Vec<_> = cases.iter().filter(|(name, kind)| SourceKind::of(&at(name)).unwrap() != *kind).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        std::fs::write(at("model.onnx"), "x").unwrap();
        assert!(SourceKind::of(&at("model.onnx")).is_err());
    }

    #[test]
    fn outputs_do_not_replace_files_of_the_model() {
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str| home.path().join(name);
        let names = ["model.ie.json", "model.ie.bin"];
        let pack = SourceKind::Pack(at("pack/model.ie.json"));
        assert!(pack.refuse_output(&at("pack"), &names).is_err());
        pack.refuse_output(&at("pack/below"), &names).unwrap();
        let gguf = SourceKind::Gguf(at("m-00001-of-00002.gguf"));
        gguf.refuse_output(home.path(), &names).unwrap();
        assert!(gguf.refuse_output(home.path(), &["m-00002-of-00002.gguf"]).is_err());
        let checkpoint = SourceKind::Checkpoint(home.path().to_path_buf());
        assert!(checkpoint.refuse_output(&at("pack"), &names).is_err());
    }
}
