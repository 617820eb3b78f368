//! What the compiler does not check: which crate may know which, and where things may be said.
//!
//! The rules are pure functions in `tidy/rules.rs`, each with a test that plants a violation; here they meet the tree.

#[path = "tidy/rules.rs"]
mod rules;
#[path = "tidy/source.rs"]
mod source;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use r3_recipe::recipe::Recipe;

use rules::Violation;

/// The crates, from the ground up, with the crates of ours each may depend on. Tests may use any.
const ARROWS: [(&str, &[&str]); 15] = [
    ("crates/core", &[]),
    ("kernels", &[]),
    ("crates/recipe", &["r3-core"]),
    ("crates/ring", &["r3-core"]),
    ("crates/tasks", &["r3-core"]),
    ("crates/scheduler", &["r3-core"]),
    ("crates/sim", &["r3-core", "r3-scheduler"]),
    ("crates/telemetry", &["r3-core"]),
    ("crates/wire", &["r3-core"]),
    ("crates/model", &["r3-core", "r3-kernels"]),
    ("crates/engine", &["r3-core", "r3-recipe", "r3-scheduler", "r3-model", "r3-kernels"]),
    ("crates/train", &["r3-core", "r3-recipe", "r3-model", "r3-kernels"]),
    (
        "crates/orchestrator",
        &[
            "r3-core",
            "r3-recipe",
            "r3-ring",
            "r3-tasks",
            "r3-scheduler",
            "r3-telemetry",
            "r3-model",
            "r3-engine",
            "r3-train",
            "r3-wire",
            "r3-kernels",
        ],
    ),
    ("fuzz", &["r3-core", "r3-kernels", "r3-recipe", "r3-ring", "r3-wire", "r3-model", "r3-engine"]),
    ("crates/cli", &["r3-core", "r3-orchestrator", "r3-recipe", "r3-telemetry", "r3-wire", "r3-kernels"]),
];

/// Dependencies that say what a crate knows: tensors, text, asynchronous edges, mappings of memory.
const KNOWLEDGE: [(&str, &[&str]); 5] = [
    ("candle-core", &["kernels", "crates/model", "crates/train"]),
    ("tokenizers", &["crates/tasks"]),
    ("minijinja", &["crates/tasks"]),
    ("tokio", &["crates/telemetry", "crates/orchestrator"]),
    ("rustix", &["kernels", "crates/ring"]),
];

/// The text files of the repository, paths relative to it.
struct Tree {
    root: PathBuf,
    files: Vec<(String, String)>,
}

impl Tree {
    fn read() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace");
        let mut tree = Self { root: root.clone(), files: Vec::new() };
        tree.add(&root);
        tree.files.sort();
        tree
    }

    fn add(&mut self, dir: &Path) {
        for entry in fs::read_dir(dir).expect("a directory of the workspace") {
            let path = entry.expect("an entry of the workspace").path();
            let relative =
                path.strip_prefix(&self.root).expect("below the root").to_string_lossy().into_owned();
            // What `.gitignore` names, and git's own.
            if ["target", "runs", ".git"].contains(&relative.as_str()) {
                continue;
            }
            if path.is_dir() {
                self.add(&path);
            } else if let Some(text) = fs::read(&path).ok().and_then(|bytes| String::from_utf8(bytes).ok()) {
                self.files.push((relative, text));
            }
        }
    }

    /// Files whose path passes `filter`.
    fn each(&self, filter: impl Fn(&str) -> bool) -> impl Iterator<Item = (&str, &str)> {
        let files = self.files.iter().filter(move |(path, _)| filter(path));
        files.map(|(path, text)| (path.as_str(), text.as_str()))
    }

    fn get(&self, path: &str) -> &str {
        let found = self.files.iter().find(|(known, _)| known == path);
        &found.unwrap_or_else(|| panic!("{path} is there")).1
    }
}

fn is_rust(path: &str) -> bool {
    path.ends_with(".rs")
}

fn is_manifest(path: &str) -> bool {
    path.ends_with("/Cargo.toml")
}

fn is_markdown(path: &str) -> bool {
    path.ends_with(".md")
}

fn is_any(_: &str) -> bool {
    true
}

/// Applies `rule` to the files that pass `filter`, and fails with every place where it is broken.
fn hold(filter: fn(&str) -> bool, rule: impl Fn(&str, &str) -> Vec<Violation>) {
    let tree = Tree::read();
    let mut n_files = 0;
    let broken: Vec<String> = tree
        .each(filter)
        .inspect(|_| n_files += 1)
        .flat_map(|(path, text)| rule(path, text))
        .map(|violation| violation.to_string())
        .collect();
    assert!(broken.is_empty(), "{}\n", broken.join("\n"));
    assert!(n_files > 0, "the rule was applied to something");
}

#[test]
fn arrows_point_down() {
    let tree = Tree::read();
    let mut broken = Vec::new();
    for (crate_dir, allowed) in ARROWS {
        let path = format!("{crate_dir}/Cargo.toml");
        broken.extend(rules::points_down(&path, tree.get(&path), allowed));
    }
    for (path, text) in tree.each(is_manifest) {
        let crate_dir = path.strip_suffix("/Cargo.toml").unwrap_or_default();
        if !ARROWS.iter().any(|(known, _)| *known == crate_dir) {
            broken.push(Violation::new(path, 0, "a crate without a row in the table of arrows"));
        }
        for (line, name) in rules::dependencies(text) {
            let knowledge = KNOWLEDGE.iter().find(|(known, _)| *known == name);
            if knowledge.is_some_and(|(_, knowing)| !knowing.contains(&crate_dir)) {
                broken.push(Violation::new(path, line, format!("must not know {name}")));
            }
        }
    }
    let broken: Vec<String> = broken.iter().map(Violation::to_string).collect();
    assert!(broken.is_empty(), "{}\n", broken.join("\n"));
}

#[test]
fn the_core_knows_nothing_but_the_standard_library() {
    assert_eq!(rules::dependencies(Tree::read().get("crates/core/Cargo.toml")), []);
}

#[test]
fn files_are_short() {
    hold(is_rust, rules::is_short);
}

#[test]
fn unsafe_code_stays_in_ring_and_kernels() {
    hold(is_rust, rules::keeps_unsafe_in_its_place);
}

#[test]
fn cuda_stays_in_the_kernels() {
    hold(is_rust, rules::keeps_cuda_in_its_place);
}

#[test]
fn nothing_forbidden_is_said() {
    hold(is_rust, rules::says_nothing_forbidden);
}

#[test]
fn imports_name_what_they_import() {
    hold(is_rust, rules::imports_by_name);
}

#[test]
fn nothing_reads_the_environment() {
    hold(is_rust, rules::reads_no_environment);
}

#[test]
fn no_test_sleeps() {
    hold(is_rust, rules::never_sleeps_in_a_test);
}

#[test]
fn no_file_names_a_machine() {
    hold(is_any, rules::names_no_machine);
}

#[test]
fn what_is_left_to_do_has_an_issue() {
    hold(is_any, rules::numbers_what_is_left_to_do);
}

#[test]
fn every_library_says_what_it_is_for() {
    hold(is_rust, rules::says_what_it_is_for);
}

#[test]
fn every_crate_takes_the_lints() {
    hold(is_manifest, rules::takes_the_lints);
}

#[test]
fn links_lead_somewhere() {
    let root = Tree::read().root;
    hold(is_markdown, |path, text| rules::links_lead_somewhere(path, text, |file| root.join(file).exists()));
}

#[test]
fn docs_name_what_exists() {
    let tree = Tree::read();
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let sources = tree.each(|path| !is_markdown(path));
    let words: BTreeSet<&str> = sources.flat_map(|(_, text)| text.split(|c| !is_word(c))).collect();
    let exists = |name: &str| words.contains(name) || tree.root.join(name).is_file();
    hold(is_markdown, |path, text| rules::names_what_exists(path, text, exists));
}

#[test]
fn every_fault_of_the_page_has_its_tests_where_it_says() {
    let tree = Tree::read();
    let rows: Vec<&str> = tree.get("docs/faults.md").lines().filter(|line| line.starts_with("| ")).collect();
    let mut n_faults = 0;
    for row in rows.into_iter().filter(|row| row[2..].starts_with(|c: char| c.is_ascii_digit())) {
        let tests = row.split('|').nth(4).expect("a column of tests");
        // `name`, `name` and `name` in `file`; `name`: without a file, the first one of the page.
        for place in tests.split(';') {
            let (names, file) = place.split_once(" in `").unwrap_or((place, "crates/sim/tests/faults.rs`"));
            let file = tree.get(file.trim_end().trim_end_matches('`'));
            for name in names.split('`').skip(1).step_by(2).filter(|name| name.contains('_')) {
                assert!(file.contains(&format!("fn {name}(")), "{row}\n{name} is not there");
            }
        }
        assert!(tests.contains('`') || tests.contains("those of"), "no test: {row}");
        n_faults += 1;
    }
    assert_eq!(n_faults, 48);
}

#[test]
fn the_readme_has_two_commands() {
    hold(|path| path == "README.md", rules::has_two_commands);
}

/// Other members have binaries, among which `cargo run` cannot choose.
#[test]
fn the_readmes_first_command_runs_r3() {
    let tree = Tree::read();
    assert!(tree.get("Cargo.toml").contains("\ndefault-members = [\"crates/cli\"]\n"));
    let manifest = tree.get("crates/cli/Cargo.toml");
    assert!(
        manifest.matches("[[bin]]").count() <= 1
            && tree.files.iter().all(|(path, _)| !path.starts_with("crates/cli/src/bin/"))
    );
}

#[test]
fn the_recipe_of_the_readme_is_good() {
    let tree = Tree::read();
    let (_, block) = tree.get("README.md").split_once("```yaml\n").expect("a recipe");
    let (recipe, _) = block.split_once("```").expect("the end of the recipe");
    if let Err(error) = Recipe::parse(recipe, "README.md") {
        panic!("{error}\n{}", error.hint());
    }
}
