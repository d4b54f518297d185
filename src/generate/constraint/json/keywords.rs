//! Keywords of schemas that are handled alike.

/// Drafts whose keywords are known; `$schema` names one of them by the end of its path.
pub(super) const DRAFTS: [&str; 6] =
    ["draft-04", "draft-06", "draft-07", "2019-09", "2020-12", "json-schema.org/schema"];

/// Keywords about values of one type, which are read together.
pub(super) const TYPED: [&str; 22] = [
    "type",
    "properties",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "required",
    "minProperties",
    "maxProperties",
    "items",
    "prefixItems",
    "additionalItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];

/// Keywords without effect on what is valid.
pub(super) const ANNOTATIONS: [&str; 22] = [
    "$id",
    "id",
    "$anchor",
    "$comment",
    "$defs",
    "$dynamicAnchor",
    "$vocabulary",
    "components",
    "definitions",
    "title",
    "description",
    "default",
    "example",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentMediaType",
    "contentEncoding",
    "discriminator",
    "externalDocs",
    "xml",
];

/// Keywords of the drafts that a grammar cannot express.
pub(super) const NOT_ENFORCED: [&str; 18] = [
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
    "contains",
    "contentSchema",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
    "extends",
];
