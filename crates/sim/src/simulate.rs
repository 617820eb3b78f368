//! Many seeds, on all cores, up to the first that fails.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::hash_engine::HashEngine;
use crate::player::Player;
use crate::program::Program;
use crate::shrink::shrink;
use crate::tally::Tally;

/// Seeds a thread takes at once.
const SEEDS_AT_ONCE: u64 = 64;

/// Programs tried at most to make a failing one small: a second or two.
const MAX_TRIES: usize = 20_000;

/// A seed whose program breaks a promise.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// Which promise.
    pub message: String,
}

impl Failure {
    /// The failure, the smallest schedule that still fails, and the command that shows both again.
    #[must_use]
    pub fn explain(&self) -> String {
        let Self { seed, message } = self;
        let shrunk = shrink_seed(*seed).map_or_else(
            || "played again, it does not fail: something outlives a schedule".to_owned(),
            |Shrunk { program, message }| format!("the smallest schedule that fails: {message}\n\n{program}"),
        );
        format!(
            "seed {seed} fails: {message}\n\n{shrunk}\n\nreplay: cargo run --release -p r3-sim -- --seed {seed}"
        )
    }
}

/// A failing program with all taken away that it does not need.
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// The program.
    pub program: Program,
    /// The promise that it breaks.
    pub message: String,
}

/// Plays a program on the hash engine.
///
/// # Errors
/// With the promise that was broken.
pub fn play(program: &Program) -> Result<Tally, String> {
    let play = || Player::new(HashEngine::new(program.config), program.config).play(program);
    catch_unwind(AssertUnwindSafe(play)).map_err(|panic| message(&*panic))
}

/// Plays the programs of `seeds` on `n_threads` threads. `progress` is told how many are done, now and then.
///
/// # Errors
/// With the lowest seed that fails, whatever the threads.
pub fn play_seeds(
    seeds: Range<u64>,
    n_threads: usize,
    progress: impl Fn(u64) + Sync,
) -> Result<Tally, Failure> {
    let next = AtomicU64::new(seeds.start);
    let n_done = AtomicU64::new(0);
    let failure: Mutex<Option<Failure>> = Mutex::new(None);
    let is_beyond = |seed: u64| {
        let failure = failure.lock().expect("nobody panics with the lock");
        failure.as_ref().is_some_and(|failure| failure.seed < seed)
    };
    let work = || {
        let mut tally = Tally::default();
        loop {
            // Handed out in order, so whoever fails has left no lower seed behind.
            let first = next.fetch_add(SEEDS_AT_ONCE, Ordering::Relaxed);
            if first >= seeds.end || is_beyond(first) {
                return tally;
            }
            let chunk = first..seeds.end.min(first + SEEDS_AT_ONCE);
            for seed in chunk.clone() {
                match play(&Program::from_seed(seed)) {
                    Ok(played) => tally += played,
                    Err(message) => {
                        let mut lowest = failure.lock().expect("nobody panics with the lock");
                        if lowest.as_ref().is_none_or(|lowest| seed < lowest.seed) {
                            *lowest = Some(Failure { seed, message });
                        }
                        return tally;
                    }
                }
            }
            let n_chunk = chunk.end - chunk.start;
            progress(n_done.fetch_add(n_chunk, Ordering::Relaxed) + n_chunk);
        }
    };
    let mut tally = Tally::default();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads.max(1)).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            tally += thread.join().expect("programs that panic are caught");
        }
    });
    match failure.into_inner().expect("nobody panics with the lock") {
        None => Ok(tally),
        Some(failure) => Err(failure),
    }
}

/// Shrinks the failing program of `seed`; `None` if it does not fail. Equal seeds shrink equally.
#[must_use]
pub fn shrink_seed(seed: u64) -> Option<Shrunk> {
    let program = Program::from_seed(seed);
    play(&program).err()?;
    let program = shrink(&program, MAX_TRIES, |program| play(program).is_err());
    let message = play(&program).expect_err("a shrunk program fails");
    Some(Shrunk { program, message })
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without words".into())
}
