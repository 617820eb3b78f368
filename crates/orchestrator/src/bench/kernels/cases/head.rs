//! From hidden states or logits to a token and its logprob.

use std::hint::black_box;

use r3_kernels::draw::draw;
use r3_kernels::gemm::Dtype;
use r3_kernels::lm_head::{Head, PlainHead, Scores, Targets, head_logprobs};
use r3_kernels::logprob::chosen_logprobs;
use r3_kernels::truncate::{Truncation, draw_kept, keep};

use super::{Case, DTYPES, F32, noise, pairs};

/// Of logits, as the engine takes them.
pub(super) fn logprobs() -> Vec<Case> {
    let case = |(t, vocab): (usize, usize)| {
        let (logits, targets, mut chosen) = (noise(t * vocab), vec![1_u32; t], vec![0.0; t]);
        Case::new(format!("[{t}, {vocab}]"), Dtype::F32, (0, t * vocab * F32), move || {
            chosen_logprobs(black_box(&logits), &targets, 1.0, black_box(&mut chosen));
        })
    };
    [(64, 2048), (64, 32_768)].map(case).into()
}

/// Logprobs and entropies of hidden states, as the trainer takes them.
pub(super) fn head() -> Vec<Case> {
    let (width, vocab) = (512, 4096);
    let case = |(dtype, t): (Dtype, usize)| {
        let (hidden, ids) = (noise(t * width), vec![1_u32; t]);
        let weight = noise(vocab * width);
        let mut scores = [vec![0.0; t], vec![0.0; t], vec![0.0; t]];
        let costs = (2 * t * width * vocab, (vocab + t) * width * F32);
        Case::new(format!("[{t}, {width}] x [{vocab}, {width}]"), dtype, costs, move || {
            let [logprobs, entropies, target_logits] = black_box(&mut scores);
            let targets = Targets { ids: &ids, temperature: 1.0, kept: None };
            head_logprobs(
                black_box(&hidden),
                Head::Plain(PlainHead { weight: &weight, width, dtype }),
                targets,
                Scores { logprobs, entropies, target_logits },
            );
        })
    };
    pairs(&DTYPES, &[64, 2048]).into_iter().map(case).collect()
}

const VOCABULARIES: [usize; 2] = [32_000, 152_000];

/// A row of logits that are peaked as a model's are: in their order, tokens get less likely by Zipf's law, `1 / rank^1.5`,
/// and a twentieth of the probability is beyond some hundreds.
fn peaked(vocab: usize) -> Vec<f32> {
    let rank = |x: f32| 1.0 + (x + 1.0) / 2.0 * vocab as f32;
    noise(vocab).into_iter().map(|x| -1.5 * rank(x).ln()).collect()
}

/// One token from a row of logits.
pub(super) fn whole_draw() -> Vec<Case> {
    let case = |vocab: usize| {
        let logits = peaked(vocab);
        Case::new(format!("[{vocab}]"), Dtype::F32, (0, vocab * F32), move || {
            black_box(draw(black_box(&logits), 1.0, 0.5));
        })
    };
    VOCABULARIES.map(case).into()
}

/// One token from what a cut leaves of a row of logits; the last row is flat, and most of it is left.
pub(super) fn truncated_draw() -> Vec<Case> {
    type Logits = fn(usize) -> Vec<f32>;
    let all = Truncation::NONE;
    let cuts: [(&str, Logits, Truncation); 5] = [
        ("top_k 50", peaked, Truncation { top_k: 50, ..all }),
        ("top_p 0.95", peaked, Truncation { top_p: 0.95, ..all }),
        ("min_p 0.05", peaked, Truncation { min_p: 0.05, ..all }),
        ("top_k 50, top_p 0.95", peaked, Truncation { top_k: 50, top_p: 0.95, ..all }),
        ("top_p 0.95, flat", noise, Truncation { top_p: 0.95, ..all }),
    ];
    let case = |(vocab, (name, logits, cut)): (usize, (&str, Logits, Truncation))| {
        let (logits, mut kept) = (logits(vocab), Vec::with_capacity(vocab));
        Case::new(format!("[{vocab}], {name}"), Dtype::F32, (0, vocab * F32), move || {
            keep(black_box(&logits), 1.0, cut, &mut kept);
            black_box(draw_kept(&logits, &kept, 1.0, 0.5));
        })
    };
    pairs(&VOCABULARIES, &cuts).into_iter().map(case).collect()
}
