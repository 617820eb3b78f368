//! Every backward pass against differences of its own forward, over odd shapes.
//!
//! The loss is `sum(y * pull)`, added up in f64 from the op's f32 output; every input is moved by a step either way. That
//! leaves an error of the step's square, and of the output's rounding over the step.

mod common;

use common::{edge, ids, noise};
use proptest::prelude::{ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, proptest};
use proptest::sample::select;
use proptest::test_runner::TestCaseResult;
use r3_kernels::attention::Heads;
use r3_kernels::attention::packed::{PackedAttention, PackedSequence};
use r3_kernels::experts::ExpertDims;
use r3_kernels::experts::trained::{ExpertGrads, ExpertOperands, ExpertTrace};
use r3_kernels::gemm::linear::Linear;
use r3_kernels::gemm::{Dtype, PackedMatrix, matmul};
use r3_kernels::lm_head::gradient::HeadGradient;
use r3_kernels::lm_head::{Head, PlainHead, Scores, Targets, head_logprobs};
use r3_kernels::low_rank::Factors;
use r3_kernels::rms_norm::{RmsNorm, rms_norm};
use r3_kernels::rope::{RopeTable, rope, rope_backward};
use r3_kernels::router::{Choice, Gated, RouterConfig, Routing, Scoring, choose, gates};
use r3_kernels::swiglu::{silu_mul, silu_mul_backward};
use r3_kernels::weight_gradient::WeightGradient;

/// How far an input is moved either way.
const STEP: f32 = 1.0 / 64.0;

/// Elements of an input that are moved, spread over all of it: each costs two forwards.
const MOVED: usize = 12;

/// Compares `backward`, which gets the inputs and the gradient of `forward`'s output and gives one gradient per input,
/// with differences, input by input, within `tolerance` of `1 + |gradient|`.
fn check(
    inputs: &[Vec<f32>],
    forward: impl Fn(&[Vec<f32>]) -> Vec<f32>,
    backward: impl Fn(&[Vec<f32>], &[f32]) -> Vec<Vec<f32>>,
    tolerance: f64,
) -> TestCaseResult {
    let pull = noise(forward(inputs).len(), 99);
    let loss = |inputs: &[Vec<f32>]| -> f64 {
        forward(inputs).iter().zip(&pull).map(|(&y, &pull)| f64::from(y) * f64::from(pull)).sum()
    };
    let gradients = backward(inputs, &pull);
    prop_assert_eq!(gradients.len(), inputs.len());
    for (at_input, (start, gradient)) in inputs.iter().zip(&gradients).enumerate() {
        prop_assert_eq!(gradient.len(), start.len());
        for at in (0..start.len()).step_by(start.len().div_ceil(MOVED).max(1)) {
            let moved = |by: f32| {
                let mut inputs = inputs.to_vec();
                inputs[at_input][at] += by;
                (f64::from(inputs[at_input][at]), loss(&inputs))
            };
            let ((low_at, low), (high_at, high)) = (moved(-STEP), moved(STEP));
            let (got, want) = (f64::from(gradient[at]), (high - low) / (high_at - low_at));
            prop_assert!(
                (got - want).abs() <= tolerance * (1.0 + want.abs()),
                "input {} at {}: {}, not {}",
                at_input,
                at,
                got,
                want
            );
        }
    }
    Ok(())
}

/// `times` noise.
fn scaled(len: usize, seed: u32, times: f32) -> Vec<f32> {
    noise(len, seed).into_iter().map(|x| times * x).collect()
}

/// What a router chose for `n_tokens` tokens, replayed.
fn choice(n_tokens: usize, config: RouterConfig, seed: u32) -> Choice {
    let ids = ids(n_tokens, config.top_k, config.n_experts, seed);
    let (scores, mut choice) = (vec![0.0; n_tokens * config.n_experts], Choice::empty());
    choose(&scores, config, 0, &mut Routing::Replay { ids: &ids, native: None }, &mut choice);
    choice
}

/// Experts up to 300, and any number of them for a token; few dimensions, since there are so many experts. Scored and
/// scaled as models do.
fn layer() -> impl Strategy<Value = (usize, RouterConfig)> {
    let experts = select(vec![1_usize, 2, 5, 16, 17, 64, 300]);
    let scoring = select(vec![Scoring::Softmax, Scoring::Sigmoid { n_groups: 1, top_groups: 1 }]);
    let made = (any::<bool>(), scoring, select(vec![1.0, 2.5]));
    (1_usize..6, experts, 0.0_f64..1.0, made).prop_map(
        |(n_tokens, n_experts, share, (norm_topk_prob, scoring, scaling))| {
            let top_k = 1 + (share * share * n_experts as f64) as usize;
            let top_k = top_k.min(n_experts);
            (n_tokens, RouterConfig { n_experts, top_k, scoring, norm_topk_prob, scaling })
        },
    )
}

/// The trainer's pass over experts of `[gate_up, down]`, for `x` and `gates`.
fn run_experts(
    (x, gates): (&[f32], &[f32]),
    choice: &Choice,
    [gate_up, down]: [&[f32]; 2],
    dims: ExpertDims,
) -> (ExpertTrace, Vec<f32>) {
    let (mut trace, mut y) = (ExpertTrace::default(), vec![0.0; x.len()]);
    let ExpertDims { width, inter, .. } = dims;
    let lengths = &[choice.n_tokens()];
    let operands = ExpertOperands { x, gates, gate_up, down, width, inter, dtype: Dtype::F32, lengths };
    trace.forward(&operands, None, choice, &mut y);
    (trace, y)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn linear_pulls_back_to_input_and_weight(t in edge(), n in edge(), k in edge()) {
        let forward = |v: &[Vec<f32>]| {
            let mut y = vec![0.0; t * n];
            matmul(&v[0], &PackedMatrix::pack(&v[1], n, k, Dtype::F32), None, &mut y);
            y
        };
        let backward = |v: &[Vec<f32>], grad: &[f32]| {
            let (mut x, mut w) = (vec![0.0; t * k], vec![0.0; n * k]);
            let operands = Linear { x: &v[0], w: &v[1], k, dtype: Dtype::F32, lengths: &[t] };
            operands.x_gradient(grad, false, &mut x);
            operands.add_w_gradient(grad, WeightGradient::Whole(&mut w));
            vec![x, w]
        };
        check(&[noise(t * k, 1), noise(n * k, 2)], forward, backward, 2e-3)?;
    }

    #[test]
    fn experts_pull_back_to_input_gates_and_both_weights(
        (n_tokens, config) in layer(), width in 1_usize..20, inter in 1_usize..10, seed in 0_u32..1000,
    ) {
        let (e, choice) = (config.n_experts, choice(n_tokens, config, seed));
        let dims = ExpertDims { n_experts: e, width, inter };
        let run = |v: &[Vec<f32>]| run_experts((&v[0], &v[1]), &choice, [&v[2], &v[3]], dims);
        let backward = |v: &[Vec<f32>], grad: &[f32]| {
            let mut out: Vec<Vec<f32>> = v.iter().map(|input| vec![0.0; input.len()]).collect();
            let [x, gates, gate_up, down] = &mut out[..] else { unreachable!("four inputs") };
            let [gate_up, down] = [gate_up, down].map(|grad| WeightGradient::Whole(grad));
            let grads = ExpertGrads { x: Some(x), gates, gate_up, down };
            let [x, gates, gate_up, down] = v else { unreachable!("four inputs") };
            let (dtype, lengths) = (Dtype::F32, &[n_tokens][..]);
            let operands = ExpertOperands { x, gates, gate_up, down, width, inter, dtype, lengths };
            run(v).0.backward(&operands, grad, grads);
            out
        };
        let inputs = [
            noise(n_tokens * width, seed),
            noise(n_tokens * config.top_k, seed + 1),
            noise(e * 2 * inter * width, seed + 2),
            noise(e * width * inter, seed + 3),
        ];
        check(&inputs, |v| run(v).1, backward, 4e-3)?;
    }

    #[test]
    fn linear_pulls_back_to_the_factors_of_its_weight(t in edge(), n in edge(), k in edge(), rank in 1_usize..10) {
        let base = noise(n * k, 4);
        let merged = |v: &[Vec<f32>]| {
            let mut w = vec![0.0; n * k];
            Factors { a: &v[1], b: &v[2], rank, scale: 0.75 }.merge(&base, 1, &mut w);
            w
        };
        let forward = |v: &[Vec<f32>]| {
            let mut y = vec![0.0; t * n];
            matmul(&v[0], &PackedMatrix::pack(&merged(v), n, k, Dtype::F32), None, &mut y);
            y
        };
        let backward = |v: &[Vec<f32>], grad: &[f32]| {
            let mut out: Vec<Vec<f32>> = v.iter().map(|input| vec![0.0; input.len()]).collect();
            let [x, a, b] = &mut out[..] else { unreachable!("three inputs") };
            let operands = Linear { x: &v[0], w: &merged(v), k, dtype: Dtype::F32, lengths: &[t] };
            operands.x_gradient(grad, false, x);
            let factors = Factors { a: &v[1], b: &v[2], rank, scale: 0.75 };
            operands.add_w_gradient(grad, WeightGradient::LowRank { factors, a, b });
            out
        };
        check(&[noise(t * k, 1), noise(rank * k, 2), noise(n * rank, 3)], forward, backward, 4e-3)?;
    }

    #[test]
    fn experts_pull_back_to_the_factors_of_one_weight_while_the_other_is_frozen(
        (n_tokens, config) in layer(), width in 1_usize..20, inter in 1_usize..10, rank in 1_usize..5,
        of_down: bool, seed in 0_u32..1000,
    ) {
        let (e, choice) = (config.n_experts, choice(n_tokens, config, seed));
        let dims = ExpertDims { n_experts: e, width, inter };
        let (n, k) = if of_down { (width, inter) } else { (2 * inter, width) };
        let base = [noise(e * 2 * inter * width, seed + 2), noise(e * width * inter, seed + 3)];
        let merged = |v: &[Vec<f32>]| {
            let mut both = base.clone();
            let at = usize::from(of_down);
            Factors { a: &v[2], b: &v[3], rank, scale: 0.75 }.merge(&base[at], e, &mut both[at]);
            both
        };
        let run = |v: &[Vec<f32>]| {
            let [gate_up, down] = merged(v);
            run_experts((&v[0], &v[1]), &choice, [&gate_up, &down], dims)
        };
        let backward = |v: &[Vec<f32>], grad: &[f32]| {
            let mut out: Vec<Vec<f32>> = v.iter().map(|input| vec![0.0; input.len()]).collect();
            let [x, gates, a, b] = &mut out[..] else { unreachable!("four inputs") };
            let factors = Factors { a: &v[2], b: &v[3], rank, scale: 0.75 };
            let mut both = [WeightGradient::Frozen, WeightGradient::Frozen];
            both[usize::from(of_down)] = WeightGradient::LowRank { factors, a, b };
            let [gate_up, down] = both;
            let grads = ExpertGrads { x: Some(x), gates, gate_up, down };
            let [gate_up, down] = merged(v);
            let (x, gates, gate_up, down) = (&v[0], &v[1], &gate_up, &down);
            let (dtype, lengths) = (Dtype::F32, &[n_tokens][..]);
            let operands = ExpertOperands { x, gates, gate_up, down, width, inter, dtype, lengths };
            run(v).0.backward(&operands, grad, grads);
            out
        };
        let inputs = [
            noise(n_tokens * width, seed),
            noise(n_tokens * config.top_k, seed + 1),
            noise(e * rank * k, seed + 4),
            noise(e * n * rank, seed + 5),
        ];
        check(&inputs, |v| run(v).1, backward, 6e-3)?;
    }

    #[test]
    fn gates_pull_back_to_every_score((n_tokens, config) in layer(), seed in 0_u32..1000) {
        let choice = choice(n_tokens, config, seed);
        let forward = |v: &[Vec<f32>]| {
            let mut out = vec![0.0; n_tokens * config.top_k];
            gates(&v[0], config, &choice, &mut out);
            out
        };
        let backward = |v: &[Vec<f32>], grad: &[f32]| {
            let (mut out, gates) = (vec![0.0; v[0].len()], forward(v));
            Gated { scores: &v[0], config, choice: &choice, gates: &gates }.add_scores_gradient(grad, &mut out);
            vec![out]
        };
        check(&[scaled(n_tokens * config.n_experts, seed, 3.0)], forward, backward, 1e-3)?;
    }

    #[test]
    fn attention_pulls_back_to_queries_keys_and_values(
        sizes in proptest::collection::vec((select(vec![1_usize, 2, 15, 16, 17, 33]), 0_usize..40), 1..4),
        (n_kv_heads, group) in select(vec![(1, 1), (2, 1), (1, 3), (2, 4), (1, 11)]),
        half in select(vec![1_usize, 7, 8, 9, 16, 33]),
        seed in 0_u32..1000,
    ) {
        let (t, head_dim) = (sizes.iter().map(|(n_own, _)| n_own).sum::<usize>(), 2 * half);
        let mut leader = 0;
        let sequences: Vec<_> = sizes.iter().map(|&(n_own, n_shared)| {
            let n_shared = n_shared.min(leader);
            leader = if n_shared == 0 { n_own } else { leader };
            PackedSequence { n_shared, n_own }
        }).collect();
        let heads = Heads { n_heads: n_kv_heads * group, n_kv_heads, head_dim };
        let forward = |v: &[Vec<f32>]| {
            let mut out = vec![0.0; v[0].len()];
            PackedAttention::new(heads, Dtype::F32).forward(&v[0], (&v[1], &v[2]), &sequences, &mut out);
            out
        };
        let backward = |v: &[Vec<f32>], grad: &[f32]| {
            let mut out: Vec<Vec<f32>> = v.iter().map(|input| vec![0.0; input.len()]).collect();
            let [q, k, v_grad] = &mut out[..] else { unreachable!("three inputs") };
            let grads = [q, k, v_grad].map(|grad| Some(&mut grad[..]));
            let qkv = [&v[0][..], &v[1], &v[2]];
            PackedAttention::new(heads, Dtype::F32).backward(qkv, &sequences, grad, grads);
            out
        };
        let kv = t * n_kv_heads * head_dim;
        let inputs = [noise(group * kv, seed), noise(kv, seed + 1), noise(kv, seed + 2)];
        check(&inputs, forward, backward, 2e-3)?;
    }

    #[test]
    fn rms_norm_pulls_back_to_row_and_weight(t in edge(), width in edge(), seed in 0_u32..1000) {
        // An epsilon this large keeps rows of one small element smooth over a step.
        let eps = 0.25;
        let forward = |v: &[Vec<f32>]| {
            let mut y = vec![0.0; t * width];
            rms_norm(&v[0], &v[1], eps, &mut y);
            y
        };
        let backward = |v: &[Vec<f32>], grad: &[f32]| {
            let (mut x, mut weight) = (vec![0.0; t * width], vec![0.0; width]);
            RmsNorm { x: &v[0], weight: &v[1], eps }.backward(grad, false, &mut x, &mut weight);
            vec![x, weight]
        };
        check(&[noise(t * width, seed), noise(width, seed + 1)], forward, backward, 4e-3)?;
    }

    #[test]
    fn rope_pulls_back_to_what_it_turned(t in edge(), heads in 1_usize..4, half in edge()) {
        let table = RopeTable::new(1e4, 2 * half, 500);
        let positions: Vec<u32> = (0u32..).map(|at| at * 37 % 500).take(t).collect();
        let forward = |v: &[Vec<f32>]| {
            let mut y = v[0].clone();
            rope(&mut y, &positions, &table);
            y
        };
        let backward = |_: &[Vec<f32>], grad: &[f32]| {
            let mut grad = grad.to_vec();
            rope_backward(&mut grad, &positions, &table);
            vec![grad]
        };
        check(&[noise(t * heads * 2 * half, 1)], forward, backward, 1e-3)?;
    }

    #[test]
    fn silu_mul_pulls_back_to_gates_and_ups(t in edge(), inter in edge(), times in 0.5_f32..4.0) {
        let forward = |v: &[Vec<f32>]| {
            let mut out = vec![0.0; t * inter];
            silu_mul(&v[0], inter, &mut out);
            out
        };
        let backward = |v: &[Vec<f32>], grad: &[f32]| {
            let mut out = vec![0.0; v[0].len()];
            silu_mul_backward(&v[0], grad, inter, &mut out);
            vec![out]
        };
        check(&[scaled(t * 2 * inter, 1, times)], forward, backward, 2e-3)?;
    }

    #[test]
    fn logprobs_and_entropies_pull_back_to_hidden_states_and_head(
        t in 1_usize..5, width in edge(), vocab in select(vec![1_usize, 2, 15, 17, 33, 1023, 1025]),
        temperature in 0.5_f32..2.0,
    ) {
        let ids: Vec<u32> = (0u32..).map(|at| at * 7919 % vocab as u32).take(t).collect();
        let targets = Targets { ids: &ids, temperature, kept: None };
        // Logprobs, then entropies, then the targets' logits.
        let scored = |v: &[Vec<f32>]| {
            let mut out = vec![0.0; 3 * t];
            let (logprobs, rest) = out.split_at_mut(t);
            let (entropies, target_logits) = rest.split_at_mut(t);
            let head = Head::Plain(PlainHead { weight: &v[1], width, dtype: Dtype::F32 });
            head_logprobs(&v[0], head, targets, Scores { logprobs, entropies, target_logits });
            out
        };
        let backward = |v: &[Vec<f32>], grad: &[f32]| {
            let scored = scored(v);
            let (logprobs, entropies, target_logits) = (&scored[..t], &scored[t..2 * t], &scored[2 * t..]);
            let (hidden, lengths) = (&v[0], &[t]);
            let head = PlainHead { weight: &v[1], width, dtype: Dtype::F32 };
            let gradient =
                HeadGradient { hidden, head, targets, logprobs, entropies, target_logits, lengths };
            let (mut hidden, mut weight) = (vec![0.0; t * width], vec![0.0; vocab * width]);
            gradient.add((&grad[..t], &grad[t..]), (Some(&mut hidden), Some(&mut weight)));
            vec![hidden, weight]
        };
        let inputs = [noise(t * width, 1), noise(vocab * width, 2)];
        check(&inputs, |v| scored(v)[..2 * t].to_vec(), backward, 4e-3)?;
    }
}
