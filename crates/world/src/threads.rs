//! The wire between ranks that are threads of one process, for tests and for verifying kernels.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::wire::{self, Wire, WireError};

/// The end of one rank. A rank that drops its end is gone for the others.
pub struct Threads {
    rank: usize,
    shared: Arc<Shared>,
}

struct Shared {
    ranks: usize,
    state: Mutex<State>,
    arrived: Condvar,
}

struct State {
    /// Messages in flight, at `from * ranks + to`. A rank is at most one exchange ahead of another, so at most two are queued.
    mail: Vec<VecDeque<Vec<u8>>>,
    gone: Vec<bool>,
}

impl Threads {
    pub fn connect(ranks: usize) -> Vec<Threads> {
        let state = State { mail: vec![VecDeque::new(); ranks * ranks], gone: vec![false; ranks] };
        let shared = Arc::new(Shared { ranks, state: Mutex::new(state), arrived: Condvar::new() });
        (0..ranks).map(|rank| Threads { rank, shared: Arc::clone(&shared) }).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().expect("no rank panics while it holds the mail")
    }
}

impl Wire for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.shared.ranks
    }

    fn exchange(&self, send: &[&[u8]], receive: &mut [&mut [u8]]) -> Result<(), WireError> {
        let ranks = self.shared.ranks;
        wire::begin(self.rank, ranks, send, receive);
        let letters: Vec<Vec<u8>> = send.iter().map(|bytes| bytes.to_vec()).collect();
        let mut state = self.state();
        for (to, letter) in letters.into_iter().enumerate().filter(|(to, _)| *to != self.rank) {
            state.mail[self.rank * ranks + to].push_back(letter);
        }
        self.shared.arrived.notify_all();
        for from in (0..ranks).filter(|from| *from != self.rank) {
            let letter = loop {
                if let Some(letter) = state.mail[from * ranks + self.rank].pop_front() {
                    break letter;
                }
                if state.gone[from] {
                    return Err(WireError::Gone { rank: from });
                }
                state = self.shared.arrived.wait(state).expect("no rank panics while it holds the mail");
            };
            let into = &mut *receive[from];
            if letter.len() != into.len() {
                let (sent, awaited) = (letter.len() as u64, into.len() as u64);
                return Err(WireError::Unequal { rank: from, sent, awaited });
            }
            into.copy_from_slice(&letter);
        }
        Ok(())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Ok(mut state) = self.shared.state.lock() {
            state.gone[self.rank] = true;
        }
        self.shared.arrived.notify_all();
    }
}
