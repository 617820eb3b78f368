//! `r3 sft`: a supervised warm start on the task's own answers, written as a Hugging Face directory.

use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use r3_core::ids::{PolicyVersion, TokenId};
use r3_engine::config::EngineConfig;
use r3_engine::engine::Engine;
use r3_kernels::gemm::Dtype;
use r3_model::autograd::Policy;
use r3_model::checkpoint::Checkpoint;
use r3_model::config::ModelConfig;
use r3_model::init::FreshWeights;
use r3_recipe::numerics::Numerics;
use r3_recipe::recipe::SftRecipe;
use r3_recipe::rollout::{Dtype as RecipeDtype, Engine as EngineSection};
use r3_recipe::task::NewOrExistingModel;
use r3_tasks::dataset::{Problem, PromptOrder};
use r3_tasks::tokenizer::Tokenizer;
use r3_telemetry::progress::{BarKind, Progress};
use r3_train::sft::{Example, SftTrainer};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use crate::error::RunError;
use crate::greedy::{Held, greedy_accuracy};
use crate::model_dir::{self, Staged};
use crate::run::with_deep_stack;
use crate::run_dir::hold_for_model;
use crate::setup::{TaskParts, load_policy};
use crate::shutdown::Shutdown;

/// Tokens of one forward and backward pass.
const MICRO_BATCH_TOKENS: usize = 4096;

/// Steps between two lines on the terminal.
const LINE_EVERY: u64 = 50;

/// What a warm start came to; `r3 sft --json` prints it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SftOutcome {
    /// Optimiser steps.
    pub steps: u64,
    /// Wall time.
    pub seconds: f64,
    /// Mean negative logprob of the answers in the last step, nats a token.
    pub loss: f64,
    /// Greedy accuracy on held-out problems of the weights as they were written.
    pub eval_after: Option<f64>,
}

/// Trains on demonstrations and writes bf16 weights to `run.out`.
///
/// # Errors
/// Whatever keeps it from starting or stops it; nothing but a lock is in `run.out` before the end, and nothing is left of it.
pub fn sft(recipe: &SftRecipe, overwrite: bool, shutdown: &Shutdown) -> Result<SftOutcome, RunError> {
    with_deep_stack(|| {
        let began = Instant::now();
        let out = &recipe.run.out;
        // Held from now on: whoever else would write there is refused, and not what takes hours to train.
        let held = hold_for_model(out)?;
        if model_dir::has_weights(out) && !overwrite {
            return Err(RunError::OutTaken { path: out.clone() });
        }
        let progress = Progress::stderr();
        let (config, policy, source_dir, tokenizer_path) = load_model(recipe, &progress)?;
        let task = TaskParts::load(&recipe.task, tokenizer_path, config.vocab_size, None, SystemTime::now())?;
        let mut trainer = SftTrainer::new(policy, &recipe.sft, MICRO_BATCH_TOKENS);
        let loss = train(recipe, &task, &mut trainer, (&progress, shutdown))?;
        let companions = [source_dir, tokenizer_path];
        let policy = trainer.policy();
        let staged = Staged::write(held, &companions, (policy.config(), policy), Dtype::Bf16)?;
        if overwrite {
            staged.publish()?
        } else {
            staged.publish_new()?
        }
        let eval_after = evaluate(recipe, &task, &progress)?;
        Ok(SftOutcome { steps: recipe.sft.steps, seconds: began.elapsed().as_secs_f64(), loss, eval_after })
    })
}

type Loaded<'a> = (ModelConfig, Policy, &'a Path, &'a Path);

fn load_model<'a>(recipe: &'a SftRecipe, progress: &Progress) -> Result<Loaded<'a>, RunError> {
    match &recipe.model {
        NewOrExistingModel::New(new) => {
            let config = ModelConfig::read(&new.config)?;
            let policy = Policy::load(&FreshWeights::new(&config, recipe.run.seed), &config)?;
            let dir = new.config.parent().unwrap_or(Path::new(""));
            Ok((config, policy, dir, new.tokenizer_path()))
        }
        NewOrExistingModel::Existing(model) => {
            let (config, policy) = load_policy(&model_dir::open(&model.path)?, progress)?;
            Ok((config, policy, &model.path, model.tokenizer_path()))
        }
    }
}

fn train(
    recipe: &SftRecipe,
    task: &TaskParts,
    trainer: &mut SftTrainer,
    (progress, shutdown): (&Progress, &Shutdown),
) -> Result<f64, RunError> {
    let mut demonstrations = Demonstrations {
        problems: &task.dataset.train,
        tokenizer: &task.tokenizer,
        order: PromptOrder::new(recipe.run.seed, task.dataset.train.len())?,
        rng: ChaCha8Rng::seed_from_u64(recipe.run.seed),
        carry_dropped: recipe.sft.carry_dropped,
        cursor: 0,
    };
    let bar = progress.bar(BarKind::Train, recipe.sft.steps);
    let mut loss = f64::NAN;
    for step in 1..=recipe.sft.steps {
        let batch = (0..recipe.sft.batch).map(|_| demonstrations.next()).collect::<Result<Vec<_>, _>>()?;
        let examples: Vec<_> = batch
            .iter()
            .map(|(tokens, answer_start)| Example { tokens, answer_start: *answer_start })
            .collect();
        let stats = trainer.step(&examples)?;
        loss = stats.loss;
        bar.inc(1);
        bar.tokens(stats.n_inputs as u64);
        if step % LINE_EVERY == 0 || step == recipe.sft.steps {
            progress.line(&format!(
                "sft step {step}/{}  loss {loss:.4}  balance {:.3}  grad {:.3}  lr {:.2e}",
                recipe.sft.steps, stats.load_balance, stats.grad_norm, stats.lr
            ));
        }
        if shutdown.is_requested() && step < recipe.sft.steps {
            return Err(RunError::Discarded { step });
        }
    }
    bar.finish();
    Ok(loss)
}

/// Endless demonstrations, keyed by a seed.
struct Demonstrations<'a> {
    problems: &'a [Problem],
    tokenizer: &'a Tokenizer,
    order: PromptOrder,
    rng: ChaCha8Rng,
    carry_dropped: f64,
    cursor: u64,
}

impl Demonstrations<'_> {
    /// Prompt, answer and end token, with the position where the answer starts.
    fn next(&mut self) -> Result<(Vec<TokenId>, usize), RunError> {
        let problem = &self.problems[self.order.prompt(self.cursor)];
        self.cursor += 1;
        let slips = self.rng.random_bool(self.carry_dropped);
        let answer = match &problem.wrong {
            Some(wrong) if slips => wrong,
            _ => &problem.answer,
        };
        let mut tokens = self.tokenizer.encode(&problem.prompt)?;
        let answer_start = tokens.len();
        tokens.extend(self.tokenizer.encode(answer)?);
        tokens.push(self.tokenizer.eos());
        Ok((tokens, answer_start))
    }
}

/// Greedy accuracy, in bf16, of the weights that were written.
fn evaluate(recipe: &SftRecipe, task: &TaskParts, progress: &Progress) -> Result<Option<f64>, RunError> {
    let n_problems = recipe.sft.eval_problems.min(task.dataset.held_out.len());
    if n_problems == 0 {
        return Ok(None);
    }
    let numbers = (RecipeDtype::Bf16, Numerics::Exact);
    let config = EngineConfig::from_recipe(&EngineSection::default(), numbers, false);
    let written = Checkpoint::open(&recipe.run.out)?;
    let mut engine = Engine::new(config, written.config(), &written, PolicyVersion(0))?;
    let stop_tokens: Arc<[TokenId]> = task.tokenizer.stop_tokens().into();
    let held = Held {
        problems: &task.dataset.held_out[..n_problems],
        reward: &*task.reward,
        stop_tokens: &stop_tokens,
        max_new_tokens: recipe.sft.max_new_tokens,
    };
    let bar = progress.bar(BarKind::Eval, n_problems as u64);
    Ok(Some(greedy_accuracy(&mut engine, &task.tokenizer, &held, &|tokens, answers| {
        bar.add(tokens, answers)
    })?))
}
