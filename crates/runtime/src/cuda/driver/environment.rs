//! Environment variables that change results of NVIDIA's libraries; cleared before any library is opened.

/// Markers of variables that only control logging.
const HARMLESS: [&str; 3] = ["LOG", "_DBG", "DEBUG"];

/// Whether a variable may change results: the TF32 override, and anything cuBLAS and cuDNN read except for logging.
fn changes_numbers(name: &str) -> bool {
    let library = ["CUBLAS_", "CUBLASLT_", "CUDNN_"].iter().any(|prefix| name.starts_with(prefix));
    name == "NVIDIA_TF32_OVERRIDE" || library && !HARMLESS.iter().any(|word| name.contains(word))
}

/// The variables that are set now and may change results, sorted.
pub fn present() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let mut names: Vec<String> = names.filter(|name| changes_numbers(name)).collect();
    names.sort();
    names
}

/// Clears those variables and returns their names. Fails with the list if other threads are running, as clearing is not safe
/// then: call this first in `main`.
pub fn clear() -> Result<Vec<String>, String> {
    let names = present();
    if names.is_empty() {
        return Ok(names);
    }
    let threads = std::fs::read_dir("/proc/self/task").map(Iterator::count).unwrap_or(usize::MAX);
    if threads != 1 {
        return Err(format!("{} changes what NVIDIA's libraries compute: unset it", names.join(", ")));
    }
    for name in &names {
        // SAFETY: this is the only thread, so nothing else reads the environment concurrently.
        unsafe { std::env::remove_var(name) };
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logging_variables_are_kept() {
        for (name, does) in [
            ("NVIDIA_TF32_OVERRIDE", true),
            ("CUBLAS_WORKSPACE_CONFIG", true),
            ("CUBLAS_EMULATE_SINGLE_PRECISION", true),
            ("CUDNN_FORCE_ENGINE", true),
            ("CUBLASLT_LOG_LEVEL", false),
            ("CUDNN_LOGLEVEL_DBG", false),
            ("CUDA_VISIBLE_DEVICES", false),
        ] {
            assert_eq!(changes_numbers(name), does, "{name}");
        }
    }
}
