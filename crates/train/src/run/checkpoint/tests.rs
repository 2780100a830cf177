use super::*;

/// Several writes long, so that a save can also stop between them.
const ELEMENTS: usize = WRITE_BYTES * 5 / 2 / 4;

fn state(step: u64) -> State {
    let cursor = serde_json::json!({ "epoch": 0, "row": 32 * step, "share": 0.1 + 0.2 });
    State { step, cursor, counters: BTreeMap::from([("applied".into(), step), ("skipped".into(), u64::MAX)]) }
}

/// Bytes that depend on the step.
fn weights(step: u64) -> Vec<u8> {
    (0..4 * ELEMENTS).map(|i| (i as u64).wrapping_mul(step + 1) as u8).collect()
}

fn newest(keep: usize) -> Retention {
    Retention { keep, keep_every: 0, best: None, prune: true }
}

fn save_step(checkpoints: &Path, step: u64, kept: &Retention, watch: Watch) -> io::Result<PathBuf> {
    let bytes = weights(step);
    let tensors = [
        Tensor { name: "weights", dtype: Dtype::F32, shape: &[ELEMENTS], bytes: &bytes },
        Tensor { name: "count", dtype: Dtype::I32, shape: &[1], bytes: &(step as i32).to_le_bytes() },
    ];
    let path = write(checkpoints, &state(step), &tensors, watch)?;
    retention::apply(checkpoints, step, kept, watch)?;
    Ok(path)
}

fn save_whole(checkpoints: &Path, step: u64, keep: usize) -> PathBuf {
    save_step(checkpoints, step, &newest(keep), &mut |_| Ok(())).unwrap()
}

/// The step of the newest whole checkpoint, after checking that it holds what that step saved.
fn latest_step(checkpoints: &Path) -> Option<u64> {
    let Whole { step, path } = latest(checkpoints).unwrap().whole?;
    let (found, tensors) = open(&path).unwrap();
    assert_eq!(found, state(step));
    let mut bytes = vec![0; 4 * ELEMENTS];
    tensors.read_into("weights", &mut bytes).unwrap();
    assert!(bytes == weights(step), "the weights of step {step}");
    Some(step)
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_run_without_checkpoints_has_none() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().join("checkpoints");
    assert_eq!(latest(&checkpoints).unwrap(), Latest::default());
    clean(&checkpoints).unwrap();
}

#[test]
fn saved_state_reads_back_and_the_newest_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    for step in [5, 9, 10, 100] {
        assert_eq!(save_whole(folder.path(), step, 2), folder.path().join(format!("step-{step}")));
        assert_eq!(latest_step(folder.path()), Some(step));
    }
    assert_eq!(names(folder.path()), ["step-10", "step-100"]);
    assert_eq!(names(&folder.path().join("step-100")), [MARKER, STATE, TENSORS]);
    save_whole(folder.path(), 101, 1);
    assert_eq!(names(folder.path()), ["step-101"]);
}

/// Stops a save before each of its operations in turn. Until the marker is written the older checkpoint counts, afterwards the
/// new one; the next save of that step always succeeds.
#[test]
fn a_save_that_stops_anywhere_leaves_a_whole_checkpoint() {
    for keep in [1, 2] {
        let mut visited = Vec::new();
        for stop_at in 0.. {
            let folder = tempfile::tempdir().unwrap();
            save_whole(folder.path(), 5, 2);
            save_whole(folder.path(), 10, 2);
            let mut operations = Vec::new();
            let saved = save_step(folder.path(), 20, &newest(keep), &mut |operation| {
                if operations.len() == stop_at {
                    return Err(io::Error::other("crash"));
                }
                operations.push(operation);
                Ok(())
            });
            let marked = operations.contains(&"write the marker");
            assert_eq!(
                latest_step(folder.path()),
                Some(if marked { 20 } else { 10 }),
                "after {operations:?}"
            );

            clean(folder.path()).unwrap();
            assert!(names(folder.path()).iter().all(|name| name.starts_with("step-")));
            save_whole(folder.path(), 20, keep);
            assert_eq!(latest_step(folder.path()), Some(20), "again after {operations:?}");
            if saved.is_ok() {
                visited = operations;
                break;
            }
        }
        assert!(visited.iter().filter(|operation| **operation == "write tensors").count() > 2);
        assert!(visited.ends_with(&["take an old checkpoint away", "remove it"]), "{visited:?}");
    }
}

#[test]
fn every_damage_is_noticed_and_named() {
    type Damage = fn(&mut Vec<u8>);
    let damages: [(&str, &str, Damage); 9] = [
        (TENSORS, "bytes and should have", |bytes| bytes.truncate(bytes.len() - 1)),
        (TENSORS, "bytes and should have", |bytes| bytes.clear()),
        (TENSORS, "is not what was saved", |bytes| *bytes.last_mut().unwrap() ^= 1),
        (TENSORS, "is not what was saved", |bytes| bytes.fill(0)),
        (STATE, "is not what was saved", |bytes| bytes.truncate(10)),
        (STATE, "is not what was saved", |bytes| bytes[3] ^= 0x20),
        (MARKER, "is not what was saved", |bytes| bytes[7] ^= 1),
        (MARKER, "was not finished", |bytes| bytes.truncate(5)),
        (MARKER, "was not finished", |bytes| bytes.clear()),
    ];
    let folder = tempfile::tempdir().unwrap();
    save_whole(folder.path(), 10, 2);
    for (file, reason, damage) in damages {
        let path = save_whole(folder.path(), 20, 2);
        let mut bytes = fs::read(path.join(file)).unwrap();
        damage(&mut bytes);
        fs::write(path.join(file), bytes).unwrap();
        assert_eq!(latest_step(folder.path()), Some(10), "{file}");
        let skipped = latest(folder.path()).unwrap().skipped;
        assert!(skipped.len() == 1 && skipped[0].0 == path && skipped[0].1.contains(reason), "{skipped:?}");
    }
    for file in [TENSORS, STATE, MARKER] {
        let path = save_whole(folder.path(), 20, 2);
        fs::remove_file(path.join(file)).unwrap();
        assert_eq!(latest_step(folder.path()), Some(10), "without {file}");
    }
    save_whole(folder.path(), 20, 2);
    assert_eq!(latest_step(folder.path()), Some(20), "a broken one is replaced");
}

#[test]
fn a_renamed_folder_is_not_another_step() {
    let folder = tempfile::tempdir().unwrap();
    let path = save_whole(folder.path(), 10, 2);
    fs::rename(path, folder.path().join("step-11")).unwrap();
    let sentence = latest(folder.path()).unwrap_err().0;
    assert!(sentence.contains("no checkpoint of this run is whole") && sentence.contains("it holds step 10"));
}

#[test]
fn pruning_never_removes_the_last_whole_one() {
    let folder = tempfile::tempdir().unwrap();
    save_whole(folder.path(), 10, 1);
    let broken = save_whole(folder.path(), 30, 2);
    fs::write(broken.join(TENSORS), "broken").unwrap();
    save_whole(folder.path(), 20, 1);
    assert_eq!(latest_step(folder.path()), Some(20), "a broken newer one does not count as the one to keep");
    assert_eq!(names(folder.path()), ["step-20", "step-30"]);
    save_whole(folder.path(), 30, 1);
    assert_eq!(names(folder.path()), ["step-30"]);
    assert_eq!(latest_step(folder.path()), Some(30));
}

#[test]
fn another_format_is_an_error_and_not_skipped() {
    let folder = tempfile::tempdir().unwrap();
    save_whole(folder.path(), 10, 2);
    let path = save_whole(folder.path(), 20, 2);
    let text = fs::read_to_string(path.join(STATE)).unwrap().replace("\"format\": 2", "\"format\": 7");
    fs::write(path.join(MARKER), hex(xxh3_128(text.as_bytes()))).unwrap();
    fs::write(path.join(STATE), text).unwrap();
    let sentence = latest(folder.path()).unwrap_err().0;
    assert!(
        sentence.contains("has checkpoint format 7 and this version reads formats up to 3"),
        "{sentence}"
    );
}

#[test]
fn a_failed_save_names_the_file_and_removes_the_partial_folder() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = save(&file, &state(1), &[], &newest(1), &mut |_| Ok(())).unwrap_err();
    assert!(error.to_string().starts_with(&file.display().to_string()), "{error}");
    let checkpoints = folder.path().join("checkpoints");
    fs::create_dir(&checkpoints).unwrap();
    fs::write(checkpoints.join("step-1"), "in the way").unwrap();
    save(&checkpoints, &state(1), &[], &newest(1), &mut |_| Ok(())).unwrap_err();
    assert_eq!(names(&checkpoints), ["step-1"]);
}

#[test]
fn milestones_and_the_best_stay() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let losses = [(10, 3.0), (20, 2.0), (30, 2.5), (40, 2.25), (50, 2.0), (60, 1.5), (70, 1.75), (80, 1.5)];
    let mut lowest: Option<Best> = None;
    for (step, loss) in losses {
        if lowest.is_none_or(|best| loss < best.loss) {
            lowest = Some(Best { step, loss, score: None });
        }
        let kept = Retention { keep: 1, keep_every: 30, best: lowest, prune: true };
        save_step(dir, step, &kept, &mut |_| Ok(())).unwrap();
        assert_eq!(best(dir), lowest);
        if step == 50 {
            assert_eq!(names(dir), ["best.json", "step-20", "step-30", "step-50"]);
        }
    }
    assert_eq!(names(dir), ["best.json", "step-30", "step-60", "step-80"]);
    let kept = Retention { keep: 1, keep_every: 0, best: None, prune: false };
    save_step(dir, 90, &kept, &mut |_| Ok(())).unwrap();
    assert_eq!(names(dir), ["best.json", "step-30", "step-60", "step-80", "step-90"], "none is removed");
    fs::remove_dir_all(dir.join("step-60")).unwrap();
    assert_eq!(best(dir), None, "a best one that is gone does not count");
    forget_after(dir, 30).unwrap();
    assert_eq!(names(dir), ["best.json", "step-30"]);
    fs::write(dir.join("best.json"), "{").unwrap();
    assert_eq!(best(dir), None);
}

#[test]
fn only_wanted_states_are_found() {
    let folder = tempfile::tempdir().unwrap();
    save_whole(folder.path(), 10, 2);
    save_whole(folder.path(), 20, 2);
    let found = latest_where(folder.path(), |state| state.step < 20).unwrap();
    assert_eq!(found.whole.unwrap().step, 10);
    assert_eq!(latest_where(folder.path(), |_| false).unwrap(), Latest::default());
}

/// A run whose finished checkpoints are all damaged is refused; one that never finished a checkpoint begins anew.
#[test]
fn a_run_whose_checkpoints_are_damaged_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = save_whole(folder.path(), 10, 2);
    fs::remove_file(path.join(TENSORS)).unwrap();
    let sentence = latest(folder.path()).unwrap_err().0;
    assert!(
        sentence.contains("no checkpoint of this run is whole") && sentence.contains(TENSORS),
        "{sentence}"
    );
    fs::remove_file(path.join(MARKER)).unwrap();
    assert_eq!(latest(folder.path()).unwrap().whole, None);
}

#[test]
fn a_checkpoint_of_format_1_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = save_whole(folder.path(), 10, 2);
    let text = fs::read_to_string(path.join(STATE)).unwrap().replace("\"format\": 2", "\"format\": 1");
    fs::write(path.join(MARKER), hex(xxh3_128(text.as_bytes()))).unwrap();
    fs::write(path.join(STATE), text).unwrap();
    let found = latest(folder.path()).unwrap().whole.unwrap();
    let counters = open(&found.path).unwrap().0.counters;
    assert_eq!((counters["skipped"], counters["skipped_in_a_row"], counters["applied"]), (0, 0, 10));
}
