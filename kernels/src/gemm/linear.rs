//! `x Wᵀ` as a candle op.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use gemm::Parallelism;

use super::gradient::{Matrix, product};
use super::{Dtype, PackedMatrix, matmul};
use crate::candle_io::{f32_slice, with_f32};

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
        let (n, k) = w.dims2()?;
        with_f32(grad, |grad| {
            let grad = Matrix::new(grad, n);
            let of = |like: &Tensor, a: Matrix<'_>, b: &[f32]| {
                let mut out = vec![0.0; like.elem_count()];
                product(a, Matrix::new(b, k), &mut out, Parallelism::Rayon(0));
                Tensor::from_vec(out, like.shape(), like.device())
            };
            let x_grad = x.track_op().then(|| with_f32(w, |w| of(x, grad, w))).transpose()?;
            let w_grad = w.track_op().then(|| with_f32(x, |x| of(w, grad.t(), x))).transpose()?;
            Ok((x_grad, w_grad))
        })
    }
}
