//! `r3 check`: reads a recipe and nothing else.

use r3_recipe::error::{Problem, RecipeError};
use r3_recipe::recipe::{Recipe, SftRecipe};

use crate::args::RecipeArgs;
use crate::error::CliError;
use crate::output;

/// Check a recipe of `r3 run` or `r3 sft`, without opening the model or a device
///
/// Every key, type and range is checked, and whether keys fit each other. Errors name line, column and what to write
/// instead.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Print the whole recipe as YAML, with --set applied and every default written out
    #[arg(long)]
    print: bool,
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        let (yaml, command) = self.read()?;
        let name = self.recipe.recipe.display();
        let verdict = format!("{name}: ok, a recipe for {command}");
        if self.print {
            output::print(&format!("# {verdict}\n{yaml}"))
        } else {
            output::print(&format!("{verdict}\n"))
        }
    }

    /// The recipe as YAML, and the command it is for: its sections tell.
    fn read(&self) -> Result<(String, &'static str), RecipeError> {
        let RecipeArgs { recipe, set } = &self.recipe;
        match Recipe::load(recipe, set) {
            Err(RecipeError::Invalid { problem, .. }) if matches!(*problem, Problem::OtherCommand { .. }) => {
                Ok((SftRecipe::load(recipe, set)?.recipe.to_yaml(), "r3 sft"))
            }
            loaded => Ok((loaded?.recipe.to_yaml(), "r3 run")),
        }
    }
}
