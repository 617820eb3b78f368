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
            let index = self.order.prompt(self.cursor);
            let problem = &self.dataset.train[index];
            prompts.push(Prompt::encode(GroupId(self.cursor), index, problem, &self.tokenizer)?);
            self.cursor += 1;
        }
        Ok(prompts)
    }
}
