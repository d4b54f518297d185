//! Argument structs that the host passes to kernels; they mirror `kernels/args.cuh` field by field. The kernel
//! `sizes` reports the sizes on the device, so that a mismatch is detected.

/// A weight matrix or a stack of them.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Matrix {
    pub data: u64,
    pub stride: u64,
    pub kind: u32,
    pub scale_kind: u32,
    pub rows: u32,
    pub cols: u32,
    pub blocks: u32,
    pub group_blocks: u32,
    pub zeros_offset: u32,
    pub codes_offset: u32,
    pub block_bytes: u32,
    pub tile_bytes: u32,
    pub block_groups: u32,
    pub supers_offset: u32,
    pub minimum: u32,
    pub codes: u32,
}

/// Addresses to which activations are written, one per form; 0 = the form is not wanted.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Acts {
    pub f32: u64,
    pub hi: u64,
    pub lo: u64,
    pub stride: u32,
    pub half_stride: u32,
}

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Matmul {
    pub w: Matrix,
    pub bias: u64,
    pub x: u64,
    pub hi: u64,
    pub lo: u64,
    pub y: u64,
    pub inputs: u64,
    pub shares: u64,
    pub count: u64,
    pub n: u32,
    pub x_stride: u32,
    pub half_stride: u32,
    pub y_stride: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Norm {
    pub x: u64,
    pub branch: u64,
    pub beside: u64,
    pub post: u64,
    pub weight: u64,
    pub rows: u64,
    pub slots: u64,
    pub weights: u64,
    pub out: Acts,
    pub n: u32,
    pub width: u32,
    pub x_stride: u32,
    pub kind: u32,
    pub eps: f32,
    pub post_eps: f32,
    pub branch_scale: f32,
    pub x_scale: f32,
    pub top_k: u32,
    pub unused: u32,
}

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Gated {
    pub gate: u64,
    pub up: u64,
    pub out: Acts,
    pub n: u32,
    pub width: u32,
    pub stride: u32,
    pub activation: u32,
    pub alpha: f32,
    pub limit: f32,
}

/// Up to three products of a few rows in one launch, and the activation of their results.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Few {
    pub of: [Matmul; 3],
    pub then: Gated,
    pub tickets: u64,
}

/// Sequence and position of a row of the batch, and the factor of its queries.
#[derive(Debug, Clone, Copy, Default, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
pub struct Row {
    pub sequence: u32,
    pub position: u32,
    pub q_factor: f32,
    pub unused: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Cache {
    pub pages: u64,
    pub layer_offset: u64,
    pub table_stride: u32,
    pub kind: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub value_dim: u32,
    pub unused: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Rope {
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub angles: u64,
    pub q_norm: u64,
    pub k_norm: u64,
    pub v_norm: u64,
    pub rows: u64,
    pub cache: Cache,
    pub n: u32,
    pub n_heads: u32,
    pub kv_heads: u32,
    pub rotary_dim: u32,
    pub adjacent: u32,
    pub eps: f32,
    pub q_scale: f32,
    pub unused: u32,
}

/// Queries, keys and values of latent attention.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct LatentRope {
    pub q: u64,
    pub k: u64,
    pub latent: u64,
    pub expanded: u64,
    pub angles: u64,
    pub rows: u64,
    pub cache: Cache,
    pub n: u32,
    pub n_heads: u32,
    pub nope: u32,
    pub rope: u32,
    pub latent_stride: u32,
    pub adjacent: u32,
    pub q_scale: f32,
    pub unused: u32,
}

/// Further inputs of layers, which depend on the token alone.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct TokenInputs {
    pub projected: u64,
    pub embedded: u64,
    pub norm: u64,
    pub out: u64,
    pub n: u32,
    pub layers: u32,
    pub width: u32,
    pub scale: f32,
    pub eps: f32,
    pub unused: u32,
}

/// Consecutive rows of one sequence.
#[derive(Debug, Clone, Copy, Default, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
pub struct Tile {
    pub first: u32,
    pub count: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Attention {
    pub q: u64,
    pub rows: u64,
    pub tiles: u64,
    pub sinks: u64,
    pub gate: u64,
    pub partial: u64,
    pub out: Acts,
    pub cache: Cache,
    pub n: u32,
    pub n_heads: u32,
    pub q_stride: u32,
    pub window: u32,
    pub softcap: f32,
    pub splits: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Route {
    pub logits: u64,
    pub experts_of: u64,
    pub weights: u64,
    pub bias: u64,
    pub factors: u64,
    pub n: u32,
    pub experts: u32,
    pub top_k: u32,
    pub softmax_over_all: u32,
    pub scored: u32,
    pub sigmoid: u32,
    pub groups: u32,
    pub groups_chosen: u32,
    pub groups_best: u32,
    pub scale: f32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Group {
    pub experts_of: u64,
    pub slots: u64,
    pub inputs: u64,
    pub shares: u64,
    pub count: u64,
    pub pairs: u32,
    pub experts: u32,
    pub top_k: u32,
    pub share_rows: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RouteGroup {
    pub route: Route,
    pub group: Group,
}

/// Router of a few rows: product, choice of experts, and sorting by expert in one launch.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Router {
    pub product: Matmul,
    pub then: RouteGroup,
    pub ticket: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Logits {
    pub logits: u64,
    pub partial: u64,
    pub places: u64,
    pub n: u32,
    pub vocab: u32,
    pub parts: u32,
    pub scale: f32,
    pub softcap: f32,
    pub unused: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct TopK {
    pub logits: u64,
    pub from: u64,
    pub to: u64,
    pub ids: u64,
    pub values: u64,
    pub n: u32,
    pub len: u32,
    pub parts: u32,
    pub k: u32,
}

/// Change of a matrix by an adapter; 0 = none.
#[derive(Debug, Clone, Copy, Default, PartialEq, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
pub struct Change {
    pub a: u64,
    pub b: u64,
    pub gain: u64,
    pub add: u64,
    pub experts: u64,
    pub rank: u32,
    pub a_kind: u32,
    pub b_kind: u32,
    pub scale: f32,
    pub add_scales: u32,
    pub unused: u32,
}

/// Consecutive rows of the batch with one of their adapters.
#[derive(Debug, Clone, Copy, Default, PartialEq, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
pub struct Adapted {
    pub changes: u64,
    pub first: u32,
    pub count: u32,
    pub part: u32,
    pub parts: u32,
    pub factor: f32,
    pub unused: u32,
}

/// Changes of up to three products of the same rows by adapters.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct LowRank {
    pub adapted: u64,
    pub x: Acts,
    pub inputs: u64,
    pub shares: u64,
    pub count: u64,
    pub h: u64,
    pub y: [u64; 3],
    pub part_stride: u64,
    pub widths: [u32; 3],
    pub index: u32,
    pub slots: u32,
    pub parts: u32,
    pub n: u32,
    pub from: u32,
    pub cols: u32,
    pub h_stride: u32,
    pub gather: u32,
    pub unused: u32,
}

/// Rows of a text in a step, and the addresses of its state before and after them.
#[derive(Debug, Clone, Copy, Default, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
pub struct StateRun {
    pub from: u64,
    pub to: u64,
    pub first: u32,
    pub count: u32,
}

/// Convolution over the positions of texts.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Conv {
    pub x: u64,
    pub kernel: u64,
    pub bias: u64,
    pub runs: u64,
    pub out: Acts,
    pub offset: u64,
    pub channels: u32,
    pub first: u32,
    pub columns: u32,
    pub width: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct LinearAttention {
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub decays: u64,
    pub rates: u64,
    pub decay: u64,
    pub decay_bias: u64,
    pub skip: u64,
    pub out: u64,
    pub runs: u64,
    pub offset: u64,
    pub key_heads: u32,
    pub per_key: u32,
    pub key_dim: u32,
    pub value_dim: u32,
    pub tiled: u32,
    pub unused: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct GatedNorm {
    pub x: u64,
    pub gate: u64,
    pub weight: u64,
    pub out: Acts,
    pub n: u32,
    pub width: u32,
    pub group: u32,
    pub gate_first: u32,
    pub eps: f32,
    pub unused: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RowGate {
    pub x: u64,
    pub gate: u64,
    pub n: u32,
    pub width: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct SpreadHeads {
    pub x: u64,
    pub out: u64,
    pub n: u32,
    pub heads: u32,
    pub width: u32,
    pub unused: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Sizes {
    pub out: u64,
}

/// Some consecutive pairs, among the row-expert pairs sorted by expert, that all have the same expert.
#[derive(Debug, Clone, Copy, Default, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
pub struct Share {
    pub expert: u32,
    pub first: u32,
    pub count: u32,
    pub unused: u32,
}

/// Sizes in bytes of all structs, which the kernel `sizes` writes if host and device agree.
pub const SIZES: [u32; 30] = [
    size_of::<Matrix>() as u32,
    size_of::<Acts>() as u32,
    size_of::<Share>() as u32,
    size_of::<Matmul>() as u32,
    size_of::<Norm>() as u32,
    size_of::<Gated>() as u32,
    size_of::<Few>() as u32,
    size_of::<Row>() as u32,
    size_of::<Cache>() as u32,
    size_of::<Rope>() as u32,
    size_of::<LatentRope>() as u32,
    size_of::<TokenInputs>() as u32,
    size_of::<Tile>() as u32,
    size_of::<Attention>() as u32,
    size_of::<Route>() as u32,
    size_of::<Group>() as u32,
    size_of::<RouteGroup>() as u32,
    size_of::<Router>() as u32,
    size_of::<Logits>() as u32,
    size_of::<TopK>() as u32,
    size_of::<Change>() as u32,
    size_of::<Adapted>() as u32,
    size_of::<LowRank>() as u32,
    size_of::<StateRun>() as u32,
    size_of::<Conv>() as u32,
    size_of::<LinearAttention>() as u32,
    size_of::<GatedNorm>() as u32,
    size_of::<RowGate>() as u32,
    size_of::<SpreadHeads>() as u32,
    size_of::<Sizes>() as u32,
];
