//! Checks of `data.new_tokens`: a tokeniser and a model that can grow, and rows that are trained.

use flatout_ir::passes::adapter::{EMBED, HEAD};
use flatout_models::config::Head;

use crate::UserError;
use crate::config::pattern::matches;
use crate::config::{AdapterKind, Config};
use crate::refuse;

impl Config {
    /// Checks that there is a tokeniser to add tokens to, and that their rows are trained.
    pub(super) fn validate_new_tokens(&self) -> Result<(), UserError> {
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
}
