//! The tensor files of a checkpoint, in safetensors format: a header of names, types, shapes and offsets in JSON, then the bytes.
//! They are written as a stream and read tensor by tensor, so neither direction needs a second copy in memory. Tensors in several
//! files are read as if they were in one.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use flatout_data::pointer::{IS_POINTER, is_pointer};
use flatout_settings::choice;
use serde::{Deserialize, Serialize};

use super::index::Index;

choice! {
    /// Element types by the format's names. Checkpoints use the first three; files of other programs may use any.
    pub enum Dtype {
        F32 = "F32",
        Bf16 = "BF16",
        I32 = "I32",
        F16 = "F16",
        F64 = "F64",
        F8E4m3 = "F8_E4M3",
        F8E5m2 = "F8_E5M2",
        I64 = "I64",
        I16 = "I16",
        I8 = "I8",
        U64 = "U64",
        U32 = "U32",
        U16 = "U16",
        U8 = "U8",
        Bool = "BOOL",
    }
}

impl Dtype {
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F64 | Dtype::I64 | Dtype::U64 => 8,
            Dtype::F32 | Dtype::I32 | Dtype::U32 => 4,
            Dtype::Bf16 | Dtype::F16 | Dtype::I16 | Dtype::U16 => 2,
            Dtype::F8E4m3 | Dtype::F8E5m2 | Dtype::I8 | Dtype::U8 | Dtype::Bool => 1,
        }
    }
}

/// A tensor to save: borrowed little-endian bytes in row-major order.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
}

/// The type, shape and position of a tensor that can be read.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Positions of its bytes, in order.
    extents: Vec<Extent>,
}

/// Consecutive bytes of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Extent {
    /// The number of the file.
    file: usize,
    offset: u64,
    bytes: u64,
}

impl Entry {
    pub fn bytes(&self) -> usize {
        self.extents.iter().map(|extent| extent.bytes as usize).sum()
    }
}

/// A tensor as the header describes it.
#[derive(Serialize, Deserialize)]
struct HeaderEntry {
    dtype: Dtype,
    shape: Vec<usize>,
    /// Offset of its first byte and of the byte after its last, from the end of the header.
    data_offsets: [u64; 2],
}

/// A key of the header that is reserved by the format and names no tensor.
const METADATA: &str = "__metadata__";
/// The format's limit on the header.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes that are read of a file to find out whether it is a Git LFS pointer.
const MAX_POINTER_BYTES: u64 = 1024;

/// The beginning of a file: the length of the header and the header. The bytes of the tensors must follow in this order and
/// without gaps. Panics if two tensors have the same name.
pub fn header(tensors: &[(&str, Dtype, &[usize])], metadata: &[(&str, &str)]) -> io::Result<Vec<u8>> {
    let mut header = serde_json::Map::new();
    if !metadata.is_empty() {
        let fields: BTreeMap<_, _> = metadata.iter().copied().collect();
        header.insert(METADATA.into(), serde_json::to_value(fields)?);
    }
    let mut end = 0;
    for (name, dtype, shape) in tensors {
        let start = end;
        end += (shape.iter().product::<usize>() * dtype.bytes()) as u64;
        let entry = HeaderEntry { dtype: *dtype, shape: shape.to_vec(), data_offsets: [start, end] };
        let twin = header.insert(name.to_string(), serde_json::to_value(entry)?);
        assert!(twin.is_none() && *name != METADATA, "{name} is a tensor's own name");
    }
    let mut header = serde_json::to_string(&header)?;
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    Ok([&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat())
}

/// Writes the file. Wider types come first, so that every tensor is aligned to its type. Panics if a tensor's bytes do not match
/// its shape, or two tensors have the same name.
pub fn write(out: &mut impl Write, tensors: &[Tensor]) -> io::Result<()> {
    let mut ordered: Vec<&Tensor> = tensors.iter().collect();
    ordered.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.bytes()));
    for Tensor { name, dtype, shape, bytes } in &ordered {
        let wanted = shape.iter().product::<usize>() * dtype.bytes();
        assert_eq!(bytes.len(), wanted, "{name} has the bytes of its shape {shape:?}");
    }
    let described: Vec<_> = ordered.iter().map(|tensor| (tensor.name, tensor.dtype, tensor.shape)).collect();
    out.write_all(&header(&described, &[])?)?;
    for tensor in ordered {
        out.write_all(tensor.bytes)?;
    }
    Ok(())
}

/// The header's names and values in file order, so that duplicates are noticed.
struct OrderedHeader(Vec<(String, serde_json::Value)>);

impl<'de> Deserialize<'de> for OrderedHeader {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = OrderedHeader;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<OrderedHeader, A::Error> {
                let mut named = vec![];
                while let Some(pair) = map.next_entry()? {
                    named.push(pair);
                }
                Ok(OrderedHeader(named))
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}

/// Checks the format's rule that the tensors of a file take up all its bytes, from `first` to `end`, without gaps and without sharing
/// any. The error continues a sentence about the file.
fn check_coverage(entries: &BTreeMap<String, Entry>, first: u64, end: u64) -> Result<(), String> {
    let mut placed: Vec<(u64, u64, &str)> = vec![];
    for (name, entry) in entries {
        placed
            .extend(entry.extents.iter().map(|held| (held.offset, held.offset + held.bytes, name.as_str())));
    }
    placed.sort_unstable();
    // Empty tensors share no bytes. A shared byte is named before the gap that it may leave elsewhere.
    let with_bytes: Vec<_> = placed.into_iter().filter(|(start, stop, _)| start < stop).collect();
    if let Some(pair) = with_bytes.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        return Err(format!("`{}` and `{}` share bytes", pair[0].2, pair[1].2));
    }
    let mut covered = first;
    for (start, stop, name) in with_bytes {
        if covered < start {
            return Err(format!(
                "no tensor has its bytes from {covered} to {start}, before `{name}`: fetch or write it again"
            ));
        }
        covered = stop;
    }
    if covered < end {
        return Err(format!(
            "its last tensor ends at byte {covered} of {end}: bytes were added to it, or its header was changed, so fetch or write it again"
        ));
    }
    Ok(())
}

/// Tensors that are open for reading, in one file or over several.
#[derive(Debug)]
pub struct TensorFile {
    files: Vec<(PathBuf, File)>,
    entries: BTreeMap<String, Entry>,
}

impl TensorFile {
    /// Reads the header and checks that the tensors in it are all of the file.
    pub fn open(path: &Path) -> io::Result<TensorFile> {
        let broken = |what: String| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{} is broken: {what}", path.display()))
        };
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        let mut prefix = [0; 8];
        file.read_exact(&mut prefix).map_err(|_| broken("it has no header".into()))?;
        let header_bytes = u64::from_le_bytes(prefix);
        if header_bytes > MAX_HEADER_BYTES.min(length.saturating_sub(8)) {
            let mut rest = vec![];
            file.take(MAX_POINTER_BYTES).read_to_end(&mut rest)?;
            if is_pointer(&[&prefix, &rest[..]].concat()) {
                let said = format!("{} {IS_POINTER}", path.display());
                return Err(io::Error::new(io::ErrorKind::InvalidData, said));
            }
            return Err(broken(format!(
                "its header would be {header_bytes} bytes of the file's {length}: it is another kind of file, or cut off"
            )));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header)?;
        let OrderedHeader(parsed) = serde_json::from_slice(&header)
            .map_err(|error| broken(format!("its header is not the format's JSON: {error}")))?;
        let data = 8 + header_bytes;
        let mut entries = BTreeMap::new();
        for (name, value) in parsed.into_iter().filter(|(name, _)| name != METADATA) {
            let HeaderEntry { dtype, shape, data_offsets: [start, end] } =
                serde_json::from_value(value).map_err(|error| broken(format!("`{name}`: {error}")))?;
            let bytes = shape.iter().try_fold(dtype.bytes(), |n, &extent| n.checked_mul(extent));
            let right_size =
                end.checked_sub(start).is_some_and(|given| bytes.is_some_and(|b| b as u64 == given));
            if !right_size {
                return Err(broken(format!("`{name}` is not where the header says")));
            }
            if end > length - data {
                return Err(broken(format!(
                    "`{name}` ends past the last of its {length} bytes: it was cut off, so fetch or copy it again"
                )));
            }
            let extent = Extent { file: 0, offset: data + start, bytes: end - start };
            let entry = Entry { dtype, shape, extents: vec![extent] };
            if entries.insert(name.clone(), entry).is_some() {
                return Err(broken(format!("its header has `{name}` twice")));
            }
        }
        check_coverage(&entries, data, length).map_err(broken)?;
        Ok(TensorFile { files: vec![(path.to_path_buf(), file)], entries })
    }

    /// Opens the files of a folder that hold tensors in parts, and checks that every part is there.
    pub fn over(folder: &Path, index: &Index) -> io::Result<TensorFile> {
        let broken = |path: &Path, what: String| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{} is broken: {what}", path.display()))
        };
        let mut parts = vec![];
        for name in index.files() {
            let path = folder.join(name);
            parts.push(TensorFile::open(&path).map_err(|error| match error.kind() {
                io::ErrorKind::InvalidData => error,
                _ => flatout_data::durable::about(&path)(error),
            })?);
        }
        let mut entries = BTreeMap::new();
        for (name, tensor) in index.tensors() {
            let mut extents = vec![];
            for part in &tensor.parts {
                let file = index.file(&part.file).expect("an index knows its files");
                let (path, _) = &parts[file].files[0];
                let Some(entry) = parts[file].entries.get(name) else {
                    return Err(broken(path, format!("it has no `{name}`")));
                };
                if entry.dtype != tensor.dtype || entry.shape != [part.len] {
                    let (dtype, shape) = (entry.dtype, &entry.shape);
                    let wanted = format!("{} [{}]", tensor.dtype, part.len);
                    return Err(broken(
                        path,
                        format!("its `{name}` is {dtype} {shape:?} and the index says {wanted}"),
                    ));
                }
                extents.extend(entry.extents.iter().map(|extent| Extent { file, ..*extent }));
            }
            entries.insert(name.clone(), Entry { dtype: tensor.dtype, shape: tensor.shape.clone(), extents });
        }
        Ok(TensorFile { files: parts.into_iter().flat_map(|part| part.files).collect(), entries })
    }

    /// Types and shapes by name, in order of name.
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    fn entry(&self, name: &str) -> io::Result<&Entry> {
        let absent = || io::Error::new(io::ErrorKind::NotFound, format!("there is no tensor `{name}`"));
        self.entries.get(name).ok_or_else(absent)
    }

    /// Reads a tensor's bytes into `place`, which must have exactly its size.
    pub fn read_into(&self, name: &str, place: &mut [u8]) -> io::Result<()> {
        let entry = self.entry(name)?;
        if entry.bytes() != place.len() {
            let sentence = format!("`{name}` is {} bytes, and {} are wanted", entry.bytes(), place.len());
            return Err(io::Error::new(io::ErrorKind::InvalidData, sentence));
        }
        self.read_part(name, 0, place)
    }

    /// Reads the bytes of a tensor from offset `from`.
    pub fn read_part(&self, name: &str, from: u64, place: &mut [u8]) -> io::Result<()> {
        let entry = self.entries.get(name).filter(|entry| from + place.len() as u64 <= entry.bytes() as u64);
        let entry = entry.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("`{name}` has no such part, or there is no `{name}`"),
            )
        })?;
        let (mut skipped, mut left) = (from, place);
        for extent in &entry.extents {
            let here = extent.bytes.saturating_sub(skipped).min(left.len() as u64);
            let (now, later) = left.split_at_mut(here as usize);
            let (path, file) = &self.files[extent.file];
            file.read_exact_at(now, extent.offset + skipped.min(extent.bytes)).map_err(|error| {
                // The caller names the file where there is only one.
                if self.files.len() > 1 { flatout_data::durable::about(path)(error) } else { error }
            })?;
            skipped = skipped.saturating_sub(extent.bytes);
            left = later;
        }
        Ok(())
    }

    /// Reads a range of a tensor's elements, counted in row-major order.
    pub fn read_range(&self, name: &str, range: Range<usize>, place: &mut [u8]) -> io::Result<()> {
        let size = self.entry(name)?.dtype.bytes();
        assert_eq!(place.len(), range.len() * size, "room for the elements of `{name}`");
        self.read_part(name, (range.start * size) as u64, place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(tensors: &[Tensor]) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        let mut bytes = Vec::new();
        write(&mut bytes, tensors).unwrap();
        std::fs::write(&path, bytes).unwrap();
        (folder, path)
    }

    const ODD: [u8; 6] = [1, 2, 3, 4, 5, 6];
    const FOUR: [u8; 16] = [9; 16];

    fn examples() -> [Tensor<'static>; 4] {
        [
            Tensor { name: "odd", dtype: Dtype::Bf16, shape: &[3, 1], bytes: &ODD },
            Tensor { name: "four", dtype: Dtype::F32, shape: &[2, 2], bytes: &FOUR },
            Tensor { name: "scalar", dtype: Dtype::I32, shape: &[], bytes: &[7, 0, 0, 0] },
            Tensor { name: "empty", dtype: Dtype::F32, shape: &[0, 5], bytes: &[] },
        ]
    }

    #[test]
    fn files_read_back_here_and_in_the_reference_library() {
        let (_folder, path) = saved(&examples());
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(file.entries().len(), 4);
        let whole = std::fs::read(&path).unwrap();
        let reference = safetensors::SafeTensors::deserialize(&whole).unwrap();
        for tensor in examples() {
            let entry = file.entries()[tensor.name].clone();
            assert_eq!((entry.dtype, entry.shape.as_slice()), (tensor.dtype, tensor.shape));
            assert_eq!(entry.extents[0].offset % tensor.dtype.bytes() as u64, 0, "aligned");
            let mut place = vec![0; entry.bytes()];
            file.read_into(tensor.name, &mut place).unwrap();
            assert_eq!(place, tensor.bytes);
            let view = reference.tensor(tensor.name).unwrap();
            assert_eq!((view.data(), view.shape()), (tensor.bytes, tensor.shape));
            assert_eq!(view.dtype().to_string(), tensor.dtype.name());
        }
    }

    #[test]
    fn the_reference_librarys_files_are_read() {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![2, 2], &FOUR).unwrap();
        let metadata = [("made_by".to_string(), "reference".to_string())].into_iter().collect();
        let bytes = safetensors::serialize([("w", view)], Some(metadata)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        std::fs::write(&path, bytes).unwrap();
        let file = TensorFile::open(&path).unwrap();
        let mut place = [0; 16];
        file.read_into("w", &mut place).unwrap();
        assert_eq!(place, FOUR);
        assert!(file.read_into("w", &mut [0; 15]).unwrap_err().to_string().contains("`w` is 16 bytes"));
        assert!(file.read_into("v", &mut place).unwrap_err().to_string().contains("no tensor `v`"));
    }

    #[test]
    fn every_truncation_is_refused() {
        let (_folder, path) = saved(&examples());
        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert!(TensorFile::open(&path).is_err(), "{length} of {} bytes", whole.len());
        }
    }

    #[test]
    fn lying_headers_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        for header in [
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#,
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}"#,
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#,
            r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#,
            r#"{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,8]}}"#,
            r#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#,
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}}"#,
            "[]",
        ] {
            std::fs::write(&path, file_of(header, 8)).unwrap();
            assert!(TensorFile::open(&path).is_err(), "{header}");
        }
    }

    /// A file with this header and this number of zeros as bytes of tensors.
    fn file_of(header: &str, bytes: usize) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; bytes]].concat()
    }

    /// As the reference library refuses them: tensors must take up every byte after the header.
    #[test]
    fn bytes_that_belong_to_no_tensor_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        let opened = |header: &str, bytes: usize| {
            let file = file_of(header, bytes);
            std::fs::write(&path, &file).unwrap();
            let opened = TensorFile::open(&path);
            assert_eq!(opened.is_ok(), safetensors::SafeTensors::deserialize(&file).is_ok(), "{header}");
            opened.map_or_else(|error| error.to_string(), |_| "whole".into())
        };
        let tensor = |name: &str, [start, end]: [usize; 2]| {
            format!(r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{start},{end}]}}"#, end - start)
        };
        let two = |one: [usize; 2], other: [usize; 2]| {
            format!("{{{},{}}}", tensor("one", one), tensor("other", other))
        };
        assert_eq!(opened(&two([0, 4], [4, 8]), 8), "whole");
        assert_eq!(opened(&two([4, 8], [0, 4]), 8), "whole");
        assert_eq!(opened(&two([8, 8], [0, 8]), 8), "whole");
        for (header, bytes, wrong, [from, to]) in [
            (two([0, 4], [4, 8]), 9, "its last tensor ends at byte FROM of TO", [8, 9]),
            (two([0, 4], [5, 8]), 8, "no tensor has its bytes from FROM to TO, before `other`", [4, 5]),
            (two([2, 4], [4, 8]), 8, "no tensor has its bytes from FROM to TO, before `one`", [0, 2]),
            (two([0, 5], [4, 8]), 8, "`one` and `other` share bytes", [0, 0]),
            ("{}".into(), 3, "its last tensor ends at byte FROM of TO", [0, 3]),
        ] {
            let place = |at: usize| (8 + header.len() + at).to_string();
            let words = wrong.replace("FROM", &place(from)).replace("TO", &place(to));
            let sentence = opened(&header, bytes);
            assert!(sentence.starts_with(&format!("{} is broken: ", path.display())), "{sentence}");
            assert!(sentence.contains(&words), "{header}: {sentence:?} lacks {words:?}");
        }
    }
}
