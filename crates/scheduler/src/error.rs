//! Why the scheduler refuses a configuration, a request or a flush.

use r3_core::count::counted;
use r3_core::ids::GroupId;
use r3_core::rollout::FinishReason;

/// A refusal, with the numbers that caused it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum SchedulerError {
    #[error("`{field}` is 0, but the scheduler needs at least 1")]
    ZeroSize { field: &'static str },
    #[error(
        "{n_blocks} blocks of {block_tokens} tokens are more slots than the {} a slot id can name",
        u32::MAX
    )]
    TooManySlots { n_blocks: usize, block_tokens: usize },
    #[error("the prompt of group {group} is empty, but sampling starts from the logits of its last token")]
    EmptyPrompt { group: GroupId },
    #[error("group {group} asks for 0 rollouts, but a group has at least 1")]
    EmptyGroup { group: GroupId },
    #[error("group {group} needs KV for {needed_tokens} tokens, but the whole cache holds {capacity_tokens}")]
    NeverFits { group: GroupId, needed_tokens: usize, capacity_tokens: usize },
    #[error("group {group} wants its routes, but none are captured")]
    RoutesOff { group: GroupId },
    #[error(
        "group {group} wants its routes from row {start} on, but its prompt has {}", counted(*prompt_tokens, "token")
    )]
    RoutesStart { group: GroupId, start: usize, prompt_tokens: usize },
    #[error("no rollout was given to take up again")]
    NothingToResume,
    #[error("rollout {index} of group {group} ended with `{finish}` and cannot be taken up {how}")]
    CannotResume { group: GroupId, index: u32, finish: FinishReason, how: &'static str },
    #[error("rollout {index} is of group {other}, but those before it are of group {group}")]
    MixedGroups { group: GroupId, index: u32, other: GroupId },
    #[error("rollouts of group {group} have sampled nothing, but have different prompts")]
    MixedPrompts { group: GroupId },
    #[error(
        "rollout {index} of group {group} may sample {max_new_tokens} tokens, and has sampled {n_sampled}"
    )]
    NothingToSample { group: GroupId, index: u32, n_sampled: usize, max_new_tokens: usize },
    #[error("the next turn of rollout {index} of group {group} begins with no token")]
    NothingGiven { group: GroupId, index: u32 },
    #[error("rollout {index} of group {group} contradicts itself: {n} {what}, but {expected} are needed")]
    Misshapen { group: GroupId, index: u32, what: &'static str, n: usize, expected: usize },
    #[error("weight epoch {epoch} does not come after the current epoch {current}")]
    StaleEpoch { epoch: u64, current: u64 },
}

impl SchedulerError {
    /// What the user (or, for a flush, the engine) can change, printed as `hint: ...`.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::ZeroSize { field } => format!("set `{field}` to 1 or more"),
            Self::TooManySlots { .. } => "give the engine less `engine.kv_memory`".into(),
            Self::EmptyPrompt { .. } => {
                "drop the dataset row, or check the chat template that renders it".into()
            }
            Self::EmptyGroup { .. } => "set `rollout.group_size` to 1 or more".into(),
            Self::NeverFits { needed_tokens, capacity_tokens, .. } => format!(
                "raise `engine.kv_memory` to at least {} times its value, or shorten prompt or `max_new_tokens` by {}",
                needed_tokens.div_ceil((*capacity_tokens).max(1)),
                needed_tokens - capacity_tokens,
            ),
            Self::RoutesOff { .. } => {
                "build the engine with routes, or do not ask for them: `return_routes: None`".into()
            }
            Self::RoutesStart { prompt_tokens, .. } => {
                format!("ask for rows from {prompt_tokens} or less on")
            }
            Self::NothingToResume => "give at least one rollout".into(),
            Self::CannotResume { .. } => {
                "an aborted rollout goes on where it stopped, a finished one with its next turn".into()
            }
            Self::MixedGroups { .. } => "resume one group at a time".into(),
            Self::MixedPrompts { .. } => "a group has one prompt: resume the others by themselves".into(),
            Self::NothingToSample { .. } => "raise `max_new_tokens`, or leave the rollout as it is".into(),
            Self::NothingGiven { .. } => "give the tokens that follow what was sampled".into(),
            Self::Misshapen { .. } => {
                "resume rollouts as they came out of an engine of the same model".into()
            }
            Self::StaleEpoch { current, .. } => format!("use an epoch of {} or more", current + 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_both_numbers_and_a_way_out() {
        let error = SchedulerError::NeverFits { group: GroupId(7), needed_tokens: 90, capacity_tokens: 64 };
        assert_eq!(error.to_string(), "group 7 needs KV for 90 tokens, but the whole cache holds 64");
        assert!(error.hint().contains("by 26"), "{}", error.hint());
    }
}
