//! Memory limits that control groups impose on the process, as containers and batch systems set them.

use std::fs;
use std::path::Path;

/// File names of a cgroup version: where its groups are mounted, the limit, the usage, and the reclaimable part of the usage.
struct Version {
    mounted: &'static str,
    limit: &'static str,
    used: &'static str,
    reclaimable: &'static str,
}

const V2: Version = Version {
    mounted: "sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    reclaimable: "inactive_file",
};
const V1: Version = Version {
    mounted: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};

/// Bytes that the process may still allocate within its group and all enclosing groups; `None` if none has a limit. `root` is
/// where the file systems are mounted.
pub fn room_bytes(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let room = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, group) = rest.split_once(':')?;
        let version = match controllers {
            "" => &V2,
            controllers if controllers.split(',').any(|name| name == "memory") => &V1,
            _ => return None,
        };
        let mounted = root.join(version.mounted);
        // In a container, the process's own group may be mounted as the root, under any name.
        let group = mounted.join(group.trim_start_matches('/'));
        let innermost = if group.is_dir() { &group } else { &mounted };
        let groups = innermost.ancestors().take_while(|folder| folder.starts_with(&mounted));
        groups.filter_map(|folder| version.room(folder)).min()
    };
    groups.lines().filter_map(room).min()
}

impl Version {
    fn room(&self, group: &Path) -> Option<u64> {
        let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        // `max`, or in version 1 a number beyond any memory, means no limit.
        let limit = number(self.limit).filter(|limit| *limit < 1 << 60)?;
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let reclaimable =
            stat.lines().find_map(|line| line.strip_prefix(self.reclaimable)?.trim().parse().ok());
        let used = number(self.used).unwrap_or(0).saturating_sub(reclaimable.unwrap_or(0));
        Some(limit.saturating_sub(used))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(name: &str, files: &[(&str, &str)]) -> Option<u64> {
        let root = std::env::temp_dir().join(format!("flatout-cgroup-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let room = room_bytes(&root);
        let _ = fs::remove_dir_all(&root);
        room
    }

    #[test]
    fn the_tightest_enclosing_group_limits() {
        let job = "sys/fs/cgroup/slurm/job";
        let files = [
            ("proc/self/cgroup", "0::/slurm/job\n"),
            (&format!("{job}/memory.max"), "8000\n"),
            (&format!("{job}/memory.current"), "5000\n"),
            (&format!("{job}/memory.stat"), "anon 3000\ninactive_file 1500\n"),
            ("sys/fs/cgroup/slurm/memory.max", "max\n"),
        ];
        assert_eq!(room("v2", &files), Some(4500));
        let tight = [&files[..4], &[("sys/fs/cgroup/slurm/memory.max", "1000\n")]].concat();
        assert_eq!(room("tight", &tight), Some(1000));
    }

    #[test]
    fn version_1_and_no_limit() {
        let first = "sys/fs/cgroup/memory/docker/a";
        let files = [
            ("proc/self/cgroup", "5:devices:/x\n4:cpu,memory:/docker/a\n0::/\n"),
            (&format!("{first}/memory.limit_in_bytes"), "6000\n"),
            (&format!("{first}/memory.usage_in_bytes"), "1000\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!(room("v1", &files), Some(5000));
        // A container sees its own group as the root.
        let inside = [("proc/self/cgroup", "0::/../host/name\n"), ("sys/fs/cgroup/memory.max", "700\n")];
        assert_eq!(room("inside", &inside), Some(700));
        assert_eq!(
            room("none", &[("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "max\n")]),
            None
        );
        assert_eq!(room("nowhere", &[]), None);
    }
}
