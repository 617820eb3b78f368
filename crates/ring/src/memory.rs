//! The memory of a ring: a memfd with the header page and the bytes, mapped into this process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::error::RingError;
use crate::protocol::Header;
use crate::room::available_bytes;

/// `r3ring\0\0`, little-endian.
const MAGIC: u64 = u64::from_le_bytes(*b"r3ring\0\0");

/// Changes with every change of [`Header`] or of how records lie in the ring.
const FORMAT_VERSION: u32 = 1;

const PAGE_BYTES: usize = 4096;
const _: () = assert!(size_of::<Header>() <= PAGE_BYTES && align_of::<Header>() <= PAGE_BYTES);

/// Neither the file nor any mapping of it can lose pages any more, so touching them cannot raise SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// What the caller of [`Memory::span`] is about to do; loom checks it, the machine does not.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Access {
    /// Look at the bytes.
    Read,
    /// Change the bytes.
    Write,
}

/// A mapped ring, unmapped when dropped.
pub(crate) struct Memory {
    /// Start of the header page; `PAGE_BYTES + capacity` bytes are mapped from here.
    base: NonNull<u8>,
    capacity: usize,
    file: OwnedFd,
}

// SAFETY: the mapping belongs to no thread; the header is atomics, and the bytes are only handed out as
// pointers.
unsafe impl Send for Memory {}
// SAFETY: as above: `&Memory` gives atomics and pointers only.
unsafe impl Sync for Memory {}

impl Memory {
    /// A new ring of at least `bytes` bytes, whole pages and all of them backed by memory.
    pub(crate) fn allocate(bytes: usize) -> Result<Self, RingError> {
        let available_bytes = available_bytes();
        let capacity = bytes.max(1).checked_next_multiple_of(PAGE_BYTES);
        let file_bytes = capacity.and_then(|capacity| capacity.checked_add(PAGE_BYTES));
        let (Some(capacity), Some(file_bytes)) = (capacity, file_bytes) else {
            return Err(RingError::NoRoom { needed_bytes: bytes as u64, available_bytes });
        };
        let needed_bytes = file_bytes as u64;
        // `fallocate` alone would not do: asked for more than there is, it may get this process killed.
        if needed_bytes > available_bytes {
            return Err(RingError::NoRoom { needed_bytes, available_bytes });
        }
        let failed = |call| move |errno| system_error(call, needed_bytes, errno);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("r3-ring", flags).map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&file, needed_bytes).map_err(failed("ftruncate"))?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, needed_bytes)
            .map_err(failed("fallocate"))?;
        rustix::fs::fcntl_add_seals(&file, SEALS).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        let memory = Self::map(file, capacity)?;
        let identity = &memory.header().identity.0;
        identity.format_version.store(FORMAT_VERSION.into(), Relaxed);
        identity.capacity.store(capacity as u64, Relaxed);
        identity.magic.store(MAGIC, Release); // Pairs with the load in `open`.
        Ok(memory)
    }

    /// A ring that another process, or this one, allocated.
    pub(crate) fn open(file: OwnedFd) -> Result<Self, RingError> {
        let unreadable = |errno: Errno| RingError::Unreadable {
            what: "the size of the ring's file",
            source: errno.into(),
        };
        let size = rustix::fs::fstat(&file).map_err(unreadable)?.st_size;
        let file_bytes = u64::try_from(size).unwrap_or(0);
        let seals = rustix::fs::fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return Err(RingError::Unsealed);
        }
        let capacity = usize::try_from(file_bytes).ok().and_then(|bytes| bytes.checked_sub(PAGE_BYTES));
        let Some(capacity) = capacity.filter(|bytes| *bytes > 0 && bytes.is_multiple_of(PAGE_BYTES)) else {
            return Err(RingError::Capacity { header_bytes: 0, file_bytes });
        };
        let memory = Self::map(file, capacity)?;
        let identity = &memory.header().identity.0;
        let magic = identity.magic.load(Acquire); // Pairs with the store in `allocate`.
        if magic != MAGIC {
            return Err(RingError::NotARing { magic });
        }
        let found = identity.format_version.load(Relaxed);
        if found != FORMAT_VERSION.into() {
            let found = u32::try_from(found).unwrap_or(u32::MAX);
            return Err(RingError::FormatVersion { found, expected: FORMAT_VERSION });
        }
        let header_bytes = identity.capacity.load(Relaxed);
        if header_bytes != capacity as u64 {
            return Err(RingError::Capacity { header_bytes, file_bytes: capacity as u64 });
        }
        Ok(memory)
    }

    fn map(file: OwnedFd, capacity: usize) -> Result<Self, RingError> {
        let mapped_bytes = PAGE_BYTES + capacity;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // Populated now: faults while writing the first lap would cost more than half of the throughput.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the kernel chooses an address nobody else uses.
        let mapped = unsafe { rustix::mm::mmap(ptr::null_mut(), mapped_bytes, access, flags, &file, 0) };
        let mapped = mapped.map_err(|errno| system_error("mmap", mapped_bytes as u64, errno))?;
        let base = NonNull::new(mapped.cast::<u8>()).expect("mmap never returns page 0 unless asked to");
        Ok(Self { base, capacity, file })
    }

    /// Bytes for records, a multiple of the page.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity as u64
    }

    pub(crate) fn header(&self) -> &Header {
        // SAFETY: the header fits the first mapped page, which is page-aligned and stays mapped as long as
        // `self`; it is made of atomics, valid for every bit pattern and for writes by others.
        unsafe { self.base.cast::<Header>().as_ref() }
    }

    /// The `n_bytes` bytes from `offset` on, as a pointer: whether they may be touched is the protocol's
    /// business.
    ///
    /// # Panics
    /// If they do not lie within the ring.
    pub(crate) fn span(&self, offset: usize, n_bytes: usize, _access: Access) -> NonNull<[u8]> {
        let end = offset.checked_add(n_bytes).expect("a span fits the address space");
        assert!(end <= self.capacity, "bytes {offset}..{end} of a ring of {}", self.capacity);
        // SAFETY: `PAGE_BYTES + capacity` bytes are mapped from `base`, and `offset <= capacity` was just
        // checked.
        let start = unsafe { self.base.add(PAGE_BYTES + offset) };
        NonNull::slice_from_raw_parts(start, n_bytes)
    }
}

impl AsFd for Memory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this very range was mapped by `map`, and whatever borrowed from it borrowed from `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), PAGE_BYTES + self.capacity) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

fn system_error(call: &'static str, needed_bytes: u64, errno: Errno) -> RingError {
    RingError::System { call, needed_bytes, source: errno.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(bytes: u64) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        rustix::fs::fcntl_add_seals(&file, SEALS).unwrap();
        file
    }

    fn refusal(file: OwnedFd) -> RingError {
        Memory::open(file).map(|memory| memory.capacity()).expect_err("must be refused")
    }

    #[test]
    fn a_ring_larger_than_the_machine_is_refused_before_it_is_made() {
        for bytes in [1 << 50, usize::MAX] {
            let refused = Memory::allocate(bytes).map(|memory| memory.capacity());
            assert!(
                matches!(refused, Err(RingError::NoRoom { needed_bytes, .. }) if needed_bytes >= bytes as u64)
            );
        }
    }

    #[test]
    fn only_a_sealed_ring_of_the_right_size_and_version_opens() {
        assert!(matches!(refusal(sealed(8192)), RingError::NotARing { magic: 0 }));
        assert!(matches!(refusal(sealed(4096)), RingError::Capacity { file_bytes: 4096, .. }));
        assert!(matches!(refusal(sealed(8200)), RingError::Capacity { file_bytes: 8200, .. }));
        let unsealed = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        assert!(matches!(refusal(unsealed), RingError::Unsealed));
        let device = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(refusal(device.into()), RingError::Unsealed));

        let memory = Memory::allocate(1).unwrap();
        let again = || memory.as_fd().try_clone_to_owned().unwrap();
        assert_eq!(Memory::open(again()).unwrap().capacity(), 4096);
        let identity = &memory.header().identity.0;
        identity.capacity.store(8192, Relaxed);
        let expected = RingError::Capacity { header_bytes: 8192, file_bytes: 4096 };
        assert_eq!(refusal(again()).to_string(), expected.to_string());
        identity.format_version.store(2, Relaxed);
        assert!(matches!(refusal(again()), RingError::FormatVersion { found: 2, expected: 1 }));
    }

    #[test]
    fn the_file_can_not_shrink_under_the_mapping() {
        let memory = Memory::allocate(8192).unwrap();
        assert_eq!(rustix::fs::ftruncate(memory.as_fd(), 4096), Err(Errno::PERM));
    }
}
