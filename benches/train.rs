//! An optimiser step of the model of this repository, on demonstrations. Replayed rollouts are measured by
//! `r3 bench train`.

use std::path::Path;

use criterion::{Criterion, Throughput, criterion_group};
use r3_core::ids::TokenId;
use r3_kernels::huge_pages::HugePages;
use r3_model::autograd::Policy;
use r3_model::config::ModelConfig;
use r3_model::init::FreshWeights;
use r3_recipe::learning::Sft;
use r3_train::sft::{Example, SftTrainer};

#[global_allocator]
static MEMORY: HugePages = HugePages::new();

/// candle's backward recurses over the graph.
const STACK_BYTES: usize = 64 << 20;

fn step(c: &mut Criterion) {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-moe");
    let model = ModelConfig::load(&model).expect("the repository has a model");
    let mut group = c.benchmark_group("train_step");
    group.sample_size(10);
    for (sequences, length) in [(8, 64), (32, 16)] {
        let policy = Policy::load(&FreshWeights::new(&model, 0), &model).expect("random weights load");
        let sft: Sft = serde_json::from_str("{\"steps\": 1, \"lr\": 1e-6}").expect("a section of a recipe");
        let mut trainer = SftTrainer::new(policy, &sft, 4096);
        let token = |at: usize| TokenId(u32::try_from(at % model.vocab_size).unwrap_or(0));
        let tokens: Vec<Vec<TokenId>> =
            (0..sequences).map(|n| (0..=length).map(|at| token(n * 31 + at * at)).collect()).collect();
        let examples: Vec<Example<'_>> =
            tokens.iter().map(|tokens| Example { tokens, answer_start: 1 }).collect();
        group.throughput(Throughput::Elements((sequences * length) as u64));
        group.bench_function(format!("{sequences}x{length}"), |b| {
            b.iter(|| trainer.step(&examples).expect("nothing diverges"));
        });
    }
}

criterion_group!(train, step);

fn main() {
    let run = || {
        train();
        Criterion::default().configure_from_args().final_summary();
    };
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(run).expect("there is a thread");
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}
