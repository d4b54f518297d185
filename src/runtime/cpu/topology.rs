//! Topology of the machine: its processors, the cores they share, and the NUMA nodes they belong to.
//!
//! Linux reports these in `/sys/devices/system`: `node/nodeN/cpulist` and `meminfo`,
//! `cpu/cpuN/topology/thread_siblings_list`. If a file cannot be read, the simplest case is assumed: one node, one
//! hardware thread per core. [`Topology::cores_first`] is the order in which processors are assigned to threads.

use crate::files;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Directory in which Linux reports the topology.
pub const SYSTEM_ROOT: &str = "/sys/devices/system";
/// Number of processors that sets of processors have room for; higher processor numbers are ignored.
const MAX_PROCESSORS: usize = 1024;

/// The processors and memory nodes of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Processors in the order of their numbers.
    processors: Vec<Processor>,
    /// Nodes in the order of their numbers; empty if the system does not report them.
    pub nodes: Vec<Node>,
}

/// A hardware thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Processor {
    id: usize,
    /// Lowest number among the hardware threads of the same core.
    core: usize,
    node: usize,
}

/// A memory node and the processors close to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Number of the node.
    pub id: usize,
    /// Numbers of its processors; empty for a node that only has memory.
    pub cpus: Vec<usize>,
    /// Memory of the node in bytes.
    pub memory_bytes: u64,
}

impl Topology {
    /// Reads the topology from a directory tree like that under [`SYSTEM_ROOT`].
    pub fn probe(root: &Path) -> Topology {
        let list =
            |path: String| files::read_to_string(&root.join(path)).map(|text| parse_list(&text)).unwrap_or_default();
        let mut nodes: Vec<Node> = list("node/online".into())
            .into_iter()
            .map(|id| Node {
                id,
                cpus: list(format!("node/node{id}/cpulist")),
                memory_bytes: memory_bytes(&root.join(format!("node/node{id}/meminfo"))),
            })
            .collect();
        nodes.sort_by_key(|node| node.id);
        let node_of = |cpu| nodes.iter().find(|node| node.cpus.contains(&cpu)).map_or(0, |node| node.id);
        let mut online = list("cpu/online".into());
        if online.is_empty() {
            online = (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
        }
        let core_of = |cpu| list(format!("cpu/cpu{cpu}/topology/thread_siblings_list")).first().copied().unwrap_or(cpu);
        let processors = online.into_iter().map(|id| Processor { id, core: core_of(id), node: node_of(id) }).collect();
        Topology { processors, nodes }
    }

    /// Returns the given processors in the order in which threads should get them: one hardware thread of every core
    /// first, since two on a core share its execution units, then their siblings. They alternate between the nodes
    /// (`scatter`), or fill a node, siblings included, before the next.
    pub fn cores_first(&self, allowed: &[usize], scatter: bool) -> Vec<usize> {
        let mut on_core: BTreeMap<usize, usize> = BTreeMap::new();
        let mut in_node: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        let mut keyed = Vec::new();
        for cpu in self.processors.iter().filter(|cpu| allowed.contains(&cpu.id)) {
            let sibling = count(&mut on_core, cpu.core);
            let turn = count(&mut in_node, (cpu.node, sibling));
            let key = if scatter { (sibling, turn, cpu.node) } else { (cpu.node, sibling, turn) };
            keyed.push((key, cpu.id));
        }
        keyed.sort_unstable();
        keyed.into_iter().map(|(_, id)| id).collect()
    }

    /// Returns how many cores the given processors belong to.
    pub fn cores(&self, allowed: &[usize]) -> usize {
        let usable = self.processors.iter().filter(|cpu| allowed.contains(&cpu.id));
        usable.map(|cpu| cpu.core).collect::<BTreeSet<_>>().len()
    }

    /// Returns the node with most of the given processors, the first one at a tie.
    pub fn fullest_node(&self, allowed: &[usize]) -> Option<&Node> {
        let inside = |node: &&Node| node.cpus.iter().filter(|cpu| allowed.contains(cpu)).count();
        self.nodes.iter().max_by_key(|node| (inside(node), Reverse(node.id)))
    }
}

/// Returns how many earlier calls had this key.
fn count<K: Ord>(counts: &mut BTreeMap<K, usize>, key: K) -> usize {
    let before = counts.entry(key).or_default();
    *before += 1;
    *before - 1
}

/// Parses a list of numbers and ranges such as `0-3,8,10-11`; parts that are not numbers are left out.
fn parse_list(text: &str) -> Vec<usize> {
    let ranges = text.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<usize>().ok()?..=last.trim().parse::<usize>().ok()?.min(MAX_PROCESSORS - 1))
    });
    ranges.flatten().take(MAX_PROCESSORS).collect()
}

/// Reads the total memory from a line such as `Node 0 MemTotal:       24684136 kB`.
fn memory_bytes(meminfo: &Path) -> u64 {
    let text = files::read_to_string(meminfo).unwrap_or_default();
    let total = text.lines().find_map(|line| line.split_once("MemTotal:"));
    let kilobytes = total.and_then(|(_, rest)| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kilobytes.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Makes a machine of two nodes of two cores with two hardware threads each, and a third node that only has
    /// memory. Processors are numbered as Linux mostly does: siblings are 4 apart.
    pub fn two_nodes(dir: &Path) -> Topology {
        let write = |path: String, text: &str| {
            let path = dir.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("cpu/online".into(), "0-7\n");
        write("node/online".into(), "0-2\n");
        for (node, cpus) in ["0-1,4-5\n", "2-3,6-7\n", "\n"].into_iter().enumerate() {
            write(format!("node/node{node}/cpulist"), cpus);
            write(format!("node/node{node}/meminfo"), &format!("Node {node} MemTotal:  {} kB\n", 1000 * (node + 1)));
        }
        for cpu in 0..8 {
            write(format!("cpu/cpu{cpu}/topology/thread_siblings_list"), &format!("{},{}\n", cpu % 4, cpu % 4 + 4));
        }
        Topology::probe(dir)
    }

    #[test]
    fn nodes_cores_and_memory_are_read_from_the_tree() {
        let dir = tempfile::tempdir().unwrap();
        let machine = two_nodes(dir.path());
        assert_eq!(machine.nodes[1], Node { id: 1, cpus: vec![2, 3, 6, 7], memory_bytes: 2000 << 10 });
        assert_eq!((machine.nodes[2].cpus.len(), machine.nodes[2].memory_bytes), (0, 3000 << 10));
        assert_eq!((machine.cores(&[0, 1, 2, 3, 4, 5, 6, 7]), machine.cores(&[1, 5, 6])), (4, 2));
        assert_eq!(machine.fullest_node(&[0, 2, 3]).unwrap().id, 1);
        assert_eq!(machine.fullest_node(&[0, 3]).unwrap().id, 0);
    }

    #[test]
    fn threads_get_whole_cores_before_siblings_compact_or_scattered() {
        let dir = tempfile::tempdir().unwrap();
        let machine = two_nodes(dir.path());
        let all: Vec<usize> = (0..8).collect();
        assert_eq!(machine.cores_first(&all, false), [0, 1, 4, 5, 2, 3, 6, 7]);
        assert_eq!(machine.cores_first(&all, true), [0, 2, 1, 3, 4, 6, 5, 7]);
        // If the first hardware thread of a core is not allowed, its sibling counts as a core of its own.
        assert_eq!(machine.cores_first(&[1, 3, 4, 7], true), [1, 3, 4, 7]);
    }

    #[test]
    fn a_machine_that_tells_nothing_has_one_thread_per_core() {
        let dir = tempfile::tempdir().unwrap();
        let machine = Topology::probe(dir.path());
        assert!(machine.nodes.is_empty());
        assert_eq!(machine.cores_first(&[0], false), [0]);
    }

    #[test]
    fn lists_are_ranges_and_numbers_and_nonsense_is_left_out() {
        let cases =
            [("0-3,8,10-11\n", vec![0, 1, 2, 3, 8, 10, 11]), ("", vec![]), ("x,2,3-", vec![2]), ("5-3", vec![])];
        for (text, expected) in cases {
            assert_eq!(parse_list(text), expected, "{text}");
        }
        assert_eq!(parse_list("0-18446744073709551615").len(), MAX_PROCESSORS);
    }
}
