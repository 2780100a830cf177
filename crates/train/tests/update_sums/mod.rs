//! The sums that an update is computed from: the gradients of what is trained, the loss and the weight.

use std::collections::BTreeMap;

use flatout_ir::Class;
use flatout_ir::passes::differentiate::{LOSS_SUM, WEIGHT_SUM, gradient_path};
use flatout_runtime::{Session, cpu};
use flatout_train::Config;
use flatout_train::config::resolved::Resolved;
use flatout_train::resolve::compile::compile;
use flatout_train::tasks::batch::{Batch, Draw};
use flatout_train::tasks::dataset::Dataset;
use flatout_train::training::update::accumulate;
use flatout_train::weights::initial;

pub type Sums = BTreeMap<String, Vec<f32>>;

const THREADS: usize = 2;

/// The sums of the first update of a config on data. Calls `see` with every micro-batch.
pub fn first_update(asked: &Config, data: &impl Dataset, mut see: impl FnMut(&Session, &Batch)) -> Sums {
    let mut resolved = Resolved::default();
    data.measure(asked, &mut resolved);
    let config = resolved.over(asked);
    let compiled = compile(&config, &cpu::target(THREADS)).expect("plans");
    let mut source = data.source(&config, compiled.feeding(), None).expect("a source");
    let mut session = Session::new(compiled.plans.clone(), THREADS).expect("a session");
    initial::write(&mut session, 3).expect("weights");
    source.begin_update();
    while let Some(batch) = source.next_batch().expect("a batch") {
        see(&session, &batch);
        accumulate(&mut session, &batch, Draw { seed: 1, step: 0 }).expect("gradients");
    }
    sums(&session)
}

/// The sums that a session has. A shift of all keys changes no softmax: the gradient of their biases is rounding, and left out.
pub fn sums(session: &Session) -> Sums {
    let slots = session.plans().slots.iter();
    let trained = slots.filter(|slot| slot.class == Class::Weight && !slot.is_whole);
    let trained = trained.filter(|slot| !slot.path.contains("wk_bias"));
    let paths = trained.map(|slot| gradient_path(&slot.path));
    let paths = paths.chain([LOSS_SUM.to_string(), WEIGHT_SUM.to_string()]);
    paths.map(|path| (path.clone(), session.read_f32(&path).expect("a sum"))).collect()
}
