//! Thread and memory placement: binds threads to processors and selects the NUMA nodes that memory is allocated on.
//!
//! A [`Placement`] is plain data and is computed first, from the topology and the options. [`Placement::take_memory`]
//! and `Placement::pin` then request it from the system: threads are pinned with `sched_setaffinity`, and memory is
//! placed with `set_mempolicy`, which also applies to the pages of files that are read from then on. Pages that are
//! already cached stay where they are.
#![allow(unsafe_code)]

use super::topology::{SYSTEM_ROOT, Topology};
use crate::error::{Error, Result};
use std::collections::BTreeSet;
use std::path::Path;
use std::str::FromStr;

/// Binding of threads to processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Affinity {
    /// The system chooses.
    #[default]
    Auto,
    /// Threads use neighbouring processors: a node is filled before the next.
    Compact,
    /// Threads are spread over the nodes.
    Scatter,
}

impl Affinity {
    /// Returns the name in options and reports.
    pub fn name(self) -> &'static str {
        match self {
            Affinity::Auto => "auto",
            Affinity::Compact => "compact",
            Affinity::Scatter => "scatter",
        }
    }
}

/// NUMA nodes that memory is allocated on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Numa {
    /// The system chooses, mostly the node of the thread that first touches a page.
    #[default]
    None,
    /// Pages are taken from all nodes in turn.
    Interleave,
    /// Threads and memory are on this node; memory of other nodes is used only when it is full.
    Node(usize),
    /// Threads and memory are on the node with most of the processors that this process may use, and nowhere else.
    Strict,
}

impl FromStr for Numa {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Numa, String> {
        match text {
            "none" => Ok(Numa::None),
            "interleave" => Ok(Numa::Interleave),
            "strict" => Ok(Numa::Strict),
            _ => text
                .strip_prefix("node:")
                .and_then(|number| number.parse().ok())
                .map(Numa::Node)
                .ok_or_else(|| "expected none, interleave, node:X or strict".into()),
        }
    }
}

impl std::fmt::Display for Numa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Numa::None => f.write_str("none"),
            Numa::Interleave => f.write_str("interleave"),
            Numa::Node(id) => write!(f, "node:{id}"),
            Numa::Strict => f.write_str("strict"),
        }
    }
}

/// Processors that each thread may use, and nodes that memory is allocated on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    /// Processors of each thread; empty if the system chooses.
    threads: Vec<Vec<usize>>,
    memory: Option<Policy>,
}

/// Arguments of `set_mempolicy`: one of its modes and a set of nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Policy {
    mode: i32,
    nodes: Vec<usize>,
}

/// Modes of `set_mempolicy`, as Linux numbers them in `mempolicy.h`.
const PREFERRED: i32 = 1;
const BIND: i32 = 2;
const INTERLEAVE: i32 = 3;

impl Placement {
    /// Decides which of the `allowed` processors each of `threads` threads uses, and which nodes memory is allocated
    /// on.
    ///
    /// # Errors
    /// The requested node does not exist, or has no memory or no processor that this process may use.
    pub fn plan(
        topology: &Topology,
        allowed: &[usize],
        affinity: Affinity,
        numa: Numa,
        threads: usize,
    ) -> Result<Placement> {
        let node = match numa {
            Numa::None | Numa::Interleave => None,
            Numa::Strict => topology.fullest_node(allowed),
            Numa::Node(id) => Some(topology.nodes.iter().find(|node| node.id == id).ok_or_else(|| {
                let ids: Vec<String> = topology.nodes.iter().map(|node| node.id.to_string()).collect();
                Error::engine(format!("--numa: found node {id}, which does not exist"))
                    .help(format!("choose one of the nodes of this machine: {}", ids.join(", ")))
            })?),
        };
        let mut usable = allowed.to_vec();
        if let Some(node) = node {
            usable.retain(|cpu| node.cpus.contains(cpu));
            if usable.is_empty() || node.memory_bytes == 0 {
                return Err(Error::engine(format!(
                    "memory node {} has no processor or no memory that this process may use",
                    node.id
                ))
                .help("choose another with --numa node:X"));
            }
        }
        let with_memory = topology.nodes.iter().filter(|node| node.memory_bytes > 0).map(|node| node.id);
        let memory = match (numa, node) {
            (Numa::Interleave, _) => Some(Policy { mode: INTERLEAVE, nodes: with_memory.collect() }),
            (Numa::Strict, Some(node)) => Some(Policy { mode: BIND, nodes: vec![node.id] }),
            (_, Some(node)) => Some(Policy { mode: PREFERRED, nodes: vec![node.id] }),
            _ => None,
        };
        let bound = affinity != Affinity::Auto;
        let ordered = bound.then(|| topology.cores_first(&usable, affinity == Affinity::Scatter));
        // With more threads than processors, the system chooses, because two threads pinned to one processor would wait
        // for each other.
        let pinned = ordered.filter(|cpus| threads <= cpus.len());
        let threads = match (pinned, node) {
            (Some(cpus), _) => cpus.into_iter().take(threads).map(|cpu| vec![cpu]).collect(),
            (None, Some(_)) => vec![usable; threads],
            (None, None) => Vec::new(),
        };
        Ok(Placement { threads, memory: memory.filter(|policy| !policy.nodes.is_empty()) })
    }

    /// Returns the processors of each thread; empty if the system chooses.
    pub fn threads(&self) -> &[Vec<usize>] {
        &self.threads
    }

    /// Returns how many different processors all threads together may use; `None` if the system chooses.
    pub(super) fn processors(&self) -> Option<usize> {
        let all: BTreeSet<&usize> = self.threads.iter().flatten().collect();
        Some(all.len()).filter(|count| *count > 0)
    }

    /// Applies the memory policy to the calling thread, the threads it starts from now on, and those that convert
    /// weights.
    ///
    /// # Errors
    /// The system refuses the policy, as in containers that forbid the call.
    pub fn take_memory(&self) -> Result<()> {
        let Some(policy) = &self.memory else { return Ok(()) };
        let others = rayon::broadcast(|_| set_policy(policy));
        let refused = others.into_iter().chain([set_policy(policy)]).collect::<std::io::Result<()>>();
        refused
            .map_err(|e| Error::engine(format!("the system refuses the memory policy: {e}")).help("leave out --numa"))
    }

    /// Restricts the calling thread to the processors of thread `t`, and returns those it could use before; `None` if
    /// nothing was changed.
    pub(super) fn pin(&self, t: usize) -> Option<Vec<usize>> {
        let cpus = self.threads.get(t)?;
        let before = allowed_processors();
        set_processors(cpus).then_some(before)
    }
}

/// Returns the processors that the calling thread may use.
pub fn allowed_processors() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    if let Ok(set) = rustix::thread::sched_getaffinity(None) {
        return (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect();
    }
    (0..std::thread::available_parallelism().map_or(1, usize::from)).collect()
}

/// Returns the number of physical cores that this process may use, at most what its control group grants. This is the
/// default number of threads.
pub fn physical_cores() -> usize {
    Topology::probe(Path::new(SYSTEM_ROOT)).cores(&allowed_processors()).clamp(1, granted_processors())
}

/// Returns the number of logical processors that this process may use, at most what the `cpu.max` or `cpu.cfs_quota_us`
/// of its control groups grant.
pub fn granted_processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Restricts the calling thread to these processors; returns false where that is not possible.
pub(super) fn set_processors(cpus: &[usize]) -> bool {
    #[cfg(target_os = "linux")]
    {
        let mut set = rustix::thread::CpuSet::new();
        cpus.iter().filter(|cpu| **cpu < rustix::thread::CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
        rustix::thread::sched_setaffinity(None, &set).is_ok()
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = cpus;
        false
    }
}

#[cfg(target_os = "linux")]
fn set_policy(policy: &Policy) -> std::io::Result<()> {
    let bits = libc::c_ulong::BITS as usize;
    let mut mask = vec![0 as libc::c_ulong; policy.nodes.iter().max().map_or(1, |max| max / bits + 1)];
    policy.nodes.iter().for_each(|node| mask[node / bits] |= 1 << (node % bits));
    // The kernel reads one bit less than `max_node` says.
    let (mode, max_node) = (libc::c_long::from(policy.mode), (mask.len() * bits + 1) as libc::c_ulong);
    // SAFETY: the call reads `mask`, which has the bits that `max_node` says and lives until the call returns; it
    // writes no memory of ours, and changes only where later pages are allocated.
    let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask.as_ptr(), max_node) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(not(target_os = "linux"))]
fn set_policy(_: &Policy) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::super::topology::tests::two_nodes;
    use super::*;

    #[test]
    fn threads_and_memory_go_where_they_were_asked_to() {
        let dir = tempfile::tempdir().unwrap();
        let machine = two_nodes(dir.path());
        let all: Vec<usize> = (0..8).collect();
        type Case = (Affinity, Numa, usize, Vec<Vec<usize>>, Option<(i32, Vec<usize>)>);
        let cases: [Case; 8] = [
            (Affinity::Auto, Numa::None, 4, vec![], None),
            (Affinity::Compact, Numa::None, 3, vec![vec![0], vec![1], vec![4]], None),
            (Affinity::Scatter, Numa::None, 3, vec![vec![0], vec![2], vec![1]], None),
            (Affinity::Scatter, Numa::None, 9, vec![], None),
            (Affinity::Auto, Numa::Interleave, 2, vec![], Some((INTERLEAVE, vec![0, 1, 2]))),
            (Affinity::Auto, Numa::Node(1), 2, vec![vec![2, 3, 6, 7]; 2], Some((PREFERRED, vec![1]))),
            (Affinity::Scatter, Numa::Node(1), 2, vec![vec![2], vec![3]], Some((PREFERRED, vec![1]))),
            (Affinity::Compact, Numa::Strict, 2, vec![vec![0], vec![1]], Some((BIND, vec![0]))),
        ];
        for (affinity, numa, threads, processors, memory) in cases {
            let plan = Placement::plan(&machine, &all, affinity, numa, threads).unwrap();
            assert_eq!(plan.threads(), processors, "{affinity:?} {numa}");
            assert_eq!(plan.memory.map(|policy| (policy.mode, policy.nodes)), memory, "{affinity:?} {numa}");
        }
    }

    #[test]
    fn a_node_that_cannot_serve_is_refused_with_the_others_named() {
        let dir = tempfile::tempdir().unwrap();
        let machine = two_nodes(dir.path());
        let plan = |numa, allowed: &[usize]| Placement::plan(&machine, allowed, Affinity::Auto, numa, 1);
        let missing = plan(Numa::Node(7), &[0]).unwrap_err();
        assert_eq!(missing.cause().kind(), "engine");
        assert!(missing.help_text().unwrap().ends_with("this machine: 0, 1, 2"));
        assert!(plan(Numa::Node(1), &[0, 1]).unwrap_err().to_string().contains("no processor"));
        assert!(plan(Numa::Node(2), &[0]).unwrap_err().to_string().contains("no processor"));
        assert!(plan(Numa::Node(0), &[0]).is_ok());
    }

    #[test]
    fn policies_are_spelled_as_they_are_parsed() {
        for text in ["none", "interleave", "node:3", "strict"] {
            assert_eq!(text.parse::<Numa>().unwrap().to_string(), text);
        }
        for text in ["", "node:", "node:x", "node:-1", "all"] {
            assert!(text.parse::<Numa>().is_err(), "{text}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_pinned_thread_runs_where_it_should_and_gets_its_freedom_back() {
        let before = allowed_processors();
        let wanted = vec![before[before.len() - 1]];
        let placement = Placement { threads: vec![wanted.clone()], memory: None };
        assert_eq!(placement.pin(0), Some(before.clone()));
        assert_eq!(allowed_processors(), wanted);
        assert!(set_processors(&before));
        assert_eq!((placement.pin(1), allowed_processors()), (None, before));
    }
}
