//! Rules for the memory of all models.

use tokio::sync::Semaphore;

/// Rules for the memory of all models.
#[derive(Debug)]
pub struct Residency {
    /// Held while a model is loaded.
    pub loads: tokio::sync::Mutex<()>,
    /// Places for requests that wait until a model is loaded.
    pub places: Semaphore,
    /// Memory for all models in bytes; `None` if it is not known.
    pub budget: Option<u64>,
}

impl Residency {
    /// Creates the rules: at most `waiting` requests wait for models, which together get `budget` bytes.
    pub fn new(waiting: usize, budget: Option<u64>) -> Residency {
        Residency { loads: tokio::sync::Mutex::default(), places: Semaphore::new(waiting), budget }
    }
}
