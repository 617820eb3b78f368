//! Every backward pass against differences of its own forward, over odd shapes.
//!
//! The loss is `sum(y * pull)`, added up in f64 from the op's f32 output; every input is moved by a step either way. That
//! leaves an error of the step's square, and of the output's rounding over the step.

mod common;

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, Var};
use common::{edge, ids, noise};
use proptest::prelude::{ProptestConfig, Strategy, any, prop_assert, proptest};
use proptest::sample::select;
use proptest::test_runner::TestCaseResult;
use r3_kernels::attention::attention_op;
use r3_kernels::experts::experts_op;
use r3_kernels::gemm::{Dtype, PackedMatrix, linear};
use r3_kernels::lm_head::head_op;
use r3_kernels::rms_norm::rms_norm_op;
use r3_kernels::rope::{RopeTable, rope_op};
use r3_kernels::router::{Choice, RouterConfig, Routing, choose, gates_op};
use r3_kernels::swiglu::silu_mul_op;

/// How far an input is moved either way.
const STEP: f32 = 1.0 / 64.0;

/// Elements of an input that are moved, spread over all of it: each costs two forwards.
const MOVED: usize = 12;

/// An input: its values and its shape.
type Input = (Vec<f32>, Vec<usize>);

fn var(values: &[f32], shape: &[usize]) -> Var {
    Var::from_vec(values.to_vec(), shape, &Device::Cpu).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Compares the gradient of `op` with differences, input by input, within `tolerance` of `1 + |gradient|`.
fn check(op: impl Fn(&[Var]) -> Result<Tensor>, inputs: &[Input], tolerance: f64) -> TestCaseResult {
    let vars: Vec<Var> = inputs.iter().map(|(values, shape)| var(values, shape)).collect();
    let y = op(&vars).unwrap();
    let pull = noise(y.elem_count(), 99);
    let loss = |vars: &[Var]| -> f64 {
        let y = values(&op(vars).unwrap());
        y.iter().zip(&pull).map(|(&y, &pull)| f64::from(y) * f64::from(pull)).sum()
    };
    let pulled = (&y * var(&pull, y.dims()).as_tensor()).unwrap().sum_all().unwrap();
    let gradients = pulled.backward().unwrap();
    for (at_input, (start, shape)) in inputs.iter().enumerate() {
        let gradient = values(gradients.get(&vars[at_input]).expect("every input has a gradient"));
        for at in (0..start.len()).step_by(start.len().div_ceil(MOVED).max(1)) {
            let moved = |by: f32| {
                let mut moved = start.clone();
                moved[at] += by;
                let mut vars = vars.clone();
                vars[at_input] = var(&moved, shape);
                (f64::from(moved[at]), loss(&vars))
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

fn input(shape: &[usize], seed: u32) -> Input {
    (noise(shape.iter().product(), seed), shape.to_vec())
}

/// The same, `times` as large.
fn scaled(shape: &[usize], seed: u32, times: f32) -> Input {
    (noise(shape.iter().product(), seed).into_iter().map(|x| times * x).collect(), shape.to_vec())
}

/// What a router chose for `n_tokens` tokens, replayed.
fn choice(n_tokens: usize, config: RouterConfig, seed: u32) -> Arc<Choice> {
    let ids = ids(n_tokens, config.top_k, config.n_experts, seed);
    let (scores, mut choice) = (vec![0.0; n_tokens * config.n_experts], Choice::empty());
    choose(&scores, config, 0, &mut Routing::Replay { ids: &ids, native: None }, &mut choice);
    Arc::new(choice)
}

/// Experts up to 300, and any number of them for a token; few dimensions, since there are so many experts.
fn layer() -> impl Strategy<Value = (usize, RouterConfig)> {
    let experts = select(vec![1_usize, 2, 5, 16, 17, 64, 300]);
    (1_usize..6, experts, 0.0_f64..1.0, any::<bool>()).prop_map(
        |(n_tokens, n_experts, share, norm_topk_prob)| {
            let top_k = 1 + (share * share * n_experts as f64) as usize;
            (n_tokens, RouterConfig { n_experts, top_k: top_k.min(n_experts), norm_topk_prob })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn linear_pulls_back_to_input_and_weight(t in edge(), n in edge(), k in edge()) {
        check(|v| linear(&v[0], &v[1]), &[input(&[t, k], 1), input(&[n, k], 2)], 2e-3)?;
    }

    #[test]
    fn experts_pull_back_to_input_gates_and_both_weights(
        (n_tokens, config) in layer(), width in 1_usize..20, inter in 1_usize..10, seed in 0_u32..1000,
    ) {
        let (e, choice) = (config.n_experts, choice(n_tokens, config, seed));
        let inputs = [
            input(&[n_tokens, width], seed),
            input(&[n_tokens, config.top_k], seed + 1),
            input(&[e, 2 * inter, width], seed + 2),
            input(&[e, width, inter], seed + 3),
        ];
        check(|v| experts_op(&v[0], &v[1], (&v[2], &v[3]), Arc::clone(&choice)), &inputs, 4e-3)?;
    }

    #[test]
    fn gates_pull_back_to_every_score((n_tokens, config) in layer(), seed in 0_u32..1000) {
        let choice = choice(n_tokens, config, seed);
        let scores = scaled(&[n_tokens, config.n_experts], seed, 3.0);
        check(|v| gates_op(&v[0], config, Arc::clone(&choice)), &[scores], 1e-3)?;
    }

    #[test]
    fn attention_pulls_back_to_queries_keys_and_values(
        lengths in proptest::collection::vec(select(vec![1_usize, 2, 15, 16, 17, 33]), 1..3),
        (n_kv_heads, group) in select(vec![(1, 1), (2, 1), (1, 3), (2, 4), (1, 11)]),
        half in select(vec![1_usize, 7, 8, 9, 16, 33]),
        seed in 0_u32..1000,
    ) {
        let (t, head_dim) = (lengths.iter().sum::<usize>(), 2 * half);
        let inputs = [
            input(&[t, n_kv_heads * group, head_dim], seed),
            input(&[t, n_kv_heads, head_dim], seed + 1),
            input(&[t, n_kv_heads, head_dim], seed + 2),
        ];
        let lengths: Arc<[usize]> = lengths.into();
        check(|v| attention_op(&v[0], &v[1], &v[2], Arc::clone(&lengths)), &inputs, 2e-3)?;
    }

    #[test]
    fn rms_norm_pulls_back_to_row_and_weight(t in edge(), width in edge(), seed in 0_u32..1000) {
        // An epsilon this large keeps rows of one small element smooth over a step.
        let inputs = [input(&[t, width], seed), input(&[width], seed + 1)];
        check(|v| rms_norm_op(&v[0], &v[1], 0.25), &inputs, 4e-3)?;
    }

    #[test]
    fn rope_pulls_back_to_what_it_turned(t in edge(), heads in 1_usize..4, half in edge()) {
        let table = Arc::new(RopeTable::new(1e4, 2 * half, 500));
        let positions: Arc<[u32]> = (0u32..).map(|at| at * 37 % 500).take(t).collect();
        let x = input(&[t, heads, 2 * half], 1);
        check(|v| rope_op(&v[0], Arc::clone(&positions), Arc::clone(&table)), &[x], 1e-3)?;
    }

    #[test]
    fn silu_mul_pulls_back_to_gates_and_ups(t in edge(), inter in edge(), times in 0.5_f32..4.0) {
        check(|v| silu_mul_op(&v[0]), &[scaled(&[t, 2 * inter], 1, times)], 2e-3)?;
    }

    #[test]
    fn logprobs_and_entropies_pull_back_to_hidden_states_and_head(
        t in 1_usize..5, width in edge(), vocab in select(vec![1_usize, 2, 15, 17, 33, 1023, 1025]),
        temperature in 0.5_f32..2.0,
    ) {
        let targets: Arc<[u32]> = (0u32..).map(|at| at * 7919 % vocab as u32).take(t).collect();
        let op = |v: &[Var]| {
            let packed = Arc::new(PackedMatrix::pack(&values(&v[1]), vocab, width, Dtype::F32));
            let (logprobs, entropies) = head_op(&v[0], &v[1], packed, Arc::clone(&targets), temperature)?;
            Tensor::cat(&[logprobs, entropies], 0)
        };
        check(op, &[input(&[t, width], 1), input(&[vocab, width], 2)], 4e-3)?;
    }
}
