//! Arguments that several commands share.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::thread;

use clap::{ArgAction, Args, ValueEnum, value_parser};
use r3_kernels::gemm::Dtype;
use r3_recipe::learning::MomentsFormat;
use r3_recipe::rollout::Dtype as RecipeDtype;

use crate::error::CliError;

/// What every command takes.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Log more to stderr; -vv and -vvv still more
    #[arg(short, long, global = true, action = ArgAction::Count, conflicts_with = "quiet", display_order = 100)]
    pub(crate) verbose: u8,
    /// Log errors only, no warnings
    #[arg(short, long, global = true, display_order = 101)]
    pub(crate) quiet: bool,
    /// CPU threads to compute on; the cores this process may use by default
    #[arg(long, global = true, value_name = "N", value_parser = value_parser!(u16).range(1..=1024), display_order = 102)]
    pub(crate) threads: Option<u16>,
}

/// A recipe, and what to change in it.
#[derive(Debug, Args)]
pub(crate) struct RecipeArgs {
    /// The recipe, a YAML file; docs/recipe.md explains every key
    pub(crate) recipe: PathBuf,
    /// Put a value over the recipe's, as in --set train.lr=1e-5; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

/// A number format, as arguments name it.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum DtypeArg {
    /// 32-bit floating point
    F32,
    /// Brain float, 8 significant bits
    Bf16,
}

impl From<DtypeArg> for Dtype {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::F32 => Self::F32,
            DtypeArg::Bf16 => Self::Bf16,
        }
    }
}

impl From<DtypeArg> for RecipeDtype {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::F32 => Self::F32,
            DtypeArg::Bf16 => Self::Bf16,
        }
    }
}

/// A format of moments, as arguments name it.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum MomentsArg {
    /// 32-bit floating point
    F32,
    /// Small floats of a byte
    #[value(name = "8bit")]
    EightBit,
}

impl From<MomentsArg> for MomentsFormat {
    fn from(moments: MomentsArg) -> Self {
        match moments {
            MomentsArg::F32 => Self::F32,
            MomentsArg::EightBit => Self::EightBit,
        }
    }
}

/// Starts the one pool of threads that engine and trainer compute on.
pub(crate) fn start_threads(threads: Option<u16>) -> Result<(), CliError> {
    let available = || thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let n_threads = threads.map_or_else(available, usize::from);
    rayon::ThreadPoolBuilder::new()
        .num_threads(n_threads)
        .thread_name(|index| format!("compute-{index}"))
        .build_global()
        .map_err(|source| CliError::Threads { n_threads, source })
}
