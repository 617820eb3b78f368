//! Log messages of all crates, on stderr.

use std::io::{self, IsTerminal};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::args::Global;
use crate::report::wants_colour;

/// Shows warnings, or what `-v` and `-q` say. The libraries below ours only ever warn.
pub(crate) fn start(global: &Global) {
    let level = match (global.quiet, global.verbose) {
        (true, _) => LevelFilter::ERROR,
        (false, 0) => LevelFilter::WARN,
        (false, 1) => LevelFilter::INFO,
        (false, 2) => LevelFilter::DEBUG,
        (false, _) => LevelFilter::TRACE,
    };
    let is_terminal = io::stderr().is_terminal();
    let lines = fmt::layer().compact().with_writer(io::stderr).with_ansi(wants_colour());
    let filter = Targets::new().with_default(level.min(LevelFilter::WARN)).with_target("r3", level);
    let registry = tracing_subscriber::registry().with(filter);
    // Whoever watches a terminal knows the time; whoever reads a file does not.
    if is_terminal {
        registry.with(lines.with_target(false).without_time()).init();
    } else {
        registry.with(lines.with_target(false)).init();
    }
}
