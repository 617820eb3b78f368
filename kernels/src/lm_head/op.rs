//! The head as a candle op.

use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

use super::gradient::HeadGradient;
use super::{Scores, Targets, head_logprobs};
use crate::candle_io::{f32_slice, f32_view};
use crate::gemm::PackedMatrix;

pub(super) fn apply(hidden: &Tensor, weight: &Tensor, head: Head) -> Result<(Tensor, Tensor)> {
    let (n_rows, shape) = (head.ids.len(), [head.packed.n(), head.packed.k()]);
    if weight.dims() != shape || hidden.dims() != [n_rows, shape[1]] {
        let (hidden, weight) = (hidden.dims(), weight.dims());
        bail!("head: hidden {hidden:?} and weight {weight:?} for {n_rows} targets of a packed {shape:?}");
    }
    let scores = hidden.contiguous()?.apply_op2(&weight.contiguous()?, head)?;
    Ok((scores.get(0)?, scores.get(1)?))
}

/// `hidden` `[T, D]`, `weight` `[V, D]` to logprobs and entropies, `[2, T]`.
pub(super) struct Head {
    packed: Arc<PackedMatrix>,
    ids: Arc<[u32]>,
    temperature: f32,
    /// Of the forward pass, `[T]`.
    target_logits: OnceLock<Vec<f32>>,
}

impl Head {
    pub(super) fn new(packed: Arc<PackedMatrix>, ids: Arc<[u32]>, temperature: f32) -> Self {
        Self { packed, ids, temperature, target_logits: OnceLock::new() }
    }

    fn targets(&self) -> Targets<'_> {
        Targets { ids: &self.ids, temperature: self.temperature }
    }
}

impl CustomOp2 for Head {
    fn name(&self) -> &'static str {
        "head-logprobs"
    }

    fn cpu_fwd(
        &self,
        hidden: &CpuStorage,
        layout: &Layout,
        _weight: &CpuStorage,
        _weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let n_rows = self.ids.len();
        let (mut scores, mut target_logits) = (vec![0.0; 2 * n_rows], vec![0.0; n_rows]);
        let (logprobs, entropies) = scores.split_at_mut(n_rows);
        let found = Scores { logprobs, entropies, target_logits: &mut target_logits };
        head_logprobs(f32_slice(hidden, layout)?, &self.packed, self.targets(), found);
        self.target_logits.get_or_init(|| target_logits);
        Ok((CpuStorage::F32(scores), Shape::from((2, n_rows))))
    }

    fn bwd(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        scores: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let (scores, grad) = (f32_view(scores)?, f32_view(&grad)?);
        let (logprobs, entropies) = scores.split_at(self.ids.len());
        let gradient = HeadGradient {
            hidden: &f32_view(hidden)?,
            weight: &f32_view(weight)?,
            packed: &self.packed,
            targets: self.targets(),
            logprobs,
            entropies,
            target_logits: self.target_logits.get().expect("the forward ran before the backward"),
        };
        let mut hidden_grad = vec![0.0; hidden.elem_count()];
        let mut weight_grad = vec![0.0; weight.elem_count()];
        gradient.add(grad.split_at(self.ids.len()), (&mut hidden_grad, &mut weight_grad));
        let tensor = |values, of: &Tensor| Tensor::from_vec(values, of.shape(), of.device()).map(Some);
        Ok((tensor(hidden_grad, hidden)?, tensor(weight_grad, weight)?))
    }
}
