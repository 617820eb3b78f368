//! A copy of the crates under test with all faults woven in, one of which is switched on when it runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::list::{Edit, Mutant};

/// The crates a schedule runs through.
const CRATES: [&str; 3] = ["crates/core", "crates/scheduler", "crates/sim"];

const MAIN: &str = include_str!("planted_main.rs");

const PLANTED: &str = "//! Which fault is switched on.

use std::sync::atomic::{AtomicUsize, Ordering};

static PLANTED: AtomicUsize = AtomicUsize::new(0);

/// Switches one on.
pub fn plant(number: usize) {
    PLANTED.store(number, Ordering::Relaxed);
}

/// Whether it is on.
pub fn is(number: usize) -> bool {
    PLANTED.load(Ordering::Relaxed) == number
}
";

/// Copies the crates below `to`, weaves the faults in and builds a program that takes the number of one, from 1.
pub(crate) fn build(mutants: &[Mutant], to: &Path) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for name in CRATES {
        for file in sources(&root, Path::new(name)) {
            let path = file.to_str().expect("paths are UTF-8");
            let text = fs::read_to_string(root.join(&file)).expect("a source file");
            let text = match path {
                "crates/core/src/lib.rs" => format!("{text}\npub mod planted;\n"),
                "crates/sim/src/main.rs" => MAIN.to_owned(),
                path if path.ends_with("Cargo.toml") => manifest(&text),
                path => woven(path, &text, mutants),
            };
            write(&to.join(&file), &text);
        }
    }
    write(&to.join("crates/core/src/planted.rs"), PLANTED);
    write(
        &to.join("Cargo.toml"),
        &workspace(&fs::read_to_string(root.join("Cargo.toml")).expect("a manifest")),
    );
    write(&to.join("Cargo.lock"), &fs::read_to_string(root.join("Cargo.lock")).expect("a lock file"));
    let built = Command::new(env!("CARGO"))
        .args(["build", "--offline", "--quiet", "--release", "--bin", "simulate"])
        .current_dir(to)
        .env("CARGO_TARGET_DIR", to.join("target"))
        .output()
        .expect("cargo runs");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    to.join("target/release/simulate")
}

/// `text` with every edit of `path` in it, each behind its number.
pub(crate) fn woven(path: &str, text: &str, mutants: &[Mutant]) -> String {
    let mut pieces: Vec<(usize, &str, String)> = Vec::new();
    for (number, mutant) in (1..).zip(mutants) {
        for Edit { find, replace, .. } in mutant.edits.iter().filter(|edit| edit.file == path) {
            let found: Vec<_> = text.match_indices(find).collect();
            let [(at, _)] = found[..] else {
                panic!("`{}` looks in {path} for what is there {} times: {find}", mutant.name, found.len())
            };
            let branch = format!("if r3_core::planted::is({number}) {{ {replace} }} else ");
            match pieces.iter_mut().find(|(known, _, _)| *known == at) {
                Some((_, known, branches)) => {
                    assert_eq!(known, find, "edits of one place replace the same");
                    branches.push_str(&branch);
                }
                None => pieces.push((at, find, branch)),
            }
        }
    }
    pieces.sort_unstable_by_key(|(at, _, _)| *at);
    let (mut woven, mut end) = (String::new(), 0);
    for (at, find, branches) in pieces {
        assert!(at >= end, "edits of {path} overlap at: {find}");
        woven.push_str(&text[end..at]);
        woven.push_str(&format!("{branches}{{ {find} }}"));
        end = at + find.len();
    }
    woven + &text[end..]
}

/// A crate's manifest without what only its tests and its real main function need.
fn manifest(text: &str) -> String {
    let (text, _) = text.split_once("[dev-dependencies]").unwrap_or((text, ""));
    text.replace("clap.workspace = true\n", "")
}

/// The workspace with these crates alone, built fast.
fn workspace(text: &str) -> String {
    let (_, settings) = text.split_once("[workspace.package]").expect("settings follow the members");
    let (settings, _) = settings.split_once("[profile.").expect("profiles come last");
    format!(
        "[workspace]\nresolver = \"3\"\nmembers = {CRATES:?}\n\n[workspace.package]{settings}\
         [profile.release]\nopt-level = 1\ndebug = 0\n"
    )
}

/// Source files and manifest of a crate, relative to the root.
fn sources(root: &Path, crate_dir: &Path) -> Vec<PathBuf> {
    let mut files = vec![crate_dir.join("Cargo.toml")];
    for entry in fs::read_dir(root.join(crate_dir).join("src")).expect("a crate has sources") {
        files.push(crate_dir.join("src").join(entry.expect("an entry").file_name()));
    }
    files.sort();
    files
}

/// Writes a file unless it is there: what does not change is not built again.
fn write(path: &Path, text: &str) {
    if fs::read_to_string(path).is_ok_and(|known| known == text) {
        return;
    }
    fs::create_dir_all(path.parent().expect("a file has a directory")).expect("a directory");
    fs::write(path, text).expect("a file");
}
