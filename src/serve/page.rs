//! Page of the server: a chat in one HTML file without a build step or outside resources (`GET /`).
//!
//! The file has one `<style>` and one `<script>` element. The policy of [`csp`] allows exactly these two by their
//! digests, and connections to this server only. An answer of a model can therefore load or run nothing, even if a
//! mistake of the page turned its text into markup.

use crate::sha256::{Digest, Sha256};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::sync::LazyLock;

/// The whole page, to be sent as `text/html; charset=utf-8` with the policy of [`csp`].
pub const HTML: &str = include_str!("page.html");

/// Returns the value of the header `Content-Security-Policy` for [`HTML`].
pub fn csp() -> &'static str {
    static POLICY: LazyLock<String> = LazyLock::new(|| {
        format!(
            "default-src 'none'; script-src '{}'; style-src '{}'; connect-src 'self'; img-src data:; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            digest(element("script")),
            digest(element("style"))
        )
    });
    &POLICY
}

/// Returns the text inside the first element of this name, which browsers hash. Our own file has the element.
fn element(name: &str) -> &'static str {
    let inner = HTML.split_once(&format!("<{name}>")).and_then(|(_, rest)| rest.split_once(&format!("</{name}>")));
    inner.map_or("", |(text, _)| text)
}

/// Returns the source expression of a text in a policy.
fn digest(text: &str) -> String {
    format!("sha256-{}", STANDARD.encode(Sha256::digest(text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use regex::Regex;

    /// Returns the markup of the page: all but the contents of its style and script.
    fn markup() -> String {
        HTML.replace(element("script"), "").replace(element("style"), "")
    }

    #[test]
    fn the_page_has_one_script_and_one_style_without_attributes() {
        for (name, least) in [("script", 10_000), ("style", 5_000)] {
            assert_eq!(HTML.matches(&format!("<{name}")).count(), 1, "{name}");
            assert!(element(name).len() > least, "{name}");
        }
        assert!(!HTML.contains('\r'), "browsers hash the text after converting line ends");
    }

    #[test]
    fn the_policy_has_the_digests_of_both() {
        assert_eq!(digest("abc"), "sha256-ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0=");
        let parts: Vec<&str> = csp().split("; ").collect();
        assert_eq!(parts[0], "default-src 'none'");
        assert_eq!(parts[1], format!("script-src '{}'", digest(element("script"))));
        assert_eq!(parts[2], format!("style-src '{}'", digest(element("style"))));
        assert!(!csp().contains("unsafe"));
    }

    #[test]
    fn the_markup_has_nothing_that_the_policy_forbids() {
        let forbidden =
            Regex::new(r#"(?i)\s(style|on\w+)\s*=|(src|href)\s*=\s*["']?(https?:|//)|<(iframe|object|embed|base)"#);
        let found: Vec<String> = forbidden.unwrap().find_iter(&markup()).map(|m| m.as_str().into()).collect();
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn the_script_never_turns_text_into_markup_or_code() {
        let script = element("script");
        for name in
            ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser"]
        {
            assert!(!script.contains(name), "{name}");
        }
        let addresses = Regex::new(r#"fetch\(|call\("(/[^"]*)""#).unwrap();
        assert!(addresses.is_match(script));
        let outside = Regex::new(r#"["'`]https?://[^"'`]*"#).unwrap();
        let found: Vec<&str> = outside.find_iter(script).map(|m| m.as_str()).collect();
        assert_eq!(found, ["\"http://www.w3.org/2000/svg", "\"http://www.w3.org/1998/Math/MathML"]);
    }

    #[test]
    fn every_control_has_a_label() {
        let markup = markup();
        let controls = Regex::new(r#"<(select|textarea|input)[^>]*id="([^"]+)"[^>]*>"#).unwrap();
        let labelled = |id: &str| markup.contains(&format!("for=\"{id}\"")) || id.starts_with("set-") || id == "key";
        let ids: Vec<&str> = controls.captures_iter(&markup).map(|found| found.get(2).unwrap().as_str()).collect();
        assert!(ids.len() >= 10 && ids.iter().all(|id| labelled(id)), "{ids:?}");
        let buttons = Regex::new(r#"<button class="icon[^>]*>"#).unwrap();
        let silent = buttons.find_iter(&markup).filter(|m| !m.as_str().contains("aria-label"));
        assert_eq!(
            silent.map(|m| m.as_str()).collect::<Vec<_>>(),
            ["<button class=\"icon sr\" id=\"side-close\" type=\"button\">"]
        );
    }

    #[test]
    fn the_script_uses_only_elements_and_icons_that_exist() {
        let ids: Vec<String> = Regex::new(r#" id="([^"]+)""#)
            .unwrap()
            .captures_iter(&markup())
            .map(|found| found[1].to_string())
            .collect();
        let used = Regex::new(r#"\$\("([\w-]+)"\)|icon\("(\w+)"\)|iconButton\("(\w+)""#).unwrap();
        for found in used.captures_iter(element("script")) {
            let plain = found.get(1).map(|id| id.as_str().to_string()).filter(|id| !id.ends_with('-'));
            let icon = found.get(2).or(found.get(3)).map(|name| format!("i-{}", name.as_str()));
            for id in plain.into_iter().chain(icon) {
                assert!(ids.contains(&id), "{id}");
            }
        }
    }
}
