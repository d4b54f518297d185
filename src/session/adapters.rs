//! Adapters of a session by name.

use super::Session;
use crate::convert::adapter;
use crate::error::{Context, Error, Result};
use crate::progress;
use crate::runtime::adapters::{AdapterSet, BoundAdapter};
use crate::units::human_bytes;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// Adapters that were loaded for a session.
#[derive(Debug, Default)]
pub struct Adapters(Vec<Named>);

/// A loaded adapter.
#[derive(Debug)]
pub struct Named {
    /// Name by which requests refer to it.
    pub name: String,
    /// The adapter.
    pub adapter: Arc<BoundAdapter>,
    /// Scale of requests that do not name one.
    pub scale: f32,
}

/// Place of an adapter: `NAME=DIR`, `DIR`, and either with `:SCALE` at the end.
#[derive(Debug, Clone, PartialEq)]
pub struct Source {
    /// Name by which requests refer to the adapter; by default that of the directory.
    pub name: String,
    /// Directory that PEFT wrote.
    pub dir: PathBuf,
    /// Scale of requests that do not name one.
    pub scale: f32,
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Source, String> {
        let (rest, scale) =
            match text.rsplit_once(':').and_then(|(rest, scale)| Some((rest, scale.parse::<f32>().ok()?))) {
                Some((rest, scale)) if scale.is_finite() => (rest, scale),
                Some(_) => return Err("expected a finite scale after the last colon".into()),
                None => (text, 1.0),
            };
        let (name, dir) = match rest.split_once('=') {
            Some((name, dir)) => (name.to_string(), Path::new(dir)),
            None => {
                let dir = Path::new(rest);
                (dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(), dir)
            }
        };
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if name.is_empty() || name.len() > 128 || !name.chars().all(allowed) {
            return Err(format!(
                "found the name `{name}`, expected up to 128 letters, digits, dots, hyphens and underscores"
            ));
        }
        match dir.as_os_str().is_empty() {
            true => Err("expected NAME=DIR or DIR".into()),
            false => Ok(Source { name, dir: dir.to_path_buf(), scale }),
        }
    }
}

impl Session {
    /// Loads adapters, and uses all of them together for sequences that choose none. If they cannot be used together,
    /// only requests that choose some are valid.
    pub(super) fn with_adapters(mut self, sources: &[Source]) -> Result<Session> {
        self.adapters = Adapters::load(&self, sources)?;
        if let Ok(together) = self.adapters.together() {
            self.engine.set_adapters(together);
        }
        Ok(self)
    }
}

impl Adapters {
    /// Loads adapters for the model of a session.
    ///
    /// # Errors
    /// Two have the same name, or one cannot be read or does not fit the model.
    pub fn load(session: &Session, sources: &[Source]) -> Result<Adapters> {
        let mut all: Vec<Named> = Vec::new();
        for Source { name, dir, scale } in sources {
            if all.iter().any(|known| known.name == *name) {
                return Err(
                    Error::usage(format!("found two adapters with the name `{name}`")).help("name them with NAME=DIR")
                );
            }
            let read = adapter::read(dir, session.engine.config())?;
            let bound = session.engine.bind_adapter(&read).at(dir)?;
            progress::detail(1, || {
                format!(
                    "adapter {name}: rank {}, {} numbers, {} in memory",
                    read.rank(),
                    read.parameters(),
                    human_bytes(bound.bytes as u64)
                )
            });
            all.push(Named { name: name.clone(), adapter: bound, scale: *scale });
        }
        Ok(Adapters(all))
    }

    /// Returns the adapters.
    pub fn all(&self) -> &[Named] {
        &self.0
    }

    /// Returns the set of all adapters with their scales.
    ///
    /// # Errors
    /// They cannot be used together; see [`AdapterSet::new`].
    pub fn together(&self) -> Result<AdapterSet> {
        AdapterSet::new(self.0.iter().map(|named| (named.adapter.clone(), named.scale)))
    }

    /// Returns the set of adapters that a request names; a scale multiplies that of the run.
    ///
    /// # Errors
    /// A name is unknown, or the adapters cannot be used together.
    pub fn set(&self, names: &[(String, f32)]) -> Result<AdapterSet> {
        let one = |(name, scale): &(String, f32)| match self.0.iter().find(|known| known.name == *name) {
            Some(known) => Ok((known.adapter.clone(), known.scale * scale)),
            None => {
                let known: Vec<&str> = self.0.iter().map(|known| known.name.as_str()).collect();
                let help = if known.is_empty() {
                    "load it with --lora NAME=DIR".into()
                } else {
                    format!("loaded are {}", known.join(", "))
                };
                Err(Error::usage(format!("found no adapter `{name}`")).help(help))
            }
        };
        AdapterSet::new(names.iter().map(one).collect::<Result<Vec<_>>>()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_have_names_and_scales_of_their_own_or_by_default() {
        let source = |name: &str, dir: &str, scale| Ok(Source { name: name.into(), dir: dir.into(), scale });
        assert_eq!("a/b".parse(), source("b", "a/b", 1.0));
        assert_eq!("x=a/b:0.5".parse(), source("x", "a/b", 0.5));
        assert_eq!("x=c:\\b".parse(), source("x", "c:\\b", 1.0));
        assert_eq!("a/b:-2".parse(), source("b", "a/b", -2.0));
        for wrong in ["", "=a", "x=", "x y=a", "a:inf", "..", "x=a:nan"] {
            assert!(wrong.parse::<Source>().is_err(), "{wrong}");
        }
    }
}
