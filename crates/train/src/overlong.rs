//! Reward shaping for long completions.

use r3_recipe::algorithm::Overlong;

/// What is added to the reward of a completion of `n_tokens`, in `[-factor, 0]`.
///
/// 0 up to `max_tokens - cache_tokens` tokens, then linear down to `-factor` at `max_tokens`, and `-factor`
/// beyond.
///
/// Source: DAPO, arXiv 2503.14476, "Overlong Reward Shaping", equation 13, where the factor is 1.
#[must_use]
pub fn punishment(n_tokens: usize, overlong: &Overlong) -> f64 {
    let Overlong { max_tokens, cache_tokens, factor } = *overlong;
    let free_tokens = max_tokens.saturating_sub(cache_tokens);
    if n_tokens <= free_tokens {
        0.0
    } else if n_tokens >= max_tokens {
        -factor
    } else {
        -factor * (n_tokens - free_tokens) as f64 / cache_tokens as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn punished(n_tokens: usize, max_tokens: usize, cache_tokens: usize) -> f64 {
        punishment(n_tokens, &Overlong { max_tokens, cache_tokens, factor: 1.0 })
    }

    #[test]
    fn the_punishment_grows_linearly_inside_the_buffer_only() {
        let punished = [0, 16, 17, 18, 19, 20, 21].map(|n| punished(n, 20, 4));
        assert_eq!(punished, [0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0]);
    }

    #[test]
    fn without_a_buffer_only_lengths_beyond_the_limit_are_punished() {
        assert_eq!([8, 9].map(|n| punished(n, 8, 0)), [0.0, -1.0]);
    }

    #[test]
    fn the_factor_scales_the_punishment() {
        let overlong = Overlong { max_tokens: 20, cache_tokens: 4, factor: 0.5 };
        assert_eq!([18, 30].map(|n| punishment(n, &overlong)), [-0.25, -0.5]);
    }
}
