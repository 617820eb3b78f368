//! The rollout worker: a thread that owns the engine, scores what it samples, and writes it into the ring.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use r3_core::ids::{GroupId, TokenId};
use r3_core::rollout::{FinishReason, Reward as Outcome};
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::sampler::Sampling;
use r3_model::error::ModelError;
use r3_model::source::{TensorSource, model_hash};
use r3_ring::frame::{FrameMeta, encode, frame_bytes};
use r3_ring::writer::Writer;
use r3_scheduler::request::Finished;
use r3_tasks::dataset::{Dataset, Problem, Prompt};
use r3_tasks::reward::{Completion, Reward, RewardFailure, score_caught};
use r3_tasks::tokenizer::Tokenizer;
use r3_telemetry::progress::Bar;

use crate::error::RunError;
use crate::handle::{Command, Pulse, Reply};

/// How rollouts are sampled.
#[derive(Clone, Debug)]
pub struct SampleSpec {
    /// Rollouts of a prompt.
    pub group_size: u32,
    /// Tokens of a completion at most.
    pub max_new_tokens: usize,
    /// Any of these ends a completion.
    pub stop_tokens: Arc<[TokenId]>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Seed of the run.
    pub seed: u64,
}

/// What a worker is built from.
pub struct WorkerParts {
    /// The engine.
    pub engine: Engine,
    /// Where rollouts go.
    pub writer: Writer,
    /// Longest wait for room in the ring.
    pub deadline: Duration,
    /// How rollouts are sampled.
    pub spec: SampleSpec,
    /// Judges completions.
    pub reward: Arc<dyn Reward>,
    /// The problems.
    pub dataset: Arc<Dataset>,
    /// Turns completions into text.
    pub tokenizer: Arc<Tokenizer>,
}

/// What sampling a batch of prompts took.
#[derive(Clone, Debug, Default)]
pub struct SampleStats {
    /// Tokens sampled.
    pub sampled_tokens: u64,
    /// Tokens of the prompts, once a group.
    pub prompt_tokens: u64,
    /// Of those, tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// Seconds of scoring.
    pub reward_s: f64,
    /// Largest share of KV blocks held at once.
    pub kv_usage: f64,
    /// Most sequences that ran at once.
    pub max_running: usize,
    /// Most sequences that waited at once.
    pub max_waiting: usize,
    /// Sequences that gave their blocks back.
    pub preemptions: u64,
    /// Rollouts that were scored.
    pub n_scored: usize,
    /// Sum of their scores.
    pub score_sum: f64,
    /// Sum of the squares of their scores.
    pub score_square_sum: f64,
    /// Rollouts cut off by their token limit.
    pub n_cut: usize,
    /// Rollouts whose reward failed.
    pub failures: Vec<RewardFailure>,
}

impl SampleStats {
    /// Rollouts sampled.
    #[must_use]
    pub fn n_rollouts(&self) -> usize {
        self.n_scored + self.failures.len()
    }

    /// Mean and sample standard deviation of the scores; 0 where there are too few.
    #[must_use]
    pub fn score_moments(&self) -> (f64, f64) {
        let n = self.n_scored as f64;
        let mean = self.score_sum / n.max(1.0);
        let variance = (self.score_square_sum - n * mean * mean) / (n - 1.0).max(1.0);
        (mean, variance.max(0.0).sqrt())
    }

    /// Adds what another batch of prompts took.
    pub fn add(&mut self, other: Self) {
        self.sampled_tokens += other.sampled_tokens;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.reward_s += other.reward_s;
        self.kv_usage = self.kv_usage.max(other.kv_usage);
        self.max_running = self.max_running.max(other.max_running);
        self.max_waiting = self.max_waiting.max(other.max_waiting);
        self.preemptions += other.preemptions;
        self.n_scored += other.n_scored;
        self.score_sum += other.score_sum;
        self.score_square_sum += other.score_square_sum;
        self.n_cut += other.n_cut;
        self.failures.extend(other.failures);
    }
}

/// What a greedy evaluation found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Problems answered.
    pub problems: usize,
    /// Mean score.
    pub accuracy: f64,
    /// Seconds it took.
    pub seconds: f64,
}

/// The worker itself, on its thread.
pub(crate) struct Worker {
    parts: WorkerParts,
    /// Problem of each group that is being sampled.
    prompts: HashMap<GroupId, usize>,
    pulse: Pulse,
}

impl Worker {
    pub(crate) fn new(parts: WorkerParts, pulse: Pulse) -> Self {
        Self { parts, prompts: HashMap::new(), pulse }
    }

    /// Obeys until the other end is dropped or something fails.
    pub(crate) fn serve(mut self, commands: &Receiver<Command>, replies: &Sender<Result<Reply, RunError>>) {
        while let Ok(command) = commands.recv() {
            let reply = match command {
                Command::Sample { prompts, bar } => self.sample(prompts, &bar).map(Reply::Sampled),
                Command::Evaluate { problems, max_new_tokens, bar } => {
                    self.evaluate(problems, max_new_tokens, &bar).map(Reply::Evaluated)
                }
                Command::Refit { weights, version } => {
                    let source = Beating { source: &weights, pulse: &self.pulse };
                    self.parts.engine.refit(&source, version).map(Reply::Refitted).map_err(RunError::from)
                }
            };
            let failed = reply.is_err();
            if replies.send(reply).is_err() || failed {
                return;
            }
        }
    }

    fn sample(&mut self, prompts: Vec<Prompt>, bar: &Bar) -> Result<SampleStats, RunError> {
        let spec = self.parts.spec.clone();
        let mut stats = SampleStats::default();
        for prompt in prompts {
            stats.prompt_tokens += prompt.tokens.len() as u64;
            self.prompts.insert(prompt.group, prompt.problem);
            self.parts.engine.submit(&GroupRequest {
                group: prompt.group,
                prompt: prompt.tokens.into(),
                size: spec.group_size,
                max_new_tokens: spec.max_new_tokens,
                stop_tokens: Arc::clone(&spec.stop_tokens),
                sampling: spec.sampling,
                seed: spec.seed,
                return_routes: self.parts.engine.captures_routes().then_some(0),
            })?;
        }
        let engine = &self.parts.engine;
        let layer_ids = engine.model().moe_layers();
        let origin = FrameMeta {
            layer_ids: &layer_ids,
            weight_epoch: engine.epoch(),
            model_hash: model_hash(engine.hashes()),
            reward: Outcome::Failed,
            mask: None,
        };
        let preemptions_before = self.parts.engine.stats().n_preemptions;
        while self.parts.engine.has_work() {
            let tick = self.parts.engine.tick()?;
            stats.sampled_tokens += tick.sampled_tokens as u64;
            bar.tokens(tick.sampled_tokens as u64);
            self.pulse.beat();
            self.observe(&mut stats);
            while let Some(finished) = self.parts.engine.take_finished() {
                self.deliver(&finished, origin, &mut stats)?;
                self.pulse.beat();
                bar.inc(1);
            }
        }
        stats.preemptions = self.parts.engine.stats().n_preemptions - preemptions_before;
        self.prompts.clear();
        Ok(stats)
    }

    fn observe(&self, stats: &mut SampleStats) {
        let now = self.parts.engine.stats();
        stats.kv_usage = stats.kv_usage.max(now.n_held_blocks as f64 / now.n_blocks as f64);
        stats.max_running = stats.max_running.max(now.n_running);
        stats.max_waiting = stats.max_waiting.max(now.n_waiting);
    }

    /// Scores a rollout and writes its frame: the one copy its routes ever see.
    ///
    /// `origin` says which weights and layers a frame of this batch is of; the reward is filled in.
    fn deliver(
        &mut self,
        finished: &Finished,
        origin: FrameMeta<'_>,
        stats: &mut SampleStats,
    ) -> Result<(), RunError> {
        let start = Instant::now();
        let reward = match self.score(finished)? {
            Ok(score) => {
                stats.n_scored += 1;
                stats.score_sum += f64::from(score);
                stats.score_square_sum += f64::from(score).powi(2);
                Outcome::Score(score)
            }
            Err(failure) => {
                tracing::warn!(group = finished.group.0, rollout = finished.index, "{failure}");
                stats.failures.push(failure);
                Outcome::Failed
            }
        };
        stats.reward_s += start.elapsed().as_secs_f64();
        stats.n_cut += usize::from(finished.finish == FinishReason::Length);
        if finished.index == 0 {
            stats.cached_tokens += finished.cached_tokens as u64;
        }
        let meta = FrameMeta { reward, ..origin };
        let rollout = finished.view();
        let mut frame = self.parts.writer.reserve(frame_bytes(&rollout), self.parts.deadline)?;
        encode(&rollout, &meta, &mut frame);
        frame.commit();
        Ok(())
    }

    fn score(&self, finished: &Finished) -> Result<Result<f32, RewardFailure>, RunError> {
        let problem = &self.parts.dataset.train[self.prompts[&finished.group]];
        judge(finished, problem, &*self.parts.reward, &self.parts.tokenizer)
    }

    fn evaluate(
        &mut self,
        problems: usize,
        max_new_tokens: usize,
        bar: &Bar,
    ) -> Result<Evaluation, RunError> {
        let start = Instant::now();
        let WorkerParts { engine, tokenizer, dataset, reward, spec, .. } = &mut self.parts;
        let held_out = &dataset.held_out[..problems.min(dataset.held_out.len())];
        let accuracy = greedy_accuracy(
            engine,
            tokenizer,
            &Held { problems: held_out, reward: &**reward, stop_tokens: &spec.stop_tokens, max_new_tokens },
            &|tokens, answers| {
                bar.add(tokens, answers);
                self.pulse.beat();
            },
        )?;
        Ok(Evaluation { problems: held_out.len(), accuracy, seconds: start.elapsed().as_secs_f64() })
    }
}

/// Weights whose reading is felt as the worker's pulse.
struct Beating<'a> {
    source: &'a dyn TensorSource,
    pulse: &'a Pulse,
}

impl TensorSource for Beating<'_> {
    fn read(&self, name: &str, out: &mut Vec<f32>) -> Result<(), ModelError> {
        self.source.read(name, out)?;
        self.pulse.beat();
        Ok(())
    }
}

/// What `reward` says of a completion of `problem`, as text.
fn judge(
    finished: &Finished,
    problem: &Problem,
    reward: &dyn Reward,
    tokenizer: &Tokenizer,
) -> Result<Result<f32, RewardFailure>, RunError> {
    let rollout = finished.view();
    let text = tokenizer.completion_text(rollout.completion(), rollout.finish)?;
    let completion = Completion {
        group: finished.group,
        index: finished.index,
        text: &text,
        finished: finished.finish == FinishReason::Stop,
    };
    Ok(score_caught(reward, problem, &completion))
}

/// What is evaluated, and how.
pub struct Held<'a> {
    /// The problems.
    pub problems: &'a [Problem],
    /// Judges the answers.
    pub reward: &'a dyn Reward,
    /// Any of these ends an answer.
    pub stop_tokens: &'a Arc<[TokenId]>,
    /// Tokens of an answer at most.
    pub max_new_tokens: usize,
}

/// Mean score of one greedy answer to each problem; an answer whose reward fails counts 0. 0 without problems.
/// `progress(tokens, answers)` hears of every tick and every answer.
///
/// # Errors
/// If a prompt cannot be encoded or the engine refuses it.
pub fn greedy_accuracy(
    engine: &mut Engine,
    tokenizer: &Tokenizer,
    held: &Held<'_>,
    progress: &dyn Fn(u64, u64),
) -> Result<f64, RunError> {
    for (index, problem) in held.problems.iter().enumerate() {
        engine.submit(&GroupRequest {
            group: GroupId(index as u64),
            prompt: tokenizer.encode(&problem.prompt)?.into(),
            size: 1,
            max_new_tokens: held.max_new_tokens,
            stop_tokens: Arc::clone(held.stop_tokens),
            sampling: Sampling::GREEDY,
            seed: 0,
            return_routes: None,
        })?;
    }
    let mut sum = 0.0;
    while engine.has_work() {
        let tick = engine.tick()?;
        progress(tick.sampled_tokens as u64, 0);
        while let Some(finished) = engine.take_finished() {
            let problem = &held.problems[finished.group.index()];
            let judged = judge(&finished, problem, held.reward, tokenizer)?;
            sum += f64::from(judged.unwrap_or(0.0));
            progress(0, 1);
        }
    }
    Ok(sum / held.problems.len().max(1) as f64)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::fixtures::{dataset, worker_parts};

    #[test]
    fn batches_add_up_and_peaks_stay_peaks() {
        let batch = |n: usize| SampleStats {
            sampled_tokens: n as u64,
            prompt_tokens: n as u64,
            cached_tokens: n as u64,
            reward_s: n as f64,
            kv_usage: n as f64,
            max_running: n,
            max_waiting: n,
            preemptions: n as u64,
            n_scored: n,
            ..SampleStats::default()
        };
        let mut stats = batch(3);
        stats.add(batch(2));
        assert_eq!((stats.sampled_tokens, stats.prompt_tokens, stats.cached_tokens), (5, 5, 5));
        assert_eq!((stats.reward_s, stats.preemptions, stats.n_scored), (5.0, 5, 5));
        assert_eq!((stats.kv_usage, stats.max_running, stats.max_waiting), (3.0, 3, 3));
    }

    /// Gives its scores in turn, and remembers what it was asked about.
    struct InTurn {
        scores: Vec<f32>,
        asked: Mutex<Vec<String>>,
    }

    impl Reward for InTurn {
        fn name(&self) -> &str {
            "in_turn"
        }

        fn score(&self, problem: &Problem, _: &str, _: bool) -> f32 {
            let mut asked = self.asked.lock().unwrap();
            asked.push(problem.prompt.clone());
            self.scores[asked.len() - 1]
        }
    }

    #[test]
    fn accuracy_is_the_mean_over_all_problems_and_a_failed_reward_counts_nothing() {
        let reward = Arc::new(InTurn { scores: vec![1.0, f32::NAN, 0.5, 0.0, 1.0], asked: Mutex::default() });
        let (mut parts, _ring) = worker_parts(reward.clone(), Duration::from_secs(60));
        let problems = dataset().train;
        let held = Held {
            problems: &problems,
            reward: &*reward,
            stop_tokens: &parts.spec.stop_tokens,
            max_new_tokens: 2,
        };
        let heard = Mutex::new((0, 0));
        let accuracy = greedy_accuracy(&mut parts.engine, &parts.tokenizer, &held, &|tokens, answers| {
            let mut heard = heard.lock().unwrap();
            *heard = (heard.0 + tokens, heard.1 + answers);
        });
        assert_eq!(accuracy.unwrap(), 2.5 / 5.0);
        let (tokens, answers) = heard.into_inner().unwrap();
        assert!((5..=10).contains(&tokens) && answers == 5, "{tokens} tokens, {answers} answers");
        let mut asked = reward.asked.lock().unwrap().clone();
        asked.sort();
        assert_eq!(asked, problems.iter().map(|problem| problem.prompt.clone()).collect::<Vec<_>>());
        let none = Held { problems: &[], ..held };
        assert_eq!(greedy_accuracy(&mut parts.engine, &parts.tokenizer, &none, &|_, _| {}).unwrap(), 0.0);
    }
}
