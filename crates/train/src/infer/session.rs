//! Opens a session that runs a loaded model's programs.

use flatout_ir::{Base, Program, Role, compile};
use flatout_runtime::Session;

use crate::Failure;
use crate::device::Device;
use crate::resolve::groups::of_part;
use crate::resolve::settle::settle;
use crate::switches::Settled;
use crate::weights::initial;
use crate::weights::loaded::Loaded;
use flatout_waits::{self as waits, Unit};

impl Loaded {
    /// Compiles programs in the precision of the config and loads the weights into a session.
    pub fn session(&mut self, device: &Device, programs: &[Program]) -> Result<Session, Failure> {
        let wait = waits::begin("planning", Unit::Nothing, None);
        let target = &device.target(&self.config.switches);
        let graph = &programs[0].graph;
        let mut settled = settle(&of_part(&self.config, graph), target, graph)?;
        keep_as_read(&mut settled, programs);
        let plans = compile(programs, target, &settled.options)?;
        drop(wait);
        let mut session = device.session(plans, &settled)?;
        // A session that stores weights as codes quantises them itself; any other reads the dequantised values.
        match settled.options.base {
            Base::Full => self.weights.load(&mut session, |_| true)?,
            _ => self.weights.without_codes(|weights| weights.load(&mut session, |_| true))?,
        };
        initial::write_tables(&mut session)?;
        if session.plans().plan(Role::Derive).is_some() {
            session.run(Role::Derive)?;
        }
        Ok(session)
    }
}

/// Stores weights in bf16 if products read them in bf16: nothing trains them, and only an update needs more digits.
pub fn keep_as_read(settled: &mut Settled, programs: &[Program]) {
    if settled.options.precision.is_narrow() {
        let slots = programs.iter().flat_map(|program| &program.graph.slots);
        let parameters = slots.filter(|slot| slot.class.is_parameter());
        settled.options.freeze = parameters.map(|slot| slot.path.clone()).collect();
    }
}
