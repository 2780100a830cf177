//! What other tools call our keys, so that a habit gets an answer instead of a shrug. Switches carry their own
//! names from elsewhere in their table; this one is for the rest.

use super::schema::{self, Meaning};
use crate::switches;

/// (name elsewhere, our key or `key=value`)
const NAMES: &[(&str, &str)] = &[
    // Model dimensions.
    ("hidden_size", "model.width"),
    ("d_model", "model.width"),
    ("n_embd", "model.width"),
    ("dim", "model.width"),
    ("embed_dim", "model.width"),
    ("n_layer", "model.layers"),
    ("n_layers", "model.layers"),
    ("num_layers", "model.layers"),
    ("num_hidden_layers", "model.layers"),
    ("depth", "model.layers"),
    ("n_head", "model.heads"),
    ("n_heads", "model.heads"),
    ("num_heads", "model.heads"),
    ("num_attention_heads", "model.heads"),
    ("n_kv_heads", "model.kv_heads"),
    ("num_kv_heads", "model.kv_heads"),
    ("num_key_value_heads", "model.kv_heads"),
    ("head_dim", "model.head_size"),
    ("intermediate_size", "model.ffn"),
    ("ffn_dim", "model.ffn"),
    ("d_ff", "model.ffn"),
    ("vocab_size", "model.vocab"),
    ("block_size", "model.context"),
    ("seq_len", "model.context"),
    ("seq_length", "model.context"),
    ("sequence_len", "model.context"),
    ("sequence_length", "model.context"),
    ("max_seq_len", "model.context"),
    ("max_seq_length", "model.context"),
    ("max_length", "model.context"),
    ("max_position_embeddings", "model.context"),
    ("rms_norm_eps", "model.norm_eps"),
    ("layer_norm_eps", "model.norm_eps"),
    ("layer_norm_epsilon", "model.norm_eps"),
    ("hidden_act", "model.activation"),
    ("activation_function", "model.activation"),
    ("n_inner", "model.ffn"),
    ("n_positions", "model.context"),
    ("attention_bias", "model.bias=attention"),
    ("mlp_bias", "model.bias=all"),
    ("qkv_bias", "model.bias=qkv"),
    ("original_max_position_embeddings", "model.rope_original_context"),
    ("tie_word_embeddings", "model.tied"),
    ("tie_embeddings", "model.tied"),
    ("weight_tying", "model.tied"),
    ("use_qk_norm", "model.qk_norm"),
    ("initializer_range", "model.init_std"),
    ("use_gqa", "model.kv_heads"),
    ("model_name_or_path", "model.from"),
    ("pretrained_model_name_or_path", "model.from"),
    ("init_from", "model.from"),
    // Portions and length of the run.
    ("ema_decay", "train.ema"),
    ("model_ema_decay", "train.ema"),
    ("use_ema", "train.ema"),
    ("model_ema", "train.ema"),
    ("max_steps", "train.steps"),
    ("max_iters", "train.steps"),
    ("num_iterations", "train.steps"),
    ("total_steps", "train.steps"),
    ("training_steps", "train.steps"),
    ("num_train_epochs", "train.epochs"),
    ("num_epochs", "train.epochs"),
    ("max_epochs", "train.epochs"),
    ("batch_size", "train.batch"),
    ("global_batch_size", "train.batch"),
    ("train_batch_size", "train.batch"),
    ("effective_batch_size", "train.batch"),
    ("per_device_train_batch_size", "train.micro_batch"),
    ("per_gpu_batch_size", "train.micro_batch"),
    ("local_batch_size", "train.micro_batch"),
    ("micro_batch_size", "train.micro_batch"),
    ("device_batch_size", "train.micro_batch"),
    ("gradient_accumulation_steps", "train.accumulate"),
    ("gradient_accumulation", "train.accumulate"),
    ("grad_accum", "train.accumulate"),
    ("grad_accum_steps", "train.accumulate"),
    ("accumulate_grad_batches", "train.accumulate"),
    ("random_seed", "train.seed"),
    ("manual_seed", "train.seed"),
    ("freeze_layers", "train.freeze"),
    // Adapters.
    ("lora_r", "adapter.rank"),
    ("lora_rank", "adapter.rank"),
    ("r", "adapter.rank"),
    ("lora_alpha", "adapter.alpha"),
    ("lora_dropout", "adapter.dropout"),
    ("target_modules", "adapter.paths"),
    ("lora_target_modules", "adapter.paths"),
    ("lora_target_linear", "adapter.paths=layers"),
    ("modules_to_save", "adapter.also_train"),
    ("lora_modules_to_save", "adapter.also_train"),
    ("rank_pattern", "adapter.groups"),
    ("alpha_pattern", "adapter.groups"),
    ("use_lora", "adapter.kind=lora"),
    ("use_peft", "adapter.kind=lora"),
    ("use_dora", "adapter.kind=dora"),
    ("peft_use_dora", "adapter.kind=dora"),
    ("lora_model_dir", "adapter.from"),
    ("adapter_name_or_path", "adapter.from"),
    // Evaluation.
    ("per_device_eval_batch_size", "eval.micro_batch"),
    ("eval_batch_size", "eval.micro_batch"),
    ("eval_steps", "eval.every"),
    ("eval_interval", "eval.every"),
    ("eval_every", "eval.every"),
    ("val_check_interval", "eval.every"),
    ("eval_iters", "eval.rows"),
    ("max_eval_samples", "eval.rows"),
    ("val_set_size", "data.held_out"),
    ("validation_split", "data.held_out"),
    // Optimiser and schedule.
    ("learning_rate", "optimizer.lr"),
    ("max_lr", "optimizer.lr"),
    ("peak_lr", "optimizer.lr"),
    ("optim", "optimizer.name"),
    ("optimizer", "optimizer.name"),
    ("adam_beta1", "optimizer.betas"),
    ("adam_beta2", "optimizer.betas"),
    ("beta1", "optimizer.betas"),
    ("beta2", "optimizer.betas"),
    ("adam_epsilon", "optimizer.eps"),
    ("adam_eps", "optimizer.eps"),
    ("wd", "optimizer.weight_decay"),
    ("decay", "optimizer.weight_decay"),
    ("max_grad_norm", "optimizer.clip"),
    ("max_norm", "optimizer.clip"),
    ("grad_clip", "optimizer.clip"),
    ("gradient_clip_val", "optimizer.clip"),
    ("clip_grad_norm", "optimizer.clip"),
    ("lr_scheduler", "schedule.name"),
    ("lr_scheduler_type", "schedule.name"),
    ("lr_schedule", "schedule.name"),
    ("decay_type", "schedule.name"),
    ("warmup", "schedule.warmup_steps"),
    ("warmup_iters", "schedule.warmup_steps"),
    ("num_warmup_steps", "schedule.warmup_steps"),
    ("lr_warmup_steps", "schedule.warmup_steps"),
    ("warmup_ratio", "schedule.warmup_share"),
    ("min_lr", "schedule.final_ratio"),
    ("min_lr_ratio", "schedule.final_ratio"),
    ("min_lr_factor", "schedule.final_ratio"),
    ("lr_decay_iters", "schedule.horizon_steps"),
    // Data.
    ("dataset", "data.path"),
    ("dataset_path", "data.path"),
    ("data_dir", "data.path"),
    ("data_path", "data.path"),
    ("train_file", "data.path"),
    ("datasets", "data.path"),
    ("text_column", "data.field"),
    ("text_field", "data.field"),
    ("dataset_text_field", "data.field"),
    ("dataset_mixture", "data.mix"),
    ("data_mixture", "data.mix"),
    ("tokenizer_name", "data.tokenizer"),
    ("tokenizer_path", "data.tokenizer"),
    ("chat_template", "data.template"),
    ("train_on_inputs", "data.train_on"),
    ("assistant_only_loss", "data.train_on"),
    ("completion_only_loss", "data.train_on"),
    ("label_column", "data.label"),
    ("label_names", "data.classes"),
    ("num_workers", "loader.workers"),
    ("dataloader_num_workers", "loader.workers"),
    ("prefetch_factor", "loader.prefetch"),
    ("dataloader_prefetch_factor", "loader.prefetch"),
    // Classes, and runs that evaluations decide.
    ("num_labels", "model.classes"),
    ("num_classes", "model.classes"),
    ("classifier_pooling", "model.pooling"),
    ("classifier_dropout", "model.head_dropout"),
    ("class_weight", "train.class_weights"),
    ("early_stopping_patience", "train.patience"),
    ("metric_for_best_model", "eval.metric"),
    ("load_best_model_at_end", "checkpoint.best=true"),
    ("n_splits", "train.folds"),
    ("k_folds", "train.folds"),
    ("sliding_window", "model.window"),
    ("sliding_window_pattern", "model.global_every"),
    ("rope_local_base_freq", "model.rope_local_theta"),
    ("query_pre_attn_scalar", "model.score_size"),
    ("use_bidirectional_attention", "model.attention=bidirectional"),
    // What is kept.
    ("save_steps", "checkpoint.every"),
    ("save_interval", "checkpoint.every"),
    ("save_every", "checkpoint.every"),
    ("checkpoint_interval", "checkpoint.every"),
    ("save_total_limit", "checkpoint.keep"),
    ("keep_latest_k", "checkpoint.keep"),
    ("logging_steps", "log.every"),
    ("log_interval", "log.every"),
    ("log_freq", "log.every"),
];

/// What `name`, or its last segment, is called here, with the values it takes.
pub(super) fn here(name: &str) -> Option<String> {
    let plain = name.trim_start_matches('-').replace('-', "_").to_ascii_lowercase();
    let last = plain.rsplit('.').next().unwrap_or_default();
    let ours = find(&plain).or_else(|| find(last))?;
    let key = ours.split('=').next().unwrap_or_default();
    let values = match schema::lookup(key) {
        Meaning::One(found) if !ours.contains('=') => schema::values_in_brackets(&found.key.kind),
        _ => String::new(),
    };
    Some(format!("`{ours}`{values}"))
}

fn find(name: &str) -> Option<&'static str> {
    let elsewhere = switches::TABLE.iter().flat_map(|switch| switch.elsewhere);
    let of_switches = elsewhere.map(|named| (named.name, named.here));
    NAMES.iter().copied().chain(of_switches).find(|(theirs, _)| *theirs == name).map(|(_, ours)| ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_is_a_key_and_no_name_is_ours_already() {
        let of_switches = switches::TABLE.iter().flat_map(|s| s.elsewhere).map(|n| (n.name, n.here));
        for (theirs, ours) in NAMES.iter().copied().chain(of_switches) {
            let (key, said) = ours.split_once('=').unwrap_or((ours, ""));
            let Meaning::One(found) = schema::lookup(key) else { panic!("{theirs}: {key} is no key") };
            if !said.is_empty() {
                let given = toml::Value::String(said.into());
                let read = super::super::value::read(
                    key,
                    &found.key.kind,
                    &given,
                    super::super::value::Written::AsText,
                );
                assert!(read.is_ok(), "{theirs}: {ours} is no value");
            }
            assert!(matches!(schema::lookup(theirs), Meaning::Nothing), "{theirs} is a name of ours");
        }
    }

    #[test]
    fn names_of_other_tools_are_answered() {
        assert_eq!(here("num_workers").unwrap(), "`loader.workers`");
        assert_eq!(here("--learning-rate").unwrap(), "`optimizer.lr`");
        assert_eq!(here("training.max_steps").unwrap(), "`train.steps`");
        assert_eq!(here("bf16").unwrap(), "`precision=bf16`");
        assert_eq!(here("use_fp8").unwrap(), "`precision=fp8`");
        assert_eq!(here("lr"), None);
    }
}
