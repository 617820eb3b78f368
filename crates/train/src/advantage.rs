//! Advantages: how much better a rollout did than those it is compared with, in f64.

/// Added to every standard deviation that is divided by, as veRL and slime do.
const STD_EPS: f64 = 1e-6;

/// Whom a rollout is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Estimator {
    /// `A_i = (R_i - mean(R)) / (std(R) + 1e-6)` over its group, `std` being the sample standard deviation (`ddof = 1`):
    /// GRPO, arXiv 2402.03300 section 4.1.2. Without the division it is Dr. GRPO's, arXiv 2503.20783.
    Group {
        /// Whether to divide.
        normalise_std: bool,
    },
    /// `A_i = R_i - mean of the others of its group`: RLOO, arXiv 2402.14740 equation 9.
    LeaveOneOut,
    /// `R_i`, or `R_i - mean(R)` over its group, [whitened](Self::whiten) over all tokens of the batch: REINFORCE++,
    /// arXiv 2501.03262 section 3.
    Batch {
        /// Whether the mean of the group is taken off first.
        group_baseline: bool,
    },
}

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

impl Estimator {
    /// Whether a group whose rewards are all equal has advantages of 0.
    #[must_use]
    pub fn compares_within_groups(self) -> bool {
        self != Self::Batch { group_baseline: false }
    }

    /// The advantages `[G]` of one group, in f64; for [`Self::Batch`] they are yet to be whitened.
    ///
    /// Equal rewards give exactly 0, whatever their mean rounds to, if they are compared within the group. A failed
    /// reward (`None`) leaves its group instead of counting as 0, and a group with fewer than two valid rewards has
    /// no signal: some trainers give such a rollout `A = R`, which rewards it for being alone.
    ///
    /// # Panics
    /// If a reward is not finite: whoever takes rewards in refuses those.
    #[must_use]
    pub fn advantages(self, rewards: &[Option<f64>]) -> GroupAdvantage {
        assert!(rewards.iter().flatten().all(|reward| reward.is_finite()), "rewards are finite");
        let signal = signal(rewards);
        if signal != Signal::Mixed && self.compares_within_groups() {
            let advantages = rewards.iter().map(|reward| reward.map(|_| 0.0)).collect();
            return GroupAdvantage { advantages, signal };
        }
        let n_valid = rewards.iter().flatten().count() as f64;
        let sum = rewards.iter().flatten().sum::<f64>();
        let mean = sum / n_valid;
        let advantage = |reward: f64| match self {
            Self::Group { normalise_std: true } => (reward - mean) / (std(rewards, mean) + STD_EPS),
            Self::Group { normalise_std: false } | Self::Batch { group_baseline: true } => reward - mean,
            Self::LeaveOneOut => reward - (sum - reward) / (n_valid - 1.0),
            Self::Batch { group_baseline: false } => reward,
        };
        let advantages = rewards.iter().map(|reward| reward.map(advantage)).collect();
        GroupAdvantage { advantages, signal }
    }

    /// Whitens the advantages of a batch, each with the number of its tokens: `A = (A' - mean) / (std + 1e-6)` over
    /// tokens, with `ddof = 1`. If all are equal, they become exactly 0. Estimators other than [`Self::Batch`] are left
    /// alone.
    pub fn whiten<'a>(self, advantages: impl Iterator<Item = (&'a mut f64, usize)>) {
        if !matches!(self, Self::Batch { .. }) {
            return;
        }
        let mut advantages: Vec<_> = advantages.collect();
        let equal = advantages.windows(2).all(|pair| *pair[0].0 == *pair[1].0);
        let n_tokens: usize = advantages.iter().map(|(_, n)| n).sum();
        let sum: f64 = advantages.iter().map(|(value, n)| **value * *n as f64).sum();
        let mean = sum / n_tokens as f64;
        let squares: f64 = advantages.iter().map(|(value, n)| (**value - mean).powi(2) * *n as f64).sum();
        let scale = (squares / (n_tokens as f64 - 1.0)).sqrt() + STD_EPS;
        for (value, _) in &mut advantages {
            **value = if equal { 0.0 } else { (**value - mean) / scale };
        }
    }
}

/// Sample standard deviation of the valid rewards.
fn std(rewards: &[Option<f64>], mean: f64) -> f64 {
    let n_valid = rewards.iter().flatten().count() as f64;
    let squares: f64 = rewards.iter().flatten().map(|reward| (reward - mean).powi(2)).sum();
    (squares / (n_valid - 1.0)).sqrt()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop, prop_assert, prop_assert_eq, proptest};

    use super::*;

    const GRPO: Estimator = Estimator::Group { normalise_std: true };
    const DR_GRPO: Estimator = Estimator::Group { normalise_std: false };

    fn some(rewards: &[f64]) -> Vec<Option<f64>> {
        rewards.iter().copied().map(Some).collect()
    }

    #[test]
    fn one_success_in_four_by_hand() {
        // mean 1/4, squares 9/16 + 3/16 = 3/4, std = sqrt(3/4 / 3) = 1/2
        let group = GRPO.advantages(&some(&[1.0, 0.0, 0.0, 0.0]));
        assert_eq!(group.signal, Signal::Mixed);
        let expected = [0.75 / 0.500_001, -0.25 / 0.500_001];
        assert!((group.advantages[0].unwrap() - expected[0]).abs() < 1e-15);
        assert!((group.advantages[3].unwrap() - expected[1]).abs() < 1e-15);
    }

    #[test]
    fn without_std_the_advantage_is_the_distance_to_the_mean() {
        let group = DR_GRPO.advantages(&some(&[3.0, 1.0, 2.0]));
        assert_eq!(group.advantages, some(&[1.0, -1.0, 0.0]));
    }

    #[test]
    fn equal_rewards_give_exactly_zero_even_where_their_mean_rounds() {
        let group = GRPO.advantages(&some(&[0.1, 0.1, 0.1]));
        assert_ne!((0.1 + 0.1 + 0.1) / 3.0, 0.1, "the mean of these rounds, or the test shows nothing");
        assert_eq!(group, GroupAdvantage { advantages: some(&[0.0; 3]), signal: Signal::Equal });
    }

    #[test]
    fn a_failed_reward_leaves_the_group() {
        let group = GRPO.advantages(&[Some(1.0), None, Some(0.0)]);
        let without = GRPO.advantages(&some(&[1.0, 0.0]));
        assert_eq!(group.advantages, [without.advantages[0], None, without.advantages[1]]);
    }

    #[test]
    fn a_rollout_alone_has_no_signal() {
        let group = GRPO.advantages(&[None, Some(1.0)]);
        assert_eq!(group, GroupAdvantage { advantages: vec![None, Some(0.0)], signal: Signal::TooFew });
        assert_eq!(GRPO.advantages(&[]).signal, Signal::TooFew);
        assert_eq!(GRPO.advantages(&[None, None]).signal, Signal::TooFew);
    }

    proptest! {
        #[test]
        fn advantages_sum_to_zero_and_keep_the_order_of_rewards(
            rewards in prop::collection::vec(prop::option::of(-8_i32..8), 0..12),
            estimator in prop::sample::select(vec![GRPO, DR_GRPO, Estimator::LeaveOneOut]),
        ) {
            let rewards: Vec<_> = rewards.iter().map(|reward| reward.map(f64::from)).collect();
            let group = estimator.advantages(&rewards);
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
