//! The same random programs on the real engine: whatever happens to a rollout, its rows and logprobs are those of a plain
//! prefill of its tokens, to the bit, under the weights that each of its versions names.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use r3_core::ids::{GroupId, PolicyVersion, SequenceId, TokenId};
use r3_core::rollout::FinishReason;
use r3_core::routes::RouteView;
use r3_engine::config::EngineConfig;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::error::EngineError;
use r3_engine::resume::Continuation;
use r3_engine::sampler::Sampling;
use r3_engine::score::ToScore;
use r3_kernels::gemm::Dtype;
use r3_kernels::numerics::Numerics;
use r3_model::checkpoint::Checkpoint;
use r3_model::config::ModelConfig;
use r3_model::error::ModelError;
use r3_model::init::FreshWeights;
use r3_model::source::{TensorSource, canonical_tensors};
use r3_scheduler::config::SchedulerConfig;
use r3_scheduler::error::SchedulerError;
use r3_scheduler::request::{Finished, Limits, Refused, Request, Sample};
use r3_scheduler::scheduler::SchedulerStats;
use r3_sim::player::Player;
use r3_sim::program::{FailsAfter, Op, Program};
use r3_sim::subject::{Prefill, Subject};
use r3_sim::tally::Tally;

/// From all of the vocabulary, unchanged: a logprob is then the one that scoring gives.
const SAMPLED: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };
const SEED: u64 = 7;

/// Tensors in memory.
struct Tensors(HashMap<String, Vec<f32>>);

impl Tensors {
    fn of(model: &ModelConfig, source: &dyn TensorSource) -> Self {
        let read = |(name, _): (String, Vec<usize>)| {
            let mut values = Vec::new();
            source.read(&name, &mut values).unwrap();
            (name, values)
        };
        Self(canonical_tensors(model).into_iter().map(read).collect())
    }
}

impl TensorSource for Tensors {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        let values = self.0.get(name).ok_or_else(|| ModelError::NoSuchTensor { name: name.to_owned() })?;
        out.clone_from(values);
        Ok(())
    }
}

/// Ends in the middle.
struct Broken<'a>(&'a Tensors);

impl TensorSource for Broken<'_> {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        if name.contains("layers.2.") {
            return Err(ModelError::NoSuchTensor { name: name.to_owned() });
        }
        self.0.read(name, out)
    }
}

/// A model in three sets of weights that route differently; version `v` is set `v % 3`.
struct Policies {
    model: ModelConfig,
    weights: [Tensors; 3],
}

impl Policies {
    fn load() -> Self {
        let dir: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../../tests/golden/nano"].iter().collect();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let model = checkpoint.config().clone();
        let fresh = |seed| Tensors::of(&model, &FreshWeights::new(&model, seed));
        Self { weights: [Tensors::of(&model, &checkpoint), fresh(1), fresh(2)], model }
    }

    fn of(&self, version: PolicyVersion) -> &Tensors {
        &self.weights[version.0 as usize % 3]
    }

    fn engine(&self, config: EngineConfig, version: PolicyVersion) -> Engine {
        Engine::new(config, &self.model, self.of(version), version).unwrap()
    }

    fn config(&self, sizes: &SchedulerConfig) -> EngineConfig {
        let config = EngineConfig {
            dtype: Dtype::F32,
            numerics: Numerics::Exact,
            kv_bytes: 0,
            block_tokens: sizes.block_tokens,
            max_batch_tokens: sizes.max_batch_tokens,
            max_running: sizes.max_running,
            prefix_cache: sizes.prefix_cache,
            capture_routes: sizes.routes.is_some(),
            replay: sizes.replays.then_some(0.0),
        };
        EngineConfig { kv_bytes: sizes.n_blocks as u64 * config.block_bytes(&self.model), ..config }
    }

    /// Engines that compute each prompt in one chunk and find nothing in a cache, one for each set.
    fn references(&self) -> [Engine; 3] {
        let plain = EngineConfig {
            dtype: Dtype::F32,
            numerics: Numerics::Exact,
            kv_bytes: 16 << 20,
            block_tokens: 16,
            max_batch_tokens: 4096,
            max_running: 1,
            prefix_cache: false,
            capture_routes: true,
            replay: None,
        };
        [0, 1, 2].map(|version| self.engine(plain, PolicyVersion(version)))
    }
}

struct RealEngine<'a> {
    policies: &'a Policies,
    references: &'a mut [Engine; 3],
    config: EngineConfig,
    engine: Engine,
    /// Tokens of every request, as of the last call.
    n_tokens: BTreeMap<SequenceId, usize>,
    sampled: Vec<Sample>,
    finished: VecDeque<Finished>,
}

impl<'a> RealEngine<'a> {
    fn new(policies: &'a Policies, references: &'a mut [Engine; 3], config: EngineConfig) -> Self {
        Self {
            policies,
            references,
            config,
            engine: policies.engine(config, PolicyVersion(0)),
            n_tokens: BTreeMap::new(),
            sampled: Vec::new(),
            finished: VecDeque::new(),
        }
    }

    /// Notes how long every request is, without asking the scheduler's plan.
    fn look(&mut self) {
        self.finished.extend(std::iter::from_fn(|| self.engine.take_finished()));
        let in_flight = self.engine.in_flight();
        self.sampled.clear();
        let mut n_tokens = BTreeMap::new();
        for rollout in self.finished.iter().chain(&in_flight) {
            let (sequence, n) = (rollout.sequence, rollout.tokens.len());
            match n - self.n_tokens.get(&sequence).copied().unwrap_or(n) {
                0 => {}
                1 => {
                    let (token, logprob) = (rollout.tokens[n - 1], rollout.rollout_logprobs.last());
                    self.sampled.push(Sample { sequence, token, logprob: *logprob.unwrap() });
                }
                more => panic!("{sequence} sampled {more} tokens in one tick"),
            }
            n_tokens.insert(sequence, n);
        }
        self.n_tokens = n_tokens;
    }

    fn how(limits: &Limits) -> Continuation {
        Continuation {
            max_new_tokens: limits.max_new_tokens,
            stop_tokens: limits.stop_tokens.clone(),
            sampling: SAMPLED,
            seed: SEED,
        }
    }
}

fn scheduler_error(error: EngineError) -> SchedulerError {
    match error {
        EngineError::Scheduler(error) => error,
        other => panic!("{other}"),
    }
}

impl Subject for RealEngine<'_> {
    fn submit(&mut self, request: &Request, n: u32) -> Result<Vec<SequenceId>, SchedulerError> {
        let ids = self.engine.submit(&GroupRequest {
            group: request.group,
            prompt: request.prompt.clone(),
            size: n,
            max_new_tokens: request.max_new_tokens,
            stop_tokens: request.stop_tokens.clone(),
            sampling: SAMPLED,
            seed: SEED,
            return_routes: request.return_routes,
        });
        let ids = ids.map_err(scheduler_error)?;
        self.look();
        Ok(ids)
    }

    fn resume(&mut self, rollouts: Vec<Finished>, limits: &Limits) -> Result<Vec<SequenceId>, Refused> {
        let ids = self.engine.resume(rollouts, &Self::how(limits)).map_err(|returned| Refused {
            error: scheduler_error(returned.error),
            rollouts: returned.rollouts,
        })?;
        self.look();
        Ok(ids)
    }

    fn next_turn(
        &mut self,
        rollout: Finished,
        given: &[TokenId],
        limits: &Limits,
    ) -> Result<SequenceId, Refused> {
        let id = self.engine.next_turn(rollout, given, &Self::how(limits)).map_err(|returned| Refused {
            error: scheduler_error(returned.error),
            rollouts: returned.rollouts,
        })?;
        self.look();
        Ok(id)
    }

    fn tick(&mut self, max_tokens: usize) -> bool {
        let has_work = self.engine.has_work();
        let stats = self.engine.tick_within(max_tokens).unwrap();
        self.look();
        assert_eq!(stats.sampled_tokens, self.sampled.len());
        assert!(stats.computed_tokens <= max_tokens);
        assert_eq!(has_work, stats.computed_tokens > 0);
        has_work
    }

    /// A forward of the real engine does not fail; what is done about it is all that is left.
    fn failing_tick(&mut self, _max_tokens: usize, _after: FailsAfter) {
        self.engine.abort_all();
        self.look();
    }

    fn sampled(&self) -> &[Sample] {
        &self.sampled
    }

    fn abort(&mut self, id: SequenceId) -> bool {
        let was_here = self.engine.abort(id);
        self.look();
        was_here
    }

    fn retract(&mut self, id: SequenceId) -> bool {
        self.engine.retract(id)
    }

    fn refit(&mut self, version: PolicyVersion) {
        let report = self.engine.refit(self.policies.of(version), version).unwrap();
        assert!(report.changed > 0 && report.version == version);
    }

    fn flush(&mut self) {
        self.engine.flush();
        let stats = self.engine.stats();
        assert_eq!((stats.n_held_blocks, stats.n_idle_blocks, stats.n_indexed_blocks), (0, 0, 0));
    }

    fn failed_refit(&mut self, version: PolicyVersion) {
        let before = (self.engine.version(), self.engine.epoch(), self.engine.hashes().to_vec());
        assert!(self.engine.refit(&Broken(self.policies.of(version)), version).is_err());
        let after = (self.engine.version(), self.engine.epoch(), self.engine.hashes().to_vec());
        assert_eq!(after, before);
    }

    fn in_flight(&self) -> Vec<Finished> {
        self.engine.in_flight()
    }

    fn take_finished(&mut self) -> Option<Finished> {
        let finished = self.finished.pop_front()?;
        self.n_tokens.remove(&finished.sequence);
        Some(finished)
    }

    fn rebuild(&mut self, version: PolicyVersion) {
        self.engine = self.policies.engine(self.config, version);
        self.n_tokens.clear();
        self.finished.clear();
    }

    fn stats(&self) -> SchedulerStats {
        self.engine.stats()
    }

    fn n_open(&self) -> usize {
        self.engine.n_open_requests()
    }

    fn check(&self) {
        self.engine.check();
    }

    fn prefill(
        &mut self,
        version: PolicyVersion,
        tokens: &[TokenId],
        replayed: Option<RouteView<'_>>,
    ) -> Prefill {
        let reference = &mut self.references[version.0 as usize % 3];
        if let Some(routes) = replayed {
            let tokens = &tokens[..=routes.rows()];
            let scored = reference.score(&ToScore { routes: replayed, ..ToScore::new(tokens) }).unwrap();
            return Prefill { rows: Some(scored.live_routes), logprobs: scored.logprobs };
        }
        let prompt = GroupRequest {
            group: GroupId(0),
            prompt: tokens.into(),
            size: 1,
            max_new_tokens: 0,
            stop_tokens: [].into(),
            sampling: SAMPLED,
            seed: 0,
            return_routes: Some(0),
        };
        reference.submit(&prompt).unwrap();
        reference.tick().unwrap();
        let prefilled = reference.take_finished().unwrap();
        assert_eq!(prefilled.finish, FinishReason::Length);
        let logprobs = if tokens.len() > 1 {
            reference.score(&ToScore::new(tokens)).unwrap().logprobs
        } else {
            Vec::new()
        };
        Prefill { rows: prefilled.routes, logprobs }
    }
}

/// The program of `seed` as this model takes it: it has 64 tokens, one shape of routes, and no prompt logprobs.
fn program(policies: &Policies, seed: u64) -> Program {
    let Program { config, mut ops } = Program::from_seed(seed);
    for op in &mut ops {
        match op {
            Op::Submit(ask) => {
                ask.prompt_logprobs = false;
                ask.reach.n_stops *= 6;
            }
            Op::Resubmit { reach, .. }
            | Op::NextTurn { reach, .. }
            | Op::Resume { reach: Some(reach), .. } => {
                reach.n_stops *= 6;
            }
            _ => {}
        }
    }
    let routes = config.routes.map(|_| policies.model.route_dims());
    Program { config: SchedulerConfig { routes, ..config }, ops }
}

fn play(policies: &Policies, references: &mut [Engine; 3], program: &Program) -> Tally {
    let engine = RealEngine::new(policies, references, policies.config(&program.config));
    Player::new(engine, program.config).play(program)
}

#[test]
fn three_hundred_programs_leave_no_trace_in_what_the_real_engine_gives() {
    let policies = Policies::load();
    let mut references = policies.references();
    let mut tally = Tally::default();
    for seed in 0..300 {
        let program = program(&policies, seed);
        let played = catch_unwind(AssertUnwindSafe(|| play(&policies, &mut references, &program)));
        tally += played.unwrap_or_else(|_| panic!("seed {seed} on the real engine: {program}"));
    }
    println!("{tally}");
    for (name, count) in tally.counts() {
        assert!(count >= 5, "{name}: {count} in {} programs", tally.schedules);
    }
}
