//! The arithmetic task: `ab+cd=`, endless, exactly checkable, and small enough to learn on a CPU.

use std::collections::HashSet;

use rand::Rng;

use crate::dataset::{Dataset, Problem, dataset_rng};
use crate::error::TaskError;

/// Problems made at most; operands of three digits and more have too many pairs to list.
const MAX_PROBLEMS: u64 = 1 << 16;

/// Sums of two operands with the same number of digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArithmeticTask {
    /// Digits of each operand, `1..=9`.
    pub digits: u32,
    /// Problems to hold out.
    pub held_out: usize,
    /// Decides which pairs are drawn, which are held out, and their order.
    pub seed: u64,
}

/// Makes the problems of `task`: every pair of operands from `10^(digits - 1)` to `10^digits - 1` (8100 for
/// two digits), or 65,536 distinct pairs where there are more.
///
/// # Errors
/// If `digits` is out of range, or `held_out` leaves nothing to train on.
pub fn generate(task: ArithmeticTask) -> Result<Dataset, TaskError> {
    let ArithmeticTask { digits, held_out, seed } = task;
    if !(1..=9).contains(&digits) {
        return Err(TaskError::DigitsOutOfRange { digits });
    }
    let lowest = 10_u64.pow(digits - 1);
    let n_operands = 10_u64.pow(digits) - lowest;
    let n_pairs = n_operands * n_operands;
    let pairs: Vec<u64> =
        if n_pairs <= MAX_PROBLEMS { (0..n_pairs).collect() } else { distinct(MAX_PROBLEMS, n_pairs, seed) };
    let problems = pairs.iter().map(|pair| sum(lowest + pair / n_operands, lowest + pair % n_operands));
    Dataset::split(problems.collect(), held_out, seed)
}

/// `n` distinct numbers below `end`, of which there are several times as many, so that few draws repeat.
fn distinct(n: u64, end: u64, seed: u64) -> Vec<u64> {
    let mut rng = dataset_rng(seed);
    let mut seen = HashSet::new();
    let mut numbers = Vec::new();
    while (numbers.len() as u64) < n {
        let number = rng.random_range(0..end);
        if seen.insert(number) {
            numbers.push(number);
        }
    }
    numbers
}

fn sum(a: u64, b: u64) -> Problem {
    let answer = (a + b).to_string();
    let wrong = Some(carry_dropped(a, b)).filter(|wrong| *wrong != answer);
    Problem { prompt: format!("{a}+{b}="), answer, wrong }
}

/// The sum of `a` and `b` by someone who never carries: 47 + 38 is 75, 55 + 55 is 0.
///
/// Most demonstrations of a warm start are spelled this way, so that the right answer is known but not
/// preferred, and reinforcement learning has a mode to choose.
#[must_use]
pub fn carry_dropped(mut a: u64, mut b: u64) -> String {
    let (mut sum, mut place) = (0, 1);
    while a > 0 || b > 0 {
        sum += (a % 10 + b % 10) % 10 * place;
        (a, b, place) = (a / 10, b / 10, place.saturating_mul(10));
    }
    sum.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts(problems: &[Problem]) -> HashSet<&str> {
        problems.iter().map(|problem| problem.prompt.as_str()).collect()
    }

    #[test]
    fn two_digits_are_all_8100_pairs_and_no_held_out_one_is_trained_on() {
        let dataset = generate(ArithmeticTask { digits: 2, held_out: 1000, seed: 7 }).unwrap();
        let (train, held_out) = (prompts(&dataset.train), prompts(&dataset.held_out));
        assert_eq!((train.len(), held_out.len()), (7100, 1000));
        assert!(train.is_disjoint(&held_out));
        let all: HashSet<&str> = train.union(&held_out).copied().collect();
        let expected: Vec<String> =
            (10..100).flat_map(|a| (10..100).map(move |b| format!("{a}+{b}="))).collect();
        assert_eq!(all, expected.iter().map(String::as_str).collect());
    }

    #[test]
    fn every_answer_is_the_sum_and_every_wrong_one_is_not() {
        for digits in [1, 2, 3, 9] {
            let dataset = generate(ArithmeticTask { digits, held_out: 10, seed: 1 }).unwrap();
            for problem in dataset.train.iter().chain(&dataset.held_out) {
                let (a, b) = problem.prompt.trim_end_matches('=').split_once('+').unwrap();
                let (a, b): (u64, u64) = (a.parse().unwrap(), b.parse().unwrap());
                assert_eq!(problem.answer, (a + b).to_string());
                assert_ne!(problem.wrong.as_ref(), Some(&problem.answer));
                assert_eq!(problem.wrong.clone().unwrap_or(problem.answer.clone()), carry_dropped(a, b));
            }
        }
    }

    #[test]
    fn more_digits_are_sampled_without_repeats_and_without_leading_zeros() {
        let dataset = generate(ArithmeticTask { digits: 3, held_out: 100, seed: 1 }).unwrap();
        assert_eq!(dataset.train.len() + dataset.held_out.len(), 65_536);
        assert!(prompts(&dataset.train).is_disjoint(&prompts(&dataset.held_out)));
        assert!(dataset.train.iter().all(|problem| problem.prompt.len() == "100+100=".len()));
    }

    /// The shipped checkpoint was warm-started on this split: another one would put held-out problems into
    /// its past.
    #[test]
    fn the_split_of_a_seed_never_changes() {
        let dataset = generate(ArithmeticTask { digits: 2, held_out: 1000, seed: 7 }).unwrap();
        let first = |problems: &[Problem]| problems[..3].iter().map(|p| p.prompt.clone()).collect::<Vec<_>>();
        assert_eq!(first(&dataset.held_out), ["44+63=", "61+93=", "40+67="]);
        assert_eq!(first(&dataset.train), ["83+52=", "70+84=", "46+45="]);
        let other = generate(ArithmeticTask { digits: 2, held_out: 1000, seed: 8 }).unwrap();
        assert_ne!(dataset.held_out, other.held_out);
    }

    #[test]
    fn a_dropped_carry_is_lost_digit_by_digit() {
        let cases =
            [(47, 38, "75"), (55, 55, "0"), (58, 71, "29"), (12, 34, "46"), (95, 15, "0"), (7, 8, "5")];
        for (a, b, expected) in cases {
            assert_eq!(carry_dropped(a, b), expected, "{a}+{b}");
        }
        assert_eq!(carry_dropped(999_999_999, 1), "999999990");
        assert_eq!(carry_dropped(0, 0), "0");
    }

    #[test]
    fn impossible_tasks_are_refused() {
        let error = |digits, held_out| generate(ArithmeticTask { digits, held_out, seed: 1 }).unwrap_err();
        assert_eq!(error(0, 0).to_string(), "operands of 0 digits were asked for, but 1 to 9 are possible");
        assert_eq!(error(10, 0).to_string(), "operands of 10 digits were asked for, but 1 to 9 are possible");
        assert!(matches!(error(2, 8100), TaskError::NothingToTrainOn { held_out: 8100, n_problems: 8100 }));
    }
}
