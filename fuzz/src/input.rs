//! Bytes of a fuzzer, taken as what a target needs.

/// Bytes that are taken from the front; what has run out is 0.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Up to `n` bytes.
    pub fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// A little-endian number of `N` bytes.
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let taken = self.bytes(N);
        let mut array = [0; N];
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    /// One byte.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number from `from` to `to`, made of one byte.
    pub fn within(&mut self, from: usize, to: usize) -> usize {
        from + usize::from(self.u8()) % (to - from + 1)
    }
}

/// Bytes that start on a multiple of eight, as a frame in the ring does.
#[derive(Clone, Debug)]
pub struct Aligned {
    words: Vec<u64>,
    n_bytes: usize,
}

impl Aligned {
    /// `n_bytes` bytes, all 0xaa.
    #[must_use]
    pub fn new(n_bytes: usize) -> Self {
        Self { words: vec![0xaaaa_aaaa_aaaa_aaaa; n_bytes.div_ceil(8)], n_bytes }
    }

    /// A copy of `bytes`.
    #[must_use]
    pub fn copy(bytes: &[u8]) -> Self {
        let mut aligned = Self::new(bytes.len());
        aligned.bytes_mut().copy_from_slice(bytes);
        aligned
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.n_bytes]
    }

    /// The bytes, to be changed.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.n_bytes]
    }
}
