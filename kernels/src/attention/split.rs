//! Attention of single queries over long contexts, cut along positions: the order of
//! [`Numerics::Fast`](crate::numerics::Numerics::Fast).
//!
//! A decoding sequence is one task per kv head, so a few long sequences leave threads idle. Here each task is cut into
//! enough parts to keep them busy; a part has a softmax of its own, and parts are put together by their weights
//! (FlashDecoding). How many there are, and with that the last bits, depends on the other sequences and the threads.

use std::cell::Cell;

use super::kernel::{KvHead, Rows};
use super::{Job, KvCache, PagedSequence, SCRATCH, attend_job, paged_attention};
use crate::parallel::{self, Disjoint};
use crate::team;

/// Positions that are worth a part of their own: fewer take less time than it takes to put parts together.
const MIN_PART: usize = 2048;

thread_local! {
    /// Results of all parts, kept so that calls do not allocate.
    static PARTS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// [`paged_attention`] in the order that keeps the threads busy: its own, unless every sequence has one query and their
/// tasks are few and spread unevenly over the threads.
///
/// # Panics
/// As [`paged_attention`].
pub fn split_attention(
    q: &[f32],
    cache: &KvCache,
    at: (usize, usize),
    sequences: &[PagedSequence<'_>],
    out: &mut [f32],
) {
    match n_parts(sequences, cache.heads.n_kv_heads) {
        0 | 1 => paged_attention(q, cache, at, sequences, out),
        n_parts => Split { cache, at, sequences, n_parts }.run(q, out),
    }
}

/// Parts of each task.
fn n_parts(sequences: &[PagedSequence<'_>], n_kv_heads: usize) -> usize {
    let (n_threads, n_tasks) = (team::n_threads(), sequences.len() * n_kv_heads);
    // With more tasks, an uneven rest costs less than cutting all of them.
    let uneven = n_tasks < 2 * n_threads && !n_tasks.is_multiple_of(n_threads);
    if !uneven || sequences.iter().any(|s| s.n_queries != 1) {
        return 1;
    }
    let longest = sequences.iter().map(|sequence| sequence.start + 1).max().unwrap_or(0);
    // As many as even the threads out, and never less than `MIN_PART` for the longest.
    (2 * n_threads).div_ceil(n_tasks).min(longest / MIN_PART)
}

/// Sequences of one query each, to be cut.
struct Split<'a> {
    cache: &'a KvCache,
    /// Layer and tokens per block.
    at: (usize, usize),
    sequences: &'a [PagedSequence<'a>],
    n_parts: usize,
}

impl Split<'_> {
    fn run(&self, q: &[f32], out: &mut [f32]) {
        let heads = self.cache.heads;
        let n_tasks = self.sequences.len() * heads.n_kv_heads;
        assert_eq!((q.len(), out.len()), (self.sequences.len() * heads.query_len(), q.len()));
        // A row's result, its highest score and its sum of exponentials.
        let record_len = heads.head_dim + 2;
        let part_len = heads.group() * record_len;
        let mut parts = PARTS.take();
        parts.resize(self.n_parts * n_tasks * part_len, 0.0);
        let places = Disjoint::new(&mut parts);
        let positions: usize = self.sequences.iter().map(|sequence| sequence.start + 1).sum();
        parallel::for_each(n_tasks * self.n_parts, 2 * positions * heads.query_len(), |i| {
            // SAFETY: tasks are distinct parts, and this range belongs to one of them.
            let place = unsafe { places.part(i * part_len..(i + 1) * part_len) };
            self.attend(q, (i / self.n_parts, i % self.n_parts), place);
        });
        for (task, out) in out.chunks_exact_mut(heads.group() * heads.head_dim).enumerate() {
            let parts = &parts[task * self.n_parts * part_len..][..self.n_parts * part_len];
            for (row, out) in out.chunks_exact_mut(heads.head_dim).enumerate() {
                join(parts.chunks_exact(part_len).map(|part| &part[row * record_len..][..record_len]), out);
            }
        }
        PARTS.set(parts);
    }

    /// Attends over the positions of one part of one task.
    fn attend(&self, q: &[f32], (task, part): (usize, usize), place: &mut [f32]) {
        let (heads, (layer, block_tokens)) = (self.cache.heads, self.at);
        let sequence = self.sequences[task / heads.n_kv_heads];
        let blocks = &sequence.blocks[..(sequence.start + 1).div_ceil(block_tokens)];
        let run = blocks.len().div_ceil(self.n_parts);
        let first = part * run;
        let n_keys = (sequence.start + 1).saturating_sub(first * block_tokens).min(run * block_tokens);
        if n_keys == 0 {
            place.fill(0.0);
            return;
        }
        let head = KvHead { index: task % heads.n_kv_heads, blocks: &blocks[first..], block_tokens };
        let job = Job { cache: self.cache, layer, head, next: None };
        let row_len = heads.group() * heads.head_dim;
        let rows = Rows { group: heads.group(), start: n_keys - 1, n_rows: heads.group() };
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.queries.clear();
            let queries = q[task * row_len..][..row_len].iter();
            scratch.queries.extend(queries.map(|x| x * heads.scale()));
            attend_job(&job, rows, scratch);
            let results = scratch.out.chunks_exact(heads.head_dim).zip(&scratch.softmax);
            for (record, (result, &(highest, sum))) in place.chunks_exact_mut(heads.head_dim + 2).zip(results)
            {
                record[..heads.head_dim].copy_from_slice(result);
                record[heads.head_dim..].copy_from_slice(&[highest, sum]);
            }
        });
    }
}

/// The mean of a row's results in all parts, by the share of the softmax that each holds.
fn join<'a>(parts: impl Iterator<Item = &'a [f32]> + Clone, out: &mut [f32]) {
    let head_dim = out.len();
    let parts = parts.filter(|part| part[head_dim + 1] != 0.0);
    let highest = parts.clone().map(|part| part[head_dim]).fold(f32::NEG_INFINITY, f32::max);
    let share = |part: &[f32]| part[head_dim + 1] * (part[head_dim] - highest).exp();
    let total: f32 = parts.clone().map(share).sum();
    out.fill(0.0);
    for part in parts {
        let share = share(part) / total;
        for (out, x) in out.iter_mut().zip(part) {
            *out += share * x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Heads;
    use crate::gemm::Dtype;
    use crate::testing::{bits, in_pool, noise};

    /// Decoding sequences of `lengths` positions, each in blocks of 16 of its own, in either order.
    fn both_orders(heads: Heads, lengths: &[usize], n_threads: usize) -> [Vec<f32>; 2] {
        let n_slots = lengths.iter().map(|length| length.next_multiple_of(16)).sum();
        let mut cache = KvCache::new(1, n_slots, heads, Dtype::F32);
        let slots: Vec<u32> = (0..n_slots as u32).collect();
        let kv = |seed| noise(n_slots * heads.kv_len(), seed);
        cache.write(0, &slots, &kv(1), &kv(2));
        let blocks: Vec<u32> = (0..n_slots as u32 / 16).rev().collect();
        let mut rest = &blocks[..];
        let sequence = |&length: &usize| {
            let (own, others) = rest.split_at(length.div_ceil(16));
            rest = others;
            PagedSequence { n_queries: 1, start: length - 1, blocks: own }
        };
        let sequences: Vec<PagedSequence<'_>> = lengths.iter().map(sequence).collect();
        let q: Vec<f32> = noise(lengths.len() * heads.query_len(), 3).iter().map(|x| x * 4.0).collect();
        in_pool(n_threads, || {
            let mut out = [(); 2].map(|()| vec![f32::NAN; q.len()]);
            paged_attention(&q, &cache, (0, 16), &sequences, &mut out[0]);
            split_attention(&q, &cache, (0, 16), &sequences, &mut out[1]);
            out
        })
    }

    #[test]
    fn parts_together_are_the_whole() {
        let heads = Heads { n_heads: 3, n_kv_heads: 1, head_dim: 20 };
        for (lengths, n_threads) in [(&[5000][..], 2), (&[4900, 7, 4200], 2), (&[2500, 4097], 3)] {
            let [exact, fast] = both_orders(heads, lengths, n_threads);
            assert_ne!(bits(&exact), bits(&fast), "{lengths:?} were cut");
            for (exact, fast) in exact.into_iter().zip(fast) {
                assert!((exact - fast).abs() < 1e-5, "{exact} {fast}");
            }
        }
    }

    #[test]
    fn what_keeps_the_threads_busy_is_not_cut() {
        let heads = Heads { n_heads: 4, n_kv_heads: 2, head_dim: 16 };
        for (lengths, n_threads) in
            [(&[5000][..], 2), (&[4200, 4200, 7, 7, 7], 4), (&[2000], 3), (&[5000], 1)]
        {
            let [exact, fast] = both_orders(heads, lengths, n_threads);
            assert_eq!(bits(&exact), bits(&fast), "{lengths:?}");
        }
    }
}
