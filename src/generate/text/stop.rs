//! Stop strings: detects them in generated text. A stop string may be spread over several tokens, so text that could be
//! the beginning of one is held back until the next tokens show whether it is.

/// Searches a growing text for stop strings.
#[derive(Debug, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// Text that was not returned yet: it could be the beginning of a stop string.
    held: String,
}

/// Text that may be shown, and whether a stop string was found.
#[derive(Debug, PartialEq, Eq)]
pub struct Shown {
    /// Text before any stop string.
    pub text: String,
    /// The stop string that was found, as an index of the list; `text` does not contain it.
    pub stopped: Option<usize>,
}

impl StopMatcher {
    /// Creates a matcher for any of `stops`; empty strings are ignored.
    pub fn new(stops: &[String]) -> StopMatcher {
        StopMatcher { stops: stops.to_vec(), held: String::new() }
    }

    /// Appends the next piece of text. If it completes several stop strings, the text is cut before the one that ends
    /// first; of several with the same end, before the longest.
    pub fn push(&mut self, piece: &str) -> Shown {
        self.held.push_str(piece);
        let stops = self.stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
        let found = |(i, stop): (usize, &String)| self.held.find(stop.as_str()).map(|at| (at + stop.len(), at, i));
        if let Some((_, at, stop)) = stops.filter_map(found).min() {
            self.held.truncate(at);
            return Shown { text: std::mem::take(&mut self.held), stopped: Some(stop) };
        }
        let keep = self.stops.iter().map(|stop| open_start(&self.held, stop)).max().unwrap_or(0);
        let tail = self.held.split_off(self.held.len() - keep);
        Shown { text: std::mem::replace(&mut self.held, tail), stopped: None }
    }

    /// Returns the text that is still held back when generation ends.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Returns the length of the longest suffix of `text` that is a proper prefix of `stop`.
fn open_start(text: &str, stop: &str) -> usize {
    let starts = stop.char_indices().map(|(at, _)| at).skip(1);
    starts.filter(|at| text.ends_with(&stop[..*at])).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut matcher = StopMatcher::new(&stops);
        let mut text = String::new();
        for piece in pieces {
            let shown = matcher.push(piece);
            text += &shown.text;
            if shown.stopped.is_some() {
                return (text, true);
            }
        }
        (text + &matcher.finish(), false)
    }

    #[test]
    fn a_stop_string_is_found_across_pieces_and_never_shown() {
        struct Case {
            stops: &'static [&'static str],
            pieces: &'static [&'static str],
            expected: (&'static str, bool),
        }
        let cases = [
            Case { stops: &["END"], pieces: &["a E", "N", "D b"], expected: ("a ", true) },
            Case { stops: &["END"], pieces: &["a E", "N", "Z"], expected: ("a ENZ", false) },
            Case { stops: &["END"], pieces: &["a EN"], expected: ("a EN", false) },
            Case { stops: &["\n\n", "."], pieces: &["one\n", "two. three"], expected: ("one\ntwo", true) },
            Case { stops: &["bc", "abcd"], pieces: &["xa", "bc", "d"], expected: ("xa", true) },
            Case { stops: &["é!"], pieces: &["caf", "é", "!"], expected: ("caf", true) },
            Case { stops: &["aab"], pieces: &["a", "a", "a", "b"], expected: ("a", true) },
            Case { stops: &[""], pieces: &["a", "b"], expected: ("ab", false) },
            Case { stops: &[], pieces: &["a", "b"], expected: ("ab", false) },
        ];
        for case in cases {
            let (text, stopped) = all(case.stops, case.pieces);
            assert_eq!((text.as_str(), stopped), case.expected, "{:?} {:?}", case.stops, case.pieces);
        }
    }

    proptest! {
        #[test]
        fn the_cut_of_the_text_does_not_matter(text in "[abé]{0,20}", stop in "[abé]{1,4}", cut in 0usize..20) {
            let cut = text.char_indices().map(|(at, _)| at).nth(cut).unwrap_or(text.len());
            let expected = match text.find(&stop) {
                Some(at) => (text[..at].to_string(), true),
                None => (text.clone(), false),
            };
            prop_assert_eq!(all(&[&stop], &[&text[..cut], &text[cut..]]), expected);
        }
    }
}
