//! Products of plain f32 matrices for backward passes, through the `gemm` crate.
//!
//! Gradients need no bits in common with an engine, only determinism: the crate's reduction order depends on
//! shapes and the machine's caches, not on scheduling.

use gemm::Parallelism;

/// A row-major matrix, or its transpose.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    strides: (isize, isize),
}

impl<'a> Matrix<'a> {
    /// Row-major rows of `columns` elements.
    pub(crate) fn new(values: &'a [f32], columns: usize) -> Self {
        let rows = values.len() / columns;
        assert_eq!(values.len(), rows * columns, "whole rows of {columns} elements");
        Self { values, rows, columns, strides: (columns.cast_signed(), 1) }
    }

    /// The transpose, without moving anything.
    pub(crate) fn t(self) -> Self {
        let (row, column) = self.strides;
        Self { rows: self.columns, columns: self.rows, strides: (column, row), ..self }
    }
}

/// `out = a b`, row-major, overwritten whole; over rayon's threads or on this one.
pub(crate) fn product(a: Matrix<'_>, b: Matrix<'_>, out: &mut [f32], parallelism: Parallelism) {
    let (m, k, n) = (a.rows, a.columns, b.columns);
    assert_eq!(b.rows, k, "inner dimensions agree");
    assert_eq!(out.len(), m * n, "the product is [{m}, {n}]");
    if k == 0 {
        out.fill(0.0);
        return;
    }
    let ((a_row, a_column), (b_row, b_column)) = (a.strides, b.strides);
    // SAFETY: shapes were checked above, and strides walk exactly the slices the matrices were made from; `out` is
    // exclusive and `[m, n]` row-major. With `read_dst` false its old contents are not read.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n.cast_signed(),
            false,
            a.values.as_ptr(),
            a_column,
            a_row,
            b.values.as_ptr(),
            b_column,
            b_row,
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposes_and_empty_sums_multiply_as_on_paper() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, -1.0, 0.5, 2.0]);
        let mut out = [f32::NAN; 6];
        product(Matrix::new(&a, 3).t(), Matrix::new(&b, 2), &mut out, Parallelism::None);
        assert_eq!(out, [3.0, 7.0, 4.5, 8.0, 6.0, 9.0]);
        product(Matrix::new(&a, 2), Matrix::new(&b, 2).t(), &mut out, Parallelism::None);
        assert_eq!(out, [-1.0, 4.5, -1.0, 9.5, -1.0, 14.5]);
        product(Matrix::new(&[], 3).t(), Matrix::new(&[], 2), &mut out, Parallelism::None);
        assert_eq!(out, [0.0; 6]);
    }
}
