//! Files of Git LFS that only say which file belongs in their place, as a clone without its large files has them.

/// The words that every such file begins with.
const START: &[u8] = b"version https://git-lfs.github.com/spec/";

/// The end of a sentence about a file that is no more than such a pointer.
pub const IS_POINTER: &str =
    "is a pointer of Git LFS, and the file itself was not fetched: run git lfs pull in its folder";

/// Whether a file that begins with these bytes is a pointer.
pub fn is_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(START)
}
