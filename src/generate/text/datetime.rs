//! The `strftime_now` function of chat templates, which insert the current date into prompts. Times are UTC, so a
//! prompt does not depend on the machine's time zone.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: &str = "January February March April May June July August September October November December";
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Returns the current time in a format of C's `strftime`, or an error message if the format has a directive that no
/// known template uses.
pub fn strftime_now(format: &str) -> Result<String, String> {
    strftime(now(), format)
}

/// Returns the current time in seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Formats `seconds` since 1970 with the directives of `strftime` that templates use.
///
/// # Errors
/// A directive is unknown.
pub fn strftime(seconds: u64, format: &str) -> Result<String, String> {
    let (year, month, day, year_day) = civil(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let month_name = MONTHS.split(' ').nth(month as usize - 1).unwrap_or_default();
    let weekday = (seconds / 86_400 + 4) % 7;
    let day_name = DAYS[weekday as usize];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let directive = chars.next();
        let padded = directive != Some('-');
        let directive = if padded { directive } else { chars.next() };
        let number = match directive {
            Some('Y') => Some((year, 4)),
            Some('y') => Some((year % 100, 2)),
            Some('m') => Some((month, 2)),
            Some('d') => Some((day, 2)),
            Some('j') => Some((year_day, 3)),
            Some('H') => Some((hour, 2)),
            Some('I') => Some(((hour + 11) % 12 + 1, 2)),
            Some('M') => Some((minute, 2)),
            Some('S') => Some((second, 2)),
            _ => None,
        };
        let written = match (number, directive) {
            (Some((n, width)), _) if padded => write!(out, "{n:0width$}"),
            (Some((n, _)), _) => write!(out, "{n}"),
            (None, Some('B')) => write!(out, "{month_name}"),
            (None, Some('b' | 'h')) => write!(out, "{}", &month_name[..3]),
            (None, Some('A')) => write!(out, "{day_name}"),
            (None, Some('a')) => write!(out, "{}", &day_name[..3]),
            (None, Some('p')) => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            (None, Some('e')) => write!(out, "{day:2}"),
            (None, Some('F')) => write!(out, "{year:04}-{month:02}-{day:02}"),
            (None, Some('T')) => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            (None, Some('D')) => write!(out, "{month:02}/{day:02}/{:02}", year % 100),
            (None, Some('R')) => write!(out, "{hour:02}:{minute:02}"),
            (None, Some('u')) => write!(out, "{}", (weekday + 6) % 7 + 1),
            (None, Some('w')) => write!(out, "{weekday}"),
            // As in Python, a time without a zone has neither a name of it nor an offset.
            (None, Some('Z' | 'z')) => Ok(()),
            (None, Some('%')) => write!(out, "%"),
            (None, other) => return Err(format!("unknown directive `%{}` of strftime_now", other.unwrap_or(' '))),
        };
        written.map_err(|e| e.to_string())?;
    }
    Ok(out)
}

/// Returns the year, month, day and day of the year of a day counted from 1970-01-01, in the Gregorian calendar.
fn civil(mut days: u64) -> (u64, u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let year_day = days + 1;
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month as u64 + 1, days + 1, year_day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let cases = [
            (0, "%Y-%m-%d %H:%M:%S %a %j", "1970-01-01 00:00:00 Thu 001"),
            (951_782_400, "%d %b %Y, %A", "29 Feb 2000, Tuesday"),
            (1_735_689_599, "%B %-d, %Y %I:%M %p %y 100%%", "December 31, 2024 11:59 PM 24 100%"),
            (1_735_689_600, "%F %T", "2025-01-01 00:00:00"),
        ];
        for (seconds, format, expected) in cases {
            assert_eq!(strftime(seconds, format).as_deref(), Ok(expected));
        }
        assert!(strftime(0, "%Q").unwrap_err().contains("%Q"));
    }
}
