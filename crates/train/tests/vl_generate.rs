//! Compares text about images with `transformers`' `generate`, token for token. `make_vl_generate.py` beside the fixtures made
//! it.

use std::path::{Path, PathBuf};

use flatout_data::examples::{QuestionPart, Questions, Sighting};
use flatout_data::vision::{ImageReader, ImageStore, Patching};
use flatout_data::{Example, ExampleTable, ImageRoom, Layout, Shape, once};
use flatout_ir::{Program, Role};
use flatout_train::device::Device;
use flatout_train::infer::generate::{
    CHUNK_WITH_IMAGES, Generator, GeneratorCapacity, Pictures, Placed, Prompt,
};
use flatout_train::infer::sampling::Sampling;
use flatout_train::metrics::Metrics;
use flatout_train::tasks::batch::Batch;
use flatout_train::tasks::capacities::{self, Capacities};
use flatout_train::tasks::examples::LaidOut;
use flatout_train::tasks::seen::{PatchImages, SeenImages};
use flatout_train::training::evaluate::{Counted, EvalResults, evaluate_all};
use flatout_train::weights::loaded::Loaded;
use serde_json::Value;

use crate::vl_folder::{expected, picture, write};

const LIKELIEST: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0, max_tokens: 14 };

/// Prompts of the fixture with all their pictures, and the tokens that follow each.
struct PromptFixture {
    folder: tempfile::TempDir,
    pictures: Pictures,
    prompts: Vec<Prompt>,
    wanted: Vec<Vec<u32>>,
}

fn tokens(value: &Value) -> Vec<u32> {
    value.as_array().expect("a list").iter().map(|token| token.as_u64().expect("a token") as u32).collect()
}

fn loaded(folder: &Path, overrides: &[&str]) -> Loaded {
    let overrides: Vec<String> = overrides.iter().map(|word| word.to_string()).collect();
    Loaded::open(folder, &overrides).expect("a model")
}

/// The files of a prompt's pictures.
fn names(case: &Value) -> Vec<PathBuf> {
    let names = case["pictures"].as_array().expect("a list");
    names.iter().map(|name| picture(name.as_str().expect("a name"))).collect()
}

impl PromptFixture {
    /// Opens the model with some overrides.
    fn open(overrides: &[&str]) -> PromptFixture {
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path());
        let loaded = loaded(folder.path(), overrides);
        let cases = expected();
        let paths: Vec<PathBuf> = cases.iter().flat_map(names).collect();
        let (pictures, numbers) = Pictures::open(&loaded, &paths).expect("images");
        let mut numbers = &numbers[..];
        let vocabulary = loaded.vocabulary.as_ref().expect("a tokeniser");
        let questions =
            Questions::open(vocabulary, None, &[folder.path().to_path_buf()], None).expect("a template");
        let mut prompts = vec![];
        for case in &cases {
            let (shown, rest) = numbers.split_at(names(case).len());
            numbers = rest;
            let parts =
                QuestionPart::split(case["question"].as_str().expect("a text"), shown.len()).expect("parts");
            let written = questions.tokens_of_parts(&parts).expect("tokens");
            let prompt = pictures.placed(&written, shown).expect("places");
            if overrides.is_empty() {
                assert_eq!(prompt.tokens, tokens(&case["prompt"]), "{case}");
            }
            prompts.push(prompt);
        }
        let wanted = cases.iter().map(|case| tokens(&case["new"])).collect();
        PromptFixture { folder, pictures, prompts, wanted }
    }

    /// The tokens that follow the prompts of these numbers, several prompts at a time, read at least `chunk` tokens at a time.
    fn answers(&self, which: &[usize], sequences: usize, chunk: usize) -> Vec<Vec<u32>> {
        let loaded = Loaded::open(self.folder.path(), &[]).expect("a model");
        let prompts: Vec<Prompt> = which.iter().map(|at| self.prompts[*at].clone()).collect();
        let longest = prompts.iter().map(|prompt| prompt.tokens.len()).max().expect("a prompt");
        let room = GeneratorCapacity { sequences, tokens: longest + LIKELIEST.max_tokens };
        let device = Device::Cpu { threads: 2 };
        let mut generator =
            Generator::with_pictures(loaded, &device, room, self.pictures.clone(), chunk).expect("a model");
        generator.continue_prompts(&prompts, LIKELIEST, &mut |_, _| {}).expect("answers")
    }
}

/// One to three images per prompt, before the text and inside it, and a prompt without any: all at once, in turns, and alone;
/// with every prompt in one run of the tower, and with portions that end before an image.
#[test]
fn answers_are_those_of_the_library() {
    let fixture = PromptFixture::open(&[]);
    let all: Vec<usize> = (0..fixture.prompts.len()).collect();
    assert!(fixture.prompts.iter().any(|prompt| prompt.images.is_empty()));
    for (sequences, chunk) in [(all.len(), CHUNK_WITH_IMAGES), (all.len(), 1), (2, 1)] {
        let made = fixture.answers(&all, sequences, chunk);
        assert_eq!(made, fixture.wanted, "{sequences} at once, {chunk} tokens at a time");
    }
    for at in all {
        assert_eq!(fixture.answers(&[at], 1, CHUNK_WITH_IMAGES), [fixture.wanted[at].clone()], "prompt {at}");
    }
}

/// Half of the tokens of every image: an answer does not depend on what is read at once, and an evaluation with the layout of
/// training finds every token of the answers to be the most likely one.
#[test]
fn generation_and_evaluation_show_the_same_part_of_an_image() {
    let overrides = ["data.task=visual_chat", "data.image_tokens=[4,64]", "visual_tokens=50%"];
    let fixture = PromptFixture::open(&overrides);
    let all: Vec<usize> = (0..fixture.prompts.len()).collect();
    let made = fixture.answers(&all, all.len(), CHUNK_WITH_IMAGES);
    for (sequences, chunk) in [(all.len(), 1), (2, 1), (1, CHUNK_WITH_IMAGES)] {
        assert_eq!(
            fixture.answers(&all, sequences, chunk),
            made,
            "{sequences} at once, {chunk} tokens at a time"
        );
    }
    let mut loaded = loaded(fixture.folder.path(), &overrides);
    let vision = loaded.config.model.as_qwen3_vl().cloned().expect("a tower");
    let mut patching =
        Patching { patch: vision.patch, merge: vision.merge, shown_percent: 50, ..Patching::default() };
    (patching.least_pixels, patching.most_pixels) =
        (4 * patching.token_pixels(), 64 * patching.token_pixels());
    let reader = ImageReader::new(patching, u64::MAX, 1 << 20);
    let mut store = ImageStore::new(patching, u64::MAX);
    for path in expected().iter().flat_map(names) {
        store.number(&reader.read_file(path).expect("an image"));
    }
    let mut table = ExampleTable::default();
    for (prompt, answer) in fixture.prompts.iter().zip(&made) {
        let sighting = |placed: &Placed| {
            let grid = store.get(placed.picture as u32).grid;
            let (merge, tokens) = (vision.merge, patching.tokens(grid));
            assert_eq!(tokens, grid.tokens(merge).div_ceil(2));
            let (start, image) = (placed.at as u32, placed.picture as u32);
            Sighting { start, image, grid, merge, tokens: tokens as u32, hash: 0 }
        };
        let images: Vec<Sighting> = prompt.images.iter().map(sighting).collect();
        let tokens = [&prompt.tokens[..], answer].concat();
        let weights: Vec<f32> =
            (0..tokens.len()).map(|at| f32::from(u8::from(at >= prompt.tokens.len()))).collect();
        table.push(Example { tokens: &tokens, weights: &weights, label: None, images: &images });
    }
    let most = (0..table.count()).map(|at| table.extent_of(at));
    let (tokens, images, patches) =
        most.fold((0, 0, 0), |(t, i, p), one| (t + one.tokens, i + one.images, p + one.patches));
    let room = ImageRoom { patches, images, largest: table.largest_image() };
    let shape = Shape::Packed { tokens, segments: table.count() };
    let layout = Layout::new(vec![shape]).with_images(Some(vec![room]));
    let capacities = Capacities::of_shape(&loaded.config, &layout, 0);
    let graph = capacities::texts(&loaded.config, &capacities, false);
    let images = PatchImages::of(&loaded.config, store).expect("images that fit").map(SeenImages::Patches);
    let set = LaidOut { parts: once(&table, usize::MAX, &layout, &[]), images, compared: None };
    let program = [Program { role: Role::Eval, graph }];
    let mut session = loaded.session(&Device::Cpu { threads: 2 }, &program).expect("a session");
    let mut counted = Counted::new(None, None);
    let see = &mut |_: Batch, results: &EvalResults| counted.see(results);
    evaluate_all(&mut session, &set, 1, see).expect("an evaluation");
    let Some(Metrics::Answers(found)) = counted.metrics() else { panic!("answers are counted") };
    assert_eq!(found.token_accuracy, 1.0, "every token is the likeliest");
}

/// The decode plan has no tower, and a text without images needs none at all.
#[test]
fn a_prompt_of_text_alone_needs_no_tower() {
    let fixture = PromptFixture::open(&[]);
    let at = fixture.prompts.iter().position(|prompt| prompt.images.is_empty()).expect("a text");
    let loaded = Loaded::open(fixture.folder.path(), &[]).expect("a model");
    let prompt = fixture.prompts[at].tokens.clone();
    let room = GeneratorCapacity { sequences: 1, tokens: prompt.len() + LIKELIEST.max_tokens };
    let mut generator = Generator::new(loaded, &Device::Cpu { threads: 2 }, room).expect("a model");
    let made = generator.continue_all(&[prompt], LIKELIEST, &mut |_, _| {}).expect("an answer");
    assert_eq!(made, [fixture.wanted[at].clone()]);
}

/// Text that spells the image token would take a picture from the placeholder it belongs to.
#[test]
fn places_and_pictures_are_counted() {
    let fixture = PromptFixture::open(&[]);
    let written = [88, 90, 3, 90];
    assert_eq!(fixture.pictures.placed(&written, &[0, 1]).expect("places").images.len(), 2);
    let refused = fixture.pictures.placed(&written, &[0]).expect_err("one is missing").to_string();
    assert!(refused.contains("has 2 places for images") && refused.contains("images is 1"), "{refused}");
}
