//! Random numbers, cheap enough for a program in a microsecond.

/// SplitMix64 (Steele, Lea and Flood, 2014): one addition and one [`mix`] a number.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The stream of `seed`. Equal seeds give equal streams, on every machine and in every version of r3.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number in `0..end`.
    ///
    /// # Panics
    /// If `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        assert!(end > 0, "nothing is below 0");
        // The high half of a product is uniform enough for ends far below 2^64, and needs no division.
        let product = u128::from(self.next()) * end as u128;
        usize::try_from(product >> 64).expect("it is below `end`")
    }

    /// A number in `from..=to`.
    pub fn between(&mut self, from: usize, to: usize) -> usize {
        from + self.below(to - from + 1)
    }

    /// True once in `n` draws.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// The finaliser of SplitMix64: a bijection in which every bit depends on every bit.
#[must_use]
pub fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_streams_and_neighbours_others() {
        let draws = |seed| {
            let mut rng = Rng::new(seed);
            (0..20).map(|_| rng.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(draws(7), draws(7));
        assert_ne!(draws(7), draws(8));
    }

    #[test]
    fn every_number_of_a_range_comes_up_about_equally_often() {
        let mut rng = Rng::new(1);
        let mut counts = [0; 5];
        (0..10_000).for_each(|_| counts[rng.between(3, 7) - 3] += 1);
        assert!(counts.iter().all(|count| (1800..2200).contains(count)), "{counts:?}");
    }
}
