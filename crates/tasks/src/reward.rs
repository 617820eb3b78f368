//! Rewards: what a completion is worth, and what happens when that cannot be said.

use std::any::Any;
use std::fmt;
use std::panic::{RefUnwindSafe, catch_unwind};

use r3_core::ids::GroupId;

use crate::dataset::Problem;
use crate::error::TaskError;
use crate::number::Number;

/// Judges completions.
///
/// Scores depend on the arguments only, so that a resumed run repeats them, and take time linear in the
/// completion: whatever could hang on a degenerate sample belongs into a process that can be killed, not
/// behind this trait.
pub trait Reward: Send + Sync + RefUnwindSafe {
    /// The name it goes by in recipes and logs.
    fn name(&self) -> &str;

    /// Whether `problem` can be judged at all; asked once for every problem before a run.
    ///
    /// # Errors
    /// If no completion could be scored against it.
    fn check(&self, problem: &Problem) -> Result<(), TaskError> {
        let _ = problem;
        Ok(())
    }

    /// The score of `completion`, which is without its stop token; `finished` says whether it had one.
    ///
    /// Best called through [`score_caught`], since it may panic or return something that is not finite.
    fn score(&self, problem: &Problem, completion: &str, finished: bool) -> f32;
}

/// 1 for exactly the answer (spaces around it aside) and a stop token after it, else 0.
#[derive(Clone, Copy, Debug)]
pub struct ExactMatch;

impl Reward for ExactMatch {
    fn name(&self) -> &str {
        "exact_match"
    }

    fn score(&self, problem: &Problem, completion: &str, finished: bool) -> f32 {
        one_if(finished && completion.trim() == problem.answer.trim())
    }
}

/// 1 if the last number in the completion is the answer's value and a stop token ended it, else 0.
///
/// For reasoning that leads up to its answer. A completion cut off at its length limit scores 0, because its
/// last number may be cut off as well.
#[derive(Clone, Copy, Debug)]
pub struct NumericMatch;

impl Reward for NumericMatch {
    fn name(&self) -> &str {
        "numeric_match"
    }

    fn check(&self, problem: &Problem) -> Result<(), TaskError> {
        match Number::parse(&problem.answer) {
            Some(_) => Ok(()),
            None => Err(TaskError::AnswerNotANumber { answer: problem.answer.clone() }),
        }
    }

    fn score(&self, problem: &Problem, completion: &str, finished: bool) -> f32 {
        let Some(answer) = Number::parse(&problem.answer) else { return f32::NAN };
        one_if(finished && Number::last_in(completion) == Some(answer))
    }
}

fn one_if(right: bool) -> f32 {
    if right { 1.0 } else { 0.0 }
}

/// A completion to score, with the rollout it is of.
#[derive(Clone, Copy, Debug)]
pub struct Completion<'a> {
    /// The rollout's group.
    pub group: GroupId,
    /// Which of the group's rollouts it is.
    pub index: u32,
    /// The sampled text, without its stop token.
    pub text: &'a str,
    /// Whether a stop token ended it.
    pub finished: bool,
}

/// The finite score of `completion`, or why there is none.
///
/// A failed score is not 0: it says nothing about the completion, so the rollout has to leave its group
/// ([`r3_core::rollout::Reward::Failed`]). See [`check_step`] for when that has gone too far.
///
/// A panic is caught here. Its message still passes the process's panic hook, which by default prints it to
/// stderr: replacing the hook would change it for every thread, and the line is worth seeing.
///
/// # Errors
/// If the reward panics or returns NaN or an infinity.
pub fn score_caught(
    reward: &dyn Reward,
    problem: &Problem,
    completion: &Completion<'_>,
) -> Result<f32, RewardFailure> {
    let score = catch_unwind(|| reward.score(problem, completion.text, completion.finished));
    let reason = match score {
        Ok(score) if score.is_finite() => return Ok(score),
        Ok(score) => FailureReason::NotFinite { score },
        Err(payload) => FailureReason::Panicked { message: panic_message(payload.as_ref()) },
    };
    Err(RewardFailure {
        reward: reward.name().into(),
        group: completion.group,
        index: completion.index,
        reason,
    })
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message").into()
}

/// A reward that could not judge one rollout.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("reward `{reward}` failed on rollout {index} of group {group}: {reason}")]
pub struct RewardFailure {
    /// Name of the reward.
    pub reward: String,
    /// The rollout's group.
    pub group: GroupId,
    /// Which of the group's rollouts.
    pub index: u32,
    /// What happened.
    pub reason: FailureReason,
}

/// How a reward failed.
#[derive(Clone, Debug, PartialEq)]
pub enum FailureReason {
    /// It panicked.
    Panicked {
        /// What it said.
        message: String,
    },
    /// It returned NaN or an infinity.
    NotFinite {
        /// What it returned.
        score: f32,
    },
}

impl fmt::Display for FailureReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Panicked { message } => write!(f, "it panicked: {message}"),
            Self::NotFinite { score } => write!(f, "its score is {score}"),
        }
    }
}

/// Lets a step pass in which the reward judged something: single failures only shrink their groups.
///
/// # Errors
/// If there are failures and not one of the step's rollouts was scored: the reward is broken, and a run that
/// went on would learn nothing.
pub fn check_step(n_scored: usize, failures: &[RewardFailure]) -> Result<(), TaskError> {
    match failures {
        [first, ..] if n_scored == 0 => {
            Err(TaskError::EveryRewardFailed { n_failed: failures.len(), first: first.clone() })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(answer: &str) -> Problem {
        Problem { prompt: "47+38=".into(), answer: answer.into(), wrong: Some("75".into()) }
    }

    fn completion(text: &str) -> Completion<'_> {
        Completion { group: GroupId(5), index: 3, text, finished: true }
    }

    #[test]
    fn only_the_answer_with_a_stop_token_is_an_exact_match() {
        let score = |text, finished| ExactMatch.score(&problem("85"), text, finished);
        assert_eq!((score("85", true), score(" 85\n", true)), (1.0, 1.0));
        for (text, finished) in
            [("85", false), ("75", true), ("085", true), ("8 5", true), ("", true), ("85<pad>", true)]
        {
            assert_eq!(score(text, finished), 0.0, "{text} {finished}");
        }
    }

    #[test]
    fn a_numeric_match_reads_the_last_number() {
        let score = |text, finished| NumericMatch.score(&problem("1,250"), text, finished);
        assert_eq!((score("5 * 250 = 1250.0", true), score("so $1,250.", true)), (1.0, 1.0));
        for (text, finished) in [("1250", false), ("1250 or 1251", true), ("-1250", true), ("none", true)] {
            assert_eq!(score(text, finished), 0.0, "{text} {finished}");
        }
    }

    #[test]
    fn an_answer_that_is_no_number_is_refused_before_the_run_and_fails_within_it() {
        assert!(NumericMatch.check(&problem("-3.5")).is_ok());
        let error = NumericMatch.check(&problem("a lot")).unwrap_err();
        assert_eq!(error.to_string(), "the answer `a lot` is not a number");
        assert!(score_caught(&NumericMatch, &problem("a lot"), &completion("1")).is_err());
        assert!(ExactMatch.check(&problem("a lot")).is_ok());
    }

    /// Does what the completion says.
    struct Obedient;

    impl Reward for Obedient {
        fn name(&self) -> &str {
            "obedient"
        }

        fn score(&self, _: &Problem, completion: &str, _: bool) -> f32 {
            match completion {
                "panic" => panic!("cannot parse {completion}"),
                "static panic" => panic!("no"),
                "odd panic" => std::panic::panic_any(7),
                number => number.parse().unwrap(),
            }
        }
    }

    #[test]
    fn a_finite_score_passes_unchanged() {
        for score in ["0", "1", "-2.5", "1e30"] {
            assert_eq!(
                score_caught(&Obedient, &problem("85"), &completion(score)),
                Ok(score.parse().unwrap())
            );
        }
    }

    #[test]
    fn a_broken_reward_becomes_a_failure_that_names_the_rollout() {
        let failure =
            |text| score_caught(&Obedient, &problem("85"), &completion(text)).unwrap_err().to_string();
        let at = "reward `obedient` failed on rollout 3 of group 5";
        assert_eq!(failure("panic"), format!("{at}: it panicked: cannot parse panic"));
        assert_eq!(failure("static panic"), format!("{at}: it panicked: no"));
        assert_eq!(failure("odd panic"), format!("{at}: it panicked: no message"));
        assert_eq!(failure("NaN"), format!("{at}: its score is NaN"));
        assert_eq!(failure("-inf"), format!("{at}: its score is -inf"));
        assert_eq!(failure("1e39"), format!("{at}: its score is inf"));
    }

    #[test]
    fn a_step_stops_only_when_nothing_was_scored() {
        let failure = score_caught(&Obedient, &problem("85"), &completion("NaN")).unwrap_err();
        let failures = vec![failure; 8];
        assert!(check_step(1, &failures).is_ok());
        assert!(check_step(0, &[]).is_ok());
        let error = check_step(0, &failures).unwrap_err().to_string();
        assert!(
            error.starts_with("the reward failed on all 8 rollouts of a step; first: reward `obedient`"),
            "{error}"
        );
    }
}
