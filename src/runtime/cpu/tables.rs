//! The table of fast kernels: one row per instruction set, chosen once at run time by asking the CPU.

use super::kernels::KernelTable;
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::scalar;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::error::{Error, Result};
use std::sync::OnceLock;

/// The environment variable that forces a row of the table, by name.
pub const ISA_VARIABLE: &str = "IEC_ISA";

/// Best first; the last row always answers.
static TABLES: &[KernelTable] = &[
    #[cfg(target_arch = "x86_64")]
    avx512::TABLE_BF16,
    #[cfg(target_arch = "x86_64")]
    avx512::TABLE,
    #[cfg(target_arch = "x86_64")]
    avx2::TABLE_VNNI,
    #[cfg(target_arch = "x86_64")]
    avx2::TABLE,
    #[cfg(target_arch = "aarch64")]
    neon::TABLE,
    scalar::TABLE,
];

impl KernelTable {
    /// The rows this CPU can run, best first.
    pub(super) fn all_detected() -> impl Iterator<Item = &'static KernelTable> {
        TABLES.iter().filter(|table| (table.detected)())
    }

    /// The best row this CPU can run.
    pub(super) fn best() -> &'static KernelTable {
        static BEST: OnceLock<&KernelTable> = OnceLock::new();
        BEST.get_or_init(|| Self::all_detected().next().expect("the scalar row always answers"))
    }

    /// The row with this name.
    ///
    /// # Errors
    /// There is none, or this CPU cannot run it.
    pub(super) fn named(name: &str) -> Result<&'static KernelTable> {
        let names: Vec<_> = Self::all_detected().map(|table| table.name).collect();
        Self::all_detected().find(|table| table.name == name).ok_or_else(|| {
            let known = if TABLES.iter().any(|table| table.name == name) { "this CPU lacks" } else { "there is no" };
            Error::engine(format!("{known} instruction set `{name}`"))
                .help(format!("unset {ISA_VARIABLE} or set it to one of: {}", names.join(", ")))
        })
    }
}
