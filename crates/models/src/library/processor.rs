//! The preprocessing of images in other libraries: the `preprocessor_config.json` of `transformers`, and the fields in timm's
//! `config.json`.
//!
//! Supported steps: resizing (the shorter side, or both) with a filter, centre crop, rescaling, normalisation. A step that
//! would change pixels otherwise is refused by its field.

use serde_json::{Map, Value, json};

use super::fields::Fields;
use crate::config::VitConfig;

/// The codes of resampling filters, with our names.
const FILTERS: [(u64, &str); 3] = [(1, "lanczos"), (2, "bilinear"), (3, "bicubic")];

/// The preprocessing of pixels; mean and deviation belong to the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processor {
    /// Rows and columns of the model's input image.
    pub size: Option<[usize; 2]>,
    /// Size before the centre crop: of the shorter side, or rows and columns.
    pub resize: Vec<usize>,
    /// The filter's name.
    pub filter: Option<&'static str>,
    /// Minimum and maximum number of pixels of an image beside a text, which keeps its aspect ratio.
    pub area: Option<[u64; 2]>,
}

/// Minimum and maximum number of pixels of an image beside a text in the published models.
pub const IMAGE_AREAS: [u64; 2] = [65_536, 16_777_216];
/// The library's limits if its file has none.
const DEFAULT_AREAS: [u64; 2] = [3_136, 1_003_520];

/// Reads a parsed `preprocessor_config.json`.
pub fn read(config: &Value) -> Result<Processor, String> {
    let f = Fields(config.as_object().ok_or("it is not a JSON object")?);
    let kind = ["image_processor_type", "feature_extractor_type"].into_iter().find_map(|name| f.get(name));
    let kind = kind.and_then(Value::as_str).unwrap_or_default();
    // The processors of supported models differ in their defaults.
    let is_square = ["ViT", "DeiT"].iter().any(|square| kind.starts_with(square));
    if !f.is_true("do_resize", true)? {
        return Err("its `do_resize` is false, and here images are scaled to the model's".into());
    }
    for name in ["crop_pct", "do_pad"] {
        if let Some(value) = f.get(name).filter(|value| **value != json!(false)) {
            return Err(format!("its `{name}` is {value}, and here there is only `size` and `crop_size`"));
        }
    }
    let crops = f.is_true("do_center_crop", f.get("crop_size").is_some() && !kind.starts_with("ViT"))?;
    let resize = match f.get("size") {
        None => vec![],
        Some(size) => sides(size, "size", !is_square)?,
    };
    let size = match (crops, f.get("crop_size")) {
        (true, Some(crop)) => square(&sides(crop, "crop_size", false)?),
        (true, None) => None,
        (false, _) if resize.len() == 1 => {
            return Err(
                "its images keep their ratio (`size` without `do_center_crop`), and here all have one size"
                    .into(),
            );
        }
        (false, _) => square(&resize),
    };
    if let Some(([height, width], least)) = size.zip(resize.iter().min())
        && *least < height.min(width)
    {
        return Err(format!("its `crop_size` is larger than its `size`: {height} x {width} of {resize:?}"));
    }
    Ok(Processor { size, resize, filter: filter(&f)?, area: None })
}

/// Reads the processor of a model that sees images beside a text: the limits of an image's area, if given.
pub fn read_area(config: &Value) -> Result<Processor, String> {
    let f = Fields(config.as_object().ok_or("it is not a JSON object")?);
    // As in the library, `min_pixels` and `max_pixels` take precedence over `size`.
    let limit = |edge: &str, pixels: &str| -> Result<Option<u64>, String> {
        let said = f.get("size").and_then(|size| size.get(edge)).filter(|value| !value.is_null());
        let (name, said) = match (f.get(pixels).filter(|value| !value.is_null()), said) {
            (Some(said), _) => (pixels.to_string(), said),
            (None, Some(said)) => (format!("size.{edge}"), said),
            (None, None) => return Ok(None),
        };
        let whole = said.as_u64().filter(|area| *area > 0);
        whole.map(Some).ok_or_else(|| format!("its `{name}` is {said}, and must be the pixels of an area"))
    };
    let area = match (limit("shortest_edge", "min_pixels")?, limit("longest_edge", "max_pixels")?) {
        (Some(least), Some(most)) if least > most => {
            return Err(format!("its least area of an image is {least} pixels, and its largest {most}"));
        }
        (Some(least), Some(most)) => Some([least, most]),
        (None, None) => Some(DEFAULT_AREAS),
        _ => return Err("it says one limit of an image's area, and wants both".into()),
    };
    Ok(Processor { area, ..Processor::default() })
}

/// Reads the `pretrained_cfg` of timm's files, which gives the cropped fraction of the shorter side, or of both.
pub(crate) fn read_timm(cfg: &Fields<'_>, image_size: usize) -> Result<Processor, String> {
    let share = match cfg.get("crop_pct") {
        None => return Ok(Processor::default()),
        Some(_) => cfg.number_or("crop_pct", 1.0)?,
    };
    if !(0.01..=1.0).contains(&share) {
        return Err(format!("its `crop_pct` is {share}, and must be a share"));
    }
    let scaled = (image_size as f64 / share).floor() as usize;
    let resize = match cfg.get("crop_mode").and_then(Value::as_str) {
        None | Some("center") => vec![scaled],
        Some("squash") => vec![scaled; 2],
        Some(other) => {
            return Err(format!("its `crop_mode` is {other:?}, and here there is only center and squash"));
        }
    };
    let named = cfg.get("interpolation").and_then(Value::as_str);
    let known = named.and_then(|named| FILTERS.iter().find(|(_, name)| *name == named));
    match (named, known) {
        (Some(named), None) => {
            Err(format!("its `interpolation` is {named:?}, and here there is bilinear, bicubic and lanczos"))
        }
        (_, known) => {
            let filter = known.map(|(_, name)| *name);
            Ok(Processor { size: Some([image_size; 2]), resize, filter, area: None })
        }
    }
}

/// Takes over the means and deviations of a `preprocessor_config.json`, for pixels multiplied by its factor.
pub(crate) fn normalise(vit: &mut VitConfig, config: &Value) -> Result<(), String> {
    normalise_by(config, [&mut vit.mean, &mut vit.std])?;
    vit.validate_body().map_err(|sentence| format!("it describes no images: {sentence}"))
}

/// `normalise` into a given mean and deviation.
pub(crate) fn normalise_by(config: &Value, [mean, std]: [&mut [f64; 3]; 2]) -> Result<(), String> {
    let f = Fields(config.as_object().ok_or("it is not a JSON object")?);
    let factor = match f.is_true("do_rescale", true)? {
        true => f.number_or("rescale_factor", 1.0 / 255.0)?,
        false => 1.0,
    };
    if factor <= 0.0 {
        return Err(format!("its `rescale_factor` is {factor}, and must be above 0"));
    }
    let normalises = f.is_true("do_normalize", true)?;
    for (name, place, none) in [("image_mean", mean, 0.0), ("image_std", std, 1.0)] {
        let said = match (normalises, f.get(name)) {
            (false, _) => [none; 3],
            (true, None) => continue,
            (true, Some(said)) => {
                let said =
                    said.as_array().map(|all| all.iter().filter_map(Value::as_f64).collect::<Vec<_>>());
                let three = said.and_then(|said| said.try_into().ok());
                three.ok_or_else(|| format!("its `{name}` must be three numbers"))?
            }
        };
        // Our means and deviations are for pixels divided by 255.
        let is_usual = (255.0 * factor - 1.0).abs() < 1e-9;
        *place = if is_usual { said } else { said.map(|x: f64| x / (255.0 * factor)) };
    }
    Ok(())
}

/// The `preprocessor_config.json` of a model with this preprocessing.
pub(crate) fn write(vit: &VitConfig, processor: &Processor) -> Value {
    let [height, width] = vit.sides();
    let code = FILTERS.iter().find(|(_, name)| Some(*name) == processor.filter).map_or(2, |(code, _)| *code);
    let size = match processor.resize[..] {
        [height, width] => json!({ "height": height, "width": width }),
        [shorter] => json!({ "shortest_edge": shorter }),
        _ => json!({ "shortest_edge": height.min(width) }),
    };
    json!({
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": true,
        "do_resize": true,
        "size": size,
        "resample": code,
        "do_center_crop": true,
        "crop_size": { "height": height, "width": width },
        "do_rescale": true,
        "rescale_factor": 1.0 / 255.0,
        "do_normalize": true,
        "image_mean": vit.mean,
        "image_std": vit.std,
    })
}

/// The preprocessing as fields of timm's `pretrained_cfg`.
pub(crate) fn write_timm(vit: &VitConfig, processor: &Processor) -> Map<String, Value> {
    let side = vit.image_size as f64;
    // The library rounds down after the division by the fraction.
    let share = processor.resize.first().map_or(1.0, |scaled| (side / (*scaled as f64 + 1e-6)).min(1.0));
    let share = if processor.resize.first() == Some(&vit.image_size) { 1.0 } else { share };
    let mode = if processor.resize.len() == 2 { "squash" } else { "center" };
    Map::from_iter([
        ("interpolation".to_string(), json!(processor.filter.unwrap_or("bilinear"))),
        ("crop_pct".to_string(), json!(share)),
        ("crop_mode".to_string(), json!(mode)),
    ])
}

fn filter(f: &Fields<'_>) -> Result<Option<&'static str>, String> {
    let Some(value) = f.get("resample") else { return Ok(None) };
    let known = FILTERS.iter().find(|(code, _)| value.as_u64() == Some(*code));
    match known {
        Some((_, name)) => Ok(Some(name)),
        None => Err(format!(
            "its `resample` is {value}, and here there is 1 (lanczos), 2 (bilinear) and 3 (bicubic)"
        )),
    }
}

/// One number for the shorter side, or rows and columns.
fn sides(value: &Value, name: &str, one_is_shorter: bool) -> Result<Vec<usize>, String> {
    let wrong =
        || format!("its `{name}` is {value}, and must have a height and a width, or the shortest edge");
    let whole = |value: &Value| value.as_u64().filter(|n| (1..1 << 16).contains(n)).map(|n| n as usize);
    if let Some(side) = whole(value) {
        return Ok(if one_is_shorter { vec![side] } else { vec![side; 2] });
    }
    if let Some(edge) = value.get("shortest_edge").filter(|edge| !edge.is_null()) {
        return Ok(vec![whole(edge).ok_or_else(wrong)?]);
    }
    let side = |name: &str| value.get(name).and_then(whole).ok_or_else(wrong);
    Ok(vec![side("height")?, side("width")?])
}

fn square(sides: &[usize]) -> Option<[usize; 2]> {
    match *sides {
        [side] => Some([side; 2]),
        [height, width] => Some([height, width]),
        _ => None,
    }
}

impl Fields<'_> {
    fn is_true(&self, name: &str, default: bool) -> Result<bool, String> {
        if self.get(name).is_some() { self.flag(name) } else { Ok(default) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kinds_of_processors_are_read() {
        let dinov2 = json!({
            "image_processor_type": "BitImageProcessor", "do_resize": true, "size": { "shortest_edge": 256 },
            "resample": 3, "do_center_crop": true, "crop_size": { "height": 224, "width": 224 },
        });
        let wanted =
            Processor { size: Some([224; 2]), resize: vec![256], filter: Some("bicubic"), area: None };
        assert_eq!(read(&dinov2).unwrap(), wanted);
        let vit = json!({ "image_processor_type": "ViTImageProcessor", "size": 384, "resample": 2 });
        let wanted =
            Processor { size: Some([384; 2]), resize: vec![384; 2], filter: Some("bilinear"), area: None };
        assert_eq!(read(&vit).unwrap(), wanted);
        let vit = VitConfig { image_size: 384, ..VitConfig::default() };
        assert_eq!(read(&write(&vit, &wanted)).unwrap(), wanted);
        let timm = write_timm(&vit, &Processor { resize: vec![438], ..wanted.clone() });
        assert_eq!(read_timm(&Fields(&timm), 384).unwrap(), Processor { resize: vec![438], ..wanted });
    }

    #[test]
    fn factors_go_into_means_and_deviations() {
        let made = |config: Value| {
            let mut vit =
                VitConfig { width: 8, layers: 1, heads: 2, patch: 2, image_size: 4, ..VitConfig::default() };
            normalise(&mut vit, &config).map(|()| (vit.mean[0], vit.std[0]))
        };
        let half = json!({ "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25] });
        assert_eq!(made(half.clone()), Ok((0.5, 0.25)));
        let mut bytes = half.clone();
        bytes["do_rescale"] = json!(false);
        assert_eq!(made(bytes), Ok((0.5 / 255.0, 0.25 / 255.0)));
        let mut doubled = half;
        doubled["rescale_factor"] = json!(1.0 / 127.5);
        assert_eq!(made(doubled), Ok((0.25, 0.125)));
        assert_eq!(made(json!({ "do_normalize": false })), Ok((0.0, 1.0)));
    }

    #[test]
    fn limits_of_an_area_are_read_from_either_form() {
        let area = |config: Value| read_area(&config).map(|processor| processor.area);
        let published =
            json!({ "size": { "shortest_edge": 65536, "longest_edge": 16777216 }, "min_pixels": 1 });
        assert_eq!(area(published), Ok(Some([1, 16777216])), "the library's order");
        assert_eq!(area(json!({ "min_pixels": 3136, "max_pixels": 12845056 })), Ok(Some([3136, 12845056])));
        assert_eq!(area(json!({ "patch_size": 16 })), Ok(Some(DEFAULT_AREAS)));
        for (config, wanted) in [
            (json!({ "min_pixels": 5, "max_pixels": 4 }), "least area of an image is 5 pixels"),
            (json!({ "max_pixels": 4 }), "one limit"),
            (
                json!({ "size": { "shortest_edge": "wide", "longest_edge": 4 } }),
                "`size.shortest_edge` is \"wide\"",
            ),
        ] {
            let refused = area(config).unwrap_err();
            assert!(refused.contains(wanted), "{refused}");
        }
    }

    #[test]
    fn steps_that_change_pixels_are_refused() {
        let cases = [
            (json!({ "do_resize": false }), "`do_resize` is false"),
            (json!({ "resample": 0 }), "`resample` is 0"),
            (json!({ "size": { "shortest_edge": 256 }, "do_center_crop": false }), "keep their ratio"),
            (json!({ "size": { "longest_edge": 256 } }), "`size` is"),
            (json!({ "size": 200, "crop_size": 224 }), "larger than its `size`"),
            (json!({ "crop_pct": 0.9 }), "`crop_pct` is 0.9"),
        ];
        for (config, wanted) in cases {
            let refused = read(&config).unwrap_err();
            assert!(refused.contains(wanted), "{refused}");
        }
    }
}
