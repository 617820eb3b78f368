//! Ctrl-C and SIGTERM: what is at hand is finished and saved, then the process ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tokio::signal::unix::{SignalKind, signal};

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
    /// Listens for SIGINT and SIGTERM from now on. At the first one `says` is logged, what happens then; the second one ends
    /// the process at once, with code 130.
    ///
    /// # Errors
    /// If the signals cannot be listened for.
    pub fn on_signals(says: &'static str) -> std::io::Result<Self> {
        let shutdown = Self::default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let (mut interrupt, mut terminate) = {
            let _context = runtime.enter();
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
        };
        let requested = shutdown.clone();
        thread::Builder::new().name("signals".into()).spawn(move || {
            runtime.block_on(async {
                loop {
                    tokio::select! {
                        _ = interrupt.recv() => {}
                        _ = terminate.recv() => {}
                    }
                    if requested.requested.swap(true, Ordering::Relaxed) {
                        std::process::exit(130);
                    }
                    tracing::warn!("{says}");
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
