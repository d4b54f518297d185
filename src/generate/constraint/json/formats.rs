//! Values of `format` that a text is held to. Any other value is an annotation.

/// Formats that describe a text without a limit of what it holds.
const HINTS: [&str; 3] = ["binary", "password", "unknown"];

const DATE: &str = "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)\
                    |02-(?:0[1-9]|[12][0-9]))";
const TIME: &str = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\\.[0-9]+)?\
                    (?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
const LABEL: &str = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?";
const IPV4: &str =
    "(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
/// Characters of a path, without `/`.
const PATH: &str = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})";
/// One part of the local name of an address.
const ATOM: &str = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+";

/// Meaning of a format for a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// It matches this pattern from its beginning to its end.
    Pattern(String),
    /// Nothing.
    Any,
    /// Something that is not enforced.
    Unknown,
}

/// Looks a format up by its name.
pub(super) fn of(name: &str) -> Format {
    Format::Pattern(match name {
        "date" => DATE.into(),
        "time" => TIME.into(),
        "date-time" => format!("{DATE}[tT]{TIME}"),
        "duration" => duration(),
        "email" => format!("{ATOM}(?:\\.{ATOM})*@(?:{LABEL}(?:\\.{LABEL})*|\\[{IPV4}\\])"),
        "hostname" => format!("{LABEL}(?:\\.{LABEL})*"),
        "ipv4" => IPV4.into(),
        "ipv6" => ipv6(),
        "uuid" => "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}".into(),
        "uri" => uri(),
        _ if HINTS.contains(&name) => return Format::Any,
        _ => return Format::Unknown,
    })
}

/// Returns the pattern of ISO 8601: weeks alone, or the other units in their order, of which the inner ones may
/// not be left out.
fn duration() -> String {
    let time = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)";
    let date = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)";
    format!("P(?:{date}(?:{time})?|{time}|[0-9]+W)")
}

/// Returns the pattern of eight groups, of which `::` stands for one or more that are zero; the last two may be
/// an IPv4 address.
fn ipv6() -> String {
    const GROUP: &str = "[0-9a-fA-F]{1,4}";
    let end = format!("(?:{GROUP}:{GROUP}|{IPV4})");
    let mut options = vec![format!("(?:{GROUP}:){{6}}{end}"), format!("::(?:{GROUP}:){{0,5}}{end}")];
    for before in 1..=7 {
        // Groups before `::`, and those that may stand behind it.
        let begin = format!("{GROUP}(?::{GROUP}){{{}}}::", before - 1);
        let behind = 7 - before;
        if behind >= 2 {
            options.push(format!("{begin}(?:{GROUP}:){{0,{}}}{end}", behind - 2));
        }
        options.push(if behind >= 1 { format!("{begin}(?:{GROUP})?") } else { begin });
    }
    options.push(format!("::(?:{GROUP})?"));
    format!("(?:{})", options.join("|"))
}

/// Returns the pattern of RFC 3986: a scheme, then an address with a path or a path alone, a query and a fragment.
fn uri() -> String {
    let host = format!("(?:\\[{}\\]|(?:[a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{{2}})*)", ipv6());
    let user = "(?:(?:[a-zA-Z0-9._~!$&'()*+,;=:-]|%[0-9a-fA-F]{2})*@)?";
    let path = format!("(?://{user}{host}(?::[0-9]*)?(?:/{PATH}*)*|/?(?:{PATH}+(?:/{PATH}*)*)?)");
    format!("[a-zA-Z][a-zA-Z0-9+.-]*:{path}(?:\\?(?:{PATH}|[/?])*)?(?:#(?:{PATH}|[/?])*)?")
}
