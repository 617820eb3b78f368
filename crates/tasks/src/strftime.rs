//! Dates for chat templates, which ask for them as Python's `strftime` spells them.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// Day 0 of the Unix epoch was a Thursday.
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// Formats `time` in UTC, or says which directive is not understood.
///
/// The local time zone, which Python would use, is left out on purpose: the same run has the same prompts
/// anywhere.
pub(crate) fn format(time: SystemTime, format: &str) -> Result<String, String> {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let month_name = MONTHS[usize::try_from(month - 1).expect("twelve months")];
    let day_name = DAYS[usize::try_from(days % 7).expect("seven days")];
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => write!(text, "{year:04}"),
            Some('y') => write!(text, "{:02}", year % 100),
            Some('m') => write!(text, "{month:02}"),
            Some('B') => write!(text, "{month_name}"),
            Some('b') => write!(text, "{}", &month_name[..3]),
            Some('d') => write!(text, "{day:02}"),
            Some('A') => write!(text, "{day_name}"),
            Some('a') => write!(text, "{}", &day_name[..3]),
            Some('H') => write!(text, "{hour:02}"),
            Some('M') => write!(text, "{minute:02}"),
            Some('S') => write!(text, "{second:02}"),
            Some('%') => write!(text, "%"),
            other => {
                return Err(format!(
                    "strftime_now does not know `%{}`",
                    other.map_or("".into(), String::from)
                ));
            }
        }
        .expect("writing into a string cannot fail");
    }
    Ok(text)
}

/// Year, month and day of a day since 1970-01-01, in the Gregorian calendar.
///
/// Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`, for days >= 0.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468; // Since 0000-03-01, so that the leap day ends a year.
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Expected texts are those of Python 3.11's `datetime.fromtimestamp(s, timezone.utc).strftime`.
    #[test]
    fn dates_are_spelled_as_python_spells_them() {
        let cases = [
            (0, "Thursday 01 January 1970 00:00:00"),
            (951_782_399, "Monday 28 February 2000 23:59:59"),
            (951_782_400, "Tuesday 29 February 2000 00:00:00"),
            (1_709_251_199, "Thursday 29 February 2024 23:59:59"),
            (4_107_542_400, "Monday 01 March 2100 00:00:00"),
        ];
        for (seconds, expected) in cases {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(format(time, "%A %d %B %Y %H:%M:%S").unwrap(), expected);
        }
        let time = UNIX_EPOCH + Duration::from_secs(951_782_400);
        assert_eq!(format(time, "%a %d %b %y, %Y-%m-%d 100%%").unwrap(), "Tue 29 Feb 00, 2000-02-29 100%");
    }

    #[test]
    fn an_unknown_directive_is_named() {
        assert_eq!(format(UNIX_EPOCH, "%Q").unwrap_err(), "strftime_now does not know `%Q`");
        assert_eq!(format(UNIX_EPOCH, "50%").unwrap_err(), "strftime_now does not know `%`");
    }
}
