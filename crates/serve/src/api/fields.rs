//! Typed access to the fields of a JSON object, with an error sentence for a field of the wrong type. A field that is null counts
//! as absent.

use serde_json::{Map, Value};

use super::error::ApiError;

pub struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub fn of(value: &'a Value) -> Result<Fields<'a>, ApiError> {
        value.as_object().map(Fields).ok_or_else(|| ApiError::bad("the body must be a JSON object"))
    }

    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        name: &str,
        kind: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let wrong = || ApiError::field(name, format!("`{name}` must be {kind}"));
        self.get(name).map(|value| read(value).ok_or_else(wrong)).transpose()
    }

    pub fn flag(&self, name: &str) -> Result<bool, ApiError> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    /// A whole number of at least 0.
    pub fn whole(&self, name: &str) -> Result<Option<u64>, ApiError> {
        self.read(name, "a whole number of at least 0", Value::as_u64)
    }

    /// A number within bounds, or the default where it is absent.
    pub fn number(&self, name: &str, [least, most]: [f64; 2], absent: f64) -> Result<f64, ApiError> {
        let kind = format!("a number from {least} to {most}");
        let within = |value: &Value| value.as_f64().filter(|number| (least..=most).contains(number));
        Ok(self.read(name, &kind, within)?.unwrap_or(absent))
    }

    pub fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.read(name, "a list", Value::as_array)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_of_the_wrong_type_are_named() {
        let value = json!({ "a": 1.5, "b": true, "c": null, "d": "x", "e": -1 });
        let fields = Fields::of(&value).unwrap();
        assert_eq!(fields.number("a", [0.0, 2.0], 0.0), Ok(1.5));
        assert_eq!(fields.number("c", [0.0, 2.0], 7.0), Ok(7.0), "null is absent");
        assert_eq!(fields.flag("b"), Ok(true));
        assert_eq!(fields.text("d"), Ok(Some("x")));
        for error in [fields.number("a", [0.0, 1.0], 0.0).unwrap_err(), fields.whole("a").unwrap_err()] {
            assert_eq!((error.status, error.param.as_deref()), (400, Some("a")), "{error:?}");
            assert!(error.message.contains("`a` must be"), "{error:?}");
        }
        assert!(fields.whole("e").is_err() && fields.flag("d").is_err() && fields.list("d").is_err());
        assert!(Fields::of(&json!([])).is_err());
    }
}
