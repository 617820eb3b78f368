//! The allocator of the `r3` process: large arrays lie together on huge pages.
//!
//! Weights, gradients, moments and activations are read from end to end. On pages of 4 KiB that is a page fault for the
//! first touch of each, and later an entry of the translation buffers; on pages of 2 MiB both are 512 times fewer. Linux gives huge pages
//! to memory that asks for them, where `/sys/kernel/mm/transparent_hugepage/enabled` says `madvise` or `always`. Most
//! arrays are smaller than such a page, so each asking for itself would get none: they share one mapping. Where there are no huge
//! pages, or no room for the mapping, nothing else changes.

mod extents;

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::huge_pages::extents::Extents;

/// Bytes of a huge page, on x86-64 and on aarch64 with base pages of 4 KiB.
const HUGE_PAGE: usize = 2 << 20;

/// Smaller blocks are the system's. An extent's own bookkeeping must be below.
const SMALLEST: usize = 256 << 10;

/// Blocks begin and end on base pages, which is the largest alignment that is served.
const BASE_PAGE: usize = 4 << 10;

/// Address space that is reserved, in bytes. Only what is touched is memory, save where the system counts what is
/// reserved, and then it refuses so much.
const RESERVED: usize = 16 << 40;

/// From here on, in bytes, zeros come from the system instead of being written.
const ZEROS_OF_SYSTEM: usize = 16 << 20;

/// Serves blocks of 256 KiB and more from one mapping that asks for huge pages, and smaller ones from the system.
///
/// A block takes the lowest free extent that holds it, and free neighbours are one extent. What is free again stays
/// resident for the next block, so a process keeps the most that it ever needed. For `#[global_allocator]`; a lock is
/// held while extents are looked up, and never for small blocks.
///
/// A large block of zeros takes new memory where it is touched, as one of the system does: a KV cache may be far larger than
/// what is ever used of it.
#[derive(Debug)]
pub struct HugePages {
    mapping: Mutex<Mapping>,
}

#[derive(Debug)]
enum Mapping {
    Unmade,
    Refused,
    Made { base: usize, extents: Extents },
}

impl HugePages {
    /// An allocator that maps nothing until a large block is asked for.
    #[expect(clippy::new_without_default, reason = "a static is made of it, and Default is not const")]
    pub const fn new() -> Self {
        Self { mapping: Mutex::new(Mapping::Unmade) }
    }

    /// A block for `layout`, and how many of its first bytes were in use before; none where the system has to help.
    fn take(&self, layout: Layout) -> Option<(*mut u8, usize)> {
        if layout.size() < SMALLEST || layout.align() > BASE_PAGE {
            return None;
        }
        let mut mapping = self.lock();
        if let Mapping::Unmade = *mapping {
            *mapping = map().unwrap_or(Mapping::Refused);
        }
        let Mapping::Made { base, extents } = &mut *mapping else { return None };
        let taken = extents.take(layout.size().next_multiple_of(BASE_PAGE))?;
        Some((ptr::with_exposed_provenance_mut(*base + taken.start), taken.used.min(layout.size())))
    }

    /// Takes `block` back, or says that it is the system's.
    fn give(&self, block: *mut u8, layout: Layout) -> bool {
        if layout.size() < SMALLEST || layout.align() > BASE_PAGE {
            return false;
        }
        let Mapping::Made { base, extents } = &mut *self.lock() else { return false };
        let Some(start) = block.addr().checked_sub(*base).filter(|&start| start < extents.limit()) else {
            return false;
        };
        extents.give(start, layout.size().next_multiple_of(BASE_PAGE));
        true
    }

    fn lock(&self) -> MutexGuard<'_, Mapping> {
        self.mapping.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reserves address space that asks for huge pages.
fn map() -> Option<Mapping> {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: the kernel chooses an address where nothing is mapped.
    let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), RESERVED, access, flags) }.ok()?;
    // A dump of the process would have to pass over all that is reserved.
    for advice in [Advice::LinuxHugepage, Advice::LinuxDontDump] {
        // SAFETY: the advice changes no byte of the mapping, which is ours. A kernel that refuses it is no loss.
        let _unsupported = unsafe { rustix::mm::madvise(base, RESERVED, advice) };
    }
    let start = base.expose_provenance();
    let aligned = start.next_multiple_of(HUGE_PAGE);
    Some(Mapping::Made { base: aligned, extents: Extents::new(RESERVED - (aligned - start)) })
}

/// Makes the first `len` bytes of `block` zero.
///
/// # Safety
/// They are the caller's to write.
unsafe fn zero(block: *mut u8, len: usize) {
    let skipped = block.align_offset(HUGE_PAGE);
    let (mut start, mut end) = (0, 0);
    if len >= ZEROS_OF_SYSTEM {
        (start, end) = (skipped, skipped + (len - skipped) / HUGE_PAGE * HUGE_PAGE);
        // SAFETY: `start` is less than `len`, since a huge page is.
        let first = unsafe { block.add(start) };
        // SAFETY: whole pages of the caller's memory, which is private and anonymous, so that it reads as zeros afterwards.
        if unsafe { rustix::mm::madvise(first.cast(), end - start, Advice::LinuxDontNeed) }.is_err() {
            (start, end) = (0, 0);
        }
    }
    // SAFETY: `start` is at most `len`, and so much is the caller's.
    unsafe { block.write_bytes(0, start) };
    // SAFETY: `end` is at most `len`.
    let rest = unsafe { block.add(end) };
    // SAFETY: the bytes from `end` to `len` are the caller's.
    unsafe { rest.write_bytes(0, len - end) };
}

// SAFETY: a block is the system's or lies in an extent that nobody else has until it is given back (`Extents::take`); which of the
// two is told by its layout and address. Extents are of whole base pages, and allocate less than `SMALLEST` at a time,
// so that the lock is not taken again while it is held.
unsafe impl GlobalAlloc for HugePages {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match self.take(layout) {
            Some((block, _)) => block,
            // SAFETY: the caller's promises are those that the system asks for.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match self.take(layout) {
            Some((block, used)) => {
                // SAFETY: the block is ours and longer than what was used of it; the rest the kernel maps as zeros.
                unsafe { zero(block, used) };
                block
            }
            // SAFETY: the caller's promises are those that the system asks for.
            None => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if !self.give(block, layout) {
            // SAFETY: the block is not of the mapping, so the system made it for this layout.
            unsafe { System.dealloc(block, layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::slice;
    use std::thread;

    use super::*;

    /// A block that is given back at the end.
    struct Block<'a> {
        memory: &'a HugePages,
        start: *mut u8,
        layout: Layout,
    }

    impl<'a> Block<'a> {
        fn new(memory: &'a HugePages, size: usize, align: usize) -> Self {
            let layout = Layout::from_size_align(size, align).unwrap();
            // SAFETY: the layout is not empty.
            let start = unsafe { memory.alloc(layout) };
            assert!(!start.is_null() && start.addr().is_multiple_of(align));
            Self { memory, start, layout }
        }

        fn zeroed(memory: &'a HugePages, size: usize) -> Self {
            let layout = Layout::from_size_align(size, 64).unwrap();
            // SAFETY: the layout is not empty.
            let start = unsafe { memory.alloc_zeroed(layout) };
            Self { memory, start, layout }
        }

        fn resize(&mut self, size: usize) {
            // SAFETY: the block was made by this allocator for this layout, and the size is not zero.
            self.start = unsafe { self.memory.realloc(self.start, self.layout, size) };
            self.layout = Layout::from_size_align(size, self.layout.align()).unwrap();
        }

        fn fill(&mut self, byte: u8) {
            // SAFETY: the block has so many bytes, and nobody else sees them.
            unsafe { self.start.write_bytes(byte, self.layout.size()) };
        }

        /// Whether the first `len` bytes are `byte`. They have been written.
        fn holds(&self, byte: u8, len: usize) -> bool {
            // SAFETY: the block has at least so many bytes, and they have been written.
            let bytes = unsafe { slice::from_raw_parts(self.start, len.min(self.layout.size())) };
            bytes.iter().all(|&held| held == byte)
        }

        fn is_mapped(&self) -> bool {
            let Mapping::Made { base, extents } = &*self.memory.lock() else { return false };
            (*base..*base + extents.limit()).contains(&self.start.addr())
        }
    }

    impl Drop for Block<'_> {
        fn drop(&mut self) {
            // SAFETY: the block was made by this allocator for this layout.
            unsafe { self.memory.dealloc(self.start, self.layout) };
        }
    }

    #[test]
    fn large_blocks_are_mapped_and_small_or_strangely_aligned_ones_are_the_systems() {
        let memory = HugePages::new();
        for (size, align, mapped) in
            [(SMALLEST, BASE_PAGE, true), (SMALLEST - 1, 64, false), (SMALLEST, 2 * BASE_PAGE, false)]
        {
            let mut block = Block::new(&memory, size, align);
            assert_eq!(block.is_mapped(), mapped, "{size} {align}");
            block.fill(1);
        }
    }

    #[test]
    fn zeroed_blocks_are_zero_where_they_were_used_and_beyond() {
        let memory = HugePages::new();
        let mut used = Block::new(&memory, SMALLEST + 5000, 64);
        used.fill(1);
        let start = used.start;
        drop(used);
        let zeroed = Block::zeroed(&memory, 4 * SMALLEST);
        assert_eq!(zeroed.start, start, "the lowest extent is taken again");
        assert!(zeroed.holds(0, 4 * SMALLEST));
    }

    #[test]
    fn a_large_block_of_zeros_takes_no_memory_before_it_is_touched() {
        let memory = HugePages::new();
        let (before, len) = (Block::new(&memory, SMALLEST, 64), 4 * ZEROS_OF_SYSTEM);
        let mut used = Block::new(&memory, len, 64);
        used.fill(1);
        let start = used.start;
        drop(used);
        let zeroed = Block::zeroed(&memory, len);
        assert!(zeroed.start == start && !start.addr().is_multiple_of(HUGE_PAGE), "not whole huge pages");
        let pages = resident_pages(start, len);
        assert!(pages <= 2 * HUGE_PAGE / BASE_PAGE, "{pages} pages of {}", len / BASE_PAGE);
        assert!(zeroed.holds(0, len));
        drop(before);
    }

    /// Base pages of `len` bytes from `start` on that are memory, as `/proc/self/pagemap` says.
    fn resident_pages(start: *const u8, len: usize) -> usize {
        let mut entries = vec![0_u64; len / BASE_PAGE];
        let map = File::open("/proc/self/pagemap").unwrap();
        let at = (start.addr() / BASE_PAGE * size_of::<u64>()) as u64;
        map.read_exact_at(bytemuck::cast_slice_mut(&mut entries), at).unwrap();
        entries.iter().filter(|&&entry| entry >> 63 == 1).count()
    }

    #[test]
    fn a_block_that_grows_and_shrinks_keeps_what_it_holds_across_the_systems_border() {
        let memory = HugePages::new();
        let mut size = SMALLEST / 2;
        let mut block = Block::new(&memory, size, 64);
        for next in [3 * SMALLEST, 9 * SMALLEST, SMALLEST, SMALLEST / 4] {
            block.fill(7);
            block.resize(next);
            assert!(block.holds(7, size), "{size} to {next}");
            size = next;
        }
    }

    #[test]
    fn threads_never_share_a_block() {
        let memory = HugePages::new();
        let work = |mark: u8| {
            for round in 0..200 {
                let mut block = Block::new(&memory, SMALLEST + 5000 * (round * usize::from(mark) % 17), 64);
                block.fill(mark);
                assert!(block.holds(mark, usize::MAX));
            }
        };
        thread::scope(|scope| (1..=4).for_each(|mark| drop(scope.spawn(move || work(mark)))));
    }

    #[test]
    fn without_a_mapping_every_block_is_the_systems() {
        let memory = HugePages { mapping: Mutex::new(Mapping::Refused) };
        let block = Block::new(&memory, SMALLEST, 64);
        assert!(!block.is_mapped() && !memory.give(block.start, block.layout));
    }

    #[test]
    fn what_no_address_range_holds_is_refused_and_not_fatal() {
        let too_much = Layout::from_size_align(1 << 47, 64).unwrap();
        // SAFETY: the layout is not empty, and no block comes of it.
        assert!(unsafe { HugePages::new().alloc(too_much) }.is_null());
    }
}
