use candle_core::Var;
use r3_recipe::learning::{NonFinite, Train};

use super::*;
use crate::batch::Limits;
use crate::fixtures::{OwnedRollout, dapo, grpo, sampled_by, tiny_policy, with_groups};
use crate::loss::correction::{Band, Correction, Weight};
use crate::loss::kl::KlEstimator;

pub(super) const WHOLE: Limits =
    Limits { mini_steps: 1, micro_batch_tokens: 1000, share_prompts: true, routes: RoutesUse::Replay };

pub(super) fn objectives() -> [Objective; 2] {
    [dapo(), grpo()]
}

pub(super) fn trainer(objective: &Objective) -> Trainer {
    trainer_at(objective, 1e-2)
}

fn trainer_at(objective: &Objective, lr: f64) -> Trainer {
    let train = Train { lr, ..Train::default() };
    Trainer::new(tiny_policy(1), objective.clone(), OptimiserConfig::of_train(&train, 100), 1.0)
}

/// Three groups of three rollouts that the tiny policy itself sampled, with unequal lengths.
pub(super) fn rollouts() -> Vec<OwnedRollout> {
    let mut policy = tiny_policy(1);
    let ids = (0..3).flat_map(|group| (0..3).map(move |index| (group, index)));
    ids.map(|(group, index)| {
        let lengths = (2 + index as usize, 3 + group as usize - index as usize);
        sampled_by(&mut policy, OwnedRollout::new(group, index, lengths, (index % 2) as f32))
    })
    .collect()
}

pub(super) fn step(
    trainer: &mut Trainer,
    rollouts: &[OwnedRollout],
    limits: Limits,
) -> Result<StepStats, TrainError> {
    let objective = trainer.objective().clone();
    with_groups(rollouts, |groups| {
        let batch = Batch::pack(groups, &objective, limits)?;
        let (mut passes, n_passes) = (Vec::new(), trainer.n_passes(&batch));
        let stats = trainer.step(&batch, &mut |pass| passes.push(pass));
        assert!(trainer.learner.gradients.is_none(), "they take memory in a step alone");
        let stats = stats?;
        let stages: Vec<Stage> = passes.iter().map(|pass| pass.stage).collect();
        let n_measured = stages.iter().take_while(|stage| **stage == Stage::Measured).count();
        let (pairs, rest) = stages[n_measured..].as_chunks::<2>();
        assert_eq!(n_measured + pairs.len(), n_passes, "every micro-batch is reported");
        assert!(pairs.iter().all(|pair| *pair == [Stage::Forward, Stage::Learned]) && rest.is_empty());
        Ok(stats)
    })
}

fn flat(vars: &[(String, Var)]) -> Vec<f32> {
    vars.iter().flat_map(|(_, var)| var.flatten_all().unwrap().to_vec1::<f32>().unwrap()).collect()
}

/// The first step's running mean is a tenth of the clipped gradient.
pub(super) fn first_moments(trainer: &Trainer) -> Vec<f32> {
    trainer.learner.optimiser.moments().iter().flat_map(|one| one.mean().to_vec()).collect()
}

/// Shifts the first expert of every choice where that keeps the ids distinct.
fn rerouted(mut rollout: OwnedRollout) -> OwnedRollout {
    let routes = rollout.routes.unwrap();
    let mut bytes = routes.view().bytes().to_vec();
    for pair in bytes.chunks_exact_mut(2) {
        pair[0] = (0..4).find(|id| !pair.contains(id)).unwrap();
    }
    let mut rows = r3_core::routes::RouteRows::with_capacity(routes.view().dims(), 0);
    rows.append(&bytes);
    rollout.routes = Some(rows);
    rollout
}

#[test]
fn every_weight_gets_a_gradient_under_replay_and_without() {
    for routes in [RoutesUse::Replay, RoutesUse::None] {
        let mut trainer = trainer(&objectives()[0]);
        step(&mut trainer, &rollouts(), Limits { routes, ..WHOLE }).unwrap();
        let Learner { policy, optimiser, .. } = &trainer.learner;
        for ((name, _), moments) in policy.vars().iter().zip(optimiser.moments()) {
            assert!(moments.mean().iter().any(|m| *m != 0.0), "{name} does not learn");
        }
    }
}

#[test]
fn at_equal_weights_there_is_no_mismatch_in_any_mini_step() {
    for mini_steps in [1, 3] {
        let stats =
            step(&mut trainer(&objectives()[0]), &rollouts(), Limits { mini_steps, ..WHOLE }).unwrap();
        let mismatch = stats.mismatch;
        assert_eq!((stats.mini_steps, mismatch.n_tokens), (mini_steps, stats.batch.n_trained));
        assert_eq!([mismatch.k3_kl, mismatch.abs_diff_max, mismatch.extreme_frac_tau2], [0.0; 3]);
        assert_eq!(mismatch.router, Some(crate::mismatch::RouterDiscrepancy::default()));
        assert_eq!(stats.version, PolicyVersion(mini_steps as u64));
    }
}

#[test]
fn tokens_of_older_weights_are_trained_on_but_not_compared() {
    let mut rollouts = rollouts();
    let n_fresh = |rollouts: &[OwnedRollout]| -> usize {
        let fresh = rollouts.iter().filter(|rollout| rollout.version == 3);
        fresh.map(|rollout| rollout.rollout_logprobs.len()).sum()
    };
    rollouts.iter_mut().for_each(|rollout| rollout.version = 3);
    for rollout in rollouts.iter_mut().step_by(2) {
        *rollout = OwnedRollout { version: 1, ..rerouted(rollout.clone()) };
        rollout.rollout_logprobs.iter_mut().for_each(|old| *old += 0.125);
    }
    for mini_steps in [1, 3] {
        let mut trainer = trainer(&objectives()[0]);
        trainer.learner.version = PolicyVersion(3);
        let stats = step(&mut trainer, &rollouts, Limits { mini_steps, ..WHOLE }).unwrap();
        let MismatchStats { n_tokens, abs_diff_max, router, .. } = stats.mismatch;
        assert_eq!((n_tokens, stats.staleness_max), (n_fresh(&rollouts), 2));
        assert!(n_tokens < stats.batch.n_trained);
        assert_eq!((abs_diff_max, router.unwrap().token_any_frac), (0.0, 0.0));
        assert_ne!(stats.actor.ppo_kl, 0.0, "the objective sees all of them");
    }
}

#[test]
fn before_the_first_update_nothing_is_clipped_and_the_policy_has_not_moved() {
    let actor = step(&mut trainer(&objectives()[0]), &rollouts(), WHOLE).unwrap().actor;
    assert_eq!([actor.ppo_kl, actor.pg_clipfrac], [0.0; 2]);
    assert!(actor.entropy > 0.0 && actor.entropy <= 13.0_f64.ln());
    let several = Limits { mini_steps: 3, ..WHOLE };
    let actor = step(&mut trainer(&objectives()[0]), &rollouts(), several).unwrap().actor;
    assert_ne!(actor.ppo_kl, 0.0, "later mini-steps come after an update");
}

#[test]
fn ppo_kl_is_rollout_minus_policy() {
    let mut rollouts = rollouts();
    rollouts.iter_mut().flat_map(|rollout| &mut rollout.rollout_logprobs).for_each(|old| *old += 0.125);
    let actor = step(&mut trainer(&objectives()[0]), &rollouts, WHOLE).unwrap().actor;
    assert!((actor.ppo_kl - 0.125).abs() < 1e-6, "{}", actor.ppo_kl);
}

#[test]
fn at_ratio_one_the_loss_is_the_mean_advantage_over_tokens_or_over_rollouts() {
    let mut rollouts = rollouts();
    rollouts[1].mask = Some(vec![0; rollouts[1].rollout_logprobs.len()]); // Or rollouts would cancel out.
    let (tokens, sequences) = with_groups(&rollouts, |groups| {
        let batch = Batch::pack(groups, &objectives()[0], WHOLE).unwrap();
        let weighed = |weight: fn(usize) -> f64| -> f64 {
            let total: f64 = batch.sequences().iter().map(|one| weight(one.n_trained)).sum();
            let sum = |(one, n): (f64, usize)| one * weight(n);
            batch.sequences().iter().map(|one| sum((one.advantage, one.n_trained))).sum::<f64>() / total
        };
        (weighed(|n| n as f64), weighed(|_| 1.0))
    });
    for (objective, mean) in objectives().iter().zip([tokens, sequences]) {
        let loss = step(&mut trainer(objective), &rollouts, WHOLE).unwrap().actor.pg_loss;
        assert!((loss + mean).abs() < 1e-5 && loss != 0.0, "{loss} is not -{mean}");
    }
}

#[test]
fn no_gradient_leaks_into_the_next_step_even_from_a_failed_one() {
    let limits = Limits { micro_batch_tokens: 1, ..WHOLE };
    let mut trainer = trainer_at(&objectives()[0], 0.0);
    let first = step(&mut trainer, &rollouts(), limits).unwrap().actor.grad_norm;
    let mut broken = rollouts();
    broken[8].tokens[0].0 = 99; // Outside the vocabulary, in the last micro-batch.
    assert!(matches!(step(&mut trainer, &broken, limits), Err(TrainError::Model(_))));
    assert_eq!(step(&mut trainer, &rollouts(), limits).unwrap().actor.grad_norm, first);
}

#[test]
fn replay_takes_the_rollouts_experts_and_reports_the_routers_own() {
    let other: Vec<_> = rollouts().into_iter().map(rerouted).collect();
    let run = |rollouts: &[OwnedRollout], routes| {
        step(&mut trainer(&objectives()[0]), rollouts, Limits { routes, ..WHOLE }).unwrap()
    };
    let replayed = run(&other, RoutesUse::Replay);
    assert!(replayed.mismatch.abs_diff_max > 0.0, "other experts give other logprobs");
    assert_eq!(replayed.mismatch.router.unwrap().token_any_frac, 1.0);
    // Diagnosis compares the same routes but runs the router's own, which are the ones that sampled.
    let diagnosed = run(&other, RoutesUse::Diagnose);
    assert_eq!(diagnosed.mismatch.abs_diff_max, 0.0);
    assert_eq!(diagnosed.mismatch.router.unwrap().token_any_frac, 1.0);
    assert_ne!(replayed.load, diagnosed.load);
    let off = run(&other, RoutesUse::None);
    assert_eq!((off.mismatch.abs_diff_max, off.mismatch.router, off.load), (0.0, None, None));
}

const FREE: Limits = Limits { routes: RoutesUse::None, ..WHOLE };

/// The weights and figures after a step at `lr`, with the trainer's own routes replayed or not.
fn with_own(own: bool, mini_steps: usize, reference: Option<u64>) -> (StepStats, Vec<f32>) {
    let objective = if reference.is_some() { with_kl(KlPlace::Loss) } else { dapo() };
    let mut trainer = trainer_at(&objective, 0.3);
    if own {
        trainer = trainer.with_replay(ReplayRule { own: Own::Experts, threshold: 0.0 });
    }
    if let Some(seed) = reference {
        trainer = trainer.with_reference(tiny_policy(seed));
    }
    let stats = step(&mut trainer, &rollouts(), Limits { mini_steps, ..FREE }).unwrap();
    (stats, flat(trainer.policy().vars()))
}

#[test]
fn own_routes_change_nothing_before_the_first_update_and_hold_its_choice_after() {
    let (off, own) = (with_own(false, 1, None), with_own(true, 1, None));
    assert_eq!(off.1, own.1);
    assert_eq!((off.0.load, own.0.load.is_some(), own.0.mismatch.router), (None, true, None));
    assert_eq!(StepStats { load: None, ..own.0 }, off.0);
    let (off, own) = (with_own(false, 3, None), with_own(true, 3, None));
    assert_eq!(off.0.mismatch, own.0.mismatch, "measured is what comes before the first update");
    assert_ne!(off.1, own.1, "a step this large moves the router's choice");
}

/// The choice held is that of the weights the step starts with: what `r3` would replay of rollouts those weights sampled.
#[test]
fn own_routes_of_the_sampling_weights_are_those_of_the_rollouts() {
    let mut replaying = trainer_at(&dapo(), 0.3);
    let stats = step(&mut replaying, &rollouts(), Limits { mini_steps: 3, ..WHOLE }).unwrap();
    let (own, weights) = with_own(true, 3, None);
    assert_eq!(flat(replaying.policy().vars()), weights);
    assert_eq!((own.actor, own.load), (stats.actor, stats.load));
}

#[test]
fn own_routes_are_diagnosed_beside_the_rollouts_and_not_replaced_by_them() {
    let other: Vec<_> = rollouts().into_iter().map(rerouted).collect();
    let limits = Limits { mini_steps: 3, routes: RoutesUse::Diagnose, ..WHOLE };
    let rule = ReplayRule { own: Own::Experts, threshold: 0.0 };
    let mut trainer = trainer_at(&dapo(), 0.3).with_replay(rule);
    let stats = step(&mut trainer, &other, limits).unwrap();
    assert_eq!(stats.mismatch.router.unwrap().token_any_frac, 1.0);
    assert_eq!(flat(trainer.policy().vars()), with_own(true, 3, None).1);
}

#[test]
fn a_reference_takes_the_trainers_own_routes() {
    let kl = |own, mini_steps| with_own(own, mini_steps, Some(1)).0.actor.kl_loss.unwrap();
    // The first mini-step is at the reference's weights; what later ones differ in is weights, not routers.
    assert_eq!((kl(false, 1), kl(true, 1)), (0.0, 0.0));
    assert_ne!(kl(false, 3), kl(true, 3));
    assert_ne!(
        with_own(true, 1, Some(2)).1,
        with_own(false, 1, Some(2)).1,
        "another router chooses otherwise"
    );
}

#[test]
fn through_replayed_gates_no_router_learns_and_everything_else_does() {
    for mini_steps in [1, 3] {
        let mut trainer =
            trainer(&dapo()).with_replay(ReplayRule { own: Own::ExpertsAndGates, threshold: 0.0 });
        let stats = step(&mut trainer, &rollouts(), Limits { mini_steps, ..FREE }).unwrap();
        assert_eq!(stats.mismatch.abs_diff_max, 0.0);
        let Learner { policy, optimiser, .. } = &trainer.learner;
        for ((name, _), moments) in policy.vars().iter().zip(optimiser.moments()) {
            let learns = moments.mean().iter().any(|m| *m != 0.0);
            assert_eq!(learns, !name.ends_with("mlp.gate.weight"), "{name}");
        }
    }
}

#[test]
fn replayed_gates_of_the_weights_at_hand_give_the_loss_that_live_ones_give() {
    let rule = ReplayRule { own: Own::ExpertsAndGates, threshold: 0.0 };
    let live = step(&mut trainer(&dapo()), &rollouts(), FREE).unwrap().actor;
    let replayed = step(&mut trainer(&dapo()).with_replay(rule), &rollouts(), FREE).unwrap().actor;
    assert_eq!(
        (live.pg_loss, live.entropy, live.ppo_kl),
        (replayed.pg_loss, replayed.entropy, replayed.ppo_kl)
    );
    assert_ne!(live.grad_norm, replayed.grad_norm);
}

#[test]
fn a_threshold_gives_way_to_the_router_as_far_as_it_says() {
    let other: Vec<_> = rollouts().into_iter().map(rerouted).collect();
    let run = |threshold| {
        let mut trainer = trainer(&dapo()).with_replay(ReplayRule { own: Own::Nothing, threshold });
        step(&mut trainer, &other, WHOLE).unwrap()
    };
    let [all, some, none] = [0.0, 0.7, 1.0].map(run);
    let plain = step(&mut trainer(&dapo()), &other, WHOLE).unwrap();
    assert_eq!(all, plain);
    assert_eq!(all.actor.replaced_frac, None);
    let frac = |stats: &StepStats| stats.actor.replaced_frac.unwrap();
    assert!(0.0 < frac(&some) && frac(&some) < frac(&none), "{} {}", frac(&some), frac(&none));
    // One expert of two was replayed that the router had not chosen.
    assert_eq!(frac(&none), 0.5);
    // Then the experts are the router's, in another order of addition.
    assert!(none.mismatch.abs_diff_max < 1e-5 && all.mismatch.abs_diff_max > 1e-3);
    assert_eq!(none.mismatch.router.unwrap().token_any_frac, 1.0, "the rollout's are still compared");
    assert_ne!((all.load, some.load), (some.load, none.load));
}

#[test]
fn without_routes_the_trainer_holds_no_route_memory() {
    let mut trainer = trainer(&objectives()[0]);
    step(&mut trainer, &rollouts(), Limits { routes: RoutesUse::None, ..WHOLE }).unwrap();
    assert_eq!((trainer.native.n_tokens(), trainer.micro.routes.capacity()), (0, 0));
}

#[test]
fn the_order_of_arrival_and_repetition_change_no_bit() {
    let run = |rollouts: Vec<OwnedRollout>| {
        let mut trainer = trainer(&objectives()[0]);
        let limits = Limits { mini_steps: 2, micro_batch_tokens: 12, ..WHOLE };
        let stats = step(&mut trainer, &rollouts, limits).unwrap();
        (stats, flat(trainer.policy().vars()))
    };
    let first = run(rollouts());
    assert_eq!(first, run(rollouts()));
    assert_eq!(first, run(rollouts().into_iter().rev().collect()));
}

#[test]
fn better_rollouts_become_likelier() {
    for algorithm in objectives() {
        let mut trainer = trainer(&algorithm);
        let first = step(&mut trainer, &rollouts(), WHOLE).unwrap();
        for _ in 0..4 {
            step(&mut trainer, &rollouts(), WHOLE).unwrap();
        }
        let last = step(&mut trainer, &rollouts(), WHOLE).unwrap();
        assert!(last.actor.pg_loss < first.actor.pg_loss - 0.05, "{:?} then {:?}", first.actor, last.actor);
        assert!(last.actor.pg_clipfrac > 0.0, "an old rollout ends up clipped");
    }
}

#[test]
fn nothing_to_learn_changes_nothing() {
    let mut trainer = trainer(&objectives()[0]);
    let before = flat(trainer.policy().vars());
    let equal: Vec<_> = rollouts().into_iter().filter(|rollout| rollout.index != 1).collect();
    let stats = step(&mut trainer, &equal, WHOLE).unwrap();
    assert_eq!((stats.mini_steps, stats.version), (0, PolicyVersion(0)));
    assert_eq!(stats.batch.n_groups_equal, 3);
    assert_eq!(flat(trainer.policy().vars()), before);
}

#[test]
fn equal_rewards_leave_a_kl_and_the_entropy_to_learn_from() {
    let equal: Vec<_> = rollouts().into_iter().filter(|rollout| rollout.index != 1).collect();
    let run = |objective: Objective, with_reference: bool| {
        let mut trainer = trainer(&objective);
        if with_reference {
            trainer = trainer.with_reference(tiny_policy(2));
        }
        let stats: Vec<_> = (0..8).map(|_| step(&mut trainer, &equal, WHOLE).unwrap()).collect();
        assert!(stats.iter().all(|one| (one.mini_steps, one.batch.n_groups_equal) == (1, 3)));
        [stats[0].actor, stats[7].actor]
    };
    let [first, last] = run(with_kl(KlPlace::Loss), true);
    assert!(last.kl_loss.unwrap() < 0.7 * first.kl_loss.unwrap(), "{first:?} then {last:?}");
    let [first, last] = run(Objective { entropy_coef: 1.0, ..dapo() }, false);
    assert!(last.entropy > first.entropy, "{first:?} then {last:?}");
    // What is compared is the reward less its KL: the completion that the reference would rather not have loses.
    let [first, last] = run(with_kl(KlPlace::Reward), true);
    assert!(last.reward_kl.is_some() && last.pg_loss < first.pg_loss - 0.05, "{first:?} then {last:?}");
}

#[test]
fn a_weight_that_is_not_a_number_stops_the_step_before_any_update() {
    let mut trainer = trainer(&objectives()[0]);
    let (_, var) = trainer.policy().vars().last().unwrap();
    var.set(&var.affine(0.0, f64::NAN).unwrap()).unwrap();
    let error = step(&mut trainer, &rollouts(), Limits { mini_steps: 3, ..WHOLE }).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the policy's logprob of group 1, rollout 0, token 1 is not finite in the step after version 0"
    );
    assert_eq!((trainer.version(), trainer.learner.optimiser.steps()), (PolicyVersion(0), 0));
}

#[test]
fn routes_of_another_model_are_refused() {
    let dims = r3_core::routes::RouteDims { n_layers: 2, top_k: 2, n_experts: 5 };
    let other: Vec<_> = rollouts().into_iter().map(|rollout| rollout.with_routes(dims)).collect();
    let error = step(&mut trainer(&objectives()[0]), &other, WHOLE).unwrap_err();
    assert!(matches!(error, TrainError::RouteShape { .. }), "{error}");
}

#[test]
fn a_resumed_trainer_continues_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let mut whole = trainer(&objectives()[0]);
    step(&mut whole, &rollouts(), WHOLE).unwrap();
    let checkpoints = crate::checkpoint::Checkpoints::new(dir.path().to_owned(), 1);
    let saved = checkpoints
        .save(whole.position(1), whole.checkpoint_bytes(), |dir| whole.write_optimiser(dir))
        .unwrap();
    let mut resumed = trainer(&objectives()[0]);
    for ((_, from), (_, to)) in whole.policy().vars().iter().zip(resumed.policy().vars()) {
        to.set(from).unwrap();
    }
    resumed.resume(&saved, &crate::checkpoint::verify(&saved).unwrap()).unwrap();
    let stats = [&mut whole, &mut resumed].map(|trainer| step(trainer, &rollouts(), WHOLE).unwrap());
    assert_eq!(stats[0], stats[1]);
    assert_eq!(flat(whole.policy().vars()), flat(resumed.policy().vars()));
}

fn shifted(by: f32) -> Vec<OwnedRollout> {
    let mut rollouts = rollouts();
    rollouts.iter_mut().flat_map(|rollout| &mut rollout.rollout_logprobs).for_each(|old| *old += by);
    rollouts
}

#[test]
fn with_the_trainers_own_old_logprobs_the_rollouts_do_not_matter() {
    let objective = Objective { old_logprobs: OldLogprobs::Trainer, ..dapo() };
    for mini_steps in [1, 3] {
        let run = |by: f32| {
            let mut trainer = trainer(&objective);
            let stats = step(&mut trainer, &shifted(by), Limits { mini_steps, ..WHOLE }).unwrap();
            (stats.actor.pg_loss, flat(trainer.policy().vars()))
        };
        assert_eq!(run(0.0), run(0.125), "{mini_steps} mini-steps");
    }
}

#[test]
fn a_correction_weighs_what_rollout_and_trainer_differ_in() {
    let rho = (-0.125_f64).exp();
    let tis = Correction { weight: Some(Weight::Tis { cap: 2.0 }), ..Correction::default() };
    let objective = |correction| Objective { correction, old_logprobs: OldLogprobs::Trainer, ..dapo() };
    let run = |correction| step(&mut trainer(&objective(correction)), &shifted(0.125), WHOLE).unwrap().actor;
    let (plain, weighed) = (run(Correction::default()), run(tis));
    assert_eq!((plain.correction_mean, weighed.correction_dropped_frac), (None, Some(0.0)));
    assert!((weighed.correction_mean.unwrap() - rho).abs() < 1e-6, "{weighed:?}");
    assert!(
        (weighed.grad_norm / plain.grad_norm - rho).abs() < 1e-5,
        "{} {}",
        weighed.grad_norm,
        plain.grad_norm
    );
    let geometric_mask = Some(Band { low: 0.9, high: 1.1 });
    let dropped = run(Correction { geometric_mask, ..Correction::default() });
    assert_eq!((dropped.correction_dropped_frac, dropped.grad_norm), (Some(1.0), 0.0));
}

pub(super) fn with_kl(place: KlPlace) -> Objective {
    Objective { kl: Some(KlTerm { coef: 1.0, estimator: KlEstimator::K3, place }), ..dapo() }
}

#[test]
fn at_the_references_weights_the_kl_is_exactly_0_and_from_there_it_is_pulled_back() {
    let run = |seed: u64, n_steps: usize| {
        let mut trainer = trainer(&with_kl(KlPlace::Loss)).with_reference(tiny_policy(seed));
        (0..n_steps).map(|_| step(&mut trainer, &rollouts(), WHOLE).unwrap().actor.kl_loss.unwrap()).last()
    };
    assert_eq!(run(1, 1), Some(0.0));
    let (before, after) = (run(2, 1).unwrap(), run(2, 8).unwrap());
    assert!(before > 0.0 && after < 0.7 * before, "{before} {after}");
}

#[test]
fn a_kl_in_the_reward_moves_advantages_only_where_policies_differ() {
    let run = |reference: Option<u64>| {
        let objective = reference.map_or_else(dapo, |_| with_kl(KlPlace::Reward));
        let mut trainer = trainer(&objective);
        if let Some(seed) = reference {
            trainer = trainer.with_reference(tiny_policy(seed));
        }
        let stats = step(&mut trainer, &rollouts(), WHOLE).unwrap();
        assert_eq!(stats.actor.kl_loss, None);
        (flat(trainer.policy().vars()), stats.actor.reward_kl)
    };
    let (without, same, other) = (run(None), run(Some(1)), run(Some(2)));
    assert_eq!(without.0, same.0);
    assert_ne!(without.0, other.0);
    assert_eq!((without.1, same.1), (None, Some(0.0)));
    // The policy is still the one that sampled, and DAPO's mean is one over tokens, too.
    let mut in_loss = trainer(&with_kl(KlPlace::Loss)).with_reference(tiny_policy(2));
    let kl = step(&mut in_loss, &rollouts(), WHOLE).unwrap().actor.kl_loss.unwrap();
    assert!((other.1.unwrap() - kl).abs() < 1e-4 * kl, "{:?} is not {kl}", other.1);
}

#[test]
fn an_entropy_bonus_keeps_the_policy_open() {
    let entropy_after = |entropy_coef: f64| {
        let mut trainer = trainer(&Objective { entropy_coef, ..dapo() });
        (0..8).map(|_| step(&mut trainer, &rollouts(), WHOLE).unwrap().actor.entropy).last().unwrap()
    };
    let (without, with) = (entropy_after(0.0), entropy_after(1.0));
    assert!(with > 1.05 * without, "{without} {with}");
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run_or_skips_the_step_as_the_recipe_says() {
    let objective = Objective { entropy_coef: 1e300, ..dapo() };
    let run = |non_finite| {
        let train = Train { non_finite, ..Train::default() };
        let config = OptimiserConfig::of_train(&train, 100);
        let mut trainer = Trainer::new(tiny_policy(1), objective.clone(), config, 1.0);
        let stats = step(&mut trainer, &rollouts(), Limits { micro_batch_tokens: 1, ..WHOLE });
        assert_eq!(flat(trainer.policy().vars()), flat(tiny_policy(1).vars()));
        assert!(first_moments(&trainer).iter().all(|&moment| moment == 0.0));
        assert_eq!((trainer.version(), trainer.position(1).optimiser_steps), (PolicyVersion(0), 0));
        stats
    };
    let error = run(NonFinite::Stop).unwrap_err();
    assert_eq!(error.to_string(), "the loss is not finite in the step after version 0");
    let stats = run(NonFinite::Skip).unwrap();
    assert_eq!((stats.mini_steps, stats.skipped_steps), (0, 1));
    let actor = stats.actor;
    assert!(
        [actor.pg_loss, actor.entropy, actor.grad_norm].iter().all(|value| value.is_finite()),
        "{actor:?}"
    );
}
