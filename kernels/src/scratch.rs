//! Buffers that outlive calls: fresh memory costs a page fault every 4 KiB, which is more than a pass over it does.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut};

/// One cache line; every buffer starts on one.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

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

impl<T: Pod> Scratch<T> {
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

impl<T: Pod> Deref for Scratch<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        cast_slice(&cast_slice::<_, u8>(&self.lines)[..self.len * size_of::<T>()])
    }
}

impl<T: Pod> DerefMut for Scratch<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        cast_slice_mut(&mut cast_slice_mut::<_, u8>(&mut self.lines)[..self.len * size_of::<T>()])
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
        assert_eq!(Scratch::<[u32; 48]>::take(3).len(), 3, "an element may end inside of a line");
    }
}
