//! The head without its logits: from hidden states `[T, D]` to logprobs and entropies `[T]`, forward and backward.
//!
//! A vocabulary of 150 thousand makes `[T, V]` the largest array of a training step by far, written and read several
//! times over. Here logits exist one tile at a time, some rows of one block of the vocabulary, and leave only the sums
//! of [`logprob`](crate::logprob); the backward pass computes them again, which costs a third more multiply-adds and
//! takes memory that grows with neither `T` nor `V`. The bits are those of `matmul` and
//! [`chosen_logprobs`](crate::logprob::chosen_logprobs), which the engine samples with.

use std::ops::Range;

use crate::gemm::{self, PackedMatrix};
use crate::isa::{Isa, multiversion};
use crate::logprob::{BLOCK, BlockSums, Distribution, EXP_WORK, inverse};
use crate::parallel::{self, Disjoint};
use crate::scratch::Scratch;

pub mod gradient;
#[cfg(test)]
mod tests;

/// Rows that are worked on together, so that buffers stay bounded.
const MAX_ROWS: usize = 1024;
/// Rows of a tile: its logits and their weights share the second-level cache.
const TILE_ROWS: usize = 64;

/// The tokens that are scored, and how.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    /// One per row, each below `V`.
    pub ids: &'a [u32],
    /// What logits are divided by: positive and finite.
    pub temperature: f32,
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

/// Scores each row of `hidden` `[T, D]` under `softmax(hidden Wᵀ / temperature)`, `W` being `head` `[V, D]`.
///
/// # Panics
/// If the shapes do not fit, a target is not below `V`, or the temperature is not positive and finite.
pub fn head_logprobs(hidden: &[f32], head: &PackedMatrix, targets: Targets<'_>, scores: Scores<'_>) {
    let (n_rows, width, vocab) = (targets.ids.len(), head.k(), head.n());
    let Scores { logprobs, entropies, target_logits } = scores;
    assert_eq!(hidden.len(), n_rows * width, "hidden states are [{n_rows}, {width}]");
    assert_eq!((logprobs.len(), entropies.len(), target_logits.len()), (n_rows, n_rows, n_rows));
    for (t, &target) in targets.ids.iter().enumerate() {
        assert!((target as usize) < vocab, "target {target} of token {t} is not below {vocab}");
    }
    let scale = inverse(targets.temperature);
    for first in (0..n_rows).step_by(MAX_ROWS) {
        let rows = first..n_rows.min(first + MAX_ROWS);
        let mut rounded = None;
        let x =
            gemm::rows_in(head.dtype(), &hidden[rows.start * width..rows.end * width], width, &mut rounded);
        let ids = &targets.ids[rows.clone()];
        let tiles = row_tiles(x, head, ids, scale);
        for (i, t) in rows.enumerate() {
            let mut distribution = Distribution::new(scale);
            for block in tiles.chunks_exact(ids.len()) {
                distribution.add(block[i].sums);
            }
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

/// Every row of every block, `[V/1024, rows]`.
fn row_tiles(x: gemm::Rows<'_>, head: &PackedMatrix, ids: &[u32], scale: f32) -> Vec<RowTile> {
    let (n_rows, n_blocks) = (ids.len(), head.n().div_ceil(BLOCK));
    let work = n_rows * head.n() * (head.k() + EXP_WORK);
    let n_runs = parallel::task_count(work).div_ceil(n_blocks).max(n_rows.div_ceil(TILE_ROWS));
    let run_rows = n_rows.div_ceil(n_runs).next_multiple_of(8);
    let n_runs = n_rows.div_ceil(run_rows);
    let mut tiles = vec![RowTile::default(); n_blocks * n_rows];
    let parts = Disjoint::new(&mut tiles);
    parallel::for_each(n_blocks * n_runs, work, |task| {
        let (block, first) = (task / n_runs, task % n_runs * run_rows);
        let rows = first..n_rows.min(first + run_rows);
        let columns = block_columns(block, head.n());
        // SAFETY: tasks are distinct pairs of a block and a run of rows, and this range belongs to one such pair.
        let tiles = unsafe { parts.part(block * n_rows + rows.start..block * n_rows + rows.end) };
        let mut logits = Scratch::<f32>::take(rows.len() * columns.len());
        gemm::multiply_columns(x.narrow(rows.clone(), head.k()), head, columns.clone(), &mut logits);
        sum_rows(&logits, scale, tiles);
        for ((logits, &id), tile) in logits.chunks_exact(columns.len()).zip(&ids[rows]).zip(tiles) {
            if columns.contains(&(id as usize)) {
                tile.target = logits[id as usize - columns.start];
            }
        }
    });
    tiles
}

/// Tokens of a block of the vocabulary.
fn block_columns(block: usize, vocab: usize) -> Range<usize> {
    block * BLOCK..vocab.min((block + 1) * BLOCK)
}

multiversion! {
    /// The sums of each row of a tile.
    fn sum_rows(logits: &[f32], scale: f32, tiles: &mut [RowTile]) = sum_rows_body;
}

#[inline(always)]
fn sum_rows_body<I: Isa>(logits: &[f32], scale: f32, tiles: &mut [RowTile]) {
    for (logits, tile) in logits.chunks_exact(logits.len() / tiles.len()).zip(tiles) {
        tile.sums = BlockSums::of::<I, true>(logits, scale);
    }
}
