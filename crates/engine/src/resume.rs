//! Rollouts that go on: where an abort stopped them, or with the next turn of their conversation.

use std::sync::Arc;

use r3_core::ids::{SequenceId, TokenId};
use r3_core::routes::{RouteRows, RouteView};
use r3_scheduler::request::{Finished, Limits, Refused};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::sampler::Sampling;

/// How a rollout that is taken up again is sampled.
#[derive(Clone, Debug)]
pub struct Continuation {
    /// Tokens to sample at most in this turn, at least 1; those sampled in it before an abort count.
    pub max_new_tokens: usize,
    /// Any of these ends the turn.
    pub stop_tokens: Arc<[TokenId]>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Keys the draws, together with group, index and position: an aborted rollout goes on as if it had not been.
    pub seed: u64,
}

/// Rollouts that could not be taken up again: whole, as they came.
#[derive(Debug)]
pub struct Returned {
    /// Why.
    pub error: EngineError,
    /// The rollouts.
    pub rollouts: Vec<Finished>,
}

impl Engine {
    /// Goes on with aborted rollouts of one group where they stopped: see [`Scheduler::resume`].
    ///
    /// # Errors
    /// If a rollout was not aborted, has sampled all it may, contradicts itself or does not fit, has routes to replay that are
    /// none, or they are not of one group. The rollouts come back as they were.
    ///
    /// [`Scheduler::resume`]: r3_scheduler::scheduler::Scheduler::resume
    pub fn resume(
        &mut self,
        rollouts: Vec<Finished>,
        how: &Continuation,
    ) -> Result<Vec<SequenceId>, Box<Returned>> {
        for rollout in &rollouts {
            let left = how.max_new_tokens.saturating_sub(rollout.n_sampled_in_last_turn());
            let checked =
                self.check_request(&rollout.tokens, left).and_then(|()| self.check_replayed(rollout));
            if let Err(error) = checked {
                return Err(Box::new(Returned { error, rollouts }));
            }
        }
        let ids = self.scheduler.resume(rollouts, &self.limits(how)).map_err(returned)?;
        self.sampling.extend(ids.iter().map(|&id| (id, (how.sampling, how.seed))));
        Ok(ids)
    }

    /// Begins the next turn of a rollout that ended: `given` follows its tokens, then more are sampled. See
    /// [`Scheduler::next_turn`].
    ///
    /// # Errors
    /// If the rollout did not end by itself, contradicts itself or would not fit, has routes to replay that are none, a token
    /// is outside the vocabulary, or nothing is given or to be sampled. The rollout comes back as it was.
    ///
    /// [`Scheduler::next_turn`]: r3_scheduler::scheduler::Scheduler::next_turn
    pub fn next_turn(
        &mut self,
        rollout: Finished,
        given: &[TokenId],
        how: &Continuation,
    ) -> Result<SequenceId, Box<Returned>> {
        let n_new = given.len().saturating_add(how.max_new_tokens);
        let checked = self.check_request(&rollout.tokens, n_new).and_then(|()| self.check_request(given, 0));
        if let Err(error) = checked.and_then(|()| self.check_replayed(&rollout)) {
            return Err(Box::new(Returned { error, rollouts: vec![rollout] }));
        }
        let id = self.scheduler.next_turn(rollout, given, &self.limits(how)).map_err(returned)?;
        self.sampling.insert(id, (how.sampling, how.seed));
        Ok(id)
    }

    /// Refuses routes that would be replayed, and that no router of this model can have chosen: they may come from a file.
    fn check_replayed(&self, rollout: &Finished) -> Result<(), EngineError> {
        let routes = rollout.routes.as_ref().filter(|_| self.config.replay.is_some());
        let Some(routes) = routes.map(RouteRows::view) else { return Ok(()) };
        let as_own = RouteView::new(self.model().route_dims(), routes.bytes());
        as_own.and_then(|routes| routes.check(routes.rows())).map_err(EngineError::ReplayRoutes)
    }

    fn limits(&self, how: &Continuation) -> Limits {
        Limits {
            max_new_tokens: how.max_new_tokens,
            stop_tokens: Arc::clone(&how.stop_tokens),
            max_support: how.sampling.max_support(self.model().vocab_size),
        }
    }

    /// Takes the KV of a running request, which keeps all it emitted and waits, in order of age. `false` if it does not run.
    pub fn retract(&mut self, id: SequenceId) -> bool {
        self.scheduler.retract(id)
    }

    /// Asserts what must hold of sequences, KV blocks, prefix cache and routes between ticks. For tests: it visits all.
    ///
    /// # Panics
    /// If something does not hold.
    pub fn check(&self) {
        self.scheduler.check();
    }

    /// Every unfinished request as [`Self::abort`] would return it, oldest first, copied; nothing changes.
    #[must_use]
    pub fn in_flight(&self) -> Vec<Finished> {
        self.scheduler.in_flight()
    }
}

fn returned(Refused { error, rollouts }: Refused) -> Box<Returned> {
    Box::new(Returned { error: error.into(), rollouts })
}
