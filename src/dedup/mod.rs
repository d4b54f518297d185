//! Which bytes are stored twice? The room for lossless deduplication; nothing lives here yet.
