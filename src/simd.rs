//! Compiles portable loops once per instruction set (baseline, AVX2, AVX-512) and runs the version that fits the
//! processor.
//!
//! Elementwise operations and attention need no intrinsics: loops over arrays with one element per SIMD lane are
//! vectorized once the compiler may use the instructions. A [`Kernel`] is such a loop with its arguments;
//! [`Level::run`] runs the copy that was compiled for this machine. All copies give the same bits, because Rust neither
//! reorders nor contracts floating-point operations.
//!
//! A kernel should be one loop or a few: in large bodies the compiler does not keep the lanes in vector registers,
//! and the values go through memory. Therefore kernels are never inlined, and longer work is split into several
//! kernels.

/// Computation with its arguments. `run` and all functions it calls must be `#[inline(always)]`, or they are not
/// recompiled.
pub trait Kernel<Output = ()> {
    /// Executes the kernel.
    fn run(self) -> Output;

    /// Runs [`Kernel::run`] compiled for AVX2. This is a method because the compiler then keeps it in one codegen
    /// unit with the closures of `run`.
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

    /// Runs [`Kernel::run`] compiled for AVX-512.
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

/// Returns `value`, and separates the loop that computed it from the loop that uses it. Without this, the compiler,
/// which vectorizes a loop backwards from the use of its result, would split the vectors into pairs where the result is
/// used lane by lane. The value passes through memory that is aligned to a cache line, so that no vector crosses a
/// cache line.
#[inline(always)]
pub(crate) fn black_box<T>(value: T) -> T {
    #[repr(align(64))]
    struct Line<T>(T);
    std::hint::black_box(Line(value)).0
}

/// Instruction set for which recompiled loops run on this machine.
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
    /// Baseline that every machine of this architecture can run.
    pub const BASELINE: Level = Level(Set::Baseline);
    /// AVX2; the caller must have detected avx2 and fma.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const AVX2: Level = Level(Set::Avx2);
    /// AVX-512; the caller must have detected avx512f, avx512vl, avx2 and fma.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const AVX512: Level = Level(Set::Avx512);

    /// Returns the widest of these instruction sets that this machine supports.
    pub fn detect() -> Level {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            let wide = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl");
            return if wide { Level::AVX512 } else { Level::AVX2 };
        }
        Level::BASELINE
    }

    /// Runs `kernel` as compiled for this instruction set.
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
