// Argument structs of kernels, passed by value; `args.rs` mirrors them field by field. Pointers come first, then an
// even number of 32-bit numbers, so that there is no padding.
#pragma once
#include "types.cuh"

// Layout of the elements of a matrix: floats row by row, or the tiles of docs/FORMAT.md.
enum Kind : uint32_t {
    KIND_F32 = 0,
    KIND_F16 = 1,
    KIND_BF16 = 2,
    KIND_INT4 = 3,         // value = (code - 8) * scale: q4_0 and symmetric int4
    KIND_INT4_AFFINE = 4,  // value = (code - zero point) * scale
    KIND_NL4 = 5,          // value = table[code] * scale
    KIND_MXFP4 = 6,        // value = e2m1(code) * 2^(scale - 127)
    KIND_INT8 = 7,         // value = code * scale
    // value = number of the code * scale + minimum, as `Matrix` says or as `coding_of` (coded_weights.cuh) knows of a kind.
    KIND_CODED = 16,
    KIND_INT5 = 17,
    KIND_INT6 = 18,
    KIND_Q4_1 = 19,
    KIND_Q5_1 = 20,
    KIND_Q2_K = 21,
    KIND_Q3_K = 22,
    KIND_Q4_K = 23,
    KIND_Q5_K = 24,
    KIND_Q6_K = 25,
    KIND_IQ4_XS = 26,
    KIND_FP8 = 27,
    KIND_NVFP4 = 28,
    KIND_INT4_ROW = 29,
    KIND_NL4_ROW = 30,
    KIND_T2 = 31,
    KIND_T3 = 32,
};

// How scales are stored. Those from SCALE_I8 on are multiplied by numbers that many groups share: an f16 number for
// each 256 columns, or, for the last two, the f32 number of the row.
enum ScaleKind : uint32_t {
    SCALE_F16 = 0,
    SCALE_F32 = 1,
    SCALE_E8M0 = 2,
    SCALE_I8 = 3,
    SCALE_U8 = 4,
    SCALE_E4M3 = 5,
    SCALE_I8_ROW = 6,
};

// How minimums are stored: f16; a byte, or the upper four bits of the scale's byte, which are multiplied by the second
// f16 number of their 256 columns and subtracted.
enum Minimum : uint32_t { MINIMUM_NONE = 0, MINIMUM_F16 = 1, MINIMUM_U8 = 2, MINIMUM_NIBBLE = 3 };

// Meaning of codes from KIND_CODED on: a number up to 32 is subtracted from the code; others are these. T2 and T3 are
// trellises, see src/scheme/trellis.rs.
enum CodeMap : uint32_t { CODES_T2 = 251, CODES_T3 = 252, CODES_NL4 = 253, CODES_E2M1 = 254, CODES_E4M3 = 255 };

// A weight matrix, or a stack of experts of one shape. For tiles the other numbers are those of `TileLayout`.
struct Matrix {
    const uint8_t* data;
    uint64_t stride;  // bytes from one matrix of a stack to the next
    uint32_t kind;
    uint32_t scale_kind;
    uint32_t rows;
    uint32_t cols;
    uint32_t blocks;        // of 32 columns, padding included
    uint32_t group_blocks;  // blocks that share a scale
    uint32_t zeros_offset;  // within a tile
    uint32_t codes_offset;  // within a tile
    uint32_t block_bytes;
    uint32_t tile_bytes;
    // For kinds from KIND_CODED on:
    uint32_t block_groups;   // groups in a block: 2 for groups of 16 columns, otherwise 1
    uint32_t supers_offset;  // of the numbers that multiply scales, within a tile
    uint32_t minimum;        // Minimum
    uint32_t codes;          // CodeMap
};

// Addresses that activations are written to: as floats (`f32`), rounded to bf16 in the order of `place` (`hi`), and the
// rounding errors (`lo`, so that hi + lo has 16 bits). Null = not written. `hi` and `lo` are padded with zeros to whole
// blocks of 32 columns.
struct Acts {
    float* f32;
    uint16_t* hi;
    uint16_t* lo;
    uint32_t stride;       // elements from row to row of f32
    uint32_t half_stride;  // elements from row to row of hi and lo: a multiple of 32
};

// Work on one expert: the pairs `first` .. `first + count` of the pairs of a row and an expert, sorted by expert.
struct Share {
    uint32_t expert;
    uint32_t first;
    uint32_t count;
    uint32_t unused;
};

// y[i][r] = sum over c of x[i][c] * w[r][c] + bias[r], for i < n.
struct Matmul {
    Matrix w;
    const float* bias;       // (rows), (experts, rows) for a stack, or null
    const float* x;          // what `matmul_f32` reads: (n, x_stride)
    const uint16_t* hi;      // what `matmul_bf16` reads: (n, half_stride), ordered by `place`
    const uint16_t* lo;      // rounding errors of `hi`, for kernels with two passes
    float* y;                // (n, y_stride)
    const uint32_t* inputs;  // row of x that row i of y is computed from; null = i itself
    const Share* shares;     // experts: blockIdx.y is an index into it; null = the matrix is no stack
    const uint32_t* count;   // experts: number of shares
    uint32_t n;
    uint32_t x_stride;
    uint32_t half_stride;
    uint32_t y_stride;
};

enum NormKind : uint32_t { NORM_RMS = 0, NORM_LAYER = 1, NORM_NONE = 2 };

// x = (x + branch_scale * (branch + beside)) * x_scale, where the sum of both branches is first normalized with `post`,
// if given; out = x normalized as `kind` says, times weight.
struct Norm {
    float* x;              // (n, x_stride), changed where there is a branch
    const float* branch;   // (n, width), or null; with `slots` (pairs, width), sorted by expert
    const float* beside;   // (n, width), or null
    const float* post;     // (width), or null
    const float* weight;   // (width), or null for ones
    const uint32_t* rows;  // row of x (and branch) that output row i reads; null = i itself
    const uint32_t* slots;   // (n, top_k): rows of `branch` whose weighted sum is added; or null
    const float* weights;    // (n, top_k), with `slots`
    Acts out;                // without any address, only the sum is wanted
    uint32_t n;
    uint32_t width;
    uint32_t x_stride;  // elements from row to row of x
    uint32_t kind;      // NormKind
    float eps;
    float post_eps;
    float branch_scale;
    float x_scale;
    uint32_t top_k;  // with `slots`
    uint32_t unused;
};

enum ActivationKind : uint32_t { ACT_SILU = 0, ACT_GELU_TANH = 1, ACT_SWIGLU_OAI = 2, ACT_RELU2 = 3 };

// out = activation(gate) * up, see src/runtime/ops.rs.
struct Gated {
    const float* gate;  // (n, stride); gate and up interleaved where `up` is null
    const float* up;    // (n, stride)
    Acts out;           // (n, width)
    uint32_t n;
    uint32_t width;
    uint32_t stride;
    uint32_t activation;
    float alpha;
    float limit;
};

// Up to three products of at most 8 rows, computed by the same kernel in one launch (blockIdx.z is the index of the
// product), and the activation of the first one (gate and up interleaved) or of the first two.
struct Few {
    Matmul of[3];
    Gated then;         // gate is y of the first, up that of the second; n = 0: no activation
    uint32_t* tickets;  // if gate and up are two products: one counter per 16 rows, 0 before the first launch and after each
};

enum KvKind : uint32_t { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2, KV_INT8 = 3 };

// Positions in a page of the cache.
#define PAGE 128

// Sequence and position of a row of the batch.
struct Row {
    uint32_t sequence;
    uint32_t position;
    float q_factor;  // of its queries
    uint32_t unused;
};

// The cache of one layer; cache.cuh describes what a page holds.
struct Cache {
    const uint64_t* pages;  // (sequences, table_stride): addresses of pages, in the order of positions
    uint64_t layer_offset;  // bytes of a page before this layer
    uint32_t table_stride;
    uint32_t kind;  // KvKind
    uint32_t kv_heads;
    uint32_t head_dim;   // of queries and keys
    uint32_t value_dim;  // of values
    uint32_t unused;
};

// Normalizes the heads of queries, keys and values if there are weights, rotates queries and keys, scales queries, and
// stores keys and values. For a cache of KV_INT8, keys and normalized values are also changed in place.
struct Rope {
    float* q;             // (n, n_heads * head_dim), in place
    float* k;             // (n, kv_heads * head_dim)
    float* v;             // (n, kv_heads * value_dim); may be k, unless the cache is of KV_INT8
    const float* angles;  // (n, rotary_dim): cosines, then sines
    const float* q_norm;  // (head_dim), or null
    const float* k_norm;  // (head_dim), or null
    const float* v_norm;  // (value_dim), or null
    const Row* rows;      // (n)
    Cache cache;
    uint32_t n;
    uint32_t n_heads;
    uint32_t kv_heads;  // heads of keys and values that are stored: all, or none if they are those of another layer
    uint32_t rotary_dim;
    uint32_t adjacent;  // 1: numbers 2i and 2i + 1 are rotated together; 0: numbers i and rotary_dim / 2 + i
    float eps;
    float q_scale;
    uint32_t unused;
};

// Queries, keys and values of latent attention: rotates the last `rope` numbers of the heads of queries, scales the
// queries, and stores keys and values. The keys of a row are `nope` numbers of each head, and `rope` numbers that all
// heads share.
struct LatentRope {
    float* q;               // (n, n_heads * (nope + rope)), in place
    float* k;               // (n, n_heads * (nope + rope)): room for keys, for a cache of KV_INT8
    const float* latent;    // (n, latent_stride), of which the last `rope` numbers are rotated and shared by all keys
    const float* expanded;  // (n, n_heads * (nope + value_dim)): keys without those numbers, and values, head by head
    const float* angles;    // (n, rope): cosines, then sines; or null, and nothing is rotated
    const Row* rows;        // (n)
    Cache cache;            // n_heads heads of keys of nope + rope numbers
    uint32_t n;
    uint32_t n_heads;
    uint32_t nope;
    uint32_t rope;
    uint32_t latent_stride;
    uint32_t adjacent;  // as in Rope
    float q_scale;
    uint32_t unused;
};

// Further inputs of layers: out = (projected * scale, normalized with `norm`, + embedded) / sqrt(2).
struct TokenInputs {
    const float* projected;  // (n, layers * width)
    const float* embedded;   // (n, layers * width)
    const float* norm;       // (width)
    float* out;              // (layers, n, width)
    uint32_t n;
    uint32_t layers;
    uint32_t width;
    float scale;
    float eps;
    uint32_t unused;
};

// Consecutive rows of one sequence.
struct Tile {
    uint32_t first;
    uint32_t count;
};

// Attention of every row over the positions of its sequence up to its own. Scores are exponents of two: queries,
// `softcap` and `sinks` are scaled by log2(e).
struct Attention {
    const float* q;  // (n, q_stride), rotated and scaled
    const Row* rows;
    const Tile* tiles;   // `attention_prefill` only
    const float* sinks;  // (n_heads): an extra logit each, times log2(e); or null
    const float* gate;   // (n, n_heads * value_dim): the sigmoid of it multiplies the result; or null
    float* partial;      // `attention_decode` only: (n, n_heads, splits, value_dim + 2)
    Acts out;            // (n, n_heads * value_dim)
    Cache cache;
    uint32_t n;
    uint32_t n_heads;
    uint32_t q_stride;
    uint32_t window;  // positions that a query sees, its own included; 0 = all
    float softcap;    // 0 = none
    uint32_t splits;  // `attention_decode` only: parts that each sequence is cut into
};

// Chooses the top_k experts of each row and computes their weights, as src/runtime/moe.rs does.
struct Route {
    const float* logits;  // (n, experts)
    uint32_t* experts_of;  // (n, top_k), best first
    float* weights;        // (n, top_k)
    const float* bias;     // (experts): added to the scores for the choice; or null
    const float* factors;  // (experts): of the weights; or null
    uint32_t n;
    uint32_t experts;
    uint32_t top_k;
    uint32_t softmax_over_all;
    uint32_t scored;  // 1: experts are chosen by scores, which the fields below and `bias` describe; 0: by logits
    uint32_t sigmoid;  // scores are sigmoids of logits; else their softmax over all
    uint32_t groups;  // of experts, of which only some are searched; 0 = no groups
    uint32_t groups_chosen;
    uint32_t groups_best;  // the score of a group is the sum of this many best scores, 1 or 2
    float scale;           // of the weights
};

// Sorts the pairs (row, choice) by expert, stably, and cuts the pairs of each expert into shares of at most
// `share_rows`.
struct Group {
    const uint32_t* experts_of;  // (pairs)
    uint32_t* slots;             // (pairs): index of each pair after sorting
    uint32_t* inputs;            // (pairs): the row of each sorted pair
    Share* shares;
    uint32_t* count;
    uint32_t pairs;
    uint32_t experts;
    uint32_t top_k;
    uint32_t share_rows;
};

// Arguments of `Route`, then of `Group`, which one thread block computes if there are few rows.
struct RouteGroup {
    Route route;
    Group group;
};

// The product of a router with at most ROUTER_ROWS rows, then `RouteGroup`, in one launch.
#define ROUTER_ROWS 8

struct Router {
    Matmul product;  // of floats (`x`, no `shares`): y is then.route.logits
    RouteGroup then;
    uint32_t* ticket;  // 0 before the first launch and after each
};

// Scales and caps logits, and finds the largest of each part of a row: of equal logits the first; NaN counts as the
// smallest.
struct Logits {
    float* logits;     // (n, vocab), scaled and capped in place
    float* partial;    // (n, parts): largest of each part
    uint32_t* places;  // (n, parts): index of that logit
    uint32_t n;
    uint32_t vocab;
    uint32_t parts;
    float scale;    // 1 = none
    float softcap;  // 0 = none
    uint32_t unused;
};

// The largest numbers of each row, largest first (of equal numbers the first; NaN counts as the smallest). A launch
// keeps the k largest of every TOP_K_SPAN numbers, and the next launch searches these, until there is one part.
#define TOP_K_SPAN 2048

struct TopK {
    const float* logits;   // (n, len); null in all launches but the first
    const uint64_t* from;  // (n, len): `to` of the launch before
    uint64_t* to;          // (n, parts, k), where there is another launch
    uint32_t* ids;         // (n, k), in the last launch
    float* values;         // (n, k), in the last launch
    uint32_t n;
    uint32_t len;
    uint32_t parts;  // ceil(len / TOP_K_SPAN)
    uint32_t k;
};

// Change of a matrix by an adapter: y becomes gain * (y + scale * B (A x)) + add. Null = none.
struct Change {
    const uint8_t* a;       // (rank, cols)
    const uint8_t* b;       // (rank, rows): B, transposed
    const float* gain;      // (rows)
    const float* add;       // (rows)
    const Change* experts;  // changes of a stack of experts, one each; the other fields are then empty
    uint32_t rank;
    uint32_t a_kind;  // Kind of `a`: floats row by row
    uint32_t b_kind;
    float scale;
    uint32_t add_scales;  // 1: the factor of the adapter multiplies `add`
    uint32_t unused;
};

// Consecutive rows of the batch with one of their adapters. The adapters of the same rows follow one another.
struct Adapted {
    const Change* changes;  // of all matrices of this device
    uint32_t first;
    uint32_t count;  // 0 = unused
    uint32_t part;   // index among the adapters of these rows
    uint32_t parts;  // number of adapters of these rows in the first entry, 0 in the others
    float factor;    // of the adapter
    uint32_t unused;
};

// Changes of up to three products of the same rows of x by adapters.
#define LOW_RANK_PRODUCTS 3

struct LowRank {
    const Adapted* adapted;  // (slots)
    Acts x;                  // inputs in at least one form; the finest is read
    const uint32_t* inputs;  // experts: row of the batch of each pair, in `Group`
    const Share* shares;     // experts: blockIdx.y is an index into it; null = the matrices are no stacks
    const uint32_t* count;   // experts: number of shares
    float* h;                // A x: (products, parts, n, h_stride), of which `part_stride` is n * h_stride
    float* y[LOW_RANK_PRODUCTS];  // (n, width of each)
    uint64_t part_stride;
    uint32_t widths[LOW_RANK_PRODUCTS];
    uint32_t index;   // of the change of the first product among `Adapted::changes`
    uint32_t slots;   // number of entries of `adapted`
    uint32_t parts;   // largest number of adapters of a row
    uint32_t n;       // rows of y
    uint32_t from;    // row of x and of `adapted` that belongs to row 0 of y; 0 for experts
    uint32_t cols;
    uint32_t h_stride;
    uint32_t gather;  // experts: 1 = x has the rows of the batch, 0 = it has the pairs
    uint32_t unused;
};

// Factor of each row: x *= sigmoid(gate).
struct RowGate {
    float* x;           // (n, width)
    const float* gate;  // (n)
    uint32_t n;
    uint32_t width;
};

// A number of each head, for each of its columns.
struct SpreadHeads {
    const float* x;  // (n, heads)
    float* out;      // (n, heads * width)
    uint32_t n;
    uint32_t heads;
    uint32_t width;
    uint32_t unused;
};

// Destination of the sizes of the structs above, see `sizes`.
// Rows of a text in a step, and the addresses of its state before and after them.
struct StateRun {
    const float* from;  // null at the beginning of the text
    float* to;
    uint32_t first;  // row of the step
    uint32_t count;
};

// Convolution over the positions of texts, channel by channel.
struct Conv {
    float* x;
    const float* kernel;  // (width, channels)
    const float* bias;    // (channels), or null
    const StateRun* runs;
    Acts out;
    uint64_t offset;    // of the last inputs, (width - 1, channels), in the state, in numbers
    uint32_t channels;  // of the whole convolution
    uint32_t first;     // channel of the first column
    uint32_t columns;
    uint32_t width;  // positions that are read, including the present one
};

// Linear attention: gated delta net or Mamba-2, whose names for q, k, v and decays are C, B, x and dt.
struct LinearAttention {
    const float* q;  // (n, key_heads * key_dim), after the convolution
    const float* k;
    const float* v;           // (n, value heads * value_dim)
    const float* decays;      // (n, value heads)
    const float* rates;       // (n, value heads), or null for Mamba-2
    const float* decay;       // (value heads): factors of the logarithms of the decays
    const float* decay_bias;  // (value heads)
    const float* skip;        // (value heads), or null
    float* out;               // (n, value heads * value_dim)
    const StateRun* runs;
    uint64_t offset;  // of the matrices, (value heads, value_dim, key_dim), in the state, in numbers
    uint32_t key_heads;
    uint32_t per_key;  // value heads that read one key head
    uint32_t key_dim;
    uint32_t value_dim;
    uint32_t tiled;  // 1 = value heads that read one key head are key_heads apart
    uint32_t unused;
};

// Norm of the output of heads, times its gate.
struct GatedNorm {
    const float* x;     // (n, width)
    const float* gate;  // (n, width)
    const float* weight;
    Acts out;
    uint32_t n;
    uint32_t width;
    uint32_t group;
    uint32_t gate_first;
    float eps;
    uint32_t unused;
};

struct Sizes {
    uint32_t* out;
};
