//! Operations of the forward pass on a device. Each operation launches a kernel: it sets the grid and the
//! arguments, and checks that all memory that the kernel accesses exists.
//!
//! Kernels do not check their arguments, so lengths are compared here, by assertions. They fail only because of
//! mistakes in this program, never because of the contents of files, which were checked when the model was opened.

use super::args;
use super::array::{Acts, Array, View};
use super::context::{Context, Graph, Launch};
use super::kind::Kind;
use super::low_rank::LowRank;
use super::multiply::{Middle, Product, arguments};
use super::recurrent::{CONV_WIDTH, LINEAR_KEY};
use crate::error::{Error, Result};
use crate::model_config::{Activation, ExpertGroups, Mlp, ModelConfig, NormKind, Recurrent, RouterSoftmax, Selection};
use std::sync::Arc;

/// Maximum number of blocks of a grid along y and along z.
pub(super) const GRID: usize = 65_535;
/// Maximum number of experts of a layer.
const EXPERTS: usize = 1024;
/// Maximum number of experts per row.
const TOP_K: usize = 32;
/// Maximum number of pairs of a row and one of its experts in a step.
const PAIRS: usize = 16_384;
/// Maximum number of groups of experts of which only some are searched.
const EXPERT_GROUPS: usize = 32;
/// Maximum number of rows (tokens) for which the router kernel is used.
const ROUTER_ROWS: usize = 8;
/// Number of tickets ([`Ops::tickets`]): one for each 16 rows of the largest gate or up matrix, because a launch that
/// computes both products also computes their activation.
const TICKETS: usize = 1 << 16;

/// Launches on a device.
#[derive(Debug)]
pub struct Ops {
    context: Arc<Context>,
    /// See [`Ops::tickets`].
    tickets: Array<u32>,
}

/// Output of a block before it is added to the residual stream.
#[derive(Debug, Clone, Copy)]
pub struct Branch<'a> {
    /// Output `(n, hidden)`; with `chosen`, the outputs of experts `(pairs, hidden)`, sorted by expert.
    pub y: View<f32>,
    /// Second output, which is added to the first: `(n, hidden)`.
    pub beside: Option<View<f32>>,
    /// Weights of the norm that is applied to the output before it is added, if any: `(hidden)`.
    pub post: Option<&'a Array<f32>>,
    /// Assignment of expert outputs to rows, for a mixture of experts.
    pub chosen: Option<Chosen>,
    /// Factor of the output.
    pub scale: f32,
    /// Factor of the residual stream after the output was added.
    pub x_scale: f32,
}

impl<'a> Branch<'a> {
    /// Returns a branch of one output, which is added as it is.
    pub fn of(y: View<f32>) -> Branch<'a> {
        Branch { y, beside: None, post: None, chosen: None, scale: 1.0, x_scale: 1.0 }
    }
}

/// Choices of experts of all rows.
#[derive(Debug, Clone, Copy)]
pub struct Chosen {
    /// Index of each choice among the pairs sorted by expert: `(n, top_k)`.
    pub slots: View<u32>,
    /// Weight of each choice: `(n, top_k)`.
    pub weights: View<f32>,
    /// Number of experts per row.
    pub top_k: usize,
}

/// Arguments of a norm: `x += branch; out = norm(x)`.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    pub x: View<f32>,
    /// Numbers from row to row of x.
    pub x_stride: usize,
    pub branch: Option<Branch<'a>>,
    /// Kind of the norm; `None` = the output is `x`.
    pub kind: Option<NormKind>,
    /// Factors of the output; `None` = 1.
    pub weight: Option<View<f32>>,
    /// Indices of the rows to compute; `None` = the first `n` rows.
    pub rows: Option<View<u32>>,
    /// Output; `None` = only the branch is added.
    pub out: Option<&'a Acts>,
    pub n: usize,
    pub width: usize,
    pub eps: f32,
    /// Added to the mean square of a branch that is normalized.
    pub post_eps: f32,
}

impl<'a> Norm<'a> {
    /// Returns the arguments of an RMSNorm of adjacent rows without a branch, factors and an output.
    pub fn of(x: View<f32>, n: usize, width: usize, eps: f32) -> Norm<'a> {
        Norm {
            x,
            x_stride: width,
            branch: None,
            kind: Some(NormKind::Rms),
            weight: None,
            rows: None,
            out: None,
            n,
            width,
            eps,
            post_eps: eps,
        }
    }
}

/// Choice of experts by the logits of a router.
pub struct ExpertChoice<'a> {
    pub softmax: RouterSoftmax,
    pub selection: Selection,
    /// Numbers added to the scores for the choice, if any: `(experts)`.
    pub bias: Option<&'a Array<f32>>,
    /// Factors of the weights, if any: `(experts)`.
    pub factors: Option<&'a Array<f32>>,
}

/// Pairs of rows and experts, sorted by expert.
pub struct Grouped {
    /// Experts of each row: `(n, top_k)`.
    pub experts_of: View<u32>,
    pub chosen: Chosen,
    /// Row of each sorted pair: `(pairs)`.
    pub inputs: View<u32>,
    /// Shares: pieces of at most `share_rows` consecutive pairs of one expert. Share `i` is computed by the
    /// thread blocks with `blockIdx.y == i`.
    pub shares: View<args::Share>,
    /// Number of shares, written by the device: `(1)`.
    pub count: View<u32>,
    pub pairs: usize,
    pub experts: usize,
    /// Maximum number of rows per share.
    pub share_rows: usize,
}

impl Ops {
    /// Creates the launches of a device after checking that its kernels take the argument structs of this program.
    ///
    /// # Errors
    /// The kernels take other structs, or the driver reports an error.
    pub fn new(context: &Arc<Context>) -> Result<Ops> {
        let ops = Ops { context: context.clone(), tickets: Array::copied(context, &[0; TICKETS])? };
        let sizes = args::SIZES;
        let out = Array::<u32>::new(context, sizes.len())?;
        ops.start(
            "sizes",
            Launch { grid: [1, 1, 1], block: 32, shared: 0 },
            &args::Sizes { out: out.view().address() },
        )?;
        let found = out.read()?;
        if found != sizes {
            return Err(Error::engine(format!(
                "found CUDA kernels with arguments of {found:?} bytes, expected {sizes:?}"
            ))
            .help("the PTX in the sources is out of date; run scripts/ptx.sh and build the program again"));
        }
        Ok(ops)
    }

    /// Starts a kernel. The caller must have checked the lengths.
    #[allow(unsafe_code)]
    pub(super) fn start<A: Copy>(&self, name: &str, launch: Launch, args: &A) -> Result<()> {
        // SAFETY: the callers, the methods of `Ops`, pass each kernel its struct, with views whose lengths they
        // checked; `Part` keeps their memory until its work is done and longer than its graphs.
        unsafe { self.context.launch(name, launch, args) }
    }

    /// Returns the number of multiprocessors of the device.
    pub(super) fn multiprocessors(&self) -> usize {
        self.context.info.multiprocessors as usize
    }

    /// Starts recorded launches.
    ///
    /// # Errors
    /// The driver reports an error.
    #[allow(unsafe_code)]
    pub fn replay(&self, graph: &mut Graph) -> Result<()> {
        // SAFETY: `Part` keeps the memory of recorded launches longer than its graphs.
        unsafe { graph.launch() }
    }

    /// Adds a branch to the residual stream, and normalizes the sum.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn norm(&self, task: &Norm<'_>) -> Result<()> {
        assert!(task.out.is_none_or(|out| out.rows >= task.n && out.width == task.width));
        self.norm_to(task, task.out.map_or_else(args::Acts::default, Acts::args))
    }

    /// Normalizes rows in place.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn norm_in_place(&self, task: &Norm<'_>) -> Result<()> {
        assert!(task.branch.is_none() && task.rows.is_none() && task.out.is_none());
        let out = args::Acts { f32: task.x.address(), stride: task.x_stride as u32, ..args::Acts::default() };
        self.norm_to(task, out)
    }

    /// Copies adjacent rows.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn copy_rows(&self, from: View<f32>, to: View<f32>, n: usize, width: usize) -> Result<()> {
        assert!(to.len() >= n * width);
        let out = args::Acts { f32: to.address(), stride: width as u32, ..args::Acts::default() };
        self.norm_to(&Norm { kind: None, ..Norm::of(from, n, width, 0.0) }, out)
    }

    /// Adds a branch, and writes the normalized sum to `out`.
    fn norm_to(&self, task: &Norm<'_>, out: args::Acts) -> Result<()> {
        let Norm { n, width, branch, x_stride, .. } = *task;
        assert!(task.rows.map_or(task.x.len() >= n * x_stride, |rows| rows.len() >= n) && width <= x_stride);
        let chosen = branch.and_then(|branch| branch.chosen);
        assert!(task.weight.is_none_or(|weight| weight.len() == width));
        let args = args::Norm {
            x: task.x.address(),
            branch: branch.map_or(0, |branch| branch.y.address()),
            beside: branch.and_then(|branch| branch.beside).map_or(0, View::address),
            post: branch.and_then(|branch| branch.post).map_or(0, |post| post.view().address()),
            weight: task.weight.map_or(0, View::address),
            rows: task.rows.map_or(0, View::address),
            slots: chosen.map_or(0, |chosen| chosen.slots.address()),
            weights: chosen.map_or(0, |chosen| chosen.weights.address()),
            out,
            n: n as u32,
            width: width as u32,
            x_stride: x_stride as u32,
            kind: task.kind.map_or(2, |kind| (kind == NormKind::Layer).into()),
            eps: task.eps,
            post_eps: task.post_eps,
            branch_scale: branch.map_or(1.0, |branch| branch.scale),
            x_scale: branch.map_or(1.0, |branch| branch.x_scale),
            top_k: chosen.map_or(0, |chosen| chosen.top_k as u32),
            unused: 0,
        };
        let block = width.div_ceil(8).next_multiple_of(32).clamp(32, 1024) as u32;
        self.start("norm", Launch { grid: [n as u32, 1, 1], block, shared: 0 }, &args)
    }

    /// Computes the activation of gate and up.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn gated(&self, args: &args::Gated) -> Result<()> {
        assert!(args.n as usize <= GRID);
        let grid = [args.width.div_ceil(512), args.n, 1];
        self.start("gated", Launch { grid, block: 128, shared: 0 }, args)
    }

    /// Multiplies rows by the sigmoids of their gates.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn gate_rows(&self, x: View<f32>, gate: View<f32>, n: usize, width: usize) -> Result<()> {
        assert!(x.len() >= n * width && gate.len() >= n && n <= GRID);
        let args = args::RowGate { x: x.address(), gate: gate.address(), n: n as u32, width: width as u32 };
        self.start(
            "gate_rows",
            Launch { grid: [width.div_ceil(128) as u32, n as u32, 1], block: 128, shared: 0 },
            &args,
        )
    }

    /// Writes a number of each head, `(n, heads)`, for each of the `width` columns of its head.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn spread_heads(&self, x: View<f32>, out: View<f32>, n: usize, [heads, width]: [usize; 2]) -> Result<()> {
        assert!(x.len() >= n * heads && out.len() >= n * heads * width && n <= GRID);
        let [rows, heads, width] = [n, heads, width].map(|size| size as u32);
        let (x, out) = (x.address(), out.address());
        let args = args::SpreadHeads { x, out, n: rows, heads, width, unused: 0 };
        self.start("spread_heads", Launch { grid: [heads, rows, 1], block: 128, shared: 0 }, &args)
    }

    /// Computes the logits of `router`, which adapters may change, chooses the experts of each row by them, and sorts
    /// the row-expert pairs.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn route(
        &self,
        (router, logits): Product<'_>,
        x: &Acts,
        grouped: &Grouped,
        choice: &ExpertChoice<'_>,
        changes: Option<&LowRank<'_>>,
    ) -> Result<()> {
        let Grouped { pairs, experts, share_rows, chosen, .. } = *grouped;
        let n = pairs / chosen.top_k;
        assert!(logits.len() >= n * experts && grouped.experts_of.len() >= pairs && grouped.inputs.len() >= pairs);
        assert!(chosen.slots.len() >= pairs && chosen.weights.len() >= pairs);
        assert!(grouped.shares.len() >= most_shares(pairs, experts, share_rows) && share_rows > 0);
        let route = choice.args(logits, grouped, n);
        let group = args::Group {
            experts_of: route.experts_of,
            slots: chosen.slots.address(),
            inputs: grouped.inputs.address(),
            shares: grouped.shares.address(),
            count: grouped.count.address(),
            pairs: pairs as u32,
            experts: experts as u32,
            top_k: route.top_k,
            share_rows: share_rows as u32,
        };
        let launch =
            |blocks: usize, block: usize| Launch { grid: [blocks as u32, 1, 1], block: block as u32, shared: 0 };
        let floats = matches!(router.matrix.kind, Kind::F32 | Kind::F16 | Kind::Bf16);
        if n <= ROUTER_ROWS && floats && changes.is_none() {
            let product = arguments(router, x, 0, logits, n);
            let args = args::Router { product, then: args::RouteGroup { route, group }, ticket: self.ticket() };
            return self.start("router", launch(experts, 256), &args);
        }
        self.matmul(router, x, 0, logits, n)?;
        changes.map_or(Ok(()), |changes| self.low_rank(changes))?;
        self.start("route", launch(n.div_ceil(4), 128), &route)?;
        self.start("group", launch(1, pairs.max(experts).next_multiple_of(32).clamp(128, 1024)), &group)
    }

    /// Returns the tickets: counters by which the thread blocks of a launch determine which of them ends last. They are
    /// zero before and after each launch.
    pub(super) fn tickets(&self) -> View<u32> {
        self.tickets.view()
    }

    /// Returns the address of the ticket for routers.
    fn ticket(&self) -> u64 {
        self.tickets.view().address()
    }
}

impl ExpertChoice<'_> {
    /// Returns the arguments of the choice for `n` rows of logits.
    fn args(&self, logits: View<f32>, grouped: &Grouped, n: usize) -> args::Route {
        let Selection { sigmoid, bias, groups, scale, .. } = self.selection;
        let of_experts = |numbers: Option<&Array<f32>>| {
            assert!(numbers.is_none_or(|numbers| numbers.view().len() == grouped.experts));
            numbers.map_or(0, |numbers| numbers.view().address())
        };
        let group = |size: fn(&ExpertGroups) -> usize| groups.as_ref().map_or(0, |groups| size(groups) as u32);
        args::Route {
            logits: logits.address(),
            experts_of: grouped.experts_of.address(),
            weights: grouped.chosen.weights.address(),
            bias: of_experts(self.bias),
            factors: of_experts(self.factors),
            n: n as u32,
            experts: grouped.experts as u32,
            top_k: grouped.chosen.top_k as u32,
            softmax_over_all: (self.softmax == RouterSoftmax::All).into(),
            scored: (sigmoid || bias || groups.is_some() || scale != 1.0).into(),
            sigmoid: sigmoid.into(),
            groups: group(|groups| groups.count),
            groups_chosen: group(|groups| groups.chosen),
            groups_best: group(|groups| groups.best),
            scale,
        }
    }
}

/// Returns the arguments of an activation; without `up`, values of gate and up alternate in `gate`.
pub fn gated(middle: &Middle<'_>, gate: View<f32>, up: Option<View<f32>>, n: usize) -> args::Gated {
    let width = middle.intermediate;
    let stride = if up.is_some() { width } else { 2 * width };
    assert!(gate.len() >= n * stride && up.is_none_or(|up| up.len() >= n * width));
    assert!(middle.out.rows >= n && middle.out.width == width);
    let (activation, alpha, limit) = match middle.activation {
        Activation::Silu => (0, 0.0, 0.0),
        Activation::GeluTanh => (1, 0.0, 0.0),
        Activation::SwigluOai { alpha, limit } => (2, alpha, limit),
        Activation::Relu2 => (3, 0.0, 0.0),
    };
    args::Gated {
        gate: gate.address(),
        up: up.map_or(0, View::address),
        out: middle.out.args(),
        n: n as u32,
        width: width as u32,
        stride: stride as u32,
        activation,
        alpha,
        limit,
    }
}

/// Checks that launches can cover the shapes of a model, so that none of the assertions here depends on a file.
///
/// # Errors
/// The model has too many experts, groups of experts, choices, heads, or rows of gate and up, or values of an odd
/// size.
pub fn check(config: &ModelConfig, rows: usize) -> Result<()> {
    let refuse = |found: String| Err(Error::engine(format!("{found} on a GPU")).help("use --device cpu"));
    if config.n_heads > GRID {
        return refuse(format!("found {} query heads, expected at most {GRID}", config.n_heads));
    }
    if let Some(recurrent) = &config.recurrent {
        let (width, key) = match recurrent.mixer {
            Recurrent::ShortConv(conv) => (conv.width, 0),
            Recurrent::GatedDeltaNet(net) => (net.width, net.key_dim),
            Recurrent::Mamba2(mamba) => (mamba.width, mamba.state),
        };
        if width > CONV_WIDTH {
            return refuse(format!("`recurrent.mixer.width`: found {width}, expected at most {CONV_WIDTH}"));
        }
        if key > LINEAR_KEY {
            return refuse(format!("`recurrent.mixer`: found keys of {key} numbers, expected at most {LINEAR_KEY}"));
        }
    }
    // Sizes of keys are even in every model: half of a head is rotated with the other half.
    let mut widths = config.heads().map(|heads| heads.value_dim);
    if let Some(width) = widths.find(|width| !width.is_multiple_of(2)) {
        return refuse(format!("`attention.latent.value`: found {width}, expected an even number"));
    }
    for mlp in config.mlps() {
        if let Mlp::Moe { latent: Some(_), .. } = mlp {
            return refuse("found experts that read narrower vectors (`mlp.latent`), which are not computed".into());
        }
        if let Mlp::Moe { selection: Selection { groups: Some(groups), .. }, .. } = mlp
            && groups.count > EXPERT_GROUPS
        {
            let found = format!("`mlp.selection.groups`: found {} groups of experts", groups.count);
            return refuse(format!("{found}, expected at most {EXPERT_GROUPS}"));
        }
        let width = match mlp {
            Mlp::Dense { intermediate, .. } => intermediate,
            Mlp::Moe { experts, top_k, .. } if experts > EXPERTS || top_k > TOP_K || rows * top_k > PAIRS => {
                return refuse(format!("found {top_k} of {experts} experts, expected at most {TOP_K} of {EXPERTS}"));
            }
            Mlp::Moe { intermediate, shared, .. } => {
                (2 * intermediate).max(shared.map_or(0, |shared| shared.intermediate))
            }
        };
        if width > 16 * TICKETS {
            return refuse(format!("found {width} rows of gate and up, expected at most {}", 16 * TICKETS));
        }
    }
    Ok(())
}

/// Returns the maximum number of shares (of at most `share_rows` pairs of one expert each) that `pairs` pairs can be
/// cut into.
pub fn most_shares(pairs: usize, experts: usize, share_rows: usize) -> usize {
    pairs.min(experts + pairs / share_rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_beyond_the_limits_of_the_kernels_are_refused_by_name() {
        let model = |mlp: serde_json::Value, latent: serde_json::Value, mixer: Option<serde_json::Value>| {
            let mut model = serde_json::json!({
                "architecture": "x", "hidden": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16,
                "vocab": 100, "max_context": 64, "norm_eps": 1e-6, "logit_softcap": null, "local_rope": null,
                "rope": {"theta": 1e4, "rotary_dim": null, "scaling": {"type": "none"}},
                "attention": {"softcap": null, "scale": 0.25, "latent": latent}, "mlp": mlp,
                "tied_embeddings": true, "bos": null,
            });
            if let Some(mixer) = mixer {
                model["recurrent"] = serde_json::json!({"layers": [0], "mixer": mixer});
            }
            let model: ModelConfig = serde_json::from_value(model).unwrap();
            check(&model, 8).err().map(|error| (error.cause().exit_code(), error.to_string()))
        };
        let with = |mlp, latent| model(mlp, latent, None);
        let refused = |mlp| with(mlp, serde_json::Value::Null);
        let moe = |experts: usize, groups: usize, shared: usize| {
            serde_json::json!({
                "kind": "moe", "experts": experts, "top_k": 2, "intermediate": 8, "activation": {"name": "silu"},
                "selection": {"groups": {"count": groups, "chosen": 2, "best": 1}}, "shared": {"intermediate": shared},
            })
        };
        assert_eq!(refused(moe(64, 32, 8)), None);
        for (mlp, found) in [
            (moe(66, 33, 8), "`mlp.selection.groups`: found 33"),
            (moe(1056, 32, 8), "2 of 1056 experts"),
            (moe(64, 32, 16 * TICKETS + 1), "1048577 rows of gate and up"),
        ] {
            let (code, message) = refused(mlp).unwrap();
            assert!(code == 5 && message.contains(found), "{message}");
        }
        let latent = |value: usize| {
            let mut latent = serde_json::json!({"q_rank": null, "kv_rank": 8, "nope": 8, "rope": 8, "norm_eps": 1e-6});
            latent["value"] = value.into();
            with(moe(64, 32, 8), latent)
        };
        assert_eq!(latent(12), None);
        assert!(latent(11).unwrap().1.contains("`attention.latent.value`: found 11, expected an even number"));
        let mixer = |width: usize, key: usize| {
            let sizes =
                serde_json::json!({"key_heads": 1, "value_heads": 2, "key_dim": key, "value_dim": 8, "width": width});
            model(moe(64, 32, 8), serde_json::Value::Null, Some(serde_json::json!({"gated_delta_net": sizes})))
        };
        assert_eq!(mixer(8, 256), None);
        assert!(mixer(9, 256).unwrap().1.contains("`recurrent.mixer.width`: found 9, expected at most 8"));
        assert!(mixer(8, 257).unwrap().1.contains("keys of 257 numbers, expected at most 256"));
    }
}
