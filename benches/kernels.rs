//! Kernels one by one, forward and backward, for comparing two commits. How near they are to what the machine can do is
//! told by `r3 bench kernels`.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use r3_kernels::adamw::{AdamwStep, adamw};
use r3_kernels::attention::packed::{PackedAttention, PackedSequence};
use r3_kernels::attention::{Heads, KvCache, PagedSequence, paged_attention};
use r3_kernels::experts::trained::{ExpertGrads, ExpertOperands, ExpertTrace};
use r3_kernels::experts::{ExpertDims, ExpertScratch, Experts, Routed, forward};
use r3_kernels::gemm::linear::Linear;
use r3_kernels::gemm::{Dtype, PackedMatrix, matmul};
use r3_kernels::huge_pages::HugePages;
use r3_kernels::lm_head::gradient::HeadGradient;
use r3_kernels::lm_head::{Head, PlainHead, Scores, Targets, head_logprobs};
use r3_kernels::logprob::chosen_logprobs;
use r3_kernels::router::{Choice, RouterConfig, Routing, choose, gates};
use r3_kernels::weight_gradient::WeightGradient;

#[global_allocator]
static MEMORY: HugePages = HugePages::new();

const DTYPES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];

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

fn gemm(c: &mut Criterion) {
    let (n, k) = (768, 768);
    let mut group = c.benchmark_group("gemm");
    for dtype in DTYPES {
        let w = PackedMatrix::pack(&noise(n * k), n, k, dtype);
        for t in [1, 8, 64, 512] {
            let (x, mut y) = (noise(t * k), vec![0.0; t * n]);
            group.throughput(Throughput::Elements((2 * t * n * k) as u64));
            group.bench_function(format!("{dtype}/{t}x{n}x{k}"), |b| {
                b.iter(|| matmul(black_box(&x), &w, None, black_box(&mut y)));
            });
        }
    }
    let (x, w, grad) = (noise(512 * k), noise(n * k), noise(512 * n));
    let (mut x_grad, mut w_grad) = (vec![0.0; 512 * k], vec![0.0; n * k]);
    group.throughput(Throughput::Elements((4 * 512 * n * k) as u64));
    for dtype in DTYPES {
        let operands = Linear { x: &x, w: &w, k, dtype, lengths: &[512] };
        group.bench_function(format!("{dtype}/backward/512x{n}x{k}"), |b| {
            b.iter(|| {
                operands.x_gradient(black_box(&grad), false, black_box(&mut x_grad));
                operands.add_w_gradient(black_box(&grad), WeightGradient::Whole(black_box(&mut w_grad)));
            });
        });
    }
}

const DIMS: ExpertDims = ExpertDims { n_experts: 32, width: 256, inter: 128 };
const ROUTER: RouterConfig = RouterConfig::softmax(32, 4, true);

/// A choice for `t` tokens, and its gates.
fn routed(t: usize) -> (Choice, Vec<f32>) {
    let (scores, mut choice) = (noise(t * ROUTER.n_experts), Choice::empty());
    choose(&scores, ROUTER, 0, &mut Routing::Free, &mut choice);
    let mut weights = vec![0.0; t * ROUTER.top_k];
    gates(&scores, ROUTER, &choice, &mut weights);
    (choice, weights)
}

fn experts(c: &mut Criterion) {
    let ExpertDims { n_experts, width, inter } = DIMS;
    let (gate_up, down) = (noise(n_experts * 2 * inter * width), noise(n_experts * width * inter));
    let mut group = c.benchmark_group("experts");
    for dtype in DTYPES {
        let packed = Experts::pack(&gate_up, &down, DIMS, dtype);
        for t in [1, 64, 512] {
            let (choice, weights) = routed(t);
            let (x, mut y, mut scratch) = (noise(t * width), vec![0.0; t * width], ExpertScratch::default());
            group.bench_function(format!("{dtype}/{t}"), |b| {
                let routed = Routed { choice: &choice, gates: &weights };
                b.iter(|| forward(black_box(&x), routed, &packed, &mut scratch, black_box(&mut y)));
            });
        }
    }
    let (choice, weights) = routed(512);
    let (x, grad) = (noise(512 * width), noise(512 * width));
    let (mut x_grad, mut gates_grad) = (vec![0.0; x.len()], vec![0.0; weights.len()]);
    let (mut gate_up_grad, mut down_grad) = (vec![0.0; gate_up.len()], vec![0.0; down.len()]);
    for dtype in DTYPES {
        let (mut trace, mut y) = (ExpertTrace::default(), vec![0.0; 512 * width]);
        let (gate_up, down) = (&gate_up[..], &down[..]);
        let (x, gates, lengths) = (&x[..], &weights[..], &[512][..]);
        let operands = ExpertOperands { x, gates, gate_up, down, width, inter, dtype, lengths };
        trace.forward(&operands, None, &choice, &mut y);
        group.bench_function(format!("{dtype}/backward/512"), |b| {
            b.iter(|| {
                let (x, gates) = (&mut x_grad[..], &mut gates_grad[..]);
                let grads = ExpertGrads {
                    x: Some(x),
                    gates,
                    gate_up: WeightGradient::Whole(&mut gate_up_grad),
                    down: WeightGradient::Whole(&mut down_grad),
                };
                trace.backward(&operands, black_box(&grad), grads);
            });
        });
    }
}

const HEADS: Heads = Heads { n_heads: 8, n_kv_heads: 4, head_dim: 32 };
const BLOCK_TOKENS: usize = 16;

fn attention(c: &mut Criterion) {
    let Heads { n_heads, n_kv_heads, head_dim } = HEADS;
    let mut group = c.benchmark_group("attention");
    for (dtype, context) in [(Dtype::F32, 256), (Dtype::Bf16, 256), (Dtype::Bf16, 2048)] {
        let n_slots = 16 * context;
        let mut cache = KvCache::new(1, n_slots, HEADS, dtype);
        let kv = noise(n_slots * n_kv_heads * head_dim);
        cache.write(0, &(0u32..).take(n_slots).collect::<Vec<_>>(), &kv, &kv);
        let blocks: Vec<u32> = (0u32..).take(n_slots / BLOCK_TOKENS).collect();
        let tables = blocks.chunks_exact(context / BLOCK_TOKENS);
        let tables: Vec<_> =
            tables.map(|blocks| PagedSequence { n_queries: 1, start: context - 1, blocks }).collect();
        let q = noise(16 * n_heads * head_dim);
        let mut out = vec![0.0; q.len()];
        group.bench_function(format!("paged/{dtype}/16_of_{context}"), |b| {
            b.iter(|| {
                paged_attention(black_box(&q), &cache, (0, BLOCK_TOKENS), &tables, black_box(&mut out))
            });
        });
    }
    let (q, kv) = (noise(512 * n_heads * head_dim), noise(512 * n_kv_heads * head_dim));
    let (grad, mut q_grad) = (noise(q.len()), vec![0.0; q.len()]);
    let (mut k_grad, mut v_grad) = (vec![0.0; kv.len()], vec![0.0; kv.len()]);
    let mut packed = PackedAttention::new(HEADS, Dtype::F32);
    group.bench_function("packed_backward/2_of_256", |b| {
        b.iter(|| {
            let out = [&mut q_grad, &mut k_grad, &mut v_grad].map(|grad| Some(&mut grad[..]));
            packed.backward([&q, &kv, &kv], &[PackedSequence::whole(256); 2], black_box(&grad), out);
        });
    });
}

fn router(c: &mut Criterion) {
    let mut group = c.benchmark_group("router");
    for (n_experts, top_k) in [(32, 4), (128, 8)] {
        let config = RouterConfig::softmax(n_experts, top_k, true);
        let (scores, mut choice) = (noise(64 * n_experts), Choice::empty());
        group.bench_function(format!("choose/{top_k}_of_{n_experts}"), |b| {
            b.iter(|| choose(black_box(&scores), config, 0, &mut Routing::Free, black_box(&mut choice)));
        });
        let mut out = vec![0.0; 64 * top_k];
        group.bench_function(format!("gates/{top_k}_of_{n_experts}"), |b| {
            b.iter(|| gates(black_box(&scores), config, &choice, black_box(&mut out)));
        });
    }
}

fn logprob(c: &mut Criterion) {
    let mut group = c.benchmark_group("logprob");
    for (t, vocab) in [(64, 2048), (16, 32_768)] {
        let (logits, targets, mut out) = (noise(t * vocab), vec![1; t], vec![0.0; t]);
        group.throughput(Throughput::Elements((t * vocab) as u64));
        group.bench_function(format!("chosen/{t}x{vocab}"), |b| {
            b.iter(|| chosen_logprobs(black_box(&logits), &targets, 1.0, black_box(&mut out)));
        });
    }
    let (t, width, vocab) = (64, 256, 2048);
    let (hidden, weight, ids) = (noise(t * width), noise(vocab * width), vec![1; t]);
    let head = PlainHead { weight: &weight, width, dtype: Dtype::F32 };
    let targets = Targets { ids: &ids, temperature: 1.0, kept: None };
    let (mut logprobs, mut entropies, mut target_logits) = (vec![0.0; t], vec![0.0; t], vec![0.0; t]);
    group.bench_function(format!("head/{t}x{width}x{vocab}"), |b| {
        b.iter(|| {
            let (logprobs, entropies) = (&mut logprobs[..], &mut entropies[..]);
            let scores = Scores { logprobs, entropies, target_logits: &mut target_logits };
            head_logprobs(black_box(&hidden), Head::Plain(head), targets, scores);
        });
    });
    let hidden = &hidden[..];
    let (logprobs, entropies, target_logits) = (&logprobs[..], &entropies[..], &target_logits[..]);
    let lengths = &[t];
    let head = HeadGradient { hidden, head, targets, logprobs, entropies, target_logits, lengths };
    let (pull, mut hidden_grad, mut weight_grad) =
        (vec![1.0; t], vec![0.0; t * width], vec![0.0; vocab * width]);
    group.bench_function(format!("head_backward/{t}x{width}x{vocab}"), |b| {
        b.iter(|| head.add(black_box((&pull, &pull)), (Some(&mut hidden_grad), Some(&mut weight_grad))));
    });
}

fn optimiser(c: &mut Criterion) {
    let step = AdamwStep {
        lr: 1e-6,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 10,
        grad_scale: 1.0,
    };
    let n = 1 << 18;
    let (mut param, grad, mut m, mut v) = (noise(n), noise(n), vec![0.0; n], vec![0.0; n]);
    let mut group = c.benchmark_group("adamw");
    group.throughput(Throughput::Elements(n as u64));
    group.bench_function(n.to_string(), |b| {
        b.iter(|| adamw(black_box(&mut param), &grad, &mut m, &mut v, &step));
    });
}

criterion_group!(kernels, gemm, experts, attention, router, logprob, optimiser);
criterion_main!(kernels);
