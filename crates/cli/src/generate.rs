//! `generate`: text from a run, piece by piece.

use std::io::Write;
use std::process::ExitCode;

use flatout_train::device::Device;
use flatout_train::generate::{Generator, Sampling};
use flatout_train::{Failure, UserError};
use serde_json::json;

use crate::args::Generate;
use crate::screen::Screen;

pub fn generate(args: &Generate, screen: &Screen) -> Result<ExitCode, Failure> {
    if !args.temperature.is_finite() || args.temperature < 0.0 {
        let sentence = format!("--temperature is {} and must be a number of at least 0", args.temperature);
        return Err(Failure::User(UserError(sentence)));
    }
    let mut generator =
        Generator::open(&args.run, &Device::open(flatout_train::run::config(&args.run)?.switches.backend)?)?;
    let how = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        seed: args.seed,
        max_tokens: args.max_tokens,
    };
    let text = generator.generate(&args.prompt, how, |piece| {
        if !screen.json {
            let mut out = std::io::stdout();
            if write!(out, "{piece}").and_then(|()| out.flush()).is_err() {
                std::process::exit(0);
            }
        }
    })?;
    if screen.json {
        let checkpoint = generator.checkpoint.display().to_string();
        screen.object(
            &json!({ "text": text, "prompt": args.prompt, "checkpoint": checkpoint, "step": generator.step }),
        );
    } else {
        screen.result("");
    }
    Ok(ExitCode::SUCCESS)
}
