//! An amount of memory, written as a person would.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];

/// A number of bytes, in YAML an integer or an integer with a unit: `4096`, `64MiB`, `2 GB`.
///
/// `KiB`, `MiB`, `GiB` and `TiB` are powers of 1024, `kB`, `MB`, `GB` and `TB` powers of 1000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl Bytes {
    /// `n` times 1024 times 1024 bytes.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// The amount as a length or an index.
    ///
    /// # Panics
    /// If it does not fit the address space, which cannot happen where pointers are 64 bits wide.
    #[must_use]
    pub fn to_usize(self) -> usize {
        usize::try_from(self.0).expect("a recipe's amounts fit the address space")
    }
}

/// Why a text is not an amount of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BytesError {
    /// Not an integer followed by a known unit.
    #[error("not an amount of memory such as 64MiB or 2GB")]
    Malformed,
    /// More than `u64::MAX` bytes.
    #[error("more bytes than 64 bits can count")]
    TooLarge,
}

impl FromStr for Bytes {
    type Err = BytesError;

    fn from_str(text: &str) -> Result<Self, BytesError> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let unit = unit.trim_start_matches(' ');
        let scale = UNITS.iter().find(|(name, _)| *name == unit).map(|&(_, scale)| scale);
        let scale = if unit.is_empty() { Some(1) } else { scale };
        let (false, Some(scale)) = (number.is_empty(), scale) else { return Err(BytesError::Malformed) };
        let number: u64 = number.parse().map_err(|_| BytesError::TooLarge)?;
        number.checked_mul(scale).map(Self).ok_or(BytesError::TooLarge)
    }
}

impl fmt::Display for Bytes {
    /// In the largest unit of 1024 that divides the amount, so that parsing gives the same amount back.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |&&(_, scale): &&(&str, u64)| self.0 > 0 && self.0.is_multiple_of(scale);
        let (unit, scale) = UNITS[..4].iter().find(fits).unwrap_or(&UNITS[8]);
        write!(f, "{}{unit}", self.0 / scale)
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BytesVisitor)
    }
}

struct BytesVisitor;

impl Visitor<'_> for BytesVisitor {
    type Value = Bytes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an amount of memory such as 64MiB")
    }

    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Bytes, E> {
        Ok(Bytes(bytes))
    }

    fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Bytes, E> {
        u64::try_from(bytes).map(Bytes).map_err(|_| E::invalid_value(de::Unexpected::Signed(bytes), &self))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
        text.parse().map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))
    }
}

impl JsonSchema for Bytes {
    fn schema_name() -> Cow<'static, str> {
        "Bytes".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A number of bytes: an integer, or an integer with a unit such as `64MiB` or `2GB`.",
            "type": ["string", "integer"],
            "pattern": "^[0-9]+ *([kMGT]B|[KMGT]iB|B)?$",
            "minimum": 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Bytes, BytesError};

    #[test]
    fn units_of_1024_and_1000_differ() {
        assert_eq!("64MiB".parse(), Ok(Bytes(64 << 20)));
        assert_eq!("64 MB".parse(), Ok(Bytes(64_000_000)));
        assert_eq!("12".parse(), Ok(Bytes(12)));
        assert_eq!("12B".parse(), Ok(Bytes(12)));
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["", "MiB", "64mib", "64M", "-1", "1.5GiB", "64MiB ", "0x10", "６４MiB"] {
            assert_eq!(text.parse::<Bytes>(), Err(BytesError::Malformed), "{text}");
        }
        for text in ["18446744073709551616", "16777216TiB"] {
            assert_eq!(text.parse::<Bytes>(), Err(BytesError::TooLarge), "{text}");
        }
    }

    #[test]
    fn display_parses_back_to_the_same_amount() {
        for amount in [0, 1, 1023, 1024, 1 << 20, 3 << 30, 1 << 50, u64::MAX, 64_000_000] {
            assert_eq!(Bytes(amount).to_string().parse(), Ok(Bytes(amount)));
        }
        assert_eq!(Bytes::mib(64).to_string(), "64MiB");
    }
}
