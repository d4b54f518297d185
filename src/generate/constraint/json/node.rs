//! Values that a schema allows: the tree between the text of a schema and the rules of a grammar.

use serde_json::Value;
use std::rc::Rc;

/// Values that a schema allows.
#[derive(Debug, Clone)]
pub(super) enum Node {
    /// Any JSON.
    Any,
    /// Nothing.
    Never,
    /// `null`.
    Null,
    /// `true` and `false`, or one of them.
    Bool(Option<bool>),
    Number(Number),
    Text(Text),
    Array(Rc<Array>),
    Object(Rc<Object>),
    /// Values that one of these allows.
    Union(Vec<Node>),
    /// Values that the referenced schema of this number allows.
    Ref(usize),
}

/// Numbers.
#[derive(Debug, Clone, Default)]
pub(super) struct Number {
    pub(super) integer: bool,
    /// The only number.
    pub(super) constant: Option<serde_json::Number>,
    /// Smallest number, and whether it is excluded.
    pub(super) min: Option<(f64, bool)>,
    /// Largest number, and whether it is excluded.
    pub(super) max: Option<(f64, bool)>,
    /// Values of `multipleOf`.
    pub(super) multiples: Vec<Value>,
}

/// Texts.
#[derive(Debug, Clone, Default)]
pub(super) struct Text {
    /// The only text.
    pub(super) constant: Option<Rc<str>>,
    /// Expressions that all spellings match, quotation marks included.
    pub(super) patterns: Vec<Rc<str>>,
    pub(super) min: usize,
    pub(super) max: Option<usize>,
}

/// Arrays.
#[derive(Debug, Clone)]
pub(super) struct Array {
    /// Items at the beginning.
    pub(super) first: Vec<Node>,
    /// Further items.
    pub(super) rest: Node,
    pub(super) min: usize,
    pub(super) max: Option<usize>,
}

/// Objects.
#[derive(Debug, Clone, Default)]
pub(super) struct Object {
    /// Whether the schema lists properties, of which there may be none.
    pub(super) listed: bool,
    /// Properties in the order in which they are written.
    pub(super) properties: Vec<Property>,
    /// Expressions of names, as those of texts, and the values of such properties.
    pub(super) patterns: Vec<(Rc<str>, Node)>,
    /// Values of other properties; `None` if the schema does not say whether there may be some.
    pub(super) others: Option<Node>,
    /// Names of other properties; `None` = any.
    pub(super) names: Option<Vec<Text>>,
    pub(super) min: usize,
    pub(super) max: Option<usize>,
}

/// A property of an object.
#[derive(Debug, Clone)]
pub(super) struct Property {
    pub(super) name: Rc<str>,
    pub(super) value: Node,
    pub(super) required: bool,
}

impl Node {
    pub(super) fn is_never(&self) -> bool {
        matches!(self, Node::Never)
    }

    /// Returns what one of these nodes allows.
    pub(super) fn union(options: Vec<Node>) -> Node {
        let mut flat = Vec::with_capacity(options.len());
        for option in options {
            match option {
                Node::Any => return Node::Any,
                Node::Never => {}
                Node::Union(inner) => flat.extend(inner),
                other => flat.push(other),
            }
        }
        match flat.len() {
            0 => Node::Never,
            1 => flat.swap_remove(0),
            _ => Node::Union(flat),
        }
    }

    /// Returns the node of one value.
    pub(super) fn constant(value: &Value) -> Node {
        match value {
            Value::Null => Node::Null,
            Value::Bool(value) => Node::Bool(Some(*value)),
            Value::Number(number) => Node::Number(Number { constant: Some(number.clone()), ..Number::default() }),
            Value::String(text) => Node::Text(Text { constant: Some(text.as_str().into()), ..Text::default() }),
            Value::Array(items) => Node::Array(Rc::new(Array {
                first: items.iter().map(Node::constant).collect(),
                rest: Node::Never,
                min: items.len(),
                max: Some(items.len()),
            })),
            Value::Object(members) => {
                let property = |(name, value): (&String, &Value)| Property {
                    name: name.as_str().into(),
                    value: Node::constant(value),
                    required: true,
                };
                let properties = members.iter().map(property).collect();
                Node::Object(Rc::new(Object { properties, others: Some(Node::Never), ..Object::default() }))
            }
        }
    }
}

impl Number {
    /// Returns true if the number has a value within the bounds and of the kind.
    pub(super) fn allows(&self, number: &serde_json::Number) -> bool {
        let Some(value) = number.as_f64() else { return false };
        let whole = !self.integer || value.fract() == 0.0;
        let above = self.min.is_none_or(|(min, excluded)| value > min || value == min && !excluded);
        let below = self.max.is_none_or(|(max, excluded)| value < max || value == max && !excluded);
        let is_multiple = |step: &Value| {
            let quotient = value / step.as_f64().unwrap_or(1.0);
            (quotient - quotient.round()).abs() < 1e-9 * quotient.abs().max(1.0)
        };
        whole && above && below && self.multiples.iter().all(is_multiple)
    }
}
