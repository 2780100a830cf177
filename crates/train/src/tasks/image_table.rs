//! Keeps a small set of images on the device: resolves `image_table` for a config, and writes the table.

use flatout_data::images::Filter;
use flatout_ir::Target;
use flatout_models::images::CHANNELS;

use super::augmentation;
use crate::UserError;
use crate::config::{Config, SourceKind, Task};
use crate::refuse;
use crate::switches::data::IMAGE_TABLE;
use crate::switches::{Choose, Chosen};

/// Limits of `auto`: a table takes at most this many bytes, and at most one part in this many of the device's memory.
const AUTO_BYTES: u64 = 1 << 30;
const AUTO_PART: u64 = 16;

/// Number of training images, their rows and columns, if they are stored decoded and have one size. For files this is known only
/// once they are open. The device resizes only with the bilinear filter.
pub fn extents(config: &Config) -> Option<[usize; 3]> {
    let data = &config.data;
    if data.task != Task::Images {
        return None;
    }
    if data.filter != Filter::Bilinear {
        return None;
    }
    let [height, width] = config.model.image_sides()?;
    match data.decoded.as_slice() {
        [images, rows, columns] => Some([*images, *rows, *columns]),
        _ if data.source() == SourceKind::Synthetic => Some([data.synthetic_rows as usize, height, width]),
        _ => None,
    }
}

/// The table that training reads, if the settled switch keeps one.
pub fn kept(config: &Config) -> Option<[usize; 3]> {
    extents(config).filter(|_| config.switches.data.image_table == Choose::On)
}

/// The config with the switch settled for a target, and the choice of `auto`.
pub(crate) fn settle(config: &Config, target: &Target) -> Result<(Config, Option<Chosen>), UserError> {
    let mut settled = config.clone();
    let (mut chosen, changed) = (None, augmentation::words(config));
    settled.switches.data.image_table = match (config.switches.data.image_table, extents(config)) {
        (Choose::On, None) if config.data.task != Task::Images => {
            refuse!("`image_table=on` has nothing to keep: `data.task` is {}", config.data.task)
        }
        (Choose::On, None) if config.data.filter != Filter::Bilinear => refuse!(
            "`image_table=on` cuts images with the bilinear filter, and `data.filter` is {}: leave one of them out",
            config.data.filter
        ),
        (asked, None) => asked,
        (Choose::On, Some(_)) if changed.is_some() => refuse!(
            "`image_table=on` cuts images on the device, and {} needs their pixels in the loader: leave one of them out",
            changed.unwrap_or_default()
        ),
        (Choose::Auto, Some(extents)) => {
            let (value, why) = match &changed {
                Some(changed) => (Choose::Off, format!("{changed} needs pixels in the loader's threads")),
                None => choice(extents, target),
            };
            chosen = Some(Chosen { switch: IMAGE_TABLE.name, value: value.to_string(), why });
            value
        }
        (asked, Some(_)) => asked,
    };
    Ok((settled, chosen))
}

fn choice(extents: [usize; 3], target: &Target) -> (Choose, String) {
    let bytes = extents.iter().product::<usize>() as u64 * CHANNELS as u64;
    let mib = bytes as f64 / (1u64 << 20) as f64;
    if target.name == "cpu" {
        return (
            Choose::Off,
            "on the CPU pixels cross no bus, and the loader cuts them beside the step".into(),
        );
    }
    if bytes > AUTO_BYTES || bytes > target.memory_bytes / AUTO_PART {
        let most = AUTO_BYTES.min(target.memory_bytes / AUTO_PART) >> 20;
        return (Choose::Off, format!("{mib:.0} MiB of images are more than the {most} MiB it keeps"));
    }
    (Choose::On, format!("{mib:.1} MiB of images stay on the device, and six numbers an image cross the bus"))
}

/// Refuses a request that turns out to be impossible once the images are open.
pub fn check(config: &Config) -> Result<(), UserError> {
    let is_asked = config.switches.data.image_table == Choose::On && config.data.task == Task::Images;
    if is_asked && extents(config).is_none() {
        refuse!(
            "`image_table=on` cannot run: the images of {} lie encoded and may be of any size, and only CIFAR's files and \
             the synthetic set lie decoded; leave it out",
            config.data.named()
        );
    }
    Ok(())
}

/// Settles the switch for measurements with random images, where there is nothing to keep.
pub fn without(config: &mut Config) -> Result<(), UserError> {
    if config.switches.data.image_table == Choose::On {
        refuse!("`image_table=on` has nothing to keep: no data is named; give data.path, or leave it out");
    }
    config.switches.data.image_table = Choose::Off;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes;
    use crate::resolve::compile::compile;
    use crate::switches::active;

    fn config(words: &[&str]) -> Config {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        recipes::resolve("vision-tiny", &[], &words).expect("a config")
    }

    fn gpu() -> Target {
        Target { name: "h200".into(), memory_bytes: 1 << 33, ..flatout_ir::target::paper() }
    }

    #[test]
    fn auto_keeps_what_is_small_on_a_gpu_and_says_why() {
        let chosen = |words: &[&str], target: &Target| {
            let (settled, chosen) = settle(&config(words), target).unwrap();
            let chosen = chosen.expect("auto chooses");
            assert_eq!(settled.switches.data.image_table.to_string(), chosen.value);
            (chosen.value, chosen.why)
        };
        let (value, why) = chosen(&["data.synthetic_rows=1000"], &gpu());
        assert!(value == "on" && why.starts_with("2.9 MiB of images stay"), "{why}");
        let (value, why) = chosen(&["data.synthetic_rows=180000"], &gpu());
        assert!(value == "off" && why.contains("more than the 512 MiB"), "{why}");
        assert_eq!(chosen(&[], &crate::resolve::compile::target()).0, "off");
        let (value, why) = chosen(&["data.synthetic_rows=1000", "data.augment=randaugment"], &gpu());
        assert!(
            value == "off" && why.starts_with("RandAugment (2 operations of magnitude 9) needs"),
            "{why}"
        );
        let (value, why) = chosen(&["data.synthetic_rows=1000", "data.erase=0.25"], &gpu());
        assert!(value == "off" && why.contains("random erasing (of 25% of images)"), "{why}");
        let refused = settle(&config(&["data.erase=0.1", "image_table=on"]), &gpu()).unwrap_err().to_string();
        assert!(refused.contains("leave one of them out"), "{refused}");
        // Nothing is known about files that are not open.
        let files = config(&["data.path=x", "image_table=on"]);
        assert_eq!(extents(&files), None);
        assert!(check(&files).unwrap_err().to_string().contains("lie encoded"));
    }

    #[test]
    fn a_plan_counts_the_table_and_the_table_is_read_from_the_plan() {
        let state = |words: &[&str], target: &Target| {
            let compiled = compile(&config(words), target).unwrap();
            let active =
                active::active(&compiled.plans, target, active::Prepared::settled(&compiled.settled));
            (active["image_table"].clone(), compiled.plans.categories()["inputs"])
        };
        let words = ["data.synthetic_rows=1000", "train.micro_batch=16"];
        let of = |value: &str| state(&[&words[..], &[value]].concat(), &crate::resolve::compile::target());
        let (on, off) = (of("image_table=on"), of("image_table=off"));
        assert_eq!((on.0.as_str(), off.0.as_str()), ("on", "off"));
        let (table, pixels, parts) = (1000 * 32 * 32 * 3, 16 * 32 * 32 * 3, 16 * 6 * 4);
        assert!(on.1.abs_diff(off.1 + table + parts - pixels) < 256, "{on:?} and {off:?}");
        assert_eq!(state(&words, &gpu()).0, "on");
    }
}
