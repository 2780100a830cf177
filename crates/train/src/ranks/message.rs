//! Messages between ranks as JSON.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Failure;

/// The bytes of a message.
pub fn write(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).expect("what ranks tell each other has a JSON form")
}

/// The message that bytes of another rank are.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(bytes)
        .map_err(|error| Failure::Environment(format!("another rank's message cannot be read: {error}")))
}

/// The messages of all ranks.
pub fn read_all<T: DeserializeOwned>(all: &[Vec<u8>]) -> Result<Vec<T>, Failure> {
    all.iter().map(|bytes| read(bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_and_others_are_a_sentence() {
        let told = [write(&(1u8, "a")), write(&(2u8, "b"))];
        assert_eq!(read_all::<(u8, String)>(&told), Ok(vec![(1, "a".into()), (2, "b".into())]));
        let Err(Failure::Environment(said)) = read_all::<u8>(&told) else { panic!("it is no number") };
        assert!(said.starts_with("another rank's message cannot be read: "), "{said}");
    }
}
