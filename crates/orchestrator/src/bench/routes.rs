//! `r3 bench routes`: what recording routes adds to a decode tick, beside a memcpy of the same bytes.

use std::collections::HashMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use r3_core::count::counted;
use r3_core::ids::{GroupId, PolicyVersion, SequenceId, TokenId};
use r3_core::routes::{RouteDims, RouteRows};
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::{Choice, RouterConfig, Routing, choose};
use r3_scheduler::config::SchedulerConfig;
use r3_scheduler::request::{Finished, Request, Sample};
use r3_scheduler::scheduler::Scheduler;
use serde::Serialize;

use crate::bench::Spread;
use crate::error::RunError;

/// Slots of a block.
const BLOCK_TOKENS: usize = 16;

/// What is measured: `sequences` of `tokens` each, always as many, one taking the place of another that ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutesSetup {
    /// Running sequences.
    pub sequences: usize,
    /// MoE layers.
    pub layers: usize,
    /// Experts a token takes in each, at most `experts`.
    pub top_k: usize,
    /// Experts of each, at most 65 536.
    pub experts: usize,
    /// Tokens every sequence samples, and ticks of a round.
    pub tokens: usize,
    /// Rounds, beside one to warm up.
    pub rounds: usize,
}

impl RoutesSetup {
    fn dims(&self) -> RouteDims {
        RouteDims { n_layers: self.layers, top_k: self.top_k, n_experts: self.experts }
    }
}

/// Microseconds of a tick, each the mean over a round's ticks; medians over the rounds, with the lowest and the highest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RoutesBench {
    /// Running sequences.
    pub sequences: usize,
    /// MoE layers.
    pub layers: usize,
    /// Experts a token takes in each.
    pub top_k: usize,
    /// Experts of each.
    pub experts: usize,
    /// Tokens every sequence samples.
    pub tokens: usize,
    /// Rounds.
    pub rounds: usize,
    /// Bytes of the rows of one tick. They are kept twice: beside the keys and values, and in the traces.
    pub bytes_per_tick: usize,
    /// All that recording adds: the three parts below.
    pub capture_us_per_tick: f64,
    /// The lowest round.
    pub capture_us_min: f64,
    /// The highest round.
    pub capture_us_max: f64,
    /// Part: ids narrowed as the layers choose, and turned into rows.
    pub router_us: f64,
    /// Part: rows to their slots, with stamps and validity.
    pub pool_us: f64,
    /// Part: what planning, ending ticks and freeing rollouts costs more with routes than without: the traces.
    pub trace_us: f64,
    /// The same bytes copied twice, in one piece each.
    pub memcpy_us: f64,
    /// The lowest round.
    pub memcpy_us_min: f64,
    /// The highest round.
    pub memcpy_us_max: f64,
    /// The same bytes copied twice by a loop over requests, layers and experts, unchecked.
    pub copy_loop_us: f64,
    /// The lowest round.
    pub copy_loop_us_min: f64,
    /// The highest round.
    pub copy_loop_us_max: f64,
    /// `capture_us_per_tick / memcpy_us`.
    pub capture_over_memcpy: f64,
    /// `capture_us_per_tick / copy_loop_us`.
    pub capture_over_copy_loop: f64,
}

impl RoutesBench {
    /// A table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let Self { sequences, layers, top_k, experts, bytes_per_tick, .. } = self;
        format!(
            "routes of {}, {}, {top_k} of {}: {} a tick\n\
             microseconds a tick           median      min      max\n\
             capture                     {:>8.2} {:>8.2} {:>8.2}\n\
             \x20 router                    {:>8.2}\n\
             \x20 pool                      {:>8.2}\n\
             \x20 traces                    {:>8.2}\n\
             memcpy of the same bytes    {:>8.2} {:>8.2} {:>8.2}\n\
             copy loop per request       {:>8.2} {:>8.2} {:>8.2}\n",
            counted(*sequences, "sequence"),
            counted(*layers, "layer"),
            counted(*experts, "expert"),
            counted(*bytes_per_tick, "byte"),
            self.capture_us_per_tick,
            self.capture_us_min,
            self.capture_us_max,
            self.router_us,
            self.pool_us,
            self.trace_us,
            self.memcpy_us,
            self.memcpy_us_min,
            self.memcpy_us_max,
            self.copy_loop_us,
            self.copy_loop_us_min,
            self.copy_loop_us_max,
        )
    }
}

/// Measures. In every tick a scheduler with routes, one without, the memcpy and the loop take turns, so that what slows
/// the machine down slows down all of them. Every trace is compared with the choices it was made of.
///
/// # Errors
/// If there are no sequences or tokens, or too many for their ids.
///
/// # Panics
/// If a row is not the one that was chosen.
pub fn measure(setup: &RoutesSetup) -> Result<RoutesBench, RunError> {
    let mut bed = TestBed::new(setup)?;
    bed.round();
    let rounds: Vec<Round> = (0..setup.rounds.max(1)).map(|_| bed.round()).collect();
    assert!(bed.n_checked >= setup.sequences, "{} traces were compared", bed.n_checked);
    let spread = |part: fn(&Round) -> f64| Spread::of(rounds.iter().map(part).collect());
    let capture = spread(|round| round.router + round.pool + round.trace);
    let (memcpy, copy_loop) = (spread(|round| round.memcpy), spread(|round| round.copy_loop));
    let RoutesSetup { sequences, layers, top_k, experts, tokens, .. } = *setup;
    Ok(RoutesBench {
        sequences,
        layers,
        top_k,
        experts,
        tokens,
        rounds: rounds.len(),
        bytes_per_tick: sequences * setup.dims().row_bytes(),
        capture_us_per_tick: capture.median,
        capture_us_min: capture.min,
        capture_us_max: capture.max,
        router_us: spread(|round| round.router).median,
        pool_us: spread(|round| round.pool).median,
        trace_us: spread(|round| round.trace).median,
        memcpy_us: memcpy.median,
        memcpy_us_min: memcpy.min,
        memcpy_us_max: memcpy.max,
        copy_loop_us: copy_loop.median,
        copy_loop_us_min: copy_loop.min,
        copy_loop_us_max: copy_loop.max,
        capture_over_memcpy: capture.median / memcpy.median,
        capture_over_copy_loop: capture.median / copy_loop.median,
    })
}

/// Microseconds a tick, means over one round.
struct Round {
    router: f64,
    pool: f64,
    trace: f64,
    memcpy: f64,
    copy_loop: f64,
}

struct TestBed {
    setup: RoutesSetup,
    /// `[L]` choices `[T, K]`. At tick `t`, layer `l` takes the one at `(l + t) % L`.
    choices: Vec<Choice>,
    record: RouteRecord,
    with_routes: Bench,
    without: Bench,
    plain: PlainCopies,
    tick: usize,
    n_checked: usize,
}

impl TestBed {
    fn new(setup: &RoutesSetup) -> Result<Self, RunError> {
        let RouteDims { n_layers, top_k, n_experts } = setup.dims();
        let router = RouterConfig::softmax(n_experts, top_k, true);
        Ok(Self {
            setup: *setup,
            choices: (0..n_layers).map(|layer| choice(router, setup.sequences, layer)).collect(),
            record: RouteRecord::new(n_layers, router),
            with_routes: Bench::new(setup, Some(setup.dims()))?,
            without: Bench::new(setup, None)?,
            plain: PlainCopies::new(setup),
            tick: 0,
            n_checked: 0,
        })
    }

    fn round(&mut self) -> Round {
        let [mut router, mut pool, mut with, mut without, mut memcpy, mut copy_loop] = [Duration::ZERO; 6];
        for _ in 0..self.setup.tokens {
            // Whichever goes second finds the code in cache; what lies between plan and end of a tick is the same.
            let order = if self.tick.is_multiple_of(2) { [true, false] } else { [false, true] };
            for routes in order {
                match routes {
                    true => with += self.with_routes.plan(self.tick),
                    false => without += self.without.plan(self.tick),
                }
            }
            let (n_layers, n_tokens, tick) = (self.choices.len(), self.setup.sequences, self.tick);
            let (record, choices) = (&mut self.record, &self.choices);
            let (rows, seconds) = timed(move || {
                record.start(n_tokens);
                for layer in 0..n_layers {
                    record.keep(layer, &choices[(layer + tick) % n_layers]);
                }
                record.rows()
            });
            router += seconds;
            pool += timed(|| self.with_routes.scheduler.record(rows)).1;
            memcpy += timed(|| self.plain.memcpy(rows)).1;
            copy_loop += timed(|| self.plain.copy_loop(|layer| choices[(layer + tick) % n_layers].ids())).1;
            for routes in order {
                match routes {
                    true => with += self.with_routes.advance(),
                    false => without += self.without.advance(),
                }
            }
            with += self.with_routes.replace_finished(|finished, computed| {
                assert_recorded(finished, computed, choices);
                self.n_checked += 1;
            });
            without += self.without.replace_finished(|_, _| ());
            self.tick += 1;
        }
        let per_tick = |total: Duration| total.as_secs_f64() * 1e6 / self.setup.tokens as f64;
        Round {
            router: per_tick(router),
            pool: per_tick(pool),
            trace: per_tick(with) - per_tick(without),
            memcpy: per_tick(memcpy),
            copy_loop: per_tick(copy_loop),
        }
    }
}

/// Every rollout's routes must be those of the ticks and rows in which its positions were computed.
fn assert_recorded(finished: &Finished, computed: &[Computed], choices: &[Choice]) {
    let routes = finished.routes.as_ref().expect("routes are on").view();
    assert_eq!(routes.rows(), computed.len(), "one row for each computed position");
    let top_k = routes.dims().top_k;
    for (position, &Computed { tick, row }) in computed.iter().enumerate() {
        for layer in 0..choices.len() {
            let chosen = &choices[(layer + tick) % choices.len()].ids()[row * top_k..][..top_k];
            let kept = routes.choice(position, layer);
            assert!(kept.eq(chosen.iter().copied()), "position {position}, layer {layer}: another row");
        }
    }
}

/// What a layer chose for `n_tokens` tokens: ids spread over the experts, distinct for each token.
fn choice(router: RouterConfig, n_tokens: usize, layer: usize) -> Choice {
    let id = |token: usize, k: usize| (token * 37 + layer * 11 + (token ^ layer) * 5 + k) % router.n_experts;
    let ids = (0..n_tokens).flat_map(|token| (0..router.top_k).map(move |k| (token, k)));
    let ids: Vec<u16> =
        ids.map(|(token, k)| u16::try_from(id(token, k)).expect("ids are below the experts")).collect();
    let mut choice = Choice::empty();
    let scores = vec![0.0; n_tokens * router.n_experts];
    choose(&scores, router, 0, &mut Routing::Replay { ids: &ids, native: None }, &mut choice);
    choice
}

/// When a position was computed: its tick, and its row in that tick's plan.
#[derive(Clone, Copy)]
struct Computed {
    tick: usize,
    row: usize,
}

/// A scheduler that always runs the same number of sequences.
struct Bench {
    scheduler: Scheduler,
    return_routes: Option<usize>,
    tokens: usize,
    samples: Vec<Sample>,
    /// By sequence and position.
    computed: HashMap<SequenceId, Vec<Computed>>,
}

impl Bench {
    fn new(setup: &RoutesSetup, routes: Option<RouteDims>) -> Result<Self, RunError> {
        let blocks_per_sequence = setup.tokens.div_ceil(BLOCK_TOKENS) + 2;
        let scheduler = Scheduler::new(SchedulerConfig {
            block_tokens: BLOCK_TOKENS,
            n_blocks: setup.sequences * blocks_per_sequence,
            max_running: setup.sequences,
            max_batch_tokens: setup.sequences,
            prefix_cache: false,
            routes,
            replays: false,
        });
        let mut bench = Self {
            scheduler: scheduler.map_err(r3_engine::error::EngineError::from)?,
            return_routes: routes.map(|_| 0),
            tokens: setup.tokens,
            samples: Vec::with_capacity(setup.sequences),
            computed: HashMap::new(),
        };
        // They end one after the other, as sequences do that began one after the other.
        for at in 1..=setup.sequences {
            bench.submit((setup.tokens * at).div_ceil(setup.sequences));
        }
        Ok(bench)
    }

    fn submit(&mut self, max_new_tokens: usize) {
        let request = Request {
            group: GroupId(0),
            prompt: [TokenId(0)].into(),
            max_new_tokens,
            stop_tokens: [].into(),
            prompt_logprobs: false,
            max_support: None,
            return_routes: self.return_routes,
        };
        self.scheduler.submit(&request).expect("there is room for every sequence");
    }

    fn plan(&mut self, tick: usize) -> Duration {
        let (_, seconds) = timed(|| self.scheduler.plan());
        let plan = self.scheduler.tick_plan();
        assert_eq!(plan.n_tokens(), self.scheduler.n_running(), "every sequence computes one token");
        for chunk in &plan.chunks {
            self.computed.entry(chunk.sequence).or_default().push(Computed { tick, row: chunk.first_row });
        }
        self.samples.clear();
        let sample = |sequence| Sample { sequence, token: TokenId(1), logprob: -1.0 };
        self.samples.extend(plan.samples.iter().map(|site| sample(site.sequence)));
        seconds
    }

    fn advance(&mut self) -> Duration {
        timed(|| self.scheduler.advance(&self.samples, PolicyVersion(0))).1
    }

    /// Takes what ended, shows it to `check` off the clock, frees it and lets another begin.
    fn replace_finished(&mut self, mut check: impl FnMut(&Finished, &[Computed])) -> Duration {
        let mut seconds = Duration::ZERO;
        while let Some(finished) = self.scheduler.take_finished() {
            let computed = self.computed.remove(&finished.sequence).expect("it was planned");
            check(&finished, &computed);
            seconds += timed(|| drop(finished)).1;
            self.submit(self.tokens);
        }
        seconds
    }
}

/// The same bytes, copied without knowing what they are: into a pool by slot, and into one list for each request.
struct PlainCopies {
    dims: RouteDims,
    pool: Vec<u8>,
    lists: Vec<RouteRows>,
    memcpy: [Vec<u8>; 2],
    at: usize,
    n_ticks: usize,
}

impl PlainCopies {
    fn new(setup: &RoutesSetup) -> Self {
        let bytes = setup.sequences * setup.tokens * setup.dims().row_bytes();
        Self {
            dims: setup.dims(),
            pool: vec![0; bytes],
            lists: vec![RouteRows::with_capacity(setup.dims(), setup.tokens); setup.sequences],
            memcpy: [vec![0; bytes], vec![0; bytes]],
            at: 0,
            n_ticks: setup.tokens,
        }
    }

    /// Each tick to another place, as a cache and traces that grow are.
    fn memcpy(&mut self, rows: &[u8]) {
        self.at = (self.at + 1) % self.n_ticks;
        for copy in &mut self.memcpy {
            copy[self.at * rows.len()..][..rows.len()].copy_from_slice(rows);
            black_box(&copy[self.at * rows.len()]);
        }
    }

    /// Row by row and id by id out of `[L]` choices `[T, K]`.
    fn copy_loop<'a>(&mut self, ids: impl Fn(usize) -> &'a [u16]) {
        let RouteDims { n_layers, top_k, .. } = self.dims;
        let (row_bytes, id_bytes) = (self.dims.row_bytes(), self.dims.width().bytes());
        for (request, list) in self.lists.iter_mut().enumerate() {
            let row = &mut self.pool[(request * self.n_ticks + self.at) * row_bytes..][..row_bytes];
            for layer in 0..n_layers {
                let chosen = &ids(layer)[request * top_k..][..top_k];
                let bytes = row[layer * top_k * id_bytes..].chunks_exact_mut(id_bytes);
                for (&id, bytes) in chosen.iter().zip(bytes) {
                    bytes.copy_from_slice(&id.to_le_bytes()[..id_bytes]);
                }
            }
            if list.rows() == self.n_ticks {
                list.truncate(0);
            }
            list.append(row);
        }
        black_box(&self.pool);
    }
}

fn timed<T>(body: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let value = body();
    (value, start.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_trace_is_compared_and_every_part_is_measured() {
        for experts in [16, 300] {
            let setup = RoutesSetup { sequences: 5, layers: 3, top_k: 2, experts, tokens: 40, rounds: 2 };
            let mut bed = TestBed::new(&setup).unwrap();
            for _ in 0..3 {
                bed.round();
            }
            assert_eq!(bed.n_checked, 15, "each of 5 sequences ends once in a round");
            let measured = measure(&setup).unwrap();
            assert_eq!((measured.rounds, measured.bytes_per_tick), (2, 5 * setup.dims().row_bytes()));
            assert!(measured.router_us > 0.0 && measured.pool_us > 0.0 && measured.memcpy_us > 0.0);
            assert!(measured.table().contains("copy loop per request"), "{}", measured.table());
        }
    }

    #[test]
    fn a_row_that_is_not_the_chosen_one_is_noticed() {
        let setup = RoutesSetup { sequences: 5, layers: 3, top_k: 2, experts: 16, tokens: 20, rounds: 1 };
        let mut bed = TestBed::new(&setup).unwrap();
        bed.round();
        bed.choices.swap(0, 1);
        let round = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bed.round().router));
        assert!(round.is_err(), "rows of earlier ticks are of other choices");
    }
}
