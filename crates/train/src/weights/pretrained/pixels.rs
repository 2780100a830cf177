//! Image preprocessing: combines the settings of a checkpoint's processor with the config.

use flatout_models::config::Model;
use flatout_models::library::processor::Processor;

use crate::UserError;
use crate::config::{Config, Sight, keys_of};

/// The processor that a config describes.
pub fn processor_of(config: &Config) -> Processor {
    let data = &config.data;
    Processor {
        size: config.model.image_sides(),
        resize: data.resize.clone(),
        filter: Some(data.filter.name()),
        area: token_pixels(&config.model)
            .zip(data.image_tokens)
            .map(|(pixels, tokens)| tokens.map(|tokens| tokens as u64 * pixels)),
    }
}

/// The pixels of an image per token of a text.
fn token_pixels(model: &Model) -> Option<u64> {
    let vision = model.as_qwen3_vl()?;
    Some(((vision.patch * vision.merge) as u64).pow(2))
}

/// Applies the area limits of a checkpoint's processor for images beside a text, rounded inwards to whole tokens; values from the
/// command line take precedence.
pub fn lay_area(config: &mut Config, processor: &Processor, overrides: &[String]) -> Result<(), UserError> {
    if config.sight() != Some(Sight::Images)
        || keys_of(overrides)?.iter().any(|key| key == "data.image_tokens")
    {
        return Ok(());
    }
    if let (Some([least, most]), Some(pixels)) = (processor.area, token_pixels(&config.model)) {
        let least = least.div_ceil(pixels).max(1);
        config.data.image_tokens = Some([least, (most / pixels).max(least)].map(|tokens| tokens as usize));
    }
    config.validate()
}

/// Applies the settings of a checkpoint's processor over those of a recipe; values from the command line take precedence.
/// `takes_size` if images also take the processor's size.
pub fn lay_processor(
    config: &mut Config,
    processor: &Processor,
    overrides: &[String],
    takes_size: bool,
) -> Result<(), UserError> {
    let given = keys_of(overrides)?;
    let is_given = |key: &str| given.iter().any(|given| given == key);
    if let (Some(filter), false) = (processor.filter, is_given("data.filter")) {
        config.data.filter = filter.parse().map_err(UserError)?;
    }
    if let (Some([height, width]), Model::Vit(vit), true) =
        (processor.size, &mut config.model, takes_size && !is_given("model.image_size"))
    {
        (vit.image_size, vit.image_height) = (width, (height != width).then_some(height));
    }
    if is_given("data.centre_crop") {
        config.data.resize.clear();
    } else if !is_given("data.resize")
        && !processor.resize.is_empty()
        && let (Some(made), Some(size)) = (config.model.image_sides(), processor.size)
    {
        config.data.resize = scaled(&processor.resize, size, made);
    }
    config.validate()
}

/// The size that images are scaled to, if they are cropped to a size other than the processor's.
fn scaled(resize: &[usize], from: [usize; 2], to: [usize; 2]) -> Vec<usize> {
    let part =
        |resize: usize, from: usize, to: usize| (resize as f64 * to as f64 / from as f64).round() as usize;
    match *resize {
        [shorter] => vec![part(shorter, from[0].min(from[1]), to[0].min(to[1]))],
        [height, width] => vec![part(height, from[0], to[0]), part(width, from[1], to[1])],
        _ => vec![],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes::resolve;

    #[test]
    fn limits_of_an_area_become_whole_tokens() {
        let tower = "model.rope_sections=[6,5,5] model.vision.width=16 model.vision.layers=1 model.vision.heads=2 model.vision.ffn=16 \
                     model.vision.patch=4 model.vision.image_token=6 model.vision.video_token=7 model.vision.start_token=4 \
                     model.vision.end_token=5 data.task=visual_chat";
        let laid = |more: &[&str], area| {
            let overrides: Vec<String> =
                tower.split_whitespace().chain(more.iter().copied()).map(String::from).collect();
            let mut config = resolve("tiny", &[], &overrides).unwrap();
            lay_area(&mut config, &Processor { area, ..Processor::default() }, &overrides).unwrap();
            (config.data.image_tokens, processor_of(&config).area)
        };
        assert_eq!(laid(&[], Some([4096, 65536])), (Some([64, 1024]), Some([4096, 65536])));
        assert_eq!(laid(&[], Some([65, 190])), (Some([2, 2]), Some([128, 128])));
        assert_eq!(laid(&[], None), (None, None));
        assert_eq!(
            laid(&["data.image_tokens=[4,16]"], Some([4096, 65536])),
            (Some([4, 16]), Some([256, 1024]))
        );
    }

    #[test]
    fn the_command_line_comes_first_then_the_processor_then_the_recipe() {
        let bicubic =
            Processor { size: Some([24; 2]), resize: vec![30], filter: Some("bicubic"), area: None };
        let laid = |overrides: &[&str], takes_size| {
            let overrides: Vec<String> = overrides.iter().map(|word| word.to_string()).collect();
            let mut config = resolve("vision-tiny", &[], &overrides).unwrap();
            lay_processor(&mut config, &bicubic, &overrides, takes_size).unwrap();
            (config.model.image_size().unwrap(), config.data.resize, config.data.filter.name())
        };
        let own = resolve("vision-tiny", &[], &[]).unwrap().model.image_size().unwrap();
        let share = (30.0 * own as f64 / 24.0).round() as usize;
        assert_eq!(laid(&[], false), (own, vec![share], "bicubic"), "training keeps its size");
        assert_eq!(laid(&[], true), (24, vec![30], "bicubic"));
        assert_eq!(laid(&["model.image_size=48"], true), (48, vec![60], "bicubic"));
        assert_eq!(laid(&["data.filter=bilinear", "data.resize=40"], true), (24, vec![40], "bilinear"));
        assert_eq!(laid(&["data.centre_crop=0.5"], true), (24, vec![], "bicubic"));
    }
}
