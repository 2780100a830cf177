//! Measures decoding on this GPU for a model of a recipe's shape with random weights: the launches of a step, which adds a token
//! to every sequence; the step as the device runs it; and steps as `serve` takes them, where the host writes the inputs and reads
//! back the tokens that the device sampled. Compares them with the time that the memory bandwidth needs for the bytes of weights
//! and cache.
//!
//! cargo run --release -p flatout-measure --example decode_speed -- qwen3-0.6b-sft [--sequences 64] [--prompt 512] [--tokens 128]

use std::collections::BTreeMap;
use std::time::Instant;

use flatout_ir::cost::of_launch;
use flatout_ir::ops::sample::{Draw, NUMBERS, SHARES};
use flatout_ir::passes::input_path;
use flatout_ir::plan::PlacedSlot;
use flatout_ir::{Class, DType, Plan, Program, Role, Target, compile};
use flatout_models::form::Form;
use flatout_runtime::Session;
use flatout_train::device::Device;
use flatout_train::infer::session::keep_as_read;
use flatout_train::resolve::groups::of_part;
use flatout_train::resolve::settle::settle;
use flatout_train::switches::Backend;
use flatout_train::{Failure, UserError, recipes};

/// Steps of one measurement, and the number of measurements.
const STEPS: usize = 50;
const ROUNDS: usize = 3;

/// The sizes of the measurement.
#[derive(Clone, Copy)]
struct Size {
    sequences: usize,
    prompt: usize,
    tokens: usize,
    vocab: usize,
}

impl Size {
    fn capacity(self) -> usize {
        self.prompt + self.tokens
    }
}

fn main() {
    if let Err(failure) = measure() {
        eprintln!("decode_speed: {failure}");
        std::process::exit(2);
    }
}

fn measure() -> Result<(), Failure> {
    let mut words = vec![];
    let (mut sequences, mut prompt, mut tokens) = (64, 512, 128);
    let mut all = std::env::args().skip(1);
    while let Some(word) = all.next() {
        let mut number = |option: &str| {
            let given = all.next().and_then(|word| word.parse().ok()).filter(|number| *number > 0);
            given.ok_or_else(|| UserError(format!("{option} takes a number above 0")))
        };
        match word.as_str() {
            "--sequences" => sequences = number("--sequences")?,
            "--prompt" => prompt = number("--prompt")?,
            "--tokens" => tokens = number("--tokens")?,
            _ => words.push(word),
        }
    }
    let Some((recipe, overrides)) = words.split_first() else {
        return Err(UserError("name a recipe, as in: decode_speed qwen3-0.6b-sft".into()).into());
    };
    let mut config = recipes::resolve(recipe, &[], overrides)?;
    let Some(vocab) = config.model.vocab() else {
        return Err(UserError(format!("{recipe} writes no text")).into());
    };
    let size = Size { sequences, prompt, tokens, vocab };
    config.model.set_context(size.capacity());
    let form =
        Form::Cached { sequences, tokens: sequences, capacity: size.capacity(), read: sequences, seen: None };
    let programs = [Program { role: Role::Decode, graph: config.model.build(form) }];
    let device = Device::open(Backend::Cuda)?;
    let target = device.target(&config.switches);
    let mut settled = settle(&of_part(&config, &programs[0].graph), &target, &programs[0].graph)?;
    keep_as_read(&mut settled, &programs);
    let plans = compile(&programs, &target, &settled.options)?;
    let plan = plans.plan(Role::Decode).expect("it was compiled").clone();
    println!("{recipe} on {}: {:.2} GiB in all", target.name, gib(plans.arena_bytes));
    let mut session = device.session(plans, &settled)?;
    fill(&mut session)?;
    write(&mut session, size, size.prompt + size.tokens / 2)?;
    launches(&mut session, &plan, &target)?;

    let limit = limit_ms(&session, size, &target);
    let share = |ms: f64| format!("{ms:8.3} ms a step, {:.1}% of the limit", 100.0 * limit / ms);
    println!(
        "{limit:8.3} ms for the bytes of weights and cache at {:.2} TB/s",
        target.rates.memory_bytes / 1e12
    );
    (0..5).try_for_each(|_| session.run(Role::Decode))?;
    for _ in 0..ROUNDS {
        let begin = session.mark()?;
        (0..STEPS).try_for_each(|_| session.run(Role::Decode))?;
        let end = session.mark()?;
        println!(
            "{} on the device",
            share(1e3 * session.between(&begin, &end)?.as_secs_f64() / STEPS as f64)
        );
    }
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        for step in 0..size.tokens {
            write(&mut session, size, size.prompt + step + 1)?;
            session.run(Role::Decode)?;
            session.result(Role::Decode, "drawn")?;
        }
        let seconds = begin.elapsed().as_secs_f64();
        let rate = (size.sequences * size.tokens) as f64 / seconds;
        println!("{} as it is served, {rate:.0} tokens/s", share(1e3 * seconds / size.tokens as f64));
    }
    Ok(())
}

fn gib(bytes: usize) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

/// Prints the launches of a step, grouped by kernel, path and shapes, longest first.
fn launches(session: &mut Session, plan: &Plan, target: &Target) -> Result<(), Failure> {
    let times = session.time(&[Role::Decode], 5)?;
    let mut rows: BTreeMap<String, (usize, f64, f64)> = BTreeMap::new();
    for (launch, time) in plan.launches.iter().zip(&times[0]) {
        let place: Vec<&str> = launch.path.split('.').filter(|part| part.parse::<usize>().is_err()).collect();
        let dims: Vec<String> = launch.ins.iter().take(2).map(|view| format!("{:?}", view.dims)).collect();
        let row =
            rows.entry(format!("{} {} {}", launch.kernel, place.join("."), dims.join(" "))).or_default();
        row.0 += 1;
        row.1 += 1e3 * time.seconds;
        row.2 += 1e3 * of_launch(launch, target).roofline_seconds;
    }
    let mut rows: Vec<_> = rows.into_iter().collect();
    rows.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    for (name, (count, ms, roofline)) in rows.iter().take(20) {
        println!("{count:4} {ms:8.3} ms, roofline {roofline:8.3}  {name}");
    }
    let sum: f64 = rows.iter().map(|(_, (_, ms, _))| ms).sum();
    println!("{:4} {sum:8.3} ms, the sum of launches timed one by one", plan.launches.len());
    Ok(())
}

/// Milliseconds that memory needs for the bytes a step must read: all weights except the embedding table (unless the head is tied
/// to it), and the cache when half of the tokens are generated.
fn limit_ms(session: &Session, size: Size, target: &Target) -> f64 {
    let plans = session.plans();
    let bytes = |slot: &PlacedSlot| (slot.ty.elements() * slot.ty.dtype.bytes()) as f64;
    // Weights that lie inside a larger slot, such as q, k and v, count once, as that slot.
    let bytes_of = |wanted: &dyn Fn(Class) -> bool| -> f64 {
        let mut largest: BTreeMap<usize, f64> = BTreeMap::new();
        let mut end = 0;
        for slot in plans.slots.iter().filter(|slot| wanted(slot.class)) {
            let all = largest.entry(slot.view.offset).or_default();
            *all = all.max(bytes(slot));
        }
        let mut sum = 0.0;
        for (at, size) in largest.into_iter().filter(|(_, size)| *size > 0.0) {
            if at >= end {
                sum += size;
                end = at + size as usize;
            }
        }
        sum
    };
    let table = plans.slots.iter().find(|slot| slot.path == "embed.weight");
    let has_head = plans.slots.iter().any(|slot| slot.path == "head.weight");
    let table = table.filter(|_| has_head).map_or(0.0, bytes);
    let seen = (size.prompt as f64 + size.tokens as f64 / 2.0) / size.capacity() as f64;
    let read = bytes_of(&Class::is_parameter) - table + seen * bytes_of(&|class| class == Class::Cache);
    1e3 * read / target.rates.memory_bytes
}

/// Fills weights and cache with small random values.
fn fill(session: &mut Session) -> Result<(), Failure> {
    let plans = session.plans().clone();
    let mut seed = 1u32;
    let mut draw = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        0.04 * ((seed >> 8) as f32 / (1 << 23) as f32 - 1.0)
    };
    let drawn: Vec<f32> = (0..1 << 20).map(|_| draw()).collect();
    let f32s: Vec<u8> = drawn.iter().flat_map(|x| x.to_le_bytes()).collect();
    let bf16s: Vec<u8> = drawn.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect();
    for slot in plans.slots.iter().filter(|slot| slot.class != Class::Input) {
        let block = match slot.ty.dtype {
            DType::BF16 => &bf16s,
            DType::F32 => &f32s,
            _ => continue,
        };
        let bytes = slot.ty.dtype.bytes() * slot.ty.elements();
        let mut all = block.repeat(bytes.div_ceil(block.len()));
        all.truncate(bytes);
        session.write_slot(&slot.path, &all)?;
    }
    if plans.plan(Role::Derive).is_some() {
        session.run(Role::Derive)?;
    }
    Ok(())
}

/// Writes the inputs of a step after which every sequence has `seen` tokens.
fn write(session: &mut Session, size: Size, seen: usize) -> Result<(), Failure> {
    let Size { sequences, vocab, .. } = size;
    let capacity = size.capacity();
    let axes = session.plans().slot(&input_path(Role::Decode, "positions")).map_or(1, |slot| slot.ty.dims[0]);
    let mut set = |name: &str, count: usize, of: &dyn Fn(usize) -> usize| {
        let values: Vec<i32> = (0..count).map(|i| of(i) as i32).collect();
        session.write_i32(&input_path(Role::Decode, name), &values)
    };
    set("tokens", sequences, &|i| (i * 7919 + seen) % vocab)?;
    set("positions", axes * sequences, &|_| seen - 1)?;
    set("cache_rows", sequences, &|i| i * capacity + seen - 1)?;
    set("new_start", sequences, &|i| i)?;
    set("new_len", sequences, &|_| 1)?;
    set("seen_start", sequences, &|i| i * capacity)?;
    set("seen_len", sequences, &|_| seen)?;
    set("last", sequences, &|i| i)?;
    let draw = |sequence: usize| Draw {
        temperature: 0.8,
        top_k: 0,
        top_p: 0.95,
        seed: 1,
        sequence: sequence as u32,
        index: seen as u32,
    };
    let mut numbers = Vec::with_capacity(sequences * NUMBERS);
    let mut shares = Vec::with_capacity(sequences * SHARES);
    for sequence in 0..sequences {
        numbers.extend(draw(sequence).numbers(vocab));
        shares.extend(draw(sequence).shares());
    }
    session.write_i32(&input_path(Role::Decode, "numbers"), &numbers)?;
    Ok(session.write_f32(&input_path(Role::Decode, "shares"), &shares)?)
}
