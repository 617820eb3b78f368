//! Decimal numbers as people write them, compared exactly.

/// A decimal number in the one form its value has, so equal numbers are equal structs: `0.digits *
/// 10^exponent`.
///
/// Exact where `f64` is not: `0.1 + 0.2` style noise and 20-digit answers compare as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Number {
    negative: bool,
    /// Significant digits, without zeros at either end; empty for zero.
    digits: String,
    exponent: i64,
}

impl Number {
    /// The number that `text` consists of, spaces around it aside.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let scan = scan(text.as_bytes(), 0)?;
        (scan.start == 0 && scan.end == text.len()).then_some(scan.number)
    }

    /// The last number in `text`: `3 + 4 = 7.` holds 7, `from -2 to 1,500` holds 1500, `x = -.5e1` holds -5.
    ///
    /// A sign counts if it touches the number and no operand comes before it, so `5-3` ends in 3. Commas are
    /// read as thousands where they part groups of three digits. One pass, linear in `text`.
    #[must_use]
    pub fn last_in(text: &str) -> Option<Self> {
        let mut last = None;
        let mut at = 0;
        while let Some(scan) = scan(text.as_bytes(), at) {
            at = scan.end;
            last = Some(scan.number);
        }
        last
    }

    /// From digits before and after the point, and a power of ten.
    fn new(negative: bool, whole: &str, fraction: &str, power: i64) -> Self {
        let digits = format!("{whole}{fraction}");
        let significant = digits.trim_start_matches('0');
        let leading_zeros = digits.len() - significant.len();
        let significant = significant.trim_end_matches('0');
        if significant.is_empty() {
            return Self { negative: false, digits: String::new(), exponent: 0 };
        }
        let length = |n: usize| i64::try_from(n).expect("a text is shorter than 2^63");
        let exponent = power.saturating_add(length(whole.len()) - length(leading_zeros));
        Self { negative, digits: significant.into(), exponent }
    }
}

struct Scan {
    number: Number,
    start: usize,
    end: usize,
}

/// The first number at or after `from`, which is not inside a number.
fn scan(text: &[u8], from: usize) -> Option<Scan> {
    let is_digit = |at: usize| text.get(at).is_some_and(u8::is_ascii_digit);
    let starts = |at: &usize| is_digit(*at) || (text[*at] == b'.' && is_digit(at + 1));
    let first = (from..text.len()).find(starts)?;
    let (whole, mut end) = whole_digits(text, first);
    let mut fraction = String::new();
    if text.get(end) == Some(&b'.') && is_digit(end + 1) {
        let digits = digits_from(text, end + 1);
        end += 1 + digits.len();
        fraction = digits;
    }
    let (power, end) = power_of_ten(text, end);
    let (negative, start) = sign(text, from, first);
    Some(Scan { number: Number::new(negative, &whole, &fraction, power), start, end })
}

fn digits_from(text: &[u8], start: usize) -> String {
    text[start..].iter().take_while(|byte| byte.is_ascii_digit()).map(|&byte| char::from(byte)).collect()
}

/// The digits before the point, commas between thousands dropped, and where they end.
fn whole_digits(text: &[u8], start: usize) -> (String, usize) {
    let mut digits = digits_from(text, start);
    let mut end = start + digits.len();
    if (1..=3).contains(&digits.len()) {
        while text.get(end) == Some(&b',') {
            let group = digits_from(text, end + 1);
            if group.len() != 3 {
                break;
            }
            digits.push_str(&group);
            end += 4;
        }
    }
    (digits, end)
}

/// The exponent of `e+3` at `at`, if one is there, and where it ends.
fn power_of_ten(text: &[u8], at: usize) -> (i64, usize) {
    if !matches!(text.get(at), Some(b'e' | b'E')) {
        return (0, at);
    }
    let sign_len = usize::from(matches!(text.get(at + 1), Some(b'+' | b'-')));
    let digits = digits_from(text, at + 1 + sign_len);
    if digits.is_empty() {
        return (0, at);
    }
    // An exponent beyond i64 saturates: no answer of a problem is that large, so it equals none.
    let power = digits.parse().unwrap_or(i64::MAX / 2);
    let power = if text[at + 1] == b'-' { -power } else { power };
    (power, at + 1 + sign_len + digits.len())
}

/// Whether the number at `first` is negative, and where it starts with its sign.
fn sign(text: &[u8], from: usize, first: usize) -> (bool, usize) {
    let before = &text[from..first];
    let (negative, len) = if before.ends_with(b"-") {
        (true, 1)
    } else if before.ends_with("\u{2212}".as_bytes()) {
        (true, "\u{2212}".len())
    } else if before.ends_with(b"+") {
        (false, 1)
    } else {
        return (false, first);
    };
    let start = first - len;
    let operand_before = text[..start]
        .iter()
        .rev()
        .find(|byte| !byte.is_ascii_whitespace())
        .is_some_and(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b')' | b']' | b'}'));
    // `is -3` has a space between word and sign, `x-3` and `5 -3` have an operand there.
    let word_before = text[..start].last().is_some_and(u8::is_ascii_whitespace)
        && text[..start].trim_ascii_end().last().is_some_and(u8::is_ascii_alphabetic);
    if operand_before && !word_before { (false, first) } else { (negative, start) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_equal_however_they_are_written() {
        let groups = [
            vec!["7", " 7 ", "+7", "7.0", "007", "7e0", "0.7e1", "70E-1", "7.000"],
            vec!["-0.5", "-.5", "-5e-1", "\u{2212}0.50"],
            vec!["1234567", "1,234,567", "1234567.0", "1.234567e6"],
            vec!["0", "-0", "0.00", "0e9"],
        ];
        for (i, group) in groups.iter().enumerate() {
            let value = Number::parse(group[0]).unwrap();
            for text in group {
                assert_eq!(Number::parse(text).as_ref(), Some(&value), "{text}");
            }
            for other in groups[..i].iter().flatten() {
                assert_ne!(Number::parse(other), Some(value.clone()), "{other}");
            }
        }
    }

    #[test]
    fn nearly_equal_values_differ() {
        for (a, b) in
            [("12345678901234567890", "12345678901234567891"), ("0.1", "0.10000000000000001"), ("5", "-5")]
        {
            assert_ne!(Number::parse(a).unwrap(), Number::parse(b).unwrap());
        }
        assert_ne!(Number::parse("1e99999999999999999999"), Number::parse("1"));
    }

    #[test]
    fn what_is_not_one_number_is_none() {
        for text in ["", " ", "x", "7x", "x7", "1 2", "3/4", "1.", "--1", "1,23", "e5", "-", "1.2.3"] {
            assert_eq!(Number::parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_last_number_of_a_text_is_found() {
        let cases = [
            ("3 + 4 = 7.", "7"),
            ("the answer is -12", "-12"),
            ("x = -.5e1!", "-5"),
            ("5-3", "3"),
            ("5 -3", "3"),
            ("(5)-3", "3"),
            ("2-3=-1", "-1"),
            ("from -2 to 1,500", "1500"),
            ("1, 2, 3", "3"),
            ("$1,234.50 in all", "1234.5"),
            ("12% of it", "12"),
            ("\\boxed{42}", "42"),
            ("v2e", "2"),
            ("π ≈ 3.14, ok…", "3.14"),
            ("= \u{2212}8", "-8"),
        ];
        for (text, expected) in cases {
            assert_eq!(Number::last_in(text), Number::parse(expected), "{text}");
        }
        assert_eq!(Number::last_in("no number, no. none"), None);
    }

    #[test]
    fn a_long_degenerate_text_is_read_in_linear_time() {
        let units = [
            ("-", None),
            ("1,", Some("1")),
            (".", None),
            ("1e", Some("1e1")),
            ("+ ", None),
            ("9.", Some("0.9")),
        ];
        for (unit, expected) in units {
            assert_eq!(Number::last_in(&unit.repeat(1 << 20)), expected.and_then(Number::parse), "{unit}");
        }
    }
}
