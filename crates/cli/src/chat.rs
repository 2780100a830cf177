//! `chat`: a conversation with a run or a model, line by line, in a terminal or through a pipe.

use std::fs::OpenOptions;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use flatout_serve::Model;
use flatout_serve::api::chat::{ContentPart, Message};
use flatout_train::infer::generate::{Finish, Generator, GeneratorCapacity, Prompt, Request};
use flatout_train::run::signal::{self, Interrupts};
use flatout_train::{Failure, UserError};
use serde_json::json;

use crate::args::SamplingArgs;
use crate::model;
use crate::screen::{Screen, count};

#[derive(Parser)]
pub struct Chat {
    /// A run (its directory or its name under `runs`, or RUN@step), or a folder in the Hugging Face layout.
    #[arg(value_name = "RUN | FOLDER")]
    pub model: PathBuf,
    /// Switches, such as backend=cpu or precision=bf16; data.template names another chat template.
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// The system message, before all others.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// The most tokens of the conversation, up to the model's context. The oldest turns of a longer one are dropped.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub tokens: usize,
    /// The most tokens of an answer; by default as many as there is room for.
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<usize>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Random seed: the same seed gives the same answers to the same lines.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

const HELP: &str = "/reset starts a new conversation, /system TEXT sets the system message, /save FILE appends the conversation to a JSONL \
                    file, /quit or Ctrl-D ends, Ctrl-C stops an answer; to send a line that begins with /, type //";

/// The context is divided by this for the share that is kept for the answer.
const ANSWER_SHARE: usize = 4;

pub fn chat(args: &Chat, screen: &Screen) -> Result<ExitCode, Failure> {
    let refused = |sentence: String| Err(Failure::User(UserError(sentence)));
    args.sampling.check()?;
    if args.tokens < 2 || args.max_tokens == Some(0) {
        return refused("--tokens must be at least 2 and --max-tokens at least 1".into());
    }
    let loaded = model::open(&args.model, &args.overrides)?;
    let talks = Model::of(&loaded, args.tokens.min(loaded.positions))?;
    if let Some(why) = talks.chat_error() {
        return refused(format!("{} cannot chat: {why}", args.model.display()));
    }
    let device = model::device(&loaded)?;
    let of_averages = model::of_averages(&loaded);
    let generator = Generator::new(loaded, &device, GeneratorCapacity { sequences: 1, tokens: args.tokens })?;
    let interrupts = signal::interrupts().map_err(Failure::io("signals"))?;
    screen.note(format!(
        "{}{of_averages}: {} tokens of context; {HELP}",
        talks.name,
        count(generator.capacity() as u64)
    ));
    let mut talk = Talk {
        args,
        screen,
        model: talks,
        generator,
        interrupts,
        system: args.system.clone(),
        turns: vec![],
    };
    let is_terminal = io::stdin().is_terminal() && !screen.json;
    for line in (Lines { is_terminal }) {
        let line = line.map_err(Failure::io("standard input"))?;
        match talk.take(line.trim_end_matches(['\n', '\r']))? {
            Next::Go => {}
            Next::Quit => break,
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Lines of standard input, with a prompt before each on a terminal.
struct Lines {
    is_terminal: bool,
}

impl Iterator for Lines {
    type Item = io::Result<String>;

    fn next(&mut self) -> Option<io::Result<String>> {
        if self.is_terminal {
            let _ = write!(io::stderr(), "> ");
        }
        let mut line = vec![];
        match io::stdin().lock().read_until(b'\n', &mut line) {
            Ok(0) => {
                if self.is_terminal {
                    let _ = writeln!(io::stderr());
                }
                None
            }
            Ok(_) => Some(Ok(String::from_utf8_lossy(&line).into_owned())),
            Err(error) => Some(Err(error)),
        }
    }
}

enum Next {
    Go,
    Quit,
}

struct Talk<'a> {
    args: &'a Chat,
    screen: &'a Screen,
    model: Model,
    generator: Generator,
    interrupts: Interrupts,
    system: Option<String>,
    /// Messages of the user and the assistant, alternating.
    turns: Vec<(&'static str, String)>,
}

impl Talk<'_> {
    fn take(&mut self, line: &str) -> Result<Next, Failure> {
        let Some(command) = line.strip_prefix('/') else {
            if !line.trim().is_empty() {
                self.ask(line)?;
            }
            return Ok(Next::Go);
        };
        let (word, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match word {
            "quit" | "exit" => return Ok(Next::Quit),
            "reset" => {
                self.turns.clear();
                self.screen.note("a new conversation begins");
            }
            "system" => {
                self.system = Some(rest.to_string()).filter(|rest| !rest.is_empty());
                self.screen.note(match &self.system {
                    Some(_) => "the system message is set",
                    None => "the system message is removed",
                });
            }
            "save" if rest.is_empty() => self.screen.note("name a file, as in /save talk.jsonl"),
            "save" => match self.save(Path::new(rest)) {
                Ok(()) => self.screen.note(format!("the conversation was saved to {rest}")),
                Err(error) => self.screen.note(format!("{rest} cannot be written: {error}")),
            },
            "help" => self.screen.note(HELP),
            _ if command.starts_with('/') => self.ask(command)?,
            _ => self.screen.note(format!("there is no command /{word}: {HELP}")),
        }
        Ok(Next::Go)
    }

    /// Says, also with --quiet, why there is no answer, or why it leaves out a part of the conversation.
    fn tell(&self, sentence: &str) {
        match self.screen.json {
            true => self.screen.json_line(&json!({ "note": sentence }).to_string()),
            false => self.screen.always(sentence),
        }
    }

    /// Answers a message of the user.
    fn ask(&mut self, text: &str) -> Result<(), Failure> {
        self.turns.push(("user", text.into()));
        let Some((prompt, end)) = self.prompt()? else {
            self.turns.pop();
            return Ok(());
        };
        let max_tokens = self.args.max_tokens.unwrap_or(usize::MAX);
        let sampling = self.args.sampling.options(self.args.seed, max_tokens);
        // Every turn has random numbers of its own.
        let copy = self.turns.len() as u32 / 2;
        let stops = end.into_iter().collect();
        let request = Request { copy, stops, text: Some(vec![]), ..Request::new(prompt, sampling) };
        let id = self.generator.submit(request)?;
        self.interrupts.take();
        let (mut answer, mut ended) = (String::new(), None);
        while self.generator.is_busy() {
            for news in self.generator.advance()? {
                // White space before an answer belongs to the template.
                let text = if answer.is_empty() { news.text.trim_start() } else { &news.text };
                answer += text;
                if !self.screen.json {
                    self.screen.piece(text);
                }
                ended = news.finish;
            }
            if self.interrupts.take() {
                self.generator.cancel(id);
            }
        }
        if self.screen.json {
            let finish = match ended {
                None => "interrupted",
                Some(Finish::Length) => "length",
                Some(_) => "stop",
            };
            self.screen
                .json_line(&json!({ "role": "assistant", "content": answer, "finish": finish }).to_string());
        } else {
            self.screen.piece("\n");
            match ended {
                None => self.screen.note("(stopped)"),
                Some(Finish::Length) => self.screen.note("(cut off: there is no room for more)"),
                Some(_) => {}
            }
        }
        self.turns.push(("assistant", answer));
        Ok(())
    }

    /// The tokens of the conversation, without its oldest turns if it is too long; `None` if the last message alone is too long.
    fn prompt(&mut self) -> Result<Option<(Prompt, Option<u32>)>, Failure> {
        let capacity = self.generator.capacity();
        let kept = self.args.max_tokens.unwrap_or(capacity).min(capacity / ANSWER_SHARE).max(1);
        let mut dropped = 0;
        loop {
            let message = |(role, text): (&'static str, &String)| Message {
                role,
                parts: vec![ContentPart::Text(text.clone())],
            };
            let turns = self.turns.iter().map(|(role, text)| message((role, text)));
            let messages: Vec<Message> =
                self.system.iter().map(|text| message(("system", text))).chain(turns).collect();
            let (prompt, end) = match self.model.conversation(&messages) {
                Ok(found) => (found.prompt, found.end),
                Err(error) => {
                    self.tell(&error.message);
                    return Ok(None);
                }
            };
            let count = prompt.tokens.len();
            if count + kept <= capacity {
                if dropped > 0 {
                    self.tell(&format!("the context is full: the oldest {dropped} messages are left out"));
                }
                return Ok(Some((prompt, end)));
            }
            if self.turns.len() == 1 {
                self.tell(&format!(
                    "the message has {count} tokens, too many for a context of {capacity} of which {kept} are kept for the answer: shorten it"
                ));
                return Ok(None);
            }
            self.turns.drain(..2);
            dropped += 2;
        }
    }

    /// Appends the conversation as a row that `data.task=chat` reads.
    fn save(&self, path: &Path) -> io::Result<()> {
        let message = |role: &str, text: &String| json!({ "role": role, "content": text });
        let system = self.system.iter().map(|text| message("system", text));
        let turns = self.turns.iter().map(|(role, text)| message(role, text));
        let row = json!({ "messages": system.chain(turns).collect::<Vec<_>>() });
        writeln!(OpenOptions::new().create(true).append(true).open(path)?, "{row}")
    }
}
