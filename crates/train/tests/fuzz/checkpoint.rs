//! Damaged files of a run: readers return the contents or an error. They do not panic, hang, or allocate more memory than the
//! file justifies.

use std::fs;
use std::path::Path;

use flatout_fuzz::{Limits, feed};
use flatout_train::run::checkpoint::{self, TensorFile};
use flatout_train::run::events::{self, Event, EventLog};

/// Uses memory if possible: a disk would take most of the time.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Headers as we write them, preceded by their lengths and followed by data.
fn tensor_files() -> Vec<Vec<u8>> {
    let headers = [
        r#"{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]}}"#,
        r#"{"__metadata__":{"made_by":"us"},"optimizer.updates":{"dtype":"I32","shape":[],"data_offsets":[0,4]}}"#,
        "{}",
    ];
    let file = |header: &str| {
        let length = (header.len() as u64).to_le_bytes();
        [&length[..], header.as_bytes(), &[7; 22]].concat()
    };
    headers.iter().map(|header| file(header)).collect()
}

#[test]
fn tensor_file() {
    let folder = folder();
    let path = folder.path().join("state.safetensors");
    feed("tensor file", &tensor_files(), Limits::default(), |bytes| {
        fs::write(&path, bytes).unwrap();
        let Ok(file) = TensorFile::open(&path) else { return };
        let tensors: Vec<(String, usize)> =
            file.entries().iter().map(|(name, entry)| (name.clone(), entry.bytes())).collect();
        for (name, size) in tensors {
            assert!(size <= bytes.len(), "{name} is {size} bytes of a file of {}", bytes.len());
            file.read_into(&name, &mut vec![0; size]).expect("what the header promises is there");
        }
    });
}

fn state(format: u32, counters: &str) -> Vec<u8> {
    format!(
        r#"{{"format":{format},"step":7,"cursor":{{"row":56,"streams":[[0,1]],"data":"x"}},"counters":{{{counters}}},
            "files":{{"state.safetensors":{{"bytes":146,"xxh3":"0123456789abcdef0123456789abcdef"}}}}}}"#
    )
    .into_bytes()
}

/// A record of tensors in parts, over the files of `tensor_files`.
fn parted() -> Vec<u8> {
    let part = |file: usize, start: usize, len: usize| {
        format!(r#"{{"file":"part-{file}","start":{start},"len":{len}}}"#)
    };
    format!(
        r#"{{"format":3,"step":7,"cursor":null,"counters":{{}},"files":{{"part-0":{{"bytes":9,"xxh3":"0"}}}},
            "tensors":{{"w":{{"dtype":"F32","shape":[3,2],"parts":[{},{}]}},
                        "empty":{{"dtype":"BF16","shape":[0],"parts":[]}}}}}}"#,
        part(0, 0, 4),
        part(1, 4, 2),
    )
    .into_bytes()
}

/// Whatever the index of a checkpoint in parts says, everything that can be opened can be read, whole and by any range.
#[test]
fn index_of_parts() {
    let folder = folder();
    let checkpoint = folder.path().join("step-7");
    fs::create_dir(&checkpoint).unwrap();
    for (i, elements) in [4, 2].into_iter().enumerate() {
        let header =
            format!(r#"{{"w":{{"dtype":"F32","shape":[{elements}],"data_offsets":[0,{}]}}}}"#, 4 * elements);
        let bytes =
            [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![i as u8; 4 * elements]]
                .concat();
        fs::write(checkpoint.join(format!("part-{i}")), bytes).unwrap();
    }
    let read = |bytes: &[u8]| {
        fs::write(checkpoint.join("state.json"), bytes).unwrap();
        let Ok((_, file)) = checkpoint::open(&checkpoint) else { return 0 };
        for (name, entry) in file.entries() {
            let elements: usize = entry.shape.iter().product();
            assert_eq!(entry.bytes(), elements * entry.dtype.bytes());
            for start in 0..elements {
                let mut place = vec![0; (elements - start) * entry.dtype.bytes()];
                file.read_range(name, start..elements, &mut place).expect("what the index promises is there");
            }
        }
        file.entries().len()
    };
    assert_eq!(read(&parted()), 2, "an undamaged index");
    feed("index of parts", &[parted()], Limits::default(), |bytes| {
        read(bytes);
    });
}

#[test]
fn state_record() {
    let folder = folder();
    let checkpoint = folder.path().join("step-7");
    fs::create_dir(&checkpoint).unwrap();
    fs::write(checkpoint.join("state.safetensors"), &tensor_files()[0]).unwrap();
    let seeds = [
        state(1, r#""tokens":1792,"samples":56"#),
        state(2, r#""tokens":1792,"samples":56,"skipped":1,"skipped_in_a_row":0"#),
    ];
    for seed in &seeds {
        fs::write(checkpoint.join("state.json"), seed).unwrap();
        let (state, _) = checkpoint::open(&checkpoint).expect("an undamaged record");
        assert_eq!((state.step, state.counters.len()), (7, 4));
    }
    feed("state.json", &seeds, Limits::default(), |bytes| {
        fs::write(checkpoint.join("state.json"), bytes).unwrap();
        let _ = checkpoint::open(&checkpoint);
    });
}

/// The whole folder: whichever file is damaged, only what was saved is accepted. The damage never gives a file the hash of
/// another.
#[test]
fn checkpoint_folder() {
    let folder = folder();
    let files = ["state.json", "state.safetensors", "complete"];
    let seeds: Vec<Vec<u8>> = [&tensor_files()[0][..], &state(2, ""), b"0123456789abcdef0123456789abcdef"]
        .iter()
        .flat_map(|bytes| (0..files.len() as u8).map(move |file| [&[file], *bytes].concat()))
        .collect();
    let checkpoint = folder.path().join("step-7");
    fs::create_dir(&checkpoint).unwrap();
    feed("checkpoint", &seeds, Limits::default(), |bytes| {
        let Some((which, bytes)) = bytes.split_first() else { return };
        fs::write(checkpoint.join(files[*which as usize % files.len()]), bytes).unwrap();
        if let Ok(found) = checkpoint::latest(folder.path()) {
            assert_eq!(found.whole, None);
        }
        fs::write(folder.path().join("best.json"), bytes).unwrap();
        let _ = checkpoint::best(folder.path());
    });
}

#[test]
fn event_log() {
    let folder = folder();
    let path = folder.path().join("events.jsonl");
    let lines = [
        r#"{"event":"step","step":1,"epoch":0.5,"loss":null,"grad_norm":0.1,"lr":0.003,"tokens":4096,"samples":32,"step_ms":12.5,"tokens_per_second":1e6,"samples_per_second":2560.0,"skipped":0}"#,
        r#"{"event":"eval","step":2,"loss":2.5}"#,
        r#"{"event":"resume","step":1}"#,
        r#"{"event":"spike","step":4,"loss":9.5,"median":2.5,"deviations":7.25}"#,
        r#"{"event":"end","status":"done","steps":9,"loss":1.5,"tokens_per_second":2.5,"skipped":2}"#,
    ];
    let whole = lines.join("\n") + "\n";
    fs::write(&path, &whole).unwrap();
    assert_eq!(events::read(&path).unwrap().len(), lines.len());
    feed(
        "events.jsonl",
        &[whole.clone().into_bytes(), whole.repeat(3).into_bytes()],
        Limits::default(),
        |bytes| {
            fs::write(&path, bytes).unwrap();
            let read = events::read(&path);
            let Ok((mut log, events)) = EventLog::reopen(&path) else {
                assert!(
                    read.is_err() && fs::read(&path).unwrap() == bytes,
                    "a log that is refused stays as it is"
                );
                return;
            };
            drop(events::steps(&events));
            events::eval_at(&events, 3);
            log.write(&Event::Resume { step: 1 }).unwrap();
            let after = events::read(&path).expect("a log that was opened again is whole");
            assert_eq!(after.len(), events.len() + 1);
            assert!(grows(&path, bytes));
        },
    );
}

/// Whether the file holds the previous whole lines, and one more.
fn grows(path: &Path, before: &[u8]) -> bool {
    let now = fs::read(path).unwrap();
    let kept = now.len() - br#"{"event":"resume","step":1}"#.len() - 1;
    now[..kept] == before[..kept]
}
