//! How much memory the machine can still give, so that what is too large is refused and not killed.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that can be allocated before something must be killed: the kernel's own estimate, or less if a
/// control group (version 2) of this process allows less. `u64::MAX` if nobody says.
#[must_use]
pub fn available_bytes() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| group_dir(&text));
    let tightest = groups.iter().flat_map(|dir| dir.ancestors()).filter_map(group_room).min();
    machine.unwrap_or(u64::MAX).min(tightest.unwrap_or(u64::MAX))
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

fn group_dir(cgroup: &str) -> Option<PathBuf> {
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(Path::new("/sys/fs/cgroup").join(path.trim_start_matches('/')))
}

/// What the control group at `dir` has left; `None` where there is no limit.
fn group_room(dir: &Path) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(dir.join(name)).ok();
    room_left(&read("memory.max")?, &read("memory.current")?, &read("memory.stat")?)
}

/// Limit less use, where file pages do not count as used: the kernel drops them on demand. Shared memory does
/// count, though the kernel lists it as file pages.
fn room_left(max: &str, current: &str, stat: &str) -> Option<u64> {
    let max: u64 = max.trim().parse().ok()?;
    let current: u64 = current.trim().parse().ok()?;
    let stat_bytes = |key: &str| -> u64 {
        let value = stat.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
        value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
    };
    let droppable = stat_bytes("file").saturating_sub(stat_bytes("shmem"));
    Some(max.saturating_sub(current.saturating_sub(droppable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_counts_in_kib() {
        assert_eq!(mem_available("MemFree: 7 kB\nMemAvailable:   3 kB\n"), Some(3072));
        assert_eq!(mem_available("MemFree: 7 kB\n"), None);
    }

    #[test]
    fn droppable_file_pages_are_room_and_shared_memory_is_not() {
        assert_eq!(room_left("1000\n", "900\n", "anon 200\nfile 700\nfile_mapped 1\nshmem 300\n"), Some(500));
        assert_eq!(room_left("max\n", "900\n", ""), None);
        assert_eq!(room_left("100\n", "900\n", ""), Some(0));
    }

    #[test]
    fn a_group_is_found_under_the_unified_hierarchy_only() {
        assert_eq!(group_dir("4:memory:/a\n0::/b/c\n"), Some(PathBuf::from("/sys/fs/cgroup/b/c")));
        assert_eq!(group_dir("4:memory:/a\n"), None);
    }
}
