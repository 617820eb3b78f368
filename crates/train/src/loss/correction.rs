//! Weights for what rollout and trainer differ in: how much a token counts that another policy sampled.
//!
//! `rho_t = exp(trainer_t - rollout_t)`. The weights carry no gradient, so they are plain numbers in f64; they multiply the
//! surrogate, and a weight of 0 drops the token. What is dropped stays in the denominators: they count what was sampled,
//! and dropping a token must not make its neighbours louder.

use crate::loss::ratio::LOG_RATIO_LIMIT;

/// An interval, both ends included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Band {
    /// Its lower end.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
}

impl Band {
    fn holds(self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }
}

/// How a kept token is weighed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weight {
    /// `min(rho_t, cap)`: truncated importance sampling, Yao et al. 2025,
    /// "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    Tis {
        /// Largest weight.
        cap: f64,
    },
    /// `min(prod_t rho_t, cap)` for all tokens of a sequence: the same with the completion as one action.
    SequenceTis {
        /// Largest weight.
        cap: f64,
    },
    /// `rho_t` inside the band, 0 outside: IcePop, Ring-1T, arXiv 2510.18855 equation 3.
    IcePop(Band),
}

/// What is done about the difference between rollout and trainer; every part is off by default, and those that are on
/// multiply.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Correction {
    /// Weight of a token that is kept.
    pub weight: Option<Weight>,
    /// Drops sequences with `prod_t rho_t` outside: masked importance sampling, Liu, Li et al. 2025, "When Speed Kills
    /// Stability".
    pub sequence_mask: Option<Band>,
    /// Drops sequences with `(prod_t rho_t)^(1/n)` outside; the same source.
    pub geometric_mask: Option<Band>,
    /// Drops tokens with `A < 0` of sequences with `mean_t(rollout_t - policy_t)` above this, in nats: DeepSeek-V3.2,
    /// arXiv 2512.02556 section 3.1, "Off-Policy Sequence Masking".
    pub opsm: Option<f64>,
    /// Drops sequences in which any `rho_t` is below this: veRL's veto.
    pub veto: Option<f64>,
}

/// The trained tokens of a micro-batch, `[T]` each, in nats; what the mask hides is not looked at.
#[derive(Clone, Copy, Debug)]
pub struct OffPolicy<'a> {
    /// Under the weights being trained.
    pub policy_logprobs: &'a [f64],
    /// The trainer's side of `rho`: the weights the step started with, or the policy where the ratio has no old weights.
    pub trainer_logprobs: &'a [f64],
    /// Under the distribution that sampled.
    pub rollout_logprobs: &'a [f64],
    /// Advantage of the token.
    pub advantages: &'a [f64],
    /// 1 where the token is trained on.
    pub mask: &'a [f32],
    /// Tokens of each sequence; sums to `T`.
    pub lengths: &'a [usize],
}

impl Correction {
    /// Whether it changes anything.
    #[must_use]
    pub fn is_on(&self) -> bool {
        *self != Self::default()
    }

    /// The weight of each token, `[T]`; 1 where the mask is 0.
    ///
    /// # Panics
    /// If the arrays differ in length.
    #[must_use]
    pub fn weights(&self, tokens: &OffPolicy<'_>) -> Vec<f64> {
        let n_tokens = tokens.mask.len();
        assert_eq!(tokens.lengths.iter().sum::<usize>(), n_tokens);
        let mut weights = vec![1.0; n_tokens];
        let mut start = 0;
        for &length in tokens.lengths {
            let trained: Vec<usize> = (start..start + length).filter(|&t| tokens.mask[t] != 0.0).collect();
            start += length;
            self.weigh_sequence(tokens, &trained, &mut weights);
        }
        weights
    }

    fn weigh_sequence(&self, tokens: &OffPolicy<'_>, trained: &[usize], weights: &mut [f64]) {
        let delta = |t: usize| tokens.trainer_logprobs[t] - tokens.rollout_logprobs[t];
        let sum: f64 = trained.iter().map(|&t| delta(t)).sum();
        let n = trained.len().max(1) as f64;
        let product = rho(sum);
        let drift =
            trained.iter().map(|&t| tokens.rollout_logprobs[t] - tokens.policy_logprobs[t]).sum::<f64>() / n;
        let outside = |band: Option<Band>, value| band.is_some_and(|band| !band.holds(value));
        let vetoed = |below: f64| trained.iter().any(|&t| rho(delta(t)) < below);
        let dropped = outside(self.sequence_mask, product)
            || outside(self.geometric_mask, rho(sum / n))
            || self.veto.is_some_and(vetoed);
        let drifted = self.opsm.is_some_and(|limit| drift > limit);
        for &t in trained {
            weights[t] = match self.weight {
                _ if dropped || (drifted && tokens.advantages[t] < 0.0) => 0.0,
                None => 1.0,
                Some(Weight::Tis { cap }) => rho(delta(t)).min(cap),
                Some(Weight::SequenceTis { cap }) => product.min(cap),
                Some(Weight::IcePop(band)) if band.holds(rho(delta(t))) => rho(delta(t)),
                Some(Weight::IcePop(_)) => 0.0,
            };
        }
    }
}

fn rho(log: f64) -> f64 {
    log.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sequences with `rho` of 2 and 1/4 (its first token is the prompt's), and of 1 and 1.
    fn weights(correction: Correction) -> Vec<f64> {
        let ln2 = std::f64::consts::LN_2;
        correction.weights(&OffPolicy {
            policy_logprobs: &[0.0, -1.0 + ln2, -2.0 - 2.0 * ln2, -1.0, -1.5],
            trainer_logprobs: &[0.0, -1.0 + ln2, -2.0 - 2.0 * ln2, -1.0, -1.0],
            rollout_logprobs: &[9.0, -1.0, -2.0, -1.0, -1.0],
            advantages: &[-1.0, -1.0, -1.0, -1.0, 1.0],
            mask: &[0.0, 1.0, 1.0, 1.0, 1.0],
            lengths: &[3, 2],
        })
    }

    fn assert_weights(correction: Correction, expected: [f64; 5]) {
        let actual = weights(correction);
        assert!(
            actual.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12),
            "{actual:?} is not {expected:?}"
        );
    }

    fn weight(weight: Weight) -> Correction {
        Correction { weight: Some(weight), ..Correction::default() }
    }

    #[test]
    fn weights_by_hand() {
        assert_weights(Correction::default(), [1.0; 5]);
        assert_weights(weight(Weight::Tis { cap: 1.5 }), [1.0, 1.5, 0.25, 1.0, 1.0]);
        assert_weights(weight(Weight::SequenceTis { cap: 5.0 }), [1.0, 0.5, 0.5, 1.0, 1.0]);
        assert_weights(weight(Weight::SequenceTis { cap: 0.4 }), [1.0, 0.4, 0.4, 0.4, 0.4]);
        let band = Band { low: 0.5, high: 5.0 };
        assert_weights(weight(Weight::IcePop(band)), [1.0, 2.0, 0.0, 1.0, 1.0]);
    }

    #[test]
    fn a_dropped_sequence_goes_whole_and_alone() {
        let dropped = [1.0, 0.0, 0.0, 1.0, 1.0];
        let off = Correction::default();
        let sequence_mask = Some(Band { low: 0.6, high: 2.0 });
        assert_weights(Correction { sequence_mask, ..off }, dropped);
        // The geometric mean is the root of 1/2.
        let geometric_mask = Some(Band { low: 0.6, high: 2.0 });
        assert_weights(Correction { geometric_mask, ..off }, [1.0; 5]);
        let geometric_mask = Some(Band { low: 0.71, high: 2.0 });
        assert_weights(Correction { geometric_mask, ..off }, dropped);
        assert_weights(Correction { veto: Some(0.3), ..off }, dropped);
        assert_weights(Correction { veto: Some(0.2), ..off }, [1.0; 5]);
        let both = Correction { veto: Some(0.3), ..weight(Weight::Tis { cap: 0.9 }) };
        assert_weights(both, [1.0, 0.0, 0.0, 0.9, 0.9]);
    }

    #[test]
    fn off_policy_sequence_masking_drops_bad_tokens_only() {
        // The policy has drifted by ln 2 / 2 and by 1/4 nats.
        let opsm = |limit| Correction { opsm: Some(limit), ..Correction::default() };
        assert_weights(opsm(0.4), [1.0; 5]);
        assert_weights(opsm(0.3), [1.0, 0.0, 0.0, 1.0, 1.0]);
        assert_weights(opsm(0.2), [1.0, 0.0, 0.0, 0.0, 1.0]);
    }
}
