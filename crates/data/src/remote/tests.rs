//! Tests of remote files against a server that works correctly or fails in various ways.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::access::Access;
use super::cache::Cache;
use super::hub;
use super::location::SetName;
use super::object::{Client, Object, RetryPolicy};
use super::ranged::Ranged;
use super::server::{COMMIT, Content, Fault, SetServer};
use crate::scratch::Scratch;

fn client(server: &SetServer, token: Option<&str>) -> Arc<Client> {
    let access = Access {
        endpoint: server.endpoint.clone(),
        token: token.map(String::from),
        offline: false,
        home: None,
    };
    let pause = Duration::from_millis(1);
    let retries = RetryPolicy { attempts: 4, pause, longest_pause: pause };
    Arc::new(Client::new(access, Duration::from_millis(300), retries).unwrap())
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn content(files: &[(&str, Vec<u8>)]) -> Content {
    Content::of(files.iter().map(|(name, bytes)| (name.to_string(), bytes.clone())).collect())
}

fn only(client: &Arc<Client>, word: &str) -> Result<Object, String> {
    let (_, files) = hub::files(client, &SetName::parse(word).unwrap(), |path| !path.ends_with(".md"))
        .map_err(|error| error.sentence)?;
    Ok(files[0].object.clone())
}

#[test]
fn sets_are_listed_over_pages_at_one_commit() {
    let names = ["README.md", "data/b.jsonl", "data/a/z.jsonl", "data/a-b.jsonl", "other/c.jsonl"];
    let server = SetServer::start(content(&names.map(|name| (name, name.as_bytes().to_vec()))));
    let client = client(&server, Some("secret"));
    let files = |word: &str| {
        let (pinned, files) =
            hub::files(&client, &SetName::parse(word).unwrap(), |path| path.ends_with("jsonl")).unwrap();
        assert_eq!(pinned.revision(), COMMIT);
        files.into_iter().map(|file| file.path).collect::<Vec<_>>()
    };
    assert_eq!(files("hf://org/set"), ["data/a/z.jsonl", "data/a-b.jsonl", "data/b.jsonl", "other/c.jsonl"]);
    let asked = server.requests();
    assert_eq!(asked.iter().filter(|line| line.contains("/tree/")).count(), 3, "{asked:?}");
    assert_eq!(files("hf://org/set/other"), ["other/c.jsonl"]);
    let object = only(&client, "hf://org/set/other").unwrap();
    server.requests();
    assert_eq!(object.read(2, 3).unwrap(), b"her");
    // The token is sent to the hub and not to the store, to which later requests go directly.
    let [hub, store] = &server.requests()[..] else { panic!("two requests") };
    assert!(hub.contains("/resolve/") && hub.contains("auth=Bearer secret"), "{hub}");
    assert!(store.contains("range=bytes=2-4 auth=-"), "{store}");
    assert_eq!(object.read(0, 2).unwrap(), b"ot");
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn refusals_of_servers_have_remedies() {
    let server = SetServer::start(content(&[("a.jsonl", bytes(10))]));
    let refused = |word: &str, token| only(&client(&server, token), word).unwrap_err();
    for (word, token, said) in [
        ("hf://org/gated", None, "gated and no token was sent: accept its terms at"),
        ("hf://org/gated", Some("x"), "the token sent may not read it"),
        ("hf://org/private", None, "set HF_TOKEN"),
        ("hf://org/none", None, "there is no data set hf://org/none"),
        ("hf://org/set@v2", None, "has no revision `v2`"),
        ("hf://org/set:test", None, "split test"),
    ] {
        let sentence = refused(word, token);
        assert!(sentence.contains(said) && sentence.ends_with('.'), "{word}: {sentence}");
    }
    let nobody = Access { endpoint: "http://127.0.0.1:9".into(), token: None, offline: false, home: None };
    let retries = RetryPolicy { attempts: 2, pause: Duration::ZERO, longest_pause: Duration::ZERO };
    let nobody = Arc::new(Client::new(nobody, Duration::from_millis(300), retries).unwrap());
    assert!(only(&nobody, "hf://org/set").unwrap_err().contains("cannot be reached for hf://org/set"));
}

#[test]
fn interrupted_transfers_are_resumed() {
    let whole = bytes(300_000);
    let server = SetServer::start(content(&[("a.jsonl", whole.clone())]));
    let client = client(&server, None);
    let object = only(&client, "hf://org/set").unwrap();
    for faults in [
        vec![Fault::Short, Fault::Short, Fault::Short, Fault::Short, Fault::Short],
        vec![Fault::OtherRange, Fault::Status(503, None), Fault::Status(500, None)],
        vec![Fault::Status(429, Some(0)), Fault::Status(403, None), Fault::Short],
        vec![Fault::Hang(Duration::from_millis(900)), Fault::Short],
    ] {
        server.change(|content| content.faults = VecDeque::from(faults.clone()));
        assert_eq!(object.read(1000, 250_000).unwrap(), whole[1000..251_000], "{faults:?}");
    }
    // Only the rest is requested.
    server.requests();
    server.change(|content| content.faults = VecDeque::from([Fault::Short]));
    assert_eq!(object.read(0, 300_000).unwrap(), whole);
    let asked = server.requests();
    assert!(asked[asked.len() - 1].contains("range=bytes=150000-299999"), "{asked:?}");
    server.change(|content| content.faults = vec![Fault::Status(503, None); 50].into());
    let error = object.read(0, 10).unwrap_err().to_string();
    assert!(error.contains("503") && error.contains("4 attempts"), "{error}");
}

#[test]
fn changed_files_and_servers_without_ranges_are_refused() {
    let server = SetServer::start(content(&[("a.jsonl", bytes(5000)), ("b.jsonl", bytes(10))]));
    let client = client(&server, None);
    let object = only(&client, "hf://org/set/a.jsonl").unwrap();
    assert_eq!(object.read(0, 10).unwrap(), bytes(10));
    let refused = |fault: Fault, said: &str| {
        server.change(|content| content.faults = VecDeque::from([fault.clone()]));
        let error = object.read(5, 10).unwrap_err().to_string();
        assert!(error.contains(said), "{fault:?}: {error}");
    };
    refused(Fault::Whole, "the whole file");
    refused(Fault::OtherTag, "changed");
    // The hub itself now has another file.
    let changed = BTreeMap::from([("a.jsonl".to_string(), bytes(5001))]);
    server.change(|content| drop(content.commits.insert(COMMIT.into(), changed)));
    let fresh = only(&client, "hf://org/set/a.jsonl").unwrap();
    server.change(|content| {
        let same_size = bytes(5002)[1..].to_vec();
        content.commits.insert(COMMIT.into(), BTreeMap::from([("a.jsonl".to_string(), same_size)]));
    });
    assert!(fresh.read(0, 10).unwrap_err().to_string().contains("changed"));
    server.change(|content| drop(content.commits.insert(COMMIT.into(), BTreeMap::new())));
    assert!(fresh.read(0, 10).unwrap_err().to_string().contains("no such file"));
}

#[test]
fn addresses_are_read_where_the_server_answers_ranges() {
    let server = SetServer::start(content(&[("a.jsonl", bytes(9000)), ("empty.txt", vec![])]));
    let client = client(&server, Some("secret"));
    let (object, head) = Object::open(client.clone(), &server.address("a.jsonl"), 4096).unwrap();
    assert_eq!((object.bytes(), head), (9000, bytes(4096)));
    assert!(server.requests().iter().all(|line| line.ends_with("auth=-")));
    let (empty, head) = Object::open(client.clone(), &server.address("empty.txt"), 4096).unwrap();
    assert_eq!((empty.bytes(), head.len()), (0, 0));
    server.change(|content| content.faults = VecDeque::from([Fault::Whole]));
    let refused = |name: &str| {
        let opened = Object::open(client.clone(), &server.address(name), 4096);
        opened.err().unwrap().sentence
    };
    assert!(refused("a.jsonl").contains("the whole file"));
    assert!(refused("none?key=secret").contains("there is no such file"));
    assert!(!refused("none?key=secret").contains("secret"), "what is signed is not shown");
    server.change(|content| {
        content.commits.insert(COMMIT.into(), BTreeMap::from([("a.jsonl".to_string(), bytes(9001))]));
    });
    assert!(object.read(0, 10).unwrap_err().to_string().contains("changed"));
}

#[test]
fn reads_at_any_place_are_few_requests() {
    let whole = bytes(5 << 20);
    let server = SetServer::start(content(&[("a.jsonl", whole.clone())]));
    let client = client(&server, None);
    let ranged = Ranged::new(only(&client, "hf://org/set").unwrap(), 2);
    server.requests();
    let mut state = 7u64;
    let mut drawn = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % below
    };
    for _ in 0..50 {
        let at = drawn(whole.len() as u64);
        let len = drawn(3 << 20).min(whole.len() as u64 - at) as usize;
        let mut out = vec![0; len];
        ranged.read_exact_at(&mut out, at, at + drawn(4 << 20)).unwrap();
        assert_eq!(out, whole[at as usize..at as usize + len]);
    }
    let ranged = Ranged::new(only(&client, "hf://org/set").unwrap(), 2);
    server.requests();
    let mut out = vec![0; 1000];
    for at in (0..5 << 20).step_by(1000).take_while(|at| at + 1000 <= 5 << 20) {
        ranged.read_exact_at(&mut out, at, 5 << 20).unwrap();
        assert_eq!(out, whole[at as usize..at as usize + 1000]);
    }
    let asked = server.requests();
    assert_eq!(asked.iter().filter(|line| line.contains("signed")).count(), 3, "{asked:?}");
}

#[test]
fn a_cache_gives_the_same_bytes_and_stays_within_its_bound() {
    let (scratch, whole) = (Scratch::new("stream-cache"), bytes(6 << 20));
    let server = SetServer::start(content(&[("a.jsonl", whole.clone())]));
    let client = client(&server, None);
    let folder = scratch.path().join("pieces");
    let most = 3 << 20;
    let read = |at: usize, len: usize| {
        let object = only(&client, "hf://org/set").unwrap().cached_in(Arc::new(Cache::new(&folder, most)));
        server.requests();
        assert_eq!(object.read(at as u64, len).unwrap(), whole[at..at + len]);
        server.requests().iter().filter(|line| line.contains("signed")).count()
    };
    assert_eq!((read(100, 1000), read(5000, 10)), (1, 0));
    assert_eq!(read((1 << 20) - 5, 10), 1, "the second piece is missing");
    assert_eq!(read((1 << 20) - 5, 10), 0);
    // A damaged piece costs a request.
    for entry in std::fs::read_dir(&folder).unwrap() {
        std::fs::write(entry.unwrap().path(), b"damaged").unwrap();
    }
    assert_eq!((read(100, 10), read(100, 10)), (1, 0));
    for at in (0..whole.len()).step_by(300_000) {
        read(at, 200_000.min(whole.len() - at));
        let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
        assert!(files.sum::<u64>() <= most);
    }
}
