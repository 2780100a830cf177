//! Ranks through the program: started by it, by the conventions of torchrun and MPI, and refused.

use std::net::TcpListener;

use serde_json::Value;
use tempfile::TempDir;

use crate::program::{execute, flatout};

fn ranks_of(report: &str) -> usize {
    let report: Value = serde_json::from_str(report).expect("an object");
    assert_eq!(
        report["members"].as_array().map(Vec::len),
        report["ranks"].as_u64().map(|ranks| ranks as usize)
    );
    assert!(
        report["exchanges"]
            .as_array()
            .expect("a list")
            .iter()
            .all(|one| one["median_us"].as_f64() > Some(0.0))
    );
    report["ranks"].as_u64().expect("a number") as usize
}

#[test]
fn the_program_starts_copies_of_itself() {
    let folder = TempDir::new().unwrap();
    let result = execute(folder.path(), &["ranks", "--ranks", "3", "--json"]);
    assert_eq!((result.code, result.err.as_str()), (Some(0), ""));
    assert_eq!(ranks_of(&result.out), 3);
    let result = execute(folder.path(), &["ranks", "--ranks", "2"]);
    assert!(result.out.starts_with("2 ranks on 1 node\n  rank 0: "), "{}", result.out);
}

#[test]
fn ranks_that_torchrun_and_mpi_start_find_one_another() {
    let folder = TempDir::new().unwrap();
    // torchrun's agent occupies the port that it names.
    let agent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = agent.local_addr().unwrap().port().to_string();
    let torchrun = vec![("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
    let starters = [("RANK", torchrun), ("OMPI_COMM_WORLD_RANK", vec![("OMPI_COMM_WORLD_SIZE", "2")])];
    for (variable, others) in &starters {
        let start = |rank: &str| {
            let mut command =
                flatout(folder.path(), &["ranks", "--json", "--run", "run", "--join-timeout", "30s"]);
            command.env(variable, rank).envs(others.iter().copied()).spawn().expect("the program starts")
        };
        let ends = [start("1"), start("0")].map(|child| child.wait_with_output().expect("an end"));
        let report = |at: usize| String::from_utf8_lossy(&ends[at].stdout).into_owned();
        let errors = |at: usize| String::from_utf8_lossy(&ends[at].stderr).into_owned();
        assert!(ends.iter().all(|end| end.status.success()), "{}{}", errors(0), errors(1));
        assert_eq!((report(0).as_str(), ranks_of(&report(1))), ("", 2));
    }
    assert!(!folder.path().join("run/rendezvous.json").exists());
}

/// Exchanges between two ranks, each kind in each size, with their bus bandwidth.
#[test]
fn doctor_times_exchanges_between_ranks() {
    let folder = TempDir::new().unwrap();
    let result = execute(folder.path(), &["doctor", "--calibrate", "--ranks", "2", "--json", "-q"]);
    assert_eq!((result.code, result.err.as_str()), (Some(0), ""));
    let report: Value = serde_json::from_str(&result.out).expect("an object");
    assert_eq!(
        (&report["ranks"], &report["kept"], &report["link"]),
        (&2.into(), &false.into(), &Value::Null)
    );
    let exchanges = report["exchanges"].as_array().expect("a list");
    assert_eq!(exchanges.len(), 3 * 5, "three kinds, from 64 KiB to 16 MiB");
    for one in exchanges {
        let number = |field: &str| one[field].as_f64().expect("a number");
        let passes = if one["exchange"] == "all_reduce" { 2.0 } else { 1.0 };
        let carried = passes / 2.0 * number("bytes") / number("seconds") / 1e9;
        assert!((number("bus_gb_per_s") / carried - 1.0).abs() < 1e-9 && carried > 0.0, "{one}");
        assert!(one["predicted_seconds"].is_null());
    }
    // 256 times the bytes must take longer.
    let of = |kind: &str, at: usize| {
        let mut kinds = exchanges.iter().filter(|one| one["exchange"] == kind);
        kinds.nth(at).and_then(|one| one["seconds"].as_f64()).expect("a time")
    };
    for kind in ["all_gather", "reduce_scatter", "all_reduce"] {
        assert!(of(kind, 4) > of(kind, 0), "{kind}: {} and {}", of(kind, 0), of(kind, 4));
    }
}

#[test]
fn doctor_refuses_to_time_exchanges_of_one_rank() {
    let folder = TempDir::new().unwrap();
    for words in [&["--gpus", "1"][..], &["--ranks", "1"], &["--ranks", "0"]] {
        let result = execute(folder.path(), &[&["doctor", "--calibrate"], words].concat());
        let begins = "flatout: one rank has no other to exchange with: give --gpus or --ranks 2 or more";
        assert!(result.code == Some(2) && result.err.starts_with(begins), "{words:?}: {}", result.err);
    }
    // Both options are only for exchanges.
    for words in [&["doctor", "--gpus", "2"][..], &["doctor", "--calibrate", "--share-gpu"]] {
        assert_eq!(execute(folder.path(), words).code, Some(2), "{words:?}");
    }
}

#[test]
fn contradictions_are_one_sentence_and_code_2() {
    let folder = TempDir::new().unwrap();
    let output = flatout(folder.path(), &["ranks", "--ranks", "4"])
        .envs([("RANK", "0"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "gpu-a")])
        .output()
        .expect("the program starts");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let sentence = "flatout: --ranks starts processes, and torchrun has started 8 already (WORLD_SIZE): leave one of the two out\n";
    assert_eq!((output.status.code(), stderr.as_str()), (Some(2), sentence));
    let result = execute(folder.path(), &["ranks", "--ranks", "2", "--nodes", "2", "--node", "0"]);
    let sentence = "flatout: --nodes 2 needs --address HOST:PORT, at which rank 0 listens on node 0\n";
    assert_eq!((result.code, result.err.as_str()), (Some(2), sentence));
}

#[test]
fn a_rank_that_never_comes_ends_the_others_with_its_number() {
    let folder = TempDir::new().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let words = format!("ranks --ranks 2 --nodes 2 --node 0 --address 127.0.0.1:{port} --join-timeout 1s");
    let result = execute(folder.path(), &words.split(' ').collect::<Vec<_>>());
    let sentence = "flatout: ranks 2-3 of 4 did not join within 1 s: see that they were started, or raise --join-timeout\n";
    assert_eq!((result.code, result.err.as_str()), (Some(1), sentence));
}
