//! Requests that arrive at any time get the tokens and log-probabilities that they get alone, to the bit.

use std::collections::BTreeMap;
use std::path::Path;

use flatout_data::examples::{QuestionPart, Questions};
use flatout_ir::random;
use flatout_train::device::Device;
use flatout_train::infer::generate::{
    Finish, Generator, GeneratorCapacity, PictureReader, Progress, Request, ScoredToken,
};
use flatout_train::infer::sampling::{Adjustments, Sampling};
use flatout_train::weights::loaded::Loaded;

use crate::small_run::{config, train_in};
use crate::vl_folder::{expected, picture, write};

const CONTEXT: usize = 160;
/// The token that ends a document.
const EOS: u32 = 1;

fn trained() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let context = format!("model.context={CONTEXT}");
    train_in(&folder.path().join("run"), &config(&[&context, "train.batch=2"]), |_| {});
    folder
}

fn serving(folder: &Path, sequences: usize) -> Generator {
    let loaded = Loaded::open(&folder.join("run"), &[]).expect("a run");
    let room = GeneratorCapacity { sequences, tokens: CONTEXT };
    Generator::serving(loaded, &Device::Cpu { threads: 2 }, room, None).expect("a model")
}

fn tokens(seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| random::philox([i, seed, 0, 0], [5, 5])[0] % 200).collect()
}

/// Everything that a request received.
#[derive(Clone, Debug, Default, PartialEq)]
struct Response {
    echoed: Vec<ScoredToken>,
    text: String,
    tokens: Vec<ScoredToken>,
    drawn: usize,
    finish: Option<Finish>,
}

impl Response {
    fn take(&mut self, news: Progress) {
        assert_eq!(self.finish, None, "nothing comes after the end");
        self.echoed.extend(news.echoed);
        self.text += &news.text;
        self.tokens.extend(news.tokens);
        self.drawn += usize::from(news.is_drawn);
        self.finish = news.finish;
    }
}

fn alone(generator: &mut Generator, request: &Request) -> Response {
    let mut response = Response::default();
    let id = generator.submit(request.clone()).expect("a request");
    while generator.is_busy() {
        for news in generator.advance().expect("a run") {
            assert_eq!(news.id, id);
            response.take(news);
        }
    }
    response
}

/// Prevents texts from ending with the token that ends a document.
fn endless() -> Adjustments {
    Adjustments { bias: vec![(EOS, -100.0)], ..Adjustments::default() }
}

/// Requests of every kind: long and short prompts, low and high temperatures, with and without log-probabilities, text, scored
/// prompts.
fn requests() -> Vec<Request> {
    let lengths = [1, 2, 17, 63, 64, 65, 120, 130, 159, 160, 40, 9];
    let request = |(number, length): (usize, usize)| {
        let temperature = [0.0, 0.7, 1.0][number % 3];
        let sampling = Sampling {
            temperature,
            top_k: [0, 20][number % 2],
            top_p: [1.0, 0.9][number % 2],
            seed: number as u64,
            max_tokens: [24, 3, 40, 0][number % 4],
        };
        Request {
            top: (number % 3 != 1).then_some(number % 4),
            echo: number % 3 == 0,
            text: (number % 2 == 0).then(Vec::new),
            copy: (number % 2) as u32,
            adjustments: Adjustments { frequency: [0.0, 0.4][number / 4 % 2], ..endless() },
            ..Request::new(tokens(number as u32, length).into(), sampling)
        }
    };
    lengths.into_iter().enumerate().map(request).collect()
}

#[test]
fn results_of_a_request_do_not_depend_on_other_requests() {
    let folder = trained();
    let requests = requests();
    // Random arrivals: several at once, some while others are read or continued, more than there are lanes.
    for (seed, lanes) in [(1, 3), (2, 3), (3, 2), (4, 7), (5, 12)] {
        let mut generator = serving(folder.path(), lanes);
        let wanted: Vec<Response> = requests.iter().map(|request| alone(&mut generator, request)).collect();
        assert!(wanted.iter().all(|response| response.finish.is_some()));
        assert!(wanted.iter().any(|response| response.tokens.len() >= 30), "some are long");
        let mut order: Vec<usize> = (0..requests.len()).collect();
        order.sort_by_key(|number| random::philox([*number as u32, seed, 1, 0], [9, 9])[0]);
        let mut coming = order.into_iter().peekable();
        let mut response: BTreeMap<u64, (usize, Response)> = BTreeMap::new();
        let mut runs = 0;
        while coming.peek().is_some() || generator.is_busy() {
            let arrivals = random::philox([runs, seed, 2, 0], [9, 9])[0] % 4;
            for _ in 0..if generator.is_busy() { arrivals / 3 } else { 1 + arrivals } {
                let Some(number) = coming.next() else { break };
                let id = generator.submit(requests[number].clone()).expect("a request");
                response.insert(id, (number, Response::default()));
            }
            for news in generator.advance().expect("a run") {
                response.get_mut(&news.id).expect("a known request").1.take(news);
            }
            runs += 1;
        }
        assert_eq!(response.len(), requests.len());
        for (number, response) in response.into_values() {
            assert_eq!(response, wanted[number], "request {number} of {lanes} lanes, seed {seed}");
        }
    }
}

/// Prompts longer than several runs, and the same tokens read by the plan that returns only the last logits.
#[test]
fn the_tokens_of_a_prompt_have_the_log_probabilities_of_drawing_them() {
    let folder = trained();
    let mut generator = serving(folder.path(), 2);
    let prompt = tokens(3, 150);
    let sampling = Sampling { max_tokens: 1, temperature: 0.0, ..Sampling::default() };
    let request = Request { echo: true, top: Some(2), ..Request::new(prompt.clone().into(), sampling) };
    let response = alone(&mut generator, &request);
    assert_eq!(response.echoed.iter().map(|told| told.token).collect::<Vec<_>>(), prompt);
    assert_eq!(response.echoed[0], ScoredToken { token: prompt[0], ..ScoredToken::default() });
    for at in [1, 2, 63, 64, 65, 149] {
        generator.clear();
        let logits = generator.read(&prompt[..at]).expect("logits");
        let sum = logits.iter().map(|x| (*x as f64).exp()).sum::<f64>().ln();
        let told = &response.echoed[at];
        let logp = logits[prompt[at] as usize] as f64 - sum;
        assert!(
            (told.logp.expect("a number") as f64 - logp).abs() < 1e-5,
            "token {at}: {told:?}, not {logp}"
        );
        let best = logits.iter().copied().fold(f32::MIN, f32::max) as f64 - sum;
        assert!((told.top[0].1 as f64 - best).abs() < 1e-5 && told.top[1].1 <= told.top[0].1, "token {at}");
    }
    let nothing = Request { how: Sampling { max_tokens: 0, ..sampling }, ..request };
    let response = alone(&mut generator, &nothing);
    assert_eq!((response.echoed.len(), response.drawn, response.finish), (150, 0, Some(Finish::Length)));
}

#[test]
fn texts_end_at_stop_strings_and_tokens() {
    let folder = trained();
    let mut generator = serving(folder.path(), 2);
    let sampling = Sampling { max_tokens: 30, temperature: 0.0, ..Sampling::default() };
    let plain = Request {
        text: Some(vec![]),
        adjustments: endless(),
        ..Request::new(tokens(7, 20).into(), sampling)
    };
    let whole = alone(&mut generator, &plain);
    assert_eq!((whole.tokens.len(), &whole.finish), (30, &Some(Finish::Length)), "{whole:?}");
    let vocabulary = generator.vocabulary().expect("a tokeniser").clone();
    let made: Vec<u32> = whole.tokens.iter().map(|told| told.token).collect();
    assert!(vocabulary.decode(&[tokens(7, 20), made.clone()].concat()).ends_with(&whole.text));
    // A string in the middle of the text.
    let place = whole.text.char_indices().nth(whole.text.chars().count() / 2).expect("a text").0;
    let stop = whole.text[place..].chars().take(4).collect::<String>();
    let first = whole.text.find(&stop).expect("it is there");
    let cut = alone(&mut generator, &Request { text: Some(vec!["nowhere".into(), stop]), ..plain.clone() });
    assert_eq!((cut.text.as_str(), cut.finish), (&whole.text[..first], Some(Finish::Text)));
    assert!(cut.tokens.len() < 30 && whole.tokens.starts_with(&cut.tokens));
    assert!(
        cut.tokens.len() < cut.drawn && cut.drawn < 30,
        "the tokens of the string were drawn: {}",
        cut.drawn
    );
    // A token.
    let last = alone(&mut generator, &Request { stops: vec![made[5]], ..plain.clone() });
    let at = made.iter().position(|token| *token == made[5]).expect("it is there");
    assert_eq!((&last.tokens[..], last.drawn), (&whole.tokens[..at], at + 1));
    assert!(matches!(last.finish, Some(Finish::Token(told)) if told.token == made[5]));
    // The end of a document, as a separate token with its log-probability.
    let to_end = Adjustments { bias: vec![(EOS, 100.0)], ..Adjustments::default() };
    let ended = alone(&mut generator, &Request { adjustments: to_end, top: Some(1), ..plain.clone() });
    assert!(ended.text.is_empty() && ended.tokens.is_empty());
    assert!(matches!(ended.finish, Some(Finish::Token(ScoredToken { token: EOS, logp: Some(_), .. }))));
    // A token that is suppressed.
    let bias = vec![(made[0], -100.0), (EOS, -100.0)];
    let other = alone(&mut generator, &Request { adjustments: Adjustments { bias, ..endless() }, ..plain });
    assert!(other.tokens.iter().all(|told| told.token != made[0]));
}

#[test]
fn lanes_of_cancelled_requests_serve_others() {
    let folder = trained();
    let mut generator = serving(folder.path(), 2);
    let sampling = Sampling { max_tokens: 100, temperature: 0.0, ..Sampling::default() };
    let request = Request::new(tokens(1, 50).into(), sampling);
    let short = Request::new(tokens(2, 9).into(), Sampling { max_tokens: 4, ..sampling });
    let wanted = alone(&mut generator, &short);
    let ids: Vec<u64> = (0..4).map(|_| generator.submit(request.clone()).expect("a request")).collect();
    let last = generator.submit(short).expect("a request");
    for _ in 0..5 {
        generator.advance().expect("a run");
    }
    ids.iter().for_each(|id| generator.cancel(*id));
    let mut response = Response::default();
    while generator.is_busy() {
        for news in generator.advance().expect("a run") {
            assert_eq!(news.id, last);
            response.take(news);
        }
    }
    assert_eq!(response, wanted);
    for (count, sentence) in [(0, "at least one"), (CONTEXT + 1, "the context is 160")] {
        let refused = generator
            .submit(Request::new(tokens(1, count).into(), sampling))
            .expect_err("no room")
            .to_string();
        assert!(refused.contains(sentence), "{refused}");
    }
    let refused =
        generator.submit(Request::new(vec![1 << 20].into(), sampling)).expect_err("no token").to_string();
    assert!(refused.contains("is not one of the model's"), "{refused}");
}

/// Images that arrive with their requests: the answers equal those of `transformers`, whatever other requests there are, among
/// them prompts without images, and with more requests than lanes.
#[test]
fn images_that_come_later_are_answered_as_the_library_does() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path());
    let sampling = Sampling { temperature: 0.0, max_tokens: 14, ..Sampling::default() };
    let loaded = Loaded::open(folder.path(), &[]).expect("a model");
    let capacity = loaded.positions;
    let reader = PictureReader::of(&loaded, capacity).expect("a reader").expect("a model that sees");
    let vocabulary = loaded.vocabulary.as_ref().expect("a tokeniser");
    let questions =
        Questions::open(vocabulary, None, &[folder.path().to_path_buf()], None).expect("a template");
    let list = |value: &serde_json::Value| -> Vec<u32> {
        value
            .as_array()
            .expect("a list")
            .iter()
            .map(|token| token.as_u64().expect("a token") as u32)
            .collect()
    };
    let (mut requests, mut wanted) = (vec![], vec![]);
    for case in expected() {
        let names = case["pictures"].as_array().expect("a list").iter();
        let files = names.map(|name| std::fs::read(picture(name.as_str().expect("a name"))).expect("a file"));
        let pictures: Vec<_> = files.map(|bytes| reader.read(&bytes).expect("an image")).collect();
        let question = case["question"].as_str().expect("a text");
        let parts = QuestionPart::split(question, pictures.len()).expect("parts");
        let written = questions.tokens_of_parts(&parts).expect("tokens");
        let prompt = match pictures.is_empty() {
            true => written.into(),
            false => reader.placed(&written, &pictures).expect("places"),
        };
        assert_eq!(prompt.tokens, list(&case["prompt"]), "{case}");
        requests.push(Request { pictures, ..Request::new(prompt, sampling) });
        wanted.push(list(&case["new"]));
    }
    assert!(wanted.len() > 2 && requests.iter().any(|request| request.pictures.is_empty()));
    for sequences in [1, 2, wanted.len()] {
        let loaded = Loaded::open(folder.path(), &[]).expect("a model");
        let room = GeneratorCapacity { sequences, tokens: capacity };
        let device = Device::Cpu { threads: 2 };
        let mut generator = Generator::serving(loaded, &device, room, Some(&reader)).expect("a model");
        // Copies of a request share its pictures and give equal answers with greedy decoding.
        for (request, wanted) in requests.iter().zip(&wanted) {
            let copies = (0..3).map(|copy| Request { copy, ..request.clone() });
            let ids: Vec<u64> = copies.map(|copy| generator.submit(copy).expect("a request")).collect();
            let mut made: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
            while generator.is_busy() {
                for news in generator.advance().expect("a step") {
                    made.entry(news.id).or_default().extend(news.tokens.iter().map(|told| told.token));
                }
            }
            assert!(ids.iter().all(|id| made.get(id).unwrap_or(&vec![]) == wanted), "{sequences} at once");
        }
        // Twice, so that pictures reuse numbers of others; the first requests are cancelled in progress.
        for cancels in [true, false] {
            let ids: Vec<u64> = requests
                .iter()
                .map(|request| generator.submit(request.clone()).expect("a request"))
                .collect();
            let mut made: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
            while generator.is_busy() {
                for news in generator.advance().expect("a step") {
                    made.entry(news.id).or_default().extend(news.tokens.iter().map(|told| told.token));
                }
                if cancels {
                    generator.cancel(ids[1]);
                }
            }
            for (at, (id, wanted)) in ids.iter().zip(&wanted).enumerate() {
                if !cancels || at != 1 {
                    assert_eq!(made.get(id).unwrap_or(&vec![]), wanted, "prompt {at}, {sequences} at once");
                }
            }
        }
    }
}
