//! Writes tar archives for tests, with any defect.

const BLOCK: usize = 512;

pub fn header(name: &str, bytes: u64, kind: u8) -> Vec<u8> {
    let mut header = vec![0; BLOCK];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..108].copy_from_slice(b"0000644\0");
    header[124..136].copy_from_slice(format!("{bytes:011o}\0").as_bytes());
    header[156] = kind;
    header[257..265].copy_from_slice(b"ustar\x0000");
    summed(header)
}

pub fn summed(mut header: Vec<u8>) -> Vec<u8> {
    header[148..156].fill(b' ');
    let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

pub fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(BLOCK), 0);
    padded
}

pub fn member(name: &str, bytes: &[u8]) -> Vec<u8> {
    [header(name, bytes.len() as u64, b'0'), padded(bytes)].concat()
}

pub fn extra(kind: u8, body: &[u8]) -> Vec<u8> {
    [header("././@LongLink", body.len() as u64, kind), padded(body)].concat()
}

pub fn record(key: &str, value: &str) -> Vec<u8> {
    let rest = format!(" {key}={value}\n");
    let length = (1..).find(|length| length == &(length.to_string().len() + rest.len())).unwrap();
    format!("{length}{rest}").into_bytes()
}

pub fn archive(parts: &[Vec<u8>]) -> Vec<u8> {
    [parts.concat(), vec![0; 2 * BLOCK]].concat()
}
