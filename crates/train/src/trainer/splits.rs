//! A step's numbers are those of its batch: not of how it was split, in which order it arrived, or what was kept in memory.

use std::path::PathBuf;

use r3_core::ids::TokenId;
use r3_kernels::gemm::Dtype;
use r3_model::autograd::{Policy, Precision};
use r3_recipe::algorithm::Algorithm;
use r3_recipe::learning::Train;
use r3_recipe::objective::ObjectiveTerms;
use safetensors::SafeTensors;
use serde::Deserialize;

use super::{Learner, StepStats, Trainer};
use crate::batch::{Batch, Limits, RoutesUse};
use crate::fixtures::{OwnedRollout, policy_like, scored_by, with_groups};
use crate::objective::Objective;
use crate::optimiser::OptimiserConfig;

/// A recipe's sections under the name of what they show.
#[derive(Deserialize)]
struct Case {
    name: String,
    algorithm: Algorithm,
    objective: ObjectiveTerms,
}

#[derive(Deserialize)]
struct Recipes {
    max_new_tokens: usize,
    cases: Vec<Case>,
}

/// Every objective that `tests/golden/objectives.py` has a reference for, by name.
fn objectives() -> Vec<(String, Objective)> {
    let path: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "../../tests/golden/objectives.safetensors"].iter().collect();
    let bytes = std::fs::read(path).unwrap();
    let metadata = SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone().unwrap();
    let Recipes { max_new_tokens, cases } = serde_json::from_str(&metadata["recipes"]).unwrap();
    let objective =
        |case: Case| (case.name, Objective::new(&case.algorithm, &case.objective, max_new_tokens));
    cases.into_iter().map(objective).collect()
}

/// Numbers that look random.
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    fn shuffle<T>(&mut self, values: &mut [T]) {
        for at in (1..values.len()).rev() {
            values.swap(at, self.below(at + 1));
        }
    }
}

/// Ragged groups with masks, sampled by a policy that is near the trainer's; with `one_prompt` for each group or without.
fn rollouts(policy: &mut Policy, draw: &mut Draw, one_prompt: bool) -> Vec<OwnedRollout> {
    let mut rollouts = Vec::new();
    for group in 0..2 + draw.below(3) as u64 {
        let n_prompt = 1 + draw.below(6);
        for index in 0..2 + draw.below(4) as u32 {
            let n_sampled = 1 + draw.below(12);
            let reward = if index < 2 { index as f32 } else { draw.below(3) as f32 / 2.0 };
            let mut rollout = OwnedRollout::new(group, index, (n_prompt, n_sampled), reward);
            rollout.mask =
                (draw.below(3) == 0).then(|| (0..n_sampled).map(|_| draw.below(2) as u8).collect());
            for (at, token) in (0..).zip(&mut rollout.tokens) {
                let own = if one_prompt && at < n_prompt { 0 } else { index };
                *token = TokenId((group as u32 * 4 + at as u32 * 7 + own * 5) % 13);
            }
            let mut rollout = scored_by(policy, rollout);
            let away = |_: &f32| draw.below(100) as f32 / 150.0 - 0.33;
            let aways: Vec<f32> = rollout.rollout_logprobs.iter().map(away).collect();
            rollout.rollout_logprobs.iter_mut().zip(aways).for_each(|(logprob, away)| *logprob += away);
            rollouts.push(rollout);
        }
    }
    rollouts
}

/// How a batch is run.
#[derive(Clone, Copy, Debug)]
struct Run {
    tied: bool,
    precision: Precision,
    limits: Limits,
    threads: usize,
}

impl Run {
    /// One step on `rollouts`: what it says, the gradient of its last update and the weights, in bits.
    fn step(&self, objective: &Objective, rollouts: &[OwnedRollout]) -> (StepStats, [Vec<u32>; 2]) {
        let policy = |seed| policy_like(seed, self.tied).with_precision(self.precision);
        let config = OptimiserConfig::of_train(&Train { lr: 1e-2, ..Train::default() }, 100);
        let mut trainer = Trainer::new(policy(1), objective.clone(), config, 0.9).with_reference(policy(2));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build().unwrap();
        let stats = pool.install(|| {
            with_groups(rollouts, |groups| {
                let batch = Batch::pack(groups, objective, self.limits).unwrap();
                trainer.take_step(&batch, &mut |_| ()).unwrap()
            })
        });
        let Learner { policy, gradients, .. } = trainer.learner;
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        let weights =
            policy.vars().iter().map(|(_, var)| var.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        let weights = weights.flat_map(|values| bits(&values)).collect();
        let gradients = gradients.unwrap().into_tensors().iter().flat_map(|values| bits(values)).collect();
        (stats, [gradients, weights])
    }
}

/// Checks steps under every objective, in one micro-batch and in those of some of `budgets` rows.
fn check_splits(share_prompts: bool, budgets: impl Fn(&mut Draw) -> [usize; 3]) {
    let (mut draw, mut n_taught) = (Draw(1), 0);
    for (name, objective) in objectives() {
        let tied = draw.below(2) == 0;
        let rollouts = rollouts(&mut policy_like(1, tied), &mut draw, share_prompts);
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let limits = Limits {
                mini_steps: 1 + draw.below(2),
                micro_batch_tokens: 10_000,
                share_prompts,
                routes: RoutesUse::Replay,
            };
            let precision = Precision { dtype, recompute: false };
            let whole = Run { tied, precision, limits, threads: 1 };
            let expected = whole.step(&objective, &rollouts);
            n_taught += usize::from(expected.0.mini_steps > 0);
            for micro_batch_tokens in budgets(&mut draw) {
                let run = Run {
                    precision: Precision { recompute: draw.below(2) == 0, ..precision },
                    limits: Limits { micro_batch_tokens, ..limits },
                    threads: 1 + draw.below(2),
                    ..whole
                };
                let mut arrived = rollouts.clone();
                draw.shuffle(&mut arrived);
                assert!(run.step(&objective, &arrived) == expected, "{name}: {run:?}");
            }
        }
    }
    assert!(n_taught > 150, "{n_taught} steps changed anything");
}

#[test]
fn a_steps_bits_do_not_depend_on_splits_order_or_recompute() {
    check_splits(false, |draw| [1, 5 + draw.below(20), 30 + draw.below(60)]);
}

#[test]
fn nor_do_they_where_prompts_are_shared_and_stay_whole() {
    // A prompt of 6 tokens and 5 completions of 12 tokens are 65 rows at most.
    check_splits(true, |draw| [65, 66 + draw.below(20), 90 + draw.below(60)]);
}
