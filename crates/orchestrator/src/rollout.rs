//! `r3 rollout`: completions, or whole conversations, with their routes, to a file.

use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use r3_core::count::counted;
use r3_core::ids::{GroupId, PolicyVersion};
use r3_engine::config::EngineConfig;
use r3_engine::engine::Engine;
use r3_engine::error::EngineError;
use r3_engine::sampler::Sampling;
use r3_kernels::gemm::Dtype;
use r3_recipe::numerics::Numerics as RecipeNumerics;
use r3_recipe::rollout::{Dtype as RecipeDtype, Engine as EngineSection};
use r3_recipe::task::Task;
use r3_scheduler::error::SchedulerError;
use r3_tasks::conversation::{Conversation, Opening};
use r3_tasks::dataset::Dataset;
use r3_tasks::reward::Reward;
use r3_tasks::script::{self, Script};
use r3_tasks::tokenizer::Tokenizer;
use r3_telemetry::format::{duration, short};
use r3_telemetry::progress::{BarKind, Progress};
use r3_wire::record::SamplingParams;
use serde::Serialize;
use serde_json::Map;

use crate::error::RunError;
use crate::memory::{memory_line, support_line};
use crate::model_dir;
use crate::out_file::OutFile;
use crate::rollouts::Rollouts;
use crate::setup::{self, TaskParts};
use crate::shutdown::Shutdown;

/// Where prompts come from.
#[derive(Clone, Copy, Debug)]
pub enum PromptSource<'a> {
    /// A file of JSON lines, one conversation each; [`Script`] says how.
    File(&'a Path),
    /// The training problems of a recipe's task, in their order. Completions are scored.
    Task(&'a Task),
}

/// How to sample.
#[derive(Clone, Debug)]
pub struct RolloutOptions {
    /// Prompts to take, the first ones; all of them by default.
    pub limit: Option<usize>,
    /// Completions of a prompt, `G`.
    pub group_size: u32,
    /// Tokens of a turn at most, at least 1.
    pub max_new_tokens: usize,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Keys the draws.
    pub seed: u64,
    /// Format of weights, keys and values.
    pub dtype: Dtype,
    /// Bytes for keys, values and routes of all resident tokens.
    pub kv_bytes: u64,
    /// Sequences decoded at once.
    pub max_running: usize,
    /// Position of the first route row to write; `None` for no routes, and then none are captured.
    pub routes_start: Option<usize>,
}

impl RolloutOptions {
    /// How tokens are drawn, as the engine takes it.
    pub(crate) fn sampling(&self) -> Sampling {
        let SamplingParams { temperature, sample_top_k, top_p, min_p } = self.sampling;
        Sampling { temperature, sample_top_k, top_p, min_p }
    }

    /// What a recipe's engine would be, with these sizes.
    fn engine(&self) -> EngineConfig {
        let captures = self.routes_start.is_some();
        let numbers = (RecipeDtype::default(), RecipeNumerics::Exact);
        EngineConfig {
            kv_bytes: self.kv_bytes,
            max_running: self.max_running,
            dtype: self.dtype,
            ..EngineConfig::from_recipe(&EngineSection::default(), numbers, captures)
        }
    }
}

/// What was sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RolloutSummary {
    /// Conversations sampled to their end: prompts times group size.
    pub rollouts: u64,
    /// Lines written: a rollout is one sample, and one more for every fork.
    pub samples: u64,
    /// Turns sampled.
    pub turns: u64,
    /// Turns that no room was left for, in the model's positions or the KV memory.
    pub turns_left_out: u64,
    /// Times that the chat template rewrote history, so that a new sample began.
    pub trajectory_forks: u64,
    /// Tokens sampled.
    pub sampled_tokens: u64,
    /// Tokens computed, prompts and given ones included.
    pub computed_tokens: u64,
    /// Tokens that were found in the prefix cache instead.
    pub cached_tokens: u64,
    /// Route rows that were copied out: every row once, however many turns follow it.
    pub route_rows: u64,
    /// Their bytes.
    pub route_bytes: u64,
    /// Wall time, loading included.
    pub seconds: f64,
    /// Sampled tokens over the seconds of sampling.
    pub tokens_per_second: f64,
}

impl RolloutSummary {
    /// A few lines for people.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { rollouts, samples, turns, trajectory_forks, sampled_tokens, .. } = self;
        let mut text = format!(
            "{} in {}: {} sampled ({} tok/s), {} computed, {} found in the prefix cache\n\
             {} in {}, trajectory_forks {trajectory_forks}; {}, {}B\n",
            counted(*rollouts, "rollout"),
            duration(self.seconds),
            counted(*sampled_tokens, "token"),
            short(self.tokens_per_second),
            self.computed_tokens,
            self.cached_tokens,
            counted(*turns, "turn"),
            counted(*samples, "sample"),
            counted(self.route_rows, "route row"),
            short(self.route_bytes as f64),
        );
        if self.turns_left_out > 0 {
            text += &format!("left out, for want of room: {}\n", counted(self.turns_left_out, "turn"));
        }
        text
    }
}

/// Samples `source` with the model of `model`, a directory, a checkpoint or a run, into `out`, in the order of the
/// prompts, until `shutdown` is asked for.
///
/// # Errors
/// If model, tokenizer or prompts cannot be used, or do not fit each other or the KV memory; or `out` cannot be written; or
/// that it was interrupted, and where the rollouts are that were whole by then.
pub fn rollout(
    model: &Path,
    source: PromptSource<'_>,
    options: &RolloutOptions,
    (mut out, shutdown): (OutFile, &Shutdown),
) -> Result<RolloutSummary, RunError> {
    let began = Instant::now();
    let dir = model_dir::resolve(model)?;
    let checkpoint = model_dir::open(&dir)?;
    let config = checkpoint.config();
    let work = Work::load(source, &dir, config.vocab_size, options.limit)?;
    let engine = options.engine();
    let first_turn = (work.check_prompts(options.routes_start)?, options.max_new_tokens);
    setup::check_kv(&engine, config, first_turn)?;
    let budget = engine.budget(config)?;
    let max_support = options.sampling().max_support(config.vocab_size);
    let support_bytes = setup::check_supports(&budget, options.max_new_tokens, max_support)?;
    let longest = match work.has_turns() {
        true => config.max_positions.min(budget.capacity_tokens()),
        false => first_turn.0 + first_turn.1,
    };
    let progress = Progress::stderr();
    progress.line(&memory_line(&budget, longest));
    if let Some(bytes) = support_bytes {
        progress.line(&support_line(bytes));
    }

    let engine = Engine::new(engine, config, &checkpoint, PolicyVersion(0))?;
    let sampling_began = Instant::now();
    let n_rollouts = work.scripts.len() as u64 * u64::from(options.group_size);
    let bar = progress.bar(BarKind::Rollout, n_rollouts);
    let mut summary = Rollouts::new(engine, &work, options).sample(&mut out, &bar, shutdown)?;
    if summary.rollouts < n_rollouts {
        let (n_written, path) = (summary.rollouts, out.name().to_path_buf());
        return Err(match out.leave()? {
            Some(path) => RunError::Unfinished { n_written, n_rollouts, path },
            None => RunError::CutOff { n_written, n_rollouts, path },
        });
    }
    bar.finish();
    out.commit()?;
    summary.seconds = began.elapsed().as_secs_f64();
    summary.tokens_per_second =
        summary.sampled_tokens as f64 / sampling_began.elapsed().as_secs_f64().max(1e-9);
    Ok(summary)
}

/// The text side: what to sample, and how it is judged.
pub(crate) struct Work {
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) scripts: Vec<Script>,
    /// Of a task: its problems, one a script, and what judges their completions.
    pub(crate) judged: Option<(Arc<Dataset>, Arc<dyn Reward>)>,
}

impl Work {
    fn load(
        source: PromptSource<'_>,
        model: &Path,
        vocab_size: usize,
        limit: Option<usize>,
    ) -> Result<Self, RunError> {
        let mut work = match source {
            PromptSource::File(path) => {
                let tokenizer = Arc::new(Tokenizer::load(model, vocab_size)?);
                Self { scripts: script::read(path, &tokenizer)?, tokenizer, judged: None }
            }
            PromptSource::Task(task) => {
                let TaskParts { tokenizer, dataset, reward, .. } =
                    TaskParts::load(task, model, vocab_size, None, SystemTime::now())?;
                let scripts = dataset.train.iter().map(|problem| Script::prompt(problem.prompt.clone()));
                Self { scripts: scripts.collect(), tokenizer, judged: Some((dataset, reward)) }
            }
        };
        work.scripts.truncate(limit.unwrap_or(usize::MAX));
        Ok(work)
    }

    /// A conversation of script `index`, before its first turn.
    pub(crate) fn begin(&self, index: usize) -> Result<Conversation, RunError> {
        let opening: Opening = self.scripts[index].opening.clone();
        Ok(Conversation::begin(opening, &Map::new(), &self.tokenizer)?)
    }

    /// Tokens of the longest prompt. Refuses routes that are to begin after a prompt has ended.
    fn check_prompts(&self, routes_start: Option<usize>) -> Result<usize, RunError> {
        let mut longest = 0;
        for index in 0..self.scripts.len() {
            let prompt_tokens = self.tokenizer.encode(self.begin(index)?.prompt())?.len();
            if let Some(start) = routes_start.filter(|&start| start > prompt_tokens) {
                let group = GroupId(index as u64);
                let late = SchedulerError::RoutesStart { group, start, prompt_tokens };
                return Err(EngineError::from(late).into());
            }
            longest = longest.max(prompt_tokens);
        }
        Ok(longest)
    }

    fn has_turns(&self) -> bool {
        self.scripts.iter().any(|script| !script.turns.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_each_is_said_as_one() {
        let one = RolloutSummary {
            rollouts: 1,
            samples: 1,
            turns: 1,
            turns_left_out: 1,
            sampled_tokens: 1,
            route_rows: 1,
            ..RolloutSummary::default()
        };
        assert_eq!(
            one.text(),
            "1 rollout in 0 ms: 1 token sampled (0 tok/s), 0 computed, 0 found in the prefix cache\n\
             1 turn in 1 sample, trajectory_forks 0; 1 route row, 0B\n\
             left out, for want of room: 1 turn\n"
        );
        let many = RolloutSummary { rollouts: 2, samples: 3, turns: 4, sampled_tokens: 0, ..one };
        assert_eq!(
            many.text(),
            "2 rollouts in 0 ms: 0 tokens sampled (0 tok/s), 0 computed, 0 found in the prefix cache\n\
             4 turns in 3 samples, trajectory_forks 0; 1 route row, 0B\n\
             left out, for want of room: 1 turn\n"
        );
    }
}
