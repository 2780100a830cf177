//! Loaded cubins and the functions in them.

use std::collections::HashMap;
use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::Arc;

use super::{Driver, Handle};
use crate::cuda::context::{CudaError, Function, Source};

/// A loaded cubin.
pub struct Module {
    driver: &'static Driver,
    raw: Handle,
}

impl Module {
    pub fn load(driver: &'static Driver, cubin: &[u8]) -> Result<Module, CudaError> {
        let mut raw = null_mut();
        // SAFETY: writes one handle; the cubin is complete, from the compiler or with a verified checksum from the cache.
        let status = unsafe { (driver.module_load)(&mut raw, cubin.as_ptr().cast()) };
        driver.ok(status, "cuModuleLoadData")?;
        Ok(Module { driver, raw })
    }

    pub fn function(self: &Arc<Self>, entry: &str) -> Result<Function, CudaError> {
        let name = CString::new(entry).map_err(|_| CudaError::new("an entry's name holds a zero byte"))?;
        let mut raw = null_mut();
        // SAFETY: writes one handle; the module is loaded.
        let status = unsafe { (self.driver.module_function)(&mut raw, self.raw, name.as_ptr()) };
        self.driver.ok(status, &format!("cuModuleGetFunction of `{entry}`"))?;
        Ok(Function { raw, driver: self.driver, _module: Arc::clone(self) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`; functions keep their module alive.
        unsafe { (self.driver.module_unload)(self.raw) };
    }
}

// SAFETY: a module is a handle that the driver accepts on any thread where its context is current.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// The modules of a session, by source.
#[derive(Default)]
pub struct Modules(HashMap<Source, Arc<Module>>);

impl Modules {
    pub fn insert(&mut self, source: Source, module: Module) {
        self.0.insert(source, Arc::new(module));
    }

    pub fn function(&self, source: &Source, entry: &str) -> Result<Function, CudaError> {
        let module = self.0.get(source);
        let module = module.ok_or_else(|| {
            CudaError::new(format!("{} with {:?} was not listed as a source", source.name, source.defines))
        })?;
        module.function(entry).map_err(|e| CudaError::status(format!("{}: {}", source.name, e.what), e.code))
    }
}
