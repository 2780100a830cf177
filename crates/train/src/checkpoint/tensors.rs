//! The tensor file of a checkpoint, in safetensors' format: a header of names, types, shapes and offsets in JSON,
//! then the bytes. Written as a stream and read tensor by tensor, so neither way needs a second copy in memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use flatout_models::choice;
use serde::{Deserialize, Serialize};

choice! {
    /// Types of saved elements, by the format's names.
    pub enum Dtype { F32 = "F32", Bf16 = "BF16", I32 = "I32" }
}

impl Dtype {
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::Bf16 => 2,
        }
    }
}

/// A tensor to save: little-endian bytes in row-major order, borrowed from wherever they lie.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
}

/// What the header says of a tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// First byte and the one after the last, counted from the end of the header.
    data_offsets: [u64; 2],
}

impl Entry {
    pub fn bytes(&self) -> usize {
        (self.data_offsets[1] - self.data_offsets[0]) as usize
    }
}

/// The format's own name for what is not a tensor.
const METADATA: &str = "__metadata__";
/// The format's bound on the header.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Writes the file. Wider types come first, so that every tensor is aligned to its type. Panics where a tensor's
/// bytes are not its shape's, or two have one name.
pub fn write(out: &mut impl Write, tensors: &[Tensor]) -> io::Result<()> {
    let mut ordered: Vec<&Tensor> = tensors.iter().collect();
    ordered.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.bytes()));
    let mut header = BTreeMap::new();
    let mut end = 0;
    for tensor in &ordered {
        let Tensor { name, dtype, shape, bytes } = **tensor;
        let wanted = shape.iter().product::<usize>() * dtype.bytes();
        assert_eq!(bytes.len(), wanted, "{name} has the bytes of its shape {shape:?}");
        let start = end;
        end += bytes.len() as u64;
        let entry = Entry { dtype, shape: shape.to_vec(), data_offsets: [start, end] };
        let twin = header.insert(name, entry);
        assert!(twin.is_none() && name != METADATA, "{name} is a tensor's own name");
    }
    let mut header = serde_json::to_string(&header)?;
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for tensor in ordered {
        out.write_all(tensor.bytes)?;
    }
    Ok(())
}

/// A tensor file that is open for reading.
#[derive(Debug)]
pub struct TensorFile {
    file: File,
    /// Where the bytes start.
    data: u64,
    entries: BTreeMap<String, Entry>,
}

impl TensorFile {
    /// Reads the header and checks that every tensor it promises is there.
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
            return Err(broken(format!("its header would be {header_bytes} bytes")));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header)?;
        let mut parsed: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(&header).map_err(|error| broken(error.to_string()))?;
        parsed.remove(METADATA);
        let data = 8 + header_bytes;
        let mut entries = BTreeMap::new();
        for (name, value) in parsed {
            let entry: Entry =
                serde_json::from_value(value).map_err(|error| broken(format!("`{name}`: {error}")))?;
            let [start, end] = entry.data_offsets;
            let bytes = entry.shape.iter().try_fold(entry.dtype.bytes(), |n, &extent| n.checked_mul(extent));
            let right_size =
                end.checked_sub(start).is_some_and(|given| bytes.is_some_and(|b| b as u64 == given));
            if !right_size || end > length - data {
                return Err(broken(format!("`{name}` is not where the header says")));
            }
            entries.insert(name, entry);
        }
        Ok(TensorFile { file, data, entries })
    }

    /// Names with types and shapes, in order of name.
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// Reads a tensor's bytes to where they belong, which must be exactly as many.
    pub fn read_into(&mut self, name: &str, place: &mut [u8]) -> io::Result<()> {
        let absent = || io::Error::new(io::ErrorKind::NotFound, format!("there is no tensor `{name}`"));
        let entry = self.entries.get(name).ok_or_else(absent)?;
        if entry.bytes() != place.len() {
            let sentence = format!("`{name}` is {} bytes, and {} are wanted", entry.bytes(), place.len());
            return Err(io::Error::new(io::ErrorKind::InvalidData, sentence));
        }
        self.file.seek(SeekFrom::Start(self.data + entry.data_offsets[0]))?;
        self.file.read_exact(place)
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
    fn what_is_written_reads_back_here_and_in_the_reference_library() {
        let (_folder, path) = saved(&examples());
        let mut file = TensorFile::open(&path).unwrap();
        assert_eq!(file.entries().len(), 4);
        let whole = std::fs::read(&path).unwrap();
        let reference = safetensors::SafeTensors::deserialize(&whole).unwrap();
        for tensor in examples() {
            let entry = file.entries()[tensor.name].clone();
            assert_eq!((entry.dtype, entry.shape.as_slice()), (tensor.dtype, tensor.shape));
            assert_eq!((file.data + entry.data_offsets[0]) % tensor.dtype.bytes() as u64, 0, "aligned");
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
        let mut file = TensorFile::open(&path).unwrap();
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
            r#"{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}"#,
            "[]",
        ] {
            let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat();
            std::fs::write(&path, bytes).unwrap();
            assert!(TensorFile::open(&path).is_err(), "{header}");
        }
    }
}
