//! Rotation of heads by a Hadamard matrix, which spreads large values of few channels over all channels before they are
//! rounded to 4 bits.
//!
//! The matrix of order `n`, a power of two, has the elements `1/sqrt(n)` and `-1/sqrt(n)`: `H(1) = [1]`, and `H(2n)`
//! consists of `H(n)` in three quarters and `-H(n)` in the last, divided by `sqrt(2)`. It is symmetric and orthonormal,
//! so it is its own inverse, and products of rotated queries with rotated keys equal those of the originals. A head
//! whose size is not a power of two is rotated in blocks of the largest power of two that divides it.

/// Smallest block of a head that consists of several blocks. In smaller ones, a large value is hardly spread.
const SMALLEST_BLOCK: usize = 16;

/// Returns the order of the matrix for heads of this size: the largest power of two that divides it.
pub fn order(head_dim: usize) -> usize {
    1 << head_dim.trailing_zeros().min(usize::BITS - 1)
}

/// Returns true if heads of this size can be rotated by the matrix of this order.
pub fn fits(head_dim: usize, order: usize) -> bool {
    head_dim == order || order >= SMALLEST_BLOCK
}

/// Multiplies each block of a head by the matrix of this order. The result is the same bits on every machine:
/// `log2(order)` rounds of sums and differences, then one multiplication.
#[inline(always)]
pub fn rotate(head: &mut [f32], order: usize) {
    let factor = 1.0 / (order as f32).sqrt();
    for block in head.chunks_exact_mut(order) {
        let mut half = 1;
        while half < order {
            for pair in block.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for i in 0..half {
                    (low[i], high[i]) = (low[i] + high[i], low[i] - high[i]);
                }
            }
            half *= 2;
        }
        for value in block {
            *value *= factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    /// Returns an element of the matrix by its definition: the sign is the parity of the common bits of row and column.
    fn element(order: usize, row: usize, column: usize) -> f64 {
        let sign = if (row & column).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        sign / (order as f64).sqrt()
    }

    #[test]
    fn rotating_multiplies_each_block_by_the_hadamard_matrix() {
        let mut rng = Rng::new(3);
        for dim in [1, 2, 8, 16, 64, 80, 96, 128, 192, 256, 1024] {
            let head: Vec<f32> = (0..dim).map(|_| rng.next_normal() as f32).collect();
            let mut rotated = head.clone();
            let order = order(dim);
            rotate(&mut rotated, order);
            for (i, value) in rotated.iter().enumerate() {
                let of_block = &head[i / order * order..][..order];
                let terms = of_block.iter().enumerate().map(|(c, v)| element(order, i % order, c) * f64::from(*v));
                let expected: f64 = terms.sum();
                assert!((f64::from(*value) - expected).abs() < 1e-5, "{dim}: {i} is {value}, not {expected}");
            }
        }
    }

    #[test]
    fn rotating_twice_returns_the_head_and_lengths_stay() {
        let mut rng = Rng::new(4);
        for dim in [8, 48, 64, 80, 256] {
            let head: Vec<f32> = (0..dim).map(|_| rng.next_normal() as f32).collect();
            let mut rotated = head.clone();
            rotate(&mut rotated, order(dim));
            let square = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
            assert!((square(&rotated) / square(&head) - 1.0).abs() < 1e-5);
            rotate(&mut rotated, order(dim));
            assert!(rotated.iter().zip(&head).all(|(a, b)| (a - b).abs() < 1e-5), "{dim}");
        }
    }

    #[test]
    fn heads_are_rotated_in_powers_of_two_from_16_on() {
        let cases = [(8, Some(8)), (64, Some(64)), (80, Some(16)), (96, Some(32)), (192, Some(64))];
        for (dim, expected) in cases.into_iter().chain([(20, None), (24, None), (25, None), (72, None)]) {
            assert_eq!(Some(order(dim)).filter(|order| fits(dim, *order)), expected, "{dim}");
        }
    }
}
