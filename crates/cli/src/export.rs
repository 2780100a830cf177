//! `export`: writes a run in the Hugging Face layout, or a model as a GGUF file.

use std::path::Path;
use std::process::ExitCode;

use flatout_ir::Codes;
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::weights::export::{self, Export as Folder, Exported, Format};
use flatout_train::weights::gguf::{self, Gguf};
use flatout_train::weights::loaded::Loaded;
use serde_json::json;

use crate::args::Export;
use crate::model;
use crate::screen::{Screen, bytes, short};

pub fn export(args: &Export, screen: &Screen) -> Result<ExitCode, Failure> {
    match args.format {
        Format::HuggingFace => to_folder(args, screen),
        Format::Gguf => to_gguf(args, screen),
    }
}

fn to_folder(args: &Export, screen: &Screen) -> Result<ExitCode, Failure> {
    let shard_size = args.shard_size.as_deref().unwrap_or("5GB");
    let Some(shard_bytes) = size(shard_size) else {
        let sentence = format!("--shard-size is {shard_size} and must be a size, as 5GB, 500MB or 2GiB");
        return Err(Failure::User(UserError(sentence)));
    };
    let dtype = args.dtype.unwrap_or(gguf::Width::F32);
    let Ok(width) = dtype.name().parse::<export::Width>() else {
        let sentence = format!("--dtype {dtype} is a type of GGUF files: give f32 or bf16, or --format gguf");
        return Err(Failure::User(UserError(sentence)));
    };
    if let Some(format) = file_format(&args.to) {
        let hint = match format {
            "gguf" => "add --format gguf",
            _ => "export to a folder, from which the tools of that format make one",
        };
        let sentence = format!(
            "--to names the folder to write, in the Hugging Face layout, and {} is the name of a {format} file: {hint}",
            args.to.display()
        );
        return Err(Failure::User(UserError(sentence)));
    }
    let mut loaded = model::open(&args.run, &[])?;
    let folder =
        Folder { to: args.to.clone(), dtype: width, shard_bytes, force: args.force, adapter: args.adapter };
    let made = export::export(&mut loaded, &folder)?;
    report(args, &loaded, &made, dtype, screen);
    if !args.adapter {
        note_codes(&loaded, screen);
    }
    Ok(ExitCode::SUCCESS)
}

/// Notes that frozen weights are exported with quantised values, which differ from those that the run began from.
fn note_codes(loaded: &Loaded, screen: &Screen) {
    let Some(stored) = loaded.weights.stored_as_codes() else { return };
    let (count, bits) = (stored.count(), if stored.codes() == Codes::Nf4 { 4 } else { 8 });
    let trained = match loaded.weights.adapters().is_empty() {
        true => "the other weights were trained",
        false => "the adapters were trained; --adapter exports the adapters alone",
    };
    screen.note(format!(
        "note     {count} frozen weights are exported with the values of their {bits}-bit codes, with which {trained}"
    ));
}

fn to_gguf(args: &Export, screen: &Screen) -> Result<ExitCode, Failure> {
    let refused = match () {
        () if args.adapter => Some("--adapter"),
        () if args.shard_size.is_some() => Some("--shard-size"),
        () => None,
    };
    if let Some(option) = refused {
        let sentence =
            format!("{option} is for the Hugging Face layout, and a GGUF file is one model: leave it out");
        return Err(Failure::User(UserError(sentence)));
    }
    gguf::check_name(&args.to)?;
    let mut loaded = model::open(&args.run, &[])?;
    let dtype = args.dtype.unwrap_or(gguf::Width::F16);
    let made = gguf::export(&mut loaded, &Gguf { to: args.to.clone(), dtype, force: args.force })?;
    report(args, &loaded, &made, dtype, screen);
    note_codes(&loaded, screen);
    if loaded.config.model.as_decoder().is_some_and(|model| gguf::is_partly_f16(model, dtype)) {
        screen.note("note     matrices whose rows are no multiple of 32 are stored in f16");
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints what was written.
fn report(args: &Export, loaded: &Loaded, made: &Exported, dtype: gguf::Width, screen: &Screen) {
    let to = args.to.display();
    if screen.json {
        screen.object(&json!({
            "to": to.to_string(),
            "format": args.format.name(),
            "dtype": dtype.name(),
            "architecture": made.architecture,
            "files": made.files,
            "parameters": made.parameters,
            "bytes": made.bytes,
            "checkpoint": loaded.place.display().to_string(),
            "step": loaded.step,
            "weights": loaded.weights.which(),
        }));
        return;
    }
    let step = match (loaded.is_run, loaded.step) {
        (true, step) => format!(" of step {}", step.unwrap_or(0)),
        (false, _) => String::new(),
    };
    screen.result(format!(
        "{to}: {}{step}, {} parameters in {dtype} ({}){}",
        made.architecture,
        short(made.parameters),
        bytes(made.bytes),
        model::of_averages(loaded)
    ));
    screen.note(format!("files    {}", made.files.join(" ")));
}

/// The file format that a name's extension stands for; `None` for names of folders.
fn file_format(to: &Path) -> Option<&'static str> {
    const FORMATS: [&str; 8] = ["gguf", "ggml", "safetensors", "onnx", "pt", "pth", "bin", "zip"];
    let end = to.extension()?.to_str()?.to_ascii_lowercase();
    FORMATS.into_iter().find(|format| *format == end && !to.is_dir())
}

/// Parses a size in bytes: a number with B, KB, MB, GB, TB, or KiB, MiB, GiB, TiB.
fn size(text: &str) -> Option<u64> {
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
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
    fn sizes_are_parsed() {
        let cases = [("5GB", 5_000_000_000), ("1.5MiB", 1_572_864), ("300", 300), ("2 kb", 2000)];
        for (text, bytes) in cases {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in ["", "0", "GB", "5XB", "-3MB", "1e5", "0.1B"] {
            assert_eq!(size(text), None, "{text}");
        }
    }
}
