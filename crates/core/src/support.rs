//! Supports: which tokens a token of a rollout was drawn from, where that was not all of the vocabulary.
//!
//! Sampling with top-k, top-p or min-p draws from what these keep, and the logprob of the drawn token is that of the
//! truncated distribution. Whoever scores the token again needs the same tokens to sum over: recomputing the cut would
//! keep others as soon as a logit differs in its last bit. So they travel with the rollout.

use std::fmt;

use crate::count::counted;
use crate::ids::TokenId;

/// Supports of consecutive tokens, borrowed: from a ring frame, a request or a file.
///
/// A row is the tokens that could be drawn, ascending; an empty one means all of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SupportView<'a> {
    sizes: &'a [u32],
    ids: &'a [TokenId],
}

impl<'a> SupportView<'a> {
    /// Views `ids` as rows of `sizes` tokens.
    ///
    /// # Errors
    /// If there are not as many ids.
    pub fn new(sizes: &'a [u32], ids: &'a [TokenId]) -> Result<Self, SupportError> {
        let needed_ids = sizes.iter().map(|&size| u64::from(size)).sum();
        if needed_ids != ids.len() as u64 {
            return Err(SupportError::Ids { ids: ids.len(), needed_ids });
        }
        Ok(Self { sizes, ids })
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(self) -> usize {
        self.sizes.len()
    }

    /// Tokens of each row.
    #[must_use]
    pub fn sizes(self) -> &'a [u32] {
        self.sizes
    }

    /// The tokens of all rows, one after another.
    #[must_use]
    pub fn ids(self) -> &'a [TokenId] {
        self.ids
    }

    /// The rows.
    pub fn iter(self) -> impl Iterator<Item = &'a [TokenId]> {
        let mut rest = self.ids;
        self.sizes.iter().map(move |&size| {
            let (row, after) = rest.split_at(size as usize);
            rest = after;
            row
        })
    }

    /// The first `n` rows.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn first(self, n: usize) -> Self {
        let sizes = &self.sizes[..n];
        let n_ids = sizes.iter().map(|&size| size as usize).sum();
        Self { sizes, ids: &self.ids[..n_ids] }
    }

    /// The rows after the first `n`.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn after(self, n: usize) -> Self {
        Self { sizes: &self.sizes[n..], ids: &self.ids[self.first(n).ids.len()..] }
    }

    /// Checks that these are supports of `drawn`, the tokens after the prompt: a row for each, which is empty or ascends
    /// and holds its token. `sampled` is 0 where a token was given, and such a token has no support; `None` if all were
    /// sampled.
    ///
    /// # Errors
    /// The first violation, with the row.
    pub fn check(self, drawn: &[TokenId], sampled: Option<&[u8]>) -> Result<(), SupportError> {
        if self.rows() != drawn.len() {
            return Err(SupportError::Rows { rows: self.rows(), expected_rows: drawn.len() });
        }
        for ((row, support), &token) in self.iter().enumerate().zip(drawn) {
            let was_given = sampled.is_some_and(|sampled| sampled[row] == 0);
            if was_given && !support.is_empty() {
                return Err(SupportError::Given { row });
            }
            if let Some(pair) = support.windows(2).find(|pair| pair[0] >= pair[1]) {
                return Err(SupportError::Order { row, token: pair[1], before: pair[0] });
            }
            if !support.is_empty() && support.binary_search(&token).is_err() {
                return Err(SupportError::Missing { row, token });
            }
        }
        Ok(())
    }

    /// The first token that is not below `vocab_size`, with its row; rows ascend.
    #[must_use]
    pub fn beyond(self, vocab_size: usize) -> Option<(usize, TokenId)> {
        let last = self.iter().enumerate().filter_map(|(row, support)| Some((row, *support.last()?)));
        { last }.find(|(_, token)| token.index() >= vocab_size)
    }
}

/// Supports of consecutive tokens, owned and append-only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SupportRows {
    sizes: Vec<u32>,
    ids: Vec<TokenId>,
}

impl SupportRows {
    /// The rows of `view`.
    #[must_use]
    pub fn of(view: SupportView<'_>) -> Self {
        Self { sizes: view.sizes.to_vec(), ids: view.ids.to_vec() }
    }

    /// Makes room for `rows` rows more, of `row_ids` tokens each.
    pub fn reserve(&mut self, rows: usize, row_ids: usize) {
        self.sizes.reserve(rows);
        self.ids.reserve(rows.saturating_mul(row_ids));
    }

    /// Gives back room that no row takes.
    pub fn shrink_to_fit(&mut self) {
        self.sizes.shrink_to_fit();
        self.ids.shrink_to_fit();
    }

    /// Appends the support of one token, ascending.
    ///
    /// # Panics
    /// If it has more tokens than 32 bits can count.
    pub fn push(&mut self, support: &[u32]) {
        self.sizes.push(u32::try_from(support.len()).expect("a vocabulary counts in 32 bits"));
        self.ids.extend(support.iter().copied().map(TokenId));
    }

    /// Appends tokens that were drawn from all of the vocabulary, or not drawn at all, until there are `rows` rows.
    pub fn fill(&mut self, rows: usize) {
        self.sizes.resize(rows.max(self.sizes.len()), 0);
    }

    /// Forgets all rows after the first `rows`.
    pub fn truncate(&mut self, rows: usize) {
        if rows < self.sizes.len() {
            self.ids.truncate(self.view().first(rows).ids.len());
            self.sizes.truncate(rows);
        }
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.sizes.len()
    }

    /// The last row.
    #[must_use]
    pub fn last(&self) -> Option<&[TokenId]> {
        self.sizes.last().map(|&size| &self.ids[self.ids.len() - size as usize..])
    }

    /// Borrows all rows.
    #[must_use]
    pub fn view(&self) -> SupportView<'_> {
        SupportView { sizes: &self.sizes, ids: &self.ids }
    }
}

/// How supports contradict themselves or the tokens they are of. Rows count from the first token after the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum SupportError {
    Ids { ids: usize, needed_ids: u64 },
    Rows { rows: usize, expected_rows: usize },
    Given { row: usize },
    Order { row: usize, token: TokenId, before: TokenId },
    Missing { row: usize, token: TokenId },
}

impl fmt::Display for SupportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ids { ids, needed_ids } => {
                write!(f, "supports hold {}, but say {needed_ids}", counted(*ids, "token"))
            }
            Self::Rows { rows, expected_rows } => {
                let (rows, tokens) = (counted(*rows, "row"), counted(*expected_rows, "token"));
                write!(f, "supports have {rows} for {tokens} after the prompt")
            }
            Self::Given { row } => write!(f, "token {row} after the prompt was given, but has a support"),
            Self::Order { row, token, before } => {
                write!(f, "the support of token {row} after the prompt has {token} after {before}")
            }
            Self::Missing { row, token } => {
                write!(f, "token {row} after the prompt is {token}, which its support lacks")
            }
        }
    }
}

impl std::error::Error for SupportError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(supports: &[&[u32]]) -> SupportRows {
        let mut rows = SupportRows::default();
        supports.iter().for_each(|support| rows.push(support));
        rows
    }

    fn ids(tokens: &[u32]) -> Vec<TokenId> {
        tokens.iter().copied().map(TokenId).collect()
    }

    #[test]
    fn rows_read_back_as_they_were_pushed() {
        let mut supports = rows(&[&[1, 4], &[], &[0, 2, 9]]);
        let read: Vec<&[TokenId]> = supports.view().iter().collect();
        assert_eq!(read, [&ids(&[1, 4])[..], &[], &ids(&[0, 2, 9])]);
        assert_eq!(supports.last(), Some(&ids(&[0, 2, 9])[..]));
        assert_eq!(supports.view().first(2), rows(&[&[1, 4], &[]]).view());
        assert_eq!(supports.view().after(1), rows(&[&[], &[0, 2, 9]]).view());
        assert_eq!(supports.view().after(3).rows(), 0);
        assert_eq!(SupportRows::of(supports.view()), supports);
        supports.fill(5);
        assert_eq!((supports.rows(), supports.last()), (5, Some(&[][..])));
        supports.truncate(9);
        supports.truncate(1);
        assert_eq!(supports, rows(&[&[1, 4]]));
        supports.fill(0);
        assert_eq!(supports.rows(), 1, "nothing is forgotten");
    }

    #[test]
    fn a_support_holds_its_token_and_ascends() {
        let check = |supports: &[&[u32]]| rows(supports).view().check(&ids(&[4, 7]), Some(&[1, 0]));
        assert_eq!(check(&[&[1, 4], &[]]), Ok(()));
        assert_eq!(check(&[&[], &[]]), Ok(()), "drawn from all of the vocabulary");
        assert_eq!(check(&[&[4]]), Err(SupportError::Rows { rows: 1, expected_rows: 2 }));
        assert_eq!(check(&[&[4], &[7]]), Err(SupportError::Given { row: 1 }));
        let [token, before] = [TokenId(3), TokenId(4)];
        assert_eq!(check(&[&[4, 3], &[]]), Err(SupportError::Order { row: 0, token, before }));
        assert_eq!(check(&[&[4, 4], &[]]), Err(SupportError::Order { row: 0, token: before, before }));
        assert_eq!(check(&[&[3, 5], &[]]), Err(SupportError::Missing { row: 0, token: before }));
        let all_sampled = rows(&[&[4], &[6]]);
        let missing = SupportError::Missing { row: 1, token: TokenId(7) };
        assert_eq!(all_sampled.view().check(&ids(&[4, 7]), None), Err(missing));
    }

    #[test]
    fn a_token_beyond_the_vocabulary_is_found() {
        let supports = rows(&[&[1, 4], &[], &[0, 9], &[12]]);
        assert_eq!(supports.view().beyond(13), None);
        assert_eq!(supports.view().beyond(9), Some((2, TokenId(9))));
    }

    #[test]
    fn sizes_that_do_not_add_up_are_refused() {
        let tokens = ids(&[1, 2, 3]);
        assert!(SupportView::new(&[1, 0, 2], &tokens).is_ok());
        let ids = 3;
        assert_eq!(SupportView::new(&[1, 1], &tokens), Err(SupportError::Ids { ids, needed_ids: 2 }));
        let needed_ids = 2 * u64::from(u32::MAX);
        assert_eq!(SupportView::new(&[u32::MAX; 2], &tokens), Err(SupportError::Ids { ids, needed_ids }));
    }
}
