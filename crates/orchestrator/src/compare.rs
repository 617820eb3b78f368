//! The same seed and data with replay on and off, and a report of what that changed.

use std::fs;
use std::path::PathBuf;

use r3_recipe::recipe::Recipe;
use r3_recipe::rollout::{ReplayMode, RouterReplay};
use r3_telemetry::report::{Comparison, Runs, html};

use crate::error::{RunError, io_at};
use crate::run::{RunOptions, run};
use crate::run_dir::RunDir;

/// Two runs that differ in replay only.
#[derive(Clone, Debug)]
pub struct Compared {
    /// Both summaries.
    pub comparison: Comparison,
    /// Where the report lies.
    pub report: PathBuf,
}

/// Runs `recipe` with replay on, then off, into `run.out/on` and `run.out/off`, and writes `run.out/report.html`.
///
/// The run without replay records routes too, but only to count where the trainer's router disagrees.
///
/// # Errors
/// Whatever stops one of the runs, or keeps the report from being written; or that another process is at work in `run.out`.
pub fn compare(recipe: &Recipe, options: &RunOptions) -> Result<Compared, RunError> {
    // Both halves are one result: nobody else begins the first while the second runs.
    let _dir = RunDir::lock(&recipe.run.out)?;
    let side = |name: &str, mode: ReplayMode| {
        let mut recipe = recipe.clone();
        let diagnose = mode == ReplayMode::Off;
        let threshold = if diagnose { 0.0 } else { recipe.router_replay.threshold };
        recipe.router_replay = RouterReplay { mode, diagnose, gates: false, threshold };
        recipe.run.out.push(name);
        run(&recipe, options)
    };
    let on = side("on", ReplayMode::R3)?;
    let off = side("off", ReplayMode::Off)?;
    let comparison = Comparison { on: on.summary, off: off.summary };
    let title = format!("Seed {}", recipe.run.seed);
    let page = html(Runs { title: &title, on: &on.records, off: &off.records }, &comparison);
    let report = recipe.run.out.join("report.html");
    fs::write(&report, page).map_err(io_at(&report))?;
    Ok(Compared { comparison, report })
}
