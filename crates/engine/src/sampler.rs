//! Draws a token from logits, keyed so that neither batch nor schedule can change the draw.

use std::ops::Range;

use r3_core::ids::{GroupId, TokenId};
use r3_kernels::draw::draw;
use r3_kernels::logprob::chosen_logprobs;
use r3_kernels::parallel::for_rows;
use r3_scheduler::request::Sample;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// How tokens are drawn.
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

    /// Whether every token of the vocabulary can be drawn.
    #[must_use]
    pub fn has_full_support(&self) -> bool {
        self.sample_top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
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

/// Draws tokens, with buffers that are reused from draw to draw.
#[derive(Debug, Default)]
pub struct Sampler {
    weights: Vec<f32>,
    order: Vec<u32>,
}

impl Sampler {
    /// Makes every draw, over the threads, and writes token and logprob of `draws[i]` to `samples[i]`.
    pub fn draw_all(&mut self, logits: &[f32], draws: &[Draw], samples: &mut [Sample]) {
        let is_whole = |draw: &Draw| draw.sampling.temperature == 0.0 || draw.sampling.has_full_support();
        let vocab_size = draws.first().map_or(0, |draw| draw.logits.len());
        for_rows(samples, 1, DRAW_WORK * vocab_size, |first, samples| {
            for (sample, draw) in samples.iter_mut().zip(&draws[first..]).filter(|(_, draw)| is_whole(draw)) {
                let drawn = draw_whole(&logits[draw.logits.clone()], &draw.sampling, draw.key);
                (sample.token, sample.logprob) = (drawn.token, drawn.logprob);
            }
        });
        // Truncation sorts the vocabulary, which takes memory: one after the other.
        for (sample, draw) in samples.iter_mut().zip(draws).filter(|(_, draw)| !is_whole(draw)) {
            let drawn = self.draw(&logits[draw.logits.clone()], &draw.sampling, draw.key);
            (sample.token, sample.logprob) = (drawn.token, drawn.logprob);
        }
    }

    /// Draws one token from `logits` `[V]`.
    ///
    /// The order of truncation is top-k, then top-p, then min-p, each on what the one before kept.
    pub fn draw(&mut self, logits: &[f32], sampling: &Sampling, key: SampleKey) -> Drawn {
        if sampling.temperature == 0.0 || sampling.has_full_support() {
            return draw_whole(logits, sampling, key);
        }
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        self.weights.clear();
        self.weights.extend(logits.iter().map(|logit| ((logit - max) / sampling.temperature).exp()));
        self.truncate(sampling);
        let kept = self.order.iter().map(|&token| (self.weights[token as usize], token));
        let token = pick(kept.clone(), key.uniform());
        let mass: f64 = kept.map(|(weight, _)| f64::from(weight)).sum();
        let logprob = (f64::from(self.weights[token as usize]) / mass).ln();
        #[expect(clippy::cast_possible_truncation, reason = "logprobs are f32")]
        Drawn { token: TokenId(token), logprob: logprob as f32 }
    }

    /// Leaves in `order` the tokens that can be drawn, most likely first.
    fn truncate(&mut self, sampling: &Sampling) {
        let Self { weights, order } = self;
        order.clear();
        order.extend((0u32..).take(weights.len()));
        order.sort_unstable_by(|&a, &b| {
            weights[b as usize].total_cmp(&weights[a as usize]).then_with(|| a.cmp(&b))
        });
        if sampling.sample_top_k > 0 {
            order.truncate(sampling.sample_top_k);
        }
        if sampling.top_p < 1.0 {
            let mass: f64 = order.iter().map(|&token| f64::from(weights[token as usize])).sum();
            let mut before = 0.0;
            let kept = order.iter().take_while(|&&token| {
                let keep = before < f64::from(sampling.top_p) * mass;
                before += f64::from(weights[token as usize]);
                keep
            });
            let kept = kept.count().max(1);
            order.truncate(kept);
        }
        // The most likely token has weight 1, so `min_p` compares with the weights as they are.
        let kept = order.iter().take_while(|&&token| weights[token as usize] >= sampling.min_p).count();
        order.truncate(kept.max(1));
    }
}

/// Multiply-adds that a logit costs, about: two exponentials.
const DRAW_WORK: usize = 64;

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

/// The token at `uniform` of the cumulative weights.
fn pick(weights: impl Iterator<Item = (f32, u32)> + Clone, uniform: f64) -> u32 {
    let mass: f64 = weights.clone().map(|(weight, _)| f64::from(weight)).sum();
    let mut left = uniform * mass;
    let mut last = 0;
    for (weight, token) in weights {
        if weight > 0.0 {
            last = token;
            left -= f64::from(weight);
            if left < 0.0 {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use r3_core::ids::SequenceId;

    use super::*;

    const KEY: SampleKey = SampleKey { seed: 1, group: GroupId(2), index: 3, position: 4 };
    const FULL: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

    fn draws(logits: &[f32], sampling: &Sampling, n: u32) -> Vec<Drawn> {
        let mut sampler = Sampler::default();
        (0..n).map(|position| sampler.draw(logits, sampling, SampleKey { position, ..KEY })).collect()
    }

    #[test]
    fn a_greedy_draw_takes_the_lowest_of_equals() {
        let drawn = Sampler::default().draw(&[0.0, 2.0, 2.0], &Sampling::GREEDY, KEY);
        assert_eq!(drawn.token, TokenId(1));
        assert!((drawn.logprob - (-(2.0 + (-2.0f32).exp()).ln())).abs() < 1e-6);
    }

    #[test]
    fn the_same_key_draws_the_same_token_and_another_key_another_stream() {
        let logits = [0.0; 32];
        assert_eq!(draws(&logits, &FULL, 64), draws(&logits, &FULL, 64));
        let mut sampler = Sampler::default();
        for key in [
            SampleKey { seed: 9, ..KEY },
            SampleKey { group: GroupId(9), ..KEY },
            SampleKey { index: 9, ..KEY },
        ] {
            let other: Vec<_> =
                (0..64).map(|position| sampler.draw(&logits, &FULL, SampleKey { position, ..key })).collect();
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
        Sampler::default().draw_all(&logits, &draws, &mut samples);
        for (draw, sample) in draws.iter().zip(samples) {
            let drawn = Sampler::default().draw(&logits[draw.logits.clone()], &draw.sampling, draw.key);
            assert_eq!((sample.token, sample.logprob), (drawn.token, drawn.logprob));
        }
    }

    #[test]
    fn truncation_keeps_what_it_says_and_scores_what_it_kept() {
        let logits = [3.0, 2.0, 1.0, 0.0];
        let kept = |sampling: &Sampling| {
            let mut tokens: Vec<u32> =
                draws(&logits, sampling, 4000).iter().map(|drawn| drawn.token.0).collect();
            tokens.sort_unstable();
            tokens.dedup();
            tokens
        };
        assert_eq!(kept(&FULL), [0, 1, 2, 3]);
        assert_eq!(kept(&Sampling { sample_top_k: 2, ..FULL }), [0, 1]);
        assert_eq!(kept(&Sampling { top_p: 0.7, ..FULL }), [0, 1]);
        assert_eq!(kept(&Sampling { top_p: 0.0, ..FULL }), [0]);
        assert_eq!(kept(&Sampling { min_p: 0.1, ..FULL }), [0, 1, 2]);
        let drawn = draws(&logits, &Sampling { sample_top_k: 1, ..FULL }, 1)[0];
        assert_eq!((drawn.token, drawn.logprob), (TokenId(0), 0.0));
    }
}
