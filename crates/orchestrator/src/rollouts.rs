//! Conversations on their way through the engine, many at once, and into a file in the order of their prompts.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;

use r3_core::ids::{GroupId, SequenceId, TokenId};
use r3_core::rollout::{FinishReason, Reward as Outcome};
use r3_core::routes::RouteRows;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::error::EngineError;
use r3_engine::resume::{Continuation, Returned};
use r3_model::source::model_hash;
use r3_scheduler::error::SchedulerError;
use r3_scheduler::request::Finished;
use r3_tasks::conversation::{Conversation, NextTurn, SampledTurn};
use r3_tasks::reward::{Completion, score_caught};
use r3_telemetry::progress::Bar;
use r3_wire::r3_file;
use r3_wire::record::{RecordView, RoutesHeader};

use crate::error::RunError;
use crate::out_file::OutFile;
use crate::rollout::{RolloutOptions, RolloutSummary, Work};
use crate::shutdown::Shutdown;

/// Rollouts begun and not written, for each that runs: enough to keep the engine busy while the first of them takes its
/// time, and no more than memory should hold of a large file.
const MAX_BEGUN: usize = 4;

/// One of a group's conversations.
#[derive(Clone)]
struct Member {
    conversation: Conversation,
    /// Turns sampled.
    turns: usize,
    forks: u64,
    /// What it became: one sample, and one more for every fork.
    samples: Vec<Finished>,
    is_done: bool,
}

/// Everything between the prompts and the file.
pub(crate) struct Rollouts<'a> {
    engine: Engine,
    work: &'a Work,
    options: &'a RolloutOptions,
    stop_tokens: Arc<[TokenId]>,
    layer_ids: Vec<u32>,
    model_hash: u64,
    /// Groups that are written.
    n_written: usize,
    /// Those after them that have begun, in order.
    groups: VecDeque<Vec<Member>>,
    summary: RolloutSummary,
}

impl<'a> Rollouts<'a> {
    pub(crate) fn new(engine: Engine, work: &'a Work, options: &'a RolloutOptions) -> Self {
        Self {
            stop_tokens: work.tokenizer.stop_tokens().into(),
            layer_ids: engine.model().moe_layers(),
            model_hash: model_hash(engine.hashes()),
            engine,
            work,
            options,
            n_written: 0,
            groups: VecDeque::new(),
            summary: RolloutSummary::default(),
        }
    }

    /// Samples everything and writes it down, or what there is of it when `shutdown` is asked for.
    pub(crate) fn sample(
        mut self,
        out: &mut OutFile,
        bar: &Bar,
        shutdown: &Shutdown,
    ) -> Result<RolloutSummary, RunError> {
        while !shutdown.is_requested() {
            self.begin_groups()?;
            if !self.engine.has_work() {
                break;
            }
            let Self { engine, summary, .. } = &mut self;
            engine.tick_until_finished(|_, tick| {
                summary.sampled_tokens += tick.sampled_tokens as u64;
                bar.tokens(tick.sampled_tokens as u64);
                if shutdown.is_requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
            while let Some(finished) = self.engine.take_finished() {
                bar.inc(u64::from(self.end_turn(finished)?));
            }
            self.write(out)?;
        }
        let stats = self.engine.stats();
        (self.summary.computed_tokens, self.summary.cached_tokens) =
            (stats.computed_tokens, stats.hit_tokens);
        Ok(self.summary)
    }

    fn begin_groups(&mut self) -> Result<(), RunError> {
        let size = self.options.group_size as usize;
        let max_groups = (MAX_BEGUN * self.options.max_running / size).max(1);
        while self.groups.len() < max_groups {
            let index = self.n_written + self.groups.len();
            if index == self.work.scripts.len() {
                break;
            }
            let conversation = self.work.begin(index)?;
            self.engine.submit(&GroupRequest {
                group: GroupId(index as u64),
                prompt: self.work.tokenizer.encode(conversation.prompt())?.into(),
                size: self.options.group_size,
                max_new_tokens: self.options.max_new_tokens,
                stop_tokens: Arc::clone(&self.stop_tokens),
                sampling: self.options.sampling(),
                seed: self.options.seed,
                return_routes: self.options.routes_start,
            })?;
            let member = Member { conversation, turns: 0, forks: 0, samples: Vec::new(), is_done: false };
            self.groups.push_back((0..size).map(|_| member.clone()).collect());
        }
        Ok(())
    }

    /// Goes on with a conversation whose turn has ended. `true` if that was its last.
    fn end_turn(&mut self, finished: Finished) -> Result<bool, RunError> {
        let Self { engine, work, options, groups, summary, .. } = self;
        let member = &mut groups[finished.group.index() - self.n_written][finished.index as usize];
        let turns = &work.scripts[finished.group.index()].turns;
        let message = turns.get(member.turns);
        member.turns += 1;
        summary.turns += 1;
        summary.route_rows += finished.new_rows as u64;
        if let Some(routes) = &finished.routes {
            summary.route_bytes += (finished.new_rows * routes.view().dims().row_bytes()) as u64;
        }
        let Some(message) = message else {
            member.end(finished);
            return Ok(true);
        };
        let start = finished.turns.last().expect("a finished turn sampled a token").start;
        let turn = SampledTurn { tokens: &finished.tokens, start, finish: finished.finish };
        let next = member.conversation.reply(turn, message, &work.tokenizer)?;
        let forks = member.forks + u64::from(matches!(next, NextTurn::Fork { .. }));
        let how = Continuation {
            max_new_tokens: options.max_new_tokens,
            stop_tokens: Arc::clone(&self.stop_tokens),
            sampling: options.sampling(),
            // A fork may sample a position again that was sampled before it, and has to draw another number for it.
            seed: options.seed.wrapping_add(forks << 32),
        };
        let went_on = match next {
            NextTurn::Continue { given } => engine.next_turn(finished, &given, &how).map(drop),
            NextTurn::Fork { prompt, .. } => {
                let fork = unsampled(&finished, prompt);
                member.samples.push(finished);
                engine.resume(vec![fork], &how).map(drop)
            }
        };
        match went_on {
            Ok(()) => {
                summary.trajectory_forks += forks - member.forks;
                member.forks = forks;
                Ok(false)
            }
            Err(returned) => {
                summary.turns_left_out += (turns.len() + 1 - member.turns) as u64;
                // A fork that found no room has sampled nothing, so there is nothing of it to keep.
                let kept = without_room(*returned)?.into_iter().find(|rollout| !rollout.turns.is_empty());
                member.samples.extend(kept);
                member.is_done = true;
                Ok(true)
            }
        }
    }

    /// Writes the groups at the front that are done.
    fn write(&mut self, out: &mut OutFile) -> Result<(), RunError> {
        while self.groups.front().is_some_and(|group| group.iter().all(|member| member.is_done)) {
            let samples: Vec<Finished> =
                self.groups.pop_front().into_iter().flatten().flat_map(|member| member.samples).collect();
            for sample in &samples {
                let view = sample.view();
                let header = RoutesHeader {
                    start: sample.routes_start,
                    layer_ids: &self.layer_ids,
                    weight_epoch: Some(self.engine.epoch()),
                    model_hash: Some(self.model_hash),
                };
                let text = self.work.tokenizer.completion_text(view.completion(), sample.finish)?;
                let record = RecordView {
                    text: Some(&text),
                    reward: self.judge(sample, &text),
                    sampling: Some(self.options.sampling),
                    ..RecordView::new(&view, &sample.turns, header)
                };
                out.write(|mut out| r3_file::write(&record, &mut out))?;
            }
            self.n_written += 1;
            self.summary.rollouts += u64::from(self.options.group_size);
            self.summary.samples += samples.len() as u64;
        }
        Ok(())
    }

    fn judge(&self, sample: &Finished, text: &str) -> Option<Outcome> {
        let (dataset, reward) = self.work.judged.as_ref()?;
        let finished = sample.finish == FinishReason::Stop;
        let completion = Completion { group: sample.group, index: sample.index, text, finished };
        let score = score_caught(&**reward, &dataset.train[sample.group.index()], &completion);
        Some(score.map_or_else(
            |failure| {
                tracing::warn!(group = sample.group.0, rollout = sample.index, "{failure}");
                Outcome::Failed
            },
            Outcome::Score,
        ))
    }
}

impl Member {
    fn end(&mut self, last: Finished) {
        self.samples.push(last);
        self.is_done = true;
    }
}

/// A request for the same group and index as `of`, with a prompt of its own: a rollout that was taken back before it
/// sampled anything is just that.
fn unsampled(of: &Finished, prompt: Vec<TokenId>) -> Finished {
    // A template that forgets most of a conversation may leave less than the rows that nobody wants.
    let routes_start = of.routes_start.min(prompt.len());
    Finished {
        sequence: SequenceId(0),
        group: of.group,
        index: of.index,
        prompt_tokens: prompt.len(),
        tokens: prompt,
        turns: Vec::new(),
        rollout_logprobs: Vec::new(),
        versions: Vec::new(),
        support: None,
        routes: of.routes.as_ref().map(|routes| RouteRows::with_capacity(routes.view().dims(), 0)),
        routes_start,
        new_rows: 0,
        prompt_logprobs: None,
        finish: FinishReason::Abort,
        cached_tokens: 0,
        n_preemptions: 0,
    }
}

/// The rollouts that came back because the conversation has no room to go on.
fn without_room(returned: Returned) -> Result<Vec<Finished>, RunError> {
    match returned.error {
        EngineError::TooLong { .. } | EngineError::Scheduler(SchedulerError::NeverFits { .. }) => {
            Ok(returned.rollouts)
        }
        error => Err(error.into()),
    }
}
