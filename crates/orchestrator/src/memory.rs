//! What an engine's memory holds, as one line at the start.

use r3_core::count::counted;
use r3_engine::memory::MemoryBudget;
use r3_recipe::bytes::Bytes;
use r3_telemetry::format::{percent, short};

/// Says what a token costs, how many fit, and what traces of sequences of `max_tokens` tokens may take besides.
pub(crate) fn memory_line(budget: &MemoryBudget, max_tokens: usize) -> String {
    let kv = format!(
        "KV memory {}: {} of {} bytes",
        Bytes(budget.kv_bytes),
        counted(budget.capacity_tokens(), "token"),
        exact(budget.bytes_per_token())
    );
    if budget.route_block_bytes == 0 {
        return format!("{kv}, none of them for routes");
    }
    format!(
        "{kv}, of which routes {} ({}); beside it, up to {}B of traces, of {} at once",
        exact(budget.route_bytes_per_token()),
        percent(budget.route_share()),
        short(budget.trace_bytes(max_tokens) as f64),
        counted(budget.max_running, "sequence")
    )
}

/// Says what the supports of truncated draws may take beside that.
pub(crate) fn support_line(bytes: u64) -> String {
    format!("truncated sampling: up to {} of kept tokens beside the KV memory", Bytes(bytes))
}

/// With a decimal only where there is one: the bookkeeping of a block is shared by its tokens.
fn exact(bytes: f64) -> String {
    if bytes.fract() == 0.0 { format!("{bytes}") } else { format!("{bytes:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget() -> MemoryBudget {
        MemoryBudget {
            kv_bytes: 64 << 20,
            block_tokens: 16,
            n_blocks: 3681,
            kv_block_bytes: 16 * 1024,
            route_block_bytes: 16 * 32 + 24,
            trace_row_bytes: 32,
            max_running: 128,
        }
    }

    #[test]
    fn the_line_says_what_a_token_and_its_routes_cost() {
        assert_eq!(
            memory_line(&budget(), 19),
            "KV memory 64MiB: 58896 tokens of 1057.5 bytes, of which routes 33.5 (3.2%); beside it, up to 73.7kB of \
             traces, of 128 sequences at once"
        );
    }

    #[test]
    fn without_capture_there_is_nothing_to_say_of_routes() {
        let off = MemoryBudget { route_block_bytes: 0, trace_row_bytes: 0, ..budget() };
        assert_eq!(
            memory_line(&off, 19),
            "KV memory 64MiB: 58896 tokens of 1024 bytes, none of them for routes"
        );
    }
}
