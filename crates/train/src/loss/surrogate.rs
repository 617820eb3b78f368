//! What is maximised of a ratio and an advantage, token by token.

use candle_core::{Result, Tensor};

use crate::loss::ratio::{LOG_RATIO_LIMIT, exp};

/// How far the ratio may move before a token stops pulling: `[1 - low, 1 + high]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip {
    /// Below 1.
    pub low: f64,
    /// Above 1.
    pub high: f64,
}

/// What is maximised of ratio `r`, advantage `A` and logprob.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Surrogate {
    /// `min(r A, clip(r) A)` (PPO, arXiv 1707.06347 equation 7), and with `dual` at least `dual * A` where `A < 0`
    /// (dual-clip PPO, arXiv 1912.09729 equation 5).
    Clipped {
        /// Bounds of the ratio.
        clip: Clip,
        /// Above 1.
        dual: Option<f64>,
    },
    /// `sg(clip(r)) A log policy` (CISPO, arXiv 2506.13585 equation 4).
    Detached {
        /// Bounds of the weight.
        clip: Clip,
    },
}

impl Surrogate {
    /// PPO's, without a dual clip.
    #[must_use]
    pub fn clipped(clip: Clip) -> Self {
        Self::Clipped { clip, dual: None }
    }

    /// The surrogate of each token; every array is `[T]`, and `log_ratio` is not clamped yet.
    ///
    /// # Errors
    /// If the arrays do not share shape, dtype and device.
    pub fn apply(self, log_ratio: &Tensor, policy_logprobs: &Tensor, advantages: &Tensor) -> Result<Tensor> {
        match self {
            Self::Clipped { clip, dual } => {
                let ratio = exp(log_ratio)?;
                let clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)?;
                let surrogate = (&ratio * advantages)?.minimum(&(clipped * advantages)?)?;
                match dual {
                    // Where A >= 0 the floor is 0, and the surrogate is not below it.
                    Some(dual) => surrogate.maximum(&(advantages.minimum(0.0)? * dual)?),
                    None => Ok(surrogate),
                }
            }
            Self::Detached { clip } => {
                let weight = exp(&log_ratio.detach())?.clamp(1.0 - clip.low, 1.0 + clip.high)?;
                (weight * advantages)? * policy_logprobs
            }
        }
    }

    /// Judges one trained token as [`Self::apply`] does, from its log-ratio.
    #[must_use]
    pub fn judge(self, log_ratio: f64, advantage: f64) -> Option<Clipped> {
        let ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp();
        match self {
            Self::Clipped { dual: Some(dual), .. } if advantage < 0.0 && ratio > dual => Some(Clipped::Dual),
            Self::Clipped { clip, .. } if advantage > 0.0 && ratio > 1.0 + clip.high => Some(Clipped::High),
            Self::Clipped { clip, .. } if advantage < 0.0 && ratio < 1.0 - clip.low => Some(Clipped::Low),
            Self::Detached { clip } if ratio > 1.0 + clip.high => Some(Clipped::High),
            Self::Detached { clip } if ratio < 1.0 - clip.low => Some(Clipped::Low),
            Self::Clipped { .. } | Self::Detached { .. } => None,
        }
    }
}

/// Which way a clip stopped a token, if one did; what `actor/pg_clipfrac` counts. CISPO stops none: its weight is bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clipped {
    /// A good token whose ratio is already above `1 + high`.
    High,
    /// A bad token whose ratio is already below `1 - low`.
    Low,
    /// A bad token whose ratio is above the dual clip.
    Dual,
}
