//! Causal attention within packed sequences, for the trainer: forward and gradient.

use super::{Heads, KvCache, LANES, PagedSequence, gradient, paged_attention};
use crate::gemm::Dtype;

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

    /// Attention of `q` `[T, H, hd]` over keys and values `[T, Hkv, hd]` into `out` `[T, H, hd]`; `lengths` sum to `T`.
    /// The bits of [`paged_attention`] over a cache of the same dtype.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn forward(&mut self, q: &[f32], (k, v): (&[f32], &[f32]), lengths: &[usize], out: &mut [f32]) {
        self.plain.fill(lengths, k, v);
        paged_attention(q, &self.plain.cache, (0, LANES), &self.plain.sequences(lengths), out);
    }

    /// Gradients of [`Self::forward`] of the same operands from `grad` `[T, H, hd]`: `out` are those of `q`, `k` and `v`,
    /// overwritten whole.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn backward(&mut self, qkv: [&[f32]; 3], lengths: &[usize], grad: &[f32], out: [&mut [f32]; 3]) {
        let [q, k, v] = qkv;
        let n_tokens: usize = lengths.iter().sum();
        let (queries, kv) = (n_tokens * self.heads.query_len(), n_tokens * self.heads.kv_len());
        assert_eq!(qkv.map(<[f32]>::len), [queries, kv, kv], "operands are [{n_tokens}, heads, hd]");
        assert_eq!(
            (grad.len(), out.each_ref().map(|out| out.len())),
            (queries, [queries, kv, kv]),
            "gradients fit"
        );
        // The second cache holds values where keys belong and keys where values do: `grad . v_p` is then a score, and
        // the gradient of a query a weighted sum.
        self.plain.fill(lengths, k, v);
        self.swapped.fill(lengths, v, k);
        let operands = gradient::Operands { attention: self, heads: self.heads, q, grad };
        gradient::backward(&operands, lengths, out);
    }
}

/// Packed sequences in a cache of their own, each from the start of a tile.
#[derive(Debug)]
pub(super) struct PackedKv {
    pub(super) cache: KvCache,
    dtype: Dtype,
    slots: Vec<u32>,
    /// `0..n_tiles`, every sequence's block table after the other.
    blocks: Vec<u32>,
}

impl PackedKv {
    fn new(heads: Heads, dtype: Dtype) -> Self {
        Self { cache: KvCache::new(1, 0, heads, dtype), dtype, slots: Vec::new(), blocks: Vec::new() }
    }

    /// Replaces what is cached.
    pub(super) fn fill(&mut self, lengths: &[usize], k: &[f32], v: &[f32]) {
        let n_tiles: usize = lengths.iter().map(|length| length.div_ceil(LANES)).sum();
        if n_tiles > self.blocks.len() {
            self.cache = KvCache::new(1, n_tiles * LANES, self.cache.heads, self.dtype);
            self.blocks = (0..u32::try_from(n_tiles).expect("fewer than 2^32 tiles")).collect();
        }
        self.slots.clear();
        let mut first = 0;
        for length in lengths {
            self.slots.extend((first..first + length).map(|slot| slot as u32));
            first += length.next_multiple_of(LANES);
        }
        self.cache.write(0, &self.slots, k, v);
    }

    pub(super) fn sequences(&self, lengths: &[usize]) -> Vec<PagedSequence<'_>> {
        let mut blocks = &self.blocks[..];
        let sequence = |&n_queries: &usize| {
            let (own, rest) = blocks.split_at(n_queries.div_ceil(LANES));
            blocks = rest;
            PagedSequence { n_queries, start: 0, blocks: own }
        };
        lengths.iter().map(sequence).collect()
    }
}
