//! Counts, as people say them.

use std::fmt::Display;

/// `1 rollout`, `2 rollouts`, `0 batches`: `n` with its noun, which is given as for one.
#[must_use]
pub fn counted<N: Display + PartialEq + From<u8>>(n: N, noun: &str) -> String {
    let ending = match noun {
        _ if n == N::from(1) => "",
        _ if noun.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{n} {noun}{ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_said_otherwise_than_none_and_many() {
        assert_eq!([0, 1, 2, 11].map(|n| counted(n, "row")), ["0 rows", "1 row", "2 rows", "11 rows"]);
        assert_eq!([1, 3].map(|n| counted(n, "batch")), ["1 batch", "3 batches"]);
        assert_eq!([1.0, 1.5].map(|n| counted(n, "byte")), ["1 byte", "1.5 bytes"]);
    }
}
