//! Logprobs of a whole step's inputs, kept from one forward for a later one.

use std::ops::Range;

use crate::batch::{Batch, Sequence};

/// A logprob for every input of a batch, in the order of its sequences. A buffer, filled again in every step.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepLogprobs {
    values: Vec<f32>,
    /// Where each sequence starts, and the end.
    starts: Vec<usize>,
}

impl StepLogprobs {
    /// Makes room for `batch`, and forgets what was kept of another.
    pub(crate) fn start(&mut self, batch: &Batch<'_>) {
        self.starts.clear();
        self.starts.push(0);
        let mut end = 0;
        self.starts.extend(batch.sequences().iter().map(Sequence::n_inputs).map(|n| {
            end += n;
            end
        }));
        self.values.clear();
        self.values.resize(end, f32::NAN);
    }

    /// Keeps the logprobs of the inputs of `sequences`.
    ///
    /// # Panics
    /// If there is not one for each.
    pub(crate) fn keep(&mut self, sequences: &Range<usize>, logprobs: &[f32]) {
        let at = self.inputs(sequences);
        self.values[at].copy_from_slice(logprobs);
    }

    /// What was kept for the inputs of `sequences`; NaN where nothing was.
    pub(crate) fn of(&self, sequences: &Range<usize>) -> &[f32] {
        &self.values[self.inputs(sequences)]
    }

    fn inputs(&self, sequences: &Range<usize>) -> Range<usize> {
        self.starts[sequences.start]..self.starts[sequences.end]
    }
}
