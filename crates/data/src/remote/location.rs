//! Parses remote entries of `data.path`: `hf://owner/set@revision/config:split` and URLs.

use crate::error::DataError;

/// The name of a data set on the hub: `hf://owner/set[@revision][/within][:split]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetName {
    /// `owner/set`.
    pub repo: String,
    /// A branch, tag or commit.
    pub revision: Option<String>,
    /// A configuration, a folder or a pattern of files.
    pub within: Option<String>,
    pub split: Option<String>,
}

const HUB: &str = "hf://";
/// URL schemes of object stores, which plain HTTP cannot read.
const STORES: [&str; 5] = ["s3://", "gs://", "gcs://", "az://", "abfs://"];

/// Whether an entry is read over the network.
pub fn is_remote(word: &str) -> bool {
    [HUB, "https://", "http://"].iter().chain(&STORES).any(|scheme| word.starts_with(scheme))
}

/// Whether an entry names a data set on the hub.
pub fn is_of_hub(word: &str) -> bool {
    word.starts_with(HUB)
}

impl SetName {
    pub fn parse(word: &str) -> Result<Self, DataError> {
        let wrong = || {
            DataError::input(format!(
                "{word} does not name a data set: write hf://owner/set, optionally followed by @revision, /config and :split, as \
                 in hf://owner/set@main/en:train."
            ))
        };
        let rest = word.strip_prefix(HUB).ok_or_else(wrong)?;
        let rest = rest.strip_prefix("datasets/").unwrap_or(rest);
        let (rest, split) = match rest.rsplit_once(':') {
            Some((rest, split)) => (rest, Some(split.to_string())),
            None => (rest, None),
        };
        let mut parts = rest.splitn(3, '/');
        let (owner, name) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        let mut within = parts.next().map(|within| within.trim_end_matches('/').to_string());
        let (name, mut revision) = match name.split_once('@') {
            Some((name, revision)) => (name, Some(revision.replace("%2F", "/"))),
            None => (name, None),
        };
        // Revisions of pull requests and conversions contain slashes, which the hub's tools also write unescaped.
        if revision.as_deref() == Some("refs")
            && let Some(rest) = within.take()
        {
            let parts: Vec<&str> = rest.splitn(3, '/').collect();
            let [kind, number, ref rest @ ..] = parts[..] else { return Err(wrong()) };
            revision = Some(format!("refs/{kind}/{number}"));
            within = rest.first().map(|rest| rest.to_string());
        }
        let is_name = |part: &str| {
            !part.is_empty()
                && !part.starts_with('.')
                && !part.contains("..")
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        let is_revision = |part: &String| part.split('/').all(is_name);
        let is_within = |part: &String| {
            !part.is_empty()
                && part.split('/').all(|name| !name.is_empty() && name != "." && name != "..")
                && !part.contains(['?', '#', '\\', '@'])
                && !part.chars().any(char::is_control)
        };
        let is_whole = is_name(owner)
            && is_name(name)
            && revision.as_ref().is_none_or(is_revision)
            && within.as_ref().is_none_or(is_within)
            && split.as_deref().is_none_or(is_name);
        if !is_whole {
            return Err(wrong());
        }
        Ok(Self { repo: format!("{owner}/{name}"), revision, within, split })
    }

    /// The same name, pinned to a commit.
    pub fn at(&self, commit: &str) -> Self {
        Self { revision: Some(commit.to_string()), ..self.clone() }
    }

    /// The commit, unless the revision is a branch or a tag.
    pub fn commit(&self) -> Option<&str> {
        self.revision.as_deref().filter(|revision| is_commit(revision))
    }

    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

impl std::fmt::Display for SetName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{HUB}{}", self.repo)?;
        self.revision.iter().try_for_each(|revision| write!(f, "@{}", revision.replace('/', "%2F")))?;
        self.within.iter().try_for_each(|within| write!(f, "/{within}"))?;
        self.split.iter().try_for_each(|split| write!(f, ":{split}"))
    }
}

pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.chars().all(|c| c.is_ascii_hexdigit())
}

/// The URLs of an entry: itself, or one for each number where it has `{000..146}`.
pub(crate) fn addresses(word: &str) -> Result<Vec<String>, DataError> {
    if let Some(scheme) = STORES.iter().find(|scheme| word.starts_with(**scheme)) {
        let (bucket, key) = word[scheme.len()..].split_once('/').unwrap_or((&word[scheme.len()..], ""));
        let https = match *scheme {
            "s3://" => format!("https://{bucket}.s3.amazonaws.com/{key}"),
            "gs://" | "gcs://" => format!("https://storage.googleapis.com/{bucket}/{key}"),
            _ => format!("https://ACCOUNT.blob.core.windows.net/{bucket}/{key}"),
        };
        return Err(DataError::input(format!(
            "{word} is read by plain HTTPS only: give {https} (or the address your store answers at), with a signature in it \
             where the object is not public."
        )));
    }
    let plain = word.strip_prefix("http://");
    let is_loopback = |rest: &str| {
        ["127.0.0.1", "localhost", "[::1]"].iter().any(|host| {
            rest.strip_prefix(host).is_some_and(|rest| rest.is_empty() || rest.starts_with([':', '/']))
        })
    };
    if plain.is_some_and(|rest| !is_loopback(rest)) {
        return Err(DataError::input(format!(
            "{word} would be read without encryption: give its https:// address."
        )));
    }
    if word.contains('*') {
        return Err(DataError::input(format!(
            "{word} has a pattern, and a server cannot be asked which files it has: number them, as in \
             https://host/file-{{00000..00146}}.parquet, or list them."
        )));
    }
    let Some((before, rest)) = word.split_once('{') else { return Ok(vec![word.to_string()]) };
    let numbers = || {
        let (range, after) = rest.split_once('}')?;
        let (first, last) = range.split_once("..")?;
        let (from, to): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        let is_right = from <= to && to - from < MOST_NUMBERED && !after.contains(['{', '}']);
        is_right.then_some((from..=to, first.len(), after))
    };
    let Some((numbers, width, after)) = numbers() else {
        return Err(DataError::input(format!(
            "The braces of {word} cannot be parsed: write numbers as in {{00000..00146}}, in one pair of braces."
        )));
    };
    Ok(numbers.map(|number| format!("{before}{number:0width$}{after}")).collect())
}

/// Limit on numbered files: a larger number is a mistake.
const MOST_NUMBERED: u64 = 1_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_sets_read_and_write() {
        let name = SetName::parse("hf://HuggingFaceFW/fineweb-edu@v1.2/sample-10BT:train").unwrap();
        assert_eq!((name.repo.as_str(), name.revision()), ("HuggingFaceFW/fineweb-edu", "v1.2"));
        assert_eq!((name.within.as_deref(), name.split.as_deref()), (Some("sample-10BT"), Some("train")));
        for word in ["hf://a/b", "hf://a/b@main", "hf://a/b/en", "hf://a/b/data/*.parquet", "hf://a/b:test"] {
            assert_eq!(SetName::parse(word).unwrap().to_string(), word);
        }
        assert_eq!(SetName::parse("hf://datasets/a/b/c").unwrap().to_string(), "hf://a/b/c");
        let converted = SetName::parse("hf://a/b@refs/convert/parquet/en").unwrap();
        assert_eq!((converted.revision(), converted.within.as_deref()), ("refs/convert/parquet", Some("en")));
        assert_eq!(SetName::parse(&converted.to_string()).unwrap(), converted);
        for wrong in ["hf://", "hf://a", "hf://a/", "hf:///b", "hf://a/../b", "hf://a/b@", "hf://a/b/../c"] {
            assert!(SetName::parse(wrong).unwrap_err().sentence.contains("owner/set"), "{wrong}");
        }
    }

    #[test]
    fn addresses_are_numbered_and_others_refused() {
        assert_eq!(
            addresses("https://h/a-{08..10}.gz?s=1").unwrap(),
            ["https://h/a-08.gz?s=1", "https://h/a-09.gz?s=1", "https://h/a-10.gz?s=1"]
        );
        assert_eq!(addresses("http://127.0.0.1:80/x").unwrap().len(), 1);
        for (wrong, said) in [
            ("s3://bucket/key.parquet", "https://bucket.s3.amazonaws.com/key.parquet"),
            ("gs://bucket/key", "https://storage.googleapis.com/bucket/key"),
            ("http://example.org/x", "https://"),
            ("http://127.0.0.1.example.org/x", "https://"),
            ("https://h/*.parquet", "number them"),
            ("https://h/{3..1}.parquet", "braces"),
            ("https://h/{1..2}{1..2}", "braces"),
        ] {
            assert!(addresses(wrong).unwrap_err().sentence.contains(said), "{wrong}");
        }
    }
}
