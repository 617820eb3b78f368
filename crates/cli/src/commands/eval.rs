//! `r3 eval`: accuracy on held-out problems.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use r3_core::count::counted;
use r3_orchestrator::eval::evaluate;
use r3_recipe::check::Rule;
use r3_recipe::error::{Problem, RecipeError};
use r3_recipe::recipe::Recipe;
use serde::Serialize;

use crate::args::RecipeArgs;
use crate::error::CliError;
use crate::output;

/// Measure how many held-out problems a model solves
///
/// Answers the recipe's held-out problems greedily, in its `rollout.dtype`: the number that `r3 run` shows before and
/// after training.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Evaluate this model instead of the recipe's: a Hugging Face directory, a checkpoint, or a run, whose newest
    /// checkpoint is taken
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Held-out problems to answer; the recipe's `eval.problems` by default
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    problems: Option<NonZeroUsize>,
    /// Print one line of JSON: accuracy, problems, seconds
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct EvalLine {
    accuracy: f64,
    problems: usize,
    seconds: f64,
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        let RecipeArgs { recipe, set } = &self.recipe;
        let mut set = set.clone();
        set.extend(self.problems.map(|problems| format!("eval.problems={problems}")));
        let mut recipe = Recipe::load(recipe, &set).map_err(|error| self.refusal(error))?.recipe;
        if let Some(model) = &self.model {
            recipe.model.path.clone_from(model);
        }
        if recipe.eval.problems == 0 {
            return Err(CliError::NoProblems);
        }
        let evaluation = evaluate(&recipe)?;
        let (accuracy, problems, seconds) = (evaluation.accuracy, evaluation.problems, evaluation.seconds);
        if self.json {
            return output::print_json(&EvalLine { accuracy, problems, seconds });
        }
        output::print(&format!(
            "{:.1} % of {} in {seconds:.1} s\n",
            100.0 * accuracy,
            counted(problems, "held-out problem")
        ))
    }

    /// What is wrong with a key that an argument here says is said of the argument.
    fn refusal(&self, error: RecipeError) -> CliError {
        if self.problems.is_some()
            && let RecipeError::Invalid { problem, .. } = &error
            && let Problem::Rule(Rule::TooFewHeldOut { problems, held_out, .. }) = **problem
        {
            return CliError::TooFewHeldOut { problems, held_out };
        }
        error.into()
    }
}
