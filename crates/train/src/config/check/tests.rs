use crate::config::SourceKind;
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
        ("train.groups=[{paths=[\"embed\"],lr=0.0}]", "`train.groups.lr` is 0 and must be a number above 0"),
        ("train.groups=[{paths=[\"embed\"],final_lr=-1.0}]", "`train.groups.final_lr` is -1"),
        ("train.groups=[{paths=[\"embed\"],lr=1e-3,lr_scale=0.5}]", "give `lr` instead"),
        (
            "train.groups=[{paths=[\"embed\"],final_lr=1e-3}] schedule.name=constant",
            "the schedule is constant",
        ),
        ("train.groups=[{paths=[\"a\"],lr=1e-3},{paths=[\"a\"],lr=1e-4}]", "two learning rates named `a`"),
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
        ("adapter.kind=lora adapter.dropout=1", "`adapter.dropout` is 1 and must be at least 0 and below 1"),
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
    assert!(sentence.contains("`data.path` is not given, and pretrain-226m trains on text"), "{sentence}");
    let config = resolve("pretrain-226m", &[], &["data.path=book.txt".into()]).unwrap();
    assert_eq!(config.validate_for_training(), Ok(()));
    let own_text = resolve("tiny", &[], &["data.path=book.txt".into()]).unwrap();
    assert_eq!(own_text.data.source(), SourceKind::Text);
}
