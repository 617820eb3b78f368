//! Tests of steps on rollouts whose draws were truncated.

use r3_core::ids::TokenId;
use r3_core::rollout::Reward;
use r3_core::support::SupportRows;
use r3_kernels::router::Routing;
use r3_model::autograd::Scored;
use r3_recipe::objective::KlPlace;

use super::tests::{WHOLE, first_moments, objectives, rollouts, step, trainer, with_kl};
use crate::batch::{Batch, Limits};
use crate::error::TrainError;
use crate::fixtures::{OwnedRollout, dapo, tiny_policy, with_groups};
use crate::micro_batch::MicroBatch;

/// The rollouts of [`rollouts()`], each of whose tokens could have been one of two or three others.
fn truncated_rollouts() -> Vec<OwnedRollout> {
    let (mut policy, mut rollouts) = (tiny_policy(1), rollouts());
    for rollout in &mut rollouts {
        let mut supports = SupportRows::default();
        for (&TokenId(token), n) in rollout.tokens[rollout.prompt_tokens..].iter().zip(0..) {
            let mut support = vec![token, (token + 3) % 13, (token + 5) % 13];
            support.truncate(2 + n % 2);
            support.sort_unstable();
            supports.push(&support);
        }
        rollout.support = Some(supports);
    }
    for at in 0..rollouts.len() {
        let one = [rollouts[at].clone(), OwnedRollout { index: 9, ..rollouts[at].clone() }];
        let one = one.map(|rollout| OwnedRollout { reward: Reward::Score(rollout.index as f32), ..rollout });
        let mut micro = MicroBatch::default();
        with_groups(&one, |groups| micro.gather(&Batch::pack(groups, &dapo(), WHOLE).unwrap(), 0..1));
        let mut routing = Routing::Replay { ids: &micro.routes, native: None };
        let scored = Scored { temperature: 1.0, kept: micro.kept() };
        let output = policy.logprobs_of(&micro.packed(), &mut routing, scored).unwrap();
        let logprobs = output.logprobs.to_vec1::<f32>().unwrap();
        rollouts[at].rollout_logprobs = logprobs[rollouts[at].prompt_tokens - 1..].to_vec();
    }
    rollouts
}

#[test]
fn truncated_rollouts_are_scored_over_what_they_were_drawn_from() {
    let k3_of = |rollouts: &[OwnedRollout], mini_steps| {
        let mut trainer = trainer(&objectives()[0]).with_truncated_rollouts();
        let stats = step(&mut trainer, rollouts, Limits { mini_steps, ..WHOLE }).unwrap();
        assert!(stats.actor.entropy < 3_f64.ln(), "of three tokens at most");
        (stats.mismatch.k3_kl, stats.mismatch.abs_diff_max)
    };
    let rollouts = truncated_rollouts();
    assert_eq!([1, 3].map(|mini_steps| k3_of(&rollouts, mini_steps)), [(0.0, 0.0); 2]);
    let mut whole = rollouts;
    whole.iter_mut().for_each(|rollout| rollout.support = None);
    let stats = step(&mut trainer(&objectives()[0]), &whole, WHOLE).unwrap();
    assert!(stats.mismatch.k3_kl > 0.1, "{}", stats.mismatch.k3_kl);
}

#[test]
fn micro_batches_of_truncated_rollouts_add_up() {
    let rollouts = truncated_rollouts();
    let gradient = |micro_batch_tokens| {
        let mut trainer = trainer(&dapo()).with_truncated_rollouts();
        step(&mut trainer, &rollouts, Limits { micro_batch_tokens, ..WHOLE }).unwrap();
        first_moments(&trainer)
    };
    let whole = gradient(1000);
    let largest = whole.iter().fold(0.0_f32, |largest, m| largest.max(m.abs()));
    for micro_batch_tokens in [1, 11] {
        let split = gradient(micro_batch_tokens);
        assert!(whole.iter().zip(&split).all(|(a, b)| (a - b).abs() <= 1e-5 * largest));
    }
}

#[test]
fn a_truncated_rollout_that_does_not_say_what_it_was_drawn_from_is_refused() {
    let refused = |broken: &[OwnedRollout]| {
        step(&mut trainer(&dapo()).with_truncated_rollouts(), broken, WHOLE).unwrap_err()
    };
    let mut broken = truncated_rollouts();
    broken[4].support = None;
    let position = broken[4].prompt_tokens;
    match refused(&broken) {
        TrainError::MissingSupport { group, index: 1, position: at } => {
            assert_eq!((group.0, at), (1, position))
        }
        error => panic!("{error}"),
    }
    let mut broken = truncated_rollouts();
    let mut supports = SupportRows::default();
    supports.fill(broken[4].rollout_logprobs.len());
    broken[4].support = Some(supports);
    assert!(matches!(refused(&broken), TrainError::MissingSupport { .. }));
    let mut broken = truncated_rollouts();
    let mut supports = broken[4].support.clone().unwrap();
    let n_sampled = supports.rows();
    supports.truncate(n_sampled - 1);
    let last = broken[4].tokens.last().unwrap().0;
    supports.push(&[last, 13]);
    broken[4].support = Some(supports);
    match refused(&broken) {
        TrainError::SupportToken { token: TokenId(13), vocab_size: 13, .. } => {}
        error => panic!("{error}"),
    }
}

#[test]
fn the_reference_is_scored_over_the_same_support() {
    let run = |seed: u64| {
        let trainer = trainer(&with_kl(KlPlace::Loss)).with_truncated_rollouts();
        let mut trainer = trainer.with_reference(tiny_policy(seed));
        step(&mut trainer, &truncated_rollouts(), WHOLE).unwrap().actor.kl_loss.unwrap()
    };
    assert_eq!(run(1), 0.0);
    assert!(run(2) > 0.0);
}
