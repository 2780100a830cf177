//! Bad input gives one sentence on standard error and exit code 2 before any work, and nothing is written.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use flatout_train::device;
use flatout_train::recipes;
use flatout_train::resolve::compile;
use flatout_train::switches::{Switch, TABLE};

use crate::program::{self, execute, flatout, small_train};

/// Every file and folder under a directory, with the files' contents.
fn tree(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.display().to_string();
        if path.is_dir() {
            found.extend(tree(&path));
            found.insert(name + "/", vec![]);
        } else {
            // The lock holds the process number of the last command.
            let is_lock = path.file_name().is_some_and(|name| name == "lock");
            found.insert(name, if is_lock { vec![] } else { fs::read(&path).expect("a file") });
        }
    }
    found
}

/// Asserts that the command is refused with a sentence that contains these words, and leaves nothing behind.
fn refused(dir: &Path, words: &[&str], sentence: &str) {
    let before = tree(dir);
    program::refused(dir, words, sentence);
    let after = tree(dir);
    let changed: Vec<_> = after.keys().filter(|name| before.get(*name) != after.get(*name)).collect();
    assert!(changed.is_empty() && before.len() == after.len(), "{words:?} left behind {changed:?}");
}

#[test]
fn words_and_numbers() {
    let folder = tempfile::tempdir().expect("a folder");
    let cases: &[(&str, &str)] = &[
        ("train tinny", "there is no recipe `tinny`; did you mean `tiny`?"),
        ("train no/such.toml", "there is no file no/such.toml"),
        (
            "trian tiny",
            "unrecognized subcommand 'trian'; a similar subcommand exists: 'train': see flatout --help",
        ),
        ("train tiny --max-time soon", "invalid value 'soon' for '--max-time <DURATION>'"),
        (
            "export run",
            "the following required arguments were not provided: --to <PATH>: see flatout export --help",
        ),
        ("train tiny --resume must", "the following required arguments were not provided: --run <DIR>"),
        (
            "sweep tiny lr=1e-3,3e-3 --resume auto",
            "the following required arguments were not provided: --run <DIR>",
        ),
        ("train tiny model.widht=64", "`model.width`"),
        ("train tiny num_workers=4", "`loader.workers=4`"),
        ("train tiny bf16=false", "here that is `precision=fp32`"),
        ("train tiny --lr 1e-3", "there is no option `--lr`; keys are given without dashes, as in `lr=1e-3`"),
        ("train tiny --batch_size=8", "here that is `train.batch`"),
        ("train tiny load_in_4bit=true", "here that is `base=nf4`"),
        ("train tiny --with a100", "there is no preset `a100`; did you mean `a100-40` or `a100-80`?"),
        ("plan tiny --gpu v100", "the v100 is older than Ampere"),
        ("plan tiny --gpu a100", "there is no GPU `a100` in the table; did you mean `a100-40` or `a100-80`?"),
        ("train tiny model.width=wide", "`model.width`"),
        ("train tiny train.steps=1.5", "`train.steps`"),
        ("train tiny data.document_mask=maybe", "`data.document_mask`"),
        ("train tiny activation=tanh", "swiglu"),
        ("train tiny fuse.qkv=perhaps", "fuse.qkv"),
        ("train tiny model.width", "key=value"),
        ("train tiny --with no-such-preset", "there is no preset `no-such-preset`"),
        ("train tiny width=128 heads=7", "`model.heads` = 7 does not divide `model.width` = 128"),
        ("train tiny heads=4 kv_heads=3", "`model.kv_heads` = 3 does not divide `model.heads` = 4"),
        ("train tiny model.head_size=31", "must be even"),
        ("train tiny batch=32 micro_batch=5", "does not divide `train.batch` = 32"),
        ("train tiny model.width=0", "`model.width` is 0"),
        ("train tiny model.layers=-2", "`model.layers`"),
        ("train tiny lr=-1", "`optimizer.lr` is -1"),
        ("train tiny lr=nan", "`optimizer.lr`"),
        ("train tiny lr=inf", "`optimizer.lr`"),
        ("train tiny weight_decay=-0.1", "`optimizer.weight_decay` is -0.1"),
        ("train tiny model.dropout=NaN", "`model.dropout`"),
        ("train tiny betas=[0.9,1.5]", "`optimizer.betas` has 1.5"),
        ("train tiny betas=[0.9]", "`optimizer.betas`"),
        ("train tiny train.freeze=[\"**\"]", "nothing to train"),
        ("train tiny model.context=4194304", "bytes"),
        ("train tiny eval.rows=1000000000000", "`eval.rows` is 1000000000000, and so many rows"),
        ("train tiny batch=16777216 prefetch=1000", "GiB of this machine's memory beside its plans"),
        ("train tiny loader.prefetch=1000000000000", "may be 1000 at most"),
        ("train tiny train.freeze=[\"*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*b\"]", "train.freeze"),
        ("train tiny cuda_graphs=on", "`cuda_graphs=on` cannot run on the CPU"),
        ("train tiny compile=reduce-overhead", "`cuda_graphs=on` cannot run on the CPU"),
        ("train tiny backend=cuda", "`backend=cuda` cannot run"),
        ("train tiny precision=tf32", "`precision=tf32` cannot run on the CPU"),
        ("train tiny positions=learned rope_cache=on", "`rope_cache=on` has nothing to cache"),
        ("plan tinny", "there is no recipe `tinny`"),
        ("plan tiny model.heads=7", "does not divide"),
        ("plan tiny cuda_graphs=on", "cannot run on the CPU"),
        ("plan tiny lr=nan --json", "`optimizer.lr`"),
        ("plan tiny --gpu rtx3091", "there is no GPU `rtx3091` in the table; did you mean `rtx3090`?"),
        ("plan tiny --gpu h200 backend=cpu", "a plan for the h200 and `backend=cpu` contradict each other"),
        (
            "plan tiny model.rope_factor=2",
            "`model.rope_factor` has no use while `model.rope_scaling` is none",
        ),
        ("plan tiny model.rope_scaling=yarn rope_factor=2", "`model.rope_original_context` is missing"),
        ("plan tiny model.activation=gelu", "one of swiglu, geglu, gelu_tanh, gelu_exact, relu2"),
        ("claims gpt", "there is no guide `gpt`; there are fvlm, bdh, gemma, qwen, pretrain"),
        ("ablate tinny", "there is no recipe `tinny`"),
        ("ablate tiny cuda_graphs=on", "`cuda_graphs=on` cannot run on the CPU"),
        ("ablate tiny precision=tf32", "`precision=tf32` cannot run on the CPU"),
        ("ablate tiny attention_kernel=mma", "`attention_kernel=mma` cannot run on the CPU"),
        (
            "ablate tiny --only fuse.qkw",
            "there is no switch `fuse.qkw` to turn off; did you mean `fuse.qkv`?",
        ),
        ("ablate tiny --budget 0", "--budget is 0"),
        ("ablate tiny data.path=-", "`data.path` is standard input"),
        (
            "ablate tiny --to-loss 2 --model",
            "--model is for measured updates, and --to-loss trains whole runs, each on one rank",
        ),
        ("ablate tiny --to-loss 2 --try lr=nan", "--try `lr=nan`: `optimizer.lr`"),
        (
            "ablate tiny --to-loss 2 --try seed=7",
            "--try `seed=7`: `train.seed` cannot be tried, as all are trained with the seeds",
        ),
        (
            "ablate tiny --to-loss 2 --try eval.goal=1",
            "--try `eval.goal=1`: `eval.goal` cannot be tried, as all are trained to the loss that --to-loss says",
        ),
        ("ablate tiny --to-loss nan", "`eval.goal` must be a number, not `NaN`"),
        (
            "ablate tiny --to-loss 2 eval.every=0",
            "`eval.goal` is compared with evaluations and there are none",
        ),
        ("tune tinny", "there is no recipe `tinny`"),
        ("tune tiny --budget 0", "--budget is 0"),
        ("tune tiny --out no/such/folder.toml", "there is no folder no/such to write"),
        ("tune tiny --out .", ". is a folder: give --out the name of a file"),
        ("tune tiny data.path=-", "`data.path` is standard input"),
        ("tune tiny context=4194304", "bytes"),
        ("recipes show tinny", "there is no recipe `tinny`"),
        ("recipes show tiny batch=0", "`train.batch` is 0"),
        ("generate runs/none", "there is no run in runs/none"),
        ("generate runs/none --temperature=-1", "--temperature is -1"),
        ("resume runs/none", "there is no run in runs/none: nothing to resume"),
        ("train tiny --run here --resume must", "there is no run in here: nothing to resume"),
    ];
    for (words, sentence) in cases {
        refused(folder.path(), &words.split(' ').collect::<Vec<_>>(), sentence);
    }
}

/// Every value of every switch that cannot run on this machine or on a GPU of the table is refused by every command that compiles, with
/// switch, value and reason, before any work.
#[test]
fn switches_that_cannot_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let cpu = compile::target();
    let config = recipes::resolve("tiny", &[], &[]).expect("a config");
    let on = |gpu: &device::gpus::Gpu| device::named(gpu.name, &config.switches).expect("a GPU of the table");
    let gpus: Vec<_> = device::gpus::named().iter().map(on).collect();
    let values = |switch: &'static Switch| switch.values().iter().map(move |value| (switch, *value));
    let mut asked = 0;
    for (switch, value) in TABLE.iter().flat_map(values) {
        let word = format!("{}={value}", switch.name);
        let here = match (switch.name, value) {
            // With a GPU it runs.
            ("backend", _) if device::has_gpu() => None,
            // It sets other switches, one of which is refused by its own name.
            ("compile", "reduce-overhead" | "max-autotune") => {
                Some("`cuda_graphs=on` cannot run".to_string())
            }
            _ => switch.available(value, &cpu).is_err().then(|| format!("`{word}` cannot run")),
        };
        for (sentence, command) in here
            .iter()
            .flat_map(|why| ["train", "plan", "ablate", "tune", "profile"].map(|command| (why, command)))
        {
            let mut words = vec![command, "tiny"];
            words.extend((switch.name != "backend").then_some("backend=cpu"));
            words.push(&word);
            refused(dir, &words, sentence);
            asked += 1;
        }
        for gpu in &gpus {
            if let Err(why) = switch.available(value, gpu) {
                refused(dir, &["plan", "tiny", "--gpu", &gpu.name, &word], &why);
                asked += 1;
            }
        }
    }
    // The two that users try most.
    refused(
        dir,
        &["plan", "tiny", "--gpu", "a100-80", "precision=fp8"],
        "`precision=fp8` cannot run on a100-80",
    );
    refused(
        dir,
        &["train", "tiny", "backend=cpu", "cuda_graphs=on"],
        "`cuda_graphs=on` cannot run on the CPU",
    );
    println!("{asked} refusals");
    assert!(asked >= 40, "{asked}");
}

#[test]
fn files() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    fs::write(dir.join("empty.txt"), "").expect("a file");
    fs::write(dir.join("short.txt"), "Too little.\n").expect("a file");
    fs::write(dir.join("latin.txt"), b"caf\xe9 au lait\n".repeat(2000)).expect("a file");
    fs::write(dir.join("book.txt"), "One line of a book after another.\n".repeat(2000)).expect("a file");
    fs::write(dir.join("broken.json"), "{").expect("a file");
    fs::write(dir.join("broken.toml"), "[model\nwidth = 3\n").expect("a file");
    fs::create_dir(dir.join("bare")).expect("a folder");
    let cases: &[(&[&str], &str)] = &[
        (&["data.path=missing.txt"], "missing.txt"),
        (&["data.path=empty.txt"], "empty"),
        (&["data.path=bare"], "bare"),
        (&["data.path=latin.txt"], "latin.txt"),
        (&["data.path=book.txt", "data.tokenizer=missing.json"], "missing.json"),
        (&["data.path=book.txt", "data.tokenizer=broken.json"], "broken.json"),
        (&["data.path=book.txt", "model.vocab=100"], "vocab"),
        (&["data.source=text"], "`data.path` is not given"),
        (&["model.vocab=64"], "model only 64: set model.vocab="),
        (&["train.steps=none", "train.epochs=2"], "`train.epochs` cannot be counted"),
        (&["--run", "empty.txt/run"], "empty.txt"),
        (&["--run", "/proc/run"], "/proc/run cannot be"),
        (&["--run", "."], ". is not empty and holds no run"),
    ];
    for (words, sentence) in cases {
        refused(dir, &small_train(words), sentence);
        let named = ["data", "model", "train"].iter().any(|section| words[0].starts_with(section));
        if named {
            refused(dir, &small_train(&[words, &["--run", "a/b"][..]].concat()), sentence);
        }
    }
    refused(dir, &["train", "broken.toml"], "broken.toml");
    refused(dir, &["train", "bare"], "there is no recipe `bare`");
}

#[test]
fn a_tokeniser_larger_than_the_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let text: String = (0..3000).map(|i| format!("{} is number {i}.\n", i * i)).collect();
    fs::write(dir.join("book.txt"), text).expect("a file");
    let words = small_train(&["data.path=book.txt", "eval.rows=0", "model.vocab=400", "--run", "run"]);
    let result = execute(dir, &words);
    assert_eq!(result.code, Some(0), "{}", result.err);
    let tokenizer = "data.tokenizer=run/tokenizer.json";
    let words = small_train(&["data.path=book.txt", tokenizer, "model.vocab=300"]);
    refused(dir, &words, "The tokeniser has 400 tokens but the model only 300");
}

#[test]
fn existing_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    assert_eq!(execute(dir, &small_train(&["--run", "run"])).code, Some(0));
    refused(
        dir,
        &small_train(&["--run", "run"]),
        "run holds a run already: continue it with `flatout resume run`",
    );
    let other = small_train(&["--run", "run", "--resume", "auto", "lr=0.5"]);
    refused(dir, &other, "begun with other settings");
    refused(dir, &["resume", "run", "model.width=64"], "model.width");
    refused(dir, &["resume", "run", "train.steps=3"], "give a larger train.steps");
    fs::remove_dir_all(dir.join("run/checkpoints")).expect("checkpoints");
    refused(dir, &["generate", "run"], "has no checkpoint yet");
}

#[test]
fn a_run_that_is_still_running() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let mut words = small_train(&["--run", "run", "--json"]);
    words.push("train.steps=1000000");
    let mut child = flatout(dir, &words).stdout(std::process::Stdio::null()).spawn().expect("a run");
    while !dir.join("run/events.jsonl").exists() {
        assert!(child.try_wait().expect("a child").is_none(), "the run ended by itself");
        std::thread::yield_now();
    }
    for words in [&["resume", "run"][..], &small_train(&["--run", "run", "--resume", "auto"])] {
        let result = execute(dir, words);
        let sentence = format!("the run in run is still running in process {}", child.id());
        assert_eq!(result.code, Some(2), "{result:?}");
        assert!(result.err.contains(&sentence) && result.err.lines().count() == 1, "{result:?}");
    }
    child.kill().expect("a living process");
    child.wait().expect("an end");
}
