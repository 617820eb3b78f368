//! Rollouts that several versions sampled: what each of them said of its tokens, a trainer that has its weights and replays
//! the rollout's routes says again, in every bit.

mod common;
#[path = "common/packing.rs"]
mod packing;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{MODELS, Rollout, checkpoint, engine, finish, plain, request, sample, tokens};
use packing::Packing;
use r3_core::ids::PolicyVersion;
use r3_core::rollout::FinishReason;
use r3_core::routes::RouteRows;
use r3_engine::config::EngineConfig;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::error::EngineError;
use r3_engine::resume::Continuation;
use r3_kernels::gemm::Dtype;
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::Routing;
use r3_model::autograd::{Policy, Precision};
use r3_model::checkpoint::Checkpoint;
use r3_model::init::FreshWeights;
use r3_model::source::TensorSource;
use r3_orchestrator::run::{RunOptions, run};
use r3_recipe::recipe::Recipe;
use r3_scheduler::request::Finished;
use r3_scheduler::scheduler::SchedulerStats;
use r3_tasks::dataset::Problem;
use r3_tasks::reward::Reward;
use r3_telemetry::metrics;

/// Three sets of weights of one model, which route differently; version `v` is set `v`.
struct Policies {
    checkpoint: Checkpoint,
    fresh: [FreshWeights; 2],
}

impl Policies {
    fn of_model(path: &str) -> Self {
        let checkpoint = checkpoint(path);
        let fresh = [1, 2].map(|seed| FreshWeights::new(checkpoint.config(), seed));
        Self { checkpoint, fresh }
    }

    fn of(&self, version: u64) -> &dyn TensorSource {
        match version {
            0 => &self.checkpoint,
            _ => &self.fresh[version as usize - 1],
        }
    }

    fn engine(&self, config: EngineConfig, version: u64) -> Engine {
        let mut engine = engine(&self.checkpoint, config);
        if version > 0 {
            self.refit(&mut engine, version);
        }
        engine
    }

    fn refit(&self, engine: &mut Engine, version: u64) {
        engine.refit(self.of(version), PolicyVersion(version)).unwrap();
    }

    /// Blocks of 4 tokens for a part of what runs, and ticks shorter than the longest sequence.
    fn cramped(&self, dtype: Dtype, replay: Option<f32>) -> EngineConfig {
        let config = EngineConfig {
            block_tokens: 4,
            max_batch_tokens: 24,
            max_running: 8,
            prefix_cache: true,
            replay,
            ..plain(dtype)
        };
        EngineConfig { kv_bytes: 45 * config.block_bytes(self.checkpoint.config()), ..config }
    }
}

/// Who holds what is in flight at a refit.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Held {
    ByTheEngine,
    ByUs,
}

/// Six groups of three, of which every two begin alike.
fn prompts() -> impl Iterator<Item = GroupRequest> {
    (0..6).map(|group| {
        let prompt = [tokens(group / 2, 14 + 5 * (group / 2)), tokens(group, 1 + group % 3)].concat();
        GroupRequest { max_new_tokens: 20, ..request(group.into(), prompt, 3) }
    })
}

fn how() -> Continuation {
    let GroupRequest { max_new_tokens, stop_tokens, sampling, seed, .. } = prompts().next().unwrap();
    Continuation { max_new_tokens, stop_tokens, sampling, seed }
}

fn take(engine: &mut Engine, ended: &mut Vec<Finished>) {
    ended.extend(std::iter::from_fn(|| engine.take_finished()));
}

/// Takes back what is in flight.
fn take_back(engine: &mut Engine, ended: &mut Vec<Finished>) -> Vec<Finished> {
    take(engine, ended);
    engine.abort_all();
    let mut aborted = Vec::new();
    take(engine, &mut aborted);
    aborted
}

fn resume(engine: &mut Engine, mut rollouts: Vec<Finished>) {
    while let Some(first) = rollouts.first() {
        let group = first.group;
        let of_group = rollouts.extract_if(.., |rollout| rollout.group == group).collect();
        engine.resume(of_group, &how()).unwrap();
    }
}

/// Samples all prompts across two refits.
fn sampled(policies: &Policies, config: EngineConfig, held: Held) -> (Vec<Finished>, SchedulerStats) {
    let mut engine = policies.engine(config, 0);
    for request in prompts() {
        engine.submit(&request).unwrap();
    }
    let mut ended = Vec::new();
    for (version, n_ticks) in [(1, 8), (2, 14)] {
        for _ in 0..n_ticks {
            engine.tick().unwrap();
        }
        let aborted = match held {
            Held::ByTheEngine => Vec::new(),
            Held::ByUs => take_back(&mut engine, &mut ended),
        };
        policies.refit(&mut engine, version);
        resume(&mut engine, aborted);
    }
    while engine.has_work() {
        engine.tick().unwrap();
    }
    take(&mut engine, &mut ended);
    ended.sort_by_key(|rollout| (rollout.group, rollout.index));
    assert_eq!(ended.len(), 18);
    (ended, engine.stats())
}

/// What a trainer has to say.
#[derive(Debug, Default)]
struct Compared {
    /// Tokens behind some that older weights sampled.
    n_behind: usize,
    /// Of these, tokens whose logprob it computes to other bits.
    n_unequal: usize,
    /// All others of which it does.
    n_unequal_elsewhere: usize,
    /// Route rows of older weights that its own router would have chosen otherwise.
    n_rerouted: usize,
    /// In nats.
    max_difference: f32,
}

/// Compares the logprobs of `rollouts` with those of a trainer that replays them, under the weights of each version, down to
/// `ratio` of what its router would choose.
fn compared(policies: &Policies, dtype: Dtype, rollouts: &[Finished], ratio: f32) -> Compared {
    let mut compared = Compared::default();
    for version in 0..3 {
        let policy = Policy::load(policies.of(version), policies.checkpoint.config()).unwrap();
        let mut policy = policy.with_precision(Precision { dtype, recompute: false });
        for rollout in rollouts {
            compare(&mut policy, rollout, (PolicyVersion(version), ratio), &mut compared);
        }
    }
    compared
}

fn compare(
    policy: &mut Policy,
    rollout: &Finished,
    (version, ratio): (PolicyVersion, f32),
    compared: &mut Compared,
) {
    let (dims, router) = (policy.config().route_dims(), policy.config().router());
    let routes = rollout.routes.as_ref().unwrap().view();
    let mut packing = Packing::new(dims);
    packing.add(&rollout.tokens, routes, None);
    let ids = packing.replayed();
    let mut native = RouteRecord::new(dims.n_layers, router);
    native.start(routes.rows());
    let mut routing = Routing::ReplayAbove { ids: &ids, ratio, native: Some(&mut native) };
    let output = policy.logprobs_of(&packing.packed(), &mut routing, packing.scored(1.0)).unwrap();
    let logprobs = output.logprobs.to_vec1::<f32>().unwrap();
    let first = rollout.prompt_tokens - 1;
    let mask = rollout.mask();
    let of_version =
        |at: &usize| rollout.versions[*at] == version && mask.as_ref().is_none_or(|mask| mask[*at] == 1);
    for at in (0..rollout.versions.len()).filter(of_version) {
        let (said, computed) = (rollout.rollout_logprobs[at], logprobs[first + at]);
        let is_unequal = usize::from(said.to_bits() != computed.to_bits());
        if rollout.versions[0] < version {
            compared.n_behind += 1;
            compared.n_unequal += is_unequal;
            compared.max_difference = compared.max_difference.max((said - computed).abs());
        } else {
            compared.n_unequal_elsewhere += is_unequal;
        }
    }
    // The last token of older weights is fed to these.
    let n_older = rollout.versions.partition_point(|&other| other < version);
    if n_older > 0 && n_older < rollout.versions.len() {
        let row_bytes = dims.row_bytes();
        let (own, recorded) = (native.rows().chunks(row_bytes), routes.bytes().chunks(row_bytes));
        compared.n_rerouted +=
            own.zip(recorded).take(first + n_older).filter(|(own, row)| own != row).count();
    }
}

fn assert_exact(dtype: Dtype, ratio: f32) {
    for model in MODELS {
        let policies = Policies::of_model(model);
        let (rollouts, stats) = sampled(&policies, policies.cramped(dtype, Some(ratio)), Held::ByTheEngine);
        assert!(stats.n_preemptions > 0 && stats.hit_tokens > 0 && stats.forked_tokens > 0, "{stats:?}");
        let n_of_three = rollouts.iter().filter(|rollout| versions(rollout).len() == 3).count();
        assert!(n_of_three > 0, "a rollout is in flight at both refits");
        let exact = compared(&policies, dtype, &rollouts, ratio);
        assert!(exact.n_behind > 100 && exact.n_rerouted > 100, "{model}: {exact:?}");
        assert_eq!((exact.n_unequal, exact.n_unequal_elsewhere), (0, 0), "{model}: {exact:?}");
        assert_eq!(exact.max_difference, 0.0);

        let (taken_back, _) = sampled(&policies, policies.cramped(dtype, Some(ratio)), Held::ByUs);
        for (one, other) in rollouts.iter().zip(&taken_back) {
            assert_eq!(one.versions, other.versions, "{model}");
            assert_eq!(Rollout::of(one.clone()), Rollout::of(other.clone()), "{model}: whoever holds them");
        }
    }
}

fn versions(rollout: &Finished) -> Vec<PolicyVersion> {
    let mut versions = rollout.versions.clone();
    versions.dedup();
    versions
}

#[test]
fn what_new_weights_sample_behind_old_routes_a_trainer_computes_in_every_bit_in_f32() {
    assert_exact(Dtype::F32, 0.0);
}

#[test]
fn what_new_weights_sample_behind_old_routes_a_trainer_computes_in_every_bit_in_bf16() {
    assert_exact(Dtype::Bf16, 0.0);
}

#[test]
fn so_it_does_where_experts_that_score_too_low_are_not_replayed() {
    assert_exact(Dtype::F32, 0.7);
}

/// The same comparison where it has to find something: engine and trainer replay alike, or not at all.
#[test]
fn an_engine_that_replays_nothing_or_otherwise_than_the_trainer_does_not_agree() {
    let policies = Policies::of_model(MODELS[0]);
    for (replay, ratio) in [(None, 0.0), (Some(0.0), 0.7), (Some(0.7), 0.0)] {
        let (rollouts, _) = sampled(&policies, policies.cramped(Dtype::F32, replay), Held::ByTheEngine);
        let compared = compared(&policies, Dtype::F32, &rollouts, ratio);
        assert!(compared.n_unequal > compared.n_behind / 2, "{replay:?} and {ratio}: {compared:?}");
        assert_eq!(compared.n_unequal_elsewhere, 0, "what one version sampled alone");
    }
}

/// Whoever computes live finds nothing that ran on the routes of older weights, whether it comes before them or after.
#[test]
fn a_request_of_the_same_prompt_is_answered_as_if_they_were_not_there() {
    let same = |group| request(group, tokens(1, 23), 3);
    for (model, held) in
        MODELS.into_iter().flat_map(|model| [(model, Held::ByTheEngine), (model, Held::ByUs)])
    {
        let policies = Policies::of_model(model);
        let config = EngineConfig { kv_bytes: 16 << 20, ..policies.cramped(Dtype::F32, Some(0.0)) };
        let mut engine = policies.engine(config, 0);
        engine.submit(&same(0)).unwrap();
        for _ in 0..6 {
            engine.tick().unwrap();
        }
        let mut ended = Vec::new();
        let in_flight = if held == Held::ByUs { take_back(&mut engine, &mut ended) } else { Vec::new() };
        policies.refit(&mut engine, 1);
        engine.submit(&same(1)).unwrap();
        if !in_flight.is_empty() {
            for _ in 0..4 {
                engine.tick().unwrap();
            }
            engine.resume(in_flight, &how()).unwrap();
        }
        while engine.has_work() {
            engine.tick().unwrap();
        }
        take(&mut engine, &mut ended);
        let (behind, beside): (Vec<_>, Vec<_>) = ended.into_iter().partition(|rollout| rollout.group.0 == 0);
        let exact = compared(&policies, Dtype::F32, &behind, 0.0);
        assert!(exact.n_behind > 10 && exact.n_rerouted > 10, "{model}: {exact:?}");
        assert_eq!((exact.n_unequal, exact.n_unequal_elsewhere), (0, 0), "{model}: {exact:?}");

        let alone = sample(&mut policies.engine(config, 1), &[same(1)]);
        let mut beside: Vec<_> = beside.into_iter().map(Rollout::of).collect();
        beside.sort_by_key(|rollout| rollout.index);
        assert_eq!(beside, alone.rollouts, "{model}, {held:?}");
    }
}

/// A conversation that goes on under other weights, and then under the same, which find what they have computed.
#[test]
fn a_next_turn_replays_the_turns_before_it() {
    for model in MODELS {
        let policies = Policies::of_model(model);
        let config = EngineConfig { kv_bytes: 16 << 20, ..policies.cramped(Dtype::F32, Some(0.0)) };
        let mut engine = policies.engine(config, 0);
        engine.submit(&request(0, tokens(1, 9), 1)).unwrap();
        let mut ended = Vec::new();
        for turn in 0..4 {
            while engine.has_work() {
                engine.tick().unwrap();
            }
            take(&mut engine, &mut ended);
            let rollout = ended.pop().unwrap();
            let exact = compared(&policies, Dtype::F32, std::slice::from_ref(&rollout), 0.0);
            assert_eq!((exact.n_unequal, exact.n_unequal_elsewhere), (0, 0), "{model}, {turn}: {exact:?}");
            assert!((exact.n_behind > 0) == (turn > 0) && (exact.n_rerouted > 0) == (turn > 0), "{exact:?}");
            if turn % 2 == 0 {
                policies.refit(&mut engine, turn / 2 + 1);
            }
            let hits = engine.stats().hit_tokens;
            engine.next_turn(rollout, &tokens(7, 5), &how()).unwrap();
            engine.tick().unwrap();
            let n_found = engine.stats().hit_tokens - hits;
            assert_eq!(n_found > 0, turn % 2 == 1, "{n_found} tokens of what ran before");
        }
    }
}

#[test]
fn routes_that_no_router_chose_are_refused_where_they_would_be_replayed() {
    let policies = Policies::of_model(MODELS[0]);
    let mut rollouts = [None, Some(0.0)].map(|replay| {
        let mut engine = policies.engine(policies.cramped(Dtype::F32, replay), 0);
        engine.submit(&request(0, tokens(1, 5), 1)).unwrap();
        engine.tick().unwrap();
        engine.tick().unwrap();
        let mut rollout = take_back(&mut engine, &mut Vec::new()).pop().unwrap();
        let dims = policies.checkpoint.config().route_dims();
        let mut zeros = RouteRows::with_capacity(dims, 6);
        zeros.append(&vec![0; 6 * dims.row_bytes()]);
        rollout.routes = Some(zeros);
        (engine, rollout)
    });
    let [(live, of_live), (replaying, of_replaying)] = &mut rollouts;
    let returned = replaying.resume(vec![of_replaying.clone()], &how()).unwrap_err();
    assert!(matches!(&returned.error, EngineError::ReplayRoutes(_)), "{}", returned.error);
    assert_eq!((returned.rollouts.len(), replaying.n_open_requests()), (1, 0));
    let finish = FinishReason::Length;
    let ended = Finished { finish, ..of_replaying.clone() };
    assert!(replaying.next_turn(ended, &tokens(2, 3), &how()).is_err());
    assert!(live.resume(vec![of_live.clone()], &how()).is_ok(), "nobody looks at them");
}

/// What is replayed is shared as what the router chooses is: the prompt of a group in flight is computed again once.
#[test]
fn replay_computes_no_more_than_the_router_would() {
    let policies = Policies::of_model(MODELS[0]);
    let n_computed = |replay| {
        let config = policies.cramped(Dtype::F32, replay);
        let mut engine = policies.engine(EngineConfig { kv_bytes: 16 << 20, ..config }, 0);
        engine.submit(&request(0, tokens(1, 40), 8)).unwrap();
        for _ in 0..6 {
            engine.tick().unwrap();
        }
        policies.refit(&mut engine, 1);
        let before = engine.stats();
        finish(&mut engine);
        let after = engine.stats();
        (after.computed_tokens - before.computed_tokens, after.hit_tokens - before.hit_tokens)
    };

    assert_eq!((n_computed(None), n_computed(Some(0.0))), ((144, 264), (144, 264)));
    // Where experts are replaced, what ran is not what anybody has recorded, and is not found.
    assert_eq!(n_computed(Some(0.9)), (408, 0));
}

/// Tells completions apart, so that every group has an advantage.
struct Spelling;

impl Reward for Spelling {
    fn name(&self) -> &str {
        "spelling"
    }

    fn score(&self, _: &Problem, completion: &str, _: bool) -> f32 {
        (completion.bytes().map(u32::from).sum::<u32>() % 97) as f32 / 97.0
    }
}

/// Twelve groups, of which six are trained on, with room for five sequences of 14 sampled tokens.
fn recipe(dir: &Path, (dtype, in_flight, threshold): (&str, &str, f64)) -> Recipe {
    let model: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../..", MODELS[1]].iter().collect();
    let text = format!(
        "
model: {{ path: {} }}
task: {{ arithmetic: {{ digits: 2 }} }}
rollout: {{ groups: 6, group_size: 4, max_new_tokens: 20, stop_token_ids: [5, 9], temperature: 1.5, over_sampling_groups: 6, dtype: {dtype} }}
router_replay: {{ threshold: {threshold} }}
algorithm: {{ dapo: {{ clip_low: 0.2, clip_high: 0.28 }} }}
train: {{ lr: 3.0e-3, max_staleness: 4, dtype: {dtype} }}
refit: {{ in_flight: {in_flight} }}
engine: {{ max_running: 7, max_batch_tokens: 40, block_tokens: 4 }}
eval: {{ problems: 0 }}
metrics: {{ listen: null }}
run: {{ steps: 6, seed: 5, out: {} }}
",
        model.display(),
        dir.join("out").display()
    );
    Recipe::parse(&text, "in_flight.yaml").unwrap()
}

/// All of a run, and what it measures of tokens behind those of older weights.
#[test]
fn a_run_with_rollouts_in_flight_has_no_mismatch_in_any_bit() {
    for in_flight in ["continue", "abort"] {
        for (dtype, threshold) in [("f32", 0.0), ("f32", 0.9), ("bf16", 0.0)] {
            let dir = tempfile::tempdir().unwrap();
            let recipe = recipe(dir.path(), (dtype, in_flight, threshold));
            let options = RunOptions { reward: Some(Arc::new(Spelling)), ..RunOptions::default() };
            let records = run(&recipe, &options).unwrap().records;
            let of = |metric| records.iter().filter_map(|record| record.get(metric)).collect::<Vec<_>>();
            let measured = [of(metrics::K3_KL), of(metrics::ABS_DIFF_MAX)];
            assert_eq!(measured, [[0.0; 6], [0.0; 6]], "{in_flight}, {dtype}, {threshold}");
            let mixed = of(metrics::ROLLOUT_PARTIAL_RATIO);
            let n_mixed = mixed.iter().filter(|&&share| share > 0.1).count();
            assert!(n_mixed >= 2, "{in_flight}, {dtype}, {threshold}: {mixed:?} of several versions");
        }
    }
}
