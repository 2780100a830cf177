//! A run's directory: `config.toml` as requested, `resolved.toml`, `events.jsonl`, `checkpoints/`, and the lock of the process
//! that writes them.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use flatout_settings::choice;

use crate::Failure;
use crate::UserError;
use crate::config::resolved::Resolved;
use crate::config::{Config, nearest};
use crate::refuse;
use flatout_data::{Vocabulary, durable};

const CONFIG: &str = "config.toml";
const RESOLVED: &str = "resolved.toml";
const LOCK: &str = "lock";
/// Pause between attempts to lock a run, and their number: a reader that checks whether it is running holds the lock briefly.
const LOCK_RETRY: Duration = Duration::from_millis(10);
const LOCK_ATTEMPTS: u32 = 3;

/// A run that this process writes. The lock belongs to the operating system and ends with the process, however that ends, so a
/// killed run is free immediately.
#[derive(Debug)]
pub struct Run {
    dir: PathBuf,
    /// Folders that were created for it, outermost first.
    created: Vec<PathBuf>,
    /// Held by rank 0 alone.
    _lock: Option<File>,
}

choice! {
    /// The value of `--resume`: the action where the directory already holds a run.
    pub enum Resume {
        /// Refuse.
        Never = "never",
        /// Continue it; begin a new run if there is none.
        Auto = "auto",
        /// Continue it; refuse if there is none.
        Must = "must",
    }
}

/// Whether the run is new or continued.
#[derive(Debug)]
pub enum Entered {
    Fresh(Run),
    Existing(Run),
}

impl Run {
    /// The next free `<recipe>-<n>` under `runs`.
    pub fn allocate(runs: &Path, recipe: &str) -> Result<Run, UserError> {
        let mut created = create(runs)?;
        let numbered = |name: &str| name.strip_prefix(recipe)?.strip_prefix('-')?.parse::<u64>().ok();
        let entries = fs::read_dir(runs).map_err(cannot("be read", runs))?;
        let taken =
            entries.flatten().filter_map(|entry| numbered(&entry.file_name().to_string_lossy())).max();
        let mut number = taken.map_or(1, |n| n.saturating_add(1));
        loop {
            let dir = runs.join(format!("{recipe}-{number}"));
            match fs::create_dir(&dir) {
                Ok(()) => {
                    created.push(dir.clone());
                    return Ok(Run { _lock: Some(lock(&dir)?), dir, created });
                }
                // Another process took the number first.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(cannot("be created", &dir)(error)),
            }
        }
    }

    /// The run in a directory that the user named, new or continued as `resume` says.
    pub fn enter(dir: &Path, resume: Resume) -> Result<Entered, UserError> {
        let mut created = vec![];
        if !is_run(dir) {
            if resume == Resume::Must {
                refuse!("there is no run in {}: nothing to resume; {}", dir.display(), other_runs(dir));
            }
            created = create(dir)?;
            let mut entries = fs::read_dir(dir).map_err(cannot("be read", dir))?.flatten();
            let ours = |name: &str| name == LOCK || name.starts_with(CONFIG) || name.starts_with(RESOLVED);
            if entries.any(|entry| !ours(&entry.file_name().to_string_lossy())) {
                refuse!("{} is not empty and holds no run: give --run a directory of its own", dir.display());
            }
        }
        let run = Run { _lock: Some(lock(dir)?), dir: dir.to_path_buf(), created };
        match (is_run(dir), resume) {
            (false, _) => {
                // A process that was killed before the run began may have had another request.
                let left = dir.join(RESOLVED);
                match fs::remove_file(&left) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        Err(cannot("be removed", &left)(error))
                    }
                    _ => Ok(Entered::Fresh(run)),
                }
            }
            (true, Resume::Never) => {
                refuse!(
                    "{} holds a run already: continue it with `{}`, or give another --run",
                    dir.display(),
                    run.resume_command()
                )
            }
            (true, _) => Ok(Entered::Existing(run)),
        }
    }

    /// A run to continue.
    pub fn reopen(dir: &Path) -> Result<Run, UserError> {
        match Run::enter(dir, Resume::Must)? {
            Entered::Existing(run) => Ok(run),
            Entered::Fresh(_) => refuse!("the run in {} has just been removed", dir.display()),
        }
    }

    /// The run as the other ranks see it, which read the directory and write nothing.
    pub fn follow(dir: &Path) -> Run {
        Run { dir: dir.to_path_buf(), created: vec![], _lock: None }
    }

    /// The file that holds the process id of the writer.
    pub fn lock_path(&self) -> PathBuf {
        self.dir.join(LOCK)
    }

    /// Removes a run that never began, if nothing but its lock is in it, and the folders created for it.
    pub fn discard(&self) {
        if self._lock.is_some() && !is_run(&self.dir) {
            let _ = fs::remove_file(self.dir.join(LOCK));
            // A folder into which another process has put something stays, as do its parents.
            self.created.iter().rev().for_each(|folder| drop(fs::remove_dir(folder)));
        }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn events_path(&self) -> PathBuf {
        self.dir.join("events.jsonl")
    }

    pub fn checkpoints_dir(&self) -> PathBuf {
        checkpoints_dir(&self.dir)
    }

    /// The resolved config that the run began with; empty for a new run and for runs of earlier versions.
    pub fn resolved(&self) -> Result<Resolved, UserError> {
        resolved(&self.dir)
    }

    /// Saves the request and the resolved config, each atomically and only if it is not there already. From then on the directory
    /// holds a run.
    pub fn save_config(&self, asked: &Config, resolved: &Resolved) -> Result<(), UserError> {
        for (name, text) in [(RESOLVED, resolved.to_toml()), (CONFIG, asked.to_toml())] {
            let path = self.dir.join(name);
            durable::ensure(&path, text.as_bytes()).map_err(cannot("be written", &path))?;
        }
        Ok(())
    }

    /// Stores the tokeniser that the run is trained with. It is written once and never changed: everything that reads the run
    /// needs it.
    pub fn keep_tokenizer(&self, vocabulary: &Vocabulary) -> Result<(), Failure> {
        let path = tokenizer_path(&self.dir);
        if !path.exists() {
            return Ok(vocabulary.save(&path)?);
        }
        let is_kept = fs::read(&path).is_ok_and(|kept| kept == vocabulary.to_json().as_bytes())
            || Vocabulary::load(&path)?.gives_the_same_tokens(vocabulary);
        match is_kept {
            true => Ok(()),
            false => Err(Failure::User(UserError(format!(
                "{} is not the tokeniser of the run's data any more: restore the one it began with, or begin a new run",
                path.display()
            )))),
        }
    }

    /// The command that continues this run.
    pub fn resume_command(&self) -> String {
        format!("flatout resume {}", quoted(&self.dir))
    }
}

/// A path quoted for a shell.
pub fn quoted(path: &Path) -> String {
    let path = path.display().to_string();
    let plain =
        path.chars().all(|c| c.is_alphanumeric() || "/._-+,:@%".contains(c)) && !path.starts_with('-');
    if plain { path } else { format!("'{}'", path.replace('\'', r"'\''")) }
}

/// The folder of runs, unless another is given.
pub const RUNS: &str = "runs";

/// The run that an argument names: a directory, or a name below [`RUNS`], with or without `@step`.
pub fn named(path: &Path) -> PathBuf {
    let text = path.to_string_lossy();
    let name = text.rsplit_once('@').map_or(&*text, |(name, _)| name);
    let is_there = path.exists() || Path::new(name).exists();
    if !is_there && is_run(&Path::new(RUNS).join(name)) { Path::new(RUNS).join(path) } else { path.into() }
}

/// The error for a directory without a run.
pub fn no_run(dir: &Path) -> UserError {
    UserError(format!("there is no run in {}; {}", dir.display(), other_runs(dir)))
}

/// The end of a sentence about a directory without a run: a run of a similar name, beside it or below [`RUNS`], or else the command
/// that lists the runs.
pub fn other_runs(dir: &Path) -> String {
    let path = dir.to_string_lossy();
    let path = path.rsplit_once('@').map_or(&*path, |(path, _)| path);
    let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy();
    let parent = Path::new(path).parent().unwrap_or(Path::new(""));
    for folder in [parent, Path::new(RUNS)] {
        let readable = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let entries = fs::read_dir(readable).into_iter().flatten().flatten();
        let runs = entries.filter(|entry| is_run(&entry.path()));
        let mut runs: Vec<String> =
            runs.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        runs.sort();
        let named = runs.iter().map(String::as_str);
        let begins = |run: &&str| name.len() > 1 && run.starts_with(&*name);
        if let Some(meant) = nearest(&name, named.clone()).or_else(|| named.clone().find(begins)) {
            return format!("did you mean {}?", folder.join(meant).display());
        }
        if folder != Path::new(RUNS) && !runs.is_empty() {
            return format!("`flatout runs {}` lists the runs there", readable.display());
        }
    }
    "`flatout runs` lists the runs".into()
}

/// Whether the directory holds a run, complete or not.
pub fn is_run(dir: &Path) -> bool {
    dir.join(CONFIG).is_file()
}

/// Whether a process writes the run at this moment. The check holds the lock for the duration of the call.
pub fn is_running(dir: &Path) -> bool {
    let opened = File::open(dir.join(LOCK));
    opened.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// The folder of a run with the files that lay beside the initial weights.
pub const BESIDE: &str = "source";

/// The tokeniser a run was trained with.
pub fn tokenizer_path(run: &Path) -> PathBuf {
    run.join("tokenizer.json")
}

pub fn checkpoints_dir(dir: &Path) -> PathBuf {
    dir.join("checkpoints")
}

/// The requested config of a run and its resolved config. Runs of earlier versions store both in `config.toml`.
pub fn asked_and_resolved(dir: &Path) -> Result<(Config, Resolved), UserError> {
    if !is_run(dir) {
        return Err(no_run(dir));
    }
    let path = dir.join(CONFIG);
    let text = fs::read_to_string(&path).map_err(cannot("be read", &path))?;
    Ok((Config::parse(&text, &path.display().to_string())?, resolved(dir)?))
}

/// The resolved config of a run, as far as it was written.
pub fn resolved(dir: &Path) -> Result<Resolved, UserError> {
    let path = dir.join(RESOLVED);
    if !path.is_file() {
        return Ok(Resolved::default());
    }
    let text = fs::read_to_string(&path).map_err(cannot("be read", &path))?;
    Resolved::parse(&text, &path.display().to_string())
}

/// The config of a run including everything that was resolved.
pub fn config(dir: &Path) -> Result<Config, UserError> {
    let (asked, resolved) = asked_and_resolved(dir)?;
    Ok(resolved.over(&asked))
}

/// Creates a folder and its parents; returns those that did not exist, outermost first.
fn create(dir: &Path) -> Result<Vec<PathBuf>, UserError> {
    let missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let mut created: Vec<PathBuf> = dir.ancestors().take_while(missing).map(Path::to_path_buf).collect();
    created.reverse();
    fs::create_dir_all(dir).map_err(cannot("be created", dir))?;
    Ok(created)
}

/// Locks the directory for this process, and writes the process id into the lock file for error messages of other processes.
fn lock(dir: &Path) -> Result<File, UserError> {
    let path = dir.join(LOCK);
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let mut file = opened.map_err(cannot("be written", dir))?;
    let mut taken = file.try_lock();
    // A process that lists runs may be checking this one at the moment.
    for _ in 0..LOCK_ATTEMPTS {
        if !matches!(taken, Err(TryLockError::WouldBlock)) {
            break;
        }
        std::thread::sleep(LOCK_RETRY);
        taken = file.try_lock();
    }
    match taken {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let by = match file.read_to_string(&mut holder) {
                Ok(_) if !holder.trim().is_empty() => format!(" in process {}", holder.trim()),
                _ => String::new(),
            };
            refuse!(
                "the run in {} is still running{by}: stop it first, or give another --run",
                dir.display()
            );
        }
        Err(TryLockError::Error(error)) => return Err(cannot("be locked", &path)(error)),
    }
    let number = format!("{}\n", std::process::id());
    let written =
        file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(number.as_bytes()));
    written.map_err(cannot("be written", &path))?;
    Ok(file)
}

fn cannot<'a>(what: &'a str, path: &'a Path) -> impl Fn(io::Error) -> UserError + 'a {
    move |error| UserError(format!("{} cannot {what}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes;

    fn tiny() -> Config {
        recipes::resolve("tiny", &[], &[]).unwrap()
    }

    fn fresh(dir: &Path) -> Run {
        match Run::enter(dir, Resume::Never).unwrap() {
            Entered::Fresh(run) => run,
            Entered::Existing(_) => panic!("{} holds a run", dir.display()),
        }
    }

    /// A process that is killed between writing the two files leaves the first.
    #[test]
    fn a_run_that_never_began_is_resolved_anew() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("run");
        let resolved = Resolved { micro_batch: Some(3), ..Resolved::default() };
        fresh(&dir).save_config(&tiny(), &resolved).unwrap();
        fs::remove_file(dir.join(CONFIG)).unwrap();
        let run = fresh(&dir);
        assert_eq!(run.resolved().unwrap(), Resolved::default());
        let other = Resolved { micro_batch: Some(5), ..Resolved::default() };
        run.save_config(&tiny(), &other).unwrap();
        assert_eq!(run.resolved().unwrap(), other);
    }

    #[test]
    fn runs_are_numbered_after_the_highest_there_is() {
        let folder = tempfile::tempdir().unwrap();
        let runs = folder.path().join("runs");
        assert_eq!(Run::allocate(&runs, "tiny").unwrap().dir(), runs.join("tiny-1"));
        for name in ["tiny-7", "tiny-x", "tiny-large-9", "other-12"] {
            fs::create_dir(runs.join(name)).unwrap();
        }
        assert_eq!(Run::allocate(&runs, "tiny").unwrap().dir(), runs.join("tiny-8"));
        assert_eq!(Run::allocate(&runs, "tiny-large").unwrap().dir(), runs.join("tiny-large-10"));
    }

    #[test]
    fn an_existing_run_is_refused_with_the_command_that_continues_it() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("my run");
        let config_of_run = tiny();
        fresh(&dir).save_config(&config_of_run, &Resolved::default()).unwrap();
        let sentence = Run::enter(&dir, Resume::Never).unwrap_err().0;
        assert!(sentence.contains(&format!("`flatout resume '{}'`", dir.display())), "{sentence}");
        for resume in [Resume::Auto, Resume::Must] {
            assert!(matches!(Run::enter(&dir, resume), Ok(Entered::Existing(_))));
        }
        assert_eq!(Run::reopen(&dir).unwrap().dir(), dir);
        assert_eq!(config(&dir).unwrap(), config_of_run);
    }

    #[test]
    fn discarding_a_run_keeps_everything_that_existed_before() {
        let folder = tempfile::tempdir().unwrap();
        fresh(&folder.path().join("a/b/c")).discard();
        Run::allocate(&folder.path().join("runs"), "tiny").unwrap().discard();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let named = folder.path().join("named");
        fs::create_dir(&named).unwrap();
        fresh(&named).discard();
        assert_eq!(fs::read_dir(&named).unwrap().count(), 0);
        let [first, second] =
            ["tiny"; 2].map(|name| Run::allocate(&folder.path().join("runs"), name).unwrap());
        first.discard();
        assert!(second.dir().is_dir(), "another's run stays");
    }

    #[test]
    fn where_there_is_no_run() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("none");
        assert!(Run::reopen(&dir).unwrap_err().0.contains("nothing to resume"));
        assert!(config(&dir).unwrap_err().0.contains("there is no run in"));
        assert!(config(&dir).unwrap_err().0.ends_with("; `flatout runs` lists the runs"));
        let begin = |name: &str| {
            let run = folder.path().join(format!("kept/{name}"));
            fs::create_dir_all(&run).unwrap();
            fs::write(run.join(CONFIG), "").unwrap();
            run
        };
        let kept = begin("tiny-1");
        for (name, meant) in [("tiny-2", &kept), ("tiyn-1@best", &kept), ("ti", &kept)] {
            let advice = other_runs(&folder.path().join("kept").join(name));
            assert_eq!(advice, format!("did you mean {}?", meant.display()));
        }
        let advice = other_runs(&folder.path().join("kept/other"));
        assert_eq!(
            advice,
            format!("`flatout runs {}` lists the runs there", folder.path().join("kept").display())
        );
        assert!(!dir.exists());
        assert!(matches!(Run::enter(&dir, Resume::Auto), Ok(Entered::Fresh(_))));
        assert!(matches!(Run::enter(&dir, Resume::Auto), Ok(Entered::Fresh(_))), "begun but for its config");
        fs::write(folder.path().join("thesis.tex"), "").unwrap();
        assert!(Run::enter(folder.path(), Resume::Auto).unwrap_err().0.contains("is not empty"));
        assert!(!folder.path().join(LOCK).exists(), "others' directories stay as they are");
    }

    #[test]
    fn one_process_at_a_time_writes_a_run() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("run");
        let held = fresh(&dir);
        held.save_config(&tiny(), &Resolved::default()).unwrap();
        let sentence = Run::reopen(&dir).unwrap_err().0;
        let holder = format!("is still running in process {}", std::process::id());
        assert!(sentence.contains(&holder), "{sentence}");
        assert!(is_running(&dir));
        drop(held);
        assert!(!is_running(&dir));
        assert!(!is_running(folder.path()), "there is no run");
        Run::reopen(&dir).unwrap();
    }

    #[test]
    fn a_directory_that_cannot_be_created_is_a_user_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        for sentence in [
            Run::allocate(&file.join("runs"), "tiny").unwrap_err().0,
            Run::enter(&file.join("run"), Resume::Never).unwrap_err().0,
        ] {
            assert!(sentence.contains("cannot be created"), "{sentence}");
        }
    }
}
