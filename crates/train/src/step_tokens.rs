//! Numbers of a whole step's rows, kept from one pass for a later one.

use std::ops::Range;

use crate::batch::{Batch, Sequence};

/// A number for every row of a batch, in the order of its sequences. A buffer, filled again in every step.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepTokens {
    values: Vec<f32>,
    /// Where each sequence starts, and the end.
    starts: Vec<usize>,
}

impl StepTokens {
    /// Makes room for `batch`, and forgets what was kept of another.
    pub(crate) fn start(&mut self, batch: &Batch<'_>) {
        self.starts.clear();
        self.starts.push(0);
        let mut end = 0;
        self.starts.extend(batch.sequences().iter().map(Sequence::n_rows).map(|n| {
            end += n;
            end
        }));
        self.values.clear();
        self.values.resize(end, f32::NAN);
    }

    /// Keeps `values` of the rows of `sequences`.
    ///
    /// # Panics
    /// If there is not one for each.
    pub(crate) fn keep(&mut self, sequences: &Range<usize>, values: &[f32]) {
        let at = self.rows(sequences);
        self.values[at].copy_from_slice(values);
    }

    /// What was kept for the rows of `sequences`; NaN where nothing was.
    pub(crate) fn of(&self, sequences: &Range<usize>) -> &[f32] {
        &self.values[self.rows(sequences)]
    }

    /// What was kept for all rows.
    pub(crate) fn all(&self) -> &[f32] {
        &self.values
    }

    /// Where the rows of `sequences` are among those of the batch.
    pub(crate) fn rows(&self, sequences: &Range<usize>) -> Range<usize> {
        self.starts[sequences.start]..self.starts[sequences.end]
    }
}
