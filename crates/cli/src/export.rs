//! `export`: a run in the Hugging Face layout.

use std::path::Path;
use std::process::ExitCode;

use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::weights::export::{Export as Wanted, export as export_run};
use serde_json::json;

use crate::args::Export;
use crate::model;
use crate::screen::{Screen, bytes, short};

pub fn export(args: &Export, screen: &Screen) -> Result<ExitCode, Failure> {
    let Some(shard_bytes) = size(&args.shard_size) else {
        let sentence =
            format!("--shard-size is {} and must be a size, as 5GB, 500MB or 2GiB", args.shard_size);
        return Err(Failure::User(UserError(sentence)));
    };
    if let Some(format) = file_format(&args.to) {
        let sentence = format!(
            "--to names the folder to make, in the Hugging Face layout, and {} is the name of a {format} file: export to \
             a folder, from which the tools of that format make one",
            args.to.display()
        );
        return Err(Failure::User(UserError(sentence)));
    }
    let mut loaded = model::open(&args.run, &[])?;
    let wanted = Wanted {
        to: args.to.clone(),
        dtype: args.dtype,
        shard_bytes,
        force: args.force,
        adapter: args.adapter,
    };
    let made = export_run(&mut loaded, &wanted)?;
    let to = args.to.display();
    if screen.json {
        screen.object(&json!({
            "to": to.to_string(),
            "architecture": made.architecture,
            "files": made.files,
            "parameters": made.parameters,
            "bytes": made.bytes,
            "checkpoint": loaded.place.display().to_string(),
            "step": loaded.step,
            "weights": loaded.weights.which(),
        }));
        return Ok(ExitCode::SUCCESS);
    }
    screen.result(format!(
        "{to}: {} of step {}, {} parameters in {} ({}){}",
        made.architecture,
        loaded.step.unwrap_or(0),
        short(made.parameters),
        args.dtype,
        bytes(made.bytes),
        model::of_averages(&loaded)
    ));
    screen.note(format!("files    {}", made.files.join(" ")));
    Ok(ExitCode::SUCCESS)
}

/// The format that a name asks for by its end, which a folder's does not.
fn file_format(to: &Path) -> Option<&'static str> {
    const FORMATS: [&str; 8] = ["gguf", "ggml", "safetensors", "onnx", "pt", "pth", "bin", "zip"];
    let end = to.extension()?.to_str()?.to_ascii_lowercase();
    FORMATS.into_iter().find(|format| *format == end && !to.is_dir())
}

/// A size in bytes: a number with B, KB, MB, GB, TB, or KiB, MiB, GiB, TiB.
fn size(said: &str) -> Option<u64> {
    let at = said.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(said.len());
    let (number, unit) = said.split_at(at);
    let unit: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1048576.0,
        "gib" => 1073741824.0,
        "tib" => 1099511627776.0,
        _ => return None,
    };
    let bytes = number.parse::<f64>().ok()? * unit;
    (1.0..1e18).contains(&bytes).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_written() {
        let cases = [("5GB", 5_000_000_000), ("1.5MiB", 1_572_864), ("300", 300), ("2 kb", 2000)];
        for (said, bytes) in cases {
            assert_eq!(size(said), Some(bytes), "{said}");
        }
        for said in ["", "0", "GB", "5XB", "-3MB", "1e5", "0.1B"] {
            assert_eq!(size(said), None, "{said}");
        }
    }
}
