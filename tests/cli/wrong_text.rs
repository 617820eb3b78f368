//! Recipes, arguments and lines that say something wrong: exit code 2.

use insta::assert_snapshot;

use crate::directory::{Directory, Ended, RECIPE, ended};

#[test]
fn an_unknown_key() {
    let directory = Directory::empty();
    directory.edit_recipe("max_new_tokens", "max_new_token");
    assert_snapshot!(directory.refused(&["run", "recipe.yaml"]), @r"
    exit 2
    error: unknown key `rollout.max_new_token`
     --> recipe.yaml:3:38
      |
    3 | rollout: { groups: 4, group_size: 8, max_new_token: 3 }
      |                                      ^^^^^^^^^^^^^

    hint: did you mean `max_new_tokens`? `rollout` takes `groups`, `group_size`, `max_new_tokens`, `temperature`, `top_p`, `sample_top_k`, `min_p`, `dtype`, `stop_token_ids`, `over_sampling_groups`
    ");
}

#[test]
fn a_value_of_the_wrong_type() {
    let directory = Directory::empty();
    directory.edit_recipe("lr: 1.0e-3", "lr: fast");
    assert_snapshot!(directory.refused(&["check", "recipe.yaml"]), @r"
    exit 2
    error: `train.lr` must be a number, not the text `fast`
     --> recipe.yaml:6:14
      |
    6 | train: { lr: fast }
      |              ^^^^

    hint: `train.lr`: Learning rate, reached after `warmup_steps`.
    ");
}

#[test]
fn keys_that_do_not_fit_each_other() {
    let directory = Directory::empty();
    assert_snapshot!(directory.refused(&["check", "recipe.yaml", "--set", "train.mini_steps=3"]), @r"
    exit 2
    error: `rollout.groups` is 4, which is no multiple of `train.mini_steps`, 3
     --> recipe.yaml:3:20
      |
    3 | rollout: { groups: 4, group_size: 8, max_new_tokens: 3 }
      |                    ^

    hint: set `rollout.groups` to 6
    ");
}

#[test]
fn a_recipe_that_does_not_exist() {
    let directory = Directory::empty();
    assert_snapshot!(directory.refused(&["run", "recipes/tinny.yaml"]), @r"
    exit 2
    error: cannot read the recipe recipes/tinny.yaml
      caused by: No such file or directory (os error 2)

    hint: give the path of a recipe, such as `recipes/tiny.yaml`
    ");
}

#[test]
fn a_recipe_of_another_command() {
    let directory = Directory::empty();
    assert_snapshot!(directory.refused(&["run", "sft.yaml"]), @r"
    exit 2
    error: this is a recipe for `r3 sft`
     --> sft.yaml:3:1
      |
    3 | sft: { steps: 20, batch: 16, lr: 3.0e-2, eval_problems: 8, max_new_tokens: 3 }
      | ^^^

    hint: run `r3 sft` with it, or remove this section
    ");
}

#[test]
fn a_set_without_a_value() {
    let directory = Directory::empty();
    assert_snapshot!(directory.refused(&["run", "recipe.yaml", "--set", "run.steps"]), @r"
    exit 2
    error: `--set run.steps` has no `=`

    hint: write the dotted key, `=` and the value, such as `--set train.lr=1e-5`
    ");
}

#[test]
fn a_set_of_an_unknown_key() {
    let directory = Directory::empty();
    assert_snapshot!(directory.refused(&["run", "recipe.yaml", "--set", "run.step=3"]), @"
    exit 2
    error: unknown key `run.step`
     --> --set:1:1
      |
    1 | run.step=3
      | ^^^^^^^^

    hint: did you mean `steps`? `run` takes `steps`, `seed`, `out`, `save_every`, `keep_last`, `keep_best`
    ");
}

#[test]
fn a_set_of_the_wrong_type() {
    let directory = Directory::empty();
    assert_snapshot!(directory.refused(&["run", "recipe.yaml", "--set", "run.steps=many"]), @r"
    exit 2
    error: `run.steps` must be a whole number, at least 0, not the text `many`
     --> --set:1:11
      |
    1 | run.steps=many
      |           ^^^^

    hint: `run.steps`: Batches of rollouts to train on; each is `train.mini_steps` optimiser steps.
    ");
}

#[test]
fn an_unknown_command() {
    let directory = Directory::empty();
    assert_snapshot!(directory.refused(&["trian", "recipe.yaml"]), @r"
    exit 2
    error: unrecognized subcommand 'trian'

    Usage: r3 [OPTIONS] <COMMAND>

    For more information, try '--help'.
    ");
}

#[test]
fn no_recipe() {
    let directory = Directory::empty();
    assert_snapshot!(directory.refused(&["run"]), @r"
    exit 2
    error: the following required arguments were not provided:
      <RECIPE>

    Usage: r3 run <RECIPE>

    For more information, try '--help'.
    ");
}

#[test]
fn no_threads() {
    let directory = Directory::empty();
    let ended =
        ended(directory.command(env!("CARGO_BIN_EXE_r3")).args(["check", "recipe.yaml", "--threads", "0"]));
    assert_snapshot!(format!("exit {}\n{}", ended.code, ended.stderr), @r"
    exit 2
    error: invalid value '0' for '--threads <N>': 0 is not in 1..=1024

    For more information, try '--help'.
    ");
}

#[test]
fn no_problems_to_evaluate() {
    let directory = Directory::empty();
    directory.edit_recipe("problems: 8", "problems: 0");
    assert_snapshot!(directory.refused(&["eval", "recipe.yaml"]), @r"
    exit 2
    error: the recipe evaluates no problems

    hint: say how many with --problems, or set `eval.problems`
    ");
}

#[test]
fn more_problems_than_are_held_out() {
    let directory = Directory::empty();
    assert_snapshot!(directory.refused(&["eval", "recipe.yaml", "--problems", "9"]), @r"
    exit 2
    error: --problems is 9, but the task holds out only 8 problems

    hint: lower --problems, or hold out more problems in `task`
    ");
    let set = directory.refused(&["eval", "recipe.yaml", "--set", "eval.problems=9"]);
    assert!(set.contains(" --> --set:1:15\n"), "{set}");
}

#[test]
fn numbers_of_problems_that_are_none() {
    let directory = Directory::empty();
    for bad in ["0", "-1", "99999999999999999999", "many"] {
        let said = directory.refused(&["eval", "recipe.yaml", "--problems", bad]);
        let named = format!("exit 2\nerror: invalid value '{bad}' for '--problems <N>': ");
        assert!(said.starts_with(&named), "{said}");
    }
}

#[test]
fn nothing_to_resume() {
    let directory = Directory::with_model();
    assert_snapshot!(directory.refused(&["run", "recipe.yaml", "--resume"]), @r"
    exit 2
    error: run holds no checkpoint to resume from

    hint: start the run without --resume
    ");
}

#[test]
fn a_model_or_a_comparison_is_nothing_to_resume() {
    let directory = Directory::with_model();
    let resume = |out: &str| directory.refused(&["run", "recipe.yaml", "--resume", "--set", out]);
    assert_snapshot!(resume("run.out=model"), @"
    exit 2
    error: model holds a model and no run to resume

    hint: name the directory of a run as `run.out`, or start a run from the model with `model.path`, without --resume
    ");
    directory.done(&["compare", "recipe.yaml"]);
    assert!(resume("run.out=run").contains("error: run holds no checkpoint to resume from"));
    assert_eq!(directory.names("run"), ["off", "on", "report.html"]);
}

#[test]
fn what_is_in_the_way_of_either_half_of_a_comparison_is_said_before_the_first_begins() {
    let directory = Directory::with_model();
    let compare = |out: &str| directory.refused(&["compare", "recipe.yaml", "--set", out]);
    std::fs::create_dir_all(directory.path("other/report.html")).unwrap();
    assert_snapshot!(compare("run.out=other"), @"
    exit 2
    error: cannot use other/report.html
      caused by: is a directory

    hint: check that the path exists, is writable and has room
    ");
    let before = directory.names("model");
    assert_snapshot!(compare("run.out=model"), @"
    exit 2
    error: model holds a model already

    hint: choose another directory, or remove that one first
    ");
    assert_eq!(directory.names("model"), before);

    directory.done(&["run", "recipe.yaml", "--set", "run.out=run/off", "--set", "run.steps=1"]);
    let earlier = directory.names("run/off");
    assert!(compare("run.out=run").contains("error: run holds a comparison already"));
    let lock = std::fs::File::open(directory.path("run/off/.lock")).unwrap();
    lock.try_lock().unwrap();
    assert_snapshot!(directory.refused(&["compare", "recipe.yaml", "--overwrite"]), @"
    exit 2
    error: another process runs in run/off

    hint: wait for it, stop it, or choose another directory, which --set run.out=DIR sets in a recipe
    ");
    assert_eq!((directory.names("run"), directory.names("run/off")), (vec!["off".to_owned()], earlier));
}

#[test]
fn the_recipe_itself_is_in_the_way() {
    let directory = Directory::with_model();
    std::fs::create_dir(directory.path("mine")).unwrap();
    let mine = format!("# Notes.\n{RECIPE}");
    directory.write("mine/recipe.yaml", &mine);
    let run = ["run", "mine/recipe.yaml", "--set", "run.out=mine"];
    let refused = directory.refused(&run);
    assert_snapshot!(refused, @"
    exit 2
    error: mine/recipe.yaml would be written over by the recipe that a run leaves there

    hint: give it another name, or choose another directory with --set run.out=DIR
    ");
    for how in ["--overwrite", "--resume"] {
        assert_eq!(directory.refused(&[&run[..], &[how]].concat()), refused);
    }
    assert_eq!(std::fs::read_to_string(directory.path("mine/recipe.yaml")).unwrap(), mine);
    assert_eq!(directory.names("mine"), ["recipe.yaml"]);
}

#[test]
fn a_run_is_in_the_way() {
    let directory = Directory::with_model();
    directory.done(&["run", "recipe.yaml"]);
    assert_snapshot!(directory.refused(&["run", "recipe.yaml"]), @r"
    exit 2
    error: run holds an earlier run

    hint: continue it with --resume, discard it with --overwrite, or choose another directory with --set run.out=DIR
    ");
}

#[test]
fn a_run_is_only_discarded_for_one_that_can_start() {
    let directory = Directory::with_model();
    directory.done(&["run", "recipe.yaml"]);
    directory.write("run/notes.txt", "mine");
    let again = |set: &str| directory.refused(&["run", "recipe.yaml", "--overwrite", "--set", set]);
    assert_snapshot!(again("model.path=run/step-000002"), @r"
    exit 2
    error: run starts from run/step-000002, which --overwrite would remove

    hint: write to another directory with --set run.out=DIR
    ");
    again("model.path=nowhere");
    again("ring.bytes=1KiB");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = format!("metrics.listen={}", taken.local_addr().unwrap());
    let before = std::fs::read(directory.path("run/metrics.jsonl")).unwrap();
    directory.refused(&["run", "recipe.yaml", "--overwrite", "--set", &listen]);
    assert_eq!(std::fs::read(directory.path("run/metrics.jsonl")).unwrap(), before);
    assert!(directory.path("run/step-000002/trainer_state.json").exists());
    directory.done(&["run", "recipe.yaml", "--overwrite", "--set", "run.steps=1"]);
    assert!(!directory.path("run/step-000002").exists());
    assert!(directory.path("run/notes.txt").exists(), "only what a run wrote is removed");
}

#[test]
fn a_resumed_run_keeps_its_seed_and_names_what_changed() {
    let directory = Directory::with_model();
    directory.done(&["run", "recipe.yaml"]);
    assert_snapshot!(directory.refused(&["run", "recipe.yaml", "--resume", "--set", "run.seed=8"]), @"
    exit 2
    error: the checkpoint was written with `run.seed: 7`, but the recipe now says 8

    hint: set `run.seed` back to 7, or start a new run from the checkpoint with `model.path`
    ");
    let resumed = directory.r3(&["run", "recipe.yaml", "--resume", "--set", "train.lr=2e-3"]);
    assert_eq!(resumed.code, 0, "{}", resumed.stderr);
    assert!(
        resumed.stderr.contains("resuming with `train.lr: 0.002` instead of 0.001"),
        "{}",
        resumed.stderr
    );
}

#[test]
fn a_checkpoint_without_its_state_is_damaged() {
    let directory = Directory::with_model();
    directory.done(&["run", "recipe.yaml"]);
    std::fs::remove_file(directory.path("run/step-000002/run_state.json")).unwrap();
    assert_snapshot!(directory.refused(&["run", "recipe.yaml", "--resume"]), @"
    exit 2
    error: cannot use run/step-000002/run_state.json
      caused by: No such file or directory (os error 2)

    hint: the checkpoint is damaged: remove it and resume from an earlier one
    ");
}

#[test]
fn a_run_that_is_done_says_so_when_it_is_resumed() {
    let directory = Directory::with_model();
    directory.done(&["run", "recipe.yaml"]);
    let before = directory.names("run");
    let resumed = directory.r3(&["run", "recipe.yaml", "--resume"]);
    assert_eq!(resumed.code, 0, "{}", resumed.stderr);
    let said = "step 2 is done, and `run.steps` is 2: nothing is left to do\n";
    assert!(resumed.stderr.ends_with(said), "{}", resumed.stderr);
    assert_eq!(directory.names("run"), before);
}

#[test]
fn a_comparison_is_in_the_way() {
    let directory = Directory::with_model();
    directory.done(&["compare", "recipe.yaml"]);
    assert_snapshot!(directory.refused(&["compare", "recipe.yaml"]), @r"
    exit 2
    error: run holds a comparison already

    hint: replace it with --overwrite, or choose another directory with --set run.out=DIR
    ");
}

#[test]
fn weights_are_in_the_way() {
    let directory = Directory::with_model();
    assert_snapshot!(directory.refused(&["new-model", "config.json", "model"]), @r"
    exit 2
    error: model holds a model already

    hint: choose another directory, or remove that one first
    ");
    assert_snapshot!(directory.refused(&["sft", "sft.yaml", "--set", "run.out=model"]), @r"
    exit 2
    error: model holds a model already

    hint: replace it with --overwrite, or choose another directory with --set run.out=DIR
    ");
}

/// How many lines were scored, and what then was said.
fn scored(directory: &Directory, lines: &str, arguments: &[&str]) -> String {
    directory.write("lines.jsonl", lines);
    let Ended { code, stdout, stderr } =
        directory.r3(&[&["score", "model", "--input", "lines.jsonl"], arguments].concat());
    format!("{} scored, exit {code}\n{stderr}", stdout.lines().count())
}

#[test]
fn a_line_that_is_no_sequence_is_named_after_those_before_it_were_scored() {
    let directory = Directory::with_model();
    assert_snapshot!(scored(&directory, "{\"tokens\": [8, 11]}\n\n{\"tokens\": [8, ]}\n", &[]), @r#"
    1 scored, exit 2
    error: lines.jsonl:3:16: not a sequence to score: trailing comma

    hint: write one object a line, such as {"tokens": [5, 17, 9]}, with "routed_experts" to replay routes
    "#);
    assert_snapshot!(scored(&directory, "{\"tokens\": [8, -1]}\n", &[]), @r#"
    0 scored, exit 2
    error: lines.jsonl:1:17: not a sequence to score: invalid value: integer `-1`, expected u32

    hint: write one object a line, such as {"tokens": [5, 17, 9]}, with "routed_experts" to replay routes
    "#);
    assert_snapshot!(scored(&directory, "{\"text\": \"8+1=\"}\n", &[]), @r#"
    0 scored, exit 2
    error: lines.jsonl:1:7: not a sequence to score: unknown field `text`, expected one of `tokens`, `routed_experts`, `layer_ids`, `temperature`, `supports`

    hint: write one object a line, such as {"tokens": [5, 17, 9]}, with "routed_experts" to replay routes
    "#);
}

#[test]
fn tokens_that_cannot_be_scored() {
    let directory = Directory::with_model();
    let long = format!("{{\"tokens\": [8{}]}}", ", 9".repeat(64));
    assert_snapshot!(scored(&directory, "{\"tokens\": [8]}\n", &[]), @"
    0 scored, exit 2
    error: cannot score lines.jsonl:1
      caused by: 1 token cannot be scored: there is nothing to predict

    hint: give at least two tokens
    ");
    assert_snapshot!(scored(&directory, "{\"tokens\": [8, 64]}\n", &[]), @r"
    0 scored, exit 2
    error: cannot score lines.jsonl:1
      caused by: token 64 at position 1 is outside the vocabulary of 64

    hint: the tokenizer and the model do not belong together
    ");
    assert_snapshot!(scored(&directory, "{\"tokens\": [8, 64]}\n", &["--side", "trainer"]), @r"
    0 scored, exit 2
    error: cannot score lines.jsonl:1
      caused by: token 64 at position 1 is outside the vocabulary of 64

    hint: the tokenizer and the model do not belong together
    ");
    assert_snapshot!(scored(&directory, &long, &["--side", "trainer"]), @r"
    0 scored, exit 2
    error: cannot score lines.jsonl:1
      caused by: a sequence of 65 tokens exceeds the model's 64 positions

    hint: shorten the sequences, or take a model with more positions
    ");
    assert_snapshot!(scored(&directory, "{\"tokens\": [8, 9, 8, 9]}\n", &["--max-tokens", "3"]), @r"
    0 scored, exit 2
    error: lines.jsonl:1: 4 tokens, but at most 3 are scored

    hint: make room with --max-tokens 4
    ");
}

#[test]
fn routes_that_cannot_be_replayed() {
    let directory = Directory::with_model();
    let refused = |line: &str| {
        let [engine, trainer] = ["engine", "trainer"].map(|side| scored(&directory, line, &["--side", side]));
        assert_eq!(engine, trainer);
        engine
    };
    assert_snapshot!(refused(r#"{"tokens": [8, 9], "routed_experts": [[[0, 1], [2, 2]]]}"#), @r"
    0 scored, exit 2
    error: cannot score lines.jsonl:1
      caused by: routes to replay break their contract
      caused by: position 0, MoE layer 1: expert 2 appears twice

    hint: check which model the routes are of
    ");
    assert_snapshot!(refused(r#"{"tokens": [8, 9], "routed_experts": [[[0, 1], [2, 4]]]}"#), @r"
    0 scored, exit 2
    error: cannot score lines.jsonl:1
      caused by: routes to replay break their contract
      caused by: position 0, MoE layer 1: expert 4 does not exist (the layer has 4)

    hint: check which model the routes are of
    ");
    assert_snapshot!(refused(r#"{"tokens": [8, 9], "routed_experts": [[[0, 1]]]}"#), @r"
    0 scored, exit 2
    error: cannot score lines.jsonl:1
      caused by: position 0: a row of routes is [2][2], one list of experts a MoE layer

    hint: check which model the routes are of
    ");
    assert_snapshot!(refused(r#"{"tokens": [8, 9], "routed_experts": []}"#), @"
    0 scored, exit 2
    error: cannot score lines.jsonl:1
      caused by: routes to replay have 0 rows, but 2 tokens are scored

    hint: `routed_experts` needs one row for each token but the last
    ");
}

#[test]
fn lines_that_do_not_exist() {
    let directory = Directory::with_model();
    assert_snapshot!(directory.refused(&["score", "model", "--input", "lines.jsonl"]), @r"
    exit 2
    error: cannot read lines.jsonl
      caused by: No such file or directory (os error 2)

    hint: name a readable file of JSON lines, or - for stdin
    ");
}
