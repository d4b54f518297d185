//! Tests that the examples do what their first lines describe, with the model that is embedded in the library.

use crate::common::{fixture, iec, packed};

#[allow(dead_code)]
#[path = "../../examples/convert.rs"]
mod convert;
#[allow(dead_code)]
#[path = "../../examples/generate.rs"]
mod generate;

#[test]
fn generate_writes_the_text_of_iec_run() {
    let pack = packed("stories260k");
    let run = iec().args(["run", "--quiet", "--prompt", "Once upon a time", "--model-dir"]).arg(pack.path()).assert();
    let expected = String::from_utf8(run.success().get_output().stdout.clone()).unwrap();
    for path in [None, Some(pack.path())] {
        let mut text = Vec::new();
        let metrics = generate::generate("Once upon a time", path, &mut text).unwrap();
        assert_eq!(String::from_utf8(text).unwrap() + "\n", expected);
        assert!(metrics.generated_tokens > 1 && metrics.steps > 1 && metrics.step_seconds > 0.0, "{metrics:?}");
    }
}

#[test]
fn convert_makes_a_quantized_pack_that_generates() {
    let out = tempfile::tempdir().unwrap();
    let summary = convert::convert(&fixture("stories260k"), out.path()).unwrap();
    assert!(summary.quantized_tensors > 0 && summary.bits_per_weight < 32.0, "{summary:?}");
    let mut text = Vec::new();
    generate::generate("Once upon a time", Some(out.path()), &mut text).unwrap();
    assert!(!text.is_empty());
    assert!(convert::convert(&fixture("stories260k"), out.path()).is_err(), "a pack is not replaced");
}
