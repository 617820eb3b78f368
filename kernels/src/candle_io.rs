//! Borrowing candle's CPU memory as plain f32 slices, for custom ops.

use std::ops::{Deref, Range};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, bail};

/// The elements of a contiguous f32 operand of a custom op's forward.
///
/// # Errors
/// If the operand is not f32 or not contiguous.
pub(crate) fn f32_slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    Ok(&values(storage)?[contiguous(layout)?])
}

/// The elements of a contiguous f32 CPU tensor, borrowed; see `Tensor::contiguous`.
///
/// # Errors
/// If the tensor is not f32, not contiguous or not on the CPU.
pub(crate) fn f32_view(tensor: &Tensor) -> Result<impl Deref<Target = [f32]>> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(cpu) = &*storage else {
        bail!("expected a CPU tensor, got one on {:?}", tensor.device())
    };
    values(cpu)?;
    Ok(F32View { range: contiguous(layout)?, storage })
}

struct F32View<S> {
    storage: S,
    range: Range<usize>,
}

impl<S: Deref<Target = Storage>> Deref for F32View<S> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &*self.storage {
            Storage::Cpu(CpuStorage::F32(values)) => &values[self.range.clone()],
            _ => unreachable!("checked when the view was made, and the lock is held since"),
        }
    }
}

/// Calls `read` with the elements of an f32 CPU tensor, copied first if it is not contiguous.
///
/// # Errors
/// If the tensor is not f32, not on the CPU, or `read` fails.
pub(crate) fn with_f32<R>(tensor: &Tensor, read: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let tensor = tensor.contiguous()?;
    read(&f32_view(&tensor)?)
}

fn values(storage: &CpuStorage) -> Result<&[f32]> {
    match storage {
        CpuStorage::F32(values) => Ok(values),
        _ => bail!("expected f32, got {:?}", storage.dtype()),
    }
}

fn contiguous(layout: &Layout) -> Result<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => {
            bail!("expected a contiguous tensor, got {:?} with strides {:?}", layout.dims(), layout.stride())
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn views_are_the_tensors_elements_and_nothing_else() {
        let matrix = Tensor::arange(0.0_f32, 6.0, &Device::Cpu).unwrap().reshape((3, 2)).unwrap();
        assert_eq!(*f32_view(&matrix.narrow(0, 1, 1).unwrap()).unwrap(), [2.0, 3.0]);
        let transposed = matrix.t().unwrap();
        assert!(f32_view(&transposed).is_err());
        let copied = with_f32(&transposed, |values| Ok(values.to_vec())).unwrap();
        assert_eq!(copied, [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
        assert!(f32_view(&matrix.to_dtype(DType::F64).unwrap()).is_err());
    }
}
