//! The memory of a ring under loom: plain bytes on the heap, each cache line watched for races.

use std::cell::UnsafeCell;
use std::ptr::NonNull;

use crate::error::RingError;
use crate::protocol::{Header, RECORD_ALIGN};

/// What the caller of [`Memory::span`] is about to do, or has just done.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Access {
    /// Look at the bytes.
    Read,
    /// Change the bytes.
    Write,
}

/// A ring on the heap, as small as it needs to be for a model.
pub(crate) struct Memory {
    header: Header,
    bytes: Box<[UnsafeCell<u8>]>,
    /// One per cache line of `bytes`: holds nothing, but loom knows who touched it when.
    watched: Vec<loom::cell::UnsafeCell<()>>,
}

// SAFETY: the bytes are only handed out as pointers, and `watched` fails the model on every racy access.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn allocate(bytes: usize) -> Result<Self, RingError> {
        let n_lines = bytes.div_ceil(RECORD_ALIGN as usize);
        Ok(Self {
            header: Header::new(),
            bytes: (0..n_lines * RECORD_ALIGN as usize).map(|_| UnsafeCell::new(0)).collect(),
            watched: (0..n_lines).map(|_| loom::cell::UnsafeCell::new(())).collect(),
        })
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// As the mapped memory's, but loom fails the model if another thread's access is not ordered with this
    /// one.
    pub(crate) fn span(&self, offset: usize, n_bytes: usize, access: Access) -> NonNull<[u8]> {
        let cells = &self.bytes[offset..offset + n_bytes];
        let line_bytes = RECORD_ALIGN as usize;
        for line in &self.watched[offset / line_bytes..(offset + n_bytes).div_ceil(line_bytes)] {
            match access {
                Access::Read => line.with(|_| ()),
                Access::Write => line.with_mut(|_| ()),
            }
        }
        let start = NonNull::from(cells).cast::<u8>();
        NonNull::slice_from_raw_parts(start, n_bytes)
    }
}
