//! Image features that are computed once, before the first step, and stored in a folder: `data.vision_cache`.
//!
//! The tower runs in its own session, which is dropped before the training session is opened. It computes the features that a
//! training plan with a tower would compute.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use flatout_data::DataError;
use flatout_data::vision::{CacheWriter, CachedImage, FeatureCache, FeatureFormat, PartSize};
use flatout_ir::types::bf16_from_f32;
use flatout_ir::{DType, Role};
use flatout_models::vision::qwen3_vl::features::{FEATURES, ROWS};
use flatout_models::vision::{Qwen3VlConfig, SCOPE};
use flatout_runtime::Session;
use flatout_waits::{self as waits, Unit};
use rayon::prelude::*;
use ring::digest::{SHA256, digest};

use crate::Failure;
use crate::config::{Config, IMAGE_TOKENS};
use crate::device::Device;
use crate::resolve::tower::{self, Economy, Tower};
use crate::switches::memory::Base;
use crate::tasks::batch::{HostTensor, Inputs, write_tensors};
use crate::tasks::dataset::Dataset;
use crate::tasks::seen::PatchImages;
use crate::weights::initial;
use crate::weights::pretrained::{self, Weights};

/// The tower that computed the features of a run.
pub struct FrozenTower {
    /// Hashes of its tensors by path, in the form in which a run records frozen weights.
    pub hashes: BTreeMap<String, String>,
}

/// Computes the missing features, and makes the data read them from then on. Returns `None` where no cache is configured or the
/// data has no images. `say` receives the cost and the savings in words.
pub fn prepare(
    config: &Config,
    data: &mut dyn Dataset,
    run: Option<&Path>,
    device: &Device,
    say: &mut dyn FnMut(String),
) -> Result<Option<FrozenTower>, Failure> {
    let Some(folder) = config.data.vision_cache.as_deref().map(Path::new) else { return Ok(None) };
    let epochs = epochs(config, data)?;
    let Some(images) = data.images() else { return Ok(None) };
    let weights = pretrained::beginning(config, run)?;
    let slots = tower::parameters_apart(config);
    let parameters: Vec<_> = slots.iter().map(|slot| (slot.path.as_str(), &slot.ty, &slot.init)).collect();
    let (tower_hash, hashes) = weights.digest(parameters)?;
    let patches = (0..images.store.count() as u32).map(|number| images.store.get(number).grid.patches());
    let room = tower::room(patches, images.block());
    let tower = Tower::compile(config, &device.target(&config.switches), room)?;
    let wanted = identified(images)?;
    let format = format(config, &tower, tower_hash);
    let mut cache = FeatureCache::open(folder, &format)?;
    let missing = cache.missing(&wanted)?;
    let economy = economy(config, images, &tower, epochs, missing.len());
    if missing.is_empty() {
        say(format!("features of all {} images are in {}", wanted.len(), folder.display()));
    } else {
        say(format!("features of {} images go to {}: {}", missing.len(), folder.display(), economy.words()));
        say(economy.decision());
        let mut writer = CacheWriter::enter(folder, &format, PartSize::default(), &mut || {
            say(format!("another process writes features to {}; waiting for it", folder.display()))
        })?;
        // The process that held the folder may have computed them.
        let missing = writer.cache().missing(&wanted)?;
        if !missing.is_empty() {
            let sizes = missing.iter().filter_map(|number| format.bytes(wanted[*number].tokens));
            writer.check_room(sizes.sum())?;
            let session = session(&tower, &weights, device)?;
            let mut filling =
                CacheFill { images, wanted: &wanted, tower: &tower, session, spent: FillTimes::default() };
            filling.fill(&missing, &mut writer)?;
            say(filling.spent.words(missing.len(), &economy));
        }
        cache = writer.finish()?;
    }
    images.give_features(cache.features(&wanted)?);
    Ok(Some(FrozenTower { hashes }))
}

/// The cost of computing the features of the missing images, and the time that this saves.
fn economy(config: &Config, images: &PatchImages, tower: &Tower, epochs: f64, missing: usize) -> Economy {
    let count = images.store.count();
    let patches: usize = (0..count as u32).map(|number| images.store.get(number).grid.patches()).sum();
    let tokens = patches / images.block();
    Economy {
        images: missing as f64,
        sightings: (epochs * images.sightings as f64).round(),
        epochs,
        shares_prefixes: tower::shares_prefixes(config),
        bytes_per_image: tower::feature_bytes(config, tokens, tower.dtype()) as f64 / count as f64,
        seconds_per_image: tower.seconds(patches) / count as f64,
        is_at_best: !tower.target.timings.knows_kernels(),
    }
}

/// Number of times that training reads its data.
fn epochs(config: &Config, data: &dyn Dataset) -> Result<f64, Failure> {
    let samples = data.total_steps(config)? * config.train.batch as u64;
    let of_steps = samples as f64 / data.describe().documents.unwrap_or(0).max(1) as f64;
    Ok(config.train.epochs.map_or(of_steps, |epochs| epochs as f64))
}

/// The format of this run's features: everything that decides their values.
fn format(config: &Config, tower: &Tower, tower_hash: String) -> FeatureFormat {
    let decoder = config.model.decoder();
    let of_tower = format!("model.{SCOPE}.");
    // Features do not depend on which tokens stand for images.
    let is_built_by = |key: &str| key.starts_with(&of_tower) && !key.ends_with("_token");
    let mut made_with = config.values();
    made_with.retain(|key, _| is_built_by(key));
    let [least, most] = config.data.image_tokens.unwrap_or(IMAGE_TOKENS);
    for (name, value) in [
        ("version", env!("CARGO_PKG_VERSION").to_string()),
        ("type", tower.dtype().name().to_string()),
        ("precision", tower.settled.options.precision.name().to_string()),
        ("tower", tower_hash),
        ("data.image_tokens", format!("[{least}, {most}]")),
        ("filter", "bicubic".to_string()),
        ("model.width", decoder.width.to_string()),
    ] {
        made_with.insert(name.to_string(), value);
    }
    // Features of earlier versions do not record this key.
    if let Some(codes) = config.switches.memory.codes() {
        made_with.insert("base".into(), Base::of(codes).name().into());
    }
    let levels = config.model.as_qwen3_vl().map_or(0, Qwen3VlConfig::feature_levels);
    FeatureFormat { made_with, levels, row_bytes: decoder.width * tower.dtype().bytes() }
}

/// Every image with the hash of its bytes, by number.
fn identified(images: &PatchImages) -> Result<Vec<CachedImage>, DataError> {
    let of = |number: u32| {
        let image = images.store.get(number);
        let bytes = images.store.bytes(number)?;
        let sha256 = digest(&SHA256, &bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        let name = image.path().map(|path| path.canonicalize().unwrap_or_else(|_| path.into()));
        let (grid, tokens) = (image.grid, image.grid.patches() / images.block());
        Ok(CachedImage { sha256, name: name.map(|path| path.display().to_string()), grid, tokens })
    };
    (0..images.store.count() as u32).into_par_iter().map(of).collect()
}

/// A session with the tower's weights.
fn session(tower: &Tower, weights: &Weights, device: &Device) -> Result<Session, Failure> {
    let mut session = device.session(tower.plans.clone(), &tower.settled)?;
    weights.load(&mut session, |_| true)?;
    initial::write_tables(&mut session)?;
    if session.plans().plan(Role::Derive).is_some() {
        session.run(Role::Derive)?;
    }
    Ok(session)
}

/// Time spent on each part of filling the cache.
#[derive(Clone, Copy, Debug, Default)]
struct FillTimes {
    tower: Duration,
    writing: Duration,
    bytes: u64,
}

impl FillTimes {
    fn words(&self, images: usize, economy: &Economy) -> String {
        let seconds_per_image = self.tower.as_secs_f64() / images as f64;
        let measured = Economy { seconds_per_image, is_at_best: false, ..economy.clone() };
        let saved = match measured.saved_seconds() {
            saved if saved > 0.0 => format!("; the training saves {saved:.1} s of it"),
            _ => String::new(),
        };
        format!(
            "features of {images} images made: the tower took {:.2} ms an image, and the disk {:.0} MB a second{saved}",
            1e3 * seconds_per_image,
            self.bytes as f64 / 1e6 / self.writing.as_secs_f64().max(1e-9)
        )
    }
}

/// State while the cache is being filled.
struct CacheFill<'a> {
    images: &'a PatchImages,
    /// All images of the set.
    wanted: &'a [CachedImage],
    tower: &'a Tower,
    session: Session,
    spent: FillTimes,
}

/// Image numbers with their patches, as the bytes that the plan takes.
type Decoded = (Vec<usize>, Vec<u8>);

impl CacheFill<'_> {
    /// Computes the features of images given by number, in groups. The next group is decoded meanwhile.
    fn fill(&mut self, missing: &[usize], writer: &mut CacheWriter) -> Result<(), Failure> {
        let (images, room) = (self.images, self.tower.room);
        let groups = self.groups(missing);
        std::thread::scope(|scope| {
            let (sender, decoded) = sync_channel(1);
            let decode = move || decode(images, &groups, room.patches, &sender);
            let spawned = std::thread::Builder::new().name("patches".into()).spawn_scoped(scope, decode);
            spawned.map_err(Failure::io("a thread that decodes images cannot be started"))?;
            let wait = waits::begin("making features", Unit::Things("images"), Some(missing.len() as u64));
            for made in decoded {
                let (numbers, patches) = made?;
                let since = Instant::now();
                let features = self.compute(&numbers, patches)?;
                self.spent.tower += since.elapsed();
                let since = Instant::now();
                for (number, bytes) in numbers.iter().zip(&features) {
                    writer.append(&self.wanted[*number], bytes)?;
                    self.spent.bytes += bytes.len() as u64;
                }
                self.spent.writing += since.elapsed();
                wait.add(numbers.len() as u64);
            }
            Ok(())
        })
    }

    /// Images in order, grouped by what the plan has room for.
    fn groups(&self, missing: &[usize]) -> Vec<Vec<usize>> {
        let room = self.tower.room;
        let mut groups: Vec<Vec<usize>> = vec![];
        let mut left = 0;
        for number in missing {
            let own = self.wanted[*number].grid.patches();
            match groups.last_mut().filter(|group| own <= left && group.len() < room.images) {
                Some(group) => group.push(*number),
                None => {
                    groups.push(vec![*number]);
                    left = room.patches;
                }
            }
            left -= own;
        }
        groups
    }

    /// The features of some images, each with its levels concatenated.
    fn compute(&mut self, numbers: &[usize], patches: Vec<u8>) -> Result<Vec<Vec<u8>>, Failure> {
        let room = self.tower.room;
        let inputs = Inputs::of(self.session.plans(), Role::Eval);
        let grids = numbers.iter().map(|number| self.wanted[*number].grid);
        let mut tensors = self.images.tower_tensors(grids, room, patches, &inputs);
        let rows = room.patches / self.images.block();
        let used: usize = numbers.iter().map(|number| self.wanted[*number].tokens).sum();
        let wanted = (0..rows as i32).map(|row| if row < used as i32 { row } else { -1 });
        tensors.push((ROWS, HostTensor::I32(wanted.collect())));
        write_tensors(&mut self.session, Role::Eval, &tensors)?;
        self.session.run(Role::Eval)?;
        let features = self.session.result(Role::Eval, FEATURES)?;
        let width = features.len() / rows / self.levels();
        let mut first = 0;
        let own = |number: &usize| {
            let begin = first;
            first += self.wanted[*number].tokens;
            begin..first
        };
        let own: Vec<_> = numbers.iter().map(own).collect();
        let dtype = self.tower.dtype();
        let of_image = |own: std::ops::Range<usize>| {
            let level = |level: &[f32]| stored(&level[own.start * width..own.end * width], dtype);
            features.chunks_exact(rows * width).flat_map(level).collect()
        };
        Ok(own.into_par_iter().map(of_image).collect())
    }

    fn levels(&self) -> usize {
        let plan = self.tower.plans.plan(Role::Eval).expect("the plan of the tower");
        plan.result(FEATURES).expect("its result").dims[0]
    }
}

/// Decodes groups of images until the receiver is dropped or one fails.
fn decode(
    images: &PatchImages,
    groups: &[Vec<usize>],
    room: usize,
    sender: &SyncSender<Result<Decoded, DataError>>,
) {
    let bytes = images.store.patch_bytes();
    for group in groups {
        let mut patches = vec![0; room * bytes];
        let (mut rest, mut parts) = (&mut patches[..], vec![]);
        for number in group {
            let count = images.store.get(*number as u32).grid.patches();
            let (own, behind) = rest.split_at_mut(count * bytes);
            parts.push((*number as u32, own));
            rest = behind;
        }
        let made = parts.into_par_iter().try_for_each(|(number, out)| images.store.patches(number, out));
        if sender.send(made.map(|()| (group.clone(), patches))).is_err() {
            return;
        }
    }
}

/// Values in the stored element type. Those of bf16 leave the plan as f32, which holds them exactly.
fn stored(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::BF16 => values.iter().flat_map(|x| bf16_from_f32(*x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}
