//! `r3 sft`: a supervised warm start.

use r3_core::count::counted;
use r3_orchestrator::error::RunError;
use r3_orchestrator::sft::sft;
use r3_recipe::recipe::SftRecipe;

use crate::args::RecipeArgs;
use crate::commands::run::listen;
use crate::error::CliError;
use crate::output;

/// Train a model on the task's own answers: a warm start for `r3 run`
///
/// Starts from random weights or from a model, shows it prompts with their answers, and writes a Hugging Face directory
/// with bf16 weights and the tokenizer to `run.out`, at the end and not before. An interrupted warm start leaves nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = crate::EXIT_CODES)]
pub(crate) struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Replace the model that `run.out` holds
    #[arg(long)]
    overwrite: bool,
    /// End stdout with one line of JSON: steps, seconds, loss, eval_after
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        let recipe = SftRecipe::load(&self.recipe.recipe, &self.recipe.set)?.recipe;
        let shutdown = listen()?;
        let out = recipe.run.out.display();
        let outcome = sft(&recipe, self.overwrite, &shutdown).map_err(|error| match error {
            RunError::OutTaken { path } => CliError::OutTaken { path, what: "a model" },
            error => error.into(),
        })?;
        if self.json {
            return output::print_json(&outcome);
        }
        let solved = match outcome.eval_after {
            Some(accuracy) => format!("; {:.1} % of held-out problems solved", 100.0 * accuracy),
            None => String::new(),
        };
        output::print(&format!(
            "wrote {out}: {} in {:.1} s, loss {:.4} nats a token{solved}\n",
            counted(outcome.steps, "step"),
            outcome.seconds,
            outcome.loss
        ))
    }
}
