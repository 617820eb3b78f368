//! Causal grouped-query attention over a paged cache of keys and values, and over packed sequences.
//!
//! Both are one function: packed attention writes its keys and values into a cache of its own and attends to that.
//! So rollout and trainer agree to the bit, and a query's result depends on its own sequence up to its own position
//! alone: not on chunking, block size, block table, neighbours or threads.

use std::cell::{Cell, RefCell};

use bytemuck::Zeroable;
use half::bf16;

use crate::gemm::Dtype;
use crate::isa::{Isa, multiversion, padded};
use crate::parallel::{self, Disjoint};
use crate::team;

mod gradient;
mod kernel;
pub mod packed;
pub mod split;
#[cfg(test)]
mod tests;

use kernel::{Element, KvHead, LANES, Rows, Scratch, View, attend, attend_far, looks_far};

/// Sizes of an attention layer. Query heads `g * H / Hkv ..` share kv head `g`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads, `H`: a multiple of `Hkv`.
    pub n_heads: usize,
    /// Heads of keys and values, `Hkv`.
    pub n_kv_heads: usize,
    /// Elements of a head, `hd`.
    pub head_dim: usize,
}

impl Heads {
    /// Query heads per kv head.
    fn group(self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    /// Elements of one token's queries.
    fn query_len(self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Elements of one token's keys, and of its values.
    fn kv_len(self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    fn assert_whole(self) {
        let whole = self.n_kv_heads > 0 && self.head_dim > 0 && self.n_heads > 0;
        assert!(
            whole && self.n_heads.is_multiple_of(self.n_kv_heads),
            "query heads do not share kv heads: {self:?}"
        );
    }

    /// What scores are multiplied by, `1 / sqrt(hd)`; queries are scaled, which costs less.
    fn scale(self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// Keys and values of every resident token at every layer.
#[derive(Clone, Debug)]
pub struct KvCache {
    heads: Heads,
    n_slots: usize,
    pages: Pages,
}

/// By layer, each in memory of its own: so much more easily finds a place between what else there is.
#[derive(Clone, Debug)]
enum Pages {
    F32(Vec<Tiles<f32>>),
    Bf16(Vec<Tiles<bf16>>),
}

impl Pages {
    fn n_layers(&self) -> usize {
        match self {
            Self::F32(layers) => layers.len(),
            Self::Bf16(layers) => layers.len(),
        }
    }
}

/// One layer, in tiles of 16 slots: `keys` `[n_tiles, Hkv, hd, 16]`, `values` `[n_tiles, Hkv, 16, hd]`.
#[derive(Clone, Debug)]
struct Tiles<E> {
    keys: Vec<E>,
    values: Vec<E>,
}

impl<E: Zeroable> Tiles<E> {
    /// In memory that nobody has touched: writing zeros to all of it would take as long as a small model's first tokens.
    fn zeros(len: usize) -> Self {
        Self { keys: bytemuck::zeroed_vec(len), values: bytemuck::zeroed_vec(len) }
    }
}

impl KvCache {
    /// A cache of `n_slots` tokens, all zero. Slots are stored in tiles of 16, so `n_slots` is best a multiple of that.
    ///
    /// # Panics
    /// If `n_heads` is not a positive multiple of `n_kv_heads`, or `head_dim` is 0.
    #[must_use]
    pub fn new(n_layers: usize, n_slots: usize, heads: Heads, dtype: Dtype) -> Self {
        heads.assert_whole();
        let len = n_slots.next_multiple_of(LANES) * heads.kv_len();
        let pages = match dtype {
            Dtype::F32 => Pages::F32((0..n_layers).map(|_| Tiles::zeros(len)).collect()),
            Dtype::Bf16 => Pages::Bf16((0..n_layers).map(|_| Tiles::zeros(len)).collect()),
        };
        Self { heads, n_slots, pages }
    }

    /// Bytes that one slot takes at all layers.
    #[must_use]
    pub fn bytes_per_slot(n_layers: usize, heads: Heads, dtype: Dtype) -> usize {
        let bytes = match dtype {
            Dtype::F32 => size_of::<f32>(),
            Dtype::Bf16 => size_of::<bf16>(),
        };
        2 * n_layers * heads.kv_len() * bytes
    }

    /// Writes keys `k` and values `v`, `[slots.len(), Hkv, hd]` each, of `layer`; row `t` goes to `slots[t]`. A bf16
    /// cache rounds to nearest, ties to even.
    ///
    /// # Panics
    /// If a shape does not fit, or layer or slot is out of range.
    pub fn write(&mut self, layer: usize, slots: &[u32], k: &[f32], v: &[f32]) {
        let n_layers = self.pages.n_layers();
        assert!(layer < n_layers, "layer {layer} of {n_layers}");
        let want = slots.len() * self.heads.kv_len();
        assert_eq!((k.len(), v.len()), (want, want), "keys and values are [{}, Hkv, hd]", slots.len());
        self.assert_slots(slots);
        let rows = NewRows { heads: self.heads, slots, k, v };
        let pages = match &mut self.pages {
            Pages::F32(layers) => PageParts::F32(layers[layer].parts()),
            Pages::Bf16(layers) => PageParts::Bf16(layers[layer].parts()),
        };
        // A tile belongs to one kv head, so heads do not meet.
        parallel::for_each(self.heads.n_kv_heads, WRITE_WORK * (k.len() + v.len()), |kv_head| {
            write_head(&pages, &rows, kv_head);
        });
    }

    /// Copies slot `from[i]` to slot `to[i]` at all layers, one after the other.
    ///
    /// # Panics
    /// If the lengths differ or a slot is out of range.
    pub fn copy_slots(&mut self, from: &[u32], to: &[u32]) {
        assert_eq!(from.len(), to.len(), "one slot to copy to for each to copy from");
        self.assert_slots(from);
        self.assert_slots(to);
        match &mut self.pages {
            Pages::F32(layers) => layers.iter_mut().for_each(|tiles| tiles.copy(self.heads, from, to)),
            Pages::Bf16(layers) => layers.iter_mut().for_each(|tiles| tiles.copy(self.heads, from, to)),
        }
    }

    fn assert_slots(&self, slots: &[u32]) {
        if let Some(&last) = slots.iter().max() {
            assert!((last as usize) < self.n_slots, "slot {last} of {}", self.n_slots);
        }
    }
}

impl<E: Element> Tiles<E> {
    fn parts(&mut self) -> [Disjoint<'_, E>; 2] {
        [Disjoint::new(&mut self.keys), Disjoint::new(&mut self.values)]
    }

    fn copy(&mut self, heads: Heads, from: &[u32], to: &[u32]) {
        for (&from, &to) in from.iter().zip(to) {
            for kv_head in 0..heads.n_kv_heads {
                let (from, from_lane) = place(heads, from as usize, kv_head);
                let (to, to_lane) = place(heads, to as usize, kv_head);
                for d in 0..heads.head_dim {
                    self.keys[to + d * LANES + to_lane] = self.keys[from + d * LANES + from_lane];
                }
                let from = from + from_lane * heads.head_dim;
                self.values.copy_within(from..from + heads.head_dim, to + to_lane * heads.head_dim);
            }
        }
    }

    /// One kv head of one sequence.
    fn view<'a>(&'a self, heads: Heads, head: KvHead<'a>) -> View<'a, E> {
        let Heads { n_kv_heads, head_dim, .. } = heads;
        View { keys: &self.keys, values: &self.values, n_kv_heads, head_dim, head, next: None }
    }
}

/// Keys and values on their way into a cache, as [`KvCache::write`] takes them.
struct NewRows<'a> {
    heads: Heads,
    slots: &'a [u32],
    k: &'a [f32],
    v: &'a [f32],
}

/// Keys and values of a layer, to be written by several tasks.
enum PageParts<'a> {
    F32([Disjoint<'a, f32>; 2]),
    Bf16([Disjoint<'a, bf16>; 2]),
}

multiversion! {
    /// Writes one kv head of all rows. No other task may write the same head.
    fn write_head(pages: &PageParts<'_>, rows: &NewRows<'_>, kv_head: usize) = write_head_body;
}

#[inline(always)]
fn write_head_body<I: Isa>(pages: &PageParts<'_>, rows: &NewRows<'_>, kv_head: usize) {
    match pages {
        PageParts::F32(parts) => write_rows(parts, rows, kv_head),
        PageParts::Bf16(parts) => write_rows(parts, rows, kv_head),
    }
}

#[inline(always)]
fn write_rows<E: Element>([keys, values]: &[Disjoint<'_, E>; 2], rows: &NewRows<'_>, kv_head: usize) {
    let Heads { n_kv_heads, head_dim, .. } = rows.heads;
    for (t, &slot) in rows.slots.iter().enumerate() {
        let (tile, lane) = place(rows.heads, slot as usize, kv_head);
        let start = tile + lane * head_dim;
        // SAFETY: the tile is this kv head's, whose only task this is.
        let keys = unsafe { keys.part(tile..tile + LANES * head_dim) };
        // SAFETY: as above.
        let values = unsafe { values.part(start..start + head_dim) };
        let row = (t * n_kv_heads + kv_head) * head_dim..(t * n_kv_heads + kv_head + 1) * head_dim;
        let (k, last_k) = rows.k[row.clone()].as_chunks::<LANES>();
        let (v, last_v) = rows.v[row].as_chunks::<LANES>();
        let (lines, _) = keys.as_chunks_mut::<LANES>();
        let (whole_lines, last_lines) = lines.split_at_mut(k.len() * LANES);
        // Rounding vectorises, spreading keys over lines does not: 16 at a time do one, then the other.
        for (lines, k) in whole_lines.chunks_exact_mut(LANES).zip(k) {
            spread_key(lines, E::narrow(k), lane);
        }
        let (whole_values, last_values) = values.as_chunks_mut::<LANES>();
        for (values, v) in whole_values.iter_mut().zip(v) {
            *values = E::narrow(v);
        }
        if !last_k.is_empty() {
            spread_key(last_lines, E::narrow(&padded(last_k)), lane);
            last_values.copy_from_slice(&E::narrow(&padded(last_v))[..last_v.len()]);
        }
    }
}

/// Writes each number of `key` into lane `lane` of a line of its own.
#[inline(always)]
fn spread_key<E: Element>(lines: &mut [[E; LANES]], key: [E; LANES], lane: usize) {
    for (line, k) in lines.iter_mut().zip(key) {
        line[lane] = k;
    }
}

/// Where the tile of a slot and kv head starts, and the slot's lane in it.
fn place(heads: Heads, slot: usize, kv_head: usize) -> (usize, usize) {
    ((slot / LANES * heads.n_kv_heads + kv_head) * LANES * heads.head_dim, slot % LANES)
}

/// Multiply-adds that writing a number costs, about: keys of a token lie on as many lines as a head has elements.
const WRITE_WORK: usize = 32;

/// Consecutive queries of one sequence whose keys and values, their own included, lie in the cache.
#[derive(Clone, Copy, Debug)]
pub struct PagedSequence<'a> {
    /// Queries of this pass.
    pub n_queries: usize,
    /// Position of the first of them; it sees positions `0..=start`.
    pub start: usize,
    /// Block table: position `p` lies in slot `blocks[p / block_tokens] * block_tokens + p % block_tokens`.
    pub blocks: &'a [u32],
}

/// Queries and the query heads of one kv head that one task attends with.
#[derive(Clone, Copy)]
struct Task {
    sequence: usize,
    /// First query, counted over all sequences.
    token: usize,
    n_queries: usize,
    /// Position of the first query.
    start: usize,
}

/// Multiply-adds that a query element costs a key, about: two, and most of the time goes elsewhere.
const ATTEND_WORK: usize = 8;

/// Query rows that share a task: twice what fills the registers, so that keys are read from near caches.
const TASK_ROWS: usize = 2 * kernel::MAX_PASS;

thread_local! {
    /// The task list of a call, kept so that calls do not allocate.
    static TASKS: Cell<Vec<Task>> = const { Cell::new(Vec::new()) };
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Attention of `q` `[T, H, hd]`, the queries of all `sequences` in order, into `out` `[T, H, hd]`.
///
/// `at` is the layer and `block_tokens`; scores are scaled by `1 / sqrt(hd)`. A score is summed up over `hd` in order,
/// a softmax over positions in 16 lanes, an output over positions in order.
///
/// # Panics
/// If a shape does not fit, or a block table is too short or leaves the cache.
pub fn paged_attention(
    q: &[f32],
    cache: &KvCache,
    at: (usize, usize),
    sequences: &[PagedSequence<'_>],
    out: &mut [f32],
) {
    let (heads, (layer, block_tokens)) = (cache.heads, at);
    assert!(
        layer < cache.pages.n_layers() && block_tokens > 0,
        "layer {layer} of {}, {block_tokens} per block",
        cache.pages.n_layers()
    );
    let mut tasks = TASKS.take();
    tasks.clear();
    let max_queries = (TASK_ROWS / heads.group()).max(1);
    let (mut token, mut work) = (0, 0);
    for (index, sequence) in sequences.iter().enumerate() {
        let PagedSequence { n_queries, start, blocks } = *sequence;
        let used = (start + n_queries).div_ceil(block_tokens);
        let end = blocks[..used].iter().max().map_or(0, |&block| (block as usize + 1) * block_tokens);
        assert!(end <= cache.n_slots, "sequence {index} reaches slot {end} of {}", cache.n_slots);
        for first in (0..n_queries).step_by(max_queries) {
            let n_queries = max_queries.min(n_queries - first);
            tasks.push(Task { sequence: index, token: token + first, n_queries, start: start + first });
        }
        token += n_queries;
        work += n_queries * (start + n_queries) * ATTEND_WORK * heads.query_len();
    }
    assert_eq!(
        (q.len(), out.len()),
        (token * heads.query_len(), q.len()),
        "queries and results are [{token}, H, hd]"
    );
    let parts = Disjoint::new(out);
    // Heads lie next to each other in a tile, so one thread takes all of a task's if there is enough else to do.
    let together = if tasks.len() >= parallel::task_count(work) { heads.n_kv_heads } else { 1 };
    // Threads take turns, more or less: the task after the next ones is this thread's.
    let stride = if parallel::task_count(work) > 1 { team::n_threads() } else { 1 };
    let task_of = |at: usize| {
        let (task, index) = (tasks.get(at / heads.n_kv_heads)?, at % heads.n_kv_heads);
        Some((*task, KvHead { index, blocks: sequences[task.sequence].blocks, block_tokens }))
    };
    parallel::for_each(tasks.len() * heads.n_kv_heads / together, work, |i| {
        SCRATCH.with_borrow_mut(|scratch| {
            for at in i * together..(i + 1) * together {
                let (task, head) = task_of(at).expect("a task for every kv head");
                let next = if at + 1 < (i + 1) * together { at + 1 } else { (i + stride) * together };
                let job = Job { cache, layer, head, next: task_of(next).map(|(_, head)| head) };
                run_task(&job, task, q, (scratch, &parts));
            }
        });
    });
    TASKS.set(tasks);
}

/// Gathers a task's scaled queries, attends, and puts the results in their places.
fn run_task(job: &Job<'_>, task: Task, q: &[f32], (scratch, out): (&mut Scratch, &Disjoint<'_, f32>)) {
    let heads = job.cache.heads;
    let row_len = heads.group() * heads.head_dim;
    let start_of = |query: usize| (task.token + query) * heads.query_len() + job.head.index * row_len;
    scratch.queries.clear();
    for query in 0..task.n_queries {
        let row = &q[start_of(query)..][..row_len];
        scratch.queries.extend(row.iter().map(|x| x * heads.scale()));
    }
    let rows = Rows { group: heads.group(), start: task.start, n_rows: task.n_queries * heads.group() };
    attend_job(job, rows, scratch);
    for (query, row) in scratch.out.chunks_exact(row_len).enumerate() {
        let start = start_of(query);
        // SAFETY: tasks are distinct pairs of queries and kv head, and this range belongs to one such pair.
        unsafe { out.part(start..start + row_len) }.copy_from_slice(row);
    }
}

/// Which keys and values a task reads.
struct Job<'a> {
    cache: &'a KvCache,
    layer: usize,
    head: KvHead<'a>,
    /// What this thread reads next, if that is known.
    next: Option<KvHead<'a>>,
}

/// Attends to what the job reads.
fn attend_job(job: &Job<'_>, rows: Rows, scratch: &mut Scratch) {
    let &Job { cache, layer, head, next } = job;
    match &cache.pages {
        Pages::F32(layers) => {
            let view = View { next, ..layers[layer].view(cache.heads, head) };
            if looks_far(&view, rows) {
                far_f32(&view, rows, scratch)
            } else {
                near_f32(&view, rows, scratch)
            }
        }
        Pages::Bf16(layers) => {
            let view = View { next, ..layers[layer].view(cache.heads, head) };
            if looks_far(&view, rows) {
                far_bf16(&view, rows, scratch)
            } else {
                near_bf16(&view, rows, scratch)
            }
        }
    }
}

// Four functions: one with all of it takes a compiler half as long again.
multiversion! {
    fn near_f32(view: &View<'_, f32>, rows: Rows, scratch: &mut Scratch) = attend;
}

multiversion! {
    fn near_bf16(view: &View<'_, bf16>, rows: Rows, scratch: &mut Scratch) = attend;
}

multiversion! {
    fn far_f32(view: &View<'_, f32>, rows: Rows, scratch: &mut Scratch) = attend_far;
}

multiversion! {
    fn far_bf16(view: &View<'_, bf16>, rows: Rows, scratch: &mut Scratch) = attend_far;
}
