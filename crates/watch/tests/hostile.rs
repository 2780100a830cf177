//! Hostile requests, names and files: no path leads out of the folder, and no text becomes markup.

use std::fs;
use std::os::unix::fs::symlink;

use crate::client::{Fixture, append, encoded, start, step};

const SECRET: &str = "recipe = \"secret\"\n";

#[test]
fn no_path_leads_out_of_the_folder() {
    let fixture = Fixture::new();
    let outside = fixture.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("config.toml"), SECRET).unwrap();
    fs::write(outside.join("sweep.json"), "{\"recipe\":\"secret\"}").unwrap();
    append(&outside, &[start(7), step(1, 7777.5)]);
    // Folders and files that are links out of the folder, and a link that stays inside.
    symlink(&outside, fixture.runs().join("linked")).unwrap();
    let own = fixture.run("own");
    append(&own, &[start(5), step(1, 2.5)]);
    symlink(&own, fixture.runs().join("again")).unwrap();
    let borrowed = fixture.run("borrowed");
    symlink(outside.join("events.jsonl"), borrowed.join("events.jsonl")).unwrap();
    symlink(outside.join("sweep.json"), borrowed.join("profile.json")).unwrap();
    symlink(outside.join("sweep.json"), borrowed.join("plan.json")).unwrap();

    let mut live = fixture.live(&["own", "borrowed", "linked", "../outside"]);
    let list = live.until("runs", |list| {
        let runs = list["runs"].as_array().unwrap();
        runs.len() == 3 && runs.iter().all(|run| run["state"] != "")
    });
    let ids: Vec<&str> =
        list["runs"].as_array().unwrap().iter().map(|run| run["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["again", "borrowed", "own"]);
    assert!(list["notes"][0].as_str().unwrap().contains("lead out"), "{list}");
    let mut received = list.to_string();
    for id in ["own", "borrowed", "again"] {
        let (status, body) = fixture.get(&format!("/api/run?id={}", encoded(id)));
        assert_eq!(status, 200, "{id}");
        received += &body;
    }
    received += &live.until("run", |run| run["id"] == "own").to_string();
    assert!(!received.contains("secret") && !received.contains("7777.5"), "{received}");

    for requested in
        ["linked", "../outside", "/etc", "own/../../outside", "..", ".", "", "own/", "OWN", "own\0"]
    {
        for path in ["/api/run?id=", "/api/sweep?id="] {
            assert_eq!(fixture.get(&format!("{path}{}", encoded(requested))).0, 404, "{path}{requested:?}");
        }
    }
    for path in [
        "/runs/own/config.toml",
        "/../outside/config.toml",
        "/%2e%2e/outside",
        "//etc/passwd",
        "/page/main.js",
        "/api/run",
    ] {
        assert_eq!(fixture.get(path).0, 404, "{path}");
    }
}

#[test]
fn a_folder_that_becomes_a_link_is_no_longer_read() {
    let fixture = Fixture::new();
    let run = fixture.run("a");
    append(&run, &[start(5), step(1, 2.5)]);
    let mut live = fixture.live(&["a"]);
    live.until("run", |run| run["id"] == "a");
    let outside = fixture.dir.path().join("outside");
    fs::rename(&run, &outside).unwrap();
    fs::write(outside.join("config.toml"), SECRET).unwrap();
    symlink(&outside, &run).unwrap();
    let (_, body) = fixture.get("/api/run?id=a");
    assert!(!body.contains("secret"), "{body}");
    live.until("runs", |list| list["all"] == true && list["runs"].as_array().unwrap().is_empty());
}

#[test]
fn names_and_texts_stay_data() {
    let fixture = Fixture::new();
    let names = [
        "<img src=x onerror=alert(1)>",
        "a\"b'c`d",
        "line\nbreak",
        "data: x",
        "é-日本",
        "\u{1b}[31mred",
        "  ",
    ];
    for name in names {
        append(
            &fixture.run(name),
            &[
                start(5),
                step(1, 2.5),
                serde_json::json!({ "event": "sample", "step": 1, "prompt": "<b>\u{1b}[2J", "text": "</script>\n\nevent: runs\ndata: {}\n\n" }),
                serde_json::json!({ "event": "warning", "message": "</script><script>alert(1)</script>\u{2028}\n\nevent: runs\ndata: {}\n\n" }),
            ],
        );
    }
    let mut live = fixture.live(&names);
    let list = live.until("runs", |list| list["runs"].as_array().unwrap().len() == names.len());
    let mut ids: Vec<&str> =
        list["runs"].as_array().unwrap().iter().map(|run| run["id"].as_str().unwrap()).collect();
    ids.sort();
    let mut wanted = names.to_vec();
    wanted.sort();
    assert_eq!(ids, wanted);
    for name in names {
        let (status, body) = fixture.get(&format!("/api/run?id={}", encoded(name)));
        assert_eq!(status, 200);
        let response: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(response["id"], name);
    }
    // A message that contains an event stays one text of one message.
    let run = live.until("run", |run| run["record"]["warning_count"] == 1);
    assert!(run["record"]["warnings"][0].as_str().unwrap().contains("event: runs\ndata: {}"));
    let (_, page) = fixture.get("/");
    assert!(!page.contains("alert(1)"), "names are not in the page");
}

#[test]
fn only_pictures_of_the_run_are_served() {
    let fixture = Fixture::new();
    let (run, other) = (fixture.run("a"), fixture.run("b"));
    append(&run, &[start(5), step(1, 2.5)]);
    let png = "\u{89}PNG\r\n\u{1a}\n".chars().map(|c| c as u8).collect::<Vec<u8>>();
    fs::create_dir(run.join("samples")).unwrap();
    fs::write(run.join("samples/3.png"), &png).unwrap();
    fs::write(run.join("samples/text.png"), SECRET).unwrap();
    fs::write(run.join("samples/large.png"), [&png[..], &[0; 1 << 17]].concat()).unwrap();
    fs::write(run.join("secret.png"), [&png[..], SECRET.as_bytes()].concat()).unwrap();
    symlink(run.join("secret.png"), run.join("samples/link.png")).unwrap();
    let outside = fixture.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("3.png"), [&png[..], SECRET.as_bytes()].concat()).unwrap();
    symlink(&outside, other.join("samples")).unwrap();
    fixture.live(&["a", "b"]).until("runs", |list| list["runs"].as_array().unwrap().len() == 2);
    let status = |id: &str, name: &str| {
        fixture.status(&format!("/api/sample?id={}&image={}", encoded(id), encoded(name)))
    };
    assert_eq!(status("a", "3.png"), 200);
    for name in
        ["4.png", "text.png", "large.png", "link.png", "../secret.png", "..", "", ".png", "3.png/", "3.PNG"]
    {
        assert_eq!(status("a", name), 404, "{name}");
    }
    assert_eq!(status("b", "3.png"), 404, "a folder that leads elsewhere");
    assert_eq!(status("c", "3.png"), 404);
    assert_eq!(fixture.status("/api/sample?id=a"), 404);
}

#[test]
fn files_that_are_not_regular_are_skipped() {
    let fixture = Fixture::new();
    let run = fixture.run("pipe");
    let made = std::process::Command::new("mkfifo").arg(run.join("events.jsonl")).status();
    if !made.is_ok_and(|status| status.success()) {
        fs::create_dir(run.join("events.jsonl")).unwrap();
    }
    fs::create_dir(run.join("plan.json")).unwrap();
    fs::write(run.join("profile.json"), "{ not json").unwrap();
    fs::write(run.join("samples.jsonl"), b"{\"text\":\"fine\"}\nnot json\n[1]\n\xff\xfe\n").unwrap();
    let mut live = fixture.live(&["pipe"]);
    live.until("runs", |list| list["runs"][0]["state"] == "crashed");
    let (status, body) = fixture.get("/api/run?id=pipe");
    assert_eq!(status, 200);
    let response: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(response["samples"], serde_json::json!([{ "text": "fine" }]));
    // The settings, the plan and the profile.
    assert_eq!(response["problems"].as_array().unwrap().len(), 3, "{body}");
}
