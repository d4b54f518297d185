//! Settings of a tokenizer beside its vocabulary: `tokenizer_config.json`, `added_tokens.json` and
//! `special_tokens_map.json`.

use crate::error::{Context, Error, Result};
use crate::strict_json;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Name of the settings of a tokenizer.
pub(super) const CONFIG: &str = "tokenizer_config.json";
/// Name of the ids of added tokens, which older versions of `transformers` wrote.
pub(super) const ADDED_TOKENS: &str = "added_tokens.json";
/// Name of the special tokens, which older versions of `transformers` wrote.
pub(super) const SPECIAL_TOKENS: &str = "special_tokens_map.json";

/// Largest size in bytes of these files, which are parsed into trees; real ones stay below 1 MB.
const LIMIT: usize = 16 << 20;
/// Fields that name a special token.
const NAMED: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Fields that name lists of special tokens.
const LISTS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];
/// Classes that say nothing about the rules of a tokenizer.
const ANY_CLASS: [&str; 2] = ["PreTrainedTokenizer", "TokenizersBackend"];

/// The settings.
#[derive(Debug, Default)]
pub(super) struct Settings {
    config: Map<String, Value>,
    special: Map<String, Value>,
    listed: BTreeMap<u32, AddedToken>,
    model_types: Vec<String>,
}

/// A token that is found in a text before the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AddedToken {
    pub(super) content: String,
    pub(super) single_word: bool,
    /// True to take the white space before the token, too.
    pub(super) lstrip: bool,
    /// True to take the white space after the token, too.
    pub(super) rstrip: bool,
    /// True to look for the token in the normalized text.
    pub(super) normalized: bool,
    /// True to hide the token from readers.
    pub(super) special: bool,
}

/// A row of a table of rules.
#[derive(Debug)]
pub(super) struct RuleRow<T: 'static> {
    /// Names of the classes of tokenizers, without `Fast`.
    pub(super) classes: &'static [&'static str],
    /// Model types whose tokenizers have these rules if no class is named.
    pub(super) model_types: &'static [&'static str],
    pub(super) rules: T,
}

impl AddedToken {
    /// Creates a special token.
    pub(super) fn special(content: String) -> AddedToken {
        AddedToken { special: true, ..AddedToken::visible(content) }
    }

    /// Creates a token that readers see.
    pub(super) fn visible(content: String) -> AddedToken {
        AddedToken { content, single_word: false, lstrip: false, rstrip: false, normalized: false, special: false }
    }

    /// Reads a token, which is a text or an object with a text and flags.
    fn parse(value: &Value, special: bool) -> Result<AddedToken> {
        let content = value.as_str().or_else(|| value["content"].as_str());
        let Some(content) = content.filter(|content| !content.is_empty()) else {
            let found = value.to_string();
            return Err(Error::corrupt(format!("found {found:.120}, expected a token: a text, or an object with one")));
        };
        let flag = |name: &str| match &value[name] {
            Value::Null => Ok(false),
            Value::Bool(flag) => Ok(*flag),
            other => Err(Error::corrupt(format!("found {other:.60}, expected true or false")).tensor(name)),
        };
        Ok(AddedToken {
            content: content.to_string(),
            single_word: flag("single_word")?,
            lstrip: flag("lstrip")?,
            rstrip: flag("rstrip")?,
            normalized: flag("normalized")?,
            special: special || flag("special")?,
        })
    }

    /// Returns the token as in `added_tokens` of a tokenizer.json.
    pub(super) fn json(&self, id: u32) -> Value {
        json!({"id": id, "content": self.content, "single_word": self.single_word, "lstrip": self.lstrip,
               "rstrip": self.rstrip, "normalized": self.normalized, "special": self.special})
    }
}

impl Settings {
    /// Creates the settings of a model without files for them.
    pub(super) fn new(model_types: &[&str]) -> Settings {
        let model_types = model_types.iter().map(|name| name.to_string()).collect();
        Settings { model_types, ..Settings::default() }
    }

    /// Reads one of the files.
    ///
    /// # Errors
    /// The file is not a JSON object, or a token in it is invalid.
    pub(super) fn read(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        if bytes.len() > LIMIT {
            return Err(Error::corrupt(format!("found {} bytes, expected at most {LIMIT}", bytes.len())));
        }
        let Value::Object(object) = strict_json::parse_python(bytes)? else {
            return Err(Error::corrupt("found another JSON value, expected an object"));
        };
        match name {
            CONFIG => {
                for (id, token) in object.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten() {
                    let place = format!("added_tokens_decoder.{id:.20}");
                    let number = id.parse().map_err(|_| Error::corrupt("expected an id")).tensor(&place)?;
                    self.listed.insert(number, AddedToken::parse(token, false).tensor(&place)?);
                }
                self.config = object;
            }
            SPECIAL_TOKENS => self.special = object,
            _ => {
                for (content, id) in object {
                    let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
                    let number = number.ok_or_else(|| Error::corrupt(format!("found {id:.60}, expected an id")));
                    self.listed.entry(number.tensor(&content)?).or_insert(AddedToken::visible(content));
                }
            }
        }
        Ok(())
    }

    /// Returns the tokens that are listed with their ids.
    pub(super) fn listed(&self) -> impl Iterator<Item = (&u32, &AddedToken)> {
        self.listed.iter()
    }

    /// Makes all listed tokens be looked for in the text as it is.
    pub(super) fn without_normalized(mut self) -> Settings {
        self.listed.values_mut().for_each(|token| token.normalized = false);
        self
    }

    /// Returns the tokens that are named as special ones.
    ///
    /// # Errors
    /// A field holds no token.
    pub(super) fn special_tokens(&self) -> Result<Vec<AddedToken>> {
        let mut tokens = Vec::new();
        for name in NAMED.into_iter().chain(LISTS) {
            let values: Vec<&Value> = match self.field(name) {
                Some(Value::Array(list)) => list.iter().collect(),
                Some(Value::Object(map)) if !map.contains_key("content") => map.values().collect(),
                field => field.into_iter().collect(),
            };
            for value in values {
                tokens.push(AddedToken { normalized: false, ..AddedToken::parse(value, true).tensor(name)? });
            }
        }
        Ok(tokens)
    }

    /// Returns the text of the special token with this name, or `default` if no file has the name.
    ///
    /// # Errors
    /// The field holds no token.
    pub(super) fn named(&self, name: &str, default: Option<&str>) -> Result<Option<String>> {
        match self.field(name) {
            Some(value) => Ok(Some(AddedToken::parse(value, true).tensor(name)?.content)),
            None => Ok(default.filter(|_| !self.config.contains_key(name)).map(str::to_string)),
        }
    }

    /// Returns true or false as a field says.
    ///
    /// # Errors
    /// The field has another value.
    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.config.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(Error::corrupt(format!("found {other:.60}, expected true or false")).tensor(name)),
        }
    }

    /// Returns a field of the settings.
    pub(super) fn config(&self, name: &str) -> Option<&Value> {
        self.config.get(name)
    }

    fn field(&self, name: &str) -> Option<&Value> {
        let fields = [self.config.get(name), self.special.get(name)];
        // Some published files have an empty text where there is no token.
        fields.into_iter().flatten().find(|value| !value.is_null() && *value != "")
    }

    /// Returns the row of the class of the tokenizer, or else of the type of the model. `file` is the file whose rules
    /// are searched.
    ///
    /// # Errors
    /// No row has the class or the type.
    pub(super) fn row<'t, T>(&self, file: &str, rows: &'t [RuleRow<T>]) -> Result<&'t T> {
        let class = self.config.get("tokenizer_class").and_then(Value::as_str);
        let class = class.map(|class| class.strip_suffix("Fast").unwrap_or(class));
        let class = class.filter(|class| !ANY_CLASS.contains(class));
        let found = match class {
            Some(class) => rows.iter().find(|row| row.classes.contains(&class)),
            None => rows.iter().find(|row| self.model_types.iter().any(|name| row.model_types.contains(&&**name))),
        };
        found.map(|row| &row.rules).ok_or_else(|| {
            let classes = rows.iter().flat_map(|row| row.classes).copied().collect::<Vec<_>>().join(", ");
            let found = match class {
                Some(class) => format!("found `{class:.60}`"),
                None => format!("found no class, and the model type `{}`", self.model_types.join("` of `")),
            };
            Error::unsupported(format!("{found}, expected one of {classes}: the rules of {file} are not known"))
                .tensor("tokenizer_class")
        })
    }
}
