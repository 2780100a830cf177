//! Augmentation of training images: converts the keys of RandAugment and random erasing for the image loader.

use flatout_data::images::{Changes, Erasing, RandAugment};

use crate::config::{Augmentation, Config};

/// The augmentation that a config asks for.
pub fn changes(config: &Config) -> Changes {
    let data = &config.data;
    let [mean, deviation] = config.model.normalisation().unwrap_or_default();
    let pair = |[least, most]: [f64; 2]| (least, most);
    let rand_augment = RandAugment {
        operations: data.augment_ops,
        probability: data.augment_probability,
        magnitude: data.augment_magnitude,
        noise: data.augment_noise,
        fill: mean.map(|mean| (255.0 * mean).round() as u8),
    };
    let erasing = Erasing {
        probability: data.erase,
        area: pair(data.erase_area),
        ratio: pair(data.erase_ratio),
        with: data.erase_with,
        mean,
        deviation,
    };
    Changes {
        rand_augment: (data.augment == Augmentation::RandAugment).then_some(rand_augment),
        erasing: (data.erase > 0.0).then_some(erasing),
    }
}

/// The augmentation in words, if there is any.
pub fn words(config: &Config) -> Option<String> {
    let Changes { rand_augment, erasing } = changes(config);
    let rand_augment = rand_augment.map(|rand| {
        let plural = if rand.operations == 1 { "" } else { "s" };
        format!("RandAugment ({} operation{plural} of magnitude {})", rand.operations, rand.magnitude)
    });
    let erasing =
        erasing.map(|erasing| format!("random erasing (of {}% of images)", 100.0 * erasing.probability));
    let words: Vec<String> = [rand_augment, erasing].into_iter().flatten().collect();
    (!words.is_empty()).then(|| words.join(" and "))
}
