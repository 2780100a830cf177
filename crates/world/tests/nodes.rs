//! Two nodes as network namespaces of this machine, with a link between them that can be slowed and cut.
//!
//! Where a process may make none, or `ip`, `nsenter` or `unshare` are missing, these tests say so and pass.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::program;

/// Makes the second namespace and the link, and starts two ranks on each node.
const NODES: &str = r#"
set -e
ip link set lo up
unshare --net sleep 600 & other=$!
trap 'kill $other' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
far="nsenter --target $other --net"
ip link add near type veth peer name far netns $other
ip address add 10.77.0.1/24 dev near
ip link set near up
$far ip link set lo up
$far ip address add 10.77.0.2/24 dev far
$far ip link set far up
# Both nodes run the same command, and leave what they said and their exit code.
start() {
    node=$1
    shift
    code=0
    "$@" "$RANK" --ranks 2 --nodes 2 --node $node --address 10.77.0.1:4077 --folder "$FOLDER" --step-ms 5 --beat-ms 100 $ARGUMENTS \
        >"$FOLDER/out-$node" 2>"$FOLDER/err-$node" || code=$?
    echo $code >"$FOLDER/code-$node"
}
both() {
    start 0 env & first=$!
    start 1 $far & second=$!
}
step() { cat "$FOLDER/step-3" 2>/dev/null || echo 0; }
"#;

/// Runs a script in a namespace where it may make others; nothing where that is not allowed.
fn nodes(script: &str, arguments: &str, folder: &TempDir) -> Option<Output> {
    let probe = Command::new("unshare")
        .args([
            "--user",
            "--map-root-user",
            "--net",
            "sh",
            "-c",
            "command -v nsenter && ip link add a type veth peer name b",
        ])
        .output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        eprintln!("skipped: network namespaces or `ip` are not available here");
        return None;
    }
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--net", "sh", "-c", &format!("{NODES}{script}")])
        .env("RANK", program::path())
        .env("FOLDER", folder.path())
        .env("ARGUMENTS", arguments)
        .output();
    Some(output.expect("a script"))
}

fn told(folder: &TempDir, name: &str) -> String {
    std::fs::read_to_string(folder.path().join(name)).expect("a file").trim().into()
}

#[test]
fn two_nodes_meet_and_end() {
    let folder = TempDir::new().unwrap();
    let Some(output) = nodes("both; wait $first; wait $second", "--steps 20", &folder) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for node in 0..2 {
        assert_eq!(
            (told(&folder, &format!("code-{node}")), told(&folder, &format!("err-{node}"))),
            ("0".into(), "".into())
        );
    }
    assert_eq!(told(&folder, "step-3"), "20");
}

#[test]
fn a_cut_link_ends_both_nodes() {
    let folder = TempDir::new().unwrap();
    let script = "both; while [ $(step) -lt 20 ]; do sleep 0.05; done; ip link set near down; wait $first; wait $second";
    let began = Instant::now();
    let Some(output) = nodes(script, "--steps 1000000 --silent-ms 2000", &folder) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let [near, far] = [0, 1].map(|node| told(&folder, &format!("err-{node}")));
    assert_eq!((told(&folder, "code-0"), told(&folder, "code-1")), ("1".into(), "1".into()));
    assert_eq!((near.lines().count(), far.lines().count()), (1, 1), "{near}\n{far}");
    assert!(near.contains("has given no sign of life for 2 s") && near.contains(") at step "), "{near}");
    assert!(far.starts_with("rank: rank 0 (") && far.contains("has given no sign of life for 2 s"), "{far}");
}

#[test]
fn a_rank_killed_on_the_far_node_is_named_on_the_near_one() {
    let folder = TempDir::new().unwrap();
    let script = r#"both; while [ $(step) -lt 20 ]; do sleep 0.05; done; kill -9 $(cat "$FOLDER/process-3"); wait $first; wait $second"#;
    let Some(output) = nodes(script, "--steps 1000000", &folder) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let [near, far] = [0, 1].map(|node| told(&folder, &format!("err-{node}")));
    let process = told(&folder, "process-3");
    assert!(near.contains(&format!("process {process}) was killed by signal 9 (SIGKILL)")), "{near}");
    assert!(
        near.starts_with("rank: rank 3 (") && near.lines().count() == 1 && far.is_empty(),
        "{near}\n{far}"
    );
    assert_eq!((told(&folder, "code-0"), told(&folder, "code-1")), ("1".into(), "1".into()));
}

#[test]
fn a_link_of_20_ms_finishes() {
    let folder = TempDir::new().unwrap();
    let script = r#"if ! tc qdisc add dev near root netem delay 20ms 2>/dev/null; then echo no netem; exit 0; fi
both; wait $first; wait $second"#;
    let Some(output) = nodes(script, "--steps 10", &folder) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    if String::from_utf8_lossy(&output.stdout).contains("no netem") {
        eprintln!("skipped: this kernel delays no packets (netem); the proxy's test has a delay of its own");
        return;
    }
    assert_eq!((told(&folder, "code-0"), told(&folder, "step-3")), ("0".into(), "10".into()));
}
