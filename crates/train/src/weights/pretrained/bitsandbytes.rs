//! Weights that bitsandbytes quantised to four bits: their settings in `config.json`, the locations of their parts in a folder,
//! and their codes and magnitudes, which are read unchanged. Beside the codes `X.weight` a file has `X.weight.absmax`,
//! `X.weight.quant_map`, a description in JSON and, if magnitudes are quantised too, their magnitudes and map.

use std::collections::{BTreeMap, BTreeSet};

use flatout_ir::TensorRange;
use flatout_ir::nf4::{BLOCK, CODES, Magnitudes, NESTED, blocks};
use flatout_models::library::stored::Stored;
use flatout_runtime::{RuntimeError, Session};
use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use super::weights::{TensorLocation, Weights, check_finite, refuse_changed};
use crate::Failure;
use crate::UserError;
use crate::refuse;
use crate::run::checkpoint::Dtype;
use crate::weights::quantized;

/// The field of a `config.json` with the quantisation settings.
pub const FIELD: &str = "quantization_config";

/// Suffixes of the names of a weight's parts.
const ABSMAX: &str = ".absmax";
const QUANT_MAP: &str = ".quant_map";
const NESTED_ABSMAX: &str = ".nested_absmax";
const NESTED_MAP: &str = ".nested_quant_map";
const STATE: &str = ".quant_state.bitsandbytes__nf4";
const FP4_STATE: &str = ".quant_state.bitsandbytes__fp4";

/// The description of a weight is one line of JSON.
const MAX_STATE_BYTES: usize = 4096;

/// Quantisation settings of a folder's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whether magnitudes are quantised too (double quantisation).
    nested: bool,
}

/// The settings in a `config.json` for weights in NF4; `None` if it does not name bitsandbytes.
pub fn settings(config: &Value) -> Result<Option<Settings>, String> {
    let settings = &config[FIELD];
    if settings["quant_method"] != "bitsandbytes" {
        return Ok(None);
    }
    let is_set = |key: &str| settings[key] == true;
    if is_set("load_in_8bit") {
        return Err(format!(
            "its `{FIELD}` has load_in_8bit, and of bitsandbytes' forms only NF4 is read: take a checkpoint with \
             load_in_4bit and bnb_4bit_quant_type nf4, or one that is not quantised"
        ));
    }
    if !is_set("load_in_4bit") {
        return Err(format!("its `{FIELD}` names bitsandbytes without load_in_4bit, and only NF4 is read"));
    }
    let of = |key: &str, default: &'static str| settings[key].as_str().unwrap_or(default).to_string();
    let kind = of("bnb_4bit_quant_type", "fp4");
    if kind != "nf4" {
        return Err(format!(
            "its `{FIELD}` has bnb_4bit_quant_type {kind}, and of bitsandbytes' forms only nf4 is read: take a checkpoint in \
             nf4, or one that is not quantised"
        ));
    }
    let storage = of("bnb_4bit_quant_storage", "uint8");
    if storage != "uint8" {
        return Err(format!(
            "its `{FIELD}` keeps codes as {storage} (bnb_4bit_quant_storage), and only uint8 is supported"
        ));
    }
    Ok(Some(Settings { nested: is_set("bnb_4bit_use_double_quant") }))
}

/// The names of the tensors that belong to a weight's codes.
pub fn beside(name: &str) -> impl Iterator<Item = String> + '_ {
    [ABSMAX, QUANT_MAP, NESTED_ABSMAX, NESTED_MAP, STATE].into_iter().map(move |end| format!("{name}{end}"))
}

/// A tensor of a file, by the file's number.
#[derive(Clone, Debug)]
struct Tensor {
    file: usize,
    name: String,
}

/// The parts of a weight in addition to its codes.
#[derive(Clone, Debug)]
pub struct Parts {
    elements: usize,
    absmax: Tensor,
    /// Present if magnitudes are quantised too.
    nested: Option<Nested>,
}

#[derive(Clone, Debug)]
struct Nested {
    largest: Tensor,
    /// The map with which the magnitudes were quantised.
    map: Box<[f32; 256]>,
    offset: f32,
}

impl Parts {
    /// The same with file numbers increased by `by`.
    pub fn moved(mut self, by: usize) -> Parts {
        self.absmax.file += by;
        if let Some(nested) = &mut self.nested {
            nested.largest.file += by;
        }
        self
    }
}

/// The parts that accompany the codes at a location, all checked against their weight.
pub fn parts(
    weights: &Weights,
    found: &BTreeMap<String, usize>,
    codes: &TensorLocation,
    stored: &Stored,
    settings: Settings,
) -> Result<Parts, UserError> {
    let name = &codes.name;
    let path = weights.file(codes).0.display();
    if !stored.is_whole() || stored.dims.len() != 2 {
        refuse!(
            "{path}: `{name}` is quantised and holds several weights or something other than rows of a linear layer, which is \
             supported only for weights that are not quantised"
        );
    }
    if found.contains_key(&format!("{name}{FP4_STATE}")) {
        refuse!("{path}: `{name}` is in fp4, and only nf4 is supported: take a checkpoint in nf4");
    }
    let part = |end: &str| match found.get_key_value(&format!("{name}{end}")) {
        Some((name, file)) => Ok(Tensor { file: *file, name: name.clone() }),
        None => refuse!("{path}: `{name}` is quantised, and its `{name}{end}` is missing"),
    };
    let state = described(weights, &part(STATE)?)?;
    let is = |key: &str, wanted: Value| match &state[key] {
        found if *found == wanted => Ok(()),
        Value::Null => refuse!("{path}: the description of `{name}` lacks `{key}`"),
        found => refuse!("{path}: `{name}` is quantised with {key} {found}, and only {wanted} is supported"),
    };
    is("quant_type", "nf4".into())?;
    is("blocksize", BLOCK.into())?;
    if state["shape"] != Value::from(stored.dims.clone()) {
        let (shape, dims) = (&state["shape"], &stored.dims);
        refuse!("{path}: `{name}` has codes of shape {shape}, and {dims:?} is what config.json describes");
    }
    let elements: usize = stored.dims.iter().product();
    sized(weights, &Tensor { file: codes.file, name: name.clone() }, Dtype::U8, elements.div_ceil(2))?;
    let table = f32s(weights, &sized(weights, &part(QUANT_MAP)?, Dtype::F32, CODES.len())?)?;
    if table.iter().zip(CODES).any(|(theirs, ours)| theirs.to_bits() != ours.to_bits()) {
        refuse!("{path}: `{name}{QUANT_MAP}` has other values than NF4's");
    }
    let is_nested = found.contains_key(&format!("{name}{NESTED_ABSMAX}"));
    if is_nested != settings.nested {
        let (is, says) =
            if is_nested { ("are", "does not say so") } else { ("are not", "says that they are") };
        refuse!(
            "{path}: the magnitudes of `{name}` {is} quantised in turn, and config.json {says} (bnb_4bit_use_double_quant)"
        );
    }
    let count = blocks(elements);
    if !is_nested {
        let absmax = sized(weights, &part(ABSMAX)?, Dtype::F32, count)?;
        return Ok(Parts { elements, absmax, nested: None });
    }
    is("nested_blocksize", NESTED.into())?;
    is("nested_dtype", "float32".into())?;
    let Some(offset) = state["nested_offset"].as_f64() else {
        refuse!("{path}: the description of `{name}` lacks `nested_offset`");
    };
    let absmax = sized(weights, &part(ABSMAX)?, Dtype::U8, count)?;
    let largest = sized(weights, &part(NESTED_ABSMAX)?, Dtype::F32, count.div_ceil(NESTED))?;
    let map = f32s(weights, &sized(weights, &part(NESTED_MAP)?, Dtype::F32, 256)?)?;
    let map = Box::new(<[f32; 256]>::try_from(map).expect("its size was checked"));
    Ok(Parts { elements, absmax, nested: Some(Nested { largest, map, offset: offset as f32 }) })
}

/// Checks a part's type and number of elements.
fn sized(weights: &Weights, part: &Tensor, dtype: Dtype, count: usize) -> Result<Tensor, UserError> {
    let (path, file) = weights.numbered(part.file);
    let entry = &file.entries()[&part.name];
    if entry.dtype != dtype || entry.shape.iter().product::<usize>() != count {
        let (path, name) = (path.display(), &part.name);
        let (is, shape) = (entry.dtype, &entry.shape);
        refuse!("{path}: `{name}` is {is} {shape:?}, and {dtype} of {count} elements belong to its weight");
    }
    Ok(part.clone())
}

fn bytes(weights: &Weights, part: &Tensor) -> Result<Vec<u8>, UserError> {
    let (path, file) = weights.numbered(part.file);
    let entry = &file.entries()[&part.name];
    let mut bytes = vec![0; entry.bytes()];
    let read = file.read_into(&part.name, &mut bytes);
    read.map_err(|error| UserError(format!("{} cannot be read: {error}", path.display())))?;
    check_finite(path, &part.name, entry.dtype, &bytes)?;
    Ok(bytes)
}

fn f32s(weights: &Weights, part: &Tensor) -> Result<Vec<f32>, UserError> {
    Ok(words(&bytes(weights, part)?))
}

fn words(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

/// The description of a weight, which a file stores as bytes.
fn described(weights: &Weights, part: &Tensor) -> Result<Value, UserError> {
    let (path, file) = weights.numbered(part.file);
    let (path, entry) = (path.display(), &file.entries()[&part.name]);
    if entry.dtype != Dtype::U8 || entry.bytes() > MAX_STATE_BYTES {
        refuse!("{path}: `{}` is not the description of a weight", part.name);
    }
    match serde_json::from_slice(&bytes(weights, part)?) {
        Ok(value) => Ok(value),
        Err(error) => refuse!("{path}: `{}` is not JSON: {error}", part.name),
    }
}

/// A weight in the form of bitsandbytes.
pub struct Packed {
    elements: usize,
    codes: Vec<u8>,
    scales: Scales,
}

enum Scales {
    Nested(Magnitudes, Box<[f32; 256]>),
    Flat(Vec<f32>),
}

impl Packed {
    /// Reads the weight at a location, and returns the hash of the bytes of its parts.
    pub fn read(
        weights: &Weights,
        place: &TensorLocation,
        parts: &Parts,
    ) -> Result<(Packed, String), Failure> {
        let mut hash = Xxh3::new();
        let mut part = |part: &Tensor| -> Result<Vec<u8>, UserError> {
            let bytes = bytes(weights, part)?;
            hash.update(&bytes);
            Ok(bytes)
        };
        let codes = part(&Tensor { file: place.file, name: place.name.clone() })?;
        let absmax = part(&parts.absmax)?;
        let scales = match &parts.nested {
            None => Scales::Flat(words(&absmax)),
            Some(Nested { largest, map, offset }) => {
                let nested = words(&part(largest)?);
                Scales::Nested(Magnitudes { codes: absmax, nested, offset: *offset }, map.clone())
            }
        };
        if let Scales::Nested(magnitudes, map) = &scales {
            hash.update(&magnitudes.offset.to_le_bytes());
            map.iter().for_each(|value| hash.update(&value.to_le_bytes()));
        }
        let hash = format!("{:032x}", hash.digest128());
        if place.expect.as_ref().is_some_and(|expected| *expected != hash) {
            refuse_changed(weights.file(place).0, &place.name)?;
        }
        Ok((Packed { elements: parts.elements, codes, scales }, hash))
    }

    /// Its values. bitsandbytes rounds them to the type that the weight was quantised from; they are not rounded here.
    pub fn values(&self) -> Vec<f32> {
        let all = 0..self.elements;
        match &self.scales {
            Scales::Nested(magnitudes, map) => {
                quantized::dequantized(&self.codes, |block| magnitudes.get(map, block), all, false)
            }
            Scales::Flat(absmax) => quantized::dequantized(&self.codes, |block| absmax[block], all, false),
        }
    }

    /// Writes codes, magnitudes and their mean unchanged into a session that stores the weight in NF4.
    pub fn write(&self, session: &mut Session, piece: &TensorRange) -> Result<(), RuntimeError> {
        match &self.scales {
            Scales::Nested(magnitudes, map) => {
                quantized::write_nf4(session, piece, &self.codes, magnitudes, map)
            }
            Scales::Flat(_) => Err(RuntimeError::Name(format!("`{}`: {FLAT}", piece.path))),
        }
    }
}

const FLAT: &str = "magnitudes that are not quantised in turn are not kept as they are, and with base=nf4 they would have to be: give \
                    base=bf16, which reads the same values";

/// Refuses to store weights in NF4 if the folder has some of them in other forms: `places` are the locations by path, `names` the
/// weights to be stored.
pub fn check(places: &BTreeMap<String, TensorLocation>, names: &BTreeSet<String>) -> Result<(), UserError> {
    let mut packed = places.iter().filter_map(|(path, place)| Some((path, place.nf4.as_ref()?))).peekable();
    let Some((first, _)) = packed.peek().cloned() else { return Ok(()) };
    let mut map: Option<&[f32; 256]> = None;
    for (path, parts) in packed {
        let Some(nested) = &parts.nested else {
            refuse!("`model.from` has weights of bitsandbytes without double quantisation: {FLAT}");
        };
        if map.is_some_and(|map| *map != *nested.map) {
            refuse!("`{path}` has magnitudes by another map than `{first}`: give base=bf16");
        }
        map = Some(&nested.map);
    }
    let is_packed = |name: &&String| places.get(*name).is_some_and(|place| place.nf4.is_some());
    if let Some(other) = names.iter().find(|name| !is_packed(name)) {
        refuse!(
            "`model.from` has `{first}` in nf4 and `{other}` not, and base=nf4 would quantise only some of them: give base=bf16, \
             which reads the same values"
        );
    }
    Ok(())
}
