//! Whole recipes: those the project ships, what defaults mean, and that no text can bring the reader down.

use std::fs;
use std::path::{Path, PathBuf};

use r3_recipe::algorithm::{Algorithm, Dapo, DynamicSampling, Grpo};
use r3_recipe::bytes::Bytes;
use r3_recipe::error::RecipeError;
use r3_recipe::learning::Train;
use r3_recipe::numerics::Numerics;
use r3_recipe::recipe::{Recipe, SftRecipe};
use r3_recipe::reference;
use r3_recipe::rollout::{Dtype, Engine, InFlight, Refit, ReplayMode, RouterReplay};
use r3_recipe::run::{Eval, Metrics, Ring};
use r3_recipe::task::{Arithmetic, Reward, Task};

const FULL: &str = "\
model: { path: assets/tiny-moe }
task: { arithmetic: { digits: 2 } }
rollout: { groups: 16, group_size: 8, max_new_tokens: 16, temperature: 1.0, dtype: bf16 }
engine: { kv_memory: 64MiB, block_tokens: 16, max_batch_tokens: 2048, max_running: 128, prefix_cache: true }
router_replay: { mode: r3 }                  # r3 | r2 | off
algorithm: { dapo: { clip_low: 0.2, clip_high: 0.28 } }
train: { dtype: f32, lr: 3.0e-4, mini_steps: 2 }
run: { steps: 40, seed: 7, out: runs/tiny }
";

const SHORT: &str = "\
model: { path: m }
task: { arithmetic: {} }
rollout: { groups: 1, group_size: 2, max_new_tokens: 1 }
algorithm: { grpo: {} }
run: { steps: 1, out: o }
";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn parse(text: &str) -> Recipe {
    Recipe::parse(text, "x.yaml").unwrap_or_else(|error| panic!("{error}\n\nhint: {}", error.hint()))
}

fn load(text: &str, overrides: &[&str]) -> Recipe {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("x.yaml");
    fs::write(&path, text).expect("a written recipe");
    let overrides: Vec<String> = overrides.iter().map(|argument| (*argument).to_owned()).collect();
    let loaded = Recipe::load(&path, &overrides).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(loaded.text, text);
    loaded.recipe
}

#[test]
fn numerics_are_exact_where_they_can_be() {
    for (dtype, expected) in [("f32", Numerics::Exact), ("bf16", Numerics::Fast)] {
        let recipe = load(SHORT, &[&format!("rollout.dtype={dtype}"), "train.dtype=f32"]);
        assert_eq!((recipe.numerics, recipe.resolved_numerics()), (None, expected));
    }
    let recipe = load(SHORT, &["rollout.dtype=bf16", "train.dtype=bf16"]);
    assert_eq!(recipe.resolved_numerics(), Numerics::Exact);
    let recipe = load(SHORT, &["rollout.dtype=f32", "numerics=fast"]);
    assert_eq!(recipe.resolved_numerics(), Numerics::Fast);
}

#[test]
fn a_full_recipe_says_what_it_says() {
    let recipe = parse(FULL);
    assert_eq!(recipe.model.path, Path::new("assets/tiny-moe"));
    assert_eq!(recipe.model.tokenizer_path(), Path::new("assets/tiny-moe"));
    assert_eq!((recipe.rollout.groups, recipe.rollout.group_size), (16, 8));
    assert_eq!(recipe.rollout.dtype, Dtype::Bf16);
    assert_eq!(recipe.engine.kv_memory, Bytes::mib(64));
    assert_eq!(recipe.router_replay.mode, ReplayMode::R3);
    assert_eq!(recipe.algorithm, Algorithm::Dapo(Dapo::default()));
    assert_eq!((recipe.train.lr, recipe.train.mini_steps), (3e-4, 2));
    assert_eq!((recipe.run.steps, recipe.run.seed), (40, 7));
}

#[test]
fn what_is_left_out_takes_its_default() {
    let recipe = parse(SHORT);
    let arithmetic =
        Arithmetic { digits: 2, held_out: 1000, seed: 0, reward: Reward::ExactMatch, attempts: 1 };
    assert_eq!(recipe.task, Task::Arithmetic(arithmetic));
    assert_eq!(recipe.rollout.temperature, 1.0);
    assert_eq!(recipe.rollout.stop_token_ids, None);
    assert_eq!(
        (recipe.rollout.over_sampling_groups, recipe.refit),
        (0, Refit { in_flight: InFlight::Continue })
    );
    assert_eq!(recipe.engine, Engine::default());
    assert_eq!(recipe.router_replay, RouterReplay::default());
    assert_eq!(recipe.algorithm, Algorithm::Grpo(Grpo { clip: 0.2, std_normalise: true }));
    assert_eq!(recipe.train, Train::default());
    assert_eq!(recipe.ring, Ring { bytes: Bytes::mib(64), deadline_s: 600 });
    assert_eq!(recipe.eval, Eval { problems: 512, every: 0, max_new_tokens: None });
    assert_eq!(recipe.metrics, Metrics::default());
    assert_eq!((recipe.run.seed, recipe.run.save_every, recipe.run.keep_last), (0, 10, 2));
}

#[test]
fn the_word_off_is_a_mode_and_not_a_boolean() {
    let recipe = parse(&FULL.replace("mode: r3", "mode: off"));
    assert_eq!(recipe.router_replay.mode, ReplayMode::Off);
}

#[test]
fn null_turns_a_listener_off() {
    assert_eq!(parse(&format!("{SHORT}metrics: {{ listen: null }}")).metrics.listen, None);
}

#[test]
fn aliases_and_merge_keys_work() {
    let text = SHORT.replace("groups: 1, group_size: 2", "groups: &n 2, group_size: *n");
    assert_eq!(parse(&text).rollout.groups, 2);
}

#[test]
fn a_whole_number_is_a_number() {
    assert_eq!(parse(&SHORT.replace("grpo: {}", "grpo: { clip: 1 }")).algorithm, {
        Algorithm::Grpo(Grpo { clip: 1.0, ..Grpo::default() })
    });
}

#[test]
fn the_last_override_wins_and_the_file_fills_the_rest() {
    let recipe = load(FULL, &["train.lr=1e-5", "train.lr=2e-5", "engine.kv_memory=1GiB", "run.out=runs/a=b"]);
    assert_eq!((recipe.train.lr, recipe.train.mini_steps), (2e-5, 2));
    assert_eq!(recipe.engine.kv_memory, Bytes(1 << 30));
    assert_eq!(recipe.run.out, Path::new("runs/a=b"));
}

#[test]
fn an_override_makes_sections_and_replaces_variants() {
    let recipe = load(SHORT, &["train.betas=[0.9, 0.95]", "algorithm={dapo: {dynamic_sampling: {}}}"]);
    assert_eq!(recipe.train.betas, [0.9, 0.95]);
    let dynamic_sampling = Some(DynamicSampling { max_batches: 10 });
    assert_eq!(recipe.algorithm, Algorithm::Dapo(Dapo { dynamic_sampling, ..Dapo::default() }));
}

#[test]
fn an_override_may_be_empty() {
    assert_eq!(load(SHORT, &["metrics.listen="]).metrics.listen, None);
}

#[test]
fn overrides_alone_can_be_a_recipe() {
    let overrides = [
        "model.path=m",
        "task={arithmetic: {}}",
        "rollout={groups: 1, group_size: 2, max_new_tokens: 1}",
        "algorithm={grpo: {}}",
        "run={steps: 1, out: o}",
    ];
    assert_eq!(load("", &overrides), parse(SHORT));
}

#[test]
fn every_algorithm_can_be_written_with_its_defaults() {
    for name in ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus"] {
        let recipe = load(SHORT, &[&format!("algorithm={{{name}: {{}}}}")]);
        assert_eq!(parse(&recipe.to_yaml()), recipe, "{name}");
    }
}

#[test]
fn dynamic_sampling_and_overlong_are_found_at_either_place() {
    let at = |prefix: &str| {
        let overlong = format!("{prefix}.overlong={{max_tokens: 16, cache_tokens: 4}}");
        load(FULL, &[&format!("{prefix}.dynamic_sampling={{max_batches: 3}}"), &overlong])
    };
    for recipe in [at("algorithm.dapo"), at("objective")] {
        let (algorithm, objective) = (&recipe.algorithm, &recipe.objective);
        assert_eq!(objective.dynamic_sampling(algorithm), Some(&DynamicSampling { max_batches: 3 }));
        assert_eq!(objective.overlong(algorithm).map(|overlong| overlong.max_tokens), Some(16));
    }
}

#[test]
fn a_recipe_survives_being_written_and_read() {
    let grown = FULL
        .replace("clip_high: 0.28", "dynamic_sampling: {}, overlong: { max_tokens: 16, cache_tokens: 4 }");
    for text in [FULL, SHORT, &grown] {
        let recipe = parse(text);
        assert_eq!(parse(&recipe.to_yaml()), recipe);
    }
}

#[test]
fn every_shipped_recipe_is_good_and_survives_being_written() {
    let mut files = 0;
    for entry in fs::read_dir(repository().join("recipes")).expect("the recipes") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        files += 1;
        if path.file_stem().is_some_and(|name| name.to_string_lossy().ends_with("-sft")) {
            let recipe = SftRecipe::load(&path, &[]).unwrap_or_else(|error| panic!("{error}")).recipe;
            assert_eq!(SftRecipe::parse(&recipe.to_yaml(), "written").expect("a good recipe"), recipe);
        } else {
            let recipe = Recipe::load(&path, &[]).unwrap_or_else(|error| panic!("{error}")).recipe;
            assert_eq!(parse(&recipe.to_yaml()), recipe);
        }
    }
    assert!(files >= 2);
}

#[test]
fn the_reference_page_is_up_to_date() {
    let path = repository().join("docs/recipe.md");
    let page = fs::read_to_string(path).unwrap_or_default();
    assert!(page == reference::reference_markdown(), "run `r3 schema --markdown > docs/recipe.md`");
}

#[test]
fn every_key_has_a_meaning() {
    for line in reference::reference_markdown().lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.split(" | ").collect();
        assert_eq!(cells.len(), 4, "{line}");
        assert!(!cells[1].is_empty() && cells[3].len() > 10, "{line}");
    }
}

#[test]
fn the_schema_knows_every_section_and_refuses_the_rest() {
    let schema = reference::schema();
    let written = serde_json::to_value(parse(SHORT)).expect("JSON");
    for key in written.as_object().expect("an object").keys() {
        assert!(schema["properties"][key].is_object(), "{key}");
    }
    assert_eq!(schema["additionalProperties"], false);
    assert_eq!(schema["required"], serde_json::json!(["model", "task", "rollout", "algorithm", "run"]));
    assert_eq!(reference::sft_schema()["required"], serde_json::json!(["model", "task", "sft", "run"]));
}

/// Knuth's MMIX generator; its high bits are good enough to choose what to break.
struct Lcg(u64);

impl Lcg {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % bound
    }
}

fn assert_printable(error: &RecipeError) {
    for text in [error.to_string(), error.hint()] {
        assert!(!text.is_empty() && !text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    }
}

/// What YAML gives meaning to, and some of what it refuses.
const PIECES: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ":",
    ": ",
    ",",
    "-",
    "- ",
    "&a ",
    "*a",
    "!!str ",
    "!x ",
    "'",
    "\"",
    "|",
    ">",
    "#",
    "\n",
    "\r",
    "\t",
    "  ",
    "---\n",
    "<<: *a",
    "? ",
    "~",
    "null",
    "true",
    "-1",
    "1e400",
    ".nan",
    "99999999999999999999",
    "é",
    "\u{feff}",
    "\0",
    "\x1b",
    "🦀",
    "%YAML 1.2\n",
    "\\",
    "group_size",
    "dapo",
    "64MiB",
];

/// The full recipe with up to four deletions, insertions, replacements and copies.
fn mutation(lcg: &mut Lcg) -> String {
    let mut text: Vec<char> = FULL.chars().collect();
    for _ in 0..1 + lcg.below(4) {
        let at = lcg.below(text.len());
        let end = (at + lcg.below(12)).min(text.len());
        match lcg.below(4) {
            0 => drop(text.drain(at..end)),
            1 => drop(text.splice(at..at, PIECES[lcg.below(PIECES.len())].chars())),
            2 => drop(text.splice(at..end, PIECES[lcg.below(PIECES.len())].chars())),
            _ => {
                let copy = text[at..end].to_vec();
                let to = lcg.below(text.len());
                drop(text.splice(to..to, copy));
            }
        }
    }
    text.into_iter().collect()
}

#[test]
fn no_mutation_of_a_recipe_panics() {
    let mut lcg = Lcg(7);
    let mut good = 0;
    for _ in 0..4000 {
        match Recipe::parse(&mutation(&mut lcg), "x.yaml") {
            Ok(recipe) => {
                good += 1;
                assert_eq!(parse(&recipe.to_yaml()), recipe);
            }
            Err(error) => assert_printable(&error),
        }
    }
    assert!(good > 100, "only {good} of 4000 are good, so little but the scanner was tried");
}

#[test]
fn no_override_panics() {
    const PIECES: &[&str] = &[
        "train", "lr", ".", "..", "=", "==", " ", "{", "}", "[", "\n", "é", "🦀", "\0", "1", "null", "*a",
        "&a ", "'", ":",
    ];
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("x.yaml");
    fs::write(&path, SHORT).expect("a written recipe");
    let mut lcg = Lcg(8);
    for _ in 0..1000 {
        let argument: String = (0..1 + lcg.below(8)).map(|_| PIECES[lcg.below(PIECES.len())]).collect();
        if let Err(error) = Recipe::load(&path, &[argument]) {
            assert_printable(&error);
        }
    }
}
