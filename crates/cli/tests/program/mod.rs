//! Runs the program as users do: in a directory, with arguments, returning the exit code and both output streams.

use std::path::Path;
use std::process::{Command, Stdio};

/// Overrides of `tiny` that make a run short.
pub const SMALL: [&str; 10] = [
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=48",
    "model.context=16",
    "train.steps=6",
    "train.batch=4",
    "schedule.warmup_steps=2",
    "eval.rows=4",
];

/// The exit code and output of a command.
#[derive(Debug)]
pub struct CommandOutput {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl CommandOutput {
    /// Asserts that the command refused its input: exit code 2, nothing on standard output, and one line with all these parts on
    /// standard error.
    pub fn assert_refused(&self, parts: &[&str]) {
        assert_eq!((self.code, self.out.as_str()), (Some(2), ""), "{self:?}");
        let line = self.err.strip_suffix('\n').unwrap_or_else(|| panic!("a whole line, not {:?}", self.err));
        assert!(line.starts_with("flatout: ") && !line.contains('\n'), "one line, not {line:?}");
        for part in parts {
            assert!(line.contains(part), "{line:?} lacks {part:?}");
        }
    }
}

/// The command, not yet started, with all its streams captured.
pub fn flatout(dir: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flatout"));
    command.current_dir(dir).args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs the program to its end.
pub fn execute(dir: &Path, words: &[&str]) -> CommandOutput {
    let output = flatout(dir, words).output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    CommandOutput { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// Asserts that the command with these words is refused with a sentence that contains this part.
pub fn refused(dir: &Path, words: &[&str], part: &str) {
    let result = execute(dir, words);
    // Shown only if the assertion fails.
    println!("{words:?}");
    result.assert_refused(&[part]);
}

/// `train tiny` with the overrides that make it small, followed by these words.
pub fn small_train<'a>(words: &[&'a str]) -> Vec<&'a str> {
    ["train", "tiny"].iter().chain(&SMALL).chain(words).copied().collect()
}
