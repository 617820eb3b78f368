//! `r3 bench routes --model`: engines that capture routes and engines that do not, tick by tick in turn over the same
//! requests.

use r3_core::count::counted;
use r3_kernels::gemm::Dtype;
use r3_kernels::numerics::Numerics;
use r3_scheduler::request::Finished;
use serde::Serialize;

use crate::bench::Spread;
use crate::bench::serving::{Load, Served, Server};
use crate::bench::subject::Subject;
use crate::error::RunError;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureSetup {
    /// Sequences, all submitted at once and run together.
    pub sequences: usize,
    /// Tokens of each prompt.
    pub prompt_tokens: usize,
    /// Tokens that each sequence samples, at least 2, so that there is a tick behind the first.
    pub new_tokens: usize,
    /// Rounds, beside one to warm up; in each, two pairs of engines serve all sequences.
    pub rounds: usize,
    /// Format of weights, keys and values.
    pub dtype: Dtype,
}

/// Throughput and time to the first token, with routes captured (`on`) and without (`off`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CaptureBench {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of each prompt.
    pub prompt_tokens: usize,
    /// Tokens that each sequence samples.
    pub new_tokens: usize,
    /// Rounds.
    pub rounds: usize,
    /// Bytes of routes that each sequence gives back.
    pub route_bytes_per_sequence: usize,
    /// Sampled tokens a second, from submission until the last rollout was taken, without the other engine's ticks.
    pub tokens_per_second_on: Spread,
    /// The same without routes.
    pub tokens_per_second_off: Spread,
    /// How much lower the median is with routes, in percent of that without; negative if it is higher.
    pub throughput_loss_percent: f64,
    /// The same, of the two engines in each round.
    pub throughput_loss_percent_by_round: Spread,
    /// Milliseconds from submission to the end of the tick that computes all prompts and samples every first token.
    pub first_token_ms_on: Spread,
    /// The same without routes.
    pub first_token_ms_off: Spread,
    /// How much higher the median is with routes, in percent of that without; negative if it is lower.
    pub first_token_delay_percent: f64,
    /// Microseconds of the ticks behind the first, of all rounds: median, lowest and highest.
    pub decode_tick_us_on: Spread,
    /// The same without routes.
    pub decode_tick_us_off: Spread,
    /// How much longer a tick takes with routes than the same tick without, which was run beside it: the median over all
    /// such pairs, in microseconds; negative if it is shorter. A machine that is busy now and then moves it less than the
    /// throughput; the copy of the traces in the last tick hardly counts.
    pub decode_tick_delay_us: f64,
    /// The same in percent of the median tick without routes.
    pub decode_tick_delay_percent: f64,
}

impl CaptureBench {
    /// A table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let Self { sequences, prompt_tokens, new_tokens, rounds, .. } = self;
        let row = |name: &str, spread: &Spread| spread.row(name);
        [
            format!(
                "{} of {prompt_tokens} + {new_tokens} tokens, {} on and off\n",
                counted(*sequences, "sequence"),
                counted(*rounds, "round")
            ),
            Spread::heading(),
            row("tokens/s, routes on", &self.tokens_per_second_on),
            row("tokens/s, routes off", &self.tokens_per_second_off),
            row("loss in a round, %", &self.throughput_loss_percent_by_round),
            row("first token, ms, on", &self.first_token_ms_on),
            row("first token, ms, off", &self.first_token_ms_off),
            row("decode tick, us, on", &self.decode_tick_us_on),
            row("decode tick, us, off", &self.decode_tick_us_off),
            format!("loss of the medians         {:>12.2} %\n", self.throughput_loss_percent),
            format!("delay of the first token    {:>12.2} %\n", self.first_token_delay_percent),
            format!("delay of a decode tick      {:>12.2} %\n", self.decode_tick_delay_percent),
            format!("                            {:>12.2} us\n", self.decode_tick_delay_us),
        ]
        .concat()
    }
}

/// Measures: in every round both engines of a pair serve the same requests, tick by tick in turn, so that what slows the
/// machine down slows down both. Each is timed for itself. Of two pairs one began with the engine that captures routes, the
/// other with the one that does not, and medians are over both. There is no prefix cache.
///
/// # Errors
/// If the weights cannot be loaded or the sequences do not fit the model.
///
/// # Panics
/// If the two engines do not sample the same tokens with the same logprobs, or routes break their contract.
pub fn measure(subject: &Subject, setup: &CaptureSetup) -> Result<CaptureBench, RunError> {
    let load = Load {
        batch: setup.sequences,
        prompt: setup.prompt_tokens,
        new: setup.new_tokens,
        // One tick computes all prompts.
        max_batch_tokens: setup.sequences * setup.prompt_tokens,
        dtype: setup.dtype,
        numerics: Numerics::Exact,
    };
    let new = |is_on| Server::new(subject, load, is_on);
    // Where its memory lies is worth a percent or two of an engine's speed, and depends on which was made first.
    let (mut on_first, mut off_second) = (new(true)?, new(false)?);
    let (mut off_first, mut on_second) = (new(false)?, new(true)?);
    let mut served: [Vec<Served>; 2] = [Vec::new(), Vec::new()];
    for round in 0..=setup.rounds.max(1) {
        for pair in [[&mut on_first, &mut off_second], [&mut on_second, &mut off_first]] {
            let [with, without] = serve(pair, round)?;
            assert_equal(&with.rollouts, &without.rollouts);
            // The first round warms up.
            if round > 0 {
                served[0].push(with);
                served[1].push(without);
            }
        }
    }
    Ok(compared(setup, &served))
}

/// One round: all requests go to both sides, which then tick in turn; who goes first changes with every tick.
fn serve(sides: [&mut Server; 2], round: usize) -> Result<[Served; 2], RunError> {
    let [on, off] = sides;
    let mut served = [on.submit(round)?, off.submit(round)?];
    for n_ticks in 0.. {
        if !on.has_work() && !off.has_work() {
            break;
        }
        let order = if (n_ticks + round).is_multiple_of(2) { [true, false] } else { [false, true] };
        for is_on in order {
            match is_on {
                true => on.tick(&mut served[0])?,
                false => off.tick(&mut served[1])?,
            }
        }
    }
    for (side, served) in [on, off].into_iter().zip(&mut served) {
        side.take(served);
    }
    Ok(served)
}

fn compared(setup: &CaptureSetup, [on, off]: &[Vec<Served>; 2]) -> CaptureBench {
    let n_tokens = (setup.sequences * setup.new_tokens) as f64;
    let rate = |served: &Served| n_tokens / served.all.as_secs_f64();
    let first = |served: &Served| served.prefill_seconds() * 1e3;
    let loss = |on: f64, off: f64| (1.0 - on / off) * 100.0;
    let rates = [on, off].map(|side| Spread::of(side.iter().map(rate).collect()));
    let firsts = [on, off].map(|side| Spread::of(side.iter().map(first).collect()));
    let ticks = [on, off].map(|side| {
        Spread::of(side.iter().flat_map(Served::decode_seconds).map(|seconds| seconds * 1e6).collect())
    });
    let pairs = on.iter().zip(off).flat_map(|(on, off)| on.decode_seconds().zip(off.decode_seconds()));
    let delays = pairs.map(|(on, off)| (on - off) * 1e6);
    let delay = Spread::of(delays.collect()).median;
    let by_round = on.iter().zip(off).map(|(on, off)| loss(rate(on), rate(off)));
    let routes = on[0].rollouts[0].routes.as_ref().expect("routes are on");
    CaptureBench {
        sequences: setup.sequences,
        prompt_tokens: setup.prompt_tokens,
        new_tokens: setup.new_tokens,
        rounds: setup.rounds.max(1),
        route_bytes_per_sequence: routes.view().bytes().len(),
        tokens_per_second_on: rates[0],
        tokens_per_second_off: rates[1],
        throughput_loss_percent: loss(rates[0].median, rates[1].median),
        throughput_loss_percent_by_round: Spread::of(by_round.collect()),
        first_token_ms_on: firsts[0],
        first_token_ms_off: firsts[1],
        first_token_delay_percent: -loss(firsts[0].median, firsts[1].median),
        decode_tick_us_on: ticks[0],
        decode_tick_us_off: ticks[1],
        decode_tick_delay_us: delay,
        decode_tick_delay_percent: delay / ticks[1].median * 100.0,
    }
}

/// Capturing routes must change nothing but that there are routes.
fn assert_equal(on: &[Finished], off: &[Finished]) {
    assert_eq!(on.len(), off.len());
    for (on, off) in on.iter().zip(off) {
        assert_eq!(on.tokens, off.tokens, "group {}: the tokens depend on the capture", on.group);
        let bits = |rollout: &Finished| -> Vec<u32> {
            rollout.rollout_logprobs.iter().map(|logprob| logprob.to_bits()).collect()
        };
        assert_eq!(bits(on), bits(off), "group {}: the logprobs depend on the capture", on.group);
        let routes = on.routes.as_ref().expect("routes are on").view();
        assert_eq!(routes.check(on.tokens.len() - 1), Ok(()), "group {}", on.group);
        assert!(off.routes.is_none());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    #[test]
    fn both_engines_sample_the_same_and_only_one_has_routes() {
        let subject = Subject::fresh(&fixtures::model_dir()).unwrap();
        let setup =
            CaptureSetup { sequences: 3, prompt_tokens: 4, new_tokens: 5, rounds: 2, dtype: Dtype::Bf16 };
        let measured = measure(&subject, &setup).unwrap();
        assert_eq!(measured.rounds, 2);
        assert_eq!(measured.route_bytes_per_sequence, 8 * subject.config.route_dims().row_bytes());
        assert!(measured.decode_tick_us_on.min > 0.0 && measured.decode_tick_us_off.min > 0.0);
        assert!(measured.first_token_ms_off.min > 0.0 && measured.tokens_per_second_on.min > 0.0);
        assert!(measured.table().contains("delay of the first token"), "{}", measured.table());
    }
}
