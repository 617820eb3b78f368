//! What goes into the scheduler and what comes out.

use std::ops::Range;
use std::sync::Arc;

use r3_core::ids::{GroupId, PolicyVersion, SequenceId, TokenId};
use r3_core::rollout::{FinishReason, RolloutView};
use r3_core::routes::RouteRows;
use r3_core::support::SupportRows;

use crate::error::SchedulerError;

/// A prompt to complete.
#[derive(Clone, Debug)]
pub struct Request {
    /// The group its rollouts belong to.
    pub group: GroupId,
    /// At least one token.
    pub prompt: Arc<[TokenId]>,
    /// Tokens to sample at most; 0 computes the prompt only, which then has one route row per token.
    pub max_new_tokens: usize,
    /// Any of these ends the completion, as its last token.
    pub stop_tokens: Arc<[TokenId]>,
    /// Whether to keep the logprobs of the prompt's own tokens; their rows are then computed, not taken from the
    /// prefix cache.
    pub prompt_logprobs: bool,
    /// Position of the first route row the request is given back, at most the prompt's length; `None` for none. Other
    /// engines call these `routed_experts_start_len` and `return_routed_experts`.
    pub return_routes: Option<usize>,
    /// Tokens that a draw keeps at most, if draws are truncated: what each one kept is then recorded, and room for it is
    /// made when the request starts. `None` draws from all of the vocabulary and records nothing.
    pub max_support: Option<usize>,
}

/// How far a rollout that is taken up again may go.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Tokens to sample at most in this turn, at least 1; those sampled in it before an abort count.
    pub max_new_tokens: usize,
    /// Any of these ends the turn, as its last token.
    pub stop_tokens: Arc<[TokenId]>,
    /// As a request's.
    pub max_support: Option<usize>,
}

/// Rollouts that could not be taken up again: whole, as they came.
#[derive(Debug)]
pub struct Refused {
    /// Why.
    pub error: SchedulerError,
    /// The rollouts.
    pub rollouts: Vec<Finished>,
}

/// The token sampled at one [`crate::plan::SampleSite`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// The site's sequence.
    pub sequence: SequenceId,
    /// What was sampled.
    pub token: TokenId,
    /// Its logprob under the distribution it was sampled from, nats.
    pub logprob: f32,
}

/// A sequence as the engine needs to see it, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct SequenceView<'a> {
    /// Its group.
    pub group: GroupId,
    /// Which of the group's rollouts, `0..G`.
    pub index: u32,
    /// Position of the token to sample next. Group, index and position key its random number, so neither
    /// preemption nor the rest of the batch changes it.
    pub position: usize,
    /// Prompt and what was sampled so far, `[position]`.
    pub tokens: &'a [TokenId],
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
}

/// A request that ended, with everything the trainer needs. It owns no block and no slot.
///
/// The first `P` of its `T` tokens are the prompt. Of the others most were sampled; those between two
/// [turns](Self::turns) were given, and carry logprob 0 and the version of the sampled token before them.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Which sequence this was.
    pub sequence: SequenceId,
    /// Its group.
    pub group: GroupId,
    /// Which of the group's rollouts, `0..G`.
    pub index: u32,
    /// Prompt, then completion, `[T]`.
    pub tokens: Vec<TokenId>,
    /// Tokens of the prompt, `P`.
    pub prompt_tokens: usize,
    /// Positions sampled, ascending, one range for each turn that sampled.
    pub turns: Vec<Range<usize>>,
    /// `[T - P]` nats.
    pub rollout_logprobs: Vec<f32>,
    /// `[T - P]`: the version that sampled each token.
    pub versions: Vec<PolicyVersion>,
    /// `[T - P]` rows: the tokens that each token was drawn from, empty for all of the vocabulary and for given tokens;
    /// `None` if no draw was truncated.
    pub support: Option<SupportRows>,
    /// Routes by position from `routes_start` on; `None` if the request wants none. They end at `T - 1` if the turn
    /// sampled a token, at `T` if its `max_new_tokens` was 0, and where it got to if it was aborted before either.
    pub routes: Option<RouteRows>,
    /// Position of the first row of `routes`.
    pub routes_start: usize,
    /// Rows of `routes` that this turn added. Those before came along with the rollout and were not copied.
    pub new_rows: usize,
    /// `[P - 1]` nats, of prompt tokens 1 on, if the request wanted them (fewer if it was aborted).
    pub prompt_logprobs: Option<Vec<f32>>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Prompt tokens that came from the prefix cache. A fork counts what its group's first prefill found there; a later
    /// turn leaves the count of the first.
    pub cached_tokens: usize,
    /// How often its blocks were taken away before it ended.
    pub n_preemptions: usize,
}

impl Finished {
    /// `[T - P]`, 1 for sampled tokens and 0 for given ones; `None` if all were sampled.
    #[must_use]
    pub fn mask(&self) -> Option<Vec<u8>> {
        let n_sampled: usize = self.turns.iter().map(ExactSizeIterator::len).sum();
        let n_tokens = self.tokens.len() - self.prompt_tokens;
        (n_sampled < n_tokens).then(|| {
            let mut mask = vec![0; n_tokens];
            for turn in &self.turns {
                mask[turn.start - self.prompt_tokens..turn.end - self.prompt_tokens].fill(1);
            }
            mask
        })
    }

    /// Tokens sampled in the turn that was going on when the rollout ended.
    #[must_use]
    pub fn n_sampled_in_last_turn(&self) -> usize {
        self.turns.last().filter(|turn| turn.end == self.tokens.len()).map_or(0, ExactSizeIterator::len)
    }

    /// The rollout, borrowed.
    #[must_use]
    pub fn view(&self) -> RolloutView<'_> {
        RolloutView {
            group: self.group,
            index: self.index,
            tokens: &self.tokens,
            prompt_tokens: self.prompt_tokens,
            rollout_logprobs: &self.rollout_logprobs,
            versions: &self.versions,
            routes: self.routes.as_ref().map(RouteRows::view),
            support: self.support.as_ref().map(SupportRows::view),
            finish: self.finish,
            cached_tokens: self.cached_tokens,
        }
    }
}
