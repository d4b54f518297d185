//! Safe loops, recompiled for the instruction set of the machine.
//!
//! Elementwise work and attention need no intrinsics: written over fixed arrays of lanes they vectorise once the
//! compiler may use the instructions. A [`Kernel`] is such a loop with its arguments; [`Level::run`] runs the copy that
//! was compiled for this machine. All copies give the same bits, because Rust neither reorders nor contracts floats.
//!
//! A kernel should be one loop or a few: in large bodies the compiler loses sight of the lanes, and vectors go through
//! memory. So kernels are never inlined, and a longer work is several of them.

/// A piece of work with its arguments. `run` and all it calls must be `#[inline(always)]`, or they are not recompiled.
pub trait Kernel<Output = ()> {
    /// Does the work.
    fn run(self) -> Output;

    /// [`Kernel::run`], compiled for AVX2. A method, as the compiler keeps it in one unit with the closures of `run`.
    ///
    /// # Safety
    /// The processor has avx2 and fma.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    #[inline(never)]
    #[allow(unsafe_code)]
    unsafe fn with_avx2(self) -> Output
    where
        Self: Sized,
    {
        self.run()
    }

    /// [`Kernel::run`], compiled for AVX-512.
    ///
    /// # Safety
    /// The processor has avx512f, avx512vl, avx2 and fma.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
    #[inline(never)]
    #[allow(unsafe_code)]
    unsafe fn with_avx512(self) -> Output
    where
        Self: Sized,
    {
        self.run()
    }
}

/// Stands between loops over lanes: the compiler vectorizes a loop backwards from what uses its result, and a use of
/// lanes one by one would cut their vectors into pairs. The value passes through memory that begins at a cache line, so
/// that no vector lies across two.
#[inline(always)]
pub(crate) fn black_box<T>(value: T) -> T {
    #[repr(align(64))]
    struct Line<T>(T);
    std::hint::black_box(Line(value)).0
}

/// The widest instruction set this machine has, as far as recompiled loops profit from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level(Set);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// What every machine of this architecture can run.
    pub const BASELINE: Level = Level(Set::Baseline);
    /// For those who asked the processor for avx2 and fma.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const AVX2: Level = Level(Set::Avx2);
    /// For those who asked the processor for avx512f, avx512vl, avx2 and fma.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const AVX512: Level = Level(Set::Avx512);

    /// The widest that this machine has.
    pub fn detect() -> Level {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            let wide = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl");
            return if wide { Level::AVX512 } else { Level::AVX2 };
        }
        Level::BASELINE
    }

    /// Runs `kernel` with the instructions of this level.
    #[allow(unsafe_code)]
    #[inline]
    pub fn run<Output>(self, kernel: impl Kernel<Output>) -> Output {
        match self.0 {
            Set::Baseline => kernel.run(),
            // SAFETY: this value exists only where the processor reported avx2 and fma.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => unsafe { kernel.with_avx2() },
            // SAFETY: this value exists only where the processor reported avx512f, avx512vl, avx2 and fma.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => unsafe { kernel.with_avx512() },
        }
    }
}
