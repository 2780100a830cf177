//! Checks of the keys of `track`.

use crate::UserError;
use crate::config::Config;
use crate::refuse;

impl Config {
    /// Checks the keys of `track`. The address is saved and shown, so it must not contain secrets.
    pub(super) fn validate_track(&self) -> Result<(), UserError> {
        for (key, value) in
            [("experiment_name", &self.track.experiment_name), ("run_name", &self.track.run_name)]
        {
            if value.as_ref().is_some_and(|value| value.trim().is_empty()) {
                refuse!("`track.{key}` is empty: give a name, or leave it out");
            }
        }
        let Some(server) = &self.track.mlflow else { return Ok(()) };
        let host = ["http://", "https://"].iter().find_map(|scheme| server.strip_prefix(scheme));
        let host = host.map(|rest| rest.split('/').next().unwrap_or_default());
        if host.is_some_and(|host| host.contains('@')) {
            refuse!(
                "`track.mlflow` has a name or a password in its address: set MLFLOW_TRACKING_USERNAME and \
                 MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, instead"
            );
        }
        let is_odd = |letter: char| letter.is_whitespace() || letter.is_control() || "?#".contains(letter);
        if host.is_none_or(str::is_empty) || server.contains(is_odd) {
            refuse!(
                "`track.mlflow` is {server:?} and not the address of an MLflow server, such as http://localhost:5000"
            );
        }
        Ok(())
    }
}
