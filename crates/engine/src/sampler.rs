//! Draws a token from logits, keyed so that neither batch nor schedule can change the draw.

use r3_core::ids::{GroupId, TokenId};
use r3_kernels::logprob::chosen_logprobs;
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
    /// Draws one token from `logits` `[V]`.
    ///
    /// The order of truncation is top-k, then top-p, then min-p, each on what the one before kept.
    pub fn draw(&mut self, logits: &[f32], sampling: &Sampling, key: SampleKey) -> Drawn {
        if sampling.temperature == 0.0 {
            return scored(argmax(logits), logits, 1.0);
        }
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        self.weights.clear();
        self.weights.extend(logits.iter().map(|logit| ((logit - max) / sampling.temperature).exp()));
        if sampling.has_full_support() {
            let token = pick(self.weights.iter().copied().zip(0..), key.uniform());
            return scored(token, logits, sampling.temperature);
        }
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

fn scored(token: u32, logits: &[f32], temperature: f32) -> Drawn {
    let mut logprob = [0.0];
    chosen_logprobs(logits, &[token], temperature, &mut logprob);
    Drawn { token: TokenId(token), logprob: logprob[0] }
}

#[cfg(test)]
mod tests {
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
