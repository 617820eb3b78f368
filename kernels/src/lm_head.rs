//! The head without its logits: from hidden states `[T, D]` to logprobs and entropies `[T]`, forward and backward.
//!
//! A vocabulary of 150 thousand makes `[T, V]` the largest array of a training step by far, written and read several
//! times over. Here logits exist one tile at a time, some rows of one block of the vocabulary, and leave only the sums
//! of [`logprob`](crate::logprob); the backward pass computes them again, which costs a third more multiply-adds and
//! takes memory that grows with neither `T` nor `V`. The bits are those of `matmul` and
//! [`chosen_logprobs`](crate::logprob::chosen_logprobs), which the engine samples with, and of
//! [`draw_kept`](crate::truncate::draw_kept) where a row is scored on a kept set.

use std::ops::Range;

use crate::gemm::{self, Dtype, PackedMatrix};
use crate::isa::{Isa, multiversion};
use crate::logprob::{BLOCK, BlockSums, Distribution, EXP_WORK, inverse};
use crate::parallel::{self, Disjoint};
use crate::scratch::Scratch;

pub mod gradient;
pub mod kept;
#[cfg(test)]
mod tests;

use kept::{Kept, KeptRows};

/// Rows that are worked on together, so that buffers stay bounded.
const MAX_ROWS: usize = 1024;
/// Rows of a tile: its logits and their weights share the second-level cache.
const TILE_ROWS: usize = 64;

/// The weight of a head, `W` `[V, D]`.
#[derive(Clone, Copy, Debug)]
pub enum Head<'a> {
    /// Packed once and for all.
    Packed(&'a PackedMatrix),
    /// Row-major: every block of the vocabulary is packed when its turn comes.
    Plain(PlainHead<'a>),
}

/// A row-major head.
#[derive(Clone, Copy, Debug)]
pub struct PlainHead<'a> {
    /// `[V, D]`.
    pub weight: &'a [f32],
    /// `D`.
    pub width: usize,
    /// What both operands of a product are rounded to.
    pub dtype: Dtype,
}

impl Head<'_> {
    /// `V` and `D`.
    fn shape(&self) -> (usize, usize) {
        match self {
            Self::Packed(packed) => (packed.n(), packed.k()),
            Self::Plain(plain) => (plain.vocab(), plain.width),
        }
    }

    fn dtype(&self) -> Dtype {
        match self {
            Self::Packed(packed) => packed.dtype(),
            Self::Plain(plain) => plain.dtype,
        }
    }

    /// Calls `each` with all blocks, in order: at once if they are packed, else one by one.
    fn for_blocks(&self, mut each: impl FnMut(Blocks<'_>)) {
        match *self {
            Self::Packed(packed) => each(Blocks { packed, first: 0, end: packed.n().div_ceil(BLOCK) }),
            Self::Plain(plain) => plain.for_blocks(each),
        }
    }
}

impl<'a> PlainHead<'a> {
    fn vocab(&self) -> usize {
        self.weight.len() / self.width
    }

    /// The rows of `block`.
    fn block(&self, block: usize) -> &'a [f32] {
        let columns = block_columns(block, self.vocab());
        &self.weight[columns.start * self.width..columns.end * self.width]
    }

    /// Calls `each` with one block after the other, packed into the same memory.
    fn for_blocks(&self, mut each: impl FnMut(Blocks<'_>)) {
        let first = self.block(0);
        let mut packed = PackedMatrix::pack(first, first.len() / self.width, self.width, self.dtype);
        for block in 0..self.vocab().div_ceil(BLOCK) {
            if block > 0 {
                packed.repack(self.block(block));
            }
            each(Blocks { packed: &packed, first: block, end: block + 1 });
        }
    }
}

/// Some blocks of the vocabulary, packed.
#[derive(Clone, Copy)]
struct Blocks<'a> {
    /// The rows of the head from those of block `first` on.
    packed: &'a PackedMatrix,
    first: usize,
    end: usize,
}

impl Blocks<'_> {
    /// Tokens of block `block`, one of these, of a vocabulary of `vocab`, as columns of what is packed.
    fn columns(&self, block: usize, vocab: usize) -> Range<usize> {
        let columns = block_columns(block, vocab);
        columns.start - self.first * BLOCK..columns.end - self.first * BLOCK
    }
}

/// The tokens that are scored, and how.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    /// One per row, each below `V`.
    pub ids: &'a [u32],
    /// What logits are divided by: positive and finite.
    pub temperature: f32,
    /// The tokens that each row is scored over; `None` for all of the vocabulary.
    pub kept: Option<Kept<'a>>,
}

/// What the forward finds out about each row, `[T]` each.
pub struct Scores<'a> {
    /// Nats of the target.
    pub logprobs: &'a mut [f32],
    /// Nats.
    pub entropies: &'a mut [f32],
    /// The target's logit, which the backward pass starts from.
    pub target_logits: &'a mut [f32],
}

/// Scores each row of `hidden` `[T, D]` under `softmax(hidden Wᵀ / temperature)`, `W` being `head` `[V, D]`, over the
/// tokens that the row keeps. How the head is held does not show.
///
/// # Panics
/// If the shapes do not fit, a target is not below `V`, a kept set is not ascending or lacks its target, or the
/// temperature is not positive and finite.
pub fn head_logprobs(hidden: &[f32], head: Head<'_>, targets: Targets<'_>, scores: Scores<'_>) {
    let (n_rows, (vocab, width)) = (targets.ids.len(), head.shape());
    let Scores { logprobs, entropies, target_logits } = scores;
    assert_eq!(hidden.len(), n_rows * width, "hidden states are [{n_rows}, {width}]");
    assert_eq!((logprobs.len(), entropies.len(), target_logits.len()), (n_rows, n_rows, n_rows));
    for (t, &target) in targets.ids.iter().enumerate() {
        assert!((target as usize) < vocab, "target {target} of token {t} is not below {vocab}");
    }
    let scale = inverse(targets.temperature);
    let kept = KeptRows::new(targets.kept, targets.ids, vocab);
    let mut kept_logits = vec![0.0; kept.len()];
    for first in (0..n_rows).step_by(MAX_ROWS) {
        let rows = first..n_rows.min(first + MAX_ROWS);
        let mut rounded = None;
        let x =
            gemm::rows_in(head.dtype(), &hidden[rows.start * width..rows.end * width], width, &mut rounded);
        let ids = &targets.ids[rows.clone()];
        let run = Run { rows: rows.clone(), ids, kept: &kept, scale, vocab };
        let mut tiles = vec![RowTile::default(); vocab.div_ceil(BLOCK) * ids.len()];
        head.for_blocks(|blocks| {
            let tiles = &mut tiles[blocks.first * ids.len()..blocks.end * ids.len()];
            run.fill(x, blocks, tiles, &mut kept_logits);
        });
        for (i, t) in rows.enumerate() {
            let distribution = match kept.range(t) {
                all if all.is_empty() => {
                    let mut distribution = Distribution::new(scale);
                    tiles.chunks_exact(ids.len()).for_each(|block| distribution.add(block[i].sums));
                    distribution
                }
                kept => distribution(&kept_logits[kept], scale),
            };
            target_logits[t] = tiles[ids[i] as usize / BLOCK * ids.len() + i].target;
            logprobs[t] = distribution.logprob(target_logits[t]);
            entropies[t] = distribution.entropy();
        }
    }
}

/// What is left of a row's logits in one block.
#[derive(Clone, Copy, Default)]
struct RowTile {
    sums: BlockSums,
    /// The target's logit, if it lies in this block.
    target: f32,
}

/// Rows that are worked on together.
struct Run<'a> {
    /// Among all.
    rows: Range<usize>,
    /// Their targets.
    ids: &'a [u32],
    /// Of all rows.
    kept: &'a KeptRows<'a>,
    scale: f32,
    vocab: usize,
}

impl Run<'_> {
    /// Every row of each of `blocks`, `[blocks, rows]`. The logits that rows keep go to `kept_logits`, which is of all rows.
    fn fill(&self, x: gemm::Rows<'_>, blocks: Blocks<'_>, tiles: &mut [RowTile], kept_logits: &mut [f32]) {
        let (n_rows, n_blocks, packed) = (self.ids.len(), blocks.end - blocks.first, blocks.packed);
        let work = n_rows * packed.n() * (packed.k() + EXP_WORK);
        let n_runs = parallel::task_count(work).div_ceil(n_blocks).max(n_rows.div_ceil(TILE_ROWS));
        let run_rows = n_rows.div_ceil(n_runs).next_multiple_of(8);
        let n_runs = n_rows.div_ceil(run_rows);
        let (parts, kept_parts) = (Disjoint::new(tiles), Disjoint::new(kept_logits));
        parallel::for_each(n_blocks * n_runs, work, |task| {
            let (block, first) = (task / n_runs, task % n_runs * run_rows);
            let rows = first..n_rows.min(first + run_rows);
            let columns = block_columns(blocks.first + block, self.vocab);
            let here = blocks.columns(blocks.first + block, self.vocab);
            // SAFETY: tasks are distinct pairs of a block and a run of rows, and this range belongs to one such pair.
            let tiles = unsafe { parts.part(block * n_rows + rows.start..block * n_rows + rows.end) };
            let mut logits = Scratch::<f32>::take(rows.len() * columns.len());
            gemm::multiply_columns(x.narrow(rows.clone(), packed.k()), packed, here, &mut logits);
            for ((logits, tile), i) in logits.chunks_exact(columns.len()).zip(tiles).zip(rows) {
                let (t, target) = (self.rows.start + i, self.ids[i] as usize);
                if columns.contains(&target) {
                    tile.target = logits[target - columns.start];
                }
                if self.kept.row(t).is_empty() {
                    tile.sums = block_sums(logits, self.scale);
                    continue;
                }
                let kept = self.kept.range_in(t, &columns);
                // SAFETY: what a row keeps of a block belongs to the one task that has both.
                let kept_logits = unsafe { kept_parts.part(kept.clone()) };
                for (to, &id) in kept_logits.iter_mut().zip(self.kept.ids(kept)) {
                    *to = logits[id as usize - columns.start];
                }
            }
        });
    }
}

/// Tokens of a block of the vocabulary.
fn block_columns(block: usize, vocab: usize) -> Range<usize> {
    block * BLOCK..vocab.min((block + 1) * BLOCK)
}

multiversion! {
    /// The sums of a row in one block.
    fn block_sums(logits: &[f32], scale: f32) -> BlockSums = block_sums_body;
}

#[inline(always)]
fn block_sums_body<I: Isa>(logits: &[f32], scale: f32) -> BlockSums {
    BlockSums::of::<I, true>(logits, scale)
}

multiversion! {
    /// The softmax of the logits that a row keeps.
    fn distribution(logits: &[f32], scale: f32) -> Distribution = distribution_body;
}

#[inline(always)]
fn distribution_body<I: Isa>(logits: &[f32], scale: f32) -> Distribution {
    let mut distribution = Distribution::new(scale);
    for block in logits.chunks(BLOCK) {
        distribution.add(BlockSums::of::<I, true>(block, scale));
    }
    distribution
}
