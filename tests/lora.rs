//! Runs that train a part of the model: updates of low rank, and everything but what is frozen.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use r3_kernels::gemm::Dtype;
use r3_model::adapter::Adapter;
use r3_model::checkpoint::Checkpoint;
use r3_model::source::{TensorSource, canonical_tensors};
use r3_orchestrator::error::RunError;
use r3_orchestrator::model_dir::{create, export_adapter};
use r3_orchestrator::run::{RunOptions, RunOutcome, run};
use r3_recipe::recipe::Recipe;
use r3_telemetry::metrics;
use safetensors::SafeTensors;

const LORA: &str = "train.lora={ rank: 2, alpha: 8, targets: [\"*.self_attn.{q,v}_proj.weight\", \
     \"*.mlp.gate.weight\", \"model.layers.7.mlp.experts.*\"] }";

fn assets() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../../assets/tiny-moe"].iter().collect()
}

/// A run that learns in every step and writes into `dir/out`, with `changes` put over it.
fn recipe(dir: &Path, changes: &[&str]) -> Recipe {
    let text = format!(
        "model: {{ path: {} }}
task: {{ arithmetic: {{ digits: 2, held_out: 8 }} }}
rollout: {{ groups: 6, group_size: 4, max_new_tokens: 4, dtype: f32 }}
algorithm: {{ dapo: {{ clip_low: 0.2, clip_high: 0.28 }} }}
train: {{ lr: 1.0e-3, mini_steps: 2, micro_batch_tokens: 64 }}
eval: {{ problems: 8 }}
metrics: {{ listen: null }}
run: {{ steps: 4, seed: 5, save_every: 2, out: {} }}
",
        assets().display(),
        dir.join("out").display()
    );
    let path = dir.join("recipe.yaml");
    fs::write(&path, text).unwrap();
    let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
    Recipe::load(&path, &changes).unwrap().recipe
}

fn start(dir: &Path, changes: &[&str]) -> Result<RunOutcome, RunError> {
    run(&recipe(dir, changes), &RunOptions::default())
}

fn resume(dir: &Path, changes: &[&str]) -> Result<RunOutcome, RunError> {
    run(&recipe(dir, changes), &RunOptions { resume: true, ..RunOptions::default() })
}

fn step(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("out/step-{step:06}"))
}

/// Names of the weights in which two models differ in a bit.
fn changed(from: &Path, to: &Path) -> BTreeSet<String> {
    let [from, to] = [from, to].map(|dir| Checkpoint::open(dir).unwrap());
    let bits = |model: &Checkpoint, name: &str| {
        let mut values = Vec::new();
        model.read(name, &mut values).unwrap();
        values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let names = canonical_tensors(from.config()).into_iter().map(|(name, _)| name);
    names.filter(|name| bits(&from, name) != bits(&to, name)).collect()
}

fn tensor_names(file: &Path) -> BTreeSet<String> {
    let bytes = fs::read(file).unwrap();
    SafeTensors::deserialize(&bytes).unwrap().names().into_iter().map(str::to_owned).collect()
}

#[test]
fn updates_of_low_rank_train_their_targets_and_resume_to_the_same_bytes() {
    let (whole, split) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let outcome = start(whole.path(), &[LORA]).unwrap();
    for record in &outcome.records[1..] {
        // The engine serves the merged weights, which the trainer's forward takes, too.
        assert_eq!(record.get(metrics::K3_KL), Some(0.0));
        let n_trained = record.get(metrics::TRAINED_PARAMETERS).unwrap();
        // Of rank 2: q, v and router of 8 layers, both matrices of 32 experts in one.
        let expected = 2 * (8 * ((64 + 64) + (64 + 32) + (64 + 32)) + 32 * ((64 + 32) + (16 + 64)));
        assert_eq!(n_trained, f64::from(expected));
    }
    let targets = changed(&assets(), &step(whole.path(), 4));
    let of_layer = |layer: usize| {
        ["self_attn.q_proj.weight", "self_attn.v_proj.weight", "mlp.gate.weight"]
            .map(|name| format!("model.layers.{layer}.{name}"))
    };
    let experts = ["gate_up_proj", "down_proj"].map(|name| format!("model.layers.7.mlp.experts.{name}"));
    assert_eq!(targets, (0..8).flat_map(of_layer).chain(experts).collect());

    start(split.path(), &[LORA, "run.steps=2"]).unwrap();
    resume(split.path(), &[LORA]).unwrap();
    for file in ["model.safetensors", "lora.safetensors", "optimiser.safetensors"] {
        let read = |dir: &Path| fs::read(step(dir, 4).join(file)).unwrap();
        assert!(read(whole.path()) == read(split.path()), "{file} differs");
    }
    let optimiser = tensor_names(&step(whole.path(), 4).join("optimiser.safetensors"));
    assert!(optimiser.iter().all(|name| name.contains(".lora_")), "{optimiser:?}");
    assert_eq!(optimiser.len(), 2 * 2 * targets.len());
}

#[test]
fn a_resumed_adapter_must_be_the_recipes_and_of_the_same_base() {
    let dir = tempfile::tempdir().unwrap();
    start(dir.path(), &[LORA, "run.steps=2"]).unwrap();
    let refused = |changes: &[&str]| match resume(dir.path(), changes) {
        Err(RunError::RecipeChanged { change }) => change.key,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(&[]), "train.lora");
    assert_eq!(refused(&[LORA, "train.lora.alpha=9"]), "train.lora.alpha");
    assert_eq!(refused(&[LORA, "train.freeze=[\"*.q_proj.weight\"]"]), "train.freeze");
    let other = dir.path().join("other");
    create(&assets(), &other, 1, Dtype::Bf16).unwrap();
    let path = format!("model.path={}", other.display());
    let error = resume(dir.path(), &[LORA, &path]).unwrap_err();
    assert!(matches!(&error, RunError::OtherBase { path, .. } if *path == other), "{error}");
    resume(dir.path(), &[LORA, "run.steps=3"]).unwrap();
}

#[test]
fn what_is_frozen_keeps_its_bits_and_has_no_optimiser_state() {
    let dir = tempfile::tempdir().unwrap();
    let freeze =
        "train.freeze=[\"*.mlp.gate.weight\", \"*norm.weight\", \"model.layers.{0,1}.mlp.experts.*\"]";
    let outcome = start(dir.path(), &[freeze, "train.dtype=f32", "run.steps=2"]).unwrap();
    assert_eq!(outcome.records[2].get(metrics::K3_KL), Some(0.0));
    let config = Checkpoint::open(&assets()).unwrap().config().clone();
    let is_frozen = |name: &str| {
        let early =
            name.starts_with("model.layers.0.mlp.experts") || name.starts_with("model.layers.1.mlp.experts");
        name.ends_with("mlp.gate.weight") || name.ends_with("norm.weight") || early
    };
    let names = canonical_tensors(&config).into_iter().map(|(name, _)| name);
    let expected: BTreeSet<String> = names.filter(|name| !is_frozen(name)).collect();
    assert_eq!(changed(&assets(), &step(dir.path(), 2)), expected);
    let optimiser = tensor_names(&step(dir.path(), 2).join("optimiser.safetensors"));
    assert_eq!(
        optimiser,
        expected.iter().flat_map(|name| ["m", "v"].map(|of| format!("{of}.{name}"))).collect()
    );
    let Err(RunError::RecipeChanged { change }) = resume(dir.path(), &[]) else { panic!("unfrozen") };
    assert_eq!(change.key, "train.freeze");
}

#[test]
fn an_adapter_is_exported_of_a_run_that_has_one() {
    let dir = tempfile::tempdir().unwrap();
    start(dir.path(), &[LORA, "run.steps=2", "eval.problems=0"]).unwrap();
    let (run, out) = (dir.path().join("out"), dir.path().join("adapter"));
    let n_parameters = export_adapter(&run, &out).unwrap();
    let written = Adapter::load(&step(dir.path(), 2)).unwrap().unwrap();
    assert_eq!(n_parameters, written.n_parameters());
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(out.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!((config["r"].as_u64(), config["lora_alpha"].as_u64()), (Some(2), Some(8)));
    assert_eq!(config["target_modules"].as_array().unwrap().len(), 16);
    assert_eq!(config["target_parameters"].as_array().unwrap().len(), 10);
    let names = tensor_names(&out.join("adapter_model.safetensors"));
    assert_eq!(names.len(), 2 * (16 + 10));
    assert!(names.contains("base_model.model.model.layers.7.mlp.experts.base_layer.lora_B.weight"));
    assert!(matches!(export_adapter(&run, &out), Err(RunError::WeightsThere { .. })));
    let error = export_adapter(&assets(), &dir.path().join("none")).unwrap_err();
    assert!(matches!(error, RunError::NoAdapter { .. }), "{error}");
}
