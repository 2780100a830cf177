//! GPUs by name, from their data sheets, so that any machine can plan for them.

use std::sync::OnceLock;

use flatout_ir::target::{Rates, Target};

use super::device::describe_target;
use crate::cuda::context::Facts;
use crate::cuda::kernels::attention::choice as attention;

/// A GPU described by its data sheet.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// The name `device::target` gives to a GPU that is present: `a100-80`.
    pub name: &'static str,
    /// Architecture: `sm_90`.
    pub arch: &'static str,
    pub memory_bytes: u64,
    pub rates: Rates,
    /// Measurements taken on such a GPU.
    pub measured: Option<&'static str>,
}

/// Memory of context, handles and modules: the maximum seen on the GPUs tested.
const DRIVER_BYTES: u64 = 1 << 30;
/// The cuDNN version assumed for GPUs that are not present.
const CUDNN: u32 = 91900;

/// All rows of the table.
pub fn named() -> &'static [Gpu] {
    static ALL: OnceLock<Vec<Gpu>> = OnceLock::new();
    ALL.get_or_init(|| read(include_str!("gpus.txt")).expect("the table is well formed"))
}

pub fn find(name: &str) -> Option<&'static Gpu> {
    named().iter().find(|gpu| gpu.name == name)
}

/// GPUs before Ampere, which lack bf16 and instructions that our kernels use.
const BEFORE_AMPERE: &[&str] = &[
    "k80",
    "m40",
    "m60",
    "p4",
    "p40",
    "p100",
    "t4",
    "v100",
    "v100-16",
    "v100-32",
    "gtx1070",
    "gtx1080",
    "gtx1080ti",
    "gtx1660",
    "titanv",
    "titanrtx",
    "rtx2060",
    "rtx2070",
    "rtx2080",
    "rtx2080ti",
    "rtx6000",
    "rtx8000",
];

/// GPUs that could be supported but have no row.
const WITHOUT_LINE: &[&str] = &[
    "a2",
    "a10",
    "a10g",
    "a16",
    "a30",
    "a40",
    "a4000",
    "a5000",
    "a6000",
    "a800",
    "l4",
    "l40",
    "h20",
    "h800",
    "gh200",
    "gb200",
    "b100",
    "b300",
    "rtx3050",
    "rtx3060",
    "rtx3070",
    "rtx3080",
    "rtx3080ti",
    "rtx3090ti",
    "rtx4060",
    "rtx4070",
    "rtx4080",
    "rtx5060",
    "rtx5070",
    "rtx5080",
    "rtxa6000",
];

/// Why a known GPU has no row: the end of a sentence that begins with its name. `None` for unknown names, such as typos.
pub fn absent(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase().replace(['_', ' '], "");
    let has = |names: &[&str]| names.contains(&&name[..]);
    if has(BEFORE_AMPERE) {
        return Some("is older than Ampere, the first that flatout runs on");
    }
    has(WITHOUT_LINE).then_some("has no line in the table of GPUs")
}

/// The compilation target of the GPU with all of its memory free. The choices of its libraries are unknown, so workspaces are
/// counted at their upper bounds, as everywhere.
pub fn target(gpu: &Gpu, deterministic: bool) -> Target {
    let target = describe_target(gpu.name.into(), gpu.memory_bytes, DRIVER_BYTES, gpu.rates, deterministic);
    Target { missing: attention::missing(&facts(gpu)), ..target }
}

/// The GPU's facts for kernels, assuming a cuDNN that supports all they use.
pub fn facts(gpu: &Gpu) -> Facts {
    Facts { cudnn: Some(CUDNN), ..Facts::on_paper(gpu.arch) }
}

/// Parses the table. Lines that begin with `#` are skipped.
fn read(text: &'static str) -> Result<Vec<Gpu>, String> {
    let lines =
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    lines.map(|(i, line)| read_line(line).map_err(|why| format!("line {}: {why}", i + 1))).collect()
}

fn read_line(line: &'static str) -> Result<Gpu, String> {
    let mut rest = line.trim();
    let mut word = || {
        let (word, after) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        rest = after.trim_start();
        word
    };
    let (name, arch) = (word(), word());
    if !arch.starts_with("sm_") {
        return Err(format!("`{arch}` is no arch"));
    }
    let mut cells = [None; 6];
    for (cell, of) in cells.iter_mut().zip(["memory", "f32", "tf32", "bf16", "fp8", "bandwidth"]) {
        *cell = match word() {
            "-" if ["tf32", "fp8"].contains(&of) => None,
            said => Some(said.parse::<f64>().map_err(|_| format!("`{said}` is no {of}"))?),
        };
    }
    let [memory, f32_rate, tf32, bf16, fp8, bandwidth] = cells;
    let given = |cell: Option<f64>| cell.expect("only modes may be missing");
    let tera = |rate: f64| rate * 1e12;
    Ok(Gpu {
        name,
        arch,
        memory_bytes: (given(memory) * (1u64 << 30) as f64) as u64,
        rates: Rates {
            f32_flops: tera(given(f32_rate)),
            tf32_flops: tf32.map(tera),
            bf16_flops: tera(given(bf16)),
            fp8_flops: fp8.map(tera),
            memory_bytes: tera(given(bandwidth)),
        },
        measured: Some(rest).filter(|said| !said.is_empty()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_parse_to_gpus() {
        let gpu = find("rtx3090").unwrap();
        assert_eq!((gpu.rates.bf16_flops, gpu.rates.memory_bytes), (71e12, 0.936e12));
        assert_eq!((gpu.rates.tf32_flops, gpu.rates.fp8_flops), (Some(35.6e12), None));
        assert_eq!((gpu.memory_bytes >> 30, gpu.measured), (23, None));
        assert!(find("h200").unwrap().measured.unwrap().contains("34.5 GiB"));
        let mut names: Vec<_> = named().iter().map(|gpu| gpu.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), named().len());
        assert_eq!(find("gtx1080"), None);
        assert!(absent("V100").unwrap().contains("Ampere") && absent("rtx3080").unwrap().contains("no line"));
        assert_eq!((absent("rtx3091"), absent("a100")), (None, None));
        let others = BEFORE_AMPERE.iter().chain(WITHOUT_LINE);
        assert!(others.into_iter().all(|name| find(name).is_none() && absent(name).is_some()));
    }

    #[test]
    fn malformed_lines_are_reported() {
        assert_eq!(read("# x\n\na sm_80 1 2 - many - 3").unwrap_err(), "line 3: `many` is no bf16");
        assert_eq!(read("a sm_80 1 - 2 3 4 5").unwrap_err(), "line 1: `-` is no f32");
        assert_eq!(read("a sm_80 1 2 3").unwrap_err(), "line 1: `` is no bf16");
        assert_eq!(read("a 1 2 3 4 5 6").unwrap_err(), "line 1: `1` is no arch");
    }

    #[test]
    fn data_sheets_give_targets() {
        let target = target(find("rtx3090").unwrap(), false);
        assert_eq!(target.name, "rtx3090");
        assert!(target.kernels.iter().any(|row| !row.deterministic));
        assert!(super::target(find("h200").unwrap(), true).kernels.iter().all(|row| row.deterministic));
        let missing: Vec<&str> = target.missing.iter().map(|(name, _)| *name).collect();
        assert_eq!(missing, ["wgmma"], "what is Hopper's alone");
        assert!(super::target(find("h200").unwrap(), false).missing.is_empty());
    }
}
