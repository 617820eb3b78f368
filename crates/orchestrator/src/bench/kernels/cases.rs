//! Ops with their shapes, their inputs, and what they have to compute and move at least.

use std::hint::black_box;

use r3_kernels::experts::{self, ExpertDims, ExpertScratch, Experts, Routed};
use r3_kernels::gemm::{Dtype, PackedMatrix, matmul};
use r3_kernels::rms_norm::rms_norm;
use r3_kernels::rope::{RopeTable, rope};
use r3_kernels::router::{Choice, Router, RouterConfig, Routing, Scoring, choose, gates};
use r3_kernels::swiglu::silu_mul;

mod attend;
mod head;
mod update;

/// One op at one shape.
pub(super) struct Case {
    /// Its sizes.
    pub(super) shape: String,
    /// Format of weights, or of keys and values.
    pub(super) dtype: Dtype,
    /// Floating-point operations of its products.
    pub(super) flops: f64,
    /// Bytes that have to be read at least.
    pub(super) bytes: f64,
    /// Bytes that are touched before any of them is touched again.
    pub(super) working_set: usize,
    /// Runs it once.
    pub(super) call: Box<dyn FnMut() + Send>,
}

impl Case {
    /// A case that touches the same memory with every call.
    fn new(
        shape: String,
        dtype: Dtype,
        (flops, bytes): (usize, usize),
        call: impl FnMut() + Send + 'static,
    ) -> Self {
        let call = Box::new(call);
        Self { shape, dtype, flops: flops as f64, bytes: bytes as f64, working_set: bytes, call }
    }
}

/// The cases of an op, made when they are wanted.
type Make = fn() -> Vec<Case>;

/// Every op, in the order in which a layer runs them.
pub(super) const OPS: [(&str, Make); 21] = [
    ("gemm", gemm),
    ("gemm_from_memory", gemm_from_memory),
    ("rms_norm", norm),
    ("rope", rotary),
    ("paged_attention", attend::paged),
    ("long_attention", attend::long),
    ("packed_attention", attend::packed),
    ("router_choose", router_choose),
    ("router_gates", router_gates),
    ("experts", moe),
    ("silu_mul", swiglu),
    ("logprobs", head::logprobs),
    ("lm_head", head::head),
    ("draw", head::whole_draw),
    ("truncated_draw", head::truncated_draw),
    ("adamw", update::elementwise_optimiser),
    ("muon", update::matrix_optimiser),
    ("low_rank_gradient", update::low_rank_gradient),
    ("low_rank_merge", update::low_rank_merge),
    ("cast", update::cast),
    ("cast_and_pack", update::cast_and_pack),
];

const DTYPES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];
/// Tokens of decoding steps, and of a training step.
const TOKENS: [usize; 4] = [1, 8, 64, 2048];
const F32: usize = size_of::<f32>();

fn element(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => F32,
        Dtype::Bf16 => F32 / 2,
    }
}

/// `n` numbers in `[-1, 1)` without a pattern that a kernel could profit from.
fn noise(n: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_u32;
    let next = || {
        // Marsaglia's xorshift32.
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1_u32 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

fn pairs<A: Copy, B: Copy>(a: &[A], b: &[B]) -> Vec<(A, B)> {
    a.iter().flat_map(|&a| b.iter().map(move |&b| (a, b))).collect()
}

fn gemm() -> Vec<Case> {
    let (n, k) = (768, 768);
    let case = |(dtype, t): (Dtype, usize)| {
        let (x, w) = (noise(t * k), PackedMatrix::pack(&noise(n * k), n, k, dtype));
        let mut y = vec![0.0; t * n];
        let costs = (2 * t * n * k, n * k * element(dtype) + t * k * F32);
        Case::new(format!("[{t}, {k}] x [{n}, {k}]"), dtype, costs, move || {
            matmul(black_box(&x), &w, None, black_box(&mut y));
        })
    };
    pairs(&DTYPES, &[1, 8, 64, 256, 2048]).into_iter().map(case).collect()
}

/// Weights that no cache holds: as many matrices as it takes, in turn.
fn gemm_from_memory() -> Vec<Case> {
    let (n, k) = (2304, 768);
    let case = |(dtype, t): (Dtype, usize)| {
        let bytes = n * k * element(dtype);
        let n_matrices = (128 << 20) / bytes;
        let packed = PackedMatrix::pack(&noise(n * k), n, k, dtype);
        let matrices = vec![packed; n_matrices];
        let (x, mut y, mut at) = (noise(t * k), vec![0.0; t * n], 0);
        let costs = (2 * t * n * k, bytes + t * k * F32);
        let case = Case::new(format!("[{t}, {k}] x [{n}, {k}]"), dtype, costs, move || {
            at = (at + 1) % n_matrices;
            matmul(black_box(&x), &matrices[at], None, black_box(&mut y));
        });
        Case { working_set: bytes * n_matrices, ..case }
    };
    pairs(&DTYPES, &[1, 8, 64]).into_iter().map(case).collect()
}

fn norm() -> Vec<Case> {
    let width = 768;
    let case = |t: usize| {
        let (x, weight, mut y) = (noise(t * width), noise(width), vec![0.0; t * width]);
        Case::new(format!("[{t}, {width}]"), Dtype::F32, (0, t * width * F32), move || {
            rms_norm(black_box(&x), &weight, 1e-6, black_box(&mut y));
        })
    };
    TOKENS.map(case).into()
}

fn rotary() -> Vec<Case> {
    let (heads, head_dim) = (8, 64);
    let case = |t: usize| {
        let (mut x, positions) = (noise(t * heads * head_dim), (0u32..).take(t).collect::<Vec<_>>());
        let table = RopeTable::new(1e6, head_dim, t);
        let costs = (0, t * heads * head_dim * F32);
        Case::new(format!("[{t}, {heads}, {head_dim}]"), Dtype::F32, costs, move || {
            rope(black_box(&mut x), &positions, &table);
        })
    };
    TOKENS.map(case).into()
}

const SOFTMAX: RouterConfig = RouterConfig::softmax(64, 8, true);

/// The router of dots.llm1 (arXiv 2506.05767), and of DeepSeek-V3 (arXiv 2412.19437), which limits groups.
const SIGMOIDS: [RouterConfig; 2] = [sigmoid(128, 6, (1, 1)), sigmoid(256, 8, (8, 4))];

const fn sigmoid(n_experts: usize, top_k: usize, (n_groups, top_groups): (usize, usize)) -> RouterConfig {
    let scoring = Scoring::Sigmoid { n_groups, top_groups };
    RouterConfig { scoring, scaling: 2.5, ..RouterConfig::softmax(n_experts, top_k, true) }
}

/// Every router with numbers of tokens.
fn routers() -> Vec<(RouterConfig, usize)> {
    [pairs(&[SOFTMAX], &TOKENS), pairs(&SIGMOIDS, &[64, 2048])].concat()
}

fn router_shape(router: RouterConfig, t: usize) -> String {
    let of = match router.scoring {
        Scoring::Softmax => String::new(),
        Scoring::Sigmoid { n_groups: 1, .. } => ", sigmoid".to_owned(),
        Scoring::Sigmoid { n_groups, top_groups } => format!(", {top_groups} of {n_groups} groups"),
    };
    format!("[{t}, {}], top {}{of}", router.n_experts, router.top_k)
}

fn router_choose() -> Vec<Case> {
    let case = |(config, t): (RouterConfig, usize)| {
        let (scores, bias, mut choice) =
            (noise(t * config.n_experts), vec![0.01; config.n_experts], Choice::empty());
        let bytes = t * config.n_experts * F32;
        Case::new(router_shape(config, t), Dtype::F32, (0, bytes), move || {
            let bias = (config.scoring != Scoring::Softmax).then_some(&bias[..]);
            choose(
                black_box(&scores),
                Router { config, bias },
                0,
                &mut Routing::Free,
                black_box(&mut choice),
            );
        })
    };
    routers().into_iter().map(case).collect()
}

fn router_gates() -> Vec<Case> {
    let case = |(config, t): (RouterConfig, usize)| {
        let (scores, mut choice) = (noise(t * config.n_experts), Choice::empty());
        choose(&scores, config, 0, &mut Routing::Free, &mut choice);
        let mut out = vec![0.0; t * config.top_k];
        let bytes = t * config.top_k * (F32 + size_of::<u16>());
        Case::new(router_shape(config, t), Dtype::F32, (0, bytes), move || {
            gates(black_box(&scores), config, &choice, black_box(&mut out));
        })
    };
    routers().into_iter().map(case).collect()
}

/// Bytes of weights count once for each expert that some token takes.
fn moe() -> Vec<Case> {
    let dims = ExpertDims { n_experts: 32, width: 512, inter: 256 };
    let config = RouterConfig::softmax(dims.n_experts, 4, true);
    let case = |(dtype, t): (Dtype, usize)| {
        let expert = 3 * dims.width * dims.inter;
        let gate_up = noise(dims.n_experts * 2 * dims.inter * dims.width);
        let experts = Experts::pack(&gate_up, &gate_up[..gate_up.len() / 2], dims, dtype);
        let (scores, x) = (noise(t * dims.n_experts), noise(t * dims.width));
        let (mut choice, mut weights) = (Choice::empty(), vec![0.0; t * config.top_k]);
        choose(&scores, config, 0, &mut Routing::Free, &mut choice);
        gates(&scores, config, &choice, &mut weights);
        let touched = (0..dims.n_experts).filter(|&e| choice.ids().iter().any(|&id| usize::from(id) == e));
        let bytes = touched.count() * expert * element(dtype) + x.len() * F32;
        let (mut scratch, mut y) = (ExpertScratch::default(), vec![0.0; x.len()]);
        let shape =
            format!("[{t}, {}], {} of {}, I {}", dims.width, config.top_k, dims.n_experts, dims.inter);
        Case::new(shape, dtype, (2 * t * config.top_k * expert, bytes), move || {
            let routed = Routed { choice: &choice, gates: &weights };
            experts::forward(black_box(&x), routed, &experts, &mut scratch, black_box(&mut y));
        })
    };
    pairs(&DTYPES, &TOKENS).into_iter().map(case).collect()
}

fn swiglu() -> Vec<Case> {
    let inter = 768;
    let case = |t: usize| {
        let (gate_up, mut out) = (noise(t * 2 * inter), vec![0.0; t * inter]);
        Case::new(format!("[{t}, {}]", 2 * inter), Dtype::F32, (0, 2 * t * inter * F32), move || {
            silu_mul(black_box(&gate_up), inter, black_box(&mut out));
        })
    };
    TOKENS.map(case).into()
}
