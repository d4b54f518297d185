//! Shows progress on stderr: bars on a terminal only, notes always.

use crate::console;
use crate::harmless::harmless;
use iec::progress::{self, Display, ShowBar, Unit, Update};
use indicatif::{MultiProgress, ProgressBar, ProgressFinish, ProgressStyle};
use std::io::IsTerminal;
use std::sync::LazyLock;

/// All bars on the screen: an operation may run inside another one, and notes are printed above them.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Shows the progress of the library on stderr from now on.
pub fn install() {
    progress::install(Display { bar, line: |text| BARS.suspend(|| console::note(text)) });
}

fn bar(label: &str, total: u64, unit: Unit) -> Option<ShowBar> {
    if !std::io::stderr().is_terminal() {
        return None;
    }
    let template = match unit {
        Unit::Bytes => "{prefix:>16} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} ETA {eta}",
        Unit::Items => "{prefix:>16} {wide_bar} {pos}/{len} ETA {eta} {msg}",
    };
    let style = ProgressStyle::with_template(template).expect("the template is valid");
    let bar = BARS.add(ProgressBar::new(total));
    let bar = bar.with_prefix(harmless(label)).with_style(style).with_finish(ProgressFinish::AndClear);
    Some(Box::new(move |update| match update {
        Update::Advance(n) => bar.inc(n),
        Update::Skip(n) => {
            bar.inc(n);
            bar.reset_eta();
        }
        Update::Retreat(n) => bar.dec(n),
        Update::Message(text) => bar.set_message(harmless(text)),
    }))
}
