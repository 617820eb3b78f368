//! What the tests of errors share.

use r3_recipe::error::RecipeError;
use r3_recipe::recipe::Recipe;

/// A good recipe in both of YAML's styles.
pub(crate) const GOOD: &str = "\
model: { path: assets/tiny-moe }
task: { arithmetic: { digits: 2 } }
rollout: { groups: 16, group_size: 8, max_new_tokens: 16 }
algorithm: { dapo: { clip_low: 0.2, clip_high: 0.28 } }
train:
  lr: 3.0e-4
  mini_steps: 2
run: { steps: 40, out: runs/tiny }
";

/// An error as the command line prints it.
pub(crate) fn report(error: &RecipeError) -> String {
    format!("error: {error}\n\nhint: {}", error.hint())
}

/// The error of a text.
pub(crate) fn parse(text: &str) -> String {
    report(&Recipe::parse(text, "x.yaml").expect_err("the recipe is wrong"))
}

/// The error of the good recipe in which `from` became `to`.
pub(crate) fn with(from: &str, to: &str) -> String {
    assert_eq!(GOOD.matches(from).count(), 1, "{from}");
    parse(&GOOD.replace(from, to))
}
