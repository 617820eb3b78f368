//! What one tick asks of the engine.

use r3_core::ids::{SequenceId, TokenId};

/// Which rows of a chunk need logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: more of the prompt is to come.
    None,
    /// The last row: a token is sampled from it.
    Last,
    /// All rows: the request wants the logprobs of its prompt.
    All,
}

/// Consecutive tokens of one sequence, computed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Whose tokens.
    pub sequence: SequenceId,
    /// Position of the first token; the keys and values before it are in the sequence's blocks.
    pub start: usize,
    /// How many.
    pub n_tokens: usize,
    /// The plan's row of the first token.
    pub first_row: usize,
    /// Which of its rows need logits.
    pub wants: Logits,
    /// How many of its first tokens take routes that were recorded under older weights:
    /// [`crate::scheduler::Scheduler::replayed_routes`]. Those of the others are the router's choice.
    pub n_replayed: usize,
}

/// One token to sample: from the logits of `row`, for `sequence`.
///
/// Several sequences may sample from one row: a group shares the last row of its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleSite {
    /// Who gets the token; its group, index and position key the random number.
    pub sequence: SequenceId,
    /// The plan's row.
    pub row: usize,
}

/// KV rows to copy, all layers: what slot `from[i]` holds goes to slot `to[i]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotCopies {
    /// Sources; a slot may appear more than once.
    pub from: Vec<u32>,
    /// Targets; each appears once and in no `from`.
    pub to: Vec<u32>,
}

/// One tick: `T` tokens to compute, without padding, and what to do with the outcome.
///
/// The engine writes the keys and values of row `t` to `slots[t]`, attends through the block tables, hands the
/// routes to [`crate::scheduler::Scheduler::record`], makes the copies, samples, and advances.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TickPlan {
    /// `[T]` inputs: decoding sequences first, then prefill chunks.
    pub tokens: Vec<TokenId>,
    /// `[T]` positions in their sequences.
    pub positions: Vec<u32>,
    /// `[T]` slots, all distinct.
    pub slots: Vec<u32>,
    /// Whose rows these are, in order; together they cover all `T` rows.
    pub chunks: Vec<Chunk>,
    /// Tokens to sample from this tick's logits, in the order of their rows.
    pub samples: Vec<SampleSite>,
    /// Copies to make *after* this tick's forward and before the next: they fork a group's partly filled prompt
    /// block, whose last rows this forward writes.
    pub copies_after_forward: SlotCopies,
}

impl TickPlan {
    /// Tokens to compute, `T`.
    #[must_use]
    pub fn n_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Empties the plan and keeps its memory.
    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.chunks.clear();
        self.samples.clear();
        self.copies_after_forward.from.clear();
        self.copies_after_forward.to.clear();
    }
}
