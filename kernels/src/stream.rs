//! Reading memory as fast as the machine can: what kernels that wait for memory are measured against.

use crate::isa::{Isa, multiversion};
use crate::parallel;

/// Words of a vector register, times registers enough to hide the latency of an addition.
const LANES: usize = 64;

/// The sum of all `words`, wrapping, read once by all threads: each its own run of consecutive words.
#[must_use]
pub fn read(words: &[u64]) -> u64 {
    let run = words.len().div_ceil(rayon::current_num_threads()).max(LANES);
    let mut sums = vec![0; words.len().div_ceil(run)];
    parallel::for_rows(&mut sums, 1, run, |first, sums| {
        for (i, sum) in sums.iter_mut().enumerate() {
            let start = (first + i) * run;
            *sum = sum_words(&words[start..words.len().min(start + run)]);
        }
    });
    sums.into_iter().fold(0, u64::wrapping_add)
}

multiversion! {
    fn sum_words(words: &[u64]) -> u64 = sum_words_body;
}

#[inline(always)]
fn sum_words_body<I: Isa>(words: &[u64]) -> u64 {
    let mut sums = [0_u64; LANES];
    let (lines, rest) = words.as_chunks::<LANES>();
    for line in lines {
        for (sum, &word) in sums.iter_mut().zip(line) {
            *sum = sum.wrapping_add(word);
        }
    }
    sums.iter().chain(rest).fold(0, |sum, &word| sum.wrapping_add(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_pool;

    #[test]
    fn every_word_is_read_once_whatever_the_split() {
        for n in [0, 1, 63, 64, 65, 1000, 1 << 20] {
            let words: Vec<u64> = (1..=n).collect();
            for threads in [1, 2, 3] {
                assert_eq!(
                    in_pool(threads, || read(&words)),
                    n * (n + 1) / 2,
                    "{n} words, {threads} threads"
                );
            }
        }
        assert_eq!(read(&[u64::MAX; 3]), u64::MAX - 2, "it wraps");
    }
}
