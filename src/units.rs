//! Parses and formats sizes, counts and durations for people.

use std::time::Duration;

/// Parses `4096`, `64K`, `64M`, `2G`, `5GB`, `1.5GiB`: K, M, G, T are powers of 1024, KB, MB, GB, TB powers of 1000.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: f64 = match unit.trim().to_ascii_uppercase().as_str() {
        "" | "B" => 1.0,
        "K" | "KIB" => 1024.0,
        "M" | "MIB" => 1024f64.powi(2),
        "G" | "GIB" => 1024f64.powi(3),
        "T" | "TIB" => 1024f64.powi(4),
        "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        _ => return Err(format!("`{unit}` is no unit of size; expected K, M, G, T, KB, MB, GB or TB")),
    };
    let bytes = number.parse::<f64>().map_err(|_| format!("`{number}` is not a number"))? * factor;
    if (1.0..9e15).contains(&bytes) {
        Ok(bytes as u64)
    } else {
        Err(format!("found `{text}`, expected 1 to 9e15 bytes"))
    }
}

/// Parses a count such as `4096`, `4k` or `4K` (4096), `1M` (1 048 576): K and M are powers of 1024, as in the context
/// lengths of models.
pub fn parse_count(text: &str) -> Result<usize, String> {
    let (number, factor) = match text.strip_suffix(['k', 'K']) {
        Some(number) => (number, 1 << 10),
        None => text.strip_suffix(['m', 'M']).map_or((text, 1), |number| (number, 1 << 20)),
    };
    let count = number.parse::<usize>().ok().and_then(|count| count.checked_mul(factor));
    count.ok_or_else(|| "expected a number, like 4096 or 4k".into())
}

/// Units of durations in milliseconds, the largest first.
const TIME_UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];

/// Longest duration that is accepted. The sum of a few of them and of any time of a clock does not overflow.
const LONGEST: Duration = Duration::from_secs(366 * 86_400);

/// Parses a duration with its unit: `200ms`, `60s`, `1.5m`, `2h`, `1d`; `0` needs no unit. The resolution is a
/// millisecond.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    if number == "0" && unit.is_empty() {
        return Ok(Duration::ZERO);
    }
    let unit_ms = TIME_UNITS.iter().find(|(name, _)| *name == unit).map(|(_, ms)| *ms as f64);
    let unit_ms =
        unit_ms.ok_or_else(|| format!("found `{text}`, expected a duration like 200ms, 60s, 5m, 2h or 1d"))?;
    let ms = number.parse::<f64>().map_err(|_| format!("`{number}` is not a number"))? * unit_ms;
    let duration = Duration::from_millis(ms.round() as u64);
    match duration <= LONGEST {
        true => Ok(duration),
        false => Err(format!("found `{text}`, expected at most 366d")),
    }
}

/// Formats a duration in whole milliseconds so that [`parse_duration`] reads it: in the largest unit that has no
/// fraction.
pub fn duration_text(duration: Duration) -> String {
    let ms = duration.as_millis();
    let unit = TIME_UNITS.iter().find(|(_, unit_ms)| ms > 0 && ms.is_multiple_of(u128::from(*unit_ms)));
    let (name, unit_ms) = unit.unwrap_or(&("s", 1000));
    format!("{}{name}", ms / u128::from(*unit_ms))
}

/// Formats a size such as `1.95 GiB`: three significant digits in the unit that fits.
pub fn human_bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for larger in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 999.5 {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    format!("{} {unit}", three_digits(value, unit != "B"))
}

/// Formats a count of parameters in thousands, millions, billions or trillions, such as `1.10 B`.
pub fn human_count(count: u64) -> String {
    let mut value = count as f64;
    let mut unit = "";
    for larger in [" K", " M", " B", " T"] {
        if value < 999.5 {
            break;
        }
        value /= 1000.0;
        unit = larger;
    }
    format!("{}{unit}", three_digits(value, !unit.is_empty()))
}

/// Formats a number with `places` decimals; values from 1e9 on, which untrusted files may contain, get an exponent.
pub fn decimals(value: f64, places: usize) -> String {
    if value.abs() < 1e9 { format!("{value:.places$}") } else { format!("{value:.3e}") }
}

/// Formats a share in percent with one decimal. Rounding never makes all of a part: `100.0 %` and `0.0 %` are exact.
pub fn percentage(part: f64, total: f64) -> String {
    let percent = if total > 0.0 { 100.0 * part / total } else { 0.0 };
    match percent {
        p if (99.95..100.0).contains(&p) => "over 99.9 %".into(),
        p if p > 0.0 && p < 0.05 => "under 0.1 %".into(),
        p => format!("{p:.1} %"),
    }
}

fn three_digits(value: f64, fraction: bool) -> String {
    match value {
        _ if !fraction => format!("{value:.0}"),
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_in_both_families_of_units() {
        for (text, bytes) in
            [("4096", 4096), ("64M", 64 << 20), ("2G", 2 << 30), ("5GB", 5_000_000_000), ("1.5KiB", 1536)]
        {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "G", "12X", "-5M", "0", "1..2K", "nan"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn counts_may_be_given_in_powers_of_1024() {
        for (text, count) in [("0", 0), ("4096", 4096), ("4k", 4096), ("32K", 32768), ("1m", 1 << 20)] {
            assert_eq!(parse_count(text), Ok(count), "{text}");
        }
        for text in ["", "k", "4kk", "1.5k", "-1", "99999999999999999999", "18446744073709551615k"] {
            assert!(parse_count(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_have_a_unit_and_are_written_as_they_are_read() {
        let cases = [("0", 0), ("0s", 0), ("200ms", 200), ("60s", 60_000), ("1.5m", 90_000), ("2h", 7_200_000)];
        for (text, ms) in cases {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "5", "s", "-1s", "1 s", "1S", "1e3s", "1..2s", "366.1d", "99999999999999999999d", "nan", "١s"]
        {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        for (ms, text) in
            [(0, "0s"), (200, "200ms"), (1000, "1s"), (90_000, "90s"), (3_600_000, "1h"), (1001, "1001ms")]
        {
            assert_eq!(duration_text(Duration::from_millis(ms)), text);
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)));
        }
    }

    #[test]
    fn numbers_of_any_size_are_short() {
        for (value, text) in
            [(0.125, "0.12"), (-3.0, "-3.00"), (1e300, "1.000e300"), (-f64::MAX, "-1.798e308"), (f64::NAN, "NaN")]
        {
            assert_eq!(decimals(value, 2), text);
        }
    }

    #[test]
    fn sizes_and_counts_are_shown_in_three_digits() {
        let cases = [(0, "0 B"), (999, "999 B"), (1_044_992, "1.00 MiB"), (2_093_796_556, "1.95 GiB")];
        for (bytes, text) in cases {
            assert_eq!(human_bytes(bytes), text);
        }
        assert_eq!(human_count(1_100_048_384), "1.10 B");
        assert_eq!(human_count(512), "512");
    }

    #[test]
    fn a_part_is_never_shown_as_all_or_nothing() {
        for (part, total, expected) in [
            (1.0, 3.0, "33.3 %"),
            (10_000.0, 10_000.0, "100.0 %"),
            (9_999.0, 10_000.0, "over 99.9 %"),
            (1.0, 10_000.0, "under 0.1 %"),
            (0.0, 10_000.0, "0.0 %"),
            (0.0, 0.0, "0.0 %"),
        ] {
            assert_eq!(percentage(part, total), expected, "{part} of {total}");
        }
    }
}
