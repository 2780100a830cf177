//! The locations of all parameters, and loading them into a session: values are read by position, in parallel, and converted
//! where the session needs another type.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use flatout_ir::passes::adapter::{EMBED, HEAD, SCOPE};
use flatout_ir::passes::average::averaged_weight;
use flatout_ir::passes::fp8_base;
use flatout_ir::types::{bf16_from_f32, bf16_to_f32};
use flatout_ir::{Adapter, Class, Codes, DType, Init, TensorRange, TensorType};
use flatout_models::config::Model;
use flatout_models::library::stored::{Stored, Within};
use flatout_models::vision;
use flatout_runtime::Session;
use flatout_waits::{self as waits, Unit};
use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::bitsandbytes::{self, Packed, Parts};
use crate::Failure;
use crate::UserError;
use crate::refuse;
use crate::run::checkpoint::{Dtype, TensorFile};
use crate::run::state::held;
use crate::weights::adapters::merge;
use crate::weights::grown::grow;
use crate::weights::initial::{drawn, values};
use crate::weights::quantized::{self, StoredBase};

/// Every parameter of a model, by path: its type and its initial values.
pub fn parameters(model: &Model) -> BTreeMap<String, (TensorType, Init)> {
    let parameters = model.build(model.least()).slots.into_iter().filter(|slot| slot.class.is_parameter());
    parameters.map(|slot| (slot.path, (slot.ty, slot.init))).collect()
}

/// One parameter's tensor in one of the files.
#[derive(Clone, Debug)]
pub struct TensorLocation {
    pub file: usize,
    pub name: String,
    /// The location of its elements in the tensor, unless they are the whole tensor unchanged.
    pub within: Option<Stored>,
    /// The hash that its bytes must have, if it is known.
    pub expect: Option<String>,
    /// The parts that accompany the tensor, if it holds NF4 codes.
    pub nf4: Option<Parts>,
}

/// The values of a model's parameters, by path: tensors in files, and random values from a seed for the rest.
#[derive(Debug)]
pub struct Weights {
    files: Vec<(PathBuf, TensorFile)>,
    places: BTreeMap<String, TensorLocation>,
    /// Running averages that a run stored of its parameters, by path.
    averages: BTreeMap<String, TensorLocation>,
    /// Whether the averages are read.
    averaged: bool,
    seed: Option<u64>,
    /// Number of tensors of the vision part, which is not read.
    pub of_images: usize,
    /// Adapters, whose tensors are among the files.
    adapters: Vec<Adapter>,
    /// Whether weights are read without merging their adapters.
    apart: bool,
    /// Tables with more rows than in their files, by path, with the number of rows there and the seed for the others.
    grown: BTreeMap<String, (usize, u64)>,
    /// Weights that a run stored as codes, which are read dequantised.
    codes: Option<StoredBase>,
    /// Another run's weights with adapters of their own, which are merged wherever no file of this run has a parameter.
    base: Option<Box<Weights>>,
    /// The expected hashes of parameters made of several tensors, if they are known.
    expected: BTreeMap<String, String>,
}

/// Bytes per read, which are hashed while they are in the cache.
const CHUNK_BYTES: usize = 1 << 20;
/// Bytes of parameters that are read in parallel, as f32.
const PORTION_BYTES: usize = 1 << 30;

impl Weights {
    pub fn of_files(files: Vec<(PathBuf, TensorFile)>) -> Weights {
        Weights { files, seed: None, ..Weights::drawn(0) }
    }

    /// Random initial weights from a seed.
    pub fn drawn(seed: u64) -> Weights {
        Weights {
            files: vec![],
            places: BTreeMap::new(),
            averages: BTreeMap::new(),
            averaged: true,
            seed: Some(seed),
            of_images: 0,
            adapters: vec![],
            apart: false,
            grown: BTreeMap::new(),
            codes: None,
            base: None,
            expected: BTreeMap::new(),
        }
    }

    /// These weights as the base of another run: its adapters do not replace those of these weights.
    pub fn into_base(self) -> Weights {
        if self.adapters.is_empty() {
            return self;
        }
        let of_images = self.of_images;
        Weights { seed: None, of_images, base: Some(Box::new(self)), ..Weights::drawn(0) }
    }

    /// Draws from a seed what the source lacks: a class head, the parameters that connect a separate tower, and the rows of new
    /// tokens.
    pub fn draw_rest(&mut self, model: &Model, seed: u64) {
        for table in [EMBED, HEAD] {
            let Some(rows) = self.rows(table) else { continue };
            if model.vocab().is_some_and(|vocab| vocab > rows) {
                self.grown.insert(table.to_string(), (rows, seed));
            }
        }
        let head = model.class_head().map(|head| format!("{head}.weight"));
        let query = model.as_fovea().map(|_| format!("{}.q_init", vision::SCOPE));
        if head.into_iter().chain(query).any(|path| !self.has(&path)) {
            self.draw_by(seed);
        }
    }

    /// Number of rows of a table in the files, including those of the base.
    fn rows(&self, table: &str) -> Option<usize> {
        match self.found(table) {
            Some(place) => Some(self.file(place).1.entries()[&place.name].shape[0]),
            None => self.base.as_ref()?.rows(table),
        }
    }

    fn has(&self, path: &str) -> bool {
        self.places.contains_key(path) || self.base.as_ref().is_some_and(|base| base.has(path))
    }

    /// Draws parameters that neither a file nor the base has from a seed.
    fn draw_by(&mut self, seed: u64) {
        match &mut self.base {
            Some(base) => base.draw_by(seed),
            None => _ = self.seed.get_or_insert(seed),
        }
    }

    /// Adds the values of another model, with its parameters under a scope.
    pub fn insert_scoped(&mut self, scope: &str, other: Weights) {
        let first = self.files.len();
        let moved = |(path, place): (String, TensorLocation)| {
            let nf4 = place.nf4.map(|parts| parts.moved(first));
            (format!("{scope}.{path}"), TensorLocation { file: first + place.file, nf4, ..place })
        };
        // Averages replace the parameters of a run that stored them.
        self.places.extend(other.places.into_iter().chain(other.averages).map(moved));
        self.files.extend(other.files);
    }

    /// A sentence about tensors of the files that do not belong to the model and are not read.
    pub fn left_out(&self) -> Option<String> {
        let count = self.of_images;
        (count > 0).then(|| {
            format!("{count} tensors of the part that sees images are not read: only text is trained")
        })
    }

    pub fn place(&mut self, path: String, place: TensorLocation) {
        self.places.insert(path, place);
    }

    /// Reads only the first rows of a matrix if its file has more.
    pub fn read_first_rows(&mut self, path: &str, rows: usize) {
        if let Some(base) = &mut self.base {
            base.read_first_rows(path, rows);
        }
        for places in [&mut self.places, &mut self.averages] {
            let Some(place) = places.get_mut(path) else { continue };
            let (_, file) = &self.files[place.file];
            let dims = file.entries()[&place.name].shape.clone();
            let own = match &place.within {
                None => 0..dims[0],
                Some(Stored { within: Within::Rows(own), .. }) => own.clone(),
                Some(_) => continue,
            };
            if own.len() > rows {
                let whole = Stored::whole(path, place.name.clone(), dims);
                place.within = Some(Stored { within: Within::Rows(own.start..own.start + rows), ..whole });
            }
        }
    }

    /// Sets the adapters of the weights, whose tensors were added before.
    pub fn adapt(&mut self, adapters: Vec<Adapter>) {
        self.adapters = adapters;
    }

    /// Sets the weights that a run stored as codes, which are then read dequantised.
    pub fn read_as_stored(&mut self, stored: StoredBase) {
        self.codes = Some(stored);
    }

    /// The weights that are read dequantised.
    pub fn stored_as_codes(&self) -> Option<&StoredBase> {
        self.codes.as_ref()
    }

    /// Runs a closure that reads all weights as they were before a run stored some as codes, in order to quantise them again.
    pub fn without_codes<T>(&mut self, read: impl FnOnce(&mut Weights) -> T) -> T {
        let stored = self.codes.take();
        let done = read(self);
        self.codes = stored;
        done
    }

    pub fn adapters(&self) -> &[Adapter] {
        &self.adapters
    }

    /// Sets whether weights are read without merging their adapters.
    pub fn keep_apart(&mut self, apart: bool) {
        self.apart = apart;
    }

    /// Sets whether averages are read if a run stored them (the default), or the trained weights.
    pub fn read_averages(&mut self, averaged: bool) {
        self.averaged = averaged;
    }

    /// Whether averages are read instead of the parameters they average.
    pub fn are_averages(&self) -> bool {
        self.averaged && !self.averages.is_empty()
    }

    /// The kind of weights that are read, for people and for scripts.
    pub fn which(&self) -> &'static str {
        if self.are_averages() { "average" } else { "trained" }
    }

    /// Adds a file of flatout, which overrides earlier ones: its tensors have the model's paths.
    pub fn overlay(
        &mut self,
        path: &Path,
        file: TensorFile,
        wanted: &BTreeMap<String, (TensorType, Init)>,
    ) -> Result<(), UserError> {
        let number = self.files.len();
        // The earlier locations belong to the source of this file's run.
        self.places.append(&mut self.averages);
        for (name, entry) in file.entries() {
            let average = averaged_weight(name);
            let ours = average.unwrap_or(name);
            let Some((ty, _)) = wanted.get(ours) else { continue };
            if entry.shape != ty.dims || entry.dtype != Dtype::F32 {
                refuse!(
                    "{}: `{name}` is {} {:?} and the model's is F32 {:?}",
                    path.display(),
                    entry.dtype,
                    entry.shape,
                    ty.dims
                );
            }
            // A table that grew was saved with all of its rows.
            self.grown.remove(ours);
            let places = if average.is_some() { &mut self.averages } else { &mut self.places };
            places.insert(
                ours.to_string(),
                TensorLocation { file: number, name: name.clone(), within: None, expect: None, nf4: None },
            );
        }
        self.files.push((path.to_path_buf(), file));
        Ok(())
    }

    pub fn file(&self, place: &TensorLocation) -> (&Path, &TensorFile) {
        self.numbered(place.file)
    }

    pub fn numbered(&self, file: usize) -> (&Path, &TensorFile) {
        let (path, file) = &self.files[file];
        (path, file)
    }

    /// Number of weights that their files store as NF4 codes.
    pub fn packed(&self) -> usize {
        let base = self.base.as_ref().map_or(0, |base| base.packed());
        base + self.places.values().filter(|place| place.nf4.is_some()).count()
    }

    /// Refuses to store these weights as codes if the files have codes that do not fit: other codes, codes of only some of the
    /// weights, or codes in a form that sessions do not use.
    pub fn check_packed(&self, codes: Codes, names: &BTreeSet<String>) -> Result<(), UserError> {
        if self.packed() > 0 && codes == Codes::Fp8 {
            refuse!(
                "`model.from` has weights that bitsandbytes quantised, and base=fp8 would quantise their values again: give \
                 base=nf4, which keeps their codes, or base=bf16"
            );
        }
        if self.packed() > 0
            && (self.base.is_some() || names.iter().any(|name| !self.beside(name).is_empty()))
        {
            refuse!(
                "`model.from` is a run with adapters beside weights that bitsandbytes quantised, and base=nf4 would quantise their \
                 sums: export it and begin from the export, or give base=bf16"
            );
        }
        bitsandbytes::check(&self.places, names)
    }

    /// A weight that a session stores in NF4 exactly as its file does, with its hash.
    fn read_packed(&self, piece: &TensorRange) -> Result<Option<(Packed, String)>, Failure> {
        let is_alone = piece.codes() == Some(Codes::Nf4) && self.beside(&piece.path).is_empty();
        let place = self.found(&piece.path).filter(|_| is_alone);
        let parts = place.and_then(|place| Some((place, place.nf4.as_ref()?)));
        parts.map(|(place, parts)| Packed::read(self, place, parts)).transpose()
    }

    /// Sets the hashes that tensors must have when they are read.
    pub fn expect(&mut self, hashes: &BTreeMap<String, String>) {
        for (path, hash) in hashes {
            if self.base.is_some() || !self.beside(path).is_empty() {
                self.expected.insert(path.clone(), hash.clone());
            } else if let Some(place) = self.averages.get_mut(path).or(self.places.get_mut(path)) {
                place.expect = Some(hash.clone());
            }
        }
    }

    /// A parameter's values as little-endian f32, and the hash of the bytes they were read from; random ones have none.
    pub fn read(
        &self,
        name: &str,
        ty: &TensorType,
        init: &Init,
    ) -> Result<(Vec<u8>, Option<String>), Failure> {
        let Some((rows, seed)) = self.grown.get(name) else { return self.read_adapted(name, ty, init) };
        let width = ty.dims[1];
        let (wide, hash) = self.read_adapted(name, &TensorType::new(ty.dtype, [*rows, width]), init)?;
        let mut table = f32s(&wide);
        grow(name, &mut table, width, ty.dims[0], *seed);
        Ok((table.into_iter().flat_map(f32::to_le_bytes).collect(), hash))
    }

    /// The same for the rows in the files, merged with their adapters.
    fn read_adapted(
        &self,
        name: &str,
        ty: &TensorType,
        init: &Init,
    ) -> Result<(Vec<u8>, Option<String>), Failure> {
        let (wide, hash) = self.read_with_adapters(name, ty, init)?;
        if self.base.is_none() {
            self.check_unchanged(name, hash.as_deref())?;
        }
        Ok((wide, hash))
    }

    /// Refuses a parameter made of several tensors that has changed.
    fn check_unchanged(&self, name: &str, hash: Option<&str>) -> Result<(), UserError> {
        if self.expected.get(name).is_none_or(|expected| hash == Some(expected)) {
            return Ok(());
        }
        let base = self.base.as_deref().unwrap_or(self);
        refuse_changed(base.found(name).map_or(Path::new(name), |place| base.file(place).0), name)
    }

    fn read_with_adapters(
        &self,
        name: &str,
        ty: &TensorType,
        init: &Init,
    ) -> Result<(Vec<u8>, Option<String>), Failure> {
        let (wide, hash) = self.read_one(name, ty, init)?;
        let beside = self.beside(name);
        if beside.is_empty() {
            return Ok((wide, hash));
        }
        let mut weight = f32s(&wide);
        let mut all = Xxh3::new();
        all.update(hash.unwrap_or_default().as_bytes());
        for adapter in beside {
            let mut read = vec![];
            for slot in adapter.parameters([ty.dims[0], ty.dims[1]]) {
                let (wide, hash) = self.read_one(&slot.path, &slot.ty, &slot.init)?;
                all.update(hash.unwrap_or_default().as_bytes());
                read.push(f32s(&wide));
            }
            merge(&mut weight, adapter, &read[0], &read[1], read.get(2).map(Vec::as_slice));
        }
        let wide = weight.into_iter().flat_map(f32::to_le_bytes).collect();
        Ok((wide, Some(format!("{:032x}", all.digest128()))))
    }

    /// A hash of the values of some parameters, independent of the type they are stored in; and the hashes of the bytes they were
    /// read from, by path.
    pub fn digest<'a>(
        &self,
        parameters: impl IntoParallelIterator<Item = (&'a str, &'a TensorType, &'a Init)>,
    ) -> Result<(String, BTreeMap<String, String>), Failure> {
        let wait = waits::begin("hashing weights", Unit::Bytes, None);
        let read = parameters.into_par_iter().map(|(path, ty, init)| {
            let (wide, stored) = self.read(path, ty, init)?;
            wait.add(wide.len() as u64);
            Ok((path, (xxh3_128(&wide), stored)))
        });
        let read = read.collect::<Result<BTreeMap<&str, _>, Failure>>()?;
        let (mut all, mut hashes) = (Xxh3::new(), BTreeMap::new());
        for (path, (values, stored)) in read {
            all.update(path.as_bytes());
            all.update(&values.to_le_bytes());
            hashes.extend(stored.map(|hash| (path.to_string(), hash)));
        }
        Ok((format!("{:032x}", all.digest128()), hashes))
    }

    /// The adapters that are merged into a weight.
    fn beside(&self, name: &str) -> Vec<&Adapter> {
        if self.apart { vec![] } else { self.adapters.iter().filter(|a| a.weight == name).collect() }
    }

    /// Whether a parameter is computed, instead of being the contents of its file.
    fn is_made(&self, name: &str) -> bool {
        let is_rounded = self.codes.as_ref().is_some_and(|stored| stored.has(name));
        is_rounded || self.grown.contains_key(name) || !self.beside(name).is_empty()
    }

    /// The location from which a parameter is read; `None` if it is random.
    fn found(&self, name: &str) -> Option<&TensorLocation> {
        self.averages.get(name).filter(|_| self.averaged).or(self.places.get(name))
    }

    fn read_one(
        &self,
        name: &str,
        ty: &TensorType,
        init: &Init,
    ) -> Result<(Vec<u8>, Option<String>), Failure> {
        let (wide, hash) = self.read_stored(name, ty, init)?;
        let values = match &self.codes {
            Some(StoredBase::Nf4 { weights, narrow }) if weights.contains(name) => {
                let is_packed = self.found(name).is_some_and(|place| place.nf4.is_some());
                match is_packed {
                    // The values are dequantised codes already.
                    true if *narrow => {
                        f32s(&wide).into_iter().map(|x| bf16_to_f32(bf16_from_f32(x))).collect()
                    }
                    true => return Ok((wide, hash)),
                    false => quantized::rounded_to_nf4(&f32s(&wide), *narrow),
                }
            }
            Some(StoredBase::Fp8(groups)) => {
                let Some(group) = groups.iter().find(|group| group.contains_key(name)) else {
                    return Ok((wide, hash));
                };
                let others = group.iter().filter(|(other, _)| *other != name);
                let others = others.map(|(other, (ty, init))| {
                    Ok(quantized::amax(&f32s(&self.read_stored(other, ty, init)?.0)))
                });
                let others = others.collect::<Result<Vec<_>, Failure>>()?;
                let values = f32s(&wide);
                let scale = fp8_base::scale(others.into_iter().chain([quantized::amax(&values)]));
                quantized::rounded_to_e4m3(&values, scale)
            }
            _ => return Ok((wide, hash)),
        };
        Ok((values.into_iter().flat_map(f32::to_le_bytes).collect(), hash))
    }

    /// The same before quantisation.
    fn read_stored(
        &self,
        name: &str,
        ty: &TensorType,
        init: &Init,
    ) -> Result<(Vec<u8>, Option<String>), Failure> {
        let Some(place) = self.found(name) else {
            if let Some(base) = &self.base {
                let (wide, hash) = base.read(name, ty, init)?;
                self.check_unchanged(name, hash.as_deref())?;
                return Ok((wide, hash));
            }
            let seed = self.seed.expect("a source without a seed has every parameter");
            let values = values(name, ty, init, seed);
            return Ok((values.into_iter().flat_map(f32::to_le_bytes).collect(), None));
        };
        if let Some(parts) = &place.nf4 {
            let (packed, hash) = Packed::read(self, place, parts)?;
            return Ok((packed.values().into_iter().flat_map(f32::to_le_bytes).collect(), Some(hash)));
        }
        let (dtype, bytes, hash) = self.stored(place)?;
        let mut wide = widened(dtype, bytes);
        if let Some(within) = &place.within {
            wide = within.take(wide.as_chunks::<4>().0).into_flattened();
        }
        assert_eq!(wide.len(), 4 * ty.elements(), "shapes are checked where files are opened");
        Ok((wide, Some(hash)))
    }

    /// A piece's values in the type of its slot. The hash covers the whole tensor's bytes, and is there if all of them were read,
    /// which `with_hash` enforces. Values stored in that type unchanged are not converted.
    fn read_for(&self, piece: &TensorRange, with_hash: bool) -> Result<(Vec<u8>, Option<String>), Failure> {
        let of_slot = |wide: Vec<u8>| if piece.ty.dtype == DType::BF16 { narrow(&wide) } else { wide };
        if !with_hash && let Some(wide) = self.read_some(piece)? {
            return Ok((of_slot(wide), None));
        }
        let as_stored = self.found(&piece.path).filter(|place| {
            let (_, file) = self.file(place);
            let is_alike = piece.ty.dtype == DType::BF16 && file.entries()[&place.name].dtype == Dtype::Bf16;
            is_alike && place.within.is_none() && !self.is_made(&piece.path)
        });
        let (mut bytes, hash) = match as_stored {
            Some(place) => {
                let (_, bytes, hash) = self.stored(place)?;
                (bytes, Some(hash))
            }
            None => {
                let (wide, hash) = self.read(&piece.path, &piece.ty, &piece.init)?;
                (of_slot(wide), hash)
            }
        };
        if !piece.is_whole() {
            let size = piece.ty.dtype.bytes();
            bytes = bytes[size * piece.range.start..size * piece.range.end].to_vec();
        }
        Ok((bytes, hash))
    }

    /// A piece's values in the type of its slot.
    pub fn piece(&self, piece: &TensorRange) -> Result<Vec<u8>, Failure> {
        Ok(self.read_for(piece, false)?.0)
    }

    /// A part of a parameter's values as f32, if it can be read without the rest: it is stored unchanged, and neither a hash nor
    /// an adapter needs all of it.
    fn read_some(&self, piece: &TensorRange) -> Result<Option<Vec<u8>>, Failure> {
        if piece.is_whole() || self.is_made(&piece.path) {
            return Ok(None);
        }
        let Some(place) = self.found(&piece.path) else {
            if self.base.is_some() {
                return Ok(None);
            }
            let seed = self.seed.expect("a source without a seed has every parameter");
            let values = drawn(&piece.path, &piece.init, seed, piece.range.clone());
            return Ok(Some(values.into_iter().flat_map(f32::to_le_bytes).collect()));
        };
        if place.within.is_some() || place.expect.is_some() || place.nf4.is_some() {
            return Ok(None);
        }
        let (path, file) = self.file(place);
        let dtype = file.entries()[&place.name].dtype;
        let mut bytes = vec![0; piece.elements() * dtype.bytes()];
        file.read_range(&place.name, piece.range.clone(), &mut bytes).map_err(Failure::io(path.display()))?;
        check_finite(path, &place.name, dtype, &bytes)?;
        Ok(Some(widened(dtype, bytes)))
    }

    /// A tensor as stored in its file, with the hash of its bytes.
    fn stored(&self, place: &TensorLocation) -> Result<(Dtype, Vec<u8>, String), Failure> {
        let (path, file) = self.file(place);
        let entry = &file.entries()[&place.name];
        let mut bytes = vec![0; entry.bytes()];
        let mut hash = Xxh3::new();
        for (i, chunk) in bytes.chunks_mut(CHUNK_BYTES).enumerate() {
            file.read_part(&place.name, (i * CHUNK_BYTES) as u64, chunk)
                .map_err(Failure::io(path.display()))?;
            check_finite(path, &place.name, entry.dtype, chunk)?;
            hash.update(chunk);
        }
        let hash = format!("{:032x}", hash.digest128());
        if place.expect.as_ref().is_some_and(|expected| *expected != hash) {
            refuse_changed(path, &place.name)?;
        }
        Ok((entry.dtype, bytes, hash))
    }

    /// Writes the selected parameters into a session, adapters only if their tensors exist. Returns the hashes of the tensors
    /// read.
    pub fn load(
        &self,
        session: &mut Session,
        wanted: impl Fn(&TensorRange) -> bool,
    ) -> Result<BTreeMap<String, String>, Failure> {
        let mut pieces = held(session, Class::is_parameter);
        pieces.retain(|piece| {
            wanted(piece) && (!piece.path.starts_with(SCOPE) || self.places.contains_key(&piece.path))
        });
        // No checkpoint contains frozen weights: the first rank, which records their hashes, reads whole tensors of them, even
        // where ranks hold shards.
        let is_first = session.rank() == 0;
        let with_hash = |piece: &TensorRange| is_first && piece.class == Class::Frozen;
        let bytes: usize = pieces.iter().map(TensorRange::bytes).sum();
        let wait = waits::begin("reading weights", Unit::Bytes, Some(bytes as u64));
        let (mut hashes, mut writer) = (BTreeMap::new(), quantized::Writer::default());
        let mut left = pieces.as_slice();
        while !left.is_empty() {
            let (some, rest) = left.split_at(portion(left));
            let read = some.par_iter().map(|piece| match self.read_packed(piece)? {
                Some((packed, hash)) => Ok((Values::Packed(packed), Some(hash).filter(|_| with_hash(piece)))),
                None => {
                    self.read_for(piece, with_hash(piece)).map(|(bytes, hash)| (Values::Plain(bytes), hash))
                }
            });
            let read = read.collect::<Result<Vec<_>, Failure>>()?;
            for (piece, (values, hash)) in some.iter().zip(read) {
                match values {
                    Values::Plain(bytes) => writer.write(session, piece, &bytes)?,
                    Values::Packed(packed) => packed.write(session, piece)?,
                }
                wait.add(piece.bytes() as u64);
                hashes.extend(hash.map(|hash| (piece.path.clone(), hash)));
            }
            left = rest;
        }
        writer.finish();
        Ok(hashes)
    }
}

/// Refuses a tensor with values that are not finite: results computed from them are not finite either.
pub(super) fn check_finite(path: &Path, name: &str, dtype: Dtype, bytes: &[u8]) -> Result<(), UserError> {
    // Infinities and NaN are the values whose exponent bits are all ones. Both folds vectorise.
    let halves = |ones: u16| {
        let half = |all: bool, half: &[u8; 2]| all & (u16::from_le_bytes(*half) & ones != ones);
        bytes.as_chunks().0.iter().fold(true, half)
    };
    let word = |all: bool, word: &[u8; 4]| all & f32::from_le_bytes(*word).is_finite();
    let is_finite = match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().fold(true, word),
        Dtype::F16 => halves(0x7c00),
        Dtype::Bf16 => halves(0x7f80),
        _ => true,
    };
    match is_finite {
        true => Ok(()),
        false => refuse!(
            "{}: `{name}` has values that are not finite, from which nothing can be computed: fetch the file again, or take \
             weights that were saved before they diverged",
            path.display()
        ),
    }
}

/// A piece as read: its values in the type of its slot, or its codes.
enum Values {
    Plain(Vec<u8>),
    Packed(Packed),
}

/// Number of pieces to read at once: at least one.
fn portion(pieces: &[TensorRange]) -> usize {
    let mut bytes = 0;
    let fits = |piece: &&TensorRange| {
        bytes += 4 * if piece.class == Class::Frozen { piece.ty.elements() } else { piece.elements() };
        bytes <= PORTION_BYTES
    };
    pieces.iter().take_while(fits).count().max(1)
}

pub(super) fn refuse_changed(path: &Path, name: &str) -> Result<(), UserError> {
    refuse!(
        "{}: `{name}` is not what the run began with, and it is frozen, so no checkpoint has it: restore the file",
        path.display()
    )
}

/// Widens elements to f32. Types are checked when files are opened.
fn widened(dtype: Dtype, bytes: Vec<u8>) -> Vec<u8> {
    let of_halves = |widen: fn(u16) -> f32| {
        let mut wide = vec![0; 2 * bytes.len()];
        let halves = bytes.as_chunks::<2>().0;
        for (word, half) in wide.as_chunks_mut::<4>().0.iter_mut().zip(halves) {
            *word = widen(u16::from_le_bytes(*half)).to_le_bytes();
        }
        wide
    };
    match dtype {
        Dtype::F32 => bytes,
        Dtype::Bf16 => of_halves(bf16_to_f32),
        Dtype::F16 => of_halves(f16_to_f32),
        other => unreachable!("{other} was refused when the file was opened"),
    }
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

/// Little-endian f32 to bf16, rounded to nearest even.
pub fn narrow(wide: &[u8]) -> Vec<u8> {
    let mut halves = vec![0; wide.len() / 2];
    for (half, word) in halves.as_chunks_mut::<2>().0.iter_mut().zip(wide.as_chunks::<4>().0) {
        *half = bf16_from_f32(f32::from_le_bytes(*word)).to_le_bytes();
    }
    halves
}

/// IEEE half precision to f32, which is exact.
fn f16_to_f32(half: u16) -> f32 {
    let (sign, exponent, fraction) = ((half >> 15) as u32, ((half >> 10) & 31) as u32, (half & 1023) as u32);
    match exponent {
        // Subnormal: a multiple of 2^-24, which f32 holds exactly.
        0 => (1.0 - 2.0 * sign as f32) * fraction as f32 * 2f32.powi(-24),
        31 => f32::from_bits((sign << 31) | (255 << 23) | (fraction << 13)),
        _ => f32::from_bits((sign << 31) | ((exponent + 112) << 23) | (fraction << 13)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However a parameter is stored or drawn, a piece of it equals that part of the whole.
    #[test]
    fn pieces_of_parameters_are_parts_of_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let stored = [("f32", Dtype::F32), ("f16", Dtype::F16), ("bf16", Dtype::Bf16)];
        let described: Vec<_> = stored.iter().map(|(name, dtype)| (*name, *dtype, &[4, 3][..])).collect();
        let mut bytes = crate::run::checkpoint::header(&described, &[]).unwrap();
        bytes.extend((0..12 * (4 + 2 + 2)).map(|i| i as u8));
        std::fs::write(&path, bytes).unwrap();
        let mut weights = Weights::of_files(vec![(path.clone(), TensorFile::open(&path).unwrap())]);
        weights.seed = Some(7);
        let place =
            |name: &str| TensorLocation { file: 0, name: name.into(), within: None, expect: None, nf4: None };
        for (name, _) in stored {
            weights.place(name.into(), place(name));
        }
        // Rows of a larger tensor, which require reading all of it.
        let all = Stored::whole("rows", "f32", vec![4, 3]);
        let within = Some(Stored { within: Within::Rows(1..3), ..all });
        weights.place("rows".into(), TensorLocation { within, ..place("f32") });
        for (name, rows) in [("f32", 4), ("f16", 4), ("bf16", 4), ("rows", 2), ("drawn", 4)] {
            for dtype in [DType::F32, DType::BF16] {
                let elements = 3 * rows;
                let whole = TensorRange {
                    path: name.into(),
                    ty: TensorType::new(dtype, [rows, 3]),
                    class: Class::Weight,
                    init: Init::Normal { std: 0.5 },
                    range: 0..elements,
                    slot: name.into(),
                    at: 0,
                };
                let (all, hash) = weights.read_for(&whole, false).unwrap();
                assert_eq!((all.len(), hash.is_some()), (elements * dtype.bytes(), name != "drawn"));
                for range in [0..elements, 0..1, 1..elements, 2..5, 3..3] {
                    let part = whole.part(range.clone());
                    let expected = &all[dtype.bytes() * range.start..dtype.bytes() * range.end];
                    assert_eq!(
                        weights.read_for(&part, false).unwrap().0,
                        expected,
                        "{name} {dtype:?} {range:?}"
                    );
                    let of_all = weights.read_for(&part, true).unwrap();
                    assert_eq!(of_all, (expected.to_vec(), hash.clone()), "{name} {dtype:?} {range:?}");
                }
            }
        }
    }

    #[test]
    fn half_precision_widens_exactly() {
        let cases = [
            (0x0000, 0.0),
            (0x8000, -0.0),
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0001, 5.960_464_5e-8),
            (0x83ff, -6.097_555e-5),
            (0x0400, 6.103_515_6e-5),
            (0x3555, 0.333_251_95),
            (0x7c00, f32::INFINITY),
            (0xfc00, f32::NEG_INFINITY),
        ];
        for (half, wide) in cases {
            assert_eq!(f16_to_f32(half).to_bits(), f32::to_bits(wide), "{half:#06x}");
        }
        assert!(f16_to_f32(0x7e00).is_nan());
    }
}
