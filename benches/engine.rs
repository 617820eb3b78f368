//! A tick of the engine that decodes, with the model of this repository. Whole rollouts are measured by `r3 bench engine`.

use std::path::Path;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_engine::config::EngineConfig;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::sampler::Sampling;
use r3_kernels::gemm::Dtype;
use r3_kernels::huge_pages::HugePages;
use r3_kernels::numerics::Numerics;
use r3_model::config::ModelConfig;
use r3_model::init::FreshWeights;

#[global_allocator]
static MEMORY: HugePages = HugePages::new();

const PROMPT_TOKENS: usize = 32;
const NEW_TOKENS: usize = 128;

/// Sequences that decode; when all have ended, as many begin again.
struct Running {
    engine: Engine,
    sequences: u32,
}

impl Running {
    fn new(sequences: u32, dtype: Dtype) -> Self {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-moe");
        let model = ModelConfig::load(&model).expect("the repository has a model");
        let config = EngineConfig {
            dtype,
            numerics: Numerics::Exact,
            kv_bytes: 64 << 20,
            block_tokens: 16,
            max_batch_tokens: 4096,
            max_running: sequences as usize,
            prefix_cache: false,
            capture_routes: true,
            replay: None,
        };
        let weights = FreshWeights::new(&model, 0);
        let engine = Engine::new(config, &model, &weights, PolicyVersion(0)).expect("the model loads");
        Self { engine, sequences }
    }

    /// A tick behind the one that computes the prompts, which is not counted.
    fn prepare(&mut self) {
        if self.engine.has_work() {
            return;
        }
        while self.engine.take_finished().is_some() {}
        let request = GroupRequest {
            group: GroupId(0),
            prompt: (0u32..).map(TokenId).take(PROMPT_TOKENS).collect(),
            size: self.sequences,
            max_new_tokens: NEW_TOKENS,
            stop_tokens: [].into(),
            sampling: Sampling { temperature: 1.0, ..Sampling::GREEDY },
            seed: 0,
            return_routes: Some(0),
        };
        self.engine.submit(&request).expect("there is room for all");
        self.engine.tick().expect("the prompts are computed");
    }
}

fn tick(c: &mut Criterion) {
    let mut group = c.benchmark_group("engine_tick");
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for sequences in [1, 64] {
            let mut running = Running::new(sequences, dtype);
            group.throughput(Throughput::Elements(sequences.into()));
            group.bench_function(format!("{dtype}/{sequences}"), |b| {
                b.iter_custom(|n_ticks| {
                    let mut time = std::time::Duration::ZERO;
                    for _ in 0..n_ticks {
                        running.prepare();
                        let start = std::time::Instant::now();
                        running.engine.tick().expect("a token is decoded");
                        time += start.elapsed();
                    }
                    time
                });
            });
        }
    }
}

criterion_group!(engine, tick);
criterion_main!(engine);
