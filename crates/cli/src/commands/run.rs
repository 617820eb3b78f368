//! `r3 run`: trains.

use r3_orchestrator::run::{RunOptions, run};
use r3_orchestrator::shutdown::Shutdown;
use r3_recipe::recipe::Recipe;
use r3_telemetry::summary::table;

use crate::args::RecipeArgs;
use crate::error::CliError;
use crate::output;

/// Train the policy of a recipe, from its first step or from a checkpoint
///
/// Samples completions, scores them, trains on them with the rollout's routes replayed, loads the new weights into
/// the rollout engine, and starts over. Shows one line a step, and a table of the whole run at the end. Into
/// `run.out` go checkpoints (`step-000010`, Hugging Face directories with the optimiser's state beside the weights),
/// `metrics.jsonl` (one object a step) and `recipe.yaml` (as it was run).
///
/// Ctrl-C, SIGTERM or a terminal that is gone (SIGHUP) finishes the step, saves it and exits with 130; --resume continues
/// from there. Under nohup a run outlives its terminal.
#[derive(Debug, clap::Args)]
#[command(after_help = crate::EXIT_CODES)]
pub(crate) struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Continue from the newest checkpoint in `run.out`
    #[arg(long, conflicts_with = "overwrite")]
    resume: bool,
    /// Discard the run that `run.out` holds
    #[arg(long)]
    overwrite: bool,
    /// End stdout with one line of JSON, the run in a dozen numbers; docs/json.md explains them
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        let recipe = Recipe::load(&self.recipe.recipe, &self.recipe.set)?.recipe;
        let options =
            RunOptions { resume: self.resume, overwrite: self.overwrite, shutdown: listen()?, reward: None };
        let outcome = run(&recipe, &options)?;
        let table = table(&outcome.records, outcome.summary.seconds);
        if self.json {
            output::message(&table);
            output::print_json(&outcome.summary)
        } else {
            output::print(&table)
        }
    }
}

/// Ctrl-C, SIGTERM and SIGHUP, from now on.
pub(crate) fn listen() -> Result<Shutdown, CliError> {
    Shutdown::on_signals("finishing the step; once more ends at once and loses it")
        .map_err(|source| CliError::Signals { source })
}
