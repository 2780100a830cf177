//! Simulates the schedule of several ranks on one GPU: in place of each exchange, a kernel of 16 blocks runs on the exchange
//! stream for the predicted time and with the predicted bytes. Prints the time of a step without exchanges, with them, and with
//! `overlap=off`, with the predictions. The numerical results are meaningless.
//!
//! cargo run --release -p flatout-measure --example stand_in -- pretrain-226m train.batch=64 [--gpus 8] [--steps 20]

use std::time::Duration;

use flatout_ir::cost::of_launch;
use flatout_ir::plan::PlacedSlot;
use flatout_ir::{Class, DType, Launch, PlanSet, Role, Target};
use flatout_measure::forecast::scaling::exchange;
use flatout_runtime::Session;
use flatout_train::device::{self, Device};
use flatout_train::ranks::target_among;
use flatout_train::resolve::compile::{Compiled, compile};
use flatout_train::resolve::prediction;
use flatout_train::switches::Backend;
use flatout_train::{Config, Failure, UserError, recipes};

/// Interleaved rounds over all variants, so that clock drift affects all of them alike.
const ROUNDS: usize = 3;

fn main() {
    if let Err(failure) = measure() {
        eprintln!("stand_in: {failure}");
        std::process::exit(2);
    }
}

fn measure() -> Result<(), Failure> {
    let (mut words, mut gpus, mut steps) = (vec![], 8, 20);
    let mut all = std::env::args().skip(1);
    while let Some(word) = all.next() {
        let mut number = |option: &str| {
            let given = all.next().and_then(|word| word.parse().ok()).filter(|number| *number > 0);
            given.ok_or_else(|| UserError(format!("{option} takes a number above 0")))
        };
        match word.as_str() {
            "--gpus" => gpus = number("--gpus")?,
            "--steps" => steps = number("--steps")?,
            _ => words.push(word),
        }
    }
    let Some((recipe, overrides)) = words.split_first() else {
        return Err(UserError("name a recipe, as in: stand_in pretrain-226m train.batch=64".into()).into());
    };
    let config = recipes::resolve(recipe, &[], overrides)?;
    let Device::Cuda(gpu) = Device::open(Backend::Cuda)? else { unreachable!("a GPU was asked for") };
    let device = Device::Cuda(gpu.clone());
    let compiled = |overlap: &str| -> Result<Compiled, Failure> {
        let config = config.with(&[format!("switches.overlap={overlap}")])?;
        let target = device.target(&config.switches);
        let links = device::links_of(&target.name, None, None, None, gpus)?;
        compile(&config, &target_among(gpus, Target { links: Some(links), ..target }))
    };
    let [on, off] = [compiled("on")?, compiled("off")?];
    eprintln!("compiled");
    let mut variants = vec![];
    for (name, plans, is_wired) in
        [("no exchange", &on, false), ("overlap=on", &on, true), ("overlap=off", &off, true)]
    {
        let target = &plans.target;
        let times = |launch: &Launch| {
            is_wired.then(|| Duration::from_secs_f64(of_launch(launch, target).predicted_seconds))
        };
        let options = device::session_options(&plans.settled);
        let mut session = Session::with_stand_in(plans.plans.clone(), &gpu, options, &times)?;
        fill(&mut session, &config)?;
        eprintln!("session: {name}");
        variants.push((name, plans, session, f64::INFINITY));
    }
    for round in 1..=ROUNDS {
        eprintln!("round {round} of {ROUNDS}");
        for (_, plans, session, best) in &mut variants {
            let runs = prediction::typical_runs(plans, config.train.batch);
            let step = |session: &mut Session| -> Result<(), Failure> {
                for (role, times) in &runs {
                    (0..*times).try_for_each(|_| session.run(*role))?;
                }
                Ok(())
            };
            (0..3).try_for_each(|_| step(session))?;
            let begin = session.mark()?;
            (0..steps).try_for_each(|_| step(session))?;
            let end = session.mark()?;
            let ms = 1e3 * session.between(&begin, &end)?.as_secs_f64() / steps as f64;
            *best = best.min(ms);
        }
    }
    let overlapped = exchange(&on, config.train.batch);
    let sequential = exchange(&off, config.train.batch);
    println!("{recipe} as one of {gpus} ranks on {}, {} buckets", on.target.name, overlapped.buckets);
    println!("exchanges of a step: {:.2} ms predicted", overlapped.wire_ms);
    println!("{:12} {:>10} {:>12} {:>12}", "", "ms a step", "longer by", "predicted");
    let bare = variants[0].3;
    for ((name, _, _, ms), predicted) in
        variants.iter().zip([0.0, overlapped.exposed_ms, sequential.exposed_ms])
    {
        println!("{name:12} {ms:10.2} {:9.2} ms {predicted:9.2} ms", ms - bare);
    }
    Ok(())
}

/// Writes values under which a step does ordinary work: small weights, tokens of the vocabulary, a weight of 1 for every token.
/// One block of random values is repeated.
fn fill(session: &mut Session, config: &Config) -> Result<(), Failure> {
    let plans: PlanSet = session.plans().clone();
    let context = config.model.tokens();
    let mut seed = 1u32;
    let mut draw = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        0.04 * ((seed >> 8) as f32 / (1 << 23) as f32 - 1.0)
    };
    let drawn: Vec<f32> = (0..1 << 18).map(|_| draw()).collect();
    let f32s: Vec<u8> = drawn.iter().flat_map(|x| x.to_le_bytes()).collect();
    let bf16s: Vec<u8> = drawn.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect();
    let ones: Vec<u8> = drawn.iter().flat_map(|_| 1f32.to_le_bytes()).collect();
    let repeated = |block: &[u8], bytes: usize| {
        let mut all = block.repeat(bytes.div_ceil(block.len()));
        all.truncate(bytes);
        all
    };
    for piece in plans.held(0).into_iter().filter(|piece| piece.class == Class::Weight) {
        let block = if piece.ty.rank() < 2 { &ones } else { &f32s };
        session.write_range(&piece.slot, piece.at, &repeated(block, 4 * piece.elements()))?;
    }
    for slot in plans.slots.iter().filter(|slot| slot.class == Class::Input) {
        let count = slot.ty.elements();
        let name = slot.path.rsplit('.').next().unwrap_or_default();
        let i32s = |of: &dyn Fn(usize) -> usize| (0..count).map(|i| of(i) as i32).collect::<Vec<_>>();
        match (slot.ty.dtype, name) {
            (DType::F32, "weights") => session.write_f32(&slot.path, &vec![1.0; count])?,
            (DType::F32, "lr") => session.write_f32(&slot.path, &vec![1e-4; count])?,
            (DType::F32, _) => session.write_f32(&slot.path, &vec![0.0; count])?,
            (DType::I32, "tokens" | "targets") => {
                session.write_i32(&slot.path, &i32s(&|i| i * 7919 % 8192))?;
            }
            (DType::I32, "positions") => session.write_i32(&slot.path, &i32s(&|i| i % context))?,
            _ => {}
        }
    }
    if plans.plan(Role::Derive).is_some() {
        session.run(Role::Derive)?;
    }
    // Without exchanges nothing gathers the copies that layers read; left at zero they would draw less power.
    let is_copy = |slot: &&PlacedSlot| {
        slot.class == Class::Derived && slot.ty.dtype == DType::BF16 && slot.ty.rank() >= 2
    };
    for slot in plans.slots.iter().filter(is_copy) {
        session.write_slot(&slot.path, &repeated(&bf16s, 2 * slot.ty.elements()))?;
    }
    Ok(())
}
