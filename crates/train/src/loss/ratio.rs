//! How much likelier the policy has made what was sampled, by token or by completion.

use candle_core::{Result, Tensor};

/// Log-ratios are clamped to `±LOG_RATIO_LIMIT` before `exp`, so that one broken token cannot overflow a step.
pub const LOG_RATIO_LIMIT: f64 = 20.0;

/// What one ratio is taken over. Every token carries the ratio of what it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ratio {
    /// `r_t = exp(policy_t - old_t)`: PPO, arXiv 1707.06347 equation 6, as GRPO and DAPO take it.
    Token,
    /// `s = exp(mean_t log r_t)` over the trained tokens of a completion: GSPO, arXiv 2507.18071 equation 7.
    SequenceMean,
    /// `s = exp(sum_t log r_t)`: the completion as one action, as in RLOO, arXiv 2402.14740.
    Sequence,
}

impl Ratio {
    /// The log-ratio of each token, `[T]`, from `log_ratio = policy - old`; differentiable, not clamped.
    ///
    /// `mask` is `[T]` and 1 where a token is trained on; `lengths` are the tokens of each sequence and sum to `T`.
    ///
    /// # Errors
    /// If the arrays do not share shape, dtype and device.
    pub fn log_ratio(self, log_ratio: Tensor, mask: &Tensor, lengths: &[usize]) -> Result<Tensor> {
        if self == Self::Token {
            return Ok(log_ratio);
        }
        let (dtype, device) = (log_ratio.dtype(), log_ratio.device());
        let ids: Vec<u32> =
            (0..).zip(lengths).flat_map(|(id, &length)| std::iter::repeat_n(id, length)).collect();
        let ids = Tensor::new(ids, device)?;
        let zeros = Tensor::zeros(lengths.len(), dtype, device)?;
        let sums = zeros.index_add(&ids, &(log_ratio * mask)?, 0)?;
        let of_sequence = match self {
            // A sequence without a trained token divides 0 by 1.
            Self::SequenceMean => (sums / zeros.index_add(&ids, mask, 0)?.maximum(1.0)?)?,
            Self::Token | Self::Sequence => sums,
        };
        of_sequence.index_select(&ids, 0)
    }

    /// The same over plain numbers.
    #[must_use]
    pub fn log_ratios(self, log_ratios: &[f64], mask: &[f32], lengths: &[usize]) -> Vec<f64> {
        let mut out = log_ratios.to_vec();
        if self == Self::Token {
            return out;
        }
        let mut start = 0;
        for &length in lengths {
            let tokens = start..start + length;
            start += length;
            let trained = tokens.clone().filter(|&t| mask[t] != 0.0);
            let (n, sum) = trained.fold((0, 0.0), |(n, sum), t| (n + 1, sum + log_ratios[t]));
            let divisor = if self == Self::SequenceMean { n.max(1) as f64 } else { 1.0 };
            out[tokens].fill(sum / divisor);
        }
        out
    }
}

/// `exp` of a log-ratio, clamped.
pub(crate) fn exp(log_ratio: &Tensor) -> Result<Tensor> {
    log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)?.exp()
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn every_token_carries_the_ratio_of_its_sequence() {
        let (values, mask, lengths) = ([9.0, 1.0, 3.0, -1.0, -3.0], [0.0_f32, 1.0, 1.0, 1.0, 0.0], [3, 2]);
        let tensors = |ratio: Ratio| {
            let values = Tensor::new(&values, &Device::Cpu).unwrap();
            let mask = Tensor::new(&mask.map(f64::from), &Device::Cpu).unwrap();
            ratio.log_ratio(values, &mask, &lengths).unwrap().to_vec1::<f64>().unwrap()
        };
        for (ratio, expected) in [
            (Ratio::Token, values),
            (Ratio::SequenceMean, [2.0, 2.0, 2.0, -1.0, -1.0]),
            (Ratio::Sequence, [4.0, 4.0, 4.0, -1.0, -1.0]),
        ] {
            assert_eq!(tensors(ratio), expected);
            assert_eq!(ratio.log_ratios(&values, &mask, &lengths), expected);
        }
    }
}
