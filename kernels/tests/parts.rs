//! A gradient over sequences that come in several calls has the bits of one call: what is kept of a weight's gradient is
//! one chain over tokens, and no pair of bf16 lies across two sequences.

use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::{Strategy, prop_assert, proptest};
use r3_kernels::experts::trained::{ExpertGrads, ExpertOperands, ExpertTrace};
use r3_kernels::gemm::Dtype;
use r3_kernels::gemm::linear::Linear;
use r3_kernels::lm_head::gradient::HeadGradient;
use r3_kernels::lm_head::{Head, PlainHead, Scores, Targets, head_logprobs};
use r3_kernels::router::{Choice, RouterConfig, Routing, choose};
use r3_kernels::weight_gradient::WeightGradient;

fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let draw = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(draw).collect()
}

/// Sequences of many lengths, and how many of them come in the first call.
fn sequences() -> impl Strategy<Value = (Vec<usize>, usize)> {
    (vec(1_usize..40, 1..9), 0_usize..9).prop_map(|(lengths, cut)| (lengths.clone(), cut.min(lengths.len())))
}

/// Gradients of `[T, ..]`, which calls append to, and of weights, which they add to.
type Gradients = (Vec<f32>, Vec<Vec<f32>>);

/// Whether `call` gives the same bits at once and in two parts, on one thread or two.
fn same_in_parts(
    (lengths, cut): &(Vec<usize>, usize),
    weights: &[usize],
    call: impl Fn(Range<usize>, &[usize], &mut Gradients) + Sync,
) -> bool {
    let first: usize = lengths[..*cut].iter().sum();
    let n_tokens: usize = lengths.iter().sum();
    let run = |parts: &[(Range<usize>, &[usize])], threads| {
        let mut out = (Vec::new(), weights.iter().map(|&len| noise(len, 99)).collect());
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| parts.iter().for_each(|(tokens, lengths)| call(tokens.clone(), lengths, &mut out)));
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        (bits(&out.0), out.1.iter().map(|weight| bits(weight)).collect::<Vec<_>>())
    };
    let whole = run(&[(0..n_tokens, lengths)], 1);
    let parts = [(0..first, &lengths[..*cut]), (first..n_tokens, &lengths[*cut..])];
    run(&parts, 1) == whole && run(&parts, 2) == whole
}

/// The rows `tokens` of `values` `[T, width]`.
fn rows(values: &[f32], width: usize, tokens: &Range<usize>) -> Vec<f32> {
    values[tokens.start * width..tokens.end * width].to_vec()
}

fn dtype(bf16: bool) -> Dtype {
    if bf16 { Dtype::Bf16 } else { Dtype::F32 }
}

proptest! {
    #[test]
    fn a_projection_in_parts(sequences in sequences(), n in 1_usize..70, k in 1_usize..70, bf16: bool) {
        let t: usize = sequences.0.iter().sum();
        let (x, w, grad) = (noise(t * k, 1), noise(n * k, 2), noise(t * n, 3));
        let same = same_in_parts(&sequences, &[n * k], |tokens, lengths, (x_grads, w_grads)| {
            let (x, grad) = (rows(&x, k, &tokens), rows(&grad, n, &tokens));
            let linear = Linear { x: &x, w: &w, k, dtype: dtype(bf16), lengths };
            let mut x_grad = vec![f32::NAN; x.len()];
            linear.x_gradient(&grad, false, &mut x_grad);
            linear.add_w_gradient(&grad, WeightGradient::Whole(&mut w_grads[0]));
            x_grads.extend(x_grad);
        });
        prop_assert!(same);
    }

    #[test]
    fn experts_in_parts(
        sequences in sequences(), n_experts in 2_usize..9, top_k in 1_usize..3, width in 1_usize..40, bf16: bool,
    ) {
        let (inter, t) = (width.div_ceil(2), sequences.0.iter().sum::<usize>());
        let (x, gates, scores) = (noise(t * width, 1), noise(t * top_k, 2), noise(t * n_experts, 3));
        let (gate_up, down) = (noise(n_experts * 2 * inter * width, 4), noise(n_experts * inter * width, 5));
        let (grad, dtype) = (noise(t * width, 6), dtype(bf16));
        let router = RouterConfig::softmax(n_experts, top_k, true);
        let same = same_in_parts(&sequences, &[gate_up.len(), down.len()], |tokens, lengths, (of_tokens, weights)| {
            let [x, grad] = [&x, &grad].map(|values| rows(values, width, &tokens));
            let gates = rows(&gates, top_k, &tokens);
            let mut choice = Choice::empty();
            choose(&rows(&scores, n_experts, &tokens), router, 0, &mut Routing::Free, &mut choice);
            let (mut trace, mut y) = (ExpertTrace::default(), vec![f32::NAN; x.len()]);
            let (mut x_grad, mut gates_grad) = (vec![f32::NAN; x.len()], vec![f32::NAN; gates.len()]);
            let [gate_up_grad, down_grad] = &mut weights[..] else { unreachable!("two weights") };
            let (x, gates, gate_up, down) = (&x[..], &gates[..], &gate_up[..], &down[..]);
            let operands = ExpertOperands { x, gates, gate_up, down, width, inter, dtype, lengths };
            trace.forward(&operands, None, &choice, &mut y);
            let (x, gates) = (&mut x_grad[..], &mut gates_grad[..]);
            let (gate_up, down) = (WeightGradient::Whole(gate_up_grad), WeightGradient::Whole(down_grad));
            trace.backward(&operands, &grad, ExpertGrads { x: Some(x), gates, gate_up, down });
            let n_tokens = lengths.iter().sum::<usize>();
            for t in 0..n_tokens {
                of_tokens.extend(rows(&x_grad, width, &(t..t + 1)));
                of_tokens.extend(rows(&gates_grad, top_k, &(t..t + 1)));
            }
        });
        prop_assert!(same);
    }
}

/// Of one piece and of several: a head cuts rows where its buffers end.
fn many_sequences() -> impl Strategy<Value = (Vec<usize>, usize)> {
    (vec(1_usize..700, 1..6), 0_usize..6).prop_map(|(lengths, cut)| (lengths.clone(), cut.min(lengths.len())))
}

proptest! {
    #![proptest_config(proptest::test_runner::Config { cases: 48, ..Default::default() })]

    #[test]
    fn a_head_in_parts(sequences in many_sequences(), width in 1_usize..20, vocab in 2_usize..70, bf16: bool) {
        let t: usize = sequences.0.iter().sum();
        let (hidden, weight, pulls) = (noise(t * width, 1), noise(vocab * width, 2), noise(2 * t, 3));
        let plain = PlainHead { weight: &weight, width, dtype: dtype(bf16) };
        let ids: Vec<u32> = (0..t).map(|t| (t * 7919 % vocab) as u32).collect();
        let same = same_in_parts(&sequences, &[weight.len()], |tokens, lengths, (hidden_grads, weights)| {
            let hidden = &rows(&hidden, width, &tokens)[..];
            let targets = Targets { ids: &ids[tokens.clone()], temperature: 0.7, kept: None };
            let [mut logprobs, mut entropies, mut target_logits] = [(); 3].map(|()| vec![f32::NAN; tokens.len()]);
            let scores = Scores { logprobs: &mut logprobs, entropies: &mut entropies, target_logits: &mut target_logits };
            head_logprobs(hidden, Head::Plain(plain), targets, scores);
            let (logprobs, entropies, target_logits) = (&logprobs[..], &entropies[..], &target_logits[..]);
            let head = HeadGradient { hidden, head: plain, targets, logprobs, entropies, target_logits, lengths };
            let mut hidden_grad = vec![0.0; hidden.len()];
            let (of_logprobs, of_entropies) = pulls.split_at(t);
            head.add((&of_logprobs[tokens.clone()], &of_entropies[tokens]), (Some(&mut hidden_grad), Some(&mut weights[0])));
            hidden_grads.extend(hidden_grad);
        });
        prop_assert!(same);
    }
}
