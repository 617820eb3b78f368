//! What a program is played on.

use r3_core::ids::{PolicyVersion, SequenceId, TokenId};
use r3_core::routes::{RouteRows, RouteView};
use r3_scheduler::error::SchedulerError;
use r3_scheduler::request::{Finished, Limits, Refused, Request, Sample};
use r3_scheduler::scheduler::SchedulerStats;

use crate::program::FailsAfter;

/// A plain prefill of `T` tokens under one set of weights, without anything before it.
#[derive(Debug)]
pub struct Prefill {
    /// What the router chooses: `[T, L, K]`, or at least `T - 1` rows; `None` if routes are off.
    pub rows: Option<RouteRows>,
    /// `[T - 1]` nats, of tokens 1 on.
    pub logprobs: Vec<f32>,
}

/// An engine under test, serving weights that a version names.
///
/// Two implement it: [`crate::hash_engine::HashEngine`], the scheduler under a model without tensors, and the real engine
/// in `tests/real_engine.rs`. They may assert more of each step than a player can see.
pub trait Subject {
    /// Queues `n` completions of a prompt.
    ///
    /// # Errors
    /// Whatever the engine refuses.
    fn submit(&mut self, request: &Request, n: u32) -> Result<Vec<SequenceId>, SchedulerError>;

    /// Takes aborted rollouts of one group up again.
    ///
    /// # Errors
    /// With the rollouts, if they are refused.
    fn resume(&mut self, rollouts: Vec<Finished>, limits: &Limits) -> Result<Vec<SequenceId>, Refused>;

    /// Begins the next turn of a rollout that ended.
    ///
    /// # Errors
    /// With the rollout, if it is refused.
    fn next_turn(
        &mut self,
        rollout: Finished,
        given: &[TokenId],
        limits: &Limits,
    ) -> Result<SequenceId, Refused>;

    /// Computes one batch of at most `max_tokens`. `false` if there was nothing to do.
    fn tick(&mut self, max_tokens: usize) -> bool;

    /// A tick that fails on its way; everything is taken back, as after any failure.
    fn failing_tick(&mut self, max_tokens: usize, after: FailsAfter);

    /// What the last tick sampled.
    fn sampled(&self) -> &[Sample];

    /// Takes a request back.
    fn abort(&mut self, id: SequenceId) -> bool;

    /// Takes the blocks of a running request.
    fn retract(&mut self, id: SequenceId) -> bool;

    /// Serves the weights of `version` from now on.
    fn refit(&mut self, version: PolicyVersion);

    /// Forgets keys, values and routes as a refit does, and keeps the weights.
    fn flush(&mut self);

    /// Begins to serve the weights of `version`, and fails.
    fn failed_refit(&mut self, version: PolicyVersion);

    /// Every unfinished request as an abort would return it, oldest first.
    fn in_flight(&self) -> Vec<Finished>;

    /// The next request that ended.
    fn take_finished(&mut self) -> Option<Finished>;

    /// Loses everything and begins anew with the weights of `version`.
    fn rebuild(&mut self, version: PolicyVersion);

    /// Counters.
    fn stats(&self) -> SchedulerStats;

    /// Requests of which the engine still holds anything.
    fn n_open(&self) -> usize;

    /// Asserts every invariant that holds between ticks.
    fn check(&self);

    /// What a plain prefill of `tokens` under the weights of `version` gives, by an engine that does nothing else.
    ///
    /// With `replayed` routes of the first tokens, these take them instead of what the router chooses, as they do in a
    /// trainer; tokens behind those and the one after need not be looked at.
    fn prefill(
        &mut self,
        version: PolicyVersion,
        tokens: &[TokenId],
        replayed: Option<RouteView<'_>>,
    ) -> Prefill;
}
