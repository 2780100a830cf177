//! Messages between ranks as JSON.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Failure;

/// The bytes of a message.
pub fn write(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).expect("messages have a JSON form")
}

/// Parses a message of another rank.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(bytes)
        .map_err(|error| Failure::Environment(format!("another rank's message cannot be read: {error}")))
}

/// Parses the messages of all ranks.
pub fn read_all<T: DeserializeOwned>(all: &[Vec<u8>]) -> Result<Vec<T>, Failure> {
    all.iter().map(|bytes| read(bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_broken_ones_give_an_error() {
        let messages = [write(&(1u8, "a")), write(&(2u8, "b"))];
        assert_eq!(read_all::<(u8, String)>(&messages), Ok(vec![(1, "a".into()), (2, "b".into())]));
        let Err(Failure::Environment(sentence)) = read_all::<u8>(&messages) else {
            panic!("it is not a number")
        };
        assert!(sentence.starts_with("another rank's message cannot be read: "), "{sentence}");
    }
}
