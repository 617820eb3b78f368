//! Borrowing candle's CPU memory as plain f32 slices, for custom ops.

use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, bail};

/// The elements of a contiguous f32 operand of a custom op's forward.
///
/// # Errors
/// If the operand is not f32 or not contiguous.
pub(crate) fn f32_slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let CpuStorage::F32(values) = storage else { bail!("expected f32, got {:?}", dtype_of(storage)) };
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("expected a contiguous tensor, got shape {:?} with stride {:?}", layout.dims(), layout.stride())
    };
    Ok(&values[start..end])
}

/// Calls `read` with the elements of an f32 CPU tensor, copied first if it is not contiguous.
///
/// # Errors
/// If the tensor is not f32, not on the CPU, or `read` fails.
pub(crate) fn with_f32<R>(tensor: &Tensor, read: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        bail!("expected a CPU tensor, got one on {:?}", tensor.device())
    };
    read(f32_slice(storage, layout)?)
}

fn dtype_of(storage: &CpuStorage) -> candle_core::DType {
    candle_core::backend::BackendStorage::dtype(storage)
}
