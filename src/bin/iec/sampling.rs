//! Sampling options.

use iec::error::{Error, Result};
use iec::generate::sampler::{Order, Sampling, SamplingFields, Version};
use iec::session::Session;
use iec::session::sampling::{SamplingTexts, last_n};

/// Heading of these options in the help.
const SAMPLING: &str = "Sampling (default: greedy; in a conversation as generation_config.json says)";

/// Heading of the options that only `--help` shows.
pub const MORE_SAMPLING: &str = "More sampling";

/// Sampling options; generation is greedy if none is given.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = SAMPLING)]
pub struct SamplingArgs {
    /// Choose the most likely token at each step
    #[arg(
        long,
        conflicts_with_all = ["temperature", "top_k", "top_p", "min_p", "typical", "xtc_probability", "mirostat"]
    )]
    greedy: bool,
    /// Divide the logits by T before sampling; 0 is greedy [default: 0, or 1 if another option selects sampling; in a
    /// conversation that of generation_config.json, or 0.8]
    #[arg(long, alias = "temp", value_name = "T")]
    temperature: Option<f64>,
    /// Sample from the K most likely tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample from the smallest set of most likely tokens whose probabilities add up to P
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Sample from tokens that are at least P times as likely as the most likely one
    #[arg(long, value_name = "P")]
    min_p: Option<f64>,
    /// Make tokens that occurred in prompt or text less likely; 1 has no effect, 1.1 is a weak penalty
    #[arg(long, value_name = "R")]
    repeat_penalty: Option<f64>,
    /// Seed of the random numbers; prompt or answer number i uses seed + i [default: 0; random in a conversation]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    #[command(flatten)]
    more: Box<MoreArgs>,
}

/// Sampling options that are used rarely.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = MORE_SAMPLING)]
struct MoreArgs {
    /// Locally typical sampling: keep the tokens whose surprise is nearest to the entropy, up to total probability P
    #[arg(long, alias = "typical-p", value_name = "P")]
    typical: Option<f64>,
    /// Subtract A from the logits of tokens that occurred
    #[arg(long, value_name = "A")]
    presence_penalty: Option<f64>,
    /// Subtract A from the logit of a token for each of its occurrences
    #[arg(long, value_name = "A")]
    frequency_penalty: Option<f64>,
    /// Number of last tokens that the three penalties consider; 0 turns them off, -1 is all [default: -1]
    #[arg(long, value_name = "N")]
    repeat_last_n: Option<i64>,
    /// DRY: lower the logit of a token that continues a repeated sequence by M * BASE^(length - ALLOWED); 0 is off
    #[arg(long, value_name = "M")]
    dry_multiplier: Option<f64>,
    /// Base of DRY [default: 1.75]
    #[arg(long, value_name = "BASE", requires = "dry_multiplier")]
    dry_base: Option<f64>,
    /// Length from which DRY penalizes a repeated sequence, in tokens [default: 2]
    #[arg(long, value_name = "ALLOWED", requires = "dry_multiplier")]
    dry_allowed_length: Option<usize>,
    /// Number of last tokens in which DRY searches; 0 turns it off, -1 is all [default: -1]
    #[arg(long, value_name = "N", requires = "dry_multiplier")]
    dry_penalty_last_n: Option<i64>,
    /// Text that a repeated sequence of DRY must not contain, instead of line break, colon, quotation mark and asterisk;
    /// repeatable; `none` allows all texts
    #[arg(long, value_name = "TEXT", requires = "dry_multiplier")]
    dry_sequence_breaker: Vec<String>,
    /// XTC: with probability P, remove the likely tokens except the least likely of them
    #[arg(long, value_name = "P")]
    xtc_probability: Option<f64>,
    /// Probability from which XTC counts a token as likely; above 0.5 XTC has no effect [default: 0.1]
    #[arg(long, value_name = "P", requires = "xtc_probability")]
    xtc_threshold: Option<f64>,
    /// Keep the surprise of the text near a target with Mirostat, version 1 or 2; 0 is off
    #[arg(long, value_name = "VERSION", value_parser = clap::value_parser!(u8).range(0..=2))]
    mirostat: Option<u8>,
    /// Target of Mirostat, in bits per token [default: 5]
    #[arg(long, alias = "mirostat-ent", value_name = "TAU", requires = "mirostat")]
    mirostat_tau: Option<f64>,
    /// Learning rate of Mirostat [default: 0.1]
    #[arg(long, alias = "mirostat-lr", value_name = "ETA", requires = "mirostat")]
    mirostat_eta: Option<f64>,
    /// Add BIAS to the logit of a token: `15043+1.5`, `" yes-2"`, `2=-inf`; repeatable. TOKEN is an id or a text of one
    /// token
    #[arg(long, value_name = "TOKEN(+|-|=)BIAS")]
    logit_bias: Vec<String>,
    /// Never generate the tokens that the tokenizer makes of TEXT at the beginning of a text, after a space or inside a
    /// word; other tokens can still spell TEXT; repeatable
    #[arg(long, value_name = "TEXT")]
    ban: Vec<String>,
    /// Order of the sampling steps [default: penalties,dry,temperature,top_k,top_p,min_p,typ_p,xtc]
    #[arg(long, value_name = "LIST")]
    samplers: Option<String>,
}

impl SamplingArgs {
    /// Checks the options before a model is opened.
    ///
    /// # Errors
    /// An option is out of range, has another form, or has no effect.
    pub fn check(&self) -> Result<()> {
        let penalties = [self.repeat_penalty, self.more.presence_penalty, self.more.frequency_penalty];
        if self.more.repeat_last_n.is_some() && penalties.iter().all(Option::is_none) {
            return Err(Error::usage("--repeat-last-n has no effect without a penalty")
                .help("add --repeat-penalty, --presence-penalty or --frequency-penalty"));
        }
        self.texts().check()?;
        self.numbers(Sampling::default())?.validate()
    }

    /// Returns the sampling of requests to `session`, whose tokenizer gives the tokens of the texts. Parameters without
    /// an option are those of `defaults`.
    ///
    /// # Errors
    /// The same as those of [`SamplingArgs::check`], or a text has no valid tokens.
    pub fn sampling(&self, session: &Session, defaults: Sampling) -> Result<Sampling> {
        let (texts, numbers) = self.unresolved(defaults)?;
        texts.resolve(numbers, || session.tokenizer(), session.engine.config().vocab)
    }

    /// Returns the texts whose tokens a tokenizer gives, and the other parameters, over those of `defaults`.
    ///
    /// # Errors
    /// The same as those of [`SamplingArgs::check`].
    pub fn unresolved(&self, defaults: Sampling) -> Result<(SamplingTexts, Sampling)> {
        Ok((self.texts(), self.numbers(defaults)?))
    }

    /// Returns true if options choose which steps remove tokens: `--mirostat` or `--samplers`.
    pub fn chooses_steps(&self) -> bool {
        self.more.mirostat > Some(0) || self.more.samplers.is_some()
    }

    /// Returns the seed, if one is given.
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    fn texts(&self) -> SamplingTexts {
        let breakers: Vec<String> =
            self.more.dry_sequence_breaker.iter().filter(|text| *text != "none").cloned().collect();
        SamplingTexts {
            logit_bias: self.more.logit_bias.clone(),
            banned: self.more.ban.clone(),
            dry_breakers: (!self.more.dry_sequence_breaker.is_empty()).then_some(breakers),
        }
    }

    /// Returns the parameters that do not depend on the model, over those of `plain`.
    fn numbers(&self, plain: Sampling) -> Result<Sampling> {
        let more = &self.more;
        let fields = SamplingFields {
            temperature: if self.greedy { Some(0.0) } else { self.temperature },
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: more.typical,
            xtc_probability: more.xtc_probability,
            xtc_threshold: more.xtc_threshold,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: more.presence_penalty,
            frequency_penalty: more.frequency_penalty,
            repeat_last_n: last_n("--repeat-last-n", more.repeat_last_n)?,
            dry_multiplier: more.dry_multiplier,
            dry_base: more.dry_base,
            dry_allowed_length: more.dry_allowed_length,
            dry_last_n: last_n("--dry-penalty-last-n", more.dry_penalty_last_n)?,
            mirostat: more.mirostat.map(|version| match version {
                1 => Some(Version::One),
                2 => Some(Version::Two),
                _ => None,
            }),
            mirostat_tau: more.mirostat_tau,
            mirostat_eta: more.mirostat_eta,
            order: more.samplers.as_deref().map(Order::parse).transpose()?,
            seed: self.seed,
        };
        Ok(fields.over(plain))
    }
}
