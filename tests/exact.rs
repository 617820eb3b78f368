//! Exact numerics: what the rollout said of its tokens, the trainer says again, in every bit; however the engine had to
//! chop, cache, preempt, fork and abort to sample them, and on any number of threads.

mod common;
#[path = "common/packing.rs"]
mod packing;

use common::{MODELS, Rollout, SAMPLED, bits, checkpoint, engine, plain, request, sample, tokens};
use packing::Packing;
use r3_core::ids::SequenceId;
use r3_core::routes::RouteRows;
use r3_core::support::SupportRows;
use r3_engine::config::EngineConfig;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::sampler::Sampling;
use r3_engine::score::ToScore;
use r3_kernels::gemm::Dtype;
use r3_kernels::router::Routing;
use r3_model::autograd::{Policy, Precision};
use r3_model::checkpoint::Checkpoint;
use r3_train::mismatch::{Mismatch, MismatchStats};

/// Rollouts of every test: 16 prompts of 4. Some are taken back before their end.
const SEQUENCES: usize = 64;
const GROUP: u32 = 4;

/// Tokens of a tick: less than the longest prompt, so that it is cut.
const TICK_TOKENS: usize = 56;

/// Samples from a part of the vocabulary: of the 16 most likely tokens those that hold 0.9, but for the unlikely.
const TRUNCATED: Sampling = Sampling { temperature: 0.8, sample_top_k: 16, top_p: 0.9, min_p: 0.02 };

fn on_threads<R: Send>(n_threads: usize, body: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap().install(body)
}

/// An engine that has to chunk, preempt, share and fork.
fn cramped(checkpoint: &Checkpoint, dtype: Dtype) -> Engine {
    let config =
        EngineConfig { block_tokens: 4, max_batch_tokens: TICK_TOKENS, prefix_cache: true, ..plain(dtype) };
    let kv_bytes = 90 * config.block_bytes(checkpoint.config());
    engine(checkpoint, EngineConfig { kv_bytes, max_running: 24, ..config })
}

/// Prompts of 2 to 62 tokens, half of which begin alike.
fn prompt(group: u32, sampling: Sampling) -> GroupRequest {
    let shared = tokens(1, if group.is_multiple_of(2) { 9 + group } else { 0 });
    let prompt = [shared, tokens(group, 2 + 7 * (group % 6))].concat();
    let max_new_tokens = 6 + 3 * group as usize;
    GroupRequest { max_new_tokens, sampling, ..request(group.into(), prompt, GROUP) }
}

/// Samples all sequences on `n_threads` threads; each has at least one token.
fn rollouts(checkpoint: &Checkpoint, dtype: Dtype, sampling: Sampling, n_threads: usize) -> Vec<Rollout> {
    on_threads(n_threads, || {
        let mut engine = cramped(checkpoint, dtype);
        let begin = |group| engine.submit(&prompt(group, sampling)).unwrap().pop();
        let doomed: Vec<SequenceId> = (0..8).filter_map(begin).collect();
        for _ in 0..18 {
            engine.tick().unwrap();
        }
        let n_aborted = doomed.into_iter().filter(|&id| engine.abort(id)).count();
        assert!(n_aborted > 0, "all were done before they could be taken back");
        // These find what the first left in the cache.
        let later: Vec<GroupRequest> = (8..16).map(|group| prompt(group, sampling)).collect();
        let mut rollouts = sample(&mut engine, &later).rollouts;
        let stats = engine.stats();
        assert!(stats.n_preemptions > 0 && stats.hit_tokens > 0 && stats.forked_tokens > 0, "{stats:?}");
        assert_eq!(rollouts.len(), SEQUENCES);
        rollouts.retain(|rollout| !rollout.logprobs.is_empty());
        rollouts
    })
}

/// What the trainer says of the same tokens, on `n_threads` threads, by its own choice of experts or the rollout's.
fn mismatch(
    policy: &mut Policy,
    rollouts: &[Rollout],
    (temperature, replay): (f32, bool),
    n_threads: usize,
) -> (MismatchStats, usize) {
    let mut packing = Packing::new(policy.config().route_dims());
    let (mut rollout_logprobs, mut mask) = (Vec::new(), Vec::new());
    for Rollout { tokens, prompt_tokens, logprobs, routes, support, .. } in rollouts {
        packing.add(tokens, routes.as_ref().unwrap().view(), support.as_ref().map(SupportRows::view));
        rollout_logprobs.resize(rollout_logprobs.len() + prompt_tokens - 1, 0.0);
        rollout_logprobs.extend(logprobs.iter().map(|&bits| f32::from_bits(bits)));
        mask.resize(mask.len() + prompt_tokens - 1, 0.0);
        mask.resize(rollout_logprobs.len(), 1.0);
    }
    let replayed = packing.replayed();
    let mut routing = if replay { Routing::Replay { ids: &replayed, native: None } } else { Routing::Free };
    let scored = packing.scored(temperature);
    let score = || policy.logprobs_of(&packing.packed(), &mut routing, scored).unwrap();
    let output = on_threads(n_threads, score);
    let logprobs = output.logprobs.to_vec1::<f32>().unwrap();
    let pairs = bits(&logprobs).into_iter().zip(bits(&rollout_logprobs)).zip(&mask);
    let n_unequal = pairs.filter(|((policy, rollout), mask)| **mask > 0.0 && policy != rollout).count();
    let mut mismatch = Mismatch::default();
    mismatch.add(&logprobs, &rollout_logprobs, &mask);
    (mismatch.finish(), n_unequal)
}

fn trainer(checkpoint: &Checkpoint, dtype: Dtype) -> Policy {
    let policy = Policy::load(checkpoint, checkpoint.config()).unwrap();
    policy.with_precision(Precision { dtype, recompute: false })
}

/// Every pair of thread counts, with and without replay.
fn assert_exact(dtype: Dtype, sampling: Sampling) {
    for model in MODELS {
        let checkpoint = checkpoint(model);
        let mut policy = trainer(&checkpoint, dtype);
        let sampled = rollouts(&checkpoint, dtype, sampling, 1);
        assert_eq!(sampled, rollouts(&checkpoint, dtype, sampling, 2), "{model}: threads of the engine");
        for (replay, n_threads) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
            let how = (sampling.temperature, replay);
            let (stats, n_unequal) = mismatch(&mut policy, &sampled, how, n_threads);
            assert!(stats.n_tokens > 1000, "{stats:?}");
            let exact = (stats.k3_kl, stats.abs_diff_max, stats.extreme_frac_tau2, n_unequal);
            assert_eq!(exact, (0.0, 0.0, 0.0, 0), "{model}, {n_threads} threads, replay {replay}");
        }
    }
}

#[test]
fn trainer_and_rollout_agree_in_every_bit_in_f32() {
    assert_exact(Dtype::F32, SAMPLED);
}

#[test]
fn trainer_and_rollout_agree_in_every_bit_in_bf16() {
    assert_exact(Dtype::Bf16, SAMPLED);
}

#[test]
fn trainer_and_rollout_agree_in_every_bit_of_truncated_draws_in_f32() {
    assert_exact(Dtype::F32, TRUNCATED);
}

#[test]
fn trainer_and_rollout_agree_in_every_bit_of_truncated_draws_in_bf16() {
    assert_exact(Dtype::Bf16, TRUNCATED);
}

/// What [`Engine::score`] says of a rollout, in chunks, on the rollout's experts or the router's.
fn assert_scored(dtype: Dtype) {
    for model in MODELS {
        let checkpoint = checkpoint(model);
        let mut engine = cramped(&checkpoint, dtype);
        for Rollout { tokens, prompt_tokens, logprobs, routes, support, .. } in
            rollouts(&checkpoint, dtype, TRUNCATED, 1)
        {
            let support = support.as_ref().map(SupportRows::view);
            for routes in [None, routes.as_ref().map(RouteRows::view)] {
                let temperature = TRUNCATED.temperature;
                let sequence = ToScore { routes, temperature, support, ..ToScore::new(&tokens) };
                let scored = engine.score(&sequence).unwrap();
                assert_eq!(bits(&scored.logprobs[prompt_tokens - 1..]), logprobs, "{model}");
            }
        }
    }
}

#[test]
fn the_engine_scores_truncated_draws_to_the_bit_in_f32() {
    assert_scored(Dtype::F32);
}

#[test]
fn the_engine_scores_truncated_draws_to_the_bit_in_bf16() {
    assert_scored(Dtype::Bf16);
}

/// Each cut of its own, so that none is carried by another.
#[test]
fn every_cut_agrees_in_every_bit() {
    let uncut = Sampling { temperature: 1.3, ..SAMPLED };
    let checkpoint = checkpoint(MODELS[1]);
    let mut policy = trainer(&checkpoint, Dtype::F32);
    for sampling in [
        Sampling { sample_top_k: 5, ..uncut },
        Sampling { sample_top_k: 10_000, ..uncut },
        Sampling { top_p: 0.7, ..uncut },
        Sampling { top_p: 1e-6, ..uncut },
        Sampling { min_p: 0.1, ..uncut },
    ] {
        let sampled = rollouts(&checkpoint, Dtype::F32, sampling, 1);
        let (stats, n_unequal) = mismatch(&mut policy, &sampled, (1.3, true), 1);
        assert!(stats.n_tokens > 1000, "{stats:?}");
        assert_eq!((stats.k3_kl, stats.abs_diff_max, n_unequal), (0.0, 0.0, 0), "{sampling:?}");
        let had_no_choice = sampled.iter().all(|rollout| rollout.logprobs.iter().all(|&bits| bits == 0));
        assert_eq!(had_no_choice, sampling.top_p < 0.5, "{sampling:?}");
    }
}

/// What the sets are for: over all of the vocabulary the same tokens are less likely, by the mass that was cut off.
#[test]
fn a_truncated_rollout_scored_over_the_whole_vocabulary_does_not_agree() {
    let checkpoint = checkpoint(MODELS[1]);
    let mut policy = trainer(&checkpoint, Dtype::F32);
    let mut sampled = rollouts(&checkpoint, Dtype::F32, TRUNCATED, 1);
    sampled.iter_mut().for_each(|rollout| rollout.support = None);
    let (stats, n_unequal) = mismatch(&mut policy, &sampled, (TRUNCATED.temperature, true), 1);
    assert!(stats.rollout_is_mean < 1.0 && stats.abs_diff_max > 0.01, "{stats:?}");
    assert!(n_unequal > stats.n_tokens / 2, "{n_unequal} of {stats:?}");
}

/// The same comparison where it has to find something.
#[test]
fn a_bf16_rollout_and_an_f32_trainer_do_not_agree() {
    let checkpoint = checkpoint(MODELS[1]);
    let sampled = rollouts(&checkpoint, Dtype::Bf16, SAMPLED, 1);
    let mut policy = trainer(&checkpoint, Dtype::F32);
    let (stats, n_unequal) = mismatch(&mut policy, &sampled, (1.0, true), 1);
    assert!(stats.k3_kl > 0.0 && stats.abs_diff_max > 1e-4, "{stats:?}");
    assert!(n_unequal > stats.n_tokens / 2, "{n_unequal} of {stats:?}");
}
