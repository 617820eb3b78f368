//! The head's backward pass, which computes the logits again.

use super::kept::KeptRows;
use super::{Blocks, MAX_ROWS, PlainHead, TILE_ROWS, Targets, block_columns};
use crate::exp::exp;
use crate::gemm;
use crate::gemm::gradient::{Left, PlainProduct, Right};
use crate::isa::{Isa, multiversion};
use crate::logprob::{EXP_WORK, inverse};
use crate::parallel;

/// What the forward pass read and found.
#[derive(Clone, Copy)]
pub struct HeadGradient<'a> {
    /// `[T, D]`.
    pub hidden: &'a [f32],
    /// `[V, D]`.
    pub head: PlainHead<'a>,
    /// As in the forward pass.
    pub targets: Targets<'a>,
    /// `[T]` nats.
    pub logprobs: &'a [f32],
    /// `[T]` nats.
    pub entropies: &'a [f32],
    /// `[T]`.
    pub target_logits: &'a [f32],
    /// `[S]`: tokens of each sequence, summing to `T`. Sequences that are multiplied in several calls, one after the other,
    /// have the weight's gradient of one call, in every bit.
    pub lengths: &'a [usize],
}

/// Cuts sequences of `lengths` into pieces of `most` rows at most, an even number, given as the lengths in each. Within a
/// sequence a cut comes after an even number of rows, so no pair of rows is cut apart.
fn pieces(lengths: &[usize], most: usize) -> Vec<Vec<usize>> {
    let (mut pieces, mut piece, mut free) = (Vec::new(), Vec::new(), most);
    for &length in lengths {
        let mut left = length;
        while left > 0 {
            let here = if left <= free { left } else { free - free % 2 };
            if here > 0 {
                piece.push(here);
            }
            (left, free) = (left - here, free - here);
            if left > 0 {
                pieces.push(std::mem::take(&mut piece));
                free = most;
            }
        }
    }
    pieces.push(piece);
    pieces
}

/// What the gradient of a row's logits depends on beside them.
struct Row<'a> {
    target: usize,
    /// The tokens it is scored over, ascending; none for all of the vocabulary.
    kept: &'a [u32],
    target_logit: f32,
    logprob: f32,
    entropy: f32,
    /// Gradient of the logprob, over temperature.
    pull: f32,
    /// Gradient of the entropy, over temperature.
    spread: f32,
}

impl HeadGradient<'_> {
    /// Adds the gradients of hidden states `[T, D]` and weight `[V, D]`, of each if it is wanted, given those of logprobs and
    /// entropies, `[T]` each. Some rows and one block of the vocabulary at a time; every element is one
    /// chain, over the vocabulary or over rows, in order.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn add(
        &self,
        (logprob_grads, entropy_grads): (&[f32], &[f32]),
        (mut hidden_grad, mut weight_grad): (Option<&mut [f32]>, Option<&mut [f32]>),
    ) {
        let PlainHead { width, dtype, .. } = self.head;
        let vocab = self.head.vocab();
        let kept = KeptRows::new(self.targets.kept, self.targets.ids, vocab);
        let rows = self.rows(&kept, logprob_grads, entropy_grads);
        let mut logit_grads = Vec::new();
        let mut end = 0;
        for lengths in pieces(self.lengths, MAX_ROWS) {
            let piece = end..end + lengths.iter().sum::<usize>();
            end = piece.end;
            let rows = &rows[piece.clone()];
            let piece = piece.start * width..piece.end * width;
            let hidden = &self.hidden[piece.clone()];
            let mut rounded = None;
            let x = gemm::rows_in(dtype, hidden, width, &mut rounded);
            self.head.for_blocks(|block| {
                let columns = block_columns(block.first, vocab);
                logit_grads.resize(rows.len() * columns.len(), 0.0);
                self.logit_gradients(x, rows, block, &mut logit_grads);
                let product = |a, b| PlainProduct { a, b: Right::Plain(b), n: width, dtype, onto: true };
                if let Some(hidden_grad) = &mut hidden_grad {
                    let weight = self.head.block(block.first);
                    product(Left::Plain(&logit_grads), weight).run(&mut hidden_grad[piece.clone()]);
                }
                if let Some(weight_grad) = &mut weight_grad {
                    let span = columns.start * width..columns.end * width;
                    product(Left::Transposed(&logit_grads, &lengths), hidden).run(&mut weight_grad[span]);
                }
            });
        }
    }

    fn rows<'k>(&self, kept: &KeptRows<'k>, logprob_grads: &[f32], entropy_grads: &[f32]) -> Vec<Row<'k>> {
        let scale = inverse(self.targets.temperature);
        let row = |(t, &target): (usize, &u32)| Row {
            target: target as usize,
            kept: kept.row(t),
            target_logit: self.target_logits[t],
            logprob: self.logprobs[t],
            entropy: self.entropies[t],
            pull: scale * logprob_grads[t],
            spread: scale * entropy_grads[t],
        };
        self.targets.ids.iter().enumerate().map(row).collect()
    }

    /// Gradients of the logits of `rows` in `block`, a single one.
    fn logit_gradients(&self, x: gemm::Rows<'_>, rows: &[Row<'_>], block: Blocks<'_>, out: &mut [f32]) {
        let (width, scale) = (self.head.width, inverse(self.targets.temperature));
        let columns = block_columns(block.first, self.head.vocab());
        parallel::for_rows(out, columns.len(), columns.len() * (width + EXP_WORK), |first, out| {
            for (i, out) in out.chunks_mut(TILE_ROWS * columns.len()).enumerate() {
                let first = first + i * TILE_ROWS;
                let tile = first..first + out.len() / columns.len();
                gemm::multiply_columns(x.narrow(tile.clone(), width), block.packed, 0..columns.len(), out);
                gradient_rows(&rows[tile], columns.start, scale, out);
            }
        });
    }
}

multiversion! {
    /// Replaces the logits of `rows` from token `first` on by their gradients.
    fn gradient_rows(rows: &[Row<'_>], first: usize, scale: f32, logits: &mut [f32]) = gradient_rows_body;
}

/// With `p = softmax(logits / temperature)`: the logprob's is `(1[j = target] - p_j) / temperature`, the entropy's
/// `-p_j (ln p_j + entropy) / temperature`; `ln p_j` is the target's logprob plus the difference of the scaled logits.
/// A token that is not kept has probability 0, and no gradient.
#[inline(always)]
fn gradient_rows_body<I: Isa>(rows: &[Row<'_>], first: usize, scale: f32, logits: &mut [f32]) {
    let n_columns = logits.len() / rows.len();
    for (row, logits) in rows.iter().zip(logits.chunks_exact_mut(n_columns)) {
        if row.kept.is_empty() {
            for logit in &mut *logits {
                *logit = slope::<I>(row, scale, *logit);
            }
        } else {
            keep_slopes::<I>(row, first, scale, logits);
        }
        if let Some(logit) = row.target.checked_sub(first).and_then(|at| logits.get_mut(at)) {
            *logit += row.pull;
        }
    }
}

/// Replaces the logits that `row` keeps, of those from token `first` on, by their gradients, and the others by 0.
#[inline(always)]
fn keep_slopes<I: Isa>(row: &Row<'_>, first: usize, scale: f32, logits: &mut [f32]) {
    let before = |end: usize| row.kept.partition_point(|&id| (id as usize) < end);
    let mut cut = 0;
    for &id in &row.kept[before(first)..before(first + logits.len())] {
        let at = id as usize - first;
        logits[cut..at].fill(0.0);
        logits[at] = slope::<I>(row, scale, logits[at]);
        cut = at + 1;
    }
    logits[cut..].fill(0.0);
}

/// The gradient of a logit, were it not the target's.
#[inline(always)]
fn slope<I: Isa>(row: &Row<'_>, scale: f32, logit: f32) -> f32 {
    let logprob = I::mul_add(scale, logit - row.target_logit, row.logprob);
    let p = exp::<I>(logprob);
    let slope = I::mul_add(-row.spread, logprob + row.entropy, -row.pull);
    if p == 0.0 { 0.0 } else { p * slope } // `ln 0` times 0 would be NaN.
}
