//! Documents that are valid against a schema are followed byte by byte: each must be allowed as it is, whatever its
//! spelling. Documents that are not valid must be stopped.

use super::super::tests::{accepts, bytes};
use super::super::{Constraint, ConstraintSource};
use super::{ReadOptions, SchemaRules, rules};
use serde_json::{Value, json};

/// A schema, documents that must be allowed, and documents that must not.
struct Case {
    schema: Value,
    valid: &'static [&'static str],
    invalid: &'static [&'static str],
}

fn case(schema: Value, valid: &'static [&'static str], invalid: &'static [&'static str]) -> Case {
    Case { schema, valid, invalid }
}

/// Follows the documents of all cases, and reports every one that is treated wrongly.
fn follow(cases: &[Case], make: impl Fn(String) -> ConstraintSource) {
    let vocabulary = bytes();
    let mut failures = Vec::new();
    for Case { schema, valid, invalid } in cases {
        let constraint = match Constraint::compile(&make(schema.to_string()), &vocabulary) {
            Ok(constraint) => constraint,
            Err(e) => {
                failures.push(format!("{schema}: {e}"));
                continue;
            }
        };
        for (texts, expected) in [(valid, true), (invalid, false)] {
            for text in texts.iter().filter(|text| accepts(&constraint, text) != expected) {
                failures.push(format!("{schema}: {text} is {}", if expected { "stopped" } else { "allowed" }));
            }
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

/// Spellings of texts that no schema limits.
const TEXTS: &[&str] = &[
    r#""""#,
    r#""plain""#,
    r#""café 你好 🙂""#,
    r#""caf\u00e9 \u4F60 \ud83d\ude00 \uD83D\uDE00""#,
    r#""\u0041\u0000\u001F\u007f\uffff\ue000\uD7FF""#,
    r#""\" \\ \/ \b \f \n \r \t / '""#,
    "\"\u{7f}\u{80}\u{2028}\"",
    r#""<b>\u003c\u003E\u0026""#,
];
/// Texts that are not JSON, or spell no character.
const NO_TEXTS: &[&str] = &[
    "\"a\nb\"",
    "\"a\tb\"",
    r#""\x41""#,
    r#""\u12""#,
    r#""\u12g4""#,
    r#""\ud83d""#,
    r#""\ude00""#,
    r#""\ud83d\u0041""#,
    r#""\'""#,
    "'a'",
    "\"a",
];

#[test]
fn texts_are_allowed_in_all_spellings() {
    follow(
        &[
            case(json!({"type": "string"}), TEXTS, NO_TEXTS),
            case(json!({}), TEXTS, NO_TEXTS),
            case(json!({"type": "string", "maxLength": 40}), TEXTS, NO_TEXTS),
            case(
                json!({"type": "string", "minLength": 0, "maxLength": 40, "pattern": "^(.|\\n|\\r|\u{2028})*$"}),
                TEXTS,
                NO_TEXTS,
            ),
            case(
                json!({"type": "string", "minLength": 2, "maxLength": 3}),
                &[
                    r#""ab""#,
                    r#""éé""#,
                    r#""\u00e9\n\/""#,
                    r#""🙂\ud83d\ude42""#,
                    r#""\ud83d\ude42\ud83d\ude42\ud83d\ude42""#,
                ],
                &[r#""a""#, r#""\ud83d\ude42""#, r#""abcd""#, r#""\u0061\u0062\u0063\u0064""#],
            ),
            case(
                json!({"const": "café/ \"\n🙂"}),
                &[
                    r#""café/ \"\n🙂""#,
                    r#""caf\u00e9\/ \"\n\ud83d\ude42""#,
                    r#""\u0063\u0061\u0066\u00E9\u002f\u0020\u0022\u000a\uD83D\uDE42""#,
                ],
                &[r#""cafe""#, r#""café""#, r#""caf\u00e8/ \"\n🙂""#],
            ),
            case(
                json!({"enum": ["naïve", "a/b", 1, null]}),
                &[r#""naïve""#, r#""na\u00efve""#, r#""a\/b""#, r#""a/b""#, "1", "null"],
                &[r#""naive""#, "2", "true"],
            ),
            case(
                json!({"type": "string", "pattern": "^[à-ÿ]{2,3}$"}),
                &[r#""éè""#, r#""\u00e9\u00E8""#, r#""é\u00e8à""#],
                &[r#""é""#, r#""ee""#, r#""\u0065\u0065""#, r#""\u00e9""#],
            ),
            case(
                json!({"type": "string", "pattern": "/"}),
                &[r#""a/b""#, r#""a\/b""#, r#""\u002f""#, r#""\n/""#],
                &[r#""ab""#, r#""\\""#],
            ),
            case(
                json!({"type": "string", "pattern": "^\\d+$|^x"}),
                &[r#""12""#, r#""\u0031""#, r#""xyz""#],
                &[r#""1a""#, r#""a""#, r#""""#],
            ),
            case(
                json!({"type": "string", "pattern": "(^|,)a(b$|$)"}),
                &[r#""a""#, r#""ab""#, r#""x,a""#, r#""\u0061""#],
                &[r#""xa""#, r#""ac""#, r#""abb""#],
            ),
            case(
                json!({"type": "string", "pattern": "^[^a]$"}),
                &[r#""b""#, r#""\n""#, r#""🙂""#, r#""\ud83d\ude42""#, r#""\"""#, r#""\u0062""#],
                &[r#""a""#, r#""\u0061""#, r#""bb""#],
            ),
            case(
                json!({"type": "string", "pattern": "^\u{1f600}-[\u{1f600}-\u{1f64f}]$"}),
                &["\"\u{1f600}-\u{1f601}\"", r#""\ud83d\ude00-\ud83d\ude4f""#],
                &[r#""\ud83d\ude00-\ud83d\ude50""#],
            ),
        ],
        ConstraintSource::JsonSchema,
    );
}

#[test]
fn every_format_allows_its_texts() {
    let format = |name: &str| json!({"type": "string", "format": name});
    follow(
        &[
            case(
                format("date-time"),
                &[
                    r#""2024-02-29T23:59:60Z""#,
                    r#""2024-01-01t00:00:00.123456+05:30""#,
                    r#""2024\u002d01-01T00\u003a00:00Z""#,
                ],
                &[r#""2024-13-01T00:00:00Z""#, r#""2024-01-01""#, r#""2024-04-31T00:00:00Z""#],
            ),
            case(format("date"), &[r#""1999-12-31""#, r#""2000-02-29""#], &[r#""1999-2-1""#, r#""1999-02-30""#]),
            case(format("time"), &[r#""23:59:59Z""#, r#""00:00:00.5-01:00""#], &[r#""24:00:00Z""#, r#""12:00""#]),
            case(
                format("duration"),
                &[r#""P1Y2M3DT4H5M6S""#, r#""PT0S""#, r#""P4W""#, r#""P1M""#, r#""PT36H""#],
                &[r#""P""#, r#""PT""#, r#""1D""#, r#""P1Y2D""#],
            ),
            case(
                format("email"),
                &[r#""a.b+c@example.com""#, r#""x@localhost""#, r#""a@[127.0.0.1]""#, r#""o'b@x.org""#],
                &[r#""a@""#, r#""@b.c""#, r#""a b@c.d""#, r#""a@-b.c""#],
            ),
            case(format("hostname"), &[r#""a""#, r#""www.ex-ample.com""#], &[r#""-a""#, r#""a..b""#, r#""a_b""#]),
            case(
                format("ipv4"),
                &[r#""0.0.0.0""#, r#""255.249.199.9""#],
                &[r#""256.0.0.0""#, r#""1.2.3""#, r#""01.2.3.4""#],
            ),
            case(
                format("ipv6"),
                &[
                    r#""::""#,
                    r#""::1""#,
                    r#""1::""#,
                    r#""2001:db8::ff00:42:8329""#,
                    r#""1:2:3:4:5:6:7:8""#,
                    r#""1:2:3:4:5:6:7::""#,
                    r#""::ffff:192.0.2.1""#,
                    r#""1::8""#,
                ],
                &[r#""1:2:3:4:5:6:7:8:9""#, r#""1::2::3""#, r#""12345::""#, r#""1:2""#, r#""1:2:3:4:5:6:7::8""#],
            ),
            case(
                format("uuid"),
                &[r#""123e4567-e89b-12d3-a456-426614174000""#, r#""00000000-0000-0000-0000-00000000ABCD""#],
                &[r#""123e4567e89b12d3a456426614174000""#, r#""123e4567-e89b-12d3-a456-42661417400g""#],
            ),
            case(
                format("uri"),
                &[
                    r#""https://user:pw@example.com:8080/a/b%20c/?q=1&r=x/?#top""#,
                    r#""https:\/\/example.com\/a""#,
                    r#""mailto:a@b.c""#,
                    r#""urn:isbn:0451450523""#,
                    r#""file:///etc/hosts""#,
                    r#""http://[::1]/""#,
                    r#""data:text/plain,hello""#,
                ],
                &[r#""example.com""#, r#""http://a b""#, r#""//x""#, r#""http://a/[x]""#],
            ),
            case(format("password"), &[r#""any \u00e9 thing""#], &["1"]),
            case(format("binary"), &[r#""any thing""#], &["1"]),
            case(
                json!({"type": "string", "format": "date", "pattern": "^2024"}),
                &[r#""2024-05-06""#],
                &[r#""2023-05-06""#, r#""2024""#],
            ),
            case(
                json!({"type": "string", "format": "email", "maxLength": 7}),
                &[r#""a@b.org""#, r#""a@b.or\u0067""#],
                &[r#""aa@b.org""#],
            ),
        ],
        ConstraintSource::JsonSchema,
    );
}

#[test]
fn numbers_are_allowed_in_all_spellings() {
    follow(
        &[
            case(
                json!({"type": "number"}),
                &["0", "-0", "-0.0", "1", "-1", "1.50", "1e2", "1E+2", "-1.5e-7", "12345678901234567890123", "1e400"],
                &["01", "+1", ".5", "1.", "1e", "0x1", "NaN", "Infinity", "\"1\"", "- 1"],
            ),
            case(
                json!({"type": "integer"}),
                &["0", "-0", "7", "-123456789012345678901234567890", "5.0", "1e2", "1E+2", "-2.0"],
                &["1.5", "1e-2", "00", "\"1\""],
            ),
            case(json!({"type": "integer", "minimum": 0, "maximum": 120}), &["0", "7", "120"], &["-1", "121", "1.5"]),
            case(json!({"type": "integer", "exclusiveMinimum": 0}), &["1", "99999"], &["0", "-1"]),
            case(
                json!({"type": "integer", "minimum": -9007199254740991i64, "maximum": 9007199254740991i64}),
                &["-9007199254740991", "0", "9007199254740991"],
                &["9007199254740992", "90071992547409910"],
            ),
            case(json!({"type": "number", "minimum": 0, "maximum": 1}), &["0", "0.25", "1", "1.0"], &["1.01", "-0.5"]),
            case(json!({"type": "number", "exclusiveMinimum": 0, "maximum": 2.5}), &["0.1", "2.5"], &["0", "2.6"]),
            case(json!({"type": "number", "minimum": 3, "exclusiveMinimum": true}), &["3.1", "4"], &["3", "2"]),
            case(json!({"type": "integer", "multipleOf": 5}), &["0", "-10", "25"], &["3", "12"]),
            case(json!({"type": "number", "multipleOf": 0.01}), &["1.25", "3", "0.1"], &["0.001"]),
            case(json!({"type": "integer", "multipleOf": 5, "minimum": 10}), &["10", "1000"], &["5", "11"]),
            case(
                json!({"enum": [1, 2.5, -0.0, 1e-7, 9007199254740993u64]}),
                &["1", "1.0", "2.5", "2.50", "1E-7", "0", "-0", "9007199254740993"],
                &["2", "9007199254740992"],
            ),
            case(json!({"const": -3}), &["-3", "-3.0"], &["3", "-30"]),
            case(json!({"type": ["integer", "null"], "minimum": 1}), &["null", "5"], &["0"]),
            case(
                json!({"type": "array", "items": {"type": "integer", "minimum": 1}}),
                &["[]", "[1]", "[1, 2]"],
                &["[0]"],
            ),
            case(
                json!({"anyOf": [{"type": "number", "maximum": 5}, {"type": "string"}, {"type": "null"}]}),
                &["4", "-7.5", "\"x\"", "null"],
                &["6", "true"],
            ),
        ][..],
        ConstraintSource::JsonSchema,
    );
}

#[test]
fn arrays_and_white_space_are_allowed() {
    follow(
        &[
            case(
                json!({"type": "array", "items": {"type": "integer"}}),
                &[
                    "[]",
                    "[ ]",
                    "[\n]",
                    "[1]",
                    "[1,2]",
                    "[1, 2]",
                    "[ 1 , 2 ]",
                    "[\n  1,\n  2\n]",
                    "[\r\n\t1,\r\n\t2\r\n]",
                ],
                &["[1 2]", "[,]", "[1,]", "[1", "[  1]", "[\n\n1]", " []", "[] "],
            ),
            case(json!({"type": "array", "maxItems": 2}), &["[]", "[null]", "[{}, []]"], &["[1,2,3]"]),
            case(json!({"type": "array", "minItems": 2}), &["[1,2]", "[1,2,3,4]"], &["[]", "[1]"]),
            case(json!({"type": "array", "minItems": 2, "maxItems": 3}), &["[1,2]", "[1,2,3]"], &["[1]", "[1,2,3,4]"]),
            case(json!({"type": "array", "maxItems": 0}), &["[]", "[ ]"], &["[1]"]),
            case(
                json!({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}),
                &["[]", "[1]", "[1,\"a\"]", "[1,\"a\",null]"],
                &["[\"a\"]", "[1,2]"],
            ),
            case(
                json!({"prefixItems": [{"const": 1}, {"const": 2}], "items": false, "type": "array", "minItems": 1}),
                &["[1]", "[1,2]"],
                &["[]", "[1,2,3]"],
            ),
            case(
                json!({"type": "array", "prefixItems": [{}, {"type": "boolean"}], "items": {"type": "null"},
                    "minItems": 3, "maxItems": 4}),
                &["[1,true,null]", "[1,false,null,null]"],
                &["[1,true]", "[1,true,1]", "[1,true,null,null,null]"],
            ),
            case(
                json!({"type": "array", "items": [{"const": 1}, {"const": 2}], "additionalItems": false}),
                &["[]", "[1]", "[1,2]"],
                &["[1,2,3]", "[2]"],
            ),
            case(json!({"type": "array", "prefixItems": [{}, {}, {}], "maxItems": 2}), &["[1,2]", "[1]"], &["[1,2,3]"]),
            case(
                json!({"const": [1, {"a": null}]}),
                &[r#"[1,{"a":null}]"#, r#"[ 1, {"\u0061": null} ]"#],
                &["[1]", "[]"],
            ),
            case(
                json!({"type": "array", "items": {"type": "array", "items": {"type": "string"}}}),
                &[r#"[["a"],[]]"#, r#"[["\u00e9", "\/"]]"#],
                &["[1]"],
            ),
        ],
        ConstraintSource::JsonSchema,
    );
}

#[test]
fn objects_are_allowed_with_any_spelling_of_their_names() {
    let person = json!({"type": "object", "properties": {"name": {"type": "string"}, "âge": {"type": "integer"}},
        "required": ["name"]});
    let closed = json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {}},
        "required": ["b"], "additionalProperties": false});
    follow(
        &[
            case(
                person,
                &[
                    r#"{"name":"x"}"#,
                    r#"{"name": "x", "âge": 5}"#,
                    r#"{"n\u0061me": "\/", "\u00e2ge": 5}"#,
                    r#"{ "name" : "x" }"#,
                    "{\n  \"name\": \"x\",\n  \"âge\": 5\n}",
                    r#"{"name": "x", "âge": 5, "other": [1, {"z": null}], "é\u00e9": "\ud83d\ude00"}"#,
                    r#"{"name": "x", "other": 1}"#,
                ],
                &[
                    "{}",
                    r#"{"âge": 5, "name": "x"}"#,
                    r#"{"name": 5}"#,
                    r#"{"name": "x", "âge": "5"}"#,
                    r#"{"name": "x", "\u00e2ge": "5"}"#,
                    r#"{"name": "x", "name": "y"}"#,
                    r#"{"name": "x", "n\u0061me": "y"}"#,
                ],
            ),
            case(
                closed,
                &[r#"{"b":1}"#, r#"{"a":1,"b":2,"c":3}"#, r#"{"b":1,"c":{"x":[]}}"#, r#"{"a": 1, "b": 2}"#],
                &["{}", r#"{"a":1}"#, r#"{"b":1,"d":2}"#, r#"{"b":1,}"#, r#"{"b" 1}"#],
            ),
            case(json!({"type": "object"}), &["{}", "{ }", r#"{"a":{"b":[{}]}}"#, "{\n\t\"\\u00e9\": 1\n}"], &["[]"]),
            case(
                json!({"type": "object", "additionalProperties": {"type": "integer"}}),
                &["{}", r#"{"a":1,"\u00e9":2}"#],
                &[r#"{"a":"1"}"#],
            ),
            case(
                json!({"type": "object", "properties": {}, "additionalProperties": false}),
                &["{}", "{ }"],
                &[r#"{"a":1}"#],
            ),
            case(
                json!({"type": "object", "patternProperties": {"^x-": {"type": "string"}, "^n": {"type": "integer"}},
                    "additionalProperties": false}),
                &["{}", r#"{"x-a":"1","n":2}"#, r#"{"\u0078-a":"\/"}"#],
                &[r#"{"x-a":1}"#, r#"{"y":1}"#],
            ),
            case(
                json!({"type": "object", "properties": {"a": {"type": "integer"}},
                    "patternProperties": {"^a": {"minimum": 3}}}),
                &[r#"{"a":3}"#, r#"{"ab":5,"z":"x"}"#, r#"{"ab":"x"}"#],
                &[r#"{"a":2}"#, r#"{"ab":2}"#],
            ),
            case(
                json!({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"},
                    "additionalProperties": {"type": "integer"}}),
                &["{}", r#"{"ab":1}"#, r#"{"\u0061b":1}"#],
                &[r#"{"A":1}"#],
            ),
            case(
                json!({"type": "object", "propertyNames": {"enum": ["red", "blue"]},
                    "additionalProperties": {"type": "integer"}}),
                &["{}", r#"{"blue":1,"red":2}"#],
                &[r#"{"green":1}"#],
            ),
            case(
                json!({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}),
                &["{}", r#"{"é":1}"#],
                &["1"],
            ),
            case(
                json!({"type": "object", "minProperties": 1, "maxProperties": 2}),
                &[r#"{"a":1}"#, r#"{"a":1,"b":2}"#],
                &["{}", r#"{"a":1,"b":2,"c":3}"#],
            ),
            case(
                json!({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2,
                    "additionalProperties": false}),
                &[r#"{"a":1,"b":2}"#, r#"{"a":1,"c":2}"#, r#"{"b":1,"c":2}"#, r#"{"a":1,"b":2,"c":3}"#],
                &["{}", r#"{"a":1}"#, r#"{"c":1}"#],
            ),
            case(
                json!({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 2}),
                &["{}", r#"{"a":1,"b":2}"#, r#"{"a":1,"z":2}"#, r#"{"y":1,"z":2}"#],
                &[r#"{"a":1,"b":2,"z":3}"#],
            ),
            case(
                json!({"type": "object", "required": ["q"]}),
                &[r#"{"q":[]}"#, r#"{"q":1,"a":2}"#],
                &["{}", r#"{"a":1}"#],
            ),
            case(
                json!({"type": "object", "properties": {"a": false, "b": {}}}),
                &["{}", r#"{"b":1}"#],
                &[r#"{"a":1}"#],
            ),
        ],
        ConstraintSource::JsonSchema,
    );
}

#[test]
fn schemas_with_many_names_allow_the_escapes_that_encoders_write() {
    let names = (0..200).map(|i| (format!("name-{i}/é"), json!({"type": "integer"})));
    let properties: serde_json::Map<String, Value> = names.collect();
    let values: Vec<String> = (0..200).map(|i| format!("value_{i} <é>")).collect();
    follow(
        &[
            case(
                json!({"type": "object", "properties": properties, "required": ["name-7/é"]}),
                &[r#"{"name-7/é":1}"#, r#"{"name-7\/\u00e9":1, "name-199/\u00E9": 2, "other\/\u00e9": 3}"#],
                &["{}", r#"{"name-7/é":"x"}"#, r#"{"name-7/é":1,"n\u0061me-7/é":"x"}"#],
            ),
            case(json!({"enum": values}), &[r#""value_7 <é>""#, r#""value_7 \u003c\u00e9\u003E""#], &[r#""value_7""#]),
        ],
        ConstraintSource::JsonSchema,
    );
}

#[test]
fn combinations_and_references_are_allowed() {
    let pets = json!({
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {
            "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
                "required": ["kind"], "additionalProperties": false},
            "Dog": {"type": "object", "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}},
                "required": ["kind", "name"], "additionalProperties": false}
        }
    });
    let tree = json!({"$ref": "#/$defs/Node", "$defs": {"Node": {"type": "object", "properties": {
        "value": {"type": "integer"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}}
    }, "required": ["value"], "additionalProperties": false}}});
    follow(
        &[
            case(
                pets,
                &[r#"{"kind":"cat"}"#, r#"{"kind": "cat", "lives": 9}"#, r#"{"kind":"dog","name":"Rex"}"#],
                &["{}", r#"{"kind":"dog"}"#, r#"{"kind":"cow"}"#, r#"{"kind":"cat","name":"x"}"#],
            ),
            case(
                tree,
                &[r#"{"value":1}"#, r#"{"value":1,"children":[{"value":2,"children":[]},{"value":3}]}"#],
                &[r#"{"children":[]}"#, r#"{"value":1,"children":[1]}"#],
            ),
            case(
                json!({"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "object",
                    "properties": {"a": {}}, "required": ["a"]}]}),
                &["\"x\"", "5", r#"{"a":1}"#],
                &["null", "{}", "[]"],
            ),
            case(
                json!({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}]}),
                &[r#"{"a":1,"b":"x"}"#, r#"{"a":1,"b":"x","c":null}"#],
                &[r#"{"a":1}"#, r#"{"b":"x"}"#],
            ),
            case(
                json!({"allOf": [{"minLength": 2}, {"pattern": "^a"}, {"type": "string", "maxLength": 3}]}),
                &["\"ab\"", "\"abc\"", r#""\u0061\u00e9""#],
                &["\"a\"", "\"bb\"", "\"abcd\""],
            ),
            case(
                json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/a~1b%20c",
                    "description": "d"}}, "required": ["x"],
                    "$defs": {"a/b c": {"enum": [1, 2]}}}),
                &[r#"{"x":1}"#],
                &[r#"{"x":3}"#],
            ),
            case(
                json!({"type": "object", "properties": {"a": {"type": "string"}, "b": {"$ref": "#/properties/a"}}}),
                &[r#"{"a":"x","b":"y"}"#],
                &[r#"{"b":1}"#],
            ),
            case(json!({"type": "string", "nullable": true}), &["null", "\"x\""], &["1"]),
            case(json!({"type": "string", "enum": ["a"], "nullable": true}), &["null", "\"a\""], &["\"b\""]),
            case(json!({"type": "null"}), &["null"], &["nul", "0"]),
            case(json!({"type": "boolean"}), &["true", "false"], &["1", "True"]),
            case(json!({"const": true}), &["true"], &["false"]),
            case(json!(true), &["null", "[1]", "\"é\"", r#"{"\u00e9":"\/"}"#, "-0.5e3"], &["nope"]),
            case(
                json!({"oneOf": [{"type": "integer", "maximum": 2}, {"type": "integer", "minimum": 3}]}),
                &["-5", "2", "3", "70"],
                &["2.5"],
            ),
            case(json!({"minLength": 2}), &["5", "null", "{}", "\"ab\""], &["\"a\""]),
            case(
                json!({"type": "object", "properties": {"self": {"$ref": "#"}, "v": {"type": "integer"}}}),
                &[r#"{"self":{"self":{"v":1},"v":2}}"#],
                &[r#"{"self":1}"#],
            ),
        ],
        ConstraintSource::JsonSchema,
    );
}

#[test]
fn closed_schemas_allow_no_properties_that_they_do_not_list() {
    follow(
        &[
            case(
                json!({"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}},
                    "l": {"type": "array", "items": {"type": "object", "properties": {"c": {}}}}}}),
                &[r#"{"a":{"b":1},"l":[{"c":2}]}"#, "{}"],
                &[r#"{"z":1}"#, r#"{"a":{"z":1}}"#, r#"{"l":[{"z":1}]}"#],
            ),
            case(json!({"type": "object", "properties": {}}), &["{}"], &[r#"{"z":1}"#]),
            case(
                json!({"type": "object", "properties": {"a": {}}, "additionalProperties": true}),
                &[r#"{"z":1}"#],
                &[],
            ),
            case(json!({"type": "object"}), &[r#"{"z":1}"#], &[]),
            case(
                json!({"allOf": [{"type": "object", "properties": {"a": {}}, "required": ["a"]}, {"$ref": "#/$defs/B"}],
                    "$defs": {"B": {"type": "object", "properties": {"b": {}}}}}),
                &[r#"{"a":1,"b":2}"#, r#"{"a":1}"#],
                &[r#"{"a":1,"z":2}"#],
            ),
        ],
        ConstraintSource::ClosedJsonSchema,
    );
}

fn hint(schema: &Value) -> SchemaRules {
    rules(schema, ReadOptions { depth: 64, lenient: true, closed: false }).unwrap()
}

/// Follows keywords that generators and servers of tools write: each has a document that must be allowed, one that must
/// not, and the places of what is left out.
#[test]
fn hints_are_followed_as_far_as_possible_and_the_rest_is_named() {
    struct Hint(Value, &'static str, &'static str, &'static [&'static str]);
    let integer = |more: Value| {
        let mut schema = json!({"type": "integer"});
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    };
    let cases = [
        // A set, a decimal, an optional value, a moment and a recursive model of Pydantic.
        Hint(
            json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true}),
            r#"["a"]"#,
            "[1]",
            &["#/uniqueItems"],
        ),
        Hint(
            json!({"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}]}),
            "\"1.5\"",
            "\"one\"",
            &["#/anyOf/1/pattern"],
        ),
        Hint(
            json!({"type": "string", "pattern": "^(?=.*[(\\d])(?<![a)])[)a]{2}(?:b|\\()$"}),
            "\")a(\"",
            "\")(\"",
            &["#/pattern"],
        ),
        Hint(json!({"type": "string", "pattern": "(?=a"}), "\"b\"", "1", &["#/pattern"]),
        Hint(
            json!({"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}], "default": null}),
            "null",
            "1",
            &[],
        ),
        // A record, a number, an address and a nullable value of Zod.
        Hint(
            json!({"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
                "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}),
            r#"{"a":1}"#,
            r#"{"a":"x"}"#,
            &[],
        ),
        Hint(json!({"type": "string", "format": "uri-reference"}), "\"../x\"", "1", &["#/format"]),
        Hint(json!({"type": "string", "format": "json"}), "\"[]\"", "1", &["#/format"]),
        // OpenAPI.
        Hint(json!({"type": "string", "nullable": true}), "null", "1", &[]),
        Hint(integer(json!({"format": "int64", "maximum": 9223372036854775807u64})), "5", "\"x\"", &["#/maximum"]),
        Hint(json!({"type": "number", "format": "double", "xml": {}, "example": 1}), "5.5", "\"x\"", &[]),
        Hint(json!({"type": "string", "format": "byte"}), "\"aGk=\"", "1", &["#/format"]),
        // Keywords that a grammar cannot express.
        Hint(integer(json!({"not": {"const": 3}})), "3", "null", &["#/not"]),
        Hint(
            integer(json!({"if": {"minimum": 3}, "then": {"multipleOf": 2}, "else": {}})),
            "5",
            "null",
            &["#/if", "#/then", "#/else"],
        ),
        Hint(
            json!({"type": "array", "contains": {"const": 1}, "minContains": 2}),
            "[]",
            "1",
            &["#/contains", "#/minContains"],
        ),
        Hint(json!({"type": "object", "dependentRequired": {"a": ["b"]}}), r#"{"a":1}"#, "1", &["#/dependentRequired"]),
        Hint(
            json!({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": false}),
            r#"{"a":1}"#,
            r#"{"b":1}"#,
            &[],
        ),
        Hint(json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "1", "null", &["#/oneOf"]),
        Hint(json!({"$dynamicRef": "#x", "type": "integer"}), "1", "null", &["#/$dynamicRef"]),
        Hint(json!({"$ref": "https://example.com/schema.json"}), "null", "nil", &["#/$ref"]),
        Hint(json!({"$ref": "#/$defs/none"}), "null", "nil", &["#/$ref"]),
        Hint(
            json!({"type": "object", "properties": {"a": {"$id": "b", "type": "string"}}}),
            r#"{"a":"x"}"#,
            r#"{"a":1}"#,
            &["#/properties/a/$id"],
        ),
        Hint(integer(json!({"minimun": 5})), "1", "null", &["#/minimun"]),
        Hint(json!({"type": "any"}), "null", "nil", &["#/type"]),
        Hint(json!({"type": "string", "minLength": "2"}), "\"\"", "1", &["#/minLength"]),
        Hint(json!({"type": "string", "maxLength": 5_000_000_000u64}), "\"x\"", "1", &["#/maxLength"]),
        Hint(json!({"type": "array", "maxItems": 1e12}), "[1,2]", "1", &["#/maxItems"]),
        Hint(integer(json!({"multipleOf": 0})), "1", "null", &["#/multipleOf"]),
        Hint(json!({"type": "object", "required": true}), "{}", "1", &["#/required"]),
        Hint(json!({"type": "object", "required": ["a"], "additionalProperties": false}), "{}", "1", &["#/required"]),
        Hint(json!({"enum": []}), "1", "nil", &["#/enum"]),
        Hint(
            json!({"type": "object", "patternProperties": {"a": {"const": 1}, "b": {}}}),
            r#"{"a":1}"#,
            r#"{"a":2}"#,
            &["#/patternProperties"],
        ),
        Hint(
            json!({"type": "object", "patternProperties": {"(?=a)": {"const": 1}}}),
            r#"{"a":1}"#,
            "1",
            &["#/patternProperties"],
        ),
        Hint(json!({"$schema": "https://example.com/dialect", "type": "null"}), "null", "1", &["#/$schema"]),
        Hint(json!({"type": "string", "pattern": "^a$", "format": "date"}), "\"a\"", "\"b\"", &["#/format"]),
    ];
    let vocabulary = bytes();
    let mut failures = Vec::new();
    for Hint(schema, valid, invalid, ignored) in cases {
        let named = hint(&schema).ignored;
        if named != ignored {
            failures.push(format!("{schema}: found {named:?}, expected {ignored:?}"));
        }
        let source = ConstraintSource::JsonSchemaHint(schema.to_string());
        let constraint = Constraint::compile(&source, &vocabulary).unwrap();
        if constraint.ignored() != ignored || !accepts(&constraint, valid) || accepts(&constraint, invalid) {
            failures.push(format!("{schema}: {valid} is stopped or {invalid} is allowed, {:?}", constraint.ignored()));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn schemas_without_a_usable_part_leave_the_text_free() {
    for schema in [json!(false), json!({"type": "integer", "minimum": 5, "maximum": 4})] {
        let source = ConstraintSource::JsonSchemaHint(schema.to_string());
        let constraint = Constraint::compile(&source, &bytes()).unwrap();
        assert_eq!(constraint.ignored(), ["#"]);
        assert!(accepts(&constraint, "[null, {}]") && !accepts(&constraint, "nil"));
    }
}

#[test]
fn schemas_that_would_not_be_enforced_are_refused_by_name() {
    let chain: Vec<String> = (0..4000).map(|i| format!(r##""a{i}": {{"$ref": "#/$defs/a{}"}}"##, i + 1)).collect();
    let long = format!(r##"{{"$ref": "#/$defs/a0", "$defs": {{{}, "a4000": {{}}}}}}"##, chain.join(","));
    let many: Vec<String> = (0..1001).map(|i| format!(r#""p{i}": {{}}"#)).collect();
    let many = format!(r#"{{"properties": {{{}}}}}"#, many.join(","));
    let large = format!(r#"{{"title": "{}"}}"#, "x".repeat(300_000));
    let deep = format!(r#"{}{{}}{}"#, r#"{"items":"#.repeat(200), "}".repeat(200));
    struct Refused<'a>(&'a str, &'a str);
    let cases = [
        Refused(r#"{"type": "array", "uniqueItems": true}"#, "`uniqueItems` at #"),
        Refused(r#"{"properties": {"a": {"not": {}}}}"#, "`not` at #/properties/a"),
        Refused(r#"{"if": {}, "then": {}}"#, "`if`"),
        Refused(r#"{"const": 123456789012345678901234}"#, "2^64"),
        Refused(r#"{"type": "integer", "minimum": 1e300}"#, "2^53"),
        Refused(r#"{"type": "string", "minimun": 5}"#, "`minimun`"),
        Refused(r#"{"$ref": "https://example.com/schema.json"}"#, "`https://example.com/schema.json`"),
        Refused(r#"{"$ref": "other.json#/a"}"#, "`other.json#/a`"),
        Refused(r##"{"$ref": "#/$defs/none"}"##, "leads nowhere"),
        Refused(r##"{"$ref": "#/$defs/a", "$defs": {"a": {"uniqueItems": true}}}"##, "`uniqueItems` at #/$defs/a"),
        Refused(r##"{"$ref": "#"}"##, "refers to itself"),
        Refused(r##"{"anyOf": [{"$ref": "#"}, {"type": "null"}]}"##, "refers to itself"),
        Refused(r#"{"properties": {"a": {"$id": "b"}}}"#, "`$id`"),
        Refused(r#"{"$schema": "https://example.com/dialect"}"#, "draft 4 to 2020-12"),
        Refused(r#"{"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}"#, "`oneOf`"),
        Refused(r#"{"type": "string", "format": "iri"}"#, "iri"),
        Refused(r#"{"type": "string", "pattern": "(?=a)b"}"#, "look-around"),
        Refused(r#"{"type": "string", "pattern": "a\\"}"#, "`pattern` at #"),
        Refused(r#"{"type": "string", "pattern": "^a$", "minLength": 2}"#, "no JSON is valid"),
        Refused(r#"{"type": "integer", "minimum": 5, "maximum": 4}"#, "no JSON is valid"),
        Refused(r#"{"type": "strin"}"#, "strin"),
        Refused(r#"{"anyOf": 5}"#, "#/anyOf"),
        Refused(r#"{"type": "object", "type": "array"}"#, "twice"),
        Refused("false", "`false`"),
        Refused("[1]", "expected an object"),
        Refused("{", "JSON schema"),
        Refused(&large, "expected at most 262144"),
        Refused(&long, "a depth of more than 256"),
        Refused(&deep, "JSON schema"),
        Refused(&many, "1001 entries of #/properties"),
    ];
    let vocabulary = bytes();
    let mut failures = Vec::new();
    for Refused(text, part) in cases {
        let shown: String = text.chars().take(80).collect();
        match Constraint::compile(&ConstraintSource::JsonSchema(text.into()), &vocabulary) {
            Err(e) if format!("{e}").contains(part) => {}
            Err(e) => failures.push(format!("{shown}: {e}")),
            Ok(_) => failures.push(format!("{shown}: accepted")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
