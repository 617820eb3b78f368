//! Whether an order of sums may depend on more than the model's dimensions.

/// What decides the order in which an op adds up.
///
/// An argument of every op that has a choice, never a global: both orders can run in one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numerics {
    /// The model's dimensions alone. A token has the same bits in any batch, chunk, cache or number of threads, in
    /// decoding, prefill and training.
    #[default]
    Exact,
    /// Whatever is fastest for the shape at hand: the number of sequences, their lengths and the threads may show in
    /// the last bits.
    Fast,
}
