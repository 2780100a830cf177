//! Two nodes on this machine, each with a parent and two ranks, and a link between them that can be delayed and cut.
//!
//! For tests of the link the nodes are network namespaces; where the system does not allow them the tests print so and pass.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::program;
use crate::ranks::free_port;

/// Starts two ranks on each node, and records the output and exit code of each parent.
const NODES: &str = r#"
set -e
start() {
    node=$1
    shift
    code=0
    "$@" "$PROGRAM" --ranks 2 --nodes 2 --node $node --address $ADDRESS --folder "$FOLDER" --step-ms 5 --beat-ms 100 $ARGUMENTS \
        >"$FOLDER/out-$node" 2>"$FOLDER/err-$node" || code=$?
    echo $code >"$FOLDER/code-$node"
}
both() {
    start 0 env & first=$!
    start 1 ${far:-env} & second=$!
}
until_step() {
    tries=0
    while [ "$(cat "$FOLDER/step-3" 2>/dev/null || echo 0)" -lt $1 ]; do
        tries=$((tries + 1))
        [ $tries -lt 400 ] || { cat "$FOLDER"/err-* >&2; exit 1; }
        sleep 0.05
    done
}
"#;

/// A namespace for each node and a link between them.
const LINK: &str = r#"
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
ADDRESS=10.77.0.1:4077
"#;

fn script(command: &mut Command, text: &str, arguments: &str, folder: &TempDir) -> Output {
    command
        .args(["sh", "-c", text])
        .env("PROGRAM", program::path())
        .env("FOLDER", folder.path())
        .env("ARGUMENTS", arguments)
        .env("ADDRESS", format!("127.0.0.1:{}", free_port()))
        .output()
        .expect("a script")
}

/// Runs a script with nodes that share this system's network.
fn nodes(text: &str, arguments: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    let output = script(&mut Command::new("env"), &format!("{NODES}{text}"), arguments, &folder);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder
}

/// Runs a script with nodes that have a link of their own, and returns its output; `None` if the system does not allow that.
fn linked_nodes(text: &str, arguments: &str) -> Option<(TempDir, String)> {
    let namespace = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net"]);
        command
    };
    let probe = namespace()
        .args(["sh", "-c", "command -v nsenter && ip link add name near type veth peer name far"])
        .output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        eprintln!("skipped: network namespaces, or `ip` and `nsenter` for them, are not available here");
        return None;
    }
    let folder = TempDir::new().unwrap();
    let output = script(&mut namespace(), &format!("{NODES}{LINK}{text}"), arguments, &folder);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    Some((folder, said))
}

fn told(folder: &TempDir, name: &str) -> [String; 2] {
    [0, 1].map(|node| {
        let path = folder.path().join(format!("{name}-{node}"));
        std::fs::read_to_string(path).expect("a file").trim().into()
    })
}

#[test]
fn two_nodes_meet_and_end() {
    let folder = nodes("both; wait $first; wait $second", "--steps 20");
    assert_eq!(
        (told(&folder, "code"), told(&folder, "err")),
        (["0", "0"].map(Into::into), ["", ""].map(Into::into))
    );
    assert_eq!(told(&folder, "step"), ["20", "20"]);
    assert!(told(&folder, "out")[0].starts_with("rank 0 of 4 is process "));
}

#[test]
fn a_rank_killed_on_the_far_node_is_named_on_the_near_one() {
    let text = r#"both; until_step 20; kill -9 $(cat "$FOLDER/process-3"); wait $first; wait $second"#;
    let folder = nodes(text, "--steps 20000");
    let [near, far] = told(&folder, "err");
    let process = std::fs::read_to_string(folder.path().join("process-3")).unwrap();
    assert!(near.contains(&format!("process {process}) was killed by signal 9 (SIGKILL)")), "{near}");
    assert!(
        near.starts_with("rank: rank 3 (") && near.lines().count() == 1 && far.is_empty(),
        "{near}\n{far}"
    );
    assert_eq!(told(&folder, "code"), ["1", "1"]);
}

#[test]
fn each_node_reports_that_rank_0_was_killed() {
    let text = r#"both; until_step 20; kill -9 $(cat "$FOLDER/process-0"); wait $first; wait $second"#;
    let folder = nodes(text, "--steps 20000");
    let [near, far] = told(&folder, "err");
    assert!(
        near.starts_with("rank: rank 0 (") && near.contains("was killed by signal 9 (SIGKILL) at step "),
        "{near}"
    );
    assert!(
        far.starts_with("rank: rank 0 (") && far.contains("which holds the ranks together, is gone at step "),
        "{far}"
    );
    assert_eq!((near.lines().count(), far.lines().count()), (1, 1), "{near}\n{far}");
    assert_eq!(told(&folder, "code"), ["1", "1"]);
}

#[test]
fn a_cut_link_ends_both_nodes() {
    let text = "both; until_step 20; ip link set near down; wait $first; wait $second";
    let began = Instant::now();
    let Some((folder, _)) = linked_nodes(text, "--steps 20000 --silent-ms 2000") else { return };
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let [near, far] = told(&folder, "err");
    assert_eq!(told(&folder, "code"), ["1", "1"]);
    assert_eq!((near.lines().count(), far.lines().count()), (1, 1), "{near}\n{far}");
    assert!(near.contains("has given no sign of life for "), "{near}");
    assert!(far.starts_with("rank: rank 0 (") && far.contains("has given no sign of life for "), "{far}");
}

#[test]
fn a_link_of_20_ms_finishes() {
    let text = "if ! tc qdisc add dev near root netem delay 20ms 2>/dev/null; then echo no netem; exit 0; fi
        both; wait $first; wait $second";
    let Some((folder, said)) = linked_nodes(text, "--steps 10") else { return };
    if said.contains("no netem") {
        eprintln!("skipped: this kernel delays no packets (netem); the wire's test has a proxy that does");
        return;
    }
    assert_eq!(
        (told(&folder, "code"), told(&folder, "step")),
        (["0", "0"].map(Into::into), ["10", "10"].map(Into::into))
    );
}
