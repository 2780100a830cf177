//! Models by name: downloaded from a server that speaks the hub's protocol, into the cache that the hub's tools share.

use std::fs;
use std::path::{Path, PathBuf};

use flatout_train::weights::pretrained::folder;
use flatout_train::weights::pretrained::hub::{Hub, Name, Snapshot, Want};

use crate::hub_server::{COMMIT, Content, HubServer};

/// A small model as other tools write it, in one file or in shards.
fn files(name: &str) -> Content {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/checkpoints").join(name);
    let mut content = Content::default();
    for entry in fs::read_dir(dir).expect("a checkpoint").flatten() {
        let name = entry.file_name().into_string().expect("a name");
        if name.starts_with("model") || name == "config.json" {
            content.files.insert(name, fs::read(entry.path()).expect("a file"));
        }
    }
    content.files.insert("tokenizer.json".into(), b"{}".to_vec());
    content
}

struct HubSetup {
    server: HubServer,
    hub: Hub,
    scratch: tempfile::TempDir,
}

fn setup(content: Content) -> HubSetup {
    let server = HubServer::start(content);
    let scratch = tempfile::tempdir().expect("a folder");
    let hub = Hub {
        endpoint: server.endpoint.clone(),
        cache: scratch.path().join("hub"),
        token: None,
        offline: false,
    };
    HubSetup { server, hub, scratch }
}

impl HubSetup {
    fn get(&self, name: &str, want: Want) -> Result<Snapshot, String> {
        let name = Name::parse(name).expect("a name");
        self.hub.snapshot(&name, want, &mut |_| {}).map_err(|error| error.0)
    }

    fn model(&self) -> PathBuf {
        self.hub.cache.join("models--org--name")
    }
}

#[test]
fn a_model_comes_whole_into_the_layout_of_the_cache() {
    let content = files("llama-bf16-shards");
    let setup = setup(content.clone());
    let Snapshot { folder, commit } = setup.get("org/name", Want::Everything).expect("a model");
    assert_eq!(
        (folder.as_path(), commit.as_str()),
        (setup.model().join("snapshots").join(COMMIT).as_path(), COMMIT)
    );
    for (file, bytes) in &content.files {
        assert_eq!(fs::read(folder.join(file)).expect("a file"), *bytes, "{file}");
        let link = fs::read_link(folder.join(file)).expect("a link");
        assert!(link.starts_with("../../blobs"), "{link:?}");
    }
    assert_eq!(fs::read_to_string(setup.model().join("refs/main")).unwrap(), COMMIT);
    assert!(setup.model().join(".no_exist").join(COMMIT).join("generation_config.json").is_file());
    let names: Vec<String> = fs::read_dir(setup.model().join("blobs"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(names.iter().all(|name| name.len() == 40 || name.len() == 64), "{names:?}");
    folder::weights(&folder, &folder::describe(&folder).expect("a model").model, false).expect("weights");

    // From then on no request is sent, by branch or by commit, online or not.
    setup.server.asked();
    let offline = HubSetup { hub: Hub { offline: true, ..setup.hub.clone() }, ..setup };
    for name in ["org/name".to_string(), format!("org/name@{COMMIT}")] {
        assert_eq!(offline.get(&name, Want::Everything).expect("a model").folder, folder);
        assert_eq!(offline.get(&name, Want::Description).expect("a model").folder, folder);
    }
    assert_eq!(offline.server.asked(), Vec::<String>::new());
    let sentence = offline.get("org/other", Want::Description).unwrap_err();
    assert!(
        sentence.contains("org/other is not in the cache") && sentence.contains("HF_HUB_OFFLINE"),
        "{sentence}"
    );
    drop(offline.scratch);
}

#[test]
fn a_description_costs_no_weights() {
    let setup = setup(files("llama"));
    let snapshot = setup.get("org/name@side/branch", Want::Description).expect("a model");
    assert!(
        snapshot.folder.join("config.json").is_file() && !snapshot.folder.join("model.safetensors").exists()
    );
    assert_eq!(fs::read_to_string(setup.model().join("refs/side/branch")).unwrap(), COMMIT);
    assert!(setup.server.asked().iter().all(|line| !line.contains("safetensors")));
    setup.get("org/name@side/branch", Want::Description).expect("a model");
    assert!(setup.server.asked().is_empty(), "what is known not to exist is not asked for again");
    setup.get("org/name@side/branch", Want::Everything).expect("a model");
    assert!(snapshot.folder.join("model.safetensors").is_file());
}

#[test]
fn a_broken_transfer_is_continued() {
    let content = files("llama");
    let weights = content.files["model.safetensors"].clone();
    let setup = setup(Content { breaks: 1, ..content });
    let folder = setup.get("org/name", Want::Everything).expect("a model").folder;
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights);
    let from_store: Vec<String> =
        setup.server.asked().into_iter().filter(|line| line.starts_with("GET /blobs")).collect();
    assert_eq!(from_store.len(), 2, "{from_store:?}");
    assert!(from_store[1].contains(&format!("range=bytes={}-", weights.len() / 2)), "{from_store:?}");
}

#[test]
fn partial_files_of_an_earlier_process_are_used_and_checked() {
    let content = files("llama");
    let weights = content.files["model.safetensors"].clone();
    for (left, ignores_ranges) in [
        (weights[..1000].to_vec(), false),
        (weights[..1000].to_vec(), true),
        // Bytes of something else: the hash reveals it, and the file is downloaded again.
        (vec![7; 1000], false),
        (vec![7; weights.len() + 5], false),
        (weights.clone(), false),
    ] {
        let setup = setup(Content { ignores_ranges, ..content.clone() });
        let etag = ring::digest::digest(&ring::digest::SHA256, &weights);
        let etag: String = etag.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        fs::create_dir_all(setup.model().join("blobs")).unwrap();
        fs::write(setup.model().join("blobs").join(format!("{etag}.incomplete")), &left).unwrap();
        let folder = setup.get("org/name", Want::Everything).expect("a model").folder;
        assert!(
            fs::read(folder.join("model.safetensors")).unwrap() == weights,
            "{} bytes were left",
            left.len()
        );
    }
}

#[test]
fn a_file_that_does_not_end_where_it_should_is_not_taken() {
    let setup = setup(Content { too_many: 3 << 20, ..files("llama") });
    let began = std::time::Instant::now();
    let refused = setup.get("org/name", Want::Everything).unwrap_err();
    assert!(refused.contains("sends more of model.safetensors of org/name than the "), "{refused}");
    assert!(began.elapsed().as_secs() < 5, "it is asked for once");
    let left: Vec<_> = fs::read_dir(setup.model().join("blobs")).unwrap().flatten().collect();
    assert!(left.iter().all(|entry| entry.metadata().unwrap().len() < 1 << 20), "{left:?}");
}

#[test]
fn the_token_is_sent_only_to_the_hub() {
    let mut setup = setup(files("llama"));
    setup.hub.token = Some("hf_secret".into());
    setup.get("org/name", Want::Everything).expect("a model");
    let asked = setup.server.asked();
    let (store, hub): (Vec<_>, Vec<_>) = asked.iter().partition(|line| line.contains(" /blobs/"));
    assert!(!store.is_empty() && store.iter().all(|line| line.ends_with("auth=-")), "{store:?}");
    assert!(!hub.is_empty() && hub.iter().all(|line| line.ends_with("auth=Bearer hf_secret")), "{hub:?}");
}

#[test]
fn a_renamed_model_is_found() {
    let setup = setup(files("llama"));
    let snapshot = setup.get("org/old", Want::Everything).expect("a model");
    assert!(snapshot.folder.join("model.safetensors").is_file());
}

#[test]
fn refusals_of_the_hub_are_explained() {
    let mut setup = setup(files("llama"));
    let cases = [
        ("org/gated", "org/gated is gated and no token was sent: accept its terms at http://"),
        ("org/private", "org/private does not exist on http://"),
        ("org/none", "there is no model org/none on http://"),
        ("org/name@v9", "org/name has no revision `v9`"),
        ("org/busy", "answered 503 for org/busy"),
    ];
    for (name, words) in cases {
        let sentence = setup.get(name, Want::Everything).unwrap_err();
        assert!(sentence.contains(words) && !sentence.contains('\n'), "{sentence:?} lacks {words:?}");
    }
    setup.hub.token = Some("hf_other".into());
    let sentence = setup.get("org/gated", Want::Everything).unwrap_err();
    assert!(sentence.contains("the token sent may not read it"), "{sentence}");
    setup.hub.endpoint = "http://127.0.0.1:1".into();
    let sentence = setup.get("org/name", Want::Everything).unwrap_err();
    assert!(sentence.contains("http://127.0.0.1:1 cannot be reached for org/name"), "{sentence}");
}

#[test]
fn models_that_cannot_be_read_are_refused_before_their_weights_come() {
    let refused = |change: &dyn Fn(&mut Content), words: &str| {
        let mut content = files("llama");
        change(&mut content);
        let setup = setup(content);
        let sentence = setup.get("org/name", Want::Everything).unwrap_err();
        assert!(sentence.contains(words), "{sentence:?} lacks {words:?}");
        assert!(setup.server.asked().iter().all(|line| !line.contains("/blobs/")));
    };
    refused(
        &|content| {
            let weights = content.files.remove("model.safetensors").unwrap();
            content.files.insert("pytorch_model.bin".into(), weights);
        },
        "has its weights only as pickles (pytorch_model.bin)",
    );
    refused(&|content| drop(content.files.remove("config.json")), "has no config.json");
    refused(
        &|content| {
            content.files.remove("model.safetensors");
            let index = br#"{"weight_map": {"a": "../../../secret.safetensors"}}"#.to_vec();
            content.files.insert("model.safetensors.index.json".into(), index);
        },
        "a shard is a .safetensors file in the same folder",
    );
}
