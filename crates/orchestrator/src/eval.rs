//! `r3 eval`: how many held-out problems a policy solves, without a run.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use r3_core::ids::{PolicyVersion, TokenId};
use r3_engine::config::EngineConfig;
use r3_engine::engine::Engine;
use r3_recipe::recipe::Recipe;
use r3_telemetry::progress::{BarKind, Progress};

use crate::error::RunError;
use crate::greedy::{Evaluation, Held, greedy_accuracy};
use crate::model_dir;
use crate::setup::{self, TaskParts};

/// Answers the first `eval.problems` held-out problems greedily, in `rollout.dtype`.
///
/// The same engine, prompts and rewards as the evaluations of a run, so the same weights give the same number.
/// `model.path` may also be a checkpoint, or a run, whose newest checkpoint is then taken.
///
/// # Errors
/// If the model, its tokenizer or the problems cannot be used, or do not fit each other or the KV memory.
pub fn evaluate(recipe: &Recipe) -> Result<Evaluation, RunError> {
    let began = Instant::now();
    let mut recipe = recipe.clone();
    recipe.model.path = model_dir::resolve(&recipe.model.path)?;
    let checkpoint = model_dir::open(&recipe.model.path)?;
    let model = checkpoint.config();
    let task = TaskParts::load(
        &recipe.task,
        recipe.model.tokenizer_path(),
        model.vocab_size,
        None,
        SystemTime::now(),
    )?;
    setup::check_stop_tokens(&recipe, model)?;
    let problems = &task.dataset.held_out[..recipe.eval.problems.min(task.dataset.held_out.len())];
    let max_new_tokens = recipe.eval.max_new_tokens.unwrap_or(recipe.rollout.max_new_tokens);
    let numbers = (recipe.rollout.dtype, recipe.resolved_numerics());
    let config = EngineConfig::from_recipe(&recipe.engine, numbers, false);
    let prompt_tokens = setup::longest_prompt(problems, &task.tokenizer)?;
    setup::check_kv(&config, model, (prompt_tokens, max_new_tokens))?;

    let progress = Progress::stderr();
    let mut engine = Engine::new(config, model, &checkpoint, PolicyVersion(0))?;
    let stop_tokens: Arc<[TokenId]> = setup::sample_spec(&recipe, &task.tokenizer).stop_tokens;
    let held = Held { problems, reward: &*task.reward, stop_tokens: &stop_tokens, max_new_tokens };
    let bar = progress.bar(BarKind::Eval, problems.len() as u64);
    let accuracy =
        greedy_accuracy(&mut engine, &task.tokenizer, &held, &|tokens, answers| bar.add(tokens, answers))?;
    bar.finish();
    Ok(Evaluation { problems: problems.len(), accuracy, seconds: began.elapsed().as_secs_f64() })
}
