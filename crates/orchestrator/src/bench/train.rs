//! `r3 bench train`: how fast the trainer learns from rollouts: replayed forward, backward and AdamW.

use std::time::Instant;

use r3_core::count::counted;
use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward, RolloutView};
use r3_core::routes::RouteRows;
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::Routing;
use r3_model::autograd::{Packed, Policy};
use r3_recipe::algorithm::Dapo;
use r3_recipe::learning::{MomentsFormat, Train};
use r3_train::batch::{Batch, Group, Limits, RoutesUse, Sample};
use r3_train::error::TrainError;
use r3_train::objective::dapo;
use r3_train::optimiser::OptimiserConfig;
use r3_train::trainer::{Stage, StepStats, Trainer};
use serde::Serialize;

use crate::bench::Spread;
use crate::bench::machine;
use crate::bench::serving::prompt;
use crate::bench::subject::Subject;
use crate::error::RunError;
use crate::run::with_deep_stack;
use crate::setup;

/// What is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainSetup {
    /// Sequences of one optimiser step, at least 2: an advantage is relative to others.
    pub sequences: usize,
    /// Tokens of each that the model is fed; each predicts another, which is trained on.
    pub length: usize,
    /// Steps, beside one to warm up.
    pub rounds: usize,
    /// How the trainer works: format, recomputation, micro-batches.
    pub train: Train,
}

/// Throughput of optimiser steps, and where their time goes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainBench {
    /// Sequences of one step.
    pub sequences: usize,
    /// Tokens of each that the model is fed.
    pub length: usize,
    /// Format of the products.
    pub dtype: String,
    /// Rows of one forward and backward.
    pub micro_batch_tokens: usize,
    /// Whether layers run again in the backward.
    pub recompute: bool,
    /// Format of AdamW's moments.
    pub moments: MomentsFormat,
    /// Steps measured.
    pub rounds: usize,
    /// Tokens fed a second, over whole optimiser steps.
    pub tokens_per_second: Spread,
    /// Seconds of a step until the loss is there, of all micro-batches.
    pub forward_seconds: Spread,
    /// Seconds until their gradients are added.
    pub backward_seconds: Spread,
    /// Seconds of clipping and AdamW.
    pub optimiser_seconds: Spread,
    /// The largest resident memory of the process, in bytes.
    pub peak_memory_bytes: u64,
}

impl TrainBench {
    /// A table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let Self { sequences, length, dtype, rounds, .. } = self;
        let milli = |spread: &Spread| spread.scaled(1e3);
        [
            format!(
                "{sequences} sequences of {}, {dtype}, {}\n",
                counted(*length, "token"),
                counted(*rounds, "optimiser step")
            ),
            Spread::heading(),
            self.tokens_per_second.row("tokens/s"),
            milli(&self.forward_seconds).row("forward and loss, ms"),
            milli(&self.backward_seconds).row("backward, ms"),
            milli(&self.optimiser_seconds).row("AdamW, ms"),
            machine::memory_row(self.peak_memory_bytes),
        ]
        .concat()
    }
}

/// Measures: rollouts are made of the policy's own forward, with its logprobs and routes, and then trained on, step after
/// step, as a run does with one mini-step: routes are replayed, the mismatch is measured in the same forward.
///
/// # Errors
/// If the weights cannot be loaded or the sequences do not fit the model.
pub fn measure(subject: &Subject, setup: &TrainSetup) -> Result<TrainBench, RunError> {
    with_deep_stack(|| {
        let policy = Policy::load(&*subject.source, &subject.config)?;
        let mut policy = policy.with_precision(setup::precision(&setup.train));
        let rollouts = roll_out(&mut policy, setup)?;
        let objective = dapo::objective(&Dapo::default());
        let steps = setup.rounds.max(1) as u64 + 1;
        let optimiser = OptimiserConfig::of_train(&setup.train, steps);
        let mut trainer = Trainer::new(policy, objective.clone(), optimiser, 1.0);
        let mut timed = Vec::new();
        for round in 0..steps {
            let groups = [group(&rollouts)];
            let limits = Limits {
                mini_steps: 1,
                micro_batch_tokens: setup.train.micro_batch_tokens,
                share_prompts: setup.train.share_prompts,
                routes: RoutesUse::Replay,
            };
            let batch = Batch::pack(&groups, &objective, limits)?;
            let (step, stats) = timed_step(&mut trainer, &batch)?;
            assert_eq!((stats.mini_steps, stats.version.0), (1, round + 1), "every step updates the weights");
            // The first step warms up.
            if round > 0 {
                timed.push(step);
            }
        }
        Ok(summary(setup, &timed))
    })
}

/// Seconds of one optimiser step.
#[derive(Clone, Copy, Default)]
struct StepSeconds {
    forward: f64,
    backward: f64,
    optimiser: f64,
}

impl StepSeconds {
    fn all(self) -> f64 {
        self.forward + self.backward + self.optimiser
    }
}

fn timed_step(trainer: &mut Trainer, batch: &Batch<'_>) -> Result<(StepSeconds, StepStats), TrainError> {
    let mut seconds = StepSeconds::default();
    let mut since = Instant::now();
    let mut lap = || std::mem::replace(&mut since, Instant::now()).elapsed().as_secs_f64();
    let stats = trainer.step(batch, &mut |pass| match pass.stage {
        Stage::Measured | Stage::Forward => seconds.forward += lap(),
        Stage::Learned => seconds.backward += lap(),
    })?;
    seconds.optimiser = lap();
    Ok((seconds, stats))
}

fn summary(setup: &TrainSetup, timed: &[StepSeconds]) -> TrainBench {
    let n_tokens = (setup.sequences * setup.length) as f64;
    let over = |value: &dyn Fn(&StepSeconds) -> f64| Spread::of(timed.iter().map(value).collect());
    TrainBench {
        sequences: setup.sequences,
        length: setup.length,
        dtype: setup.train.dtype.to_string(),
        micro_batch_tokens: setup.train.micro_batch_tokens,
        recompute: setup.train.recompute,
        moments: setup.train.moments,
        rounds: timed.len(),
        tokens_per_second: over(&|step| n_tokens / step.all()),
        forward_seconds: over(&|step| step.forward),
        backward_seconds: over(&|step| step.backward),
        optimiser_seconds: over(&|step| step.optimiser),
        peak_memory_bytes: machine::peak_memory_bytes(),
    }
}

/// A rollout that owns what a view borrows. Its prompt is one token.
struct Rollout {
    tokens: Vec<TokenId>,
    logprobs: Vec<f32>,
    versions: Vec<PolicyVersion>,
    routes: RouteRows,
}

/// Rollouts as `policy` would have sampled them, had the sampler drawn these tokens.
fn roll_out(policy: &mut Policy, setup: &TrainSetup) -> Result<Vec<Rollout>, RunError> {
    let (dims, vocab_size) = (policy.config().route_dims(), policy.config().vocab_size);
    let mut record = RouteRecord::new(dims.n_layers, policy.config().router());
    let mut rollouts = Vec::new();
    for sequence in 0..setup.sequences {
        let tokens = prompt(sequence, setup.length + 1, vocab_size);
        record.start(setup.length);
        let packed = Packed {
            tokens: &tokens[..setup.length],
            targets: &tokens[1..],
            lengths: &[setup.length],
            shared: &[],
        };
        let output = policy.logprobs(&packed, &mut Routing::Record(&mut record), 1.0)?;
        let mut routes = RouteRows::with_capacity(dims, setup.length);
        routes.append(record.rows());
        rollouts.push(Rollout {
            logprobs: output.logprobs.to_vec1::<f32>().map_err(TrainError::from)?,
            versions: vec![PolicyVersion(0); setup.length],
            tokens,
            routes,
        });
    }
    Ok(rollouts)
}

/// All rollouts as one group in which every other one is rewarded.
fn group(rollouts: &[Rollout]) -> Group<'_> {
    let samples = (0u32..).zip(rollouts).map(|(index, rollout)| Sample {
        rollout: RolloutView {
            group: GroupId(0),
            index,
            tokens: &rollout.tokens,
            prompt_tokens: 1,
            rollout_logprobs: &rollout.logprobs,
            versions: &rollout.versions,
            routes: Some(rollout.routes.view()),
            finish: FinishReason::Length,
            cached_tokens: 0,
            support: None,
        },
        reward: Reward::Score(if index % 2 == 0 { 1.0 } else { 0.0 }),
        mask: None,
    });
    Group { id: GroupId(0), samples: samples.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    #[test]
    fn every_token_is_learned_from_and_the_parts_make_the_whole() {
        let subject = Subject::fresh(&fixtures::model_dir()).unwrap();
        let train = Train { micro_batch_tokens: 16, ..Train::default() };
        let measured = measure(&subject, &TrainSetup { sequences: 3, length: 8, rounds: 2, train }).unwrap();
        assert_eq!(measured.rounds, 2);
        let parts = [measured.forward_seconds, measured.backward_seconds, measured.optimiser_seconds];
        assert!(parts.iter().all(|part| part.min > 0.0));
        let slowest: f64 = parts.iter().map(|part| part.max).sum();
        assert!(measured.tokens_per_second.min >= 24.0 / slowest * 0.999);
        assert!(measured.table().contains("AdamW, ms"), "{}", measured.table());
    }

    #[test]
    fn a_group_of_one_has_nothing_to_learn_from() {
        let subject = Subject::fresh(&fixtures::model_dir()).unwrap();
        let mut policy = Policy::load(&*subject.source, &subject.config).unwrap();
        let setup = TrainSetup { sequences: 4, length: 3, rounds: 1, train: Train::default() };
        let rollouts = roll_out(&mut policy, &setup).unwrap();
        let rewards: Vec<_> = group(&rollouts).samples.iter().map(|sample| sample.reward).collect();
        assert_eq!(rewards, [1.0, 0.0, 1.0, 0.0].map(Reward::Score));
        assert!(rollouts.iter().all(|rollout| rollout.routes.rows() == 3 && rollout.logprobs.len() == 3));
    }
}
