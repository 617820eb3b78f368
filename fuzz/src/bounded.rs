//! What reading may cost in memory.

/// What `read` returns, once it is known to have held no more than `base_bytes` and `factor` bytes for each byte
/// of its input at any time.
///
/// # Panics
/// If it held more.
pub fn bounded<T>(input: &[u8], base_bytes: usize, factor: usize, read: impl FnOnce() -> T) -> T {
    let mut read_value = None;
    let held = allocation_counter::measure(|| read_value = Some(read()));
    let allowed_bytes = base_bytes + factor * input.len();
    assert!(
        held.bytes_max <= allowed_bytes as u64,
        "reading {} bytes held {} bytes, more than {allowed_bytes}",
        input.len(),
        held.bytes_max
    );
    read_value.expect("it was read")
}
