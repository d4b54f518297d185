//! Cost of a step: a line through the measured (rows, time) of recent steps.
//!
//! Time = base + rows · slope, by least squares with weights that decay by [`KEEP`] with each step. As long as all
//! steps had about the same number of rows, the slope is unknown, and time is taken as proportional to rows. This
//! estimate is too high for larger steps, so the budget grows from below.

use super::Micros;

/// Factor of the weight of earlier measurements with each new one.
const KEEP: f64 = 0.98;

/// Range of the cost of an output token, in prompt tokens.
const OUTPUT_WEIGHT: (f64, f64) = (1.0, 16.0);

/// Cost of an output token before both kinds of steps are measured.
const INITIAL_OUTPUT_WEIGHT: f64 = 2.0;

/// Measured costs of steps.
#[derive(Debug, Clone, Default)]
pub struct CostModel {
    weight: f64,
    rows: f64,
    time: f64,
    rows_rows: f64,
    rows_time: f64,
    /// Time per row of steps that only decode.
    decode: Option<f64>,
}

impl CostModel {
    /// Adds a measurement.
    pub fn observe(&mut self, rows: u32, decode_only: bool, time: Micros) {
        let (x, y) = (f64::from(rows.max(1)), time as f64);
        let add = |sum: &mut f64, value: f64| *sum = *sum * KEEP + value;
        add(&mut self.weight, 1.0);
        add(&mut self.rows, x);
        add(&mut self.time, y);
        add(&mut self.rows_rows, x * x);
        add(&mut self.rows_time, x * y);
        if decode_only {
            let new = y / x;
            self.decode = Some(self.decode.map_or(new, |old| old * 0.9 + new * 0.1));
        }
    }

    /// Returns base and slope of the line in microseconds, if a step was measured.
    fn line(&self) -> Option<(f64, f64)> {
        if self.weight == 0.0 {
            return None;
        }
        let (x, y) = (self.rows / self.weight, self.time / self.weight);
        let variance = self.rows_rows / self.weight - x * x;
        let slope = (self.rows_time / self.weight - x * y) / variance;
        let base = y - slope * x;
        let known = variance > 1.0 && slope > 0.0 && base >= 0.0;
        Some(if known { (base, slope) } else { (0.0, (y / x).max(1e-3)) })
    }

    /// Returns the number of rows predicted to take at most `time`; without a measurement, `None`.
    pub fn rows_within(&self, time: Micros) -> Option<u32> {
        let (base, slope) = self.line()?;
        Some(((time as f64 - base) / slope).clamp(0.0, f64::from(u32::MAX)) as u32)
    }

    /// Returns the number of rows that take this time, without the base of a step; 0 before a measurement.
    pub fn rows_of(&self, time: Micros) -> f64 {
        self.line().map_or(0.0, |(_, slope)| time as f64 / slope)
    }

    /// Returns the cost of an output token in prompt tokens.
    pub fn output_weight(&self) -> f64 {
        match (self.decode, self.line()) {
            (Some(decode), Some((_, slope))) => (decode / slope).clamp(OUTPUT_WEIGHT.0, OUTPUT_WEIGHT.1),
            _ => INITIAL_OUTPUT_WEIGHT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_through_measurements_is_found() {
        let mut model = CostModel::default();
        assert_eq!(model.rows_within(200_000), None);
        model.observe(10, true, 30_000);
        assert_eq!(model.rows_within(60_000), Some(20), "proportional while one number of rows was seen");
        for rows in [1, 8, 32, 200, 512, 64] {
            model.observe(rows, rows < 64, 10_000 + 2_000 * u64::from(rows));
        }
        assert_eq!(model.rows_within(210_000), Some(100));
        assert_eq!(model.rows_within(5_000), Some(0));
        assert!((1.0..=16.0).contains(&model.output_weight()));
    }

    #[test]
    fn a_machine_that_becomes_slower_is_noticed() {
        let mut model = CostModel::default();
        let mut run = |factor: u64| {
            (0..400).for_each(|i| model.observe(16 + i % 64, false, 1_000 * factor * u64::from(16 + i % 64)));
            model.rows_within(100_000).unwrap()
        };
        let (before, after) = (run(1), run(4));
        assert!((95..=100).contains(&before) && (23..=27).contains(&after), "{before} {after}");
    }
}
