//! What a training step does to weights, and a refit.

use std::hint::black_box;

use r3_kernels::adamw::bytes::ByteMoments;
use r3_kernels::adamw::{AdamwStep, adamw};
use r3_kernels::cast::{narrow_bf16, round_to_bf16, widen_bf16, widen_f16};
use r3_kernels::gemm::linear::Linear;
use r3_kernels::gemm::{Dtype, PackedMatrix};
use r3_kernels::low_rank::Factors;
use r3_kernels::muon::{MuonStep, muon};
use r3_kernels::weight_gradient::WeightGradient;

use super::{Case, DTYPES, F32, noise, pairs};

pub(super) fn elementwise_optimiser() -> Vec<Case> {
    let step = AdamwStep {
        lr: 1e-6,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.0,
        step: 10,
        grad_scale: 1.0,
    };
    let case = |n: usize| {
        let (mut param, grad) = (noise(n), noise(n));
        let (mut m, mut v) = (vec![0.0; n], vec![0.0; n]);
        Case::new(format!("[{n}]"), Dtype::F32, (0, 4 * n * F32), move || {
            adamw(black_box(&mut param), &grad, black_box(&mut m), black_box(&mut v), &step);
        })
    };
    let in_bytes = |n: usize| {
        let (mut param, grad, mut moments) = (noise(n), noise(n), ByteMoments::zeros(n));
        Case::new(format!("[{n}], 8 bit"), Dtype::F32, (0, 2 * n * (F32 + 1)), move || {
            moments.update(black_box(&mut param), &grad, &step, 1);
        })
    };
    let sizes = [1 << 18, 1 << 23];
    sizes.map(case).into_iter().chain(sizes.map(in_bytes)).collect()
}

/// Matrices of experts, and one of attention.
pub(super) fn matrix_optimiser() -> Vec<Case> {
    let step = MuonStep {
        lr: 1e-6,
        momentum: 0.95,
        nesterov: true,
        iterations: 5,
        weight_decay: 0.0,
        grad_scale: 1.0,
    };
    let case = |(n_matrices, rows, cols): (usize, usize, usize)| {
        let n = n_matrices * rows * cols;
        let (mut param, grad, mut sum) = (noise(n), noise(n), vec![0.0; n]);
        let (long, short) = (rows.max(cols), rows.min(cols));
        let flops = step.iterations * n_matrices * 2 * short * short * (2 * long + short);
        Case::new(format!("{n_matrices} x [{rows}, {cols}]"), Dtype::F32, (flops, 3 * n * F32), move || {
            muon(black_box(&mut param), &grad, black_box(&mut sum), (rows, cols), &step);
        })
    };
    [(32, 256, 512), (1, 768, 768)].map(case).into()
}

/// Gradients of the factors of an update of low rank, `[N, K]` being the matrix.
pub(super) fn low_rank_gradient() -> Vec<Case> {
    let (t, n, k) = (2048, 768, 768);
    let case = |rank: usize| {
        let (x, w, grad) = (noise(t * k), noise(n * k), noise(t * n));
        let (a, b) = (noise(rank * k), noise(n * rank));
        let (mut a_grad, mut b_grad) = (vec![0.0; a.len()], vec![0.0; b.len()]);
        let costs = (4 * t * rank * (n + k), (x.len() + grad.len() + a.len() + b.len()) * F32);
        Case::new(format!("[{t}], [{n}, {k}], rank {rank}"), Dtype::F32, costs, move || {
            let operands = Linear { x: &x, w: &w, k, dtype: Dtype::F32, lengths: &[t] };
            let factors = Factors { a: &a, b: &b, rank, scale: 0.5 };
            let (a, b) = (black_box(&mut a_grad[..]), black_box(&mut b_grad[..]));
            operands.add_w_gradient(black_box(&grad), WeightGradient::LowRank { factors, a, b });
        })
    };
    [8, 32].map(case).into()
}

/// The weights that an update of low rank makes of others: of attention, and of all experts of a layer.
pub(super) fn low_rank_merge() -> Vec<Case> {
    let case = |(count, n, k, rank): (usize, usize, usize, usize)| {
        let (base, mut out) = (noise(count * n * k), vec![0.0; count * n * k]);
        let (a, b) = (noise(count * rank * k), noise(count * n * rank));
        let costs = (2 * base.len() * rank, (base.len() + a.len() + b.len()) * F32);
        Case::new(format!("{count} x [{n}, {k}], rank {rank}"), Dtype::F32, costs, move || {
            let factors = Factors { a: &a, b: &b, rank, scale: 0.5 };
            factors.merge(black_box(&base), count, black_box(&mut out));
        })
    };
    [(1, 768, 768, 8), (32, 512, 512, 8)].map(case).into()
}

/// Of slices: checkpoints, hashes and embeddings.
pub(super) fn cast() -> Vec<Case> {
    let case = |n: usize| {
        let (values, narrow) = (noise(n), vec![[1, 63]; n]);
        let (mut rounded, mut narrowed) = (values.clone(), narrow.clone());
        let widen = |name: &str, widen: fn(&[[u8; 2]], &mut [f32])| {
            let (narrow, mut widened) = (narrow.clone(), vec![0.0; n]);
            Case::new(format!("[{n}], {name} to f32"), Dtype::F32, (0, n * F32 / 2), move || {
                widen(black_box(&narrow), black_box(&mut widened));
            })
        };
        [
            widen("bf16", widen_bf16),
            widen("f16", widen_f16),
            Case::new(format!("[{n}], f32 to bf16"), Dtype::F32, (0, n * F32), move || {
                narrow_bf16(black_box(&values), black_box(&mut narrowed));
            }),
            Case::new(format!("[{n}], rounded in place"), Dtype::F32, (0, n * F32), move || {
                round_to_bf16(black_box(&mut rounded));
            }),
        ]
    };
    [1 << 16, 1 << 23].into_iter().flat_map(case).collect()
}

/// A refit's share: f32 weights, rounded if need be, into the layout of products.
pub(super) fn cast_and_pack() -> Vec<Case> {
    let case = |(dtype, n): (Dtype, usize)| {
        let k = 768;
        let w = noise(n * k);
        let mut packed = PackedMatrix::pack(&w, n, k, dtype);
        Case::new(format!("[{n}, {k}]"), dtype, (0, n * k * F32), move || {
            packed.repack(black_box(&w));
        })
    };
    pairs(&DTYPES, &[768, 16_384]).into_iter().map(case).collect()
}
