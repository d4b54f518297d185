//! Element types that this program knows only in order to refuse them by name: those of forks of llama.cpp, those that
//! llama.cpp removed, and those that hold activations.

use super::types::GgmlType;
use crate::error::Error;

/// Program whose files contain a type.
#[derive(Clone, Copy)]
enum Origin {
    /// ik_llama.cpp, a fork of llama.cpp.
    Ik,
    /// The fork of PrismML.
    Prism,
    /// bitnet.cpp; ik_llama.cpp uses the number for the same type.
    BitNet,
    /// llama.cpp before the type was removed.
    Removed,
}

/// Types by number. 142 and 143 also belonged to ik_llama.cpp before it removed these two.
/// Sources: `ggml/include/ggml.h` of ikawrakow/ik_llama.cpp, PrismML-Eng/llama.cpp and ggml-org/llama.cpp.
const FOREIGN: &[(u32, &str, Origin)] = &[
    (4, "Q4_2", Origin::Removed),
    (5, "Q4_3", Origin::Removed),
    (31, "Q4_0_4_4", Origin::Removed),
    (32, "Q4_0_4_8", Origin::Removed),
    (33, "Q4_0_8_8", Origin::Removed),
    (36, "I2_S", Origin::BitNet),
    (37, "IQ4_NL_4_8", Origin::Removed),
    (38, "IQ4_NL_8_8", Origin::Removed),
    (133, "Q6_0", Origin::Ik),
    (134, "IQ1_BN", Origin::Ik),
    (135, "IQ2_BN", Origin::Ik),
    (137, "IQ2_K", Origin::Ik),
    (138, "IQ3_K", Origin::Ik),
    (139, "IQ4_K", Origin::Ik),
    (140, "IQ5_K", Origin::Ik),
    (141, "IQ6_K", Origin::Ik),
    (142, "PQ2_0", Origin::Prism),
    (143, "PTQ1_0", Origin::Prism),
    (144, "IQ4_KS", Origin::Ik),
    (145, "IQ2_KS", Origin::Ik),
    (146, "IQ4_KSS", Origin::Ik),
    (151, "Q8_KV", Origin::Ik),
    (152, "IQ5_KS", Origin::Ik),
    (153, "IQ2_KT", Origin::Ik),
    (154, "IQ3_KT", Origin::Ik),
    (155, "IQ4_KT", Origin::Ik),
    (156, "IQ3_KS", Origin::Ik),
    (157, "IQ2_KL", Origin::Ik),
    (158, "IQ1_KT", Origin::Ik),
];

/// Numbers that ik_llama.cpp gives to its types, most of which hold several rows interleaved (`_R4`, `_R8`).
const IK: std::ops::RangeInclusive<u32> = 133..=399;

/// Returns the error for a type number that [`GgmlType::of`] does not have.
pub(super) fn refusal(id: u32) -> Error {
    let known = FOREIGN.iter().find(|row| row.0 == id);
    let (name, origin) = match known {
        Some((_, name, origin)) => (format!("type {name} (number {id})"), Some(*origin)),
        None => (format!("element type number {id}"), IK.contains(&id).then_some(Origin::Ik)),
    };
    let usual = || format!("use a file of one of the types {}", GgmlType::readable().join(", "));
    let refused = |why: &str| Error::unsupported(format!("found {name}, {why}"));
    match origin {
        Some(Origin::Ik) => refused("which belongs to ik_llama.cpp and is not supported")
            .help("get a file of the model that llama.cpp itself can read, or pack the original checkpoint"),
        Some(Origin::Prism) => {
            let why = "which belongs to PrismML's fork of llama.cpp and needs a Hadamard transform of the activations";
            refused(why).help("get the model as Q1_0 or Q2_0, or pack the original checkpoint")
        }
        Some(Origin::BitNet) => refused("which belongs to bitnet.cpp and is not supported")
            .help("get the model as TQ1_0 or TQ2_0, or pack the original checkpoint"),
        Some(Origin::Removed) => refused("which llama.cpp has removed").help(usual()),
        None => refused("which is not supported").help(usual()),
    }
}

/// Returns the error for a type of [`GgmlType`] that has no decoder.
pub(super) fn undecodable(kind: GgmlType) -> Error {
    match kind {
        GgmlType::Q8_1 | GgmlType::Q8_K => {
            let found = format!("found GGML type {kind}, expected a type for weights");
            Error::unsupported(format!("{found}: llama.cpp uses it for activations only, in memory"))
                .help("the file is damaged or was made by another program; get the model as Q8_0")
        }
        _ => Error::unsupported(format!("found GGML type {kind}, which is not supported"))
            .help(format!("use a file of one of the types {}", GgmlType::readable().join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_foreign_type_is_refused_with_its_name_and_its_program() {
        let cases = [
            (137, "IQ2_K", "ik_llama.cpp", "checkpoint"),
            (158, "IQ1_KT", "ik_llama.cpp", "checkpoint"),
            (212, "212", "ik_llama.cpp", "checkpoint"),
            (142, "PQ2_0", "Hadamard", "Q2_0"),
            (143, "PTQ1_0", "PrismML", "Q1_0"),
            (36, "I2_S", "bitnet.cpp", "TQ2_0"),
            (31, "Q4_0_4_4", "removed", "Q4_0"),
            (1011, "1011", "not supported", "IQ2_XXS"),
        ];
        for (id, name, program, help) in cases {
            assert!(GgmlType::of(id).is_err());
            let error = refusal(id);
            assert!(error.to_string().contains(name) && error.to_string().contains(program), "{error}");
            assert!(error.help_text().unwrap().contains(help), "{:?}", error.help_text());
        }
        assert!(FOREIGN.iter().all(|row| GgmlType::of(row.0).is_err()));
        assert!(undecodable(GgmlType::Q8_K).to_string().contains("activations"));
    }
}
