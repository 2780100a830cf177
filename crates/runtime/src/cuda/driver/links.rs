//! Links between GPUs by name, so that any machine can predict exchanges.

use std::sync::OnceLock;

use flatout_ir::links::{Link, Links};

/// The default network between nodes: 400 Gbit/s per GPU.
pub const NET: &str = "ib400";
/// The newest PCIe generation in the table.
pub const NEWEST_PCIE: u32 = 5;
/// Fraction of a GPU that NCCL's kernels occupy during an exchange: 16 of an H100's 132 multiprocessors.
const HELD_PART: f64 = 16.0 / 132.0;

struct Row {
    link: Link,
    /// The GPUs that have this link.
    gpus: Vec<&'static str>,
}

fn rows() -> &'static [Row] {
    static ALL: OnceLock<Vec<Row>> = OnceLock::new();
    ALL.get_or_init(|| read(include_str!("links.txt")).expect("the table is well formed"))
}

/// All rows of the table.
pub fn named() -> impl Iterator<Item = &'static Link> {
    rows().iter().map(|row| &row.link)
}

pub fn find(name: &str) -> Option<&'static Link> {
    named().find(|link| link.name == name)
}

pub fn default_net() -> &'static Link {
    find(NET).expect("the table has it")
}

/// The link between the GPUs of a node, by GPU name.
pub fn of_gpu(gpu: &str) -> Option<&'static Link> {
    rows().iter().find(|row| row.gpus.contains(&gpu)).map(|row| &row.link)
}

/// The links of a cluster with this many GPUs per node.
pub fn between(local: &Link, net: &Link, ranks_a_node: usize) -> Links {
    Links { local: local.clone(), net: net.clone(), ranks_a_node, held_part: HELD_PART }
}

/// The links of a cluster of nodes with GPUs of a given name; `None` if the table does not list the GPU.
pub fn of_nodes(gpu: &str, ranks_a_node: usize) -> Option<Links> {
    Some(between(of_gpu(gpu)?, default_net(), ranks_a_node))
}

fn read(text: &'static str) -> Result<Vec<Row>, String> {
    let lines =
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    lines.map(|(i, line)| read_line(line).map_err(|why| format!("line {}: {why}", i + 1))).collect()
}

fn read_line(line: &'static str) -> Result<Row, String> {
    let words: Vec<&'static str> = line.split_whitespace().collect();
    let [name, bandwidth, simple, low_latency, ref gpus @ ..] = words[..] else {
        return Err(format!("{} words and not 4 or more", words.len()));
    };
    let number = |word: &str| match word.parse::<f64>() {
        Ok(x) if x > 0.0 && x.is_finite() => Ok(x),
        _ => Err(format!("`{word}` is no number above 0")),
    };
    let step_seconds = [1e-6 * number(simple)?, 1e-6 * number(low_latency)?];
    let link = Link { name: name.into(), bytes_per_second: 1e9 * number(bandwidth)?, step_seconds };
    Ok(Row { link, gpus: gpus.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::driver::gpus;

    #[test]
    fn every_gpu_has_a_link() {
        for gpu in gpus::named() {
            assert!(of_gpu(gpu.name).is_some(), "{}", gpu.name);
        }
        let known = |gpu: &&str| gpus::find(gpu).is_some();
        assert!(rows().iter().flat_map(|row| &row.gpus).all(known));
        assert_eq!(of_gpu("h200").unwrap().name, "nvlink4");
        assert_eq!(find(NET).unwrap().bytes_per_second, 48e9);
        assert_eq!(find("nvlink9"), None);
        assert!(
            find(&format!("pcie{NEWEST_PCIE}")).is_some()
                && find(&format!("pcie{}", NEWEST_PCIE + 1)).is_none()
        );
        let links = of_nodes("a100-80", 8).unwrap();
        assert_eq!((links.local.name.as_str(), links.ranks_a_node), ("nvlink3", 8));
        assert_eq!(of_nodes("gtx1080", 8), None);
    }

    #[test]
    fn malformed_lines_are_reported() {
        let refused = |text: &'static str| read(text).err().unwrap();
        assert_eq!(refused("# x\n\nnvlink4 360 3.4"), "line 3: 3 words and not 4 or more");
        assert_eq!(refused("nvlink4 fast 3.4 0.6"), "line 1: `fast` is no number above 0");
        assert_eq!(refused("nvlink4 0 3.4 0.6"), "line 1: `0` is no number above 0");
    }
}
