//! Table of the formats that are read, and of those that are refused by name.

use super::format::Format;
use super::{auto_round, awq, bitsandbytes, compressed_tensors, fp8, gptq, mlx, modelopt, mxfp4, torchao};

/// All formats that are read.
pub(super) const FORMATS: [Format; 10] = [
    fp8::FP8,
    compressed_tensors::COMPRESSED_TENSORS,
    awq::AWQ,
    gptq::GPTQ,
    auto_round::AUTO_ROUND,
    bitsandbytes::BITSANDBYTES,
    modelopt::MODELOPT,
    mlx::MLX,
    torchao::TORCHAO,
    mxfp4::MXFP4,
];

/// Formats that are known and not read: value of `quant_method`, and the reason.
pub(super) const REFUSED: [(&str, &str); 15] = [
    ("exl3", "EXL3 stores trellis codes behind Hadamard transforms"),
    ("exl2", "EXL2 stores groups of different widths in the order of its GPU kernel"),
    ("aqlm", "AQLM stores indices into learned codebooks"),
    ("quip", "QuIP# stores indices into lattices behind Hadamard transforms"),
    ("quip_sharp", "QuIP# stores indices into lattices behind Hadamard transforms"),
    ("higgs", "HIGGS stores indices into grids behind Hadamard transforms"),
    ("hqq", "HQQ stores its groups in an order of its own"),
    ("vptq", "VPTQ stores indices of vectors"),
    ("spqr", "SpQR stores outliers beside its codes"),
    ("eetq", "EETQ stores weights in the order of a GPU kernel"),
    ("quanto", "quanto stores tensor subclasses in an order of their own"),
    ("bitnet", "BitNet stores ternary weights"),
    ("fbgemm_fp8", "fbgemm_fp8 clips activations, which its scales assume"),
    ("quark", "Quark has many kinds that depend on its export"),
    ("marlin", "Marlin stores weights in the order of a GPU kernel"),
];
