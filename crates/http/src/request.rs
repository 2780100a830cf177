//! A request as a function sees it: its path, the decoded values of its query, and its body.

use bytes::Bytes;

/// A request to read something or, if the server accepts bodies, to do something. Other methods are refused before a function
/// sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    pub path: String,
    /// Names and values in the order of the query.
    pub query: Vec<(String, String)>,
    pub body: Option<Bytes>,
}

impl Request {
    pub fn new(path: &str, query: &str) -> Request {
        let pairs = query.split('&').filter(|pair| !pair.is_empty());
        let decoded = pairs.map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decoded(name), decoded(value))
        });
        Request { path: path.into(), query: decoded.collect(), body: None }
    }

    /// The first value of a name.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// All values of a name.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.query.iter().filter(move |(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// Percent-decoded text. Invalid UTF-8 becomes the replacement character.
fn decoded(text: &str) -> String {
    let (bytes, mut out, mut at) = (text.as_bytes(), vec![], 0);
    while at < bytes.len() {
        let pair = bytes.get(at + 1..at + 3).and_then(|pair| std::str::from_utf8(pair).ok());
        let is_hex = |pair: &&str| pair.bytes().all(|byte| byte.is_ascii_hexdigit());
        match (bytes[at], pair.filter(is_hex).and_then(|pair| u8::from_str_radix(pair, 16).ok())) {
            (b'%', Some(byte)) => {
                out.push(byte);
                at += 2;
            }
            (b'+', _) => out.push(b' '),
            (byte, _) => out.push(byte),
        }
        at += 1;
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded() {
        let request = Request::new("/x", "run=a%2Fb+c&run=%C3%A9&empty&bad=%zz%2&&half=%e");
        assert_eq!(request.values("run").collect::<Vec<_>>(), ["a/b c", "é"]);
        assert_eq!(request.value("empty"), Some(""));
        assert_eq!(request.value("bad"), Some("%zz%2"));
        assert_eq!(request.value("half"), Some("%e"));
        assert_eq!(request.value("absent"), None);
        assert_eq!(Request::new("/x", "a=%ff").value("a"), Some("\u{fffd}"));
        assert_eq!(Request::new("/x", "a=%+1").value("a"), Some("% 1"), "a sign is no digit");
    }
}
