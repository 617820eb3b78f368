//! The head's memory grows with neither the rows nor the vocabulary, forward or backward.
#![expect(unsafe_code, reason = "counting bytes takes a global allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use r3_kernels::gemm::Dtype;
use r3_kernels::lm_head::gradient::HeadGradient;
use r3_kernels::lm_head::{Head, PlainHead, Scores, Targets, head_logprobs};

struct Watching;

/// Bytes held by all threads, and the most there were.
static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Relaxed: one counter, and the threads that count are joined before it is read.
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller's promises are those `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

const WIDTH: usize = 8;

/// Most bytes that scoring `n_rows` rows and going back takes beside operands and results.
fn extra_bytes(n_rows: usize, vocab: usize) -> usize {
    let wave = |n: usize| (0..n).map(|i| (i % 23) as f32 / 23.0).collect::<Vec<f32>>();
    let (hidden, weight, pull) = (wave(n_rows * WIDTH), wave(vocab * WIDTH), wave(n_rows));
    let head = PlainHead { weight: &weight, width: WIDTH, dtype: Dtype::F32 };
    let ids: Vec<u32> = (0..n_rows).map(|t| (t % vocab) as u32).collect();
    let [mut logprobs, mut entropies, mut target_logits] = [(); 3].map(|()| vec![0.0; n_rows]);
    let (mut hidden_grad, mut weight_grad) = (vec![0.0; hidden.len()], vec![0.0; weight.len()]);
    let held = HELD.load(Ordering::Relaxed);
    MOST.store(held, Ordering::Relaxed);
    let targets = Targets { ids: &ids, temperature: 1.0, kept: None };
    let scores =
        Scores { logprobs: &mut logprobs, entropies: &mut entropies, target_logits: &mut target_logits };
    head_logprobs(&hidden, Head::Plain(head), targets, scores);
    let gradient = HeadGradient {
        hidden: &hidden,
        head,
        targets,
        logprobs: &logprobs,
        entropies: &entropies,
        target_logits: &target_logits,
        lengths: &[n_rows],
    };
    gradient.add((&pull, &pull), (Some(&mut hidden_grad), Some(&mut weight_grad)));
    assert!(hidden_grad.iter().chain(&weight_grad).any(|&grad| grad != 0.0));
    MOST.load(Ordering::Relaxed) - held
}

#[test]
fn no_array_of_rows_by_vocabulary_is_ever_made() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let [small, longer, wider] =
        [(2048, 2048), (8192, 2048), (2048, 8192)].map(|(t, v)| pool.install(|| extra_bytes(t, v)));
    // Gradients of the logits of 1024 rows by 1024 tokens, twice, as products pack them; and what else they pack.
    assert!(small < 12 << 20, "{small} bytes");
    // Scores and what belongs to a row; sums of a block.
    assert!(longer < small + 6144 * 160, "{longer} bytes for four times the rows, {small} before");
    assert!(wider < small + 6144 * 32, "{wider} bytes for four times the vocabulary, {small} before");
}
