//! Counts of instructions instead of times: `scripts/count-instructions.sh` runs this benchmark with the filter `count`
//! under callgrind, which collects inside [`counted`] only and writes the sum of each call to a file. In this mode each
//! measurement runs once after a warm-up and prints one line, its name and the units that the sum is divided by.

use std::sync::atomic::{AtomicBool, Ordering};

static COUNTING: AtomicBool = AtomicBool::new(false);

/// Turns the mode on.
pub fn start() {
    COUNTING.store(true, Ordering::Relaxed);
}

/// Returns true in this mode.
pub fn counting() -> bool {
    COUNTING.load(Ordering::Relaxed)
}

/// Calls the function. Its name and the lack of type parameters are how callgrind finds it.
#[inline(never)]
pub fn counted(f: &mut dyn FnMut()) {
    f();
}

/// Prints the line of a measurement.
pub fn print(name: &str, units: usize) {
    println!("{name}\t{units}");
}
