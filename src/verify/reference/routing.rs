//! Routing of tokens to experts: which experts compute a token, and with which weights.

use super::family::Family;
use super::family::Family::{
    DeepseekV2, DeepseekV3, Gemma4, Glm4Moe, Glm4MoeLite, GptOss, GraniteHybrid, Lfm2Moe, MiniMaxM2, Mistral4, Mixtral,
    NemotronH, Qwen3_5Moe, Qwen3Moe, Qwen3Next, Qwen3VlMoe,
};
use super::fields::Fields;
use super::norm::{sigmoid, softmax};
use crate::error::{Error, Result};
use candle_core::{DType, Tensor};

/// Parameters of the choice of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Number of experts; 0 if the model has none.
    pub count: usize,
    /// Number of experts that compute a token.
    pub chosen: usize,
    /// True if the weights of the selected experts sum to one before they are multiplied by `factor`.
    pub normalized: bool,
    /// True if scores are sigmoids of the logits, with a bias for the choice, instead of a softmax.
    pub sigmoid: bool,
    pub groups: Option<Groups>,
    /// Factor of the weights.
    pub factor: f64,
    /// True if logits are computed in f32 whatever the type of the model.
    pub wide: bool,
    /// True if an MLP that computes every token is added.
    pub shared: bool,
}

/// Groups of experts, of which only the best are open to a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Groups {
    pub count: usize,
    pub chosen: usize,
    /// Number of scores whose sum is the score of their group, from the largest on.
    pub best: usize,
}

/// Expert that computes a token.
#[derive(Debug, Clone, Copy)]
pub struct Choice {
    pub token: usize,
    pub expert: usize,
    pub weight: f64,
}

/// Routing without experts.
const NONE: Routing = Routing {
    count: 0,
    chosen: 0,
    normalized: true,
    sigmoid: false,
    groups: None,
    factor: 1.0,
    wide: false,
    shared: false,
};

/// Defaults of a family that followed DeepSeek.
struct Usual {
    count: usize,
    chosen: usize,
    groups: (usize, usize),
    factor: f64,
}

impl Routing {
    pub(super) fn read(family: Family, json: Fields<'_>) -> Result<Routing> {
        let usual = |count, chosen, groups, factor| Usual { count, chosen, groups, factor };
        let routing = match family {
            Mixtral => Routing { count: json.size("num_local_experts")?.unwrap_or(8), chosen: 2, ..NONE },
            Qwen3Moe | Qwen3VlMoe => {
                let is_vl = family == Qwen3VlMoe;
                let (usual, chosen) = if is_vl { (60, 4) } else { (128, 8) };
                let count = json.size("num_experts")?.or(json.size("num_local_experts")?).unwrap_or(usual);
                // transformers ignores norm_topk_prob in Qwen3-VL-MoE.
                Routing { count, chosen, normalized: is_vl || json.flag("norm_topk_prob", false)?, ..NONE }
            }
            MiniMaxM2 => {
                let count = json.size("num_local_experts")?.or(json.size("num_experts")?).unwrap_or(256);
                Routing { count, chosen: 8, sigmoid: true, ..NONE }
            }
            Lfm2Moe => Routing {
                count: json.size("num_experts")?.unwrap_or(32),
                chosen: 4,
                normalized: json.flag("norm_topk_prob", true)?,
                sigmoid: true,
                factor: json.number("routed_scaling_factor")?.unwrap_or(1.0),
                ..NONE
            },
            GraniteHybrid => Routing { shared: true, ..of_granite(json)? },
            Qwen3_5Moe => beside_gated(json, 256, 8)?,
            Qwen3Next => Routing { normalized: json.flag("norm_topk_prob", true)?, ..beside_gated(json, 512, 10)? },
            GptOss => {
                let count = json.size("num_local_experts")?.or(json.size("num_experts")?).unwrap_or(128);
                Routing { count, chosen: 4, ..NONE }
            }
            Gemma4 if json.flag("enable_moe_block", false)? => {
                Routing { count: json.required("num_experts")?, chosen: json.required("top_k_experts")?, ..NONE }
            }
            DeepseekV3 => Routing { sigmoid: true, ..deep(json, &usual(256, 8, (8, 4), 2.5))? },
            Glm4Moe => Routing { sigmoid: true, ..deep(json, &usual(128, 8, (1, 1), 1.0))? },
            Glm4MoeLite => Routing { sigmoid: true, ..deep(json, &usual(64, 4, (1, 1), 1.8))? },
            NemotronH => Routing { sigmoid: true, ..deep(json, &usual(0, 8, (1, 1), 1.0))? },
            Mistral4 => Routing { wide: false, ..deep(json, &usual(128, 4, (1, 1), 1.0))? },
            DeepseekV2 => {
                let routing = deep(json, &usual(64, 6, (1, 1), 1.0))?;
                let groups = match json.word("topk_method").unwrap_or("greedy") {
                    "greedy" => None,
                    "group_limited_greedy" => routing.groups.map(|groups| Groups { best: 1, ..groups }),
                    other => {
                        let found = format!("found `{other:.40}`, expected greedy or group_limited_greedy");
                        return Err(Error::unsupported(found).tensor("topk_method"));
                    }
                };
                // transformers ignores norm_topk_prob in this family.
                Routing { groups, normalized: false, ..routing }
            }
            _ => NONE,
        };
        let given = match family {
            Gemma4 => None,
            _ => json.size("num_experts_per_tok")?.or(json.size("experts_per_token")?),
        };
        let routing = Routing { chosen: given.unwrap_or(routing.chosen), ..routing };
        routing.check()?;
        Ok(routing)
    }

    fn check(&self) -> Result<()> {
        let open = match self.groups {
            None => self.count,
            Some(Groups { count, chosen, .. }) => {
                if count == 0 || !self.count.is_multiple_of(count) || chosen == 0 || chosen > count {
                    let found = format!(
                        "found {count} groups of {} experts, of which {chosen} are chosen, expected a divisor",
                        self.count
                    );
                    return Err(Error::corrupt(found).tensor("n_group"));
                }
                self.count / count * chosen
            }
        };
        if self.count > 0 && (self.chosen == 0 || self.chosen > open) {
            let found = format!("found {}, expected 1 to {open}", self.chosen);
            return Err(Error::corrupt(found).tensor("num_experts_per_tok"));
        }
        Ok(())
    }

    /// Chooses the experts of all tokens from logits `(tokens, experts)` and a bias of the experts for the choice.
    pub fn choose(&self, logits: &Tensor, bias: Option<&[f64]>) -> candle_core::Result<Vec<Choice>> {
        let scores = if self.sigmoid { sigmoid(logits)? } else { softmax(logits, None)? };
        let scores = scores.to_dtype(DType::F64)?.to_vec2::<f64>()?;
        let mut choice = Vec::new();
        for (token, scores) in scores.into_iter().enumerate() {
            let mut ranks = scores.clone();
            ranks.iter_mut().zip(bias.into_iter().flatten()).for_each(|(rank, bias)| *rank += bias);
            if let Some(groups) = self.groups {
                groups.close(&mut ranks);
            }
            let mut order: Vec<usize> = (0..ranks.len()).collect();
            order.sort_by(|a, b| ranks[*b].total_cmp(&ranks[*a]));
            order.truncate(self.chosen);
            // A softmax over the selected logits equals these scores divided by their sum.
            let total: f64 = order.iter().map(|expert| scores[*expert]).sum();
            let divisor = if self.normalized { total + 1e-20 } else { 1.0 };
            let weight = |expert: usize| scores[expert] / divisor * self.factor;
            choice.extend(order.into_iter().map(|expert| Choice { token, expert, weight: weight(expert) }));
        }
        Ok(choice)
    }
}

impl Groups {
    /// Sets the ranks of experts outside of the best groups to minus infinity.
    fn close(&self, ranks: &mut [f64]) {
        let size = ranks.len() / self.count;
        let score = |group: &[f64]| -> f64 {
            let mut group = group.to_vec();
            group.sort_by(|a, b| b.total_cmp(a));
            group.iter().take(self.best).sum()
        };
        let scores: Vec<f64> = ranks.chunks(size).map(score).collect();
        let mut order: Vec<usize> = (0..self.count).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        for group in &order[self.chosen..] {
            ranks[group * size..(group + 1) * size].fill(f64::NEG_INFINITY);
        }
    }
}

/// Reads the fields of the experts of Granite 4.
fn of_granite(json: Fields<'_>) -> Result<Routing> {
    Ok(Routing { count: json.size("num_local_experts")?.unwrap_or(8), chosen: 2, ..NONE })
}

/// Reads the fields of experts beside an MLP with a gate.
fn beside_gated(json: Fields<'_>, count: usize, chosen: usize) -> Result<Routing> {
    let shared = json.size("shared_expert_intermediate_size")?.unwrap_or(512) > 0;
    Ok(Routing { count: json.size("num_experts")?.unwrap_or(count), chosen, shared, ..NONE })
}

/// Reads the fields that DeepSeek introduced.
fn deep(json: Fields<'_>, usual: &Usual) -> Result<Routing> {
    let groups = Groups {
        count: json.size("n_group")?.unwrap_or(usual.groups.0),
        chosen: json.size("topk_group")?.unwrap_or(usual.groups.1),
        best: 2,
    };
    Ok(Routing {
        count: json.size("n_routed_experts")?.unwrap_or(usual.count),
        chosen: usual.chosen,
        normalized: json.flag("norm_topk_prob", true)?,
        sigmoid: false,
        groups: Some(groups),
        factor: json.number("routed_scaling_factor")?.unwrap_or(usual.factor),
        wide: true,
        shared: json.size("n_shared_experts")? != Some(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn choose(routing: Routing, logits: &[f32], bias: Option<&[f64]>) -> Vec<(usize, f64)> {
        let logits = Tensor::from_slice(logits, (1, logits.len()), &Device::Cpu).unwrap();
        routing.choose(&logits, bias).unwrap().iter().map(|choice| (choice.expert, choice.weight)).collect()
    }

    #[test]
    fn a_bias_decides_the_choice_but_not_the_weights() {
        let routing = Routing { count: 3, chosen: 2, sigmoid: true, factor: 2.0, ..NONE };
        let found = choose(routing, &[0.0, 0.0, 9.0], Some(&[1.0, 2.0, -9.0]));
        assert_eq!(found, [(1, 1.0), (0, 1.0)]);
    }

    #[test]
    fn only_experts_of_the_best_groups_are_chosen() {
        let groups = |best| Some(Groups { count: 2, chosen: 1, best });
        let routing = Routing { count: 4, chosen: 1, sigmoid: true, ..NONE };
        let logits = [1.0, -9.0, 0.9, 0.8];
        // The first group has the best expert, the second the best two.
        for (best, expert) in [(1, 0), (2, 2)] {
            assert_eq!(choose(Routing { groups: groups(best), ..routing }, &logits, None)[0].0, expert, "{best}");
        }
        assert!(Routing { groups: Some(Groups { count: 3, chosen: 1, best: 2 }), ..routing }.check().is_err());
        assert!(Routing { groups: groups(2), chosen: 3, ..routing }.check().is_err());
    }
}
