//! What replay of routes must satisfy.

use crate::check::{Limit, Rule, within};
use crate::rollout::{ReplayMode, RouterReplay};

/// Parts of `router_replay` that do not go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayConflict {
    /// Gates that nobody has recorded.
    #[error(
        "`router_replay.gates` replays recorded gates, but {}",
        match mode {
            ReplayMode::R3 => "a rollout sends its expert ids alone",
            ReplayMode::R2 | ReplayMode::Off => "with `mode: off` nothing is recorded",
        }
    )]
    GatesNotRecorded {
        /// `router_replay.mode`.
        mode: ReplayMode,
    },
    /// An expert that takes the place of another has no recorded gate.
    #[error("`router_replay.threshold` replaces experts, but `gates` replays those of the experts replaced")]
    ReplacedGates,
    /// Nothing to give way.
    #[error("`router_replay.threshold` limits what is replayed, but with `mode: off` nothing is")]
    NothingReplayed,
}

impl ReplayConflict {
    /// Dotted paths of the keys to look at, the one to point at first.
    pub(crate) fn paths(self) -> [&'static str; 2] {
        match self {
            Self::GatesNotRecorded { .. } => ["router_replay.gates", "router_replay.mode"],
            Self::ReplacedGates => ["router_replay.threshold", "router_replay.gates"],
            Self::NothingReplayed => ["router_replay.threshold", "router_replay.mode"],
        }
    }

    /// What to write instead.
    pub(crate) fn hint(self) -> &'static str {
        match self {
            Self::GatesNotRecorded { .. } => {
                "set `router_replay.mode: r2`, where the trainer records both, or remove `gates`"
            }
            Self::ReplacedGates => "remove one of the two",
            Self::NothingReplayed => "set `router_replay.mode` to `r3` or `r2`, or remove `threshold`",
        }
    }
}

pub(crate) fn check_replay(replay: &RouterReplay) -> Result<(), Rule> {
    let &RouterReplay { mode, gates, threshold, .. } = replay;
    within("router_replay.threshold", threshold, Limit::Share, "0")?;
    let conflict = if gates && mode != ReplayMode::R2 {
        ReplayConflict::GatesNotRecorded { mode }
    } else if threshold > 0.0 && gates {
        ReplayConflict::ReplacedGates
    } else if threshold > 0.0 && mode == ReplayMode::Off {
        ReplayConflict::NothingReplayed
    } else {
        return Ok(());
    };
    Err(Rule::Replay(conflict))
}
