//! The reinforcement learning step: replayed forward, loss, backward, update.

use std::ops::Range;
use std::path::Path;

use candle_core::DType;
use r3_core::ids::PolicyVersion;
use r3_kernels::route_record::RouteRecord;
use r3_model::autograd::{Policy, PolicyOutput, Scored, SharedWeights};
use r3_recipe::objective::{KlPlace, OldLogprobs};

use crate::batch::{Batch, MiniStep, RoutesUse};
use crate::batch_stats::BatchStats;
use crate::checkpoint::{Position, TrainerState};
use crate::contract::check_supports;
use crate::error::TrainError;
use crate::learner::Learner;
use crate::loads::{LoadStats, Loads};
use crate::loss::loss;
use crate::micro_batch::{LossInputs, MicroBatch};
use crate::mismatch::{Mismatch, MismatchStats};
use crate::objective::{KlTerm, Objective};
use crate::optimiser::OptimiserConfig;
use crate::optimiser_state;
use crate::replay::{Own, Replay, ReplayRule, n_replaced};
use crate::reward_kl::{self, TakenOut};
use crate::step_tokens::StepTokens;
use actor_sums::ActorSums;

mod actor_sums;

/// Trains a policy on batches of rollouts.
pub struct Trainer {
    learner: Learner,
    objective: Objective,
    temperature: f32,
    /// Whether every sampled token has to come with its support.
    truncated: bool,
    micro: MicroBatch,
    native: RouteRecord,
    old: StepTokens,
    replay: Replay,
    reference: Option<Reference>,
}

/// A frozen policy, and what it says about a step's tokens.
struct Reference {
    policy: Policy,
    logprobs: StepTokens,
    /// When the KL is taken out of the rewards.
    taken: Option<TakenOut>,
}

/// What one batch did to the policy. Means are over trained tokens unless said otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct StepStats {
    /// Policy version after the step.
    pub version: PolicyVersion,
    /// Optimiser steps made; 0 when no group taught anything.
    pub mini_steps: usize,
    /// Optimiser steps not made, since a loss or gradient was not finite.
    pub skipped_steps: usize,
    /// The groups.
    pub batch: BatchStats,
    /// Rollout against trainer at equal weights, before the first update: over the trained tokens that the version at
    /// hand sampled.
    pub mismatch: MismatchStats,
    /// The updates.
    pub actor: ActorStats,
    /// Spread of the experts this step ran, before the first update; `None` when neither the batch nor the trainer keeps
    /// routes.
    pub load: Option<LoadStats>,
    /// Mean staleness of the rollouts before the first update, in optimiser steps.
    pub staleness_mean: f64,
    /// Largest staleness of a rollout before the first update, in optimiser steps.
    pub staleness_max: u64,
}

/// Means over the updates of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ActorStats {
    /// Loss, mean over optimiser steps.
    pub pg_loss: f64,
    /// KL to the reference as the loss has it, nats, mean over optimiser steps; `None` if it has none.
    pub kl_loss: Option<f64>,
    /// KL to the reference that is taken out of the rewards, nats, mean over the trained tokens; `None` if none is.
    pub reward_kl: Option<f64>,
    /// `mean(rollout - policy)` in nats, over all updates' forwards: how far the policy moved from its
    /// rollouts.
    pub ppo_kl: f64,
    /// Share of tokens stopped by the clip.
    pub pg_clipfrac: f64,
    /// Share of good tokens stopped above.
    pub clip_frac_high: f64,
    /// Share of bad tokens stopped below.
    pub clip_frac_low: f64,
    /// Mean weight that the correction gives a token, those it drops included; `None` without one.
    pub correction_mean: Option<f64>,
    /// Share of tokens that the correction drops; `None` without one.
    pub correction_dropped_frac: Option<f64>,
    /// Share of replayed experts that scored too low and were replaced, over the updates' forwards; `None` without a
    /// threshold.
    pub replaced_frac: Option<f64>,
    /// Share of bad tokens stopped by the dual clip.
    pub clip_frac_dual: f64,
    /// Entropy of the policy, nats.
    pub entropy: f64,
    /// Gradient norm before clipping, mean over optimiser steps.
    pub grad_norm: f64,
    /// Learning rate of the last optimiser step.
    pub lr: f64,
}

/// How far a micro-batch is: what [`Trainer::step`] tells whoever watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassDone {
    /// Inputs of its sequences.
    pub n_inputs: usize,
    /// What was done with them.
    pub stage: Stage,
}

/// Stages of a micro-batch: it is measured and no more, or it goes forward and is then learned from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// A forward measured the mismatch; all of these come before the first update.
    Measured,
    /// The forward and its loss are done, the backward follows.
    Forward,
    /// Its gradient was added.
    Learned,
}

impl Trainer {
    /// A trainer that has made no step. `temperature` is the rollout's: logprobs are of the distribution
    /// sampled from.
    #[must_use]
    pub fn new(policy: Policy, objective: Objective, config: OptimiserConfig, temperature: f32) -> Self {
        let native = RouteRecord::new(policy.config().route_dims().n_layers, policy.config().router());
        Self {
            learner: Learner::new(policy, config),
            objective,
            temperature,
            truncated: false,
            micro: MicroBatch::default(),
            native,
            old: StepTokens::default(),
            replay: Replay::default(),
            reference: None,
        }
    }

    /// Refuses rollouts that do not say what their tokens were drawn from: their draws were truncated, and all of the
    /// vocabulary is not the distribution that their logprobs are of.
    #[must_use]
    pub fn with_truncated_rollouts(mut self) -> Self {
        self.truncated = true;
        self
    }

    /// Gives the KL of the objective something to be measured to.
    #[must_use]
    pub fn with_reference(mut self, policy: Policy) -> Self {
        self.reference = Some(Reference { policy, logprobs: StepTokens::default(), taken: None });
        self
    }

    /// Replays by `rule`.
    ///
    /// # Panics
    /// If its threshold is not a share, or replaces experts whose gates are replayed.
    #[must_use]
    pub fn with_replay(mut self, rule: ReplayRule) -> Self {
        self.replay = Replay::new(rule);
        self
    }

    /// Forwards that [`Self::step`] makes of `batch`: those of the batch, one of each micro-batch for a reference, and those
    /// of the first mini-step where no update's own forward serves to measure it.
    #[must_use]
    pub fn n_passes(&self, batch: &Batch<'_>) -> usize {
        let mut counts = batch.mini_steps().iter().map(|mini| mini.micro_batches.len());
        let of_reference = self.reference.as_ref().map_or(0, |_| counts.clone().sum());
        let of_first = if self.n_measured_by_updates() == 0 { counts.next().unwrap_or(0) } else { 0 };
        batch.n_passes() + of_reference + of_first
    }

    /// Mini-steps whose update's forward is also what measures them: the first. None where a reference has to know which
    /// experts the trainer takes, or that forward itself has gates to replay.
    fn n_measured_by_updates(&self) -> usize {
        match self.replay.rule().own {
            Own::Nothing => 1,
            Own::Experts => usize::from(self.reference.is_none()),
            Own::ExpertsAndGates => 0,
        }
    }

    /// Continues the run whose checkpoint `dir` holds `state`; the policy was loaded from the same directory.
    ///
    /// # Errors
    /// If the optimiser state cannot be read or is not that of this policy.
    pub fn resume(&mut self, dir: &Path, state: &TrainerState) -> Result<(), TrainError> {
        let fresh = self.learner.optimiser.moments();
        let moments = optimiser_state::read(dir, self.learner.policy.vars(), fresh)?;
        self.learner.optimiser.resume(moments, state.optimiser_steps);
        self.learner.version = PolicyVersion(state.version);
        Ok(())
    }

    /// Writes the optimiser state into `dir`; weights are the model's to write.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_optimiser(&self, dir: &Path) -> Result<(), TrainError> {
        optimiser_state::write(dir, self.learner.policy.vars(), self.learner.optimiser.moments())
    }

    /// Bytes that weights in f32 and optimiser state take on disk, short of headers.
    #[must_use]
    pub fn checkpoint_bytes(&self) -> u64 {
        let n_values = self.policy().weights().iter().map(|(_, weight)| weight.elem_count()).sum::<usize>();
        optimiser_state::bytes(self.learner.optimiser.moments()) + 4 * n_values as u64
    }

    /// Where the run stands after `step` batches.
    #[must_use]
    pub fn position(&self, step: u64) -> Position {
        let optimiser_steps = self.learner.optimiser.steps();
        Position { step, version: self.learner.version, optimiser_steps, score: None }
    }

    /// What it optimises, and what a batch for it is packed with.
    #[must_use]
    pub fn objective(&self) -> &Objective {
        &self.objective
    }

    /// The policy being trained.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.learner.policy
    }

    /// The weights, for an engine to load before the next step.
    pub fn weights(&mut self) -> SharedWeights {
        self.learner.policy.shared_weights()
    }

    /// Optimiser steps inside the weights.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        self.learner.version
    }

    /// Trains on `batch`: one optimiser step for each of its mini-steps.
    ///
    /// The mismatch is measured at the weights the step starts with, on every trained token that they sampled: on those
    /// of older weights it would be the policy's own movement. The first mini-step's own forwards serve for its share; the others' would come after an update, so they get a
    /// forward of their own first. That costs `(mini_steps - 1) / mini_steps` of a forward and nothing with
    /// one mini-step.
    ///
    /// Gradients take memory only in here, so that an engine beside the trainer can have it for keys and values.
    ///
    /// `progress` hears of every micro-batch that is measured or learned from, [`Self::n_passes`] times, and of every
    /// forward in between.
    ///
    /// # Errors
    /// [`TrainError::NonFinite`] names the logprob, loss or gradient that is not finite. The update it would
    /// have gone into is not made, so weights are those of the last whole optimiser step. Where the recipe skips such a loss or
    /// gradient, that is all that happens.
    pub fn step(
        &mut self,
        batch: &Batch<'_>,
        progress: &mut dyn FnMut(PassDone),
    ) -> Result<StepStats, TrainError> {
        self.check_routes(batch)?;
        check_supports(batch, self.learner.policy.config().vocab_size, self.truncated)?;
        let stats = self.take_step(batch, progress);
        self.learner.gradients = None;
        stats
    }

    /// The step itself. The gradients of its last update stay.
    fn take_step(
        &mut self,
        batch: &Batch<'_>,
        progress: &mut dyn FnMut(PassDone),
    ) -> Result<StepStats, TrainError> {
        let _span = tracing::info_span!("step", version = self.version().0).entered();
        let (staleness_mean, staleness_max) = batch.staleness(self.version());
        let measured = Measured::new(batch, &self.learner, self.replay.rule().own != Own::Nothing);
        let mut account = Account { measured, actor: ActorSums::default(), progress };
        self.old.start(batch);
        self.replay.start();
        let n_measured_by_updates = self.n_measured_by_updates();
        for mini in batch.mini_steps().iter().skip(n_measured_by_updates) {
            for sequences in &mini.micro_batches {
                let pass = self.forward(batch, sequences.clone(), Purpose::Measure)?;
                self.old.keep(sequences, &pass.policy_logprobs);
                self.replay.keep(sequences, &pass.output.ran);
                account.measured.add(&self.micro, &pass, &self.native);
                (account.progress)(PassDone { n_inputs: self.micro.n_inputs(), stage: Stage::Measured });
            }
        }
        self.refer(batch, &mut account)?;
        for (index, mini) in batch.mini_steps().iter().enumerate() {
            self.mini_step(batch, mini, &mut account, index < n_measured_by_updates)?;
        }
        let Account { measured, actor, .. } = account;
        let (mismatch, load) = measured.finish();
        Ok(StepStats {
            version: self.version(),
            mini_steps: actor.n_updates,
            skipped_steps: batch.mini_steps().len() - actor.n_updates,
            batch: *batch.stats(),
            mismatch,
            actor: actor.finish(),
            load,
            staleness_mean,
            staleness_max,
        })
    }

    /// Runs the reference, if there is one, on all of `batch`. It takes the experts that the trainer takes, so that the KL
    /// is of the weights and not of two routers.
    fn refer(&mut self, batch: &Batch<'_>, account: &mut Account<'_>) -> Result<(), TrainError> {
        let Self { reference: Some(reference), objective, micro, replay, temperature, .. } = self else {
            return Ok(());
        };
        reference.logprobs.start(batch);
        for sequences in batch.mini_steps().iter().flat_map(|mini| &mini.micro_batches) {
            micro.gather(batch, sequences.clone());
            let rollout = (batch.routes() == RoutesUse::Replay).then_some(&micro.routes[..]);
            let mut routing = replay.routing(rollout, sequences, None);
            // Over the same support, so that the KL is between two distributions of what could have been sampled.
            let scored = Scored { temperature: *temperature, kept: micro.kept() };
            let output = reference.policy.measure(&micro.packed(), &mut routing, scored)?;
            let logprobs = output.logprobs.to_vec1::<f32>()?;
            if let Some(at) = logprobs.iter().position(|logprob| !logprob.is_finite()) {
                let tensor = name_position("the reference", batch, sequences.clone(), at);
                return Err(TrainError::NonFinite { tensor, version: account.measured.version });
            }
            reference.logprobs.keep(sequences, &logprobs);
            (account.progress)(PassDone { n_inputs: micro.n_inputs(), stage: Stage::Measured });
        }
        if let Some(KlTerm { coef, estimator, place: KlPlace::Reward }) = objective.kl {
            let logprobs = reference.logprobs.all();
            let taken = reward_kl::take_out(batch, objective, (estimator, coef), logprobs);
            account.actor.reward_kl = Some(taken.kl);
            reference.taken = Some(taken);
        }
        Ok(())
    }

    /// One optimiser step.
    fn mini_step(
        &mut self,
        batch: &Batch<'_>,
        mini: &MiniStep,
        account: &mut Account<'_>,
        measure: bool,
    ) -> Result<(), TrainError> {
        self.learner.start_step();
        let denominator = self.objective.aggregation.denominator(&mini.counts);
        let purpose = if measure { Purpose::MeasureAndLearn } else { Purpose::Learn };
        for sequences in &mini.micro_batches {
            let pass = self.forward(batch, sequences.clone(), purpose)?;
            if measure {
                account.measured.add(&self.micro, &pass, &self.native);
                self.old.keep(sequences, &pass.policy_logprobs);
            }
            let reference = self.reference.as_ref();
            if let Some(Reference { taken: Some(taken), logprobs, .. }) = reference {
                self.micro.advantages.copy_from_slice(&taken.advantages[logprobs.rows(sequences)]);
            }
            let old_logprobs = match self.objective.old_logprobs {
                OldLogprobs::Rollout => &self.micro.rollout_logprobs,
                OldLogprobs::Trainer => self.old.of(sequences),
            };
            account.actor.add_tokens(&self.micro, &pass, old_logprobs, &self.objective);
            let mut inputs = LossInputs::new(&self.micro, old_logprobs, DType::F32)?;
            let policy_logprobs: Vec<f64> = pass.policy_logprobs.iter().copied().map(f64::from).collect();
            if let Some(weights) = self.micro.correction(&self.objective, &policy_logprobs, old_logprobs) {
                account.actor.add_correction(&weights, &self.micro.mask);
                inputs.correct(&weights)?;
            }
            if let Some(reference) = reference {
                inputs.refer_to(reference.logprobs.of(sequences))?;
            }
            let tokens = inputs.batch((&pass.output.logprobs, &pass.output.entropy), &self.micro);
            let loss = loss(&self.objective, &tokens, denominator)?;
            let n_inputs = self.micro.n_inputs();
            (account.progress)(PassDone { n_inputs, stage: Stage::Forward });
            if self.learner.add_gradient(&loss.total, &pass.output)? {
                account.actor.add_loss(&loss, denominator)?;
            }
            (account.progress)(PassDone { n_inputs, stage: Stage::Learned });
        }
        if let Some(update) = self.learner.update()? {
            account.actor.add_update(update);
        }
        Ok(())
    }

    /// Gathers the micro-batch of `sequences` and runs the policy on it.
    fn forward(
        &mut self,
        batch: &Batch<'_>,
        sequences: Range<usize>,
        purpose: Purpose,
    ) -> Result<Pass, TrainError> {
        let Self { learner, micro, native, replay, .. } = self;
        micro.gather(batch, sequences.clone());
        let is_measured = purpose != Purpose::Learn;
        let mut native = (is_measured && batch.routes() != RoutesUse::None).then_some(native);
        if let Some(native) = &mut native {
            native.start(micro.n_rows());
        }
        let rollout = (batch.routes() == RoutesUse::Replay).then_some(&micro.routes[..]);
        let mut routing = replay.routing(rollout, &sequences, native);
        let scored = Scored { temperature: self.temperature, kept: micro.kept() };
        let output = match purpose {
            Purpose::Measure => learner.policy.measure(&micro.packed(), &mut routing, scored)?,
            _ => learner.policy.logprobs_of(&micro.packed(), &mut routing, scored)?,
        };
        let policy_logprobs = output.logprobs.to_vec1::<f32>()?;
        if let Some(at) = policy_logprobs.iter().position(|logprob| !logprob.is_finite()) {
            let tensor = name_position("the policy", batch, sequences, at);
            return Err(TrainError::NonFinite { tensor, version: learner.version });
        }
        let entropy = output.entropy.to_vec1::<f32>()?;
        let n_replaced = n_replaced(&routing, &output.ran);
        Ok(Pass { output, policy_logprobs, entropy, n_replaced })
    }

    /// Refuses routes of another model before any weight changes.
    fn check_routes(&self, batch: &Batch<'_>) -> Result<(), TrainError> {
        let replays_own = self.replay.rule().own != Own::Nothing;
        assert!(!replays_own || batch.routes() != RoutesUse::Replay, "routes of one side are replayed");
        let expected = self.learner.policy.config().route_dims();
        match (batch.route_dims(), batch.sequences().first()) {
            (Some(dims), Some(first)) if dims != expected => {
                let rollout = &first.sample.rollout;
                Err(TrainError::RouteShape { group: rollout.group, index: rollout.index, dims, expected })
            }
            _ => Ok(()),
        }
    }
}

/// What a forward is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// The mismatch and the old logprobs: no gradient runs back.
    Measure,
    Learn,
    MeasureAndLearn,
}

/// What a step adds up, and who watches it.
struct Account<'a> {
    measured: Measured,
    actor: ActorSums,
    progress: &'a mut dyn FnMut(PassDone),
}

/// One forward: differentiable, and as plain numbers.
struct Pass {
    output: PolicyOutput,
    policy_logprobs: Vec<f32>,
    entropy: Vec<f32>,
    /// Replayed experts that were replaced, and all of them.
    n_replaced: Option<(usize, usize)>,
}

/// Says which rollout the row `at` of a micro-batch belongs to.
fn name_position(whose: &str, batch: &Batch<'_>, sequences: Range<usize>, mut at: usize) -> String {
    for sequence in &batch.sequences()[sequences] {
        if at < sequence.n_rows() {
            let rollout = &sequence.sample.rollout;
            return format!(
                "{whose}'s logprob of group {}, rollout {}, token {}",
                rollout.group,
                rollout.index,
                sequence.n_shared + at + 1
            );
        }
        at -= sequence.n_rows();
    }
    unreachable!("a micro-batch has as many rows as its sequences")
}

/// What is measured at the weights a step starts with.
struct Measured {
    version: PolicyVersion,
    mismatch: Mismatch,
    loads: Option<Loads>,
    routes: RoutesUse,
}

impl Measured {
    fn new(batch: &Batch<'_>, learner: &Learner, keeps_own: bool) -> Self {
        let routes = batch.routes();
        let has_loads = routes != RoutesUse::None || keeps_own;
        let loads = has_loads.then(|| Loads::new(learner.policy.config().route_dims()));
        Self { version: learner.version, mismatch: Mismatch::default(), loads, routes }
    }

    fn add(&mut self, micro: &MicroBatch, pass: &Pass, native: &RouteRecord) {
        let fresh = micro.mask.iter().zip(&micro.versions);
        let fresh = fresh.map(|(&mask, &version)| if version == self.version { mask } else { 0.0 });
        let fresh: Vec<f32> = fresh.collect();
        self.mismatch.add(&pass.policy_logprobs, &micro.rollout_logprobs, &fresh);
        let Some(loads) = &mut self.loads else { return };
        if self.routes != RoutesUse::None {
            self.mismatch.add_routes(native, &micro.routes, &fresh);
        }
        let uses = micro.uses();
        for (layer, ran) in pass.output.ran.iter().enumerate() {
            loads.add(layer, &ran.ids, &uses);
        }
    }

    fn finish(self) -> (MismatchStats, Option<LoadStats>) {
        (self.mismatch.finish(), self.loads.map(|loads| loads.finish()))
    }
}

#[cfg(test)]
mod sharing_tests;
#[cfg(test)]
mod splits;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod truncated;
