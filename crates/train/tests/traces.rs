//! The files that a run leaves for people and other tools: TensorBoard's files, decoded here by a separate reader, and the report
//! with its plots.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use flatout_train::run::events::{self, Event, Step};

use crate::small_run::{config, train_in};

/// An event of TensorBoard, with the fields that we write.
#[derive(Debug, Default, PartialEq)]
struct BoardEvent {
    time: f64,
    step: u64,
    version: String,
    /// A session began: 1 is START.
    session: u64,
    scalars: BTreeMap<String, f32>,
    texts: BTreeMap<String, String>,
}

/// CRC-32C by its definition, bit by bit, with the mask of record files.
fn checksum(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= *byte as u32;
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    (!crc).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[test]
fn the_reader_knows_checksums() {
    let unmask = |masked: u32| masked.wrapping_sub(0xa282_ead8).rotate_left(15);
    for (bytes, crc) in
        [(&b"123456789"[..], 0xe306_9283u32), (&[0; 32], 0x8a91_36aa), (&[0xff; 32], 0x62a8_ab43)]
    {
        assert_eq!(unmask(checksum(bytes)), crc);
    }
}

/// The fields of a message: number, and the bits or bytes.
fn fields(mut message: &[u8]) -> Vec<(u64, u64, &[u8])> {
    fn varint(message: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = message[0];
            *message = &message[1..];
            value |= ((byte & 0x7f) as u64) << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        value
    }
    let mut found = vec![];
    while !message.is_empty() {
        let key = varint(&mut message);
        let (bits, taken) = match key & 7 {
            0 => (varint(&mut message), 0),
            1 => (u64::from_le_bytes(message[..8].try_into().unwrap()), 8),
            2 => (0, varint(&mut message) as usize),
            5 => (u32::from_le_bytes(message[..4].try_into().unwrap()) as u64, 4),
            other => panic!("wire type {other}"),
        };
        let (bytes, rest) = message.split_at(taken);
        found.push((key >> 3, bits, bytes));
        message = rest;
    }
    found
}

fn decode(event: &[u8]) -> BoardEvent {
    let mut read = BoardEvent::default();
    for (number, bits, bytes) in fields(event) {
        match number {
            1 => read.time = f64::from_bits(bits),
            2 => read.step = bits,
            3 => read.version = String::from_utf8(bytes.to_vec()).unwrap(),
            5 => {
                for (_, _, value) in fields(bytes) {
                    let (mut tag, mut number, mut text) = (String::new(), None, None);
                    for (field, bits, bytes) in fields(value) {
                        match field {
                            1 => tag = String::from_utf8(bytes.to_vec()).unwrap(),
                            2 => number = Some(f32::from_bits(bits as u32)),
                            8 => text = fields(bytes).into_iter().find(|f| f.0 == 8).map(|f| f.2),
                            _ => {}
                        }
                    }
                    read.scalars.extend(number.map(|n| (tag.clone(), n)));
                    read.texts.extend(text.map(|t| (tag, String::from_utf8(t.to_vec()).unwrap())));
                }
            }
            7 => read.session = fields(bytes)[0].1,
            other => panic!("field {other}"),
        }
    }
    read
}

/// The event files of a run in order of name, with every checksum verified.
fn boards(run: &Path) -> Vec<Vec<BoardEvent>> {
    let names = fs::read_dir(run).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = names.filter(|path| path.to_string_lossy().contains("tfevents")).collect();
    files.sort();
    let read = |path| {
        let bytes = fs::read(path).unwrap();
        let mut rest = &bytes[..];
        let mut records = vec![];
        while !rest.is_empty() {
            let word = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(checksum(&rest[..8]), word(8));
            assert_eq!(checksum(&rest[12..12 + length]), word(12 + length));
            records.push(decode(&rest[12..12 + length]));
            rest = &rest[16 + length..];
        }
        records
    };
    files.into_iter().map(read).collect()
}

fn scalar(board: &[BoardEvent], tag: &str) -> Vec<(u64, f32)> {
    board.iter().filter_map(|read| Some((read.step, *read.scalars.get(tag)?))).collect()
}

#[test]
fn tensorboards_files_follow_the_run_and_its_restarts() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let config = config(&["checkpoint.every=20", "checkpoint.keep=9", "eval.every=25", "eval.rows=8"]);
    let steps = train_in(&run, &config, |_| {});
    let [board] = &boards(&run)[..] else { panic!("one process writes one file") };
    assert_eq!((board[0].version.as_str(), board[0].step), ("brain.Event:2", 0));
    assert!(board.iter().all(|read| read.session == 0), "nothing to take back");
    assert!(board[1].texts["config"].contains("width = 32"));
    assert!(board.windows(2).all(|pair| pair[0].time <= pair[1].time && pair[1].time > 1.7e9));
    let series = |of: fn(&Step) -> f32| steps.iter().map(|s| (s.step, of(s))).collect::<Vec<_>>();
    assert_eq!(scalar(board, "train/loss"), series(|s| s.loss));
    assert_eq!(scalar(board, "train/lr"), series(|s| s.lr));
    assert_eq!(scalar(board, "train/grad_norm"), series(|s| s.grad_norm));
    assert_eq!(scalar(board, "speed/tokens_per_second"), series(|s| s.tokens_per_second as f32));
    assert!(scalar(board, "speed/of_predicted").is_empty(), "nothing was calibrated");
    assert!(
        scalar(board, "speed/mfu").is_empty() && scalar(board, "gpu/utilization").is_empty(),
        "on the CPU"
    );
    let evals = |events: &[Event]| -> Vec<(u64, f32)> {
        let eval = |event: &Event| match event {
            Event::Eval { step, loss, .. } => Some((*step, *loss)),
            _ => None,
        };
        events.iter().filter_map(eval).collect()
    };
    let log = events::read(&run.join("events.jsonl")).unwrap();
    assert_eq!(scalar(board, "eval/loss"), evals(&log));
    assert_eq!(scalar(board, "eval/loss").len(), 2);

    // Simulates a crash after which the checkpoint of step 20 is the last complete one.
    for step in [40, 50] {
        fs::remove_dir_all(run.join(format!("checkpoints/step-{step}"))).unwrap();
    }
    train_in(&run, &config, |_| {});
    let [before, after] = &boards(&run)[..] else { panic!("the second process writes a second file") };
    assert_eq!(before, board, "the first file stays as it was");
    assert_eq!((after[1].session, after[1].step), (1, 21), "what was said of step 21 and later is void");
    assert!(after.iter().all(|read| read.session == 0 || read.step == 21));
    let again = scalar(after, "train/loss");
    assert_eq!(again, scalar(board, "train/loss")[20..], "and said again, to the bit");
}

#[test]
fn a_report_describes_the_run_and_its_results() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("my | run");
    let config = config(&["eval.every=25", "eval.rows=8", "fuse.qkv=off"]);
    let steps = train_in(&run, &config, |_| {});
    let page = fs::read_to_string(run.join("report.md")).unwrap();
    let log = events::read(&run.join("events.jsonl")).unwrap();
    let Some(Event::Start(start)) = log.first() else { panic!("a start") };
    let Some(Event::End(end)) = log.last() else { panic!("an end") };
    let bytes: u64 = start.memory.values().sum();
    assert_eq!(bytes, start.arena_bytes, "the categories are all of it");
    let (took, stepped) = (end.time - start.time, steps.iter().map(|s| s.step_ms / 1e3).sum::<f64>());
    assert!(stepped <= took + 1e-3, "steps of {stepped} s in a run of {took} s");
    let rate = 12_800.0 / end.tokens_per_second;
    assert!(
        stepped <= rate + 1e-3 && rate <= took + 1e-3,
        "{stepped} s of steps, {rate} s by the end's rate"
    );
    for said in [
        "# my | run\n\nDone: 50 steps in".to_string(),
        format!("| training loss | {:.4} (smoothed ", steps[49].loss),
        format!("| held-out loss | {:.4} after step 50 |", end.loss),
        "| loss floor | ".into(),
        "| trained on | 12,800 tokens in 400 rows".into(),
        "| shape | 2 layers of width 32, 2 heads, vocabulary 512, context 32 |".into(),
        "| data | synthetic".into(),
        format!("| flatout | {} |", start.version),
        format!("| device | {} |", start.device),
        "| `fuse.qkv` | off | set by the user |".into(),
        "| `fuse.loss` | on | the default |".into(),
        "| `deterministic` | on | as compiled |".into(),
        format!("| `precision` | fp32 | auto: {} |", start.auto["precision"]),
        "![Loss of my | run](plots/loss.svg)".into(),
        format!("flatout resume '{}' ", run.display()),
        format!("tensorboard --logdir '{}'", run.display()),
        "continues from step 50".into(),
    ] {
        assert!(page.contains(&said), "{said:?} is not in\n{page}");
    }
    assert!(!page.contains("## Warnings") && !page.contains("MFU") && !page.contains("NaN"), "{page}");
    for name in ["loss", "lr", "grad_norm", "throughput"] {
        assert!(page.contains(&format!("(plots/{name}.svg)")));
        let svg = fs::read_to_string(run.join(format!("plots/{name}.svg"))).unwrap();
        assert!(svg.contains("class=\"line c0\"") && svg.ends_with("</svg>\n"), "{name}");
        assert!(!svg.contains("NaN"), "{name}");
    }
    let loss = fs::read_to_string(run.join("plots/loss.svg")).unwrap();
    for said in ["training, smoothed", "held-out", "floor"] {
        assert!(loss.contains(&format!(">{said}</text>")), "{said}");
    }
    assert_eq!(loss.matches("<circle").count(), 3, "two evaluations and the legend");
}
