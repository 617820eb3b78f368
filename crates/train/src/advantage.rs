//! Group-relative advantages: how much better a rollout did than the others of its prompt.

/// Added to the standard deviation, as veRL and slime do.
const STD_EPS: f64 = 1e-6;

/// What the rewards of one group teach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Two or more valid rewards that differ.
    Mixed,
    /// All valid rewards are equal, so every advantage is exactly 0.
    Equal,
    /// Fewer than two rewards are valid, so there is nothing to compare with.
    TooFew,
}

/// The advantages of one group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupAdvantage {
    /// `[G]`, in the order of the rewards; `None` where the reward failed. Exactly 0 unless `signal` is
    /// [`Signal::Mixed`].
    pub advantages: Vec<Option<f64>>,
    /// Whether the group teaches anything.
    pub signal: Signal,
}

/// Judges the rewards `[G]` of one group; `None` is a failed reward and takes no part.
#[must_use]
pub fn signal(rewards: &[Option<f64>]) -> Signal {
    let mut valid = rewards.iter().flatten();
    let Some(first) = valid.next() else { return Signal::TooFew };
    let mut n_valid = 1;
    let mut equal = true;
    for reward in valid {
        n_valid += 1;
        equal &= reward == first;
    }
    match (n_valid, equal) {
        (1, _) => Signal::TooFew,
        (_, true) => Signal::Equal,
        (_, false) => Signal::Mixed,
    }
}

/// `A_i = (R_i - mean(R)) / (std(R) + 1e-6)` over the valid rewards of one group, in f64.
///
/// `std` is the sample standard deviation (`ddof = 1`). Without `normalise_std` the division is left out,
/// which is Dr. GRPO (arXiv 2503.20783). Equal rewards give exactly 0, whatever the mean rounds to. A failed
/// reward (`None`) leaves its group instead of counting as 0, and a group with fewer than two valid rewards
/// has no signal: some trainers give such a rollout `A = R`, which rewards it for being alone.
///
/// Source: GRPO, arXiv 2402.03300 section 4.1.2, and DeepSeek-R1, arXiv 2501.12948.
///
/// # Panics
/// If a reward is not finite: whoever takes rewards in refuses those.
#[must_use]
pub fn advantages(rewards: &[Option<f64>], normalise_std: bool) -> GroupAdvantage {
    assert!(rewards.iter().flatten().all(|reward| reward.is_finite()), "rewards are finite");
    let signal = signal(rewards);
    if signal != Signal::Mixed {
        let advantages = rewards.iter().map(|reward| reward.map(|_| 0.0)).collect();
        return GroupAdvantage { advantages, signal };
    }
    let n_valid = rewards.iter().flatten().count() as f64;
    let mean = rewards.iter().flatten().sum::<f64>() / n_valid;
    let scale = if normalise_std {
        let squares: f64 = rewards.iter().flatten().map(|reward| (reward - mean).powi(2)).sum();
        (squares / (n_valid - 1.0)).sqrt() + STD_EPS
    } else {
        1.0
    };
    let advantages = rewards.iter().map(|reward| reward.map(|reward| (reward - mean) / scale)).collect();
    GroupAdvantage { advantages, signal }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

    use super::*;

    fn some(rewards: &[f64]) -> Vec<Option<f64>> {
        rewards.iter().copied().map(Some).collect()
    }

    #[test]
    fn one_success_in_four_by_hand() {
        // mean 1/4, squares 9/16 + 3/16 = 3/4, std = sqrt(3/4 / 3) = 1/2
        let group = advantages(&some(&[1.0, 0.0, 0.0, 0.0]), true);
        assert_eq!(group.signal, Signal::Mixed);
        let expected = [0.75 / 0.500_001, -0.25 / 0.500_001];
        assert!((group.advantages[0].unwrap() - expected[0]).abs() < 1e-15);
        assert!((group.advantages[3].unwrap() - expected[1]).abs() < 1e-15);
    }

    #[test]
    fn without_std_the_advantage_is_the_distance_to_the_mean() {
        let group = advantages(&some(&[3.0, 1.0, 2.0]), false);
        assert_eq!(group.advantages, some(&[1.0, -1.0, 0.0]));
    }

    #[test]
    fn equal_rewards_give_exactly_zero_even_where_their_mean_rounds() {
        let group = advantages(&some(&[0.1, 0.1, 0.1]), true);
        assert_ne!((0.1 + 0.1 + 0.1) / 3.0, 0.1, "the mean of these rounds, or the test shows nothing");
        assert_eq!(group, GroupAdvantage { advantages: some(&[0.0; 3]), signal: Signal::Equal });
    }

    #[test]
    fn a_failed_reward_leaves_the_group() {
        let group = advantages(&[Some(1.0), None, Some(0.0)], true);
        let without = advantages(&some(&[1.0, 0.0]), true);
        assert_eq!(group.advantages, [without.advantages[0], None, without.advantages[1]]);
    }

    #[test]
    fn a_rollout_alone_has_no_signal() {
        let group = advantages(&[None, Some(1.0)], true);
        assert_eq!(group, GroupAdvantage { advantages: vec![None, Some(0.0)], signal: Signal::TooFew });
        assert_eq!(advantages(&[], true).signal, Signal::TooFew);
        assert_eq!(advantages(&[None, None], true).signal, Signal::TooFew);
    }

    proptest! {
        #[test]
        fn advantages_sum_to_zero_and_keep_the_order_of_rewards(
            rewards in prop::collection::vec(prop::option::of(-8_i32..8), 0..12),
            normalise_std in any::<bool>(),
        ) {
            let rewards: Vec<_> = rewards.iter().map(|reward| reward.map(f64::from)).collect();
            let group = advantages(&rewards, normalise_std);
            let sum: f64 = group.advantages.iter().flatten().sum();
            prop_assert!(sum.abs() < 1e-9);
            for (a, r) in group.advantages.iter().zip(&rewards) {
                prop_assert_eq!(a.is_some(), r.is_some());
                for (b, s) in group.advantages.iter().zip(&rewards) {
                    if let (Some(a), Some(b), Some(r), Some(s)) = (a, b, r, s) && r > s {
                        prop_assert!(a > b);
                    }
                }
            }
        }
    }
}
