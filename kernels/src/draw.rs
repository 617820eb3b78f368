//! Drawing a token from a row of logits, with its log-probability, in as many passes over the row as a sum takes.

use crate::exp::exp;
use crate::isa::{Isa, multiversion};
use crate::logprob::{BLOCK, BlockSums, Distribution, inverse};

const LANES: usize = 16;
/// Blocks whose sums are kept from the first pass over a row to the second; those after them are summed up again.
const KEPT: usize = 32;

/// A drawn token and its `ln softmax(logits / temperature)`, in nats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// The token.
    pub token: u32,
    /// Its logprob, with the bits of [`chosen_logprobs`](crate::logprob::chosen_logprobs).
    pub logprob: f32,
}

/// Draws a token from `softmax(logits / temperature)`, `logits` `[V]`: the first at which the probabilities summed up
/// in order exceed `uniform`, a number in `[0, 1)`. Tokens of logit `-inf` are never drawn.
///
/// Sums over blocks of tokens say which block the token is in, and only that block is searched.
///
/// # Panics
/// If `logits` is empty, or `temperature` is not positive and finite.
#[must_use]
pub fn draw(logits: &[f32], temperature: f32, uniform: f64) -> Draw {
    assert!(!logits.is_empty(), "a token is drawn from one logit or more");
    let (token, logprob) = draw_row(logits, inverse(temperature), uniform);
    Draw { token, logprob }
}

multiversion! {
    fn draw_row(logits: &[f32], scale: f32, uniform: f64) -> (u32, f32) = draw_row_body;
}

#[inline(always)]
fn draw_row_body<I: Isa>(logits: &[f32], scale: f32, uniform: f64) -> (u32, f32) {
    let mut kept = [BlockSums::default(); KEPT];
    let mut distribution = Distribution::new(scale);
    for (at, block) in logits.chunks(BLOCK).enumerate() {
        let sums = BlockSums::of::<I, false>(block, scale);
        distribution.add(sums);
        if at < KEPT {
            kept[at] = sums;
        }
    }
    // The block of the token, and how far into its share. Rounding may leave some behind the last token, so it is the
    // last block with a share if none is found before.
    let (mut first, mut part, mut left) = (0, 0.0, uniform);
    for (at, block) in logits.chunks(BLOCK).enumerate() {
        let sums = if at < KEPT { kept[at] } else { BlockSums::of::<I, false>(block, scale) };
        let share = distribution.share(sums);
        if share > 0.0 {
            (first, part) = (at * BLOCK, left / share);
            if left < share {
                break;
            }
        }
        left -= share;
    }
    let block = &logits[first..logits.len().min(first + BLOCK)];
    let token = first + find::<I>(block, scale, part);
    (token as u32, distribution.logprob(logits[token]))
}

/// The first token of `block` at which its exponentials summed up exceed `part` of their sum, or else the last that has
/// any.
#[inline(always)]
fn find<I: Isa>(block: &[f32], scale: f32, part: f64) -> usize {
    let BlockSums { highest, sum, .. } = BlockSums::of::<I, false>(block, scale);
    let mut left = part * f64::from(sum);
    let mut last = 0;
    for (at, chunk) in block.chunks(LANES).enumerate() {
        let mut weights = [0.0; LANES];
        for (weight, x) in weights.iter_mut().zip(chunk) {
            *weight = exp::<I>(scale * (x - highest));
        }
        for (lane, &weight) in weights.iter().enumerate() {
            if weight > 0.0 {
                last = at * LANES + lane;
                left -= f64::from(weight);
                if left < 0.0 {
                    return last;
                }
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logprob::chosen_logprobs;
    use crate::testing::noise;

    #[test]
    fn every_token_is_drawn_over_its_share_of_the_unit_interval() {
        for n in [1, 7, 16, 1024, 1025, 3000] {
            let logits: Vec<f32> = noise(n, 3);
            let temperature = 0.7;
            let exps: Vec<f64> =
                logits.iter().map(|&x| (f64::from(x) / f64::from(temperature)).exp()).collect();
            let total: f64 = exps.iter().sum();
            let mut before = 0.0;
            for (token, exp) in exps.iter().enumerate() {
                let share = exp / total;
                for uniform in [before + 0.1 * share, before + 0.9 * share] {
                    assert_eq!(draw(&logits, temperature, uniform).token as usize, token, "of {n}");
                }
                before += share;
            }
        }
    }

    #[test]
    fn the_logprob_has_the_bits_of_chosen_logprobs() {
        for (n, temperature) in [(5, 1.0), (1024, 0.6), (4000, 1.3)] {
            let logits: Vec<f32> = noise(n, 1).iter().map(|x| 9.0 * x).collect();
            for uniform in [0.0, 0.3, 0.7, 0.999] {
                let drawn = draw(&logits, temperature, uniform);
                let mut expected = [f32::NAN];
                chosen_logprobs(&logits, &[drawn.token], temperature, &mut expected);
                assert_eq!(drawn.logprob.to_bits(), expected[0].to_bits());
            }
        }
    }

    #[test]
    fn a_token_without_mass_is_never_drawn() {
        let mut logits = vec![f32::NEG_INFINITY; 3000];
        (logits[1500], logits[1501]) = (0.0, 0.0);
        for (uniform, token) in [(0.0, 1500), (0.499, 1500), (0.501, 1501), (1.0 - f64::EPSILON / 2.0, 1501)]
        {
            assert_eq!(draw(&logits, 1.0, uniform).token, token);
        }
        assert!(draw(&[0.0, f32::NAN], 1.0, 0.5).logprob.is_nan());
    }
}
