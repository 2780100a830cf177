//! Compares the foveated decoder with a model written from its equations over `transformers`' DINOv2 and Llama: frame tokens,
//! loss and every gradient of a tiny random model, in f32 on the CPU and with the oracle, and generation with the cache.
//! `make_fovea.py` beside the fixtures made them, in f64.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use flatout_data::vision::{FrameInputs, FrameRoom, LookRead, Video};
use flatout_ir::passes::differentiate::{LOSS_SUM, differentiate, gradient_path};
use flatout_ir::passes::input_path;
use flatout_ir::{Builder, Graph, Op, Options, Program, Recompute, Role, Tensor, compile, oracle};
use flatout_models::config::{DecoderConfig, FoveaConfig, Look, Model, Vision};
use flatout_models::decoder::{self, Pass};
use flatout_models::form::{Documents, Form, ImageExtents, LossForm, SeenFrames};
use flatout_models::layers::Sight;
use flatout_models::library;
use flatout_models::library::stored::Stored;
use flatout_models::vision::{self, TextBody};
use flatout_runtime::{Session, cpu};
use flatout_train::run::checkpoint::TensorFile;
use flatout_train::weights::{initial, pretrained};

use crate::distance::relative;
use crate::fixture::{Fixture, sums};
use crate::unfused;

/// The largest relative L2 distance of any tensor.
const BOUND: f64 = 1e-5;
/// The first samples have frames.
const VIDEOS: usize = 2;
const ALL: [usize; 3] = [0, 1, 2];

#[test]
fn second_looks_equal_the_reference() {
    equals_the_reference(Look::Fine, "");
}

/// The text after first looks: a single pass, in which no query is computed.
#[test]
fn first_looks_equal_the_reference() {
    equals_the_reference(Look::Coarse, "coarse.");
}

fn equals_the_reference(look: Look, kept: &str) {
    let golden = Golden::open(look);
    let layout = golden.layout(&ALL, Repeats::Once);
    let tables = Options { rope_positions: Some(32), ..Options::default() };
    let full = Options { recompute: Recompute::Full, ..Options::default() };
    for (how, options) in [
        ("fused", Options::default()),
        ("rope tables", tables),
        ("recompute", full),
        ("plain", unfused::options()),
    ] {
        golden.check(&format!("{look}, {how}"), kept, &golden.compiled(&layout, &options));
    }
    golden.check(&format!("{look}, oracle"), kept, &golden.by_the_oracle(&layout));
}

/// The loss and the gradients, by our paths, of a pass.
struct Computed {
    loss: f64,
    gradients: BTreeMap<String, Vec<f64>>,
}

impl Computed {
    /// Asserts that every gradient of another pass equals this one's. Gradients of key biases are only rounding.
    fn assert_near(&self, what: &str, other: &Computed) {
        let off = (self.loss - other.loss).abs() / other.loss;
        assert!(off < BOUND, "{what}: the loss is off by {off:.1e}");
        assert_eq!(self.gradients.len(), other.gradients.len());
        for (path, want) in &other.gradients {
            let got = &self.gradients[path];
            let off = match path.ends_with("wk_bias") && path.starts_with("vision.") {
                true => {
                    let queries = length(&other.gradients[&path.replace("wk_bias", "wq_bias")]);
                    if queries == 0.0 { length(got) } else { length(got) / queries }
                }
                false => relative(got, &want.iter().map(|x| *x as f32).collect::<Vec<_>>()),
            };
            assert!(off < BOUND, "{what}: {path} is off by {off:.1e}");
        }
    }
}

fn length(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn wide<T: Copy + Into<f64>>(values: &[T]) -> Vec<f64> {
    values.iter().map(|x| (*x).into()).collect()
}

pub struct Sample {
    /// The image of every frame.
    pub frames: Vec<u32>,
    pub tokens: Vec<i32>,
    learned: Vec<i32>,
}

pub struct Golden {
    pub model: DecoderConfig,
    pub fixture: Fixture,
    /// Shapes and values by the authors' names.
    pub weights: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    pub images: Vec<Vec<u8>>,
    pub samples: Vec<Sample>,
}

/// Whether an image that occurs as several frames is encoded once or for every frame.
#[derive(Clone, Copy, PartialEq)]
enum Repeats {
    Once,
    EveryTime,
}

/// Samples packed into one row, in the form that a plan takes.
struct Layout {
    form: LossForm,
    i32s: BTreeMap<&'static str, Vec<i32>>,
    weights: Vec<f32>,
    pixels: Vec<u8>,
}

impl Golden {
    pub fn open(look: Look) -> Golden {
        let mut fixture = Fixture::open("fovea");
        let Model::Decoder(mut model) = library::read(&fixture.json).expect("a foveated model").model else {
            panic!("it reads text")
        };
        let Some(Vision::Fovea(tower)) = &mut model.vision else { panic!("it looks at frames") };
        tower.mode = look;
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden");
        let file = TensorFile::open(&folder.join("fovea-weights.safetensors")).expect("weights");
        let mut weights = BTreeMap::new();
        for (name, entry) in file.entries() {
            let mut bytes = vec![0; entry.shape.iter().product()];
            file.read_into(name, &mut bytes).expect("a tensor");
            let is_factor = name.ends_with("lambda1") || name.contains("norm") && name.ends_with("weight");
            let offset = if is_factor { 1.0 } else { 0.0 };
            let values = bytes.iter().map(|byte| (*byte as f32 - 128.0) / 128.0 + offset).collect();
            weights.insert(name.clone(), (entry.shape.clone(), values));
        }
        let size = tower.frame_bytes();
        let images = fixture.bytes("images").chunks_exact(size).map(<[u8]>::to_vec).collect();
        let mut frames = fixture.i32s("frames").into_iter().map(|image| image as u32);
        let mut tokens = fixture.i32s("tokens").into_iter();
        let mut learned = fixture.i32s("learned").into_iter();
        let counts = fixture.i32s("frame_counts").into_iter().zip(fixture.i32s("token_counts"));
        let sample = |(frame_count, token_count): (i32, i32)| Sample {
            frames: frames.by_ref().take(frame_count as usize).collect(),
            tokens: tokens.by_ref().take(token_count as usize).collect(),
            learned: learned.by_ref().take(token_count as usize).collect(),
        };
        let samples = counts.map(sample).collect();
        Golden { model, fixture, weights, images, samples }
    }

    fn tower(&self) -> &FoveaConfig {
        self.model.vision.as_ref().and_then(Vision::as_fovea).expect("a tower")
    }

    fn read(&self) -> LookRead {
        match self.tower().mode {
            Look::Fine => LookRead::Fine,
            Look::Coarse => LookRead::Coarse,
        }
    }

    /// The location of each of our weights among the authors'.
    fn places(&self) -> Vec<Stored> {
        let model = Model::from(self.model.clone());
        let shapes = pretrained::parameters(&model);
        model.published().unwrap().stored(&|path| shapes[path].0.dims.clone()).expect("names")
    }

    fn ours(&self) -> Vec<(String, Vec<f32>)> {
        self.places().into_iter().map(|at| (at.ours.clone(), at.take(&self.weights[&at.theirs].1))).collect()
    }

    /// A layout of some samples, with spare capacity in every dimension.
    fn layout(&self, which: &[usize], repeats: Repeats) -> Layout {
        let samples: Vec<&Sample> = which.iter().map(|number| &self.samples[*number]).collect();
        let mut tokens: Vec<i32> = vec![3];
        let (mut positions, mut targets, mut weights) = (vec![0], vec![-1], vec![0.0]);
        let (mut starts, mut lens) = (vec![], vec![]);
        let mut videos: Vec<(usize, Vec<u32>)> = vec![];
        let mut used = 0;
        for sample in &samples {
            let (row, frames) = (tokens.len(), sample.frames.len());
            starts.push(row as i32);
            lens.push((frames + sample.tokens.len()) as i32);
            tokens.extend(vec![-1; frames]);
            tokens.extend(&sample.tokens);
            positions.extend(0..lens[lens.len() - 1]);
            // The target after the last frame, or padding.
            targets.extend(vec![-1; frames]);
            weights.extend(vec![0.0; frames]);
            targets.extend(sample.tokens[1..].iter().chain([&-1]));
            weights.extend(sample.learned[1..].iter().chain([&0]).map(|learned| *learned as f32));
            let own = sample.frames.iter().map(|image| match repeats {
                Repeats::Once => *image,
                Repeats::EveryTime => {
                    used += 1;
                    100 * used + *image
                }
            });
            videos.push((row, own.collect()));
        }
        for (values, none) in [(&mut tokens, 2), (&mut positions, 0), (&mut targets, -1)] {
            values.extend([none; 2]);
        }
        weights.extend([0.0; 2]);
        let len = tokens.len();
        starts.push(0);
        lens.push(0);
        let frames: usize = samples.iter().map(|sample| sample.frames.len()).sum();
        let room = FrameRoom { images: 6, frames: frames + 2, videos: VIDEOS + 1 };
        let room = if repeats == Repeats::Once { room } else { FrameRoom { images: frames + 1, ..room } };
        let of: Vec<Video<'_>> = videos.iter().map(|(row, images)| Video { row: *row, images }).collect();
        let made = FrameInputs::new(&of, room, len, self.read());
        let mut pixels: Vec<u8> =
            made.images.iter().flat_map(|image| self.images[(*image % 100) as usize].clone()).collect();
        pixels.resize(room.images * self.tower().frame_bytes(), 77);
        let FrameRoom { images, frames, videos } = room;
        let seen = ImageExtents::Frames(SeenFrames { images, frames, videos, longest: 4, repeats: 4 });
        let form = LossForm {
            documents: Documents::Apart { most: starts.len() },
            seen: Some(seen),
            ..LossForm::rows(1, len)
        };
        let i32s = BTreeMap::from([
            ("tokens", tokens),
            ("positions", positions),
            ("targets", targets),
            ("segment_start", starts),
            ("segment_len", lens),
            ("seen", made.seen),
            ("frame_images", made.frame_images),
            ("frame_positions", made.frame_positions),
            ("video_start", made.video_start),
            ("video_len", made.video_len),
            ("look_start", made.look_start),
            ("look_len", made.look_len),
            ("previous", made.previous),
        ]);
        Layout { form, i32s, weights, pixels }
    }

    fn graph(&self, layout: &Layout) -> Graph {
        Model::from(self.model.clone()).build(Form::Loss(layout.form))
    }

    /// A session of one graph with its weights and inputs written.
    fn session(&self, role: Role, graph: Graph, layout: &Layout, options: &Options) -> Session {
        let plans = compile(&[Program { role, graph }], &cpu::target(2), options).expect("plans");
        let mut session = Session::new(plans, 2).expect("a session");
        let has = |session: &Session, path: &str| session.plans().slot(path).is_some();
        for (path, values) in self.ours() {
            if has(&session, &path) {
                session.write_f32(&path, &values).expect("a weight");
            }
        }
        initial::write_tables(&mut session).expect("tables");
        for (name, values) in &layout.i32s {
            let path = input_path(role, name);
            if has(&session, &path) {
                session.write_i32(&path, values).expect("an input");
            }
        }
        if has(&session, &input_path(role, "pixels")) {
            session.write_u8(&input_path(role, "pixels"), &layout.pixels).expect("pixels");
        }
        if has(&session, &input_path(role, "weights")) {
            session.write_f32(&input_path(role, "weights"), &layout.weights).expect("weights");
        }
        session
    }

    /// Computes a pass by a session that is compiled with these options.
    fn compiled(&self, layout: &Layout, options: &Options) -> Computed {
        let mut session = self.session(Role::GRAD, self.graph(layout), layout, options);
        session.run(Role::GRAD).expect("gradients");
        let gradient = |(path, values): (String, Vec<f32>)| {
            let gradient = match session.plans().slot(&gradient_path(&path)) {
                Some(_) => wide(&session.read_f32(&gradient_path(&path)).expect("a gradient")),
                None => vec![0.0; values.len()],
            };
            (path, gradient)
        };
        let gradients = self.ours().into_iter().map(gradient).collect();
        Computed { loss: session.read_f32(LOSS_SUM).expect("a sum")[0] as f64, gradients }
    }

    /// Computes a pass by evaluating the graph as it is before all passes of the compiler.
    fn by_the_oracle(&self, layout: &Layout) -> Computed {
        let trained = differentiate(&self.graph(layout)).graph;
        let mut values: HashMap<String, Vec<f64>> =
            self.ours().into_iter().map(|(path, x)| (path, wide(&x))).collect();
        values.extend(layout.i32s.iter().map(|(name, x)| (name.to_string(), wide(x))));
        values.insert("weights".into(), wide(&layout.weights));
        values.insert("pixels".into(), wide(&layout.pixels));
        for slot in &trained.slots {
            values.entry(slot.path.clone()).or_insert_with(|| match slot.class {
                flatout_ir::Class::Const => wide(&initial::values(&slot.path, &slot.ty, &slot.init, 0)),
                _ => vec![0.0; slot.ty.elements()],
            });
        }
        let mut written = oracle::run(&trained, &values).writes;
        let gradient = |(path, values): (String, Vec<f32>)| {
            let gradient = written.remove(&gradient_path(&path));
            (path, gradient.unwrap_or_else(|| vec![0.0; values.len()]))
        };
        let gradients = self.ours().into_iter().map(gradient).collect();
        Computed { loss: written.remove(LOSS_SUM).expect("a sum")[0], gradients }
    }

    fn check(&self, what: &str, kept: &str, computed: &Computed) {
        let mut fixture = Fixture::open("fovea");
        let loss = fixture.f32s(&format!("{kept}loss_sum"))[0] as f64;
        assert!((computed.loss / loss - 1.0).abs() < BOUND, "{what}: {} and not {loss}", computed.loss);
        let mut theirs: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for at in self.places() {
            let own = theirs.entry(at.theirs.clone()).or_insert_with(|| vec![0.0; at.dims.iter().product()]);
            at.put(&computed.gradients[&at.ours], own);
        }
        let kept = format!("{kept}grad.");
        let in_file = fixture.file.entries().keys().filter(|name| name.starts_with(&kept)).count();
        assert_eq!(theirs.len(), in_file, "every gradient of the file is compared");
        let mut worst = (0.0, String::new());
        for (name, gradient) in &theirs {
            let want = fixture.f32s(&format!("{kept}{name}"));
            let off = if name.ends_with("attention.key.bias") {
                // A common shift of all keys changes no probability: its gradient is rounding, measured relative to that of the
                // queries.
                let queries = fixture.f32s(&format!("{kept}{}", name.replace("key", "query")));
                length(gradient) / length(&wide(&queries))
            } else if want.iter().all(|x| *x == 0.0) {
                length(gradient)
            } else {
                relative(&sums(gradient), &want)
            };
            assert!(off < BOUND, "{what}: {name} is off by {off:.1e}");
            if off > worst.0 {
                worst = (off, name.clone());
            }
        }
        println!("{what}: {} gradients, {} is off most, by {:.1e}", theirs.len(), worst.1, worst.0);
    }

    /// The graph of the frame tokens alone.
    fn tokens_graph(&self, layout: &Layout) -> Graph {
        let (b, c) = (Builder::new(), &self.model);
        let w = decoder::weights(&b, c);
        fn body<'g>(
            b: &'g Builder,
            c: &DecoderConfig,
            w: &decoder::Weights,
            x: [Tensor<'g>; 2],
            sight: Sight<'g>,
        ) -> Tensor<'g> {
            decoder::apply(
                b,
                c,
                w,
                x[0],
                &Pass {
                    positions: x[1],
                    tokens: None,
                    types: None,
                    sight,
                    draw: None,
                    images: None,
                    window: None,
                    read: None,
                },
            )
        }
        let over = |x, positions, sight| body(&b, c, &w, [x, positions], sight);
        let beside = TextBody {
            width: c.width,
            init_std: c.init_std,
            body: &over,
            cached: None,
            features_given: false,
        };
        let vision = c.vision.as_ref().expect("a tower");
        let (features, seen) =
            vision::features(&b, vision, &beside, layout.form.seen.expect("frames"), layout.form.len);
        b.result("tokens", features.main.gather(seen));
        b.finish()
    }
}

/// The frame tokens, for both kinds of looks.
#[test]
fn tokens_of_frames_equal_the_reference() {
    for (look, kept) in [(Look::Coarse, "coarse_tokens"), (Look::Fine, "fine_tokens")] {
        let mut golden = Golden::open(look);
        let layout = golden.layout(&ALL, Repeats::Once);
        let graph = golden.tokens_graph(&layout);
        let mut session = golden.session(Role::Logits, graph, &layout, &Options::default());
        session.run(Role::Logits).expect("tokens");
        let rows = session.result(Role::Logits, "tokens").expect("tokens");
        let seen = layout.i32s["seen"].iter().zip(rows.chunks_exact(golden.model.width));
        let got: Vec<f32> = seen.filter(|(row, _)| **row >= 0).flat_map(|(_, row)| row.to_vec()).collect();
        let off = relative(&got, &golden.fixture.f32s(kept));
        assert!(off < BOUND, "{kept} are off by {off:.1e}");
    }
}

/// No sample attends to another, and an image that occurs as several frames may be encoded once or for each of them.
#[test]
fn samples_packed_and_alone_and_repeats_once_and_every_time() {
    for look in [Look::Fine, Look::Coarse] {
        let golden = Golden::open(look);
        let together = golden.compiled(&golden.layout(&ALL, Repeats::Once), &Options::default());
        let apart = golden.compiled(&golden.layout(&ALL, Repeats::EveryTime), &Options::default());
        apart.assert_near(&format!("{look}, every repeat encoded"), &together);
        let turned = golden.compiled(&golden.layout(&[2, 1, 0], Repeats::Once), &Options::default());
        turned.assert_near(&format!("{look}, in another order"), &together);
        let mut sum: Option<Computed> = None;
        for number in ALL {
            let alone = golden.compiled(&golden.layout(&[number], Repeats::Once), &Options::default());
            match &mut sum {
                None => sum = Some(alone),
                Some(sum) => {
                    sum.loss += alone.loss;
                    for (path, gradient) in alone.gradients {
                        let all = sum.gradients.get_mut(&path).expect("the same weights");
                        all.iter_mut().zip(gradient).for_each(|(sum, x)| *sum += x);
                    }
                }
            }
        }
        sum.expect("samples").assert_near(&format!("{look}, alone"), &together);
    }
}

/// A sample without frames gives the same result in a plan without the tower as beside others.
#[test]
fn text_alone_needs_no_tower() {
    let golden = Golden::open(Look::Fine);
    let mut layout = golden.layout(&[2], Repeats::Once);
    let beside = golden.compiled(&layout, &Options::default());
    layout.form.seen = None;
    let graph = golden.graph(&layout);
    assert!(graph.slots.iter().all(|slot| !slot.path.starts_with("vision.")), "no tower");
    let alone = golden.compiled(&layout, &Options::default());
    alone.assert_near("text alone", &beside);
}

/// In the last layer only the inputs of queries are computed for the patches, and weights are read once for each use.
#[test]
fn patches_stop_before_the_last_layer() {
    let golden = Golden::open(Look::Fine);
    let graph = golden.graph(&golden.layout(&ALL, Repeats::Once));
    let reads = |path: &str| {
        let slot = graph.find_slot(path).expect("declared");
        graph.nodes.iter().filter(|node| node.op == Op::Read { slot }).count()
    };
    for (path, first, last) in [("attn.wq", 3, 2), ("attn.wk", 1, 1), ("attn.wo", 3, 2), ("ffn.up", 3, 2)] {
        assert_eq!(reads(&format!("vision.layers.0.{path}")), first, "{path}");
        assert_eq!(reads(&format!("vision.layers.2.{path}")), last, "{path}");
        assert_eq!(reads(&format!("layers.0.{path}")), 2, "{path} of the text: coarse and fine");
    }
}

/// Queries read only wq, so keys and values are one product and queries another; in the text all three are one.
#[test]
fn keys_and_values_are_one_product_where_queries_are_read_alone() {
    let golden = Golden::open(Look::Fine);
    let layout = golden.layout(&ALL, Repeats::Once);
    let session = golden.session(Role::GRAD, golden.graph(&layout), &layout, &Options::default());
    let has = |path: &str| session.plans().slots.iter().any(|slot| slot.path == path);
    assert!(has("vision.layers.0.attn.wk+wv") && has("vision.layers.2.attn.wk+wv"));
    assert!(has("layers.0.attn.wq+wk+wv") && has("layers.0.ffn.gate+up"));
}

/// Frame by frame with the cache, where each query comes from the state after the previous frame; then text, greedily. Both
/// samples at once, one after another, and in separate lanes.
#[test]
fn text_over_the_cache_equals_the_plain_loop() {
    const PROMPT: usize = 4;
    let mut golden = Golden::open(Look::Fine);
    let wanted = golden.fixture.i32s("generated");
    let count = wanted.len() / VIDEOS;
    let (lanes, room, capacity) = (VIDEOS, 6, 24);
    let seen = SeenFrames::next_of(lanes);
    let form = |tokens: usize, seen: Option<ImageExtents>| Form::Cached {
        sequences: lanes,
        tokens,
        capacity,
        read: lanes,
        seen,
    };
    let model = Model::from(golden.model.clone());
    let programs = [
        Program { role: Role::Prefill, graph: model.build(form(room, Some(ImageExtents::Frames(seen)))) },
        Program { role: Role::Decode, graph: model.build(form(lanes, None)) },
    ];
    let plans = compile(&programs, &cpu::target(2), &Options::default()).expect("plans");
    let mut session = Session::new(plans, 2).expect("a session");
    for (path, values) in golden.ours() {
        session.write_f32(&path, &values).expect("a weight");
    }
    initial::write_tables(&mut session).expect("tables");
    let mut read = [0; VIDEOS];
    let mut made: Vec<Vec<i32>> = vec![vec![]; VIDEOS];
    // The second sample begins one run later, so that lanes without new tokens keep their states.
    for run in 0.. {
        let mut rows: Vec<(usize, Option<u32>, Vec<i32>)> = vec![];
        for lane in 0..lanes {
            let sample = &golden.samples[lane];
            let (frames, at) = (sample.frames.len(), read[lane]);
            if lane == 1 && run == 0 || made[lane].len() == count {
                continue;
            }
            rows.push(match at {
                at if at < frames => (lane, Some(sample.frames[at]), vec![-1]),
                at if at == frames => (lane, None, sample.tokens[..PROMPT].to_vec()),
                _ => (lane, None, vec![*made[lane].last().expect("a token")]),
            });
        }
        if rows.is_empty() {
            break;
        }
        let is_decode = rows.iter().all(|(_, frame, tokens)| frame.is_none() && tokens.len() == 1);
        let (role, room) = if is_decode { (Role::Decode, lanes) } else { (Role::Prefill, room) };
        let mut inputs: BTreeMap<&str, Vec<i32>> = BTreeMap::new();
        for (name, count, fill) in [
            ("tokens", room, 0),
            ("positions", room, 0),
            ("cache_rows", room, -1),
            ("new_start", lanes, 0),
            ("new_len", lanes, 0),
            ("seen_start", lanes, 0),
            ("seen_len", lanes, 0),
            ("last", lanes, -1),
        ] {
            inputs.insert(name, vec![fill; count]);
        }
        if role == Role::Prefill {
            for (name, count) in [("seen", room), ("previous", lanes)] {
                inputs.insert(name, vec![-1; count]);
            }
            for name in ["look_start", "look_len"] {
                inputs.insert(name, vec![0; lanes]);
            }
        }
        let mut pixels = vec![];
        let mut at = 0;
        for (lane, frame, tokens) in &rows {
            let lane = *lane;
            let mut set = |name: &str, at: usize, value: usize| {
                inputs.get_mut(name).expect("an input")[at] = value as i32;
            };
            if let Some(image) = frame {
                let look = pixels.len() / golden.tower().frame_bytes();
                pixels.extend(&golden.images[*image as usize]);
                set("seen", at, look);
                set("look_start", look, look);
                set("look_len", look, 1);
                set("previous", look, if read[lane] == 0 { lanes } else { lane });
            }
            for i in 0..tokens.len() {
                set("positions", at + i, read[lane] + i);
                set("cache_rows", at + i, lane * capacity + read[lane] + i);
            }
            set("new_start", lane, at);
            set("new_len", lane, tokens.len());
            set("seen_start", lane, lane * capacity);
            set("seen_len", lane, read[lane] + tokens.len());
            set("last", lane, at + tokens.len() - 1);
            inputs.get_mut("tokens").expect("tokens")[at..at + tokens.len()].copy_from_slice(tokens);
            at += tokens.len();
            read[lane] += tokens.len();
        }
        for (name, values) in &inputs {
            session.write_i32(&input_path(role, name), values).expect("an input");
        }
        if role == Role::Prefill {
            pixels.resize(lanes * golden.tower().frame_bytes(), 0);
            session.write_u8(&input_path(role, "pixels"), &pixels).expect("pixels");
        }
        session.run(role).expect("logits");
        let logits = session.result(role, "logits").expect("logits");
        for (lane, frame, _) in rows.iter().filter(|(_, frame, _)| frame.is_none()) {
            assert!(frame.is_none());
            let row = &logits[lane * golden.model.vocab..][..golden.model.vocab];
            let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("a vocabulary");
            made[*lane].push(best as i32);
        }
    }
    assert_eq!(made.concat(), wanted);
}
