//! Buffers that outlive calls: fresh memory costs a page fault every 4 KiB, which is more than a pass over it does.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// One cache line; every buffer starts on one.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

/// What a buffer may be read as.
///
/// # Safety
/// Every bit pattern must be a value, the alignment at most that of a cache line, and drop must do nothing.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: any four bytes are an f32.
unsafe impl Plain for f32 {}
// SAFETY: any four bytes are a u32.
unsafe impl Plain for u32 {}
// SAFETY: any eight bytes are a u64.
unsafe impl Plain for u64 {}

thread_local! {
    /// What calls on this thread put back. A stack, since a thread that waits for its tasks may run others meanwhile.
    static FREE: RefCell<Vec<Vec<CacheLine>>> = const { RefCell::new(Vec::new()) };
}

/// Elements borrowed from the thread's free buffers until dropped. They hold whatever the last borrower left.
pub(crate) struct Scratch<T> {
    lines: Vec<CacheLine>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Plain> Scratch<T> {
    /// `len` elements.
    pub(crate) fn take(len: usize) -> Self {
        let n_lines = (len * size_of::<T>()).div_ceil(size_of::<CacheLine>());
        let mut lines = FREE.with_borrow_mut(|free| {
            // The smallest that is large enough, or else the largest, which grows.
            let fit = |lines: &Vec<CacheLine>| (lines.len() < n_lines, lines.len().abs_diff(n_lines));
            let best = (0..free.len()).min_by_key(|&at| fit(&free[at]));
            best.map(|at| free.swap_remove(at)).unwrap_or_default()
        });
        if lines.len() < n_lines {
            lines.clear(); // Or growing would copy what nobody reads.
            lines.resize(n_lines, CacheLine([0; 64]));
        }
        Self { lines, len, elements: PhantomData }
    }
}

impl<T: Plain> Deref for Scratch<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the lines are borrowed as long as the slice and hold `len` elements, and any bytes are a `T`.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl<T: Plain> DerefMut for Scratch<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`, and `self` is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

impl<T> Drop for Scratch<T> {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        FREE.with_borrow_mut(|free| free.push(lines));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_and_starts_on_a_cache_line() {
        let start = {
            let mut scratch = Scratch::<f32>::take(100);
            scratch.fill(1.0);
            assert_eq!(*scratch, [1.0; 100]);
            scratch.as_ptr().addr()
        };
        let (first, second) = (Scratch::<u32>::take(90), Scratch::<u32>::take(3));
        assert_eq!((first.as_ptr().addr(), *first == [1.0_f32.to_bits(); 90]), (start, true));
        assert_ne!(second.as_ptr().addr(), start, "it is taken");
        assert_eq!((first.len(), second.len(), second.as_ptr().addr() % 64), (90, 3, 0));
    }
}
