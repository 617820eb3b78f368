//! Numbers as people read them: few digits, short exponents, units.

/// About three significant digits: `0.53`, `1.2e-5`, `12.1k`.
#[must_use]
pub fn short(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if value.is_nan() => "nan".into(),
        _ if size == 0.0 => "0".into(),
        _ if !(0.01..1e9).contains(&size) => format!("{value:.1e}"),
        _ if size >= 1e6 => format!("{:.1}M", value / 1e6),
        _ if size >= 1e3 => format!("{:.1}k", value / 1e3),
        _ if size >= 100.0 => format!("{value:.0}"),
        _ if size >= 10.0 => format!("{value:.1}"),
        _ if size >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// A share from 0 to 1 as a percentage: `3.1%`.
#[must_use]
pub fn percent(share: f64) -> String {
    if share > 0.0 && share < 0.001 { "<0.1%".into() } else { format!("{:.1}%", 100.0 * share) }
}

/// A duration: `32 ms`, `0.9 s`, `2 m 05 s`, `1 h 03 m`.
#[must_use]
pub fn duration(seconds: f64) -> String {
    let whole = seconds.round().max(0.0) as u64;
    match whole {
        _ if seconds < 0.1 => format!("{:.0} ms", 1e3 * seconds),
        0..100 => format!("{seconds:.1} s"),
        100..3600 => format!("{} m {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} m", whole / 3600, whole % 3600 / 60),
    }
}

/// What stands where a number was not measured.
pub const MISSING: &str = "-";

/// `format` of a value, or [`MISSING`].
#[must_use]
pub fn or_missing(value: Option<f64>, format: fn(f64) -> String) -> String {
    value.map_or_else(|| MISSING.into(), format)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_about_three_digits_at_every_size() {
        let values = [0.0, 1.24e-5, -0.0123, 0.534, 4.0, 43.21, 123.4, 12_140.0, 3.4e6, 5e12, f64::NAN];
        insta::assert_snapshot!(values.map(short).join(" "), @"0 1.2e-5 -0.012 0.53 4.00 43.2 123 12.1k 3.4M 5.0e12 nan");
    }

    #[test]
    fn a_share_that_is_not_zero_never_reads_as_zero() {
        assert_eq!([0.0, 0.0004, 0.031, 1.0].map(percent), ["0.0%", "<0.1%", "3.1%", "100.0%"]);
    }

    #[test]
    fn durations_change_unit_where_they_would_be_hard_to_read() {
        let durations = [0.0321, 0.94, 62.0, 125.0, 3780.0].map(duration);
        assert_eq!(durations, ["32 ms", "0.9 s", "62.0 s", "2 m 05 s", "1 h 03 m"]);
    }
}
