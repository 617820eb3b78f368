//! Model directories that are not what they should be: exit code 2, before anything is trained or written.

use std::collections::BTreeMap;
use std::fs;

use insta::assert_snapshot;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::json;

use crate::directory::{Directory, config};

const WEIGHTS: &str = "model/model.safetensors";

/// A stored tensor: dtype, shape and bytes.
type Tensor = (Dtype, Vec<usize>, Vec<u8>);

/// Rewrites the weights after `change`.
fn change_tensors(directory: &Directory, change: impl FnOnce(&mut BTreeMap<String, Tensor>)) {
    let bytes = fs::read(directory.path(WEIGHTS)).unwrap();
    let read = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: BTreeMap<String, Tensor> = read
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect();
    change(&mut tensors);
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    directory.write(WEIGHTS, serialize(views, None).unwrap());
}

/// What `r3 run` says, having left no directory behind.
fn refused(directory: &Directory) -> String {
    let said = directory.refused(&["run", "recipe.yaml"]);
    assert!(!directory.path("run/recipe.yaml").exists());
    said
}

#[test]
fn no_directory() {
    let directory = Directory::empty();
    assert_snapshot!(refused(&directory), @r"
    exit 2
    error: cannot read model/config.json
      caused by: No such file or directory (os error 2)

    hint: name a Hugging Face model directory, with config.json and *.safetensors
    ");
    assert_snapshot!(directory.refused(&["eval", "recipe.yaml", "--model", "nowhere"]), @r"
    exit 2
    error: cannot read nowhere/config.json
      caused by: No such file or directory (os error 2)

    hint: name a Hugging Face model directory, with config.json and *.safetensors
    ");
    assert_snapshot!(directory.refused(&["export", "nowhere", "out"]), @r"
    exit 2
    error: cannot read nowhere/config.json
      caused by: No such file or directory (os error 2)

    hint: name a Hugging Face model directory, with config.json and *.safetensors
    ");
}

#[test]
fn no_weights() {
    let directory = Directory::with_model();
    fs::remove_file(directory.path(WEIGHTS)).unwrap();
    assert_snapshot!(refused(&directory), @r"
    exit 2
    error: model: no model.safetensors and no model.safetensors.index.json

    hint: r3 reads safetensors only; convert other formats first
    ");
}

#[test]
fn truncated_weights() {
    let directory = Directory::with_model();
    let bytes = fs::read(directory.path(WEIGHTS)).unwrap();
    directory.write(WEIGHTS, &bytes[..bytes.len() - 10]);
    assert_snapshot!(refused(&directory), @r"
    exit 2
    error: model/model.safetensors is not a whole safetensors file: its tensors need 16304 bytes, the file has 16294

    hint: the file is truncated or corrupt: copy or download it again
    ");
    directory.write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:4665a5\nsize 16304\n");
    assert_snapshot!(refused(&directory), @r"
    exit 2
    error: model/model.safetensors is a Git LFS pointer and not the file itself

    hint: fetch what it points to with `git lfs pull`, or download the model again
    ");
    fs::remove_file(directory.path(WEIGHTS)).unwrap();
    directory.write("model/model.safetensors.index.json", "{");
    assert_snapshot!(refused(&directory), @r"
    exit 2
    error: model/model.safetensors.index.json is not valid JSON
      caused by: EOF while parsing an object at line 1 column 1

    hint: fix model.safetensors.index.json or export the model again
    ");
}

#[test]
fn weights_that_are_not_numbers() {
    let directory = Directory::with_model();
    change_tensors(&directory, |tensors| {
        let (_, _, bytes) = tensors.get_mut("model.layers.1.mlp.gate.weight").unwrap();
        bytes[6..8].copy_from_slice(&0x7FC0_u16.to_le_bytes());
    });
    assert_snapshot!(refused(&directory), @r"
    exit 2
    error: tensor `model.layers.1.mlp.gate.weight` is NaN at element 3

    hint: the weights are damaged: go back to an earlier checkpoint
    ");
    assert_snapshot!(directory.refused(&["eval", "recipe.yaml"]), @r"
    exit 2
    error: tensor `model.layers.1.mlp.gate.weight` is NaN at element 3

    hint: the weights are damaged: go back to an earlier checkpoint
    ");
}

#[test]
fn weights_that_overflow() {
    let directory = Directory::with_model();
    change_tensors(&directory, |tensors| {
        // 3e38 in bf16: finite, as is every weight, but no sum of such is.
        let (_, _, bytes) = tensors.get_mut("model.norm.weight").unwrap();
        bytes.chunks_exact_mut(2).for_each(|value| value.copy_from_slice(&0x7F61_u16.to_le_bytes()));
    });
    directory.write("prompts.jsonl", "{\"prompt\": \"1+1=\"}\n");
    directory.write("tokens.jsonl", "{\"tokens\": [8, 11, 14]}\n");
    // Without what is said at the start.
    let refused = |arguments: &[&str]| {
        let said = directory.refused(arguments);
        let is_of_error = |line: &&str| ["exit", "error", "hint"].iter().any(|word| line.starts_with(word));
        said.lines().filter(is_of_error).collect::<Vec<_>>().join("\n")
    };
    let rollout =
        ["rollout", "model", "--prompts", "prompts.jsonl", "--out", "out.jsonl", "--max-new-tokens", "4"];
    assert_snapshot!(refused(&rollout), @"
    exit 4
    error: group 0, rollout 0: the logprob of the token at position 4 is NaN
    hint: numbers overflow on their way through these weights: go back to an earlier checkpoint, and if a run made them, lower `train.lr`
    ");
    assert!(!directory.path("out.jsonl").exists());
    let truncated = [&rollout[..], &["--top-k", "4"]].concat();
    assert_eq!(refused(&truncated), refused(&rollout));
    let score = |side| directory.refused(&["score", "model", "--input", "tokens.jsonl", "--side", side]);
    assert_snapshot!(score("engine"), @"
    exit 4
    error: cannot score tokens.jsonl:1
      caused by: the logprob of the token at position 1 is NaN

    hint: numbers overflow on their way through these weights: go back to an earlier checkpoint, and if a run made them, lower `train.lr`
    ");
    assert_eq!(score("trainer"), score("engine"));
    assert_snapshot!(refused(&["run", "recipe.yaml", "--set", "eval.problems=0"]), @"
    exit 4
    error: group 0, rollout 0: the logprob of the token at position 4 is NaN
    hint: numbers overflow on their way through these weights: go back to an earlier checkpoint, and if a run made them, lower `train.lr`
    ");
}

#[test]
fn a_missing_tensor() {
    let directory = Directory::with_model();
    change_tensors(&directory, |tensors| {
        tensors.remove("model.layers.1.mlp.experts.3.up_proj.weight").unwrap();
    });
    assert_snapshot!(refused(&directory), @r"
    exit 2
    error: model: tensor `model.layers.1.mlp.experts.3.up_proj.weight` is missing

    hint: config.json and the weights do not belong together: check both come from one model
    ");
}

#[test]
fn a_surplus_tensor() {
    let directory = Directory::with_model();
    change_tensors(&directory, |tensors| {
        let norm = tensors["model.norm.weight"].clone();
        tensors.insert("model.layers.2.input_layernorm.weight".into(), norm);
    });
    assert_snapshot!(refused(&directory), @r"
    exit 2
    error: model: tensor `model.layers.2.input_layernorm.weight` is not part of this model

    hint: config.json and the weights do not belong together: check both come from one model
    ");
}

#[test]
fn a_misshapen_tensor() {
    let directory = Directory::with_model();
    change_tensors(&directory, |tensors| {
        let (_, shape, bytes) = tensors.get_mut("model.norm.weight").unwrap();
        shape[0] -= 1;
        bytes.truncate(2 * shape[0]);
    });
    assert_snapshot!(refused(&directory), @r"
    exit 2
    error: model: tensor `model.norm.weight` has shape [15], but config.json implies [16]

    hint: config.json and the weights do not belong together: check both come from one model
    ");
}

#[test]
fn a_model_of_another_family() {
    let directory = Directory::with_model();
    let mut config = config();
    config["model_type"] = json!("mixtral");
    directory.write("model/config.json", config.to_string());
    assert_snapshot!(refused(&directory), @r"
    exit 2
    error: model/config.json: model type `mixtral` is not supported

    hint: r3 runs `qwen3_moe` and `dots1` models
    ");
    assert_snapshot!(directory.refused(&["new-model", "model", "other"]), @r"
    exit 2
    error: model/config.json: model type `mixtral` is not supported

    hint: r3 runs `qwen3_moe` and `dots1` models
    ");
}

#[test]
fn a_tokenizer_of_another_model() {
    let directory = Directory::empty();
    let mut config = config();
    config["vocab_size"] = json!(32);
    directory.write("config.json", config.to_string());
    directory.done(&["new-model", ".", "model"]);
    assert_snapshot!(refused(&directory), @r"
    exit 2
    error: model/tokenizer.json has token 63 (`_`), but the model's vocabulary ends at 32

    hint: use the tokenizer files that came with this model
    ");
}

#[test]
fn a_model_without_a_tokenizer() {
    let directory = Directory::with_model();
    fs::remove_file(directory.path("model/tokenizer.json")).unwrap();
    assert_snapshot!(refused(&directory), @r"
    exit 2
    error: cannot read model/tokenizer.json: No such file or directory (os error 2)

    hint: check the path and its permissions; paths are relative to where r3 runs
    ");
}

#[test]
fn a_model_is_written_neither_over_a_run_nor_over_its_checkpoints_nor_a_run_over_a_model() {
    let directory = Directory::with_model();
    directory.done(&["sft", "sft.yaml"]);
    directory.done(&["run", "recipe.yaml", "--set", "model.path=warm"]);
    let (before, sft) = (directory.names("run"), ["sft", "sft.yaml", "--overwrite", "--set"]);
    let over_run = directory.refused(&["export", "run", "run"]);
    assert_snapshot!(over_run, @"
    exit 2
    error: run is the directory of a run

    hint: choose another directory, or one inside it: whoever names the run would get this model instead of its newest checkpoint
    ");
    assert_eq!(directory.refused(&["new-model", ".", "run"]), over_run);
    assert_eq!(directory.refused(&[&sft[..], &["run.out=run"]].concat()), over_run);
    assert_eq!(directory.names("run"), before);
    let over_model = ["run", "recipe.yaml", "--overwrite", "--set", "run.out=warm"];
    assert_snapshot!(directory.refused(&over_model), @"
    exit 2
    error: warm holds a model already

    hint: choose another directory, or remove that one first
    ");
    assert!(!directory.path("warm/.lock").exists());

    let held = fs::File::open(directory.path("run/.lock")).unwrap();
    held.try_lock().unwrap();
    assert_snapshot!(directory.refused(&[&sft[..], &["run.out=run/step-000002"]].concat()), @"
    exit 2
    error: run/step-000002 is a checkpoint of a run

    hint: choose another directory, since the run may be resumed from it
    ");
    assert_snapshot!(directory.refused(&["compare", "recipe.yaml"]), @"
    exit 2
    error: another process runs in run

    hint: wait for it, stop it, or choose another directory, which --set run.out=DIR sets in a recipe
    ");
    directory.done(&["export", "run", "run/exported"]);
    held.unlock().unwrap(); // Closed alone, a child that another thread has just forked would still hold it.
    directory.done(&["run", "recipe.yaml", "--resume", "--set", "model.path=warm"]);
}
