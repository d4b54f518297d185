//! Names the formats of models that this program does not read, so that an error says what a file is.

use crate::error::{Error, Result};
use crate::files;
use std::path::Path;

/// Ends of file names, and the names of the formats.
const FORMATS: [(&str, &str); 10] = [
    ("onnx", "an ONNX model"),
    ("h5", "HDF5 weights of Keras or TensorFlow"),
    ("keras", "a Keras model"),
    ("tflite", "a TensorFlow Lite model"),
    ("msgpack", "weights of Flax"),
    ("npz", "weights of NumPy or an old MLX"),
    ("mlmodel", "a Core ML model"),
    ("engine", "a TensorRT engine"),
    ("nemo", "a NeMo archive"),
    ("exl2", "an ExLlamaV2 model"),
];

/// Fails if the end of the name of the file `path` is that of a format that is not read.
///
/// # Errors
/// It is, or the system cannot tell what it is.
pub(in crate::convert) fn refuse(path: &Path) -> Result<()> {
    if !files::is_file(path)? {
        return Ok(());
    }
    let end = path.extension().and_then(|end| end.to_str()).unwrap_or_default().to_ascii_lowercase();
    match FORMATS.iter().find(|(known, _)| *known == end) {
        Some((_, words)) => {
            Err(Error::unsupported(format!("found {words}, expected a checkpoint, a pack or a GGUF file"))
                .at(path)
                .help("name the checkpoint of safetensors or PyTorch weights that it was made from"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_another_format_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for (name, content, expected) in
            [("model.onnx", "\x08\x07\x12\x07pytorch", "an ONNX model"), ("weights.NPZ", "PK\x03\x04", "old MLX")]
        {
            std::fs::write(dir.path().join(name), content).unwrap();
            let refused = refuse(&dir.path().join(name)).unwrap_err().to_string();
            assert!(refused.contains(expected), "{refused}");
        }
        std::fs::write(dir.path().join("model.safetensors"), "").unwrap();
        refuse(&dir.path().join("model.safetensors")).unwrap();
        refuse(dir.path()).unwrap();
        refuse(&dir.path().join("missing")).unwrap();
    }
}
