//! Discrete-event simulation of the scheduler in virtual time: a load of requests with their clients, a model of the
//! engine's speed, and a model of the prefix cache drive the same scheduler as a server does.

mod blocks;
mod load;
mod measure;
mod results;
mod run;
#[cfg(test)]
mod tests;

pub use blocks::{BlockCache, Head};
pub use load::{Arrival, Arrivals, Client, Lengths, Load};
pub use measure::{Histogram, Series};
pub use results::{KeyResults, Results, SERIES};
pub use run::{Machine, Setup, simulate};
