//! The contract that routes from outside must keep, and the names a refusal gives to where they break it.

use std::ops::Range;

use r3_core::routes::{RouteDims, RouteError, RouteView};

use crate::error::{Fault, WireError};
use crate::layout::Layout;

/// The last position a token can have, where its sequence is not known: sums of positions and rows cannot overflow.
const LAST_POSITION: usize = u32::MAX as usize;

/// One sample of somebody's answer: what a refusal calls it, and what its routes must fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Who sent it.
    pub layout: Layout,
    /// Its number in the file or answer, from 0.
    pub number: usize,
    /// `T`, all tokens of prompt and completion; `None` if the sender did not say.
    pub n_tokens: Option<usize>,
    /// Whether at least one token was sampled: the last of `T` tokens is then no input, and has no row.
    pub sampled: bool,
    /// Position of the first row.
    pub start: usize,
    /// Positions sampled, one range a turn, ascending; empty if they are not known, which makes everything turn 0.
    pub turns: Vec<Range<usize>>,
}

impl Sample {
    /// A sample of which nothing else is known: rows from position 0, of any number.
    #[must_use]
    pub fn new(layout: Layout, number: usize) -> Self {
        Self { layout, number, n_tokens: None, sampled: true, start: 0, turns: Vec::new() }
    }

    /// A refusal of this sample.
    pub(crate) fn refuse(&self, fault: Fault) -> WireError {
        WireError::Sample { layout: self.layout, sample: self.number, fault }
    }

    /// The turn whose forward computed the row of `position`: the first that sampled a token after it.
    #[must_use]
    pub fn turn_of(&self, position: usize) -> usize {
        let later = self.turns.iter().position(|turn| turn.end > position.saturating_add(1));
        later.unwrap_or(self.turns.len().saturating_sub(1))
    }

    /// Rows that tokens and start ask for; `None` if the number of tokens is not known.
    pub(crate) fn expected_rows(&self) -> Result<Option<usize>, WireError> {
        let Some(n_tokens) = self.n_tokens else { return Ok(None) };
        let end = n_tokens.saturating_sub(usize::from(self.sampled));
        match end.checked_sub(self.start) {
            Some(rows) => Ok(Some(rows)),
            None => Err(self.refuse(Fault::Start { start: self.start, n_tokens, end })),
        }
    }

    /// Refuses another number of rows than the tokens need. Callers that allocate for rows check this first.
    pub(crate) fn check_rows(&self, rows: usize) -> Result<(), WireError> {
        match (self.expected_rows()?, self.n_tokens) {
            (Some(expected_rows), Some(n_tokens)) if rows != expected_rows => {
                let last = self.start.saturating_add(rows.min(expected_rows));
                let turn = self.turn_of(last);
                Err(self.refuse(Fault::Rows { turn, start: self.start, rows, expected_rows, n_tokens }))
            }
            (None, _) if self.start > LAST_POSITION => {
                Err(self.refuse(Fault::StartBeyond { start: self.start }))
            }
            _ => Ok(()),
        }
    }

    /// Checks the contract of routes whose rows are all written: their number, no layer that was never captured,
    /// every id in range, none twice in one choice. `layer_ids` `[L]` are the model's numbers of the layers.
    ///
    /// # Errors
    /// The first violation, with turn, layer and position.
    ///
    /// # Panics
    /// If `layer_ids` is not `[L]`.
    pub fn check(&self, routes: RouteView<'_>, layer_ids: &[u32]) -> Result<(), WireError> {
        assert_eq!(layer_ids.len(), routes.dims().n_layers, "one id for each layer");
        self.check_rows(routes.rows())?;
        self.check_captured(routes, layer_ids)?;
        routes.check(routes.rows()).map_err(|error| self.refuse(self.named(error, layer_ids)))
    }

    /// An engine that never captured sends zeros. For `K > 1` they are duplicates, too, but that would not say why;
    /// for `K = 1` they are only ever unlikely.
    fn check_captured(&self, routes: RouteView<'_>, layer_ids: &[u32]) -> Result<(), WireError> {
        let RouteDims { n_layers, top_k, n_experts } = routes.dims();
        let rows = routes.rows();
        // One expert leaves no choice, and r3's own rows say beside them whether they were written.
        if rows == 0 || n_experts == 1 || (top_k == 1 && self.layout == Layout::R3) {
            return Ok(());
        }
        let is_zero = |layer| (0..rows).all(|row| (0..top_k).all(|k| routes.expert(row, layer, k) == 0));
        let zero_layers: Vec<usize> = (0..n_layers).filter(|&layer| is_zero(layer)).collect();
        let Some(&first) = zero_layers.first() else { return Ok(()) };
        // Choices that are all zero in one layer, or, if no layer has another, in all of them.
        let n_choices = if zero_layers.len() == n_layers { rows * n_layers } else { rows };
        if top_k == 1 && !is_beyond_chance(n_choices, n_experts) {
            return Ok(());
        }
        let (layer, position) = (layer_ids[first], self.start);
        Err(self.refuse(Fault::NeverCaptured { turn: self.turn_of(position), layer, position, rows }))
    }

    fn named(&self, error: RouteError, layer_ids: &[u32]) -> Fault {
        let place = |row: usize, layer: usize| {
            let position = self.start.saturating_add(row);
            (self.turn_of(position), layer_ids[layer], position)
        };
        match error {
            RouteError::RaggedBytes { bytes, row_bytes } => Fault::Ragged { bytes, row_bytes },
            RouteError::RowCount { rows, expected_rows } => {
                let n_tokens = self.n_tokens.unwrap_or(expected_rows);
                Fault::Rows { turn: 0, start: self.start, rows, expected_rows, n_tokens }
            }
            RouteError::OutOfRange { row, layer, expert, n_experts } => {
                let (turn, layer, position) = place(row, layer);
                Fault::OutOfRange { turn, layer, position, expert: expert.into(), n_experts }
            }
            RouteError::Duplicate { row, layer, expert } => {
                let (turn, layer, position) = place(row, layer);
                Fault::Duplicate { turn, layer, position, expert }
            }
        }
    }
}

/// Whether a fair router of `n_experts` chooses expert 0 `n_choices` times in a row less than once in `2^32`.
fn is_beyond_chance(n_choices: usize, n_experts: usize) -> bool {
    n_choices as f64 * (n_experts as f64).log2() >= 32.0
}

#[cfg(test)]
mod tests {
    use r3_core::routes::RouteView;

    use super::*;

    fn fault(sample: &Sample, dims: RouteDims, bytes: &[u8]) -> Option<Fault> {
        let layer_ids: Vec<u32> = (0..dims.n_layers as u32).map(|layer| 2 * layer + 1).collect();
        match sample.check(RouteView::new(dims, bytes).unwrap(), &layer_ids) {
            Ok(()) => None,
            Err(WireError::Sample { fault, .. }) => Some(fault),
            Err(other) => panic!("{other}"),
        }
    }

    const PAIRS: RouteDims = RouteDims { n_layers: 2, top_k: 2, n_experts: 4 };

    #[test]
    fn a_broken_choice_is_named_by_turn_layer_and_position() {
        // Turns sampled tokens 3 and 4, then 7: row 3 is an input of the first turn, row 4 of the second.
        let sample = Sample { start: 3, turns: vec![3..5, 7..8], ..Sample::new(Layout::Sglang, 6) };
        let twice = fault(&sample, PAIRS, &[0, 1, 2, 3, 0, 1, 2, 2]);
        assert_eq!(twice, Some(Fault::Duplicate { turn: 1, layer: 3, position: 4, expert: 2 }));
        let beyond = fault(&sample, PAIRS, &[0, 4, 2, 3, 0, 1, 2, 1]);
        let expected = Fault::OutOfRange { turn: 0, layer: 1, position: 3, expert: 4, n_experts: 4 };
        assert_eq!(beyond, Some(expected));
    }

    #[test]
    fn a_sampled_sequence_has_a_row_less_than_tokens_and_a_prefilled_one_as_many() {
        let mut sample = Sample { n_tokens: Some(3), ..Sample::new(Layout::Vllm, 0) };
        let two_rows = [0, 1, 2, 3, 1, 0, 2, 3];
        assert_eq!(fault(&sample, PAIRS, &two_rows), None);
        sample.sampled = false;
        let missing = Fault::Rows { turn: 0, start: 0, rows: 2, expected_rows: 3, n_tokens: 3 };
        assert_eq!(fault(&sample, PAIRS, &two_rows), Some(missing));
        sample = Sample { sampled: true, start: 1, ..sample };
        assert_eq!(fault(&sample, PAIRS, &two_rows[..4]), None);
        sample.start = 3;
        let beyond = Fault::Start { start: 3, n_tokens: 3, end: 2 };
        assert_eq!(fault(&sample, PAIRS, &two_rows), Some(beyond));
    }

    #[test]
    fn a_layer_that_was_never_captured_is_named_rather_than_its_duplicates() {
        let sample = Sample::new(Layout::Vllm, 0);
        let captured = fault(&sample, PAIRS, &[0, 1, 0, 0, 2, 3, 0, 0]);
        assert_eq!(captured, Some(Fault::NeverCaptured { turn: 0, layer: 3, position: 0, rows: 2 }));
    }

    #[test]
    fn zeros_of_one_expert_a_token_are_refused_once_chance_cannot_explain_them() {
        let of = |n_layers| RouteDims { n_layers, top_k: 1, n_experts: 16 };
        let sample = Sample::new(Layout::Sglang, 0);
        // A choice of 16 is 4 bits.
        assert_eq!(fault(&sample, of(1), &[0; 7]), None);
        let captured = Fault::NeverCaptured { turn: 0, layer: 1, position: 0, rows: 8 };
        assert_eq!(fault(&sample, of(1), &[0; 8]), Some(captured));
        assert!(fault(&sample, of(4), &[0; 8]).is_some(), "two rows, but no layer chose another");
        assert_eq!(fault(&sample, of(4), &[0, 0, 0, 1, 0, 0, 0, 0]), None, "two rows are chance");
    }

    #[test]
    fn zeros_are_the_only_choice_of_one_expert_and_are_trusted_in_r3s_own_rows() {
        let lone = RouteDims { n_layers: 1, top_k: 1, n_experts: 1 };
        assert_eq!(fault(&Sample::new(Layout::Vllm, 0), lone, &[0; 99]), None);
        let one_of_two = RouteDims { n_experts: 2, ..lone };
        assert!(fault(&Sample::new(Layout::Vllm, 0), one_of_two, &[0; 99]).is_some());
        assert_eq!(fault(&Sample::new(Layout::R3, 0), one_of_two, &[0; 99]), None);
    }
}
