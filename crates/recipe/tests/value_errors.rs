//! What a person reads who misspelt a key, left one out, or gave it a value of another kind.

mod common;

use common::{GOOD, parse, report, with};
use insta::assert_snapshot;
use r3_recipe::recipe::SftRecipe;

#[test]
fn an_unknown_key_names_the_nearest() {
    assert_snapshot!(with("group_size", "group_sise"), @"
    error: unknown key `rollout.group_sise`
     --> x.yaml:3:24
      |
    3 | rollout: { groups: 16, group_sise: 8, max_new_tokens: 16 }
      |                        ^^^^^^^^^^

    hint: did you mean `group_size`? `rollout` takes `groups`, `group_size`, `max_new_tokens`, `temperature`, `top_p`, `sample_top_k`, `min_p`, `dtype`, `stop_token_ids`, `over_sampling_groups`
    ");
}

#[test]
fn an_unknown_key_of_the_root_is_pointed_at() {
    assert_snapshot!(with("train:", "trian:"), @"
    error: unknown key `trian`
     --> x.yaml:5:1
      |
    5 | trian:
      | ^^^^^

    hint: did you mean `train`? a recipe takes `model`, `task`, `rollout`, `engine`, `router_replay`, `numerics`, `algorithm`, `objective`, `train`, `refit`, `ring`, `eval`, `metrics`, `run`
    ");
}

#[test]
fn an_unknown_key_in_a_block_style_mapping_is_pointed_at() {
    assert_snapshot!(with("mini_steps", "steps"), @"
    error: unknown key `train.steps`
     --> x.yaml:7:3
      |
    7 |   steps: 2
      |   ^^^^^

    hint: there is `run.steps`; `train` takes `dtype`, `recompute`, `freeze`, `lora`, `lr`, `betas`, `eps`, `weight_decay`, `grad_clip`, `non_finite`, `moments`, `muon`, `warmup_steps`, `schedule`, `decay_steps`, `min_lr_ratio`, `mini_steps`, `micro_batch_tokens`, `share_prompts`, `max_staleness`
    ");
}

#[test]
fn a_key_of_another_section_is_found() {
    assert_snapshot!(with("lr: 3.0e-4", "temperature: 0.7"), @"
    error: unknown key `train.temperature`
     --> x.yaml:6:3
      |
    6 |   temperature: 0.7
      |   ^^^^^^^^^^^

    hint: there is `rollout.temperature`; `train` takes `dtype`, `recompute`, `freeze`, `lora`, `lr`, `betas`, `eps`, `weight_decay`, `grad_clip`, `non_finite`, `moments`, `muon`, `warmup_steps`, `schedule`, `decay_steps`, `min_lr_ratio`, `mini_steps`, `micro_batch_tokens`, `share_prompts`, `max_staleness`
    ");
}

#[test]
fn a_peers_key_is_translated() {
    assert_snapshot!(with("lr: 3.0e-4", "learning_rate: 3.0e-4"), @"
    error: unknown key `train.learning_rate`
     --> x.yaml:6:3
      |
    6 |   learning_rate: 3.0e-4
      |   ^^^^^^^^^^^^^

    hint: r3 calls this `train.lr`; `train` takes `dtype`, `recompute`, `freeze`, `lora`, `lr`, `betas`, `eps`, `weight_decay`, `grad_clip`, `non_finite`, `moments`, `muon`, `warmup_steps`, `schedule`, `decay_steps`, `min_lr_ratio`, `mini_steps`, `micro_batch_tokens`, `share_prompts`, `max_staleness`
    ");
}

#[test]
fn an_unknown_key_inside_a_variant_is_pointed_at() {
    assert_snapshot!(with("clip_high", "clip_hgih"), @"
    error: unknown key `algorithm.dapo.clip_hgih`
     --> x.yaml:4:37
      |
    4 | algorithm: { dapo: { clip_low: 0.2, clip_hgih: 0.28 } }
      |                                     ^^^^^^^^^

    hint: did you mean `clip_high`? `algorithm.dapo` takes `clip_low`, `clip_high`, `dynamic_sampling`, `overlong`
    ");
}

#[test]
fn a_missing_key_points_at_its_section() {
    assert_snapshot!(with("groups: 16, ", ""), @"
    error: missing key `rollout.groups`
     --> x.yaml:3:1
      |
    3 | rollout: { group_size: 8, max_new_tokens: 16 }
      | ^^^^^^^

    hint: add `rollout.groups`: Prompts in a batch, each with `group_size` completions; a multiple of `train.mini_steps`.
    ");
}

#[test]
fn a_missing_section_points_at_the_top() {
    assert_snapshot!(with("run: { steps: 40, out: runs/tiny }", ""), @"
    error: missing key `run`
     --> x.yaml:1:1
      |
    1 | model: { path: assets/tiny-moe }
      | ^

    hint: add `run`: Length, seed and directory of the run.
    ");
}

#[test]
fn a_text_is_no_number() {
    assert_snapshot!(with("3.0e-4", "fast"), @"
    error: `train.lr` must be a number, not the text `fast`
     --> x.yaml:6:7
      |
    6 |   lr: fast
      |       ^^^^

    hint: `train.lr`: Learning rate, reached after `warmup_steps`.
    ");
}

#[test]
fn a_quoted_number_is_a_text() {
    assert_snapshot!(with("3.0e-4", "\"3.0e-4\""), @r#"
    error: `train.lr` must be a number, not the text `3.0e-4`
     --> x.yaml:6:7
      |
    6 |   lr: "3.0e-4"
      |       ^^^^^^^^

    hint: remove the quotes
    "#);
}

#[test]
fn a_word_for_no_number_has_no_quotes_to_remove() {
    for word in ["nan", "inf", "infinity"] {
        let said = with("3.0e-4", word);
        assert!(said.contains(&format!("not the text `{word}`")), "{said}");
        assert!(said.contains("hint: `train.lr`: Learning rate"), "{said}");
    }
}

#[test]
fn a_negative_count_is_refused() {
    assert_snapshot!(with("steps: 40", "steps: -1"), @"
    error: `run.steps` must be a whole number, at least 0, not `-1`
     --> x.yaml:8:15
      |
    8 | run: { steps: -1, out: runs/tiny }
      |               ^^

    hint: `run.steps`: Batches of rollouts to train on; each is `train.mini_steps` optimiser steps.
    ");
}

#[test]
fn a_fractional_count_is_refused() {
    assert_snapshot!(with("groups: 16", "groups: 16.5"), @"
    error: `rollout.groups` must be a whole number, at least 0, not `16.5`
     --> x.yaml:3:20
      |
    3 | rollout: { groups: 16.5, group_size: 8, max_new_tokens: 16 }
      |                    ^^^^

    hint: `rollout.groups`: Prompts in a batch, each with `group_size` completions; a multiple of `train.mini_steps`.
    ");
}

#[test]
fn a_count_beyond_64_bits_is_refused() {
    assert_snapshot!(with("steps: 40", "steps: 99999999999999999999"), @"
    error: `run.steps` must be a whole number, at least 0, not `100000000000000000000`
     --> x.yaml:8:15
      |
    8 | run: { steps: 99999999999999999999, out: runs/tiny }
      |               ^^^^^^^^^^^^^^^^^^^^

    hint: `run.steps`: Batches of rollouts to train on; each is `train.mini_steps` optimiser steps.
    ");
}

#[test]
fn a_digit_count_beyond_32_bits_is_refused() {
    assert_snapshot!(with("digits: 2", "digits: 4294967296"), @"
    error: `task.arithmetic.digits` must be a whole number from 0 to 4294967295, not `4294967296`
     --> x.yaml:2:31
      |
    2 | task: { arithmetic: { digits: 4294967296 } }
      |                               ^^^^^^^^^^

    hint: `task.arithmetic.digits`: Digits of each operand, 1 to 9.
    ");
}

#[test]
fn an_infinite_number_is_refused() {
    assert_snapshot!(with("3.0e-4", ".inf"), @"
    error: the number `.inf` is not finite
     --> x.yaml:6:7
      |
    6 |   lr: .inf
      |       ^^^^

    hint: write a finite number, or remove the key for its default
    ");
}

#[test]
fn a_number_is_no_path() {
    assert_snapshot!(with("runs/tiny", "7"), @"
    error: `run.out` must be a path, not `7`
     --> x.yaml:8:24
      |
    8 | run: { steps: 40, out: 7 }
      |                        ^

    hint: put it in quotes
    ");
}

#[test]
fn a_list_too_long_is_refused() {
    assert_snapshot!(with("lr: 3.0e-4", "betas: [0.9, 0.95, 0.99]"), @"
    error: `train.betas` must be a list of 2 numbers, not a list of 3
     --> x.yaml:6:10
      |
    6 |   betas: [0.9, 0.95, 0.99]
      |          ^

    hint: `train.betas`: Decay of the running means of gradient and squared gradient, each in `[0, 1)`.
    ");
}

#[test]
fn a_list_item_is_pointed_at() {
    assert_snapshot!(with("lr: 3.0e-4", "betas: [0.9, high]"), @"
    error: `train.betas[1]` must be a number, not the text `high`
     --> x.yaml:6:16
      |
    6 |   betas: [0.9, high]
      |                ^^^^

    hint: `train.betas`: Decay of the running means of gradient and squared gradient, each in `[0, 1)`.
    ");
}

#[test]
fn a_section_that_is_no_mapping_is_refused() {
    assert_snapshot!(with("{ steps: 40, out: runs/tiny }", "40"), @"
    error: `run` must be a mapping of keys to values, not `40`
     --> x.yaml:8:6
      |
    8 | run: 40
      |      ^^

    hint: `run`: Length, seed and directory of the run.
    ");
}

#[test]
fn a_section_that_holds_nothing_is_refused() {
    assert_snapshot!(with("  lr: 3.0e-4\n  mini_steps: 2\n", ""), @"
    error: `train` must be a mapping of keys to values, not nothing
     --> x.yaml:5:6
      |
    5 | train:
      |      ^

    hint: remove `train`, or write `train: {}` for its defaults
    ");
}

#[test]
fn a_recipe_that_is_a_list_is_refused() {
    assert_snapshot!(parse("- model\n- task\n"), @"
    error: a recipe must be a mapping of keys to values, not a list
     --> x.yaml:1:1
      |
    1 | - model
      | ^

    hint: `docs/recipe.md` lists every key
    ");
}

#[test]
fn a_section_that_is_a_list_is_refused() {
    assert_snapshot!(with("{ groups: 16, group_size: 8, max_new_tokens: 16 }", "[16, 8, 16]"), @"
    error: `rollout` must be a mapping of keys to values, not a list
     --> x.yaml:3:10
      |
    3 | rollout: [16, 8, 16]
      |          ^

    hint: `rollout`: What is sampled for every batch.
    ");
}

#[test]
fn a_choice_that_holds_nothing_is_refused() {
    assert_snapshot!(with("{ arithmetic: { digits: 2 } }", "{}"), @"
    error: `task` must hold one of `arithmetic`, `jsonl`, but holds nothing
     --> x.yaml:2:1
      |
    2 | task: {}
      | ^^^^

    hint: write `task: { arithmetic: {} }`, say
    ");
}

#[test]
fn a_number_that_overflows_is_refused() {
    assert_snapshot!(with("3.0e-4", "1e400"), @"
    error: the number `1e400` is not finite
     --> x.yaml:6:7
      |
    6 |   lr: 1e400
      |       ^^^^^

    hint: write a finite number, or remove the key for its default
    ");
}

#[test]
fn an_amount_of_memory_needs_a_known_unit() {
    assert_snapshot!(with("run:", "engine: { kv_memory: 64megs }\nrun:"), @"
    error: `engine.kv_memory` must be an amount of memory such as 64MiB, not the text `64megs`
     --> x.yaml:8:22
      |
    8 | engine: { kv_memory: 64megs }
      |                      ^^^^^^

    hint: `engine.kv_memory`: Memory for keys, values and, with replay on, routes of all resident tokens. What keys and values take of it is free while the trainer trains.
    ");
}

#[test]
fn an_address_must_be_one() {
    assert_snapshot!(with("run:", "metrics: { listen: localhost }\nrun:"), @"
    error: `metrics.listen`: invalid socket address syntax
     --> x.yaml:8:20
      |
    8 | metrics: { listen: localhost }
      |                    ^^^^^^^^^

    hint: `metrics.listen`: Address, such as `127.0.0.1:9464`, that serves `/metrics` to Prometheus while the run lasts; `null` is nowhere.
    ");
}

#[test]
fn an_unknown_word_names_the_nearest() {
    assert_snapshot!(with("max_new_tokens: 16", "max_new_tokens: 16, dtype: fp32"), @"
    error: `rollout.dtype` must be one of `f32`, `bf16`, not `fp32`
     --> x.yaml:3:66
      |
    3 | rollout: { groups: 16, group_size: 8, max_new_tokens: 16, dtype: fp32 }
      |                                                                  ^^^^

    hint: did you mean `f32`?
    ");
}

#[test]
fn an_unknown_variant_names_those_there_are() {
    assert_snapshot!(with("dapo: { clip_low: 0.2, clip_high: 0.28 }", "gppo: {}"), @"
    error: `algorithm` must be one of `grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`, `rloo`, `reinforce_plus_plus`, not `gppo`
     --> x.yaml:4:14
      |
    4 | algorithm: { gppo: {} }
      |              ^^^^

    hint: did you mean `grpo`?
    ");
}

#[test]
fn two_variants_are_one_too_many() {
    assert_snapshot!(with("algorithm: {", "algorithm: { grpo: {},"), @"
    error: `algorithm` must hold one of `grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`, `rloo`, `reinforce_plus_plus`, but holds `grpo`, `dapo`
     --> x.yaml:4:24
      |
    4 | algorithm: { grpo: {}, dapo: { clip_low: 0.2, clip_high: 0.28 } }
      |                        ^^^^

    hint: keep one; on the command line, `--set 'algorithm={dapo: {}}'` replaces the block
    ");
}

#[test]
fn a_variant_without_settings_is_refused() {
    assert_snapshot!(with("{ arithmetic: { digits: 2 } }", "arithmetic"), @"
    error: `task` must hold the settings of `arithmetic`
     --> x.yaml:2:7
      |
    2 | task: arithmetic
      |       ^^^^^^^^^^

    hint: write `task: { arithmetic: {} }` to take its defaults
    ");
}

#[test]
fn a_variant_that_is_a_number_is_refused() {
    assert_snapshot!(with("{ arithmetic: { digits: 2 } }", "2"), @"
    error: `task` must be one of `arithmetic`, `jsonl`, not `2`
     --> x.yaml:2:7
      |
    2 | task: 2
      |       ^

    hint: `task`: Where prompts come from and how completions are judged.
    ");
}

#[test]
fn a_word_for_replay_that_is_not_one_is_refused() {
    assert_snapshot!(with("run:", "router_replay: { mode: R2 }\nrun:"), @"
    error: `router_replay.mode` must be one of `r3`, `r2`, `off`, not `R2`
     --> x.yaml:8:24
      |
    8 | router_replay: { mode: R2 }
      |                        ^^

    hint: did you mean `r2`?
    ");
}

#[test]
fn a_recipe_for_the_other_command_is_recognised() {
    let sft = "model: { existing: { path: a } }\nsft: { steps: 1 }\n";
    assert_snapshot!(parse(sft), @"
    error: this is a recipe for `r3 sft`
     --> x.yaml:2:1
      |
    2 | sft: { steps: 1 }
      | ^^^

    hint: run `r3 sft` with it, or remove this section
    ");
    assert_snapshot!(report(&SftRecipe::parse(GOOD, "x.yaml").expect_err("no warm start")), @"
    error: this is a recipe for `r3 run`
     --> x.yaml:3:1
      |
    3 | rollout: { groups: 16, group_size: 8, max_new_tokens: 16 }
      | ^^^^^^^

    hint: run `r3 run` with it, or remove this section
    ");
}

#[test]
fn a_number_beyond_its_limit_is_told_as_it_was_written_and_with_the_bound_it_crossed() {
    let objective = |own| with("train:", &format!("objective: {{ {own} }}\ntrain:"));
    let cases = [
        (with("16,", "2147483647,"), "2147483647, but must be at most 16777216"),
        (with("16,", "18446744073709551615,"), "18446744073709551615, but must be at most 16777216"),
        (with("mini_steps: 2", "muon: { iterations: 4000000000 }"), "4000000000, but must be from 1 to 20"),
        (with("3.0e-4", "1e39"), "1e39, but must be in the range of f32, 1e-45 to 3e38"),
        (objective("dual_clip: 1.00000001"), "1.00000001, but must be above 1"),
        (objective("dual_clip: 1e39"), "1e39, but must be in the range of f32, up to 3e38"),
        (objective("correction: { sequence_mask: { high: 0.5 } }"), "0.5, but must be at least 1"),
    ];
    for (report, said) in cases {
        assert!(report.lines().next().is_some_and(|line| line.ends_with(&format!(" is {said}"))), "{report}");
    }
}
