//! How far rollout and trainer disagree at equal weights: the numbers that routing replay exists to lower.
//!
//! All are over trained tokens (mask 1). `Δ = policy - rollout` in nats and `ρ = exp(Δ)`.

use r3_kernels::route_record::RouteRecord;

/// Accumulates the mismatch over micro-batches, in f64.
#[derive(Clone, Debug, Default)]
pub struct Mismatch {
    /// `|Δ|` of every token, for the quantile.
    abs_deltas: Vec<f32>,
    k3: f64,
    abs: Sums,
    exp_abs: f64,
    n_extreme: usize,
    ratio: Sums,
    ratio_max: f64,
    probabilities: Correlation,
    routes: Option<RouteCounts>,
}

/// The mismatch over all tokens that were added. Without tokens, everything is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MismatchStats {
    /// Tokens compared.
    pub n_tokens: usize,
    /// `mean(ρ - 1 - log ρ)` in nats: k3 on tokens the rollout sampled, so it estimates `KL(rollout ||
    /// policy)` (R3, arXiv 2510.11370, equation 6, prints the arguments the other way round).
    pub k3_kl: f64,
    /// Mean of `|Δ|`, nats.
    pub abs_diff_mean: f64,
    /// Sample standard deviation of `|Δ|`, nats.
    pub abs_diff_std: f64,
    /// Maximum of `|Δ|`, nats.
    pub abs_diff_max: f64,
    /// 99th percentile of `|Δ|` (nearest rank), nats.
    pub abs_diff_p99: f64,
    /// F(2): share of tokens with `max(ρ, 1 / ρ) > 2`.
    pub extreme_frac_tau2: f64,
    /// `mean(exp |Δ|)`; 1 is ideal, above 1.05 is a warning (NeMo-RL).
    pub token_mult_prob_error: f64,
    /// Pearson correlation of the two probabilities; 1 when they are the same, `None` when either never
    /// varies.
    pub probs_pearson_corr: Option<f64>,
    /// Mean of `ρ`.
    pub rollout_is_mean: f64,
    /// Maximum of `ρ`.
    pub rollout_is_max: f64,
    /// `(Σρ)² / (n Σρ²)`: effective sample size as a share of the tokens, in `(0, 1]`.
    pub rollout_is_eff_sample_size: f64,
    /// How often this pass's router would have chosen other experts than the rollout's; `None` without
    /// routes.
    pub router: Option<RouterDiscrepancy>,
}

/// Share of route choices that differ, as *sets* of experts, between rollout and trainer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterDiscrepancy {
    /// Over (token, MoE layer); about 10 % in the R3 paper.
    pub token_layer_frac: f64,
    /// Tokens with at least one differing layer; 94 % in the R3 paper.
    pub token_any_frac: f64,
    /// Mean differing layers of a token; about 6 in the R3 paper.
    pub layers_per_token: f64,
}

impl Mismatch {
    /// Adds the trained tokens of a micro-batch; all arrays are `[T]`.
    ///
    /// # Panics
    /// If the arrays differ in length.
    pub fn add(&mut self, policy_logprobs: &[f32], rollout_logprobs: &[f32], mask: &[f32]) {
        assert_eq!(policy_logprobs.len(), mask.len());
        assert_eq!(rollout_logprobs.len(), mask.len());
        for ((&policy, &rollout), _) in
            policy_logprobs.iter().zip(rollout_logprobs).zip(mask).filter(|(_, kept)| **kept != 0.0)
        {
            let (policy, rollout) = (f64::from(policy), f64::from(rollout));
            let delta = policy - rollout;
            // `exp_m1` keeps k3 exact where ρ is close to 1, which is where it is wanted.
            self.k3 += delta.exp_m1() - delta;
            self.abs.add(delta.abs());
            self.exp_abs += delta.abs().exp();
            self.n_extreme += usize::from(delta.abs() > std::f64::consts::LN_2);
            self.ratio.add(delta.exp());
            self.ratio_max = self.ratio_max.max(delta.exp());
            self.probabilities.add(policy.exp(), rollout.exp());
            self.abs_deltas.push(delta.abs() as f32);
        }
    }

    /// Compares the routes of the trained tokens' inputs: `native`, this pass's own choice, with `rollout`
    /// `[L, T, K]`, the recorded one. `mask` is `[T]`.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn add_routes(&mut self, native: &RouteRecord, rollout: &[u16], mask: &[f32]) {
        let n_tokens = mask.len();
        assert_eq!(native.n_tokens(), n_tokens);
        let counts = self.routes.get_or_insert_default();
        if n_tokens == 0 || rollout.is_empty() {
            return;
        }
        let layer_ids = native.layer(0).len();
        assert!(rollout.len().is_multiple_of(layer_ids));
        let top_k = layer_ids / n_tokens;
        let mut differing = vec![0_usize; n_tokens];
        for (layer, recorded) in rollout.chunks_exact(layer_ids).enumerate() {
            let native = native.layer(layer);
            let rows = native.chunks_exact(top_k).zip(recorded.chunks_exact(top_k));
            for (count, (native, recorded)) in differing.iter_mut().zip(rows) {
                *count += usize::from(!same_set(native, recorded));
            }
        }
        counts.n_layers = rollout.len() / layer_ids;
        for (differing, _) in differing.iter().zip(mask).filter(|(_, kept)| **kept != 0.0) {
            counts.n_tokens += 1;
            counts.n_tokens_any += usize::from(*differing > 0);
            counts.n_token_layers += differing;
        }
    }

    /// The mismatch over everything added.
    #[must_use]
    pub fn finish(mut self) -> MismatchStats {
        let n_tokens = self.abs_deltas.len();
        if n_tokens == 0 {
            return MismatchStats::default();
        }
        let n = n_tokens as f64;
        let rank = (n_tokens * 99).div_ceil(100) - 1;
        let p99 = *self.abs_deltas.select_nth_unstable_by(rank, f32::total_cmp).1;
        let abs_max = self.abs_deltas.iter().copied().fold(0.0, f32::max);
        MismatchStats {
            n_tokens,
            k3_kl: self.k3 / n,
            abs_diff_mean: self.abs.sum / n,
            abs_diff_std: self.abs.sample_std(n),
            abs_diff_max: abs_max.into(),
            abs_diff_p99: p99.into(),
            extreme_frac_tau2: self.n_extreme as f64 / n,
            token_mult_prob_error: self.exp_abs / n,
            probs_pearson_corr: self.probabilities.pearson(n),
            rollout_is_mean: self.ratio.sum / n,
            rollout_is_max: self.ratio_max,
            rollout_is_eff_sample_size: self.ratio.sum.powi(2) / (n * self.ratio.squares),
            router: self.routes.map(RouteCounts::finish),
        }
    }
}

/// Whether two choices hold the same experts; both hold each at most once.
fn same_set(a: &[u16], b: &[u16]) -> bool {
    a == b || a.iter().all(|id| b.contains(id))
}

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    sum: f64,
    squares: f64,
}

impl Sums {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.squares += value * value;
    }

    fn sample_std(self, n: f64) -> f64 {
        if n < 2.0 {
            return 0.0;
        }
        // Rounding may take a variance of 0 below 0.
        ((self.squares - self.sum * self.sum / n).max(0.0) / (n - 1.0)).sqrt()
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Correlation {
    x: Sums,
    y: Sums,
    products: f64,
}

impl Correlation {
    fn add(&mut self, x: f64, y: f64) {
        self.x.add(x);
        self.y.add(y);
        self.products += x * y;
    }

    fn pearson(self, n: f64) -> Option<f64> {
        let covariance = self.products - self.x.sum * self.y.sum / n;
        let x = self.x.squares - self.x.sum * self.x.sum / n;
        let y = self.y.squares - self.y.sum * self.y.sum / n;
        (x > 0.0 && y > 0.0).then(|| (covariance / (x * y).sqrt()).clamp(-1.0, 1.0))
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct RouteCounts {
    n_layers: usize,
    n_tokens: usize,
    n_tokens_any: usize,
    n_token_layers: usize,
}

impl RouteCounts {
    fn finish(self) -> RouterDiscrepancy {
        let n_tokens = self.n_tokens.max(1) as f64;
        let layers_per_token = self.n_token_layers as f64 / n_tokens;
        RouterDiscrepancy {
            token_layer_frac: layers_per_token / self.n_layers.max(1) as f64,
            token_any_frac: self.n_tokens_any as f64 / n_tokens,
            layers_per_token,
        }
    }
}

#[cfg(test)]
mod tests {
    use r3_kernels::router::{Choice, RouterConfig, Routing, choose};

    use super::*;

    fn assert_close(actual: f64, expected: f64) {
        assert!((actual - expected).abs() < 1e-6, "{actual} is not {expected}");
    }

    /// Two trained tokens with ρ = 4 and ρ = 1/2, and a prompt token that must not count.
    fn two_tokens() -> Mismatch {
        let (half, eighth) = (0.5_f32.ln(), 0.125_f32.ln());
        let mut mismatch = Mismatch::default();
        mismatch.add(&[-7.0, half, half * 2.0], &[0.0, eighth, half], &[0.0, 1.0, 1.0]);
        mismatch
    }

    #[test]
    fn two_tokens_by_hand() {
        let (ln2, ln4) = (2.0_f64.ln(), 4.0_f64.ln());
        let stats = two_tokens().finish();
        assert_eq!(stats.n_tokens, 2);
        assert_close(stats.k3_kl, ((4.0 - 1.0 - ln4) + (0.5 - 1.0 + ln2)) / 2.0);
        assert_close(stats.abs_diff_mean, (ln4 + ln2) / 2.0);
        assert_close(stats.abs_diff_std, (ln4 - ln2) / 2.0_f64.sqrt());
        assert_close(stats.abs_diff_max, ln4);
        assert_close(stats.abs_diff_p99, ln4);
        assert_close(stats.token_mult_prob_error, (4.0 + 2.0) / 2.0);
        assert_close(stats.rollout_is_mean, 2.25);
        assert_close(stats.rollout_is_max, 4.0);
        assert_close(stats.rollout_is_eff_sample_size, 4.5 * 4.5 / (2.0 * 16.25));
        // (1/2, 1/8) and (1/4, 1/2): two points on a falling line.
        assert_close(stats.probs_pearson_corr.unwrap(), -1.0);
        assert_eq!(stats.router, None);
    }

    #[test]
    fn a_token_is_extreme_above_a_factor_of_two_either_way() {
        let mut mismatch = Mismatch::default();
        let log = [2.01_f32, 0.497, 1.99, 0.503].map(f32::ln);
        mismatch.add(&log, &[0.0; 4], &[1.0; 4]);
        assert_eq!(mismatch.finish().extreme_frac_tau2, 0.5);
    }

    #[test]
    fn equal_logprobs_have_exactly_no_mismatch() {
        let logprobs = [-0.1, -2.5, -1e-4];
        let mut mismatch = Mismatch::default();
        mismatch.add(&logprobs, &logprobs, &[1.0; 3]);
        let stats = mismatch.finish();
        assert_eq!([stats.k3_kl, stats.abs_diff_max, stats.abs_diff_std, stats.extreme_frac_tau2], [0.0; 4]);
        assert_eq!(
            [stats.token_mult_prob_error, stats.rollout_is_mean, stats.rollout_is_eff_sample_size],
            [1.0; 3]
        );
        assert_close(stats.probs_pearson_corr.unwrap(), 1.0);
    }

    #[test]
    fn splitting_tokens_over_micro_batches_changes_nothing() {
        let policy: Vec<f32> = (0..100).map(|i| -0.01 * i as f32).collect();
        let rollout: Vec<f32> = (0..100).map(|i| -0.0103 * i as f32 - 0.001).collect();
        let mut whole = Mismatch::default();
        whole.add(&policy, &rollout, &[1.0; 100]);
        let mut split = Mismatch::default();
        for from in (0..100).step_by(7) {
            let to = (from + 7).min(100);
            split.add(&policy[from..to], &rollout[from..to], &[1.0; 7][..to - from]);
        }
        let whole = whole.finish();
        assert_eq!(whole, split.finish());
        let mut sorted: Vec<f32> = policy.iter().zip(&rollout).map(|(p, r)| (p - r).abs()).collect();
        sorted.sort_by(f32::total_cmp);
        assert_close(whole.abs_diff_p99, sorted[98].into());
    }

    #[test]
    fn nothing_added_is_all_zero() {
        assert_eq!(Mismatch::default().finish(), MismatchStats::default());
    }

    /// A record of two layers, three tokens, top 2 of 4.
    fn native() -> RouteRecord {
        let config = RouterConfig::softmax(4, 2, true);
        let mut record = RouteRecord::new(2, config);
        record.start(3);
        let scores = [9., 8., 0., 0., 0., 9., 8., 0., 0., 0., 9., 8.]; // {0, 1}, {1, 2}, {2, 3}
        for layer in 0..2 {
            choose(&scores, config, layer, &mut Routing::Record(&mut record), &mut Choice::empty());
        }
        record
    }

    #[test]
    fn routes_differ_as_sets_over_trained_tokens() {
        let mut mismatch = two_tokens();
        // Layer 0: token 0 differs but is not trained on, token 1 has the same set in another order.
        // Layer 1: tokens 1 and 2 hold one other expert.
        mismatch.add_routes(&native(), &[3, 2, 2, 1, 2, 3, 0, 1, 1, 3, 2, 0], &[0.0, 1.0, 1.0]);
        let router = mismatch.finish().router.unwrap();
        assert_close(router.token_layer_frac, 2.0 / 4.0);
        assert_close(router.token_any_frac, 1.0);
        assert_close(router.layers_per_token, 1.0);
    }

    #[test]
    fn equal_routes_have_no_discrepancy() {
        let mut mismatch = two_tokens();
        mismatch.add_routes(&native(), &[0, 1, 1, 2, 2, 3, 0, 1, 1, 2, 2, 3], &[1.0; 3]);
        assert_eq!(mismatch.finish().router, Some(RouterDiscrepancy::default()));
    }
}
