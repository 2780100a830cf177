//! A prompt: its tokens, and the images among them.

use flatout_data::vision::{Grid, Stretch, positions};

/// Tokens, and the images that occupy some of their positions.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Prompt {
    pub tokens: Vec<u32>,
    /// In order of position.
    pub images: Vec<Placed>,
}

/// An image in a prompt: its tokens begin at position `at` and are consecutive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Placed {
    pub at: usize,
    /// Its number among the pictures.
    pub picture: usize,
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Prompt {
        Prompt { tokens, images: vec![] }
    }
}

/// The grids of pictures by number, and the patches per side of a token.
#[derive(Clone, Debug, Default)]
pub struct Grids {
    pub all: Vec<Grid>,
    pub merge: usize,
    /// For each picture the merge blocks that the text model sees, if these are not all.
    pub shown: Vec<Option<Vec<u32>>>,
}

impl Grids {
    pub fn tokens(&self, picture: usize) -> usize {
        self.shown[picture].as_ref().map_or(self.all[picture].tokens(self.merge), Vec::len)
    }

    /// The merge blocks of a picture that become tokens.
    pub fn blocks(&self, picture: usize) -> impl Iterator<Item = usize> + '_ {
        let shown = self.shown[picture].as_deref();
        (0..self.tokens(picture)).map(move |token| shown.map_or(token, |blocks| blocks[token] as usize))
    }
}

/// Tokens of a prompt that have not been read yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rest<'a> {
    pub tokens: &'a [u32],
    images: &'a [Placed],
    /// Position of the first token in its prompt.
    from: usize,
}

impl<'a> Rest<'a> {
    pub fn of(prompt: &'a Prompt) -> Rest<'a> {
        Rest { tokens: &prompt.tokens, images: &prompt.images, from: 0 }
    }

    pub fn text(tokens: &'a [u32]) -> Rest<'a> {
        Rest { tokens, images: &[], from: 0 }
    }

    pub fn has_images(&self) -> bool {
        !self.images.is_empty()
    }

    /// Images with the positions of their first tokens, counted from the first of these tokens.
    pub fn images(&self) -> impl Iterator<Item = Placed> + '_ {
        self.images.iter().map(|placed| Placed { at: placed.at - self.from, ..*placed })
    }

    /// The largest number of these tokens, at most `room`, that splits no image and includes only images that `takes` accepts.
    pub fn fitting(&self, room: usize, grids: &Grids, mut takes: impl FnMut(Placed) -> bool) -> usize {
        let most = self.tokens.len().min(room);
        for placed in self.images().filter(|placed| placed.at < most) {
            if placed.at + grids.tokens(placed.picture) > most || !takes(placed) {
                return placed.at;
            }
        }
        most
    }

    pub fn split_at(&self, count: usize) -> (Rest<'a>, Rest<'a>) {
        let (now, later) = self.tokens.split_at(count);
        let seen = self.images.partition_point(|placed| placed.at < self.from + count);
        let (images, more) = self.images.split_at(seen);
        (Rest { tokens: now, images, ..*self }, Rest { tokens: later, images: more, from: self.from + count })
    }

    /// Time, height and width of every token if the first is at position `next`, and the position after the last.
    pub fn positions(&self, next: usize, grids: &Grids) -> (Vec<[i32; 3]>, usize) {
        let (mut stretches, mut end) = (vec![], 0);
        for Placed { at, picture } in self.images() {
            stretches.extend([Stretch::Text(at - end), Stretch::Image(grids.all[picture])]);
            end = at + grids.tokens(picture);
        }
        stretches.push(Stretch::Text(self.tokens.len() - end));
        let (mut all, more) = positions(stretches, grids.merge);
        for Placed { at, picture } in self.images() {
            // Keeps only the visible blocks; earlier images were reduced already.
            let shown: Vec<[i32; 3]> = grids.blocks(picture).map(|block| all[at + block]).collect();
            all.splice(at..at + grids.all[picture].tokens(grids.merge), shown);
        }
        all.iter_mut().flatten().for_each(|position| *position += next as i32);
        (all, next + more as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three tokens, an image of six, two tokens, an image of one, a token.
    fn prompt() -> (Prompt, Grids) {
        let all = vec![Grid { rows: 4, columns: 6 }, Grid { rows: 2, columns: 2 }];
        let grids = Grids { all, merge: 2, shown: vec![None, None] };
        let images = vec![Placed { at: 3, picture: 0 }, Placed { at: 11, picture: 1 }];
        (Prompt { tokens: (0..13).collect(), images }, grids)
    }

    #[test]
    fn no_image_is_cut() {
        let (prompt, grids) = prompt();
        let rest = Rest::of(&prompt);
        let fitting: Vec<usize> = (0..15).map(|room| rest.fitting(room, &grids, |_| true)).collect();
        assert_eq!(fitting, [0, 1, 2, 3, 3, 3, 3, 3, 3, 9, 10, 11, 12, 13, 13]);
        assert_eq!(
            rest.fitting(15, &grids, |placed| placed.picture == 0),
            11,
            "an image that has no room waits"
        );
        let (now, later) = rest.split_at(3);
        assert!(!now.has_images() && now.tokens == [0, 1, 2] && later.tokens.len() == 10);
        assert_eq!(later.images().map(|placed| placed.at).collect::<Vec<_>>(), [0, 8]);
        assert_eq!(later.fitting(5, &grids, |_| true), 0);
    }

    /// Two of six blocks, in the second row and column: the text continues at the position after all six.
    #[test]
    fn an_image_that_is_not_shown_whole_keeps_its_places() {
        let (whole, mut grids) = prompt();
        let (all, end) = Rest::of(&whole).positions(0, &grids);
        grids.shown[0] = Some(vec![1, 5]);
        let images = vec![Placed { at: 3, picture: 0 }, Placed { at: 7, picture: 1 }];
        let some = Prompt { tokens: (0..9).collect(), images };
        let wanted: Vec<[i32; 3]> = [&all[..3], &[all[4], all[8]], &all[9..]].concat();
        assert_eq!(Rest::of(&some).positions(0, &grids), (wanted, end));
        assert_eq!(Rest::of(&some).fitting(4, &grids, |_| true), 3, "no image is cut");
    }

    #[test]
    fn positions_continue_after_a_portion() {
        let (prompt, grids) = prompt();
        let whole = Rest::of(&prompt).positions(0, &grids);
        assert_eq!(whole.1, 10, "three, the longer side of three, two, one and one");
        for cut in [1, 3, 9, 10, 11, 12] {
            let (now, later) = Rest::of(&prompt).split_at(cut);
            let (mut all, next) = now.positions(0, &grids);
            let (more, end) = later.positions(next, &grids);
            all.extend(more);
            assert_eq!((all, end), whole, "cut at {cut}");
        }
    }
}
