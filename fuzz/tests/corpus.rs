//! Every corpus through its target, without a fuzzer: what was found once stays fixed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use r3_fuzz::{TARGETS, Target};

/// What all corpora may hold together; a fuzzer's own corpus grows without end.
const MAX_BYTES: u64 = 400 << 10;

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Names in a directory.
fn names(dir: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Replays a corpus; how many of its inputs were let in, and how many refused.
fn replay(target: &Target) -> (usize, usize) {
    let dir = here("corpus").join(target.name);
    let (mut n_let_in, mut n_refused) = (0, 0);
    for name in names(&dir) {
        let input = fs::read(dir.join(&name)).unwrap();
        // The name of the input, should it panic: the output of a test that passes is not shown.
        println!("{}/{name}", target.name);
        if (target.body)(&input) { n_let_in += 1 } else { n_refused += 1 }
    }
    (n_let_in, n_refused)
}

#[test]
fn every_corpus_passes_and_reaches_behind_the_checks() {
    for target in &TARGETS {
        let (n_let_in, n_refused) = replay(target);
        assert!(n_let_in > 0, "{}: nothing of the corpus is let in", target.name);
        let makes_what_is_good = target.name == "frame_round_trip";
        assert!(n_refused > 0 || makes_what_is_good, "{}: nothing of the corpus is refused", target.name);
    }
}

#[test]
fn every_target_has_a_binary_and_a_corpus() {
    let targets: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
    assert_eq!(names(&here("corpus")), targets);
    let binaries = names(&here("src/bin"));
    assert_eq!(binaries, targets.iter().map(|name| format!("{name}.rs")).collect());
}

#[test]
fn the_corpora_are_small() {
    let sizes = TARGETS.iter().flat_map(|target| {
        let dir = here("corpus").join(target.name);
        names(&dir).into_iter().map(move |name| fs::metadata(dir.join(name)).unwrap().len())
    });
    let total_bytes: u64 = sizes.sum();
    assert!(total_bytes <= MAX_BYTES, "{total_bytes} bytes");
}
