//! The ring: rollouts cross from worker to trainer as frames in shared memory, written once, read in place.
//!
//! One writer, one reader, variable-size records. The two ends may be threads or processes: it is the same
//! code. A full ring means wait, never drop; every wait has a deadline; a peer that dies or goes away is an
//! error, and a writer killed at any instruction leaves only whole frames. [`frame`] puts a rollout into a
//! record and checks everything on the way out. This crate must never know what a frame is worth: no groups,
//! no batches, no clocks beyond its deadlines, no model.
//!
//! Start with [`ring::Ring`], then the protocol both ends share (`protocol.rs`), then [`writer`] and
//! [`reader`].
//!
//! ```
//! # fn main() -> Result<(), r3_ring::error::RingError> {
//! use std::time::Duration;
//!
//! let (mut writer, mut reader) = r3_ring::ring::Ring::create(1 << 16)?;
//! let mut reservation = writer.reserve(5, Duration::from_secs(1))?;
//! reservation.copy_from_slice(b"hello");
//! reservation.commit();
//! let id = reader.next(Duration::from_secs(1))?;
//! assert_eq!(reader.bytes(id), b"hello");
//! reader.release(id);
//! # Ok(())
//! # }
//! ```
#![expect(unsafe_code, reason = "shared memory is mapped by address and handed out as slices")]

pub mod error;
pub mod frame;
mod frame_layout;
#[cfg(all(test, loom))]
mod loom_model;
#[cfg_attr(loom, path = "loom_memory.rs")]
mod memory;
mod peer;
mod protocol;
pub mod reader;
pub mod ring;
#[cfg(not(loom))]
pub mod room;
mod sync;
pub mod writer;
