//! One greedy answer to each of a set of problems, and how they are judged.

use std::ops::ControlFlow;
use std::sync::Arc;

use r3_core::ids::{GroupId, TokenId};
use r3_core::rollout::FinishReason;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::sampler::Sampling;
use r3_scheduler::request::Finished;
use r3_tasks::dataset::Problem;
use r3_tasks::reward::{Completion, Reward, RewardFailure, score_caught};
use r3_tasks::tokenizer::Tokenizer;

use crate::error::RunError;

/// What a greedy evaluation found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Problems answered.
    pub problems: usize,
    /// Mean score.
    pub accuracy: f64,
    /// Seconds it took.
    pub seconds: f64,
}

/// What is evaluated, and how.
pub struct Held<'a> {
    /// The problems.
    pub problems: &'a [Problem],
    /// Judges the answers.
    pub reward: &'a dyn Reward,
    /// Any of these ends an answer.
    pub stop_tokens: &'a Arc<[TokenId]>,
    /// Tokens of an answer at most.
    pub max_new_tokens: usize,
}

/// Mean score of one greedy answer to each problem; an answer whose reward fails counts 0. 0 without problems.
/// `progress(tokens, answers)` hears of every tick and every answer.
///
/// # Errors
/// If a prompt cannot be encoded or the engine refuses it.
///
/// # Panics
/// If the engine has other requests: their rollouts would be taken for answers.
pub fn greedy_accuracy(
    engine: &mut Engine,
    tokenizer: &Tokenizer,
    held: &Held<'_>,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<f64, RunError> {
    assert_eq!(engine.n_open_requests(), 0, "an evaluation has the engine to itself");
    for (index, problem) in held.problems.iter().enumerate() {
        engine.submit(&GroupRequest {
            group: GroupId(index as u64),
            prompt: tokenizer.encode(&problem.prompt)?.into(),
            size: 1,
            max_new_tokens: held.max_new_tokens,
            stop_tokens: Arc::clone(held.stop_tokens),
            sampling: Sampling::GREEDY,
            seed: 0,
            return_routes: None,
        })?;
    }
    let mut sum = 0.0;
    while engine.has_work() {
        engine.tick_until_finished(|_, tick| {
            progress(tick.sampled_tokens as u64, 0);
            ControlFlow::Continue(())
        })?;
        while let Some(finished) = engine.take_finished() {
            let problem = &held.problems[finished.group.index()];
            let judged = judge(&finished, problem, held.reward, tokenizer)?;
            sum += f64::from(judged.unwrap_or(0.0));
            progress(0, 1);
        }
    }
    Ok(sum / held.problems.len().max(1) as f64)
}

/// What `reward` says of the last answer that a rollout gives to `problem`, as text.
pub(crate) fn judge(
    finished: &Finished,
    problem: &Problem,
    reward: &dyn Reward,
    tokenizer: &Tokenizer,
) -> Result<Result<f32, RewardFailure>, RunError> {
    let start = finished.turns.last().map_or(finished.prompt_tokens, |turn| turn.start);
    let text = tokenizer.completion_text(&finished.tokens[start..], finished.finish)?;
    let completion = Completion {
        group: finished.group,
        index: finished.index,
        text: &text,
        finished: finished.finish == FinishReason::Stop,
    };
    Ok(score_caught(reward, problem, &completion))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use super::*;
    use crate::fixtures::{dataset, worker_parts};

    /// Gives its scores in turn, and remembers what it was asked about.
    struct InTurn {
        scores: Vec<f32>,
        asked: Mutex<Vec<String>>,
    }

    impl Reward for InTurn {
        fn name(&self) -> &str {
            "in_turn"
        }

        fn score(&self, problem: &Problem, _: &str, _: bool) -> f32 {
            let mut asked = self.asked.lock().unwrap();
            asked.push(problem.prompt.clone());
            self.scores[asked.len() - 1]
        }
    }

    #[test]
    fn accuracy_is_the_mean_over_all_problems_and_a_failed_reward_counts_nothing() {
        let reward = Arc::new(InTurn { scores: vec![1.0, f32::NAN, 0.5, 0.0, 1.0], asked: Mutex::default() });
        let (mut parts, _ring) = worker_parts(reward.clone(), Duration::from_secs(60));
        let problems = dataset().train;
        let held = Held {
            problems: &problems,
            reward: &*reward,
            stop_tokens: &parts.spec.stop_tokens,
            max_new_tokens: 2,
        };
        let heard = Mutex::new((0, 0));
        let accuracy = greedy_accuracy(&mut parts.engine, &parts.tokenizer, &held, &|tokens, answers| {
            let mut heard = heard.lock().unwrap();
            *heard = (heard.0 + tokens, heard.1 + answers);
        });
        assert_eq!(accuracy.unwrap(), 2.5 / 5.0);
        let (tokens, answers) = heard.into_inner().unwrap();
        assert!((5..=10).contains(&tokens) && answers == 5, "{tokens} tokens, {answers} answers");
        let mut asked = reward.asked.lock().unwrap().clone();
        asked.sort();
        assert_eq!(asked, problems.iter().map(|problem| problem.prompt.clone()).collect::<Vec<_>>());
        let none = Held { problems: &[], ..held };
        assert_eq!(greedy_accuracy(&mut parts.engine, &parts.tokenizer, &none, &|_, _| {}).unwrap(), 0.0);
    }
}
