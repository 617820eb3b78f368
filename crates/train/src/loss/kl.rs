//! Estimates of `KL(policy || reference)` at a token that the policy sampled.
//!
//! Source: Schulman 2020, "Approximating KL Divergence" (k1 to k3). As values k1 and k3 are unbiased; as *losses* they are not
//! what they seem: on average the gradient of k1 is 0 and k3's is that of the reverse divergence, while k2's is the gradient of
//! the KL. The unbiased form, DeepSeek-V3.2 (arXiv 2512.02556 equation 7), weighs k3 by the importance ratio, whose gradient
//! makes up the difference off-policy as well.

use candle_core::{Result, Tensor};

use crate::loss::ratio::{LOG_RATIO_LIMIT, exp};

/// An estimate is clamped to `±KL_LIMIT` nats, so that one broken token cannot outweigh a step (veRL).
const KL_LIMIT: f64 = 10.0;

/// Which estimate; `x = policy - reference`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KlEstimator {
    /// `x`.
    K1,
    /// `x^2 / 2`.
    K2,
    /// `exp(-x) - 1 + x`.
    K3,
    /// `exp(policy - old) (exp(-x) - 1 + x)`.
    Unbiased,
}

impl KlEstimator {
    /// The estimate at each token, `[T]` nats, differentiable.
    ///
    /// # Errors
    /// If the arrays do not share shape, dtype and device.
    pub fn apply(self, policy: &Tensor, reference: &Tensor, old: &Tensor) -> Result<Tensor> {
        let x = (policy - reference)?.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)?;
        let estimate = match self {
            Self::K1 => x,
            Self::K2 => (x.sqr()? / 2.0)?,
            Self::K3 | Self::Unbiased => ((x.neg()?.exp()? + &x)? - 1.0)?,
        };
        let estimate = estimate.clamp(-KL_LIMIT, KL_LIMIT)?;
        match self {
            Self::Unbiased => estimate * exp(&(policy - old)?)?,
            Self::K1 | Self::K2 | Self::K3 => Ok(estimate),
        }
    }

    /// The same of one token, where policy and old weights are the same.
    #[must_use]
    pub fn of(self, log_ratio: f64) -> f64 {
        let x = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
        let estimate = match self {
            Self::K1 => x,
            Self::K2 => x * x / 2.0,
            Self::K3 | Self::Unbiased => (-x).exp_m1() + x,
        };
        estimate.clamp(-KL_LIMIT, KL_LIMIT)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn estimates_by_hand() {
        let policy = Var::new(&[0.5_f64, -30.0], &Device::Cpu).unwrap();
        let reference = Tensor::new(&[0.0_f64, 0.0], &Device::Cpu).unwrap();
        let old = Tensor::new(&[0.25_f64, -30.0], &Device::Cpu).unwrap();
        let k3 = (-0.5_f64).exp() - 0.5;
        for (estimator, expected) in [
            (KlEstimator::K1, [0.5, -10.0]),
            (KlEstimator::K2, [0.125, 10.0]),
            (KlEstimator::K3, [k3, 10.0]),
            (KlEstimator::Unbiased, [0.25_f64.exp() * k3, 10.0]),
        ] {
            let kl = estimator.apply(&policy, &reference, &old).unwrap();
            let gradient = kl.sum_all().unwrap().backward().unwrap();
            let values = kl.to_vec1::<f64>().unwrap();
            assert!(
                values.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12),
                "{values:?} {expected:?}"
            );
            let gradient = gradient.get(&policy).unwrap().to_vec1::<f64>().unwrap();
            assert!(gradient.iter().all(|value| value.is_finite()));
            let plain = if estimator == KlEstimator::Unbiased { k3 } else { expected[0] };
            assert!((estimator.of(0.5) - plain).abs() < 1e-12);
        }
    }

    /// Over all tokens of a distribution, weighed by how often the policy samples them.
    #[test]
    fn the_gradient_of_k2_and_of_the_unbiased_form_is_that_of_the_kl() {
        let logits = Var::new(&[0.3_f64, -1.0, 0.8], &Device::Cpu).unwrap();
        let reference = Tensor::new(&[-1.0_f64, -1.2, -1.1], &Device::Cpu).unwrap();
        let log_sum = logits.exp().unwrap().sum_all().unwrap().log().unwrap();
        let policy = logits.broadcast_sub(&log_sum).unwrap();
        let frozen = policy.detach();
        let probabilities = frozen.exp().unwrap();
        let gradient = |loss: Tensor| {
            let store = loss.sum_all().unwrap().backward().unwrap();
            store.get(&logits).unwrap().to_vec1::<f64>().unwrap()
        };
        let kl = gradient((policy.exp().unwrap() * (&policy - &reference).unwrap()).unwrap());
        let of = |estimator: KlEstimator| {
            gradient((estimator.apply(&policy, &reference, &frozen).unwrap() * &probabilities).unwrap())
        };
        let close = |a: &[f64]| a.iter().zip(&kl).all(|(a, b)| (a - b).abs() < 1e-12);
        assert!(close(&of(KlEstimator::K2)) && close(&of(KlEstimator::Unbiased)));
        assert!(!close(&of(KlEstimator::K1)) && !close(&of(KlEstimator::K3)));
    }
}
