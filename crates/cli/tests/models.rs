//! `eval`, `generate`, `logits` and `export` on runs, folders and a model by its name on the hub, through the program.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::hub_server::{COMMIT, Content, HubServer};
use crate::program::{CommandOutput, execute, flatout, refused, small_train};

fn json(result: &CommandOutput) -> Value {
    assert_eq!(result.code, Some(0), "{result:?}");
    serde_json::from_str(&result.out).unwrap_or_else(|error| panic!("{error}: {result:?}"))
}

fn done(result: CommandOutput) -> CommandOutput {
    assert_eq!(result.code, Some(0), "{result:?}");
    result
}

/// A run on text, with checkpoints of steps 3 and 6.
fn text_run(dir: &Path) {
    let text: String = (0..3000).map(|i| format!("{} is the square of {i}.\n", i * i)).collect();
    fs::write(dir.join("book.txt"), text).expect("a file");
    let words = ["data.path=book.txt", "model.vocab=300", "checkpoint.every=3", "--run", "run"];
    done(execute(dir, &small_train(&words)));
}

#[test]
fn a_run_is_evaluated_exported_and_continued() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    text_run(dir);

    // The result equals the run's own evaluation of the same rows.
    let events = fs::read_to_string(dir.join("run/events.jsonl")).expect("events");
    let mut evals = events.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let last = evals.rfind(|event| event["event"] == "eval").expect("an evaluation");
    let found = json(&execute(dir, &["eval", "run", "--json"]));
    assert!(
        (found["loss"].as_f64().unwrap() - last["loss"].as_f64().unwrap()).abs() < 1e-5,
        "{found} {last}"
    );
    assert_eq!((found["step"].as_u64(), found["on"].as_str()), (Some(6), Some("held_out")));
    let (loss, perplexity) = (found["loss"].as_f64().unwrap(), found["perplexity"].as_f64().unwrap());
    assert!((loss.exp() / perplexity - 1.0).abs() < 1e-12);
    let earlier = json(&execute(dir, &["eval", "run@3", "--json"]));
    assert!(earlier["loss"].as_f64().unwrap() > loss, "step 3 was worse: {earlier}");

    // A text that is given is evaluated as a whole: every token but the first is predicted.
    let other: String = (0..200).map(|i| format!("{i} is the square of nothing.\n")).collect();
    fs::write(dir.join("other.txt"), &other).expect("a file");
    let on_other = json(&execute(dir, &["eval", "run", "data.path=other.txt", "--json"]));
    assert_eq!(on_other["on"], "all");
    assert!(on_other["tokens"].as_u64().unwrap() > 2000, "{on_other}");
    let few = json(&execute(dir, &["eval", "run", "data.path=other.txt", "eval.rows=3", "--json"]));
    assert_eq!((few["rows"].as_u64(), few["tokens"].as_u64()), (Some(3), Some(48)));

    // Bits a byte are those of all tokens over the bytes of the file.
    let bits = |found: &Value| found["metrics"]["bits_per_byte"].as_f64().expect("bits a byte");
    assert!((bits(&found) - bits(&last)).abs() < 1e-5, "{found} {last}");
    let [loss_on_other, tokens] = ["loss", "tokens"].map(|name| on_other[name].as_f64().unwrap());
    let of_file = loss_on_other * tokens / 2f64.ln() / other.len() as f64;
    assert!((bits(&on_other) / of_file - 1.0).abs() < 0.02, "{on_other}, and by the file {of_file}");

    // The exported folder is the same model.
    let exported = json(&execute(dir, &["export", "run", "--to", "out", "--json"]));
    assert_eq!(exported["architecture"], "Qwen3ForCausalLM");
    let again = json(&execute(dir, &["eval", "out", "data.path=other.txt", "--json"]));
    assert_eq!(again["tokens"], on_other["tokens"]);
    assert!((again["loss"].as_f64().unwrap() - on_other["loss"].as_f64().unwrap()).abs() < 1e-6);
    let shown = done(execute(dir, &["eval", "out", "data.path=other.txt"])).out;
    assert!(shown.contains("nats a token, perplexity") && shown.ends_with("rows of 16\n"), "{shown:?}");

    let prompts = ["--prompt", "12 is", "--prompt", "the square", "--prompt", "12 is"];
    let sampling = ["--max-tokens", "9", "--seed", "4", "--top-p", "0.9", "--top-k", "50"];
    let many = |model: &'static str| {
        let words = [&["generate", model, "--json"][..], &prompts, &sampling].concat();
        json(&execute(dir, &words))["texts"].clone()
    };
    let texts = many("run");
    assert_eq!(texts, many("out"), "a text begins with <bos> in both");
    assert!(texts[0].as_str().unwrap().starts_with("12 is") && texts[0] != texts[2], "{texts}");
    let one = [&["generate", "run", "--prompt", "the square"][..], &sampling].concat();
    let result = done(execute(dir, &one));
    let shown = |c: char| {
        let is_escaped = c.is_control() && !matches!(c, '\n' | '\t');
        if is_escaped { c.escape_default().to_string() } else { c.to_string() }
    };
    let text: String = texts[1].as_str().unwrap().chars().map(shown).collect();
    assert_eq!(result.out.strip_suffix('\n'), Some(&text[..]), "alone as among others, piece by piece");
    assert!(result.err.contains("tokens/s"), "{result:?}");
    fs::write(dir.join("prompts.txt"), "12 is\nthe square\n12 is\n").expect("a file");
    fs::write(dir.join("prompts.json"), r#"["12 is", "the square", "12 is"]"#).expect("a file");
    for file in ["prompts.txt", "prompts.json"] {
        for at_once in ["1", "2", "16"] {
            let words =
                [&["generate", "run", "--prompts", file, "--at-once", at_once, "--json"][..], &sampling];
            assert_eq!(json(&execute(dir, &words.concat()))["texts"], texts, "{file}, {at_once} at once");
        }
    }

    // Nothing is replaced without --force, and the error for a missing step lists the existing ones.
    refused(dir, &["export", "run", "--to", "out"], "out is there already");
    done(execute(
        dir,
        &["export", "run@3", "--to", "out", "--force", "--dtype", "bf16", "--shard-size", "20KB"],
    ));
    assert!(dir.join("out/model.safetensors.index.json").is_file());
    refused(dir, &["export", "run@4", "--to", "more"], "no checkpoint of step 4: there is 3, 6");
}

/// A short answer is likelier than one of many tokens, for any model.
#[test]
fn questions_with_choices_are_asked() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    text_run(dir);
    let row = |prompt: &str, right: usize| {
        format!("{{\"prompt\": \"{prompt}\", \"choices\": [\"9\", \"z q x w k\"], \"answer\": {right}}}\n")
    };
    // One prompt is longer than the model's context and loses its beginning.
    let long = "4 is the square of 2. ".repeat(30);
    let rows: String = [("81 is the square of", 0), ("", 0), (&long, 0), ("1 is", 1)]
        .map(|(prompt, right)| row(prompt, right))
        .concat();
    fs::write(dir.join("plain.jsonl"), rows).expect("a file");
    let arc = r#"{"question": "1?", "choices": {"text": ["9", "z q x w k"], "label": ["A", "B"]}, "answerKey": "A"}"#;
    fs::write(dir.join("arc.jsonl"), arc).expect("a file");
    let words = ["eval", "run", "--choices", "plain.jsonl", "--choices", "arc.jsonl"];
    let found = json(&execute(dir, &[&words[..], &["--json"]].concat()));
    let plain = &found["choices"][0];
    assert_eq!((plain["questions"].as_u64(), plain["acc"].as_f64()), (Some(4), Some(0.75)), "{found}");
    assert!((plain["acc_stderr"].as_f64().unwrap() - 0.25).abs() < 1e-12, "{found}");
    assert_eq!(
        (found["choices"][1]["form"].as_str(), found["choices"][1]["acc"].as_f64()),
        (Some("arc"), Some(1.0))
    );
    assert!(done(execute(dir, &words)).out.contains("acc 0.7500 ± 0.2500"));

    // With a tokeniser that puts nothing before a text, all of an answer to an empty prompt is still scored.
    done(execute(dir, &["export", "run", "--to", "out"]));
    let tokenizer = dir.join("out/tokenizer.json");
    let mut bare: Value = serde_json::from_slice(&fs::read(&tokenizer).expect("a file")).expect("JSON");
    bare["post_processor"] = Value::Null;
    fs::write(&tokenizer, bare.to_string()).expect("a file");
    fs::write(dir.join("empty.jsonl"), r#"{"prompt": "", "choices": ["9", "8 8 8 8"], "answer": 0}"#)
        .expect("a file");
    let of_folder = json(&execute(dir, &["eval", "out", "--choices", "empty.jsonl", "--json"]));
    assert_eq!(of_folder["choices"][0]["acc"].as_f64(), Some(1.0), "{of_folder}");

    fs::write(dir.join("bad.jsonl"), format!("{arc}\n{{\"question\": \"x\"}}\n")).expect("a file");
    let result = execute(dir, &["eval", "run", "--choices", "bad.jsonl"]);
    result.assert_refused(&["bad.jsonl, line 2", "data.on_error=skip"]);
    let skipped =
        json(&execute(dir, &["eval", "run", "--choices", "bad.jsonl", "data.on_error=skip", "--json"]));
    assert_eq!(skipped["choices"][0]["questions"], 1);
}

#[test]
fn unusable_models_and_files_are_refused() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    done(execute(dir, &small_train(&["--run", "run"])));
    fs::create_dir(dir.join("empty")).expect("a folder");
    fs::write(dir.join("ids.json"), "[[1]]").expect("a file");
    let cases: &[(&str, &str)] = &[
        ("eval nowhere", "there is no run in nowhere"),
        ("eval empty", "it has neither config.toml nor config.json"),
        ("eval run model.width=3", "`model.width` cannot change when a model is used"),
        ("eval run data.path=none.txt", "none.txt"),
        ("eval run@x", "`x` is neither"),
        ("generate run --top-p 0", "--top-p is 0 and must be above 0"),
        ("generate run --top-p 1.5", "--top-p is 1.5"),
        ("generate run --at-once 0", "--at-once is 0"),
        ("generate run --prompts none.txt", "none.txt cannot be read"),
        ("generate run --prompt zebra", "zebra"),
        ("generate run@77", "there is no checkpoint of step 77"),
        ("export nowhere --to out", "there is no run in nowhere"),
        ("export run --to out --shard-size big", "--shard-size is big"),
        ("logits run --ids none.json --out out", "none.json cannot be read"),
        ("logits nowhere --ids ids.json --out out", "there is no run in nowhere"),
    ];
    for (words, sentence) in cases {
        refused(dir, &words.split(' ').collect::<Vec<_>>(), sentence);
        assert!(!dir.join("out").exists(), "{words}");
    }
}

#[test]
fn a_model_by_its_name_is_fetched_trained_and_found_again() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    done(execute(dir, &small_train(&["--run", "first"])));
    done(execute(dir, &["export", "first", "--to", "out", "--dtype", "bf16", "--shard-size", "30KB"]));
    let mut content = Content::default();
    for entry in fs::read_dir(dir.join("out")).expect("a folder").flatten() {
        content.files.insert(entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
    }
    let server = HubServer::start(content);
    let run = |words: &[&str], offline: &str| {
        let mut command = flatout(dir, words);
        command
            .env("HF_HOME", dir.join("hf"))
            .env("HF_ENDPOINT", &server.endpoint)
            .env("HF_HUB_OFFLINE", offline);
        for name in ["HF_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH"] {
            command.env_remove(name);
        }
        let output = command.output().expect("the program starts");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        CommandOutput { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    };
    let training = [
        "train",
        "tiny",
        "model.from=org/name",
        "train.steps=3",
        "train.batch=2",
        "warmup_steps=1",
        "eval.rows=0",
        "checkpoint.every=1",
        "--run",
        "run",
        "--resume",
        "auto",
    ];
    let result = run(&training, "1");
    result.assert_refused(&["org/name is not in the cache"]);
    assert!(!dir.join("run").exists());

    // A plan needs no weights.
    assert_eq!(done(run(&["plan", "tiny", "model.from=org/name", "--json"], "0")).err, "");
    assert!(
        server.asked().iter().all(|line| !line.contains(".safetensors ")),
        "only what describes the model"
    );
    let result = done(run(&training, "0"));
    assert!(result.err.contains("fetched  model-00001-of-"), "{result:?}");
    // The config keeps the branch as it was given; resolved.toml has the commit.
    let asked = fs::read_to_string(dir.join("run/config.toml")).expect("a config");
    assert!(asked.contains("from = \"org/name\""), "{asked}");
    let resolved = fs::read_to_string(dir.join("run/resolved.toml")).expect("the resolved values");
    assert!(resolved.contains(&format!("from = \"org/name@{COMMIT}\"")), "{resolved}");

    // The same command continues without the network, although it names a branch and the run a commit.
    let longer = [&training[..], &["train.steps=5"]].concat();
    let result = done(run(&longer, "1"));
    assert!(result.err.contains("continuing after step 3"), "{result:?}");
    let result = run(&["train", "tiny", "model.from=org/none"], "0");
    result.assert_refused(&["there is no model org/none"]);
}

const BDH: &str = "
[model]
kind = \"bdh\"
head = \"tokens\"
width = 32
layers = 2
heads = 2
latent = 64
vocab = 512
context = 32
[train]
steps = 4
batch = 4
[optimizer]
lr = 1e-3
[eval]
rows = 8
";

/// BDH supports the commands of a decoder, and writes a sample at the end of the run.
#[test]
fn a_bdh_reads_and_writes_text() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    std::fs::write(dir.join("bdh.toml"), BDH).expect("a recipe");
    let done = |words: &[&str]| {
        let result = execute(dir, words);
        assert_eq!(result.code, Some(0), "{words:?}: {}", result.err);
        result.out
    };
    let out = done(&["train", "bdh.toml", "--run", "run", "backend=cpu", "train.ema=0.9"]);
    assert!(out.contains("held-out loss of the averaged weights") && out.contains("sample "), "{out}");
    let out = done(&["eval", "run", "backend=cpu"]);
    assert!(out.contains("nats a token") && out.trim_end().ends_with("(averaged weights)"), "{out}");
    assert!(!done(&["eval", "run", "backend=cpu", "train.ema=0"]).contains("averaged"));
    std::fs::write(dir.join("ids.json"), "[[1, 2, 3], [4]]").expect("ids");
    let out =
        done(&["logits", "run", "backend=cpu", "--ids", "ids.json", "--out", "l.safetensors", "--json"]);
    assert!(out.contains("\"weights\":\"average\"") || out.contains("\"weights\": \"average\""), "{out}");
    let words =
        ["generate", "run", "backend=cpu", "--prompt", "the", "--prompt", "a", "--max-tokens", "5", "--json"];
    let object: serde_json::Value = serde_json::from_str(&done(&words)).expect("one object");
    assert_eq!((object["texts"].as_array().map(Vec::len), &object["weights"]), (Some(2), &"average".into()));
    let words = ["eval", "run", "backend=cpu", "--predict", "x.csv", "--out", "y.csv"];
    refused(dir, &words, "no head of classes");
    refused(dir, &["export", "run", "--to", "out"], "");
}

/// The loss of the last evaluation in a run's log.
fn held_out(dir: &Path, run: &str) -> f64 {
    let log = fs::read_to_string(dir.join(run).join("events.jsonl")).expect("a log");
    let events = log.lines().map(|line| serde_json::from_str::<Value>(line).expect("an event"));
    let mut losses =
        events.filter(|event| event["event"] == "eval").map(|event| event["loss"].as_f64().expect("a loss"));
    losses.next_back().expect("an evaluation")
}

/// Adapters of the run that a run starts from are part of its base: they are kept when its own adapters are read, saved, resumed and
/// merged.
#[test]
fn a_run_with_adapters_begins_from_a_run_with_adapters() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let done = |words: &[&str]| {
        let result = execute(dir, words);
        assert_eq!(result.code, Some(0), "{words:?}: {}", result.err);
        result
    };
    done(&small_train(&["--run", "base"]));
    let adapted = |from: &'static str, kind: &'static str, run: &'static str| {
        let from = if from == "base" { "model.from=base" } else { "model.from=one" };
        let kind = if kind == "lora" { "adapter.kind=lora" } else { "adapter.kind=dora" };
        let words = [
            "train",
            "tiny",
            from,
            kind,
            "adapter.rank=2",
            "train.batch=4",
            "eval.rows=4",
            "lr=0.05",
            "train.steps=6",
        ];
        done(&[&words[..], &["schedule.warmup_steps=2", "--run", run]].concat());
    };
    adapted("base", "lora", "one");
    adapted("one", "dora", "two");
    assert_ne!(held_out(dir, "one"), held_out(dir, "base"));
    let of = |run: &str, what: &str| {
        let result = done(&["eval", what, "eval.rows=4", "--json"]);
        let loss =
            serde_json::from_str::<Value>(&result.out).expect("an object")["loss"].as_f64().expect("a loss");
        assert!(
            (loss - held_out(dir, run)).abs() < 1e-5,
            "{what}: {loss}, and {run} had {}",
            held_out(dir, run)
        );
    };
    of("one", "one");
    of("two", "two");
    done(&["export", "two", "--to", "merged"]);
    done(&["resume", "two", "train.steps=8"]);
    of("two", "two");
    // The weights that it started from, adapters included, are checked to be unchanged.
    let changed = dir.join("one/checkpoints/step-6/state.safetensors");
    let mut bytes = fs::read(&changed).expect("a checkpoint");
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("a length")) as usize;
    bytes[data..].iter_mut().step_by(256).for_each(|byte| *byte ^= 1);
    fs::write(&changed, bytes).expect("a checkpoint");
    refused(dir, &["eval", "two", "eval.rows=4"], "is not what");
}

/// A run that starts from a run with adapters may have adapters of another rank. Its new parameters are initialised at random, however
/// many such runs are below it.
#[test]
fn new_parameters_over_runs_with_adapters_are_random() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    text_run(dir);
    let train = |recipe: &str, own: &str, run: &str| {
        let shared = "train.batch=4 eval.rows=4 lr=0.01 schedule.warmup_steps=0";
        let words =
            ["train", recipe, "--run", run].into_iter().chain(shared.split(' ')).chain(own.split(' '));
        done(execute(dir, &words.collect::<Vec<_>>()));
    };
    let few = "data.path=book.txt train.steps=2";
    train("tiny", &format!("model.from=run adapter.kind=lora adapter.rank=2 {few}"), "one");
    train("tiny", &format!("model.from=one adapter.kind=dora adapter.rank=2 {few}"), "two");
    train("tiny", &format!("model.from=two adapter.kind=lora adapter.rank=5 {few}"), "wider");
    train("tiny", &format!("model.from=two data.new_tokens=['<note>'] {few}"), "longer");
    let rows: String = (0..40).map(|i| format!("{i} is a number,{}\n", ["even", "odd"][i % 2])).collect();
    fs::write(dir.join("numbers.csv"), format!("text,label\n{rows}")).expect("a table");
    train("text-classify", "model.from=two data.path=numbers.csv train.epochs=1", "classes");
}
