//! Kernel tables of all instruction sets, of which the best that this CPU can run is selected once at run time.

use super::kernels::KernelTable;
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::scalar;
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512};
use crate::error::{Error, Result};
use std::sync::OnceLock;

/// Environment variable that forces a kernel table, by name.
pub const ISA_VARIABLE: &str = "IEC_ISA";

/// Kernel tables, best first; every CPU can run the last one.
static TABLES: &[KernelTable] = &[
    #[cfg(target_arch = "x86_64")]
    amx::TABLE,
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
    /// Returns the tables that this CPU can run, best first.
    pub(super) fn all_detected() -> impl Iterator<Item = &'static KernelTable> {
        TABLES.iter().filter(|table| (table.detected)())
    }

    /// Returns the best table that this CPU can run.
    pub(super) fn best() -> &'static KernelTable {
        static BEST: OnceLock<&KernelTable> = OnceLock::new();
        BEST.get_or_init(|| Self::all_detected().next().expect("every CPU can run the scalar table"))
    }

    /// Returns the table with this name.
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
