//! Encodes TensorBoard's records: a length and bytes, each with a checksum; the bytes are a protocol buffer with an event. Field
//! numbers are those of TensorFlow's `event.proto`, `summary.proto` and `tensor.proto`.

/// A record of an event file.
#[derive(Clone, Debug, PartialEq)]
pub struct Record<'a> {
    /// Unix time in seconds.
    pub time: f64,
    pub step: u64,
    pub content: Content<'a>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Content<'a> {
    /// The first record of a file.
    Version,
    /// The run was resumed: earlier records of this step and later ones are void.
    Restart,
    /// Values by tag.
    Scalars(&'a [(&'a str, f32)]),
    /// A text in Markdown under a tag.
    Text(&'a str, &'a str),
}

/// The file version from which readers handle restarts.
const VERSION: &str = "brain.Event:2";
const SESSION_START: u64 = 1;
const DT_STRING: u64 = 7;

impl Record<'_> {
    /// Encodes the record: length (8 bytes), its checksum (4), the event, its checksum (4).
    pub fn to_bytes(&self) -> Vec<u8> {
        let event = self.event();
        let length = (event.len() as u64).to_le_bytes();
        let mut bytes = Vec::with_capacity(event.len() + 16);
        bytes.extend(length);
        bytes.extend(masked(crc32c(&length)).to_le_bytes());
        bytes.extend(&event);
        bytes.extend(masked(crc32c(&event)).to_le_bytes());
        bytes
    }

    fn event(&self) -> Vec<u8> {
        let mut event = Message::default();
        event.fixed64(1, self.time.to_bits());
        event.varint(2, self.step);
        match &self.content {
            Content::Version => event.bytes(3, VERSION.as_bytes()),
            Content::Restart => {
                let mut log = Message::default();
                log.varint(1, SESSION_START);
                event.bytes(7, &log.0);
            }
            Content::Scalars(values) => {
                let mut summary = Message::default();
                for (tag, number) in *values {
                    let mut value = Message::default();
                    value.bytes(1, tag.as_bytes());
                    value.fixed32(2, number.to_bits());
                    summary.bytes(1, &value.0);
                }
                event.bytes(5, &summary.0);
            }
            Content::Text(tag, text) => {
                let (mut plugin, mut metadata, mut tensor) =
                    (Message::default(), Message::default(), Message::default());
                plugin.bytes(1, b"text");
                metadata.bytes(1, &plugin.0);
                tensor.varint(1, DT_STRING);
                // A tensor without dimensions.
                tensor.bytes(2, &[]);
                tensor.bytes(8, text.as_bytes());
                let (mut value, mut summary) = (Message::default(), Message::default());
                value.bytes(1, tag.as_bytes());
                value.bytes(8, &tensor.0);
                value.bytes(9, &metadata.0);
                summary.bytes(1, &value.0);
                event.bytes(5, &summary.0);
            }
        }
        event.0
    }
}

/// A message of a protocol buffer, built field by field.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn varint(&mut self, field: u64, value: u64) {
        self.number(field << 3);
        self.number(value);
    }

    fn fixed64(&mut self, field: u64, bits: u64) {
        self.number(field << 3 | 1);
        self.0.extend(bits.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.number(field << 3 | 2);
        self.number(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn fixed32(&mut self, field: u64, bits: u32) {
        self.number(field << 3 | 5);
        self.0.extend(bits.to_le_bytes());
    }
}

/// Masks a checksum, because the data may itself contain checksums: rotated, with a constant added.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), a byte at a time: records are a few hundred bytes a step.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc: u32, byte| TABLE[(crc as u8 ^ byte) as usize] ^ crc >> 8)
}

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors of RFC 3720, appendix B.4, and the usual digits.
    #[test]
    fn checksums_are_those_of_the_standard() {
        let up: Vec<u8> = (0..32).collect();
        let down: Vec<u8> = (0..32).rev().collect();
        let read_command = [
            0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0, 0x04, 0, 0, 0, 0,
            0x14, 0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0,
        ];
        for (bytes, crc) in [
            (&b""[..], 0),
            (b"123456789", 0xe306_9283),
            (&[0; 32], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&up, 0x46dd_794e),
            (&down, 0x113f_db5c),
            (&read_command, 0xd996_3a56),
        ] {
            assert_eq!(crc32c(bytes), crc, "{bytes:x?}");
        }
    }

    /// Compares with the bytes of TensorBoard's own writer for the same events.
    #[test]
    fn records_are_those_of_tensorboards_own_writer() {
        let hex = |record: Record<'_>| -> String {
            record.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
        };
        let (time, step) = (1.5, 300);
        for (content, bytes) in [
            (Content::Version, include_str!("golden/version.hex")),
            (Content::Restart, include_str!("golden/restart.hex")),
            (
                Content::Scalars(&[("train/loss", 2.5), ("train/lr", 1e-3)]),
                include_str!("golden/scalars.hex"),
            ),
            (Content::Text("config", "a **b**"), include_str!("golden/text.hex")),
        ] {
            assert_eq!(hex(Record { time, step, content: content.clone() }), bytes.trim(), "{content:?}");
        }
    }
}
