//! Sampling parameters as users give them: each may be absent.

use super::dry::Dry;
use super::mirostat::{Mirostat, Version};
use super::settings::{Sampling, Xtc};
use super::stage::Order;

/// Sampling parameters of which each may be absent. Their meanings are those of [`Sampling`].
#[allow(missing_docs)]
#[derive(Debug, Clone, Default)]
pub struct SamplingFields {
    pub temperature: Option<f64>,
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub typical_p: Option<f64>,
    pub xtc_probability: Option<f64>,
    pub xtc_threshold: Option<f64>,
    pub repeat_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub repeat_last_n: Option<Option<usize>>,
    pub dry_multiplier: Option<f64>,
    pub dry_base: Option<f64>,
    pub dry_allowed_length: Option<usize>,
    pub dry_last_n: Option<Option<usize>>,
    /// `Some(None)` turns Mirostat off.
    pub mirostat: Option<Option<Version>>,
    pub mirostat_tau: Option<f64>,
    pub mirostat_eta: Option<f64>,
    pub order: Option<Order>,
    pub seed: Option<u64>,
}

impl SamplingFields {
    /// Returns `plain` with the parameters that are there. Without a temperature, a parameter that removes tokens draws
    /// from the others with temperature 1, if `plain` is greedy.
    pub fn over(self, plain: Sampling) -> Sampling {
        let filters = [self.top_p, self.min_p, self.typical_p, self.xtc_probability];
        let draws = self.top_k.is_some() || self.mirostat.flatten().is_some() || filters.iter().any(Option::is_some);
        let unnamed = if draws && plain.temperature == 0.0 { 1.0 } else { plain.temperature };
        let mirostat = self.mirostat.unwrap_or(plain.mirostat.as_ref().map(|mirostat| mirostat.version));
        let (tau, eta) = plain.mirostat.as_ref().map_or((Mirostat::TAU, Mirostat::ETA), |m| (m.tau, m.eta));
        let (tau, eta) = (self.mirostat_tau.unwrap_or(tau), self.mirostat_eta.unwrap_or(eta));
        Sampling {
            temperature: self.temperature.unwrap_or(unnamed),
            top_k: self.top_k.unwrap_or(plain.top_k),
            top_p: self.top_p.unwrap_or(plain.top_p),
            min_p: self.min_p.unwrap_or(plain.min_p),
            typical_p: self.typical_p.unwrap_or(plain.typical_p),
            xtc: Xtc {
                probability: self.xtc_probability.unwrap_or(plain.xtc.probability),
                threshold: self.xtc_threshold.unwrap_or(plain.xtc.threshold),
            },
            repeat_penalty: self.repeat_penalty.unwrap_or(plain.repeat_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(plain.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(plain.frequency_penalty),
            repeat_last_n: self.repeat_last_n.unwrap_or(plain.repeat_last_n),
            dry: Dry {
                multiplier: self.dry_multiplier.unwrap_or(plain.dry.multiplier),
                base: self.dry_base.unwrap_or(plain.dry.base),
                allowed_length: self.dry_allowed_length.unwrap_or(plain.dry.allowed_length),
                last_n: self.dry_last_n.unwrap_or(plain.dry.last_n),
                ..plain.dry
            },
            mirostat: mirostat.map(|version| Mirostat { version, tau, eta }),
            order: self.order.unwrap_or(plain.order),
            seed: self.seed.unwrap_or(plain.seed),
            ..plain
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_that_are_there_replace_others_and_draw_from_greedy_ones() {
        let warm = Sampling { temperature: 0.5, top_k: 3, seed: 7, ..Sampling::default() };
        assert_eq!(SamplingFields::default().over(warm.clone()), warm);
        let some = SamplingFields { top_p: Some(0.9), repeat_last_n: Some(Some(4)), ..SamplingFields::default() };
        let expected = Sampling { top_p: 0.9, repeat_last_n: Some(4), ..warm.clone() };
        assert_eq!(some.clone().over(warm), expected);
        assert_eq!(some.over(Sampling::default()).temperature, 1.0);
        let greedy = SamplingFields { temperature: Some(0.0), top_k: Some(5), ..SamplingFields::default() };
        assert_eq!(greedy.over(Sampling::default()).temperature, 0.0);
    }

    #[test]
    fn mirostat_can_be_turned_off_and_keeps_its_numbers() {
        let plain = Sampling {
            mirostat: Some(Mirostat { version: Version::One, tau: 3.0, eta: 0.2 }),
            temperature: 1.0,
            ..Sampling::default()
        };
        let off = SamplingFields { mirostat: Some(None), ..SamplingFields::default() };
        assert_eq!(off.over(plain.clone()).mirostat, None);
        let two = SamplingFields { mirostat: Some(Some(Version::Two)), mirostat_eta: Some(0.1), ..Default::default() };
        assert_eq!(two.over(plain).mirostat, Some(Mirostat { version: Version::Two, tau: 3.0, eta: 0.1 }));
    }
}
