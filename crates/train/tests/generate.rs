//! Prefill and decode over a cache give the logits of the full forward pass.

use std::collections::BTreeSet;

use flatout_ir::passes::input_path;
use flatout_ir::{Class, Options, Program, Role, compile, random};
use flatout_models::decoder::build;
use flatout_models::form::Form;
use flatout_runtime::{Session, cpu};
use flatout_train::Config;
use flatout_train::device::Device;
use flatout_train::infer::generate::{Generator, GeneratorCapacity};
use flatout_train::infer::sampling::Sampling;
use flatout_train::run::checkpoint::TensorFile;
use flatout_train::weights::initial;
use flatout_train::weights::loaded::Loaded;

use crate::distance::relative;
use crate::small_run::{config, train_in};

const CONTEXT: usize = 160;

/// The straightforward computation: all logits of the whole sequence at once, with the checkpoint's weights.
struct Forward {
    session: Session,
    config: Config,
}

impl Forward {
    fn open(config: &Config, generator: &Generator) -> Forward {
        let form = Form::Logits { rows: 1, len: CONTEXT, seen: None };
        let programs = [Program { role: Role::Logits, graph: build(config.model.decoder(), form) }];
        let plans = compile(&programs, &cpu::target(2), &Options::default()).expect("plans");
        let mut session = Session::new(plans, 2).expect("a session");
        let file = TensorFile::open(&generator.checkpoint.join("state.safetensors")).expect("a checkpoint");
        let is_weight =
            |path: &str| session.plans().slot(path).is_some_and(|slot| slot.class == Class::Weight);
        let paths: Vec<String> = file.entries().keys().filter(|path| is_weight(path)).cloned().collect();
        for path in paths {
            let mut bytes = vec![0; file.entries()[&path].bytes()];
            file.read_into(&path, &mut bytes).expect("a weight");
            session.write_slot(&path, &bytes).expect("a weight");
        }
        initial::write_tables(&mut session).expect("tables");
        Forward { session, config: config.clone() }
    }

    /// Logits after each token.
    fn logits(&mut self, tokens: &[u32]) -> Vec<Vec<f32>> {
        let padded: Vec<i32> = (0..CONTEXT).map(|i| tokens.get(i).map_or(0, |&t| t as i32)).collect();
        let positions: Vec<i32> = (0..CONTEXT as i32).collect();
        self.session.write_i32(&input_path(Role::Logits, "tokens"), &padded).expect("tokens");
        self.session.write_i32(&input_path(Role::Logits, "positions"), &positions).expect("positions");
        self.session.run(Role::Logits).expect("logits");
        let logits = self.session.result(Role::Logits, "logits").expect("logits");
        logits.chunks(self.config.model.decoder().vocab).take(tokens.len()).map(<[f32]>::to_vec).collect()
    }
}

fn trained(overrides: &[&str]) -> (tempfile::TempDir, Config, Generator) {
    let folder = tempfile::tempdir().expect("a folder");
    let context = format!("model.context={CONTEXT}");
    let config = config(&[&[context.as_str(), "train.batch=2"], overrides].concat());
    train_in(&folder.path().join("run"), &config, |_| {});
    let generator = Generator::open(&folder.path().join("run"), &Device::Cpu { threads: 2 }).expect("a run");
    (folder, config, generator)
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| random::philox([i, 0, 0, 0], [5, 5])[0] % 200).collect()
}

#[test]
fn prompts_of_any_length_and_the_tokens_after_them() {
    let (_folder, config, mut generator) = trained(&[]);
    let all = tokens(CONTEXT);
    let mut forward = Forward::open(&config, &generator);
    let wanted = forward.logits(&all);
    let mut worst = 0.0f64;
    // Prompts are read 64 tokens at a time: below, at and beyond one chunk, two chunks and the whole context.
    for prompt in [1, 2, 5, 63, 64, 65, 66, 127, 128, 129, 159, 160] {
        generator.clear();
        let mut check = |logits: Vec<f32>, last: usize| {
            let off = relative(&logits, &wanted[last]);
            assert!(off < 1e-5, "after {} tokens of a prompt of {prompt}: off by {off:.1e}", last + 1);
            worst = worst.max(off);
        };
        check(generator.read(&all[..prompt]).expect("a prompt"), prompt - 1);
        for next in prompt..(prompt + 3).min(CONTEXT) {
            check(generator.read(&all[next..next + 1]).expect("a token"), next);
        }
        // A second piece of several tokens uses the prefill plan again.
        let more = (prompt + 3).min(CONTEXT)..(prompt + 13).min(CONTEXT);
        if !more.is_empty() {
            check(generator.read(&all[more.clone()]).expect("more"), more.end - 1);
        }
    }
    println!("logits off by {worst:.1e} at most");
    let sentence = generator.read(&all).expect_err("the context is full").to_string();
    assert!(sentence.contains("do not fit a context of 160"), "{sentence}");
}

#[test]
fn the_same_seed_draws_the_same_text() {
    let (_folder, _, mut generator) = trained(&[]);
    let mut say = |temperature: f64| -> Vec<String> {
        let text = |seed| {
            let sampling = Sampling { temperature, top_k: 0, top_p: 1.0, seed, max_tokens: 40 };
            let mut pieces = String::new();
            let text = generator.generate("", sampling, |piece| pieces.push_str(piece)).expect("text");
            assert!(text.starts_with(&pieces), "{pieces:?} comes before all of {text:?}");
            text
        };
        (0..8).map(text).collect()
    };
    let texts = say(1.0);
    assert_eq!(texts, say(1.0));
    assert!(texts.iter().collect::<BTreeSet<_>>().len() > 4, "other seeds draw other texts");
    let likeliest = say(0.0);
    assert!(likeliest.iter().all(|text| *text == likeliest[0]), "the likeliest token needs no seed");
}

#[test]
fn bf16_runs_generate_in_bf16() {
    let (_folder, config, mut generator) = trained(&["precision=bf16"]);
    let all = tokens(70);
    let wanted = Forward::open(&config, &generator).logits(&all);
    let off = relative(&generator.read(&all).expect("a prompt"), &wanted[69]);
    assert!(off > 1e-5 && off < 0.03, "bf16 is off by {off:.1e} from fp32");
}

/// Learned token values are part of the cache.
#[test]
fn learned_values_are_in_the_cache() {
    let (_folder, config, mut generator) =
        trained(&["model.value_embeddings=1", "model.tied=false", "schedule.windows=[16,160]"]);
    let all = tokens(90);
    let wanted = Forward::open(&config, &generator).logits(&all);
    for (from, to) in [(0, 65), (65, 66), (66, 90)] {
        let off = relative(&generator.read(&all[from..to]).expect("tokens"), &wanted[to - 1]);
        assert!(off < 1e-5, "after {to} tokens: off by {off:.1e}");
    }
}

/// A generator for several sequences at once.
fn several(dir: &std::path::Path, sequences: usize) -> Generator {
    let loaded = Loaded::open(dir, &[]).expect("a run");
    Generator::new(loaded, &Device::Cpu { threads: 2 }, GeneratorCapacity { sequences, tokens: CONTEXT })
        .expect("a model")
}

#[test]
fn lanes_of_any_lengths_have_the_logits_of_the_full_forward_pass() {
    let (folder, config, generator) = trained(&[]);
    let mut forward = Forward::open(&config, &generator);
    let mut several = several(&folder.path().join("run"), 5);
    let all: Vec<Vec<u32>> =
        (0..5).map(|lane| tokens(CONTEXT).into_iter().map(|t| (t * 7 + lane) % 200).collect()).collect();
    let wanted: Vec<Vec<Vec<f32>>> = all.iter().map(|tokens| forward.logits(tokens)).collect();
    // Prompts that fill less and more than a prefill, lanes that pause, and single tokens beside long pieces.
    let rounds: [[usize; 5]; 5] =
        [[1, 70, 3, 0, 130], [1, 1, 1, 90, 1], [0, 40, 0, 1, 1], [1, 1, 1, 1, 1], [157, 0, 9, 0, 2]];
    let mut seen = [0; 5];
    for round in rounds {
        let portions: Vec<(usize, &[u32])> = (0..5)
            .filter(|lane| round[*lane] > 0)
            .map(|lane| (lane, &all[lane][seen[lane]..seen[lane] + round[lane]]))
            .collect();
        let logits = several.read_lanes(&portions).expect("logits");
        for ((lane, portion), logits) in portions.iter().zip(logits) {
            seen[*lane] += portion.len();
            let off = relative(&logits, &wanted[*lane][seen[*lane] - 1]);
            assert!(off < 1e-5, "lane {lane} after {} tokens: off by {off:.1e}", seen[*lane]);
        }
    }
}

#[test]
fn many_prompts_at_once_are_continued_as_one_by_one() {
    let (folder, _, mut alone) = trained(&[]);
    let sampling = Sampling { temperature: 1.0, top_k: 40, top_p: 0.95, seed: 11, max_tokens: 30 };
    let prompts: Vec<Vec<u32>> = (0..7).map(|i| tokens(100)[..1 + 13 * i].to_vec()).collect();
    let one_by_one: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| {
            alone
                .continue_all(std::slice::from_ref(prompt), sampling, &mut |_, _| {})
                .expect("text")
                .remove(0)
        })
        .collect();
    assert!(one_by_one.iter().any(|made| made.len() == 30), "some are cut off: {one_by_one:?}");
    // More prompts than lanes: a lane that is done takes the next prompt.
    for sequences in [7, 3, 2] {
        let mut told = vec![vec![]; 7];
        let mut several = several(&folder.path().join("run"), sequences);
        let made = several.continue_all(&prompts, sampling, &mut |prompt, token| told[prompt].push(token));
        assert_eq!(made.expect("text"), one_by_one, "{sequences} at once");
        assert_eq!(told, one_by_one);
        assert_eq!(several.made, one_by_one.iter().map(Vec::len).sum::<usize>());
    }
    let copies = vec![prompts[2].clone(); 3];
    let made =
        several(&folder.path().join("run"), 3).continue_all(&copies, sampling, &mut |_, _| {}).expect("text");
    assert_eq!(made[0], one_by_one[2]);
    assert!(made[0] != made[1] && made[1] != made[2], "copies of a prompt are drawn by themselves");
}
