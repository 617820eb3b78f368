//! A task, a recipe and a small model for the tests of this crate.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, iter};

use r3_core::ids::{GroupId, PolicyVersion, SequenceId, TokenId};
use r3_core::rollout::{FinishReason, Reward as Outcome};
use r3_engine::config::EngineConfig;
use r3_engine::engine::Engine;
use r3_model::config::ModelConfig;
use r3_model::init::FreshWeights;
use r3_recipe::recipe::Recipe;
use r3_ring::reader::Reader;
use r3_ring::ring::Ring;
use r3_scheduler::request::Finished;
use r3_tasks::dataset::{Dataset, Problem, Prompt};
use r3_tasks::reward::Reward;
use r3_tasks::tokenizer::Tokenizer;
use r3_telemetry::progress::{Bar, BarKind, Progress};

use crate::pending::{Origin, Pending, Scored};
use crate::setup::sample_spec;
use crate::worker::WorkerParts;

/// The model of this repository: 8 MoE layers of 32 experts, top-4.
pub(crate) fn model_dir() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../../assets/tiny-moe"].iter().collect()
}

/// The names in `dir`, sorted.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Groups of two rollouts of at most three tokens.
pub(crate) fn recipe() -> Recipe {
    let text = "
model: { path: model }
task: { arithmetic: { digits: 2 } }
rollout: { groups: 2, group_size: 2, max_new_tokens: 3 }
algorithm: { dapo: { clip_low: 0.2, clip_high: 0.28 } }
run: { steps: 4, out: run }
";
    Recipe::parse(text, "test.yaml").unwrap()
}

pub(crate) fn model() -> ModelConfig {
    ModelConfig::load(&model_dir()).unwrap()
}

pub(crate) fn tokenizer() -> Tokenizer {
    Tokenizer::load(&model_dir(), model().vocab_size).unwrap()
}

/// Five sums to train on, and none held out.
pub(crate) fn dataset() -> Dataset {
    let problem = |n: u32| Problem { prompt: format!("{n}+{n}="), answer: format!("{}", 2 * n), wrong: None };
    Dataset { train: (10..15).map(problem).collect(), held_out: Vec::new() }
}

/// A worker over random weights, and the ring's other end.
pub(crate) fn worker_parts(reward: Arc<dyn Reward>, deadline: Duration) -> (WorkerParts, Reader) {
    let (recipe, model, tokenizer) = (recipe(), model(), tokenizer());
    let (writer, reader) = Ring::create(1 << 20).unwrap();
    let numbers = (recipe.rollout.dtype, recipe.resolved_numerics());
    let config = EngineConfig::from_recipe(&recipe.engine, numbers, true);
    let engine = Engine::new(config, &model, &FreshWeights::new(&model, 1), PolicyVersion(0)).unwrap();
    let parts = WorkerParts {
        engine,
        writer,
        deadline,
        spec: sample_spec(&recipe, &tokenizer),
        reward,
        dataset: Arc::new(dataset()),
        tokenizer: Arc::new(tokenizer),
        pending: Pending::default(),
        n_refits: 0,
    };
    (parts, reader)
}

/// The first problem as group 0, said to be the `problem`-th.
pub(crate) fn prompt(problem: usize) -> Prompt {
    Prompt::encode(GroupId(0), problem, &dataset().train[0], &tokenizer()).unwrap()
}

/// A rollout of three prompt tokens and two sampled ones, without routes.
pub(crate) fn scored(group: u64, index: u32, reward: Outcome) -> Scored {
    let rollout = Finished {
        sequence: SequenceId(0),
        group: GroupId(group),
        index,
        tokens: [1, 2, 3, 4, 5].map(TokenId).into(),
        prompt_tokens: 3,
        turns: iter::once(3..5).collect(),
        rollout_logprobs: vec![-0.5, -1.5],
        versions: vec![PolicyVersion(2); 2],
        support: None,
        routes: None,
        routes_start: 0,
        new_rows: 0,
        prompt_logprobs: None,
        finish: FinishReason::Stop,
        cached_tokens: 0,
        n_preemptions: 0,
    };
    Scored { rollout, reward, origin: Origin::default() }
}

pub(crate) fn bar() -> Bar {
    Progress::stderr().bar(BarKind::Rollout, 1)
}
