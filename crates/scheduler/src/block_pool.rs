//! How many hold each block, and which occupancy of it this is.

use std::cmp::Reverse;

use r3_core::ids::BlockId;

/// One occupancy of one block: what its keys, values and routes were written under.
///
/// A block gets a new stamp each time it is handed out, so whatever carries an older one (a route row, a prefix
/// index entry) is recognised as somebody else's. Within one block no stamp is ever used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// Weight epoch in which the block was handed out.
    pub(crate) epoch: u64,
    /// How often the block had been handed out, from 1; 0 marks a block never handed out.
    pub(crate) generation: u64,
}

impl Stamp {
    /// Matches no block that was ever handed out.
    pub(crate) const NEVER: Self = Self { epoch: 0, generation: 0 };
}

/// All KV blocks: free, or held by `n >= 0` block tables (0: kept by the prefix cache alone).
pub(crate) struct BlockPool {
    holders: Vec<u32>,
    stamps: Vec<Stamp>,
    /// The next one last.
    free: Vec<BlockId>,
    /// Blocks of a cache that were ever handed out: those of the lowest ids.
    n_touched: usize,
    epoch: u64,
}

impl BlockPool {
    /// `n_blocks` free blocks, lowest id first, in epoch 0.
    pub(crate) fn new(n_blocks: usize) -> Self {
        let n_ids = u32::try_from(n_blocks).expect("block ids are u32");
        Self {
            holders: vec![0; n_blocks],
            stamps: vec![Stamp::NEVER; n_blocks],
            free: (0..n_ids).rev().map(BlockId).collect(),
            n_touched: 0,
            epoch: 0,
        }
    }

    /// Hands out a free block under a new stamp, held once.
    pub(crate) fn take(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.n_touched = self.n_touched.max(self.n_blocks() - self.free.len());
        self.holders[block.index()] = 1;
        let stamp = &mut self.stamps[block.index()];
        *stamp = Stamp { epoch: self.epoch, generation: stamp.generation + 1 };
        Some(block)
    }

    /// One more holder. The caller makes sure that the block is not free.
    pub(crate) fn hold(&mut self, block: BlockId) {
        self.holders[block.index()] += 1;
    }

    /// One holder less; returns how many are left.
    ///
    /// # Panics
    /// If nobody holds the block: a double release is a bug.
    pub(crate) fn release(&mut self, block: BlockId) -> u32 {
        let holders = &mut self.holders[block.index()];
        *holders = holders.checked_sub(1).expect("a block is released once per holder");
        *holders
    }

    /// Takes a block back that nobody holds.
    pub(crate) fn give_back(&mut self, block: BlockId) {
        assert_eq!(self.holders(block), 0, "block {block} is still held");
        self.free.push(block);
    }

    /// Blocks handed out from now on are stamped with `epoch`. The lowest ids go first again: what is used of a large cache lies
    /// together, and where it lies does not depend on what went before.
    ///
    /// # Panics
    /// If a block is not free.
    pub(crate) fn flush(&mut self, epoch: u64) {
        assert_eq!(self.free.len(), self.n_blocks(), "nobody holds a block during a flush");
        self.free.sort_unstable_by_key(|&block| Reverse(block));
        self.epoch = epoch;
    }

    /// Blocks that were handed out since the last [`Self::renew`].
    pub(crate) fn n_touched(&self) -> usize {
        self.n_touched
    }

    /// From now on the blocks are of another cache, in which nothing has been written.
    pub(crate) fn renew(&mut self) {
        self.n_touched = 0;
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn holders(&self, block: BlockId) -> u32 {
        self.holders[block.index()]
    }

    pub(crate) fn stamp(&self, block: BlockId) -> Stamp {
        self.stamps[block.index()]
    }

    pub(crate) fn n_blocks(&self) -> usize {
        self.holders.len()
    }

    pub(crate) fn free(&self) -> &[BlockId] {
        &self.free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reused_block_has_a_new_stamp() {
        let mut pool = BlockPool::new(1);
        let block = pool.take().unwrap();
        let first = pool.stamp(block);
        assert_eq!(pool.take(), None);
        assert_eq!(pool.release(block), 0);
        pool.give_back(block);
        assert_eq!(pool.take(), Some(block));
        assert_ne!(pool.stamp(block), first);
        assert_ne!(pool.stamp(block), Stamp::NEVER);
    }

    #[test]
    fn after_a_flush_the_lowest_ids_go_first_and_stay_touched_until_the_cache_is_another() {
        let mut pool = BlockPool::new(4);
        let [first, second, third] = [(); 3].map(|()| pool.take().unwrap());
        for block in [second, third, first] {
            pool.release(block);
            pool.give_back(block);
        }
        assert_eq!((pool.take(), pool.n_touched()), (Some(first), 3));
        pool.release(first);
        pool.give_back(first);
        pool.flush(1);
        assert_eq!(pool.n_touched(), 3);
        pool.renew();
        assert_eq!(pool.n_touched(), 0);
        assert_eq!([(); 2].map(|()| pool.take().unwrap().index()), [0, 1]);
        assert_eq!(pool.n_touched(), 2);
    }

    #[test]
    fn a_block_comes_back_only_after_its_last_holder() {
        let mut pool = BlockPool::new(2);
        let block = pool.take().unwrap();
        pool.hold(block);
        assert_eq!((pool.release(block), pool.release(block)), (1, 0));
        assert_eq!(pool.free().len(), 1);
        pool.give_back(block);
        assert_eq!(pool.free().len(), 2);
    }
}
