//! Mutates chat templates as lists of tags and of the texts between them, and tags as lists of words.

use super::{below, edit, one_in, pick, range};
use iec::rng::Rng;

/// Filters, operators and accesses to put behind a value.
const SUFFIXES: &str = "|tojson |length |upper |trim |list |join('a') |replace('','aa') |indent(9) |reverse |first \
    |map(attribute='role') |selectattr('role','equalto','user') |default('x',true) |batch(2) |tojson(indent=99) *9 **99 \
    ~messages +1 -1 //0 %0 [0] [-1] [::-1] [1:] .role ['content'] .split('') .strip() .items() .get('a') ==x if(x)else(1)";

/// Expressions to put in the place of a name.
const VALUES: &str = "range(999) range(10**9) messages loop loop.index0 loop(messages) self none true '' '{{' [] {} x \
    {'a':messages} namespace(n=0) 1e308 9223372036854775807 (messages) not(x) strftime_now('%Y') raise_exception('x')";

/// Tags to put around other parts.
const AROUND: &[(&str, &str)] = &[
    ("{% if messages %}", "{% endif %}"),
    ("{%- if not x -%}", "{%- else -%}y{%- endif -%}"),
    ("{% for m in messages %}", "{% endfor %}"),
    ("{% for i in range(99) %}", "{% endfor %}"),
    ("{% for x in messages recursive %}{{ loop(messages) }}", "{% endfor %}"),
    ("{% macro f(x) %}", "{% endmacro %}{{ f(f) }}"),
    ("{% macro f() %}{{ f() }}", "{% endmacro %}{{ f() }}"),
    ("{% filter upper %}", "{% endfilter %}"),
    ("{% set x %}", "{% endset %}{{ x }}"),
    ("{% set x = messages %}", "{{ x | tojson }}"),
    ("{% raw %}", "{% endraw %}"),
    ("{% generation %}", "{% endgeneration %}"),
];

pub(super) fn mutate(input: &[u8], other: &[u8], rng: &mut Rng) -> Option<Vec<u8>> {
    let mut all = pieces(std::str::from_utf8(input).ok()?);
    let others = pieces(std::str::from_utf8(other).ok()?);
    for _ in 0..=below(rng, 3) {
        let part = if one_in(4, rng) { range(all.len(), rng) } else { 0..all.len() };
        match below(rng, 16) {
            0 => edit(&mut all, &others, rng),
            1..5 => {
                let (open, close) = pick(AROUND, rng);
                all.insert(part.end, vec![close.to_string()]);
                all.insert(part.start, vec![open.to_string()]);
            }
            _ => {
                let piece = below(rng, all.len());
                let donor = others.get(below(rng, others.len())).map_or(&[][..], Vec::as_slice);
                change(all.get_mut(piece)?, donor, rng);
            }
        }
    }
    Some(all.concat().concat().into_bytes())
}

/// Changes a text, or the words of a tag after its opening delimiter and the name of its statement.
fn change(piece: &mut Vec<String>, donor: &[String], rng: &mut Rng) {
    let is_name = |word: &String| word.starts_with(|c: char| c.is_alphanumeric());
    let is_statement = piece.get(1).is_some_and(|sign| sign == "%");
    let first = if is_statement { piece.iter().position(is_name).map_or(2, |at| at + 1) } else { 2 };
    let (first, last) = if piece.len() > first + 2 { (first, piece.len() - 2) } else { (0, piece.len()) };
    if is_statement && first == 0 {
        return;
    }
    let mut inner = piece[first..last].to_vec();
    let names: Vec<usize> = (0..inner.len()).filter(|at| is_name(&inner[*at])).collect();
    if names.is_empty() || one_in(8, rng) {
        edit(&mut inner, donor.get(first..donor.len().saturating_sub(2)).unwrap_or_default(), rng);
    } else if one_in(2, rng) {
        inner.insert(pick(&names, rng) + 1, word(SUFFIXES, rng));
    } else {
        inner[*pick(&names, rng)] = word(VALUES, rng);
    }
    piece.splice(first..last, inner);
}

fn word(words: &str, rng: &mut Rng) -> String {
    pick(&words.split(' ').collect::<Vec<_>>(), rng).to_string()
}

/// Splits a template into tags and texts; a text has one word.
fn pieces(template: &str) -> Vec<Vec<String>> {
    let mut pieces = Vec::new();
    let mut rest = template;
    let nearest = |text: &str, marks: [&str; 3]| marks.iter().filter_map(|mark| text.find(mark)).min();
    while !rest.is_empty() {
        let start = nearest(rest, ["{{", "{%", "{#"]).unwrap_or(rest.len());
        let end = if start > 0 { start } else { nearest(&rest[2..], ["}}", "%}", "#}"]).map_or(rest.len(), |n| n + 4) };
        pieces.push(if start > 0 { vec![rest[..end].to_string()] } else { words(&rest[..end]) });
        rest = &rest[end..];
    }
    pieces
}

/// Splits a tag into names and numbers, runs of spaces, and single signs.
fn words(tag: &str) -> Vec<String> {
    let kind = |c: char| (c.is_alphanumeric() || c == '_', c.is_whitespace());
    let mut words: Vec<String> = Vec::new();
    for c in tag.chars() {
        match words.last_mut() {
            Some(word) if kind(c) != (false, false) && word.ends_with(|end| kind(end) == kind(c)) => word.push(c),
            _ => words.push(c.to_string()),
        }
    }
    words
}
