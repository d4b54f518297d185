//! Memory that this process may still use: of the machine, of the control groups that contain the process, and of its
//! address space (`ulimit -v`).
//!
//! A container may use less memory than its machine has, and the system kills a process in it that uses more. The
//! limits are files: `memory.max` in every directory of a control group of version 2, `memory.limit_in_bytes` in
//! version 1. The memory in use contains cached pages of files, which the system drops when memory is needed.

use crate::files;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::path::{Path, PathBuf};

/// Limits of at least this many bytes mean "no limit" in control groups of version 1.
const UNLIMITED: u64 = 1 << 60;

/// Bytes of the address space that are left for stacks and heaps of threads that start later; the heap of a thread
/// reserves 64 MiB.
const THREADS: u64 = 256 << 20;

/// Names of the files of a version of control groups.
struct Version {
    /// Directory of the hierarchy that limits memory.
    root: &'static str,
    /// File with the limit in bytes.
    limit: &'static str,
    /// File with the bytes in use, cached pages of files included.
    used: &'static str,
    /// Fields of `memory.stat` with the bytes of cached files.
    cached: [&'static str; 2],
}

const V2: Version = Version {
    root: "sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    cached: ["inactive_file", "active_file"],
};

const V1: Version = Version {
    root: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_inactive_file", "total_active_file"],
};

/// Returns how many more bytes of memory this process can use without being killed; `None` where the system does not
/// say. Swap space counts as memory.
pub fn memory_left() -> Option<u64> {
    memory_left_in(Path::new("/"))
}

/// Raises the limit of open files to the highest one that the process may set. Programs that wait with `select` need a
/// low limit, so the system starts processes with one.
pub fn raise_open_files() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
    {
        // A refusal leaves the limit as it is, which `open_files` tells.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// Returns the limit of open files.
pub fn open_files() -> Option<u64> {
    getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(soft, _)| soft)
}

/// Does what [`memory_left`] does, with the files below `root`.
fn memory_left_in(root: &Path) -> Option<u64> {
    let info = files::read_to_string(&root.join("proc/meminfo")).unwrap_or_default();
    let kib = |name: &str| number_after(&info, &format!("{name}:"));
    let machine = kib("MemAvailable").map(|available| (available + kib("SwapFree").unwrap_or(0)) << 10);
    let groups = files::read_to_string(&root.join("proc/self/cgroup")).unwrap_or_default();
    let limited = groups.lines().filter_map(group_of).flat_map(|(version, group)| {
        directories(&root.join(version.root), group).into_iter().filter_map(|dir| left_of_group(&dir, version))
    });
    limited.chain(machine).chain(address_space_left(root)).min()
}

/// Returns the bytes of address space that the process may still map; `None` without a limit.
fn address_space_left(root: &Path) -> Option<u64> {
    let limits = files::read_to_string(&root.join("proc/self/limits")).ok()?;
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: u64 = limit.split_whitespace().next()?.parse().ok()?;
    let status = files::read_to_string(&root.join("proc/self/status")).ok()?;
    Some(limit.saturating_sub(number_after(&status, "VmSize:")? << 10).saturating_sub(THREADS))
}

/// Reads a line of `/proc/self/cgroup`, `ID:CONTROLLERS:PATH`; `None` if its hierarchy does not limit memory.
fn group_of(line: &str) -> Option<(&'static Version, &str)> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    let version = match controllers {
        "" => &V2,
        list if list.split(',').any(|name| name == "memory") => &V1,
        _ => return None,
    };
    Some((version, path))
}

/// Returns the directories of a group and of all groups around it. In a container, the path may be one that exists
/// only outside of it; of the returned directories, then only `root` exists, which is the group of the container.
fn directories(root: &Path, group: &str) -> Vec<PathBuf> {
    let inside = root.join(group.trim_start_matches('/'));
    inside.ancestors().take_while(|dir| dir.starts_with(root)).map(Path::to_path_buf).collect()
}

/// Returns the bytes that a group may still use; `None` if it has no limit.
fn left_of_group(dir: &Path, version: &Version) -> Option<u64> {
    let number = |name: &str| files::read_to_string(&dir.join(name)).ok()?.trim().parse::<u64>().ok();
    let limit = number(version.limit).filter(|limit| *limit < UNLIMITED)?;
    let stat = files::read_to_string(&dir.join("memory.stat")).unwrap_or_default();
    let cached: u64 = version.cached.iter().filter_map(|name| number_after(&stat, name)).sum();
    Some(limit.saturating_sub(number(version.used)?.saturating_sub(cached)))
}

/// Returns the number after `name` in the first line that begins with the word `name`.
fn number_after(text: &str, name: &str) -> Option<u64> {
    let words = text.lines().map(str::split_whitespace).find_map(|mut words| (words.next()? == name).then_some(words));
    words?.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates files below a temporary directory and returns what [`memory_left_in`] reads there.
    fn left(files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        memory_left_in(root.path())
    }

    const MACHINE: (&str, &str) = ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:   5000 kB\nSwapFree: 1000 kB\n");

    #[test]
    fn without_control_groups_the_machine_counts() {
        assert_eq!(left(&[]), None);
        assert_eq!(left(&[MACHINE]), Some(6000 << 10));
        assert!(memory_left().is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn the_smallest_limit_of_all_groups_around_the_process_counts() {
        let files = [
            MACHINE,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "10\n"),
            ("sys/fs/cgroup/a/memory.max", "1000000\n"),
            ("sys/fs/cgroup/a/memory.current", "900000\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 100000\nactive_file 200000\n"),
        ];
        assert_eq!(left(&files), Some(400_000));
    }

    #[test]
    fn the_limit_of_the_address_space_counts() {
        let files =
            |limit| [MACHINE, ("proc/self/limits", limit), ("proc/self/status", "Name: x\nVmSize:   1024 kB\n")];
        let text = "Limit  Soft Limit  Hard Limit  Units\nMax address space  270532608  unlimited  bytes\n";
        assert_eq!(left(&files(text)), Some(1 << 20));
        assert_eq!(left(&files("Max address space  1000  1000  bytes\n")), Some(0));
        assert_eq!(left(&files("Max address space  unlimited  unlimited  bytes\n")), Some(6000 << 10));
    }

    #[test]
    fn version_1_is_read_also_where_only_the_containers_group_is_visible() {
        let files = |limit| {
            [
                MACHINE,
                ("proc/self/cgroup", "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", limit),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "3000000"),
                ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 500000\n"),
            ]
        };
        assert_eq!(left(&files("4000000\n")), Some(1_500_000));
        assert_eq!(left(&files("2000000\n")), Some(0));
        assert_eq!(left(&files("9223372036854771712\n")), Some(6000 << 10));
    }
}
