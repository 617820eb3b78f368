//! The contract that rollouts must keep before anyone trains on them.

use r3_core::rollout::RolloutView;

use crate::batch::{Batch, Group, RoutesUse, Sample, Sequence};
use crate::error::TrainError;

pub(crate) fn refuse_repeated_groups(groups: &[Group<'_>]) -> Result<(), TrainError> {
    let mut ids: Vec<_> = groups.iter().filter(|group| !group.samples.is_empty()).collect();
    ids.sort_by_key(|group| group.id);
    match ids.windows(2).find(|pair| pair[0].id == pair[1].id) {
        Some(pair) => {
            Err(TrainError::DuplicateRollout { group: pair[1].id, index: pair[1].samples[0].rollout.index })
        }
        None => Ok(()),
    }
}

/// The samples of a group by index, each checked against its contract.
pub(crate) fn ordered_samples<'a>(
    group: &Group<'a>,
    routes: RoutesUse,
) -> Result<Vec<Sample<'a>>, TrainError> {
    let mut samples = group.samples.clone();
    samples.sort_by_key(|sample| sample.rollout.index);
    for (at, sample) in samples.iter().enumerate() {
        let RolloutView { group: own, index, .. } = sample.rollout;
        if own != group.id {
            return Err(TrainError::ForeignRollout { group: own, index, holder: group.id });
        }
        if at > 0 && samples[at - 1].rollout.index == index {
            return Err(TrainError::DuplicateRollout { group: own, index });
        }
        check(sample, routes)?;
    }
    Ok(samples)
}

fn check(sample: &Sample<'_>, routes: RoutesUse) -> Result<(), TrainError> {
    let RolloutView { group, index, tokens, prompt_tokens, .. } = sample.rollout;
    let misshapen = |array, len, expected| TrainError::Misshapen { group, index, array, len, expected };
    if prompt_tokens == 0 || prompt_tokens > tokens.len() {
        return Err(misshapen("prompt tokens", prompt_tokens, tokens.len().min(1)));
    }
    let n_sampled = tokens.len() - prompt_tokens;
    let lengths = [
        ("rollout logprobs", sample.rollout.rollout_logprobs.len()),
        ("versions", sample.rollout.versions.len()),
        ("mask entries", sample.mask.map_or(n_sampled, <[u8]>::len)),
    ];
    if let Some((array, len)) = lengths.into_iter().find(|(_, len)| *len != n_sampled) {
        return Err(misshapen(array, len, n_sampled));
    }
    let non_finite = |array, value, at| TrainError::NonFiniteInput { group, index, array, value, at };
    if let Some(at) = sample.rollout.rollout_logprobs.iter().position(|logprob| !logprob.is_finite()) {
        return Err(non_finite("rollout logprobs", sample.rollout.rollout_logprobs[at], prompt_tokens + at));
    }
    if let Some(reward) = sample.reward.score().filter(|reward| !reward.is_finite()) {
        return Err(non_finite("reward", reward, 0));
    }
    if let Some(support) = sample.rollout.support {
        let checked = support.check(sample.rollout.completion(), sample.mask);
        checked.map_err(|source| TrainError::Support { group, index, source })?;
    }
    if routes == RoutesUse::None || n_sampled == 0 {
        return Ok(());
    }
    let view = sample.rollout.routes.ok_or(TrainError::MissingRoutes { group, index })?;
    view.check(tokens.len() - 1).map_err(|source| TrainError::Routes { group, index, source })
}

/// Refuses supports of another model than one of `vocab_size` tokens, and, if draws were truncated, tokens without one.
pub(crate) fn check_supports(
    batch: &Batch<'_>,
    vocab_size: usize,
    truncated: bool,
) -> Result<(), TrainError> {
    for Sequence { sample, .. } in batch.sequences() {
        let RolloutView { group, index, support, prompt_tokens, .. } = sample.rollout;
        if let Some((row, token)) = support.and_then(|support| support.beyond(vocab_size)) {
            let position = prompt_tokens + row;
            return Err(TrainError::SupportToken { group, index, position, token, vocab_size });
        }
        let is_trained = |row: usize| sample.mask.is_none_or(|mask| mask[row] != 0);
        let is_whole = |row: &usize| support.is_none_or(|support| support.sizes()[*row] == 0);
        let missing = (0..sample.rollout.completion().len()).filter(|&row| is_trained(row)).find(is_whole);
        if let Some(row) = missing.filter(|_| truncated) {
            return Err(TrainError::MissingSupport { group, index, position: prompt_tokens + row });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use r3_core::ids::GroupId;
    use r3_core::ids::TokenId;
    use r3_core::rollout::Reward;
    use r3_core::routes::{RouteDims, RouteError};
    use r3_core::support::{SupportError, SupportRows};

    use super::*;
    use crate::batch::Limits;
    use crate::fixtures::{OwnedRollout, dapo, with_groups};

    const DIMS: RouteDims = RouteDims { n_layers: 2, top_k: 2, n_experts: 5 };

    fn refused(rollouts: &[OwnedRollout], routes: RoutesUse) -> Option<TrainError> {
        let limits = Limits { mini_steps: 1, micro_batch_tokens: 100, share_prompts: true, routes };
        with_groups(rollouts, |groups| Batch::pack(groups, &dapo(), limits).err())
    }

    fn refusal(rollouts: &[OwnedRollout], routes: RoutesUse) -> String {
        refused(rollouts, routes).expect("a refusal").to_string()
    }

    fn pair() -> Vec<OwnedRollout> {
        [1.0, 0.0]
            .map(|reward| OwnedRollout::new(7, u32::from(reward == 0.0), (2, 3), reward).with_routes(DIMS))
            .into()
    }

    #[test]
    fn a_broken_rollout_is_refused_by_group_and_index() {
        let broken = |breaking: fn(&mut OwnedRollout)| {
            let mut rollouts = pair();
            breaking(&mut rollouts[1]);
            refusal(&rollouts, RoutesUse::None)
        };
        let short = broken(|rollout| rollout.rollout_logprobs.truncate(2));
        assert_eq!(short, "group 7, rollout 1 has 2 rollout logprobs, but 3 are needed");
        let mask = broken(|rollout| rollout.mask = Some(vec![1]));
        assert_eq!(mask, "group 7, rollout 1 has 1 mask entries, but 3 are needed");
        let logprob = broken(|rollout| rollout.rollout_logprobs[1] = f32::NAN);
        assert_eq!(logprob, "group 7, rollout 1: rollout logprobs holds NaN at 3");
        let reward = broken(|rollout| rollout.reward = Reward::Score(f32::INFINITY));
        assert_eq!(reward, "group 7, rollout 1: reward holds inf at 0");
        assert_eq!(broken(|rollout| rollout.index = 0), "group 7, rollout 0 came twice");
    }

    #[test]
    fn supports_that_break_their_contract_are_refused() {
        let refused_with = |supports: &[&[u32]], mask: Option<Vec<u8>>| {
            let mut rollouts = pair();
            let mut rows = SupportRows::default();
            supports.iter().for_each(|support| rows.push(support));
            (rollouts[1].support, rollouts[1].mask) = (Some(rows), mask);
            refused(&rollouts, RoutesUse::None)
        };
        let tokens = pair()[1].tokens[2..].iter().map(|token| token.0).collect::<Vec<_>>();
        let [first, second, third] = tokens[..] else { panic!("three are sampled") };
        assert!(refused_with(&[&[first], &[], &[0, third]], None).is_none());
        assert!(refused_with(&[&[first], &[], &[0, third]], Some(vec![1, 0, 1])).is_none());
        for (supports, mask, expected) in [
            (&[&[first][..], &[]][..], None, SupportError::Rows { rows: 2, expected_rows: 3 }),
            (&[&[], &[second], &[]], Some(vec![1, 0, 1]), SupportError::Given { row: 1 }),
            (&[&[], &[0], &[]], None, SupportError::Missing { row: 1, token: TokenId(second) }),
        ] {
            match refused_with(supports, mask) {
                Some(TrainError::Support { group: GroupId(7), index: 1, source }) => {
                    assert_eq!(source, expected)
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_group_that_comes_twice_or_holds_another_groups_rollout_is_refused() {
        let limits =
            Limits { mini_steps: 1, micro_batch_tokens: 100, share_prompts: true, routes: RoutesUse::None };
        let pack = |groups: &[Group<'_>]| Batch::pack(groups, &dapo(), limits).err();
        with_groups(&pair(), |groups| {
            let twice = [groups[0].clone(), groups[0].clone()];
            assert_eq!(pack(&twice).unwrap().to_string(), "group 7, rollout 0 came twice");
            let renamed = [Group { id: GroupId(8), samples: groups[0].samples.clone() }];
            assert_eq!(pack(&renamed).unwrap().to_string(), "group 7, rollout 0 lies in group 8");
        });
    }

    #[test]
    fn replay_and_diagnosis_without_routes_are_refused() {
        let mut rollouts = pair();
        assert!(refused(&rollouts, RoutesUse::Replay).is_none());
        rollouts[1].routes = None;
        for routes in [RoutesUse::Replay, RoutesUse::Diagnose] {
            assert_eq!(
                refusal(&rollouts, routes),
                "group 7, rollout 1 has no routes, but the trainer needs them"
            );
        }
        assert!(refused(&rollouts, RoutesUse::None).is_none());
    }

    #[test]
    fn routes_that_break_their_contract_are_refused() {
        let mut rollouts = pair();
        // 3 rows for 5 tokens.
        rollouts[1].routes = OwnedRollout::new(7, 1, (1, 3), 0.0).with_routes(DIMS).routes;
        let Some(TrainError::Routes { group, index, source }) = refused(&rollouts, RoutesUse::Replay) else {
            panic!("accepted")
        };
        assert_eq!((group.0, index), (7, 1));
        assert_eq!(source, RouteError::RowCount { rows: 3, expected_rows: 4 });
        let wider = RouteDims { n_experts: 6, ..DIMS };
        rollouts[1] = OwnedRollout::new(7, 1, (2, 3), 0.0).with_routes(wider);
        assert!(refusal(&rollouts, RoutesUse::Replay).starts_with("group 7, rollout 1 has routes of shape"));
    }
}
