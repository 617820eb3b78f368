//! `r3 compare`: one seed, replay on and off.

use r3_orchestrator::compare::compare;
use r3_orchestrator::error::RunError;
use r3_orchestrator::run::RunOptions;
use r3_recipe::recipe::Recipe;

use crate::args::RecipeArgs;
use crate::commands::run::listen;
use crate::error::CliError;
use crate::output;

/// Run a recipe twice, with replay on and off, and compare
///
/// Same seed, same data: what differs is whether the trainer takes the experts that the rollout took. Prints one table,
/// and writes `report.html` into `run.out`, with plots of KL, |Δ logprob|, route disagreement and reward. The two runs
/// lie in `run.out/on` and `run.out/off`.
#[derive(Debug, clap::Args)]
#[command(after_help = crate::EXIT_CODES)]
pub(crate) struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Discard the comparison that `run.out` holds
    #[arg(long)]
    overwrite: bool,
    /// End stdout with one line of JSON, the numbers of both runs under `on` and `off`; docs/json.md explains them
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        let recipe = Recipe::load(&self.recipe.recipe, &self.recipe.set)?.recipe;
        let options =
            RunOptions { resume: false, overwrite: self.overwrite, shutdown: listen()?, reward: None };
        let compared = compare(&recipe, &options).map_err(|error| match error {
            RunError::Interrupted { .. } => CliError::ComparisonInterrupted,
            RunError::OutTaken { .. } => {
                CliError::OutTaken { path: recipe.run.out.clone(), what: "a comparison" }
            }
            error => error.into(),
        })?;
        if let Ok(report) = &compared.report {
            output::message(&format!("report: {}\n", report.display()));
        }
        let table = compared.comparison.table();
        if self.json {
            output::message(&table);
            output::print_json(&compared.comparison)?;
        } else {
            output::print(&table)?;
        }
        compared.report?;
        Ok(())
    }
}
