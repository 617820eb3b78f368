//! The rollout worker: a thread that owns the engine, scores what it samples, and writes it into the ring.
//!
//! It counts ticks, never time, so that a run does the same whenever it runs: which rollouts are in flight at a refit
//! follows from the recipe.

use std::mem;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use r3_core::ids::{PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward as Outcome};
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::resume::Continuation;
use r3_engine::sampler::Sampling;
use r3_kernels::experts::Experts;
use r3_kernels::gemm::PackedMatrix;
use r3_model::error::ModelError;
use r3_model::source::{Lent, TensorSource, model_hash};
use r3_recipe::rollout::InFlight;
use r3_ring::frame::{FrameMeta, encode, frame_bytes};
use r3_ring::writer::Writer;
use r3_scheduler::request::Finished;
use r3_tasks::dataset::{Dataset, Prompt};
use r3_tasks::retries::Retries;
use r3_tasks::reward::Reward;
use r3_tasks::tokenizer::Tokenizer;
use r3_telemetry::progress::Bar;

use crate::error::RunError;
use crate::greedy::{Evaluation, Held, greedy_accuracy, judge};
use crate::handle::{Command, Pulse, Refitted, Reply};
use crate::pending::{Origin, Pending, Scored};
use crate::pending_file::Snapshot;
use crate::sample_stats::SampleStats;

/// How rollouts are sampled.
#[derive(Clone, Debug)]
pub struct SampleSpec {
    /// Rollouts of a prompt.
    pub group_size: u32,
    /// Tokens of an answer at most.
    pub max_new_tokens: usize,
    /// Any of these ends a completion.
    pub stop_tokens: Arc<[TokenId]>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Seed of the run.
    pub seed: u64,
    /// How often a rollout may answer.
    pub retries: Retries,
    /// What a refit does to unfinished rollouts.
    pub in_flight: InFlight,
    /// Versions that may lie between a group's first one and the one served, for the group not to be in this step: the
    /// bound on staleness, less what one step adds to it.
    pub max_lag: u64,
}

impl SampleSpec {
    /// How the turn that `rollout` ends with ended, if it did: a checkpoint keeps nothing of what was said after it.
    fn end_of_turn(&self, rollout: &Finished) -> Option<FinishReason> {
        let last = rollout.tokens.last().filter(|_| rollout.n_sampled_in_last_turn() > 0)?;
        if self.stop_tokens.contains(last) {
            return Some(FinishReason::Stop);
        }
        (rollout.n_sampled_in_last_turn() == self.max_new_tokens).then_some(FinishReason::Length)
    }

    /// How a rollout goes on that was begun like this.
    fn continuation(&self) -> Continuation {
        Continuation {
            max_new_tokens: self.max_new_tokens,
            stop_tokens: Arc::clone(&self.stop_tokens),
            sampling: self.sampling,
            seed: self.seed,
        }
    }
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
    /// What an earlier process left unfinished.
    pub pending: Pending,
    /// Refits of the run by then.
    pub n_refits: u64,
}

/// The worker itself, on its thread.
pub(crate) struct Worker {
    parts: WorkerParts,
    /// Which of the model's layers have routes.
    layer_ids: Vec<u32>,
    /// One hash over the weights served.
    model_hash: u64,
    pulse: Pulse,
}

impl Worker {
    pub(crate) fn new(parts: WorkerParts, pulse: Pulse) -> Self {
        let engine = &parts.engine;
        let (layer_ids, model_hash) = (engine.model().moe_layers(), model_hash(engine.hashes()));
        Self { parts, layer_ids, model_hash, pulse }
    }

    /// Obeys until the other end is dropped or something fails.
    pub(crate) fn serve(mut self, commands: &Receiver<Command>, replies: &Sender<Result<Reply, RunError>>) {
        while let Ok(command) = commands.recv() {
            let reply = match command {
                Command::Sample { prompts, n_groups, bar } => {
                    self.sample(prompts, n_groups, &bar).map(Reply::Sampled)
                }
                Command::Drain { bar } => self.drain(&bar).map(Reply::Sampled),
                Command::FreeCache => {
                    self.parts.engine.free_cache();
                    Ok(Reply::Freed)
                }
                Command::Evaluate { problems, max_new_tokens, bar } => {
                    self.evaluate(problems, max_new_tokens, &bar).map(Reply::Evaluated)
                }
                Command::Refit { weights, version } => self.refit(&weights, version).map(Reply::Refitted),
                Command::Snapshot => Ok(Reply::Snapshot(self.snapshot())),
            };
            let failed = reply.is_err();
            if replies.send(reply).is_err() || failed {
                return;
            }
        }
    }

    /// Begins `prompts`, and hands over the oldest `n_groups` of the groups that were begun.
    fn sample(&mut self, prompts: Vec<Prompt>, n_groups: usize, bar: &Bar) -> Result<SampleStats, RunError> {
        self.resume()?;
        prompts.into_iter().try_for_each(|prompt| self.begin(prompt))?;
        let served = self.parts.engine.version();
        let oldest = PolicyVersion(served.0.saturating_sub(self.parts.spec.max_lag));
        // Where every group goes there is nothing to wait for: rollouts go as they end.
        let is_choice = self.parts.pending.n_groups() > n_groups;
        let mut stats = SampleStats::default();
        while !self.parts.pending.is_ready(n_groups, oldest) {
            for rollout in self.tick(&mut stats, bar)? {
                match is_choice {
                    true => self.parts.pending.keep(rollout),
                    false => self.deliver(&rollout, &mut stats)?,
                }
            }
        }
        for rollout in self.parts.pending.take(n_groups) {
            self.deliver(&rollout, &mut stats)?;
        }
        Ok(stats)
    }

    /// Finishes what is in flight, and keeps it.
    fn drain(&mut self, bar: &Bar) -> Result<SampleStats, RunError> {
        let mut stats = SampleStats::default();
        while self.parts.engine.has_work() {
            for rollout in self.tick(&mut stats, bar)? {
                self.parts.pending.keep(rollout);
            }
        }
        Ok(stats)
    }

    fn begin(&mut self, prompt: Prompt) -> Result<(), RunError> {
        let Self { parts: WorkerParts { engine, spec, pending, .. }, .. } = self;
        pending.begin(&prompt, spec.group_size, engine.version());
        engine.submit(&GroupRequest {
            group: prompt.group,
            prompt: prompt.tokens.into(),
            size: spec.group_size,
            max_new_tokens: spec.max_new_tokens,
            stop_tokens: Arc::clone(&spec.stop_tokens),
            sampling: spec.sampling,
            seed: spec.seed,
            return_routes: engine.captures_routes().then_some(0),
        })?;
        Ok(())
    }

    /// Gives the engine back what was taken out of it. They go in the order of their age, so the engine plans as if they
    /// had never left.
    fn resume(&mut self) -> Result<(), RunError> {
        let mut partial = mem::take(&mut self.parts.pending.partial).into_iter().peekable();
        while let Some(mut first) = partial.next() {
            if let Some(finish) = self.parts.spec.end_of_turn(&first) {
                first.finish = finish;
                let reply =
                    self.reply(&first, 0.0).expect("a rollout whose last answer ended is not unfinished");
                self.ask_again(first, &reply)?;
                continue;
            }
            let mut members = vec![first];
            while let Some(next) = partial
                .next_if(|next| next.group == members[0].group && self.parts.spec.end_of_turn(next).is_none())
            {
                members.push(next);
            }
            let how = self.parts.spec.continuation();
            self.parts.engine.resume(members, &how).map_err(|returned| returned.error)?;
        }
        Ok(())
    }

    /// What follows the last answer of `rollout`, if it does not end with it.
    fn reply(&self, rollout: &Finished, score: f32) -> Option<String> {
        let problem = &self.parts.dataset.train[self.parts.pending.problem(rollout.group)];
        self.parts.spec.retries.reply(problem, rollout.turns.len(), score)
    }

    /// Lets the engine sample another answer after `reply`.
    fn ask_again(&mut self, rollout: Finished, reply: &str) -> Result<(), RunError> {
        let WorkerParts { engine, spec, tokenizer, .. } = &mut self.parts;
        let given = tokenizer.encode(reply)?;
        engine.next_turn(rollout, &given, &spec.continuation()).map_err(|returned| returned.error)?;
        Ok(())
    }

    /// Takes everything unfinished out of the engine.
    fn take_back(&mut self) {
        self.parts.engine.abort_all();
        while let Some(rollout) = self.parts.engine.take_finished() {
            self.parts.pending.partial.push(rollout);
        }
    }

    /// Ticks of the engine until one ends rollouts; those, scored.
    fn tick(&mut self, stats: &mut SampleStats, bar: &Bar) -> Result<Vec<Scored>, RunError> {
        assert!(self.parts.engine.has_work(), "rollouts that are waited for are in the engine");
        let Self { parts: WorkerParts { engine, .. }, pulse, .. } = self;
        let mut n_preemptions = engine.stats().n_preemptions;
        engine.tick_until_finished(|engine, tick| {
            let now = engine.stats();
            stats.sampled_tokens += tick.sampled_tokens as u64;
            stats.preemptions += now.n_preemptions - n_preemptions;
            n_preemptions = now.n_preemptions;
            stats.observe(&now);
            bar.tokens(tick.sampled_tokens as u64);
            pulse.beat();
            ControlFlow::Continue(())
        })?;
        let mut ended = Vec::new();
        while let Some(finished) = self.parts.engine.take_finished() {
            if let Some(scored) = self.score(finished, stats)? {
                ended.push(scored);
                bar.inc(1);
            }
            self.pulse.beat();
        }
        Ok(ended)
    }

    /// Scores an answer. `None` if it was wrong and another one may be given, which the engine now samples.
    fn score(&mut self, rollout: Finished, stats: &mut SampleStats) -> Result<Option<Scored>, RunError> {
        let start = Instant::now();
        let origin = self.origin();
        let WorkerParts { dataset, reward, tokenizer, pending, .. } = &self.parts;
        let problem = &dataset.train[pending.problem(rollout.group)];
        let reward = match judge(&rollout, problem, &**reward, tokenizer)? {
            Ok(score) => Outcome::Score(score),
            Err(failure) => {
                tracing::warn!(group = rollout.group.0, rollout = rollout.index, "{failure}");
                stats.failures.push(failure);
                Outcome::Failed
            }
        };
        stats.reward_s += start.elapsed().as_secs_f64();
        let score = reward.score().unwrap_or(f32::INFINITY);
        if let Some(reply) = self.reply(&rollout, score) {
            self.ask_again(rollout, &reply)?;
            return Ok(None);
        }
        self.parts.pending.end_one(rollout.group);
        Ok(Some(Scored { rollout, reward, origin }))
    }

    /// Writes the frame of a rollout: the one copy its routes ever see.
    fn deliver(&mut self, scored: &Scored, stats: &mut SampleStats) -> Result<(), RunError> {
        stats.hand_over(scored);
        let Scored { rollout, reward, origin: Origin { weight_epoch, model_hash } } = scored;
        let mask = rollout.mask();
        let meta = FrameMeta {
            layer_ids: &self.layer_ids,
            weight_epoch: *weight_epoch,
            model_hash: *model_hash,
            reward: *reward,
            mask: mask.as_deref(),
        };
        let rollout = rollout.view();
        let mut frame = self.parts.writer.reserve(frame_bytes(&rollout), self.parts.deadline)?;
        encode(&rollout, &meta, &mut frame);
        frame.commit();
        Ok(())
    }

    fn origin(&self) -> Origin {
        Origin { weight_epoch: self.parts.n_refits, model_hash: self.model_hash }
    }

    /// Loads trained weights. Should that fail, whatever is in flight goes on under the old ones.
    fn refit(&mut self, weights: &dyn TensorSource, version: PolicyVersion) -> Result<Refitted, RunError> {
        let source = Beating { source: weights, pulse: &self.pulse };
        let report = self.parts.engine.refit(&source, version)?;
        self.model_hash = model_hash(&report.hashes);
        self.parts.n_refits += 1;
        let n_rollouts = self.parts.engine.n_open_requests();
        match self.parts.spec.in_flight {
            InFlight::Abort => self.take_back(),
            // The engine keeps what is in flight; after a drain, nothing is.
            InFlight::Continue | InFlight::Drain => {}
        }
        Ok(Refitted { report, n_groups: self.parts.pending.n_unfinished(), n_rollouts })
    }

    /// Answers held-out problems, with the engine to itself: whatever is in flight steps aside, and nothing that is cached
    /// here is found by what is sampled next, in this process or in one that resumes from a checkpoint.
    fn evaluate(
        &mut self,
        problems: usize,
        max_new_tokens: usize,
        bar: &Bar,
    ) -> Result<Evaluation, RunError> {
        let start = Instant::now();
        self.take_back();
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
        engine.flush();
        Ok(Evaluation { problems: held_out.len(), accuracy, seconds: start.elapsed().as_secs_f64() })
    }

    fn snapshot(&self) -> Snapshot {
        let WorkerParts { engine, pending, .. } = &self.parts;
        Snapshot::new(pending, &engine.in_flight(), &self.layer_ids, self.origin())
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

    fn lend(&self, name: &str) -> Option<Lent<'_>> {
        self.pulse.beat();
        self.source.lend(name)
    }

    fn visit(&self, name: &str, each: &mut dyn FnMut(&[f32])) -> Result<(), ModelError> {
        self.source.visit(name, each)?;
        self.pulse.beat();
        Ok(())
    }

    fn packed_matrix(&self, name: &str, matrix: &Arc<PackedMatrix>) {
        self.source.packed_matrix(name, matrix);
    }

    fn packed_experts(&self, down: &str, experts: &Arc<Experts>) {
        self.source.packed_experts(down, experts);
    }
}

#[cfg(test)]
mod tests;
