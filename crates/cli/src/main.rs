//! The `r3` command: arguments in, exit codes out. All work is done in the crates below.
//!
//! Data goes to stdout, everything else to stderr. Start with [`Cli`]; each of [`commands`] is one small file.

mod args;
mod commands;
mod error;
mod logging;
mod output;
mod report;

use std::panic;
use std::process::ExitCode;

use clap::Parser;
use r3_kernels::huge_pages::HugePages;
use r3_orchestrator::shutdown;

use crate::args::Global;
use crate::commands::{
    bench, check, compare, eval, export, new_model, rollout, routes, run, schema, score, sft,
};
use crate::error::CliError;

#[global_allocator]
static MEMORY: HugePages = HugePages::new();

/// Reinforcement learning of mixture-of-experts language models, with the rollout's expert routes replayed in training.
///
/// One process samples completions, scores them, trains on them and loads the new weights. A recipe, one YAML file,
/// says all of it: begin with `r3 run recipes/tiny.yaml`, which takes a minute on two cores.
#[derive(Debug, Parser)]
#[command(name = "r3", version, max_term_width = 100, propagate_version = true, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    global: Global,
}

const EXIT_CODES: &str = "\
Exit codes: 0 done, 1 a bug in r3, 2 the recipe, the arguments or a file they name, 3 the machine (memory, disk, \
ports), 4 the run diverged, 130 interrupted.

Results go to stdout; progress, warnings and errors to stderr. NO_COLOR=1 turns colours off.";

#[derive(Debug, clap::Subcommand)]
enum Command {
    Run(run::Args),
    Check(check::Args),
    Compare(compare::Args),
    Eval(eval::Args),
    Sft(sft::Args),
    Rollout(rollout::Args),
    Score(score::Args),
    Routes(routes::Args),
    NewModel(new_model::Args),
    Export(export::Args),
    Bench(bench::Args),
    Schema(schema::Args),
}

fn main() -> ExitCode {
    panic::set_hook(Box::new(report::panicked));
    let cli = Cli::parse();
    // A panic has been reported by the hook; unwinding lets the worker thread end in order.
    match panic::catch_unwind(|| execute(&cli)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) if error.is_closed_pipe() => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            report::report(&error);
            error.exit_code()
        }
        Err(_) => ExitCode::FAILURE,
    }
}

fn execute(cli: &Cli) -> Result<(), CliError> {
    logging::start(&cli.global);
    // Who cannot have it so will hear of what is short from what needs it.
    let _ = shutdown::outlive_large_files();
    args::start_threads(cli.global.threads)?;
    match &cli.command {
        Command::Run(args) => args.execute(),
        Command::Check(args) => args.execute(),
        Command::Compare(args) => args.execute(),
        Command::Eval(args) => args.execute(),
        Command::Sft(args) => args.execute(),
        Command::Rollout(args) => args.execute(),
        Command::Score(args) => args.execute(),
        Command::Routes(args) => args.execute(),
        Command::NewModel(args) => args.execute(),
        Command::Export(args) => args.execute(),
        Command::Bench(args) => args.execute(),
        Command::Schema(args) => args.execute(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_do_not_contradict_each_other() {
        Cli::command().debug_assert();
    }
}
