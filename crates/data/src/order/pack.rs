//! Packs documents into rows: streams of `<bos> document <eos>`, concatenated and cut every `context` tokens.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::documents::{Documents, InBlocks, Spent, Walk};
use super::permutation::Order;
use crate::error::DataError;

/// Number of streams that rows come from in turn. It is fixed, so that results do not depend on the number of threads, and it
/// bounds how many threads can pack at once.
pub const STREAMS: usize = 8;

/// The shape of a row, and which tokens of it may attend to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packing {
    pub context: usize,
    pub document_mask: bool,
    pub frame: Frame,
}

/// The tokens that packing puts around every document. A vocabulary with one token for both ends puts it at the end only.
/// Without an end token, the last token of a document predicts nothing, because what follows is not its continuation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub bos: Option<u32>,
    pub eos: Option<u32>,
}

impl Frame {
    pub(crate) fn of(bos: u32, eos: u32) -> Self {
        Self { bos: (bos != eos).then_some(bos), eos: Some(eos) }
    }

    pub(crate) fn tokens(self) -> u64 {
        u64::from(self.bos.is_some()) + u64::from(self.eos.is_some())
    }
}

/// Tokens `start..start + len` of a row, which may attend to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub start: u32,
    pub len: u32,
}

/// Upper bound on the segments of a row: the shortest document has two tokens with its frame, and one more document may be cut
/// off at either end.
pub const fn max_segments(context: usize) -> usize {
    context / 2 + 2
}

/// One row of exactly `context` tokens.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    pub tokens: Vec<i32>,
    pub targets: Vec<i32>,
    pub positions: Vec<i32>,
    pub segments: Vec<Segment>,
}

impl Row {
    pub(crate) fn bytes(context: usize) -> usize {
        3 * context * size_of::<i32>() + size_of::<Self>()
    }
}

/// Position of a stream: token `offset` of its document number `document`, counted from 0; the tokens of the frame count. Where
/// documents come in blocks, `block` counts the blocks of the stream and `document` the documents within the block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamPosition {
    #[serde(default, skip_serializing_if = "is_zero")]
    pub block: u64,
    pub document: u64,
    pub offset: u64,
}

fn is_zero(block: &u64) -> bool {
    *block == 0
}

/// The places of a stream: every `lanes`-th position of an order, beginning with `lane`.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    pub order: Order,
    lane: u64,
    lanes: u64,
    /// The place after the last; `None` for a stream that never ends.
    end: Option<u64>,
    /// Where every stream reads all of few blocks: the residue of the documents that this stream takes.
    share: Option<u64>,
}

impl Places {
    pub(crate) fn is_end(&self, place: u64) -> bool {
        self.end == Some(place)
    }

    /// The position in the order of all streams.
    pub(crate) fn position(&self, place: u64) -> u64 {
        place * self.lanes + self.lane
    }

    /// Whether a document of the block at a place belongs to this stream. The residue rotates from place to place, so that
    /// blocks with fewer documents than there are streams do not leave a stream empty for ever.
    pub(crate) fn takes(&self, place: u64, document: u64) -> bool {
        self.share.is_none_or(|share| (place + document) % STREAMS as u64 == share)
    }

    /// The document or block at a place.
    pub(crate) fn at(&self, place: u64) -> u64 {
        self.order.document(self.position(place))
    }
}

/// The documents at the places of a stream, as one series of tokens.
pub(crate) struct Stream {
    documents: Arc<dyn Documents>,
    places: Places,
    /// Present where documents come in blocks.
    walk: Option<Box<dyn Walk>>,
    packing: Packing,
    position: StreamPosition,
    /// The document at `position`, framed; empty until it is needed.
    current: Vec<u32>,
    /// Time spent on documents since the last `take_spent`.
    spent: Spent,
}

/// A buffer with a larger capacity than this is shrunk after its document, so that one long document does not cost memory in
/// every stream for the rest of the run.
const KEPT_TOKENS: usize = 64 << 10;

/// Most consecutive documents without tokens, where the number of documents is not known.
const MOST_EMPTY: u64 = 1 << 20;

impl Stream {
    /// Stream `lane` of the training rows, starting at `position`.
    pub(crate) fn training(
        documents: Arc<dyn Documents>,
        order: Order,
        packing: Packing,
        lane: usize,
        position: StreamPosition,
    ) -> Self {
        let lane = lane as u64;
        let places = match documents.in_blocks().is_some_and(InBlocks::are_few) {
            true => Places { order, lane: 0, lanes: 1, end: None, share: Some(lane) },
            false => Places { order, lane, lanes: STREAMS as u64, end: None, share: None },
        };
        Self::new(documents, places, packing, position)
    }

    /// All documents once, in one stream.
    pub(crate) fn once(documents: Arc<dyn Documents>, order: Order, packing: Packing) -> Self {
        let end = documents.in_blocks().map_or_else(|| documents.count(), |blocks| Some(blocks.blocks()));
        let places = Places { order, lane: 0, lanes: 1, end, share: None };
        Self::new(documents, places, packing, StreamPosition::default())
    }

    fn new(
        documents: Arc<dyn Documents>,
        places: Places,
        packing: Packing,
        position: StreamPosition,
    ) -> Self {
        let walk = documents.in_blocks().map(|blocks| blocks.walk(places.clone(), position));
        Self { documents, places, walk, packing, position, current: Vec::new(), spent: Spent::default() }
    }

    pub(crate) fn position(&self) -> StreamPosition {
        self.position
    }

    /// Bytes of the current document.
    pub(crate) fn held_bytes(&self) -> usize {
        self.current.capacity() * size_of::<u32>()
    }

    /// Time spent on documents since the last call.
    pub(crate) fn take_spent(&mut self) -> Spent {
        std::mem::take(&mut self.spent)
    }

    /// The next row, or `None` where nothing is left to predict. The target of a token is the token that follows it in the
    /// stream, also across rows, so that every token of the stream but the first is predicted once. With the document mask,
    /// positions restart with each segment, and an `<eos>` predicts nothing, because another document follows. A last row that
    /// the documents do not fill is padded with `<eos>` without targets.
    pub(crate) fn row(&mut self) -> Result<Option<Row>, DataError> {
        let Packing { context, document_mask, frame } = self.packing;
        let mut tokens: Vec<i32> = Vec::with_capacity(context);
        let mut documents: Vec<Segment> = Vec::new();
        let mut last_of_document: Vec<usize> = Vec::new();
        while tokens.len() < context && self.load()? {
            let offset = self.position.offset as usize;
            let len = (context - tokens.len()).min(self.current.len() - offset);
            documents.push(Segment { start: tokens.len() as u32, len: len as u32 });
            tokens.extend(self.current[offset..offset + len].iter().map(|token| *token as i32));
            self.position.offset += len as u64;
            if offset + len == self.current.len() {
                last_of_document.push(tokens.len() - 1);
            }
        }
        let mut targets: Vec<i32> = tokens.iter().skip(1).copied().collect();
        if tokens.len() == context && self.load()? {
            targets.push(self.current[self.position.offset as usize] as i32);
        }
        if targets.is_empty() {
            return Ok(None);
        }
        targets.resize(context, -1);
        if tokens.len() < context {
            documents.push(Segment { start: tokens.len() as u32, len: (context - tokens.len()) as u32 });
            tokens.resize(context, frame.eos.unwrap_or(0) as i32);
        }
        let segments =
            if document_mask { documents } else { vec![Segment { start: 0, len: context as u32 }] };
        if document_mask || frame.eos.is_none() {
            last_of_document.into_iter().for_each(|last| targets[last] = -1);
        }
        let positions = segments.iter().flat_map(|segment| 0..segment.len as i32).collect();
        Ok(Some(Row { tokens, targets, positions, segments }))
    }

    /// Makes `position` refer to a token of `current`; false after the last document. Skips documents without tokens.
    fn load(&mut self) -> Result<bool, DataError> {
        let mut empty = 0;
        loop {
            if !self.current.is_empty() {
                if self.position.offset < self.current.len() as u64 {
                    return Ok(true);
                }
                self.advance();
            }
            if self.walk.is_none() && self.places.is_end(self.position.document) {
                return Ok(false);
            }
            let Frame { bos, eos } = self.packing.frame;
            self.current.extend(bos);
            let before = self.current.len();
            let (current, spent) = (&mut self.current, &mut self.spent);
            match &mut self.walk {
                None => self.documents.append(self.places.at(self.position.document), current, spent)?,
                Some(walk) => {
                    if !walk.next(&mut self.position, current, spent)? {
                        self.current.clear();
                        return Ok(false);
                    }
                }
            }
            if self.current.len() > before {
                // Pushing one token would otherwise double the buffer of a long document.
                self.current.reserve_exact(1);
                self.current.extend(eos);
                continue;
            }
            empty += 1;
            let most = self.documents.count().filter(|_| self.walk.is_none()).unwrap_or(MOST_EMPTY);
            if empty > most {
                return Err(DataError::input(
                    "None of the documents has any token: check the tokeniser and data.field.",
                ));
            }
            self.advance();
        }
    }

    fn advance(&mut self) {
        let StreamPosition { block, document, .. } = self.position;
        self.position = StreamPosition { block, document: document + 1, offset: 0 };
        self.current.clear();
        self.current.shrink_to(KEPT_TOKENS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::documents::TokenTable;

    const BOS: u32 = 0;
    const EOS: u32 = 1;

    fn packing(context: usize, document_mask: bool) -> Packing {
        Packing { context, document_mask, frame: Frame::of(BOS, EOS) }
    }

    fn table(documents: &[&[u32]]) -> Arc<dyn Documents> {
        Arc::new(TokenTable::new(documents, 100))
    }

    fn rows(mut stream: Stream) -> Vec<Row> {
        std::iter::from_fn(|| stream.row().unwrap()).collect()
    }

    fn once(documents: &[&[u32]], packing: Packing) -> Vec<Row> {
        let mut rows = rows(Stream::once(table(documents), Order::new(None, 0), packing));
        rows.iter_mut().for_each(|row| row.segments.shrink_to_fit());
        rows
    }

    #[test]
    fn rows_follow_each_other_without_a_gap() {
        let rows = once(&[&[10, 11], &[12, 13, 14]], packing(3, false));
        let tokens: Vec<&[i32]> = rows.iter().map(|row| row.tokens.as_slice()).collect();
        let targets: Vec<&[i32]> = rows.iter().map(|row| row.targets.as_slice()).collect();
        assert_eq!(tokens, [[0, 10, 11], [1, 0, 12], [13, 14, 1]]);
        assert_eq!(targets, [[10, 11, 1], [0, 12, 13], [14, 1, -1]]);
        assert!(rows.iter().all(|row| row.positions == [0, 1, 2]));
        assert!(rows.iter().all(|row| row.segments == [Segment { start: 0, len: 3 }]));
    }

    #[test]
    fn the_document_mask_begins_anew_with_each_document() {
        let rows = once(&[&[10, 11], &[12, 13, 14]], packing(6, true));
        assert_eq!(rows[0].tokens, [0, 10, 11, 1, 0, 12]);
        assert_eq!(rows[0].targets, [10, 11, 1, -1, 12, 13]);
        assert_eq!(rows[0].positions, [0, 1, 2, 3, 0, 1]);
        assert_eq!(rows[0].segments, [Segment { start: 0, len: 4 }, Segment { start: 4, len: 2 }]);
        // The rest of the second document is a segment of its own, and so is the padding.
        assert_eq!(rows[1].tokens, [13, 14, 1, 1, 1, 1]);
        assert_eq!(rows[1].targets, [14, 1, -1, -1, -1, -1]);
        assert_eq!(rows[1].positions, [0, 1, 2, 0, 1, 2]);
        assert_eq!(rows[1].segments, [Segment { start: 0, len: 3 }, Segment { start: 3, len: 3 }]);
    }

    #[test]
    fn a_last_row_without_anything_to_predict_is_dropped() {
        // Seven tokens: two rows of three, then an <eos> whose prediction the row before it has made.
        assert_eq!(once(&[&[10, 11, 12, 13, 14]], packing(3, false)).len(), 2);
        assert_eq!(once(&[&[10, 11, 12, 13, 14]], packing(100, false)).len(), 1);
    }

    #[test]
    fn no_row_has_more_segments_than_promised() {
        let shortest: Vec<&[u32]> = vec![&[10]; 200];
        for context in 1..40 {
            let most =
                once(&shortest, packing(context, true)).iter().map(|row| row.segments.len()).max().unwrap();
            assert!(most <= max_segments(context), "{most} segments in {context} tokens");
        }
    }

    #[test]
    fn a_stream_resumes_from_any_position() {
        let documents: Vec<Vec<u32>> =
            (0..13).map(|index| vec![10 + index; 1 + index as usize % 5]).collect();
        let documents: Vec<&[u32]> = documents.iter().map(Vec::as_slice).collect();
        let order = Order::new(Some(13), 3);
        let begin = StreamPosition::default();
        for mask in [false, true] {
            let make =
                |position| Stream::training(table(&documents), order.clone(), packing(4, mask), 5, position);
            let mut stream = make(begin);
            for _ in 0..60 {
                let mut resumed = make(stream.position());
                let expected = stream.row().unwrap();
                assert_eq!(resumed.row().unwrap(), expected);
                assert_eq!(resumed.position(), stream.position());
            }
        }
    }
}
