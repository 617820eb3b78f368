//! A rollout: one sampled completion with everything the trainer needs to learn from it.

use std::fmt;

use crate::ids::{GroupId, PolicyVersion, TokenId};
use crate::routes::RouteView;
use crate::support::SupportView;

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was sampled; it is the last token.
    Stop,
    /// `max_new_tokens` were sampled.
    Length,
    /// The request was taken back before it finished.
    Abort,
}

impl FinishReason {
    /// The reason as one byte, for frames.
    #[must_use]
    pub fn to_byte(self) -> u8 {
        match self {
            Self::Stop => 0,
            Self::Length => 1,
            Self::Abort => 2,
        }
    }

    /// Reads [`Self::to_byte`] back.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        [Self::Stop, Self::Length, Self::Abort].get(usize::from(byte)).copied()
    }
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        })
    }
}

/// What a reward function said about a completion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reward {
    /// A finite score.
    Score(f32),
    /// The function failed: the rollout leaves its group instead of poisoning it.
    Failed,
}

impl Reward {
    /// The score, if there is one.
    #[must_use]
    pub fn score(self) -> Option<f32> {
        match self {
            Self::Score(score) => Some(score),
            Self::Failed => None,
        }
    }
}

/// A finished rollout, borrowed: from the engine that made it or from the ring frame that carries it.
///
/// Of its `T` tokens the first `prompt_tokens` are the prompt and the other `N = T - prompt_tokens` were sampled.
#[derive(Clone, Copy, Debug)]
pub struct RolloutView<'a> {
    /// The prompt this completes.
    pub group: GroupId,
    /// Which of the group's rollouts this is, `0..G`.
    pub index: u32,
    /// Prompt, then completion, `[T]`.
    pub tokens: &'a [TokenId],
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// `[N]` nats: log-probability of each sampled token under the distribution it was sampled from.
    pub rollout_logprobs: &'a [f32],
    /// `[N]`: the policy version that sampled each token.
    pub versions: &'a [PolicyVersion],
    /// `[T - 1, L, K]`; `None` when replay is off.
    pub routes: Option<RouteView<'a>>,
    /// `[N]` rows: the tokens that each sampled token was drawn from; `None` if that was all of the vocabulary.
    pub support: Option<SupportView<'a>>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: usize,
}

impl<'a> RolloutView<'a> {
    /// The prompt, `[P]`.
    #[must_use]
    pub fn prompt(&self) -> &'a [TokenId] {
        &self.tokens[..self.prompt_tokens]
    }

    /// The sampled tokens, `[N]`.
    #[must_use]
    pub fn completion(&self) -> &'a [TokenId] {
        &self.tokens[self.prompt_tokens..]
    }

    /// The oldest policy version inside the completion; `None` if nothing was sampled.
    #[must_use]
    pub fn oldest_version(&self) -> Option<PolicyVersion> {
        self.versions.iter().min().copied()
    }
}
