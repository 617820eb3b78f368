//! Truncated sampling: which tokens of a row of logits can be drawn, and a draw from those alone.
//!
//! The kept tokens, in order of their ids, are scored as a row of their own: laid end to end their logits are summed as
//! those of any row, so keeping all of them changes no bit, and a single one has logprob 0.0. Whoever knows the kept
//! ids and has the same logits gets the same logprob: [`lm_head`](crate::lm_head) does.

use crate::draw::{Draw, draw};
use crate::exp::exp;
use crate::isa::{Isa, multiversion, padded};
use crate::logprob::inverse;
use crate::rank::{id, rank, score};
use crate::scratch::Scratch;
use crate::softmax::max;

const LANES: usize = 16;

/// What cuts tokens off a distribution. Each cut works on what the one before it left: `top_k`, then `top_p`, then
/// `min_p`, as the warpers of Hugging Face transformers and SGLang's sampler do (vLLM applies `min_p` first).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Truncation {
    /// Keeps this many most likely tokens, of equals those with the lowest ids; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest most likely tokens that hold this share of the probability (nucleus sampling, arXiv 1904.09751);
    /// 1 keeps all, and one is always kept.
    pub top_p: f32,
    /// Keeps tokens at least this many times as likely as the most likely one (arXiv 2407.01082); 0 keeps all.
    pub min_p: f32,
}

impl Truncation {
    /// Keeps all.
    pub const NONE: Self = Self { top_k: 0, top_p: 1.0, min_p: 0.0 };

    /// Whether no token can be cut off.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
    }

    /// Tokens that are kept of `vocab` at most.
    #[must_use]
    pub fn max_kept(&self, vocab: usize) -> usize {
        if self.top_k == 0 { vocab } else { vocab.min(self.top_k) }
    }
}

/// Puts the tokens of `softmax(logits / temperature)`, `logits` `[V]`, that `cut` keeps into `kept`, ascending: one or
/// more, and at most [`Truncation::max_kept`]. Tokens whose probability is 0 in f32 are never among them.
///
/// If the probabilities are not numbers, the first token of which that is so is kept alone, so that the logprob says it.
///
/// # Panics
/// If `logits` is empty, or `temperature` is not positive and finite.
pub fn keep(logits: &[f32], temperature: f32, cut: Truncation, kept: &mut Vec<u32>) {
    assert!(!logits.is_empty(), "a token is drawn from one logit or more");
    kept.clear();
    let mut weights = Scratch::<f32>::take(logits.len());
    let (highest, total) = weigh(logits, inverse(temperature), &mut weights);
    if total.is_nan() {
        kept.extend((0..).zip(&*weights).find(|(_, weight)| weight.is_nan()).map(|(token, _)| token));
        return;
    }
    let row = Row { logits, weights: &weights };
    let mut ranks = Scratch::<u64>::take(logits.len().next_multiple_of(LANES));
    let last = if (1..logits.len()).contains(&cut.top_k) {
        Some(last_of_top_k(&row, cut, &mut ranks))
    } else if cut.top_p < 1.0 {
        let floor = highest - NUCLEUS_DEPTH * temperature;
        Some(last_of_nucleus(&row, (total, cut.top_p.into()), floor, &mut ranks))
    } else {
        None
    };
    // The most likely token has weight 1, so `min_p` compares with the weights as they are.
    let n = collect(&row, last.map_or(f32::NEG_INFINITY, score), cut.min_p, &mut ranks);
    let last = last.unwrap_or(u64::MAX);
    kept.extend(ranks[..n].iter().filter(|&&rank| rank <= last).map(|&rank| id(rank)));
}

/// Draws one of the tokens `kept`, ascending, from the softmax over them alone: [`draw`] of their logits.
///
/// # Panics
/// If nothing is kept, a token is not below `V`, or `temperature` is not positive and finite.
#[must_use]
pub fn draw_kept(logits: &[f32], kept: &[u32], temperature: f32, uniform: f64) -> Draw {
    let mut row = Scratch::<f32>::take(kept.len());
    for (logit, &token) in row.iter_mut().zip(kept) {
        *logit = logits[token as usize];
    }
    let Draw { token, logprob } = draw(&row, temperature, uniform);
    Draw { token: kept[token as usize], logprob }
}

/// A row of logits `[V]` and, of each, how many times as likely as the most likely token it is.
struct Row<'a> {
    logits: &'a [f32],
    weights: &'a [f32],
}

impl Row<'_> {
    fn weight(&self, rank: u64) -> f64 {
        self.weights[id(rank) as usize].into()
    }
}

/// Nats below the most likely token in which a nucleus is looked for first: few tokens of a peaked row lie there.
const NUCLEUS_DEPTH: f32 = 10.0;

/// Tokens of which the most likely one stands for all.
const SET: usize = 16;

/// The rank of the last token that `top_k`, and then `top_p`, keep.
fn last_of_top_k(row: &Row<'_>, cut: Truncation, ranks: &mut [u64]) -> u64 {
    // Where so many sets have a token that likely, there are as many tokens. What has weight 0 comes after what has not, so
    // that it may be one of them.
    let mut highest = Scratch::<f32>::take(row.logits.len().div_ceil(SET * LANES) * LANES);
    let floor = if cut.top_k < highest.len() {
        highest_of_sets(row.logits, &mut highest);
        *highest.select_nth_unstable_by(cut.top_k - 1, |a, b| b.total_cmp(a)).1
    } else {
        f32::NEG_INFINITY
    };
    let n = collect(row, floor, 0.0, ranks);
    let mut ranks = &mut ranks[..n];
    if cut.top_k < n {
        ranks.select_nth_unstable(cut.top_k);
        ranks = &mut ranks[..cut.top_k];
    }
    if cut.top_p < 1.0 {
        let total = ranks.iter().map(|&rank| row.weight(rank)).sum();
        let found = search(row, ranks, (total, cut.top_p.into()));
        found.unwrap_or_else(|| last_needed(row, ranks, cut.top_p.into()))
    } else {
        ranks.iter().copied().max().expect("the most likely token is kept")
    }
}

/// The rank of the last token that `top_p`, `share`, keeps of `total`, the sum of all weights. Tokens of logit `floor` or
/// more are looked at first.
fn last_of_nucleus(row: &Row<'_>, (total, share): (f64, f64), floor: f32, ranks: &mut [u64]) -> u64 {
    for floor in [floor, f32::NEG_INFINITY] {
        let n = collect(row, floor, 0.0, ranks);
        if let Some(last) = search(row, &mut ranks[..n], (total, share)) {
            return last;
        }
    }
    let n = collect(row, f32::NEG_INFINITY, 0.0, ranks);
    last_needed(row, &mut ranks[..n], share)
}

/// What [`last_needed`] finds, without sorting `ranks`, which may be the most likely ones only: `total` is the sum of all,
/// in any order. `None` if what it takes is not among them, or if another order of a sum could change what is found.
fn search(row: &Row<'_>, mut ranks: &mut [u64], (total, share): (f64, f64)) -> Option<u64> {
    /// Fewer are sorted.
    const FEW: usize = 64;
    // Twice what two orders of two sums can make of a difference.
    let slack = 4.0 * row.weights.len() as f64 * f64::EPSILON * total;
    let (enough, mut held) = (share * total, 0.0);
    // A quickselect by weight: those before `ranks` hold `held`, which is not enough.
    while ranks.len() > FEW {
        let n = ranks.len() / 2;
        ranks.select_nth_unstable(n);
        let more = held + ranks[..n].iter().map(|&rank| row.weight(rank)).sum::<f64>();
        if (more - enough).abs() <= slack {
            return None;
        }
        (ranks, held) = if more < enough { (&mut ranks[n..], more) } else { (&mut ranks[..n], held) };
    }
    ranks.sort_unstable();
    for &rank in &*ranks {
        held += row.weight(rank);
        if (held - enough).abs() <= slack {
            return None;
        }
        if held > enough {
            return Some(rank);
        }
    }
    None
}

/// Sorts `ranks`, and finds the first up to which they hold `share` of their sum, both added up in order.
fn last_needed(row: &Row<'_>, ranks: &mut [u64], share: f64) -> u64 {
    ranks.sort_unstable();
    let enough = share * ranks.iter().map(|&rank| row.weight(rank)).sum::<f64>();
    let mut held = 0.0;
    let is_enough = |rank: &&u64| {
        held += row.weight(**rank);
        held >= enough
    };
    // Nothing is lost by rounding at the end: the last sum is the whole one, and a share of it is not more.
    *ranks.iter().find(is_enough).expect("all hold a share of all")
}

multiversion! {
    /// `e^(scale (x - max))` of each logit. Returns the highest logit and the sum of the weights, which is NaN if one is.
    fn weigh(logits: &[f32], scale: f32, weights: &mut [f32]) -> (f32, f64) = weigh_body;
}

#[inline(always)]
fn weigh_body<I: Isa>(logits: &[f32], scale: f32, weights: &mut [f32]) -> (f32, f64) {
    let highest = max(logits);
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let (weight_chunks, weight_rest) = weights.as_chunks_mut::<LANES>();
    for (weights, logits) in weight_chunks.iter_mut().zip(chunks) {
        for lane in 0..LANES {
            weights[lane] = exp::<I>(scale * (logits[lane] - highest));
            lanes[lane] += f64::from(weights[lane]);
        }
    }
    for ((lane, weight), logit) in lanes.iter_mut().zip(weight_rest).zip(rest) {
        *weight = exp::<I>(scale * (logit - highest));
        *lane += f64::from(*weight);
    }
    (highest, lanes.iter().sum())
}

multiversion! {
    /// The highest logit of each set of at most [`SET`] tokens, `-inf` of none. A set is one lane of as many chunks; those
    /// behind the last whole chunk are in no set.
    fn highest_of_sets(logits: &[f32], highest: &mut [f32]) = highest_of_sets_body;
}

#[inline(always)]
fn highest_of_sets_body<I: Isa>(logits: &[f32], highest: &mut [f32]) {
    let sets = logits.as_chunks::<LANES>().0.chunks(SET);
    highest.fill(f32::NEG_INFINITY);
    for (highest, chunks) in highest.as_chunks_mut::<LANES>().0.iter_mut().zip(sets) {
        for logits in chunks {
            for lane in 0..LANES {
                highest[lane] = if logits[lane] > highest[lane] { logits[lane] } else { highest[lane] };
            }
        }
    }
}

multiversion! {
    /// The ranks of tokens whose logit is `floor` or more and whose weight is above 0 and `least` or more, in the order of
    /// ids; returns how many there are. `ranks` has room for whole lanes.
    fn collect(row: &Row<'_>, floor: f32, least: f32, ranks: &mut [u64]) -> usize = collect_body;
}

#[inline(always)]
fn collect_body<I: Isa>(row: &Row<'_>, floor: f32, least: f32, ranks: &mut [u64]) -> usize {
    let (mut n, mut first) = (0, 0);
    let (logits, last_logits) = row.logits.as_chunks::<LANES>();
    let (weights, last_weights) = row.weights.as_chunks::<LANES>();
    // A token of weight 0 is not wanted.
    let last = (padded(last_logits), padded(last_weights));
    for (logits, weights) in logits.iter().zip(weights).chain([(&last.0, &last.1)]) {
        let mut wanted = [false; LANES];
        let mut any = false;
        for lane in 0..LANES {
            wanted[lane] = (logits[lane] >= floor) & (weights[lane] >= least) & (weights[lane] > 0.0);
            any |= wanted[lane];
        }
        // Most often none is.
        if any {
            let mut all = [0; LANES];
            for lane in 0..LANES {
                all[lane] = rank(logits[lane], first + lane as u32);
            }
            for (rank, wanted) in all.into_iter().zip(wanted) {
                ranks[n] = rank;
                n += usize::from(wanted);
            }
        }
        first += LANES as u32;
    }
    n
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{
        ProptestConfig, Strategy, prop, prop_assert, prop_assert_eq, prop_oneof, proptest,
    };

    use super::*;
    use crate::logprob::chosen_logprobs;
    use crate::testing::noise;

    fn kept(logits: &[f32], temperature: f32, cut: Truncation) -> Vec<u32> {
        let mut kept = vec![7; 3];
        keep(logits, temperature, cut, &mut kept);
        kept
    }

    /// The definition, in f64, one cut after the other.
    fn plain(logits: &[f32], temperature: f32, cut: Truncation) -> Vec<u32> {
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |&(_, logit): &(u32, f32)| {
            ((f64::from(logit) - f64::from(highest)) / f64::from(temperature)).exp()
        };
        let mut left: Vec<(u32, f32)> =
            (0..).zip(logits.iter().copied()).filter(|(_, logit)| logit.is_finite()).collect();
        left.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        left.truncate(cut.max_kept(left.len()));
        let mass: f64 = left.iter().map(weight).sum();
        let (mut n, mut held) = (0, 0.0);
        while n < left.len() && (n == 0 || held < f64::from(cut.top_p) * mass) {
            held += weight(&left[n]);
            n += 1;
        }
        left.truncate(if cut.top_p < 1.0 { n } else { left.len() });
        left.retain(|one| weight(one) >= f64::from(cut.min_p));
        let mut tokens: Vec<u32> = left.into_iter().map(|(token, _)| token).collect();
        tokens.sort_unstable();
        tokens
    }

    /// Logits with ties and with tokens that are cut off already; the first is always there.
    fn logits() -> impl Strategy<Value = Vec<f32>> {
        let logit = prop_oneof![
            4 => (-300_i32..300).prop_map(|x| x as f32 / 40.0),
            2 => (-4_i32..4).prop_map(|x| x as f32),
            1 => prop::sample::select(vec![f32::NEG_INFINITY, 0.0, -0.0]),
        ];
        prop::collection::vec(logit, 1..400).prop_map(|mut logits| {
            logits[0] = logits[0].max(-5.0);
            logits
        })
    }

    fn cut() -> impl Strategy<Value = Truncation> {
        let top_k =
            prop_oneof![2 => prop::sample::select(vec![0_usize]), 3 => 1_usize..50, 1 => 300_usize..1000];
        let top_p = prop_oneof![1 => prop::sample::select(vec![1.0_f32, 1e-30]), 3 => 0.001_f32..1.0];
        let min_p = prop_oneof![1 => prop::sample::select(vec![0.0_f32, 1.0]), 2 => 0.0_f32..1.0];
        (top_k, top_p, min_p).prop_map(|(top_k, top_p, min_p)| Truncation { top_k, top_p, min_p })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

        /// Up to what rounding moves over a boundary.
        #[test]
        fn what_is_kept_is_what_the_definition_keeps(
            logits in logits(), temperature in 0.2_f32..3.0, cut in cut(),
        ) {
            let got = kept(&logits, temperature, cut);
            prop_assert!(!got.is_empty() && got.len() <= cut.max_kept(logits.len()));
            prop_assert!(got.is_sorted_by(|a, b| a < b), "{:?}", got);
            let near = |by: f32| {
                let top_p = if cut.top_p < 1.0 { (cut.top_p * (1.0 + by)).min(1.0 - 1e-7) } else { 1.0 };
                plain(&logits, temperature, Truncation { top_p, min_p: (cut.min_p * (1.0 - by)).min(1.0), ..cut })
            };
            let (fewer, more) = (near(-1e-5), near(1e-5));
            prop_assert!(fewer.iter().all(|token| got.contains(token)), "{:?} lacks some of {:?}", got, fewer);
            prop_assert!(got.iter().all(|token| more.contains(token)), "{:?} has more than {:?}", got, more);
        }

        /// `logprob = z_y - logsumexp_kept z`, in f64.
        #[test]
        fn a_draw_is_of_the_kept_and_scored_over_them(
            logits in logits(), temperature in 0.2_f32..3.0, cut in cut(), uniform in 0.0_f64..1.0,
        ) {
            let kept = kept(&logits, temperature, cut);
            let drawn = draw_kept(&logits, &kept, temperature, uniform);
            prop_assert!(kept.contains(&drawn.token));
            let z = |token: u32| f64::from(logits[token as usize]) / f64::from(temperature);
            let highest = kept.iter().map(|&token| z(token)).fold(f64::NEG_INFINITY, f64::max);
            let total = kept.iter().map(|&token| (z(token) - highest).exp()).sum::<f64>().ln() + highest;
            let want = z(drawn.token) - total;
            let got = f64::from(drawn.logprob);
            prop_assert!((got - want).abs() <= 2e-6 * (1.0 + want.abs()), "{} is not {}", got, want);
            if kept.len() == 1 {
                prop_assert_eq!(drawn.logprob.to_bits(), 0.0_f32.to_bits());
            }
        }
    }

    /// The definition, in the numbers of [`keep`]: everything ranked, cut after cut.
    fn sorted(logits: &[f32], temperature: f32, cut: Truncation) -> Vec<u32> {
        let mut weights = vec![0.0; logits.len()];
        weigh(logits, inverse(temperature), &mut weights);
        let row = Row { logits, weights: &weights };
        let ids = (0..logits.len()).filter(|&token| weights[token] > 0.0);
        let mut ranks: Vec<u64> = ids.map(|token| rank(logits[token], token as u32)).collect();
        ranks.sort_unstable();
        ranks.truncate(cut.max_kept(ranks.len()));
        if cut.top_p < 1.0 {
            let last = last_needed(&row, &mut ranks, cut.top_p.into());
            ranks.retain(|&rank| rank <= last);
        }
        ranks.retain(|&rank| row.weight(rank) >= cut.min_p.into());
        let mut tokens: Vec<u32> = ranks.into_iter().map(id).collect();
        tokens.sort_unstable();
        tokens
    }

    proptest! {
        #[test]
        fn what_is_kept_is_what_ranking_everything_keeps(
            (n, seed) in (1_usize..6000, 0_u32..1000), range in prop::sample::select(vec![0.0_f32, 0.5, 5.0, 30.0, 300.0]),
            grain in prop::sample::select(vec![0.0_f32, 0.5]), temperature in 0.2_f32..3.0, cut in cut(),
        ) {
            let coarse = |x: f32| if grain > 0.0 { (x / grain).round() * grain } else { x };
            let logits: Vec<f32> = noise(n, seed).into_iter().map(|x| coarse(range * x)).collect();
            prop_assert_eq!(kept(&logits, temperature, cut), sorted(&logits, temperature, cut));
        }
    }

    #[test]
    fn sums_too_near_to_tell_are_left_to_the_order_of_ranks() {
        let half = Truncation { top_p: 0.5, ..Truncation::NONE };
        for n in [2, 100, 5000] {
            let (logits, weights) = (vec![3.0; n], vec![1.0; n]);
            let row = Row { logits: &logits, weights: &weights };
            let ranks: Vec<u64> = (0_u32..).zip(&logits).map(|(token, &logit)| rank(logit, token)).collect();
            let found = |share| search(&row, &mut ranks.clone(), (n as f64, share)).map(id);
            assert_eq!((found(0.5), found(0.5 + f64::EPSILON)), (None, None));
            assert_eq!(found(0.5 + 1e-8), Some(n as u32 / 2));
            assert_eq!(
                search(&row, &mut ranks.clone(), (3.0 * n as f64, 0.5)),
                None,
                "not all that there are"
            );
            assert_eq!(kept(&logits, 1.0, half).len(), n / 2);
        }
    }

    #[test]
    fn keeping_all_changes_no_bit() {
        for n in [1, 16, 17, 1024, 1025, 3000] {
            let logits = noise(n, 3);
            let all = kept(&logits, 0.7, Truncation { top_k: n + 5, top_p: 1.0, min_p: 1e-30 });
            assert_eq!(all.len(), n);
            for uniform in (0..50).map(|at| f64::from(at) / 50.0) {
                assert_eq!(draw_kept(&logits, &all, 0.7, uniform), draw(&logits, 0.7, uniform));
            }
            let mut logprob = [0.0];
            let drawn = draw_kept(&logits, &all, 0.7, 0.3);
            chosen_logprobs(&logits, &[drawn.token], 0.7, &mut logprob);
            assert_eq!(drawn.logprob.to_bits(), logprob[0].to_bits());
        }
    }

    #[test]
    fn every_kept_token_is_drawn_over_its_share() {
        let logits = [3.0, 1.0, 2.0, 0.0, 2.5];
        let kept = kept(&logits, 0.8, Truncation { top_k: 3, ..Truncation::NONE });
        assert_eq!(kept, [0, 2, 4]);
        let weights = kept.iter().map(|&token| f64::from(logits[token as usize] / 0.8).exp());
        let total: f64 = weights.clone().sum();
        let mut before = 0.0;
        for (weight, &token) in weights.zip(&kept) {
            for part in [0.05, 0.95] {
                let drawn = draw_kept(&logits, &kept, 0.8, before + part * weight / total);
                assert_eq!(
                    (drawn.token, (f64::from(drawn.logprob) - (weight / total).ln()).abs() < 1e-6),
                    (token, true)
                );
            }
            before += weight / total;
        }
    }

    #[test]
    fn of_equals_the_lowest_ids_are_kept() {
        let logits = [1.0, 2.0, 0.0, -0.0, 2.0, 0.0, 2.0];
        let by = |top_k, top_p, min_p| kept(&logits, 1.0, Truncation { top_k, top_p, min_p });
        assert_eq!(by(2, 1.0, 0.0), [1, 4]);
        assert_eq!(by(5, 1.0, 0.0), [0, 1, 2, 4, 6], "-0 is 0");
        assert_eq!(by(0, 0.3, 0.0), [1, 4]);
        assert_eq!(by(0, 1.0, 1.0), [1, 4, 6], "as likely as the most likely");
        assert_eq!(by(0, 1e-38, 0.0), [1]);
    }

    /// 8/15, 4/15, 2/15, 1/15: after `top_k: 2`, 2/3 and 1/3.
    #[test]
    fn a_cut_counts_what_the_one_before_left() {
        let logits = [8.0_f32, 4.0, 2.0, 1.0].map(f32::ln);
        let by = |top_k, top_p, min_p| kept(&logits, 1.0, Truncation { top_k, top_p, min_p });
        assert_eq!(by(0, 0.6, 0.0), [0, 1]);
        assert_eq!(by(2, 0.6, 0.0), [0]);
        assert_eq!(by(0, 0.9, 0.3), [0, 1], "of three");
        assert_eq!(by(1, 0.9, 0.01), [0]);
    }

    #[test]
    fn what_is_no_number_is_not_hidden() {
        for (logits, first) in [
            ([1.0, f32::NAN, 0.0], 1),
            ([1.0, 0.0, f32::INFINITY], 2),
            ([f32::NEG_INFINITY; 3], 0),
            ([f32::NAN; 3], 0),
        ] {
            for cut in
                [Truncation { top_k: 1, ..Truncation::NONE }, Truncation { top_p: 0.5, ..Truncation::NONE }]
            {
                let kept = kept(&logits, 1.0, cut);
                assert_eq!(kept, [first], "{logits:?}");
                assert!(draw_kept(&logits, &kept, 1.0, 0.5).logprob.is_nan());
            }
        }
        let cut_off = [0.5, f32::NEG_INFINITY, 1.0];
        assert_eq!(kept(&cut_off, 1.0, Truncation { top_k: 3, ..Truncation::NONE }), [0, 2], "never drawn");
    }
}
