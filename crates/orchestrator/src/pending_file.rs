//! Rollouts on their way as a file of a checkpoint: ring frames one after another, group by group.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use r3_core::ids::{GroupId, PolicyVersion, SequenceId};
use r3_core::rollout::{FinishReason, Reward};
use r3_core::routes::{RouteDims, RouteRows};
use r3_core::support::SupportRows;
use r3_ring::frame::{Frame, FrameMeta, decode_all, encode, frame_bytes};
use r3_scheduler::request::Finished;

use crate::error::{RunError, io_at};
use crate::pending::{Origin, Pending, Scored};
use crate::prompts::Prompts;

/// Of a checkpoint.
pub(crate) const FILE: &str = "pending.frames";

/// What a checkpoint keeps of the groups that were begun and not trained on.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The version that began each group.
    pub begun: BTreeMap<GroupId, PolicyVersion>,
    /// Their rollouts, as frames. One that did not end has finish `abort`, and no routes if it has sampled nothing.
    pub frames: Vec<u8>,
}

impl Snapshot {
    /// Copies `pending`, and `in_engine`, the unfinished rollouts that the engine of `origin` holds, oldest first.
    ///
    /// `layer_ids` `[L]` says which of the model's layers the routes are of.
    #[must_use]
    pub fn new(pending: &Pending, in_engine: &[Finished], layer_ids: &[u32], origin: Origin) -> Self {
        let mut frames = Vec::new();
        for Scored { rollout, reward, origin } in pending.kept() {
            append(&mut frames, rollout, layer_ids, (*reward, *origin));
        }
        for rollout in pending.partial.iter().chain(in_engine) {
            append(&mut frames, rollout, layer_ids, (Reward::Failed, origin));
        }
        Self { begun: pending.begun(), frames }
    }

    /// Writes the rollouts into checkpoint `dir`, if there are any.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), std::io::Error> {
        if self.frames.is_empty() { Ok(()) } else { fs::write(dir.join(FILE), &self.frames) }
    }
}

fn append(out: &mut Vec<u8>, rollout: &Finished, layer_ids: &[u32], (reward, origin): (Reward, Origin)) {
    let Origin { weight_epoch, model_hash } = origin;
    let mask = rollout.mask();
    let mut view = rollout.view();
    // What comes after the last sampled token was given, follows from the rollout before it, and has no rows yet that the
    // weights which sample next must have made. The same goes for all rows of what has sampled nothing.
    let end = rollout.turns.last().map_or(rollout.prompt_tokens, |turn| turn.end);
    let n = end - rollout.prompt_tokens;
    view.tokens = &view.tokens[..end];
    (view.rollout_logprobs, view.versions) = (&view.rollout_logprobs[..n], &view.versions[..n]);
    view.support = view.support.filter(|_| n > 0).map(|support| support.first(n));
    view.routes = view.routes.filter(|_| n > 0).map(|routes| routes.first(end - 1));
    let mask = mask.as_deref().map(|mask| &mask[..n]);
    let meta = FrameMeta { layer_ids, weight_epoch, model_hash, reward, mask };
    let start = out.len();
    out.resize(start + frame_bytes(&view), 0);
    encode(&view, &meta, &mut out[start..]);
}

/// What rollouts of a checkpoint have to be like.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// Rollouts of a group.
    pub group_size: usize,
    /// Shape of the routes the engine captures; `None` if it captures none.
    pub routes: Option<RouteDims>,
}

/// Refuses groups that a resumed run began, by the version that began each, when they would be too old to train on: the bound
/// may be lower now.
///
/// # Errors
/// [`RunError::PendingStale`] names the oldest.
pub fn check_ages(
    begun: &BTreeMap<u64, u64>,
    version: PolicyVersion,
    max_staleness: u64,
) -> Result<(), RunError> {
    let ages = begun.iter().map(|(&group, &began)| (version.0.saturating_sub(began), group));
    match ages.max() {
        Some((staleness, group)) if staleness > max_staleness => {
            Err(RunError::PendingStale { group, staleness, max_staleness })
        }
        _ => Ok(()),
    }
}

/// Reads what [`Snapshot::write`] wrote of the groups in `begun`, which complete the prompts of `prompts`.
///
/// # Errors
/// If a frame is broken, a group is not whole, or its prompt is not the one it has now.
pub fn read(
    dir: &Path,
    begun: &BTreeMap<u64, u64>,
    expected: Expected,
    prompts: &mut Prompts,
) -> Result<Pending, RunError> {
    let mut pending = Pending::default();
    if begun.is_empty() {
        return Ok(pending);
    }
    let path = dir.join(FILE);
    let bytes = AlignedBytes::read(&path).map_err(io_at(&path))?;
    let frames = decode_all(bytes.get());
    let frames = frames.map_err(|source| RunError::PendingFrame { path: path.clone(), source })?;
    let mut groups: BTreeMap<u64, Vec<Frame<'_>>> = begun.keys().map(|&group| (group, Vec::new())).collect();
    // In the order of the file, which is that of their age.
    let is_partial = |frame: &&Frame<'_>| frame.rollout().finish == FinishReason::Abort;
    pending.partial = frames.iter().filter(is_partial).map(|frame| rollout(frame, expected.routes)).collect();
    for frame in frames {
        groups.entry(frame.rollout().group.0).or_default().push(frame);
    }
    for (group, frames) in groups {
        let mut found: Vec<u32> = frames.iter().map(|frame| frame.rollout().index).collect();
        found.sort_unstable();
        let is_whole = found.iter().copied().eq((0..).take(expected.group_size));
        let Some(&version) = begun.get(&group).filter(|_| is_whole) else {
            let expected = expected.group_size;
            return Err(RunError::PendingGroup { path, group, found, expected });
        };
        let prompt = prompts.of(GroupId(group))?;
        let is_of_prompt = |frame: &Frame<'_>| frame.rollout().prompt() == prompt.tokens;
        if !frames.iter().all(is_of_prompt) {
            return Err(RunError::PendingPrompt { path, group });
        }
        let n_unfinished = frames.iter().filter(is_partial).count();
        let kept = frames.iter().filter(|frame| !is_partial(frame)).map(|frame| Scored {
            rollout: rollout(frame, expected.routes),
            reward: frame.reward(),
            origin: Origin { weight_epoch: frame.weight_epoch(), model_hash: frame.model_hash() },
        });
        pending.restore(&prompt, PolicyVersion(version), kept.collect(), n_unfinished);
    }
    Ok(pending)
}

/// The rollout of a frame, as the engine gave it back. The number of its sequence was the engine's own.
fn rollout(frame: &Frame<'_>, routes: Option<RouteDims>) -> Finished {
    let view = frame.rollout();
    let no_rows = routes.map(|dims| RouteRows::with_capacity(dims, 0));
    let rows = view.routes.map(|routes| {
        let mut rows = RouteRows::with_capacity(routes.dims(), routes.rows());
        rows.append(routes.bytes());
        rows
    });
    Finished {
        sequence: SequenceId(0),
        group: view.group,
        index: view.index,
        tokens: view.tokens.to_vec(),
        prompt_tokens: view.prompt_tokens,
        turns: turns(frame.mask(), view.prompt_tokens),
        rollout_logprobs: view.rollout_logprobs.to_vec(),
        versions: view.versions.to_vec(),
        support: view.support.map(SupportRows::of),
        routes: rows.or(no_rows),
        routes_start: 0,
        new_rows: 0,
        prompt_logprobs: None,
        finish: view.finish,
        cached_tokens: view.cached_tokens,
        n_preemptions: 0,
    }
}

/// Positions at which `mask` is 1, as ranges; its first entry is of position `start`.
fn turns(mask: &[u8], start: usize) -> Vec<Range<usize>> {
    let mut turns: Vec<Range<usize>> = Vec::new();
    for (position, _) in (start..).zip(mask).filter(|(_, sampled)| **sampled == 1) {
        match turns.last_mut() {
            Some(turn) if turn.end == position => turn.end += 1,
            _ => turns.push(position..position + 1),
        }
    }
    turns
}

/// The bytes of a file, where frames can be read in place: from a multiple of eight on.
struct AlignedBytes {
    words: Vec<u64>,
    n_bytes: usize,
}

impl AlignedBytes {
    fn read(path: &Path) -> Result<Self, std::io::Error> {
        let mut file = File::open(path)?;
        let n_bytes = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
        let mut words = vec![0; n_bytes.div_ceil(size_of::<u64>())];
        file.read_exact(&mut bytemuck::cast_slice_mut(&mut words)[..n_bytes])?;
        Ok(Self { words, n_bytes })
    }

    fn get(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.n_bytes]
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;

    use r3_core::ids::TokenId;
    use r3_tasks::dataset::Prompt;

    use super::*;
    use crate::fixtures::{dataset, scored, tokenizer};

    const DIMS: RouteDims = RouteDims { n_layers: 1, top_k: 1, n_experts: 4 };
    const EXPECTED: Expected = Expected { group_size: 3, routes: Some(DIMS) };
    const BEGUN: PolicyVersion = PolicyVersion(4);

    fn prompts() -> Prompts {
        Prompts::new(Arc::new(dataset()), Arc::new(tokenizer()), 3, 9).unwrap()
    }

    fn prompt() -> Prompt {
        prompts().of(GroupId(7)).unwrap()
    }

    /// A rollout of group 7 with `n` tokens after its prompt, of which those in `turns` were sampled.
    fn rollout(index: u32, n: usize, turns: &[(usize, usize)], finish: FinishReason) -> Finished {
        let prompt = prompt();
        let p = prompt.tokens.len();
        let mut rollout = scored(7, index, Reward::Failed).rollout;
        rollout.tokens = prompt.tokens;
        rollout.tokens.extend((0..n).map(|_| TokenId(5)));
        rollout.prompt_tokens = p;
        rollout.turns = turns.iter().map(|(start, end)| start + p..end + p).collect();
        rollout.rollout_logprobs = (0..n).map(|at| -(at as f32)).collect();
        rollout.versions = (0..n).map(|at| PolicyVersion(4 + at as u64)).collect();
        let mut rows = RouteRows::with_capacity(DIMS, p + n);
        rows.append(&vec![3; if n == 0 { 2 } else { p + n - 1 }]);
        rollout.routes = Some(rows);
        (rollout.finish, rollout.cached_tokens) = (finish, 2);
        rollout
    }

    /// Group 7, with a whole rollout, an unfinished one of two turns, and one that has sampled nothing.
    fn pending() -> (Pending, Vec<Finished>) {
        let origin = Origin { weight_epoch: 3, model_hash: 11 };
        let whole = rollout(1, 3, &[(0, 3)], FinishReason::Stop);
        let in_flight = vec![
            rollout(0, 6, &[(0, 2), (4, 6)], FinishReason::Abort),
            rollout(2, 0, &[], FinishReason::Abort),
        ];
        let mut pending = Pending::default();
        pending.begin(&prompt(), 3, BEGUN);
        pending.end_one(GroupId(7));
        pending.keep(Scored { rollout: whole, reward: Reward::Score(0.25), origin });
        (pending, in_flight)
    }

    fn snapshot() -> Snapshot {
        let (pending, in_flight) = pending();
        Snapshot::new(&pending, &in_flight, &[2], Origin { weight_epoch: 5, model_hash: 12 })
    }

    fn begun() -> BTreeMap<u64, u64> {
        BTreeMap::from([(7, BEGUN.0)])
    }

    /// What reading `frames` says.
    fn read_frames(frames: Vec<u8>) -> (PathBuf, Result<Pending, RunError>) {
        let dir = tempfile::tempdir().unwrap();
        Snapshot { frames, ..snapshot() }.write(dir.path()).unwrap();
        (dir.path().join(FILE), read(dir.path(), &begun(), EXPECTED, &mut prompts()))
    }

    #[test]
    fn groups_that_a_lower_bound_makes_too_old_are_refused_before_anything_is_sampled() {
        let begun = BTreeMap::from([(3, 7), (4, 5), (5, 9)]);
        check_ages(&begun, PolicyVersion(9), 4).unwrap();
        let error = check_ages(&begun, PolicyVersion(9), 3).unwrap_err();
        assert!(
            matches!(error, RunError::PendingStale { group: 4, staleness: 4, max_staleness: 3 }),
            "{error}"
        );
        check_ages(&BTreeMap::new(), PolicyVersion(9), 0).unwrap();
    }

    #[test]
    fn rollouts_come_back_as_they_were() {
        let (before, mut in_flight) = pending();
        let (_, after) = read_frames(snapshot().frames);
        let after = after.unwrap();
        assert_eq!((after.begun(), after.n_unfinished()), (before.begun(), 1));
        assert_eq!(after.problem(GroupId(7)), prompt().problem);
        in_flight[1].routes.as_mut().unwrap().truncate(0);
        assert_eq!(format!("{:?}", after.partial), format!("{in_flight:?}"));
        let [before, after] = [&before, &after].map(|pending| pending.kept().collect::<Vec<_>>());
        assert_eq!(format!("{after:?}"), format!("{before:?}"));
    }

    #[test]
    fn supports_come_back_up_to_the_last_sampled_token() {
        let (_, mut in_flight) = pending();
        // Two turns and what was given between and after them.
        let mut supports = SupportRows::default();
        for support in [&[5, 8][..], &[5], &[], &[], &[2, 5], &[5, 9]] {
            supports.push(support);
        }
        in_flight.truncate(1);
        (in_flight[0].support, in_flight[0].index) = (Some(supports.clone()), 0);
        let mut said = in_flight[0].clone();
        said.tokens.extend([TokenId(3), TokenId(4)]);
        said.rollout_logprobs.extend([0.0; 2]);
        said.versions.extend([PolicyVersion(9); 2]);
        said.routes.as_mut().unwrap().append(&[3; 2]);
        said.support.as_mut().unwrap().fill(8);
        let mut pending = Pending::default();
        pending.begin(&prompt(), 1, BEGUN);
        for in_flight in [&in_flight[0], &said] {
            let dir = tempfile::tempdir().unwrap();
            let in_flight = std::slice::from_ref(in_flight);
            Snapshot::new(&pending, in_flight, &[2], Origin::default()).write(dir.path()).unwrap();
            let expected = Expected { group_size: 1, ..EXPECTED };
            let after = read(dir.path(), &begun(), expected, &mut prompts()).unwrap();
            assert_eq!(after.partial[0].support, Some(supports.clone()));
        }
    }

    #[test]
    fn without_routes_none_come_back() {
        let (_, mut in_flight) = pending();
        let mut pending = Pending::default();
        pending.begin(&prompt(), 1, BEGUN);
        in_flight.truncate(1);
        (in_flight[0].routes, in_flight[0].index) = (None, 0);
        let dir = tempfile::tempdir().unwrap();
        Snapshot::new(&pending, &in_flight, &[2], Origin::default()).write(dir.path()).unwrap();
        let expected = Expected { group_size: 1, routes: None };
        let after = read(dir.path(), &begun(), expected, &mut prompts()).unwrap();
        assert_eq!(after.partial[0].routes, None);
    }

    #[test]
    fn nothing_pending_is_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let none = Snapshot::new(&Pending::default(), &[], &[2], Origin::default());
        none.write(dir.path()).unwrap();
        assert!(!dir.path().join(FILE).exists());
        assert_eq!(read(dir.path(), &BTreeMap::new(), EXPECTED, &mut prompts()).unwrap().n_groups(), 0);
        let missing = read(dir.path(), &begun(), EXPECTED, &mut prompts());
        assert!(matches!(missing, Err(RunError::Io { path, .. }) if path == dir.path().join(FILE)));
    }

    #[test]
    fn a_damaged_file_is_refused_by_name_wherever_the_damage_is() {
        let whole = snapshot().frames;
        for n_bytes in [1, 100, whole.len() / 2, whole.len() - 8] {
            let (expected, found) = read_frames(whole[..n_bytes].to_vec());
            assert!(
                matches!(found, Err(RunError::PendingFrame { path, .. }) if path == expected),
                "{n_bytes}"
            );
        }
        for at in (0..whole.len()).step_by(37) {
            let mut damaged = whole.clone();
            damaged[at] ^= 4;
            let (expected, found) = read_frames(damaged);
            assert!(matches!(found, Err(RunError::PendingFrame { path, .. }) if path == expected), "{at}");
        }
    }

    #[test]
    fn a_group_that_is_not_whole_or_not_the_tasks_is_refused() {
        let (pending, mut in_flight) = pending();
        let read_with = |in_flight: &[Finished]| {
            read_frames(Snapshot::new(&pending, in_flight, &[2], Origin::default()).frames).1.unwrap_err()
        };
        let found = |error: RunError| match error {
            RunError::PendingGroup { group: 7, found, expected: 3, .. } => found,
            other => panic!("{other}"),
        };
        assert_eq!(found(read_with(&in_flight[..1])), [0, 1]);
        assert_eq!(found(read_with(&[in_flight[0].clone(), in_flight[0].clone()])), [0, 0, 1]);
        let strange = Finished { group: GroupId(8), ..in_flight[0].clone() };
        let error = read_with(&[in_flight[0].clone(), in_flight[1].clone(), strange]);
        assert!(matches!(error, RunError::PendingGroup { group: 8, .. }), "{error}");
        in_flight[1].tokens[0] = TokenId(9);
        let error = read_with(&in_flight);
        assert!(matches!(error, RunError::PendingPrompt { group: 7, .. }), "{error}");
    }

    #[test]
    fn a_mask_says_where_the_turns_are() {
        assert_eq!(turns(&[1, 1, 0, 1, 0, 0, 1, 1], 3), [3..5, 6..7, 9..11]);
        assert_eq!(turns(&[], 3), [] as [Range<usize>; 0]);
    }
}
