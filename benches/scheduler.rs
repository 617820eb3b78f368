//! A tick of the scheduler: plan, record, advance, with sequences that end and others that take their places.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::routes::RouteDims;
use r3_scheduler::config::SchedulerConfig;
use r3_scheduler::request::{Request, Sample};
use r3_scheduler::scheduler::Scheduler;

const BLOCK_TOKENS: usize = 16;
const NEW_TOKENS: usize = 128;
const DIMS: RouteDims = RouteDims { n_layers: 48, top_k: 8, n_experts: 128 };

/// Sequences that decode, always as many.
struct Running {
    scheduler: Scheduler,
    routes: Option<RouteDims>,
    samples: Vec<Sample>,
    /// Rows of a tick.
    rows: Vec<u8>,
}

impl Running {
    fn new(sequences: usize, routes: Option<RouteDims>) -> Self {
        let config = SchedulerConfig {
            block_tokens: BLOCK_TOKENS,
            n_blocks: sequences * (NEW_TOKENS / BLOCK_TOKENS + 2),
            max_running: sequences,
            max_batch_tokens: sequences,
            prefix_cache: true,
            routes,
            replays: false,
        };
        let scheduler = Scheduler::new(config).expect("there are blocks");
        let rows = (0..sequences * DIMS.row_bytes()).map(|at| (at % DIMS.top_k) as u8).collect();
        let mut running = Self { scheduler, routes, samples: Vec::with_capacity(sequences), rows };
        (1..=sequences).for_each(|at| running.submit((NEW_TOKENS * at).div_ceil(sequences)));
        running
    }

    fn submit(&mut self, max_new_tokens: usize) {
        let request = Request {
            group: GroupId(0),
            prompt: [TokenId(0)].into(),
            max_new_tokens,
            stop_tokens: [].into(),
            prompt_logprobs: false,
            max_support: None,
            return_routes: self.routes.map(|_| 0),
        };
        self.scheduler.submit(&request).expect("there is room for every sequence");
    }

    fn tick(&mut self) {
        assert!(self.scheduler.plan(), "there is work");
        let plan = self.scheduler.tick_plan();
        let sample = |sequence| Sample { sequence, token: TokenId(1), logprob: -1.0 };
        self.samples.clear();
        self.samples.extend(plan.samples.iter().map(|site| sample(site.sequence)));
        let n_tokens = plan.n_tokens();
        if let Some(dims) = self.routes {
            self.scheduler.record(&self.rows[..n_tokens * dims.row_bytes()]);
        }
        self.scheduler.advance(&self.samples, PolicyVersion(0));
        while let Some(finished) = self.scheduler.take_finished() {
            black_box(finished);
            self.submit(NEW_TOKENS);
        }
    }
}

fn tick(c: &mut Criterion) {
    let mut group = c.benchmark_group("scheduler_tick");
    for sequences in [8, 256] {
        group.throughput(Throughput::Elements(sequences as u64));
        for (name, routes) in [("routes", Some(DIMS)), ("no_routes", None)] {
            let mut running = Running::new(sequences, routes);
            group.bench_function(format!("{sequences}/{name}"), |b| b.iter(|| running.tick()));
        }
    }
}

criterion_group!(scheduler, tick);
criterion_main!(scheduler);
