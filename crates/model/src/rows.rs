//! Activations on plain buffers, which are used again.

/// Activations `[T, width]` in a buffer that goes back to its pool when it is no longer needed.
#[derive(Debug)]
pub struct Rows {
    buffer: Vec<f32>,
    len: usize,
    width: usize,
}

impl Rows {
    /// The values, row-major.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.buffer[..self.len]
    }

    pub(crate) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.buffer[..self.len]
    }

    /// Takes the values out: what is left knows its shape and holds nothing.
    pub(crate) fn take(&mut self) -> Self {
        Self { buffer: std::mem::take(&mut self.buffer), ..*self }
    }

    pub(crate) fn rows(&self) -> usize {
        self.len / self.width
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }
}

/// Buffers that are free.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    free: Vec<Vec<f32>>,
}

impl Pool {
    /// Rows that hold whatever was there.
    pub(crate) fn take(&mut self, rows: usize, width: usize) -> Rows {
        let len = rows * width;
        // The smallest that is large enough, or else the largest grows: were any taken, all would in turn grow to
        // the size of the logits.
        let fit = |buffer: &Vec<f32>| (buffer.len() < len, buffer.len().abs_diff(len));
        let best = (0..self.free.len()).min_by_key(|&at| fit(&self.free[at]));
        let mut buffer = best.map(|at| self.free.swap_remove(at)).unwrap_or_default();
        if buffer.len() < len {
            buffer.clear(); // Or growing would copy what nobody reads.
            buffer.resize(len, 0.0);
        }
        Rows { buffer, len, width }
    }

    pub(crate) fn release(&mut self, rows: Rows) {
        // Of rows that were taken out there is nothing.
        if !rows.buffer.is_empty() {
            self.free.push(rows.buffer);
        }
    }

    /// Bytes of all buffers that are free.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.free.iter().map(|buffer| size_of_val(&buffer[..])).sum()
    }

    /// Frees the largest buffers until `bytes` are given back; returns how many are not.
    pub(crate) fn give_back(&mut self, bytes: usize) -> usize {
        self.free.sort_unstable_by_key(Vec::len);
        let mut left = bytes;
        while let Some(buffer) = self.free.pop_if(|_| left > 0) {
            left = left.saturating_sub(size_of_val(&buffer[..]));
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_activations_do_not_take_large_buffers() {
        let mut pool = Pool::default();
        for _ in 0..4 {
            let taken = [(8, 1000), (8, 16), (8, 16)].map(|(rows, width)| pool.take(rows, width));
            taken.into_iter().rev().for_each(|rows| pool.release(rows));
        }
        let mut held: Vec<usize> = pool.free.iter().map(Vec::len).collect();
        held.sort_unstable();
        assert_eq!(held, [128, 128, 8000]);
    }

    #[test]
    fn rows_that_were_taken_out_leave_their_shape_and_no_memory() {
        let mut pool = Pool::default();
        let mut rows = pool.take(2, 3);
        rows.values_mut().fill(5.0);
        let taken = rows.take();
        assert_eq!((taken.values(), rows.rows(), rows.width()), (&[5.0; 6][..], 2, 3));
        pool.release(rows);
        assert_eq!(pool.free.len(), 0);
        pool.release(taken);
        assert_eq!(pool.bytes(), 24);
    }

    #[test]
    fn the_largest_buffers_are_given_back_first_and_no_more_than_are_asked_for() {
        let mut pool = Pool::default();
        let taken = [1000, 10, 500].map(|len| pool.take(1, len));
        taken.into_iter().for_each(|rows| pool.release(rows));
        assert_eq!(pool.give_back(0), 0);
        assert_eq!((pool.give_back(4004), pool.free.len()), (0, 1));
        assert_eq!((pool.give_back(50), pool.free.len()), (10, 0));
    }
}
