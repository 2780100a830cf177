//! Merges the data cursors of ranks, each of which knows a part of it.

use serde_json::Value;

/// Merges cursors in which null stands for what a rank does not know. The error is the number of the first rank that contradicts
/// those before it, and so cannot have read the same data.
pub fn merged(known: &[Value]) -> Result<Value, usize> {
    let mut whole = Value::Null;
    for (rank, cursor) in known.iter().enumerate() {
        merge(&mut whole, cursor).ok_or(rank)?;
    }
    Ok(whole)
}

/// Merges another rank's cursor into `whole`; `None` if they contradict.
fn merge(whole: &mut Value, other: &Value) -> Option<()> {
    match (whole, other) {
        (_, Value::Null) => Some(()),
        (whole @ Value::Null, other) => {
            *whole = other.clone();
            Some(())
        }
        (Value::Array(whole), Value::Array(other)) if whole.len() == other.len() => {
            whole.iter_mut().zip(other).try_for_each(|(whole, other)| merge(whole, other))
        }
        (Value::Object(whole), Value::Object(other)) if whole.keys().eq(other.keys()) => {
            whole.values_mut().zip(other.values()).try_for_each(|(whole, other)| merge(whole, other))
        }
        (whole, other) => (whole == other).then_some(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ranks_know_the_whole_together() {
        let of = |row: u64, streams: Value| json!({ "row": row, "streams": streams, "data": "a" });
        let place = |document: u64| json!({ "document": document, "offset": 7 });
        let known = [
            of(40, json!([place(1), null, null])),
            of(40, json!([null, null, place(3)])),
            of(40, json!([place(1), place(2), null])),
        ];
        let whole = of(40, json!([place(1), place(2), place(3)]));
        assert_eq!(merged(&known), Ok(whole.clone()));
        assert_eq!(merged(std::slice::from_ref(&whole)), Ok(whole.clone()));
        assert_eq!(merged(&known[..2]), Ok(of(40, json!([place(1), null, place(3)]))));
        assert_eq!(merged(&[Value::Null, Value::Null]), Ok(Value::Null));
        for other in [
            of(41, json!([null, null, null])),
            of(40, json!([null, null, place(4)])),
            of(40, json!([null, null])),
            json!({ "row": 40 }),
            json!(40),
        ] {
            assert_eq!(merged(&[whole.clone(), known[0].clone(), other]), Err(2));
        }
    }
}
