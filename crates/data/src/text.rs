//! Plain text files as documents: read, cut at line ends, split by content, tokenised once.

use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::documents::TokenTable;
use crate::error::DataError;
use crate::formats;
use crate::random::fingerprint;
use crate::tokenizer::Vocabulary;

/// Files taken from a folder. A file that is named itself may have any ending.
const ENDINGS: [&str; 2] = ["txt", "md"];

/// Text files in memory, cut and split but not tokenised yet.
pub(crate) struct Text {
    contents: Vec<String>,
    documents: Vec<Document>,
    /// A document whose hash is below this is held out.
    threshold: u64,
}

struct Document {
    file: usize,
    start: usize,
    end: usize,
    /// Of the content alone: a document that occurs twice is on the same side twice, and neither the seed, nor the
    /// names of the files, nor documents added later move one to the other side.
    hash: u64,
}

impl Text {
    /// Reads all files, then cuts and splits them. `held_out` is the fraction of documents kept from training; at
    /// least one document is held out unless it is 0, and at least one is left.
    pub(crate) fn read(paths: &[PathBuf], held_out: f64) -> Result<Self, DataError> {
        let mut contents = Vec::new();
        for path in files(paths)? {
            contents.push(read_file(&path)?);
        }
        let total_bytes: usize = contents.iter().map(String::len).sum();
        let document_bytes = formats::document_bytes(total_bytes as u64);
        let mut documents = Vec::new();
        for (file, content) in contents.iter().enumerate() {
            for (start, end) in cut(content, document_bytes) {
                let text = &content[start..end];
                if !text.trim().is_empty() {
                    documents.push(Document { file, start, end, hash: fingerprint(text.as_bytes()) });
                }
            }
        }
        let shown = list(paths);
        if documents.is_empty() {
            return Err(DataError::input(format!(
                "There is no text in {shown}: data.path needs some to learn from."
            )));
        }
        let hashes = || documents.iter().map(|document| document.hash);
        let (least, most) = (hashes().min().unwrap_or(0), hashes().max().unwrap_or(0));
        if held_out > 0.0 && least == most {
            return Err(DataError::input(format!(
                "The {total_bytes} bytes of {shown} are too few different lines to hold some out for evaluation: give \
                 more text, or set data.held_out=0 to train on all of it."
            )));
        }
        let threshold = match held_out {
            0.0 => 0,
            _ => ((held_out * 2f64.powi(64)) as u64).clamp(least + 1, most),
        };
        Ok(Self { contents, documents, threshold })
    }

    /// The documents of one side, in the order of the files.
    pub(crate) fn side(&self, held_out: bool) -> impl Iterator<Item = &str> + Send {
        let documents =
            self.documents.iter().filter(move |document| (document.hash < self.threshold) == held_out);
        documents.map(|document| &self.contents[document.file][document.start..document.end])
    }

    /// A number that differs when the text of one side differs.
    pub(crate) fn fingerprint(&self, held_out: bool) -> u64 {
        self.side(held_out).fold(0, |hash, text| crate::random::key(hash, fingerprint(text.as_bytes())))
    }

    /// The tokens of one side. All cores take part; the result does not depend on how many there are.
    pub(crate) fn tokenize(&self, held_out: bool, vocabulary: &Vocabulary) -> Result<TokenTable, DataError> {
        let texts: Vec<&str> = self.side(held_out).collect();
        let documents: Vec<Vec<u32>> =
            texts.par_iter().map(|text| vocabulary.encode(text)).collect::<Result<_, DataError>>()?;
        let documents: Vec<&[u32]> =
            documents.iter().map(Vec::as_slice).filter(|tokens| !tokens.is_empty()).collect();
        Ok(TokenTable::new(&documents, vocabulary.size()))
    }
}

/// The files behind some paths, folders searched to the bottom, sorted within each path.
fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, DataError> {
    if paths.is_empty() {
        return Err(DataError::input(
            "data.path is empty: give a text file or a folder of .txt and .md files.",
        ));
    }
    let mut files = Vec::new();
    for path in paths {
        let metadata = std::fs::metadata(path).map_err(|error| unreadable(path, &error))?;
        if metadata.is_file() {
            files.push(path.clone());
            continue;
        }
        let before = files.len();
        search(path, &mut files)?;
        if files.len() == before {
            return Err(DataError::input(format!(
                "The folder {} has no .txt or .md files: name one that has, or name the files.",
                path.display()
            )));
        }
    }
    Ok(files)
}

fn search(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let entries = std::fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut entries: Vec<PathBuf> =
        entries.map_err(|error| unreadable(folder, &error))?.into_iter().map(|entry| entry.path()).collect();
    entries.sort_unstable();
    for path in entries {
        // A link to a folder is not followed, so that no circle of links is walked for ever.
        if path.is_dir() && !path.is_symlink() {
            search(&path, files)?;
        } else if path.is_file()
            && path.extension().is_some_and(|ending| ENDINGS.iter().any(|known| ending == *known))
        {
            files.push(path);
        }
    }
    Ok(())
}

fn read_file(path: &Path) -> Result<String, DataError> {
    let bytes = std::fs::read(path).map_err(|error| unreadable(path, &error))?;
    if bytes.is_empty() {
        return Err(DataError::input(format!(
            "The file {} is empty: there is nothing to learn from.",
            path.display()
        )));
    }
    String::from_utf8(bytes).map_err(|error| {
        DataError::input(format!(
            "The file {} is not UTF-8 text at byte {}: convert it or leave it out.",
            path.display(),
            error.utf8_error().valid_up_to()
        ))
    })
}

fn unreadable(path: &Path, error: &std::io::Error) -> DataError {
    match error.kind() {
        std::io::ErrorKind::NotFound => {
            DataError::input(format!("There is no file or folder {}: check data.path.", path.display()))
        }
        _ => DataError::input(format!("{} cannot be read: {error}.", path.display())),
    }
}

fn list(paths: &[PathBuf]) -> String {
    let shown: Vec<String> = paths.iter().take(3).map(|path| path.display().to_string()).collect();
    let more = if paths.len() > 3 { format!(" and {} more", paths.len() - 3) } else { String::new() };
    shown.join(", ") + &more
}

/// Where the documents of a file begin and end.
fn cut(content: &str, document_bytes: usize) -> Vec<(usize, usize)> {
    let mut documents = Vec::new();
    let mut start = 0;
    while start < content.len() {
        let end = start + formats::text::end(&content.as_bytes()[start..], document_bytes);
        documents.push((start, end));
        start = end;
    }
    documents
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::documents::Documents;
    use crate::scratch::Scratch;

    fn lines(count: usize) -> String {
        (0..count).map(|line| format!("line {line} of a text that tells nothing\n")).collect()
    }

    #[test]
    fn cuts_cover_the_text_and_fall_on_line_ends() {
        let text = lines(5000);
        let documents = cut(&text, 1000);
        assert_eq!(documents.iter().map(|(start, end)| &text[*start..*end]).collect::<String>(), text);
        for (start, end) in &documents[..documents.len() - 1] {
            assert!(text[*start..*end].ends_with('\n'));
            assert!((1000..1060).contains(&(end - start)), "{}", end - start);
        }
    }

    #[test]
    fn long_lines_are_cut_at_spaces_and_otherwise_between_characters() {
        let spaced = "word ".repeat(1000);
        let solid = "ß東🦊".repeat(1000);
        for text in [&spaced, &solid] {
            let documents = cut(text, 100);
            assert_eq!(documents.iter().map(|(start, end)| &text[*start..*end]).collect::<String>(), **text);
            assert!(documents.iter().all(|(start, end)| end - start <= 203));
        }
        assert!(cut(&spaced, 100).iter().all(|(start, end)| spaced[*start..*end].ends_with(' ')));
        assert_eq!(cut("short", 100), [(0, 5)]);
    }

    #[test]
    fn the_split_follows_the_content_and_leaves_both_sides_something() {
        let scratch = Scratch::new("split");
        let path = scratch.write("a.txt", lines(30_000).as_bytes());
        let text = Text::read(std::slice::from_ref(&path), 0.3).unwrap();
        let (train, held): (HashSet<&str>, HashSet<&str>) =
            (text.side(false).collect(), text.side(true).collect());
        assert!(train.is_disjoint(&held));
        let share = held.len() as f64 / (held.len() + train.len()) as f64;
        assert!((0.1..0.5).contains(&share), "{share}");

        let few = scratch.write("few.txt", lines(8).as_bytes());
        for held_out in [1e-9, 0.05, 0.999_999] {
            let text = Text::read(std::slice::from_ref(&few), held_out).unwrap();
            assert!(text.side(false).count() > 0 && text.side(true).count() > 0, "{held_out}");
        }
        let all = Text::read(&[few], 0.0).unwrap();
        assert_eq!((all.side(true).count(), all.side(false).collect::<String>()), (0, lines(8)));
    }

    #[test]
    fn tokenised_documents_are_the_cut_ones() {
        let scratch = Scratch::new("tokenise");
        scratch.write("book/b.txt", lines(300).as_bytes());
        scratch.write("book/deeper/a.md", "# Überschrift\n\nText.\n".repeat(20).as_bytes());
        scratch.write("book/ignored.bin", &[0xff, 0xfe]);
        let text = Text::read(&[scratch.path().join("book")], 0.2).unwrap();
        let vocabulary = Vocabulary::train(text.side(false), 300).unwrap();
        for held_out in [false, true] {
            let table = text.tokenize(held_out, &vocabulary).unwrap();
            let texts: Vec<&str> = text.side(held_out).collect();
            assert_eq!(table.count(), Some(texts.len() as u64));
            for (index, text) in texts.iter().enumerate() {
                let mut tokens = Vec::new();
                table.append(index as u64, &mut tokens, &mut crate::documents::Spent::default()).unwrap();
                assert_eq!(vocabulary.decode(&tokens), *text);
            }
        }
        assert!(text.side(false).chain(text.side(true)).any(|document| document.contains("Überschrift")));
    }

    #[test]
    fn bad_files_are_named() {
        let scratch = Scratch::new("bad-text");
        std::fs::create_dir_all(scratch.path().join("nothing")).unwrap();
        let error = |path: PathBuf| {
            let error = Text::read(&[path], 0.05).err().unwrap();
            assert!(error.is_input());
            error.sentence
        };
        assert!(error(scratch.path().join("gone.txt")).contains("no file or folder"));
        assert!(error(scratch.write("empty.txt", b"")).contains("empty.txt is empty"));
        assert!(error(scratch.write("blank.txt", b" \n\n ")).contains("no text in"));
        assert!(
            error(scratch.write("latin.txt", b"caf\xe9")).contains("latin.txt is not UTF-8 text at byte 3")
        );
        assert!(error(scratch.write("short.txt", b"just this")).contains("data.held_out=0"));
        assert!(error(scratch.path().join("nothing")).contains("no .txt or .md files"));
        assert!(Text::read(&[], 0.05).err().unwrap().sentence.contains("data.path is empty"));
    }
}
