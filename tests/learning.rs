//! The shipped recipe learns, and replaying the rollout's routes is what keeps both sides together while it does.

#[path = "common/packing.rs"]
mod packing;

use std::path::PathBuf;

use packing::Packing;
use r3_core::ids::{GroupId, PolicyVersion};
use r3_engine::config::EngineConfig;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::sampler::Sampling;
use r3_kernels::gemm::Dtype;
use r3_kernels::numerics::Numerics;
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::Routing;
use r3_model::autograd::Policy;
use r3_model::checkpoint::Checkpoint;
use r3_orchestrator::run::{RunOptions, run};
use r3_recipe::recipe::Recipe;
use r3_tasks::arithmetic::{ArithmeticTask, generate};
use r3_tasks::tokenizer::Tokenizer;
use r3_train::mismatch::{Mismatch, MismatchStats, RouterDiscrepancy};

fn in_repository(path: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../..", path].iter().collect()
}

#[test]
fn the_shipped_recipe_raises_held_out_accuracy_by_30_points_in_12_steps() {
    let dir = tempfile::tempdir().unwrap();
    let model = in_repository("assets/tiny-moe");
    let changes = [
        format!("model.path={}", model.display()),
        format!("run.out={}", dir.path().display()),
        "run.steps=12".into(),
        "eval.problems=256".into(),
        "metrics.listen=null".into(),
    ];
    let recipe = Recipe::load(&in_repository("recipes/tiny.yaml"), &changes).unwrap().recipe;
    let summary = run(&recipe, &RunOptions::default()).unwrap().summary;
    let (before, after) = (summary.eval_before.unwrap(), summary.eval_after.unwrap());
    assert!(after - before >= 0.3, "held-out accuracy went from {before:.3} to {after:.3}");
}

/// Rollouts of the shipped model, sampled in bf16, and what the f32 policy is to be compared with.
struct Rollouts {
    packing: Packing,
    /// Of every input's target; 0 where the target is a prompt token.
    logprobs: Vec<f32>,
    /// 1 where the target was sampled.
    mask: Vec<f32>,
}

impl Rollouts {
    fn sample(checkpoint: &Checkpoint, n_groups: u64) -> Self {
        let model = checkpoint.config();
        let tokenizer = Tokenizer::load(&in_repository("assets/tiny-moe"), model.vocab_size).unwrap();
        let problems = generate(ArithmeticTask { digits: 2, held_out: 1000, seed: 0 }).unwrap().train;
        let config = EngineConfig {
            dtype: Dtype::Bf16,
            numerics: Numerics::Exact,
            kv_bytes: 64 << 20,
            block_tokens: 16,
            max_batch_tokens: 2048,
            max_running: 256,
            prefix_cache: true,
            capture_routes: true,
            replay: None,
        };
        let mut engine = Engine::new(config, model, checkpoint, PolicyVersion(0)).unwrap();
        for (problem, group) in problems.iter().zip(0..n_groups) {
            let request = GroupRequest {
                group: GroupId(group),
                prompt: tokenizer.encode(&problem.prompt).unwrap().into(),
                size: 8,
                max_new_tokens: 4,
                stop_tokens: tokenizer.stop_tokens().into(),
                sampling: Sampling { temperature: 1.0, ..Sampling::GREEDY },
                seed: 7,
                return_routes: Some(0),
            };
            engine.submit(&request).unwrap();
        }
        let mut rollouts =
            Self { packing: Packing::new(model.route_dims()), logprobs: Vec::new(), mask: Vec::new() };
        while engine.has_work() {
            engine.tick().unwrap();
            while let Some(finished) = engine.take_finished() {
                let rollout = finished.view();
                rollouts.packing.add(rollout.tokens, rollout.routes.unwrap(), rollout.support);
                let n_prompt_targets = rollout.prompt_tokens - 1;
                rollouts.logprobs.extend(std::iter::repeat_n(0.0, n_prompt_targets));
                rollouts.logprobs.extend(rollout.rollout_logprobs);
                rollouts.mask.extend(std::iter::repeat_n(0.0, n_prompt_targets));
                rollouts.mask.extend(std::iter::repeat_n(1.0, rollout.rollout_logprobs.len()));
            }
        }
        rollouts
    }

    /// How far the f32 `policy` is from the rollout when it takes the rollout's experts, or its own.
    fn mismatch(&self, policy: &mut Policy, replay: bool) -> MismatchStats {
        let recorded = self.packing.replayed();
        let dims = policy.config().route_dims();
        let mut native = RouteRecord::new(dims.n_layers, policy.config().router());
        native.start(self.mask.len());
        let mut routing = match replay {
            true => Routing::Replay { ids: &recorded, native: Some(&mut native) },
            false => Routing::Record(&mut native),
        };
        let output =
            policy.logprobs_of(&self.packing.packed(), &mut routing, self.packing.scored(1.0)).unwrap();
        let mut mismatch = Mismatch::default();
        mismatch.add(&output.logprobs.to_vec1().unwrap(), &self.logprobs, &self.mask);
        mismatch.add_routes(&native, &recorded, &self.mask);
        mismatch.finish()
    }
}

#[test]
fn at_equal_weights_replay_cuts_the_kl_between_bf16_rollout_and_f32_trainer_to_0_4() {
    let checkpoint = Checkpoint::open(&in_repository("assets/tiny-moe")).unwrap();
    // The k3 of the free router is carried by the few tokens whose flips mattered, so it takes this many to be steady.
    let rollouts = Rollouts::sample(&checkpoint, 1600);
    let mut policy = Policy::load(&checkpoint, checkpoint.config()).unwrap();
    let on = rollouts.mismatch(&mut policy, true);
    let off = rollouts.mismatch(&mut policy, false);
    assert!(on.n_tokens >= 32_768 && on.n_tokens == off.n_tokens, "{} tokens", on.n_tokens);
    assert!(on.k3_kl > 0.0 && on.k3_kl <= 0.4 * off.k3_kl, "k3 is {:e} on, {:e} off", on.k3_kl, off.k3_kl);
    for stats in [on, off] {
        let RouterDiscrepancy { token_layer_frac, token_any_frac, .. } = stats.router.unwrap();
        assert!(token_layer_frac > 0.0 && token_any_frac >= token_layer_frac, "{:?}", stats.router);
    }
}
