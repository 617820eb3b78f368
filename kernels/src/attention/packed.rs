//! Causal attention within packed sequences, for the trainer: forward and gradient.
//!
//! Sequences that begin alike share those positions: they are packed once, and every sequence of such a unit attends to
//! them. A query's result is the same to the bit as if its sequence were whole.

use super::{Heads, KvCache, LANES, PagedSequence, gradient, paged_attention};
use crate::gemm::Dtype;

/// One of several sequences packed one after the other: what it shares, then tokens of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedSequence {
    /// Leading positions that it takes from its leader, the last sequence before it that takes none. 0 makes it one.
    pub n_shared: usize,
    /// Tokens that follow them. Only these are packed.
    pub n_own: usize,
}

impl PackedSequence {
    /// `n_own` tokens that share nothing.
    #[must_use]
    pub fn whole(n_own: usize) -> Self {
        Self { n_shared: 0, n_own }
    }

    /// Positions.
    #[must_use]
    pub fn len(self) -> usize {
        self.n_shared + self.n_own
    }

    /// Whether it has no position.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// Attention of sequences packed one after the other, with room that is used again from call to call.
#[derive(Debug)]
pub struct PackedAttention {
    heads: Heads,
    /// Keys and values, in the dtype of the engine's cache.
    pub(super) plain: PackedKv,
    /// The two swapped, for the gradient.
    pub(super) swapped: PackedKv,
}

impl PackedAttention {
    /// Attention with `heads` whose keys and values are kept in `dtype`.
    ///
    /// # Panics
    /// If `n_heads` is not a positive multiple of `n_kv_heads`, or `head_dim` is 0.
    #[must_use]
    pub fn new(heads: Heads, dtype: Dtype) -> Self {
        Self { heads, plain: PackedKv::new(heads, dtype), swapped: PackedKv::new(heads, dtype) }
    }

    /// Attention of `q` `[T, H, hd]` over keys and values `[T, Hkv, hd]` into `out` `[T, H, hd]`; own tokens of the
    /// `sequences` sum to `T`. The bits of [`paged_attention`] over a cache of the same dtype.
    ///
    /// # Panics
    /// If the shapes do not fit, or a sequence shares more than its leader has.
    pub fn forward(
        &mut self,
        q: &[f32],
        (k, v): (&[f32], &[f32]),
        sequences: &[PackedSequence],
        out: &mut [f32],
    ) {
        self.plain.fill(sequences, k, v);
        paged_attention(q, &self.plain.cache, (0, LANES), &self.plain.paged(sequences), out);
    }

    /// Gradients of [`Self::forward`] of the same operands from `grad` `[T, H, hd]`: `out` are those of `q`, `k` and `v`,
    /// overwritten whole; `None` is not computed. Those of a shared key or value are one sum over the queries of all
    /// sequences that see it, in order.
    ///
    /// # Panics
    /// If the shapes do not fit, or a sequence shares more than its leader has.
    pub fn backward(
        &mut self,
        qkv: [&[f32]; 3],
        sequences: &[PackedSequence],
        grad: &[f32],
        out: [Option<&mut [f32]>; 3],
    ) {
        let [q, k, v] = qkv;
        let n_tokens: usize = sequences.iter().map(|sequence| sequence.n_own).sum();
        let (queries, kv) = (n_tokens * self.heads.query_len(), n_tokens * self.heads.kv_len());
        assert_eq!(qkv.map(<[f32]>::len), [queries, kv, kv], "operands are [{n_tokens}, heads, hd]");
        assert_eq!(grad.len(), queries, "the gradient is [{n_tokens}, H, hd]");
        let fits = |(out, len): (&Option<&mut [f32]>, usize)| out.as_ref().is_none_or(|out| out.len() == len);
        assert!(out.iter().zip([queries, kv, kv]).all(fits), "gradients have the shapes of operands");
        // The second cache holds values where keys belong and keys where values do: `grad . v_p` is then a score, and
        // the gradient of a query a weighted sum.
        self.plain.fill(sequences, k, v);
        self.swapped.fill(sequences, v, k);
        let operands = gradient::Operands { attention: self, heads: self.heads, q, grad };
        gradient::backward(&operands, sequences, out);
    }
}

/// Packed sequences in a cache of their own. A leader starts with a tile, and so does what another adds to the whole tiles
/// it shares: the rest of what it shares is copied in front of its own.
#[derive(Debug)]
pub(super) struct PackedKv {
    pub(super) cache: KvCache,
    dtype: Dtype,
    /// Of every token.
    slots: Vec<u32>,
    /// Every sequence's block table after the other.
    blocks: Vec<u32>,
    /// Slots to copy from and to.
    copies: [Vec<u32>; 2],
}

impl PackedKv {
    fn new(heads: Heads, dtype: Dtype) -> Self {
        let cache = KvCache::new(1, 0, heads, dtype);
        Self { cache, dtype, slots: Vec::new(), blocks: Vec::new(), copies: Default::default() }
    }

    /// Replaces what is cached.
    fn fill(&mut self, sequences: &[PackedSequence], k: &[f32], v: &[f32]) {
        let n_slots = self.lay_out(sequences) * LANES;
        if n_slots > self.cache.n_slots {
            self.cache = KvCache::new(1, n_slots, self.cache.heads, self.dtype);
        }
        self.cache.write(0, &self.slots, k, v);
        let [from, to] = &self.copies;
        self.cache.copy_slots(from, to);
    }

    /// Gives every token a slot and every sequence a block table; returns how many tiles they take.
    fn lay_out(&mut self, sequences: &[PackedSequence]) -> usize {
        self.slots.clear();
        self.blocks.clear();
        self.copies.iter_mut().for_each(Vec::clear);
        let (mut n_tiles, mut leader, mut leader_len) = (0, 0, 0);
        for &PackedSequence { n_shared, n_own } in sequences {
            if n_shared == 0 {
                (leader, leader_len) = (n_tiles, n_own);
            }
            assert!(n_shared <= leader_len, "{n_shared} positions are shared of {leader_len}");
            let (whole, rest) = (n_shared / LANES, n_shared % LANES);
            let own_tiles = (rest + n_own).div_ceil(LANES);
            self.blocks.extend(ids(leader, whole).chain(ids(n_tiles, own_tiles)));
            self.copies[0].extend(ids((leader + whole) * LANES, rest));
            self.copies[1].extend(ids(n_tiles * LANES, rest));
            self.slots.extend(ids(n_tiles * LANES + rest, n_own));
            n_tiles += own_tiles;
        }
        n_tiles
    }

    /// The sequences as they lie in the cache.
    pub(super) fn paged(&self, sequences: &[PackedSequence]) -> Vec<PagedSequence<'_>> {
        let mut blocks = &self.blocks[..];
        let paged = |sequence: &PackedSequence| {
            let (table, rest) = blocks.split_at(sequence.len().div_ceil(LANES));
            blocks = rest;
            PagedSequence { n_queries: sequence.n_own, start: sequence.n_shared, blocks: table }
        };
        sequences.iter().map(paged).collect()
    }
}

/// `n` consecutive slots or tiles.
fn ids(first: usize, n: usize) -> impl Iterator<Item = u32> {
    (first..first + n).map(|id| u32::try_from(id).expect("fewer than 2^32 slots"))
}
