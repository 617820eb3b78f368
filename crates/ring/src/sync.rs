//! The atomics of the protocol: the standard library's, or loom's when the protocol is model-checked.
//!
//! Every memory ordering the protocol relies on is one [`Edge`], so the model can weaken each in turn and
//! show that it is needed.

use std::sync::atomic::Ordering;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, fence};

/// One end of a happens-before edge between writer and reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Edge {
    /// The writer's store of `head`: a record's bytes become visible. Pairs with `HeadObserve`.
    HeadPublish,
    /// The reader's load of `head`. Pairs with `HeadPublish`.
    HeadObserve,
    /// The reader's store of `tail`: it is done with a record's bytes. Pairs with `TailObserve`.
    TailPublish,
    /// The writer's load of `tail`. Pairs with `TailPublish`.
    TailObserve,
    /// Between storing a position and looking for a waiter. Pairs with `WaitFence`.
    WakeFence,
    /// Between saying "I wait" and looking at the position again. Pairs with `WakeFence`.
    WaitFence,
}

impl Edge {
    /// The ordering that makes the protocol sound.
    const fn sound(self) -> Ordering {
        match self {
            Self::HeadPublish | Self::TailPublish => Ordering::Release,
            Self::HeadObserve | Self::TailObserve => Ordering::Acquire,
            // Store here, load there, on both sides: only a total order rules out that both miss.
            Self::WakeFence | Self::WaitFence => Ordering::SeqCst,
        }
    }

    /// The next weaker ordering: the broken control of the loom model.
    #[cfg(loom)]
    const fn weakened(self) -> Ordering {
        match self {
            Self::HeadPublish | Self::TailPublish | Self::HeadObserve | Self::TailObserve => {
                Ordering::Relaxed
            }
            Self::WakeFence | Self::WaitFence => Ordering::AcqRel,
        }
    }
}

/// The orderings in force: all sound, except for the one that a broken control weakens under loom.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Orders {
    #[cfg(loom)]
    pub(crate) weakened: Option<Edge>,
}

impl Orders {
    #[inline]
    pub(crate) fn of(self, edge: Edge) -> Ordering {
        #[cfg(loom)]
        if self.weakened == Some(edge) {
            return edge.weakened();
        }
        edge.sound()
    }
}

/// Turns at the loop before an end of the ring goes to sleep: about a microsecond. None under loom, where
/// turning without a state change only multiplies the executions.
pub(crate) const fn spins() -> u32 {
    if cfg!(loom) { 0 } else { 200 }
}

#[cfg(not(loom))]
pub(crate) use os_futex::Futex;

#[cfg(not(loom))]
mod os_futex {
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    use rustix::io::Errno;
    use rustix::thread::futex;

    /// A 32-bit word in shared memory that one end sleeps on.
    #[repr(transparent)]
    pub(crate) struct Futex {
        pub(crate) word: AtomicU32,
    }

    impl Futex {
        /// Sleeps while the word is `expected`; wakes early without a reason now and then. False after
        /// `limit`.
        pub(crate) fn wait(&self, expected: u32, limit: Duration) -> bool {
            let limit = futex::Timespec {
                tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: limit.subsec_nanos().into(),
            };
            // Not `PRIVATE`: the other end may live in another process.
            let outcome = futex::wait(&self.word, futex::Flags::empty(), expected, Some(&limit));
            outcome != Err(Errno::TIMEDOUT)
        }

        /// Wakes whoever sleeps on the word.
        pub(crate) fn wake(&self) {
            futex::wake(&self.word, futex::Flags::empty(), 1).expect("the word is mapped and aligned");
        }
    }
}

#[cfg(loom)]
pub(crate) use loom_futex::Futex;

#[cfg(loom)]
mod loom_futex {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use loom::sync::atomic::AtomicU32;
    use loom::sync::{Condvar, Mutex};

    /// The kernel's futex: compare and sleep are one step under the queue's lock, and nothing times out, so a
    /// lost wake-up is a deadlock that loom reports.
    pub(crate) struct Futex {
        pub(crate) word: AtomicU32,
        queue: Mutex<()>,
        sleepers: Condvar,
    }

    impl Futex {
        pub(crate) fn new() -> Self {
            Self { word: AtomicU32::new(0), queue: Mutex::new(()), sleepers: Condvar::new() }
        }

        pub(crate) fn wait(&self, expected: u32, _limit: Duration) -> bool {
            let queue = self.queue.lock().expect("no thread panics with the queue locked");
            if self.word.load(Ordering::Relaxed) == expected {
                drop(self.sleepers.wait(queue).expect("no thread panics with the queue locked"));
            }
            true
        }

        pub(crate) fn wake(&self) {
            let _queue = self.queue.lock().expect("no thread panics with the queue locked");
            self.sleepers.notify_all();
        }
    }
}
