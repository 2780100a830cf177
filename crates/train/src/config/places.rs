//! Relative paths of a config, rebased for a process that works in another folder.

use std::path::Path;

use flatout_data::remote::is_remote;

use super::{Config, Paths};

/// The path that stands for standard input.
const STANDARD_INPUT: &str = "-";

impl Config {
    /// The same config with its relative paths rebased to `folder`.
    pub fn based_at(&self, folder: &Path) -> Config {
        let mut config = self.clone();
        let based = |path: &mut String| {
            if path != STANDARD_INPUT && !path.is_empty() && !is_remote(path) {
                *path = folder.join(&*path).display().to_string();
            }
        };
        let all = |paths: &mut Paths| paths.0.iter_mut().for_each(based);
        let data = &mut config.data;
        data.path.iter_mut().chain(&mut data.held_out_path).for_each(all);
        data.mix.0.iter_mut().for_each(|part| all(&mut part.path));
        let files = data.tokenizer.iter_mut().chain(&mut data.image_root);
        files.chain(&mut data.vision_cache).for_each(based);
        config.adapter.from.iter_mut().for_each(based);
        // A template may also be a text or a name, and a model may be on the hub.
        data.template.iter_mut().filter(|template| folder.join(&**template).is_file()).for_each(based);
        let place = |from: &str| from.rsplit_once('@').map_or(from, |(place, _)| place).to_string();
        let based_model = |from: &mut Option<String>| {
            let from = from.iter_mut();
            from.filter(|from| folder.join(&**from).is_dir() || folder.join(place(from)).is_dir())
                .for_each(based);
        };
        based_model(config.model.from_mut());
        based_model(&mut config.preference.reference);
        if let Some(tower) = config.model.as_fovea_mut() {
            based_model(&mut tower.from);
        }
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes::resolve;

    #[test]
    fn only_relative_paths_are_rebased() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("chat.jinja"), "").unwrap();
        std::fs::create_dir(folder.path().join("base")).unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let words =
            ["data.path=a/*.txt,/b.txt,hf://a/b", "data.held_out_path=v.txt,/w.txt", "data.tokenizer=t.json"];
        let words = words.map(String::from);
        let mut config = resolve("pretrain-226m", &[], &words).unwrap();
        *config.model.from_mut() = Some("base@20".into());
        config.data.template = Some("chat.jinja".into());
        config.data.vision_cache = Some("features".into());
        let based = config.based_at(folder.path());
        assert_eq!(based.data.path, Some(Paths(vec![at("a/*.txt"), "/b.txt".into(), "hf://a/b".into()])));
        assert_eq!(based.data.held_out_path, Some(Paths(vec![at("v.txt"), "/w.txt".into()])));
        assert_eq!(based.data.tokenizer, Some(at("t.json")));
        assert_eq!(based.data.template, Some(at("chat.jinja")));
        assert_eq!(based.data.vision_cache, Some(at("features")));
        assert_eq!(based.model.from(), Some(&at("base@20")));
        config.data.path = Some(Paths(vec!["-".into()]));
        config.data.template = Some("chatml".into());
        *config.model.from_mut() = Some("org/name@main".into());
        let based = config.based_at(folder.path());
        assert_eq!((&based.data.path, &based.data.template), (&config.data.path, &config.data.template));
        assert_eq!(based.model.from(), config.model.from());
    }
}
