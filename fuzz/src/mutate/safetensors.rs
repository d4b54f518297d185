//! Mutates safetensors files, and headers without a file, as JSON with a correct length. In half of the outputs the
//! tensors are placed one after the other, with the sizes of their dtypes and shapes.

use super::json::{self, Node};
use super::{Reader, below, number, one_in};
use iec::rng::Rng;

/// Maximum bytes of data that are written; a header may describe more.
const MOST_DATA: usize = 4096;

pub(super) fn mutate(input: &[u8], other: &[u8], rng: &mut Rng) -> Option<Vec<u8>> {
    let (mut header, mut data) = parse(input)?;
    let other = parse(other).map_or_else(|| header.clone(), |(header, _)| header);
    for _ in 0..=below(rng, 4) {
        json::change(&mut header, &other, rng);
    }
    let end = if one_in(2, rng) { place(&mut header) } else { None };
    let text = header.text();
    let Some(data) = &mut data else { return Some(text.into_bytes()) };
    if let Some(end) = end.filter(|end| *end <= MOST_DATA) {
        data.resize(end, 1);
    }
    let exact = text.len() as u64;
    let length = if one_in(32, rng) { number(exact, rng) } else { exact };
    Some([&length.to_le_bytes(), text.as_bytes(), data].concat())
}

/// Returns the header, and the data if the input is a complete file; `None` if the header is not JSON.
fn parse(input: &[u8]) -> Option<(Node, Option<Vec<u8>>)> {
    let mut file = Reader { bytes: input, at: 0 };
    let (header, data) = match file.prefixed(8) {
        Some(header) => (header, Some(input[file.at..].to_vec())),
        None => (input, None),
    };
    Some((json::parse(header)?.swap_remove(0), data))
}

/// Places all tensors one after the other; returns the end of the last one in bytes, or `None` if the header is no
/// object or a size is unknown.
fn place(header: &mut Node) -> Option<usize> {
    let Node::Map(members) = header else { return None };
    let mut end = 0usize;
    for (_, tensor) in members {
        let Node::Map(fields) = tensor else { continue };
        let field = |name: &str| fields.iter().find(|(key, _)| key == name).map(|(_, value)| value);
        let (Some(dtype), Some(Node::List(shape))) = (field("\"dtype\""), field("\"shape\"")) else { continue };
        let bits: usize = dtype.text().replace(|c: char| !c.is_ascii_digit(), "").parse().unwrap_or(8);
        let axes = shape.iter().map(|axis| axis.text().parse::<usize>().ok());
        let count = axes.into_iter().try_fold(1usize, |count, axis| count.checked_mul(axis?))?;
        let start = end;
        end = start.checked_add(count.checked_mul(bits / 8)?)?;
        let offsets = Node::Leaf(format!("[{start},{end}]"));
        fields.iter_mut().filter(|(key, _)| key == "\"data_offsets\"").for_each(|field| field.1 = offsets.clone());
    }
    Some(end)
}
