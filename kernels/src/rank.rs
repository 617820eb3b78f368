//! One number that orders what has a score and an id: experts by their scores, tokens by their logits.
//!
//! Comparing numbers takes no branch, where comparing scores, then ids, takes two that nothing can predict.

/// Less for a higher score, of equal ones for the lower id; NaN come last, and -0 is equal to 0. Neither 0 nor `u64::MAX`
/// is a rank.
#[inline(always)]
pub(crate) fn rank(score: f32, id: u32) -> u64 {
    let bits = (score + 0.0).to_bits(); // No -0.
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    let ascending = if score.is_nan() { 1 } else { ascending };
    u64::from(!ascending) << 32 | u64::from(id)
}

/// The id of a rank.
#[inline(always)]
pub(crate) fn id(rank: u64) -> u32 {
    rank as u32
}

/// The score of a rank; of NaN, something else.
#[inline(always)]
pub(crate) fn score(rank: u64) -> f32 {
    let ascending = !((rank >> 32) as u32);
    f32::from_bits(if ascending >> 31 == 1 { ascending & !(1 << 31) } else { !ascending })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_go_down_from_the_highest_and_tell_score_and_id() {
        let falling = [
            f32::INFINITY,
            f32::MAX,
            1.5,
            1.0,
            f32::MIN_POSITIVE,
            0.0,
            -1e-40,
            -1.0,
            -7.5,
            f32::NEG_INFINITY,
        ];
        let ranks: Vec<u64> =
            falling.iter().flat_map(|&x| [rank(x, 0), rank(x, 4), rank(x, u32::MAX)]).collect();
        assert!(ranks.is_sorted_by(|a, b| a < b) && ranks[0] > 0);
        for (&x, rank) in falling.iter().zip(ranks.chunks(3)) {
            assert_eq!((score(rank[0]), id(rank[1]), id(rank[2])), (x, 4, u32::MAX));
        }
        assert_eq!(rank(-0.0, 3), rank(0.0, 3));
        for nan in [f32::NAN, -f32::NAN] {
            assert!(ranks.iter().all(|&other| other < rank(nan, 0)) && rank(nan, u32::MAX) < u64::MAX);
        }
    }
}
