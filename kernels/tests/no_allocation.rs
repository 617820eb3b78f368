//! The engine's hot path allocates nothing once its buffers have grown.
#![expect(unsafe_code, reason = "counting allocations takes a global allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use r3_kernels::experts::{ExpertDims, ExpertScratch, Experts, Routed, forward};
use r3_kernels::gemm::{Dtype, PackedMatrix, matmul};
use r3_kernels::router::{Choice, Router, RouterConfig, Routing, Scoring, choose};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises are those `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often this thread allocates during `body`.
fn allocations(body: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    body();
    ALLOCATIONS.get() - before
}

fn ramp(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i % 17) as f32 / 17.0 - 0.5).collect()
}

#[test]
fn products_and_experts_allocate_only_to_grow() {
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![0]))), 1);

    let dims = ExpertDims { n_experts: 4, width: 40, inter: 24 };
    let softmax = RouterConfig::softmax(4, 2, true);
    let scoring = Scoring::Sigmoid { n_groups: 2, top_groups: 1 };
    let sigmoid = Router { config: RouterConfig { scoring, ..softmax }, bias: Some(&[0.0, 0.1, -0.1, 0.2]) };
    let (x, gates, gate_up, down) = (ramp(9 * 40), ramp(9 * 2), ramp(4 * 48 * 40), ramp(4 * 40 * 24));
    let scores = ramp(9 * 4);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let mut w = PackedMatrix::pack(&ramp(50 * 40), 50, 40, dtype);
        let experts = Experts::pack(&gate_up, &down, dims, dtype);
        let (mut choice, mut scratch) = (Choice::empty(), ExpertScratch::default());
        let (mut projected, mut y) = (vec![0.0; 9 * 50], vec![0.0; 9 * 40]);
        let mut pass = |n_tokens: usize| {
            let (x, y) = (&x[..n_tokens * 40], &mut y[..n_tokens * 40]);
            matmul(x, &w, None, &mut projected[..n_tokens * 50]);
            for router in [softmax.into(), sigmoid] {
                choose(&scores[..n_tokens * 4], router, 0, &mut Routing::Free, &mut choice);
            }
            let routed = Routed { choice: &choice, gates: &gates[..n_tokens * 2] };
            forward(x, routed, &experts, &mut scratch, y);
        };
        assert!(allocations(|| pass(9)) > 0);
        assert_eq!(allocations(|| [1, 4, 9, 2].into_iter().for_each(&mut pass)), 0);
        let repack = || [50, 20, 33].into_iter().for_each(|n| w.repack(&gate_up[..n * 40]));
        assert_eq!(allocations(repack), 0);
    }
}
