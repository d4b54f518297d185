//! Receiver of the lines that a server writes to its log.

use std::sync::Arc;

/// Receiver of log lines.
pub type LogLine = Arc<dyn Fn(&str) + Send + Sync>;
