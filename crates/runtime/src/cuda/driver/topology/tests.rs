//! Tests paths and links on recorded machines: H100s with NVSwitch, pairs with bridges, GPUs on two sockets, a virtual machine.

use super::*;

const PCIE4: Pcie = Pcie { generation: 4, width: 16 };
const PCIE5: Pcie = Pcie { generation: 5, width: 16 };

fn machine(gpus: Vec<Attachment>, between: impl Fn(usize, usize) -> Between) -> Topology {
    let count = gpus.len();
    let row = |a| (0..count).map(|b| if a == b { Between::default() } else { between(a, b) }).collect();
    Topology { gpus, between: (0..count).map(row).collect() }
}

fn gpu(at: u32, nvlink: Option<u32>, ends: Vec<End>, pcie: Pcie) -> Attachment {
    Attachment { pci: address(0, at, 0), nvlink, ends, pcie: Some(pcie) }
}

fn told(peers: bool, nvlink: bool, level: c_uint) -> Between {
    Between { peers: Some(peers), nvlink: Some(nvlink), meet: Meet::of(level) }
}

#[test]
fn eight_gpus_at_switches_have_all_their_links() {
    let gpus = (0..8).map(|at| gpu(at, nvlink_of(9, 0), vec![End::Switch; 18], PCIE5)).collect();
    let all = machine(gpus, |a, b| told(true, true, if a / 4 == b / 4 { 40 } else { 50 }));
    assert_eq!(all.path(0, 7).to_string(), "NVLink4 x18");
    assert_eq!(all.gpus[3].to_string(), "18 x NVLink4, PCIe5 x16");
    let link = all.link(8).unwrap();
    assert_eq!((link.name.as_str(), link.bytes_per_second), ("nvlink4", 360e9));
    assert_eq!(all.link(1), None, "one GPU exchanges with nobody");
    assert_eq!(all.link(64), None, "nobody knows how more are linked");
}

#[test]
fn bridges_join_pairs_and_the_slowest_path_counts() {
    // Four RTX 3090 in two bridged pairs: four links within a pair, the host between pairs.
    let ends = |at: u32| vec![End::Gpu(address(0, at ^ 1, 0)); 4];
    let gpus = (0..4).map(|at| gpu(at, nvlink_of(8, 6), ends(at), PCIE4)).collect();
    let all = machine(gpus, |a, b| if a ^ 1 == b { told(true, true, 30) } else { told(false, false, 30) });
    assert_eq!(all.path(2, 3).to_string(), "NVLink3 x4");
    assert_eq!(all.path(1, 2).to_string(), "PCIe4 x16 host");
    let pair = all.link(2).unwrap();
    assert_eq!(pair.name, "nvlink3 x4");
    assert!((pair.bytes_per_second - 230e9 / 3.0).abs() < 1.0);
    assert_eq!(all.link(4).unwrap().name, "pcie4-host");
}

#[test]
fn pcie_is_direct_only_below_switches() {
    let gpus = || (0..2).map(|at| gpu(at, nvlink_of(8, 9), vec![], PCIE4)).collect();
    let path = |peers, level| machine(gpus(), |_, _| told(peers, false, level)).path(0, 1);
    assert_eq!(path(true, 10).to_string(), "PCIe4 x16 direct");
    assert_eq!(path(true, 20).link().unwrap().name, "pcie4");
    assert_eq!(path(false, 10).to_string(), "PCIe4 x16 host");
    assert_eq!(path(true, 30).link().unwrap().name, "pcie4-host");
    assert_eq!(path(true, 50).to_string(), "PCIe4 x16 sockets");
    assert_eq!(path(true, 50).link().unwrap().name, "pcie4-host");
    assert_eq!(path(true, 77), Path::Unknown, "a level that nobody knows");
    let narrow = Pcie { generation: 4, width: 8 };
    let gpus = vec![gpu(0, None, vec![], PCIE5), gpu(1, None, vec![], narrow)];
    let half = machine(gpus, |_, _| told(true, false, 10)).link(2).unwrap();
    assert_eq!((half.name.as_str(), half.bytes_per_second), ("pcie4 x8", 11e9));
    let of = |generation| Path::Pcie { pcie: Pcie { generation, width: 16 }, over: Over::Switches }.link();
    assert_eq!(of(6).unwrap().name, "pcie5", "the newest that the table has");
    assert_eq!(of(3).unwrap().bytes_per_second, 11e9);
    assert_eq!(of(1), None);
}

#[test]
fn unreported_facts_are_unknown() {
    let gpus = || (0..2).map(|at| gpu(at, nvlink_of(9, 0), vec![End::Unknown; 18], PCIE5)).collect();
    // Remote ends are hidden, but the GPUs report that they reach each other over NVLink.
    let all = machine(gpus(), |_, _| told(true, true, 40));
    assert_eq!(all.path(0, 1).to_string(), "NVLink4 x18");
    let silent = machine(gpus(), |_, _| Between::default());
    assert_eq!((silent.path(0, 1), silent.link(2)), (Path::Unknown, None));
    assert!(silent.path(0, 1).legend().unwrap().starts_with("unknown"));
    let nothing = Attachment::default();
    assert_eq!(nothing.to_string(), "no NVLink, PCIe unknown");
    assert_eq!(machine(vec![nothing.clone(), nothing], |_, _| told(true, false, 10)).link(2), None);
    // An architecture that the table does not list has links but no prediction.
    let gpus = (0..2).map(|at| gpu(at, nvlink_of(12, 1), vec![End::Switch; 2], PCIE5)).collect();
    let new = machine(gpus, |_, _| told(true, true, 10));
    assert_eq!((new.path(0, 1).to_string().as_str(), new.link(2)), ("NVLink x2", None));
}

#[test]
fn struct_layouts_match_the_header() {
    assert_eq!(size_of::<PciInfo>(), 68);
    assert_eq!(std::mem::offset_of!(PciInfo, domain), 16);
    assert_eq!(std::mem::offset_of!(PciInfo, address), 36);
    assert_eq!(address(0, 0x1b, 0), "0000:1b:00.0");
}
