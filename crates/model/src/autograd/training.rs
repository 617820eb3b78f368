//! How weights are trained: whole, not at all, or through an update of low rank.

use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Var, bail};
use r3_kernels::low_rank::Factors;
use r3_kernels::weight_gradient::WeightGradient;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::values::values;
use crate::error::ModelError;

/// How a weight is trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Training {
    /// Every element.
    Whole,
    /// Not at all: it has no gradient and nothing changes it.
    Frozen,
    /// `W = W0 + scale B A`, of which the factors are trained (LoRA, arXiv 2106.09685, section 4.1): `A` `[r, K]` starts
    /// uniform in `1 / sqrt(K)` either way, as PEFT's, and `B` `[N, r]` at 0, so `W` starts as `W0`, to the bit. Experts
    /// are stacks of matrices, each with factors of its own.
    LowRank {
        /// `r`.
        rank: usize,
        /// What the update is multiplied with: `alpha / r`.
        scale: f32,
    },
}

/// Whether a weight can have an update of low rank: projections, routers and experts can; norms, biases, embeddings and
/// the head cannot.
#[must_use]
pub fn takes_low_rank(name: &str) -> bool {
    let matrix = name.strip_suffix(".weight").unwrap_or(name);
    matrix.ends_with("_proj") || matrix.ends_with("mlp.gate")
}

/// Names of the factors `A` and `B` of weight `name`.
#[must_use]
pub fn factor_names(name: &str) -> [String; 2] {
    let stem = name.strip_suffix(".weight").unwrap_or(name);
    ["A", "B"].map(|factor| format!("{stem}.lora_{factor}.weight"))
}

/// What becomes of a weight's gradient. Numbers are indices among the trained tensors.
#[derive(Debug)]
pub(super) enum Learning {
    Whole(usize),
    Frozen,
    LowRank(LowRank),
}

/// A weight with factors.
#[derive(Debug)]
pub(super) struct LowRank {
    /// Where `A` is; `B` follows.
    first: usize,
    rank: usize,
    scale: f32,
    /// Matrices of the stack.
    count: usize,
    /// The weight without its update.
    base: Vec<f32>,
    /// Copies of the factors, as they are merged.
    factors: [Vec<f32>; 2],
}

impl Learning {
    /// Lets weight number `index` learn as `how` says, adding what is trained to `trained`.
    pub(super) fn new(
        how: Training,
        (name, weight): &(String, Var),
        (seed, index): (u64, u64),
        trained: &mut Vec<(String, Var)>,
    ) -> Result<Self, ModelError> {
        let first = trained.len();
        let Training::LowRank { rank, scale } = how else {
            if how == Training::Frozen {
                return Ok(Self::Frozen);
            }
            trained.push((name.clone(), weight.clone()));
            return Ok(Self::Whole(first));
        };
        assert!(takes_low_rank(name), "{name} takes no update of low rank");
        let (stack, [n, k]) = match *weight.dims() {
            [n, k] => (vec![], [n, k]),
            [count, n, k] => (vec![count], [n, k]),
            _ => unreachable!("a matrix or a stack of them"),
        };
        let shape = |rows, columns| [&stack[..], &[rows, columns]].concat();
        // Streams of fresh weights are their numbers: the same seed must not give the same numbers twice.
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream((1 << 32) + index);
        let count = stack.iter().product::<usize>();
        let bound = 1.0 / (k as f32).sqrt();
        let a: Vec<f32> = (0..count * rank * k).map(|_| bound * (2.0 * rng.random::<f32>() - 1.0)).collect();
        let b = vec![0.0; count * n * rank];
        for ((name, values), shape) in
            factor_names(name).into_iter().zip([&a, &b]).zip([shape(rank, k), shape(n, rank)])
        {
            trained.push((name, Var::from_slice(values, shape, &Device::Cpu)?));
        }
        let base = values(weight.as_tensor())?.to_vec();
        Ok(Self::LowRank(LowRank { first, rank, scale, count, base, factors: [a, b] }))
    }

    /// The first trained tensor it needs.
    pub(super) fn first(&self) -> Option<usize> {
        match self {
            Self::Whole(first) | Self::LowRank(LowRank { first, .. }) => Some(*first),
            Self::Frozen => None,
        }
    }

    /// Where its gradient goes among `gradients`, those of the trained tensors from `start` on.
    pub(super) fn gradient<'a>(&'a self, gradients: &'a mut [Vec<f32>], start: usize) -> WeightGradient<'a> {
        match self {
            Self::Frozen => WeightGradient::Frozen,
            Self::Whole(at) => WeightGradient::Whole(&mut gradients[at - start]),
            Self::LowRank(low_rank) => {
                let at = low_rank.first - start;
                let [a, b] = gradients.get_disjoint_mut([at, at + 1]).expect("B follows A");
                WeightGradient::LowRank { factors: low_rank.factors(), a, b }
            }
        }
    }

    /// The gradient of one that takes no update of low rank; `None` if it is frozen.
    pub(super) fn whole<'a>(&self, gradients: &'a mut [Vec<f32>]) -> Option<&'a mut [f32]> {
        match self {
            Self::Frozen => None,
            Self::Whole(at) => Some(&mut gradients[*at]),
            Self::LowRank(_) => unreachable!("refused when it was set"),
        }
    }

    /// Brings `weight` up to date with its factors among `trained`.
    pub(super) fn merge(&mut self, trained: &[(String, Var)], weight: &Var) {
        let Self::LowRank(low_rank) = self else { return };
        for (copy, (_, var)) in low_rank.factors.iter_mut().zip(&trained[low_rank.first..]) {
            copy.copy_from_slice(&values(var.as_tensor()).expect("factors were made here"));
        }
        weight.inplace_op1(&*low_rank).expect("weights were made here");
    }
}

impl LowRank {
    fn factors(&self) -> Factors<'_> {
        let [a, b] = &self.factors;
        Factors { a, b, rank: self.rank, scale: self.scale }
    }
}

/// Writes the merged weight into its own memory, which others share.
impl InplaceOp1 for LowRank {
    fn name(&self) -> &'static str {
        "merge"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (CpuStorage::F32(values), Some((start, end))) = (storage, layout.contiguous_offsets()) else {
            bail!("a weight is not contiguous f32")
        };
        self.factors().merge(&self.base, self.count, &mut values[start..end]);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
