//! The gradient of packed attention, with probabilities recomputed.
//!
//! A task is one kv head of one unit, a sequence with those that share its beginning, walked through in order; so every sum
//! of the gradient has one order.

use std::cell::RefCell;
use std::ops::Range;

use half::bf16;

use super::kernel::{Element, KvHead, LANES, MAX_PASS, Rows, View, lanes_of, whole_tiles};
use super::packed::{PackedAttention, PackedSequence};
use super::{Heads, Pages};
use crate::isa::{Isa, Lanes, multiversion, padded, sum_lanes};
use crate::parallel::{self, Disjoint};
use crate::softmax::{exp_in_place, max};

/// What a gradient is computed of.
pub(super) struct Operands<'a> {
    /// Its caches filled with keys and values, and the two swapped.
    pub(super) attention: &'a PackedAttention,
    pub(super) heads: Heads,
    /// `[T, H, hd]`.
    pub(super) q: &'a [f32],
    /// `[T, H, hd]`.
    pub(super) grad: &'a [f32],
}

/// Gradients of queries, keys and values, where they are wanted. The gradient passes through the rounding of keys and
/// values to bf16 as if it were not there.
pub(super) fn backward(operands: &Operands<'_>, sequences: &[PackedSequence], out: [Option<&mut [f32]>; 3]) {
    let heads = operands.heads;
    let wanted = out.each_ref().map(Option::is_some);
    let [q_grad, k_grad, v_grad] = out.map(|out| Disjoint::new(out.unwrap_or_default()));
    let paged = operands.attention.plain.paged(sequences);
    let units = units(sequences);
    let work = sequences.iter().map(|one| one.n_own * one.len() * 5 * heads.query_len()).sum();
    parallel::for_each(units.len() * heads.n_kv_heads, work, |i| {
        let (unit, kv_head) = (&units[i / heads.n_kv_heads], i % heads.n_kv_heads);
        BUFFERS.with_borrow_mut(|buffers| {
            for (grad, wanted) in [(&mut buffers.k_grad, wanted[1]), (&mut buffers.v_grad, wanted[2])] {
                grad.clear();
                grad.resize(if wanted { unit.n_tokens * heads.head_dim } else { 0 }, 0.0);
            }
            let mut start = 0;
            for at in unit.sequences.clone() {
                let head = KvHead { index: kv_head, blocks: paged[at].blocks, block_tokens: LANES };
                let PackedSequence { n_shared, n_own } = sequences[at];
                let job = Job { operands, head, wanted };
                let tokens = Tokens { first: unit.first_token + start, start, n_shared, n_own };
                backward_sequence(&job, tokens, buffers, &q_grad);
                start += n_own;
            }
            for (parts, rows) in [(&k_grad, &buffers.k_grad), (&v_grad, &buffers.v_grad)] {
                for (t, row) in rows.chunks_exact(heads.head_dim).enumerate() {
                    let start = ((unit.first_token + t) * heads.n_kv_heads + kv_head) * heads.head_dim;
                    // SAFETY: tasks are distinct pairs of unit and kv head, and the range is such a pair's.
                    unsafe { parts.part(start..start + heads.head_dim) }.copy_from_slice(row);
                }
            }
        });
    });
}

/// A leader and those that share with it: one task for a kv head, so that what they share has one sum.
struct Unit {
    sequences: Range<usize>,
    /// Among all tokens.
    first_token: usize,
    n_tokens: usize,
}

fn units(sequences: &[PackedSequence]) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    let mut first_token = 0;
    for (at, &PackedSequence { n_shared, n_own }) in sequences.iter().enumerate() {
        match units.last_mut() {
            Some(unit) if n_shared > 0 => {
                unit.sequences.end = at + 1;
                unit.n_tokens += n_own;
            }
            _ => units.push(Unit { sequences: at..at + 1, first_token, n_tokens: n_own }),
        }
        first_token += n_own;
    }
    units
}

/// What a task reads of a sequence.
struct Job<'a> {
    operands: &'a Operands<'a>,
    head: KvHead<'a>,
    /// Which gradients are: of queries, keys, values.
    wanted: [bool; 3],
}

/// The own tokens of one sequence.
#[derive(Clone, Copy)]
struct Tokens {
    /// The first among all.
    first: usize,
    /// The first among those of its unit.
    start: usize,
    /// Positions before it, which are the first of the unit.
    n_shared: usize,
    n_own: usize,
}

/// Buffers of a task, grown to the largest unit and kept.
#[derive(Default)]
struct Buffers {
    /// Of the unit's tokens, `[n_tokens, hd]`; empty if it is not wanted.
    k_grad: Vec<f32>,
    /// As `k_grad`.
    v_grad: Vec<f32>,
    /// Of one pass, `[R, hd]`: scaled queries, gradients of the outputs, gradients of the queries if they are wanted.
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
    let PackedAttention { plain, swapped, .. } = job.operands.attention;
    match (&plain.cache.pages, &swapped.cache.pages) {
        (Pages::F32(a), Pages::F32(b)) => {
            let views =
                [(a, plain), (b, swapped)].map(|(layers, kv)| layers[0].view(kv.cache.heads, job.head));
            walk::<I, f32>(job, &views, tokens, buffers, q_grad);
        }
        (Pages::Bf16(a), Pages::Bf16(b)) => {
            let views =
                [(a, plain), (b, swapped)].map(|(layers, kv)| layers[0].view(kv.cache.heads, job.head));
            walk::<I, bf16>(job, &views, tokens, buffers, q_grad);
        }
        _ => unreachable!("both caches were made with one dtype"),
    }
}

#[inline(always)]
fn walk<I: Isa, E: Element>(
    job: &Job<'_>,
    views: &[View<'_, E>; 2],
    tokens: Tokens,
    buffers: &mut Buffers,
    q_grad: &Disjoint<'_, f32>,
) {
    let heads = job.operands.heads;
    let stride = (tokens.n_shared + tokens.n_own).next_multiple_of(LANES);
    for rows in [&mut buffers.probabilities, &mut buffers.score_grads] {
        rows.resize(MAX_PASS * stride, 0.0);
    }
    let rows = Rows { group: heads.group(), start: tokens.n_shared, n_rows: tokens.n_own * heads.group() };
    let mut first = 0;
    while first < rows.n_rows {
        let n = rows.pass_len::<I>(first);
        // Where row `first + r` lies in `q` and in its gradient.
        let start_of = |r: usize| {
            let (query, head) = ((first + r) / heads.group(), (first + r) % heads.group());
            (tokens.first + query) * heads.query_len()
                + (job.head.index * heads.group() + head) * heads.head_dim
        };
        buffers.queries.clear();
        buffers.out_grads.clear();
        for r in 0..n {
            let row = start_of(r)..start_of(r) + heads.head_dim;
            buffers.queries.extend(job.operands.q[row.clone()].iter().map(|x| x * heads.scale()));
            buffers.out_grads.extend_from_slice(&job.operands.grad[row]);
        }
        match n {
            8 => backward_pass::<I, E, 8, 2>(views, (rows, first), tokens, buffers, job.wanted),
            4 => backward_pass::<I, E, 4, 1>(views, (rows, first), tokens, buffers, job.wanted),
            3 => backward_pass::<I, E, 3, 1>(views, (rows, first), tokens, buffers, job.wanted),
            2 => backward_pass::<I, E, 2, 1>(views, (rows, first), tokens, buffers, job.wanted),
            _ => backward_pass::<I, E, 1, 1>(views, (rows, first), tokens, buffers, job.wanted),
        }
        for (r, row) in buffers.q_grads.chunks_exact(heads.head_dim).enumerate() {
            // SAFETY: tasks are distinct pairs of unit and kv head, and the range is such a pair's.
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
fn backward_pass<I: Isa, E: Element, const R: usize, const T: usize>(
    [view, swapped]: &[View<'_, E>; 2],
    (rows, first): (Rows, usize),
    tokens: Tokens,
    buffers: &mut Buffers,
    [wants_q, wants_k, wants_v]: [bool; 3],
) {
    let stride = buffers.probabilities.len() / MAX_PASS;
    let n_keys = rows.n_keys(first + R - 1);
    view.score::<I, R, T, false>(&buffers.queries, n_keys, &mut buffers.probabilities, stride);
    swapped.score::<I, R, T, false>(&buffers.out_grads, n_keys, &mut buffers.score_grads, stride);
    for r in 0..R {
        let n_seen = rows.n_keys(first + r);
        let seen = whole_tiles(&mut buffers.probabilities, (r, stride), n_seen);
        let grads = &mut buffers.score_grads[r * stride..][..stride];
        grads[n_seen..].fill(0.0);
        let sum = exp_in_place::<I>(seen, max(seen));
        softmax_gradient::<I>(seen.as_chunks_mut().0, sum, grads.as_chunks_mut().0);
        let n_whole = seen.len();
        buffers.probabilities[r * stride + n_whole..(r + 1) * stride].fill(0.0);
    }
    buffers.q_grads.clear();
    if wants_q {
        buffers.q_grads.resize(R * view.head_dim, 0.0);
        swapped.add_weighted::<I, R, false>(&buffers.score_grads, stride, 0..n_keys, &mut buffers.q_grads);
    }
    let Buffers { k_grad, v_grad, queries, out_grads, probabilities, score_grads, .. } = buffers;
    // Where the gradients of positions lie: shared ones at the unit's beginning, the others at the sequence's own.
    let places = [(0..tokens.n_shared, 0), (tokens.n_shared..n_keys, tokens.start)];
    for (positions, row) in places {
        let at = row * view.head_dim;
        if wants_k {
            add_outer::<I, R>((score_grads, stride), queries, positions.clone(), &mut k_grad[at..]);
        }
        if wants_v {
            add_outer::<I, R>((probabilities, stride), out_grads, positions, &mut v_grad[at..]);
        }
    }
}

/// Divides `exps` by their `sum`, and turns `grads`, of the probabilities, into those of the scores.
#[inline(always)]
fn softmax_gradient<I: Isa>(exps: &mut [[f32; LANES]], sum: f32, grads: &mut [[f32; LANES]]) {
    // By a product, which takes a tenth of the time of quotients.
    let scale = 1.0 / sum;
    let mut lanes = [0.0; LANES];
    for (exps, grads) in exps.iter_mut().zip(&*grads) {
        // Two loops, each of which becomes a vector's instruction or two.
        for p in &mut *exps {
            *p *= scale;
        }
        for ((lane, &p), &grad) in lanes.iter_mut().zip(&*exps).zip(grads) {
            *lane = I::mul_add(p, grad, *lane);
        }
    }
    let mean = sum_lanes(lanes);
    for (grad, p) in grads.as_flattened_mut().iter_mut().zip(exps.as_flattened()) {
        *grad = p * (*grad - mean);
    }
}

/// `out[i] += sum_r weights[r][p] rows[r]` for the `i`th `p` of `positions`: `rows` `[R, hd]`, `out` `[.., hd]`.
#[inline(always)]
fn add_outer<I: Isa, const R: usize>(
    (weights, stride): (&[f32], usize),
    rows: &[f32],
    positions: Range<usize>,
    out: &mut [f32],
) {
    let head_dim = rows.len() / R;
    let outer = Outer { weights, stride, positions, rows };
    let out = &mut out[..outer.positions.len() * head_dim];
    let mut column = 0;
    // As many columns as there are registers for rows: each weight is loaded once for all of them.
    while column + LANES <= head_dim {
        column += match (head_dim - column) / LANES {
            2.. if I::WIDE => outer.add_columns::<I, R, 2>(column, out),
            _ => outer.add_columns::<I, R, 1>(column, out),
        };
    }
    if column < head_dim {
        outer.add_last_columns::<I, R>(column, out);
    }
}

/// Rows waiting to be added.
struct Outer<'a> {
    weights: &'a [f32],
    stride: usize,
    positions: Range<usize>,
    rows: &'a [f32],
}

impl Outer<'_> {
    /// The columns `column..column + 16 C` of [`add_outer`]; `16 C`.
    #[inline(always)]
    fn add_columns<I: Isa, const R: usize, const C: usize>(&self, column: usize, out: &mut [f32]) -> usize {
        let head_dim = self.rows.len() / R;
        let mut columns = [[I::Lanes::splat(0.0); C]; R];
        for (r, columns) in columns.iter_mut().enumerate() {
            for (c, lanes) in columns.iter_mut().enumerate() {
                *lanes = I::Lanes::load(lanes_of(&self.rows[r * head_dim + column + c * LANES..]));
            }
        }
        // Checked here once, as in `View::score`.
        assert!(self.positions.end <= self.stride && R * self.stride <= self.weights.len());
        for (p, out) in self.positions.clone().zip(out.chunks_exact_mut(head_dim)) {
            let out = &mut out[column..][..C * LANES];
            let mut sums = [I::Lanes::splat(0.0); C];
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum = I::Lanes::load(lanes_of(&out[c * LANES..]));
            }
            for (r, columns) in columns.iter().enumerate() {
                // SAFETY: `p` is one of the positions, and so below `stride`.
                let weight = I::Lanes::splat(unsafe { *self.weights.get_unchecked(r * self.stride + p) });
                for c in 0..C {
                    sums[c] = weight.mul_add(columns[c], sums[c]);
                }
            }
            for (c, sum) in sums.iter().enumerate() {
                sum.store(out[c * LANES..].first_chunk_mut().expect("columns lie inside a head"));
            }
        }
        C * LANES
    }

    /// The columns from `column` on, fewer than 16.
    #[inline(always)]
    fn add_last_columns<I: Isa, const R: usize>(&self, column: usize, out: &mut [f32]) {
        let head_dim = self.rows.len() / R;
        let rows: [I::Lanes; R] = std::array::from_fn(|r| {
            I::Lanes::load(&padded(&self.rows[r * head_dim + column..][..head_dim - column]))
        });
        for (p, out) in self.positions.clone().zip(out.chunks_exact_mut(head_dim)) {
            let out = &mut out[column..];
            let mut sum = I::Lanes::load(&padded(out));
            for (r, row) in rows.iter().enumerate() {
                sum = I::Lanes::splat(self.weights[r * self.stride + p]).mul_add(*row, sum);
            }
            let mut lanes = [0.0; LANES];
            sum.store(&mut lanes);
            out.copy_from_slice(&lanes[..out.len()]);
        }
    }
}
