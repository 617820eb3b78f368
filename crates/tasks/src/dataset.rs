//! Problems, prompts, and the order in which training visits them.

use std::collections::HashSet;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::Xxh3;

use r3_core::ids::{GroupId, TokenId};

use crate::error::TaskError;
use crate::reward::Reward;
use crate::tokenizer::Tokenizer;

/// The stream of the generator that makes datasets; epochs use the streams `0..`.
const DATASET_STREAM: u64 = u64::MAX;

/// One question with its answer, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What the model reads, chat template already applied.
    pub prompt: String,
    /// What a reward compares the completion with, without an end token.
    pub answer: String,
    /// A plausible mistake, for warm starts that leave something to learn; never equal to `answer`.
    pub wrong: Option<String>,
}

/// Problems to train on and problems to measure with; no prompt is in both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dataset {
    /// Problems that rollouts are made of.
    pub train: Vec<Problem>,
    /// Problems that are only ever evaluated.
    pub held_out: Vec<Problem>,
}

impl Dataset {
    /// Shuffles `problems` by `seed` and holds the first `held_out` of them out.
    ///
    /// # Errors
    /// If nothing would be left to train on, or two problems share a prompt: one could be trained on and the
    /// other held out.
    pub fn split(mut problems: Vec<Problem>, held_out: usize, seed: u64) -> Result<Self, TaskError> {
        let mut prompts = HashSet::with_capacity(problems.len());
        if let Some(problem) = problems.iter().find(|problem| !prompts.insert(&problem.prompt)) {
            return Err(TaskError::DuplicatePrompt { prompt: problem.prompt.clone() });
        }
        if held_out >= problems.len() {
            return Err(TaskError::NothingToTrainOn { held_out, n_problems: problems.len() });
        }
        problems.shuffle(&mut dataset_rng(seed));
        let train = problems.split_off(held_out);
        Ok(Self { train, held_out: problems })
    }

    /// Checks before a run that every prompt can be encoded and every answer be judged by `reward`.
    ///
    /// # Errors
    /// The first problem that cannot, by number: training problems first, then held-out ones.
    pub fn check(&self, tokenizer: &Tokenizer, reward: &dyn Reward) -> Result<(), TaskError> {
        for (set, problems) in [("training", &self.train), ("held-out", &self.held_out)] {
            for (index, problem) in problems.iter().enumerate() {
                tokenizer
                    .check_text(&problem.prompt)
                    .and_then(|()| reward.check(problem))
                    .map_err(|fault| fault.of_problem(set, index))?;
            }
        }
        Ok(())
    }

    /// XXH3-64 of every prompt and answer in their order: equal for the same problems, on any machine.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut hash = Xxh3::new();
        for problems in [&self.train, &self.held_out] {
            hash.update(&(problems.len() as u64).to_le_bytes());
            for text in problems.iter().flat_map(|problem| [&problem.prompt, &problem.answer]) {
                hash.update(&(text.len() as u64).to_le_bytes());
                hash.update(text.as_bytes());
            }
        }
        hash.digest()
    }
}

/// The random numbers that datasets are generated and split with.
pub(crate) fn dataset_rng(seed: u64) -> ChaCha8Rng {
    stream_rng(seed, DATASET_STREAM)
}

fn stream_rng(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    rng
}

/// The order in which a run visits its training problems: every problem once an epoch, shuffled anew each
/// time.
///
/// Stateless but for a cache: the problem at a cursor depends on (seed, cursor, number of problems) only, so
/// a run that resumes at its saved cursor sees exactly the prompts it would have seen. Epoch `e` uses stream
/// `e` of the seed's generator rather than seed `seed + e`, by which runs with neighbouring seeds would share
/// their epochs.
#[derive(Clone, Debug)]
pub struct PromptOrder {
    seed: u64,
    epoch: u64,
    /// The permutation of `epoch`.
    order: Vec<usize>,
}

impl PromptOrder {
    /// An order over `n_problems` problems.
    ///
    /// # Errors
    /// If there are no problems.
    pub fn new(seed: u64, n_problems: usize) -> Result<Self, TaskError> {
        if n_problems == 0 {
            return Err(TaskError::NothingToTrainOn { held_out: 0, n_problems: 0 });
        }
        Ok(Self { seed, epoch: 0, order: permutation(seed, 0, n_problems) })
    }

    /// Index of the problem at `cursor`, the number of prompts taken before it in the whole run.
    ///
    /// Moving to another epoch costs one shuffle.
    pub fn prompt(&mut self, cursor: u64) -> usize {
        let n_problems = self.order.len();
        let (epoch, at) = (cursor / n_problems as u64, cursor % n_problems as u64);
        if epoch != self.epoch {
            self.epoch = epoch;
            self.order = permutation(self.seed, epoch, n_problems);
        }
        self.order[usize::try_from(at).expect("a remainder of a usize fits one")]
    }
}

fn permutation(seed: u64, epoch: u64, n_problems: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n_problems).collect();
    order.shuffle(&mut stream_rng(seed, epoch));
    order
}

/// What the engine is asked to complete: text stops here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The group whose rollouts complete it.
    pub group: GroupId,
    /// Index of the problem in its set.
    pub problem: usize,
    /// The prompt's tokens, at least one.
    pub tokens: Vec<TokenId>,
}

impl Prompt {
    /// Encodes `problem`, the `index`-th of the training problems.
    ///
    /// # Errors
    /// If the prompt holds a character that the vocabulary lacks, or no token at all.
    pub fn encode(
        group: GroupId,
        index: usize,
        problem: &Problem,
        tokenizer: &Tokenizer,
    ) -> Result<Self, TaskError> {
        let tokens =
            tokenizer.encode(&problem.prompt).map_err(|fault| fault.of_problem("training", index))?;
        if tokens.is_empty() {
            return Err(TaskError::Empty { what: "prompt" }.of_problem("training", index));
        }
        Ok(Self { group, problem: index, tokens })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reward::{ExactMatch, NumericMatch};
    use crate::tokenizer::tests::tiny;

    fn problem(prompt: &str, answer: &str) -> Problem {
        Problem { prompt: prompt.into(), answer: answer.into(), wrong: None }
    }

    #[test]
    fn every_epoch_visits_every_problem_once_and_in_another_order() {
        let mut order = PromptOrder::new(7, 50).unwrap();
        let epochs: Vec<Vec<usize>> =
            (0..3).map(|epoch| (0..50).map(|at| order.prompt(epoch * 50 + at)).collect()).collect();
        for epoch in &epochs {
            let mut sorted = epoch.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        }
        assert!(epochs[0] != epochs[1] && epochs[1] != epochs[2] && epochs[0] != epochs[2]);
    }

    #[test]
    fn a_resumed_order_continues_where_it_stopped() {
        let mut whole = PromptOrder::new(3, 7).unwrap();
        let visited: Vec<usize> = (0..40).map(|cursor| whole.prompt(cursor)).collect();
        for start in [0, 6, 7, 8, 23, 39] {
            let mut resumed = PromptOrder::new(3, 7).unwrap();
            let rest: Vec<usize> = (start..40).map(|cursor| resumed.prompt(cursor)).collect();
            assert_eq!(rest, visited[usize::try_from(start).unwrap()..]);
        }
        let backwards: Vec<usize> = (0..40).rev().map(|cursor| whole.prompt(cursor)).collect();
        assert_eq!(backwards, visited.iter().rev().copied().collect::<Vec<_>>());
    }

    /// Resuming a checkpoint relies on this order across releases, so a changed generator must show.
    #[test]
    fn the_order_of_a_seed_never_changes() {
        let mut order = PromptOrder::new(7, 10).unwrap();
        let visited: Vec<usize> = (0..20).map(|cursor| order.prompt(cursor)).collect();
        assert_eq!(visited, [0, 7, 5, 2, 9, 1, 6, 8, 3, 4, 9, 5, 7, 1, 4, 8, 3, 2, 6, 0]);
    }

    #[test]
    fn neighbouring_seeds_share_no_epoch() {
        let epoch = |seed, epoch: u64| {
            let mut order = PromptOrder::new(seed, 100).unwrap();
            (0..100).map(|at| order.prompt(epoch * 100 + at)).collect::<Vec<_>>()
        };
        assert_ne!(epoch(7, 1), epoch(8, 0));
    }

    #[test]
    fn an_order_needs_a_problem() {
        assert!(matches!(PromptOrder::new(1, 0), Err(TaskError::NothingToTrainOn { .. })));
    }

    #[test]
    fn a_split_keeps_every_problem_on_one_side() {
        let problems: Vec<Problem> = (0..20).map(|n| problem(&format!("{n}="), "1")).collect();
        let dataset = Dataset::split(problems.clone(), 5, 1).unwrap();
        assert_eq!((dataset.train.len(), dataset.held_out.len()), (15, 5));
        let all: HashSet<&str> =
            dataset.train.iter().chain(&dataset.held_out).map(|problem| problem.prompt.as_str()).collect();
        assert_eq!(all.len(), 20);
        assert_ne!(dataset, Dataset::split(problems, 5, 2).unwrap());
    }

    #[test]
    fn a_split_that_leaks_or_starves_is_refused() {
        let twice = vec![problem("1+1=", "2"), problem("2+2=", "4"), problem("1+1=", "2")];
        let error = Dataset::split(twice, 1, 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the prompt `1+1=` is there twice, so it could be trained on and held out"
        );
        let error = Dataset::split(vec![problem("1+1=", "2")], 1, 1).unwrap_err();
        assert_eq!(error.to_string(), "holding out 1 of 1 problem leaves none to train on");
    }

    #[test]
    fn a_digest_tells_problems_their_order_and_their_sets_apart() {
        let [a, b] = [problem("1+1=", "2"), problem("2+2=", "4")];
        let digest = |train: &[&Problem], held_out: &[&Problem]| {
            let [train, held_out] = [train, held_out].map(|set| set.iter().copied().cloned().collect());
            Dataset { train, held_out }.digest()
        };
        assert_eq!(digest(&[&a], &[&b]), digest(&[&a], &[&b]));
        let digests =
            [digest(&[&a, &b], &[]), digest(&[&b, &a], &[]), digest(&[&a], &[&b]), digest(&[&a], &[])];
        assert_eq!(digests.into_iter().collect::<HashSet<_>>().len(), digests.len());
        let [short, long] = [problem("1", "+1=2"), problem("1+", "1=2")];
        assert_ne!(digest(&[&short], &[]), digest(&[&long], &[]));
    }

    #[test]
    fn a_prompt_is_encoded_with_its_group_and_problem() {
        let prompt = Prompt::encode(GroupId(9), 4, &problem("1+2=", "3"), &tiny()).unwrap();
        assert_eq!((prompt.group, prompt.problem), (GroupId(9), 4));
        assert_eq!(tiny().decode(&prompt.tokens).unwrap(), "1+2=");
    }

    #[test]
    fn a_prompt_that_cannot_be_encoded_names_the_problem() {
        let encode =
            |text| Prompt::encode(GroupId(0), 4, &problem(text, "3"), &tiny()).unwrap_err().to_string();
        assert_eq!(encode("é="), "training problem 4: the vocabulary has no `é` (character 0 of `é=`)");
        assert_eq!(encode(""), "training problem 4: the prompt is empty");
    }

    #[test]
    fn a_dataset_is_checked_against_tokenizer_and_reward() {
        let dataset = |train, held_out| Dataset { train: vec![train], held_out: vec![held_out] };
        let sound = dataset(problem("1+2=", "3"), problem("2+2=", "four"));
        assert!(sound.check(&tiny(), &ExactMatch).is_ok());
        let error = sound.check(&tiny(), &NumericMatch).unwrap_err();
        assert_eq!(error.to_string(), "held-out problem 0: the answer `four` is not a number");
        let error = dataset(problem("É", "3"), problem("2", "4")).check(&tiny(), &ExactMatch).unwrap_err();
        assert_eq!(error.to_string(), "training problem 0: the vocabulary has no `É` (character 0 of `É`)");
    }
}
