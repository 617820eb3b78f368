//! Attention as a candle op: the packed forward, and its gradient with probabilities recomputed.
//!
//! A task is one kv head of one sequence, walked through in order, so every sum of the gradient has one order.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};

use super::kernel::{LANES, MAX_PASS, Rows, View, padded};
use super::{Heads, PackedKv, Pages, Table, packed_attention};
use crate::candle_io::{f32_slice, with_f32};
use crate::isa::{Isa, Lanes, multiversion, sum_lanes};
use crate::parallel::{self, Disjoint};
use crate::softmax::{exp_in_place, max};

pub(super) fn apply(q: &Tensor, k: &Tensor, v: &Tensor, lengths: Arc<[usize]>) -> Result<Tensor> {
    let (n_tokens, n_heads, head_dim) = q.dims3()?;
    let (_, n_kv_heads, _) = k.dims3()?;
    let kv = (n_tokens, n_kv_heads, head_dim);
    let total: usize = lengths.iter().sum();
    let shares = n_kv_heads > 0 && n_heads.is_multiple_of(n_kv_heads);
    if k.dims3()? != kv || v.dims3()? != kv || total != n_tokens || !shares {
        let shapes = [q, k, v].map(Tensor::dims);
        bail!("attention of q, k, v {shapes:?} over lengths that sum to {total}");
    }
    let op = Attention { lengths, heads: Heads { n_heads, n_kv_heads, head_dim } };
    q.contiguous()?.apply_op3(&k.contiguous()?, &v.contiguous()?, op)
}

struct Attention {
    lengths: Arc<[usize]>,
    heads: Heads,
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (q, kv) = (f32_slice(q, q_layout)?, (f32_slice(k, k_layout)?, f32_slice(v, v_layout)?));
        let mut out = vec![0.0; q.len()];
        packed_attention(q, kv, &self.lengths, self.heads, &mut out);
        Ok((CpuStorage::F32(out), q_layout.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let mut grads = [q, k, v].map(|x| vec![0.0; x.elem_count()]);
        with_f32(q, |q| {
            with_f32(grad, |grad| {
                with_f32(k, |k| {
                    with_f32(v, |v| {
                        self.backward((q, grad), (k, v), &mut grads);
                        Ok(())
                    })
                })
            })
        })?;
        let [q_grad, k_grad, v_grad] = grads;
        let tensor =
            |values: Vec<f32>, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device()).map(Some);
        Ok((tensor(q_grad, q)?, tensor(k_grad, k)?, tensor(v_grad, v)?))
    }
}

impl Attention {
    fn backward(&self, (q, grad): (&[f32], &[f32]), (k, v): (&[f32], &[f32]), grads: &mut [Vec<f32>; 3]) {
        let heads = self.heads;
        // The second cache holds values where keys belong and keys where values do: `grad . v_p` is then a score,
        // and the gradient of a query a weighted sum.
        let (plain, swapped) =
            (PackedKv::new(&self.lengths, heads, k, v), PackedKv::new(&self.lengths, heads, v, k));
        let [q_grad, k_grad, v_grad] = grads.each_mut().map(|grad| Disjoint::new(grad));
        let sequences = plain.sequences();
        let first_tokens: Vec<usize> =
            self.lengths.iter().scan(0, |end, n| Some(std::mem::replace(end, *end + n))).collect();
        let work = self.lengths.iter().map(|n| n * n * 5 * heads.query_len()).sum();
        parallel::for_each(sequences.len() * heads.n_kv_heads, work, |i| {
            let (sequence, kv_head) = (i / heads.n_kv_heads, i % heads.n_kv_heads);
            let table = Table { blocks: sequences[sequence].blocks, block_tokens: LANES };
            let job = Job {
                views: [plain.view(kv_head, table), swapped.view(kv_head, table)],
                q,
                grad,
                heads,
                kv_head,
            };
            let tokens = Tokens { first: first_tokens[sequence], len: self.lengths[sequence] };
            BUFFERS.with_borrow_mut(|buffers| {
                backward_sequence(&job, tokens, buffers, &q_grad);
                for (parts, rows) in [(&k_grad, &buffers.k_grad), (&v_grad, &buffers.v_grad)] {
                    for (t, row) in rows.chunks_exact(heads.head_dim).enumerate() {
                        let start = ((tokens.first + t) * heads.n_kv_heads + kv_head) * heads.head_dim;
                        // SAFETY: tasks are distinct pairs of sequence and kv head, and the range is such a pair's.
                        unsafe { parts.part(start..start + heads.head_dim) }.copy_from_slice(row);
                    }
                }
            });
        });
    }
}

impl PackedKv<'_> {
    fn view<'a>(&'a self, kv_head: usize, table: Table<'a>) -> View<'a, f32> {
        let Pages::F32(tiles) = &self.cache.pages else { unreachable!("packed sequences are f32") };
        tiles.view(&self.cache, 0, kv_head, table)
    }
}

/// What a task reads.
struct Job<'a> {
    /// Keys and values, then the two swapped.
    views: [View<'a, f32>; 2],
    q: &'a [f32],
    grad: &'a [f32],
    heads: Heads,
    kv_head: usize,
}

/// The tokens of one sequence among all.
#[derive(Clone, Copy)]
struct Tokens {
    first: usize,
    len: usize,
}

/// Buffers of a task, grown to the longest sequence and kept.
#[derive(Default)]
struct Buffers {
    /// `[len, hd]`.
    k_grad: Vec<f32>,
    /// `[len, hd]`.
    v_grad: Vec<f32>,
    /// Of one pass, `[R, hd]`: scaled queries, gradients of the outputs, gradients of the queries.
    queries: Vec<f32>,
    out_grads: Vec<f32>,
    q_grads: Vec<f32>,
    /// Of one pass, `[R, stride]`: probabilities, and gradients of scores.
    probabilities: Vec<f32>,
    score_grads: Vec<f32>,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

multiversion! {
    fn backward_sequence(
        job: &Job<'_>, tokens: Tokens, buffers: &mut Buffers, q_grad: &Disjoint<'_, f32>,
    ) = backward_sequence_body;
}

#[inline(always)]
fn backward_sequence_body<I: Isa>(
    job: &Job<'_>,
    tokens: Tokens,
    buffers: &mut Buffers,
    q_grad: &Disjoint<'_, f32>,
) {
    let heads = job.heads;
    let stride = tokens.len.next_multiple_of(LANES);
    for grad in [&mut buffers.k_grad, &mut buffers.v_grad] {
        grad.clear();
        grad.resize(tokens.len * heads.head_dim, 0.0);
    }
    for rows in [&mut buffers.probabilities, &mut buffers.score_grads] {
        rows.resize(MAX_PASS * stride, 0.0);
    }
    let rows = Rows { group: heads.group(), start: 0, n_rows: tokens.len * heads.group() };
    let mut first = 0;
    while first < rows.n_rows {
        let n = rows.pass_len::<I>(first);
        // Where row `first + r` lies in `q` and in its gradient.
        let start_of = |r: usize| {
            let (query, head) = ((first + r) / heads.group(), (first + r) % heads.group());
            (tokens.first + query) * heads.query_len() + (job.kv_head * heads.group() + head) * heads.head_dim
        };
        buffers.queries.clear();
        buffers.out_grads.clear();
        for r in 0..n {
            let row = start_of(r)..start_of(r) + heads.head_dim;
            buffers.queries.extend(job.q[row.clone()].iter().map(|x| x * heads.scale()));
            buffers.out_grads.extend_from_slice(&job.grad[row]);
        }
        match n {
            8 => backward_pass::<I, 8>(job, rows, first, buffers),
            4 => backward_pass::<I, 4>(job, rows, first, buffers),
            3 => backward_pass::<I, 3>(job, rows, first, buffers),
            2 => backward_pass::<I, 2>(job, rows, first, buffers),
            _ => backward_pass::<I, 1>(job, rows, first, buffers),
        }
        for (r, row) in buffers.q_grads.chunks_exact(heads.head_dim).enumerate() {
            // SAFETY: tasks are distinct pairs of sequence and kv head, and the range is such a pair's.
            let out = unsafe { q_grad.part(start_of(r)..start_of(r) + heads.head_dim) };
            for (out, x) in out.iter_mut().zip(row) {
                *out = heads.scale() * x;
            }
        }
        first += n;
    }
}

/// With `p` the probabilities and `g` the output's gradient: `ds_j = p_j (g . v_j - sum_i p_i g . v_i)`, then
/// `dq = sum_j ds_j k_j`, `dk_j += ds_j q`, `dv_j += p_j g`.
#[inline(always)]
fn backward_pass<I: Isa, const R: usize>(job: &Job<'_>, rows: Rows, first: usize, buffers: &mut Buffers) {
    let [view, swapped] = &job.views;
    let stride = buffers.probabilities.len() / MAX_PASS;
    let n_keys = rows.n_keys(first + R - 1);
    view.score::<I, R, 1>(&buffers.queries, n_keys, &mut buffers.probabilities, stride);
    swapped.score::<I, R, 1>(&buffers.out_grads, n_keys, &mut buffers.score_grads, stride);
    for r in 0..R {
        let (seen, unseen) =
            buffers.probabilities[r * stride..][..n_keys].split_at_mut(rows.n_keys(first + r));
        unseen.fill(0.0);
        let sum = exp_in_place::<I>(seen, max(seen));
        softmax_gradient::<I>(seen, sum, &mut buffers.score_grads[r * stride..][..n_keys]);
    }
    buffers.q_grads.clear();
    buffers.q_grads.resize(R * job.heads.head_dim, 0.0);
    swapped.add_weighted::<I, R>(&buffers.score_grads, stride, 0..n_keys, &mut buffers.q_grads);
    add_outer::<I, R>((&buffers.score_grads, stride), &buffers.queries, n_keys, &mut buffers.k_grad);
    add_outer::<I, R>((&buffers.probabilities, stride), &buffers.out_grads, n_keys, &mut buffers.v_grad);
}

/// Divides `exps` by their `sum`, and turns `grads`, of the probabilities, into those of the scores; 0 beyond `exps`.
#[inline(always)]
fn softmax_gradient<I: Isa>(exps: &mut [f32], sum: f32, grads: &mut [f32]) {
    let (grads, unseen) = grads.split_at_mut(exps.len());
    unseen.fill(0.0);
    let mut lanes = [0.0; LANES];
    for (exps, grads) in exps.chunks_mut(LANES).zip(grads.chunks(LANES)) {
        for ((lane, p), &grad) in lanes.iter_mut().zip(exps).zip(grads) {
            *p /= sum;
            *lane = I::mul_add(*p, grad, *lane);
        }
    }
    let mean = sum_lanes(lanes);
    for (grad, p) in grads.iter_mut().zip(exps) {
        *grad = *p * (*grad - mean);
    }
}

/// `out[p] += sum_r weights[r][p] rows[r]` for `p` in `0..n_keys`: `rows` `[R, hd]`, `out` `[len, hd]`.
#[inline(always)]
fn add_outer<I: Isa, const R: usize>(
    (weights, stride): (&[f32], usize),
    rows: &[f32],
    n_keys: usize,
    out: &mut [f32],
) {
    let head_dim = rows.len() / R;
    let whole = head_dim - head_dim % LANES;
    let weights: [&[f32]; R] = std::array::from_fn(|r| &weights[r * stride..][..n_keys]);
    for column in (0..whole).step_by(LANES) {
        add_outer_columns::<I, R>(weights, rows, (column, LANES), out);
    }
    if whole < head_dim {
        add_outer_columns::<I, R>(weights, rows, (whole, head_dim - whole), out);
    }
}

/// The `width` columns from `column` on.
#[inline(always)]
fn add_outer_columns<I: Isa, const R: usize>(
    weights: [&[f32]; R],
    rows: &[f32],
    (column, width): (usize, usize),
    out: &mut [f32],
) {
    let head_dim = rows.len() / R;
    let rows: [I::Lanes; R] =
        std::array::from_fn(|r| I::Lanes::load(&padded(&rows[r * head_dim + column..][..width])));
    for (p, out) in out.chunks_exact_mut(head_dim).take(weights[0].len()).enumerate() {
        let out = &mut out[column..][..width];
        let mut sum = I::Lanes::load(&padded(out));
        for (row, weights) in rows.iter().zip(&weights) {
            sum = I::Lanes::splat(weights[p]).mul_add(*row, sum);
        }
        let mut lanes = [0.0; LANES];
        sum.store(&mut lanes);
        out.copy_from_slice(&lanes[..width]);
    }
}
