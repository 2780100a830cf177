//! A client of MLflow's REST interface, with the calls that sending a run needs.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flatout_data::remote::http::agent;
use serde_json::{Value, json};
use ureq::Agent;

/// Timeout after which a server counts as away.
const SILENCE: Duration = Duration::from_secs(8);
/// The longest response that is read.
const ANSWER_BYTES: u64 = 1 << 20;
/// The most characters of a server's message that are shown.
const SHOWN: usize = 200;

/// The error of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Temporary: the server does not answer, has an error of its own, or does not accept the credentials.
    Away(String),
    /// The experiment or run does not exist.
    Absent(String),
    /// The server refuses the request and would refuse it again.
    Refused(String),
    /// The request is too large; a smaller one may be accepted.
    TooLarge(String),
}

impl Trouble {
    pub fn sentence(self) -> String {
        match self {
            Trouble::Away(why) | Trouble::Absent(why) | Trouble::Refused(why) | Trouble::TooLarge(why) => why,
        }
    }
}

/// The user's credentials, from MLflow's environment variables.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    pub token: Option<String>,
    pub user: Option<String>,
    pub password: Option<String>,
}

impl Credentials {
    pub fn of_environment() -> Credentials {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Credentials {
            token: variable("MLFLOW_TRACKING_TOKEN"),
            user: variable("MLFLOW_TRACKING_USERNAME"),
            password: variable("MLFLOW_TRACKING_PASSWORD"),
        }
    }

    /// The value of the `authorization` header: a token, or user and password.
    fn header(&self) -> Option<String> {
        match (&self.token, &self.user) {
            (Some(token), _) => Some(format!("Bearer {token}")),
            (None, Some(user)) => {
                let both = format!("{user}:{}", self.password.as_deref().unwrap_or_default());
                Some(format!("Basic {}", STANDARD.encode(both)))
            }
            (None, None) => None,
        }
    }
}

pub struct Client {
    agent: Agent,
    base: String,
    authorization: Option<String>,
}

impl Client {
    pub fn new(server: &str, credentials: Credentials) -> Result<Client, String> {
        let agent = agent(SILENCE).map_err(|error| error.sentence)?;
        let base = format!("{}/api/2.0/mlflow", server.trim_end_matches('/'));
        Ok(Client { agent, base, authorization: credentials.header() })
    }

    /// The id of the experiment with this name, which is created if it does not exist.
    pub fn experiment(&self, name: &str) -> Result<String, Trouble> {
        let number = |answer: &Value| match answer.as_str() {
            Some(number) => Ok(number.to_string()),
            None => Err(Trouble::Away("it answers without the id of an experiment".into())),
        };
        let find = || self.get("experiments/get-by-name", &[("experiment_name", name)]);
        match find() {
            Ok(found) => number(&found["experiment"]["experiment_id"]),
            Err(Trouble::Absent(_)) => match self.post("experiments/create", &json!({ "name": name })) {
                Ok(made) => number(&made["experiment_id"]),
                // Another run may have created it meanwhile.
                Err(Trouble::Refused(why)) => match find() {
                    Ok(found) => number(&found["experiment"]["experiment_id"]),
                    Err(_) => Err(Trouble::Refused(why)),
                },
                Err(trouble) => Err(trouble),
            },
            Err(trouble) => Err(trouble),
        }
    }

    /// The id of the run in an experiment that has a tag.
    pub fn run_with_tag(&self, experiment: &str, key: &str, value: &str) -> Result<Option<String>, Trouble> {
        let filter = format!("tags.`{key}` = '{value}'");
        let request = json!({ "experiment_ids": [experiment], "filter": filter, "max_results": 1 });
        let found = self.post("runs/search", &request)?;
        Ok(found["runs"][0]["info"]["run_id"].as_str().map(str::to_string))
    }

    pub fn create_run(&self, run: &Value) -> Result<String, Trouble> {
        let made = self.post("runs/create", run)?;
        let id = made["run"]["info"]["run_id"].as_str();
        id.map(str::to_string).ok_or_else(|| Trouble::Away("it answers without the id of a run".into()))
    }

    /// Checks that a run exists and is not deleted; a deleted run refuses everything until it is restored.
    pub fn check_run(&self, id: &str) -> Result<(), Trouble> {
        match self.get("runs/get", &[("run_id", id)]) {
            Ok(found) if found["run"]["info"]["lifecycle_stage"] == "deleted" => Err(Trouble::Absent(
                format!("the run {id} is deleted there: restore it, or give another track.experiment_name"),
            )),
            Err(trouble @ (Trouble::Absent(_) | Trouble::Away(_))) => Err(trouble),
            // A server that cannot answer this is assumed to have the run.
            _ => Ok(()),
        }
    }

    pub fn get(&self, path: &str, query: &[(&str, &str)]) -> Result<Value, Trouble> {
        let mut request = self.agent.get(format!("{}/{path}", self.base));
        for (name, value) in query {
            request = request.query(name, value);
        }
        if let Some(authorization) = &self.authorization {
            request = request.header("authorization", authorization);
        }
        self.answer(request.call())
    }

    pub fn post(&self, path: &str, body: &Value) -> Result<Value, Trouble> {
        let mut request = self.agent.post(format!("{}/{path}", self.base)).content_type("application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header("authorization", authorization);
        }
        self.answer(request.send(body.to_string()))
    }

    fn answer(
        &self,
        answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<Value, Trouble> {
        let mut response = answer.map_err(|error| Trouble::Away(format!("it does not answer ({error})")))?;
        let status = response.status().as_u16();
        let text = response.body_mut().with_config().limit(ANSWER_BYTES).read_to_string();
        let text = text.map_err(|error| Trouble::Away(format!("its response is incomplete ({error})")))?;
        let body: Value = serde_json::from_str(&text).unwrap_or_default();
        let code = body["error_code"].as_str().unwrap_or_default();
        let message = format!("it says {status} {}", shown(body["message"].as_str().unwrap_or(code)));
        let message = message.trim_end().to_string();
        match status {
            200..=299 if body.is_object() => Ok(body),
            404 if code == "RESOURCE_DOES_NOT_EXIST" => Err(Trouble::Absent(message)),
            401 | 403 => Err(Trouble::Away(format!(
                "{message}: set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            ))),
            413 => Err(Trouble::TooLarge(message)),
            400 | 409 | 422 => Err(Trouble::Refused(message)),
            429 | 500..=599 => Err(Trouble::Away(message)),
            _ => Err(Trouble::Away(format!("{message}, which is not a response of MLflow"))),
        }
    }
}

/// A server's message on one line, without control characters.
fn shown(words: &str) -> String {
    let plain = words.split_whitespace().collect::<Vec<_>>().join(" ");
    plain.chars().filter(|letter| !letter.is_control()).take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_sent_before_a_password() {
        let user = || (Some("me".to_string()), Some("secret".to_string()));
        let credentials = |token: Option<&str>, (user, password): (Option<String>, Option<String>)| {
            Credentials { token: token.map(String::from), user, password }.header()
        };
        assert_eq!(credentials(None, (None, None)), None);
        assert_eq!(credentials(Some("t"), user()).as_deref(), Some("Bearer t"));
        assert_eq!(credentials(None, user()).as_deref(), Some("Basic bWU6c2VjcmV0"));
    }

    #[test]
    fn words_of_a_server_are_one_short_line() {
        assert_eq!(shown("a\nb\u{1b}[31m"), "a b[31m");
        assert_eq!(shown(&"x".repeat(1000)).len(), SHOWN);
    }
}
