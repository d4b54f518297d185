//! A vocabulary under construction: the text of each id, and the tokens that are found in a text before the others.

use super::settings::{AddedToken, Settings};
use crate::convert::merges::{self, Piece};
use crate::convert::tokenizer_json::{MOST_ADDED, MOST_TOKENS, byte_alphabet, template};
use crate::error::{Context, Error, Result};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};

/// Tokens by id and by text. Each id has one text, and each text one id.
#[derive(Debug, Default)]
pub(super) struct Vocabulary {
    ids: HashMap<String, u32>,
    texts: BTreeMap<u32, String>,
    added: BTreeMap<u32, AddedToken>,
}

impl Vocabulary {
    /// Adds a token of the model.
    ///
    /// # Errors
    /// The id or the text exists already, or there are more tokens than any real vocabulary has.
    pub(super) fn insert(&mut self, id: u32, text: String) -> Result<()> {
        if let Some(other) = self.ids.get(&text) {
            return Err(Error::corrupt(format!("found `{text:.60}` with the ids {other} and {id}, expected one id")));
        }
        if let Some(other) = self.texts.get(&id) {
            return Err(Error::corrupt(format!("found the id {id} for `{other:.60}` and `{text:.60}`")));
        }
        if self.texts.len() == MOST_TOKENS {
            return Err(Error::unsupported(format!("found more than {MOST_TOKENS} tokens")));
        }
        self.texts.insert(id, text.clone());
        self.ids.insert(text, id);
        Ok(())
    }

    /// Adds the tokens of byte-level BPE, given as bytes and ranks, from the id `first` on; returns the merges, ordered
    /// by rank.
    ///
    /// # Errors
    /// A byte has no token, or a token or rank occurs twice.
    pub(super) fn insert_ranked(&mut self, tokens: &[(Vec<u8>, u32)], first: u32) -> Result<Vec<String>> {
        let alphabet = byte_alphabet();
        let mut bytes = [false; 256];
        let mut texts = Vec::with_capacity(tokens.len());
        for (token, rank) in tokens {
            let text: String = token.iter().map(|byte| alphabet[usize::from(*byte)]).collect();
            let id = rank.checked_add(first).ok_or_else(|| Error::corrupt(format!("found the rank {rank}")))?;
            if let [byte] = token[..] {
                bytes[usize::from(byte)] = true;
            }
            self.insert(id, text.clone())?;
            texts.push((id, *rank, text));
        }
        if let Some(byte) = bytes.iter().position(|found| !found) {
            return Err(Error::corrupt(format!("found no token for the byte {byte:#04x}, expected one for each byte")));
        }
        merges::by_score(texts.iter().map(|(id, rank, text)| Piece { id: *id as usize, text, score: -(*rank as f32) }))
    }

    /// Marks a token of the model as one that is found in a text before the others.
    pub(super) fn mark_added(&mut self, id: u32, token: AddedToken) {
        self.added.insert(id, token);
    }

    /// Adds a token that is found in a text before the others, with the next free id.
    pub(super) fn append_special(&mut self, content: String) -> Result<()> {
        let id = self.next_id();
        self.add(id, AddedToken::special(content))
    }

    /// Returns the id of a token.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// Returns the text of a token.
    pub(super) fn text(&self, id: u32) -> Option<&str> {
        self.texts.get(&id).map(String::as_str)
    }

    /// Returns the number of tokens.
    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    /// Returns the id after the highest one.
    pub(super) fn next_id(&self) -> u32 {
        self.texts.last_key_value().map_or(0, |(id, _)| id.saturating_add(1))
    }

    /// Adds the tokens that the settings list with their ids, then those that they only name. `defaults` are tokens
    /// that a class has where the settings name none.
    ///
    /// # Errors
    /// A token contradicts the vocabulary.
    pub(super) fn add_listed(&mut self, settings: &Settings, defaults: &[&str]) -> Result<()> {
        for (id, token) in settings.listed() {
            self.add(*id, token.clone()).tensor("added_tokens")?;
        }
        let named = settings.special_tokens()?.into_iter();
        for token in named.chain(defaults.iter().map(|content| AddedToken::special(content.to_string()))) {
            match self.id(&token.content) {
                Some(id) => self.added.entry(id).or_insert(token).special = true,
                None => self.add(self.next_id(), token)?,
            }
        }
        match self.added.len() > MOST_ADDED {
            true => Err(Error::unsupported(format!("found more than {MOST_ADDED} added tokens"))),
            false => Ok(()),
        }
    }

    /// Adds a token that is found in a text before the others. A placeholder of the model, which is an added token,
    /// too, may get another text.
    ///
    /// # Errors
    /// The id belongs to another token, or the text to another id.
    pub(super) fn add(&mut self, id: u32, token: AddedToken) -> Result<()> {
        match self.texts.get(&id) {
            Some(text) if *text == token.content => {}
            Some(text) if self.added.contains_key(&id) && !self.ids.contains_key(&token.content) => {
                self.ids.remove(text);
                self.ids.insert(token.content.clone(), id);
                self.texts.insert(id, token.content.clone());
            }
            _ => self.insert(id, token.content.clone())?,
        }
        self.added.insert(id, token);
        Ok(())
    }

    /// Returns the `post_processor` that puts the tokens at the beginning and the end around a text. `defaults` are
    /// their texts where the settings name none; `adds` says whether the class adds them unless the settings say so.
    ///
    /// # Errors
    /// A setting has another type than expected.
    pub(super) fn post_processor(
        &self,
        settings: &Settings,
        defaults: [Option<&str>; 2],
        adds: [bool; 2],
    ) -> Result<Value> {
        let mut frame = [None, None];
        for (i, name) in ["bos", "eos"].into_iter().enumerate() {
            if settings.flag(&format!("add_{name}_token"))?.unwrap_or(adds[i]) {
                let text = settings.named(&format!("{name}_token"), defaults[i])?;
                frame[i] = text.and_then(|text| Some((self.id(&text)? as usize, text)));
            }
        }
        let [bos, eos] = frame.each_ref().map(|token| token.as_ref().map(|(id, text)| (*id, text.as_str())));
        Ok(if bos.or(eos).is_some() { template(bos, eos) } else { Value::Null })
    }

    /// Returns the `added_tokens` of a tokenizer.json.
    pub(super) fn added_json(&self) -> Vec<Value> {
        self.added.iter().map(|(id, token)| token.json(*id)).collect()
    }

    /// Returns the `vocab` of byte-pair encoding. Added tokens are included so that each keeps its id.
    pub(super) fn json(&self) -> Map<String, Value> {
        self.texts.iter().map(|(id, text)| (text.clone(), json!(id))).collect()
    }

    /// Returns the `vocab` of a unigram model: the tokens with their scores, in the order of their ids.
    ///
    /// # Errors
    /// An id has no token.
    pub(super) fn scored_json(&self, score: impl Fn(u32) -> f32) -> Result<Value> {
        let gap = self.texts.keys().zip(0..).find(|(id, expected)| *id != expected);
        if let Some((id, expected)) = gap {
            let found = format!("found the id {id} after {expected} tokens, expected ids without a gap");
            return Err(Error::unsupported(found).tensor("added_tokens"));
        }
        Ok(self.texts.iter().map(|(id, text)| json!([text, f64::from(score(*id))])).collect())
    }
}
