//! Schedules find what is wrong: faults are planted in a copy of the sources, and each is caught.

mod list;
mod weave;

use std::path::Path;
use std::process::Command;

use list::{Edit, MUTANTS, Mutant};

/// Schedules within which a fault must be caught.
const N_SCHEDULES: u64 = 2000;

/// What schedules find in the copy with fault `number`; `None` if nothing.
fn caught(program: &Path, number: usize) -> Option<Caught> {
    let arguments = [number.to_string(), N_SCHEDULES.to_string()];
    let output = Command::new(program).args(arguments).output().expect("the copy runs");
    match output.status.code() {
        Some(0) => return None,
        Some(1) => {}
        other => panic!("the copy with fault {number} ended with {other:?}"),
    }
    let text = String::from_utf8(output.stdout).expect("it prints text");
    let mut fields = text.splitn(3, '\t');
    let mut count = || fields.next().and_then(|count| count.parse().ok()).expect("seed and operations");
    Some(Caught { seed: count(), n_ops: count(), what: fields.next().expect("what fails").to_owned() })
}

/// The first schedule that fails.
struct Caught {
    seed: u64,
    /// Operations of what is left of it when it was made small.
    n_ops: u64,
    /// What fails, and that small schedule.
    what: String,
}

#[test]
fn every_planted_fault_is_caught_within_2000_schedules() {
    let program = weave::build(&MUTANTS, &Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutants"));
    assert!(caught(&program, 0).is_none(), "without a fault, no schedule fails");
    let mut survivors = Vec::new();
    for (number, mutant) in (1..).zip(&MUTANTS) {
        let Some(Caught { seed, n_ops, what }) = caught(&program, number) else {
            survivors.push(mutant.name);
            continue;
        };
        println!("{}: {what}", mutant.name);
        assert!(what.ends_with(&format!("cargo run --release -p r3-sim -- --seed {seed}\n")), "{what}");
        assert!(n_ops <= 6, "{}: {n_ops} operations are not a small schedule\n{what}", mutant.name);
    }
    assert!(survivors.is_empty(), "not caught within {N_SCHEDULES} schedules: {survivors:#?}");
}

#[test]
fn the_documentation_lists_the_planted_faults() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/simulation.md");
    let page = std::fs::read_to_string(page).expect("docs/simulation.md");
    let row = |mutant: &Mutant| {
        let faults: Vec<_> = mutant.faults.iter().map(u32::to_string).collect();
        format!("| {} | {} |\n", mutant.name, faults.join(", "))
    };
    let rows: String = MUTANTS.iter().map(row).collect();
    assert!(page.contains(&rows), "the table of docs/simulation.md must be:\n{rows}");
}

#[test]
fn edits_of_one_place_are_alternatives() {
    const ONE: Mutant =
        Mutant { name: "one", faults: &[], edits: &[Edit { file: "a.rs", find: "b + 1", replace: "b" }] };
    const TWO: Mutant = Mutant {
        name: "two",
        faults: &[],
        edits: &[
            Edit { file: "a.rs", find: "b + 1", replace: "b + 2" },
            Edit { file: "a.rs", find: "c", replace: "d" },
            Edit { file: "other.rs", find: "e", replace: "f" },
        ],
    };
    let is = "if r3_core::planted::is";
    assert_eq!(
        weave::woven("a.rs", "x(b + 1, c)", &[ONE, TWO]),
        format!("x({is}(1) {{ b }} else {is}(2) {{ b + 2 }} else {{ b + 1 }}, {is}(2) {{ d }} else {{ c }})")
    );
}
