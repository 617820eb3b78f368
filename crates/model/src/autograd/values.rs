//! Borrowing candle's CPU memory as plain f32 slices.

use std::ops::Deref;

use candle_core::{CpuStorage, Result, Storage, Tensor, bail};

/// The elements of a contiguous f32 CPU tensor, borrowed.
///
/// # Errors
/// If the tensor is not f32, not contiguous or not on the CPU.
pub(super) fn values(tensor: &Tensor) -> Result<impl Deref<Target = [f32]>> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(CpuStorage::F32(_)), Some((start, end))) = (&*storage, layout.contiguous_offsets())
    else {
        bail!(
            "{:?} {:?} on {:?} is not contiguous f32 in host memory",
            tensor.dtype(),
            layout,
            tensor.device()
        )
    };
    Ok(Values { range: start..end, storage })
}

struct Values<S> {
    storage: S,
    range: std::ops::Range<usize>,
}

impl<S: Deref<Target = Storage>> Deref for Values<S> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &*self.storage {
            Storage::Cpu(CpuStorage::F32(values)) => &values[self.range.clone()],
            _ => unreachable!("checked when it was borrowed, and the lock is held since"),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn values_are_the_tensors_elements_and_nothing_else() {
        let matrix = Tensor::arange(0.0_f32, 6.0, &Device::Cpu).unwrap().reshape((3, 2)).unwrap();
        assert_eq!(*values(&matrix.narrow(0, 1, 1).unwrap()).unwrap(), [2.0, 3.0]);
        assert!(values(&matrix.t().unwrap()).is_err());
        assert!(values(&matrix.to_dtype(DType::F64).unwrap()).is_err());
    }
}
