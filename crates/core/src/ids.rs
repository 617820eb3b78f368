//! Newtyped ids and the policy version.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The id as an index.
            #[must_use]
            pub fn index(self) -> usize {
                usize::try_from(self.0).expect("an id fits the address space")
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// Index of a token in the vocabulary, `0..V`.
    TokenId(u32)
}
id! {
    /// Room for one token's keys, values and routes: an index into the KV cache and the route pool.
    SlotId(u32)
}
id! {
    /// `block_tokens` consecutive slots.
    BlockId(u32)
}
id! {
    /// One sequence inside the engine, unique for the engine's lifetime.
    SequenceId(u64)
}
id! {
    /// All rollouts of one prompt, unique for a run.
    GroupId(u64)
}
id! {
    /// Optimiser steps inside a set of weights; 0 before the first step.
    PolicyVersion(u64)
}

impl PolicyVersion {
    /// The version after one more optimiser step.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// Optimiser steps between `older` and this version; 0 if `older` is not older.
    #[must_use]
    pub fn staleness(self, older: Self) -> u64 {
        self.0.saturating_sub(older.0)
    }
}
