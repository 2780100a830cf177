//! Recipes: found by name or path, extended, combined with presets and overrides into one config.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use flatout_data::Vocabulary;
use flatout_models::config::{DecoderConfig, Model};
use flatout_runtime::cuda::gpus::{self, Gpu};
use serde_json::json;
use toml::{Table, Value};

use crate::config::{Config, Layers, SourceKind, Task, parse, suggestion};
use crate::refuse;
use crate::resolve::groups;
use crate::tasks;
use crate::weights::peft::Peft;
use crate::weights::pretrained::{self, Description};
use crate::{Failure, UserError};

/// A TOML file that is part of the program.
#[derive(Clone, Copy, Debug)]
pub struct Embedded {
    pub name: &'static str,
    pub text: &'static str,
}

const RECIPES: &[Embedded] = &[
    Embedded { name: "tiny", text: include_str!("../../../recipes/tiny.toml") },
    Embedded { name: "pretrain-226m", text: include_str!("../../../recipes/pretrain-226m.toml") },
    Embedded { name: "gpt2-124m", text: include_str!("../../../recipes/gpt2-124m.toml") },
    Embedded { name: "gpt2-speedrun", text: include_str!("../../../recipes/gpt2-speedrun.toml") },
    Embedded { name: "smollm2-135m", text: include_str!("../../../recipes/smollm2-135m.toml") },
    Embedded { name: "smollm2-360m", text: include_str!("../../../recipes/smollm2-360m.toml") },
    Embedded { name: "gemma3-1b-pairs", text: include_str!("../../../recipes/gemma3-1b-pairs.toml") },
    Embedded { name: "qwen3-vl-2b-vqa", text: include_str!("../../../recipes/qwen3-vl-2b-vqa.toml") },
    Embedded { name: "qwen3-vl-4b-vqa", text: include_str!("../../../recipes/qwen3-vl-4b-vqa.toml") },
    Embedded { name: "qwen3-vl-8b-vqa", text: include_str!("../../../recipes/qwen3-vl-8b-vqa.toml") },
    Embedded { name: "qwen3-vl-2b-dpo", text: include_str!("../../../recipes/qwen3-vl-2b-dpo.toml") },
    Embedded { name: "fvlm-135m-align", text: include_str!("../../../recipes/fvlm-135m-align.toml") },
    Embedded { name: "fvlm-135m-sft", text: include_str!("../../../recipes/fvlm-135m-sft.toml") },
    Embedded { name: "fvlm-135m-dpo", text: include_str!("../../../recipes/fvlm-135m-dpo.toml") },
    Embedded { name: "fvlm-360m-align", text: include_str!("../../../recipes/fvlm-360m-align.toml") },
    Embedded { name: "fvlm-360m-sft", text: include_str!("../../../recipes/fvlm-360m-sft.toml") },
    Embedded { name: "fvlm-360m-dpo", text: include_str!("../../../recipes/fvlm-360m-dpo.toml") },
    Embedded { name: "fvlm-1.7b-align", text: include_str!("../../../recipes/fvlm-1.7b-align.toml") },
    Embedded { name: "fvlm-1.7b-sft", text: include_str!("../../../recipes/fvlm-1.7b-sft.toml") },
    Embedded { name: "fvlm-1.7b-dpo", text: include_str!("../../../recipes/fvlm-1.7b-dpo.toml") },
    Embedded { name: "gemma3-4b-pairs", text: include_str!("../../../recipes/gemma3-4b-pairs.toml") },
    Embedded { name: "text-classify", text: include_str!("../../../recipes/text-classify.toml") },
    Embedded { name: "vision-tiny", text: include_str!("../../../recipes/vision-tiny.toml") },
    Embedded { name: "smollm2-135m-sft", text: include_str!("../../../recipes/smollm2-135m-sft.toml") },
    Embedded { name: "qwen3-0.6b-sft", text: include_str!("../../../recipes/qwen3-0.6b-sft.toml") },
    Embedded { name: "qwen3-8b-lora", text: include_str!("../../../recipes/qwen3-8b-lora.toml") },
    Embedded { name: "qwen3-0.6b-dpo", text: include_str!("../../../recipes/qwen3-0.6b-dpo.toml") },
    Embedded { name: "preference-tiny", text: include_str!("../../../recipes/preference-tiny.toml") },
    Embedded { name: "bdh-cifar10", text: include_str!("../../../recipes/bdh-cifar10.toml") },
    Embedded { name: "vit-tiny-cifar10", text: include_str!("../../../recipes/vit-tiny-cifar10.toml") },
    Embedded { name: "dinov2-s-classify", text: include_str!("../../../recipes/dinov2-s-classify.toml") },
    Embedded { name: "dinov2-b-classify", text: include_str!("../../../recipes/dinov2-b-classify.toml") },
];

/// The preset of every GPU; only the description depends on the GPU.
const GPU: &str = include_str!("../../../recipes/presets/gpu.toml");

/// The word for layers of --with in sentences.
const PRESET: &str = "preset";

/// The entry that only files with all keys have, which runs and `flatout recipes show` write.
const SAVED: &str = "recipe";

/// The embedded recipes.
pub fn list() -> &'static [Embedded] {
    RECIPES
}

/// The embedded presets for `--with`: tasks, and every GPU in the table.
pub fn presets() -> &'static [Embedded] {
    static ALL: OnceLock<Vec<Embedded>> = OnceLock::new();
    ALL.get_or_init(|| {
        let quick_test = include_str!("../../../recipes/presets/quick-test.toml");
        let gpu = |gpu: &Gpu| {
            let gib = gpu.memory_bytes as f64 / (1u64 << 30) as f64;
            let description = format!("Settings for one {} with {gib:.1} GiB, {}.", gpu.name, how_known(gpu));
            Embedded { name: gpu.name, text: format!("description = {description:?}\n{GPU}").leak() }
        };
        let small = include_str!("../../../recipes/presets/small.toml");
        let quick_test = Embedded { name: "quick-test", text: quick_test };
        let small = Embedded { name: "small", text: small };
        [quick_test, small].into_iter().chain(gpus::named().iter().map(gpu)).collect()
    })
}

/// The names and descriptions of recipes and presets.
pub fn as_json() -> serde_json::Value {
    let row = |embedded: &Embedded| json!({ "name": embedded.name, "description": embedded.description() });
    let rows = |all: &[Embedded]| all.iter().map(row).collect::<Vec<_>>();
    json!({ "recipes": rows(list()), "presets": rows(presets()) })
}

/// For each GPU among the presets, a note on whether its settings were measured.
pub fn gpu_notes(with: &[String]) -> Vec<String> {
    let found = with.iter().filter_map(|name| gpus::find(name));
    found.map(|gpu| format!("{}: {}", gpu.name, how_known(gpu))).collect()
}

fn how_known(gpu: &Gpu) -> String {
    match gpu.measured {
        Some(measured) => format!("measured: {measured}"),
        None => "from its data sheet and the roofline, not measured".into(),
    }
}

impl Embedded {
    /// Its description, one sentence.
    pub fn description(&self) -> String {
        let table = parse(self.text, self.name).expect("embedded files are well formed");
        table.get("description").and_then(Value::as_str).unwrap_or_default().to_string()
    }
}

/// The config of a recipe (a name or a path), with presets or files over it and then `key=value` overrides, each in order.
pub fn resolve(recipe: &str, with: &[String], overrides: &[String]) -> Result<Config, UserError> {
    let mut layers = Layers::default();
    let source = find(recipe, None, "recipe", RECIPES)?;
    let mut own = vec![];
    add(&mut layers, &source, &mut Vec::new(), &mut own)?;
    for overlay in with {
        let source = find(overlay, None, PRESET, presets())?;
        let mut table = parse(&source.text, &source.origin)?;
        if table.contains_key("extends") {
            refuse!(
                "{}: a file that is given with --with cannot extend another: remove `extends`",
                source.origin
            );
        }
        table.remove("description");
        let lists_all = table.contains_key(SAVED);
        layers.table(table, &source.text, &source.origin)?;
        if !source.is_embedded() && !lists_all {
            layers.note_given();
        }
        for PresetAddition { table, text, origin, .. } in own.iter().filter(|own| own.preset == source.name) {
            layers.table(table.clone(), text, origin)?;
        }
    }
    layers.overrides(overrides)?;
    layers.name(&source.name);
    let Some(from) = layers.from().map(String::from) else { return with_adapter(layers) };
    let described = pretrained::describe(&pretrained::Source::parse(&from)?)?;
    let grown = grown_vocab(&layers, &described)?;
    // The config of a run has the vocabulary that its model grew to.
    if let Some(vocab) = grown {
        layers.remove_vocab(vocab);
    }
    layers.model(&described.model, &from)?;
    if let Some(from) = layers.tower_from().map(String::from) {
        let tower = pretrained::describe(&pretrained::Source::parse(&from)?)?;
        layers.set_tower(&tower.model, &from)?;
    }
    if let Some(vocab) = grown {
        layers.set_vocab(vocab);
    }
    let mut config = with_adapter(layers)?;
    described.check_head(&config.model, &from)?;
    if config.model.classes().is_some() && described.model.classes() == config.model.classes() {
        let data = &mut config.data;
        data.classes = pretrained::class_names(&data.classes, &described.classes, &from)?;
    }
    if config.model.image_size().is_some() {
        pretrained::lay_processor(&mut config, &described.processor, overrides, false)?;
    }
    pretrained::lay_area(&mut config, &described.processor, overrides)?;
    let is_text = config.data.task == Task::Text;
    let reads_tokens =
        config.model.vocab().is_some() && (config.data.source() == SourceKind::Text || !is_text);
    if reads_tokens && config.data.tokenizer.is_none() {
        let Some(tokenizer) = described.tokenizer else {
            refuse!("{from} has no tokenizer.json, which its model needs: give data.tokenizer");
        };
        config.data.tokenizer = Some(tokenizer.display().to_string());
    }
    Ok(config)
}

/// The vocabulary that a model grows to when tokens are added to its tokeniser. Rows that the model has beyond its tokeniser's tokens
/// are used first.
fn grown_vocab(layers: &Layers, described: &Description) -> Result<Option<usize>, UserError> {
    let (given, tokens) = layers.tokenizer();
    let path = given.map(PathBuf::from).or_else(|| described.tokenizer.clone());
    let (Some(path), Some(vocab), false) = (path, described.model.vocab(), tokens.is_empty()) else {
        return Ok(None);
    };
    let vocabulary = Vocabulary::load(&path).and_then(|loaded| loaded.with_tokens(&tokens));
    let size = vocabulary.map_err(|error| UserError(error.sentence))?.size();
    Ok((size > vocab).then_some(size))
}

/// Sets the number of classes from the data, unless it is given.
fn set_classes(layers: &mut Layers) -> Result<(), UserError> {
    if !layers.leaves_classes_to_data() {
        return Ok(());
    }
    let is_set = layers.sets_classes();
    let mut known = layers.clone();
    if !is_set {
        known.set_classes(LEAST_CLASSES);
    }
    // Errors of the other keys are reported once the config is complete.
    let Ok(sketch) = known.sketch() else { return Ok(()) };
    if sketch.model.classes().is_none() {
        return Ok(());
    }
    match tasks::classes(&sketch) {
        Ok(Some(classes)) => layers.set_classes(classes),
        Ok(None) => {}
        // Training opens the data again and reports the error then.
        Err(_) if is_set => {}
        Err(Failure::User(error)) => return Err(error),
        Err(Failure::Environment(sentence)) => return Err(UserError(sentence)),
    }
    Ok(())
}

/// The fewest classes that a head may have.
const LEAST_CLASSES: usize = 2;

/// The config with the values of the adapter of `adapter.from`.
fn with_adapter(mut layers: Layers) -> Result<Config, UserError> {
    set_classes(&mut layers)?;
    let Some(from) = layers.adapter_from().map(String::from) else {
        let has_embedded_groups = layers.has_embedded_groups();
        let mut config = layers.finish()?;
        if has_embedded_groups && matches!(config.model, Model::Vit(_)) {
            groups::leave_out_absent(&mut config);
        }
        return Ok(config);
    };
    let peft = Peft::open(Path::new(&from), text_model(&layers.sketch()?)?)?;
    layers.adapter(&peft.adapter, &from)?;
    let config = layers.finish()?;
    peft.check(&config)?;
    Ok(config)
}

/// The text model that an adapter of PEFT belongs to.
fn text_model(config: &Config) -> Result<&DecoderConfig, UserError> {
    match config.model.as_decoder() {
        Some(decoder) => Ok(decoder),
        None => refuse!(
            "`adapter.from` is for text models, and `model.kind` is {}: leave it out",
            config.model.kind()
        ),
    }
}

/// A recipe or preset that was found.
struct RecipeSource {
    name: String,
    /// The name or the path, for sentences.
    origin: String,
    /// The folder that relative paths in it start from.
    folder: Option<PathBuf>,
    text: String,
}

impl RecipeSource {
    /// Whether it is embedded: files have a folder.
    fn is_embedded(&self) -> bool {
        self.folder.is_none()
    }
}

/// Finds a recipe or preset among the embedded names, then among files; `folder` is that of the file in which the name is written.
fn find(
    name: &str,
    folder: Option<&Path>,
    what: &str,
    embedded: &[Embedded],
) -> Result<RecipeSource, UserError> {
    if let Some(known) = embedded.iter().find(|known| known.name == name) {
        let (name, text) = (known.name.to_string(), known.text.to_string());
        return Ok(RecipeSource { origin: name.clone(), name, folder: None, text });
    }
    let path = folder.map_or_else(|| PathBuf::from(name), |folder| folder.join(name));
    let written_as_path = name.contains(std::path::MAIN_SEPARATOR) || name.ends_with(".toml");
    if !path.is_file() {
        let names: Vec<_> = embedded.iter().map(|known| known.name).collect();
        if written_as_path {
            refuse!(
                "there is no file {}; `flatout recipes` lists the {what}s that need none",
                path.display()
            );
        }
        let all = names.join(", ");
        if let Some(why) = gpus::absent(name).filter(|_| what == PRESET) {
            refuse!("there is no preset `{name}`: the GPU {why}; there is {all}");
        }
        match suggestion(name, &names) {
            Some(meant) => refuse!("there is no {what} `{name}`; {meant}"),
            None => {
                refuse!("there is no {what} `{name}` and no such file; `flatout recipes` lists the {what}s")
            }
        }
    }
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => refuse!("{} cannot be read: {error}", path.display()),
    };
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let folder = path.parent().map(Path::to_path_buf);
    Ok(RecipeSource { name: stem, origin: path.display().to_string(), folder, text })
}

/// A recipe's addition to a preset, written in the recipe as `[with.PRESET...]`.
struct PresetAddition {
    preset: String,
    table: Table,
    text: String,
    origin: String,
}

/// Adds the recipes that a recipe extends, then the recipe; their additions to presets are pushed to `own`. `descendants` are the recipes
/// that are being added, to detect a cycle.
fn add(
    layers: &mut Layers,
    source: &RecipeSource,
    descendants: &mut Vec<String>,
    own: &mut Vec<PresetAddition>,
) -> Result<(), UserError> {
    let origin = &source.origin;
    if descendants.contains(origin) {
        refuse!("{origin} extends itself, by way of {}", descendants.join(", "));
    }
    descendants.push(origin.clone());
    let mut table = parse(&source.text, origin)?;
    match table.remove("extends") {
        None => {}
        Some(Value::String(base)) => {
            let base = find(&base, source.folder.as_deref(), "recipe", RECIPES)
                .map_err(|error| UserError(format!("{origin}: `extends`: {error}")))?;
            add(layers, &base, descendants, own)?;
        }
        Some(_) => refuse!("{origin}: `extends` must be the name or path of one recipe"),
    }
    match table.remove("with") {
        None => {}
        Some(Value::Table(with)) => {
            for (preset, table) in with {
                if !presets().iter().any(|known| known.name == preset) {
                    refuse!("{origin}: `with.{preset}` names no preset; `flatout recipes` lists them");
                }
                let Value::Table(table) = table else {
                    refuse!("{origin}: `with.{preset}` must be a table of sections");
                };
                own.push(PresetAddition { preset, table, text: source.text.clone(), origin: origin.clone() });
            }
        }
        Some(_) => refuse!("{origin}: `with` must be a table for each preset that the recipe adds to"),
    }
    let lists_all = table.contains_key(SAVED);
    layers.table(table, &source.text, origin)?;
    if source.is_embedded() {
        layers.note_embedded();
    } else if !lists_all {
        layers.note_given();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ScheduleName;

    #[test]
    fn embedded_recipes_are_valid_and_described() {
        for recipe in list() {
            let config = resolve(recipe.name, &[], &[]).unwrap();
            assert_eq!(config.recipe, recipe.name);
            assert!(recipe.description().ends_with('.'), "{}", recipe.name);
            assert_eq!(config.description, recipe.description());
        }
        for preset in presets() {
            assert!(preset.description().ends_with('.'), "{}", preset.name);
            for recipe in list() {
                let resolved = resolve(recipe.name, &[preset.name.into()], &[]);
                let reads_text = resolve(recipe.name, &[], &[]).unwrap().model.as_decoder().is_some();
                if preset.name == "small" && !reads_text {
                    let refused = resolved.unwrap_err().0;
                    assert!(refused.contains("`model."), "it is of text models: {refused}");
                    continue;
                }
                let config = resolved.unwrap();
                assert_eq!(config.description, recipe.description(), "a preset is no recipe");
            }
        }
    }

    #[test]
    fn pretrain_226m_is_what_its_name_says() {
        let config = resolve("pretrain-226m", &[], &[]).unwrap();
        assert_eq!(config.model.parameters(), 226_546_432);
        assert_eq!(config.train.batch * config.model.decoder().context, 131_072);
        assert_eq!(config.train.batch / config.train.micro_batch().unwrap(), 4);
        assert_eq!((config.optimizer.lr, config.optimizer.betas), (3e-3, [0.9, 0.95]));
        assert_eq!((config.schedule.name, config.schedule.warmup_steps), (ScheduleName::Cosine, 2000));
    }

    /// The parameters of the public models of these shapes, and the tokens per step.
    #[test]
    fn recipes_have_the_sizes_of_their_models() {
        let sizes = [
            ("gpt2-124m", 124_439_808 + 47 * 768, 512 * 1024),
            ("smollm2-135m", 134_515_008, 512 * 2048),
            ("smollm2-360m", 361_821_120, 512 * 2048),
            // With a head of two classes.
            ("gemma3-1b-pairs", 999_885_952 + 2 * 1152, 8 * 512),
            ("gemma3-4b-pairs", 3_880_263_168 + 2 * 2560, 8 * 512),
            ("smollm2-135m-sft", 134_515_008, 32 * 2048),
            ("qwen3-0.6b-sft", 596_049_920, 32 * 2048),
            ("qwen3-8b-lora", 8_190_735_360, 16 * 2048),
            ("text-classify", 134_515_008 + 2 * 576, 32 * 512),
            ("qwen3-vl-8b-vqa", 8_767_123_696, 16 * 8192),
            ("qwen3-vl-4b-vqa", 4_437_815_808, 16 * 8192),
            ("qwen3-vl-2b-vqa", 2_127_532_032, 16 * 8192),
            ("qwen3-vl-2b-dpo", 2_127_532_032, 16 * 8192),
            ("fvlm-135m-align", 157_310_592, 32 * 1088),
            ("fvlm-360m-align", 384_912_000, 32 * 1088),
            ("fvlm-1.7b-align", 1_735_303_936, 32 * 1088),
        ];
        for (name, parameters, tokens) in sizes {
            let config = resolve(name, &[], &[]).unwrap();
            assert_eq!(config.model.parameters(), parameters, "{name}");
            assert_eq!(config.train.batch * config.model.decoder().context, tokens, "{name}");
            assert!(config.model.decoder().vocab.is_multiple_of(64), "{name}");
        }
        let more = resolve("pretrain-226m", &[], &["batch=96".into(), "micro_batch=8".into()]).unwrap();
        assert_eq!(more.train.batch * more.model.decoder().context, 196_608);
        assert_eq!(more.train.batch / more.train.micro_batch().unwrap(), 12);
        let own = resolve("gpt2-124m", &[], &["vocab=50257".into()]).unwrap();
        let written =
            flatout_models::library::huggingface::write(own.model.decoder(), "float32", &[], &[]).unwrap();
        assert_eq!(written["model_type"], "gpt2");
    }

    /// The model of the recipes is written with the architecture of the published files.
    #[test]
    fn pairs_recipes_have_gemmas_shapes() {
        use flatout_models::library::gemma::embed_scale;
        for (name, width) in [("gemma3-1b-pairs", 1152), ("gemma3-4b-pairs", 2560)] {
            let config = resolve(name, &[], &[]).unwrap();
            assert_eq!(config.validate_for_training(), Ok(()), "{name}");
            assert_eq!(
                (config.model.decoder().width, config.model.decoder().embed_scale),
                (width, embed_scale(width, "bfloat16"))
            );
            let written =
                flatout_models::library::huggingface::write(config.model.decoder(), "bfloat16", &[2], &[1])
                    .unwrap();
            assert_eq!(written["architectures"][0], "Gemma3TextForSequenceClassification");
            let quick = resolve(name, &["quick-test".into()], &[]).unwrap();
            assert_eq!(
                (quick.train.steps, quick.eval_every(10), quick.schedule.warmup_steps),
                (Some(10), 5, 2)
            );
        }
    }

    #[test]
    fn sft_recipes_have_the_shapes_of_smollm2_and_qwen3() {
        for (name, architecture) in
            [("smollm2-135m-sft", "LlamaForCausalLM"), ("qwen3-0.6b-sft", "Qwen3ForCausalLM")]
        {
            let config = resolve(name, &[], &[]).unwrap();
            assert_eq!((config.validate_for_training(), config.data.task), (Ok(()), Task::Chat), "{name}");
            let written =
                flatout_models::library::huggingface::write(config.model.decoder(), "bfloat16", &[2], &[1])
                    .unwrap();
            assert_eq!(written["architectures"][0], architecture);
            let small = resolve(name, &["small".into(), "quick-test".into()], &[]).unwrap();
            assert!(small.model.parameters() < 1_500_000 && small.train.steps == Some(10), "{name}");
        }
    }

    #[test]
    fn dpo_recipes_have_qwen3s_shape_and_a_small_one() {
        let config = resolve("qwen3-0.6b-dpo", &[], &[]).unwrap();
        assert_eq!((config.validate_for_training(), config.data.task), (Ok(()), Task::Preference));
        assert_eq!(config.model, resolve("qwen3-0.6b-sft", &[], &[]).unwrap().model);
        let small = resolve("qwen3-0.6b-dpo", &["small".into(), "quick-test".into()], &[]).unwrap();
        assert!(small.model.parameters() < 1_500_000 && small.train.steps == Some(10));
        let tiny = resolve("preference-tiny", &[], &[]).unwrap();
        assert_eq!((tiny.validate_for_training(), tiny.together()), (Ok(()), 2));
    }

    /// The stages of the foveated model in every size: one model, and rates that fall from stage to stage.
    #[test]
    fn stages_of_the_foveated_model_follow_one_another() {
        for (size, connector, rates, finals) in [
            ("135m", 1e-3, [1e-5, 3e-5, 1e-6], [3e-5, 3e-6, 1e-7]),
            ("360m", 1e-3, [1e-5, 3e-5, 1e-6], [3e-5, 3e-6, 1e-7]),
            ("1.7b", 3e-4, [3e-6, 1e-5, 5e-7], [1e-5, 1e-6, 5e-8]),
        ] {
            let [align, sft, dpo] = ["align", "sft", "dpo"].map(|stage| {
                let name = format!("fvlm-{size}-{stage}");
                let small = resolve(&name, &["small".into(), "quick-test".into()], &[]).unwrap();
                assert!(small.model.parameters() < 1_500_000 && small.train.steps == Some(10), "{name}");
                let config = resolve(&name, &[], &[]).unwrap();
                assert_eq!(config.validate_for_training(), Ok(()), "{name}");
                config
            });
            assert!(align.model == sft.model && sft.model == dpo.model, "{size}");
            assert_eq!([&align, &sft, &dpo].map(|config| config.optimizer.lr), rates, "{size}");
            assert_eq!(
                [&align, &sft, &dpo].map(|config| config.schedule.final_lr),
                finals.map(Some),
                "{size}"
            );
            let groups = |config: &Config| -> Vec<Option<f64>> {
                config.train.groups.0.iter().map(|group| group.lr).collect()
            };
            assert_eq!(groups(&align), [None, Some(connector)], "{size}");
            assert!(groups(&sft) == [None] && groups(&dpo) == [None], "{size}");
            assert_eq!((dpo.together(), dpo.data.still_frames, dpo.train.epochs), (2, 8, Some(1)), "{size}");
            assert_eq!((dpo.preference.beta(), dpo.schedule.warmup_share), (0.1, Some(0.1)), "{size}");
        }
        let images = resolve("qwen3-vl-2b-dpo", &[], &[]).unwrap();
        assert_eq!((images.validate_for_training(), images.together()), (Ok(()), 2));
        assert_eq!(images.model, resolve("qwen3-vl-2b-vqa", &[], &[]).unwrap().model);
    }

    #[test]
    fn the_number_of_classes_comes_from_the_data() {
        let folder = tempfile::tempdir().unwrap();
        let rows: String =
            ["good", "bad", "fair"].iter().map(|label| format!("{label} text,{label}\n").repeat(3)).collect();
        let path = written(folder.path(), "reviews.csv", &format!("text,label\n{rows}"));
        let data = format!("data.path={path}");
        let classes = |recipe: &str, words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
            resolve(recipe, &[], &words).map(|config| config.model.classes())
        };
        assert_eq!(classes("text-classify", &[]), Ok(Some(2)), "of the synthetic pairs");
        assert_eq!(classes("text-classify", &[&data]), Ok(Some(3)));
        assert_eq!(
            classes("text-classify", &[&data, "model.classes=5"]),
            Ok(Some(5)),
            "a given number is kept"
        );
        assert_eq!(classes("text-classify", &[&data, "data.classes=good,bad"]), Ok(Some(2)));
        assert_eq!(
            classes("gemma3-1b-pairs", &[&data, "eval.metric=macro_f1"]),
            Ok(Some(3)),
            "over the recipe"
        );
        let lost = classes("text-classify", &["data.path=nowhere.csv"]).unwrap_err().0;
        assert!(lost.contains("nowhere.csv"), "{lost}");
        assert_eq!(classes("gemma3-1b-pairs", &["data.path=nowhere.csv"]), Ok(Some(2)), "the recipe's");
        for class in ["a", "b", "c", "d"] {
            written(folder.path(), &format!("images/{class}/1.png"), "");
        }
        let images = format!("data.path={}/images", folder.path().display());
        assert_eq!(classes("vision-tiny", &[&images]), Ok(Some(4)));
    }

    #[test]
    fn every_gpu_is_a_preset_that_says_whether_it_was_measured() {
        for name in ["rtx3090", "rtx4090", "rtx5090", "a100-40", "a100-80", "h100", "h200"] {
            let config = resolve("pretrain-226m", &[name.into()], &[]).unwrap();
            assert_eq!(config.train.micro_batch(), None, "{name}: by arithmetic");
            assert_eq!(
                config.switches.compute.backend,
                crate::switches::Backend::Cuda,
                "{name}: never the CPU in silence"
            );
            let notes = gpu_notes(&["quick-test".into(), name.into()]);
            assert_eq!(notes.len(), 1);
            assert_eq!(notes[0].contains("not measured"), name != "h200", "{notes:?}");
        }
        let readme = include_str!("../../../README.md");
        let note = &gpu_notes(&["h200".into()])[0];
        let figure = note.split(' ').find(|word| word.contains(',')).expect("a count with a separator");
        assert!(
            readme.contains(&format!("{figure} tokens/s")),
            "{figure} is not the README's figure: {note}"
        );
        let given = resolve("pretrain-226m", &["h200".into()], &["micro_batch=32".into()]).unwrap();
        assert_eq!(given.train.micro_batch(), Some(32), "overrides lie over it");
    }

    fn written(folder: &Path, name: &str, text: &str) -> String {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_string()
    }

    #[test]
    fn files_extend_recipes_and_are_overlaid_and_overridden() {
        let folder = tempfile::tempdir().unwrap();
        written(folder.path(), "base.toml", "extends = \"tiny\"\n[optimizer]\nlr = 1\nclip = 2\neps = 3\n");
        let mine = written(
            folder.path(),
            "deep/mine.toml",
            "extends = \"../base.toml\"\ndescription = \"Mine.\"\n[optimizer]\nclip = 20\neps = 30\nbetas = [0, 0.5]\n",
        );
        let overlay =
            written(folder.path(), "gpu.toml", "description = \"A GPU.\"\n[optimizer]\neps = 300\n");
        let config = resolve(&mine, &["quick-test".into(), overlay], &["betas=0.25,0.75".into()]).unwrap();
        assert_eq!((config.recipe.as_str(), config.description.as_str()), ("mine", "Mine."));
        let optimizer = config.optimizer;
        assert_eq!((optimizer.lr, optimizer.clip, optimizer.eps), (1.0, 20.0, 300.0));
        assert_eq!(optimizer.betas, [0.25, 0.75]);
        assert_eq!(config.train.steps, Some(10));
        assert_eq!(config.model.decoder().width, 128);
    }

    #[test]
    fn a_shown_recipe_is_a_recipe() {
        let folder = tempfile::tempdir().unwrap();
        for recipe in list() {
            let shown = resolve(recipe.name, &[], &[]).unwrap();
            let mine = written(folder.path(), "mine.toml", &shown.to_toml());
            let again = resolve(&mine, &[], &[]).unwrap();
            assert_eq!(again, Config { recipe: "mine".into(), ..shown });
        }
    }

    #[test]
    fn recipes_that_do_not_exist_are_refused() {
        let refused = |recipe: &str, with: &[&str]| {
            let with: Vec<String> = with.iter().map(|s| s.to_string()).collect();
            resolve(recipe, &with, &[]).unwrap_err().0
        };
        assert_eq!(refused("tinny", &[]), "there is no recipe `tinny`; did you mean `tiny`?");
        assert!(
            refused("llama", &[])
                .contains("there is no recipe `llama` and no such file; `flatout recipes` lists the recipes")
        );
        assert_eq!(
            refused("gpt", &[]),
            "there is no recipe `gpt`; did you mean `gpt2-124m` or `gpt2-speedrun`?"
        );
        assert_eq!(
            refused("tiny", &["a100"]),
            "there is no preset `a100`; did you mean `a100-40` or `a100-80`?"
        );
        assert!(refused("tiny", &["v100"]).contains("the GPU is older than Ampere"));
        assert!(refused("a/b.toml", &[]).contains("there is no file a/b.toml"));
        assert_eq!(
            refused("tiny", &["quik-test"]),
            "there is no preset `quik-test`; did you mean `quick-test`?"
        );

        let folder = tempfile::tempdir().unwrap();
        let circle = written(folder.path(), "a.toml", "extends = \"b.toml\"\n");
        written(folder.path(), "b.toml", "extends = \"a.toml\"\n");
        assert!(refused(&circle, &[]).contains("extends itself, by way of"));
        let lost = written(folder.path(), "c.toml", "extends = \"tinny\"\n");
        assert!(refused(&lost, &[]).contains("c.toml: `extends`: there is no recipe `tinny`"));
        assert!(refused("tiny", &[&circle]).contains("cannot extend another"));
        let folder_as_file = folder.path().to_str().unwrap();
        assert!(refused(folder_as_file, &[]).contains("there is no file"));
    }
}
