//! Contracts with other tools: the fields of events and plans, the bytes a plan promises, recipes that round-trip.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use flatout_train::device;
use flatout_train::recipes;
use flatout_train::resolve::compile;
use serde_json::Value;

use crate::program::{self, CommandOutput, SMALL, execute, small_train};

fn ok(dir: &Path, words: &[&str]) -> CommandOutput {
    let result = execute(dir, words);
    assert_eq!(result.code, Some(0), "{words:?}: {}", result.err);
    result
}

fn fields(object: &Value) -> BTreeSet<&str> {
    object.as_object().expect("an object").keys().map(String::as_str).collect()
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect()
}

#[test]
fn events_have_the_fields_of_the_contract() {
    let folder = tempfile::tempdir().expect("a folder");
    let words = small_train(&["eval.every=2", "checkpoint.every=3", "--run", "run", "--json"]);
    let result = ok(folder.path(), &words);
    assert_eq!(result.err, "", "nothing beside the objects");
    let log = fs::read_to_string(folder.path().join("run/events.jsonl")).expect("a log");
    assert_eq!(result.out, log, "`--json` prints the log's own lines");
    let events = lines(&log);
    let wanted = [
        (
            "start",
            "recipe backend switches arena_bytes driver_bytes not_deterministic optimizer loader start_seconds time version device libraries \
             steps micro_batch parameters memory auto predicted_ms is_calibrated data",
        ),
        (
            "step",
            "step epoch loss grad_norm lr tokens samples step_ms tokens_per_second samples_per_second skipped time \
             data_wait_ms",
        ),
        ("eval", "step loss"),
        ("saved", "step path"),
        ("end", "status steps loss loss_floor tokens_per_second skipped time data_wait"),
    ];
    let of = |name: &str| events.iter().filter(|event| event["event"] == name).collect::<Vec<_>>();
    for (name, names) in wanted {
        assert!(!of(name).is_empty(), "there is an event {name}");
        for event in of(name) {
            assert_eq!(fields(event), names.split(' ').chain(["event"]).collect(), "{event}");
        }
    }
    assert_eq!(events.len(), wanted.iter().map(|(name, _)| of(name).len()).sum::<usize>());
    let steps = |name: &str| of(name).iter().map(|event| event["step"].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(
        (steps("step"), steps("eval"), steps("saved")),
        (vec![1, 2, 3, 4, 5, 6], vec![2, 4, 6], vec![3, 6])
    );
    let last = of("step")[5];
    assert_eq!((last["tokens"].as_u64(), last["samples"].as_u64()), (Some(6 * 4 * 16), Some(6 * 4)));
    assert_eq!((&events[0]["event"], &events[events.len() - 1]["event"]), (&"start".into(), &"end".into()));
    let end = of("end")[0];
    assert_eq!((&end["status"], &end["steps"]), (&"done".into(), &6.into()));
    assert!(end["loss"].as_f64().unwrap() > end["loss_floor"].as_f64().unwrap());

    // A run with more steps than before continues, and its log shows that.
    let result = ok(folder.path(), &["resume", "run", "train.steps=8", "--json"]);
    let resumed = lines(&result.out);
    assert_eq!(resumed[1], serde_json::json!({ "event": "resume", "step": 6 }));
    let log = fs::read_to_string(folder.path().join("run/events.jsonl")).expect("a log");
    assert!(log.ends_with(&result.out));
}

#[test]
fn text_has_no_floor() {
    let folder = tempfile::tempdir().expect("a folder");
    let text: String = (0..2000).map(|i| format!("line {i} of a book\n")).collect();
    fs::write(folder.path().join("book.txt"), text).expect("a file");
    let words =
        small_train(&["data.path=book.txt", "eval.rows=0", "train.steps=none", "train.epochs=1", "--json"]);
    let events = lines(&ok(folder.path(), &words).out);
    let (step, end) = (&events[events.len() - 3], &events[events.len() - 1]);
    assert_eq!(end.get("loss_floor"), None);
    let epoch = step["epoch"].as_f64().expect("an epoch");
    assert!((0.97..=1.03).contains(&epoch), "one epoch of steps ends at {epoch}");
}

const PLANNED: &str = "recipe backend arena_bytes driver_bytes categories layers peak parameters trained_parameters flops_per_token micro_batch \
    step_flops step_bytes roofline_step_ms predicted_step_ms roofline_run_seconds predicted_run_seconds timed_kernels work \
    largest_micro_batch switches instead attention_kernels not_deterministic auto fp8";

/// The numbers of a plan add up, and the plot is written to --out.
#[test]
fn a_plan_has_layers_work_rows_and_alternatives() {
    let folder = tempfile::tempdir().expect("a folder");
    let words: Vec<&str> =
        ["plan", "tiny"].iter().chain(&SMALL).chain(&["--json", "--out", "pictures"]).copied().collect();
    let plan = |cache: &Path| -> Value {
        let output =
            program::flatout(folder.path(), &words).env("FLATOUT_CACHE", cache).output().expect("it starts");
        serde_json::from_slice(&output.stdout).expect("an object")
    };
    let cache = tempfile::tempdir().expect("a folder");
    let plan = plan(cache.path());
    assert_eq!(fields(&plan), PLANNED.split_whitespace().collect());
    let sum = |list: &str, of: &str| -> u64 {
        plan[list].as_array().expect("a list").iter().map(|row| row[of].as_u64().expect("a number")).sum()
    };
    assert_eq!(sum("layers", "bytes"), plan["arena_bytes"]);
    assert_eq!(
        (sum("work", "flops"), sum("work", "bytes")),
        (plan["step_flops"].as_u64().unwrap(), plan["step_bytes"].as_u64().unwrap())
    );
    assert!(plan["peak"]["bytes"].as_u64() <= plan["arena_bytes"].as_u64());
    assert_eq!(
        (&plan["predicted_step_ms"], &plan["timed_kernels"]),
        (&Value::Null, &0.into()),
        "nothing was timed"
    );
    let run = plan["roofline_run_seconds"].as_f64().unwrap();
    assert!((run / (6e-3 * plan["roofline_step_ms"].as_f64().unwrap()) - 1.0).abs() < 1e-9, "six steps");
    let largest = plan["largest_micro_batch"].as_array().expect("a list");
    let names: Vec<_> = largest.iter().map(|row| row["recompute"].as_str().unwrap()).collect();
    assert_eq!(names, ["none", "cheap", "wide", "full"]);
    let instead = plan["instead"].as_array().expect("a list");
    let row = |switch: &str, value: &str| {
        instead.iter().find(|row| row["switch"] == switch && row["value"] == value).expect("a row").clone()
    };
    assert!(row("memory_plan", "off")["more_bytes"].as_i64().unwrap() > 0);
    assert!(row("recompute", "wide")["more_bytes"].as_i64().unwrap() < 0);
    assert!(row("precision", "tf32")["refused"].as_str().unwrap().contains("cannot run on the CPU"));
    let svg = fs::read_to_string(folder.path().join("pictures/arena.svg")).expect("a picture");
    assert!(svg.starts_with("<svg") && svg.contains(">grad</text>") && svg.contains(">apply</text>"));
    // The difference of an alternative equals that of its own plan.
    let other = [&words[..words.len() - 2], &["memory_plan=off"]].concat();
    let other: Value = serde_json::from_str(&ok(folder.path(), &other).out).expect("an object");
    assert_eq!(other["arena_bytes"], row("memory_plan", "off")["arena_bytes"]);
    let refused = execute(folder.path(), &["plan", "tiny", "--out", "pictures/arena.svg"]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("give another --out"), "{}", refused.err);
}

/// A plan for a GPU by name needs no GPU; it says whether it fits, and is made even if it does not.
#[test]
fn a_plan_for_a_gpu_by_name_says_whether_it_fits() {
    let folder = tempfile::tempdir().expect("a folder");
    let planned = |words: &[&str]| -> Value {
        let result = ok(folder.path(), &[&["plan", "gpt2-124m", "layers=2", "--json"], words].concat());
        serde_json::from_str(&result.out).expect("an object")
    };
    let small = planned(&["--gpu", "rtx3090"]);
    assert_eq!(small["backend"], "rtx3090");
    assert_eq!(small["switches"]["precision"], "bf16");
    assert_eq!(
        fields(&small["gpu"]),
        "fits largest_micro_batch measured memory_bytes name".split(' ').collect()
    );
    assert_eq!((&small["gpu"]["fits"], &small["gpu"]["measured"]), (&true.into(), &Value::Null));
    let large = planned(&["--gpu", "h200", "micro_batch=512"]);
    assert!(large["gpu"]["measured"].as_str().unwrap().contains("tokens/s"));
    assert!(large["roofline_step_ms"].as_f64().unwrap() < small["roofline_step_ms"].as_f64().unwrap());
    let too_much = planned(&["--gpu", "rtx3090", "micro_batch=512", "recompute=none"]);
    assert_eq!(too_much["gpu"]["fits"], false);
    let most = too_much["gpu"]["largest_micro_batch"].as_u64().unwrap();
    assert!(most < 512 && too_much["arena_bytes"].as_u64() > too_much["gpu"]["memory_bytes"].as_u64());
    assert_eq!(
        planned(&["--gpu", "rtx3090", &format!("micro_batch={most}"), "recompute=none"])["gpu"]["fits"],
        true
    );
}

/// Plans for several GPUs show the ranks, the memory of one and the scaling; plans for ranks on CPUs have no predictions.
#[test]
fn a_plan_for_several_ranks_says_how_it_scales() {
    let folder = tempfile::tempdir().expect("a folder");
    let base = ["plan", "gpt2-124m", "layers=2", "train.batch=32"];
    let planned = |words: &[&str]| -> Value {
        let result = ok(folder.path(), &[&base[..], &["--json"], words].concat());
        serde_json::from_str(&result.out).expect("an object")
    };
    let alone = planned(&["--gpu", "h100"]);
    assert_eq!((&alone["world"], &alone["switches"]["overlap"]), (&Value::Null, &"nothing to share".into()));
    let sixteen = planned(&["--gpu", "h100", "--gpus", "8", "--nodes", "2"]);
    let world = &sixteen["world"];
    assert_eq!(
        fields(world),
        "compute_by exchange exchanges_by link link_by net nodes ranks scaling shard why"
            .split(' ')
            .collect()
    );
    assert_eq!((&world["ranks"], &world["nodes"]), (&16.into(), &2.into()));
    assert_eq!((&world["link"], &world["net"]), (&"nvlink4".into(), &"ib400".into()));
    assert_eq!((&world["link_by"], &world["exchanges_by"]), (&"table".into(), &"links".into()));
    assert_eq!((&world["shard"], &sixteen["switches"]["shard"]), (&"optimizer".into(), &"optimizer".into()));
    assert!(world["why"].as_str().unwrap().starts_with("each of 16 ranks"));
    assert!(sixteen["arena_bytes"].as_u64() < alone["arena_bytes"].as_u64(), "a rank keeps a share");
    assert_eq!(sixteen["switches"]["overlap"], "on");
    let rows = world["scaling"].as_array().expect("rows");
    let ranks: Vec<u64> = rows.iter().map(|row| row["ranks"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [1, 2, 4, 8, 16]);
    assert_eq!(rows[4]["arena_bytes"], sixteen["arena_bytes"]);
    assert_eq!(rows[4]["exchange"], world["exchange"]);
    assert_eq!(world["exchange"]["step_ms"], sixteen["roofline_step_ms"]);
    let none = sixteen["instead"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["value"] == "none" && row["switch"] == "shard");
    assert!(none.expect("the other level")["more_bytes"].as_i64().unwrap() > 0);
    let slow =
        planned(&["--gpu", "h100", "--gpus", "8", "--nodes", "2", "--link", "pcie4", "--net", "ib100"]);
    let wire = |plan: &Value| plan["world"]["exchange"]["wire_ms"].as_f64().unwrap();
    assert!(wire(&slow) > 5.0 * wire(&sixteen));
    let result = ok(folder.path(), &[&base[..], &["--gpu", "h100", "--gpus", "8"]].concat()).out;
    for line in [
        "ranks            8: one node of h100, linked by nvlink4",
        "shared           shard=optimizer (auto",
        "of linear",
    ] {
        assert!(result.contains(line), "{line} in {result}");
    }
    let on_cpu = planned(&["--ranks", "4", "backend=cpu"]);
    assert_eq!((&on_cpu["world"]["ranks"], &on_cpu["world"]["exchange"]), (&4.into(), &Value::Null));
    for (words, why) in [
        (
            &["--gpu", "h100", "--gpus", "8", "--link", "nvlink"][..],
            "--link names the link `nvlink`, which is not in the table",
        ),
        (&["--gpu", "h100", "--gpus", "64"], "64 lanes share out `train.batch` = 32 rows"),
        (&["--gpu", "h100", "--gpus", "2", "backend=cpu"], "--gpus and `backend=cpu` contradict each other"),
        (&["--gpu", "h100", "--ranks", "2"], "--ranks plans for ranks on CPUs"),
        (&["--gpu", "h100", "--gpus", "0"], "give a number from 1 to 1024"),
        (&["--gpu", "h100", "--nodes", "2"], "--gpus"),
    ] {
        let refused = execute(folder.path(), &[&base[..], words].concat());
        refused.assert_refused(&[why]);
    }
}

#[test]
fn a_plan_has_its_fields_and_its_bytes_are_the_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let sets: [&[&str]; 9] = [
        &[],
        &["train.ema=0.99", "eval.rows=4"],
        &["data.document_mask=true"],
        &["train.micro_batch=2"],
        &["precision=bf16"],
        &["recompute=full"],
        &["memory_plan=off"],
        &["model.dropout=0.1", "compile=off", "attention=naive", "eval.micro_batch=3"],
        &["model.tied=false", "eval.rows=0", "train.freeze=[embed.*]"],
    ];
    let mut sizes = BTreeSet::new();
    for overrides in sets {
        let plan: Vec<&str> = ["plan", "tiny"].iter().chain(&SMALL).chain(overrides).copied().collect();
        let result = ok(folder.path(), &[&plan[..], &["--json"]].concat());
        let plan: Value = serde_json::from_str(&result.out).expect("an object");
        for field in ["arena_bytes", "categories", "parameters", "flops_per_token", "switches"] {
            assert!(fields(&plan).contains(field), "{field}");
        }
        let names = "parameters frozen adapters gradients optimizer average activations workspace inputs";
        assert_eq!(fields(&plan["categories"]), names.split(' ').collect());
        let categories = plan["categories"].as_object().expect("an object").values();
        assert_eq!(categories.map(|bytes| bytes.as_u64().unwrap()).sum::<u64>(), plan["arena_bytes"]);
        assert!(!folder.path().join("runs").exists(), "a plan writes nothing");

        let run = tempfile::tempdir().expect("a folder");
        let events = lines(&ok(run.path(), &small_train(&[overrides, &["--json"]].concat())).out);
        assert_eq!(events[0]["arena_bytes"], plan["arena_bytes"], "{overrides:?}");
        assert_eq!(events[0]["switches"], plan["switches"], "{overrides:?}");
        sizes.insert(plan["arena_bytes"].as_u64().unwrap());
    }
    assert!(sizes.len() >= 7, "these overrides differ in memory");
}

#[test]
fn recipes_round_trip() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let shown = ok(dir, &["recipes", "show", "tiny"]).out;
    fs::write(dir.join("mine.toml"), &shown).expect("a file");
    let again = ok(dir, &["recipes", "show", "mine.toml"]).out;
    let without_name = |text: &str| text.replace("recipe = \"mine\"", "recipe = \"tiny\"");
    assert_eq!(without_name(&again), shown);
    let losses = |words: &[&str]| {
        let events = lines(&ok(dir, &[words, &SMALL, &["--json"]].concat()).out);
        let steps = events.into_iter().filter(|event| event["event"] == "step");
        steps.map(|event| event["loss"].to_string()).collect::<Vec<_>>()
    };
    let tiny = losses(&["train", "tiny"]);
    assert_eq!(tiny.len(), 6);
    assert_eq!(losses(&["train", "mine.toml"]), tiny);
    assert_eq!(losses(&["train"]), tiny, "without a recipe it is tiny");
    let runs: BTreeSet<String> = fs::read_dir(dir.join("runs"))
        .expect("runs")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect();
    assert_eq!(runs, ["mine-1", "tiny-1", "tiny-2"].map(String::from).into());
}

#[test]
fn a_run_shows_what_it_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let result = ok(folder.path(), &small_train(&["eval.every=0"]));
    let start: Vec<&str> = result.err.lines().take_while(|line| !line.starts_with("step ")).collect();
    assert!(start.len() <= 12 && start[0] == "tiny  ->  runs/tiny-1", "{}", result.err);
    for words in
        ["done     6 steps in", "held-out loss ", "above the floor of", "sample   ", "run      runs/tiny-1"]
    {
        assert!(result.out.contains(words), "{words:?} in {}", result.out);
    }
    assert!(result.err.contains("next     flatout generate runs/tiny-1"), "{}", result.err);
    let quiet = ok(folder.path(), &small_train(&["-q"]));
    assert_eq!(quiet.err, "");
    let text = ok(folder.path(), &["generate", "runs/tiny-1", "--max-tokens", "12", "--json"]).out;
    let object: Value = serde_json::from_str(&text).expect("an object");
    let named = "text prompt texts prompts images checkpoint step weights tokens prompt_tokens seconds tokens_per_second";
    assert_eq!(fields(&object), named.split(' ').collect());
    assert_eq!(object["step"], 6);
    let plain = ok(folder.path(), &["generate", "runs/tiny-1", "--max-tokens", "12"]).out;
    assert_eq!(plain.trim_end_matches('\n'), object["text"].as_str().expect("text"));
}

#[test]
fn every_command_has_help() {
    let folder = tempfile::tempdir().expect("a folder");
    for command in ["train", "resume", "plan", "generate", "runs", "watch", "recipes", "schema", "doctor"] {
        let result = ok(folder.path(), &[command, "--help"]);
        assert!(result.out.contains("Usage: flatout") && result.err.is_empty(), "{command}");
        assert!(ok(folder.path(), &["--help"]).out.contains(&format!("  {command} ")), "{command} is listed");
    }
    for words in
        [&["recipes"][..], &["runs"], &["schema"], &["recipes", "show", "pretrain-226m"], &["doctor"]]
    {
        for json in [false, true] {
            let result = ok(folder.path(), &[words, if json { &["--json"] } else { &[] }].concat());
            assert!(!result.out.is_empty() && result.err.is_empty());
            assert_eq!(serde_json::from_str::<Value>(&result.out).is_ok(), json, "{words:?}");
        }
    }
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0, "none of them writes anything");
}

#[test]
fn the_schema_shows_values_and_filters_by_a_word() {
    let folder = tempfile::tempdir().expect("a folder");
    let result = |words: &[&str]| ok(folder.path(), &[&["schema"], words].concat()).out;
    assert!(result(&["precision"]).contains("switches.precision"));
    assert!(result(&["precision"]).contains("Takes one of auto, fp32, tf32, bf16, fp8."));
    let warmup = result(&["warmup"]);
    assert!(warmup.lines().all(|line| line.contains("warmup")) && warmup.lines().count() >= 2, "{warmup}");
    assert!(result(&["learning_rate"]).contains("optimizer.lr"));
    let rows: Value = serde_json::from_str(&result(&["warmup", "--json"])).expect("a list");
    assert_eq!(rows.as_array().expect("a list").len(), warmup.lines().count());
    let refused = execute(folder.path(), &["schema", "max_grad_norm"]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("here that is `optimizer.clip`"), "{}", refused.err);
    let one = result(&["data.flip"]);
    for line in ["data.flip", "  Takes a number.", "  range    must be from 0 to 1", "  default  0.5"] {
        assert!(one.lines().any(|result| result == line), "{one} lacks {line}");
    }
    let prefetch = result(&["loader.prefetch"]);
    assert!(prefetch.contains("must be at least 1, may be 1000 at most"), "{prefetch}");
    assert!(result(&["data.filter"]).contains("  Takes one of bilinear, bicubic, lanczos."));
    let refused = execute(folder.path(), &["schema", "data.flpi"]);
    assert_eq!((refused.code, refused.out.as_str()), (Some(2), ""));
    assert!(refused.err.contains("did you mean `data.flip`?"), "{}", refused.err);
}

/// The text of `docs/guides/coming-from.md` after a heading.
fn page_for_newcomers(heading: &str) -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/guides/coming-from.md");
    let page = fs::read_to_string(page).expect("the page");
    let (_, after) = page.split_once(heading).expect("the heading");
    after.to_string()
}

/// Every command that the page gives for a guide can be planned, for the GPU it names or an H100.
#[test]
fn commands_of_the_guides_can_be_run() {
    let page = page_for_newcomers("## The five optimisation guides");
    let mut tried = 0;
    for line in page.lines().filter_map(|line| line.strip_prefix("flatout train ")) {
        let mut words = line.split(' ');
        let recipe = words.next().expect("a recipe");
        let (mut with, mut overrides) = (vec![], vec![]);
        while let Some(word) = words.next() {
            match word {
                "--with" => with.push(words.next().expect("a preset").to_string()),
                word => overrides.push(word.to_string()),
            }
        }
        let config =
            recipes::resolve(recipe, &with, &overrides).unwrap_or_else(|why| panic!("{line}: {why}"));
        config.validate_for_training().unwrap_or_else(|why| panic!("{line}: {why}"));
        let gpu = with.last().map_or("h100", String::as_str);
        let target = device::named(gpu, &config.switches).expect("a GPU of the table");
        compile::compile(&config, &target).unwrap_or_else(|why| panic!("{line}: {why}"));
        tried += 1;
    }
    assert!(tried >= 28, "{tried} commands were tried");
}

/// Every setting of a guide, given as written there, is answered as the page says.
#[test]
fn settings_of_the_guides_are_answered() {
    let folder = tempfile::tempdir().expect("a folder");
    let page = page_for_newcomers("| typed | answered with | guide |");
    let mut typed = 0;
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let result = execute(folder.path(), &["plan", "tiny", cells[0].trim_matches('`')]);
        result.assert_refused(&[cells[1]]);
        if let Some(answer) = cells[1].strip_prefix('`').and_then(|cell| cell.strip_suffix('`'))
            && answer.contains('=')
        {
            // Keys of adapters are read where there are adapters.
            let words = ["train.batch=96", "adapter.kind=lora", answer].map(String::from);
            let config = recipes::resolve("tiny", &[], &words);
            assert!(config.is_ok(), "{line}: {config:?}");
        }
        typed += 1;
    }
    assert!(typed >= 35, "{typed} settings were typed");
}

/// The second column of the tables in `docs/guides/coming-from.md` has keys of flatout.
#[test]
fn the_page_for_newcomers_names_only_keys_that_exist() {
    let folder = tempfile::tempdir().expect("a folder");
    let schema: Value =
        serde_json::from_str(&ok(folder.path(), &["schema", "--json"]).out).expect("an object");
    let keys: BTreeSet<&str> =
        schema.as_array().expect("a list").iter().map(|key| key["path"].as_str().expect("a path")).collect();
    let page = page_for_newcomers("# Coming from another trainer");
    let mut seen = 0;
    for line in page.lines().filter(|line| line.starts_with("| ")) {
        let column = line.split(" | ").nth(1).unwrap_or_default();
        // The text between backticks is every other piece.
        for name in column.split('`').skip(1).step_by(2).filter(|name| !name.contains(['-', ' '])) {
            let key = name.split('=').next().unwrap_or_default();
            let known = keys.contains(key) || keys.contains(format!("switches.{key}").as_str());
            assert!(known, "`{key}` in {line:?} is no key");
            seen += 1;
        }
    }
    assert!(seen > 60, "{seen} keys were checked");
}
