//! Log-probabilities of chosen tokens and entropies of their distributions, in nats.
//!
//! A row of logits is read once, in blocks of 1 024 tokens: each block's maximum, then its sums relative to that. The
//! blocks are put together in order in f64, so the error does not grow with the vocabulary, and nobody needs all of a
//! row at once: [`lm_head`](crate::lm_head) makes the same blocks out of hidden states.

use crate::exp::exp;
use crate::isa::{Isa, multiversion, sum_lanes};
use crate::parallel;
use crate::softmax::{exp_sum, max};

const LANES: usize = 16;
/// Tokens whose exponentials are summed up in f32: 64 per lane.
pub(crate) const BLOCK: usize = 1024;
/// Multiply-adds that one `exp` of a row costs, about.
pub(crate) const EXP_WORK: usize = 12;

/// `ln softmax(logits / temperature)` of each row's target: `logits` `[T, V]`, `targets` and `logprobs` `[T]`.
///
/// # Panics
/// If the shapes do not fit, a target is not below `V`, or `temperature` is not positive and finite.
pub fn chosen_logprobs(logits: &[f32], targets: &[u32], temperature: f32, logprobs: &mut [f32]) {
    assert_eq!(targets.len(), logprobs.len(), "one logprob per target");
    let vocab = logits.len() / targets.len().max(1);
    assert_eq!(logits.len(), vocab * targets.len(), "logits are not [{}, V]", targets.len());
    for (t, &target) in targets.iter().enumerate() {
        assert!((target as usize) < vocab, "target {target} of token {t} is not below {vocab}");
    }
    let scale = inverse(temperature);
    parallel::for_rows(logprobs, 1, EXP_WORK * vocab, |first, logprobs| {
        let targets = &targets[first..][..logprobs.len()];
        logprob_rows(&logits[first * vocab..][..logprobs.len() * vocab], targets, scale, logprobs);
    });
}

/// 1 / `temperature`.
///
/// # Panics
/// If `temperature` is not positive and finite, or its inverse is not.
pub(crate) fn inverse(temperature: f32) -> f32 {
    let scale = 1.0 / temperature;
    assert!(temperature > 0.0 && temperature.is_finite() && scale.is_finite(), "temperature {temperature}");
    scale
}

multiversion! {
    fn logprob_rows(logits: &[f32], targets: &[u32], scale: f32, logprobs: &mut [f32]) = logprob_rows_body;
}

#[inline(always)]
fn logprob_rows_body<I: Isa>(logits: &[f32], targets: &[u32], scale: f32, logprobs: &mut [f32]) {
    let rows = logits.chunks_exact(logits.len() / targets.len());
    for ((row, &target), logprob) in rows.zip(targets).zip(logprobs) {
        let mut distribution = Distribution::new(scale);
        for block in row.chunks(BLOCK) {
            distribution.add(BlockSums::of::<I, false>(block, scale));
        }
        *logprob = distribution.logprob(row[target as usize]);
    }
}

/// What one block of a row adds to its distribution.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BlockSums {
    /// Highest logit.
    pub(crate) highest: f32,
    /// `sum e^z` of `z = (x - highest) / temperature`.
    pub(crate) sum: f32,
    /// `sum z e^z`, for the entropy.
    moment: f32,
}

impl BlockSums {
    /// Sums of at most [`BLOCK`] logits; the moment only if `MOMENT`, with the same bits otherwise.
    #[inline(always)]
    pub(crate) fn of<I: Isa, const MOMENT: bool>(logits: &[f32], scale: f32) -> Self {
        // Finite even if all of the block is cut off: `-inf` less `-inf` would be NaN.
        let highest = max(logits).max(f32::MIN);
        let (sum, moment) = if MOMENT {
            exp_moments::<I>(logits, highest, scale)
        } else {
            (exp_sum::<I>(logits, highest, scale), 0.0)
        };
        Self { highest, sum, moment }
    }
}

/// `softmax(logits / temperature)` of a row, its blocks added one after the other.
///
/// With `z = (x - max) / temperature` and `S = sum e^z`, a logprob is `z - ln S` and the entropy
/// `ln S - sum(z e^z) / S`.
pub(crate) struct Distribution {
    scale: f32,
    highest: f32,
    sum: f64,
    moment: f64,
}

impl Distribution {
    /// That of no token; `scale` is 1 / temperature.
    pub(crate) fn new(scale: f32) -> Self {
        Self { scale, highest: f32::MIN, sum: 0.0, moment: 0.0 }
    }

    /// Takes in the row's next block.
    pub(crate) fn add(&mut self, block: BlockSums) {
        let highest = self.highest.max(block.highest);
        let (sum, moment) = self.moved(self.highest, highest, (self.sum, self.moment));
        let (block_sum, block_moment) =
            self.moved(block.highest, highest, (block.sum.into(), block.moment.into()));
        (self.highest, self.sum, self.moment) = (highest, sum + block_sum, moment + block_moment);
    }

    /// Sums relative to `from`, relative to `to` instead.
    fn moved(&self, from: f32, to: f32, (sum, moment): (f64, f64)) -> (f64, f64) {
        let shift = f64::from(self.scale) * (f64::from(from) - f64::from(to));
        let weight = shift.exp();
        (weight * sum, weight * (moment + shift * sum))
    }

    /// Nats of a token of logit `logit`.
    pub(crate) fn logprob(&self, logit: f32) -> f32 {
        (f64::from(self.scale * (logit - self.highest)) - self.sum.ln()) as f32
    }

    /// Probability of the tokens of a block that was added.
    pub(crate) fn share(&self, block: BlockSums) -> f64 {
        self.moved(block.highest, self.highest, (block.sum.into(), 0.0)).0 / self.sum
    }

    /// Entropy in nats, if every block came with its moment.
    pub(crate) fn entropy(&self) -> f32 {
        (self.sum.ln() - self.moment / self.sum) as f32
    }
}

/// `sum e^z` and `sum z e^z` of a block.
#[inline(always)]
fn exp_moments<I: Isa>(block: &[f32], highest: f32, scale: f32) -> (f32, f32) {
    let (mut sums, mut moments) = ([0.0; LANES], [0.0; LANES]);
    for chunk in block.chunks(LANES) {
        for ((sum, moment), &x) in sums.iter_mut().zip(&mut moments).zip(chunk) {
            let z = scale * (x - highest);
            let e = exp::<I>(z);
            *sum += e;
            *moment += if e == 0.0 { 0.0 } else { z * e }; // `-inf * 0` would be NaN.
        }
    }
    (sum_lanes(sums), sum_lanes(moments))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::testing::bits;

    fn wave(n: usize, size: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 1.7).sin() * size).collect()
    }

    fn logprobs_of(logits: &[f32], targets: &[u32], temperature: f32) -> Vec<f32> {
        let mut out = vec![f32::NAN; targets.len()];
        chosen_logprobs(logits, targets, temperature, &mut out);
        out
    }

    multiversion! {
        fn distribution(row: &[f32], scale: f32) -> Distribution = distribution_body;
    }

    #[inline(always)]
    fn distribution_body<I: Isa>(row: &[f32], scale: f32) -> Distribution {
        let mut distribution = Distribution::new(scale);
        for block in row.chunks(BLOCK) {
            distribution.add(BlockSums::of::<I, true>(block, scale));
        }
        distribution
    }

    fn entropies_of(logits: &[f32], vocab: usize, temperature: f32) -> Vec<f32> {
        logits.chunks(vocab).map(|row| distribution(row, inverse(temperature)).entropy()).collect()
    }

    /// Logits `0.6 ln [1, 3, 4]` at temperature 0.6 are the probabilities 1/8, 3/8, 4/8.
    #[test]
    fn at_temperature_six_tenths_the_probabilities_are_those_by_hand() {
        let logits: Vec<f32> = [1.0_f32, 3.0, 4.0].map(|p| 0.6 * p.ln()).repeat(3);
        let got = logprobs_of(&logits, &[0, 1, 2], 0.6);
        for (got, p) in got.into_iter().zip([0.125_f32, 0.375, 0.5]) {
            assert!((got - p.ln()).abs() < 1e-6, "{got} is not ln {p}");
        }
        let entropy = -(0.125 * 0.125_f32.ln() + 0.375 * 0.375_f32.ln() + 0.5 * 0.5_f32.ln());
        assert!((entropies_of(&logits, 3, 0.6)[2] - entropy).abs() < 1e-6);
    }

    #[test]
    fn the_entropy_of_a_uniform_row_is_the_logarithm_of_its_length() {
        for vocab in [1, 2, 17, 5_000, 151_936] {
            let want = (vocab as f32).ln();
            assert!((entropies_of(&vec![0.7; vocab], vocab, 0.8)[0] - want).abs() <= 1e-6 * want);
            let logprob = logprobs_of(&vec![0.7; vocab], &[0], 0.8)[0];
            assert!((logprob + want).abs() <= 1e-6 * want);
        }
    }

    #[test]
    fn tokens_cut_off_count_nothing_and_nan_is_not_hidden() {
        let cut = [1.0, f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY];
        assert!((entropies_of(&cut, 4, 1.0)[0] - 2_f32.ln()).abs() < 1e-6);
        assert_eq!(logprobs_of(&cut, &[1], 1.0), [f32::NEG_INFINITY]);
        let mut broken = wave(100, 1.0);
        broken[77] = f32::NAN;
        assert!(logprobs_of(&broken, &[3], 1.0)[0].is_nan() && entropies_of(&broken, 100, 1.0)[0].is_nan());
    }

    proptest! {
        #[test]
        fn rows_are_those_of_f64(vocab in 1_usize..3_000, target in 0_usize..3_000, temperature in 0.05_f32..3.0) {
            let target = target % vocab;
            let logits = wave(vocab, 8.0);
            let z: Vec<f64> = logits.iter().map(|&x| f64::from(x) / f64::from(temperature)).collect();
            let total = z.iter().map(|z| z.exp()).sum::<f64>();
            let want = z[target] - total.ln();
            let got = f64::from(logprobs_of(&logits, &[target as u32], temperature)[0]);
            prop_assert!((got - want).abs() < 1e-6 * (1.0 + want.abs()), "{} {}", got, want);
            let want = total.ln() - z.iter().map(|z| z.exp() * z).sum::<f64>() / total;
            let got = f64::from(entropies_of(&logits, vocab, temperature)[0]);
            prop_assert!((got - want).abs() < 1e-5 * (1.0 + want.abs()), "{} {}", got, want);
        }

        #[test]
        fn a_token_is_scored_the_same_alone_and_among_others(vocab in 1_usize..2_000, n_tokens in 1_usize..60) {
            let logits = wave(vocab * n_tokens, 5.0);
            let targets: Vec<u32> = (0..n_tokens).map(|t| (t * 31 % vocab) as u32).collect();
            let (logprobs, entropy) = (logprobs_of(&logits, &targets, 0.9), entropies_of(&logits, vocab, 0.9));
            for (t, row) in logits.chunks(vocab).enumerate() {
                prop_assert_eq!(bits(&logprobs[t..=t]), bits(&logprobs_of(row, &targets[t..=t], 0.9)));
                prop_assert_eq!(bits(&entropy[t..=t]), bits(&entropies_of(row, vocab, 0.9)));
            }
        }
    }

    #[test]
    fn a_target_past_the_vocabulary_is_named() {
        let panic = std::panic::catch_unwind(|| logprobs_of(&[0.0; 6], &[0, 3], 1.0)).unwrap_err();
        assert_eq!(*panic.downcast::<String>().unwrap(), "target 3 of token 1 is not below 3");
        assert!(std::panic::catch_unwind(|| logprobs_of(&[0.0; 6], &[0, 2], 0.0)).is_err());
    }
}
