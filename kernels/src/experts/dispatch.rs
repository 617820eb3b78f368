//! Sorting a batch by expert: who goes where, and how to find the way back.

use std::cmp::Reverse;
use std::mem;
use std::ops::Range;

use crate::isa::{Isa, multiversion};
use crate::parallel;
use crate::router::Choice;
use crate::team;

/// The `T K` (token, k) pairs of a choice as rows sorted by expert; within an expert by token.
///
/// The sort is stable and counts pairs, so no row is padded or dropped.
#[derive(Debug, Default)]
pub(super) struct Dispatch {
    top_k: usize,
    /// `[E + 1]`: expert `e` owns rows `starts[e]..starts[e + 1]`.
    starts: Vec<u32>,
    /// `[T K]`: the token of each row.
    tokens: Vec<u32>,
    /// `[T, K]`: the row of each pair.
    rows: Vec<u32>,
    segments: Vec<Segment>,
}

/// Rows of one expert for one task.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub(super) expert: usize,
    pub(super) rows: Range<usize>,
}

impl Dispatch {
    /// Rows of a segment at most: what stays in the second-level cache between the expert's two products.
    pub(super) const MAX_ROWS: usize = 64;

    /// Sorts `choice`, reusing the buffers.
    pub(super) fn fill(&mut self, choice: &Choice) {
        let ids = choice.ids();
        assert!(u32::try_from(ids.len()).is_ok(), "fewer than 2^32 pairs in a batch");
        self.top_k = choice.top_k();
        self.starts.clear();
        self.starts.resize(choice.n_experts() + 1, 0);
        for &id in ids {
            self.starts[usize::from(id) + 1] += 1;
        }
        for expert in 1..self.starts.len() {
            self.starts[expert] += self.starts[expert - 1];
        }
        self.tokens.resize(ids.len(), 0);
        self.rows.resize(ids.len(), 0);
        // Each start serves as its expert's cursor and ends at the next expert's start; shifting them restores it.
        for (pair, &id) in ids.iter().enumerate() {
            let cursor = &mut self.starts[usize::from(id)];
            self.tokens[*cursor as usize] = (pair / self.top_k) as u32;
            self.rows[pair] = *cursor;
            *cursor += 1;
        }
        self.starts.rotate_right(1);
        self.starts[0] = 0;
        self.cut();
    }

    fn cut(&mut self) {
        let mut segments = mem::take(&mut self.segments);
        segments.clear();
        // What the worst routing of such a batch takes, so that later ones do not allocate.
        segments.reserve(self.n_experts() + self.n_rows() / Self::MAX_ROWS);
        self.cut_into(&mut segments, Self::MAX_ROWS);
        self.segments = segments;
    }

    /// Adds all rows to `segments`, at most `max_rows` of one expert in each, the longest first, so that threads that take
    /// them in turns end together.
    fn cut_into(&self, segments: &mut Vec<Segment>, max_rows: usize) {
        for expert in 0..self.n_experts() {
            let rows = self.expert_rows(expert);
            for start in rows.clone().step_by(max_rows) {
                let rows = start..rows.end.min(start.saturating_add(max_rows));
                segments.push(Segment { expert, rows });
            }
        }
        segments.sort_unstable_by_key(|segment| (Reverse(segment.rows.len()), segment.rows.start));
    }

    pub(super) fn n_experts(&self) -> usize {
        self.starts.len() - 1
    }

    /// `T K`.
    pub(super) fn n_rows(&self) -> usize {
        self.tokens.len()
    }

    /// The rows of `expert`, perhaps none.
    pub(super) fn expert_rows(&self, expert: usize) -> Range<usize> {
        self.starts[expert] as usize..self.starts[expert + 1] as usize
    }

    /// All rows, cut into tasks, the longest first.
    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The experts that have rows, with all of theirs, the busiest first.
    pub(super) fn busy_experts(&self) -> Vec<Segment> {
        self.pieces(usize::MAX)
    }

    /// As many rows of one expert in each as keep all threads busy, so that its weights are packed for few tasks; the longest
    /// first.
    pub(super) fn even_pieces(&self) -> Vec<Segment> {
        self.pieces((self.n_rows() / (2 * team::n_threads())).max(Self::MAX_ROWS))
    }

    fn pieces(&self, max_rows: usize) -> Vec<Segment> {
        let mut pieces = Vec::with_capacity(self.n_experts());
        self.cut_into(&mut pieces, max_rows);
        pieces
    }

    /// The tokens of `rows`.
    pub(super) fn tokens(&self, rows: Range<usize>) -> &[u32] {
        &self.tokens[rows]
    }

    /// How many of an expert's `rows` are of each sequence that sends it any, in order, where sequences have `lengths`
    /// tokens.
    pub(super) fn lengths_of(&self, rows: Range<usize>, lengths: &[usize]) -> Vec<usize> {
        let (mut tokens, mut end) = (self.tokens(rows), 0);
        let mut counts = Vec::with_capacity(lengths.len().min(tokens.len()));
        for length in lengths {
            end += length;
            let (here, rest) = tokens.split_at(tokens.partition_point(|&token| (token as usize) < end));
            tokens = rest;
            counts.extend((!here.is_empty()).then_some(here.len()));
        }
        counts
    }

    /// Copies the tokens of `rows` from `x` `[T, width]` to `out` `[rows, width]`.
    pub(super) fn gather<W: Copy>(&self, x: &[W], width: usize, rows: Range<usize>, out: &mut [W]) {
        for (out, &token) in out.chunks_exact_mut(width).zip(self.tokens(rows)) {
            out.copy_from_slice(&x[token as usize * width..][..width]);
        }
    }

    /// `y[t] = sum over k of gates[t, k] * out[row of (t, k)]`, in router order: `out` is `[T K, width]`, `y`
    /// `[T, width]`. Without `gates` every pair counts once.
    pub(super) fn combine(&self, out: &[f32], gates: Option<&[f32]>, width: usize, y: &mut [f32]) {
        let combine = Combine { dispatch: self, out, gates, width };
        parallel::for_rows(y, width, COMBINE_WORK * self.top_k * width, |first, y| {
            combine_rows(&combine, first, y)
        });
    }

    /// Moves one value per pair `[T, K]` to the pairs' rows, `[T K]`.
    pub(super) fn to_rows(&self, pairs: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; pairs.len()];
        for (&value, &row) in pairs.iter().zip(&self.rows) {
            out[row as usize] = value;
        }
        out
    }

    /// Undoes [`Self::to_rows`].
    pub(super) fn to_pairs(&self, rows: &[f32]) -> Vec<f32> {
        self.rows.iter().map(|&row| rows[row as usize]).collect()
    }
}

/// Multiply-adds that adding up an element costs, about: most of it is memory.
const COMBINE_WORK: usize = 4;

struct Combine<'a> {
    dispatch: &'a Dispatch,
    out: &'a [f32],
    gates: Option<&'a [f32]>,
    width: usize,
}

multiversion! {
    /// Adds up the rows of the tokens from `first` on.
    fn combine_rows(combine: &Combine<'_>, first: usize, y: &mut [f32]) = combine_body;
}

#[inline(always)]
fn combine_body<I: Isa>(combine: &Combine<'_>, first: usize, y: &mut [f32]) {
    let Combine { dispatch: Dispatch { top_k, rows, .. }, out, gates, width } = *combine;
    // Columns whose sums stay in registers while the answers pass by.
    const RUN: usize = 64;
    for (token, y) in (first..).zip(y.chunks_exact_mut(width)) {
        let pairs = token * top_k..(token + 1) * top_k;
        let answer = |pair: usize| &out[rows[pair] as usize * width..][..width];
        let gate = |pair: usize| gates.map_or(1.0, |gates| gates[pair]);
        let (runs, rest) = y.as_chunks_mut::<RUN>();
        for (at, y) in runs.iter_mut().enumerate() {
            let mut sums = [0.0; RUN];
            for pair in pairs.clone() {
                let (gate, answers) = (gate(pair), &answer(pair).as_chunks::<RUN>().0[at]);
                for (sum, &answer) in sums.iter_mut().zip(answers) {
                    *sum = I::mul_add(gate, answer, *sum);
                }
            }
            *y = sums;
        }
        rest.fill(0.0);
        for pair in pairs {
            for (y, &answer) in rest.iter_mut().zip(&answer(pair)[width - width % RUN..]) {
                *y = I::mul_add(gate(pair), answer, *y);
            }
        }
    }
}
