//! How `doctor` shows the links between the GPUs of this machine: a line for one GPU, a matrix for several.

use flatout_train::device::{self, Topology};
use serde_json::{Value, json};

use crate::screen::Screen;

/// Prints the links; nothing if there is no GPU.
pub fn print(screen: &Screen) {
    if device::visible_gpus() > 0 {
        lines(device::topology()).iter().for_each(|line| screen.result(format!("         {line}")));
    }
}

fn lines(topology: Result<&Topology, String>) -> Vec<String> {
    let topology = match topology {
        Ok(topology) => topology,
        Err(why) => return vec![format!("links    not known: {why}")],
    };
    let count = topology.gpus.len();
    if let [only] = &topology.gpus[..] {
        return vec![format!("links    {only}, of the only GPU that is visible")];
    }
    let cell = |a: usize, b: usize| if a == b { "-".to_string() } else { topology.path(a, b).to_string() };
    let cells: Vec<Vec<String>> = (0..count).map(|a| (0..count).map(|b| cell(a, b)).collect()).collect();
    let width = |b: usize| cells.iter().map(|row| row[b].len()).max().unwrap_or(0).max(5);
    let line = |head: String, row: &dyn Fn(usize) -> String| {
        let row: Vec<String> = (0..count).map(|b| format!("{:<1$}", row(b), width(b))).collect();
        format!("{head:8} {}", row.join("  ")).trim_end().to_string()
    };
    let mut lines = vec![line("links".into(), &|b| format!("GPU {b}"))];
    lines.extend((0..count).map(|a| line(format!("GPU {a}"), &|b| cells[a][b].clone())));
    let pairs = (0..count).flat_map(|a| (0..a).map(move |b| (a, b)));
    let mut legends: Vec<&str> = pairs.filter_map(|(a, b)| topology.path(a, b).legend()).collect();
    legends.sort_unstable();
    legends.dedup();
    lines.extend(legends.into_iter().map(|legend| format!("         {legend}")));
    lines.push(match topology.link(count) {
        Some(link) => {
            format!("         exchanges among all of them are predicted over {}, the slowest path", link.name)
        }
        None => "         exchanges are predicted by the table of links, because a path is not known".into(),
    });
    lines
}

/// The links as JSON; null if there is no GPU.
pub fn object() -> Value {
    if device::visible_gpus() == 0 {
        return Value::Null;
    }
    match device::topology() {
        Ok(topology) => described(topology),
        Err(why) => json!({ "unknown": why }),
    }
}

fn described(topology: &Topology) -> Value {
    let count = topology.gpus.len();
    let path = |a: usize, b: usize| (a != b).then(|| topology.path(a, b).to_string());
    let gpu = |gpu: &device::Attachment| {
        json!({
            "pci": gpu.pci,
            "nvlinks": gpu.ends.len(),
            "nvlink_generation": gpu.nvlink,
            "pcie_generation": gpu.pcie.map(|pcie| pcie.generation),
            "pcie_width": gpu.pcie.map(|pcie| pcie.width),
        })
    };
    json!({
        "gpus": topology.gpus.iter().map(gpu).collect::<Vec<_>>(),
        "paths": (0..count).map(|a| (0..count).map(|b| path(a, b)).collect::<Vec<_>>()).collect::<Vec<_>>(),
        "predicted_over": topology.link(count).map(|link| link.name),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_train::device::{Attachment, Between, End, Meet, Pcie};

    /// Two pairs of GPUs, each joined by a bridge of four links, on the two sockets of a host.
    fn pairs() -> Topology {
        let pcie = Some(Pcie { generation: 4, width: 16 });
        let pci = |at: usize| format!("0000:0{at}:00.0");
        let gpu = |at: usize| Attachment {
            pci: pci(at),
            nvlink: Some(3),
            ends: vec![End::Gpu(pci(at ^ 1)); 4],
            pcie,
        };
        let between = |a: usize, b: usize| {
            let joined = a ^ 1 == b;
            let meet = Some(if joined { Meet::HostBridge } else { Meet::Sockets });
            Between { peers: Some(joined), nvlink: Some(joined), meet }
        };
        let row = |a: usize| (0..4).map(|b| between(a, b)).collect();
        Topology { gpus: (0..4).map(gpu).collect(), between: (0..4).map(row).collect() }
    }

    #[test]
    fn several_gpus_are_a_matrix_with_a_legend() {
        let lines = lines(Ok(&pairs()));
        assert_eq!(lines.len(), 1 + 4 + 1 + 1, "{lines:#?}");
        assert_eq!(lines[0], "links    GPU 0              GPU 1              GPU 2              GPU 3");
        assert_eq!(
            lines[2],
            "GPU 1    NVLink3 x4         -                  PCIe4 x16 sockets  PCIe4 x16 sockets"
        );
        assert!(lines[5].trim().starts_with("sockets: "));
        assert!(lines[6].ends_with("predicted over pcie4-host, the slowest path"));
        let object = described(&pairs());
        assert_eq!(object["paths"][1], json!(["NVLink3 x4", null, "PCIe4 x16 sockets", "PCIe4 x16 sockets"]));
        assert_eq!(
            (&object["gpus"][2]["nvlinks"], &object["predicted_over"]),
            (&json!(4), &json!("pcie4-host"))
        );
    }

    #[test]
    fn one_gpu_is_a_line_and_unknown_links_are_reported() {
        let Topology { mut gpus, .. } = pairs();
        gpus.truncate(1);
        let one = Topology { gpus, between: vec![vec![Between::default()]] };
        assert_eq!(lines(Ok(&one)), ["links    4 x NVLink3, PCIe4 x16, of the only GPU that is visible"]);
        assert_eq!(lines(Err("NVML was not found".into())), ["links    not known: NVML was not found"]);
    }
}
