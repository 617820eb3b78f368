//! What goes into the scheduler and what comes out.

use std::sync::Arc;

use r3_core::ids::{GroupId, PolicyVersion, SequenceId, TokenId};
use r3_core::rollout::{FinishReason, RolloutView};
use r3_core::routes::RouteRows;

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
    /// `[T - P]` nats.
    pub rollout_logprobs: Vec<f32>,
    /// `[T - P]`: the version that sampled each token.
    pub versions: Vec<PolicyVersion>,
    /// Routes by position; `None` when they are off. `T - 1` rows if a token was sampled, `T` rows if
    /// `max_new_tokens` was 0, and as many as were computed if it was aborted before its first token.
    pub routes: Option<RouteRows>,
    /// `[P - 1]` nats, of prompt tokens 1 on, if the request wanted them (fewer if it was aborted).
    pub prompt_logprobs: Option<Vec<f32>>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Prompt tokens that came from the prefix cache. A fork counts what its group's first prefill found there.
    pub cached_tokens: usize,
    /// How often its blocks were taken away before it ended.
    pub n_preemptions: usize,
}

impl Finished {
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
            finish: self.finish,
            cached_tokens: self.cached_tokens,
        }
    }
}
