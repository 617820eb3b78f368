//! What a person reads whose recipe is well-formed but cannot be run, or who set a wrong value from the command line.

mod common;

use std::fs;

use common::{GOOD, report, with};
use insta::assert_snapshot;
use r3_recipe::recipe::{Recipe, SftRecipe};

fn load(overrides: &[&str]) -> Result<Recipe, String> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("x.yaml");
    fs::write(&path, GOOD).expect("a written recipe");
    let overrides: Vec<String> = overrides.iter().map(|argument| (*argument).to_owned()).collect();
    let loaded = Recipe::load(&path, &overrides).map(|loaded| loaded.recipe);
    loaded.map_err(|error| report(&error).replace(&*path.to_string_lossy(), "x.yaml"))
}

fn set(overrides: &[&str]) -> String {
    load(overrides).expect_err("the recipe is wrong")
}

#[test]
fn a_group_of_one_is_refused() {
    assert_snapshot!(with("group_size: 8", "group_size: 1"), @"
    error: `rollout.group_size` is 1, but must be at least 2
     --> x.yaml:3:36
      |
    3 | rollout: { groups: 16, group_size: 1, max_new_tokens: 16 }
      |                                    ^

    hint: `rollout.group_size: 8` is usual
    ");
}

#[test]
fn groups_that_mini_steps_cannot_share_are_refused() {
    assert_snapshot!(with("mini_steps: 2", "mini_steps: 5"), @"
    error: `rollout.groups` is 16, which is no multiple of `train.mini_steps`, 5
     --> x.yaml:3:20
      |
    3 | rollout: { groups: 16, group_size: 8, max_new_tokens: 16 }
      |                    ^^

    hint: set `rollout.groups` to 20
    ");
}

#[test]
fn more_over_sampling_than_a_batch_is_refused() {
    assert_snapshot!(set(&["train.max_staleness=2", "rollout.over_sampling_groups=17"]), @"
    error: `rollout.over_sampling_groups` is 17, but a step trains on 16 groups
     --> --set:1:30
      |
    1 | rollout.over_sampling_groups=17
      |                              ^^

    hint: set `rollout.over_sampling_groups` to 16 or less
    ");
    load(&["train.max_staleness=2", "rollout.over_sampling_groups=16"]).expect("as many as a batch are fine");
}

#[test]
fn exact_numerics_across_dtypes_are_refused() {
    assert_snapshot!(set(&["numerics=exact", "rollout.dtype=bf16", "train.dtype=f32"]), @"
    error: `numerics` is `exact`, but `rollout.dtype` is bf16 and `train.dtype` is f32
     --> --set:1:10
      |
    1 | numerics=exact
      |          ^^^^^

    hint: set `rollout.dtype` to f32 or `train.dtype` to bf16, or `numerics` to `fast`
    ");
    load(&["numerics=exact", "rollout.dtype=f32"]).expect("one dtype is fine");
    load(&["numerics=fast", "rollout.dtype=f32"]).expect("free order may be asked for");
}

#[test]
fn over_sampling_without_staleness_is_refused() {
    assert_snapshot!(set(&["rollout.over_sampling_groups=4", "train.max_staleness=1"]), @"
    error: `train.max_staleness` is 1, but groups that `rollout.over_sampling_groups` leaves for the next step are 2 optimiser steps old by then
     --> --set:1:21
      |
    1 | train.max_staleness=1
      |                     ^

    hint: set `train.max_staleness` to 2 or more, or `rollout.over_sampling_groups` to 0
    ");
    assert_snapshot!(set(&["rollout.over_sampling_groups=4"]), @"
    error: `train.max_staleness` is 0, but groups that `rollout.over_sampling_groups` leaves for the next step are 2 optimiser steps old by then
     --> --set:1:30
      |
    1 | rollout.over_sampling_groups=4
      |                              ^

    hint: set `train.max_staleness` to 2 or more, or `rollout.over_sampling_groups` to 0
    ");
    load(&["rollout.over_sampling_groups=4", "train.max_staleness=2"]).expect("a step's worth is enough");
}

#[test]
fn a_temperature_of_zero_is_refused() {
    assert_snapshot!(with("max_new_tokens: 16", "max_new_tokens: 16, temperature: 0"), @"
    error: `rollout.temperature` is 0, but must be above 0
     --> x.yaml:3:72
      |
    3 | rollout: { groups: 16, group_size: 8, max_new_tokens: 16, temperature: 0 }
      |                                                                        ^

    hint: `rollout.temperature: 1.0` is usual
    ");
}

#[test]
fn a_learning_rate_that_f32_rounds_to_zero_is_refused() {
    assert_snapshot!(with("3.0e-4", "1.0e-60"), @"
    error: `train.lr` is 1e-60, but must be in the range of f32, 1e-45 to 3e38
     --> x.yaml:6:7
      |
    6 |   lr: 1.0e-60
      |       ^^^^^^^

    hint: `train.lr: 1e-6` is usual
    ");
}

#[test]
fn overlong_punishment_out_of_reach_is_refused() {
    let overlong = "clip_low: 0.2, overlong: { max_tokens: 32, cache_tokens: 16 }";
    assert_snapshot!(with("clip_low: 0.2", overlong), @"
    error: overlong punishment begins after 16 tokens, but a completion has at most 16
     --> x.yaml:4:61
      |
    4 | algorithm: { dapo: { clip_low: 0.2, overlong: { max_tokens: 32, cache_tokens: 16 }, clip_high: 0.28 } }
      |                                                             ^^

    hint: set `max_tokens` to 16, or remove `overlong`
    ");
}

#[test]
fn more_evaluation_than_held_out_is_refused_even_by_default() {
    assert_snapshot!(with("arithmetic: { digits: 2 }", "jsonl: { train: a.jsonl }"), @"
    error: `eval.problems` is 512, but the task holds out only 0 problems
     --> x.yaml:2:1
      |
    2 | task: { jsonl: { train: a.jsonl } }
      | ^^^^

    hint: hold out more problems in `task`, or set `eval.problems` to 0
    ");
}

#[test]
fn nothing_left_to_train_on_is_refused() {
    assert_snapshot!(with("digits: 2", "digits: 1"), @"
    error: `task.arithmetic.held_out` is 1000, but 1-digit operands make only 81 pairs
     --> x.yaml:2:31
      |
    2 | task: { arithmetic: { digits: 1 } }
      |                               ^

    hint: set `held_out` below 81, or `digits` higher
    ");
}

#[test]
fn dropped_carries_need_an_arithmetic_task() {
    let text = "\
model: { existing: { path: a } }
task: { jsonl: { train: a.jsonl, eval: b.jsonl } }
sft: { steps: 1, lr: 1.0e-3, carry_dropped: 0.5 }
run: { out: b }
";
    assert_snapshot!(report(&SftRecipe::parse(text, "x.yaml").expect_err("no carries")), @"
    error: `sft.carry_dropped` is 0.5, but only arithmetic has carries to drop
     --> x.yaml:3:45
      |
    3 | sft: { steps: 1, lr: 1.0e-3, carry_dropped: 0.5 }
      |                                             ^^^

    hint: set `sft.carry_dropped` to 0
    ");
}

/// Every number that has a limit, with a value beyond it.
const BEYOND: &[&str] = &[
    "task.arithmetic.digits=0",
    "task.arithmetic.digits=10",
    "task.arithmetic.attempts=0",
    "task.arithmetic.attempts=17",
    "rollout.groups=0",
    "rollout.groups=16777217",
    "rollout.group_size=1",
    "rollout.max_new_tokens=0",
    "rollout.temperature=1e39",
    "rollout.temperature=1e-40",
    "rollout.top_p=0",
    "rollout.top_p=1.1",
    "rollout.min_p=-0.1",
    "rollout.min_p=1",
    "rollout.sample_top_k=16777217",
    "rollout.over_sampling_groups=16777217",
    "engine.kv_memory=0",
    "engine.block_tokens=0",
    "engine.max_batch_tokens=0",
    "engine.max_running=0",
    "algorithm.dapo.clip_low=0",
    "algorithm.dapo.clip_low=1.1",
    "algorithm.dapo.clip_high=0",
    "algorithm.dapo.dynamic_sampling={max_batches: 0}",
    "algorithm.dapo.overlong={max_tokens: 0, cache_tokens: 0}",
    "algorithm.dapo.overlong={max_tokens: 8, cache_tokens: 0}",
    "algorithm.dapo.overlong={max_tokens: 8, cache_tokens: 4, factor: -1}",
    "algorithm={grpo: {clip: 0}}",
    "algorithm={dr_grpo: {clip: 0}}",
    "algorithm={gspo: {clip_low: 0}}",
    "algorithm={gspo: {clip_high: 0}}",
    "algorithm={cispo: {clip_low: 2}}",
    "algorithm={cispo: {clip_high: 0}}",
    "algorithm={rloo: {clip: 2}}",
    "algorithm={reinforce_plus_plus: {clip: 2}}",
    "objective.horizon=0",
    "objective.dual_clip=1",
    "objective.entropy_coef=-1",
    "objective.kl={coef: 0}",
    "objective.correction={weight: {tis: {cap: 0}}}",
    "objective.correction={weight: {sequence_tis: {cap: 0}}}",
    "objective.correction={weight: {icepop: {low: 2}}}",
    "objective.correction={sequence_mask: {high: 0.5}}",
    "objective.correction={geometric_mask: {low: -1}}",
    "objective.correction={opsm: {delta: -1}}",
    "objective.correction={veto: {below: 2}}",
    "objective.dynamic_sampling={max_batches: 0}",
    "objective.overlong={max_tokens: 0, cache_tokens: 0}",
    "train.lr=0",
    "train.betas=[1, 0.9]",
    "train.betas=[0.9, -0.1]",
    "train.eps=0",
    "train.weight_decay=-1",
    "train.grad_clip=0",
    "train.mini_steps=0",
    "train.micro_batch_tokens=0",
    "train.min_lr_ratio=1.5",
    "train.muon={momentum: 1}",
    "train.muon={iterations: 0}",
    "train.muon={iterations: 21}",
    "ring.bytes=0",
    "ring.deadline_s=0",
    "eval.max_new_tokens=0",
    "run.steps=0",
    "run.keep_last=0",
];

#[test]
fn every_number_has_a_limit() {
    for argument in BEYOND {
        let path = argument.split(['=', '{', ' ']).next().unwrap_or_default();
        let report = set(&[argument]);
        assert!(report.contains(&format!("error: `{path}")) && report.contains(", but must be "), "{report}");
        assert!(report.contains("--> --set:1:") && report.contains("is usual"), "{report}");
    }
}

/// Every number of a warm start that has a limit, with a value beyond it.
const SFT_BEYOND: &[(&str, &str)] = &[
    ("steps", "0"),
    ("batch", "0"),
    ("lr", "0"),
    ("betas", "[1, 0]"),
    ("betas", "[0, 1]"),
    ("weight_decay", "-1"),
    ("grad_clip", "0"),
    ("load_balance", "-1"),
    ("carry_dropped", "1.1"),
    ("max_new_tokens", "0"),
];

#[test]
fn every_number_of_a_warm_start_has_a_limit() {
    let good = "model: { new: { config: c } }\ntask: { arithmetic: {} }\nsft: { steps: 1, lr: 1 }\nrun: { out: o }\n";
    SftRecipe::parse(good, "x.yaml").expect("a good recipe");
    for (key, value) in SFT_BEYOND {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("x.yaml");
        fs::write(&path, good).expect("a written recipe");
        let error = SftRecipe::load(&path, &[format!("sft.{key}={value}")]).expect_err("beyond its limit");
        assert!(report(&error).starts_with(&format!("error: `sft.{key}` is ")), "{}", report(&error));
    }
}

#[test]
fn an_empty_path_is_refused() {
    assert_snapshot!(with("runs/tiny", "''"), @"
    error: `run.out` is empty
     --> x.yaml:8:24
      |
    8 | run: { steps: 40, out: '' }
      |                        ^^

    hint: write a text after `run.out:`
    ");
}

#[test]
fn an_overlong_cache_beyond_the_limit_is_refused() {
    let overlong = "clip_low: 0.2, overlong: { max_tokens: 8, cache_tokens: 16 }";
    assert_snapshot!(with("clip_low: 0.2", overlong), @"
    error: `algorithm.dapo.overlong.cache_tokens` is 16, but `max_tokens` is 8
     --> x.yaml:4:78
      |
    4 | algorithm: { dapo: { clip_low: 0.2, overlong: { max_tokens: 8, cache_tokens: 16 }, clip_high: 0.28 } }
      |                                                                              ^^

    hint: set `cache_tokens` to 8 or less
    ");
}

#[test]
fn the_best_checkpoints_need_an_evaluation_each() {
    assert_snapshot!(set(&["run.keep_best=1"]), @"
    error: `run.keep_best` is 1, but not every checkpoint is evaluated
     --> --set:1:15
      |
    1 | run.keep_best=1
      |               ^

    hint: set `eval.every` to `run.save_every`, 10, or to a divisor of it
    ");
    assert_snapshot!(set(&["run.keep_best=1", "eval.every=10", "eval.problems=0"]), @"
    error: `run.keep_best` is 1, but not every checkpoint is evaluated
     --> --set:1:15
      |
    1 | run.keep_best=1
      |               ^

    hint: set `eval.problems` to 512
    ");
}

#[test]
fn replay_of_what_was_not_recorded_is_refused() {
    assert_snapshot!(set(&["router_replay.gates=true"]), @"
    error: `router_replay.gates` replays recorded gates, but a rollout sends its expert ids alone
     --> --set:1:21
      |
    1 | router_replay.gates=true
      |                     ^^^^

    hint: set `router_replay.mode: r2`, where the trainer records both, or remove `gates`
    ");
    assert_snapshot!(set(&["router_replay={mode: off, gates: true}"]), @"
    error: `router_replay.gates` replays recorded gates, but with `mode: off` nothing is recorded
     --> --set:1:34
      |
    1 | router_replay={mode: off, gates: true}
      |                                  ^^^^

    hint: set `router_replay.mode: r2`, where the trainer records both, or remove `gates`
    ");
    assert_snapshot!(set(&["router_replay={mode: r2, gates: true, threshold: 0.5}"]), @"
    error: `router_replay.threshold` replaces experts, but `gates` replays those of the experts replaced
     --> --set:1:50
      |
    1 | router_replay={mode: r2, gates: true, threshold: 0.5}
      |                                                  ^^^

    hint: remove one of the two
    ");
    assert_snapshot!(set(&["router_replay={mode: off, threshold: 0.5}"]), @"
    error: `router_replay.threshold` limits what is replayed, but with `mode: off` nothing is
     --> --set:1:38
      |
    1 | router_replay={mode: off, threshold: 0.5}
      |                                      ^^^

    hint: set `router_replay.mode` to `r3` or `r2`, or remove `threshold`
    ");
    assert_snapshot!(set(&["router_replay={threshold: 1.5}"]), @"
    error: `router_replay.threshold` is 1.5, but must be from 0 to 1
     --> --set:1:27
      |
    1 | router_replay={threshold: 1.5}
      |                           ^^^

    hint: `router_replay.threshold: 0` is usual
    ");
}

#[test]
fn a_stable_schedule_and_the_steps_of_its_fall_belong_together() {
    assert_snapshot!(set(&["train.schedule=wsd"]), @"
    error: `train.schedule` is `wsd`, but `train.decay_steps` is 0
     --> --set:1:16
      |
    1 | train.schedule=wsd
      |                ^^^

    hint: set `train.decay_steps` to the optimiser steps of the fall, a tenth of all of them, say
    ");
    assert_snapshot!(set(&["train.decay_steps=5"]), @"
    error: `train.decay_steps` is 5, but `train.schedule` is not `wsd`
     --> --set:1:19
      |
    1 | train.decay_steps=5
      |                   ^

    hint: set `train.schedule: wsd`, or remove `decay_steps`: other schedules fall from the warm-up on
    ");
    load(&["train.schedule=wsd", "train.decay_steps=5"]).expect("both together are fine");
}

#[test]
fn what_an_algorithm_cannot_take_is_refused() {
    assert_snapshot!(set(&["objective.dual_clip=3", "algorithm={cispo: {}}"]), @"
    error: `objective.dual_clip` bounds a clipped surrogate, but CISPO clips the weight instead
     --> --set:1:21
      |
    1 | objective.dual_clip=3
      |                     ^

    hint: remove `dual_clip`; `algorithm.cispo.clip_high` is the bound of CISPO
    ");
    assert_snapshot!(set(&["objective.correction={weight: {tis: {}}}"]), @"
    error: `objective.correction.weight` corrects for the rollout, but the ratio divides by the rollout's logprobs already
     --> --set:1:23
      |
    1 | objective.correction={weight: {tis: {}}}
      |                       ^^^^^^

    hint: set `objective.old_logprobs: trainer`, or correct with `sequence_mask` or `geometric_mask`
    ");
    assert_snapshot!(set(&["objective.kl={coef: 1, place: reward, estimator: unbiased}"]), @"
    error: `objective.kl.estimator: unbiased` is about the gradient of a loss, but a reward has none
     --> --set:1:50
      |
    1 | objective.kl={coef: 1, place: reward, estimator: unbiased}
      |                                                  ^^^^^^^^

    hint: set `objective.kl.estimator` to `k1`, or `place` to `loss`
    ");
    assert_snapshot!(set(&["objective.kl={coef: 1, place: reward}", "objective.truncated=mask"]), @"
    error: `objective.kl.place: reward` needs every completion's KL, but `truncated: mask` leaves some out
     --> --set:1:31
      |
    1 | objective.kl={coef: 1, place: reward}
      |                               ^^^^^^

    hint: set `objective.kl.place: loss`, or `objective.truncated: keep`
    ");
    assert_snapshot!(set(&["objective.horizon=8"]), @"
    error: `objective.horizon` is what `aggregation: sequence_sum` divides by, and nothing else reads it
     --> --set:1:19
      |
    1 | objective.horizon=8
      |                   ^

    hint: set `objective.aggregation: sequence_sum`, or remove `horizon`
    ");
    let twice = ["algorithm.dapo.dynamic_sampling={}", "objective={dynamic_sampling: {}}"];
    assert_snapshot!(set(&twice), @"
    error: `algorithm.dapo.dynamic_sampling` and `objective.dynamic_sampling` are both written
     --> --set:1:12
      |
    1 | objective={dynamic_sampling: {}}
      |            ^^^^^^^^^^^^^^^^

    hint: remove `objective.dynamic_sampling`
    ");
}

#[test]
fn two_sources_of_evaluation_are_refused() {
    assert_snapshot!(with("arithmetic: { digits: 2 }", "jsonl: { train: a, eval: b, held_out: 5 }"), @"
    error: `task.jsonl` has both `eval` and `held_out`
     --> x.yaml:2:47
      |
    2 | task: { jsonl: { train: a, eval: b, held_out: 5 } }
      |                                               ^

    hint: remove `held_out` to evaluate on the file `eval`
    ");
}

#[test]
fn a_wrong_override_is_shown() {
    assert_snapshot!(set(&["train.lr=1e-4", "rollout.group_size=many"]), @"
    error: `rollout.group_size` must be a whole number, at least 0, not the text `many`
     --> --set:1:20
      |
    1 | rollout.group_size=many
      |                    ^^^^

    hint: `rollout.group_size`: Completions of one prompt (`G`), at least 2: an advantage compares them.
    ");
}

#[test]
fn an_override_of_an_unknown_key_is_shown() {
    assert_snapshot!(set(&["train.lrr=1e-4"]), @"
    error: unknown key `train.lrr`
     --> --set:1:1
      |
    1 | train.lrr=1e-4
      | ^^^^^^^^^

    hint: did you mean `lr`? `train` takes `dtype`, `recompute`, `freeze`, `lora`, `lr`, `betas`, `eps`, `weight_decay`, `grad_clip`, `non_finite`, `moments`, `muon`, `warmup_steps`, `schedule`, `decay_steps`, `min_lr_ratio`, `mini_steps`, `micro_batch_tokens`, `share_prompts`, `max_staleness`
    ");
}

#[test]
fn an_override_without_a_value_is_refused() {
    assert_snapshot!(set(&["train.lr"]), @"
    error: `--set train.lr` has no `=`

    hint: write the dotted key, `=` and the value, such as `--set train.lr=1e-5`
    ");
}

#[test]
fn an_override_without_a_key_is_refused() {
    assert_snapshot!(set(&["=1"]), @"
    error: `--set =1` does not begin with a dotted key

    hint: write the dotted key, `=` and the value, such as `--set train.lr=1e-5`
    ");
}

#[test]
fn an_override_that_is_not_yaml_is_shown() {
    assert_snapshot!(set(&["train.betas=[0.9"]), @"
    error: not YAML: unclosed bracket '['
     --> --set:1:13
      |
    1 | train.betas=[0.9
      |             ^

    hint: check colons, quotes, brackets and indentation at and before this place
    ");
}

#[test]
fn an_override_that_breaks_a_rule_is_shown() {
    assert_snapshot!(set(&["rollout.groups=7"]), @"
    error: `rollout.groups` is 7, which is no multiple of `train.mini_steps`, 2
     --> --set:1:16
      |
    1 | rollout.groups=7
      |                ^

    hint: set `rollout.groups` to 8
    ");
}

#[test]
fn an_override_of_another_variant_is_refused() {
    assert_snapshot!(set(&["algorithm.grpo.clip=0.1"]), @"
    error: `algorithm` must hold one of `grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`, `rloo`, `reinforce_plus_plus`, but holds `dapo`, `grpo`
     --> --set:1:1
      |
    1 | algorithm.grpo.clip=0.1
      | ^^^^^^^^^^^^^^^^^^^

    hint: keep one; on the command line, `--set 'algorithm={grpo: {}}'` replaces the block
    ");
}

#[test]
fn an_override_inside_a_word_is_refused() {
    assert_snapshot!(set(&["router_replay.mode=r3", "router_replay.mode.layers=2"]), @"
    error: `router_replay.mode` holds no keys that could be set
     --> --set:1:1
      |
    1 | router_replay.mode.layers=2
      | ^^^^^^^^^^^^^^^^^^^^^^^^^

    hint: set `router_replay.mode` itself
    ");
}

#[test]
fn an_override_of_endless_depth_is_refused() {
    let report = set(&[&format!("{}a=1", "a.".repeat(100_000))]);
    assert!(report.contains("has a longer key than there is"));
}

#[test]
fn an_override_of_an_endless_key_is_refused() {
    let report = set(&[&format!("{}=1", "a".repeat(100_000))]);
    assert!(report.starts_with("error: unknown key `aaa"));
}
