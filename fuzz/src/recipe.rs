//! Recipes: what is read prints what reads the same, and what is refused says where.

use std::path::Path;

use r3_recipe::bytes::Bytes;
use r3_recipe::error::RecipeError;
use r3_recipe::place::Place;
use r3_recipe::recipe::{Loaded, Recipe, SftRecipe};
use r3_recipe::task::{Jsonl, Reward, Task};

use crate::bounded::bounded;
use crate::input::Input;
use crate::said::check_said;

/// Name of the recipe in messages.
const NAME: &str = "fuzzed.yaml";

/// The recipe that [`overrides`] are put over.
const BASE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes/tiny.yaml");

/// Reading a recipe may hold the ten thousand values that aliases can make of a few, and [`READ_FACTOR`] bytes for each of
/// its own: a value may be one character, and knows where it stands.
const READ_BYTES: usize = 1 << 21;
const READ_FACTOR: usize = 1 << 8;

/// Any text as a recipe of either kind.
///
/// # Panics
/// If a property does not hold.
pub fn text(input: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(input) else { return false };
    let recipe = bounded(input, READ_BYTES, READ_FACTOR, || Recipe::parse(text, NAME));
    match &recipe {
        Ok(recipe) => check_recipe(recipe),
        Err(error) => check_refusal(error, &[(NAME, text)]),
    }
    let sft = bounded(input, READ_BYTES, READ_FACTOR, || SftRecipe::parse(text, NAME));
    match &sft {
        Ok(sft) => {
            let yaml = sft.to_yaml();
            assert_eq!(SftRecipe::parse(&yaml, NAME).expect(&yaml), *sft, "{yaml}");
        }
        Err(error) => check_refusal(error, &[(NAME, text)]),
    }
    recipe.is_ok() || sft.is_ok()
}

/// Lines of text as `--set` arguments over a good recipe.
///
/// # Panics
/// If a property does not hold.
pub fn overrides(input: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(input) else { return false };
    let arguments: Vec<String> = text.split('\n').map(str::to_owned).collect();
    let loaded = bounded(input, READ_BYTES, READ_FACTOR, || Recipe::load(Path::new(BASE), &arguments));
    match &loaded {
        Ok(Loaded { recipe, .. }) => check_recipe(recipe),
        Err(error) => {
            let base = std::fs::read_to_string(BASE).expect("the recipe is there");
            let arguments = arguments.iter().map(|argument| ("--set", argument.as_str()));
            let sources: Vec<_> = std::iter::once((BASE, base.as_str())).chain(arguments).collect();
            check_refusal(error, &sources);
        }
    }
    loaded.is_ok()
}

/// A good recipe with numbers and texts made of the bytes.
///
/// # Panics
/// If a property does not hold.
pub fn values(input: &[u8]) -> bool {
    let mut recipe = Recipe::load(Path::new(BASE), &[]).expect("a good recipe").recipe;
    let mut input = Input(input);
    let mut number = || f64::from_bits(input.u64());
    recipe.rollout.temperature = number();
    recipe.train.lr = number();
    recipe.train.betas = [number(), number()];
    recipe.train.weight_decay = number();
    recipe.run.seed = input.u64();
    recipe.run.save_every = input.u64();
    recipe.engine.kv_memory = Bytes(input.u64());
    recipe.rollout.stop_token_ids = Some((0..input.within(0, 3)).map(|_| input.u32()).collect());
    let texts = String::from_utf8_lossy(input.0);
    let mut texts = texts.split('\0').map(str::to_owned);
    let mut text = || texts.next().unwrap_or_else(|| "text".into());
    recipe.model.path = text().into();
    recipe.run.out = text().into();
    recipe.task = Task::Jsonl(Jsonl {
        train: text().into(),
        eval: Some(text().into()),
        prompt_key: text(),
        answer_key: text(),
        held_out: 0,
        reward: Reward::ExactMatch,
    });
    let is_good = recipe.check().is_ok();
    if is_good {
        check_recipe(&recipe);
    }
    is_good
}

fn check_recipe(recipe: &Recipe) {
    assert_eq!(recipe.check(), Ok(()));
    let yaml = recipe.to_yaml();
    match Recipe::parse(&yaml, NAME) {
        Ok(again) => assert_eq!(again, *recipe, "{yaml}"),
        Err(error) => panic!("{error}\n{yaml}"),
    }
}

/// A refusal says something about a place that is in one of the `sources`, by name and text.
fn check_refusal(error: &RecipeError, sources: &[(&str, &str)]) {
    check_said(&error.to_string(), &error.hint());
    let RecipeError::Invalid { place: Some(place), .. } = error else { return };
    let is_in = |(name, text): &(&str, &str)| *name == place.name && lies_in(place, text);
    assert!(sources.iter().any(is_in), "{place:?}");
}

fn lies_in(place: &Place, text: &str) -> bool {
    let text = text.strip_prefix('\u{feff}').filter(|_| place.name != "--set").unwrap_or(text);
    // YAML ends a line with a carriage return, too.
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let line = text.split('\n').nth(place.line - 1);
    // A missing key may be noticed where a line has ended.
    let columns = 1..=place.text.chars().count() + 1;
    line == Some(&place.text) && columns.contains(&place.column) && place.width >= 1
}
