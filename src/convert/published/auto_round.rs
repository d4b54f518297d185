//! `auto-round`: matrices in the layout of GPTQ or AWQ, with bits by module in `extra_config`.

use super::format::{Describe, Format, Settings};
use super::names::spellings;
use super::{awq, gptq};
use crate::convert::arch::Fields;
use crate::error::Result;
use std::collections::BTreeMap;

pub(super) const AUTO_ROUND: Format = Format {
    name: "AutoRound",
    methods: &["auto-round", "auto_round", "intel/auto-round"],
    markers: &[".qweight"],
    open,
    ..Format::NONE
};

fn open(settings: &Settings<'_>) -> Result<Describe> {
    let fields = settings.fields()?;
    let packing = fields.word_opt("packing_format")?.unwrap_or_default();
    let of_awq = match packing.strip_prefix("auto_round:").unwrap_or(packing) {
        "auto_gptq" | "gptq" | "gptqmodel" => false,
        "auto_awq" | "awq" => true,
        _ => {
            let expected = "expected auto_round:auto_gptq or auto_round:auto_awq";
            return Err(fields.unsupported("packing_format", expected));
        }
    };
    // Layouts of AWQ have 4 bits only.
    let bits_of = |fields: &Fields<'_>| match gptq::bits(fields)? {
        bits if of_awq && bits != 4 => Err(fields.unsupported("bits", "expected 4 with auto_awq")),
        bits => Ok(bits),
    };
    let usual = gptq::Module { bits: bits_of(&fields)?, group: gptq::group(&fields, "group_size")?, add: 1 };
    let mut own = BTreeMap::new();
    if let Some(extra) = fields.object_opt("extra_config")? {
        for key in extra.keys() {
            let Some(module) = extra.object_opt(key)? else { continue };
            // Modules of 16 bits are floats, and have no codes to describe.
            if module.count_opt("bits")?.is_some_and(|bits| bits <= 8) {
                let bits = bits_of(&module)?;
                let has_group = module.get("group_size").is_some();
                let group = if has_group { gptq::group(&module, "group_size")? } else { usual.group };
                own.insert(key.to_string(), gptq::Module { bits, group, ..usual });
            }
        }
    }
    Ok(Box::new(move |parts, qweight| {
        let module = spellings(parts.stem).find_map(|name| own.get(&name).copied()).unwrap_or(usual);
        match of_awq {
            true => awq::matrix(parts, qweight, module.group, "AutoRound 4 bit"),
            false => gptq::matrix(parts, qweight, module, "AutoRound"),
        }
    }))
}
