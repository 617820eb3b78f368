//! `simulate`: random schedules until one breaks a promise.

use std::io::{IsTerminal, Write};
use std::ops::Range;
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use clap::Parser;
use r3_sim::program::Program;
use r3_sim::simulate::{Failure, play, play_seeds, shrink_seed};

/// Plays random schedules on r3's scheduler and compares every rollout with an oracle. Exits with 1 at the first that
/// fails, and prints the smallest schedule that still does.
#[derive(Parser)]
struct Cli {
    /// The schedules to play
    #[arg(long, value_name = "FROM..TO", default_value = "0..20000", value_parser = parse_seeds)]
    seeds: Range<u64>,
    /// Play one schedule, and print it
    #[arg(long, value_name = "SEED", conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Threads; as many as there are cores if not given
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

fn parse_seeds(text: &str) -> Result<Range<u64>, String> {
    let parse = |number: &str| number.parse::<u64>().map_err(|error| format!("`{number}`: {error}"));
    let (from, to) = text.split_once("..").ok_or("two numbers with `..` between them are needed")?;
    let seeds = parse(from)?..parse(to)?;
    if seeds.is_empty() { Err(format!("there is no seed in {text}")) } else { Ok(seeds) }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    // A schedule that fails panics hundreds of times while it is shrunk.
    std::panic::set_hook(Box::new(|_| {}));
    let passed = match cli.seed {
        Some(seed) => play_one(seed),
        None => play_many(cli.seeds, cli.threads),
    };
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn play_one(seed: u64) -> bool {
    let program = Program::from_seed(seed);
    println!("{program}\n");
    match play(&program) {
        Ok(tally) => {
            print!("{tally}");
            true
        }
        Err(message) => {
            println!("{}", Failure { seed, message }.explain());
            let shrunk = shrink_seed(seed);
            // Once more with the hook of the standard library, which says where.
            drop(std::panic::take_hook());
            shrunk.is_some_and(|shrunk| play(&shrunk.program).is_ok())
        }
    }
}

fn play_many(seeds: Range<u64>, n_threads: Option<usize>) -> bool {
    let n_threads = n_threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
    let start = Instant::now();
    let n_seeds = seeds.end - seeds.start;
    let is_terminal = std::io::stderr().is_terminal();
    let progress = |n_done: u64| {
        if is_terminal {
            let mut stderr = std::io::stderr().lock();
            // Progress that cannot be shown is no reason to stop.
            let _ = write!(stderr, "\r{n_done} of {n_seeds} schedules").and_then(|()| stderr.flush());
        }
    };
    let outcome = play_seeds(seeds.clone(), n_threads, progress);
    let wall_s = start.elapsed().as_secs_f64();
    if is_terminal {
        eprintln!();
    }
    match outcome {
        Ok(tally) => {
            println!(
                "seeds {}..{} on {n_threads} threads in {wall_s:.1} s: no violation",
                seeds.start, seeds.end
            );
            print!("{tally}");
            true
        }
        Err(failure) => {
            println!("{}", failure.explain());
            false
        }
    }
}
