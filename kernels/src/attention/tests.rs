//! Attention against f64, paged against packed to the bit, and the gradient against candle and finite differences.

use std::panic::catch_unwind;

use candle_core::{D, Device, Tensor, Var};
use half::bf16;
use proptest::array::uniform3;
use proptest::prelude::{Strategy, prop_assert, prop_assert_eq, proptest};
use proptest::sample::select;

use super::kernel::{LANES, Rows, Scratch};
use super::packed::{PackedAttention, PackedSequence};
use super::{Heads, KvCache, KvHead, PagedSequence, Pages, attend, paged_attention};
use crate::gemm::Dtype;
#[cfg(target_arch = "x86_64")]
use crate::isa::{Avx2, Avx512, Level, level};
use crate::isa::{Baseline, Isa};

/// Scores are sums of up to 128 products of at most 2.25, scaled by `1 / sqrt(hd)`: about 25, with an error of
/// `sqrt(128)` half units in the last place. Their exponentials are off by as much, relatively.
const TOLERANCE: f64 = 2e-5;

/// Queries, keys and values of packed sequences.
#[derive(Clone, Debug)]
struct Inputs {
    heads: Heads,
    lengths: Vec<usize>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Inputs {
    fn new(heads: Heads, lengths: &[usize]) -> Self {
        let n_tokens: usize = lengths.iter().sum();
        let wave = |n: usize, seed: f32| (0..n).map(|i| ((i as f32 + seed) * 1.7).sin() * 1.5).collect();
        let (q, kv) = (n_tokens * heads.query_len(), n_tokens * heads.kv_len());
        Self { heads, lengths: lengths.to_vec(), q: wave(q, 0.0), k: wave(kv, 0.3), v: wave(kv, 0.6) }
    }

    fn packed(&self) -> Vec<f32> {
        self.packed_in(Dtype::F32)
    }

    fn packed_in(&self, dtype: Dtype) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.q.len()];
        // More sequences first, to see that nothing of them stays.
        let mut attention = PackedAttention::new(self.heads, dtype);
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| [&x[..], &vec![f32::NAN; x.len()]].concat());
        let sequences = alone(&self.lengths);
        attention.forward(&q, (&k, &v), &sequences.repeat(2), &mut [&out[..], &out[..]].concat());
        attention.forward(&self.q, (&self.k, &self.v), &sequences, &mut out);
        out
    }

    /// Tokens `first..first + n` of the one sequence there is.
    fn tokens(&self, first: usize, n: usize) -> [&[f32]; 3] {
        let (q, kv) = (self.heads.query_len(), self.heads.kv_len());
        [(&self.q, q), (&self.k, kv), (&self.v, kv)].map(|(x, len)| &x[first * len..][..n * len])
    }
}

/// Sequences that share nothing.
fn alone(lengths: &[usize]) -> Vec<PackedSequence> {
    lengths.iter().copied().map(PackedSequence::whole).collect()
}

fn heads_strategy() -> impl Strategy<Value = Heads> {
    (1_usize..4, select(vec![1, 2, 3, 4, 5, 8, 11]), 1_usize..65).prop_map(|(n_kv_heads, group, half)| {
        Heads { n_heads: n_kv_heads * group, n_kv_heads, head_dim: 2 * half }
    })
}

fn inputs_strategy() -> impl Strategy<Value = Inputs> {
    let lengths = proptest::collection::vec(0_usize..40, 1..4);
    (heads_strategy(), lengths).prop_map(|(heads, lengths)| Inputs::new(heads, &lengths))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// The textbook formula, one query and head at a time.
fn reference(inputs: &Inputs) -> Vec<f64> {
    let Heads { n_heads, n_kv_heads, head_dim } = inputs.heads;
    let row = |x: &[f32], t: usize, n: usize, head: usize| -> Vec<f64> {
        x[(t * n + head) * head_dim..][..head_dim].iter().map(|&x| f64::from(x)).collect()
    };
    let mut out = Vec::new();
    let mut first = 0;
    for &length in &inputs.lengths {
        for t in 0..length {
            for head in 0..n_heads {
                let kv_head = head / (n_heads / n_kv_heads);
                let q = row(&inputs.q, first + t, n_heads, head);
                let weight = |key: usize| {
                    let k = row(&inputs.k, first + key, n_kv_heads, kv_head);
                    let dot: f64 = q.iter().zip(&k).map(|(a, b)| a * b).sum();
                    (dot / (head_dim as f64).sqrt()).exp()
                };
                let weights: Vec<f64> = (0..=t).map(weight).collect();
                let total: f64 = weights.iter().sum();
                for d in 0..head_dim {
                    let value = |key: usize| row(&inputs.v, first + key, n_kv_heads, kv_head)[d];
                    out.push((0..=t).map(|key| weights[key] / total * value(key)).sum());
                }
            }
        }
        first += length;
    }
    out
}

/// Runs one sequence through a cache at layer 1 of 2, `chunks` queries at a time, blocks in a scrambled order.
fn paged(inputs: &Inputs, dtype: Dtype, block_tokens: usize, chunks: &[usize]) -> Vec<f32> {
    let [length] = inputs.lengths[..] else { panic!("one sequence") };
    let n_blocks = length.div_ceil(block_tokens) + 2;
    // 7919 is prime, so that this visits every block once.
    let blocks: Vec<u32> = (0..n_blocks).map(|i| ((i * 7919 + 1) % n_blocks) as u32).collect();
    let mut cache = KvCache::new(2, n_blocks * block_tokens, inputs.heads, dtype);
    let everywhere: Vec<u32> = (0..(n_blocks * block_tokens) as u32).collect();
    let broken = vec![f32::NAN; everywhere.len() * inputs.heads.kv_len()];
    for layer in 0..2 {
        cache.write(layer, &everywhere, &broken, &broken);
    }
    let mut out = Vec::new();
    let mut sizes = chunks.iter().cycle();
    let mut start = 0;
    while start < length {
        let n_queries = (*sizes.next().unwrap()).min(length - start);
        let [q, k, v] = inputs.tokens(start, n_queries);
        let slots: Vec<u32> = (start..start + n_queries)
            .map(|p| blocks[p / block_tokens] * block_tokens as u32 + (p % block_tokens) as u32)
            .collect();
        cache.write(1, &slots, k, v);
        let mut rows = vec![f32::NAN; q.len()];
        let sequence = PagedSequence { n_queries, start, blocks: &blocks };
        paged_attention(q, &cache, (1, block_tokens), &[sequence], &mut rows);
        out.extend(rows);
        start += n_queries;
    }
    out
}

#[test]
fn two_tokens_are_that_by_hand() {
    // Scores of the second query are 0 and ln 3, so it takes 1/4 of the first value and 3/4 of the second.
    let heads = Heads { n_heads: 1, n_kv_heads: 1, head_dim: 4 };
    let q = [9.0, 9.0, 9.0, 9.0, 2.0, 0.0, 0.0, 0.0];
    let k = [0.0, 7.0, 0.0, 0.0, 3_f32.ln(), 0.0, 5.0, 0.0];
    let v = [4.0, 8.0, 0.0, 1.0, 0.0, 4.0, 8.0, 1.0];
    let mut out = [f32::NAN; 8];
    PackedAttention::new(heads, Dtype::F32).forward(&q, (&k, &v), &alone(&[2]), &mut out);
    assert_eq!(out[..4], v[..4]);
    for (got, want) in out[4..].iter().zip([1.0, 5.0, 6.0, 1.0]) {
        assert!((got - want).abs() < 1e-6, "{out:?}");
    }
}

proptest! {
    #[test]
    fn outputs_are_those_of_f64(inputs in inputs_strategy()) {
        for (got, want) in inputs.packed().into_iter().zip(reference(&inputs)) {
            prop_assert!((f64::from(got) - want).abs() < TOLERANCE, "{} {}", got, want);
        }
    }

    #[test]
    fn paged_has_the_bits_of_packed(
        heads in heads_strategy(),
        length in 1_usize..70,
        block_tokens in select(vec![1, 3, 4, 8, 16, 24, 32]),
        chunks in proptest::collection::vec(1_usize..30, 1..4),
    ) {
        let inputs = Inputs::new(heads, &[length]);
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let got = paged(&inputs, dtype, block_tokens, &chunks);
            prop_assert_eq!(bits(&got), bits(&inputs.packed_in(dtype)));
        }
    }

    #[test]
    fn a_bf16_cache_rounds_keys_and_values_and_nothing_else(
        heads in heads_strategy(), length in 1_usize..40, block_tokens in select(vec![1, 4, 16]),
    ) {
        let mut inputs = Inputs::new(heads, &[length]);
        let got = paged(&inputs, Dtype::Bf16, block_tokens, &[length, 1]);
        for x in inputs.k.iter_mut().chain(&mut inputs.v) {
            *x = bf16::from_f32(*x).to_f32();
        }
        prop_assert_eq!(bits(&got), bits(&inputs.packed()));
    }

    #[test]
    fn a_sequence_is_the_same_alone_and_among_others(inputs in inputs_strategy()) {
        let together = inputs.packed();
        let mut first = 0;
        for &length in &inputs.lengths {
            let [q, k, v] = inputs.tokens(first, length).map(<[f32]>::to_vec);
            let alone = Inputs { heads: inputs.heads, lengths: vec![length], q, k, v }.packed();
            let len = inputs.heads.query_len();
            prop_assert_eq!(bits(&alone), bits(&together[first * len..][..length * len]));
            first += length;
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let heads = Heads { n_heads: 6, n_kv_heads: 2, head_dim: 64 };
    let inputs = Inputs::new(heads, &[90, 1, 40]);
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| (inputs.packed(), gradients(&inputs)))
    };
    let (one, three) = (run(1), run(3));
    assert_eq!(bits(&one.0), bits(&three.0));
    assert_eq!(bits(&one.1.concat()), bits(&three.1.concat()));
}

#[test]
fn a_later_token_cannot_reach_an_earlier_one_even_by_nan() {
    let heads = Heads { n_heads: 2, n_kv_heads: 2, head_dim: 20 };
    let clean = Inputs::new(heads, &[21]);
    let mut broken = clean.clone();
    let from = 13 * heads.kv_len();
    broken.k[from..].fill(f32::NAN);
    broken.v[from..].fill(f32::INFINITY);
    let (clean, broken) = (clean.packed(), broken.packed());
    let from = 13 * heads.query_len();
    assert_eq!(bits(&clean[..from]), bits(&broken[..from]));
    assert!(broken[from..].iter().all(|x| x.is_nan()));
}

/// One kv head of one sequence, compiled for `I`; the machine must have it.
fn attend_as<I: Isa>(inputs: &Inputs) -> Vec<f32> {
    let heads = inputs.heads;
    let n_tiles = inputs.lengths[0].div_ceil(LANES) as u32;
    let (slots, blocks): (Vec<u32>, Vec<u32>) =
        ((0..inputs.lengths[0] as u32).collect(), (0..n_tiles).collect());
    let mut cache = KvCache::new(1, blocks.len() * LANES, heads, Dtype::F32);
    cache.write(0, &slots, &inputs.k, &inputs.v);
    let head = KvHead { index: 0, blocks: &blocks, block_tokens: LANES };
    let Pages::F32(layers) = &cache.pages else { unreachable!("an f32 cache") };
    let view = layers[0].view(heads, head);
    let mut scratch = Scratch::default();
    scratch.queries.extend(inputs.q.iter().map(|x| x * heads.scale()));
    let rows = Rows { group: heads.group(), start: 0, n_rows: inputs.lengths[0] * heads.group() };
    attend::<I>(&view, rows, &mut scratch);
    scratch.out
}

#[test]
fn every_instruction_set_computes_the_formula() {
    for (group, head_dim, length) in [(1, 16, 19), (3, 10, 33), (5, 64, 7)] {
        let inputs = Inputs::new(Heads { n_heads: group, n_kv_heads: 1, head_dim }, &[length]);
        let mut results = vec![attend_as::<Baseline>(&inputs)];
        #[cfg(target_arch = "x86_64")]
        {
            if matches!(level(), Level::Avx2 | Level::Avx512) {
                results.push(attend_as::<Avx2>(&inputs));
            }
            if level() == Level::Avx512 {
                results.push(attend_as::<Avx512>(&inputs));
                assert_eq!(bits(&results[2]), bits(&inputs.packed()));
            }
        }
        for (got, want) in results.iter().flat_map(|got| got.iter().zip(reference(&inputs))) {
            assert!((f64::from(*got) - want).abs() < TOLERANCE, "{got} {want}");
        }
    }
}

#[test]
fn copied_slots_hold_the_same_keys_and_values_at_every_layer() {
    let heads = Heads { n_heads: 4, n_kv_heads: 2, head_dim: 6 };
    let inputs = Inputs::new(heads, &[5]);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let mut cache = KvCache::new(3, 40, heads, dtype);
        let [q, k, v] = inputs.tokens(0, 5);
        for layer in 0..3 {
            cache.write(
                layer,
                &[0, 1, 2, 3, 4],
                &k.iter().map(|x| x * (layer + 1) as f32).collect::<Vec<_>>(),
                v,
            );
        }
        cache.copy_slots(&[0, 1, 2, 3, 4], &[35, 36, 37, 38, 39]);
        for layer in 0..3 {
            let run = |blocks: &[u32]| {
                let mut out = vec![f32::NAN; q.len()];
                paged_attention(
                    q,
                    &cache,
                    (layer, 5),
                    &[PagedSequence { n_queries: 5, start: 0, blocks }],
                    &mut out,
                );
                out
            };
            assert_eq!(bits(&run(&[0])), bits(&run(&[7])));
            assert_ne!(bits(&run(&[0])), bits(&run(&[1])));
        }
    }
}

#[test]
fn a_slot_takes_a_key_and_a_value_per_layer_and_kv_head() {
    let heads = Heads { n_heads: 8, n_kv_heads: 2, head_dim: 64 };
    assert_eq!(KvCache::bytes_per_slot(3, heads, Dtype::F32), 3 * 2 * 2 * 64 * 4);
    assert_eq!(KvCache::bytes_per_slot(3, heads, Dtype::Bf16), 3 * 2 * 2 * 64 * 2);
}

#[test]
fn what_lies_outside_the_cache_is_named() {
    let heads = Heads { n_heads: 1, n_kv_heads: 1, head_dim: 2 };
    let message = |body: fn(KvCache)| {
        let cache = KvCache::new(1, 8, heads, Dtype::F32);
        *catch_unwind(move || body(cache)).unwrap_err().downcast::<String>().unwrap()
    };
    let got = message(|mut cache| cache.write(0, &[8], &[0.0; 2], &[0.0; 2]));
    assert_eq!(got, "slot 8 of 8");
    let got = message(|cache| {
        let sequence = PagedSequence { n_queries: 1, start: 4, blocks: &[0, 2] };
        paged_attention(&[0.0; 2], &cache, (0, 4), &[sequence], &mut [0.0; 2]);
    });
    assert_eq!(got, "sequence 0 reaches slot 12 of 8");
}

/// The output's gradient in every test.
fn pull(inputs: &Inputs) -> Vec<f32> {
    (0..inputs.q.len()).map(|i| (i as f32 * 0.9).cos()).collect()
}

fn vars(inputs: &Inputs) -> [Var; 3] {
    let Heads { n_heads, n_kv_heads, head_dim } = inputs.heads;
    let n_tokens = inputs.lengths.iter().sum::<usize>();
    [(&inputs.q, n_heads), (&inputs.k, n_kv_heads), (&inputs.v, n_kv_heads)]
        .map(|(x, n)| Var::from_slice(x, (n_tokens, n, head_dim), &Device::Cpu).unwrap())
}

fn gradients_of(out: &Tensor, inputs: &Inputs, vars: &[Var; 3]) -> [Vec<f32>; 3] {
    let pull = Tensor::from_vec(pull(inputs), out.shape(), &Device::Cpu).unwrap();
    let grads = (out * pull).unwrap().sum_all().unwrap().backward().unwrap();
    vars.each_ref().map(|var| grads.get(var).unwrap().flatten_all().unwrap().to_vec1().unwrap())
}

fn gradients(inputs: &Inputs) -> [Vec<f32>; 3] {
    gradients_in(inputs, Dtype::F32)
}

fn gradients_in(inputs: &Inputs, dtype: Dtype) -> [Vec<f32>; 3] {
    gradients_of_some(inputs, dtype, [true; 3])
}

/// Of those of queries, keys and values that are wanted; the others are not touched.
fn gradients_of_some(inputs: &Inputs, dtype: Dtype, wanted: [bool; 3]) -> [Vec<f32>; 3] {
    let operands = [&inputs.q[..], &inputs.k, &inputs.v];
    let mut out = operands.map(|x| vec![f32::NAN; x.len()]);
    let [q, k, v] = &mut out;
    let some = |at: usize, out| if wanted[at] { Some(out) } else { None };
    let grads = [some(0, &mut q[..]), some(1, &mut k[..]), some(2, &mut v[..])];
    PackedAttention::new(inputs.heads, dtype).backward(
        operands,
        &alone(&inputs.lengths),
        &pull(inputs),
        grads,
    );
    out
}

/// The same formula in candle's own operations, whose gradient is candle's.
fn naive_gradients(inputs: &Inputs) -> [Vec<f32>; 3] {
    let vars = vars(inputs);
    let Heads { n_heads, n_kv_heads, head_dim } = inputs.heads;
    let mut outs = Vec::new();
    let mut first = 0;
    for &n in inputs.lengths.iter().filter(|&&n| n > 0) {
        let [q, k, v] = vars.each_ref().map(|x| x.narrow(0, first, n).unwrap().transpose(0, 1).unwrap());
        let repeat = |x: Tensor| {
            let x = x
                .unsqueeze(1)
                .unwrap()
                .broadcast_as((n_kv_heads, n_heads / n_kv_heads, n, head_dim))
                .unwrap();
            x.reshape((n_heads, n, head_dim)).unwrap()
        };
        let (q, k, v) = (q.contiguous().unwrap(), repeat(k), repeat(v));
        let scores = q.matmul(&k.t().unwrap().contiguous().unwrap()).unwrap();
        let mask: Vec<f32> = (0..n * n).map(|i| if i % n > i / n { -1e9 } else { 0.0 }).collect();
        let mask = Tensor::from_vec(mask, (1, n, n), &Device::Cpu).unwrap();
        let scores = (scores / (head_dim as f64).sqrt()).unwrap().broadcast_add(&mask).unwrap();
        let exps = scores.exp().unwrap();
        let p = exps.broadcast_div(&exps.sum_keepdim(D::Minus1).unwrap()).unwrap();
        outs.push(p.matmul(&v).unwrap().transpose(0, 1).unwrap());
        first += n;
    }
    gradients_of(&Tensor::cat(&outs, 0).unwrap(), inputs, &vars)
}

#[test]
fn the_gradients_are_those_of_candle() {
    for (n_heads, n_kv_heads, head_dim) in [(1, 1, 2), (4, 2, 16), (6, 2, 34), (9, 1, 64), (3, 3, 128)] {
        for lengths in [&[1][..], &[5, 0, 1, 18], &[37]] {
            let inputs = Inputs::new(Heads { n_heads, n_kv_heads, head_dim }, lengths);
            for (ours, naive) in
                gradients(&inputs).concat().into_iter().zip(naive_gradients(&inputs).concat())
            {
                assert!((ours - naive).abs() < 2e-5 * (1.0 + naive.abs()), "{ours} {naive}");
            }
        }
    }
}

#[test]
fn the_gradients_are_those_of_finite_differences() {
    let inputs = Inputs::new(Heads { n_heads: 4, n_kv_heads: 2, head_dim: 6 }, &[3, 7]);
    let loss = |inputs: &Inputs| -> f64 {
        reference(inputs).iter().zip(pull(inputs)).map(|(out, pull)| out * f64::from(pull)).sum()
    };
    let fields: [fn(&mut Inputs) -> &mut Vec<f32>; 3] = [|x| &mut x.q, |x| &mut x.k, |x| &mut x.v];
    for (grad, field) in gradients(&inputs).iter().zip(fields) {
        for (i, &grad) in grad.iter().enumerate() {
            let moved = |by: f32| {
                let mut inputs = inputs.clone();
                field(&mut inputs)[i] += by;
                (f64::from(field(&mut inputs)[i]), loss(&inputs))
            };
            let ((low_x, low), (high_x, high)) = (moved(-1e-3), moved(1e-3));
            let want = (high - low) / (high_x - low_x);
            assert!((f64::from(grad) - want).abs() < 1e-5, "{grad} {want}");
        }
    }
}

#[test]
fn gradients_through_a_bf16_cache_are_those_at_the_rounded_keys_and_values() {
    let mut inputs = Inputs::new(Heads { n_heads: 6, n_kv_heads: 2, head_dim: 34 }, &[5, 0, 37]);
    let got = gradients_in(&inputs, Dtype::Bf16);
    assert_ne!(got, gradients(&inputs));
    for x in inputs.k.iter_mut().chain(&mut inputs.v) {
        *x = bf16::from_f32(*x).to_f32();
    }
    assert_eq!(got.map(|grad| bits(&grad)), gradients(&inputs).map(|grad| bits(&grad)));
}

/// Sequences that begin as their leader does, each of them whole.
#[derive(Clone, Debug)]
struct Shared {
    whole: Inputs,
    /// What each of `whole` shares.
    n_shared: Vec<usize>,
}

impl Shared {
    /// Of each sequence, how much it shares, at most what its leader has, and how much more it has.
    fn new(heads: Heads, sizes: &[(usize, usize)]) -> Self {
        let (mut lengths, mut n_shared, mut leaders) = (Vec::new(), Vec::new(), Vec::new());
        let (mut leader, mut leader_len) = (0, 0);
        for &(shared, own) in sizes {
            let shared = shared.min(leader_len);
            if shared == 0 {
                (leader, leader_len) = (lengths.iter().sum(), own);
            }
            lengths.push(shared + own);
            n_shared.push(shared);
            leaders.push(leader);
        }
        let mut whole = Inputs::new(heads, &lengths);
        let (q, kv) = (heads.query_len(), heads.kv_len());
        let mut first = 0;
        for ((length, n_shared), leader) in lengths.iter().zip(&n_shared).zip(leaders) {
            for (x, len) in [(&mut whole.q, q), (&mut whole.k, kv), (&mut whole.v, kv)] {
                x.copy_within(leader * len..(leader + n_shared) * len, first * len);
            }
            first += length;
        }
        Self { whole, n_shared }
    }

    fn sequences(&self) -> Vec<PackedSequence> {
        let each = self.whole.lengths.iter().zip(&self.n_shared);
        each.map(|(length, &n_shared)| PackedSequence { n_shared, n_own: length - n_shared }).collect()
    }

    /// The rows of `x`, of `len` elements a token, that are not shared.
    fn own(&self, x: &[f32], len: usize) -> Vec<f32> {
        let (mut own, mut rest) = (Vec::new(), x);
        for (length, n_shared) in self.whole.lengths.iter().zip(&self.n_shared) {
            let (sequence, others) = rest.split_at(length * len);
            own.extend_from_slice(&sequence[n_shared * len..]);
            rest = others;
        }
        own
    }

    fn operands(&self) -> [Vec<f32>; 3] {
        let Inputs { heads, q, k, v, .. } = &self.whole;
        [(q, heads.query_len()), (k, heads.kv_len()), (v, heads.kv_len())].map(|(x, len)| self.own(x, len))
    }
}

fn shared_strategy() -> impl Strategy<Value = Shared> {
    let sizes = proptest::collection::vec((0_usize..50, 0_usize..40), 1..5);
    (heads_strategy(), sizes).prop_map(|(heads, sizes)| Shared::new(heads, &sizes))
}

proptest! {
    #[test]
    fn what_is_shared_does_not_show_in_any_bit(unit in shared_strategy()) {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let [q, k, v] = unit.operands();
            let mut out = vec![f32::NAN; q.len()];
            PackedAttention::new(unit.whole.heads, dtype).forward(&q, (&k, &v), &unit.sequences(), &mut out);
            let want = unit.own(&unit.whole.packed_in(dtype), unit.whole.heads.query_len());
            prop_assert_eq!(bits(&out), bits(&want));
        }
    }

    #[test]
    fn a_gradient_has_the_same_bits_whichever_others_are_wanted(
        inputs in inputs_strategy(), dtype in select(vec![Dtype::F32, Dtype::Bf16]),
        wanted in uniform3(select(vec![false, true])),
    ) {
        let (all, some) = (gradients_in(&inputs, dtype), gradients_of_some(&inputs, dtype, wanted));
        for at in (0..3).filter(|&at| wanted[at]) {
            prop_assert_eq!(bits(&some[at]), bits(&all[at]));
        }
    }

    #[test]
    fn gradients_of_what_is_shared_are_those_of_all_who_share_it(unit in shared_strategy()) {
        let heads = unit.whole.heads;
        let [q_len, kv_len] = [heads.query_len(), heads.kv_len()];
        // Shared rows of the others are pulled at by nobody, as they have none of their own.
        let mut pull = pull(&unit.whole);
        let mut first = 0;
        for (length, n_shared) in unit.whole.lengths.iter().zip(&unit.n_shared) {
            pull[first * q_len..][..n_shared * q_len].fill(0.0);
            first += length;
        }
        let gradients = |operands: [&[f32]; 3], sequences: &[PackedSequence], pull: &[f32]| {
            let mut out = operands.map(|x| vec![f32::NAN; x.len()]);
            let grads = out.each_mut().map(|out| Some(&mut out[..]));
            PackedAttention::new(heads, Dtype::F32).backward(operands, sequences, pull, grads);
            out
        };
        let Inputs { q, k, v, lengths, .. } = &unit.whole;
        let whole = gradients([q, k, v], &alone(lengths), &pull);
        let own = unit.operands();
        let got = gradients(own.each_ref().map(|x| &x[..]), &unit.sequences(), &unit.own(&pull, q_len));
        prop_assert_eq!(bits(&got[0]), bits(&unit.own(&whole[0], q_len)), "queries");
        for (got, whole) in got[1..].iter().zip(&whole[1..]) {
            let mut want = unit.own(whole, kv_len);
            let (mut first, mut first_own, mut leader) = (0, 0, 0);
            for (length, &n_shared) in lengths.iter().zip(&unit.n_shared) {
                leader = if n_shared == 0 { first_own } else { leader };
                let rows = &whole[first * kv_len..][..n_shared * kv_len];
                want[leader * kv_len..].iter_mut().zip(rows).for_each(|(want, x)| *want += x);
                (first, first_own) = (first + length, first_own + length - n_shared);
            }
            // The same terms in another order. Each is rounded where it is up to a hundred, a product over a head, and
            // up to 2.4e-5 came of it; a term too few is a hundredth and more.
            for (got, want) in got.iter().zip(want) {
                prop_assert!((got - want).abs() < 1e-4 * (1.0 + want.abs()), "{} {}", got, want);
            }
        }
    }
}

#[test]
fn a_sequence_cannot_share_more_than_there_is() {
    let heads = Heads { n_heads: 1, n_kv_heads: 1, head_dim: 2 };
    let sequences = [PackedSequence::whole(1), PackedSequence { n_shared: 2, n_own: 1 }];
    let forward = || {
        let (q, mut out) = ([0.0; 4], [0.0; 4]);
        PackedAttention::new(heads, Dtype::F32).forward(&q, (&q, &q), &sequences, &mut out);
    };
    let message = *catch_unwind(forward).unwrap_err().downcast::<String>().unwrap();
    assert_eq!(message, "2 positions are shared of 1");
}
