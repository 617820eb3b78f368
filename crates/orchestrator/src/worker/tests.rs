use r3_core::rollout::RolloutView;
use r3_engine::config::EngineConfig;
use r3_model::init::FreshWeights;
use r3_ring::frame::Frame;
use r3_ring::reader::Reader;
use r3_tasks::reward::ExactMatch;

use super::*;
use crate::fixtures::{bar, dataset, model, recipe, worker_parts};
use crate::pending_file::{self, Expected};
use crate::prompts::Prompts;

const MODES: [InFlight; 3] = [InFlight::Drain, InFlight::Abort, InFlight::Continue];
const GROUPS: usize = 4;
const OVER: usize = 4;

/// The rollout side of a run, which is given other weights after every step.
struct Rollouts {
    worker: Worker,
    ring: Reader,
    prompts: Prompts,
    version: u64,
    /// Every rollout that was handed over: what it is, to the bit, and the versions of its tokens.
    taken: Vec<(String, Vec<u64>)>,
}

impl Rollouts {
    fn new(in_flight: InFlight) -> Self {
        Self::of(in_flight, Retries { attempts: 1 })
    }

    /// Five of eight to sixteen sequences run at once, so that refits find some running, some waiting and some whole.
    fn of(in_flight: InFlight, retries: Retries) -> Self {
        let (mut parts, ring) = worker_parts(Arc::new(ExactMatch), Duration::from_secs(60));
        let numbers = (recipe().rollout.dtype, recipe().resolved_numerics());
        let config = EngineConfig::from_recipe(&recipe().engine, numbers, true);
        let sizes = EngineConfig { max_running: 5, max_batch_tokens: 16, block_tokens: 4, ..config };
        let config = EngineConfig { replay: Some(0.0), ..sizes };
        let weights = FreshWeights::new(&model(), 1);
        parts.engine = Engine::new(config, &model(), &weights, PolicyVersion(0)).unwrap();
        parts.dataset = Arc::new(Dataset { held_out: dataset().train, ..dataset() });
        parts.spec = SampleSpec { max_new_tokens: 7, in_flight, max_lag: 1, retries, ..parts.spec };
        let prompts = Prompts::new(Arc::clone(&parts.dataset), Arc::clone(&parts.tokenizer), 3, 0).unwrap();
        let worker = Worker::new(parts, Pulse::default());
        Self { worker, ring, prompts, version: 0, taken: Vec::new() }
    }

    /// As another process goes on with it, from files and the weights served.
    fn resumed(&self) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = self.worker.snapshot();
        snapshot.write(dir.path()).unwrap();
        let SampleSpec { in_flight, retries, .. } = self.worker.parts.spec;
        let mut other = Self::of(in_flight, retries);
        other.prompts = other.prompts_at(self.prompts.cursor());
        let expected = Expected { group_size: 2, routes: Some(model().route_dims()) };
        let begun = snapshot.begun.iter().map(|(group, version)| (group.0, version.0)).collect();
        other.worker.parts.pending =
            pending_file::read(dir.path(), &begun, expected, &mut other.prompts).unwrap();
        other.version = self.version;
        other.worker.parts.engine.refit(&weights(self.version), PolicyVersion(self.version)).unwrap();
        other.taken.clone_from(&self.taken);
        other
    }

    fn prompts_at(&self, cursor: u64) -> Prompts {
        let WorkerParts { dataset, tokenizer, .. } = &self.worker.parts;
        Prompts::new(Arc::clone(dataset), Arc::clone(tokenizer), 3, cursor).unwrap()
    }

    fn sample(&mut self) {
        let n_pending = self.worker.parts.pending.n_groups();
        let prompts = self.prompts.take(GROUPS + OVER - n_pending).unwrap();
        self.worker.sample(prompts, GROUPS, &bar()).unwrap();
        if self.worker.parts.spec.in_flight == InFlight::Drain {
            self.worker.drain(&bar()).unwrap();
        }
        while let Ok(id) = self.ring.next(Duration::ZERO) {
            let frame = Frame::decode(self.ring.bytes(id)).unwrap();
            let RolloutView { versions, .. } = frame.rollout();
            let versions = versions.iter().map(|version| version.0).collect();
            let taken = format!("{:?} {:?} {:?}", frame.rollout(), frame.mask(), frame.reward());
            self.taken.push((taken, versions));
            self.ring.release(id);
        }
    }

    fn refit(&mut self) -> Refitted {
        self.version += 1;
        self.worker.refit(&weights(self.version), PolicyVersion(self.version)).unwrap()
    }

    fn steps(&mut self, n: usize) {
        for _ in 0..n {
            self.sample();
            self.refit();
        }
    }
}

fn weights(version: u64) -> FreshWeights {
    FreshWeights::new(&model(), version + 1)
}

fn after_six_steps(in_flight: InFlight) -> Rollouts {
    let mut rollouts = Rollouts::new(in_flight);
    rollouts.steps(6);
    rollouts
}

#[test]
fn versions_are_exact_in_flight_and_staleness_is_bounded() {
    for in_flight in MODES {
        let mut rollouts = Rollouts::new(in_flight);
        let mut n_mixed = 0;
        for step in 0..6 {
            rollouts.taken.clear();
            rollouts.sample();
            assert_eq!(rollouts.taken.len(), 2 * GROUPS);
            for (_, versions) in &rollouts.taken {
                assert!(versions.is_sorted() && versions.iter().all(|version| version + 2 >= step));
                n_mixed += usize::from(versions.first() != versions.last());
            }
            let refitted = rollouts.refit();
            assert_eq!(refitted.n_rollouts == 0, in_flight == InFlight::Drain, "{refitted:?}");
        }
        assert_eq!(n_mixed > 4, in_flight != InFlight::Drain, "{n_mixed} mixed");
    }
}

#[test]
fn whether_the_engine_or_the_worker_holds_them_rollouts_go_on_alike() {
    let (kept, taken_back) = (after_six_steps(InFlight::Continue), after_six_steps(InFlight::Abort));
    assert_eq!(kept.taken, taken_back.taken);
    assert_ne!(kept.taken, after_six_steps(InFlight::Drain).taken);
}

#[test]
fn a_refit_that_fails_leaves_what_is_in_flight_as_it_was() {
    struct Broken;
    impl TensorSource for Broken {
        fn read(&self, name: &str, _: &mut Vec<f32>) -> Result<(), ModelError> {
            Err(ModelError::NoSuchTensor { name: name.to_owned() })
        }
    }
    for in_flight in MODES {
        let mut rollouts = Rollouts::new(in_flight);
        for _ in 0..6 {
            rollouts.sample();
            let state = |worker: &Worker| {
                let WorkerParts { engine, pending, .. } = &worker.parts;
                (engine.stats(), engine.epoch(), engine.version(), format!("{pending:?}"))
            };
            let before = state(&rollouts.worker);
            let next = PolicyVersion(rollouts.version + 1);
            assert!(rollouts.worker.refit(&Broken, next).is_err());
            assert_eq!(state(&rollouts.worker), before, "{in_flight:?}");
            rollouts.refit();
        }
        assert_eq!(rollouts.taken, after_six_steps(in_flight).taken, "{in_flight:?}");
    }
}

#[test]
fn rollouts_whose_cache_is_freed_before_the_refit_go_on_with_the_same_bits() {
    for in_flight in MODES {
        let mut rollouts = Rollouts::new(in_flight);
        for _ in 0..6 {
            rollouts.sample();
            rollouts.worker.parts.engine.free_cache();
            assert_eq!(rollouts.worker.parts.engine.stats().n_running, 0);
            rollouts.refit();
        }
        assert_eq!(rollouts.taken, after_six_steps(in_flight).taken, "{in_flight:?}");
    }
}

#[test]
fn an_evaluation_neither_disturbs_what_is_in_flight_nor_is_disturbed() {
    for in_flight in MODES {
        let mut rollouts = Rollouts::new(in_flight);
        let mut idle = Rollouts::new(in_flight);
        for _ in 0..6 {
            rollouts.sample();
            rollouts.refit();
            idle.worker.parts.engine.refit(&weights(rollouts.version), PolicyVersion(9)).unwrap();
            let [found, expected] =
                [&mut rollouts, &mut idle].map(|it| it.worker.evaluate(3, 5, &bar()).unwrap());
            assert_eq!((found.problems, found.accuracy), (3, expected.accuracy));
        }
        assert_eq!(rollouts.taken, after_six_steps(in_flight).taken, "{in_flight:?}");
    }
}

#[test]
fn what_a_checkpoint_keeps_goes_on_in_another_process_alike() {
    for in_flight in MODES {
        let expected = after_six_steps(in_flight).taken;
        for n_before in [1, 4] {
            let mut before = Rollouts::new(in_flight);
            before.steps(n_before);
            let mut after = before.resumed();
            after.steps(6 - n_before);
            assert_eq!(after.taken, expected, "{in_flight:?} after {n_before} steps");
            before.steps(6 - n_before);
            assert_eq!(before.taken, expected, "a checkpoint changes nothing");
        }
    }
}

#[test]
fn a_wrong_answer_is_answered_and_what_is_said_then_is_not_trained_on() {
    let (mut parts, mut ring) = worker_parts(Arc::new(ExactMatch), Duration::from_secs(60));
    parts.spec.retries = Retries { attempts: 3 };
    let tokenizer = Arc::clone(&parts.tokenizer);
    let prompts = Prompts::new(Arc::clone(&parts.dataset), Arc::clone(&tokenizer), 3, 0).unwrap().take(2);
    let mut worker = Worker::new(parts, Pulse::default());
    let stats = worker.sample(prompts.unwrap(), 2, &bar()).unwrap();
    assert_eq!((stats.n_rollouts(), stats.turns), (4, 12), "random weights are never right");
    assert_eq!(stats.completion_tokens, stats.sampled_tokens);
    while let Ok(id) = ring.next(Duration::ZERO) {
        let frame = Frame::decode(ring.bytes(id)).unwrap();
        let rollout = frame.rollout();
        let given = rollout.completion().iter().zip(frame.mask()).filter(|&(_, &mask)| mask == 0);
        let given: Vec<TokenId> = given.map(|(&token, _)| token).collect();
        let prompt = tokenizer.decode(rollout.prompt()).unwrap();
        assert_eq!(tokenizer.decode(&given).unwrap(), format!("no. {prompt}no. {prompt}"));
        assert_eq!(rollout.routes.unwrap().rows(), rollout.tokens.len() - 1);
        ring.release(id);
    }
    assert_eq!((worker.parts.pending.n_groups(), worker.parts.engine.n_open_requests()), (0, 0));
}

#[test]
fn rollouts_that_answer_again_go_on_alike_whoever_holds_them_and_in_another_process() {
    let retries = Retries { attempts: 2 };
    let after = |in_flight, n| {
        let mut rollouts = Rollouts::of(in_flight, retries);
        rollouts.steps(n);
        rollouts
    };
    let expected = after(InFlight::Continue, 5).taken;
    assert_eq!(expected, after(InFlight::Abort, 5).taken);
    for in_flight in MODES {
        let expected = after(in_flight, 5).taken;
        for n_before in [1, 3] {
            let mut resumed = after(in_flight, n_before).resumed();
            resumed.steps(5 - n_before);
            assert_eq!(resumed.taken, expected, "{in_flight:?} after {n_before} steps");
        }
    }
}
