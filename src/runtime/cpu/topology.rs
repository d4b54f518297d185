//! Which processors does this machine have, which of them share a core, and which memory is near to which?
//!
//! Linux tells in `/sys/devices/system`: `node/nodeN/cpulist` and `meminfo`, `cpu/cpuN/topology/thread_siblings_list`.
//! What cannot be read is taken to be simple: one node, one hardware thread per core. [`Topology::cores_first`] is the
//! order in which threads get processors.

use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::read_to_string;
use std::path::Path;

/// Where Linux tells.
pub const SYSTEM_ROOT: &str = "/sys/devices/system";
/// Larger processor numbers are not believed; sets of processors have room for so many.
const MAX_PROCESSORS: usize = 1024;

/// The processors and memory nodes of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// In order of their number.
    processors: Vec<Processor>,
    /// In order of their number; empty when the system does not tell.
    pub nodes: Vec<Node>,
}

/// A hardware thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Processor {
    id: usize,
    /// The lowest number among those that share its core.
    core: usize,
    node: usize,
}

/// A memory node and the processors near to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Its number.
    pub id: usize,
    /// Numbers of its processors; there are nodes of memory alone.
    pub cpus: Vec<usize>,
    /// Its memory.
    pub memory_bytes: u64,
}

impl Topology {
    /// Reads a tree like that under [`SYSTEM_ROOT`].
    pub fn probe(root: &Path) -> Topology {
        let list = |path: String| read_to_string(root.join(path)).map(|text| parse_list(&text)).unwrap_or_default();
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

    /// The given processors in the order in which threads should get them: one hardware thread of every core first,
    /// since two on a core share its arithmetic, then their siblings. They come from the nodes in turn (`scatter`), or
    /// fill a node, siblings included, before the next.
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

    /// How many cores the given processors belong to.
    pub fn cores(&self, allowed: &[usize]) -> usize {
        let usable = self.processors.iter().filter(|cpu| allowed.contains(&cpu.id));
        usable.map(|cpu| cpu.core).collect::<BTreeSet<_>>().len()
    }

    /// The node with most of the given processors, the first of several.
    pub fn fullest_node(&self, allowed: &[usize]) -> Option<&Node> {
        let inside = |node: &&Node| node.cpus.iter().filter(|cpu| allowed.contains(cpu)).count();
        self.nodes.iter().max_by_key(|node| (inside(node), Reverse(node.id)))
    }
}

/// How many came before with this key.
fn count<K: Ord>(counts: &mut BTreeMap<K, usize>, key: K) -> usize {
    let before = counts.entry(key).or_default();
    *before += 1;
    *before - 1
}

/// `0-3,8,10-11` as numbers; what is no number is left out.
fn parse_list(text: &str) -> Vec<usize> {
    let ranges = text.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<usize>().ok()?..=last.trim().parse::<usize>().ok()?.min(MAX_PROCESSORS - 1))
    });
    ranges.flatten().take(MAX_PROCESSORS).collect()
}

/// `Node 0 MemTotal:       24684136 kB`.
fn memory_bytes(meminfo: &Path) -> u64 {
    let text = read_to_string(meminfo).unwrap_or_default();
    let total = text.lines().find_map(|line| line.split_once("MemTotal:"));
    let kilobytes = total.and_then(|(_, rest)| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kilobytes.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Two nodes of two cores with two hardware threads each, numbered as Linux mostly does: siblings are 4 apart; and
    /// a node of memory alone.
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
        // A sibling whose first hardware thread is not ours is a core of its own.
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
