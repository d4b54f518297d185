//! Loss of a second quantization: of weights that are quantized in the source and are quantized again.
//!
//! The source holds codes, so the weights before its own quantization are not known. The error is measured between the
//! decoded codes of the source and the new codes; it comes on top of the error that the source has.

use serde::Serialize;

/// Tensors that are quantized twice, and what the second quantization adds. Tensors whose values the new codes hold
/// exactly are not counted.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Requantized {
    /// Number of tensors.
    pub tensors: usize,
    /// Mean over these tensors of their relative error: root mean square of the errors divided by that of the decoded
    /// weights.
    pub relative_rms_mean: f64,
    /// Largest relative error of a tensor.
    pub relative_rms_max: f64,
    /// Name of the tensor with this error.
    pub worst_tensor: String,
}

impl Requantized {
    /// Summarizes tensors, each with its relative error; `None` if there is none with an error.
    pub fn of<'a>(tensors: impl IntoIterator<Item = (&'a str, f64)>) -> Option<Requantized> {
        let lossy: Vec<(&str, f64)> = tensors.into_iter().filter(|(_, error)| *error > 0.0).collect();
        let (worst, most) = lossy.iter().copied().reduce(|worst, next| if next.1 > worst.1 { next } else { worst })?;
        Some(Requantized {
            tensors: lossy.len(),
            relative_rms_mean: lossy.iter().map(|(_, error)| error).sum::<f64>() / lossy.len() as f64,
            relative_rms_max: most,
            worst_tensor: worst.to_string(),
        })
    }

    /// Describes the loss in words, as a warning.
    pub fn warning(&self) -> String {
        let Requantized { tensors, relative_rms_mean, relative_rms_max, worst_tensor } = self;
        let [mean, most] = [relative_rms_mean, relative_rms_max].map(|error| 100.0 * error);
        format!(
            "warning: {tensors} tensors are quantized twice, because the source holds them quantized; the second \
             quantization adds a relative error of {mean:.2} % on average and of {most:.2} % in the worst tensor, \
             `{worst_tensor}`; quantize the original floats to avoid it"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_tensors_do_not_count_and_the_worst_is_named() {
        assert_eq!(Requantized::of([("a", 0.0)]), None);
        let found = Requantized::of([("a", 0.0), ("b", 0.01), ("c", 0.03), ("d", 0.02)]).unwrap();
        assert_eq!((found.tensors, found.relative_rms_max, &*found.worst_tensor), (3, 0.03, "c"));
        assert!((found.relative_rms_mean - 0.02).abs() < 1e-12);
        for words in ["3 tensors are quantized twice", "2.00 % on average", "3.00 %", "`c`"] {
            assert!(found.warning().contains(words), "{}", found.warning());
        }
    }
}
