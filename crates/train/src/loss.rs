//! Policy losses: pure functions of one micro-batch and the denominators of the whole optimiser step.
//!
//! Every loss is a weighted sum over tokens whose weights do not depend on how the step is split, so the
//! gradients of its micro-batches add up to the gradient of the step.

use candle_core::{Result, Tensor};

/// Log-ratios are clamped to `±LOG_RATIO_LIMIT` before `exp`, so that one broken token cannot overflow a
/// step.
const LOG_RATIO_LIMIT: f64 = 20.0;

/// How far the ratio may move before a token stops pulling: `[1 - low, 1 + high]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip {
    /// Below 1.
    pub low: f64,
    /// Above 1.
    pub high: f64,
}

/// One micro-batch as the losses see it. Every array is `[T]` f32; entry `t` is about the token predicted at
/// input `t`.
#[derive(Clone, Copy, Debug)]
pub struct TokenBatch<'a> {
    /// Log-probabilities under the weights being trained, in nats; the only differentiable array.
    pub policy_logprobs: &'a Tensor,
    /// Log-probabilities under the distribution that sampled; any finite value where the mask is 0.
    pub rollout_logprobs: &'a Tensor,
    /// Advantage of the token's rollout.
    pub advantages: &'a Tensor,
    /// 1 where the token is trained on, else 0.
    pub mask: &'a Tensor,
    /// `1 / |o_i|`: one over the trained tokens of the token's rollout; any finite value where the mask is 0.
    pub inverse_lengths: &'a Tensor,
}

/// DAPO's clipped surrogate, to be minimised: `-sum(mask * min(r A, clip(r) A)) / n_tokens`, a scalar.
///
/// `r = exp(policy - rollout)`. `n_tokens` counts the trained tokens of the whole optimiser step, not of this
/// micro-batch, so micro-batches add up. Prompt tokens are masked, never dropped.
///
/// Source: DAPO, arXiv 2503.14476, "Clip-Higher" and "Token-Level Policy Gradient Loss". We differ in
/// clamping the log-ratio to ±20.
///
/// # Errors
/// If the arrays do not share shape, dtype and device.
pub fn dapo(batch: &TokenBatch<'_>, clip: Clip, n_tokens: f64) -> Result<Tensor> {
    (surrogate(batch, clip)? * batch.mask)?.sum_all()? / -n_tokens
}

/// GRPO's clipped surrogate, to be minimised: `-sum_i (1 / |o_i|) sum_t min(r A, clip(r) A) / n_sequences`, a
/// scalar.
///
/// `n_sequences` counts the rollouts of the whole optimiser step that have trained tokens, so micro-batches
/// add up.
///
/// Source: GRPO, arXiv 2402.03300 equation 3, and DeepSeek-R1, arXiv 2501.12948 equation 1, without the KL
/// term. We differ in clamping the log-ratio to ±20.
///
/// # Errors
/// If the arrays do not share shape, dtype and device.
pub fn grpo(batch: &TokenBatch<'_>, clip: Clip, n_sequences: f64) -> Result<Tensor> {
    let per_token = (surrogate(batch, clip)? * batch.mask)?;
    (per_token * batch.inverse_lengths)?.sum_all()? / -n_sequences
}

/// `min(r A, clip(r) A)`, `[T]`.
fn surrogate(batch: &TokenBatch<'_>, clip: Clip) -> Result<Tensor> {
    let log_ratio = (batch.policy_logprobs - batch.rollout_logprobs)?;
    let ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)?.exp()?;
    let clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)?;
    (&ratio * batch.advantages)?.minimum(&(clipped * batch.advantages)?)
}

/// Which way the clip stopped a token, if it did; what `actor/pg_clipfrac` counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clipped {
    /// A good token whose ratio is already above `1 + high`.
    High,
    /// A bad token whose ratio is already below `1 - low`.
    Low,
}

/// Judges one trained token as the losses here do, from its log-ratio `policy - rollout`.
#[must_use]
pub fn clipped(log_ratio: f64, advantage: f64, clip: Clip) -> Option<Clipped> {
    let ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp();
    if advantage > 0.0 && ratio > 1.0 + clip.high {
        Some(Clipped::High)
    } else if advantage < 0.0 && ratio < 1.0 - clip.low {
        Some(Clipped::Low)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    type Loss = fn(&TokenBatch<'_>, Clip, f64) -> Result<Tensor>;

    const CLIP: Clip = Clip { low: 0.2, high: 0.28 };

    /// Two rollouts: tokens 0 to 2 (the first is a prompt token) and tokens 3 to 6.
    #[derive(Clone)]
    struct Case {
        policy: Vec<f32>,
        rollout: Vec<f32>,
        advantages: Vec<f32>,
        mask: Vec<f32>,
        inverse_lengths: Vec<f32>,
    }

    impl Case {
        fn new() -> Self {
            Self {
                policy: vec![-9.0, -0.9, -1.2, -0.5, -2.0, -1.4, -0.1],
                rollout: vec![0.0, -1.0, -1.25, -1.0, -1.0, -1.5, -0.2],
                advantages: vec![1.5, 1.5, 1.5, -0.5, -0.5, -0.5, -0.5],
                mask: vec![0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
                inverse_lengths: vec![0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25],
            }
        }

        fn slice(&self, from: usize, to: usize) -> Self {
            let cut = |values: &[f32]| values[from..to].to_vec();
            Self {
                policy: cut(&self.policy),
                rollout: cut(&self.rollout),
                advantages: cut(&self.advantages),
                mask: cut(&self.mask),
                inverse_lengths: cut(&self.inverse_lengths),
            }
        }

        /// Loss and gradient by the policy's logprobs.
        fn run(&self, loss: Loss, denominator: f64) -> (f32, Vec<f32>) {
            let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
            let policy = Var::from_tensor(&tensor(&self.policy)).unwrap();
            let [rollout, advantages, mask, inverse_lengths] =
                [&self.rollout, &self.advantages, &self.mask, &self.inverse_lengths].map(|v| tensor(v));
            let batch = TokenBatch {
                policy_logprobs: &policy,
                rollout_logprobs: &rollout,
                advantages: &advantages,
                mask: &mask,
                inverse_lengths: &inverse_lengths,
            };
            let loss = loss(&batch, CLIP, denominator).unwrap();
            let gradients = loss.backward().unwrap();
            (loss.to_scalar().unwrap(), gradients.get(&policy).unwrap().to_vec1().unwrap())
        }
    }

    /// The definition, token by token in f64.
    fn by_hand(case: &Case, weight: impl Fn(usize) -> f64) -> f64 {
        let mut loss = 0.0;
        for t in 0..case.policy.len() {
            let ratio = (f64::from(case.policy[t]) - f64::from(case.rollout[t])).exp();
            let advantage = f64::from(case.advantages[t]);
            let clipped = ratio.clamp(1.0 - CLIP.low, 1.0 + CLIP.high);
            loss -= f64::from(case.mask[t]) * weight(t) * (ratio * advantage).min(clipped * advantage);
        }
        loss
    }

    fn assert_close(actual: f64, expected: f64, tolerance: f64) {
        assert!((actual - expected).abs() <= tolerance, "{actual} is not {expected} within {tolerance}");
    }

    #[test]
    fn dapo_by_hand() {
        // One token, r = 2, A = 1: clipped to 1.28; one token, r = 0.5, A = -1: clipped to 0.8.
        let case = Case {
            policy: vec![2.0_f32.ln(), 0.5_f32.ln()],
            rollout: vec![0.0; 2],
            advantages: vec![1.0, -1.0],
            mask: vec![1.0; 2],
            inverse_lengths: vec![1.0; 2],
        };
        assert_close(case.run(dapo, 2.0).0.into(), (-1.28 + 0.8) / 2.0, 1e-6);
        let case = Case::new();
        assert_close(case.run(dapo, 6.0).0.into(), by_hand(&case, |_| 1.0 / 6.0), 1e-6);
    }

    #[test]
    fn grpo_by_hand() {
        let case = Case::new();
        let weight = |t: usize| if t < 3 { 1.0 / 2.0 / 2.0 } else { 1.0 / 4.0 / 2.0 };
        assert_close(case.run(grpo, 2.0).0.into(), by_hand(&case, weight), 1e-6);
    }

    #[test]
    fn gradients_match_finite_differences() {
        for loss in [dapo as Loss, grpo as Loss] {
            let case = Case::new();
            let gradient = case.run(loss, 6.0).1;
            for (t, gradient) in gradient.into_iter().enumerate() {
                let shifted = |by: f32| {
                    let mut case = case.clone();
                    case.policy[t] += by;
                    f64::from(case.run(loss, 6.0).0)
                };
                let step = 1e-2;
                let difference = (shifted(step) - shifted(-step)) / (2.0 * f64::from(step));
                assert_close(gradient.into(), difference, 2e-4);
            }
        }
    }

    #[test]
    fn a_clipped_token_has_no_gradient() {
        let mut case = Case::new();
        case.policy[1] = case.rollout[1] + 0.5; // A > 0 and r = 1.65 > 1.28
        case.policy[4] = case.rollout[4] - 0.5; // A < 0 and r = 0.61 < 0.8
        case.policy[5] = case.rollout[5] + 0.5; // A < 0 and r above the clip: still pulled back
        for loss in [dapo as Loss, grpo as Loss] {
            let gradient = case.run(loss, 6.0).1;
            assert_eq!([gradient[1], gradient[4]], [0.0, 0.0]);
            assert!(gradient[2] < 0.0 && gradient[5] > 0.0);
        }
        let judged = [1, 4, 5, 2].map(|t: usize| {
            let log_ratio = f64::from(case.policy[t]) - f64::from(case.rollout[t]);
            clipped(log_ratio, case.advantages[t].into(), CLIP)
        });
        assert_eq!(judged, [Some(Clipped::High), Some(Clipped::Low), None, None]);
    }

    #[test]
    fn a_masked_token_has_no_gradient() {
        for loss in [dapo as Loss, grpo as Loss] {
            assert_eq!(Case::new().run(loss, 6.0).1[0], 0.0);
        }
    }

    #[test]
    fn micro_batches_add_up() {
        for loss in [dapo as Loss, grpo as Loss] {
            let case = Case::new();
            let (whole, gradient) = case.run(loss, 6.0);
            let (first, first_gradient) = case.slice(0, 3).run(loss, 6.0);
            let (second, second_gradient) = case.slice(3, 7).run(loss, 6.0);
            assert_close((first + second).into(), whole.into(), 1e-6);
            assert_eq!([first_gradient, second_gradient].concat(), gradient);
        }
    }

    #[test]
    fn a_broken_ratio_stays_finite() {
        let mut case = Case::new();
        case.rollout[3] = -1e30; // A < 0: unclamped, the surrogate would be -inf
        for loss in [dapo as Loss, grpo as Loss] {
            let (loss, gradient) = case.run(loss, 6.0);
            assert!(loss.is_finite() && gradient.iter().all(|g| g.is_finite()));
        }
    }
}
