//! The rollout worker: a thread that owns the engine, scores what it samples, and writes it into the ring.
//!
//! It counts ticks, never time, so that a run does the same whenever it runs: which rollouts are in flight at a refit
//! follows from the recipe.

use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use r3_core::ids::{PolicyVersion, TokenId};
use r3_core::rollout::{FinishReason, Reward as Outcome};
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::resume::Continuation;
use r3_engine::sampler::Sampling;
use r3_model::error::ModelError;
use r3_model::source::{TensorSource, model_hash};
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

    /// One tick of the engine; the rollouts that ended with it, scored.
    fn tick(&mut self, stats: &mut SampleStats, bar: &Bar) -> Result<Vec<Scored>, RunError> {
        assert!(self.parts.engine.has_work(), "rollouts that are waited for are in the engine");
        let preemptions_before = self.parts.engine.stats().n_preemptions;
        let tick = self.parts.engine.tick()?;
        let now = self.parts.engine.stats();
        stats.sampled_tokens += tick.sampled_tokens as u64;
        stats.preemptions += now.n_preemptions - preemptions_before;
        stats.observe(&now);
        bar.tokens(tick.sampled_tokens as u64);
        self.pulse.beat();
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
        Origin { weight_epoch: self.parts.engine.epoch(), model_hash: self.model_hash }
    }

    /// Loads trained weights. Should that fail, whatever is in flight goes on under the old ones.
    fn refit(&mut self, weights: &dyn TensorSource, version: PolicyVersion) -> Result<Refitted, RunError> {
        let source = Beating { source: weights, pulse: &self.pulse };
        let report = self.parts.engine.refit(&source, version)?;
        self.model_hash = model_hash(&report.hashes);
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
}

#[cfg(test)]
mod tests {
    use r3_core::rollout::RolloutView;
    use r3_engine::config::EngineConfig;
    use r3_model::init::FreshWeights;
    use r3_ring::frame::Frame;
    use r3_ring::reader::Reader;
    use r3_tasks::reward::ExactMatch;

    use super::*;
    use crate::fixtures::{bar, dataset, model, recipe, worker_parts};
    use crate::pending_file::{self, Expected};
    use crate::prompts::Prompts;

    const MODES: [InFlight; 3] = [InFlight::Drain, InFlight::Abort, InFlight::Continue];
    const GROUPS: usize = 4;
    const OVER: usize = 4;

    /// The rollout side of a run, which is given other weights after every step.
    struct Rollouts {
        worker: Worker,
        ring: Reader,
        prompts: Prompts,
        version: u64,
        /// Every rollout that was handed over: what it is, to the bit, and the versions of its tokens.
        taken: Vec<(String, Vec<u64>)>,
    }

    impl Rollouts {
        fn new(in_flight: InFlight) -> Self {
            Self::of(in_flight, Retries { attempts: 1 })
        }

        /// Five of eight to sixteen sequences run at once, so that refits find some running, some waiting and some whole.
        fn of(in_flight: InFlight, retries: Retries) -> Self {
            let (mut parts, ring) = worker_parts(Arc::new(ExactMatch), Duration::from_secs(60));
            let config = EngineConfig::from_recipe(&recipe().engine, recipe().rollout.dtype, true);
            let config = EngineConfig { max_running: 5, max_batch_tokens: 16, block_tokens: 4, ..config };
            let weights = FreshWeights::new(&model(), 1);
            parts.engine = Engine::new(config, &model(), &weights, PolicyVersion(0)).unwrap();
            parts.dataset = Arc::new(Dataset { held_out: dataset().train, ..dataset() });
            parts.spec = SampleSpec { max_new_tokens: 7, in_flight, max_lag: 1, retries, ..parts.spec };
            let prompts =
                Prompts::new(Arc::clone(&parts.dataset), Arc::clone(&parts.tokenizer), 3, 0).unwrap();
            let worker = Worker::new(parts, Pulse::default());
            Self { worker, ring, prompts, version: 0, taken: Vec::new() }
        }

        /// As another process goes on with it, from files and the weights served.
        fn resumed(&self) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let snapshot = self.worker.snapshot();
            snapshot.write(dir.path()).unwrap();
            let SampleSpec { in_flight, retries, .. } = self.worker.parts.spec;
            let mut other = Self::of(in_flight, retries);
            other.prompts = other.prompts_at(self.prompts.cursor());
            let expected = Expected { group_size: 2, routes: Some(model().route_dims()) };
            let begun = snapshot.begun.iter().map(|(group, version)| (group.0, version.0)).collect();
            other.worker.parts.pending =
                pending_file::read(dir.path(), &begun, expected, &mut other.prompts).unwrap();
            other.version = self.version;
            other.worker.parts.engine.refit(&weights(self.version), PolicyVersion(self.version)).unwrap();
            other.taken.clone_from(&self.taken);
            other
        }

        fn prompts_at(&self, cursor: u64) -> Prompts {
            let WorkerParts { dataset, tokenizer, .. } = &self.worker.parts;
            Prompts::new(Arc::clone(dataset), Arc::clone(tokenizer), 3, cursor).unwrap()
        }

        fn sample(&mut self) {
            let n_pending = self.worker.parts.pending.n_groups();
            let prompts = self.prompts.take(GROUPS + OVER - n_pending).unwrap();
            self.worker.sample(prompts, GROUPS, &bar()).unwrap();
            if self.worker.parts.spec.in_flight == InFlight::Drain {
                self.worker.drain(&bar()).unwrap();
            }
            while let Ok(id) = self.ring.next(Duration::ZERO) {
                let frame = Frame::decode(self.ring.bytes(id)).unwrap();
                let RolloutView { versions, .. } = frame.rollout();
                let versions = versions.iter().map(|version| version.0).collect();
                let taken = format!("{:?} {:?} {:?}", frame.rollout(), frame.mask(), frame.reward());
                self.taken.push((taken, versions));
                self.ring.release(id);
            }
        }

        fn refit(&mut self) -> Refitted {
            self.version += 1;
            self.worker.refit(&weights(self.version), PolicyVersion(self.version)).unwrap()
        }

        fn steps(&mut self, n: usize) {
            for _ in 0..n {
                self.sample();
                self.refit();
            }
        }
    }

    fn weights(version: u64) -> FreshWeights {
        FreshWeights::new(&model(), version + 1)
    }

    fn after_six_steps(in_flight: InFlight) -> Rollouts {
        let mut rollouts = Rollouts::new(in_flight);
        rollouts.steps(6);
        rollouts
    }

    #[test]
    fn versions_are_exact_in_flight_and_staleness_is_bounded() {
        for in_flight in MODES {
            let mut rollouts = Rollouts::new(in_flight);
            let mut n_mixed = 0;
            for step in 0..6 {
                rollouts.taken.clear();
                rollouts.sample();
                assert_eq!(rollouts.taken.len(), 2 * GROUPS);
                for (_, versions) in &rollouts.taken {
                    assert!(versions.is_sorted() && versions.iter().all(|version| version + 2 >= step));
                    n_mixed += usize::from(versions.first() != versions.last());
                }
                let refitted = rollouts.refit();
                assert_eq!(refitted.n_rollouts == 0, in_flight == InFlight::Drain, "{refitted:?}");
            }
            assert_eq!(n_mixed > 4, in_flight != InFlight::Drain, "{n_mixed} mixed");
        }
    }

    #[test]
    fn whether_the_engine_or_the_worker_holds_them_rollouts_go_on_alike() {
        let (kept, taken_back) = (after_six_steps(InFlight::Continue), after_six_steps(InFlight::Abort));
        assert_eq!(kept.taken, taken_back.taken);
        assert_ne!(kept.taken, after_six_steps(InFlight::Drain).taken);
    }

    #[test]
    fn a_refit_that_fails_leaves_what_is_in_flight_as_it_was() {
        struct Broken;
        impl TensorSource for Broken {
            fn read(&self, name: &str, _: &mut Vec<f32>) -> Result<(), ModelError> {
                Err(ModelError::NoSuchTensor { name: name.to_owned() })
            }
        }
        for in_flight in MODES {
            let mut rollouts = Rollouts::new(in_flight);
            for _ in 0..6 {
                rollouts.sample();
                let state = |worker: &Worker| {
                    let WorkerParts { engine, pending, .. } = &worker.parts;
                    (engine.stats(), engine.epoch(), engine.version(), format!("{pending:?}"))
                };
                let before = state(&rollouts.worker);
                let next = PolicyVersion(rollouts.version + 1);
                assert!(rollouts.worker.refit(&Broken, next).is_err());
                assert_eq!(state(&rollouts.worker), before, "{in_flight:?}");
                rollouts.refit();
            }
            assert_eq!(rollouts.taken, after_six_steps(in_flight).taken, "{in_flight:?}");
        }
    }

    #[test]
    fn an_evaluation_neither_disturbs_what_is_in_flight_nor_is_disturbed() {
        for in_flight in MODES {
            let mut rollouts = Rollouts::new(in_flight);
            let mut idle = Rollouts::new(in_flight);
            for _ in 0..6 {
                rollouts.sample();
                rollouts.refit();
                idle.worker.parts.engine.refit(&weights(rollouts.version), PolicyVersion(9)).unwrap();
                let [found, expected] =
                    [&mut rollouts, &mut idle].map(|it| it.worker.evaluate(3, 5, &bar()).unwrap());
                assert_eq!((found.problems, found.accuracy), (3, expected.accuracy));
            }
            assert_eq!(rollouts.taken, after_six_steps(in_flight).taken, "{in_flight:?}");
        }
    }

    #[test]
    fn what_a_checkpoint_keeps_goes_on_in_another_process_alike() {
        for in_flight in MODES {
            let expected = after_six_steps(in_flight).taken;
            for n_before in [1, 4] {
                let mut before = Rollouts::new(in_flight);
                before.steps(n_before);
                let mut after = before.resumed();
                after.steps(6 - n_before);
                assert_eq!(after.taken, expected, "{in_flight:?} after {n_before} steps");
                before.steps(6 - n_before);
                assert_eq!(before.taken, expected, "a checkpoint changes nothing");
            }
        }
    }

    #[test]
    fn a_wrong_answer_is_answered_and_what_is_said_then_is_not_trained_on() {
        let (mut parts, mut ring) = worker_parts(Arc::new(ExactMatch), Duration::from_secs(60));
        parts.spec.retries = Retries { attempts: 3 };
        let tokenizer = Arc::clone(&parts.tokenizer);
        let prompts = Prompts::new(Arc::clone(&parts.dataset), Arc::clone(&tokenizer), 3, 0).unwrap().take(2);
        let mut worker = Worker::new(parts, Pulse::default());
        let stats = worker.sample(prompts.unwrap(), 2, &bar()).unwrap();
        assert_eq!((stats.n_rollouts(), stats.turns), (4, 12), "random weights are never right");
        assert_eq!(stats.completion_tokens, stats.sampled_tokens);
        while let Ok(id) = ring.next(Duration::ZERO) {
            let frame = Frame::decode(ring.bytes(id)).unwrap();
            let rollout = frame.rollout();
            let given = rollout.completion().iter().zip(frame.mask()).filter(|&(_, &mask)| mask == 0);
            let given: Vec<TokenId> = given.map(|(&token, _)| token).collect();
            let prompt = tokenizer.decode(rollout.prompt()).unwrap();
            assert_eq!(tokenizer.decode(&given).unwrap(), format!("no. {prompt}no. {prompt}"));
            assert_eq!(rollout.routes.unwrap().rows(), rollout.tokens.len() - 1);
            ring.release(id);
        }
        assert_eq!((worker.parts.pending.n_groups(), worker.parts.engine.n_open_requests()), (0, 0));
    }

    #[test]
    fn rollouts_that_answer_again_go_on_alike_whoever_holds_them_and_in_another_process() {
        let retries = Retries { attempts: 2 };
        let after = |in_flight, n| {
            let mut rollouts = Rollouts::of(in_flight, retries);
            rollouts.steps(n);
            rollouts
        };
        let expected = after(InFlight::Continue, 5).taken;
        assert_eq!(expected, after(InFlight::Abort, 5).taken);
        for in_flight in MODES {
            let expected = after(in_flight, 5).taken;
            for n_before in [1, 3] {
                let mut resumed = after(in_flight, n_before).resumed();
                resumed.steps(5 - n_before);
                assert_eq!(resumed.taken, expected, "{in_flight:?} after {n_before} steps");
            }
        }
    }
}
