//! A few threads that stay together for one pass and hand each other work within a fraction of a microsecond.
//!
//! A forward of a small model is hundreds of parallel sections of microseconds each, while waking a thread of the pool
//! costs several. [`in_team`] asks rayon's pool for its threads once, and until the pass ends they wait for the
//! next section spinning. Members come and go as the pool can spare them: a section ends when its tasks are done,
//! whoever did them, so nobody waits for a thread that the machine gives to somebody else.
//!
//! Which thread runs a task is decided by who asks first; what a task computes must not depend on it.

use std::cell::{Cell, UnsafeCell};
use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// Rounds of [`spin_loop`] before a waiting thread offers its core to others, some 20 us.
const SPINS: u32 = 1000;

thread_local! {
    static ROLE: Cell<Role> = const { Cell::new(Role::Alone) };
}

/// What the current thread is to a team.
#[derive(Clone, Copy)]
enum Role {
    /// Nothing: a section of its own drafts a team for itself.
    Alone,
    /// The one that splits work. The team outlives the role: [`Leading`] ends both.
    Leader(*const Team),
    /// Inside a task, which runs its own sections alone; which of the team's threads this is.
    Member(usize),
}

/// Runs `body` with the threads of the current pool at hand for the sections in it.
///
/// Worth it from some tens of microseconds of work on. `body` runs on the calling thread.
pub fn in_team<R: Send>(body: impl FnOnce() -> R + Send) -> R {
    let n_helpers = rayon::current_num_threads() - 1;
    if n_helpers == 0 || !matches!(ROLE.get(), Role::Alone) {
        return body();
    }
    let team = Team::default();
    let lead = || {
        let _leading = Leading::of(&team);
        body()
    };
    if rayon::current_thread_index().is_some() {
        return rayon::join(lead, || help(&team, n_helpers)).0;
    }
    // A thread from outside leads itself, for buffers of one call are free for the next on the same thread only; one of the
    // pool's stays asleep.
    rayon::in_place_scope(|scope| {
        (0..n_helpers).for_each(|_| scope.spawn(|_| team.help()));
        lead()
    })
}

/// Which of the section's threads runs the current task, below the threads of the pool: no two run one at a time.
pub(crate) fn member() -> usize {
    match ROLE.get() {
        Role::Member(index) => index,
        Role::Alone | Role::Leader(_) => 0,
    }
}

/// Threads that a section can use here.
pub(crate) fn n_threads() -> usize {
    match ROLE.get() {
        Role::Member(_) => 1,
        Role::Alone | Role::Leader(_) => rayon::current_num_threads(),
    }
}

/// Whether sections start within a fraction of a microsecond.
pub(crate) fn is_at_hand() -> bool {
    matches!(ROLE.get(), Role::Leader(_))
}

/// Calls `body(task)` once for each of `n_tasks`, on whichever threads come first.
pub(crate) fn run(n_tasks: usize, body: &(dyn Fn(usize) + Sync)) {
    match ROLE.get() {
        Role::Member(_) => (0..n_tasks).for_each(body),
        Role::Alone => in_team(|| match ROLE.get() {
            Role::Alone => (0..n_tasks).for_each(body),
            _ => run(n_tasks, body),
        }),
        Role::Leader(team) => {
            // SAFETY: `Leading` gave this thread the role and takes it back before the team goes.
            let team = unsafe { &*team };
            let _working = Working::instead_of(Role::Leader(team), 0);
            team.lead(n_tasks, body);
        }
    }
}

/// [`Team::help`] on `n_helpers` threads of the pool, as far as it can spare them.
fn help(team: &Team, n_helpers: usize) {
    if n_helpers == 1 {
        return team.help();
    }
    rayon::join(|| help(team, n_helpers / 2), || help(team, n_helpers - n_helpers / 2));
}

/// What a team works on.
#[derive(Default)]
#[repr(align(128))]
struct Team {
    /// Tasks of the current section that nobody has taken.
    untaken: AtomicUsize,
    /// Tasks of the current section that have not ended.
    unfinished: AtomicUsize,
    /// A task panicked.
    failed: AtomicBool,
    dismissed: AtomicBool,
    /// Threads that came to help.
    n_arrived: AtomicUsize,
    section: UnsafeCell<Option<Section>>,
}

/// One parallel section: `body(task)` for tasks `0..n_tasks`.
#[derive(Clone, Copy)]
struct Section {
    n_tasks: usize,
    body: *const (dyn Fn(usize) + Sync),
}

// SAFETY: `section` is written by the leader while no task is untaken or unfinished, and read by whoever has taken a
// task and not finished it; the atomics order the two. What it points to is `Sync` and outlives the section.
unsafe impl Sync for Team {}

impl Team {
    /// Runs a section to its end. Only the leader may, outside of tasks.
    fn lead(&self, n_tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        // SAFETY: this only forgets the lifetime; `lead` does not return before every task has ended.
        let body = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync), *const (dyn Fn(usize) + Sync + 'static)>(
                body,
            )
        };
        // SAFETY: the last section has ended and nobody has a task, so nobody reads.
        unsafe { *self.section.get() = Some(Section { n_tasks, body }) };
        self.unfinished.store(n_tasks, Ordering::Relaxed); // Published by the store below.
        self.untaken.store(n_tasks, Ordering::Release); // Pairs with the Acquire in `take`.
        let under_way = UnderWay(self);
        while self.take() {}
        drop(under_way);
        assert!(!self.failed.load(Ordering::Relaxed), "a task of this section panicked");
    }

    /// Does what there is to do until the team is dismissed.
    fn help(&self) {
        let index = self.n_arrived.fetch_add(1, Ordering::Relaxed) + 1;
        let _working = Working::instead_of(ROLE.get(), index);
        let mut patience = Patience::default();
        // Pairs with the Release in `Leading::drop`.
        while !self.dismissed.load(Ordering::Acquire) {
            if self.take() {
                patience = Patience::default();
            } else {
                patience.wait();
            }
        }
    }

    /// Takes a task and runs it; `false` if there is none.
    #[inline]
    fn take(&self) -> bool {
        let mut untaken = self.untaken.load(Ordering::Relaxed);
        loop {
            if untaken == 0 {
                return false;
            }
            // Acquire pairs with the Release in `lead`, also through others' exchanges in between. Should the section
            // have changed since the load, the task is one of the new section, whose fields are read below.
            match self.untaken.compare_exchange_weak(
                untaken,
                untaken - 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => break,
                Err(now) => untaken = now,
            }
        }
        let _taken = Taken(self);
        // SAFETY: a task is taken and not finished, so the leader does not write.
        let section = unsafe { *self.section.get() }.expect("tasks belong to a section");
        // SAFETY: the leader keeps what `body` borrows alive until every task has ended.
        unsafe { (*section.body)(section.n_tasks - untaken) };
        true
    }
}

/// A section whose tasks borrow from the leader, who must not go before they have ended, not even in a panic.
struct UnderWay<'a>(&'a Team);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        // There are such tasks only if one of the leader's own has panicked.
        let left = self.0.untaken.swap(0, Ordering::Relaxed);
        self.0.unfinished.fetch_sub(left, Ordering::Relaxed);
        let mut patience = Patience::default();
        // Pairs with the Release in `Taken::drop`.
        while self.0.unfinished.load(Ordering::Acquire) > 0 {
            patience.wait();
        }
    }
}

/// A task that was taken, until it ends.
struct Taken<'a>(&'a Team);

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.failed.store(true, Ordering::Relaxed); // Published by the next line.
        }
        self.0.unfinished.fetch_sub(1, Ordering::Release); // Pairs with the Acquire in `lead`.
    }
}

/// The leader's role, and the team's end.
struct Leading<'a>(&'a Team);

impl<'a> Leading<'a> {
    fn of(team: &'a Team) -> Self {
        ROLE.set(Role::Leader(team));
        Self(team)
    }
}

impl Drop for Leading<'_> {
    fn drop(&mut self) {
        ROLE.set(Role::Alone);
        self.0.dismissed.store(true, Ordering::Release); // Pairs with the Acquire in `help`.
    }
}

/// A member's role for as long as it works; then it is again what it was.
struct Working(Role);

impl Working {
    fn instead_of(role: Role, index: usize) -> Self {
        ROLE.set(Role::Member(index));
        Self(role)
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        ROLE.set(self.0);
    }
}

/// How long a thread has waited: at first it spins, then it lets others run.
#[derive(Default)]
struct Patience {
    spins: u32,
}

impl Patience {
    #[inline]
    fn wait(&mut self) {
        if self.spins < SPINS {
            self.spins += 1;
            spin_loop();
        } else {
            thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::testing::in_pool;

    #[test]
    fn every_task_of_every_section_runs_once() {
        for threads in [1, 2, 3, 5] {
            let counts: Vec<AtomicUsize> = (0..64).map(|_| AtomicUsize::new(0)).collect();
            in_pool(threads, || {
                in_team(|| {
                    for section in 0..2000 {
                        run(section % 64 + 1, &|task| {
                            counts[task].fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            });
            for (task, count) in counts.iter().enumerate() {
                let sections = (0..2000).filter(|section| section % 64 >= task).count();
                assert_eq!(count.load(Ordering::Relaxed), sections, "task {task} on {threads} threads");
            }
        }
    }

    #[test]
    fn a_section_sees_what_the_one_before_wrote() {
        in_pool(2, || {
            in_team(|| {
                let values: Vec<AtomicUsize> = (0..8).map(|_| AtomicUsize::new(0)).collect();
                for round in 1..5000 {
                    run(8, &|task| {
                        let next = values[(task + round) % 8].load(Ordering::Relaxed);
                        assert!(next == round - 1 || next == round);
                        values[task].store(round, Ordering::Relaxed);
                    });
                    assert!(values.iter().all(|value| value.load(Ordering::Relaxed) == round));
                }
            });
        });
    }

    #[test]
    fn sections_inside_tasks_and_without_a_team_run_too() {
        let count = AtomicUsize::new(0);
        let add = |_| {
            count.fetch_add(1, Ordering::Relaxed);
        };
        let nested = || run(3, &|_| run(5, &add));
        nested();
        in_pool(2, nested);
        in_pool(2, || in_team(nested));
        in_pool(2, || in_team(|| in_team(nested)));
        assert_eq!(count.into_inner(), 4 * 15);
    }

    #[test]
    fn outside_of_a_pool_the_calling_thread_leads() {
        let (caller, count) = (thread::current().id(), AtomicUsize::new(0));
        for panics in [false, true] {
            let lead = || {
                in_team(|| {
                    assert_eq!(thread::current().id(), caller);
                    run(64, &|_| {
                        assert!(member() > 0 || thread::current().id() == caller);
                        count.fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(!panics, "asked to");
                });
            };
            assert_eq!(catch_unwind(AssertUnwindSafe(lead)).is_err(), panics);
        }
        assert_eq!(count.into_inner(), 2 * 64);
    }

    #[test]
    fn a_leader_that_panics_waits_for_the_tasks_of_others() {
        let (begun, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let task = |_| {
            begun.fetch_add(1, Ordering::Relaxed);
            if member() == 0 {
                while begun.load(Ordering::Relaxed) < 2 {
                    thread::yield_now();
                }
                panic!("the leader's");
            }
            for _ in 0..10_000 {
                thread::yield_now();
            }
            ended.fetch_add(1, Ordering::Relaxed);
        };
        in_pool(2, || {
            in_team(|| {
                assert!(catch_unwind(AssertUnwindSafe(|| run(64, &task))).is_err());
                assert_eq!(ended.load(Ordering::Relaxed) + 1, begun.load(Ordering::Relaxed));
            });
        });
    }

    #[test]
    fn a_panic_reaches_the_leader_and_leaves_a_pool_that_works() {
        in_pool(2, || {
            for panicking in 0..16 {
                let section = || in_team(|| run(16, &|task| assert_ne!(task, panicking)));
                assert!(catch_unwind(AssertUnwindSafe(section)).is_err());
            }
            let count = AtomicUsize::new(0);
            in_team(|| {
                run(4, &|_| {
                    count.fetch_add(1, Ordering::Relaxed);
                });
            });
            assert_eq!(count.into_inner(), 4);
        });
    }
}
