//! Full blocks, findable by the tokens before and in them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher};

use r3_core::ids::{BlockId, TokenId};

use crate::block_pool::Stamp;

/// An indexed block, and with it everything before it: a block's content never changes under one stamp, so
/// (`block`, `stamp`) names one exact sequence of tokens from position 0 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix {
    pub(crate) block: BlockId,
    pub(crate) stamp: Stamp,
    hash: u64,
}

#[derive(Clone, Copy)]
struct Entry {
    stamp: Stamp,
    hash: u64,
    parent: Option<(BlockId, Stamp)>,
    /// Bytes of the routes it is found by.
    n_replayed: usize,
}

/// Index of full blocks by chained hash, and the order in which those that nobody holds are evicted.
///
/// The hash only says where to look. A hit compares the block's own tokens and requires that its parent *is* the
/// block found for the tokens before, so by induction the whole prefix is equal, token by token. When a parent is
/// evicted its children can no longer be found and wait for their own eviction; a block that needs their place in
/// the index displaces them.
///
/// A block of which the router chose no route itself is found by these, too, so whoever has its routes chosen never finds
/// it: nor what comes after, whose parent it is. That the routes are the same and not of the same hash only, whoever
/// asks has to look up where they lie.
pub(crate) struct PrefixCache {
    block_tokens: usize,
    index: HashMap<u64, BlockId, BuildHasherDefault<DefaultHasher>>,
    entries: Vec<Option<Entry>>,
    tokens: Vec<TokenId>,
    idle: IdleList,
}

impl PrefixCache {
    pub(crate) fn new(n_blocks: usize, block_tokens: usize) -> Self {
        Self {
            block_tokens,
            index: HashMap::with_capacity_and_hasher(n_blocks, BuildHasherDefault::default()),
            entries: vec![None; n_blocks],
            tokens: vec![TokenId(0); n_blocks * block_tokens],
            idle: IdleList::new(n_blocks),
        }
    }

    /// The block that holds exactly `tokens` after exactly `parent`, and was indexed with as many `replayed` bytes of
    /// routes, and the same but for a collision.
    pub(crate) fn find(&self, parent: Option<Prefix>, tokens: &[TokenId], replayed: &[u8]) -> Option<Prefix> {
        let hash = chained_hash(parent, tokens, replayed);
        let block = *self.index.get(&hash)?;
        let entry = self.entries[block.index()].expect("the index names indexed blocks");
        let is_equal = entry.parent == identity(parent)
            && entry.n_replayed == replayed.len()
            && self.tokens(block) == tokens;
        is_equal.then_some(Prefix { block, stamp: entry.stamp, hash })
    }

    /// Indexes `block`, which is full with `tokens` and whose first slots took `replayed` routes. Returns the block whose
    /// place in the index it took, if any: that one belonged to a prefix that collides or can no longer be found.
    ///
    /// # Panics
    /// If `block` is indexed already or `tokens` do not fill it.
    pub(crate) fn insert(
        &mut self,
        parent: Option<Prefix>,
        tokens: &[TokenId],
        replayed: &[u8],
        (block, stamp): (BlockId, Stamp),
    ) -> (Prefix, Option<BlockId>) {
        assert!(!self.contains(block), "block {block} is indexed already");
        let hash = chained_hash(parent, tokens, replayed);
        let displaced = self.index.insert(hash, block);
        if let Some(other) = displaced {
            self.entries[other.index()] = None;
        }
        let n_replayed = replayed.len();
        self.entries[block.index()] = Some(Entry { stamp, hash, parent: identity(parent), n_replayed });
        let start = block.index() * self.block_tokens;
        self.tokens[start..start + self.block_tokens].copy_from_slice(tokens);
        (Prefix { block, stamp, hash }, displaced)
    }

    /// Whether `block` is indexed.
    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.entries[block.index()].is_some()
    }

    /// Whether `prefix` is still what its block is indexed as.
    pub(crate) fn holds(&self, prefix: Prefix) -> bool {
        self.entries[prefix.block.index()].is_some_and(|entry| entry.stamp == prefix.stamp)
    }

    /// Nobody holds `block` any more: it may be evicted, after all that became idle before it.
    pub(crate) fn park(&mut self, block: BlockId) {
        self.idle.push_newest(block);
    }

    /// Somebody holds `block` again, or it left the index.
    pub(crate) fn unpark(&mut self, block: BlockId) {
        self.idle.remove(block);
    }

    /// Forgets the block that has been idle for longest.
    pub(crate) fn evict(&mut self) -> Option<BlockId> {
        let block = self.idle.oldest()?;
        self.idle.remove(block);
        let entry = self.entries[block.index()].take().expect("idle blocks are indexed");
        self.index.remove(&entry.hash);
        Some(block)
    }

    /// Blocks nobody holds.
    pub(crate) fn n_idle(&self) -> usize {
        self.idle.len
    }

    /// Indexed blocks.
    pub(crate) fn n_indexed(&self) -> usize {
        self.index.len()
    }

    /// The tokens of an indexed block.
    pub(crate) fn tokens(&self, block: BlockId) -> &[TokenId] {
        &self.tokens[block.index() * self.block_tokens..][..self.block_tokens]
    }

    /// Asserts that index and entries are each other's inverse, that every entry was made under `stamp_of` its block
    /// and that exactly the indexed blocks without `holders_of` are idle.
    pub(crate) fn check(&self, stamp_of: impl Fn(BlockId) -> Stamp, holders_of: impl Fn(BlockId) -> u32) {
        let n_entries = self.entries.iter().flatten().count();
        assert_eq!(self.index.len(), n_entries, "every entry is indexed once");
        for (hash, &block) in &self.index {
            let entry = self.entries[block.index()].expect("the index names indexed blocks");
            assert_eq!(entry.hash, *hash);
            assert_eq!(entry.stamp, stamp_of(block), "block {block} is indexed under another occupancy");
            assert_eq!(self.idle.contains(block), holders_of(block) == 0, "block {block} idle or held");
        }
        let n_idle = self.index.values().filter(|&&block| self.idle.contains(block)).count();
        assert_eq!(self.idle.len, n_idle, "idle blocks are indexed");
    }
}

fn identity(prefix: Option<Prefix>) -> Option<(BlockId, Stamp)> {
    prefix.map(|prefix| (prefix.block, prefix.stamp))
}

/// Hash of everything up to and including `tokens` on `replayed` routes, the same in every run.
fn chained_hash(parent: Option<Prefix>, tokens: &[TokenId], replayed: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    parent.map(|parent| parent.hash).hash(&mut hasher);
    tokens.hash(&mut hasher);
    replayed.hash(&mut hasher);
    hasher.finish()
}

/// A list of blocks, oldest first, in which any block is moved in constant time and without allocation.
///
/// Circular and doubly linked; the last element of both arrays is the list's ends, a block that links to itself
/// is not in the list.
struct IdleList {
    newer: Vec<u32>,
    older: Vec<u32>,
    len: usize,
}

impl IdleList {
    fn new(n_blocks: usize) -> Self {
        let ends = u32::try_from(n_blocks).expect("block ids are u32");
        Self { newer: (0..=ends).collect(), older: (0..=ends).collect(), len: 0 }
    }

    fn ends(&self) -> usize {
        self.newer.len() - 1
    }

    fn contains(&self, block: BlockId) -> bool {
        self.newer[block.index()] != block.0
    }

    fn oldest(&self) -> Option<BlockId> {
        (self.len > 0).then(|| BlockId(self.newer[self.ends()]))
    }

    fn push_newest(&mut self, block: BlockId) {
        assert!(!self.contains(block), "block {block} is idle already");
        let ends = self.ends();
        let newest = self.older[ends];
        self.older[block.index()] = newest;
        self.newer[block.index()] = self.newer[newest as usize];
        self.newer[newest as usize] = block.0;
        self.older[ends] = block.0;
        self.len += 1;
    }

    fn remove(&mut self, block: BlockId) {
        assert!(self.contains(block), "block {block} is not idle");
        let (older, newer) = (self.older[block.index()], self.newer[block.index()]);
        self.newer[older as usize] = newer;
        self.older[newer as usize] = older;
        self.newer[block.index()] = block.0;
        self.older[block.index()] = block.0;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(generation: u64) -> Stamp {
        Stamp { epoch: 0, generation }
    }

    fn tokens(ids: [u32; 2]) -> [TokenId; 2] {
        ids.map(TokenId)
    }

    #[test]
    fn a_block_is_found_by_everything_before_it() {
        let mut cache = PrefixCache::new(4, 2);
        let (first, _) = cache.insert(None, &tokens([1, 2]), &[], (BlockId(0), stamp(1)));
        let (second, _) = cache.insert(Some(first), &tokens([3, 4]), &[], (BlockId(1), stamp(1)));
        assert_eq!(cache.find(None, &tokens([1, 2]), &[]), Some(first));
        assert_eq!(cache.find(Some(first), &tokens([3, 4]), &[]), Some(second));
        assert_eq!(cache.find(None, &tokens([3, 4]), &[]), None, "the same tokens after nothing");
        assert_eq!(cache.find(Some(first), &tokens([3, 5]), &[]), None);
    }

    #[test]
    fn an_equal_hash_of_other_tokens_or_another_parent_is_no_hit() {
        let mut cache = PrefixCache::new(4, 2);
        let (parent, _) = cache.insert(None, &tokens([1, 2]), &[], (BlockId(0), stamp(1)));
        cache.insert(Some(parent), &tokens([3, 4]), &[], (BlockId(1), stamp(1)));
        let forged = chained_hash(None, &tokens([8, 9]), &[]);
        cache.index.insert(forged, BlockId(0));
        assert_eq!(cache.find(None, &tokens([8, 9]), &[]), None, "block 0 holds [1, 2]");
        let reborn = Prefix { stamp: stamp(2), ..parent };
        assert_eq!(
            cache.find(Some(reborn), &tokens([3, 4]), &[]),
            None,
            "equal hash, but the parent was replaced"
        );
    }

    #[test]
    fn a_colliding_prefix_takes_the_place_and_names_the_displaced_block() {
        let mut cache = PrefixCache::new(4, 2);
        let (old_parent, _) = cache.insert(None, &tokens([1, 2]), &[], (BlockId(0), stamp(1)));
        cache.insert(Some(old_parent), &tokens([3, 4]), &[], (BlockId(1), stamp(1)));
        cache.park(BlockId(0));
        assert_eq!(cache.evict(), Some(BlockId(0)));
        let (parent, _) = cache.insert(None, &tokens([1, 2]), &[], (BlockId(2), stamp(1)));
        assert_eq!(
            cache.find(Some(parent), &tokens([3, 4]), &[]),
            None,
            "block 1 belongs to the evicted parent"
        );
        let (child, displaced) = cache.insert(Some(parent), &tokens([3, 4]), &[], (BlockId(3), stamp(1)));
        assert_eq!(displaced, Some(BlockId(1)));
        assert_eq!(cache.find(Some(parent), &tokens([3, 4]), &[]), Some(child));
        assert!(!cache.contains(BlockId(1)));
    }

    #[test]
    fn the_block_idle_for_longest_is_evicted_first() {
        let mut cache = PrefixCache::new(3, 2);
        for id in 0..3 {
            cache.insert(None, &tokens([id, id]), &[], (BlockId(id), stamp(1)));
            cache.park(BlockId(id));
        }
        cache.unpark(BlockId(0));
        cache.park(BlockId(0));
        cache.unpark(BlockId(2));
        assert_eq!(cache.n_idle(), 2);
        assert_eq!([cache.evict(), cache.evict(), cache.evict()], [Some(BlockId(1)), Some(BlockId(0)), None]);
        assert_eq!(cache.n_indexed(), 1, "block 2 is held and stays");
        cache.check(|_| stamp(1), |_| 1);
    }
}
