//! `serve`: serves a run or a model over HTTP, for programs that speak OpenAI's API.

use std::net::{TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use flatout_serve::{Model, Service};
use flatout_train::infer::generate::{Generator, GeneratorCapacity};
use flatout_train::run::signal;
use flatout_train::{Failure, UserError};
use serde_json::json;

use crate::model;
use crate::screen::{Screen, bytes, complain, count};

#[derive(Parser)]
pub struct Serve {
    /// A run (its directory or its name under `runs`, or RUN@step), or a folder in the Hugging Face layout.
    #[arg(value_name = "RUN | FOLDER")]
    pub model: PathBuf,
    /// Switches, such as precision=bf16; data.template names another chat template.
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// The address to listen on. Any address but a loopback one requires --key.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// The port to listen on, 0 for any free one.
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub port: u16,
    /// The API key that every request must carry; defaults to the environment variable FLATOUT_API_KEY, which unlike this option does
    /// not show in the list of processes.
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// Texts that are generated at the same time; further requests wait.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub at_once: usize,
    /// The most tokens of a prompt with its answer, up to the model's context. The KV cache holds --at-once times as many.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub tokens: usize,
    /// The device that computes: cpu, cuda, or auto (the GPU where there is one); the same as backend=...
    #[arg(long, value_name = "DEVICE", value_parser = ["auto", "cpu", "cuda"])]
    pub device: Option<String>,
}

/// The environment variable with the API key, for when no option gives it.
const KEY: &str = "FLATOUT_API_KEY";

pub fn serve(args: &Serve, screen: &Screen) -> Result<ExitCode, Failure> {
    let user = |sentence: String| Failure::User(UserError(sentence));
    for (name, value) in [("--at-once", args.at_once), ("--tokens", args.tokens)] {
        if value == 0 {
            return Err(user(format!("{name} is 0 and must be at least 1")));
        }
    }
    let key = key(args).map_err(user)?;
    let listener = listen(args, key.is_some()).map_err(user)?;
    let stop = signal::install().map_err(Failure::io("signals"))?;
    // Before the first request there is nothing to finish, so that a signal ends the process at once.
    stop.watch_start(|_| signal::leave(0)).map_err(Failure::io("signals"))?;
    let device = args.device.iter().map(|device| format!("backend={device}"));
    let overrides: Vec<String> = args.overrides.iter().cloned().chain(device).collect();
    let loaded = model::open(&args.model, &overrides)?;
    let room = GeneratorCapacity { sequences: args.at_once, tokens: args.tokens };
    let served = Model::of(&loaded, args.tokens.min(loaded.positions))?;
    let device = model::device(&loaded)?;
    let of_averages = model::of_averages(&loaded);
    let mut generator = Generator::serving(loaded, &device, room, served.images())?;
    let (name, chat_error) = (served.name.clone(), served.chat_error().map(String::from));
    let has_key = key.is_some();
    let service = Service::start(listener, served, key).map_err(Failure::io("the server"))?;
    let base = format!("{}v1", service.url());
    let (tokens, cache) = (generator.capacity(), generator.cache_bytes() as u64);
    if screen.json {
        screen.object(&json!({
            "url": service.url(), "base_url": base, "model": name, "at_once": args.at_once, "tokens": tokens, "cache_bytes": cache,
            "chat": chat_error.is_none(), "key": has_key,
        }));
    } else {
        screen.result(format!("{name}{of_averages} is served at {base}"));
        screen.note(format!(
            "{} texts at once, {} tokens each: the KV cache takes {}",
            count(args.at_once as u64),
            count(tokens as u64),
            bytes(cache)
        ));
        if let Some(why) = &chat_error {
            screen.note(format!("only completions are served, no chat: {why}"));
        }
        screen.note(match has_key {
            true => "requests need the header Authorization: Bearer KEY; Ctrl-C ends the server",
            false => "only this machine can reach it; Ctrl-C ends the server",
        });
    }
    stop.begin_steps();
    let log = |line: String| {
        if screen.verbose {
            complain(line);
        }
    };
    service.run(&mut generator, &|| stop.requested().is_some(), &log)?;
    Ok(ExitCode::SUCCESS)
}

/// The API key that requests must carry, if there is one.
fn key(args: &Serve) -> Result<Option<String>, String> {
    let (key, source) = match &args.key {
        Some(key) => (key.clone(), "--key"),
        None => match std::env::var(KEY) {
            Ok(key) => (key, KEY),
            Err(std::env::VarError::NotPresent) => return Ok(None),
            Err(_) => return Err(format!("{KEY} is not valid UTF-8")),
        },
    };
    match key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Err(format!(
            "{source} must have visible ASCII characters only, without spaces, so that a header can carry it"
        )),
        false => Ok(Some(key)),
    }
}

/// Binds the requested address.
fn listen(args: &Serve, has_key: bool) -> Result<TcpListener, String> {
    let (host, port) = (args.host.as_str(), args.port);
    let addresses: Vec<_> = (host, port)
        .to_socket_addrs()
        .map_err(|error| format!("--host {host} is no address of this machine: {error}"))?
        .collect();
    if !has_key && !addresses.iter().all(|address| address.ip().is_loopback()) {
        return Err(format!(
            "--host {host} can be reached from other machines: give a key with --key or {KEY}, or leave --host out"
        ));
    }
    TcpListener::bind(&addresses[..]).map_err(|error| {
        format!("{host}:{port} cannot be listened on: {error}; give another --port or --host")
    })
}
