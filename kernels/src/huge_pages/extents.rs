//! Which parts of an address range are free.

use std::collections::BTreeMap;

/// The free parts of `0..limit`: the extents below `top`, and all above it.
#[derive(Debug)]
pub(super) struct Extents {
    /// Length by start. No two touch, and none touches `top`.
    free: BTreeMap<usize, usize>,
    top: usize,
    /// The highest that `top` has been.
    used: usize,
    limit: usize,
}

/// What [`Extents::take`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) start: usize,
    /// How many of the first units have been taken before. Those after them never have.
    pub(super) used: usize,
}

impl Extents {
    pub(super) fn new(limit: usize) -> Self {
        Self { free: BTreeMap::new(), top: 0, used: 0, limit }
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Takes the lowest extent of `len`, or none when the range is full.
    pub(super) fn take(&mut self, len: usize) -> Option<Taken> {
        let lowest = self.free.iter().find(|&(_, &free)| free >= len).map(|(&start, &free)| (start, free));
        if let Some((start, free)) = lowest {
            self.free.remove(&start);
            if free > len {
                self.free.insert(start + len, free - len);
            }
            return Some(Taken { start, used: len });
        }
        let start = self.top;
        if len > self.limit - start {
            return None;
        }
        self.top = start + len;
        let used = self.used.saturating_sub(start).min(len);
        self.used = self.used.max(self.top);
        Some(Taken { start, used })
    }

    /// Frees what `take` returned for `len`.
    pub(super) fn give(&mut self, start: usize, len: usize) {
        let (mut start, mut end) = (start, start + len);
        if let Some(after) = self.free.remove(&end) {
            end += after;
        }
        if let Some((&before, &free)) = self.free.range(..start).next_back()
            && before + free == start
        {
            self.free.remove(&before);
            start = before;
        }
        if end == self.top {
            self.top = start;
        } else {
            self.free.insert(start, end - start);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
    use proptest::sample::Index;

    use super::*;

    const LIMIT: usize = 64;

    /// A unit of the range: who has it, and whether anybody ever had.
    #[derive(Clone, Copy, Default, PartialEq, Eq)]
    struct Unit {
        taken: bool,
        ever: bool,
    }

    /// The lowest place for `len` units, by looking at every one.
    fn lowest(units: &[Unit], len: usize) -> Option<usize> {
        (0..=LIMIT.checked_sub(len)?).find(|&start| units[start..start + len].iter().all(|unit| !unit.taken))
    }

    proptest! {
        #[test]
        fn the_lowest_free_units_are_taken_and_what_was_used_is_told(
            steps in vec((any::<bool>(), 1_usize..20, any::<Index>()), 1..200),
        ) {
            let mut extents = Extents::new(LIMIT);
            let mut units = [Unit::default(); LIMIT];
            let mut held = Vec::new();
            for (give, len, which) in steps {
                if give && !held.is_empty() {
                    let (start, len) = held.swap_remove(which.index(held.len()));
                    extents.give(start, len);
                    units[start..start + len].iter_mut().for_each(|unit| unit.taken = false);
                } else {
                    let taken = extents.take(len);
                    prop_assert_eq!(taken.map(|taken| taken.start), lowest(&units, len));
                    let Some(taken) = taken else { continue };
                    let ours = &mut units[taken.start..taken.start + len];
                    prop_assert!(ours[taken.used..].iter().all(|unit| !unit.ever), "zeros that are none");
                    ours.fill(Unit { taken: true, ever: true });
                    held.push((taken.start, len));
                }
            }
            for (start, len) in held {
                extents.give(start, len);
            }
            prop_assert!(extents.free.is_empty() && extents.top == 0, "neighbours have not become one");
        }
    }
}
