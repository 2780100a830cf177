//! Calls at the hub: collects the parts of all ranks, and sends everyone the result.

use std::collections::HashMap;

use crate::failure::{Failure, named};
use crate::frame::MOST_BYTES;
use crate::message::{Head, Member, Op, join_call, join_parts, split_call};

/// Maximum size of a call's result. Host messages are small, and the frame needs room for heads and lengths.
pub const MOST_CALL_BYTES: usize = MOST_BYTES - (64 << 10);

/// Calls that some ranks have made and others have not.
pub(crate) struct Collected {
    ranks: usize,
    open: HashMap<(String, u64), Open>,
}

struct Open {
    head: Head,
    /// The rank whose part arrived first.
    first: usize,
    parts: Vec<Option<Vec<u8>>>,
}

impl Collected {
    pub fn new(ranks: usize) -> Collected {
        Collected { ranks, open: HashMap::new() }
    }

    /// Adds the part of a rank. Returns the payload of the answer to everyone if it was the last part.
    pub fn take(
        &mut self,
        rank: usize,
        payload: &[u8],
        members: &[Member],
    ) -> Result<Option<Vec<u8>>, Failure> {
        let Some((head, bytes)) = split_call(payload) else {
            let sentence = format!("{} sent a call that cannot be read", members[rank].named(rank));
            return Err(Failure::new(Some(rank), sentence));
        };
        let key = (head.line.clone(), head.count);
        let ranks = self.ranks;
        let fresh = || Open { head: head.clone(), first: rank, parts: vec![None; ranks] };
        let open = self.open.entry(key.clone()).or_insert_with(fresh);
        if open.head != head || open.parts[rank].is_some() {
            let sentence = format!(
                "{} calls {} while {} calls {}: the ranks made unequal decisions",
                members[rank].named(rank),
                shown(&head),
                members[open.first].named(open.first),
                shown(&open.head)
            );
            return Err(Failure::new(Some(rank), sentence));
        }
        open.parts[rank] = Some(bytes.to_vec());
        if open.parts.iter().any(Option::is_none) {
            return Ok(None);
        }
        let Open { head, parts, .. } = self.open.remove(&key).expect("it was there");
        let parts: Vec<Vec<u8>> = parts.into_iter().flatten().collect();
        let result = match head.op {
            Op::Broadcast => parts[0].clone(),
            Op::Gather => join_parts(parts.iter().map(Vec::as_slice)),
            Op::Agree => {
                // Eight-byte little-endian numbers, of which the largest is the result.
                let numbers: Option<Vec<u64>> =
                    parts.iter().map(|part| Some(u64::from_le_bytes(part[..].try_into().ok()?))).collect();
                let largest = numbers.and_then(|numbers| numbers.into_iter().max());
                largest.unwrap_or_default().to_le_bytes().to_vec()
            }
            Op::Barrier => vec![],
        };
        if result.len() > MOST_CALL_BYTES {
            let sentence = format!(
                "{} gives {} bytes, more than the {MOST_CALL_BYTES} that a call may carry",
                shown(&head),
                result.len()
            );
            return Err(Failure::new(None, sentence));
        }
        Ok(Some(join_call(&head, &result)))
    }

    /// A clause on waiting calls: which ranks wait in which call, and for which.
    pub fn waiting(&self) -> Option<String> {
        let mut open: Vec<&Open> = self.open.values().collect();
        open.sort_by_key(|open| (open.head.line.clone(), open.head.count));
        let clause = |open: &&Open| {
            let those = |is_there: bool| {
                named(
                    &(0..self.ranks)
                        .filter(|rank| open.parts[*rank].is_some() == is_there)
                        .collect::<Vec<_>>(),
                )
            };
            format!("{} of {} waits for {}", shown(&open.head), those(true), those(false))
        };
        let clauses: Vec<String> = open.iter().map(clause).collect();
        (!clauses.is_empty()).then(|| clauses.join("; "))
    }
}

fn shown(head: &Head) -> String {
    let op = match head.op {
        Op::Broadcast => "broadcast",
        Op::Gather => "gather",
        Op::Agree => "agree",
        Op::Barrier => "barrier",
    };
    format!("{op} `{}`", head.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::split_parts;

    fn members(ranks: usize) -> Vec<Member> {
        let member = |rank| Member { host: "a".into(), process: 100 + rank as u32, node: None, device: None };
        (0..ranks).map(member).collect()
    }

    fn part(line: &str, count: u64, op: Op, name: &str, bytes: &[u8]) -> Vec<u8> {
        join_call(&Head { line: line.into(), count, op, name: name.into() }, bytes)
    }

    #[test]
    fn lines_do_not_wait_for_each_other() {
        let mut calls = Collected::new(2);
        let all = members(2);
        let loss = part("main", 0, Op::Gather, "loss", b"ab");
        let save = part("save", 0, Op::Barrier, "saved", b"");
        assert_eq!(calls.take(0, &loss, &all), Ok(None));
        assert_eq!(calls.take(1, &save, &all), Ok(None));
        assert_eq!(
            calls.waiting().unwrap(),
            "gather `loss` of rank 0 waits for rank 1; barrier `saved` of rank 1 waits for rank 0"
        );
        let answer = calls.take(1, &part("main", 0, Op::Gather, "loss", b"c"), &all).unwrap().unwrap();
        let (head, bytes) = split_call(&answer).unwrap();
        assert_eq!(
            (head.name.as_str(), split_parts(bytes).unwrap()),
            ("loss", vec![b"ab".to_vec(), b"c".to_vec()])
        );
        assert!(calls.take(0, &save, &all).unwrap().is_some());
        assert_eq!(calls.waiting(), None);
    }

    #[test]
    fn the_largest_number_is_agreed_on() {
        let mut calls = Collected::new(3);
        for rank in 0..3u64 {
            let number = [7, 99, 3][rank as usize] + (1u64 << 40);
            let part = part("main", 4, Op::Agree, "stop", &number.to_le_bytes());
            let answer = calls.take(rank as usize, &part, &members(3)).unwrap();
            let number = answer.map(|answer| split_call(&answer).unwrap().1.to_vec());
            assert_eq!(number, (rank == 2).then(|| (99u64 + (1 << 40)).to_le_bytes().to_vec()));
        }
    }

    #[test]
    fn unequal_calls_are_reported_with_both_ranks() {
        let mut calls = Collected::new(2);
        let all = members(2);
        assert_eq!(calls.take(0, &part("main", 0, Op::Gather, "loss", b""), &all), Ok(None));
        let told = calls.take(1, &part("main", 0, Op::Barrier, "end", b""), &all).unwrap_err();
        let sentence = "rank 1 (a, process 101) calls barrier `end` while rank 0 (a, process 100) calls gather `loss`: \
            the ranks made unequal decisions";
        assert_eq!((told.rank, told.sentence.as_str()), (Some(1), sentence));
        assert!(calls.take(1, b"\xff\xff\xff\xff", &all).is_err());
    }
}
