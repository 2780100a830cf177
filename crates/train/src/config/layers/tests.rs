use flatout_models::config::DecoderConfig;
use flatout_settings::Section;
use flatout_settings::section;

use super::*;
use crate::config::{Count, SourceKind};
use crate::recipes::resolve;
use crate::switches::{Auto, Choose, Toggle};
use flatout_ir::Precision;

fn with(overrides: &[&str]) -> Result<Config, UserError> {
    let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
    resolve("tiny", &[], &overrides)
}

fn refused(overrides: &[&str]) -> String {
    with(overrides).expect_err(&overrides.join(" ")).0
}

#[test]
fn overrides_apply_in_order_by_long_and_short_names() {
    let config = with(&[
        "optimizer.lr=1e-3",
        "lr=2e-3",
        "betas=[0.8, 0.9]",
        "precision=bf16",
        "fuse.qkv=off",
        "switches.memory_plan=false",
        "micro_batch=8",
        "seed=7",
        "data.path=a=b.txt",
        "freeze=[embed, layers.*.norm]",
        "model.qk_norm=false",
        "workers=auto",
        "steps=1e3",
    ])
    .unwrap();
    assert_eq!(config.optimizer.lr, 2e-3);
    assert_eq!(config.optimizer.betas, [0.8, 0.9]);
    assert_eq!(config.switches.compute.precision, Auto::Given(Precision::BF16));
    assert_eq!((config.switches.fuse.qkv, config.switches.memory.plan), (Toggle::Off, Toggle::Off));
    assert_eq!((config.train.micro_batch, config.eval.micro_batch), (Count::Given(8), Count::Auto));
    assert_eq!((config.train.seed, config.train.steps), (7, Some(1000)));
    assert_eq!(config.data.path.as_ref().unwrap().0, ["a=b.txt"]);
    assert_eq!(config.data.source(), SourceKind::Text);
    assert_eq!(config.train.freeze, ["embed", "layers.*.norm"]);
    assert!(!config.model.decoder().qk_norm);
}

#[test]
fn giving_one_of_two_alternative_keys_removes_the_recipes_other() {
    let epochs = with(&["epochs=2"]).unwrap().train;
    assert_eq!((epochs.steps, epochs.epochs), (None, Some(2)));
    let accumulate = |overrides: &[&str]| {
        let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
        resolve("pretrain-226m", &[], &overrides).unwrap().train
    };
    let split = accumulate(&["accumulate=8"]);
    assert_eq!((split.micro_batch, split.micro_batch()), (Count::Auto, Some(8)));
    assert_eq!(accumulate(&["micro_batch=auto", "accumulate=32"]).micro_batch(), Some(2));
    assert_eq!(accumulate(&["accumulate=32", "micro_batch=auto"]).micro_batch(), Some(2));
    assert_eq!(accumulate(&["micro_batch=auto"]).micro_batch(), None);
    assert!(refused(&["epochs=1", "steps=2"]).contains("are both given"));
}

#[test]
fn options_that_are_keys_are_answered_with_them() {
    for (words, sentence) in [
        ("--lr 1e-3", "there is no option `--lr`; keys are given without dashes, as in `lr=1e-3`"),
        ("--lr=1e-3", "there is no option `--lr`; keys are given without dashes, as in `lr=1e-3`"),
        ("--lr --json", "keys are given without dashes, as in `lr=VALUE`"),
        ("--model.layers 6", "as in `model.layers=6`"),
        ("--learning_rate 1e-3", "there is no option `--learning_rate`; here that is `optimizer.lr=1e-3`"),
        ("--grad-accum-steps 12", "here that is `train.accumulate=12`"),
        ("--bf16", "here that is `precision=bf16`"),
        ("--load_in_4bit", "here that is `base=nf4`"),
        ("--every 5", "here eval.every=VALUE or checkpoint.every=VALUE or log.every=VALUE"),
    ] {
        let (option, next) = words.split_once(' ').map_or((words, None), |(a, b)| (a, Some(b)));
        let answer = option_as_key(option, next).unwrap();
        assert!(answer.contains(sentence), "{words}: {answer:?} lacks {sentence:?}");
    }
    assert_eq!(option_as_key("--colour", None), None);
}

#[test]
fn a_shorter_run_has_a_shorter_warm_up_unless_one_is_asked_for() {
    let warmup = |overrides: &[&str]| with(overrides).unwrap().schedule.warmup_steps;
    assert_eq!(warmup(&["train.steps=400"]), 50, "the recipe's, while it fits");
    assert_eq!(warmup(&["train.steps=40"]), 3, "50 of 800");
    assert_eq!(warmup(&["train.steps=5"]), 0);
    assert_eq!(warmup(&["train.steps=5", "warmup_steps=2"]), 2);
    assert!(refused(&["warmup_steps=11", "steps=10"]).contains("`schedule.warmup_steps` = 11 is more"));
    let of_epochs = resolve("bdh-cifar10", &[], &["train.steps=100".into()]).unwrap();
    assert_eq!(of_epochs.schedule.warmup_steps, 10);
    assert_eq!((of_epochs.eval.every, of_epochs.eval.every_epochs), (10, None));
    let resumed = with(&["steps=100", "warmup_steps=60"]).unwrap().resumed(&["steps=50".into()]).unwrap();
    assert_eq!(resumed.schedule.warmup_steps, 60, "the horizon of a resumed run does not change");
}

#[test]
fn the_batch_is_micro_batch_times_accumulate() {
    let train = |overrides: &[&str]| with(overrides).unwrap().train;
    for words in [["train.micro_batch=8", "train.accumulate=12"], ["accumulate=12", "micro_batch=8"]] {
        let train = train(&words);
        assert_eq!((train.batch, train.micro_batch(), train.accumulate), (96, Some(8), None));
    }
    let agreed = train(&["micro_batch=8", "batch=96", "accumulate=12"]);
    assert_eq!((agreed.batch, agreed.micro_batch()), (96, Some(8)));
    assert_eq!(
        refused(&["micro_batch=8", "batch=64", "accumulate=12"]),
        "`train.micro_batch` = 8 times `train.accumulate` = 12 is 96, and `train.batch` is 64: leave one of them out"
    );
    assert!(refused(&["micro_batch=8", "accumulate=0"]).contains("`train.accumulate` is 0"));

    let mut layers = Layers::default();
    layers.file(&with(&[]).unwrap().to_toml(), "tiny").unwrap();
    layers.file("[train]\nmicro_batch = 2\naccumulate = 6\n", "mine.toml").unwrap();
    assert_eq!(layers.clone().finish().unwrap().train.batch, 12);
    let contradiction = "[train]\nbatch = 3\nmicro_batch = 2\naccumulate = 6\n";
    let sentence = layers.file(contradiction, "mine.toml").unwrap_err().0;
    assert!(sentence.starts_with("mine.toml line 4: `train.micro_batch` = 2 times"), "{sentence}");
}

#[test]
fn compile_sets_switches_in_the_order_of_the_overrides() {
    let switches = with(&["compile=off", "fuse.qkv=on"]).unwrap().switches;
    assert_eq!((switches.fuse.qkv, switches.fuse.norm), (Toggle::On, Toggle::Off));
    assert_eq!(switches.kernels.cuda_graphs, Choose::Off);
    let switches = with(&["fuse.qkv=on", "compile=off"]).unwrap().switches;
    assert_eq!(switches.fuse.qkv, Toggle::Off);
    assert_eq!(with(&["compile=reduce-overhead"]).unwrap().switches.kernels.cuda_graphs, Choose::On);

    let mut layers = Layers::default();
    layers.file(&with(&[]).unwrap().to_toml(), "base").unwrap();
    layers.file("[switches]\nattention = \"naive\"\nfuse.loss = true\ncompile = \"off\"\n", "over").unwrap();
    let switches = layers.finish().unwrap().switches;
    assert_eq!((switches.fuse.loss, switches.fuse.qkv), (Toggle::On, Toggle::Off), "a switch beside it wins");
}

#[test]
fn unknown_keys_are_answered_with_the_likely_name() {
    let cases = [
        ("optimiser.lr=1", "there is no key `optimiser.lr`; did you mean `optimizer.lr`?"),
        ("bathc=1", "there is no key `bathc`; did you mean `train.batch`?"),
        ("precison=bf16", "there is no key `precison`; did you mean `switches.precision`?"),
        ("fuse.qvk=on", "there is no key `fuse.qvk`; did you mean `switches.fuse.qkv`?"),
        ("qkv=on", "there is no key `qkv`; did you mean `switches.fuse.qkv`?"),
        ("num_workers=4", "there is no key `num_workers`; here that is `loader.workers=4`"),
        ("per_device_train_batch_size=4", "here that is `train.micro_batch=4`"),
        ("gradient_checkpointing=true", "here that is `recompute=full`"),
        ("gradient_checkpointing=false", "here that is `recompute=none`"),
        ("use_fp8=true", "here that is `precision=fp8`"),
        ("optimizer=adamw", "here that is `optimizer.name=adamw`"),
        ("optimizer=sgd", "here that is `optimizer.name` (adamw, muon)"),
        (
            "optimizer.name=AdamW8bit",
            "must be one of adamw, muon, not `AdamW8bit`; here that is `optimizer.state=int8`",
        ),
        ("attention=sdpa", "not `sdpa`; here that is `attention=flash`"),
        ("workers=0", "not `0`; here that is `loader.workers=1`"),
        ("train.lr=1", "there is no key `train.lr`; here that is `optimizer.lr`"),
        ("model.precision=bf16", "there is no key `model.precision`; here that is `switches.precision`"),
        ("optimizer.dampening=1", "`optimizer` has name, lr, adamw_lr, betas, eps, momentum, nesterov"),
        ("xyzzy=1", "`flatout schema` lists them all"),
        ("every=10", "`every` may be eval.every or checkpoint.every or log.every: give it in full"),
        ("lr", "`lr` is neither a recipe nor key=value"),
        ("=3", "there is no key ``"),
        ("lr=fast", "`optimizer.lr` must be a number, not `fast`"),
        ("lr=", "`optimizer.lr` must be a number, not ``"),
        ("precision=fp4", "`switches.precision` must be one of auto, fp32, tf32, bf16, fp8, not `fp4`"),
        ("steps=-5", "`train.steps` must be a whole number of 0 or more, not `-5`"),
        ("lr=NaN", "`optimizer.lr` must be a number, not `NaN`"),
        ("lr=none", "`optimizer.lr` must be a number, not `none`"),
        ("groups=[{path='a'}]", "one of them has `path`"),
        ("groups=[{lr_scale=0.5}]", "`train.groups` has a table without `paths`"),
        ("groups=[{paths=['a'],lr_scale='x'}]", "`train.groups.lr_scale` must be a number"),
    ];
    for (argument, words) in cases {
        let sentence = refused(&[argument]);
        assert!(sentence.contains(words), "{argument}: {sentence:?} lacks {words:?}");
    }
}

#[test]
fn files_are_refused_with_file_and_line() {
    let cases = [
        (
            "[model]\nwidth = 8\nwidht = 9\n",
            "mine.toml line 3: there is no key `model.widht`; did you mean `model.width`?",
        ),
        (
            "[train]\nbatch = 8\nsteps = \"many\"\n",
            "mine.toml line 3: `train.steps` must be a whole number of 0 or more, not `many`",
        ),
        ("lr = 1\n", "mine.toml line 1: there is no key `lr`; here that is `optimizer.lr`"),
        (
            "\n[training]\nmax_steps = 5\n",
            "mine.toml line 3: there is no key `training.max_steps`; here that is `train.steps=5`",
        ),
        ("[train]\nsteps = 1\nepochs = 1\n", "`train.steps` and `train.epochs` are both given"),
        ("\n\n[nothing]\n", "mine.toml line 3: there is no key `nothing`"),
        ("[train]\nsteps = \n", "mine.toml line 2: "),
        ("[train]\nbatch = 1\nbatch = 2\n", "mine.toml line 3: "),
        ("description = 5\n", "mine.toml line 1: `description` must be a text"),
        ("train = 5\n", "mine.toml line 1: there is no key `train`"),
        (
            "[[train.groups]]\npaths = \"a\"\nrate = 1\n",
            "mine.toml line 1: `train.groups` must be a list of tables",
        ),
        ("[train]\nbatch = 8\n", "`model.width` is missing: give a whole number"),
    ];
    for (text, words) in cases {
        let sentence = Config::parse(text, "mine.toml").unwrap_err().0;
        assert!(sentence.contains(words), "{sentence:?} lacks {words:?}");
        assert!(!sentence.contains('\n'), "{sentence:?}");
    }
}

#[test]
fn a_loaded_model_replaces_the_recipes_and_must_agree_with_overrides() {
    let tiny = with(&[]).unwrap().model.decoder().clone();
    let model = DecoderConfig { width: 48, tied: false, context: 64, kv_heads: None, ..tiny };
    let resolved = |overrides: &[&str]| {
        let mut layers = Layers::default();
        layers.file(&with(&[]).unwrap().to_toml(), "tiny").unwrap();
        let mut words = vec!["model.from=there".to_string()];
        words.extend(overrides.iter().map(|word| word.to_string()));
        layers.overrides(&words).unwrap();
        layers.model(&model.clone().into(), "there").and_then(|()| layers.finish())
    };
    let config = resolved(&["lr=1e-4", "width=48", "dropout=0.25"]).unwrap();
    let expected = DecoderConfig { from: Some("there".into()), dropout: 0.25, ..model.clone() };
    assert_eq!(*config.model.decoder(), expected, "tiny's context of 128 becomes the model's");
    assert_eq!(resolved(&["context=96"]).unwrap().model.decoder().context, 96, "unless it is given");
    for (word, sentence) in [
        ("width=128", "`model.width` is 128 and the model of there has 48: leave it out"),
        ("tied=true", "`model.tied` is true and the model of there has false"),
        ("kv_heads=2", "`model.kv_heads` is 2 and the model of there has none"),
    ] {
        let refused = resolved(&[word]).unwrap_err().0;
        assert!(refused.contains(sentence), "{refused}");
    }
}

#[test]
fn a_resumed_run_changes_only_what_may_change() {
    let config = with(&["steps=100", "warmup_steps=10"]).unwrap();
    let longer = config.resumed(&["steps=200".into(), "eval.every=7".into(), "log.every=5".into()]).unwrap();
    assert_eq!((longer.train.steps, longer.schedule.horizon_steps), (Some(200), Some(100)));
    assert_eq!((longer.eval.every, longer.log.every), (7, 5));
    assert!(config.resumed(&["shard=gradients".into()]).is_ok(), "state is divided again at every start");
    let again = longer.resumed(&["steps=300".into()]).unwrap();
    assert_eq!(again.schedule.horizon_steps, Some(100), "the horizon is the first run's");
    for argument in ["lr=1", "precision=bf16", "compile=off", "batch=64", "horizon_steps=5"] {
        let sentence = config.resumed(&[argument.into()]).unwrap_err().0;
        assert!(sentence.contains("cannot change when a run is resumed"), "{sentence}");
    }
    assert!(config.resumed(&["stpes=5".into()]).unwrap_err().0.contains("did you mean `train.steps`?"));
}

section! {
    /// A part with a width of its own.
    pub struct Tower {
        /// Its width.
        pub width: usize,
        /// Its depth.
        pub layers: usize = 2,
    }
}

section! {
    /// A model that may have such a part.
    pub struct Seeing {
        /// Its width.
        pub width: usize,
        /// Its eyes.
        pub vision: Option<Tower>,
    }
}

#[test]
fn nested_tables_are_laid_written_and_read_back() {
    let keys = schema::of_section("model", Seeing::keys());
    let mut values = BTreeMap::new();
    let file = parse("[model]\nwidth = 8\n[model.vision]\nwidth = 4\n", "mine.toml").unwrap();
    let mut leaves = vec![];
    collect_leaves(&mut vec![], &file, &keys, &mut leaves);
    for (path, given) in leaves {
        values.insert(path.join("."), given);
    }
    let Meaning::One(found) = schema::lookup_among(&keys, "model.vision.layers") else { panic!("a key") };
    values.insert(found.path, Value::Integer(3));
    let mut tree = Table::new();
    for (path, value) in &values {
        nest(&mut tree, keys.iter().find(|found| found.path == *path).unwrap(), value.clone());
    }
    let seeing: Seeing = tree["model"].clone().try_into().unwrap();
    assert_eq!(seeing, Seeing { width: 8, vision: Some(Tower { width: 4, layers: 3 }) });
    let text = text::section_text("model", &keys, &values);
    assert_eq!(text, "\n[model]\nwidth = 8\n\n[model.vision]\nwidth = 4\nlayers = 3\n");
    let again: Table = toml::from_str(&text).unwrap();
    assert_eq!(again, tree);
}

#[test]
fn nested_keys_are_required_only_in_a_given_table_and_unknown_ones_are_named() {
    let keys = schema::of_section("model", Seeing::keys());
    let missed = |given: &[&str]| missing(&keys, |path| given.contains(&path)).map(|found| &found.path[..]);
    assert_eq!(missed(&["model.width"]), None);
    assert_eq!(missed(&["model.width", "model.vision.layers"]), Some("model.vision.width"));
    assert_eq!(
        unknown(&keys, "model.vision.widht", None),
        "there is no key `model.vision.widht`; did you mean `model.vision.width`?"
    );
    assert_eq!(
        unknown(&keys, "model.vision.colour", None),
        "there is no key `model.vision.colour`; `model` has width, vision.width, vision.layers"
    );
}
