//! Speculation planner: chooses the number of draft tokens with the highest expected tokens per second.
//!
//! A step that reads `n` tokens takes longer than one that reads a single token, and draft tokens may be rejected. Both
//! are measured continuously: [`Cost`] holds the time of steps of each size, [`Trust`] the fraction of draft tokens
//! that was accepted. Where drafting does not save time, it stops. Only the number of tokens read at once changes,
//! never the generated tokens.

use std::time::Duration;

/// Largest number of tokens read in one step.
pub const MAX_ROWS: usize = 64;
/// Largest number of tokens drafted for one text.
pub const MAX_AHEAD: usize = 31;
/// Minimum factor by which a plan must exceed the expected speed without draft tokens, because measurements are
/// uncertain.
const MARGIN: f64 = 1.03;
/// Assumed cost of each further token in steps larger than any that was measured, as a fraction of a step of one token.
/// It is low, so that a first attempt is made and measured.
const GUESSED_SLOPE: f64 = 0.04;

/// Estimate of the draft tokens of one text before they are drafted.
#[derive(Debug, Clone, Copy)]
pub struct Estimate {
    /// Probability that a draft token is accepted if those before it are.
    pub likely: f64,
    /// Largest number of draft tokens.
    pub room: usize,
    /// Whether drafting takes no time.
    pub is_free: bool,
}

/// Estimated time of a step that reads `rows` tokens, in seconds: `speed * shape[rows]`, where `speed` is the time of a
/// step of one token. `speed` is adapted quickly, because texts grow and other programs change the memory bandwidth
/// that is left within seconds; `shape` is adapted slowly.
#[derive(Debug, Clone)]
pub struct Cost {
    speed: f64,
    /// By number of tokens, the time of a step relative to that of a step of one token; `None` = never measured.
    shape: Vec<Option<f64>>,
    /// Seconds to draft one more token for all texts. Before the first step is measured, it holds this time as a
    /// multiple of the time of a step of one token.
    draft: f64,
    /// Fixed number of tokens to draft, if set.
    always: Option<usize>,
}

impl Cost {
    /// Creates an estimate without measurements. A draft token is assumed to cost `draft` steps of one token.
    pub fn new(draft: f64) -> Cost {
        let mut shape = vec![None; MAX_ROWS + 1];
        shape[1] = Some(1.0);
        Cost { speed: 0.0, shape, draft, always: None }
    }

    /// Makes [`Cost::plan`] return `ahead` draft tokens for every text (fewer where a text has less room), even if that
    /// is slower.
    pub fn always(mut self, ahead: usize) -> Cost {
        self.always = Some(ahead);
        self
    }

    /// Records the time of a step of `rows` tokens.
    pub fn observe(&mut self, rows: usize, time: Duration) {
        // Larger batches are not measured because no tokens are drafted for them.
        let Some(shape) = self.shape.get(rows).copied() else { return };
        let seconds = time.as_secs_f64();
        if self.speed == 0.0 {
            self.draft *= seconds;
            self.speed = seconds / self.relative(rows);
        }
        match shape {
            None => self.shape[rows] = Some(seconds / self.speed),
            Some(shape) => {
                // A single slow step has limited influence.
                let seconds = seconds.min(2.0 * self.speed * shape);
                self.speed += 0.2 * (seconds / shape - self.speed);
                self.shape[rows] = Some(if rows == 1 { 1.0 } else { shape + 0.1 * (seconds / self.speed - shape) });
            }
        }
    }

    /// Records the time of drafting one token for all texts.
    pub fn observe_draft(&mut self, time: Duration) {
        self.draft += 0.2 * (time.as_secs_f64() - self.draft);
    }

    /// Returns the cost of `rows` tokens relative to one token: measured, or interpolated between the nearest measured
    /// sizes, or extrapolated beyond them.
    fn relative(&self, rows: usize) -> f64 {
        let known = |n: &usize| self.shape[*n].map(|shape| (*n, shape));
        let below = (1..=rows).rev().find_map(|n| known(&n));
        let above = (rows..=MAX_ROWS).find_map(|n| known(&n));
        let (below, shape) = below.unwrap_or((1, 1.0));
        let slope = match above {
            Some((above, higher)) if above > below => (higher - shape) / (above - below) as f64,
            _ => GUESSED_SLOPE,
        };
        shape + slope * (rows - below) as f64
    }

    fn seconds(&self, rows: usize, ahead: usize) -> f64 {
        self.speed * self.relative(rows) + self.draft * ahead as f64
    }

    /// Returns the number of tokens to draft for each text.
    pub fn plan(&self, texts: &[Estimate]) -> Vec<usize> {
        match self.always {
            Some(ahead) => texts.iter().map(|text| ahead.min(text.room)).collect(),
            None => self.best(texts).0,
        }
    }

    /// Returns the better of two estimates about the same text, alone in its step; the first one if they are equal.
    pub fn better(&self, first: Estimate, second: Estimate) -> Estimate {
        let speed = |estimate: Estimate| match self.always {
            Some(_) if estimate.room == 0 => 0.0,
            Some(_) => estimate.likely,
            None => self.best(&[estimate]).1,
        };
        if speed(second) > speed(first) { second } else { first }
    }

    /// Returns the numbers of draft tokens with the most expected tokens per second, and these.
    fn best(&self, texts: &[Estimate]) -> (Vec<usize>, f64) {
        let mut ahead = vec![0; texts.len()];
        let mut best = (ahead.clone(), MARGIN * texts.len() as f64 / self.seconds(texts.len().min(MAX_ROWS), 0));
        if texts.iter().all(|text| text.room == 0) {
            return best;
        }
        let mut gains: Vec<f64> = texts.iter().map(|text| text.likely).collect();
        let (mut expected, mut dear) = (texts.len() as f64, 0);
        for rows in texts.len() + 1..=MAX_ROWS {
            let open = (0..texts.len()).filter(|i| ahead[*i] < texts[*i].room.min(MAX_AHEAD));
            let Some(next) = open.max_by(|a, b| gains[*a].total_cmp(&gains[*b])) else { break };
            ahead[next] += 1;
            expected += gains[next];
            gains[next] *= texts[next].likely;
            if !texts[next].is_free {
                dear = dear.max(ahead[next]);
            }
            let rate = expected / self.seconds(rows, dear);
            if rate > best.1 {
                best = (ahead.clone(), rate);
            }
        }
        best
    }
}

/// Acceptance rate of draft tokens, estimated from about the last thirty that were verified.
#[derive(Debug, Clone, Copy)]
pub struct Trust {
    hits: f64,
    trials: f64,
}

impl Trust {
    /// Creates an estimate that starts at the rate `likely`, with the weight of two verified draft tokens.
    pub fn new(likely: f64) -> Trust {
        Trust { hits: 2.0 * likely, trials: 2.0 }
    }

    /// Returns the fraction of draft tokens that is accepted.
    pub fn likely(&self) -> f64 {
        self.hits / self.trials
    }

    /// Records that the first `right` of `ahead` consecutive draft tokens were accepted. Those after a rejected one
    /// were not compared.
    pub fn observe(&mut self, ahead: usize, right: usize) {
        for i in 0..ahead.min(right + 1) {
            self.hits = 0.97 * self.hits + f64::from(i < right);
            self.trials = 0.97 * self.trials + 1.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(likely: f64, room: usize) -> Estimate {
        Estimate { likely, room, is_free: true }
    }

    /// Returns a function from the tokens of a step to its time: 10 ms, and `slope` times that for each further token.
    fn machine(slope: f64) -> impl Fn(usize) -> Duration {
        move |rows| Duration::from_secs_f64(0.01 * (1.0 + slope * (rows - 1) as f64))
    }

    /// Returns the number of tokens planned for one text after some steps on this machine.
    fn settled(likely: f64, slope: f64) -> usize {
        let mut cost = Cost::new(0.0);
        let time = machine(slope);
        cost.observe(1, time(1));
        for _ in 0..40 {
            let rows = 1 + cost.plan(&[estimate(likely, 40)])[0];
            cost.observe(rows, time(rows));
        }
        cost.plan(&[estimate(likely, 40)])[0]
    }

    #[test]
    fn more_is_drafted_the_likelier_and_the_cheaper_it_is() {
        let cheap = [0.0, 0.3, 0.8, 0.99].map(|likely| settled(likely, 0.02));
        assert!(cheap[0] == 0 && cheap.is_sorted() && cheap[3] > 20, "{cheap:?}");
        let dear = [0.0, 0.3, 0.8, 0.99].map(|likely| settled(likely, 0.4));
        assert!(dear[1] == 0 && dear[3] > 0 && dear[3] < cheap[3], "{dear:?}");
        assert_eq!(settled(0.99, 1.0), 0);
    }

    #[test]
    fn a_slower_machine_changes_no_plan() {
        let (mut cost, time) = (Cost::new(0.0), machine(0.1));
        for rows in (1..=32).cycle().take(2000) {
            cost.observe(rows, time(rows));
        }
        let before = cost.plan(&[estimate(0.8, 40)]);
        (0..50).for_each(|_| cost.observe(8, time(8) * 2));
        assert_eq!(cost.plan(&[estimate(0.8, 40)]), before);
    }

    #[test]
    fn rows_go_to_the_texts_whose_draft_tokens_are_accepted() {
        let (mut cost, time) = (Cost::new(0.0), machine(0.05));
        for rows in (1..=MAX_ROWS).cycle().take(1000) {
            cost.observe(rows, time(rows));
        }
        let plan = cost.plan(&[(0.0, 40), (0.9, 40), (0.9, 2), (0.5, 0)].map(|(likely, room)| estimate(likely, room)));
        assert!(plan[0] == 0 && plan[1] > 4 && plan[2] == 2 && plan[3] == 0, "{plan:?}");
        cost.observe(MAX_ROWS + 1, time(MAX_ROWS + 1));
        assert_eq!(cost.plan(&[estimate(0.9, 40); MAX_ROWS + 1]), [0; MAX_ROWS + 1]);
    }

    #[test]
    fn tokens_that_cost_more_than_they_save_are_not_drafted() {
        let mut cost = Cost::new(1.0);
        cost.observe(1, Duration::from_millis(10));
        assert_eq!(cost.plan(&[Estimate { is_free: false, ..estimate(0.9, 40) }]), [0]);
        (0..100).for_each(|_| cost.observe_draft(Duration::from_micros(10)));
        assert_ne!(cost.plan(&[Estimate { is_free: false, ..estimate(0.9, 40) }]), [0]);
    }

    #[test]
    fn trust_follows_what_happens() {
        let mut trust = Trust::new(0.5);
        (0..50).for_each(|_| trust.observe(4, 4));
        assert!(trust.likely() > 0.95);
        (0..50).for_each(|_| trust.observe(4, 0));
        assert!(trust.likely() < 0.25, "{}", trust.likely());
    }
}
