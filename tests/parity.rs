//! How a token is computed never shows in what is computed: chunks, blocks, caches, neighbours, preemption, threads,
//! route capture, and which side computes it. All comparisons are bitwise.

mod common;
#[path = "common/packing.rs"]
mod packing;

use std::sync::Arc;

use common::{MODELS, Rollout, SAMPLED, bits, checkpoint, engine, finish, plain, request, sample, tokens};
use packing::Packing;
use r3_core::ids::{GroupId, TokenId};
use r3_core::routes::RouteRows;
use r3_core::support::SupportRows;
use r3_engine::config::EngineConfig;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::sampler::Sampling;
use r3_engine::score::ToScore;
use r3_kernels::gemm::Dtype;
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::Routing;
use r3_model::autograd::{Policy, Precision};
use r3_model::checkpoint::Checkpoint;

/// Samples from a part of the vocabulary: of the 9 most likely tokens those that hold 0.97, but for the unlikely.
const TRUNCATED: Sampling = Sampling { temperature: 1.2, sample_top_k: 9, top_p: 0.97, min_p: 0.01 };

/// Tokens of the longest sequence of [`converse`]: both turns' prompts and completions.
const LONGEST: usize = 22 + 6 + 12 + 5 + 12;

/// Four conversations that begin alike, each sampled three times; then each goes on from one of its completions.
fn converse(engine: &mut Engine) -> Vec<Rollout> {
    let first: Vec<GroupRequest> = (0..4)
        .map(|group| request(group.into(), [tokens(1, 22), tokens(group, 3 + group)].concat(), 3))
        .collect();
    let mut rollouts = sample(engine, &first).rollouts;
    let second: Vec<GroupRequest> = (0..4)
        .map(|group| {
            let said = &rollouts[3 * group as usize + 1].tokens;
            request(u64::from(group) + 4, [said.clone(), tokens(group + 4, 5)].concat(), 3)
        })
        .collect();
    rollouts.extend(sample(engine, &second).rollouts);
    rollouts
}

/// Checks routes and logprobs of `rollouts` against one prefill of each on its own.
fn assert_plain_prefill(rollouts: &[Rollout], checkpoint: &Checkpoint, dtype: Dtype) {
    let mut fresh = engine(checkpoint, plain(dtype));
    for rollout in rollouts {
        let scored = fresh.score(&ToScore::new(&rollout.tokens)).unwrap();
        let (group, index) = (rollout.group, rollout.index);
        assert_eq!(rollout.routes.as_ref(), Some(&scored.live_routes), "routes of {group}/{index}");
        let scored = bits(&scored.logprobs[rollout.prompt_tokens - 1..]);
        assert_eq!(rollout.logprobs, scored, "logprobs of {group}/{index}");
    }
}

/// What [`converse`] gives in one chunk without a cache, checked against plain prefills.
fn reference(checkpoint: &Checkpoint, dtype: Dtype) -> Vec<Rollout> {
    let rollouts = converse(&mut engine(checkpoint, plain(dtype)));
    assert_eq!(rollouts.len(), 24);
    assert_plain_prefill(&rollouts, checkpoint, dtype);
    rollouts
}

fn with_blocks(config: EngineConfig, checkpoint: &Checkpoint, n_blocks: usize) -> EngineConfig {
    EngineConfig { kv_bytes: n_blocks as u64 * config.block_bytes(checkpoint.config()), ..config }
}

/// Every block size with every token budget, through prefix hits and forks.
fn assert_chunks_do_not_show(dtype: Dtype) {
    for model in MODELS {
        let checkpoint = checkpoint(model);
        let expected = reference(&checkpoint, dtype);
        for block_tokens in [1, 4, 16] {
            for max_batch_tokens in [1, 2, 3, 5, 7] {
                let config =
                    EngineConfig { block_tokens, max_batch_tokens, prefix_cache: true, ..plain(dtype) };
                let mut engine = engine(&checkpoint, config);
                let rollouts = converse(&mut engine);
                assert_eq!(
                    rollouts, expected,
                    "{model}: blocks of {block_tokens}, {max_batch_tokens} a tick"
                );
                let stats = engine.stats();
                assert!(stats.hit_tokens > 0 && stats.forked_tokens > 0, "{stats:?}");
            }
        }
    }
}

/// Every block size with a KV cache that holds little more than one sequence.
fn assert_preemption_does_not_show(dtype: Dtype) {
    for model in MODELS {
        let checkpoint = checkpoint(model);
        let expected = reference(&checkpoint, dtype);
        for block_tokens in [1, 4, 16] {
            for prefix_cache in [true, false] {
                let config = EngineConfig { block_tokens, max_batch_tokens: 5, prefix_cache, ..plain(dtype) };
                let n_blocks = LONGEST.div_ceil(block_tokens) + 1;
                let mut engine = engine(&checkpoint, with_blocks(config, &checkpoint, n_blocks));
                let rollouts = converse(&mut engine);
                assert_eq!(rollouts, expected, "{model}: blocks of {block_tokens}, cache {prefix_cache}");
                assert!(engine.stats().n_preemptions > 0, "{:?}", engine.stats());
            }
        }
    }
}

#[test]
fn prefix_hits_chunks_forks_and_neighbours_do_not_show_in_f32() {
    assert_chunks_do_not_show(Dtype::F32);
}

#[test]
fn prefix_hits_chunks_forks_and_neighbours_do_not_show_in_bf16() {
    assert_chunks_do_not_show(Dtype::Bf16);
}

#[test]
fn preemption_does_not_show_in_f32() {
    assert_preemption_does_not_show(Dtype::F32);
}

#[test]
fn preemption_does_not_show_in_bf16() {
    assert_preemption_does_not_show(Dtype::Bf16);
}

#[test]
fn a_sampled_sequence_has_a_route_row_less_than_tokens_and_a_prefilled_one_as_many() {
    for model in MODELS {
        let mut engine = engine(&checkpoint(model), plain(Dtype::F32));
        for n_tokens in [1, 2, 17] {
            let prefill = GroupRequest { max_new_tokens: 0, ..request(0, tokens(1, n_tokens), 1) };
            let one = GroupRequest { max_new_tokens: 1, ..request(1, tokens(1, n_tokens), 1) };
            let rollouts = sample(&mut engine, &[prefill, one, request(2, tokens(1, n_tokens), 2)]).rollouts;
            let rows = |rollout: &Rollout| rollout.routes.as_ref().map(RouteRows::rows);
            assert_eq!(rollouts[0].tokens.len(), n_tokens as usize);
            assert_eq!(rows(&rollouts[0]), Some(n_tokens as usize));
            for sampled in &rollouts[1..] {
                assert!(sampled.tokens.len() > n_tokens as usize);
                assert_eq!(rows(sampled), Some(sampled.tokens.len() - 1));
            }
        }
    }
}

#[test]
fn without_capture_no_route_memory_is_held_and_every_tick_and_sample_is_the_same() {
    for (model, dtype) in MODELS.into_iter().zip([Dtype::F32, Dtype::Bf16, Dtype::F32]) {
        let checkpoint = checkpoint(model);
        let on = EngineConfig { block_tokens: 4, max_batch_tokens: 7, prefix_cache: true, ..plain(dtype) };
        let off = EngineConfig { capture_routes: false, ..on };
        assert!(off.block_bytes(checkpoint.config()) < on.block_bytes(checkpoint.config()));
        // As many blocks on both sides, few enough for preemptions.
        let (on, off) = (with_blocks(on, &checkpoint, 13), with_blocks(off, &checkpoint, 13));
        let (mut on, mut off) = (engine(&checkpoint, on), engine(&checkpoint, off));
        for group in 0..4 {
            let request = request(group.into(), [tokens(1, 22), tokens(group, 3 + group)].concat(), 3);
            let unrouted = GroupRequest { return_routes: None, ..request.clone() };
            assert_eq!(on.submit(&request).unwrap(), off.submit(&unrouted).unwrap());
        }
        let mut n_finished = 0;
        while on.has_work() {
            assert_eq!(on.tick().unwrap(), off.tick().unwrap());
            let mut stats = on.stats();
            assert!(std::mem::take(&mut stats.route_bytes) > 0);
            assert_eq!(stats, off.stats());
            while let Some(with) = on.take_finished() {
                let without = off.take_finished().unwrap();
                assert_eq!((with.sequence, &with.tokens), (without.sequence, &without.tokens));
                assert_eq!(bits(&with.rollout_logprobs), bits(&without.rollout_logprobs));
                assert!(with.routes.is_some() && without.routes.is_none());
                n_finished += 1;
            }
        }
        assert!(!off.has_work() && off.take_finished().is_none());
        assert_eq!(n_finished, 12);
        assert!(on.stats().n_preemptions > 0);
    }
}

/// Rollouts of 1 to 34 prompt tokens, some of which stop early, and the packed batch of them.
struct Trained {
    packing: Packing,
    rollouts: Vec<Rollout>,
}

impl Trained {
    fn new(checkpoint: &Checkpoint, sampling: Sampling, dtype: Dtype) -> Self {
        let mut engine = engine(checkpoint, plain(dtype));
        let stop_tokens = Arc::from([TokenId(1)]);
        let requests: Vec<GroupRequest> = (0..12)
            .map(|group| GroupRequest {
                sampling,
                stop_tokens: Arc::clone(&stop_tokens),
                ..request(group.into(), tokens(group, 1 + 3 * group), 2)
            })
            .collect();
        let rollouts = sample(&mut engine, &requests).rollouts;
        let mut packing = Packing::new(checkpoint.config().route_dims());
        for rollout in &rollouts {
            packing.add(
                &rollout.tokens,
                rollout.routes.as_ref().unwrap().view(),
                rollout.support.as_ref().map(SupportRows::view),
            );
        }
        Self { packing, rollouts }
    }

    /// Logprobs of the completions, out of one per input.
    fn of_completions(&self, logprobs: &[f32]) -> Vec<Vec<u32>> {
        let mut first = 0;
        let completion = |rollout: &Rollout| {
            let (start, end) = (first + rollout.prompt_tokens - 1, first + rollout.tokens.len() - 1);
            first = end;
            bits(&logprobs[start..end])
        };
        self.rollouts.iter().map(completion).collect()
    }

    fn policy_logprobs(&self, policy: &mut Policy, routing: &mut Routing<'_>, temperature: f32) -> Vec<f32> {
        let scored = self.packing.scored(temperature);
        let output = policy.logprobs_of(&self.packing.packed(), routing, scored).unwrap();
        output.logprobs.to_vec1().unwrap()
    }
}

#[test]
fn at_equal_f32_weights_trainer_and_rollout_agree_in_every_bit() {
    the_two_sides_agree_in(Dtype::F32);
}

#[test]
fn at_equal_bf16_weights_trainer_and_rollout_agree_in_every_bit() {
    the_two_sides_agree_in(Dtype::Bf16);
}

fn the_two_sides_agree_in(dtype: Dtype) {
    for model in MODELS {
        let checkpoint = checkpoint(model);
        let precision = Precision { dtype, recompute: false };
        let policy = Policy::load(&checkpoint, checkpoint.config()).unwrap();
        let mut policy = policy.with_precision(precision);
        for sampling in [SAMPLED, Sampling { temperature: 0.7, ..SAMPLED }, TRUNCATED] {
            let trained = Trained::new(&checkpoint, sampling, dtype);
            let sampled: Vec<Vec<u32>> = trained.rollouts.iter().map(|r| r.logprobs.clone()).collect();
            let replayed = trained.packing.replayed();
            let dims = checkpoint.config().route_dims();
            let mut native = RouteRecord::new(dims.n_layers, checkpoint.config().router());
            native.start(trained.packing.packed().tokens.len());
            let mut replay = Routing::Replay { ids: &replayed, native: Some(&mut native) };
            for routing in [&mut Routing::Free, &mut replay] {
                let logprobs = trained.policy_logprobs(&mut policy, routing, sampling.temperature);
                assert_eq!(trained.of_completions(&logprobs), sampled, "{model}: {sampling:?}");
            }
            let native: Vec<u16> = (0..dims.n_layers).flat_map(|layer| native.layer(layer)).collect();
            assert_eq!(native, replayed, "{model}: the trainer's own routes");
        }
    }
}

#[test]
fn a_sample_depends_on_seed_group_and_index_but_not_on_the_rest_of_the_batch() {
    for (model, dtype) in MODELS.into_iter().zip([Dtype::F32, Dtype::Bf16, Dtype::F32]) {
        let checkpoint = checkpoint(model);
        let config = EngineConfig { max_batch_tokens: 64, prefix_cache: true, ..plain(dtype) };
        let sampling = if dtype == Dtype::F32 { SAMPLED } else { TRUNCATED };
        let watched = GroupRequest { max_new_tokens: 24, sampling, ..request(70, tokens(9, 20), 1) };
        let alone = |request: &GroupRequest| {
            let request = std::slice::from_ref(request);
            sample(&mut engine(&checkpoint, config), request).rollouts.swap_remove(0)
        };
        let expected = alone(&watched);

        let mut crowd: Vec<GroupRequest> =
            (0..20).map(|group| request(group.into(), tokens(group, 5 + group), 3)).collect();
        crowd.insert(10, GroupRequest { size: 1, ..watched.clone() });
        let rollouts = sample(&mut engine(&checkpoint, config), &crowd).rollouts;
        assert_eq!(rollouts.len(), 61);
        assert_eq!(rollouts.last(), Some(&expected), "{model}");

        let others = [
            GroupRequest { seed: 8, ..watched.clone() },
            GroupRequest { group: GroupId(71), ..watched.clone() },
        ];
        for other in &others {
            assert_ne!(alone(other).tokens, expected.tokens, "{model}");
        }
        let group = [GroupRequest { size: 2, ..watched }];
        let rollouts = sample(&mut engine(&checkpoint, config), &group).rollouts;
        assert_eq!(rollouts[0], expected, "{model}");
        assert_ne!(rollouts[1].tokens, expected.tokens, "{model}");
    }
}

/// Rollouts, logprobs and every gradient, from prompts long enough to be worth splitting.
fn both_sides(checkpoint: &Checkpoint) -> (Vec<Rollout>, Vec<u32>, Vec<Vec<u32>>) {
    let mut engine = engine(checkpoint, plain(Dtype::Bf16));
    let requests: Vec<GroupRequest> =
        (0..3).map(|group| request(group.into(), tokens(group, 100 + group), 2)).collect();
    for request in &requests {
        engine.submit(request).unwrap();
    }
    let rollouts = finish(&mut engine).rollouts;
    let mut packing = Packing::new(checkpoint.config().route_dims());
    for rollout in &rollouts {
        packing.add(
            &rollout.tokens,
            rollout.routes.as_ref().unwrap().view(),
            rollout.support.as_ref().map(SupportRows::view),
        );
    }
    let mut policy = Policy::load(checkpoint, checkpoint.config()).unwrap();
    let replayed = packing.replayed();
    let mut routing = Routing::Replay { ids: &replayed, native: None };
    let output = policy.logprobs(&packing.packed(), &mut routing, 1.0).unwrap();
    let mut gradients = policy.zero_gradients();
    policy
        .backward(&output, &output.logprobs.sum_all().unwrap().backward().unwrap(), &mut gradients)
        .unwrap();
    let logprobs = bits(&output.logprobs.to_vec1().unwrap());
    (rollouts, logprobs, gradients.into_tensors().iter().map(|gradient| bits(gradient)).collect())
}

/// Routes are addressed by the engine they are of, never by how many were built before it.
#[test]
fn models_of_one_process_do_not_know_of_each_other() {
    let checkpoints = MODELS.map(checkpoint);
    let requests = |model: u32| [request(0, tokens(model, 9), 2), request(1, tokens(model + 2, 5), 1)];
    let alone = |model: usize| {
        let mut engine = engine(&checkpoints[model], plain(Dtype::F32));
        sample(&mut engine, &requests(model as u32)).rollouts
    };
    let expected = [alone(0), alone(1), alone(0)];
    // Both models, one of them twice, and the twin built while the others are at work.
    let mut engines: Vec<Engine> =
        (0..2).map(|model| engine(&checkpoints[model], plain(Dtype::F32))).collect();
    for (model, engine) in engines.iter_mut().enumerate() {
        requests(model as u32).iter().for_each(|request| drop(engine.submit(request).unwrap()));
        engine.tick().unwrap();
    }
    engines.push(engine(&checkpoints[0], plain(Dtype::F32)));
    requests(0).iter().for_each(|request| drop(engines[2].submit(request).unwrap()));
    while engines.iter().any(Engine::has_work) {
        for engine in engines.iter_mut().filter(|engine| engine.has_work()) {
            engine.tick().unwrap();
        }
    }
    let found: Vec<_> = engines.iter_mut().map(|engine| finish(engine).rollouts).collect();
    assert_eq!(found, expected);
    assert_ne!(found[0], found[1]);
}

#[test]
fn the_number_of_threads_does_not_show() {
    let checkpoint = checkpoint(MODELS[0]);
    let on = |n_threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
        pool.install(|| both_sides(&checkpoint))
    };
    assert!(on(1) == on(2), "rollouts, logprobs or gradients differ");
}
