//! Rules by which families read a property of a layer or of a head from `config.json`.

/// Share of a head that is rotated.
#[derive(Clone, Copy)]
pub(super) enum Share {
    /// The whole head, whatever `partial_rotary_factor` says.
    Whole,
    /// That of `partial_rotary_factor`, or this one.
    Given(f64),
    /// That of `partial_rotary_factor`, or as many values as this field says, or the whole head.
    Width(&'static str),
}

/// Values of a head that are rotated together.
#[derive(Clone, Copy)]
pub(super) enum PairRule {
    Halves,
    Adjacent,
    /// Adjacent ones, unless this field is false.
    AdjacentUnless(&'static str),
}

/// Layers with sliding-window attention.
#[derive(Clone, Copy)]
pub(super) enum Slides {
    Nowhere,
    All,
    /// If `use_sliding_window` says so, layers from `max_window_layers` on.
    FromMaxWindowLayers,
    /// If `use_sliding_window` says so, all layers.
    IfUsed,
    /// Layers with even numbers.
    EverySecond,
    /// All layers but every n-th; `sliding_window_pattern` may give another n.
    AllButPattern(usize),
    /// All layers but every n-th.
    AllButEvery(usize),
    /// All layers but every n-th, counted from the last one.
    AllButEveryFromTheEnd(usize),
    /// If `use_sliding_window` says so, layers without rotation.
    WhereNotRotatedIfUsed,
}

/// Layers that rotate queries and keys.
#[derive(Clone, Copy)]
pub(super) enum Rotates {
    Everywhere,
    Nowhere,
    /// Layers with sliding-window attention.
    WhereItSlides,
    /// All, if `position_embedding_type` is `rope`.
    IfSaid,
    /// Layers of `no_rope_layers`, or all but every n-th, where n is `no_rope_layer_interval`.
    ListedOrByInterval,
    /// Layers with a base in `layer_rope_theta`, or all but every n-th, counted from the last one.
    ListedOrAllButEveryFromTheEnd(usize),
}

/// Layers with a dense MLP in a family with experts.
#[derive(Clone, Copy)]
pub(super) enum Dense {
    Nowhere,
    /// Layers of `mlp_only_layers` and those that `decoder_sparse_step` leaves out.
    ListedOrByStep,
    /// Layers of `mlp_layer_types`, or the first ones: `first_k_dense_replace`, or n.
    TypesOrFirst(usize),
    /// The first ones: `first_k_dense_replace`, or n.
    First(usize),
    /// The first ones: as many as this field says, or n.
    FirstOf(&'static str, usize),
    /// Layers with `-` in `hybrid_override_pattern`.
    InPattern,
}
