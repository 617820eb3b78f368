//! Faults to plant, each as edits of the source.

/// A piece of a file that is replaced. `find` occurs there once; it and `replace` both fit between braces.
pub(crate) struct Edit {
    pub(crate) file: &'static str,
    pub(crate) find: &'static str,
    pub(crate) replace: &'static str,
}

/// One fault.
pub(crate) struct Mutant {
    /// What goes wrong.
    pub(crate) name: &'static str,
    /// Numbers in `docs/faults.md` of faults of this kind that other systems have had.
    pub(crate) faults: &'static [u32],
    pub(crate) edits: &'static [Edit],
}

const BLOCKS: &str = "crates/scheduler/src/block_pool.rs";
const KV: &str = "crates/scheduler/src/kv_memory.rs";
const PLANNER: &str = "crates/scheduler/src/planner.rs";
const POOL: &str = "crates/scheduler/src/route_pool.rs";
const RETRACT: &str = "crates/scheduler/src/retract.rs";
const SCHEDULER: &str = "crates/scheduler/src/scheduler.rs";
const SEQUENCE: &str = "crates/scheduler/src/sequence.rs";
const ENGINE: &str = "crates/sim/src/hash_engine.rs";

const RECORD: &str = "self.kv.record(block, first, of_run);";
const KEEP: &str = "trace.reserve(self.computed.saturating_sub(trace.end()));";
const COPY_FORK: &str = "self.kv.copy_routes(BlockId(from), BlockId(to), n_slots);";
const WRITE: &str = r#"self.adopt(block, stamp);
        for (word, bits) in self.validity(block, slots.clone()) {
            assert_eq!(self.valid[word] & bits, 0, "block {block}: a slot from {first} on has a row");
            self.valid[word] |= bits;
        }
        let at = self.byte_range(block, slots);
        self.bytes[at].copy_from_slice(rows);"#;
const EVICT_ALL: &str = "while let Some(block) = self.cache.as_mut().and_then(PrefixCache::evict) {
            self.pool.give_back(block);
        }";
const ALL_FREE: &str =
    "assert_eq!(self.free.len(), self.n_blocks(), \"nobody holds a block during a flush\");";
const STALE_EPOCH: &str = "return Err(SchedulerError::StaleEpoch { epoch, current: self.kv.epoch() });";

pub(crate) const MUTANTS: [Mutant; 44] = [
    Mutant {
        name: "the last row of a prefill is cut off",
        faults: &[1],
        edits: &[Edit { file: SEQUENCE, find: "usize::from(finish == FinishReason::Abort)", replace: "1" }],
    },
    Mutant {
        name: "every row of a tick is its first",
        faults: &[2],
        edits: &[Edit {
            file: SCHEDULER,
            find: RECORD,
            replace: "self.kv.record(block, first, &rows[..row_bytes].repeat(run.len()));",
        }],
    },
    Mutant {
        name: "rows are one position late",
        faults: &[13],
        edits: &[Edit {
            file: SCHEDULER,
            find: RECORD,
            replace: "let late = &of_run[..of_run.len() - row_bytes];
                self.kv.record(block, first, &[&of_run[..row_bytes], late].concat());",
        }],
    },
    Mutant {
        name: "rows of all chunks but the first are lost",
        faults: &[3, 8],
        edits: &[Edit {
            file: SCHEDULER,
            find: RECORD,
            replace: "let is_first = behind.len() + of_run.len() == rows.len();
                let lost = vec![0; of_run.len()];
                self.kv.record(block, first, if is_first { of_run } else { &lost });",
        }],
    },
    Mutant {
        name: "a reused slot keeps the routes of its last occupant",
        faults: &[5, 17],
        edits: &[Edit {
            file: POOL,
            find: WRITE,
            replace: "self.stamps[block.index()] = stamp;
        for (slot, row) in slots.clone().zip(rows.chunks_exact(self.dims.row_bytes())) {
            for (word, bits) in self.validity(block, slot..slot + 1) {
                if self.valid[word] & bits == 0 {
                    let at = self.byte_range(block, slot..slot + 1);
                    self.bytes[at].copy_from_slice(row);
                }
                self.valid[word] |= bits;
            }
        }",
        }],
    },
    Mutant {
        name: "a fork's copied slots keep the keys of their last occupant",
        faults: &[5, 17],
        edits: &[Edit {
            file: ENGINE,
            find: "kv[to as usize] = kv[from as usize];",
            replace: "let _ = (from, to);",
        }],
    },
    Mutant {
        name: "blocks of a forward that failed can be found",
        faults: &[6],
        edits: &[Edit {
            file: SCHEDULER,
            find: "self.plan.clear();",
            replace: r#"for chunk in &self.plan.chunks {
            let sequence = self.sequences.get_mut(&chunk.sequence).expect("planned sequences exist");
            sequence.settle(&mut self.kv, chunk.start + chunk.n_tokens);
        }
        self.plan.clear();"#,
        }],
    },
    Mutant {
        name: "re-prefill overwrites the trace",
        faults: &[7, 25],
        edits: &[Edit {
            file: SEQUENCE,
            find: KEEP,
            replace: "if trace.end() <= self.computed {
            trace.truncate(0);
        }",
        }],
    },
    Mutant {
        name: "rows of the next attempt are joined to those of the last",
        faults: &[36],
        edits: &[Edit {
            file: SEQUENCE,
            find: KEEP,
            replace: "for position in trace.start()..trace.end().min(self.computed) {
            let (at, slot) = (position / kv.block_tokens(), position % kv.block_tokens());
            let row = kv.routes(BlockId(self.blocks[at]), slot..slot + 1);
            trace.append(row.expect(\"every computed slot has a readable row\"));
        }",
        }],
    },
    Mutant {
        name: "the last emitted row is computed again",
        faults: &[7, 25],
        edits: &[Edit { file: SEQUENCE, find: "turn.end - 1", replace: "turn.end - 2" }],
    },
    Mutant {
        name: "rows that nothing was sampled under survive a refit",
        faults: &[7, 39],
        edits: &[Edit { file: SEQUENCE, find: "trace.truncate(end);", replace: "let _ = trace;" }],
    },
    Mutant {
        name: "prompt logprobs survive a refit",
        faults: &[39],
        edits: &[Edit { file: SEQUENCE, find: "logprobs.clear();", replace: "let _ = logprobs;" }],
    },
    Mutant {
        name: "preemption drops the trace",
        faults: &[8],
        edits: &[Edit {
            file: RETRACT,
            find: "sequence.n_preemptions += 1;",
            replace: "sequence.n_preemptions += 1;
        sequence.trace.iter_mut().for_each(|trace| trace.truncate(0));",
        }],
    },
    Mutant {
        name: "a prefix hit holds all its blocks but the first",
        faults: &[10],
        edits: &[Edit {
            file: KV,
            find: "hit.blocks.iter().for_each(|&block| self.hold(block));",
            replace: "hit.blocks.iter().skip(1).for_each(|&block| self.hold(block));",
        }],
    },
    Mutant {
        name: "rows are stored in the order of another forward",
        faults: &[15, 16],
        edits: &[Edit {
            file: ENGINE,
            find: "scheduler.record(route_rows(ran, dims).view().bytes());",
            replace: "let ran: Vec<_> = ran.rchunks(dims.row_ids()).flatten().copied().collect();
            scheduler.record(route_rows(&ran, dims).view().bytes());",
        }],
    },
    Mutant {
        name: "routes of padding land in slot 0",
        faults: &[17],
        edits: &[Edit {
            file: SCHEDULER,
            find: RECORD,
            replace: "self.kv.record(block, first, of_run);
                self.kv.record(BlockId(0), 0, &of_run[..row_bytes]);",
        }],
    },
    Mutant {
        name: "keys of padding land in slot 0",
        faults: &[17],
        edits: &[Edit {
            file: ENGINE,
            find: "kv[slot as usize] = state;",
            replace: "kv[slot as usize] = state;
            kv[0] = state;",
        }],
    },
    Mutant {
        name: "every turn hands over all rows again",
        faults: &[4],
        edits: &[Edit {
            file: SEQUENCE,
            find: "sequence.inherited_rows = sequence.trace_end();",
            replace: "sequence.inherited_rows = 0;",
        }],
    },
    Mutant {
        name: "the boundary row is that of the turn before",
        faults: &[23, 24],
        edits: &[Edit {
            file: SEQUENCE,
            find: "self.turn_start = self.tokens.len();",
            replace: "self.turn_start = self.tokens.len();
        if let Some(trace) = &mut self.trace {
            let rows = trace.clone().into_rows();
            let row_bytes = rows.view().dims().row_bytes();
            rows.view().bytes().rchunks(row_bytes).take(1).for_each(|row| trace.append(row));
        }",
        }],
    },
    Mutant {
        name: "rows of a prefix hit begin at the block's first slot",
        faults: &[26],
        edits: &[Edit {
            file: SEQUENCE,
            find: "kv.routes(BlockId(self.blocks[at]), first..end)",
            replace: "kv.routes(BlockId(self.blocks[at]), 0..end - first)",
        }],
    },
    Mutant {
        name: "given tokens count as sampled",
        faults: &[28],
        edits: &[Edit { file: SEQUENCE, find: "position > self.turn_start", replace: "true" }],
    },
    Mutant {
        name: "prefixes are found across a refit",
        faults: &[39, 40],
        edits: &[
            Edit { file: KV, find: EVICT_ALL, replace: "let _ = PrefixCache::evict;" },
            Edit { file: BLOCKS, find: ALL_FREE, replace: "" },
            Edit {
                file: KV,
                find: "next.stamp == self.pool.stamp(next.block) && next.stamp.epoch == self.pool.epoch()",
                replace: "next.stamp == self.pool.stamp(next.block)",
            },
        ],
    },
    Mutant {
        name: "a refit that failed has retracted what ran",
        faults: &[44],
        edits: &[Edit {
            file: RETRACT,
            find: STALE_EPOCH,
            replace: "while let Some(running) = self.running.last() {
                self.retract(running.id);
            }
            return Err(SchedulerError::StaleEpoch { epoch, current: self.kv.epoch() });",
        }],
    },
    Mutant {
        name: "a refit that failed has emptied the cache",
        faults: &[44],
        edits: &[Edit {
            file: RETRACT,
            find: STALE_EPOCH,
            replace: "if self.running.is_empty() {
                self.kv.flush(epoch);
            }
            return Err(SchedulerError::StaleEpoch { epoch, current: self.kv.epoch() });",
        }],
    },
    Mutant {
        name: "one version stands for the whole request",
        faults: &[45],
        edits: &[Edit {
            file: SEQUENCE,
            find: "self.versions.push(version);",
            replace: "self.versions.push(version);
        self.versions.fill(version);",
        }],
    },
    Mutant {
        name: "a refit turns the order of those who wait around",
        faults: &[46],
        edits: &[Edit {
            file: RETRACT,
            find: "self.waiting.make_contiguous().sort_unstable();",
            replace: "self.waiting.make_contiguous().sort_unstable_by(|a, b| b.cmp(a));",
        }],
    },
    Mutant {
        name: "a fork copies the prompt's first block",
        faults: &[],
        edits: &[Edit {
            file: PLANNER,
            find: "source.blocks[n_shared] * n_slots + slot",
            replace: "source.blocks[0] * n_slots + slot",
        }],
    },
    Mutant {
        name: "a fork's routes are one slot short",
        faults: &[],
        edits: &[Edit {
            file: SCHEDULER,
            find: COPY_FORK,
            replace: "self.kv.copy_routes(BlockId(from), BlockId(to), n_slots.saturating_sub(1));",
        }],
    },
    Mutant {
        name: "a fork has no rows of its prompt",
        faults: &[8],
        edits: &[Edit { file: SCHEDULER, find: COPY_FORK, replace: "let _ = (from, to, n_slots);" }],
    },
    Mutant {
        name: "a token is sampled from the first row of its chunk",
        faults: &[2],
        edits: &[Edit { file: PLANNER, find: "first_row + n_tokens - 1", replace: "first_row" }],
    },
    Mutant {
        name: "a stop token in the last position is overlooked",
        faults: &[],
        edits: &[Edit {
            file: SEQUENCE,
            find: "self.stop_tokens.contains(&token)",
            replace: "self.stop_tokens.contains(&token) && self.n_sampled() < self.max_new_tokens",
        }],
    },
    Mutant {
        name: "a stop token after a preemption is overlooked",
        faults: &[],
        edits: &[Edit {
            file: SEQUENCE,
            find: "self.stop_tokens.contains(&token)",
            replace: "self.stop_tokens.contains(&token) && self.n_preemptions == 0",
        }],
    },
    Mutant {
        name: "a group is remembered after its last member",
        faults: &[11],
        edits: &[Edit { file: SCHEDULER, find: "self.families.remove(&key);", replace: "let _ = &key;" }],
    },
    Mutant {
        name: "resumed rollouts that share a prompt are filed under one that does not",
        faults: &[],
        edits: &[Edit {
            file: SCHEDULER,
            find: "self.families.insert(first.family, Family { leader: None, unstarted: ids });",
            replace: "self.families.insert(members[0].family, Family { leader: None, unstarted: ids });",
        }],
    },
    Mutant {
        name: "a leader that is retracted still leads",
        faults: &[],
        edits: &[Edit {
            file: RETRACT,
            find: "family.leader = family.leader.filter(|&leader| leader != id);",
            replace: "let _ = &family;",
        }],
    },
    Mutant {
        name: "a leader that was taken back still leads",
        faults: &[],
        edits: &[Edit {
            file: SCHEDULER,
            find: "family.leader = family.leader.filter(|&leader| leader != id);",
            replace: "let _ = &family;",
        }],
    },
    Mutant {
        name: "a tick that is given up leaves the supports of its draws",
        faults: &[49],
        edits: &[Edit {
            file: SEQUENCE,
            find: "support.truncate(self.versions.len());",
            replace: "let _ = &support;",
        }],
    },
    Mutant {
        name: "given tokens have no support, not even an empty one",
        faults: &[49],
        edits: &[Edit {
            file: SEQUENCE,
            find: "support.fill(self.versions.len());",
            replace: "let _ = &support;",
        }],
    },
    Mutant {
        name: "the oldest is preempted first",
        faults: &[46],
        edits: &[Edit {
            file: PLANNER,
            find: r#"self.running.pop().expect("somebody asked for a block")"#,
            replace: "self.running.remove(0)",
        }],
    },
    Mutant {
        name: "logits are left out of a chunk that is sampled from",
        faults: &[],
        edits: &[Edit {
            file: PLANNER,
            find: "end == sequence.tokens.len() && sequence.max_new_tokens > 0",
            replace: "false",
        }],
    },
    Mutant {
        name: "after a refit the new router chooses where routes are replayed",
        faults: &[],
        edits: &[Edit {
            file: SEQUENCE,
            find: "self.n_replayed = if replays && is_whole { end } else { 0 };",
            replace: "let _ = (replays, is_whole);",
        }],
    },
    Mutant {
        name: "the last position that is replayed is left to the router",
        faults: &[],
        edits: &[Edit {
            file: PLANNER,
            find: "sequence.n_replayed.clamp(start, end) - start",
            replace: "sequence.n_replayed.saturating_sub(1).clamp(start, end) - start",
        }],
    },
    Mutant {
        name: "every chunk replays the first rows",
        faults: &[],
        edits: &[Edit {
            file: SCHEDULER,
            find: "routes.slice(start..start + n_replayed)",
            replace: "routes.slice(0..n_replayed)",
        }],
    },
    Mutant {
        name: "what ran on replayed routes is found by its tokens alone",
        faults: &[],
        edits: &[Edit {
            file: KV,
            find: "cache.insert(parent, tokens, replayed, (block, stamp))",
            replace: "cache.insert(parent, tokens, &[], (block, stamp))",
        }],
    },
];
