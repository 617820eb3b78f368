//! An engine that serves one round of requests after another, tick by tick, and is timed for itself.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use r3_core::ids::{GroupId, PolicyVersion, TokenId};
use r3_engine::config::EngineConfig;
use r3_engine::engine::{Engine, GroupRequest};
use r3_engine::sampler::Sampling;
use r3_kernels::gemm::Dtype;
use r3_kernels::numerics::Numerics;
use r3_scheduler::request::Finished;

use crate::bench::subject::Subject;
use crate::error::RunError;

/// Slots of a block.
const BLOCK_TOKENS: usize = 16;

/// What is served in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    /// Sequences, all submitted at once and run together.
    pub(crate) batch: usize,
    /// Tokens of each prompt.
    pub(crate) prompt: usize,
    /// Tokens that each sequence samples.
    pub(crate) new: usize,
    /// Tokens of one tick at most.
    pub(crate) max_batch_tokens: usize,
    /// Format of weights, keys and values.
    pub(crate) dtype: Dtype,
    /// Whether orders of sums may depend on the batch.
    pub(crate) numerics: Numerics,
}

/// One tick of a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tick {
    /// How long it took.
    pub(crate) time: Duration,
    /// Tokens computed.
    pub(crate) computed: usize,
    /// Tokens sampled.
    pub(crate) sampled: usize,
}

/// What one round gave.
#[derive(Default)]
pub(crate) struct Served {
    /// In order.
    pub(crate) ticks: Vec<Tick>,
    /// From submission until the last rollout was taken, without what the engine did not do.
    pub(crate) all: Duration,
    /// In the order of their groups.
    pub(crate) rollouts: Vec<Finished>,
}

impl Served {
    /// Seconds of the ticks that decode: behind the first, and sampling every token they compute.
    pub(crate) fn decode_seconds(&self) -> impl Iterator<Item = f64> {
        let decodes = self.ticks.iter().skip(1).filter(|tick| tick.computed == tick.sampled);
        decodes.map(|tick| tick.time.as_secs_f64())
    }

    /// Seconds until every prompt is computed: all but the ticks that decode.
    pub(crate) fn prefill_seconds(&self) -> f64 {
        self.all.as_secs_f64() - self.decode_seconds().sum::<f64>()
    }
}

/// An engine without prefix cache, and with room for all of a load.
pub(crate) struct Server {
    engine: Engine,
    load: Load,
    return_routes: Option<usize>,
}

impl Server {
    /// Loads the model.
    ///
    /// # Errors
    /// If the weights cannot be read.
    pub(crate) fn new(subject: &Subject, load: Load, capture_routes: bool) -> Result<Self, RunError> {
        let mut config = EngineConfig {
            dtype: load.dtype,
            numerics: load.numerics,
            kv_bytes: 0,
            block_tokens: BLOCK_TOKENS,
            max_batch_tokens: load.max_batch_tokens,
            max_running: load.batch,
            prefix_cache: false,
            capture_routes,
            replay: None,
        };
        let blocks = (load.prompt + load.new).div_ceil(BLOCK_TOKENS) + 1;
        config.kv_bytes = config.block_bytes(&subject.config) * (load.batch * blocks) as u64;
        crate::setup::check_kv(&config, &subject.config, (load.prompt, load.new))?;
        let engine = Engine::new(config, &subject.config, &*subject.source, PolicyVersion(0))?;
        Ok(Self { engine, load, return_routes: capture_routes.then_some(0) })
    }

    /// Whether a tick would do anything.
    pub(crate) fn has_work(&self) -> bool {
        self.engine.has_work()
    }

    /// Begins round `round`, whose samples are like those of no other.
    ///
    /// # Errors
    /// If the sequences do not fit the model.
    pub(crate) fn submit(&mut self, round: usize) -> Result<Served, RunError> {
        let requests: Vec<GroupRequest> = (0..self.load.batch).map(|at| self.request(round, at)).collect();
        let start = Instant::now();
        for request in &requests {
            self.engine.submit(request)?;
        }
        let ticks = Vec::with_capacity(2 * self.load.new);
        Ok(Served { ticks, all: start.elapsed(), rollouts: Vec::new() })
    }

    /// Serves a round to its end, as the rollout worker does: on a thread of the pool.
    ///
    /// # Errors
    /// If a forward fails.
    pub(crate) fn serve(&mut self, served: &mut Served) -> Result<(), RunError> {
        let mut last = Instant::now();
        let start = last;
        while self.has_work() {
            self.engine.tick_until_finished(|_, ticked| {
                let now = Instant::now();
                let (computed, sampled) = (ticked.computed_tokens, ticked.sampled_tokens);
                served.ticks.push(Tick { time: now - last, computed, sampled });
                last = now;
                ControlFlow::Continue(())
            })?;
            served.rollouts.extend(std::iter::from_fn(|| self.engine.take_finished()));
        }
        served.all += start.elapsed();
        Ok(())
    }

    /// One tick.
    ///
    /// # Errors
    /// If the forward fails.
    pub(crate) fn tick(&mut self, served: &mut Served) -> Result<(), RunError> {
        let start = Instant::now();
        let ticked = self.engine.tick()?;
        let time = start.elapsed();
        served.all += time;
        served.ticks.push(Tick { time, computed: ticked.computed_tokens, sampled: ticked.sampled_tokens });
        Ok(())
    }

    /// Ends a round.
    pub(crate) fn take(&mut self, served: &mut Served) {
        let start = Instant::now();
        served.rollouts.extend(std::iter::from_fn(|| self.engine.take_finished()));
        served.all += start.elapsed();
        served.rollouts.sort_by_key(|rollout| rollout.group);
    }

    fn request(&self, round: usize, at: usize) -> GroupRequest {
        GroupRequest {
            group: GroupId(at as u64),
            prompt: prompt(at, self.load.prompt, self.engine.model().vocab_size).into(),
            size: 1,
            max_new_tokens: self.load.new,
            stop_tokens: [].into(),
            sampling: Sampling { temperature: 1.0, ..Sampling::GREEDY },
            seed: round as u64,
            return_routes: self.return_routes,
        }
    }
}

/// A prompt of its own for each sequence, of tokens the model has.
pub(crate) fn prompt(sequence: usize, n_tokens: usize, vocab_size: usize) -> Vec<TokenId> {
    let token = |at: usize| u32::try_from((sequence * 31 + at * 7 + at * at) % vocab_size).unwrap_or(0);
    (0..n_tokens).map(|at| TokenId(token(at))).collect()
}
