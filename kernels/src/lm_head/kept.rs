//! The part of the vocabulary that a row is scored on, where that is not all of it.

use std::ops::Range;

/// Kept sets, ragged: what was sampled from a truncated distribution is scored over the tokens that could be drawn.
#[derive(Clone, Copy, Debug)]
pub struct Kept<'a> {
    /// `[T]`: tokens kept of each row; 0 keeps all of the vocabulary.
    pub sizes: &'a [u32],
    /// The kept tokens, row after row, each ascending and with the row's target among them.
    pub ids: &'a [u32],
}

/// [`Kept`], and where each row of it starts.
pub(super) struct KeptRows<'a> {
    /// `[T + 1]`.
    starts: Vec<usize>,
    ids: &'a [u32],
}

impl<'a> KeptRows<'a> {
    /// # Panics
    /// If the sets are not ascending, below `vocab`, and around their targets.
    pub(super) fn new(kept: Option<Kept<'a>>, targets: &[u32], vocab: usize) -> Self {
        let Some(Kept { sizes, ids }) = kept else { return Self { starts: Vec::new(), ids: &[] } };
        assert_eq!(sizes.len(), targets.len(), "a kept set for each row");
        let mut starts = vec![0];
        starts.extend(sizes.iter().scan(0, |end, &size| {
            *end += size as usize;
            Some(*end)
        }));
        assert_eq!(starts.last(), Some(&ids.len()), "kept sets of these sizes");
        let rows = Self { starts, ids };
        for (t, target) in targets.iter().enumerate() {
            let row = rows.row(t);
            assert!(row.is_sorted_by(|a, b| a < b), "the kept tokens of token {t} ascend");
            assert!(
                row.last().is_none_or(|&last| (last as usize) < vocab),
                "token {t} keeps what is below {vocab}"
            );
            assert!(
                row.is_empty() || row.binary_search(target).is_ok(),
                "token {t} keeps its target {target}"
            );
        }
        rows
    }

    /// What row `t` keeps; nothing if that is all of the vocabulary.
    pub(super) fn row(&self, t: usize) -> &'a [u32] {
        &self.ids[self.range(t)]
    }

    /// Where the kept tokens of row `t` lie among those of all rows.
    pub(super) fn range(&self, t: usize) -> Range<usize> {
        if self.starts.is_empty() { 0..0 } else { self.starts[t]..self.starts[t + 1] }
    }

    /// Where those of row `t` that lie in `columns` are among those of all rows.
    pub(super) fn range_in(&self, t: usize, columns: &Range<usize>) -> Range<usize> {
        let start = self.range(t).start;
        let before = |end: usize| start + self.row(t).partition_point(|&id| (id as usize) < end);
        before(columns.start)..before(columns.end)
    }

    /// Kept tokens of all rows.
    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Those in `range`.
    pub(super) fn ids(&self, range: Range<usize>) -> &'a [u32] {
        &self.ids[range]
    }
}
