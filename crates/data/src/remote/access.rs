//! The hub's endpoint and the user's token, from the environment variables of the Hugging Face tools.

use std::fs;
use std::path::{Path, PathBuf};

/// Access to the hub for this user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    /// The hub's URL without a trailing slash; `HF_ENDPOINT`.
    pub endpoint: String,
    /// The user's token; `HF_TOKEN`, or the file `token` in `HF_HOME`.
    pub token: Option<String>,
    /// Whether requests are forbidden; `HF_HUB_OFFLINE`.
    pub offline: bool,
    /// The folder of the Hugging Face tools; `HF_HOME`. `None` where the user has no home folder.
    pub home: Option<PathBuf>,
}

impl Access {
    pub fn from_environment() -> Self {
        let under_home = || {
            let caches = variable("XDG_CACHE_HOME").map(PathBuf::from);
            let caches = caches.or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache")));
            caches.map(|caches| caches.join("huggingface"))
        };
        let home = variable("HF_HOME").map(PathBuf::from).or_else(under_home);
        let kept = variable("HF_TOKEN_PATH").map(PathBuf::from);
        let kept = kept.or_else(|| home.as_ref().map(|home| home.join("token")));
        let token = variable("HF_TOKEN").or_else(|| fs::read_to_string(kept?).ok());
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Self {
            endpoint: endpoint.trim_end_matches('/').to_string(),
            token: token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty()),
            offline: variable("HF_HUB_OFFLINE")
                .is_some_and(|value| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str())),
            home,
        }
    }
}

/// An environment variable, if it is not empty.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}
