//! A refit loads all of the new weights or keeps all of the old ones, and nothing computed under other weights is ever
//! found again. All comparisons are bitwise.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};

use common::{MODELS, Rollout, Sampled, checkpoint, engine, finish, plain, request, sample, tokens};
use r3_core::ids::PolicyVersion;
use r3_core::rollout::FinishReason;
use r3_engine::config::EngineConfig;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::error::EngineError;
use r3_engine::resume::Continuation;
use r3_kernels::gemm::Dtype;
use r3_model::autograd::Policy;
use r3_model::checkpoint::Checkpoint;
use r3_model::error::ModelError;
use r3_model::source::{TensorSource, canonical_tensors, hash_tensors};
use r3_scheduler::request::Finished;

/// A source that a test meddles with: `meddle(read, name, values)` sees every read, numbered from 0.
struct Meddled<'a, F> {
    source: &'a dyn TensorSource,
    n_reads: AtomicUsize,
    meddle: F,
}

impl<'a, F: Fn(usize, &str, &mut Vec<f32>) -> Result<(), ModelError> + Sync> Meddled<'a, F> {
    fn new(source: &'a dyn TensorSource, meddle: F) -> Self {
        Self { source, n_reads: AtomicUsize::new(0), meddle }
    }
}

impl<F: Fn(usize, &str, &mut Vec<f32>) -> Result<(), ModelError> + Sync> TensorSource for Meddled<'_, F> {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        self.source.read(name, out)?;
        let read = self.n_reads.fetch_add(1, Ordering::Relaxed);
        (self.meddle)(read, name, out)
    }
}

/// `source` with every value of the tensors that `name` picks multiplied by `factor`.
fn scaled<'a>(
    source: &'a dyn TensorSource,
    name: impl Fn(&str) -> bool + Sync + 'a,
    factor: f32,
) -> impl TensorSource + 'a {
    Meddled::new(source, move |_, tensor, values| {
        if name(tensor) {
            values.iter_mut().for_each(|value| *value *= factor);
        }
        Ok(())
    })
}

fn cached(dtype: Dtype) -> EngineConfig {
    EngineConfig { block_tokens: 4, prefix_cache: true, ..plain(dtype) }
}

fn cold(checkpoint: &Checkpoint, source: &dyn TensorSource, dtype: Dtype) -> Engine {
    Engine::new(cached(dtype), checkpoint.config(), source, PolicyVersion(0)).unwrap()
}

fn requests() -> [GroupRequest; 2] {
    [request(0, tokens(1, 18), 2), request(1, [tokens(1, 12), tokens(2, 7)].concat(), 2)]
}

#[test]
fn a_refit_with_the_same_weights_changes_no_bit_and_forgets_the_cache() {
    for (model, dtype) in MODELS.into_iter().zip([Dtype::F32, Dtype::Bf16, Dtype::F32]) {
        let checkpoint = checkpoint(model);
        let mut engine = engine(&checkpoint, cached(dtype));
        let before = sample(&mut engine, &requests());
        let warm = sample(&mut engine, &requests());
        assert!(warm.cached_tokens > 0);

        let epoch = engine.epoch();
        let report = engine.refit(&checkpoint, PolicyVersion(1)).unwrap();
        assert_eq!((report.changed, report.version), (0, PolicyVersion(1)));
        assert!(report.epoch > epoch && report.epoch == engine.epoch());
        let hits = engine.stats().hit_tokens;
        let after = sample(&mut engine, &requests()[..1]);
        assert_eq!((after.cached_tokens, engine.stats().hit_tokens), (0, hits));
        assert_eq!(after.rollouts, before.rollouts[..2]);
        assert_eq!(warm.rollouts, before.rollouts);
    }
}

#[test]
fn one_changed_expert_tensor_is_audited_and_served_as_a_cold_engine_would() {
    for (model, dtype) in MODELS.into_iter().zip([Dtype::F32, Dtype::Bf16, Dtype::F32]) {
        let checkpoint = checkpoint(model);
        let mut engine = engine(&checkpoint, cached(dtype));
        let before = sample(&mut engine, &requests()).rollouts;
        let old_hashes = engine.hashes().to_vec();

        let name = "model.layers.1.mlp.experts.down_proj";
        let trained = scaled(&checkpoint, |tensor| tensor == name, 1.5);
        let report = engine.refit(&trained, PolicyVersion(1)).unwrap();
        let expected = hash_tensors(checkpoint.config(), &trained, dtype).unwrap();
        assert_eq!(expected.len(), canonical_tensors(checkpoint.config()).len());
        assert_eq!((&report.hashes, engine.hashes()), (&expected, &expected[..]));
        assert_eq!(report.changed, 1);
        let changed: Vec<&str> = old_hashes
            .iter()
            .zip(&expected)
            .filter(|(old, new)| old != new)
            .map(|(_, new)| new.name.as_str())
            .collect();
        assert_eq!(changed, [name]);

        let after = sample(&mut engine, &requests());
        let expected = sample(&mut cold(&checkpoint, &trained, dtype), &requests());
        assert_eq!(after.rollouts[0].logprobs[0], expected.rollouts[0].logprobs[0], "{model}");
        assert_eq!(after.rollouts, expected.rollouts, "{model}");
        assert_ne!(after.rollouts, before, "{model}: the change is large enough to show");
    }
}

/// Refits `engine` from a meddled source, expects a refusal, and checks that nothing of the engine moved.
fn refused(engine: &mut Engine, expected: &Sampled, trained: &dyn TensorSource) -> EngineError {
    let (epoch, version, hashes) = (engine.epoch(), engine.version(), engine.hashes().to_vec());
    let error = engine.refit(trained, PolicyVersion(9)).expect_err("a broken source is refused");
    assert_eq!((engine.epoch(), engine.version(), engine.hashes()), (epoch, version, &hashes[..]));
    let after = sample(engine, &requests());
    assert_eq!(after.rollouts, expected.rollouts);
    // The cache is the old weights' too, so it is still good.
    assert_eq!(after.cached_tokens, expected.cached_tokens);
    error
}

/// A served engine with its cache warm, and what it answers.
fn serving(checkpoint: &Checkpoint) -> (Engine, Sampled) {
    let mut engine = engine(checkpoint, cached(Dtype::F32));
    sample(&mut engine, &requests());
    let expected = sample(&mut engine, &requests());
    assert!(expected.cached_tokens > 0);
    (engine, expected)
}

#[test]
fn a_source_that_fails_at_any_read_leaves_the_old_weights_served() {
    let checkpoint = checkpoint(MODELS[0]);
    let (mut engine, expected) = serving(&checkpoint);
    // Other weights than those served, so that a half-done refit would show.
    let other = scaled(&checkpoint, |name| name.ends_with("proj.weight"), 1.25);
    let n_tensors = canonical_tensors(checkpoint.config()).len();
    // Every tensor is read twice: to be hashed, and to be loaded.
    for failing in 0..2 * n_tensors {
        let trained = Meddled::new(&other, |read, name, _| match read == failing {
            true => Err(ModelError::NoSuchTensor { name: name.to_owned() }),
            false => Ok(()),
        });
        let error = refused(&mut engine, &expected, &trained);
        assert!(matches!(error, EngineError::Model(ModelError::NoSuchTensor { .. })), "{failing}: {error}");
    }
    // With no failure, the same source is taken.
    let trained = Meddled::new(&other, |_, _, _| Ok(()));
    engine.refit(&trained, PolicyVersion(1)).unwrap();
    assert_eq!(trained.n_reads.load(Ordering::Relaxed), 2 * n_tensors);
    assert_ne!(sample(&mut engine, &requests()).rollouts, expected.rollouts);
}

#[test]
fn a_value_that_is_not_finite_in_any_tensor_leaves_the_old_weights_served() {
    let checkpoint = checkpoint(MODELS[0]);
    let (mut engine, expected) = serving(&checkpoint);
    let other = scaled(&checkpoint, |name| name.ends_with("proj.weight"), 1.25);
    let names: Vec<String> =
        canonical_tensors(checkpoint.config()).into_iter().map(|(name, _)| name).collect();
    for (broken, bad) in names.iter().zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().cycle()) {
        let trained = Meddled::new(&other, |_, name, values| {
            if name == broken {
                *values.last_mut().unwrap() = bad;
            }
            Ok(())
        });
        let error = refused(&mut engine, &expected, &trained);
        let EngineError::Model(ModelError::NotFinite { name, .. }) = &error else {
            panic!("{broken}: {error}")
        };
        assert_eq!(name, broken);
    }
}

#[test]
fn a_trainers_weight_that_is_not_finite_is_refused() {
    let checkpoint = checkpoint(MODELS[0]);
    let (mut engine, expected) = serving(&checkpoint);
    let names = ["model.layers.1.self_attn.k_proj.weight", "model.layers.2.mlp.experts.down_proj"];
    for broken in [&names[..], &names[1..]] {
        let mut policy = Policy::load(&checkpoint, checkpoint.config()).unwrap();
        policy.change(|vars| {
            for (_, var) in vars.iter().filter(|(name, _)| broken.contains(&name.as_str())) {
                var.set(&(var.as_tensor() * f64::INFINITY).unwrap()).unwrap();
            }
        });
        let error = refused(&mut engine, &expected, &policy.shared_weights());
        let EngineError::Model(ModelError::NotFinite { name, index: 0, .. }) = &error else {
            panic!("{broken:?}: {error}")
        };
        assert_eq!(name, broken[0]);
    }
}

#[test]
fn weights_that_change_while_they_are_read_fail_the_audit() {
    let checkpoint = checkpoint(MODELS[0]);
    let (mut engine, expected) = serving(&checkpoint);
    let n_tensors = canonical_tensors(checkpoint.config()).len();
    for moving in ["model.embed_tokens.weight", "model.layers.2.mlp.gate.weight", "model.norm.weight"] {
        let trained = Meddled::new(&checkpoint, |read, name, values| {
            if name == moving && read >= n_tensors {
                values[0] += 0.5;
            }
            Ok(())
        });
        let error = refused(&mut engine, &expected, &trained);
        let EngineError::Audit { differing, tensors, first } = &error else { panic!("{moving}: {error}") };
        assert_eq!((*differing, *tensors, first.as_str()), (1, n_tensors, moving));
    }
}

#[test]
fn a_refit_that_fails_does_not_disturb_what_runs() {
    let checkpoint = checkpoint(MODELS[0]);
    let expected = sample(&mut engine(&checkpoint, cached(Dtype::F32)), &requests());
    let mut engine = engine(&checkpoint, cached(Dtype::F32));
    for request in requests() {
        engine.submit(&request).unwrap();
    }
    let broken = Meddled::new(&checkpoint, |read, _, values: &mut Vec<f32>| {
        values.iter_mut().for_each(|value| *value *= if read > 20 { f32::NAN } else { 1.25 });
        Ok(())
    });
    let mut n_refused = 0;
    while engine.has_work() {
        engine.tick().unwrap();
        let before = (engine.stats(), engine.epoch());
        broken.n_reads.store(0, Ordering::Relaxed);
        engine.refit(&broken, PolicyVersion(1)).expect_err("a weight is not a number");
        assert_eq!(
            (engine.stats(), engine.epoch(), engine.version()),
            (before.0, before.1, PolicyVersion(0))
        );
        n_refused += 1;
    }
    assert_eq!(finish(&mut engine).rollouts, expected.rollouts);
    assert!(n_refused >= 11);
}

/// Computing KV again, under the weights it was computed with, is no event: neither for a refit in flight nor for an
/// abort from which the rollouts are resumed.
#[test]
fn what_goes_on_under_the_same_weights_samples_what_it_would_have() {
    for (model, dtype) in MODELS.into_iter().zip([Dtype::F32, Dtype::Bf16, Dtype::F32]) {
        let checkpoint = checkpoint(model);
        let config = EngineConfig { max_batch_tokens: 64, ..cached(dtype) };
        let expected = sample(&mut engine(&checkpoint, config), &requests());
        let (mut refitted, mut aborted) = (engine(&checkpoint, config), engine(&checkpoint, config));
        for request in requests() {
            refitted.submit(&request).unwrap();
            aborted.submit(&request).unwrap();
        }
        let mut rollouts = Vec::new();
        let mut n_resumed = 0;
        for tick in 1.. {
            if !refitted.has_work() && !aborted.has_work() {
                break;
            }
            refitted.tick().unwrap();
            aborted.tick().unwrap();
            if tick % 3 == 0 {
                refitted.refit(&checkpoint, PolicyVersion(tick)).unwrap();
                n_resumed += abort_and_resume(&mut aborted, &mut rollouts);
            }
        }
        assert_eq!(finish(&mut refitted).rollouts, expected.rollouts, "{model}");
        rollouts.extend(finish(&mut aborted).rollouts);
        rollouts.sort_by_key(|rollout| (rollout.group, rollout.index));
        assert_eq!(rollouts, expected.rollouts, "{model}");
        assert!(n_resumed > 8 && refitted.stats().n_retractions > 8);
    }
}

/// Takes everything back and goes on with it; what had ended goes to `ended`. Returns how many were resumed.
fn abort_and_resume(engine: &mut Engine, ended: &mut Vec<Rollout>) -> usize {
    engine.abort_all();
    let mut groups: [Vec<Finished>; 2] = Default::default();
    while let Some(finished) = engine.take_finished() {
        match finished.finish {
            FinishReason::Abort => groups[finished.group.index()].push(finished),
            _ => ended.push(Rollout::of(finished)),
        }
    }
    let request = request(0, Vec::new(), 1);
    let how = Continuation {
        max_new_tokens: request.max_new_tokens,
        stop_tokens: request.stop_tokens,
        sampling: request.sampling,
        seed: request.seed,
    };
    let mut n_resumed = 0;
    for rollouts in groups.into_iter().filter(|rollouts| !rollouts.is_empty()) {
        n_resumed += engine.resume(rollouts, &how).unwrap().len();
    }
    n_resumed
}

#[test]
fn requests_that_wait_are_answered_by_the_new_weights() {
    for (model, dtype) in MODELS.into_iter().zip([Dtype::F32, Dtype::Bf16, Dtype::F32]) {
        let checkpoint = checkpoint(model);
        let mut engine = engine(&checkpoint, cached(dtype));
        sample(&mut engine, &requests()); // The cache holds their prompts when they are submitted again.
        for request in requests() {
            engine.submit(&request).unwrap();
        }
        let trained = scaled(&checkpoint, |name| name.ends_with("o_proj.weight"), 1.5);
        engine.refit(&trained, PolicyVersion(1)).unwrap();
        let expected = sample(&mut cold(&checkpoint, &trained, dtype), &requests());
        assert_eq!(finish(&mut engine).rollouts, expected.rollouts, "{model}");
    }
}

/// Runs two sequences in a cache that holds little more than one, until one has ended and the other, which had sampled
/// tokens before its blocks were taken, waits.
fn with_a_preempted_sequence(checkpoint: &Checkpoint) -> Engine {
    let config = EngineConfig { block_tokens: 1, max_running: 2, ..cached(Dtype::F32) };
    let kv_bytes = 20 * config.block_bytes(checkpoint.config());
    let mut engine = engine(checkpoint, EngineConfig { kv_bytes, ..config });
    for group in 0..2 {
        engine.submit(&request(group, tokens(group as u32, 5), 1)).unwrap();
    }
    while engine.take_finished().is_none() {
        engine.tick().unwrap();
    }
    let stats = engine.stats();
    assert_eq!((stats.n_running, stats.n_waiting, stats.n_preemptions), (0, 1, 1));
    engine
}

#[test]
fn what_a_preempted_sequence_said_before_a_refit_is_never_rewritten() {
    let checkpoint = checkpoint(MODELS[0]);
    let mut undisturbed = with_a_preempted_sequence(&checkpoint);
    let old = finish(&mut undisturbed).rollouts.swap_remove(0);

    let mut engine = with_a_preempted_sequence(&checkpoint);
    let trained = scaled(&checkpoint, |name| name.ends_with("proj.weight"), 1.5);
    engine.refit(&trained, PolicyVersion(1)).unwrap();
    while engine.has_work() {
        engine.tick().unwrap();
    }
    let finished = engine.take_finished().unwrap();
    let rollout = finished.view();
    let n_old = rollout.versions.iter().filter(|version| **version == PolicyVersion(0)).count();
    assert!(n_old >= 2 && n_old < rollout.versions.len(), "{:?}", rollout.versions);
    assert!(rollout.versions.is_sorted());
    let kept_tokens = rollout.prompt_tokens + n_old;
    assert_eq!(rollout.tokens[..kept_tokens], old.tokens[..kept_tokens]);
    assert_eq!(common::bits(&rollout.rollout_logprobs[..n_old]), old.logprobs[..n_old]);
    assert_ne!(common::bits(&rollout.rollout_logprobs[n_old..]), old.logprobs[n_old..]);
    // The rows of the inputs whose outputs were sampled: all but that of the last old token.
    let (routes, old_routes) = (rollout.routes.unwrap(), old.routes.as_ref().unwrap().view());
    let kept_bytes = (kept_tokens - 1) * routes.dims().row_bytes();
    assert_eq!(routes.bytes()[..kept_bytes], old_routes.bytes()[..kept_bytes]);
    assert_ne!(routes.bytes()[kept_bytes..], old_routes.bytes()[kept_bytes..]);
    assert_eq!(routes.check(rollout.tokens.len() - 1), Ok(()));
}

#[test]
fn a_shared_system_prompt_is_never_found_across_five_refits() {
    let checkpoint = checkpoint(MODELS[1]);
    let mut engine = engine(&checkpoint, cached(Dtype::Bf16));
    let system = tokens(1, 24);
    let turn = |group: u64| request(group, [system.clone(), tokens(group as u32 + 2, 5)].concat(), 2);
    let mut seen: Vec<Vec<Rollout>> = Vec::new();
    for version in 0..=5 {
        let factor = 1.0 + 0.1 * version as f32;
        let trained = scaled(&checkpoint, |name| name.ends_with("layernorm.weight"), factor);
        if version > 0 {
            engine.refit(&trained, PolicyVersion(version)).unwrap();
        }
        let hits = engine.stats().hit_tokens;
        let first = sample(&mut engine, &[turn(0)]);
        assert_eq!(
            (first.cached_tokens, engine.stats().hit_tokens),
            (0, hits),
            "version {version}: a stale hit"
        );
        let second = sample(&mut engine, &[turn(1)]);
        assert_eq!(second.cached_tokens, 2 * 24, "version {version}: the new weights' own prefix is found");

        let rollouts = [first.rollouts, second.rollouts].concat();
        let expected = sample(&mut cold(&checkpoint, &trained, Dtype::Bf16), &[turn(0), turn(1)]);
        assert_eq!(rollouts, expected.rollouts, "version {version}");
        assert!(!seen.contains(&rollouts), "version {version} answers as another did");
        seen.push(rollouts);
    }
}
