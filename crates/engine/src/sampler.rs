//! Draws a token from logits, keyed so that neither batch nor schedule can change the draw.

use std::ops::Range;

use r3_core::ids::{GroupId, TokenId};
use r3_kernels::draw::draw;
use r3_kernels::logprob::chosen_logprobs;
use r3_kernels::parallel::for_rows;
use r3_kernels::truncate::{Truncation, draw_kept, keep};
use r3_scheduler::request::Sample;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// How tokens are drawn: logits are divided by the temperature, then cut, in the order of [`Truncation`], and what is
/// left is a distribution of its own, which the token is drawn from and its logprob is of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token, lowest id first.
    pub temperature: f32,
    /// Keeps the `n` most likely tokens; 0 keeps all.
    pub sample_top_k: usize,
    /// Keeps the most likely tokens until their mass reaches this; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this times as likely as the most likely one; 0 keeps all.
    pub min_p: f32,
}

impl Sampling {
    /// The most likely token every time.
    pub const GREEDY: Self = Self { temperature: 0.0, sample_top_k: 0, top_p: 1.0, min_p: 0.0 };

    /// Tokens of a vocabulary that a draw keeps at most; `None` if draws cut off none, or take the most likely anyway.
    #[must_use]
    pub fn max_support(&self, vocab_size: usize) -> Option<usize> {
        let is_cut = self.temperature > 0.0 && !self.truncation().is_none();
        is_cut.then(|| self.truncation().max_kept(vocab_size))
    }

    fn truncation(&self) -> Truncation {
        Truncation { top_k: self.sample_top_k, top_p: self.top_p, min_p: self.min_p }
    }
}

/// What decides a draw, beside the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleKey {
    /// Seed of the run.
    pub seed: u64,
    /// Group of the rollout.
    pub group: GroupId,
    /// Rollout inside its group.
    pub index: u32,
    /// Position of the drawn token in its sequence.
    pub position: u32,
}

impl SampleKey {
    /// A uniform number in `[0, 1)` that depends on the key alone.
    fn uniform(self) -> f64 {
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&self.seed.to_le_bytes());
        seed[8..16].copy_from_slice(&self.group.0.to_le_bytes());
        seed[16..20].copy_from_slice(&self.index.to_le_bytes());
        seed[20..24].copy_from_slice(&self.position.to_le_bytes());
        ChaCha8Rng::from_seed(seed).random()
    }
}

/// A draw to be made.
#[derive(Clone, Debug)]
pub struct Draw {
    /// How.
    pub sampling: Sampling,
    /// What decides it.
    pub key: SampleKey,
    /// Where its row of logits lies.
    pub logits: Range<usize>,
}

/// A drawn token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn {
    /// The token.
    pub token: TokenId,
    /// Nats, under the distribution it was drawn from (for a greedy draw: under temperature 1).
    pub logprob: f32,
}

/// Draws tokens, with buffers that are reused from tick to tick.
#[derive(Debug, Default)]
pub struct Sampler {
    /// One for each draw of the tick, and more if an earlier one had more.
    slots: Vec<Slot>,
    n_draws: usize,
}

/// A draw that was made.
#[derive(Debug, Default)]
struct Slot {
    token: TokenId,
    logprob: f32,
    /// What it was drawn from, ascending, if it was cut.
    kept: Vec<u32>,
    is_cut: bool,
}

impl Sampler {
    /// Makes every draw, over the threads, and writes token and logprob of `draws[i]` to `samples[i]`.
    pub fn draw_all(&mut self, logits: &[f32], draws: &[Draw], samples: &mut [Sample]) {
        self.n_draws = draws.len();
        self.slots.resize_with(self.slots.len().max(draws.len()), Slot::default);
        let slots = &mut self.slots[..draws.len()];
        for (slot, draw) in slots.iter_mut().zip(draws) {
            // Room for the most that may be kept, so that no tick makes it again.
            let max_support = draw.sampling.max_support(draw.logits.len());
            slot.is_cut = max_support.is_some();
            slot.kept.clear();
            slot.kept.reserve(max_support.unwrap_or(0));
        }
        let vocab_size = draws.first().map_or(0, |draw| draw.logits.len());
        for_rows(slots, 1, DRAW_WORK * vocab_size, |first, slots| {
            for (slot, draw) in slots.iter_mut().zip(&draws[first..]) {
                let drawn = draw_one(&logits[draw.logits.clone()], &draw.sampling, draw.key, &mut slot.kept);
                (slot.token, slot.logprob) = (drawn.token, drawn.logprob);
            }
        });
        for (sample, slot) in samples.iter_mut().zip(&*slots) {
            (sample.token, sample.logprob) = (slot.token, slot.logprob);
        }
    }

    /// What each draw of the last [`Self::draw_all`] was made from, ascending; `None` where nothing could be cut off.
    pub fn supports(&self) -> impl Iterator<Item = Option<&[u32]>> {
        self.slots[..self.n_draws].iter().map(|slot| slot.is_cut.then_some(&slot.kept[..]))
    }
}

/// Multiply-adds that a logit costs, about: two exponentials.
const DRAW_WORK: usize = 64;

/// Draws one token from `logits` `[V]`. What a draw that is cut keeps goes to `kept`.
fn draw_one(logits: &[f32], sampling: &Sampling, key: SampleKey, kept: &mut Vec<u32>) -> Drawn {
    if sampling.max_support(logits.len()).is_none() {
        return draw_whole(logits, sampling, key);
    }
    keep(logits, sampling.temperature, sampling.truncation(), kept);
    let drawn = draw_kept(logits, kept, sampling.temperature, key.uniform());
    Drawn { token: TokenId(drawn.token), logprob: drawn.logprob }
}

/// A draw that no token is cut from, which takes no memory.
fn draw_whole(logits: &[f32], sampling: &Sampling, key: SampleKey) -> Drawn {
    if sampling.temperature == 0.0 {
        let (token, mut logprob) = (argmax(logits), [0.0]);
        chosen_logprobs(logits, &[token], 1.0, &mut logprob);
        return Drawn { token: TokenId(token), logprob: logprob[0] };
    }
    let drawn = draw(logits, sampling.temperature, key.uniform());
    Drawn { token: TokenId(drawn.token), logprob: drawn.logprob }
}

/// Index of the largest logit, the lowest on a tie; a NaN is never the largest.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (&logit, token) in logits.iter().zip(0..) {
        if logit > best.0 {
            best = (logit, token);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use r3_core::ids::SequenceId;

    use super::*;

    const KEY: SampleKey = SampleKey { seed: 1, group: GroupId(2), index: 3, position: 4 };
    const FULL: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

    fn draw(logits: &[f32], sampling: &Sampling, key: SampleKey) -> Drawn {
        draw_one(logits, sampling, key, &mut Vec::new())
    }

    fn draws(logits: &[f32], sampling: &Sampling, n: u32) -> Vec<Drawn> {
        (0..n).map(|position| draw(logits, sampling, SampleKey { position, ..KEY })).collect()
    }

    #[test]
    fn a_greedy_draw_takes_the_lowest_of_equals() {
        let drawn = draw(&[0.0, 2.0, 2.0], &Sampling::GREEDY, KEY);
        assert_eq!(drawn.token, TokenId(1));
        assert!((drawn.logprob - (-(2.0 + (-2.0f32).exp()).ln())).abs() < 1e-6);
    }

    #[test]
    fn the_same_key_draws_the_same_token_and_another_key_another_stream() {
        let logits = [0.0; 32];
        assert_eq!(draws(&logits, &FULL, 64), draws(&logits, &FULL, 64));
        for key in [
            SampleKey { seed: 9, ..KEY },
            SampleKey { group: GroupId(9), ..KEY },
            SampleKey { index: 9, ..KEY },
        ] {
            let other: Vec<_> =
                (0..64).map(|position| draw(&logits, &FULL, SampleKey { position, ..key })).collect();
            assert_ne!(other, draws(&logits, &FULL, 64));
        }
    }

    #[test]
    fn frequencies_follow_the_tempered_distribution() {
        let sampling = Sampling { temperature: 0.5, ..FULL };
        let drawn = draws(&[0.0, 1.0], &sampling, 20_000);
        let ones = drawn.iter().filter(|drawn| drawn.token == TokenId(1)).count();
        let expected = 2.0f64.exp() / (1.0 + 2.0f64.exp());
        assert!((f64::from(u32::try_from(ones).unwrap()) / 20_000.0 - expected).abs() < 0.01);
        let one = drawn.iter().find(|drawn| drawn.token == TokenId(1)).unwrap();
        assert!((f64::from(one.logprob) - expected.ln()).abs() < 1e-6);
    }

    #[test]
    fn draws_made_together_are_those_made_one_by_one() {
        let logits: Vec<f32> = (0..6 * 40).map(|i| (i as f32 * 1.9).sin() * 3.0).collect();
        let samplings = [FULL, Sampling::GREEDY, Sampling { sample_top_k: 3, ..FULL }];
        let draws: Vec<Draw> = (0..6)
            .map(|at: u32| Draw {
                sampling: samplings[at as usize % 3],
                key: SampleKey { position: at, ..KEY },
                logits: at as usize * 40..(at as usize + 1) * 40,
            })
            .collect();
        let unsampled = Sample { sequence: SequenceId(0), token: TokenId(99), logprob: 0.0 };
        let mut samples = vec![unsampled; 6];
        let mut sampler = Sampler::default();
        for n in [6, 2, 6] {
            sampler.draw_all(&logits, &draws[..n], &mut samples[..n]);
            assert_eq!(sampler.supports().count(), n);
            for ((draw, sample), support) in draws.iter().zip(&samples).zip(sampler.supports()) {
                let mut kept = Vec::new();
                let drawn = draw_one(&logits[draw.logits.clone()], &draw.sampling, draw.key, &mut kept);
                assert_eq!((sample.token, sample.logprob), (drawn.token, drawn.logprob));
                let is_cut = draw.sampling.sample_top_k > 0;
                assert_eq!(support, is_cut.then_some(&kept[..]));
                assert_eq!(kept.len(), if is_cut { 3 } else { 0 });
            }
        }
    }

    #[test]
    fn truncated_draws_follow_the_distribution_of_what_is_kept() {
        let logits = [3.0, 2.0, 1.0, 0.0];
        let sampling = Sampling { temperature: 0.8, sample_top_k: 3, top_p: 0.9, ..FULL };
        let drawn = draws(&logits, &sampling, 20_000);
        let weights = [3.0_f64, 2.0].map(|logit| (logit / f64::from(0.8_f32)).exp());
        let share = weights[1] / (weights[0] + weights[1]);
        let ones = drawn.iter().filter(|drawn| drawn.token == TokenId(1)).count();
        assert!((ones as f64 / 20_000.0 - share).abs() < 0.01);
        assert!(drawn.iter().all(|drawn| drawn.token.0 < 2), "0.94 of the three");
        let one = drawn.iter().find(|drawn| drawn.token == TokenId(1)).unwrap();
        assert!((f64::from(one.logprob) - share.ln()).abs() < 1e-6);
    }

    #[test]
    fn a_draw_that_cuts_nothing_has_no_support() {
        let supports = |sampling: Sampling| [4, 100].map(|vocab_size| sampling.max_support(vocab_size));
        assert_eq!(supports(FULL), [None; 2]);
        assert_eq!(supports(Sampling { sample_top_k: 7, ..Sampling::GREEDY }), [None; 2]);
        assert_eq!(supports(Sampling { sample_top_k: 7, ..FULL }), [Some(4), Some(7)]);
        assert_eq!(supports(Sampling { top_p: 0.9, ..FULL }), [Some(4), Some(100)]);
        assert_eq!(supports(Sampling { min_p: 0.1, sample_top_k: 5, ..FULL }), [Some(4), Some(5)]);
    }
}
