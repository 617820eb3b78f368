//! The same seed and data with replay on and off, and a report of what that changed.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use r3_recipe::recipe::Recipe;
use r3_recipe::rollout::{ReplayMode, RouterReplay};
use r3_telemetry::report::{Comparison, Runs, html};

use crate::error::{RunError, io_at};
use crate::run::{RunOptions, check_free, run_in};
use crate::run_dir::RunDir;

/// Two runs that differ in replay only.
#[derive(Debug)]
pub struct Compared {
    /// Both summaries.
    pub comparison: Comparison,
    /// Where the report lies, or why it does not: hours of runs are not lost with it.
    pub report: Result<PathBuf, RunError>,
}

/// Runs `recipe` with replay on, then off, into `run.out/on` and `run.out/off`, and writes `run.out/report.html`.
///
/// The run without replay records routes too, but only to count where the trainer's router disagrees.
///
/// # Errors
/// Whatever stops one of the runs, or that the report can never be written; or that another process is at work in `run.out`,
/// `on` or `off`, one of which holds what is not to be lost.
pub fn compare(recipe: &Recipe, options: &RunOptions) -> Result<Compared, RunError> {
    // Both halves are one result: nobody else begins the first while the second runs, or the second while the first does.
    let _dir = RunDir::lock_no_model(&recipe.run.out)?;
    let side = |name: &str, mode: ReplayMode| {
        let mut recipe = recipe.clone();
        let diagnose = mode == ReplayMode::Off;
        let threshold = if diagnose { 0.0 } else { recipe.router_replay.threshold };
        recipe.router_replay = RouterReplay { mode, diagnose, gates: false, threshold };
        recipe.run.out.push(name);
        let dir = RunDir::lock_new(&recipe.run.out)?;
        check_free(&dir, &recipe, options)?;
        Ok::<_, RunError>((dir, recipe))
    };
    // What is in the way of either is said before the hours that the first takes.
    let ((on_dir, on), (off_dir, off)) = (side("on", ReplayMode::R3)?, side("off", ReplayMode::Off)?);
    let report = recipe.run.out.join("report.html");
    if report.is_dir() {
        return Err(io_at(&report)(ErrorKind::IsADirectory.into()));
    }
    let on = run_in(on_dir, &on, options);
    // A report of an earlier comparison is none of this one, should it end before its own.
    if matches!(on, Ok(_) | Err(RunError::Interrupted { .. })) && report.exists() {
        fs::remove_file(&report).map_err(io_at(&report))?;
    }
    let on = on?;
    let off = run_in(off_dir, &off, options)?;
    let comparison = Comparison { on: on.summary, off: off.summary };
    let title = format!("Seed {}", recipe.run.seed);
    let page = html(Runs { title: &title, on: &on.records, off: &off.records }, &comparison);
    let written = fs::write(&report, page).map_err(io_at(&report));
    Ok(Compared { comparison, report: written.map(|()| report) })
}
