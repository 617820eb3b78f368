//! Splitting work over threads, in ways that cannot change a bit of the result.
//!
//! Work is counted in multiply-adds, roughly. Below `min_task_work` a call stays on its thread: handing work over
//! would cost more than it saves. Which pool is used is the caller's choice (`ThreadPool::install`).

use std::marker::PhantomData;
use std::ops::Range;

use crate::team;

/// Multiply-adds worth a task of its own where threads have to be woken: 2 us on a core with AVX-512, 10 us on an old
/// one. Waking takes longer than that, but so do multiply-adds that wait for memory: with four times as many, products of
/// one row take twice the time.
const WOKEN_TASK_WORK: usize = 1 << 18;
/// The same in a team, whose threads are awake.
const TEAM_TASK_WORK: usize = 1 << 16;

/// Tasks handed out per thread, so that uneven ones even out.
const TASKS_PER_THREAD: usize = 4;

/// Multiply-adds worth a task of its own.
pub(crate) fn min_task_work() -> usize {
    if team::is_at_hand() { TEAM_TASK_WORK } else { WOKEN_TASK_WORK }
}

/// How many tasks `work` multiply-adds are worth here; 1 means "run inline".
pub(crate) fn task_count(work: usize) -> usize {
    let by_work = work / min_task_work();
    if by_work <= 1 {
        return 1;
    }
    match team::n_threads() {
        1 => 1,
        threads => by_work.min(threads * TASKS_PER_THREAD),
    }
}

/// Calls `body(task)` for every task, in parallel if `work` (multiply-adds of all of them) is worth it. Tasks start in order,
/// each on the thread that is free first, so they may be uneven.
pub fn for_each(n_tasks: usize, work: usize, body: impl Fn(usize) + Sync + Send) {
    spread(n_tasks, task_count(work) > 1, body);
}

/// Calls `body(task)` for every task, over the threads if `in_parallel`, else in order on this one.
pub(crate) fn spread(n_tasks: usize, in_parallel: bool, body: impl Fn(usize) + Sync + Send) {
    if in_parallel && n_tasks > 1 {
        team::run(n_tasks, &body);
    } else {
        (0..n_tasks).for_each(body);
    }
}

/// Multiply-adds that writing an element to memory costs, about.
const FILL_WORK: usize = 16;

/// Sets all `values` to `value`.
pub fn fill<T: Copy + Send + Sync>(values: &mut [T], value: T) {
    for_rows(values, 1, FILL_WORK, |_, run| run.fill(value));
}

/// Splits `rows` `[T, row_len]` into runs of whole rows and calls `body(first_row, run)` on each, in parallel if
/// `T * work_per_row` multiply-adds are worth it. `body` must treat every row alike: how rows fall into runs varies.
///
/// # Panics
/// If `rows` is not whole rows.
pub fn for_rows<T: Send>(
    rows: &mut [T],
    row_len: usize,
    work_per_row: usize,
    body: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    let n_rows = rows.len() / row_len.max(1);
    assert_eq!(rows.len(), n_rows * row_len, "rows of {row_len} elements");
    let n_tasks = task_count(n_rows * work_per_row).min(n_rows);
    if n_tasks <= 1 {
        if n_rows > 0 {
            body(0, rows);
        }
        return;
    }
    let run = n_rows.div_ceil(n_tasks);
    let parts = Disjoint::new(rows);
    team::run(n_rows.div_ceil(run), &|task| {
        let rows = task * run..n_rows.min((task + 1) * run);
        // SAFETY: each task has rows of its own.
        body(rows.start, unsafe { parts.part(rows.start * row_len..rows.end * row_len) });
    });
}

/// A mutable slice whose parts are written by several tasks at once.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer stands for an exclusive borrow of a `[T]`, and `part` demands that no two live parts
// overlap; handing parts to other threads then needs no more than `T: Send`.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}
// SAFETY: as for `&mut [T]`, which is `Send` for `T: Send`.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The elements `range`.
    ///
    /// # Safety
    /// No other live part, on any thread, overlaps `range`.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the caller vouches that parts do not overlap")]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: `range.start <= len` was checked, so the pointer stays inside the borrowed slice or one past it.
        let start = unsafe { self.start.add(range.start) };
        // SAFETY: the range lies inside the slice borrowed for `'a`, and the caller keeps parts apart.
        unsafe { std::slice::from_raw_parts_mut(start, range.end - range.start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_pool;

    #[test]
    fn every_row_is_visited_once_whatever_the_split() {
        for (threads, n_rows, work) in
            [(1, 7, WOKEN_TASK_WORK), (2, 0, 1), (2, 1, 1 << 30), (3, 101, WOKEN_TASK_WORK)]
        {
            let mut rows = vec![0_usize; n_rows * 3];
            in_pool(threads, || {
                for_rows(&mut rows, 3, work, |first, run| {
                    for (i, row) in run.chunks_exact_mut(3).enumerate() {
                        row.iter_mut().for_each(|x| *x += first + i + 1);
                    }
                });
            });
            assert!(rows.iter().enumerate().all(|(i, &x)| x == i / 3 + 1));
        }
    }

    #[test]
    fn all_values_are_filled() {
        for n in [0, 1, WOKEN_TASK_WORK] {
            let mut values = vec![1.0; n];
            in_pool(2, || fill(&mut values, 0.5));
            assert!(values.iter().all(|&value| value == 0.5));
        }
    }

    #[test]
    fn little_work_stays_on_its_thread() {
        in_pool(2, || {
            assert_eq!(task_count(WOKEN_TASK_WORK), 1);
            assert_eq!(task_count(3 * WOKEN_TASK_WORK), 3);
            assert_eq!(task_count(usize::MAX), 2 * TASKS_PER_THREAD);
            team::in_team(|| {
                assert_eq!(task_count(TEAM_TASK_WORK), 1);
                assert_eq!(task_count(3 * TEAM_TASK_WORK), 3);
                spread(2, true, |_| assert_eq!(task_count(usize::MAX), 1));
            });
        });
        in_pool(1, || assert_eq!(task_count(usize::MAX), 1));
    }

    #[test]
    fn tasks_write_their_own_parts() {
        let mut values = vec![0; 64];
        let parts = Disjoint::new(&mut values);
        in_pool(2, || {
            spread(64, true, |task| {
                // SAFETY: each task takes its own element.
                let part = unsafe { parts.part(task..task + 1) };
                part[0] = task;
            });
        });
        assert!(values.iter().enumerate().all(|(i, &x)| x == i));
    }
}
