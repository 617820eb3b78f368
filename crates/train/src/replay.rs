//! What a step's passes replay: the rollout's routes, or what the trainer's own router chose before the first update.

use std::ops::Range;

use r3_kernels::route_record::RouteRecord;
use r3_kernels::router::Routing;
use r3_model::autograd::RanExperts;

/// What is replayed beside what a batch's routes are for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReplayRule {
    /// Whether updates hold to the router's own choice of before. Batches then have no routes to replay.
    pub own: Own,
    /// An expert is replayed where it scores at least this share of the least that the router itself would choose, in `0..=1`;
    /// else the best of that choice takes its place. 0 replays all.
    pub threshold: f32,
}

/// What the updates of a step keep of the router as it was before the first of them (R2, arXiv 2510.11370, section 3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Own {
    /// Nothing.
    #[default]
    Nothing,
    /// The experts, weighed by the scores at hand.
    Experts,
    /// The experts and their gates: constants, through which no router learns.
    ExpertsAndGates,
}

/// A rule, and what it has kept of this step.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    rule: ReplayRule,
    kept: Vec<Kept>,
}

/// One micro-batch before the first update.
#[derive(Debug)]
struct Kept {
    sequences: Range<usize>,
    /// `[L, T, K]`.
    ids: Vec<u16>,
    /// `[L, T, K]`, if they are replayed.
    gates: Option<Vec<f32>>,
}

impl Replay {
    pub(crate) fn new(rule: ReplayRule) -> Self {
        assert!((0.0..=1.0).contains(&rule.threshold), "a threshold of {}", rule.threshold);
        assert!(
            rule.threshold == 0.0 || rule.own != Own::ExpertsAndGates,
            "gates of experts that are replaced"
        );
        Self { rule, kept: Vec::new() }
    }

    pub(crate) fn rule(&self) -> ReplayRule {
        self.rule
    }

    /// Forgets what was kept of another step.
    pub(crate) fn start(&mut self) {
        self.kept.clear();
    }

    /// Keeps what the pass over the micro-batch of `sequences` ran, as far as the rule asks for it.
    pub(crate) fn keep(&mut self, sequences: &Range<usize>, ran: &[RanExperts]) {
        if self.rule.own == Own::Nothing {
            return;
        }
        let gates = || ran.iter().flat_map(|layer| layer.gates.iter().copied()).collect();
        self.kept.push(Kept {
            sequences: sequences.clone(),
            ids: ran.iter().flat_map(|layer| layer.ids.iter().copied()).collect(),
            gates: (self.rule.own == Own::ExpertsAndGates).then(gates),
        });
    }

    /// Who chooses the experts for the micro-batch of `sequences`: whoever chose its `rollout` ids `[L, T, K]`, if there are
    /// any to replay, the router of before, if its choice was kept, or the one at hand. `native` keeps what that would choose.
    pub(crate) fn routing<'a>(
        &'a self,
        rollout: Option<&'a [u16]>,
        sequences: &Range<usize>,
        native: Option<&'a mut RouteRecord>,
    ) -> Routing<'a> {
        let own = self.kept.iter().find(|kept| kept.sequences == *sequences);
        let ratio = self.rule.threshold;
        match (rollout.or(own.map(|own| &own.ids[..])), own.and_then(|own| own.gates.as_deref())) {
            (Some(ids), Some(gates)) => Routing::ReplayGates { ids, gates },
            (Some(ids), None) if ratio > 0.0 => Routing::ReplayAbove { ids, ratio, native },
            (Some(ids), None) => Routing::Replay { ids, native },
            (None, _) => native.map_or(Routing::Free, Routing::Record),
        }
    }
}

/// How many of the ids that `routing` replays a pass that `ran` replaced, and of how many; `None` where it may not.
pub(crate) fn n_replaced(routing: &Routing<'_>, ran: &[RanExperts]) -> Option<(usize, usize)> {
    let Routing::ReplayAbove { ids, .. } = routing else { return None };
    let ran = ran.iter().flat_map(|layer| layer.ids.iter());
    Some((ran.zip(*ids).filter(|(ran, replayed)| ran != replayed).count(), ids.len()))
}
