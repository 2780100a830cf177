//! All parsers of bytes from sockets, on damaged input: no panic, no hang, bounded memory.

use flatout_fuzz::{Limits, feed};
use flatout_world::frame::{self, FrameKind, MOST_BYTES, MOST_GREETING_BYTES};
use flatout_world::hosts;
use flatout_world::message::{
    Beat, Head, Hello, Join, MAGIC, Member, Op, PROTOCOL, Report, Status, Welcome, join_call, join_parts,
    json, parse, split_call, split_parts,
};

fn member() -> Member {
    Member { host: "gpu-a".into(), process: 4242, node: Some(1), device: Some("GPU 1".into()) }
}

fn seeds() -> Vec<Vec<u8>> {
    let join = Join {
        magic: MAGIC.into(),
        protocol: PROTOCOL,
        version: "1.0".into(),
        rank: 3,
        ranks: 4,
        secret: Some("word".into()),
        member: member(),
    };
    let head = Head { line: "main".into(), count: 7, op: Op::Gather, name: "loss".into() };
    let parts = join_parts([&b"one"[..], b"", b"three"].into_iter());
    let beat =
        Beat { status: Status { step: 3, doing: "training".into(), part: 1 }, marks: vec![(8, 1), (6, 2)] };
    let frames = [
        frame::encode(FrameKind::Hello, &json(&Hello { magic: MAGIC.into(), label: "slurm 7.0".into() })),
        frame::encode(FrameKind::Join, &json(&join)),
        frame::encode(FrameKind::Welcome, &json(&Welcome { session: u64::MAX, members: vec![member(); 3] })),
        frame::encode(FrameKind::Beat, &json(&beat)),
        frame::encode(FrameKind::Call, &join_call(&head, b"bytes of a rank")),
        frame::encode(FrameKind::Answer, &join_call(&head, &parts)),
        frame::encode(
            FrameKind::Failure,
            &json(&Report { sentence: "the disk is full".into(), about: None }),
        ),
        frame::encode(FrameKind::Bye, b""),
    ];
    let mut seeds = frames.to_vec();
    seeds.push(frames.concat());
    seeds
}

#[test]
fn frames() {
    let limits = Limits { memory_bytes: 64 << 20, ..Limits::default() };
    feed("world-frames", &seeds(), limits, |bytes| {
        for most in [MOST_GREETING_BYTES, MOST_BYTES] {
            let mut from = bytes;
            while let Ok(frame) = frame::read(&mut from, most) {
                // A frame that was read encodes to the same bytes.
                let again = frame::encode(frame.kind, &frame.payload);
                assert!(bytes.windows(again.len()).any(|window| window == again));
                let payload = &frame.payload[..];
                let _ = (parse::<Hello>(payload), parse::<Join>(payload), parse::<Welcome>(payload));
                let _ = (parse::<Beat>(payload), parse::<Report>(payload));
                if let Some((_, rest)) = split_call(payload)
                    && let Some(parts) = split_parts(rest)
                {
                    assert_eq!(join_parts(parts.iter().map(Vec::as_slice)), rest);
                }
            }
        }
    });
}

#[test]
fn lists_of_hosts() {
    let lists = ["gpu1", "gpu-[01-03,7],login", "rack[1-2]n[0-1]", "a[1-2],b,c[3]-ib", "tux[0-65535]"];
    let seeds: Vec<Vec<u8>> = lists.iter().map(|list| list.as_bytes().to_vec()).collect();
    feed("world-hosts", &seeds, Limits::default(), |bytes| {
        let list = String::from_utf8_lossy(bytes);
        if let Ok(hosts) = hosts::expand(&list) {
            assert!(!hosts.is_empty() && hosts.len() <= 1 << 16);
            assert!(hosts.iter().all(|host| !host.contains(['[', ']', ','])), "{list}: {hosts:?}");
        }
    });
}
