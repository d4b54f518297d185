//! Names on the command line for values of library types.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Command};
use iec::dtype::DType;
use std::ffi::OsStr;

/// A value with its names, the first of which is shown, and a few words for help.
pub type Named<T> = (T, &'static [&'static str], &'static str);

/// A float type, or `None` to keep the one that is there.
pub type KeptOrFloat = Option<DType>;

/// The names of [`KeptOrFloat`].
pub const KEPT_OR_FLOAT: &[Named<KeptOrFloat>] = &[
    (None, &["keep"], ""),
    (Some(DType::F32), &["fp32", "f32"], ""),
    (Some(DType::BF16), &["bf16"], ""),
    (Some(DType::F16), &["fp16", "f16"], ""),
];

/// The names of a switch.
pub const ON_OR_OFF: &[Named<bool>] = &[(true, &["on"], ""), (false, &["off"], "")];

/// The names of float types.
pub const FLOAT: &[Named<DType>] =
    &[(DType::F32, &["fp32", "f32"], ""), (DType::BF16, &["bf16"], ""), (DType::F16, &["fp16", "f16"], "")];

/// Parser that accepts what another one accepts, and offers words to the completion of shells.
#[derive(Debug, Clone)]
pub struct Offering<P> {
    words: &'static [&'static str],
    parser: P,
}

/// Returns a parser that accepts what `parser` accepts, and offers `words` to the completion of shells. Options with
/// such a parser set `hide_possible_values`, because their help describes all values.
pub fn offering<P: TypedValueParser>(words: &'static [&'static str], parser: P) -> Offering<P> {
    Offering { words, parser }
}

impl<P: TypedValueParser> TypedValueParser for Offering<P> {
    type Value = P::Value;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<P::Value, clap::Error> {
        self.parser.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let words = self.words.iter().map(|word| PossibleValue::new(*word));
        (!self.words.is_empty()).then(|| Box::new(words) as Box<dyn Iterator<Item = PossibleValue>>)
    }
}

/// Returns a parser that accepts the names in `rows` and returns their values.
pub fn named<T: Clone + Send + Sync + 'static>(rows: &'static [Named<T>]) -> impl TypedValueParser<Value = T> {
    let shown = |(_, names, help): &'static Named<T>| {
        let value = PossibleValue::new(names[0]).aliases(&names[1..]);
        if help.is_empty() { value } else { value.help(*help) }
    };
    PossibleValuesParser::new(rows.iter().map(shown)).try_map(|text| {
        let found = rows.iter().find(|(_, names, _)| names.contains(&text.as_str()));
        found.map(|(value, ..)| value.clone()).ok_or("no such name")
    })
}
