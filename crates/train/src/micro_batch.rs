//! A micro-batch: consecutive sequences of a batch, packed end to end as the model takes them.
//!
//! Inputs that a sequence shares with its leader have no rows of their own. Nobody is trained on what they predict, so for a
//! loss the rows of a prompt that is shared are the leader's.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use r3_core::ids::{PolicyVersion, TokenId};
use r3_kernels::lm_head::kept::Kept;
use r3_model::autograd::Packed;
use r3_recipe::objective::OldLogprobs;

use crate::batch::{Batch, RoutesUse, Sequence};
use crate::loss::TokenBatch;
use crate::loss::correction::OffPolicy;
use crate::objective::Objective;

/// One forward's worth of a batch. Every array without a shape is `[T]`, an entry a row; entry `t` of an array about
/// predictions is about the token that input `t` predicts.
///
/// A buffer for [`Self::gather`], filled again for every micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MicroBatch {
    /// Inputs: all tokens of each sequence but its last and those it shares.
    pub tokens: Vec<TokenId>,
    /// The token after each input.
    pub targets: Vec<TokenId>,
    /// `[sequences]`: rows of each, summing to `T`.
    pub lengths: Vec<usize>,
    /// `[sequences]`: inputs before them whose rows are its leader's.
    pub shared: Vec<usize>,
    /// Logprob of each target when it was sampled, in nats; 0 for prompt tokens.
    pub rollout_logprobs: Vec<f32>,
    /// The version that sampled each target; 0 for prompt tokens.
    pub versions: Vec<PolicyVersion>,
    /// Advantage of the sequence.
    pub advantages: Vec<f64>,
    /// 1 where the target is trained on, else 0.
    pub mask: Vec<f32>,
    /// Weight of the sequence's tokens in the loss.
    pub weights: Vec<f64>,
    /// Tokens of each target's support, 0 for all of the vocabulary; empty when no rollout's draws were truncated.
    pub support_sizes: Vec<u32>,
    /// The supports, one after another, each ascending.
    pub support: Vec<u32>,
    /// `[L, T, K]`: the routes of the inputs, layer by layer, in router order; empty when the batch carries
    /// none.
    pub routes: Vec<u16>,
}

impl MicroBatch {
    /// Replaces this micro-batch by the `sequences` of `batch`; routes are read from where the rollouts lie.
    ///
    /// # Panics
    /// If the range is not one of the batch.
    pub fn gather(&mut self, batch: &Batch<'_>, sequences: Range<usize>) {
        let sequences = &batch.sequences()[sequences];
        self.clear();
        for sequence in sequences {
            self.push(sequence);
        }
        if sequences.iter().any(|sequence| sequence.sample.rollout.support.is_some()) {
            self.push_supports(sequences);
        }
        if batch.routes() != RoutesUse::None {
            self.push_routes(sequences);
        }
    }

    /// What `objective` multiplies the surrogate of each token by, `[T]`, if anything.
    ///
    /// # Panics
    /// If the logprobs are not `[T]`.
    #[must_use]
    pub fn correction(
        &self,
        objective: &Objective,
        policy_logprobs: &[f64],
        old_logprobs: &[f32],
    ) -> Option<Vec<f64>> {
        let double = |values: &[f32]| values.iter().copied().map(f64::from).collect::<Vec<_>>();
        let old_logprobs = match objective.old_logprobs {
            OldLogprobs::Rollout => None,
            OldLogprobs::Trainer => Some(double(old_logprobs)),
        };
        objective.correction.is_on().then(|| {
            objective.correction.weights(&OffPolicy {
                policy_logprobs,
                trainer_logprobs: old_logprobs.as_deref().unwrap_or(policy_logprobs),
                rollout_logprobs: &double(&self.rollout_logprobs),
                advantages: &self.advantages,
                mask: &self.mask,
                lengths: &self.lengths,
            })
        })
    }

    /// As a policy takes it.
    #[must_use]
    pub fn packed(&self) -> Packed<'_> {
        Packed { tokens: &self.tokens, targets: &self.targets, lengths: &self.lengths, shared: &self.shared }
    }

    /// What its targets are scored over; `None` for all of the vocabulary.
    #[must_use]
    pub fn kept(&self) -> Option<Kept<'_>> {
        let Self { support_sizes: sizes, support: ids, .. } = self;
        (!sizes.is_empty()).then_some(Kept { sizes, ids })
    }

    /// Rows, `T`.
    #[must_use]
    pub fn n_rows(&self) -> usize {
        self.tokens.len()
    }

    /// Inputs of all sequences, those that are shared counted for each.
    #[must_use]
    pub fn n_inputs(&self) -> usize {
        self.n_rows() + self.shared.iter().sum::<usize>()
    }

    /// Inputs that each row stands for, `[T]`: 1, and 1 more for each sequence that shares it.
    #[must_use]
    pub fn uses(&self) -> Vec<u64> {
        let mut uses = vec![1; self.n_rows()];
        let (mut start, mut leader) = (0, 0);
        for (length, &n_shared) in self.lengths.iter().zip(&self.shared) {
            if n_shared == 0 {
                leader = start;
            }
            uses[leader..leader + n_shared].iter_mut().for_each(|uses| *uses += 1);
            start += length;
        }
        uses
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.targets.clear();
        self.lengths.clear();
        self.shared.clear();
        self.rollout_logprobs.clear();
        self.versions.clear();
        self.advantages.clear();
        self.mask.clear();
        self.weights.clear();
        self.support_sizes.clear();
        self.support.clear();
        self.routes.clear();
    }

    fn push(&mut self, sequence: &Sequence<'_>) {
        let rollout = &sequence.sample.rollout;
        let (n_rows, n_shared) = (sequence.n_rows(), sequence.n_shared);
        let n_sampled = rollout.completion().len();
        let end = self.tokens.len() + n_rows;
        self.tokens.extend_from_slice(&rollout.tokens[n_shared..n_shared + n_rows]);
        self.targets.extend_from_slice(&rollout.tokens[n_shared + 1..]);
        self.lengths.push(n_rows);
        self.shared.push(n_shared);
        self.rollout_logprobs.resize(end - n_sampled, 0.0);
        self.rollout_logprobs.extend_from_slice(rollout.rollout_logprobs);
        self.versions.resize(end - n_sampled, PolicyVersion::default());
        self.versions.extend_from_slice(rollout.versions);
        self.advantages.resize(end, sequence.advantage);
        self.weights.resize(end, sequence.weight);
        self.mask.resize(end - n_sampled, 0.0);
        match sequence.sample.mask {
            Some(mask) => self.mask.extend(mask.iter().map(|&kept| f32::from(u8::from(kept != 0)))),
            None => self.mask.resize(end, 1.0),
        }
    }

    /// Targets of the prompt and given tokens have no support, as if they had been drawn from all of the vocabulary.
    fn push_supports(&mut self, sequences: &[Sequence<'_>]) {
        for sequence in sequences {
            let end = self.support_sizes.len() + sequence.n_rows();
            if let Some(support) = sequence.sample.rollout.support {
                self.support_sizes.resize(end - support.rows(), 0);
                self.support_sizes.extend_from_slice(support.sizes());
                self.support.extend(support.ids().iter().map(|token| token.0));
            }
            self.support_sizes.resize(end, 0);
        }
    }

    fn push_routes<'a>(&mut self, sequences: &[Sequence<'a>]) {
        let view = |sequence: &Sequence<'a>| {
            (sequence.n_shared, sequence.sample.rollout.routes.expect("pack refused missing routes"))
        };
        let Some(dims) = sequences.first().map(|first| view(first).1.dims()) else { return };
        self.routes.resize(dims.row_ids() * self.tokens.len(), 0);
        let mut rows = self.routes.chunks_exact_mut(dims.top_k);
        for layer in 0..dims.n_layers {
            for (n_shared, view) in sequences.iter().map(view) {
                for (row, ids) in (n_shared..view.rows()).zip(rows.by_ref()) {
                    view.copy_layer(row, layer, ids);
                }
            }
        }
    }
}

/// The arrays of a micro-batch that losses need, as tensors `[T]`.
#[derive(Clone, Debug)]
pub struct LossInputs {
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    correction: Option<Tensor>,
    ref_logprobs: Option<Tensor>,
}

impl LossInputs {
    /// The arrays of `micro` as `dtype`. `old_logprobs` is `[T]`: what the ratio divides by.
    ///
    /// # Errors
    /// If candle fails.
    pub fn new(micro: &MicroBatch, old_logprobs: &[f32], dtype: DType) -> Result<Self> {
        let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu)?.to_dtype(dtype);
        let double = |values: &[f64]| Tensor::new(values, &Device::Cpu)?.to_dtype(dtype);
        Ok(Self {
            old_logprobs: tensor(old_logprobs)?,
            advantages: double(&micro.advantages)?,
            mask: tensor(&micro.mask)?,
            weights: double(&micro.weights)?,
            correction: None,
            ref_logprobs: None,
        })
    }

    /// Adds the reference's logprobs `[T]`.
    ///
    /// # Errors
    /// If candle fails.
    pub fn refer_to(&mut self, ref_logprobs: &[f32]) -> Result<()> {
        let dtype = self.weights.dtype();
        self.ref_logprobs = Some(Tensor::new(ref_logprobs, &Device::Cpu)?.to_dtype(dtype)?);
        Ok(())
    }

    /// Multiplies the surrogate of each token by `weights` `[T]`.
    ///
    /// # Errors
    /// If candle fails.
    pub fn correct(&mut self, weights: &[f64]) -> Result<()> {
        let dtype = self.weights.dtype();
        self.correction = Some(Tensor::new(weights, &Device::Cpu)?.to_dtype(dtype)?);
        Ok(())
    }

    /// The micro-batch with the policy's logprobs and entropies, each `[T]`.
    #[must_use]
    pub fn batch<'a>(
        &'a self,
        (policy_logprobs, entropy): (&'a Tensor, &'a Tensor),
        micro: &'a MicroBatch,
    ) -> TokenBatch<'a> {
        TokenBatch {
            policy_logprobs,
            old_logprobs: &self.old_logprobs,
            ref_logprobs: self.ref_logprobs.as_ref(),
            entropy,
            advantages: &self.advantages,
            mask: &self.mask,
            weights: &self.weights,
            correction: self.correction.as_ref(),
            lengths: &micro.lengths,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Limits;
    use crate::fixtures::{OwnedRollout, dapo, with_groups};
    use r3_core::routes::RouteDims;
    use r3_core::support::SupportRows;

    #[test]
    fn two_sequences_by_hand() {
        let dims = RouteDims { n_layers: 2, top_k: 1, n_experts: 4 };
        let mut first = OwnedRollout::new(0, 0, (2, 2), 1.0).with_routes(dims);
        first.mask = Some(vec![1, 0]);
        let mut second = OwnedRollout::new(0, 1, (1, 2), 0.0).with_routes(dims);
        second.version = 5;
        with_groups(&[first, second], |groups| {
            let limits = Limits {
                mini_steps: 1,
                micro_batch_tokens: 100,
                share_prompts: true,
                routes: RoutesUse::Replay,
            };
            let batch = Batch::pack(groups, &dapo(), limits).unwrap();
            let mut micro = MicroBatch { tokens: vec![TokenId(9); 40], ..MicroBatch::default() };
            micro.gather(&batch, 0..2);
            assert_eq!(micro.tokens, [0, 1, 2, 100, 101].map(TokenId));
            assert_eq!(micro.targets, [1, 2, 3, 101, 102].map(TokenId));
            assert_eq!(micro.lengths, [3, 2]);
            assert_eq!(micro.rollout_logprobs, [0.0, 0.0, -1.0, -1.0, -2.0]);
            assert_eq!(micro.versions, [0, 0, 0, 5, 5].map(PolicyVersion));
            assert_eq!(micro.mask, [0.0, 1.0, 0.0, 1.0, 1.0]);
            assert_eq!(micro.weights, [1.0; 5], "each token of DAPO weighs the same");
            assert_eq!(micro.routes, [0, 1, 2, 0, 1, 1, 2, 3, 1, 2]);
            assert!(micro.kept().is_none());
            assert!(micro.advantages[0] > 0.0 && micro.advantages[3] == -micro.advantages[0]);
        });
    }

    const UNROUTED: Limits =
        Limits { mini_steps: 1, micro_batch_tokens: 100, share_prompts: true, routes: RoutesUse::None };

    #[test]
    fn supports_lie_at_the_targets_they_are_of() {
        let mut rollouts =
            [(0, 1.0), (1, 0.0), (2, 1.0)].map(|(index, reward)| OwnedRollout::new(0, index, (2, 2), reward));
        let mut supports = SupportRows::default();
        supports.push(&[3, 102]);
        supports.push(&[103, 104, 105]);
        rollouts[1].support = Some(supports);
        with_groups(&rollouts, |groups| {
            let batch = Batch::pack(groups, &dapo(), UNROUTED).unwrap();
            let mut micro = MicroBatch::default();
            micro.gather(&batch, 0..3);
            assert_eq!(micro.targets, [1, 2, 3, 101, 102, 103, 201, 202, 203].map(TokenId));
            assert_eq!(micro.support_sizes, [0, 0, 0, 0, 2, 3, 0, 0, 0]);
            assert_eq!(micro.support, [3, 102, 103, 104, 105]);
            assert!(micro.kept().is_some());
            micro.gather(&batch, 0..1);
            assert!(micro.kept().is_none() && micro.support.is_empty());
        });
    }

    #[test]
    fn without_routes_none_are_gathered() {
        let dims = RouteDims { n_layers: 2, top_k: 1, n_experts: 4 };
        let rollouts =
            [0.0, 1.0].map(|reward| OwnedRollout::new(0, reward as u32, (1, 1), reward).with_routes(dims));
        with_groups(&rollouts, |groups| {
            let batch = Batch::pack(groups, &dapo(), UNROUTED).unwrap();
            let mut micro = MicroBatch::default();
            micro.gather(&batch, 0..2);
            assert_eq!(micro.routes.capacity(), 0, "off holds no route memory");
            let mut used = MicroBatch { routes: vec![7; 9], ..MicroBatch::default() };
            used.gather(&batch, 0..2);
            assert_eq!(used, micro, "nothing of an earlier micro-batch stays");
        });
    }
}
