//! Second chances: what is said after a wrong answer.

use crate::dataset::{Dataset, Problem};
use crate::error::TaskError;
use crate::tokenizer::Tokenizer;

/// How often a rollout may answer its problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retries {
    /// Answers, at least 1.
    pub attempts: usize,
}

impl Retries {
    /// What follows the `n`-th answer to `problem`, counted from 1, which scored `score`; `None` if the rollout ends with
    /// it, since it is right (1 or more) or was the last.
    #[must_use]
    pub fn reply(self, problem: &Problem, n: usize, score: f32) -> Option<String> {
        (score < 1.0 && n < self.attempts).then(|| wrong(problem))
    }

    /// Tokens that a rollout of `problem` may have after its prompt, with `max_new_tokens` an answer.
    ///
    /// # Errors
    /// If the vocabulary lacks something that is said after a wrong answer.
    pub fn max_tokens(
        self,
        problem: &Problem,
        max_new_tokens: usize,
        tokenizer: &Tokenizer,
    ) -> Result<usize, TaskError> {
        let n_replies = self.attempts.saturating_sub(1);
        let reply = if n_replies > 0 { tokenizer.encode(&wrong(problem))?.len() } else { 0 };
        Ok(self.attempts.saturating_mul(max_new_tokens).saturating_add(n_replies.saturating_mul(reply)))
    }

    /// Checks before a run that all that may be said can be encoded.
    ///
    /// # Errors
    /// The first training problem for which it cannot.
    pub fn check(self, dataset: &Dataset, tokenizer: &Tokenizer) -> Result<(), TaskError> {
        for (index, problem) in dataset.train.iter().enumerate() {
            if let Some(reply) = self.reply(problem, 1, 0.0) {
                tokenizer.check_text(&reply).map_err(|fault| fault.of_problem("training", index))?;
            }
        }
        Ok(())
    }
}

/// The problem again.
fn wrong(problem: &Problem) -> String {
    format!("no. {}", problem.prompt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::tests::tiny;

    fn problem() -> Problem {
        Problem { prompt: "47+38=".into(), answer: "85".into(), wrong: None }
    }

    #[test]
    fn a_wrong_answer_is_told_so_until_the_attempts_are_used_up() {
        let reply = |attempts, n, score| Retries { attempts }.reply(&problem(), n, score);
        assert_eq!(reply(3, 1, 0.0).as_deref(), Some("no. 47+38="));
        assert!(reply(3, 2, 0.5).is_some());
        assert_eq!([reply(3, 3, 0.0), reply(3, 1, 1.0), reply(1, 1, 0.0)], [None, None, None]);
    }

    #[test]
    fn a_rollout_has_room_for_all_attempts_and_what_is_said_between_them() {
        let room = |attempts| Retries { attempts }.max_tokens(&problem(), 4, &tiny()).unwrap();
        assert_eq!([1, 2, 3].map(room), [4, 4 + 10 + 4, 4 + 10 + 4 + 10 + 4]);
    }

    #[test]
    fn what_cannot_be_said_is_known_before_a_run() {
        let dataset = |prompt: &str| Dataset {
            train: vec![Problem { prompt: prompt.into(), ..problem() }],
            held_out: Vec::new(),
        };
        let check = |attempts, prompt| Retries { attempts }.check(&dataset(prompt), &tiny());
        assert!(check(2, "1+1=").is_ok() && check(1, "É").is_ok());
        let error = check(2, "É").unwrap_err().to_string();
        assert!(error.starts_with("training problem 0: the vocabulary has no `É`"), "{error}");
    }
}
