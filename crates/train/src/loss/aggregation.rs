//! How the losses of tokens become one number.
//!
//! A loss is `sum_t weight_t * mask_t * loss_t / denominator`. Both factors count the whole optimiser step and never the
//! micro-batch, so the gradients of micro-batches add up to the gradient of the step, however it is cut.

use candle_core::{Result, Tensor};

/// How the losses of tokens become one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aggregation {
    /// `sum_t / n_tokens`: every token weighs the same (DAPO, arXiv 2503.14476; veRL's `token-mean`).
    TokenMean,
    /// `sum_i (1/|o_i|) sum_t / n_sequences`: every completion weighs the same (GRPO, arXiv 2402.03300; veRL's
    /// `seq-mean-token-mean`).
    SequenceMean,
    /// `sum_i (1/horizon) sum_t / n_sequences`: a token weighs the same in every step, too (Dr. GRPO, arXiv 2503.20783;
    /// veRL's `seq-mean-token-sum-norm`, and `seq-mean-token-sum` with a horizon of 1).
    SequenceSum {
        /// Tokens that a completion is divided by.
        horizon: usize,
    },
    /// `sum_g (1/sum_(i in g) |o_i|) sum_i sum_t / n_prompts`: every prompt weighs the same (ScaleRL, arXiv
    /// 2510.13786).
    PromptMean,
}

/// What an optimiser step trains on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCounts {
    /// Tokens trained on.
    pub n_tokens: usize,
    /// Completions with such tokens.
    pub n_sequences: usize,
    /// Prompts with such completions.
    pub n_prompts: usize,
}

impl Aggregation {
    /// Weight of each trained token of a completion that has `n_sequence` of them, when all completions of its prompt
    /// have `n_prompt`.
    #[must_use]
    pub fn weight(self, n_sequence: usize, n_prompt: usize) -> f64 {
        match self {
            Self::TokenMean | Self::SequenceSum { .. } => 1.0,
            Self::SequenceMean => 1.0 / n_sequence as f64,
            Self::PromptMean => 1.0 / n_prompt as f64,
        }
    }

    /// What the sum over an optimiser step is divided by.
    #[must_use]
    pub fn denominator(self, counts: &StepCounts) -> f64 {
        let &StepCounts { n_tokens, n_sequences, n_prompts } = counts;
        match self {
            Self::TokenMean => n_tokens as f64,
            Self::SequenceMean => n_sequences as f64,
            Self::SequenceSum { horizon } => n_sequences as f64 * horizon as f64,
            Self::PromptMean => n_prompts as f64,
        }
    }
}

/// `weight_t * mask_t * x_t`; all arrays are `[T]`.
pub(crate) fn weighted(x: &Tensor, mask: &Tensor, weights: &Tensor) -> Result<Tensor> {
    (x * mask)? * weights
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mean_gives_its_own_kind_the_same_weight() {
        // Prompt 0 has completions of 1 and 3 tokens, prompt 1 one of 4.
        let counts = StepCounts { n_tokens: 8, n_sequences: 3, n_prompts: 2 };
        let shares = |aggregation: Aggregation| {
            [(1, 4), (3, 4), (4, 4)].map(|(n_sequence, n_prompt)| {
                let weight = aggregation.weight(n_sequence, n_prompt);
                n_sequence as f64 * weight / aggregation.denominator(&counts)
            })
        };
        assert_eq!(shares(Aggregation::TokenMean), [1.0 / 8.0, 3.0 / 8.0, 4.0 / 8.0]);
        assert_eq!(shares(Aggregation::SequenceMean), [1.0 / 3.0; 3]);
        assert_eq!(shares(Aggregation::SequenceSum { horizon: 4 }), [1.0 / 12.0, 3.0 / 12.0, 4.0 / 12.0]);
        assert_eq!(shares(Aggregation::PromptMean), [1.0 / 8.0, 3.0 / 8.0, 1.0 / 2.0]);
    }
}
