//! What a recipe must satisfy beyond types: ranges, and keys that must fit each other.

use std::fmt;
use std::path::Path;

use r3_core::count::counted;

use crate::check_learning::{check_numerics, check_over_sampling, check_sft, check_train};
use crate::check_objective::{check_algorithm, check_objective};
use crate::check_replay::{ReplayConflict, check_replay};
use crate::recipe::{Recipe, SftRecipe};
use crate::rollout::{Dtype, Engine, Rollout};
use crate::run::{Eval, Run};
use crate::task::{NewOrExistingModel, Task};

/// What a number may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// A count from this to [`Limit::MAX_COUNT`].
    Count(u32),
    /// A count from 1 to this.
    UpTo(u32),
    /// Above 0, also when rounded to f32.
    Positive,
    /// The same, and so large that its inverse is finite in f32: numbers are divided by it.
    Divisor,
    /// 0 or more, and finite in f32.
    NotNegative,
    /// From 0 to 1.
    Share,
    /// Above 0, at most 1.
    PositiveShare,
    /// From 0 to below 1.
    BelowOne,
    /// Above 1.
    AboveOne,
    /// 1 or more.
    OneOrMore,
}

impl Limit {
    /// Of `rollout.temperature`.
    pub const TEMPERATURE: Self = Self::Divisor;
    /// Of `rollout.top_p`.
    pub const TOP_P: Self = Self::PositiveShare;
    /// Of `rollout.sample_top_k`.
    pub const SAMPLE_TOP_K: Self = Self::Count(0);
    /// Of `rollout.min_p`.
    pub const MIN_P: Self = Self::BelowOne;
    /// More than any count in a recipe needs to be, and so little that a product of two cannot overflow.
    pub const MAX_COUNT: u32 = 1 << 24;

    /// Whether `value` is within the limit; never for a NaN.
    #[must_use]
    pub fn holds(self, value: f64) -> bool {
        let single = value as f32;
        match self {
            Self::Count(from) => (f64::from(from)..=f64::from(Self::MAX_COUNT)).contains(&value),
            Self::UpTo(to) => (1.0..=f64::from(to)).contains(&value),
            Self::Positive => single > 0.0 && single.is_finite(),
            Self::Divisor => single > 0.0 && single.is_finite() && single.recip().is_finite(),
            Self::NotNegative => single >= 0.0 && single.is_finite(),
            Self::Share => (0.0..=1.0).contains(&value),
            Self::PositiveShare => value > 0.0 && value <= 1.0,
            Self::BelowOne => (0.0..1.0).contains(&value),
            Self::AboveOne => single > 1.0 && single.is_finite(),
            Self::OneOrMore => single >= 1.0 && single.is_finite(),
        }
    }

    /// What must stand instead of `value`, which is beyond the limit, such as `at least 0`.
    #[must_use]
    pub fn instead_of(self, value: f64) -> String {
        match self {
            Self::Count(from) if value < f64::from(from) => format!("at least {from}"),
            Self::Count(_) => format!("at most {}", Self::MAX_COUNT),
            Self::UpTo(to) => format!("from 1 to {to}"),
            Self::Positive | Self::Divisor if value <= 0.0 => "above 0".into(),
            Self::Divisor => "in the range 3e-39 to 3e38".into(),
            Self::NotNegative if value < 0.0 => "at least 0".into(),
            Self::AboveOne if value as f32 <= 1.0 => "above 1".into(),
            Self::OneOrMore if value < 1.0 => "at least 1".into(),
            Self::AboveOne | Self::OneOrMore => "in the range of f32, up to 3e38".into(),
            Self::Positive | Self::NotNegative => "in the range of f32, 1e-45 to 3e38".into(),
            Self::Share => "from 0 to 1".into(),
            Self::PositiveShare => "above 0 and at most 1".into(),
            Self::BelowOne => "at least 0 and below 1".into(),
        }
    }
}

/// A number with its limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Dotted path of the key.
    pub path: &'static str,
    /// The value.
    pub value: f64,
    /// What it may be.
    pub limit: Limit,
    /// What it usually is.
    pub usual: &'static str,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, value, limit, .. } = self;
        let value_text = match limit {
            // Of whole numbers, which read best as they were written.
            Limit::Count(_) | Limit::UpTo(_) => (*value as u64).to_string(),
            _ => plain(*value),
        };
        write!(f, "`{path}` is {value_text}, but must be {}", limit.instead_of(*value))
    }
}

/// A number as a person would write it.
fn plain(value: f64) -> String {
    if value == 0.0 || (1e-4..1e9).contains(&value.abs()) { value.to_string() } else { format!("{value:e}") }
}

/// A recipe that is well-formed but cannot be run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Rule {
    /// A number beyond its limit.
    #[error("{0}")]
    OutOfRange(Bound),
    /// Keys of `router_replay` against each other.
    #[error("{0}")]
    Replay(ReplayConflict),
    /// A name or path without a character.
    #[error("`{path}` is empty")]
    EmptyText {
        /// Dotted path of the key.
        path: &'static str,
    },
    /// The groups of a batch cannot be shared out.
    #[error("`rollout.groups` is {groups}, which is no multiple of `train.mini_steps`, {mini_steps}")]
    UnevenMiniSteps {
        /// `rollout.groups`.
        groups: usize,
        /// `train.mini_steps`.
        mini_steps: usize,
    },
    /// More groups kept for the next step than one step trains on: the oldest would not fit into it.
    #[error("`rollout.over_sampling_groups` is {over_sampling_groups}, but a step trains on {}", counted(*groups, "group"))]
    OverSampledBatch {
        /// `rollout.over_sampling_groups`.
        over_sampling_groups: usize,
        /// `rollout.groups`.
        groups: usize,
    },
    /// Groups that go on into the next step would be too stale for it.
    #[error(
        "`train.max_staleness` is {max_staleness}, but groups that `rollout.over_sampling_groups` leaves for the next \
         step are {} old by then", counted(*mini_steps, "optimiser step")
    )]
    OverSampledStaleness {
        /// `train.mini_steps`.
        mini_steps: usize,
        /// `train.max_staleness`.
        max_staleness: u64,
    },
    /// A schedule without the steps it needs.
    #[error("`train.schedule` is `wsd`, but `train.decay_steps` is 0")]
    NoDecaySteps,
    /// Steps that no schedule asks for.
    #[error("`train.decay_steps` is {decay_steps}, but `train.schedule` is not `wsd`")]
    UnusedDecaySteps {
        /// `train.decay_steps`.
        decay_steps: u64,
    },
    /// The same bits from formats that round differently.
    #[error("`numerics` is `exact`, but `rollout.dtype` is {rollout} and `train.dtype` is {train}")]
    ExactAcrossDtypes {
        /// `rollout.dtype`.
        rollout: Dtype,
        /// `train.dtype`.
        train: Dtype,
    },
    /// The punishment grows over more tokens than there are.
    #[error("`{path}` is {cache_tokens}, but `max_tokens` is {max_tokens}")]
    OverlongCacheTooLong {
        /// Dotted path of the key.
        path: &'static str,
        /// Where the punishment is whole.
        max_tokens: usize,
        /// Tokens over which it grows.
        cache_tokens: usize,
    },
    /// No completion is ever long enough to be punished.
    #[error(
        "overlong punishment begins after {}, but a completion has at most {max_new_tokens}",
        counted(*free_tokens, "token")
    )]
    OverlongOutOfReach {
        /// Dotted path of `max_tokens`.
        path: &'static str,
        /// `max_tokens - cache_tokens`.
        free_tokens: usize,
        /// `rollout.max_new_tokens`.
        max_new_tokens: usize,
    },
    /// A block at both of the places that may hold it.
    #[error("`algorithm.dapo.{key}` and `objective.{key}` are both written")]
    TwoPlaces {
        /// Last part of both keys.
        key: &'static str,
        /// Dotted path of the second one.
        path: &'static str,
    },
    /// A horizon, and nothing that is divided by it.
    #[error("`objective.horizon` is what `aggregation: sequence_sum` divides by, and nothing else reads it")]
    UnusedHorizon,
    /// A bound on clipped losses, and no clipped loss.
    #[error("`objective.dual_clip` bounds a clipped surrogate, but CISPO clips the weight instead")]
    DualClipOfCispo,
    /// The importance of a token counted twice.
    #[error(
        "`objective.correction.weight` corrects for the rollout, but the ratio divides by the rollout's logprobs already"
    )]
    WeightOverRollout,
    /// A gradient asked of a reward.
    #[error("`objective.kl.estimator: unbiased` is about the gradient of a loss, but a reward has none")]
    UnbiasedKlInReward,
    /// A KL of completions that nobody runs the policy on.
    #[error(
        "`objective.kl.place: reward` needs every completion's KL, but `truncated: mask` leaves some out"
    )]
    KlInMaskedReward,
    /// An adapter of nothing.
    #[error("`train.lora.targets` is empty, so nothing would be trained")]
    NoTargets,
    /// Nothing would be left to train on.
    #[error("`task.arithmetic.held_out` is {held_out}, but {digits}-digit operands make only {pairs} pairs")]
    NothingToTrainOn {
        /// Pairs kept for evaluation.
        held_out: usize,
        /// Digits of an operand.
        digits: u32,
        /// Pairs of operands.
        pairs: u64,
    },
    /// More problems to evaluate than held out.
    #[error("`{path}` is {problems}, but the task holds out only {}", counted(*held_out, "problem"))]
    TooFewHeldOut {
        /// Dotted path of the key.
        path: &'static str,
        /// Problems to evaluate.
        problems: usize,
        /// Problems held out.
        held_out: usize,
    },
    /// Two sources of evaluation problems.
    #[error("`task.jsonl` has both `eval` and `held_out`")]
    TwoEvaluations,
    /// Best checkpoints wanted of which nobody knows how good they are.
    #[error("`run.keep_best` is {keep_best}, but not every checkpoint is evaluated")]
    UnknownBest {
        /// `run.keep_best`.
        keep_best: usize,
        /// `eval.problems`.
        problems: usize,
        /// `run.save_every`.
        save_every: u64,
    },
    /// Dropped carries, in a task that has none.
    #[error("`sft.carry_dropped` is {carry_dropped}, but only arithmetic has carries to drop")]
    NoCarries {
        /// Share of demonstrations.
        carry_dropped: f64,
    },
}

impl Rule {
    /// Dotted paths of the keys to look at, the one to point at first.
    #[must_use]
    pub fn paths(&self) -> [&'static str; 2] {
        match self {
            Self::OutOfRange(bound) => [bound.path; 2],
            Self::Replay(conflict) => conflict.paths(),
            Self::EmptyText { path } => [path; 2],
            Self::UnevenMiniSteps { .. } => ["rollout.groups", "train.mini_steps"],
            Self::OverSampledBatch { .. } => ["rollout.over_sampling_groups", "rollout.groups"],
            Self::OverSampledStaleness { .. } => ["train.max_staleness", "rollout.over_sampling_groups"],
            Self::NoDecaySteps | Self::UnusedDecaySteps { .. } => ["train.decay_steps", "train.schedule"],
            Self::ExactAcrossDtypes { .. } => ["numerics", "rollout.dtype"],
            Self::OverlongCacheTooLong { path, .. }
            | Self::OverlongOutOfReach { path, .. }
            | Self::TwoPlaces { path, .. } => [path; 2],
            Self::UnusedHorizon => ["objective.horizon"; 2],
            Self::DualClipOfCispo => ["objective.dual_clip"; 2],
            Self::UnbiasedKlInReward => ["objective.kl.estimator", "objective.kl"],
            Self::KlInMaskedReward => ["objective.kl.place", "objective.truncated"],
            Self::WeightOverRollout => ["objective.correction.weight", "objective"],
            Self::NoTargets => ["train.lora.targets"; 2],
            Self::NothingToTrainOn { .. } => ["task.arithmetic.held_out", "task.arithmetic.digits"],
            Self::TooFewHeldOut { path, .. } => [path, "task"],
            Self::TwoEvaluations => ["task.jsonl.held_out"; 2],
            Self::UnknownBest { .. } => ["run.keep_best", "eval.every"],
            Self::NoCarries { .. } => ["sft.carry_dropped"; 2],
        }
    }

    /// What to write instead.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::OutOfRange(Bound { path, usual, .. }) => format!("`{path}: {usual}` is usual"),
            Self::Replay(conflict) => conflict.hint().into(),
            Self::EmptyText { path } => format!("write a text after `{path}:`"),
            Self::UnevenMiniSteps { groups, mini_steps } => {
                format!("set `rollout.groups` to {}", groups.next_multiple_of(*mini_steps))
            }
            Self::OverSampledBatch { groups, .. } => {
                format!("set `rollout.over_sampling_groups` to {groups} or less")
            }
            Self::OverSampledStaleness { mini_steps, .. } => {
                format!(
                    "set `train.max_staleness` to {mini_steps} or more, or `rollout.over_sampling_groups` to 0"
                )
            }
            Self::NoDecaySteps => {
                "set `train.decay_steps` to the optimiser steps of the fall, a tenth of all of them, say"
                    .into()
            }
            Self::UnusedDecaySteps { .. } => {
                "set `train.schedule: wsd`, or remove `decay_steps`: other schedules fall from the warm-up on"
                    .into()
            }
            Self::ExactAcrossDtypes { rollout, train } => format!(
                "set `rollout.dtype` to {train} or `train.dtype` to {rollout}, or `numerics` to `fast`"
            ),
            Self::OverlongCacheTooLong { max_tokens, .. } => {
                format!("set `cache_tokens` to {max_tokens} or less")
            }
            Self::OverlongOutOfReach { max_new_tokens, .. } => {
                format!("set `max_tokens` to {max_new_tokens}, or remove `overlong`")
            }
            Self::TwoPlaces { path, .. } => format!("remove `{path}`"),
            Self::UnusedHorizon => "set `objective.aggregation: sequence_sum`, or remove `horizon`".into(),
            Self::DualClipOfCispo => {
                "remove `dual_clip`; `algorithm.cispo.clip_high` is the bound of CISPO".into()
            }
            Self::WeightOverRollout => {
                "set `objective.old_logprobs: trainer`, or correct with `sequence_mask` or `geometric_mask`"
                    .into()
            }
            Self::UnbiasedKlInReward => "set `objective.kl.estimator` to `k1`, or `place` to `loss`".into(),
            Self::KlInMaskedReward => "set `objective.kl.place: loss`, or `objective.truncated: keep`".into(),
            Self::NoTargets => {
                "name the weights to adapt, such as `targets: [\"*.self_attn.{q,v}_proj.weight\"]`".into()
            }
            Self::NothingToTrainOn { pairs, .. } => {
                format!("set `held_out` below {pairs}, or `digits` higher")
            }
            Self::TooFewHeldOut { path, held_out, .. } => {
                format!("hold out more problems in `task`, or set `{path}` to {held_out}")
            }
            Self::TwoEvaluations => "remove `held_out` to evaluate on the file `eval`".into(),
            Self::UnknownBest { problems: 0, .. } => "set `eval.problems` to 512".into(),
            Self::UnknownBest { save_every, .. } => {
                format!("set `eval.every` to `run.save_every`, {save_every}, or to a divisor of it")
            }
            Self::NoCarries { .. } => "set `sft.carry_dropped` to 0".into(),
        }
    }
}

impl Recipe {
    /// Checks ranges, and keys against each other. Reading a recipe does so already.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn check(&self) -> Result<(), Rule> {
        let Self { model, task, rollout, engine, algorithm, objective, .. } = self;
        let Self { numerics, train, ring, eval, run, .. } = self;
        filled("model.path", &model.path)?;
        filled("run.out", &run.out)?;
        check_task(task)?;
        check_rollout(rollout)?;
        check_engine(engine)?;
        check_replay(&self.router_replay)?;
        check_algorithm(algorithm, rollout.max_new_tokens)?;
        check_objective(objective, algorithm, rollout.max_new_tokens)?;
        check_train(train)?;
        if !rollout.groups.is_multiple_of(train.mini_steps) {
            return Err(Rule::UnevenMiniSteps { groups: rollout.groups, mini_steps: train.mini_steps });
        }
        check_over_sampling(rollout, train)?;
        check_numerics(*numerics, rollout.dtype, train.dtype)?;
        within("ring.bytes", ring.bytes.0, Limit::Positive, "64MiB")?;
        within("ring.deadline_s", ring.deadline_s, Limit::Count(1), "600")?;
        within("eval.max_new_tokens", eval.max_new_tokens.unwrap_or(1), Limit::Count(1), "16")?;
        enough_held_out("eval.problems", eval.problems, task)?;
        within("run.steps", run.steps, Limit::Count(1), "40")?;
        within("run.keep_last", run.keep_last, Limit::Count(1), "2")?;
        check_keep_best(run, eval)
    }
}

/// The best can only be told if every checkpoint is evaluated; the last one always is.
fn check_keep_best(run: &Run, eval: &Eval) -> Result<(), Rule> {
    let is_evaluated = run.save_every == 0 || (eval.every > 0 && run.save_every.is_multiple_of(eval.every));
    if run.keep_best == 0 || (eval.problems > 0 && is_evaluated) {
        return Ok(());
    }
    Err(Rule::UnknownBest { keep_best: run.keep_best, problems: eval.problems, save_every: run.save_every })
}

impl SftRecipe {
    /// Checks ranges, and keys against each other. Reading a recipe does so already.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn check(&self) -> Result<(), Rule> {
        let Self { model, task, sft, run } = self;
        match model {
            NewOrExistingModel::New(new) => filled("model.new.config", &new.config)?,
            NewOrExistingModel::Existing(model) => filled("model.existing.path", &model.path)?,
        }
        filled("run.out", &run.out)?;
        check_task(task)?;
        check_sft(sft)?;
        enough_held_out("sft.eval_problems", sft.eval_problems, task)?;
        match task {
            Task::Jsonl(_) if sft.carry_dropped > 0.0 => {
                Err(Rule::NoCarries { carry_dropped: sft.carry_dropped })
            }
            Task::Jsonl(_) | Task::Arithmetic(_) => Ok(()),
        }
    }
}

fn check_task(task: &Task) -> Result<(), Rule> {
    match task {
        Task::Arithmetic(arithmetic) => {
            within("task.arithmetic.digits", arithmetic.digits, Limit::UpTo(9), "2")?;
            within("task.arithmetic.attempts", arithmetic.attempts, Limit::UpTo(16), "1 or 2")?;
            let pairs = arithmetic.n_problems();
            if usize::try_from(pairs).is_ok_and(|pairs| arithmetic.held_out >= pairs) {
                let (held_out, digits) = (arithmetic.held_out, arithmetic.digits);
                return Err(Rule::NothingToTrainOn { held_out, digits, pairs });
            }
            Ok(())
        }
        Task::Jsonl(jsonl) => {
            filled("task.jsonl.train", &jsonl.train)?;
            filled("task.jsonl.prompt_key", &jsonl.prompt_key)?;
            filled("task.jsonl.answer_key", &jsonl.answer_key)?;
            if jsonl.eval.is_some() && jsonl.held_out > 0 { Err(Rule::TwoEvaluations) } else { Ok(()) }
        }
    }
}

/// A file's length is not known here, so only what the recipe says is compared.
fn enough_held_out(path: &'static str, problems: usize, task: &Task) -> Result<(), Rule> {
    let held_out = match task {
        Task::Arithmetic(arithmetic) => arithmetic.held_out,
        Task::Jsonl(jsonl) if jsonl.eval.is_some() => return Ok(()),
        Task::Jsonl(jsonl) => jsonl.held_out,
    };
    if problems > held_out { Err(Rule::TooFewHeldOut { path, problems, held_out }) } else { Ok(()) }
}

fn check_rollout(rollout: &Rollout) -> Result<(), Rule> {
    within("rollout.groups", rollout.groups, Limit::Count(1), "16")?;
    within("rollout.group_size", rollout.group_size, Limit::Count(2), "8")?;
    within("rollout.max_new_tokens", rollout.max_new_tokens, Limit::Count(1), "16")?;
    within("rollout.temperature", rollout.temperature, Limit::TEMPERATURE, "1.0")?;
    within("rollout.over_sampling_groups", rollout.over_sampling_groups, Limit::Count(0), "0")?;
    within("rollout.top_p", rollout.top_p, Limit::TOP_P, "1.0")?;
    within("rollout.min_p", rollout.min_p, Limit::MIN_P, "0")?;
    within("rollout.sample_top_k", rollout.sample_top_k, Limit::SAMPLE_TOP_K, "0")
}

fn check_engine(engine: &Engine) -> Result<(), Rule> {
    within("engine.kv_memory", engine.kv_memory.0, Limit::Positive, "64MiB")?;
    within("engine.block_tokens", engine.block_tokens, Limit::Count(1), "16")?;
    within("engine.max_batch_tokens", engine.max_batch_tokens, Limit::Count(1), "2048")?;
    within("engine.max_running", engine.max_running, Limit::Count(1), "128")
}

pub(crate) fn within(
    path: &'static str,
    value: impl Number,
    limit: Limit,
    usual: &'static str,
) -> Result<(), Rule> {
    let value = value.to_f64();
    if limit.holds(value) { Ok(()) } else { Err(Rule::OutOfRange(Bound { path, value, limit, usual })) }
}

pub(crate) fn filled(path: &'static str, text: &(impl AsRef<Path> + ?Sized)) -> Result<(), Rule> {
    if text.as_ref().as_os_str().is_empty() { Err(Rule::EmptyText { path }) } else { Ok(()) }
}

/// A number of a recipe, for comparison with a limit that f64 holds exactly.
pub(crate) trait Number {
    fn to_f64(self) -> f64;
}

impl Number for f64 {
    fn to_f64(self) -> f64 {
        self
    }
}

impl Number for u32 {
    fn to_f64(self) -> f64 {
        self.into()
    }
}

impl Number for u64 {
    fn to_f64(self) -> f64 {
        self as f64
    }
}

impl Number for usize {
    fn to_f64(self) -> f64 {
        self as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_said_as_one() {
        let path = "eval.problems";
        let said = [
            Rule::OverSampledBatch { over_sampling_groups: 2, groups: 1 },
            Rule::OverSampledStaleness { mini_steps: 1, max_staleness: 0 },
            Rule::OverlongOutOfReach { path, free_tokens: 1, max_new_tokens: 1 },
            Rule::TooFewHeldOut { path, problems: 2, held_out: 1 },
        ]
        .map(|rule| rule.to_string());
        let ends = ["trains on 1 group", "1 optimiser step old by then", "at most 1", "only 1 problem"];
        for (said, end) in said.iter().zip(ends) {
            assert!(said.ends_with(end), "{said}");
        }
        assert!(said[2].contains("after 1 token,"), "{}", said[2]);
    }
}
