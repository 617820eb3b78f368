//! The engine: requests in, one forward a tick, finished rollouts out.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use r3_core::ids::{GroupId, PolicyVersion, SequenceId, TokenId};
use r3_kernels::attention::{KvCache, PagedSequence};
use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::Routing;
use r3_kernels::team::in_team;
use r3_model::buffers::{Buffers, Paged};
use r3_model::config::ModelConfig;
use r3_model::executor::{Executor, Weights, check_vocabulary};
use r3_model::forward::{forward, logits};
use r3_model::rows::Rows;
use r3_model::source::{TensorHash, TensorSource};
use r3_scheduler::plan::{Chunk, Logits, TickPlan};
use r3_scheduler::request::{Finished, Request, Sample, SequenceView};
use r3_scheduler::scheduler::{Scheduler, SchedulerStats};

use crate::config::EngineConfig;
use crate::error::EngineError;
use crate::refit;
use crate::replayed::Replayed;
use crate::sampler::{Draw, SampleKey, Sampler, Sampling};
use crate::score::{Replay, ScoredUnder};

/// Multiply-adds of a tick that are worth waking other threads for.
const TEAM_WORK: usize = 1 << 20;

/// All rollouts of one prompt, to be sampled alike.
#[derive(Clone, Debug)]
pub struct GroupRequest {
    /// Which group.
    pub group: GroupId,
    /// The prompt, `1..` tokens.
    pub prompt: Arc<[TokenId]>,
    /// Rollouts, `G`.
    pub size: u32,
    /// Tokens to sample at most; 0 computes the prompt only.
    pub max_new_tokens: usize,
    /// Any of these ends a completion.
    pub stop_tokens: Arc<[TokenId]>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Keys the draws, together with group, index and position.
    pub seed: u64,
    /// Position of the first route row to give back, at most the prompt's length; `None` for no routes. Other engines
    /// call these `routed_experts_start_len` and `return_routed_experts`.
    pub return_routes: Option<usize>,
}

/// Token counts of one tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TickStats {
    /// Tokens computed.
    pub computed_tokens: usize,
    /// Tokens sampled.
    pub sampled_tokens: usize,
}

/// Serves one model. Weights, KV, routes and prefix cache belong to one epoch, which only a refit ends. What is in flight
/// then goes on, and is computed again: by the new router's choice, or on the routes it recorded under the old weights, if
/// these are what a trainer will replay ([`EngineConfig::replay`]).
pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) exec: Buffers,
    pub(crate) weights: Weights<Buffers>,
    pub(crate) hashes: Vec<TensorHash>,
    pub(crate) version: PolicyVersion,
    pub(crate) scheduler: Scheduler,
    pub(crate) replay: Option<Replay>,
    pub(crate) scored_under: Option<ScoredUnder>,
    replayed: Replayed,
    /// None from when it was freed to the next forward.
    pub(crate) cache: Option<KvCache>,
    record: Option<RouteRecord>,
    sampler: Sampler,
    pub(crate) sampling: HashMap<SequenceId, (Sampling, u64)>,
    draws: Vec<Draw>,
    samples: Vec<Sample>,
    logit_rows: Vec<usize>,
    /// Multiply-adds, about.
    work_per_token: usize,
    /// Empty between ticks; kept for its memory.
    tables: Vec<PagedSequence<'static>>,
}

impl Engine {
    /// Loads the weights of `source` and gives the KV cache its memory.
    ///
    /// # Errors
    /// If a tensor cannot be read or is not finite, or the KV memory holds no block.
    pub fn new(
        config: EngineConfig,
        model: &ModelConfig,
        source: &dyn TensorSource,
        version: PolicyVersion,
    ) -> Result<Self, EngineError> {
        let sizes = config.scheduler(model)?;
        let mut exec = Buffers::new(model, config.dtype, config.numerics);
        let (weights, hashes) = in_team(|| refit::load(&mut exec, model, source, config.dtype))?;
        Ok(Self {
            config,
            exec,
            weights,
            hashes,
            version,
            cache: Some(kv_cache(config, model, sizes.n_blocks)),
            scheduler: Scheduler::new(sizes)?,
            replay: None,
            scored_under: None,
            replayed: Replayed::default(),
            record: config
                .capture_routes
                .then(|| RouteRecord::new(model.route_dims().n_layers, model.router())),
            sampler: Sampler::default(),
            sampling: HashMap::new(),
            draws: Vec::new(),
            samples: Vec::new(),
            logit_rows: Vec::new(),
            work_per_token: model.active_parameters(),
            tables: Vec::new(),
        })
    }

    /// Queues a group.
    ///
    /// # Errors
    /// If the prompt is empty or has a token outside the vocabulary, prompt and completion exceed the model's positions
    /// or the whole KV cache, or routes are wanted that the engine does not capture.
    pub fn submit(&mut self, request: &GroupRequest) -> Result<Vec<SequenceId>, EngineError> {
        self.check_request(&request.prompt, request.max_new_tokens)?;
        let ids = self.scheduler.submit_group(
            &Request {
                group: request.group,
                prompt: Arc::clone(&request.prompt),
                max_new_tokens: request.max_new_tokens,
                stop_tokens: Arc::clone(&request.stop_tokens),
                prompt_logprobs: false,
                return_routes: request.return_routes,
                max_support: request.sampling.max_support(self.model().vocab_size),
            },
            request.size,
        )?;
        self.sampling.extend(ids.iter().map(|&id| (id, (request.sampling, request.seed))));
        Ok(ids)
    }

    /// Computes one batch: plan, forward, record, sample, advance. Does nothing when there is no work.
    ///
    /// # Errors
    /// If a token's logprob is not finite, since numbers overflow under these weights. If the forward fails, which would be
    /// a bug: requests are checked when they are submitted.
    pub fn tick(&mut self) -> Result<TickStats, EngineError> {
        self.tick_within(self.config.max_batch_tokens)
    }

    /// [`Self::tick`] for a batch of at most `max_tokens` tokens, whatever the others are.
    ///
    /// # Errors
    /// As a tick does.
    ///
    /// # Panics
    /// If `max_tokens` is 0.
    pub fn tick_within(&mut self, max_tokens: usize) -> Result<TickStats, EngineError> {
        if !self.scheduler.has_work() {
            return Ok(TickStats::default());
        }
        self.scheduler.plan_within(max_tokens);
        let work = self.scheduler.tick_plan().n_tokens() * self.work_per_token;
        if work < TEAM_WORK { self.compute() } else { in_team(|| self.compute()) }
    }

    /// The planned batch: forward, record, sample, advance.
    fn compute(&mut self) -> Result<TickStats, EngineError> {
        let logits = self.forward()?;
        self.record_routes();
        let copies = &self.scheduler.tick_plan().copies_after_forward;
        let cache = self.cache.as_mut().expect("a forward needs one");
        cache.copy_slots(&copies.from, &copies.to);
        self.sample(&logits);
        let plan = self.scheduler.tick_plan();
        let stats = TickStats { computed_tokens: plan.n_tokens(), sampled_tokens: self.samples.len() };
        self.exec.release(logits);
        let checked = self.check_samples();
        self.scheduler.advance(&self.samples, self.version);
        checked.map(|()| stats)
    }

    /// Refuses tokens that were drawn from what is no distribution: finite weights may still overflow.
    fn check_samples(&self) -> Result<(), EngineError> {
        match self.samples.iter().find(|sample| !sample.logprob.is_finite()) {
            None => Ok(()),
            Some(&Sample { sequence, logprob, .. }) => {
                let SequenceView { group, index, position, .. } = self.scheduler.sequence(sequence);
                Err(EngineError::NonFinite { group, index, position, logprob })
            }
        }
    }

    /// Ticks until a rollout has ended or there is no work, and calls `after` after every tick, which may end it, too.
    ///
    /// On a thread of the current pool: there a tick's team gathers without the caller being put to sleep and woken,
    /// which takes 20 us.
    ///
    /// # Errors
    /// As a tick does.
    pub fn tick_until_finished(
        &mut self,
        mut after: impl FnMut(&Self, TickStats) -> ControlFlow<()> + Send,
    ) -> Result<(), EngineError> {
        rayon::scope(|_| {
            while self.has_work() && !self.scheduler.has_finished() {
                let stats = self.tick()?;
                if after(self, stats).is_break() {
                    break;
                }
            }
            Ok(())
        })
    }

    /// The next rollout that ended.
    pub fn take_finished(&mut self) -> Option<Finished> {
        let finished = self.scheduler.take_finished()?;
        self.sampling.remove(&finished.sequence);
        Some(finished)
    }

    /// Takes a request back; it finishes with what it has. `false` if it is not here (any more).
    pub fn abort(&mut self, id: SequenceId) -> bool {
        self.scheduler.abort(id)
    }

    /// Takes all requests back; they finish with what they have.
    pub fn abort_all(&mut self) {
        self.scheduler.abort_all();
    }

    /// Whether a tick would do anything.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.scheduler.has_work()
    }

    /// The model served.
    #[must_use]
    pub fn model(&self) -> &ModelConfig {
        &self.weights.config
    }

    /// Whether routes are captured, so that a request can have them.
    #[must_use]
    pub fn captures_routes(&self) -> bool {
        self.config.capture_routes
    }

    /// The policy version served.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// The weight epoch; it ends with every refit.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.scheduler.epoch()
    }

    /// Hashes of the resident weights.
    #[must_use]
    pub fn hashes(&self) -> &[TensorHash] {
        &self.hashes
    }

    /// Queue, memory and cache counters.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        self.scheduler.stats()
    }

    /// Requests whose sampling is still held: as many as are unfinished or not yet taken.
    #[must_use]
    pub fn n_open_requests(&self) -> usize {
        self.sampling.len()
    }

    /// Refuses tokens the model does not have, and sequences longer than it can place.
    pub(crate) fn check_request(&self, prompt: &[TokenId], max_new_tokens: usize) -> Result<(), EngineError> {
        let ModelConfig { vocab_size, max_positions, .. } = self.weights.config;
        check_vocabulary(prompt, vocab_size)?;
        let tokens = prompt.len() + max_new_tokens;
        if tokens > max_positions {
            return Err(EngineError::TooLong { tokens, max_positions });
        }
        Ok(())
    }

    /// Runs the model over the planned batch; logits of the wanted rows, whose index is in `logit_rows`.
    fn forward(&mut self) -> Result<Rows, EngineError> {
        let Self {
            scheduler,
            exec,
            weights,
            cache,
            config,
            record,
            replay,
            replayed,
            scored_under,
            tables,
            ..
        } = self;
        let cache =
            cache.get_or_insert_with(|| kv_cache(*config, &weights.config, scheduler.stats().n_blocks));
        let plan = scheduler.tick_plan();
        let sequence = |chunk: &Chunk| PagedSequence {
            n_queries: chunk.n_tokens,
            start: chunk.start,
            blocks: scheduler.block_table(chunk.sequence),
        };
        let mut sequences = emptied(std::mem::take(tables));
        sequences.extend(plan.chunks.iter().map(sequence));
        let mut attend = Paged {
            cache,
            block_tokens: config.block_tokens,
            positions: &plan.positions,
            slots: &plan.slots,
            sequences: &sequences,
        };
        if let Some(record) = record {
            record.start(plan.n_tokens());
        }
        let mut routing = match (replay, record) {
            (Some(replay), _) => replay.routing(plan),
            (None, Some(record)) => replayed.routing(scheduler, config.replay, record),
            (None, None) => Routing::Free,
        };
        let hidden = forward(exec, weights, &plan.tokens, &mut attend, &mut routing)?;
        *tables = emptied(sequences);
        let scored = prompt_logprobs(scheduler, weights, &hidden, scored_under.as_ref());
        wanted_rows(plan, &mut self.logit_rows);
        let wanted = if self.logit_rows.len() == plan.n_tokens() {
            hidden
        } else {
            let wanted = exec.select_rows(&hidden, self.logit_rows.iter().copied());
            exec.release(hidden);
            wanted
        };
        let logits = logits(exec, weights, &wanted)?;
        exec.release(wanted);
        for (chunk, logprobs) in scored {
            scheduler.record_prompt_logprobs(chunk.sequence, chunk.start, &logprobs);
        }
        Ok(logits)
    }

    /// Keeps the routes this forward took. They lie beside the keys and values that were computed under them.
    fn record_routes(&mut self) {
        if let Some(replay) = &mut self.replay {
            replay.keep_live_routes();
            self.scheduler.record(replay.rows());
        } else if let Some(record) = &mut self.record {
            self.scheduler.record(record.rows());
        }
    }

    /// Draws a token for every sample site of the plan.
    fn sample(&mut self, logits: &Rows) {
        let vocab_size = self.weights.config.vocab_size;
        self.samples.clear();
        self.draws.clear();
        for site in &self.scheduler.tick_plan().samples {
            let sequence = self.scheduler.sequence(site.sequence);
            let (sampling, seed) = self.sampling[&site.sequence];
            let position = u32::try_from(sequence.position).expect("positions fit a u32");
            let key = SampleKey { seed, group: sequence.group, index: sequence.index, position };
            let row = self.logit_row(site.row);
            let logits = row * vocab_size..(row + 1) * vocab_size;
            self.draws.push(Draw { sampling, key, logits });
            self.samples.push(Sample { sequence: site.sequence, token: TokenId(0), logprob: 0.0 });
        }
        self.sampler.draw_all(logits.values(), &self.draws, &mut self.samples);
        for (sample, kept) in self.samples.iter().zip(self.sampler.supports()) {
            if let Some(kept) = kept {
                self.scheduler.record_support(sample.sequence, kept);
            }
        }
    }

    /// Index among the computed logits of row `row` of the plan.
    fn logit_row(&self, row: usize) -> usize {
        self.logit_rows.binary_search(&row).expect("rows with a use have logits")
    }
}

/// A cache that holds nothing, in memory that is not touched yet.
fn kv_cache(config: EngineConfig, model: &ModelConfig, n_blocks: usize) -> KvCache {
    KvCache::new(model.n_layers, n_blocks * config.block_tokens, model.heads(), config.dtype)
}

/// The same memory without its elements, to hold others that borrow from elsewhere: `collect` takes over what it maps.
fn emptied<'a>(mut tables: Vec<PagedSequence<'_>>) -> Vec<PagedSequence<'a>> {
    tables.clear();
    tables.into_iter().map(|table| PagedSequence { blocks: &[], ..table }).collect()
}

/// Logprobs of the prompt tokens that requests want to know, by chunk.
fn prompt_logprobs(
    scheduler: &Scheduler,
    weights: &Weights<Buffers>,
    hidden: &Rows,
    under: Option<&ScoredUnder>,
) -> Vec<(Chunk, Vec<f32>)> {
    let wanted = scheduler.tick_plan().chunks.iter().filter(|chunk| chunk.wants == Logits::All);
    let score = |&chunk: &Chunk| {
        let sequence = scheduler.sequence(chunk.sequence);
        let end = (chunk.start + chunk.n_tokens + 1).min(sequence.prompt_tokens);
        let targets = &sequence.tokens[chunk.start + 1..end];
        let ids: Vec<u32> = targets.iter().map(|token| token.0).collect();
        let targets = under.expect("who scores says under what").targets(chunk.start, &ids);
        (chunk, Buffers::head_logprobs(weights, hidden, chunk.first_row, targets))
    };
    wanted.map(score).collect()
}

/// Rows of `plan` that a token is drawn from, ascending; rollouts that fork share one.
fn wanted_rows(plan: &TickPlan, rows: &mut Vec<usize>) {
    rows.clear();
    rows.extend(plan.samples.iter().map(|site| site.row));
    rows.sort_unstable();
    rows.dedup();
}
