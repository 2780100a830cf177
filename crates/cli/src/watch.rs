//! `watch` and `train --watch`: show runs live in a browser.

use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use flatout_http::Server;
use flatout_train::Failure;
use flatout_train::UserError;
use serde_json::json;

use crate::args::Watch;
use crate::model::RUNS;
use crate::screen::Screen;

/// The default port, if it is free.
const PORT: u16 = 8600;

pub fn watch(args: &Watch, screen: &Screen) -> Result<ExitCode, Failure> {
    let dir = args.dir.as_deref().unwrap_or(Path::new(RUNS));
    let user = |sentence: String| Failure::User(UserError(sentence));
    if !dir.is_dir() {
        let advice = match &args.dir {
            Some(_) => "name a folder of runs, or a run",
            None => "flatout train makes a run in it, or name another folder",
        };
        return Err(user(format!("there is no folder {}: {advice}", dir.display())));
    }
    let listener = listen(args).map_err(user)?;
    let server = flatout_watch::serve(dir, listener)
        .map_err(|error| user(format!("{} cannot be shown: {error}", dir.display())))?;
    if screen.json {
        screen.object(&json!({ "url": server.url(), "folder": dir }));
    } else {
        screen.result(format!("{} is shown at {}", dir.display(), server.url()));
        screen.note("the page is read-only; Ctrl-C ends the server");
    }
    if args.open && !open(server.url()) {
        screen.note("there is no browser to open it in");
    }
    server.wait();
    Ok(ExitCode::FAILURE)
}

/// Binds the requested address.
fn listen(args: &Watch) -> Result<TcpListener, String> {
    let (host, port) = (args.host.as_str(), args.port.unwrap_or(PORT));
    let addresses: Vec<_> = (host, port)
        .to_socket_addrs()
        .map_err(|error| format!("--host {host} is no address of this machine: {error}"))?
        .collect();
    match TcpListener::bind(&addresses[..]) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && args.port.is_none() => {
            TcpListener::bind((host, 0)).map_err(|error| format!("{host} has no free port: {error}"))
        }
        bound => bound.map_err(|error| {
            format!("{host}:{port} cannot be listened on: {error}; give another --port or --host")
        }),
    }
}

/// Serves the page of the run that this process trains, with the other runs of its folder, until the returned server is dropped. If that
/// fails, a note is printed and training goes on.
pub fn beside(run: &Path, screen: &Screen) -> Option<Server> {
    let folder = run.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let served =
        TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| flatout_watch::serve(folder, listener));
    match served {
        Ok(server) => {
            let name = run.file_name().unwrap_or_default().to_string_lossy();
            let url = format!("{}#run={}", server.url(), encoded(&name));
            screen.always(format!("watch    {url}"));
            open(&url);
            Some(server)
        }
        Err(error) => {
            screen.note(format!("watch    the page cannot be shown: {error}"));
            None
        }
    }
}

/// Percent-encodes a name for a URL.
fn encoded(name: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    name.bytes()
        .map(|byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// Opens an address in the desktop's browser, if there is one; returns whether that was tried.
fn open(url: &str) -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let program = match cfg!(target_os = "macos") {
        true => "open",
        false if is_set("DISPLAY") || is_set("WAYLAND_DISPLAY") => "xdg-open",
        false => return false,
    };
    let mut command = Command::new(program);
    // A process group of its own keeps Ctrl-C in this terminal from ending the browser.
    command.process_group(0);
    command.arg(url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match command.spawn() {
        // A thread waits for the program, so that it does not become a zombie.
        Ok(mut child) => std::thread::Builder::new().spawn(move || child.wait()).is_ok(),
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_percent_encoded() {
        assert_eq!(encoded("tiny-1"), "tiny-1");
        assert_eq!(encoded("a b#é"), "a%20b%23%C3%A9");
    }
}
