//! Description of the API in the format of OpenAPI 3.1.

use serde_json::{Value, json};

/// Returns the description.
pub fn document() -> Value {
    json!({"openapi": "3.1.0", "info": {"title": "iec", "version": env!("CARGO_PKG_VERSION")}, "paths": {}})
}
