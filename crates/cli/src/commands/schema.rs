//! `r3 schema`: recipes for machines and readers.

use r3_recipe::reference;

use crate::error::CliError;
use crate::output;

/// Print the JSON schema of recipes, for editors, or the reference of every key
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The schema of recipes for `r3 sft`, instead of those for `r3 run`
    #[arg(long, conflicts_with = "markdown")]
    sft: bool,
    /// The reference of every key of both, in Markdown: docs/recipe.md
    #[arg(long)]
    markdown: bool,
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        if self.markdown {
            return output::print(&reference::reference_markdown());
        }
        let schema = if self.sft { reference::sft_schema() } else { reference::schema() };
        output::print(&format!("{schema:#}\n"))
    }
}
