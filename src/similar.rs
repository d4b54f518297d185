//! Similar names, for errors about names that do not exist.

/// Returns the name in `names` that is most similar to `name`, if one is similar.
pub fn nearest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let scored = names.into_iter().map(|known| (strsim::jaro_winkler(name, known), known));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|(score, _)| *score > 0.75).map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn misspelled_names_are_found_and_others_are_not() {
        let names = ["help", "save", "regenerate"];
        for (name, expected) in
            [("hlep", Some("help")), ("svae", Some("save")), ("regenrate", Some("regenerate")), ("xyzzy", None)]
        {
            assert_eq!(nearest(name, names), expected, "{name}");
        }
    }
}
