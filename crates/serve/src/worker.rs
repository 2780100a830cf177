//! The loop that submits jobs to the generator and passes its progress to their outlets.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use flatout_train::Failure;
use flatout_train::infer::generate::{Generator, Progress, Request};

use crate::api::Endpoint;
use crate::api::error::ApiError;
use crate::front::Front;
use crate::outlet::Outlet;

/// The time that running jobs have to end after the server was stopped.
const GRACE: Duration = Duration::from_secs(5);
/// The interval at which an idle worker checks whether it was stopped.
const LOOK: Duration = Duration::from_millis(50);

/// The texts of one HTTP request.
pub struct Job {
    pub requests: Vec<Request>,
    pub outlet: Outlet,
    pub began: Instant,
}

/// A running job.
struct Open {
    outlet: Outlet,
    /// The generator's ids of its texts, in the order of its choices.
    numbers: Vec<u64>,
    began: Instant,
}

impl Open {
    fn line(&self, outcome: &str) -> String {
        let Outlet { head, usage, .. } = &self.outlet;
        let form = if head.endpoint == Endpoint::Chat { "chat" } else { "completions" };
        let seconds = self.began.elapsed().as_secs_f64();
        let (read, made) = (usage.prompt, usage.completion);
        format!("{form} {} {outcome}: {read} tokens read, {made} made in {seconds:.2} s", head.id)
    }
}

struct Worker<'a> {
    generator: &'a mut Generator,
    /// Running jobs in the order in which they arrived.
    open: BTreeMap<u64, Open>,
    /// The job and the choice of each id of the generator.
    places: BTreeMap<u64, (u64, usize)>,
    next: u64,
    log: &'a dyn Fn(String),
}

impl Worker<'_> {
    fn begin(&mut self, job: Job) {
        let Job { requests, outlet, began } = job;
        let mut open = Open { outlet, numbers: vec![], began };
        let key = self.next;
        self.next += 1;
        for (choice, request) in requests.into_iter().enumerate() {
            match self.generator.submit(request) {
                Ok(number) => {
                    open.numbers.push(number);
                    self.places.insert(number, (key, choice));
                }
                Err(error) => {
                    open.outlet.fail(&ApiError::bad(error.to_string()));
                    self.finish(open, "refused");
                    return;
                }
            }
        }
        self.open.insert(key, open);
    }

    /// Cancels the remaining texts of a job and logs its end.
    fn finish(&mut self, open: Open, outcome: &str) {
        for number in &open.numbers {
            self.generator.cancel(*number);
            self.places.remove(number);
        }
        (self.log)(open.line(outcome));
    }

    /// Cancels jobs whose clients have disconnected.
    fn cancel_closed(&mut self) {
        let is_closed = |(key, open): (&u64, &Open)| open.outlet.is_closed().then_some(*key);
        let gone: Vec<u64> = self.open.iter().filter_map(is_closed).collect();
        for key in gone {
            let open = self.open.remove(&key).expect("an open job");
            self.finish(open, "left by its client");
        }
    }

    fn give(&mut self, news: Progress) {
        let Some((key, choice)) = self.places.get(&news.id).copied() else { return };
        if news.finish.is_some() {
            self.places.remove(&news.id);
        }
        if self.open.get_mut(&key).expect("an open job").outlet.take(choice, news) {
            let open = self.open.remove(&key).expect("an open job");
            self.finish(open, "done");
        }
    }

    fn fail_all(&mut self, error: &ApiError, outcome: &str) {
        for (_, mut open) in std::mem::take(&mut self.open) {
            open.outlet.fail(error);
            self.finish(open, outcome);
        }
    }
}

/// Answers queued jobs with an error.
fn fail_waiting(jobs: &Receiver<Job>, error: &ApiError) {
    for mut job in jobs.try_iter() {
        job.outlet.fail(error);
    }
}

/// Works until `stop` returns true and running jobs have ended or their time is up, or until the device fails.
pub fn work(
    generator: &mut Generator,
    jobs: &Receiver<Job>,
    front: &Front,
    stop: &dyn Fn() -> bool,
    log: &dyn Fn(String),
) -> Result<(), Failure> {
    let mut worker = Worker { generator, open: BTreeMap::new(), places: BTreeMap::new(), next: 0, log };
    let mut closing: Option<Instant> = None;
    let ending = ApiError::with_status(503, "the server is ending");
    loop {
        if closing.is_none() && stop() {
            front.is_closing.store(true, Ordering::Release);
            closing = Some(Instant::now());
        }
        if worker.open.is_empty() && closing.is_none() {
            match jobs.recv_timeout(LOOK) {
                Ok(job) => worker.begin(job),
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
        while let Ok(job) = jobs.try_recv() {
            worker.begin(job);
        }
        if closing.is_some_and(|since| worker.open.is_empty() || since.elapsed() > GRACE) {
            worker.fail_all(&ending, "cut off");
            return Ok(());
        }
        worker.cancel_closed();
        if !worker.generator.is_busy() {
            continue;
        }
        match worker.generator.advance() {
            Ok(news) => news.into_iter().for_each(|news| worker.give(news)),
            Err(failure) => {
                front.is_closing.store(true, Ordering::Release);
                let sentence = format!("the model failed: {failure}");
                let error = ApiError::with_status(500, sentence);
                worker.fail_all(&error, "failed");
                fail_waiting(jobs, &error);
                return Err(failure);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use flatout_http::Reply;

    use super::*;
    use crate::api::{Delivery, Head};
    use crate::front::Ticket;
    use crate::outlet::Texts;

    #[test]
    fn queued_jobs_get_the_failure_of_the_device() {
        let (sender, jobs) = mpsc::channel();
        let mut replies = vec![];
        for _ in 0..2 {
            let head = Head { endpoint: Endpoint::Chat, id: "x".into(), created: 0, model: "m".into() };
            let texts = Texts { prompt_tokens: 1, echoes: vec![String::new()], has_logprobs: false };
            let ticket = Ticket::of(&Arc::default(), 1);
            let (reply, outlet) = Outlet::open(head, texts, Delivery::Whole, Arc::default(), ticket);
            sender.send(Job { requests: vec![], outlet, began: Instant::now() }).unwrap();
            replies.push(reply);
        }
        fail_waiting(&jobs, &ApiError::with_status(500, "the model failed: no memory"));
        for reply in replies {
            let Reply::Later(mut waiting) = reply else { panic!("an answer that comes later") };
            assert_eq!(waiting.try_recv().expect("an answer").status, 500);
        }
    }
}
