//! Error compensation: a weight that could not be stored exactly is made up for by those that follow.
//!
//! The error of the outputs of one row is `e H e^T`, with `e = w - q` and H the mean products of the inputs (GPTQ,
//! Frantar et al. 2022, in the form of Chee et al. 2023). With `H = U D U^T`, U unit upper triangular, it is the sum
//! over columns k of `D_k (e_k + sum_{j<k} e_j U_jk)^2`: so columns are rounded one after the other, each to the code
//! nearest to `w_k + sum_{j<k} e_j U_jk`. Scales are fixed before (static groups), so columns can go in any order, the
//! most active ones first, and every scheme can be written.
//!
//! Rounding in one pass cannot take back what it did to early columns. So sweeps of coordinate descent follow: block by
//! block, the gradient `e H` is computed, the scale of the block moves to its optimum for the codes, and each code to
//! the optimum for all the others. No step makes the error larger.
//!
//! Rows are independent: sixteen of them go together, one in each lane, and their result does not depend on their
//! company.

mod correlations;
mod tile;

pub(super) use correlations::{Correlations, Hessian};
pub(super) use tile::Tile;
