//! The fields of a `config.json`, with errors that name the field.

use serde_json::{Map, Value};

use crate::config::bounds::MAX_LAYERS;

/// The fields of an object. As in the library, a null field counts as absent.
pub(crate) struct Fields<'a>(pub &'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub fn extent(&self, name: &str) -> Result<usize, String> {
        let value = self.get(name).ok_or_else(|| format!("it has no `{name}`"))?;
        let whole = value.as_u64().filter(|n| *n > 0).and_then(|n| usize::try_from(n).ok());
        whole.ok_or_else(|| format!("its `{name}` is {value}, and must be a whole number of 1 or more"))
    }

    pub fn extent_or(&self, name: &str, default: usize) -> Result<usize, String> {
        self.get(name).map_or(Ok(default), |_| self.extent(name))
    }

    pub fn number_or(&self, name: &str, default: f64) -> Result<f64, String> {
        let Some(value) = self.get(name) else { return Ok(default) };
        let number = value.as_f64().filter(|x| x.is_finite());
        number.ok_or_else(|| format!("its `{name}` is {value}, and must be a number"))
    }

    /// A number of layers, limited before anything is listed by layer.
    pub fn layers(&self, name: &str, default: Option<usize>) -> Result<usize, String> {
        let layers = match default {
            Some(default) => self.extent_or(name, default)?,
            None => self.extent(name)?,
        };
        match layers <= MAX_LAYERS {
            true => Ok(layers),
            false => Err(format!("its `{name}` is {layers} and may be {MAX_LAYERS} at most")),
        }
    }

    /// An optional number.
    pub fn number(&self, name: &str) -> Result<Option<f64>, String> {
        self.get(name).map(|_| self.number_or(name, 0.0)).transpose()
    }

    pub fn flag(&self, name: &str) -> Result<bool, String> {
        self.flag_or(name, false)
    }

    pub fn flag_or(&self, name: &str, default: bool) -> Result<bool, String> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| format!("its `{name}` is {value}, and must be true or false"))
    }

    /// Checks that a field, if present, has this value; `supported` names what is supported here.
    pub fn only(&self, name: &str, value: Value, supported: &str) -> Result<(), String> {
        let Some(found) = self.get(name).filter(|found| **found != value) else { return Ok(()) };
        let shown = found.to_string();
        let shown = if shown.len() > 60 { "given".to_string() } else { shown };
        Err(format!("its `{name}` is {shown}, and here there is only {supported}"))
    }

    /// A list of numbers.
    pub fn numbers(&self, name: &str) -> Result<Option<Vec<f64>>, String> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let numbers = value.as_array().and_then(|all| all.iter().map(Value::as_f64).collect());
        match numbers {
            Some(numbers) => Ok(Some(numbers)),
            None => Err(format!("its `{name}` is not a list of numbers")),
        }
    }

    /// One token or a list of them.
    pub fn tokens(&self, name: &str) -> Result<Vec<u32>, String> {
        let Some(value) = self.get(name) else { return Ok(vec![]) };
        let token = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
        let tokens = match value {
            Value::Array(tokens) => tokens.iter().map(token).collect(),
            one => token(one).map(|token| vec![token]),
        };
        tokens.ok_or_else(|| format!("its `{name}` is {value}, and must be a token or a list of them"))
    }
}
