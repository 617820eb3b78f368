//! Blocks, prefix cache and route pool as one memory: they are handed out, found and forgotten together.

use std::ops::Range;

use r3_core::ids::{BlockId, TokenId};
use r3_core::routes::RouteDims;

use crate::block_pool::BlockPool;
use crate::prefix_cache::{Prefix, PrefixCache};
use crate::route_pool::RoutePool;

/// A cached prefix, held for whoever found it.
#[derive(Default)]
pub(crate) struct Hit {
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) end: Option<Prefix>,
}

/// The KV memory. Each block is in exactly one state: free, idle (kept by the prefix cache, held by nobody) or
/// held by one or more block tables.
pub(crate) struct KvMemory {
    block_tokens: usize,
    pool: BlockPool,
    cache: Option<PrefixCache>,
    routes: Option<RoutePool>,
}

impl KvMemory {
    pub(crate) fn new(
        n_blocks: usize,
        block_tokens: usize,
        prefix_cache: bool,
        routes: Option<RouteDims>,
    ) -> Self {
        Self {
            block_tokens,
            pool: BlockPool::new(n_blocks),
            cache: prefix_cache.then(|| PrefixCache::new(n_blocks, block_tokens)),
            routes: routes.map(|dims| RoutePool::new(dims, n_blocks, block_tokens)),
        }
    }

    /// Blocks that can be handed out: free and idle.
    pub(crate) fn n_available(&self) -> usize {
        self.pool.free().len() + self.n_idle()
    }

    /// Blocks that only the prefix cache keeps.
    pub(crate) fn n_idle(&self) -> usize {
        self.cache.as_ref().map_or(0, PrefixCache::n_idle)
    }

    /// Blocks the prefix cache can find, held or idle.
    pub(crate) fn n_indexed(&self) -> usize {
        self.cache.as_ref().map_or(0, PrefixCache::n_indexed)
    }

    /// Hands out a block: a free one, else the one that was idle for longest.
    pub(crate) fn allocate(&mut self) -> Option<BlockId> {
        if self.pool.free().is_empty() {
            let evicted = self.cache.as_mut()?.evict()?;
            self.pool.give_back(evicted);
        }
        self.pool.take()
    }

    /// One more table holds `block`, which is held or idle.
    pub(crate) fn hold(&mut self, block: BlockId) {
        if self.pool.holders(block) == 0 {
            self.cache.as_mut().expect("only the prefix cache keeps blocks that nobody holds").unpark(block);
        }
        self.pool.hold(block);
    }

    /// One table less holds `block`; after the last it is idle if it can be found again, else free.
    pub(crate) fn release(&mut self, block: BlockId) {
        if self.pool.release(block) > 0 {
            return;
        }
        match &mut self.cache {
            Some(cache) if cache.contains(block) => cache.park(block),
            _ => self.pool.give_back(block),
        }
    }

    /// Whether a sequence that holds `block` may write into it: nobody else holds or can find it.
    pub(crate) fn is_private(&self, block: BlockId) -> bool {
        self.pool.holders(block) == 1 && !self.cache.as_ref().is_some_and(|cache| cache.contains(block))
    }

    /// Finds and holds the longest cached prefix of `tokens[..max_tokens]` in whole blocks of the current epoch, all of
    /// whose routes are readable. Its first tokens take `replayed` routes, bytes `[n, L, K]`, the others the router's.
    pub(crate) fn hit(&mut self, tokens: &[TokenId], max_tokens: usize, mut replayed: &[u8]) -> Hit {
        let mut hit = Hit::default();
        for chunk in tokens[..max_tokens].chunks_exact(self.block_tokens) {
            let of_block;
            (of_block, replayed) = replayed.split_at(replayed.len().min(self.block_route_bytes()));
            let Some(next) = self.find(hit.end, chunk, of_block) else { break };
            let is_current =
                next.stamp == self.pool.stamp(next.block) && next.stamp.epoch == self.pool.epoch();
            if !is_current || !self.is_readable(next.block, self.block_tokens) {
                break;
            }
            hit.blocks.push(next.block);
            hit.end = Some(next);
        }
        hit.blocks.iter().for_each(|&block| self.hold(block));
        hit
    }

    /// A block that holds exactly `tokens` after exactly `parent`, whose first slots ran `replayed` routes and whose others
    /// ran the router's. A block on which the router chose all of them is one, too, if these are what it chose: keys and
    /// values follow from tokens and routes.
    fn find(&self, parent: Option<Prefix>, tokens: &[TokenId], replayed: &[u8]) -> Option<Prefix> {
        let cache = self.cache.as_ref()?;
        if replayed.is_empty() {
            return cache.find(parent, tokens, replayed);
        }
        let n_slots = replayed.len() * self.block_tokens / self.block_route_bytes();
        let ran_them = |found: &Prefix| self.routes(found.block, 0..n_slots) == Some(replayed);
        let find = |by| cache.find(parent, tokens, by).filter(ran_them);
        find(replayed).or_else(|| find(&[]))
    }

    /// Makes `block`, full with `tokens` after `parent`, findable, and returns the prefix that now ends here: in
    /// `block`, or in an equal block that was indexed before. `None` if `parent` can no longer be found. The routes of its
    /// first `n_replayed` slots were not the router's choice.
    ///
    /// # Panics
    /// If one of these is not readable.
    pub(crate) fn publish(
        &mut self,
        parent: Option<Prefix>,
        tokens: &[TokenId],
        block: BlockId,
        n_replayed: usize,
    ) -> Option<Prefix> {
        let cache = self.cache.as_ref()?;
        if parent.is_some_and(|parent| !cache.holds(parent)) {
            return None;
        }
        let stamp = self.pool.stamp(block);
        let replayed: &[u8] = match &self.routes {
            Some(routes) if n_replayed > 0 => {
                routes.read(block, 0..n_replayed, stamp).expect("what ran was recorded")
            }
            _ => &[],
        };
        if let Some(found) = self.find(parent, tokens, replayed) {
            return Some(found);
        }
        let cache = self.cache.as_mut()?;
        let (prefix, displaced) = cache.insert(parent, tokens, replayed, (block, stamp));
        if let Some(displaced) = displaced
            && self.pool.holders(displaced) == 0
        {
            cache.unpark(displaced);
            self.pool.give_back(displaced);
        }
        Some(prefix)
    }

    /// Stores `rows`, bytes `[n, L, K]`, as the routes of the `n` slots of `block` from slot `first` on.
    ///
    /// # Panics
    /// If routes are off, the rows do not fit the block, or one of the slots has a row.
    pub(crate) fn record(&mut self, block: BlockId, first: usize, rows: &[u8]) {
        let stamp = self.pool.stamp(block);
        self.routes.as_mut().expect("routes are on").write(block, first, stamp, rows);
    }

    /// Brings the rows of `slots` near, which are about to be recorded.
    ///
    /// # Panics
    /// If routes are off.
    pub(crate) fn fetch_routes(&self, slots: &[u32]) {
        self.routes.as_ref().expect("routes are on").fetch(slots);
    }

    /// The route rows of `slots` of `block`, bytes `[n, L, K]`, if all of them are readable.
    pub(crate) fn routes(&self, block: BlockId, slots: Range<usize>) -> Option<&[u8]> {
        self.routes.as_ref()?.read(block, slots, self.pool.stamp(block))
    }

    /// Whether the routes of the first `n_slots` slots of `block` are readable; true if routes are off.
    pub(crate) fn is_readable(&self, block: BlockId, n_slots: usize) -> bool {
        self.routes
            .as_ref()
            .is_none_or(|routes| routes.read(block, 0..n_slots, self.pool.stamp(block)).is_some())
    }

    /// Copies the routes of the first `n_slots` slots, as the engine copies their keys and values.
    pub(crate) fn copy_routes(&mut self, from: BlockId, to: BlockId, n_slots: usize) {
        if let Some(routes) = &mut self.routes {
            routes.copy((from, self.pool.stamp(from)), (to, self.pool.stamp(to)), n_slots);
        }
    }

    /// Forgets everything findable and stamps what is handed out from now on with `epoch`.
    pub(crate) fn flush(&mut self, epoch: u64) {
        while let Some(block) = self.cache.as_mut().and_then(PrefixCache::evict) {
            self.pool.give_back(block);
        }
        self.pool.flush(epoch);
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.pool.epoch()
    }

    /// Slots of a block.
    pub(crate) fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    pub(crate) fn n_blocks(&self) -> usize {
        self.pool.n_blocks()
    }

    /// Bytes of the routes of a block's slots; 0 if routes are off.
    fn block_route_bytes(&self) -> usize {
        self.routes.as_ref().map_or(0, |routes| routes.row_bytes() * self.block_tokens)
    }

    /// Blocks that were handed out since the last [`Self::renew`].
    pub(crate) fn n_touched(&self) -> usize {
        self.pool.n_touched()
    }

    /// From now on the blocks are of another cache.
    pub(crate) fn renew(&mut self) {
        self.pool.renew();
    }

    /// Bytes of the route pool.
    pub(crate) fn route_bytes(&self) -> usize {
        self.routes.as_ref().map_or(0, RoutePool::bytes)
    }

    /// The tokens `block` is indexed under, if it is.
    pub(crate) fn indexed_tokens(&self, block: BlockId) -> Option<&[TokenId]> {
        let cache = self.cache.as_ref()?;
        cache.contains(block).then(|| cache.tokens(block))
    }

    /// Asserts that `holders`, counted from the block tables, are the pool's, and that every block has one state.
    pub(crate) fn check(&self, holders: &[u32]) {
        let stamp_of = |block: BlockId| self.pool.stamp(block);
        if let Some(cache) = &self.cache {
            cache.check(stamp_of, |block| self.pool.holders(block));
        }
        let mut is_free = vec![false; self.n_blocks()];
        for block in self.pool.free() {
            assert!(!std::mem::replace(&mut is_free[block.index()], true), "block {block} is free twice");
        }
        for (id, &counted) in (0..).zip(holders) {
            let block = BlockId(id);
            let is_indexed = self.cache.as_ref().is_some_and(|cache| cache.contains(block));
            assert_eq!(self.pool.holders(block), counted, "block {block}: counted holders");
            let n_states = u8::from(is_free[block.index()])
                + u8::from(counted > 0)
                + u8::from(is_indexed && counted == 0);
            assert_eq!(n_states, 1, "block {block} is in exactly one of free, idle and held");
            assert!(!(is_free[block.index()] && is_indexed), "block {block} is free, but can be found");
            let is_current = !is_indexed || stamp_of(block).epoch == self.epoch();
            assert!(is_current, "block {block} of another epoch can be found");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_pool::Stamp;

    const DIMS: RouteDims = RouteDims { n_layers: 1, top_k: 2, n_experts: 4 };
    const TOKENS: [TokenId; 5] = [TokenId(1), TokenId(2), TokenId(3), TokenId(4), TokenId(5)];

    /// Two published blocks of two tokens, with routes, idle.
    fn cached() -> (KvMemory, [BlockId; 2]) {
        let mut kv = KvMemory::new(3, 2, true, Some(DIMS));
        let blocks = [kv.allocate().unwrap(), kv.allocate().unwrap()];
        let mut end = None;
        for (block, tokens) in blocks.into_iter().zip(TOKENS.chunks_exact(2)) {
            kv.record(block, 0, &[0, 1]);
            kv.record(block, 1, &[2, 3]);
            end = kv.publish(end, tokens, block, 0);
            assert!(end.is_some());
        }
        kv.release(blocks[1]);
        kv.release(blocks[0]);
        (kv, blocks)
    }

    fn hit(kv: &mut KvMemory) -> Vec<BlockId> {
        kv.hit(&TOKENS, 4, &[]).blocks
    }

    #[test]
    fn a_hit_holds_its_blocks_and_the_last_release_parks_them() {
        let (mut kv, blocks) = cached();
        assert_eq!((kv.n_available(), kv.n_idle()), (3, 2));
        assert_eq!(hit(&mut kv), blocks);
        assert_eq!((kv.n_available(), kv.n_idle()), (1, 0));
        kv.check(&[1, 1, 0]);
        blocks.into_iter().for_each(|block| kv.release(block));
        assert_eq!(kv.n_idle(), 2);
        kv.check(&[0, 0, 0]);
    }

    #[test]
    fn a_hit_is_cut_where_a_route_is_not_readable() {
        let (mut kv, blocks) = cached();
        let other = Stamp { epoch: 0, generation: 9 };
        kv.routes.as_mut().unwrap().write(blocks[1], 0, other, &[0, 1]);
        assert_eq!(hit(&mut kv), blocks[..1], "block 1 carries rows of another occupancy");
    }

    #[test]
    fn eviction_takes_the_tail_first_and_the_prefix_stays_findable() {
        let (mut kv, blocks) = cached();
        assert_eq!((kv.allocate(), kv.allocate()), (Some(BlockId(2)), Some(blocks[1])));
        assert_eq!(hit(&mut kv), blocks[..1]);
        assert_eq!(kv.allocate(), None);
    }

    #[test]
    fn a_flush_leaves_nothing_to_find() {
        let (mut kv, _) = cached();
        kv.flush(1);
        assert_eq!(hit(&mut kv), []);
        assert_eq!((kv.n_available(), kv.n_indexed(), kv.epoch()), (3, 0, 1));
        kv.check(&[0, 0, 0]);
    }

    #[test]
    fn a_displaced_idle_block_is_freed() {
        let (mut kv, blocks) = cached();
        kv.hold(blocks[1]);
        assert_eq!((kv.allocate(), kv.allocate()), (Some(BlockId(2)), Some(blocks[0])));
        kv.release(blocks[1]);
        let first = kv.publish(None, &TOKENS[..2], BlockId(2), 0);
        let second = kv.publish(first, &TOKENS[2..4], blocks[0], 0).unwrap();
        assert_eq!(second.block, blocks[0], "block 1 followed an evicted parent");
        assert_eq!((kv.n_idle(), kv.n_available()), (0, 1));
        kv.check(&[1, 0, 1]);
    }

    #[test]
    fn nothing_is_published_after_a_parent_that_is_gone() {
        let mut kv = KvMemory::new(1, 2, true, None);
        let block = kv.allocate().unwrap();
        let first = kv.publish(None, &TOKENS[..2], block, 0);
        kv.release(block);
        assert_eq!(kv.allocate(), Some(block));
        assert_eq!(kv.publish(first, &TOKENS[2..4], block, 0), None, "it was evicted");
        assert!(kv.publish(None, &TOKENS[2..4], block, 0).is_some());
        assert_eq!(kv.publish(first, &TOKENS[2..4], block, 0), None, "its block is another prefix now");
    }

    /// Publishes `TOKENS[..4]` in two blocks more, which ran `rows`; all of the first is replayed, and of the second
    /// `n_replayed`.
    fn publish(kv: &mut KvMemory, rows: [&[u8]; 2], n_replayed: usize) -> [BlockId; 2] {
        let mut end = None;
        let blocks = [2, n_replayed].into_iter().zip(rows).zip(TOKENS.chunks_exact(2));
        let blocks = blocks.map(|((n_replayed, rows), tokens)| {
            let block = kv.allocate().unwrap();
            kv.record(block, 0, rows);
            end = kv.publish(end, tokens, block, n_replayed);
            end.unwrap().block
        });
        let blocks: Vec<_> = blocks.collect();
        [blocks[0], blocks[1]]
    }

    /// Blocks that are found for tokens of which the first take `replayed` routes.
    fn found(kv: &mut KvMemory, replayed: &[u8]) -> Vec<BlockId> {
        let blocks = kv.hit(&TOKENS, 4, replayed).blocks;
        blocks.iter().for_each(|&block| kv.release(block));
        blocks
    }

    #[test]
    fn what_ran_on_replayed_routes_is_found_by_these_and_by_nobody_who_computes_live() {
        let mut kv = KvMemory::new(6, 2, true, Some(DIMS));
        let [first, second] = publish(&mut kv, [&[3, 1, 2, 0], &[1, 0, 2, 3]], 1);
        assert_eq!(found(&mut kv, &[]), [], "the same tokens, chosen by the router");
        assert_eq!(found(&mut kv, &[3, 1, 2, 0, 1, 0]), [first, second]);
        assert_eq!(found(&mut kv, &[3, 1, 2, 0]), [first], "of the second block one was replayed, not none");
        assert_eq!(found(&mut kv, &[3, 1, 2, 0, 1, 0, 2, 3]), [first], "nor two");
        assert_eq!(found(&mut kv, &[3, 1, 2, 0, 1, 2]), [first], "nor on another expert");
        assert_eq!(found(&mut kv, &[3, 1, 0, 2]), [], "the same experts in another order");
        assert_eq!(publish(&mut kv, [&[3, 1, 2, 0], &[1, 0, 2, 3]], 1), [first, second], "one is kept");
        assert_ne!(publish(&mut kv, [&[3, 1, 0, 2], &[1, 0, 2, 3]], 1)[0], first);
    }

    #[test]
    fn what_the_router_chose_itself_is_found_by_who_replays_the_same() {
        let (mut kv, blocks) = cached();
        assert_eq!(found(&mut kv, &[0, 1, 2, 3, 0, 1]), blocks, "the rest is the router's in both");
        assert_eq!(found(&mut kv, &[0, 1, 2, 3, 0, 1, 2, 3]), blocks);
        assert_eq!(found(&mut kv, &[0, 1, 2, 3, 1, 0]), blocks[..1]);
        assert_eq!(found(&mut kv, &[0, 1, 3, 2]), [], "not the first row alone");
        let own = kv.allocate().unwrap();
        kv.record(own, 0, &[0, 1, 2, 3]);
        let end = kv.publish(None, &TOKENS[..2], own, 2).unwrap();
        assert_eq!(end.block, blocks[0], "what replays the same goes on behind it");
        kv.release(own);
    }

    #[test]
    fn replayed_routes_of_one_hash_are_told_apart() {
        let mut kv = KvMemory::new(4, 2, true, Some(DIMS));
        let [first, _] = publish(&mut kv, [&[3, 1, 2, 0], &[1, 0, 2, 3]], 0);
        // The block then holds what another ran.
        let other = Stamp { epoch: 0, generation: 9 };
        let stamp = kv.pool.stamp(first);
        let routes = kv.routes.as_mut().unwrap();
        routes.write(first, 0, other, &[0, 1]);
        routes.write(first, 0, stamp, &[3, 1, 0, 2]);
        assert_eq!(found(&mut kv, &[3, 1, 2, 0]), []);
    }

    #[test]
    fn without_routes_no_byte_is_held() {
        assert_eq!(KvMemory::new(64, 16, true, None).route_bytes(), 0);
    }
}
