//! What a person reads whose recipe says wrongly what is trained.

mod common;

use common::with;
use insta::assert_snapshot;

#[test]
fn a_text_that_is_no_pattern_is_refused() {
    assert_snapshot!(with("lr: 3.0e-4", "freeze: [\"*.self_attn.{q,k_proj.weight\"]"), @r#"
    error: `train.freeze[0]` must be a pattern over names of weights such as "*.self_attn.{q,v}_proj.weight", not the text `*.self_attn.{q,k_proj.weight`
     --> x.yaml:6:12
      |
    6 |   freeze: ["*.self_attn.{q,k_proj.weight"]
      |            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

    hint: `train.freeze`: Names of weights that are not trained, by pattern: `*.mlp.gate.weight` is every router. `*` is any characters, `?` is one, `{q,k}` is one of several texts; a pattern that matches no weight is refused.
    "#);
}

#[test]
fn one_pattern_without_a_list_is_refused() {
    assert_snapshot!(with("lr: 3.0e-4", "freeze: \"*.mlp.gate.weight\""), @r#"
    error: `train.freeze` must be a list, not the text `*.mlp.gate.weight`
     --> x.yaml:6:11
      |
    6 |   freeze: "*.mlp.gate.weight"
      |           ^^^^^^^^^^^^^^^^^^^

    hint: `train.freeze`: Names of weights that are not trained, by pattern: `*.mlp.gate.weight` is every router. `*` is any characters, `?` is one, `{q,k}` is one of several texts; a pattern that matches no weight is refused.
    "#);
}

#[test]
fn an_adapter_of_nothing_is_refused() {
    assert_snapshot!(with("lr: 3.0e-4", "lora: { targets: [] }"), @r#"
    error: `train.lora.targets` is empty, so nothing would be trained
     --> x.yaml:6:20
      |
    6 |   lora: { targets: [] }
      |                    ^

    hint: name the weights to adapt, such as `targets: ["*.self_attn.{q,v}_proj.weight"]`
    "#);
}

#[test]
fn an_adapter_without_targets_is_refused() {
    assert_snapshot!(with("lr: 3.0e-4", "lora: { rank: 8 }"), @"
    error: missing key `train.lora.targets`
     --> x.yaml:6:3
      |
    6 |   lora: { rank: 8 }
      |   ^^^^

    hint: add `train.lora.targets`: Names of the weights that get one, by pattern as in `train.freeze`: of projections, routers (`*.mlp.gate.weight`) and experts (`*.mlp.experts.*`). Norms, biases, embeddings and the head take none.
    ");
}

#[test]
fn a_rank_of_nothing_is_refused() {
    assert_snapshot!(with("lr: 3.0e-4", "lora: { rank: 0, targets: [\"*_proj.weight\"] }"), @r#"
    error: `train.lora.rank` is 0, but must be from 1 to 1024
     --> x.yaml:6:17
      |
    6 |   lora: { rank: 0, targets: ["*_proj.weight"] }
      |                 ^

    hint: `train.lora.rank: 8` is usual
    "#);
}

#[test]
fn an_update_of_no_size_is_refused() {
    assert_snapshot!(with("lr: 3.0e-4", "lora: { alpha: 0, targets: [\"*_proj.weight\"] }"), @r#"
    error: `train.lora.alpha` is 0, but must be above 0
     --> x.yaml:6:18
      |
    6 |   lora: { alpha: 0, targets: ["*_proj.weight"] }
      |                  ^

    hint: `train.lora.alpha: 16` is usual
    "#);
}
