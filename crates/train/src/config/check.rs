//! Checks of a config's values against their bounds and against one another.

use flatout_data::Tree;
use flatout_data::examples::MOST_FRAMES;
use flatout_ir::passes::adapter::{EMBED, HEAD};
use flatout_models::config::Head;
use flatout_models::decoder::{Attention, DecoderConfig};

use super::pattern::matches;
use super::{
    AdapterKind, Augmentation, Config, Data, MixPart, Paths, ScheduleName, Sight, SourceKind, Task, Unit,
};
use crate::UserError;
use crate::refuse;
use crate::switches::Choose;

/// Row and token indices on the device are 32-bit.
const MAX_ROWS: usize = 1 << 24;
/// Upper bounds beyond any use: batches prepared ahead, threads, parts of a mixture, operations of RandAugment.
const MAX_PREFETCH: usize = 1000;
const MAX_WORKERS: usize = 1024;
const MAX_PARTS: usize = 1000;
const MOST_OPERATIONS: usize = 100;
/// Tokens of an image; no context is as long.
const MAX_IMAGE_TOKENS: usize = 1 << 20;
/// Weights of a mixture; within these bounds its shares are computed without loss of precision.
const WEIGHTS: std::ops::RangeInclusive<f64> = 1e-9..=1e9;

impl Config {
    /// Checks all values; the error is one sentence that names the keys.
    pub fn validate(&self) -> Result<(), UserError> {
        self.model.validate()?;
        self.validate_data()?;
        self.validate_changes()?;
        self.validate_train()?;
        self.validate_preference()?;
        self.adapter.validate()?;
        self.validate_lengths_of_rows()?;
        self.validate_optimizer()?;
        self.validate_schedule()?;
        self.validate_classes()?;
        self.validate_samples()?;
        at_least_one("checkpoint.keep", self.checkpoint.keep)?;
        if self.checkpoint.best && self.eval.rows == 0 {
            refuse!(
                "`checkpoint.best` is true but `eval.rows` is 0: without evaluation no checkpoint is the best"
            );
        }
        at_least_one("train.max_skipped", self.train.max_skipped as usize)?;
        within("log.spike", self.log.spike, 0.0, f64::MAX)?;
        at_least_one("loader.prefetch", self.loader.prefetch)?;
        at_most("loader.prefetch", self.loader.prefetch, MAX_PREFETCH)?;
        at_most("loader.workers", self.loader.workers.given().unwrap_or(0), MAX_WORKERS)?;
        self.validate_track()?;
        at_least_one("log.every", self.log.every as usize)
    }

    /// Checks the keys of `track`. The address is saved and shown, so it must not contain secrets.
    fn validate_track(&self) -> Result<(), UserError> {
        for (key, value) in
            [("experiment_name", &self.track.experiment_name), ("run_name", &self.track.run_name)]
        {
            if value.as_ref().is_some_and(|value| value.trim().is_empty()) {
                refuse!("`track.{key}` is empty: give a name, or leave it out");
            }
        }
        let Some(server) = &self.track.mlflow else { return Ok(()) };
        let host = ["http://", "https://"].iter().find_map(|scheme| server.strip_prefix(scheme));
        let host = host.map(|rest| rest.split('/').next().unwrap_or_default());
        if host.is_some_and(|host| host.contains('@')) {
            refuse!(
                "`track.mlflow` has a name or a password in its address: set MLFLOW_TRACKING_USERNAME and \
                 MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, instead"
            );
        }
        let is_odd = |letter: char| letter.is_whitespace() || letter.is_control() || "?#".contains(letter);
        if host.is_none_or(str::is_empty) || server.contains(is_odd) {
            refuse!(
                "`track.mlflow` is {server:?} and not the address of an MLflow server, such as http://localhost:5000"
            );
        }
        Ok(())
    }

    /// Checks that the run has data to train on. Separate from `validate`, because plans and listings need no data.
    pub fn validate_for_training(&self) -> Result<(), UserError> {
        self.validate_head_and_data()?;
        // Only checked here: the resolved config of a run that three ranks began has three lanes.
        if let Some(lanes) = self.train.lanes.given().filter(|lanes| !lanes.is_power_of_two()) {
            refuse!("`train.lanes` = {lanes} is not a power of two: give 1, 2, 4, 8 ...");
        }
        if self.data.source() != SourceKind::Synthetic && !self.data.has_files() {
            refuse!(
                "`data.path` is not given, and {} trains on text: name a text file or a folder of them, as in \
                 data.path=book.txt",
                if self.recipe.is_empty() { "this recipe" } else { &self.recipe }
            );
        }
        Ok(())
    }

    /// DoRA divides by the lengths of rows, which must not be zero.
    fn validate_lengths_of_rows(&self) -> Result<(), UserError> {
        let is_zero = |model: &DecoderConfig| model.init_residual == 0.0 && model.from.is_none();
        if self.adapter.kind == AdapterKind::Dora && self.model.as_decoder().is_some_and(is_zero) {
            refuse!(
                "`adapter.kind=dora` divides by the lengths of rows, and with `model.init_residual=0` some rows are zero at first: \
                 give model.from or adapter.kind=lora"
            );
        }
        Ok(())
    }

    /// Checks that there is a tokeniser to add tokens to, and that their rows are trained.
    fn validate_new_tokens(&self) -> Result<(), UserError> {
        let tokens = &self.data.new_tokens;
        let Some(decoder) = self.model.as_decoder().filter(|_| !tokens.is_empty()) else {
            return match tokens.is_empty() {
                true => Ok(()),
                false => refuse!(
                    "`data.new_tokens` is given and `model.kind` is {}: only a decoder can grow",
                    self.model.kind()
                ),
            };
        };
        if self.data.tokenizer.is_none() && self.model.from().is_none() {
            refuse!(
                "`data.new_tokens` is given and there is no tokeniser to add them to: give model.from or data.tokenizer"
            );
        }
        if decoder.value_embeddings > 0 {
            refuse!(
                "`data.new_tokens` is given and `model.value_embeddings` is {}: value embeddings cannot grow, so leave \
                 data.new_tokens out",
                decoder.value_embeddings
            );
        }
        let has_own_head = decoder.head == Head::Tokens && !decoder.tied;
        let names = |patterns: &[String], path: &str| patterns.iter().any(|pattern| matches(pattern, path));
        for (name, path) in [("embed", EMBED), ("head", HEAD)].into_iter().take(1 + usize::from(has_own_head))
        {
            if names(&self.train.freeze, path) {
                refuse!(
                    "`train.freeze` names `{path}`, and `data.new_tokens` adds rows to it that must be trained: leave one \
                     of them out"
                );
            }
            if self.adapter.kind != AdapterKind::None && !names(&self.adapter.also_train, path) {
                refuse!(
                    "`data.new_tokens` adds rows to `{path}` that nothing would train beside the adapters: name {name} in \
                     adapter.also_train"
                );
            }
        }
        Ok(())
    }

    fn validate_data(&self) -> Result<(), UserError> {
        let data = &self.data;
        within("data.held_out", data.held_out, 0.0, 1.0)?;
        if data.held_out == 1.0 {
            refuse!("`data.held_out` is 1, which leaves nothing to train on");
        }
        if data.held_out == 0.0 && data.held_out_path.is_none() && self.eval.rows > 0 {
            refuse!(
                "`data.held_out` is 0, so there is nothing to evaluate on: raise it, name files with \
                 data.held_out_path, or give eval.rows=0"
            );
        }
        let names_nothing = |paths: &Paths| paths.0.is_empty() || paths.0.iter().any(String::is_empty);
        if data.path.as_ref().is_some_and(names_nothing) {
            refuse!("`data.path` is empty: name a file");
        }
        self.validate_held_out_path()?;
        if data.tokenizer.as_deref() == Some("") {
            refuse!("`data.tokenizer` is empty: name a file");
        }
        for (key, given) in [
            ("path", data.path.is_some()),
            ("mix", !data.mix.0.is_empty()),
            ("tokenizer", data.tokenizer.is_some()),
            ("new_tokens", !data.new_tokens.is_empty()),
        ] {
            let is_read = ["tokenizer", "new_tokens"].contains(&key) && data.task.unit() != Unit::Documents;
            if given && data.source() == SourceKind::Synthetic && !is_read {
                refuse!(
                    "`data.{key}` is given but the synthetic source reads no file: give data.source=text"
                );
            }
        }
        self.validate_new_tokens()?;
        if data.path.is_some() && !data.mix.0.is_empty() {
            refuse!("`data.path` and `data.mix` are both given: give one of them");
        }
        if data.mix.0.len() > MAX_PARTS {
            refuse!("`data.mix` has {} tables and may have {MAX_PARTS} at most", data.mix.0.len());
        }
        for MixPart { path, weight } in &data.mix.0 {
            if names_nothing(path) {
                refuse!("`data.mix` has a table whose `path` is empty: name a file");
            }
            if !weight.is_finite() || *weight <= 0.0 {
                refuse!("`data.mix` gives {path} the weight {weight}, which must be a number above 0");
            }
            if !WEIGHTS.contains(weight) {
                let (least, most) = (WEIGHTS.start(), WEIGHTS.end());
                refuse!(
                    "`data.mix` gives {path} the weight {weight:e}, which must be from {least:e} to {most:e}"
                );
            }
        }
        self.validate_examples()?;
        within("data.stream_cache_gb", data.stream_cache_gb, 0.0, 1e6)?;
        at_least_one("data.max_document_bytes", data.max_document_bytes)?;
        self.validate_lengths()?;
        let kind = self.model.kind();
        if self.model.as_decoder().is_none() {
            for (key, given) in
                [("document_mask", data.document_mask), ("mean_tokens", data.mean_tokens.is_some())]
            {
                if given {
                    refuse!("`data.{key}` is given and `model.kind` is {kind}: only a decoder has it");
                }
            }
        }
        if let Some(vocab) =
            self.model.vocab().filter(|vocab| data.eos.is_some_and(|eos| eos >= *vocab as u64))
        {
            refuse!("`data.eos` must be below `model.vocab` = {vocab}: lower it");
        }
        Ok(())
    }

    fn validate_lengths(&self) -> Result<(), UserError> {
        let (data, context) = (&self.data, self.model.tokens());
        if let Some(mean) = data.mean_tokens {
            if data.source() != SourceKind::Synthetic {
                refuse!(
                    "`data.mean_tokens` is for synthetic examples, and data.path is given: leave one out"
                );
            }
            if data.task.unit() != Unit::Documents {
                refuse!(
                    "`data.mean_tokens` makes synthetic examples of text, and `data.task` is {}: leave one out",
                    data.task
                );
            }
            if !(2..=context).contains(&mean) {
                refuse!("`data.mean_tokens` is {mean} and must be from 2 to `model.context` = {context}");
            }
        }
        let is_text = data.task.unit() == Unit::Documents && self.model.classes().is_none();
        if !data.lengths.is_empty() && data.mean_tokens.is_none() && is_text {
            refuse!("`data.lengths` is for examples, and rows of text are equally long: leave it out");
        }
        if let Some(len) = data.lengths.iter().find(|len| !(1..=context).contains(*len)) {
            refuse!("`data.lengths` has {len}, and each must be from 1 to `model.context` = {context}");
        }
        for (key, counts) in [("images", &data.images), ("patches", &data.patches)] {
            if !counts.is_empty() && counts.len() != data.lengths.len() {
                refuse!(
                    "`data.{key}` has {} numbers and `data.lengths` {}: give one for each share of the examples",
                    counts.len(),
                    data.lengths.len()
                );
            }
        }
        if Tree::list(&data.trees, &[]).is_some() && Tree::list(&data.trees, &data.tree_images).is_none() {
            refuse!(
                "`data.tree_images` must have four numbers for each tree of `data.trees`: images and patches of the prefix, \
                 images and patches after it"
            );
        }
        if Tree::list(&data.trees, &[]).is_none() {
            refuse!(
                "`data.trees` must have four numbers per tree: examples, tokens of their prefix, tokens after it (at least one per \
                 example), and how many of these are trained on"
            );
        }
        Ok(())
    }

    /// Checks `data.held_out_path`, which excludes every other way to hold out data.
    fn validate_held_out_path(&self) -> Result<(), UserError> {
        let data = &self.data;
        let Some(paths) = &data.held_out_path else { return Ok(()) };
        if paths.0.is_empty() || paths.0.iter().any(String::is_empty) {
            refuse!("`data.held_out_path` is empty: name a file");
        }
        if paths.0.iter().any(|path| path == "-") {
            refuse!("`data.held_out_path` is standard input, which only data.path may be: name a file");
        }
        if self.data.source() == SourceKind::Synthetic {
            refuse!(
                "`data.held_out_path` is given and the training data is synthetic: give data.path, or leave it out"
            );
        }
        if self.train.folds.is_some() {
            refuse!(
                "`train.folds` and `data.held_out_path` are both given: folds are parts of data.path; leave one out"
            );
        }
        if data.group.is_some() {
            refuse!(
                "`data.group` and `data.held_out_path` are both given, and files divide the rows already: leave one out"
            );
        }
        Ok(())
    }

    /// Checks the keys of tasks other than text.
    fn validate_examples(&self) -> Result<(), UserError> {
        let data = &self.data;
        let toml = |data| toml::Value::try_from(data).expect("a section has a TOML form");
        let (written, defaults) = (toml(data), toml(&Data::default()));
        for (key, of) in Task::own_keys() {
            if written.get(key) != defaults.get(key) && !self.reads(key) {
                return Err(UserError(self.unread(key, of)));
            }
        }
        if data.task.unit() == Unit::Documents {
            return Ok(());
        }
        if !data.mix.0.is_empty() && self.sight() != Some(Sight::Frames) {
            refuse!(
                "`data.mix` is for texts and for samples with frames, and `data.task` is {}: list the files in data.path",
                data.task
            );
        }
        let context = self.model.tokens();
        if let Some(most) = data.max_tokens
            && !(2..=context).contains(&most)
        {
            refuse!("`data.max_tokens` is {most} and must be from 2 to `model.context` = {context}");
        }
        if let Some(date) = &data.date
            && flatout_data::examples::Date::parse(date).is_none()
        {
            refuse!("`data.date` is {date}, which is not a date: write it as 2025-01-31");
        }
        self.validate_sight()?;
        self.validate_frames()?;
        self.validate_views()?;
        at_least_one("data.max_pixels", data.max_pixels as usize)?;
        at_least_one("data.synthetic_rows", data.synthetic_rows as usize)
    }

    /// Checks the keys of images beside texts and of the answers about them.
    fn validate_sight(&self) -> Result<(), UserError> {
        let data = &self.data;
        if let Some([least, most]) = data.image_tokens
            && !(1 <= least && least <= most && most <= MAX_IMAGE_TOKENS)
        {
            refuse!(
                "`data.image_tokens` is [{least}, {most}] and not the fewest and the most tokens of an image, in order, from 1 to \
                 {MAX_IMAGE_TOKENS}"
            );
        }
        if data.vision_cache.as_deref() == Some("") {
            refuse!("`data.vision_cache` is empty: name a folder");
        }
        if data.vision_cache.is_some() && self.switches.data.visual_tokens.percent() < 100 {
            refuse!(
                "`visual_tokens` chooses the tokens of an image by its pixels, and with `data.vision_cache` none are decoded: \
                 leave one of them out"
            );
        }
        if let Some([open, close]) = &data.answer_marks
            && (open.is_empty() || close.is_empty() || open == close)
        {
            refuse!("`data.answer_marks` must be two different texts, such as [\"<ANS>\", \"</ANS>\"]");
        }
        Ok(())
    }

    /// Checks that frames and text of a sample fit into the context, and how examples are kept together.
    fn validate_frames(&self) -> Result<(), UserError> {
        let (data, context) = (&self.data, self.model.tokens());
        if self.sight() != Some(Sight::Frames) {
            return Ok(());
        }
        at_least_one("data.still_frames", data.still_frames)?;
        at_most("data.still_frames", data.still_frames, MOST_FRAMES)?;
        let text = data.max_tokens.unwrap_or(2);
        if text + MOST_FRAMES > context {
            refuse!(
                "a sample has up to {MOST_FRAMES} frames, a token each, and up to {text} tokens of text (`data.max_tokens`), and \
                 `model.context` is {context}: raise it, or lower data.max_tokens"
            );
        }
        let keeps_together = self.switches.data.shared_prefix == Choose::On && self.together() == 1;
        if keeps_together && !data.mix.0.is_empty() {
            refuse!(
                "`shared_prefix=on` keeps examples with the same beginning together, and `data.mix` draws examples by shares: leave \
                 one out"
            );
        }
        Ok(())
    }

    /// Checks the keys of crops and augmentation.
    fn validate_views(&self) -> Result<(), UserError> {
        let data = &self.data;
        for (key, [least, most], bound) in [
            ("crop_scale", data.crop_scale, 1.0),
            ("crop_ratio", data.crop_ratio, 100.0),
            ("erase_area", data.erase_area, 1.0),
            ("erase_ratio", data.erase_ratio, 100.0),
        ] {
            if !(least > 0.0 && least <= most && most <= bound) {
                refuse!(
                    "`data.{key}` is [{least}, {most}] and not two numbers above 0, in order, up to {bound}"
                );
            }
        }
        let is_set =
            |extents: &[usize]| extents.len() == 3 && extents.iter().all(|n| (1..1 << 31).contains(n));
        if !data.decoded.is_empty() && !is_set(&data.decoded) {
            refuse!(
                "`data.decoded` is {:?} and not the number of images, their rows and their columns",
                data.decoded
            );
        }
        within("data.flip", data.flip, 0.0, 1.0)?;
        at_least_one("data.augment_ops", data.augment_ops)?;
        at_most("data.augment_ops", data.augment_ops, MOST_OPERATIONS)?;
        within("data.augment_magnitude", data.augment_magnitude, 0.0, 10.0)?;
        within("data.augment_noise", data.augment_noise, 0.0, 10.0)?;
        within("data.augment_probability", data.augment_probability, 0.0, 1.0)?;
        within("data.erase", data.erase, 0.0, 1.0)?;
        within("data.centre_crop", data.centre_crop, 0.01, 1.0)?;
        self.validate_resize()
    }

    /// Refuses augmentation for tasks other than images.
    fn validate_changes(&self) -> Result<(), UserError> {
        let data = &self.data;
        let is_changed = data.augment != Augmentation::None || data.erase > 0.0;
        if is_changed && data.task != Task::Images {
            refuse!(
                "`data.augment` and `data.erase` change the images of data.task=images, and `data.task` is {}: leave them out",
                data.task
            );
        }
        Ok(())
    }

    /// Checks that the model's images fit into the size that images are scaled to.
    fn validate_resize(&self) -> Result<(), UserError> {
        let resize = &self.data.resize;
        let Some([height, width]) = self.model.image_sides() else { return Ok(()) };
        let fits = match resize[..] {
            [] => true,
            [shorter] => shorter >= height.max(width),
            [rows, columns] => rows >= height && columns >= width,
            _ => refuse!("`data.resize` is {resize:?} and not the shorter side, or rows and columns"),
        };
        if !fits || resize.iter().any(|side| *side > 1 << 16) {
            refuse!(
                "`data.resize` is {resize:?}, and the model's images of {height} x {width} pixels are cut out of it: give at \
                 least as many, and at most 65536"
            );
        }
        Ok(())
    }

    fn validate_train(&self) -> Result<(), UserError> {
        let train = &self.train;
        match (train.steps, train.epochs) {
            (None, None) => refuse!("neither `train.steps` nor `train.epochs` is given: give one of them"),
            (Some(_), Some(_)) => {
                refuse!("`train.steps` and `train.epochs` are both given: give one of them")
            }
            (Some(0), _) => refuse!("`train.steps` is 0 and must be at least 1"),
            (_, Some(0)) => refuse!("`train.epochs` is 0 and must be at least 1"),
            _ => {}
        }
        let batch = train.batch;
        at_least_one("train.batch", batch)?;
        at_most("train.batch", batch, MAX_ROWS)?;
        if let Some(accumulate) = train.accumulate {
            if train.micro_batch.given().is_some() {
                refuse!("`train.micro_batch` and `train.accumulate` are both given: give one of them");
            }
            at_least_one("train.accumulate", accumulate)?;
            if !batch.is_multiple_of(accumulate) {
                refuse!(
                    "`train.accumulate` = {accumulate} does not divide `train.batch` = {batch}: change one of them"
                );
            }
        }
        if let Some(rows) = train.micro_batch() {
            at_least_one("train.micro_batch", rows)?;
            // With several lanes, the last micro-batch of each is padded.
            let has_one_lane = train.lanes.given().is_none_or(|lanes| lanes == 1);
            if has_one_lane && !batch.is_multiple_of(rows) {
                refuse!(
                    "`train.micro_batch` = {rows} does not divide `train.batch` = {batch}: change one of them"
                );
            }
        }
        if let Some(lanes) = train.lanes.given() {
            at_least_one("train.lanes", lanes)?;
            if lanes > batch {
                refuse!(
                    "`train.lanes` = {lanes} is more than the rows of `train.batch` = {batch}: some lanes would have none"
                );
            }
        }
        let context = self.model.tokens();
        for (key, rows) in
            [("train.micro_batch", train.micro_batch()), ("eval.micro_batch", self.eval.micro_batch.given())]
        {
            if rows.is_some_and(|rows| rows.saturating_mul(context) > i32::MAX as usize) {
                refuse!(
                    "`{key}` rows of {context} tokens (`model.context`) are more tokens than 2147483647: make it smaller"
                );
            }
        }
        let of_images =
            [("label_smoothing", train.label_smoothing), ("mixup", train.mixup), ("cutmix", train.cutmix)];
        if let Some((key, _)) = of_images.iter().find(|(_, value)| *value != 0.0)
            && self.model.image_size().is_none()
        {
            refuse!(
                "`train.{key}` is given and `model.kind` is {}: only a model of images has it",
                self.model.kind()
            );
        }
        if !(0.0..1.0).contains(&train.label_smoothing) {
            refuse!(
                "`train.label_smoothing` is {} and must be at least 0 and below 1",
                train.label_smoothing
            );
        }
        if !(0.0..1.0).contains(&train.ema) {
            refuse!(
                "`train.ema` is {} and must be at least 0 and below 1: 0.9999 averages over about 10,000 updates",
                train.ema
            );
        }
        within("train.mixup", train.mixup, 0.0, 1000.0)?;
        within("train.cutmix", train.cutmix, 0.0, 1000.0)?;
        self.validate_groups()
    }

    fn validate_windows(&self) -> Result<(), UserError> {
        const MOST: usize = 16;
        let windows = &self.schedule.windows;
        if windows.is_empty() {
            return Ok(());
        }
        if windows.len() > MOST {
            refuse!(
                "`schedule.windows` has {} windows and may have {MOST} at most: every one has plans of its own",
                windows.len()
            );
        }
        if windows.contains(&0) {
            refuse!(
                "`schedule.windows` has a window of 0 tokens: a token sees at least itself, so give 1 or more"
            );
        }
        let sees_back = self.model.as_decoder().is_some_and(|model| model.attention == Attention::Causal);
        if !sees_back || self.model.has_tower() {
            refuse!("`schedule.windows` is for decoders of text with causal attention: leave it out");
        }
        let has_lengths = self.data.mean_tokens.is_some() || !self.data.lengths.is_empty();
        if self.data.task != Task::Text || has_lengths {
            refuse!(
                "`schedule.windows` is for rows of one length, which data.task=text without lengths has: leave it out"
            );
        }
        Ok(())
    }

    fn validate_schedule(&self) -> Result<(), UserError> {
        let schedule = &self.schedule;
        within("schedule.final_ratio", schedule.final_ratio, 0.0, 1.0)?;
        within("schedule.warmup_share", schedule.warmup_share.unwrap_or(0.0), 0.0, 1.0)?;
        if schedule.decay_steps.is_some() && schedule.name != ScheduleName::Wsd {
            refuse!(
                "`schedule.decay_steps` is given but the schedule is {}: only wsd has it; drop it with \
                 schedule.decay_steps=none",
                schedule.name
            );
        }
        self.validate_windows()?;
        let converges = schedule.name == ScheduleName::Converge;
        match schedule.final_lr {
            None if converges => {
                refuse!(
                    "`schedule.name` is converge and `schedule.final_lr` is missing: give the learning rate that all groups end at"
                );
            }
            Some(_) if !converges => {
                refuse!(
                    "`schedule.final_lr` is given but the schedule is {}: only converge has it; the others end at \
                     `schedule.final_ratio` of their peak, or at `final_lr` of a group; drop it with schedule.final_lr=none",
                    schedule.name
                );
            }
            given => within("schedule.final_lr", given.unwrap_or(0.0), 0.0, f64::MAX)?,
        }
        let Some(horizon) = schedule.horizon_steps.or(self.train.steps) else { return Ok(()) };
        if horizon == 0 {
            refuse!("`schedule.horizon_steps` is 0 and must be at least 1");
        }
        let whose = if schedule.horizon_steps.is_some() { "schedule.horizon_steps" } else { "train.steps" };
        let warmup = schedule.warmup_steps;
        if warmup > horizon {
            refuse!("`schedule.warmup_steps` = {warmup} is more than `{whose}` = {horizon}: lower it");
        }
        if let Some(decay) = schedule.decay_steps
            && warmup.saturating_add(decay) > horizon
        {
            refuse!(
                "`schedule.warmup_steps` = {warmup} and `schedule.decay_steps` = {decay} are more than `{whose}` = \
                 {horizon}: lower one of them"
            );
        }
        Ok(())
    }
}

pub(super) fn at_least_one(key: &str, value: usize) -> Result<(), UserError> {
    if value == 0 {
        refuse!("`{key}` is 0 and must be at least 1");
    }
    Ok(())
}

pub(super) fn at_most(key: &str, value: usize, most: usize) -> Result<(), UserError> {
    if value > most {
        refuse!("`{key}` is {value} and may be {most} at most");
    }
    Ok(())
}

pub(super) fn within(key: &str, value: f64, least: f64, most: f64) -> Result<(), UserError> {
    if !(least..=most).contains(&value) {
        let bounds =
            if most == f64::MAX { format!("at least {least}") } else { format!("from {least} to {most}") };
        refuse!("`{key}` is {value} and must be {bounds}");
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use crate::recipes::resolve;

    pub fn refused(overrides: &str) -> String {
        let overrides: Vec<String> = overrides.split(' ').map(String::from).collect();
        resolve("tiny", &[], &overrides).expect_err(&overrides.join(" ")).0
    }

    #[test]
    fn contradicting_values_are_refused() {
        let lanes = resolve("tiny", &[], &["train.lanes=6".into()]).expect("such a run can be resumed");
        let sentence = lanes.validate_for_training().expect_err("but not begun").0;
        assert!(sentence.starts_with("`train.lanes` = 6 is not a power of two"), "{sentence}");
        let cases = [
            ("train.lanes=16 batch=8", "more than the rows of `train.batch` = 8"),
            ("batch=32 micro_batch=5", "`train.micro_batch` = 5 does not divide `train.batch` = 32"),
            ("batch=32 accumulate=5", "`train.accumulate` = 5 does not divide `train.batch` = 32"),
            ("accumulate=0", "`train.accumulate` is 0"),
            ("batch=0", "`train.batch` is 0"),
            ("steps=0", "`train.steps` is 0"),
            ("steps=none", "neither `train.steps` nor `train.epochs`"),
            ("steps=10 epochs=1", "are both given"),
            ("micro_batch=2 accumulate=2 batch=8", "`train.batch` is 8: leave one of them out"),
            ("steps=10 warmup_steps=11", "`schedule.warmup_steps` = 11 is more than `train.steps` = 10"),
            ("decay_steps=5", "only wsd has it"),
            ("schedule.name=wsd steps=10 warmup_steps=6 decay_steps=5", "are more than `train.steps` = 10"),
            ("horizon_steps=0", "`schedule.horizon_steps` is 0"),
            ("lr=-1", "`optimizer.lr` is -1"),
            ("lr=0", "must be a number above 0"),
            ("betas=[0.9,1.0]", "`optimizer.betas` has 1"),
            ("clip=-1", "`optimizer.clip` is -1 and must be at least 0"),
            ("final_ratio=2", "`schedule.final_ratio` is 2 and must be from 0 to 1"),
            ("held_out=1", "nothing to train on"),
            ("held_out=0", "nothing to evaluate on"),
            ("data.held_out_path=v.txt", "the training data is synthetic"),
            ("data.path=a.txt data.held_out_path=", "`data.held_out_path` is empty"),
            ("data.path=a.txt data.held_out_path=-", "is standard input"),
            (
                "data.path=a.csv data.task=classes head=classes model.classes=2 folds=3 data.held_out_path=v.csv",
                "`train.folds` and `data.held_out_path` are both given",
            ),
            (
                "data.path=a.jsonl data.task=chat data.group=id data.held_out_path=v.jsonl",
                "`data.group` and `data.held_out_path` are both given",
            ),
            ("data.source=synthetic data.path=a.txt", "reads no file"),
            ("adapter.kind=dora model.init_residual=0", "divides by the lengths of rows"),
            ("data.path=", "`data.path` is empty"),
            ("tokenizer=t.json", "`data.tokenizer` is given but the synthetic source"),
            ("data.template=chatml", "`data.template` is given but `data.task` is text: give data.task=chat"),
            (
                "data.task=chat data.label=y",
                "`data.label` is given but `data.task` is chat: give data.task=classes",
            ),
            ("data.task=chat data.date=tomorrow", "`data.date` is tomorrow, which is not a date"),
            ("data.task=classes data.max_tokens=1", "`data.max_tokens` is 1 and must be from 2 to"),
            ("data.task=classes data.max_tokens=100000", "`model.context` = "),
            (
                "data.task=chat data.image_tokens=[4,16]",
                "`data.image_tokens` is given but `data.task` is chat: give data.task=visual_chat",
            ),
            (
                "data.task=text data.answer_marks=[\"<A>\",\"</A>\"]",
                "`data.answer_marks` is given but `data.task` is text: give data.task=visual_chat",
            ),
            (
                "data.task=chat data.vision_cache=features",
                "`data.vision_cache` is given but `data.task` is chat: give data.task=visual_chat",
            ),
            ("data.task=visual_chat data.vision_cache=''", "`data.vision_cache` is empty"),
            (
                "data.task=visual_chat data.vision_cache=features visual_tokens=50%",
                "`visual_tokens` chooses the tokens of an image by its pixels",
            ),
            ("data.task=visual_chat data.image_tokens=[16,4]", "`data.image_tokens` is [16, 4] and not"),
            ("data.task=visual_chat data.image_tokens=[0,4]", "`data.image_tokens` is [0, 4] and not"),
            ("data.task=visual_chat data.answer_marks=[\"a\",\"a\"]", "must be two different texts"),
            ("data.task=visual_chat data.label=y", "`data.label` is given but `data.task` is visual_chat"),
            ("data.task=chat data.mix=[{path=\"a.jsonl\"}]", "`data.mix` is for texts"),
            ("keep=0", "`checkpoint.keep` is 0"),
            ("checkpoint.best=true eval.rows=0", "without evaluation no checkpoint is the best"),
            ("max_skipped=0", "`train.max_skipped` is 0"),
            ("log.spike=-1", "`log.spike` is -1 and must be at least 0"),
            ("prefetch=0", "`loader.prefetch` is 0"),
            ("prefetch=1000000000000", "`loader.prefetch` is 1000000000000 and may be 1000 at most"),
            ("loader.workers=100000", "`loader.workers` is 100000 and may be 1024 at most"),
            ("data.mix=[{path=\"a\",weight=1e300},{path=\"b\"}]", "the weight 1e300, which must be from"),
            ("data.mix=[{path=\"a\",weight=1e-300},{path=\"b\"}]", "the weight 1e-300, which must be from"),
            ("log.every=0", "`log.every` is 0"),
            ("track.mlflow=localhost:5000", "`track.mlflow` is \"localhost:5000\" and not the address"),
            ("track.mlflow=http://", "and not the address of an MLflow server"),
            ("track.mlflow=http://a/?b", "and not the address of an MLflow server"),
            ("track.mlflow=http://me:secret@a", "set MLFLOW_TRACKING_USERNAME"),
            ("track.experiment_name=''", "`track.experiment_name` is empty"),
            ("heads=3 kv_heads=2 head_size=8", "does not divide `model.heads`"),
            ("batch=16777216 micro_batch=16777216", "are more tokens than"),
            ("train.groups=[{paths=[]}]", "`paths` is empty"),
            ("train.groups=[{paths=[\"embed\"],name=\"\"}]", "`name` is empty"),
            (
                "train.groups=[{paths=[\"embed\"],lr=0.0}]",
                "`train.groups.lr` is 0 and must be a number above 0",
            ),
            ("train.groups=[{paths=[\"embed\"],final_lr=-1.0}]", "`train.groups.final_lr` is -1"),
            ("train.groups=[{paths=[\"embed\"],lr=1e-3,lr_scale=0.5}]", "give `lr` instead"),
            (
                "train.groups=[{paths=[\"embed\"],final_lr=1e-3}] schedule.name=constant",
                "the schedule is constant",
            ),
            (
                "train.groups=[{paths=[\"a\"],lr=1e-3},{paths=[\"a\"],lr=1e-4}]",
                "two learning rates named `a`",
            ),
            ("train.groups=[{paths=[\"a\"],lr=1e-3,name=\"base\"}]", "two learning rates named `base`"),
            ("schedule.name=converge", "`schedule.final_lr` is missing"),
            ("schedule.final_lr=1e-4", "only converge has it"),
            ("schedule.name=converge schedule.final_lr=-1", "`schedule.final_lr` is -1"),
            (
                "train.groups=[{paths=[\"embed\"],lr_scale=0.5}] schedule.name=converge schedule.final_lr=1e-4",
                "converge brings all groups to one learning rate",
            ),
            ("adapter.kind=lora adapter.rank=0", "`adapter.rank` is 0"),
            ("adapter.kind=lora adapter.alpha=0", "`adapter.alpha` is 0 and must be a number above 0"),
            (
                "adapter.kind=lora adapter.dropout=1",
                "`adapter.dropout` is 1 and must be at least 0 and below 1",
            ),
            ("adapter.kind=lora adapter.paths=[]", "`adapter.paths` is empty"),
            ("adapter.also_train=head", "`adapter.also_train` is given but `adapter.kind` is none"),
            ("adapter.kind=lora adapter.groups=[{name=\"a.b\",paths=[\"layers\"]}]", "the name `a.b`"),
            (
                "adapter.kind=lora adapter.groups=[{paths=[]}]",
                "`adapter.groups` has a table whose `paths` is empty",
            ),
            ("train.groups=[{paths=[\"a\"],lr_scale=-1.0}]", "`train.groups.lr_scale` is -1"),
        ];
        for (overrides, words) in cases {
            let sentence = refused(overrides);
            assert!(sentence.contains(words), "{overrides}: {sentence:?} lacks {words:?}");
            assert!(!sentence.contains('\n') && !sentence.contains("  "), "{sentence:?}");
        }
    }

    #[test]
    fn a_run_on_text_needs_a_path_and_a_plan_does_not() {
        let config = resolve("pretrain-226m", &[], &[]).unwrap();
        let sentence = config.validate_for_training().unwrap_err().0;
        assert!(
            sentence.contains("`data.path` is not given, and pretrain-226m trains on text"),
            "{sentence}"
        );
        let config = resolve("pretrain-226m", &[], &["data.path=book.txt".into()]).unwrap();
        assert_eq!(config.validate_for_training(), Ok(()));
        let own_text = resolve("tiny", &[], &["data.path=book.txt".into()]).unwrap();
        assert_eq!(own_text.data.source(), super::SourceKind::Text);
    }
}
