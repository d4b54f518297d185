//! GPTQ error compensation: the rounding error of a weight is compensated by the weights that are rounded after it.
//!
//! The error of the outputs of one row is `e H e^T`, with `e = w - q` and H the mean products of the inputs (GPTQ,
//! Frantar et al. 2022, in the form of Chee et al. 2023). With `H = U D U^T`, U unit upper triangular, it is the sum
//! over columns k of `D_k (e_k + sum_{j<k} e_j U_jk)^2`. Columns are therefore rounded one after the other, each to
//! the code nearest to `w_k + sum_{j<k} e_j U_jk`. Scales are fixed before (static groups), so columns can be
//! processed in any order, here by decreasing activity, and every scheme is supported.
//!
//! A single pass cannot correct early columns afterwards. Sweeps of coordinate descent therefore follow: block by
//! block, the gradient `e H` is computed, the scale of the block moves to its optimum for the codes, and each code
//! moves to its optimum for all the others. No step increases the error.
//!
//! Rows are independent: sixteen of them are processed together, one per lane, and the result of a row does not
//! depend on the other rows.

mod correlations;
mod tile;

pub(super) use correlations::{Correlations, Elimination, Hessian};
pub(super) use tile::{Products, Spread, Tile};
