//! The trainer's end of the rollout worker: commands out, replies in, and no wait without a bound.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use r3_core::ids::PolicyVersion;
use r3_engine::refit::RefitReport;
use r3_model::autograd::SharedWeights;
use r3_tasks::dataset::Prompt;
use r3_telemetry::progress::Bar;

use crate::error::RunError;
use crate::greedy::Evaluation;
use crate::pending_file::Snapshot;
use crate::sample_stats::SampleStats;
use crate::worker::{Worker, WorkerParts};

/// How long one look at the replies may take before the worker's pulse is felt.
const LOOK: Duration = Duration::from_millis(100);

/// What the worker is asked to do.
pub(crate) enum Command {
    Sample { prompts: Vec<Prompt>, n_groups: usize, bar: Bar },
    Drain { bar: Bar },
    FreeCache,
    Evaluate { problems: usize, max_new_tokens: usize, bar: Bar },
    Refit { weights: SharedWeights, version: PolicyVersion },
    Snapshot,
}

/// An answer to one [`Command`], in order.
#[derive(Debug)]
pub(crate) enum Reply {
    Sampled(SampleStats),
    Freed,
    Evaluated(Evaluation),
    Refitted(Refitted),
    Snapshot(Snapshot),
}

/// What a refit did, and what it found in flight.
#[derive(Clone, Debug)]
pub struct Refitted {
    /// The engine's account.
    pub report: RefitReport,
    /// Groups with unfinished rollouts.
    pub n_groups: usize,
    /// Unfinished rollouts: they go on under the new weights.
    pub n_rollouts: usize,
}

/// Counts what the worker gets done: ticks, answers, tensors. A worker whose count stands still for the deadline is stuck: in a reward that
/// never returns, say.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pulse {
    beats: Arc<AtomicU64>,
}

impl Pulse {
    /// One more is done.
    pub(crate) fn beat(&self) {
        self.beats.fetch_add(1, Ordering::Relaxed); // A count to look at; it orders nothing.
    }

    fn count(&self) -> u64 {
        self.beats.load(Ordering::Relaxed)
    }
}

/// How long one look may count as waiting. More passes where this process was stopped, by Ctrl-Z or a machine that sleeps, and its worker
/// with it.
const LONGEST_LOOK: Duration = Duration::from_secs(1);

/// How long the pulse has stood still while the worker could run.
#[derive(Debug)]
struct Patience {
    beats: u64,
    looked: Instant,
    waited: Duration,
}

impl Patience {
    fn new(beats: u64, now: Instant) -> Self {
        Self { beats, looked: now, waited: Duration::ZERO }
    }

    /// Feels the pulse at `now`, and says how long it has stood still.
    fn look(&mut self, beats: u64, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.looked).min(LONGEST_LOOK);
        let waited = if beats == self.beats { self.waited + passed } else { Duration::ZERO };
        *self = Self { beats, looked: now, waited };
        waited
    }
}

/// The worker's commands, replies and pulse. Dropping it lets the worker finish, within the deadline.
///
/// Should the worker panic, whoever waits for it panics with the same payload. The panic hook has then run once, on
/// the worker's thread, and does not run again.
pub struct WorkerHandle {
    commands: Option<Sender<Command>>,
    replies: Receiver<Result<Reply, RunError>>,
    thread: Option<JoinHandle<()>>,
    pulse: Pulse,
    patience: Patience,
    deadline: Duration,
}

impl WorkerHandle {
    /// Starts the worker thread.
    ///
    /// # Errors
    /// If the machine has no thread to give.
    pub fn spawn(parts: WorkerParts) -> Result<Self, RunError> {
        let (commands, command_queue) = channel();
        let (reply_queue, replies) = channel();
        let (deadline, pulse) = (parts.deadline, Pulse::default());
        let worker = Worker::new(parts, pulse.clone());
        let thread = thread::Builder::new()
            .name("rollout".into())
            .spawn(move || worker.serve(&command_queue, &reply_queue))
            .map_err(|source| RunError::Io { path: "the rollout thread".into(), source })?;
        let patience = Patience::new(0, Instant::now());
        Ok(Self { commands: Some(commands), replies, thread: Some(thread), pulse, patience, deadline })
    }

    /// Begins `prompts` and asks for the rollouts of `n_groups` groups, the oldest that are whole; they arrive in the ring,
    /// and [`Self::sampled`] says when all have.
    ///
    /// # Errors
    /// If the worker is gone.
    pub fn sample(&mut self, prompts: Vec<Prompt>, n_groups: usize, bar: Bar) -> Result<(), RunError> {
        self.send(Command::Sample { prompts, n_groups, bar })
    }

    /// The outcome of [`Self::sample`], if it comes within `wait`; `None` while the worker gets on with it.
    ///
    /// # Errors
    /// Whatever stopped the worker, or that it got nothing done before the deadline.
    pub fn sampled(&mut self, wait: Duration) -> Result<Option<SampleStats>, RunError> {
        match self.look(wait)? {
            Some(Reply::Sampled(stats)) => Ok(Some(stats)),
            Some(_) => unreachable!("replies come in the order of commands"),
            None => Ok(None),
        }
    }

    /// Finishes all that is in flight, under the weights that are served. Nothing arrives in the ring.
    ///
    /// # Errors
    /// As [`Self::sampled`].
    pub fn drain(&mut self, bar: Bar) -> Result<SampleStats, RunError> {
        self.send(Command::Drain { bar })?;
        match self.reply()? {
            Reply::Sampled(stats) => Ok(stats),
            _ => unreachable!("replies come in the order of commands"),
        }
    }

    /// Frees the engine's KV until more is sampled; rollouts in flight will compute theirs again. To be called when no more
    /// is sampled with these weights, since a refit forgets the KV anyway, and training needs memory.
    ///
    /// # Errors
    /// As [`Self::sampled`].
    pub fn free_cache(&mut self) -> Result<(), RunError> {
        self.send(Command::FreeCache)?;
        match self.reply()? {
            Reply::Freed => Ok(()),
            _ => unreachable!("replies come in the order of commands"),
        }
    }

    /// Copies what was begun and has not arrived in the ring, for a checkpoint.
    ///
    /// # Errors
    /// As [`Self::sampled`].
    pub fn snapshot(&mut self) -> Result<Snapshot, RunError> {
        self.send(Command::Snapshot)?;
        match self.reply()? {
            Reply::Snapshot(snapshot) => Ok(snapshot),
            _ => unreachable!("replies come in the order of commands"),
        }
    }

    /// Answers the first `problems` held-out problems greedily.
    ///
    /// # Errors
    /// As [`Self::sampled`].
    pub fn evaluate(
        &mut self,
        problems: usize,
        max_new_tokens: usize,
        bar: Bar,
    ) -> Result<Evaluation, RunError> {
        self.send(Command::Evaluate { problems, max_new_tokens, bar })?;
        match self.reply()? {
            Reply::Evaluated(evaluation) => Ok(evaluation),
            _ => unreachable!("replies come in the order of commands"),
        }
    }

    /// Loads the trained weights into the engine, audited, and forgets everything of the old ones; rollouts in flight go
    /// on, now or when more is sampled.
    ///
    /// # Errors
    /// If a tensor is not finite or a hash differs; the engine then still serves the old weights. Or as
    /// [`Self::sampled`].
    pub fn refit(&mut self, weights: SharedWeights, version: PolicyVersion) -> Result<Refitted, RunError> {
        self.send(Command::Refit { weights, version })?;
        match self.reply()? {
            Reply::Refitted(refitted) => Ok(refitted),
            _ => unreachable!("replies come in the order of commands"),
        }
    }

    fn send(&mut self, command: Command) -> Result<(), RunError> {
        self.patience = Patience::new(self.pulse.count(), Instant::now());
        let commands = self.commands.as_ref().expect("commands are only closed on drop");
        commands.send(command).map_err(|_| self.gone())
    }

    /// Why there is no worker any more: its panic goes on here.
    fn gone(&mut self) -> RunError {
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(panic)) => resume_unwind(panic),
            _ => RunError::WorkerGone,
        }
    }

    fn reply(&mut self) -> Result<Reply, RunError> {
        loop {
            if let Some(reply) = self.look(LOOK)? {
                return Ok(reply);
            }
        }
    }

    /// Waits for a reply, at most for `wait`; fails once the pulse has stood still for the deadline.
    fn look(&mut self, wait: Duration) -> Result<Option<Reply>, RunError> {
        match self.replies.recv_timeout(wait) {
            Ok(reply) => return reply.map(Some),
            Err(RecvTimeoutError::Disconnected) => return Err(self.gone()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let waited = self.patience.look(self.pulse.count(), Instant::now());
        if waited > self.deadline {
            self.thread = None; // A stuck thread cannot be joined; it ends with the process.
            return Err(RunError::Stalled { waited });
        }
        Ok(None)
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        self.commands = None;
        let Some(thread) = self.thread.take() else { return };
        loop {
            match self.replies.recv_timeout(self.deadline) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let _ = thread.join(); // Whoever drops the handle is beyond caring how the worker ended.
                    return;
                }
                Err(RecvTimeoutError::Timeout) => return, // As in `look`.
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Mutex;

    use r3_model::autograd::Policy;
    use r3_model::init::FreshWeights;
    use r3_model::source::canonical_tensors;
    use r3_tasks::dataset::Problem;
    use r3_tasks::reward::{ExactMatch, Reward};

    use super::*;
    use crate::fixtures::{bar, model, prompt, worker_parts};

    const DEADLINE: Duration = Duration::from_millis(300);

    /// Never returns while the other end of its channel is held.
    struct Stuck(Mutex<Receiver<()>>);

    impl Reward for Stuck {
        fn name(&self) -> &str {
            "stuck"
        }

        fn score(&self, _: &Problem, _: &str, _: bool) -> f32 {
            let _ = self.0.lock().unwrap().recv();
            0.0
        }
    }

    /// A worker whose reward returns once the sender is dropped.
    fn stuck() -> (WorkerHandle, Sender<()>) {
        let (release, held) = channel();
        let (parts, _) = worker_parts(Arc::new(Stuck(Mutex::new(held))), DEADLINE);
        let mut worker = WorkerHandle::spawn(parts).unwrap();
        worker.sample(vec![prompt(0)], 1, bar()).unwrap();
        (worker, release)
    }

    /// How sampling ends.
    fn outcome(worker: &mut WorkerHandle) -> Result<SampleStats, RunError> {
        loop {
            if let Some(stats) = worker.sampled(LOOK)? {
                return Ok(stats);
            }
        }
    }

    #[test]
    fn a_reward_that_never_returns_stalls_the_run_and_is_not_waited_for() {
        let (mut worker, release) = stuck();
        match outcome(&mut worker) {
            Err(RunError::Stalled { waited }) => assert!(waited > DEADLINE),
            other => panic!("{other:?}"),
        }
        drop(worker);
        drop(release);
    }

    #[test]
    fn time_in_which_the_process_was_stopped_is_not_the_workers() {
        let start = Instant::now();
        let mut patience = Patience::new(0, start);
        assert_eq!(patience.look(0, start + LOOK), LOOK);
        let woken = start + LOOK + Duration::from_secs(3600);
        assert_eq!(patience.look(0, woken), LOOK + LONGEST_LOOK);
        assert_eq!(patience.look(0, woken + LOOK), 2 * LOOK + LONGEST_LOOK);
        assert_eq!(patience.look(1, woken + 2 * LOOK), Duration::ZERO);
        assert_eq!(patience.look(1, woken + 3 * LOOK), LOOK);
    }

    #[test]
    fn a_handle_is_dropped_within_the_deadline_though_its_worker_is_stuck() {
        let (worker, release) = stuck();
        let (dropped, done) = channel();
        let dropper = thread::spawn(move || {
            drop(worker);
            dropped.send(()).unwrap();
        });
        done.recv_timeout(Duration::from_secs(60)).expect("the drop returns while the reward does not");
        dropper.join().unwrap();
        drop(release);
    }

    #[test]
    fn a_panic_of_the_worker_goes_on_where_it_is_waited_for() {
        let (parts, _ring) = worker_parts(Arc::new(ExactMatch), Duration::from_secs(60));
        let mut worker = WorkerHandle::spawn(parts).unwrap();
        worker.sample(vec![prompt(usize::MAX)], 1, bar()).unwrap();
        let panic = catch_unwind(AssertUnwindSafe(|| outcome(&mut worker))).expect_err("no such problem");
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(message.starts_with("index out of bounds"), "{message}");
        assert!(matches!(worker.sample(Vec::new(), 0, bar()), Err(RunError::WorkerGone)));
    }

    #[test]
    fn the_error_of_the_worker_is_the_error_of_the_wait() {
        let (parts, ring) = worker_parts(Arc::new(ExactMatch), Duration::from_secs(60));
        let mut worker = WorkerHandle::spawn(parts).unwrap();
        drop(ring);
        worker.sample(vec![prompt(0)], 1, bar()).unwrap();
        assert!(matches!(outcome(&mut worker), Err(RunError::Ring(_))));
    }

    #[test]
    fn every_tensor_of_a_refit_is_a_beat() {
        let (parts, _ring) = worker_parts(Arc::new(ExactMatch), Duration::from_secs(60));
        let mut worker = WorkerHandle::spawn(parts).unwrap();
        let mut policy = Policy::load(&FreshWeights::new(&model(), 2), &model()).unwrap();
        let refitted = worker.refit(policy.shared_weights(), PolicyVersion(1)).unwrap();
        assert_eq!(
            (refitted.report.version, refitted.n_groups, refitted.n_rollouts),
            (PolicyVersion(1), 0, 0)
        );
        assert!(worker.pulse.count() >= canonical_tensors(&model()).len() as u64);
    }
}
