//! `r3 bench step`: a whole step of reinforcement learning with the parts of a run: rollout, ring, replayed training, refit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use r3_core::count::counted;
use r3_core::ids::{GroupId, PolicyVersion};
use r3_engine::config::EngineConfig;
use r3_engine::engine::Engine;
use r3_engine::sampler::Sampling;
use r3_kernels::gemm::Dtype;
use r3_kernels::numerics::Numerics;
use r3_model::autograd::Policy;
use r3_recipe::algorithm::Grpo;
use r3_recipe::learning::{MomentsFormat, Train};
use r3_recipe::rollout::{Engine as EngineSection, InFlight};
use r3_ring::frame::max_frame_bytes;
use r3_ring::ring::Ring;
use r3_tasks::dataset::{Dataset, Problem, Prompt};
use r3_tasks::retries::Retries;
use r3_tasks::reward::Reward;
use r3_tasks::tokenizer::Tokenizer;
use r3_telemetry::progress::{BarKind, Progress};
use r3_train::batch::{Batch, Limits, RoutesUse};
use r3_train::objective::{Objective, grpo};
use r3_train::optimiser::OptimiserConfig;
use r3_train::trainer::Trainer;
use serde::Serialize;

use crate::bench::Spread;
use crate::bench::machine;
use crate::bench::serving::prompt;
use crate::bench::subject::Subject;
use crate::error::RunError;
use crate::group_buffer::{GroupBuffer, check_layers, groups};
use crate::handle::WorkerHandle;
use crate::pending::Pending;
use crate::run::with_deep_stack;
use crate::setup;
use crate::worker::{SampleSpec, WorkerParts};

/// What is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSetup {
    /// Prompts of a step.
    pub groups: usize,
    /// Completions of each, at least 2.
    pub group_size: u32,
    /// Tokens of each prompt.
    pub prompt: usize,
    /// Tokens of each completion.
    pub new: usize,
    /// Steps, beside the first, which warms up.
    pub rounds: usize,
    /// Format of the engine's weights, keys and values.
    pub dtype: Dtype,
    /// How the trainer works.
    pub train: Train,
}

impl StepSetup {
    fn completions(&self) -> usize {
        self.groups * self.group_size as usize
    }
}

/// What a step takes, and how soon the first is done.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepBench {
    /// Completions of a step.
    pub completions: usize,
    /// Completions of one prompt.
    pub group_size: u32,
    /// Tokens of each prompt.
    pub prompt: usize,
    /// Tokens of each completion.
    pub new: usize,
    /// Format of the engine's weights, keys and values.
    pub dtype: String,
    /// Format of the trainer's products.
    pub train_dtype: String,
    /// Rows of one forward and backward.
    pub micro_batch_tokens: usize,
    /// Whether layers run again in the backward.
    pub recompute: bool,
    /// Format of AdamW's moments.
    pub moments: MomentsFormat,
    /// Steps measured, behind the first.
    pub rounds: usize,
    /// Seconds of a whole step: the sum of the next three.
    pub step_seconds: Spread,
    /// Seconds until all completions are sampled, scored and in the ring.
    pub rollout_seconds: Spread,
    /// Seconds until the weights are updated.
    pub train_seconds: Spread,
    /// Seconds until the engine serves them.
    pub refit_seconds: Spread,
    /// Seconds from the start of the process to the end of its first optimiser step, to a hundredth: loading is in it. `null`
    /// where the system does not tell.
    pub first_step_seconds: Option<f64>,
    /// The largest resident memory of the process, in bytes.
    pub peak_memory_bytes: u64,
}

impl StepBench {
    /// A table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let Self { completions, group_size, prompt, new, dtype, train_dtype, rounds, .. } = self;
        let first = self.first_step_seconds.map_or("unknown".into(), |seconds| format!("{seconds:.2} s"));
        [
            format!(
                "{completions} completions, {group_size} of each prompt, {prompt} + {new} tokens, \
                 rollout {dtype}, training {train_dtype}, {}\n",
                counted(*rounds, "step")
            ),
            Spread::heading(),
            self.step_seconds.scaled(1e3).row("step, ms"),
            self.rollout_seconds.scaled(1e3).row("  rollout"),
            self.train_seconds.scaled(1e3).row("  training"),
            self.refit_seconds.scaled(1e3).row("  refit"),
            format!("from the start of the process to the end of the first optimiser step: {first}\n"),
            machine::memory_row(self.peak_memory_bytes),
        ]
        .concat()
    }
}

/// Measures, with a reward that tells completions apart and means nothing.
///
/// # Errors
/// If model or tokenizer cannot be loaded, or the sequences do not fit the model.
///
/// # Panics
/// If a completion is missing or a step trains nothing.
pub fn measure(subject: &Subject, setup: &StepSetup) -> Result<StepBench, RunError> {
    with_deep_stack(|| {
        let mut parts = Parts::start(subject, setup)?;
        let mut steps = Vec::new();
        let mut first_step_seconds = None;
        for round in 0..=setup.rounds.max(1) {
            let (step, age) = parts.step(setup, round)?;
            match round {
                0 => first_step_seconds = age,
                _ => steps.push(step),
            }
        }
        let over = |value: fn(&StepSeconds) -> f64| Spread::of(steps.iter().map(value).collect());
        Ok(StepBench {
            completions: setup.completions(),
            group_size: setup.group_size,
            prompt: setup.prompt,
            new: setup.new,
            dtype: setup.dtype.to_string(),
            train_dtype: setup.train.dtype.to_string(),
            micro_batch_tokens: setup.train.micro_batch_tokens,
            recompute: setup.train.recompute,
            moments: setup.train.moments,
            rounds: steps.len(),
            step_seconds: over(|step| step.rollout + step.train + step.refit),
            rollout_seconds: over(|step| step.rollout),
            train_seconds: over(|step| step.train),
            refit_seconds: over(|step| step.refit),
            first_step_seconds,
            peak_memory_bytes: machine::peak_memory_bytes(),
        })
    })
}

/// Seconds of one step.
struct StepSeconds {
    rollout: f64,
    train: f64,
    refit: f64,
}

/// What a run is made of, without its files and metrics.
struct Parts {
    worker: WorkerHandle,
    buffer: GroupBuffer,
    trainer: Trainer,
    objective: Objective,
    vocab_size: usize,
}

impl Parts {
    /// Builds and connects everything, in the order of a run.
    fn start(subject: &Subject, setup: &StepSetup) -> Result<Self, RunError> {
        let config = engine_config(subject, setup);
        setup::check_kv(&config, &subject.config, (setup.prompt, setup.new))?;
        let tokenizer = Arc::new(Tokenizer::load(&subject.dir, subject.config.vocab_size)?);
        let dims = Some(subject.config.route_dims());
        let frame_bytes = max_frame_bytes(setup.prompt + setup.new, dims, None);
        let ring_bytes = setup::ring_bytes(frame_bytes, setup.completions());
        let (writer, reader) = Ring::create(usize::try_from(ring_bytes).unwrap_or(usize::MAX))?;
        let objective = grpo::objective(&Grpo::default());
        let optimiser = OptimiserConfig::of_train(&setup.train, setup.rounds as u64 + 1);
        let policy = Policy::load(&*subject.source, &subject.config)?;
        let policy = policy.with_precision(setup::precision(&setup.train));
        let mut trainer = Trainer::new(policy, objective.clone(), optimiser, 1.0);
        let weights = trainer.weights();
        let worker = WorkerHandle::spawn(WorkerParts {
            engine: Engine::new(config, &subject.config, &weights, trainer.version())?,
            writer,
            deadline: Duration::from_secs(600),
            spec: sample_spec(setup),
            reward: Arc::new(Spelling),
            dataset: Arc::new(Dataset { train: vec![problem()], held_out: Vec::new() }),
            tokenizer,
            pending: Pending::default(),
            n_refits: 0,
        })?;
        let (buffer, vocab_size) = (GroupBuffer::new(reader), subject.config.vocab_size);
        Ok(Self { worker, buffer, trainer, objective, vocab_size })
    }

    /// One step, as [`run`](crate::run::run) has it; also the age of the process when its optimiser step was done.
    fn step(&mut self, setup: &StepSetup, round: usize) -> Result<(StepSeconds, Option<f64>), RunError> {
        let start = Instant::now();
        let bar = |kind, total: usize| Progress::stderr().bar(kind, total as u64);
        let first = round * setup.groups;
        let prompts = (first..first + setup.groups).map(|group| Prompt {
            group: GroupId(group as u64),
            problem: 0,
            tokens: prompt(group, setup.prompt, self.vocab_size),
        });
        let rollout_bar = bar(BarKind::Rollout, setup.completions());
        self.worker.sample(prompts.collect(), setup.groups, rollout_bar)?;
        let sampled = self.buffer.receive(setup.completions(), &mut self.worker)?;
        assert_eq!(sampled.n_scored, setup.completions(), "every completion has a score");
        self.worker.free_cache()?;
        let rollout = start.elapsed().as_secs_f64();

        let start = Instant::now();
        let frames = self.buffer.frames()?;
        check_layers(&frames, &self.trainer.policy().config().moe_layers())?;
        let groups = groups(&frames, self.trainer.version(), setup.train.max_staleness)?;
        let limits = Limits {
            mini_steps: setup.train.mini_steps,
            micro_batch_tokens: setup.train.micro_batch_tokens,
            share_prompts: setup.train.share_prompts,
            routes: RoutesUse::Replay,
        };
        let batch = Batch::pack(&groups, &self.objective, limits)?;
        let stats = self.trainer.step(&batch, &mut |_| {})?;
        assert_eq!(stats.version, PolicyVersion(round as u64 + 1), "every step updates the weights");
        drop((batch, groups, frames));
        self.buffer.release();
        let age = machine::process_age_seconds();
        let train = start.elapsed().as_secs_f64();

        let start = Instant::now();
        self.worker.refit(self.trainer.weights(), self.trainer.version())?;
        Ok((StepSeconds { rollout, train, refit: start.elapsed().as_secs_f64() }, age))
    }
}

/// A recipe's default engine, with room for all completions of a step at once.
fn engine_config(subject: &Subject, setup: &StepSetup) -> EngineConfig {
    let section = EngineSection { max_running: setup.completions(), ..EngineSection::default() };
    let mut config = EngineConfig {
        dtype: setup.dtype,
        numerics: Numerics::Exact,
        kv_bytes: 0,
        block_tokens: section.block_tokens,
        max_batch_tokens: section.max_batch_tokens.max(section.max_running),
        max_running: section.max_running,
        prefix_cache: section.prefix_cache,
        capture_routes: true,
        replay: None,
    };
    let blocks = (setup.prompt + setup.new).div_ceil(config.block_tokens) + 1;
    config.kv_bytes = config.block_bytes(&subject.config) * (setup.completions() * blocks) as u64;
    config
}

fn sample_spec(setup: &StepSetup) -> SampleSpec {
    SampleSpec {
        group_size: setup.group_size,
        max_new_tokens: setup.new,
        // Nothing ends a completion early.
        stop_tokens: [].into(),
        sampling: Sampling { temperature: 1.0, ..Sampling::GREEDY },
        seed: 0,
        retries: Retries { attempts: 1 },
        in_flight: InFlight::default(),
        max_lag: 0,
    }
}

fn problem() -> Problem {
    Problem { prompt: String::new(), answer: String::new(), wrong: None }
}

/// Tells completions apart, so that every group has an advantage.
struct Spelling;

impl Reward for Spelling {
    fn name(&self) -> &str {
        "spelling"
    }

    fn score(&self, _: &Problem, completion: &str, _: bool) -> f32 {
        let sum: u32 = completion.bytes().map(u32::from).sum();
        (sum % 997) as f32 / 997.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    #[test]
    fn steps_are_whole_and_their_parts_make_the_whole() {
        let subject = Subject::fresh(&fixtures::model_dir()).unwrap();
        let setup = StepSetup {
            groups: 2,
            group_size: 3,
            prompt: 5,
            new: 4,
            rounds: 2,
            dtype: Dtype::Bf16,
            train: Train::default(),
        };
        let measured = measure(&subject, &setup).unwrap();
        assert_eq!((measured.rounds, measured.completions), (2, 6));
        let parts = [measured.rollout_seconds, measured.train_seconds, measured.refit_seconds];
        let lowest: f64 = parts.iter().map(|part| part.min).sum();
        assert!(lowest > 0.0 && measured.step_seconds.max >= lowest);
        assert!(measured.first_step_seconds.is_some_and(f64::is_finite));
        assert!(measured.table().contains("refit"), "{}", measured.table());
    }

    #[test]
    fn a_model_without_tokenizer_is_refused() {
        let mut subject = Subject::fresh(&fixtures::model_dir()).unwrap();
        subject.dir = "nowhere".into();
        let setup = StepSetup {
            groups: 1,
            group_size: 2,
            prompt: 2,
            new: 2,
            rounds: 1,
            dtype: Dtype::F32,
            train: Train::default(),
        };
        assert!(matches!(measure(&subject, &setup), Err(RunError::Task(_))));
    }
}
