//! Rotary position embedding (arXiv 2104.09864) in the halves layout of Llama and Qwen3 (`rotate_half`).

use crate::isa::{Isa, multiversion};
use crate::parallel::{self, Disjoint};
use crate::rms_norm::{inverse_rms, row_work};

/// Multiply-adds that a cosine and a sine cost, about.
const TABLE_WORK: usize = 1 << 10;

/// Cosines and sines of every angle, `[max_positions, head_dim / 2]` each.
#[derive(Clone, Debug)]
pub struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Angles `position / theta^(2i / head_dim)`, as Hugging Face's default rotary embedding computes them.
    ///
    /// Exponent, power, reciprocal and angle are rounded to f32 one after the other, as there; power, cosine and
    /// sine are taken in f64 before rounding, because f32 versions differ between maths libraries.
    ///
    /// # Panics
    /// If `head_dim` is not even and positive.
    #[must_use]
    pub fn new(theta: f64, head_dim: usize, max_positions: usize) -> Self {
        assert!(head_dim > 0 && head_dim.is_multiple_of(2), "head_dim {head_dim} has no halves");
        let half = head_dim / 2;
        let theta = f64::from(theta as f32);
        let frequencies: Vec<f32> =
            (0..half).map(|i| 1.0 / theta.powf(f64::from((2 * i) as f32 / head_dim as f32)) as f32).collect();
        let [mut cos, mut sin] = [(); 2].map(|()| vec![0.0; max_positions * half]);
        let sines = Disjoint::new(&mut sin);
        parallel::for_rows(&mut cos, half, TABLE_WORK * half, |first, cos| {
            // SAFETY: each run of cosines is another, and these are the sines of the same angles.
            let sin = unsafe { sines.part(first * half..first * half + cos.len()) };
            let rows = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
            for (position, (cos, sin)) in (first..).zip(rows) {
                for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&frequencies) {
                    let (sine, cosine) = f64::from(position as f32 * frequency).sin_cos();
                    (*cos, *sin) = (cosine as f32, sine as f32);
                }
            }
        });
        Self { half, cos, sin }
    }

    /// Positions the table covers.
    #[must_use]
    pub fn max_positions(&self) -> usize {
        self.cos.len() / self.half
    }
}

/// Rotates `x` `[T, H, head_dim]` in place, token `t` by the angles of `positions[t]`.
///
/// Element `i` of a head's first half pairs with element `i` of its second:
/// `(a, b) -> (a cos - b sin, b cos + a sin)`.
///
/// # Panics
/// If `x` is not `[T, H, head_dim]`, or a position is past the table's end.
pub fn rope(x: &mut [f32], positions: &[u32], table: &RopeTable) {
    rotate(x, positions, table, 1.0);
}

/// Turns the gradient `grad` of [`rope`]'s result into that of its operand, in place: a rotation's transpose is the
/// rotation back.
///
/// # Panics
/// As [`rope`].
pub fn rope_backward(grad: &mut [f32], positions: &[u32], table: &RopeTable) {
    rotate(grad, positions, table, -1.0);
}

/// [`rope`] with every sine times `direction`: 1 changes no bit, -1 turns back.
fn rotate(x: &mut [f32], positions: &[u32], table: &RopeTable, direction: f32) {
    let row_len = checked_row_len(x, positions, table);
    parallel::for_rows(x, row_len, ROTATE_WORK * row_len, |first, rows| {
        rotate_rows(rows, &positions[first..][..rows.len() / row_len], table, direction);
    });
}

/// Multiply-adds that turning an element costs, about.
const ROTATE_WORK: usize = 8;

/// RMSNorm of every head of `x` `[T, H, head_dim]` by `weight` `[head_dim]`, then [`rope`], in place: the bits of one
/// after the other.
///
/// # Panics
/// As [`rope`], or if `weight` is not `[head_dim]`.
pub fn norm_rope(x: &mut [f32], (weight, eps): (&[f32], f32), positions: &[u32], table: &RopeTable) {
    assert_eq!(weight.len(), 2 * table.half, "a weight for each element of a head");
    let row_len = checked_row_len(x, positions, table);
    let row_work = row_len / weight.len() * row_work(weight.len()) + ROTATE_WORK * row_len;
    parallel::for_rows(x, row_len, row_work, |first, rows| {
        let positions = &positions[first..][..rows.len() / row_len];
        normalise_heads(rows, weight, eps);
        rotate_rows(rows, positions, table, 1.0);
    });
}

multiversion! {
    fn normalise_heads(x: &mut [f32], weight: &[f32], eps: f32) = normalise_heads_body;
}

#[inline(always)]
fn normalise_heads_body<I: Isa>(x: &mut [f32], weight: &[f32], eps: f32) {
    for head in x.chunks_exact_mut(weight.len()) {
        let scale = inverse_rms::<I>(head, eps);
        for (x, &weight) in head.iter_mut().zip(weight) {
            *x = *x * scale * weight;
        }
    }
}

/// Elements of a token, `H * head_dim`.
fn checked_row_len(x: &[f32], positions: &[u32], table: &RopeTable) -> usize {
    let row_len = x.len() / positions.len().max(1);
    assert!(
        row_len * positions.len() == x.len() && row_len.is_multiple_of(2 * table.half),
        "x of {} elements is not [{}, H, {}]",
        x.len(),
        positions.len(),
        2 * table.half
    );
    if let Some(&last) = positions.iter().max() {
        let end = table.max_positions();
        assert!((last as usize) < end, "position {last} is past the table of {end} positions");
    }
    row_len
}

multiversion! {
    fn rotate_rows(x: &mut [f32], positions: &[u32], table: &RopeTable, direction: f32) = rotate_rows_body;
}

#[inline(always)]
fn rotate_rows_body<I: Isa>(x: &mut [f32], positions: &[u32], table: &RopeTable, direction: f32) {
    let half = table.half;
    for (row, &position) in x.chunks_exact_mut(x.len() / positions.len()).zip(positions) {
        let angles = position as usize * half..(position as usize + 1) * half;
        let (cos, sin) = (&table.cos[angles.clone()], &table.sin[angles]);
        for head in row.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                let sin = direction * sin;
                (*a, *b) = (I::mul_add(*a, cos, -(*b * sin)), I::mul_add(*b, cos, *a * sin));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::*;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 1.7).sin() * 3.0).collect()
    }

    #[test]
    fn position_zero_changes_nothing_and_position_one_turns_by_one_radian() {
        let table = RopeTable::new(10_000.0, 2, 2);
        let mut x = [3.0, 4.0, 3.0, 4.0];
        rope(&mut x, &[0, 1], &table);
        assert_eq!(x[..2], [3.0, 4.0]);
        let (sin, cos) = 1.0_f32.sin_cos();
        assert!((x[2] - (3.0 * cos - 4.0 * sin)).abs() < 1e-6);
        assert!((x[3] - (4.0 * cos + 3.0 * sin)).abs() < 1e-6);
    }

    /// `10000^(2i / 8)` is 1, 10, 100, 1000: reciprocal and angle are then rounded to f32, as in torch.
    #[test]
    fn angles_are_rounded_to_f32_before_the_sine() {
        let table = RopeTable::new(10_000.0, 8, 30_001);
        for (i, frequency) in [1.0, 0.1, 0.01, 0.001_f32].into_iter().enumerate() {
            for position in [1_u16, 7, 30_000] {
                let (sin, cos) = f64::from(f32::from(position) * frequency).sin_cos();
                let at = usize::from(position) * 4 + i;
                assert_eq!((table.sin[at], table.cos[at]), (sin as f32, cos as f32));
            }
        }
    }

    proptest! {
        #[test]
        fn every_pair_is_turned_by_its_angle(half in 1_usize..65, heads in 1_usize..4, first in 0_u32..500) {
            let table = RopeTable::new(1e6, 2 * half, 600);
            let positions = [first, 599, 0, first + 1];
            let before = wave(4 * heads * 2 * half);
            let mut after = before.clone();
            rope(&mut after, &positions, &table);
            for (i, (before, after)) in before.chunks(2 * half).zip(after.chunks(2 * half)).enumerate() {
                for j in 0..half {
                    let angle = f64::from(positions[i / heads]) * 1e6_f64.powf(-(j as f64) / half as f64);
                    let (sin, cos) = angle.sin_cos();
                    let (a, b) = (f64::from(before[j]), f64::from(before[half + j]));
                    // An f32 angle of up to 600 radians is off by 2^-15.
                    prop_assert!((f64::from(after[j]) - (a * cos - b * sin)).abs() < 4e-4);
                    prop_assert!((f64::from(after[half + j]) - (b * cos + a * sin)).abs() < 4e-4);
                }
            }
        }

        #[test]
        fn a_token_is_turned_the_same_alone_and_among_others(half in 1_usize..65, n_tokens in 1_u32..30) {
            let table = RopeTable::new(1e4, 2 * half, 100);
            let positions: Vec<u32> = (0..n_tokens).map(|t| t * 37 % 100).collect();
            let mut all = wave(positions.len() * 4 * half);
            let mut alone = all.clone();
            rope(&mut all, &positions, &table);
            for (row, position) in alone.chunks_mut(4 * half).zip(&positions) {
                rope(row, std::slice::from_ref(position), &table);
            }
            prop_assert_eq!(all, alone);
        }
    }

    #[test]
    fn norm_and_rope_at_once_have_the_bits_of_one_after_the_other() {
        for half in [1, 8, 16, 33] {
            let (table, positions) = (RopeTable::new(1e4, 2 * half, 100), [7, 99, 0, 50, 12]);
            let weight: Vec<f32> = wave(2 * half).iter().map(|x| x + 4.0).collect();
            let mut at_once = wave(5 * 3 * 2 * half);
            let mut expected = vec![0.0; at_once.len()];
            crate::rms_norm::rms_norm(&at_once, &weight, 1e-6, &mut expected);
            rope(&mut expected, &positions, &table);
            norm_rope(&mut at_once, (&weight, 1e-6), &positions, &table);
            assert_eq!(at_once, expected);
        }
    }

    #[test]
    fn a_position_past_the_table_is_named() {
        let table = RopeTable::new(1e4, 4, 8);
        let panic = std::panic::catch_unwind(|| rope(&mut [0.0; 8], &[0, 8], &table)).unwrap_err();
        assert_eq!(*panic.downcast::<String>().unwrap(), "position 8 is past the table of 8 positions");
    }

    #[test]
    fn the_gradient_turns_back() {
        let table = RopeTable::new(1e4, 6, 50);
        let mut y = wave(24);
        rope(&mut y, &[3, 49], &table);
        // The gradient of sum(y^2) / 2 is x itself, because a rotation keeps lengths.
        rope_backward(&mut y, &[3, 49], &table);
        assert!(y.iter().zip(wave(24)).all(|(grad, x)| (grad - x).abs() < 1e-5));
    }
}
