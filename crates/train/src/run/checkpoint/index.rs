//! The index of a checkpoint in parts: the elements of every tensor that each file holds.
//!
//! Names, types and shapes are those of whole tensors, so a reader does not see how many ranks wrote the checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use flatout_ir::TensorRange;
use serde::{Deserialize, Serialize};

use super::Dtype;

/// A tensor in parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parted {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// In order of elements; each element is in exactly one part.
    pub parts: Vec<CheckpointPart>,
}

/// Elements of a tensor that lie in one file, under the tensor's name and with one axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointPart {
    pub file: String,
    /// Its first element, counted in row-major order.
    pub start: usize,
    pub len: usize,
}

/// The tensors of a checkpoint by name, with the file and position of every part.
#[derive(Clone, Debug, PartialEq)]
pub struct Index {
    tensors: BTreeMap<String, Parted>,
    files: Vec<String>,
}

/// The name of the file that a rank writes.
pub fn part_name(rank: usize, ranks: usize) -> String {
    format!("state-{rank:05}-of-{ranks:05}.safetensors")
}

impl Index {
    /// Validates a record: the parts follow one another and cover the whole tensor, and the files lie beside the record.
    pub fn of(tensors: BTreeMap<String, Parted>) -> Result<Index, String> {
        let mut files = BTreeSet::new();
        for (name, tensor) in &tensors {
            let elements = tensor.shape.iter().try_fold(1usize, |n, extent| n.checked_mul(*extent));
            let mut end = 0usize;
            for part in &tensor.parts {
                let is_beside = matches!(
                    Path::new(&part.file).components().collect::<Vec<_>>()[..],
                    [Component::Normal(file)] if file == part.file.as_str()
                );
                if !is_beside {
                    return Err(format!(
                        "`{name}` would lie in {:?}, which is not a file beside it",
                        part.file
                    ));
                }
                let next = end.checked_add(part.len).filter(|_| part.start == end);
                end = next.ok_or_else(|| format!("the parts of `{name}` do not follow one another"))?;
                files.insert(part.file.clone());
            }
            if Some(end) != elements {
                return Err(format!("the parts of `{name}` are not the whole of {:?}", tensor.shape));
            }
        }
        Ok(Index { tensors, files: files.into_iter().collect() })
    }

    /// The index of the pieces that each rank writes.
    pub fn of_owners(owners: &[Vec<TensorRange>], dtype: impl Fn(&TensorRange) -> Dtype) -> Index {
        let mut tensors: BTreeMap<String, Parted> = BTreeMap::new();
        for (rank, pieces) in owners.iter().enumerate() {
            for piece in pieces {
                let (dtype, shape) = (dtype(piece), piece.ty.dims.clone());
                let file = part_name(rank, owners.len());
                let whole = tensors.entry(piece.path.clone());
                let whole = whole.or_insert_with(|| Parted { dtype, shape, parts: vec![] });
                whole.parts.push(CheckpointPart { file, start: piece.range.start, len: piece.elements() });
            }
        }
        for tensor in tensors.values_mut() {
            tensor.parts.sort_by_key(|part| part.start);
        }
        Index::of(tensors).expect("owners have every element once")
    }

    pub fn tensors(&self) -> &BTreeMap<String, Parted> {
        &self.tensors
    }

    /// The files that hold parts, in order of name.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// The number of a file in this order.
    pub fn file(&self, name: &str) -> Option<usize> {
        self.files.binary_search_by(|file| file.as_str().cmp(name)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::checkpoint::{Tensor, TensorFile, tensors};
    use serde_json::json;

    fn index(tensors: serde_json::Value) -> Result<Index, String> {
        Index::of(serde_json::from_value(tensors).expect("tensors"))
    }

    fn file(folder: &Path, name: &str, parts: &[Tensor]) {
        let mut bytes = vec![];
        tensors::write(&mut bytes, parts).unwrap();
        std::fs::write(folder.join(name), bytes).unwrap();
    }

    fn two_files() -> serde_json::Value {
        json!({
            "b": { "dtype": "BF16", "shape": [2, 3], "parts": [
                { "file": "state-00000-of-00002.safetensors", "start": 0, "len": 1 },
                { "file": "state-00001-of-00002.safetensors", "start": 1, "len": 5 }] },
            "a": { "dtype": "I32", "shape": [], "parts": [
                { "file": "state-00001-of-00002.safetensors", "start": 0, "len": 1 }] },
        })
    }

    fn tensor<'t>(name: &'t str, dtype: Dtype, shape: &'t [usize], bytes: &'t [u8]) -> Tensor<'t> {
        Tensor { name, dtype, shape, bytes }
    }

    #[test]
    fn tensors_in_parts_are_read_as_whole_ones() {
        let folder = tempfile::tempdir().unwrap();
        let b: Vec<u8> = (1..=12).collect();
        let names = [part_name(0, 2), part_name(1, 2)];
        file(folder.path(), &names[0], &[tensor("b", Dtype::Bf16, &[1], &b[..2])]);
        let rest = [tensor("b", Dtype::Bf16, &[5], &b[2..]), tensor("a", Dtype::I32, &[1], &[9, 0, 0, 0])];
        file(folder.path(), &names[1], &rest);
        let index = index(two_files()).unwrap();
        assert_eq!(index.files(), names);
        let open = || TensorFile::over(folder.path(), &index);
        let whole = open().unwrap();
        let shapes: Vec<_> = whole.entries().values().map(|entry| entry.shape.clone()).collect();
        assert_eq!(shapes, [vec![], vec![2, 3]]);
        let mut place = [0; 12];
        whole.read_into("b", &mut place).unwrap();
        assert_eq!(place[..], b);
        for start in 0..=6 {
            for end in start..=6 {
                let mut place = vec![0; 2 * (end - start)];
                whole.read_range("b", start..end, &mut place).unwrap();
                assert_eq!(place, b[2 * start..2 * end]);
            }
        }
        assert!(whole.read_range("b", 5..7, &mut [0; 4]).is_err());

        let broken = |parts: &[Tensor], expected: &str| {
            file(folder.path(), &names[1], parts);
            let error = open().unwrap_err().to_string();
            assert!(error.contains(&names[1]) && error.contains(expected), "{error}");
        };
        broken(&rest[..1], "it has no `a`");
        broken(
            &[tensor("b", Dtype::Bf16, &[4], &b[..8]), rest[1]],
            "its `b` is BF16 [4] and the index says BF16 [5]",
        );
        broken(&[tensor("b", Dtype::F16, &[5], &b[2..]), rest[1]], "its `b` is F16 [5]");
        std::fs::remove_file(folder.path().join(&names[1])).unwrap();
        assert!(open().unwrap_err().to_string().contains(&names[1]));
    }

    #[test]
    fn an_index_that_does_not_add_up_is_refused() {
        let cases: [(&str, serde_json::Value, &str); 7] = [
            ("/b/parts/1/start", json!(2), "do not follow one another"),
            ("/b/parts/0/len", json!(2), "do not follow one another"),
            ("/b/parts/1/len", json!(4), "are not the whole of [2, 3]"),
            ("/b/parts/1/len", json!(usize::MAX), "do not follow one another"),
            ("/b/shape", json!([usize::MAX, 2]), "are not the whole of"),
            ("/b/parts", json!([]), "are not the whole of [2, 3]"),
            ("/b/parts/0/file", json!("../state"), "is not a file beside it"),
        ];
        for (at, value, expected) in cases {
            let mut tensors = two_files();
            *tensors.pointer_mut(at).unwrap() = value;
            let error = index(tensors).unwrap_err();
            assert!(error.contains("`b`") && error.contains(expected), "{at}: {error}");
        }
    }
}
