//! The stream of prompts: which problem comes next, and which group it becomes.

use std::sync::Arc;

use r3_core::ids::GroupId;
use r3_tasks::dataset::{Dataset, Prompt, PromptOrder};
use r3_tasks::tokenizer::Tokenizer;

use crate::error::RunError;

/// Training prompts in the order of a seed. Everything it does follows from the cursor, which checkpoints keep.
pub struct Prompts {
    dataset: Arc<Dataset>,
    tokenizer: Arc<Tokenizer>,
    order: PromptOrder,
    cursor: u64,
}

impl Prompts {
    /// A stream that has given out `cursor` prompts already.
    ///
    /// # Errors
    /// If the dataset has nothing to train on.
    pub fn new(
        dataset: Arc<Dataset>,
        tokenizer: Arc<Tokenizer>,
        seed: u64,
        cursor: u64,
    ) -> Result<Self, RunError> {
        let order = PromptOrder::new(seed, dataset.train.len())?;
        Ok(Self { dataset, tokenizer, order, cursor })
    }

    /// Prompts given out so far; the next one's group has this number.
    #[must_use]
    pub fn cursor(&self) -> u64 {
        self.cursor
    }

    /// The next `n` prompts.
    ///
    /// # Errors
    /// If a prompt cannot be encoded.
    pub fn take(&mut self, n: usize) -> Result<Vec<Prompt>, RunError> {
        let mut prompts = Vec::with_capacity(n);
        for _ in 0..n {
            prompts.push(self.of(GroupId(self.cursor))?);
            self.cursor += 1;
        }
        Ok(prompts)
    }

    /// The prompt of `group`, wherever the stream stands.
    ///
    /// # Errors
    /// If it cannot be encoded.
    pub fn of(&mut self, group: GroupId) -> Result<Prompt, RunError> {
        let index = self.order.prompt(group.0);
        Ok(Prompt::encode(group, index, &self.dataset.train[index], &self.tokenizer)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{dataset, tokenizer};

    fn prompts(seed: u64, cursor: u64) -> Prompts {
        Prompts::new(Arc::new(dataset()), Arc::new(tokenizer()), seed, cursor).unwrap()
    }

    #[test]
    fn a_stream_goes_on_at_its_cursor_through_every_epoch() {
        let whole = prompts(3, 0).take(13).unwrap();
        for cursor in 0..13 {
            let mut resumed = prompts(3, cursor);
            let rest = resumed.take(13 - usize::try_from(cursor).unwrap()).unwrap();
            assert_eq!(rest, whole[13 - rest.len()..]);
            assert_eq!(resumed.of(GroupId(5)).unwrap(), whole[5]);
            assert_eq!(resumed.cursor(), 13);
        }
    }

    #[test]
    fn a_group_has_the_number_of_its_prompt_and_an_epoch_has_every_problem() {
        let taken = prompts(3, 0).take(10).unwrap();
        assert!(taken.iter().zip(0..).all(|(prompt, number)| prompt.group == GroupId(number)));
        for epoch in taken.chunks(5) {
            let mut problems: Vec<usize> = epoch.iter().map(|prompt| prompt.problem).collect();
            problems.sort_unstable();
            assert_eq!(problems, [0, 1, 2, 3, 4]);
        }
        let first = &taken[0];
        assert_eq!(tokenizer().encode(&dataset().train[first.problem].prompt).unwrap(), first.tokens);
        assert_ne!(taken, prompts(4, 0).take(10).unwrap());
    }

    #[test]
    fn nothing_to_train_on_is_refused() {
        let none = Dataset { train: Vec::new(), ..dataset() };
        assert!(Prompts::new(Arc::new(none), Arc::new(tokenizer()), 0, 0).is_err());
    }
}
