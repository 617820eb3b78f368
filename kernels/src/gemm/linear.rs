//! `x Wᵀ` as a candle op.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

use super::gradient::{Left, product};
use super::{Dtype, PackedMatrix, matmul};
use crate::candle_io::{f32_slice, f32_view};

pub(super) fn apply(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    x.contiguous()?.apply_op2(&w.contiguous()?, Linear)
}

struct Linear;

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        w: &CpuStorage,
        w_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (n, k) = w_layout.shape().dims2()?;
        let Some((&width, outer)) = x_layout.dims().split_last() else { bail!("linear: x is a scalar") };
        if width != k || n == 0 || k == 0 {
            bail!("linear: x {:?} does not fit weights [{n}, {k}]", x_layout.dims());
        }
        let w = PackedMatrix::pack(f32_slice(w, w_layout)?, n, k, Dtype::F32);
        let mut y = vec![0.0; outer.iter().product::<usize>() * n];
        matmul(f32_slice(x, x_layout)?, &w, None, &mut y);
        Ok((CpuStorage::F32(y), Shape::from([outer, &[n]].concat())))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (_, k) = w.dims2()?;
        let (x_values, w_values) = (f32_view(x)?, f32_view(w)?);
        let grad = grad.contiguous()?;
        let grad = f32_view(&grad)?;
        let gradient = |of: &Tensor, a: Left<'_>, b: &[f32]| {
            let mut out = vec![0.0; of.elem_count()];
            product(a, b, k, &mut out);
            Tensor::from_vec(out, of.shape(), of.device())
        };
        let x_grad = || gradient(x, Left::Plain(&grad), &w_values);
        let w_grad = || gradient(w, Left::Transposed(&grad), &x_values);
        Ok((x.track_op().then(x_grad).transpose()?, w.track_op().then(w_grad).transpose()?))
    }
}
