//! Ctrl-C, SIGTERM and SIGHUP: what is at hand is finished and saved, then the process ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fs, future, thread};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Linux's number of the signal that a process gets whose file grows beyond `ulimit -f`.
const SIGXFSZ: i32 = 25;

/// From now on what is written beyond `ulimit -f` fails with its file's name, as on a full disk, instead of ending the process
/// without a word.
///
/// # Errors
/// If the signal cannot be caught; it ends the process then.
pub fn outlive_large_files() -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _context = runtime.enter();
    // Whether anybody still listens makes no difference to what the signal does.
    signal(SignalKind::from_raw(SIGXFSZ)).map(drop)
}

/// Whether someone asked the work to end. Clones share the wish.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    requested: Arc<AtomicBool>,
}

impl Shutdown {
    /// Listens for SIGINT, SIGTERM and SIGHUP from now on. At the first one `says` is logged, what happens then; the second
    /// one ends the process at once, with code 130. SIGHUP, the loss of the terminal, only asks, since the shell repeats what
    /// the system said, and says nothing to a process that was told to ignore it, as by `nohup`.
    ///
    /// # Errors
    /// If the signals cannot be listened for.
    pub fn on_signals(says: &'static str) -> std::io::Result<Self> {
        let shutdown = Self::default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let (mut interrupt, mut terminate, mut hangup) = {
            let _context = runtime.enter();
            let hangup = (!ignores_hangup()).then(|| signal(SignalKind::hangup())).transpose()?;
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, hangup)
        };
        let requested = shutdown.clone();
        thread::Builder::new().name("signals".into()).spawn(move || {
            runtime.block_on(async {
                loop {
                    let insists = tokio::select! {
                        _ = interrupt.recv() => true,
                        _ = terminate.recv() => true,
                        () = received(hangup.as_mut()) => false,
                    };
                    match requested.requested.swap(true, Ordering::Relaxed) {
                        false => tracing::warn!("{says}"),
                        true if insists => std::process::exit(130),
                        true => {}
                    }
                }
            });
        })?;
        Ok(shutdown)
    }

    /// Asks the work to end where it can be saved.
    pub fn request(&self) {
        self.requested.store(true, Ordering::Relaxed); // A flag that is polled; it orders nothing.
    }

    /// Whether someone asked.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }
}

/// Whether whoever started this process told it to ignore SIGHUP.
fn ignores_hangup() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // Bit 0 is signal 1.
    ignored.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 1 == 1))
}

/// When `signal` comes, if it is listened for.
async fn received(signal: Option<&mut Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => future::pending().await,
    }
}
