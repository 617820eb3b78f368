//! The main function of the copy with the planted faults: plays schedules until one fails, and makes that small.

use std::process::ExitCode;

use r3_sim::simulate::{play_seeds, shrink_seed};

fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).map(|argument| argument.parse().expect("two numbers"));
    let (planted, n_schedules) = (numbers.next().expect("a fault"), numbers.next().expect("schedules"));
    std::panic::set_hook(Box::new(|_| {}));
    r3_core::planted::plant(usize::try_from(planted).expect("a small number"));
    let Err(failure) = play_seeds(0..n_schedules, 1, |_| ()) else { return ExitCode::SUCCESS };
    let shrunk = shrink_seed(failure.seed).expect("a seed that fails, fails again");
    println!("{}\t{}\t{}", failure.seed, shrunk.program.ops.len(), failure.explain());
    ExitCode::FAILURE
}
