//! Training on several ranks: the same bits for every number of ranks that divides the lanes, also across a resume, a signal and a killed
//! rank.

use std::fs;
use std::net::TcpListener;
use std::process::{Child, Command};
use std::time::{Duration, Instant, SystemTime};

use flatout_train::run::events::{self, Event, Step, WorldFacts};

use crate::fixture::{self, Fixture, checkpoints, wait_until};
use crate::program::{execute, flatout};

const STEPS: u64 = 20;

/// Overrides of a short run with eight lanes.
const SMALL: &str = "model.width=32 model.layers=1 model.heads=2 model.kv_heads=1 model.ffn=48 train.batch=16 train.lanes=8 \
                     train.steps=20 schedule.warmup_steps=2 eval.rows=12 eval.every=10 checkpoint.every=10 backend=cpu -q";
pub const TEXT: &str = "tiny model.context=32 model.dropout=0.1 optimizer.clip=0.5 train.ema=0.9";

/// Adapters, which every rank has whole, with an embedding that ranks divide.
pub const LORA: &str = "tiny model.context=32 model.width=64 model.layers=2 adapter.kind=lora adapter.rank=32 \
                        adapter.dropout=0.1 adapter.also_train=[embed]";
pub const DORA: &str = "tiny model.context=32 model.width=64 model.layers=2 adapter.kind=dora adapter.rank=32 \
                        adapter.also_train=[embed] train.ema=0.9";

/// (name, command, numbers of ranks other than one).
const KINDS: [(&str, &str, &[usize]); 11] = [
    ("text", TEXT, &[2, 4, 8]),
    ("bf16", "tiny model.context=32 optimizer.state=bf16 train.micro_batch=1", &[4]),
    ("int8", "tiny model.context=32 optimizer.state=int8", &[2]),
    ("chat", "tiny data.task=chat model.context=64 data.synthetic_rows=200", &[2, 4]),
    ("trees", "tiny data.task=chat model.context=64 data.synthetic_rows=200 shared_prefix=on", &[4]),
    ("pairs", "tiny data.task=preference model.context=64 data.synthetic_rows=200", &[2, 4]),
    (
        "referred",
        "tiny data.task=preference preference.reference=pairs-1 model.context=64 data.synthetic_rows=200",
        &[2],
    ),
    (
        "judged",
        "tiny data.task=preference preference.loss=kto model.context=64 data.synthetic_rows=200",
        &[2, 4],
    ),
    ("lora", LORA, &[2, 4]),
    ("dora", DORA, &[2]),
    ("images", "vision-tiny data.synthetic_rows=200 train.mixup=0.4 image_table=off model.layers=3", &[2, 4]),
];

/// The runs and numbers of ranks that are also tested with gradients reduced in every micro-batch, of which a lane has one, and with
/// weights that layers gather.
const IN_STEP: [(&str, usize, &str); 10] = [
    ("text", 4, "gradients"),
    ("text", 2, "gradients"),
    ("text", 4, "parameters"),
    ("int8", 2, "gradients"),
    ("int8", 2, "parameters"),
    ("lora", 4, "gradients"),
    ("lora", 4, "parameters"),
    ("dora", 2, "parameters"),
    ("images", 2, "gradients"),
    ("images", 2, "parameters"),
];

pub fn words<'w>(command: &'w str, run: &'w str, ranks: &'w str) -> Vec<&'w str> {
    let (recipe, more) = command.split_once(' ').unwrap_or((command, ""));
    let of_images = recipe.starts_with("vision");
    let is_text_key = |word: &&str| !(of_images && (word.contains("kv_heads") || word.contains("ffn")));
    let small = SMALL.split(' ').filter(|word| !word.is_empty()).filter(is_text_key);
    let more = more.split(' ').filter(|word| !word.is_empty());
    ["train", recipe].into_iter().chain(small).chain(more).chain(["--run", run, "--ranks", ranks]).collect()
}

/// Ranks divide large tensors, as `auto` does here, or only rows.
const SHARDS: [&str; 2] = ["optimizer", "none"];

fn train(fixture: &Fixture, command: &str, run: &str, ranks: usize) {
    let result = execute(fixture.folder.path(), &words(command, run, &ranks.to_string()));
    assert_eq!(result.code, Some(0), "{run}: {}", result.err);
}

/// Everything in the log about steps and evaluations except times.
fn log_without_times(fixture: &Fixture, run: &str) -> Vec<String> {
    let of = |event: Event| match event {
        Event::Step(step) => {
            let timeless = Step {
                step_ms: 0.0,
                tokens_per_second: 0.0,
                samples_per_second: 0.0,
                time: 0.0,
                of_predicted: None,
                data_wait_ms: None,
                ranks: None,
                ..step
            };
            Some(Event::Step(timeless).to_json())
        }
        Event::Eval { .. } => Some(event.to_json()),
        _ => None,
    };
    fixture.events(run).into_iter().filter_map(of).collect()
}

#[test]
fn every_number_of_ranks_that_divides_the_lanes_has_the_same_bits() {
    let fixture = Fixture::new();
    for (kind, command, numbers) in KINDS {
        let one = format!("{kind}-1");
        train(&fixture, command, &one, 1);
        assert_eq!(fixture.losses(&one).len() as u64, STEPS);
        // The first number of ranks is tested once more without sharding.
        let without = numbers.iter().take(1).map(|ranks| (*ranks, SHARDS[1]));
        let in_step = IN_STEP.iter().filter(|(of, ..)| *of == kind).map(|(_, ranks, shard)| (*ranks, *shard));
        let optimizer = numbers.iter().map(|ranks| (*ranks, SHARDS[0]));
        for (ranks, shard) in optimizer.chain(without).chain(in_step) {
            let run = format!("{kind}-{ranks}-{shard}");
            let command = if shard == SHARDS[0] { command } else { &format!("{command} shard={shard}") };
            train(&fixture, command, &run, ranks);
            assert_eq!(world(&fixture, &run).shard, shard, "{run}");
            assert_eq!(log_without_times(&fixture, &run), log_without_times(&fixture, &one), "{run}");
            for step in [10, 20] {
                assert!(fixture.state(&run, step) == fixture.state(&one, step), "{run} at step {step}");
            }
            // If there is a reference, each rank scores a share.
            let scores = |run: &str| fs::read(fixture.dir(run).join("reference.safetensors")).ok();
            assert!(scores(&run) == scores(&one), "{run}");
            assert_eq!(scores(&one).is_some(), command.contains("preference"), "{run}");
            // Ranks report their times late, the first ones after the first step.
            let steps = events::steps(&fixture.events(&run));
            let slowest = steps.last().and_then(|step| step.ranks.as_ref()).expect("times of ranks").slowest;
            assert!(slowest < ranks as u64);
        }
    }
    let losses = events::steps(&fixture.events("text-1"));
    assert!(losses[STEPS as usize - 1].loss < losses[0].loss - 0.5, "something is learned");
    let of = |run: &str| {
        let WorldFacts { ranks, nodes, lanes, shard, .. } = world(&fixture, run);
        (ranks, nodes, lanes, shard)
    };
    assert_eq!(of("text-1"), (1, 1, 8, "none".into()));
    assert_eq!(of("text-4-optimizer"), (4, 1, 8, "optimizer".into()));
}

fn world(fixture: &Fixture, run: &str) -> WorldFacts {
    match &fixture.events(run)[0] {
        Event::Start(start) => start.world.clone().expect("several lanes"),
        event => panic!("{event:?} is first"),
    }
}

#[test]
fn ranks_that_do_not_divide_the_lanes_stay_close_and_warn() {
    let fixture = Fixture::new();
    // Sixteen rows do not divide by three either.
    let commands = [("text", TEXT), ("chat", "tiny data.task=chat model.context=64 data.synthetic_rows=200")];
    for (kind, command) in commands {
        let runs = [1, 3].map(|ranks| (ranks, format!("{kind}-{ranks}")));
        for (ranks, run) in &runs {
            train(&fixture, command, run, *ranks);
        }
        let [one, three] = runs.each_ref().map(|(_, run)| events::steps(&fixture.events(run)));
        assert_eq!((one.len(), three.len()), (20, 20));
        for (one, three) in one.iter().zip(&three) {
            assert!((three.loss / one.loss - 1.0).abs() < 1e-5, "{kind}: {} and {}", one.loss, three.loss);
            assert_eq!(one.tokens, three.tokens);
        }
        let warned = |run: &str| {
            let warnings = fixture.events(run).into_iter();
            let of = |event| matches!(event, Event::Warning { message } if message.contains("8 lanes, which 3 ranks cannot share out"));
            warnings.filter_map(|event| of(event).then_some(())).count()
        };
        assert_eq!(runs.each_ref().map(|(_, run)| warned(run)), [0, 1], "{kind}");
    }
    // Ranks that exchange in every micro-batch all run as many micro-batches as the one with most: five or six rows, examples of any
    // length.
    for (kind, shard, more) in
        [("text", "gradients", " train.micro_batch=5"), ("chat", "gradients", ""), ("chat", "parameters", "")]
    {
        let command = commands.iter().find(|(own, _)| *own == kind).expect("one of the commands").1;
        let run = format!("{kind}-{shard}");
        train(&fixture, &format!("{command}{more} shard={shard}"), &run, 3);
        assert_eq!(world(&fixture, &run).shard, shard);
        let [one, three] = [&format!("{kind}-1"), &run].map(|run| events::steps(&fixture.events(run)));
        for (one, three) in one.iter().zip(&three) {
            assert!((three.loss / one.loss - 1.0).abs() < 1e-5, "{kind}: {} and {}", one.loss, three.loss);
            assert_eq!(one.tokens, three.tokens);
        }
    }
    // A run that three ranks began is read by other commands, and resumes with two.
    let mut three = words(TEXT, "three", "3");
    three.retain(|word| *word != "train.lanes=8");
    assert_eq!(execute(fixture.folder.path(), &three).code, Some(0));
    let result = execute(fixture.folder.path(), &["generate", "three", "--max-tokens", "3"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
    let result = execute(fixture.folder.path(), &["resume", "three", "train.steps=22", "--ranks", "2", "-q"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
    let mut refused = words(TEXT, "refused", "3");
    refused.push("deterministic=on");
    let result = execute(fixture.folder.path(), &refused);
    assert_eq!(result.code, Some(2));
    assert!(
        result.err.starts_with("flatout: `deterministic=on` promises the bits of `train.lanes` = 8"),
        "{}",
        result.err
    );
    assert!(!fixture.dir("refused").exists());
}

#[test]
fn another_number_of_ranks_resumes_with_the_same_bits() {
    let fixture = Fixture::new();
    train(&fixture, TEXT, "unbroken", 1);
    let mut half = words(TEXT, "run", "4");
    half.extend(["train.steps=7", "schedule.horizon_steps=20"]);
    assert_eq!(execute(fixture.folder.path(), &half).code, Some(0));
    // With eight ranks, two groups of four are replicas of each other.
    let groups = ["mesh.shards=4", "shard=parameters"];
    for (steps, ranks, more) in
        [("12", "1", &[][..]), ("15", "8", &groups), ("20", "2", &["mesh.shards=auto"])]
    {
        let steps = format!("train.steps={steps}");
        let mut all = vec!["resume", "run", &steps, "--ranks", ranks, "-q"];
        all.extend(more);
        let result = execute(fixture.folder.path(), &all);
        assert_eq!(result.code, Some(0), "{}", result.err);
    }
    let mut refused = words(TEXT, "refused", "4");
    refused.push("mesh.shards=3");
    let result = execute(fixture.folder.path(), &refused);
    assert_eq!(result.code, Some(2));
    assert!(
        result.err.starts_with("flatout: `mesh.shards` = 3 does not divide the 4 ranks"),
        "{}",
        result.err
    );
    fixture.assert_same("unbroken", "run", STEPS);
}

/// The running child processes of a process.
pub fn children(parent: u32) -> Vec<u32> {
    let of = |entry: fs::DirEntry| {
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let mut behind_name = stat.rsplit(')').next()?.split_whitespace();
        let (state, own) = (behind_name.next()?.to_string(), behind_name.next()?.parse::<u32>().ok()?);
        let number = entry.file_name().to_string_lossy().parse::<u32>().ok()?;
        (own == parent && state != "Z").then_some(number)
    };
    let mut found: Vec<u32> = fs::read_dir("/proc").expect("processes").flatten().filter_map(of).collect();
    found.sort_unstable();
    found
}

pub fn send_to(signal: &str, process: u32) {
    let sent = Command::new("kill").args([signal, &process.to_string()]).status().expect("kill");
    assert!(sent.success());
}

pub fn wait_for(child: Child, most: Duration) -> (Option<i32>, String) {
    let began = Instant::now();
    let output = child.wait_with_output().expect("an end");
    assert!(began.elapsed() < most, "{:?}", began.elapsed());
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A run that is long enough to be killed.
fn long(run: &str) -> Vec<&str> {
    let mut words = words(TEXT, run, "4");
    words.extend(["train.steps=60", "checkpoint.every=3", "eval.every=0"]);
    words
}

#[test]
fn a_rank_that_is_killed_ends_all_and_the_run_resumes_exactly() {
    let fixture = Fixture::new();
    assert_eq!(execute(fixture.folder.path(), &long("unbroken")).code, Some(0));
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock");
    let seed = since_1970.as_nanos() as usize;
    for round in 0..3 {
        let run = format!("run-{round}");
        let (victim, first) = ((seed >> (3 * round)) % 4, 3 + (seed >> (5 * round)) as u64 % 20);
        let ranks = ["1", "2", "4", "8"][(seed >> (2 * round)) % 4];
        // Once with gradients reduced in every micro-batch, and once with weights gathered in it.
        let mut command = long(&run);
        command.push(["shard=optimizer", "shard=gradients", "shard=parameters"][round]);
        let mut child = fixture.start(&command);
        wait_until(&mut child, || checkpoints(&fixture.dir(&run)).whole >= Some(first));
        let all = children(child.id());
        assert_eq!(all.len(), 4);
        send_to("-KILL", all[victim]);
        let (code, stderr) = wait_for(child, Duration::from_secs(5));
        assert_eq!((code, stderr.lines().count()), (Some(1), 1), "seed {seed}: {stderr}");
        assert!(stderr.contains("was killed by signal 9 (SIGKILL)"), "{stderr}");
        let newest = checkpoints(&fixture.dir(&run)).whole.expect("a checkpoint");
        let advice = format!(
            "; the newest whole checkpoint is step {newest}; continue with: flatout resume {run} --ranks 4\n"
        );
        assert!(stderr.ends_with(&advice), "{stderr}");
        assert!(!all.iter().any(|rank| fs::exists(format!("/proc/{rank}")).unwrap_or(true)), "all are gone");
        let result = execute(fixture.folder.path(), &["resume", &run, "--ranks", ranks, "-q"]);
        assert_eq!(result.code, Some(0), "seed {seed}: {}", result.err);
        fixture.assert_same("unbroken", &run, 60);
    }
}

#[test]
fn one_rank_that_is_asked_to_stop_stops_all_after_the_same_step() {
    let fixture = Fixture::new();
    train(&fixture, TEXT, "unbroken", 2);
    let mut slow = words(TEXT, "run", "4");
    slow.extend(["train.steps=5000", "schedule.horizon_steps=20", "checkpoint.every=0", "eval.every=0"]);
    let mut child = fixture.start(&slow);
    wait_until(&mut child, || !events::steps(&fixture.events("run")).is_empty());
    send_to("-TERM", children(child.id())[2]);
    let (code, stderr) = wait_for(child, Duration::from_secs(20));
    assert_eq!(code, Some(3), "{stderr}");
    let Some(Event::End(end)) = fixture.events("run").last().cloned() else { panic!("an end") };
    assert_eq!(checkpoints(&fixture.dir("run")).whole, Some(end.steps));
    let both = [fixture.losses("unbroken"), fixture.losses("run")];
    let shared = both[0].len().min(both[1].len());
    assert_eq!(both[0][..shared], both[1][..shared]);
}

#[test]
fn ranks_that_a_launcher_started_train_alike() {
    let fixture = Fixture::new();
    train(&fixture, TEXT, "one", 1);
    let agent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = agent.local_addr().unwrap().port().to_string();
    let start = |rank: &str| {
        let mut words = words(TEXT, "run", "2");
        words.retain(|word| !["--ranks", "2"].contains(word));
        let mut command = flatout(fixture.folder.path(), &words);
        let of = [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
        command.envs(of).spawn().expect("the program starts")
    };
    let ends = [start("1"), start("0")].map(|child| wait_for(child, Duration::from_secs(60)));
    assert_eq!(ends, [(Some(0), String::new()), (Some(0), String::new())]);
    fixture.assert_same("one", "run", STEPS);
}

#[test]
fn unsupported_settings_of_ranks_are_one_sentence_and_code_2() {
    let fixture = Fixture::new();
    for (more, sentence) in [
        ("wire=nccl", "`wire=nccl` cannot run on the CPU: NCCL connects GPUs"),
        ("--gpus 2", "--gpus and --ranks both say how many processes to start: give one of them"),
        ("data.path=-", "standard input cannot be read by several ranks"),
        ("data.path=nowhere.txt", "There is no file or folder nowhere.txt"),
        ("train.lanes=32", "`train.lanes` = 32 is more than the rows of `train.batch` = 16"),
        ("train.lanes=5", "`train.lanes` = 5 is not a power of two"),
        (
            "shard=full",
            "must be one of auto, none, optimizer, gradients, parameters, not `full`; here that is `shard=parameters`",
        ),
        ("shard=parameters fuse.optimizer=off", "`shard=parameters` cannot run with `fuse.optimizer=off`"),
        ("shard=optimizer fuse.optimizer=off", "`shard=optimizer` cannot run with `fuse.optimizer=off`"),
        ("shard=gradients fuse.optimizer=off", "`shard=gradients` cannot run with `fuse.optimizer=off`"),
    ] {
        let mut all = words(TEXT, "run", "2");
        all.extend(more.split(' '));
        let result = execute(fixture.folder.path(), &all);
        result.assert_refused(&[sentence]);
        assert!(!fixture.dir("run").exists(), "{more}");
    }
    let on_gpus =
        words(TEXT, "run", "2").into_iter().map(|word| if word == "--ranks" { "--gpus" } else { word });
    let result = execute(fixture.folder.path(), &on_gpus.collect::<Vec<_>>());
    let sentence =
        "flatout: --gpus and `backend=cpu` contradict each other: give --ranks, or leave backend=cpu out\n";
    assert_eq!((result.code, result.err.as_str()), (Some(2), sentence));
}

/// A run of one rank and one lane writes nothing about ranks.
#[test]
fn one_rank_with_one_lane_does_not_mention_ranks() {
    let fixture = Fixture::new();
    let mut plain = words(TEXT, "plain", "1");
    plain.retain(|word| !["--ranks", "1", "train.lanes=8"].contains(word));
    assert_eq!(execute(fixture.folder.path(), &plain).code, Some(0));
    let mut one = words(TEXT, "one", "1");
    one.push("train.lanes=1");
    assert_eq!(execute(fixture.folder.path(), &one).code, Some(0));
    fixture.assert_same("plain", "one", STEPS);
    let log = fs::read_to_string(fixture.dir("plain").join("events.jsonl")).expect("a log");
    assert!(!log.contains("\"world\"") && !log.contains("\"ranks\""));
    let resolved = |run: &str| fs::read_to_string(fixture.dir(run).join("resolved.toml")).expect("a file");
    assert!(!resolved("plain").contains("lanes") && resolved("plain") == resolved("one"));
}

/// All ranks skip the same updates, roll back to the same checkpoint and stop together.
#[test]
fn updates_that_are_not_finite_are_the_same_on_every_number_of_ranks() {
    let fixture = Fixture::new();
    let wild = ["optimizer.lr=1e18", "optimizer.clip=0", "schedule.warmup_steps=10", "train.max_skipped=2"];
    let warnings = ["1", "4"].map(|ranks| {
        let run = format!("run-{ranks}");
        let mut all = words(TEXT, &run, ranks);
        all.extend(wild.into_iter().chain(["checkpoint.every=1", "eval.rows=0"]));
        let result = execute(fixture.folder.path(), &all);
        assert_eq!(
            (result.code, result.err.lines().filter(|line| line.starts_with("flatout: ")).count()),
            (Some(1), 1)
        );
        assert!(result.err.contains("going back to step 1 did not help 3 times"), "{}", result.err);
        fixture::warnings(fixture.events(&run))
    });
    assert!(warnings[0].iter().any(|words| words.contains("going back to step 1 and on with row")));
    assert_eq!(warnings[0], warnings[1]);
}

/// Ranks whose hosts have other files under the same name are refused before the first step.
#[test]
fn unequal_data_is_refused_and_leaves_no_run() {
    let fixture = Fixture::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let run = fixture.dir("run").display().to_string();
    let start = |node: &str| {
        let dir = fixture.dir(&format!("host-{node}"));
        fs::create_dir(&dir).expect("a folder");
        let line = |i: usize| format!("{{\"text\":\"host {node} has line {i} of its own\"}}\n");
        fs::write(dir.join("book.jsonl"), (0..200).map(line).collect::<String>()).expect("a file");
        let mut all = words(TEXT, &run, "1");
        let address = format!("127.0.0.1:{port}");
        all.extend(["data.path=book.jsonl", "--nodes", "2", "--node", node, "--address", &address]);
        flatout(&dir, &all).spawn().expect("the program starts")
    };
    let ends = [start("0"), start("1")].map(|child| wait_for(child, Duration::from_secs(60)));
    assert_eq!(ends.each_ref().map(|(code, _)| *code), [Some(2); 2], "{ends:?}");
    let stderr = &ends[0].1;
    assert!(stderr.starts_with("flatout: ") && stderr.contains(" are not those of rank 0 ("), "{stderr}");
    assert!(!fixture.dir("run").exists(), "{stderr}");
}
