//! `r3 bench kernels`: every op, beside what binds it.

use r3_orchestrator::bench::kernels::{measure, ops};

use crate::commands::bench::{RoundsArgs, print};
use crate::error::CliError;

/// Measure every kernel, as a share of what binds it on this machine
///
/// First the machine itself: the GFLOP/s of its fastest large product in either format, and the GB/s at which all threads
/// read memory. Then each op at shapes of decoding (1, 8 and 64 tokens) and of training (2048), with the time that its
/// products take at least, or reading what it reads from where a working set of that size lies, whichever is longer, as a
/// share of the time it took. What is neither, such as the exponentials of a softmax, is not counted, so ops made of
/// those stay below 100 %.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Only ops whose name contains this
    op: Option<String>,
    #[command(flatten)]
    rounds: RoundsArgs,
}

impl Args {
    pub(super) fn execute(&self) -> Result<(), CliError> {
        let op = self.op.as_deref().unwrap_or_default();
        if !ops().any(|known| known.contains(op)) {
            return Err(CliError::NoOp { op: op.to_owned(), known: ops().collect() });
        }
        let measured = measure(op, self.rounds.rounds as usize);
        print(self.rounds.json, &measured, &measured.table())
    }
}
