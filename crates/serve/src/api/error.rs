//! Errors in the format of OpenAI's API.

use flatout_http::Answer;
use serde_json::json;

/// The error of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub status: u16,
    pub message: String,
    /// The field that is at fault.
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

/// Seconds after which a request that found the queue full may be sent again.
const RETRY_AFTER: &str = "1";

impl ApiError {
    /// A bad request.
    pub fn bad(message: impl Into<String>) -> ApiError {
        ApiError::with_status(400, message)
    }

    /// A bad request because of a field.
    pub fn field(param: &str, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(param.into()), ..ApiError::bad(message) }
    }

    pub fn with_status(status: u16, message: impl Into<String>) -> ApiError {
        let code = match status {
            401 => Some("invalid_api_key"),
            _ => None,
        };
        ApiError { status, message: message.into(), param: None, code }
    }

    pub fn with_code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    fn kind(&self) -> &'static str {
        match self.status {
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    pub fn json(&self) -> String {
        let error =
            json!({ "message": self.message, "type": self.kind(), "param": self.param, "code": self.code });
        json!({ "error": error }).to_string()
    }

    pub fn answer(&self) -> Answer {
        let answer = Answer::whole(self.status, "application/json", self.json());
        match self.status {
            429 | 503 => answer.with("retry-after", RETRY_AFTER),
            401 => answer.with("www-authenticate", "Bearer"),
            _ => answer,
        }
    }
}
