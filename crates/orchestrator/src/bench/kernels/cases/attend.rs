//! Attention of decoding and of training.

use std::hint::black_box;

use r3_core::count::counted;
use r3_kernels::attention::packed::{PackedAttention, PackedSequence};
use r3_kernels::attention::split::split_attention;
use r3_kernels::attention::{Heads, KvCache, PagedSequence, paged_attention};
use r3_kernels::gemm::Dtype;
use r3_kernels::numerics::Numerics;

use super::{Case, DTYPES, F32, element, noise, pairs};

const HEADS: Heads = Heads { n_heads: 16, n_kv_heads: 4, head_dim: 64 };
const BLOCK_TOKENS: usize = 16;

/// Decoding: one query a sequence, over a context of which each sequence has its own.
struct Decode {
    heads: Heads,
    dtype: Dtype,
    sequences: usize,
    context: usize,
    numerics: Numerics,
}

impl Decode {
    fn case(self, shape: String) -> Case {
        let Self { heads, dtype, sequences, context, numerics } = self;
        let Heads { n_heads, n_kv_heads, head_dim } = heads;
        let n_slots = sequences * context;
        let mut cache = KvCache::new(1, n_slots, heads, dtype);
        let slots: Vec<u32> = (0u32..).take(n_slots).collect();
        let kv = noise(n_slots * n_kv_heads * head_dim);
        cache.write(0, &slots, &kv, &kv);
        let q = noise(sequences * n_heads * head_dim);
        let mut out = vec![0.0; q.len()];
        let blocks: Vec<u32> = (0u32..).take(n_slots / BLOCK_TOKENS).collect();
        let costs = (4 * n_slots * n_heads * head_dim, 2 * n_slots * n_kv_heads * head_dim * element(dtype));
        let attention = match numerics {
            Numerics::Exact => paged_attention,
            Numerics::Fast => split_attention,
        };
        Case::new(shape, dtype, costs, move || {
            let tables = blocks.chunks_exact(context / BLOCK_TOKENS);
            let tables: Vec<_> =
                tables.map(|blocks| PagedSequence { n_queries: 1, start: context - 1, blocks }).collect();
            attention(black_box(&q), &cache, (0, BLOCK_TOKENS), &tables, black_box(&mut out));
        })
    }
}

/// Decoding in the engine's own order.
pub(super) fn paged() -> Vec<Case> {
    let case = |(dtype, (sequences, context))| {
        let decode = Decode { heads: HEADS, dtype, sequences, context, numerics: Numerics::Exact };
        decode.case(format!("{}, context {context}", counted(sequences, "sequence")))
    };
    pairs(&DTYPES, &[(1, 1024), (64, 160), (64, 1024)]).into_iter().map(case).collect()
}

/// A few sequences with long contexts, where the two orders differ.
pub(super) fn long() -> Vec<Case> {
    let heads = |n_heads, n_kv_heads, head_dim| Heads { n_heads, n_kv_heads, head_dim };
    let (one, four, two) = (heads(8, 1, 64), heads(12, 4, 64), heads(4, 2, 32));
    let shapes = [
        (one, 1, 1024),
        (one, 1, 4096),
        (one, 1, 16_384),
        (one, 3, 4096),
        (one, 3, 16_384),
        (one, 5, 4096),
        (one, 8, 4096),
        (four, 1, 4096),
        (four, 1, 16_384),
        (four, 3, 4096),
        (four, 3, 16_384),
        (two, 1, 16_384),
        (two, 3, 16_384),
    ];
    let case = |((heads, sequences, context), (numerics, order))| {
        let Heads { n_heads, n_kv_heads, head_dim } = heads;
        let shape = format!("{n_heads}/{n_kv_heads} x {head_dim}, {sequences} x {context}, {order}");
        Decode { heads, dtype: Dtype::F32, sequences, context, numerics }.case(shape)
    };
    pairs(&shapes, &[(Numerics::Exact, "exact"), (Numerics::Fast, "fast")]).into_iter().map(case).collect()
}

/// Training: every query of every sequence.
pub(super) fn packed() -> Vec<Case> {
    let Heads { n_heads, n_kv_heads, head_dim } = HEADS;
    let case = |(sequences, length): (usize, usize)| {
        let t = sequences * length;
        let (q, kv) = (noise(t * n_heads * head_dim), noise(t * n_kv_heads * head_dim));
        let (mut out, packed) = (vec![0.0; q.len()], vec![PackedSequence::whole(length); sequences]);
        let pairs = sequences * length * (length + 1) / 2;
        let costs = (4 * pairs * n_heads * head_dim, (q.len() + 2 * kv.len()) * F32);
        let mut attention = PackedAttention::new(HEADS, Dtype::F32);
        Case::new(format!("{} of {length}", counted(sequences, "sequence")), Dtype::F32, costs, move || {
            attention.forward(black_box(&q), (&kv, &kv), &packed, black_box(&mut out));
        })
    };
    [(8, 256), (32, 64)].map(case).into()
}
