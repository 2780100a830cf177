//! Compares chat templates with transformers' rendering (`templates/make.py`), and tests the learned parts of conversations.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::scratch::Scratch;
use flatout_data::examples::{
    ChatTemplate, Conversation, Date, ExampleSets, ExampleSpec, TrainOn, open, spans,
};
use flatout_data::formats::{Field, Fields};
use serde::Deserialize;

#[derive(Deserialize)]
struct Expected {
    date: String,
    specials: BTreeMap<String, String>,
    conversations: BTreeMap<String, Talk>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Talk {
    messages: Vec<Fields>,
    tools: Option<Field>,
}

#[derive(Deserialize)]
struct Case {
    template: String,
    conversation: String,
    prompt: bool,
    text: Option<String>,
    error: Option<String>,
    tokens: Option<Vec<u32>>,
    mask: Option<Vec<u8>>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates")
}

fn expected() -> Expected {
    serde_json::from_str(&std::fs::read_to_string(folder().join("expected.json")).unwrap()).unwrap()
}

fn source(name: &str) -> String {
    std::fs::read_to_string(folder().join(format!("{name}.jinja"))).unwrap()
}

#[test]
fn every_template_renders_as_transformers_does() {
    let expected = expected();
    let mut styles: Vec<&str> = expected.cases.iter().map(|case| case.template.as_str()).collect();
    styles.dedup();
    assert!(styles.len() >= 16, "{styles:?}");
    let specials: Vec<(String, String)> = expected.specials.clone().into_iter().collect();
    let date = Date::parse(&expected.date);
    assert!(date.is_some());
    for case in &expected.cases {
        let named = format!("{} of {}, prompt {}", case.template, case.conversation, case.prompt);
        let template =
            ChatTemplate::compile(&source(&case.template), &case.template, specials.clone(), date).unwrap();
        let talk = &expected.conversations[&case.conversation];
        let messages = talk.messages.clone();
        let turns = messages.len();
        let conversation = Conversation { messages, tools: talk.tools.clone(), ..Conversation::default() };
        match (template.render(&conversation, turns, case.prompt), &case.text) {
            (Ok(rendered), Some(text)) => assert_eq!(rendered.text, *text, "{named}"),
            (Err(_), None) => assert!(case.error.is_some(), "{named}"),
            (found, wanted) => panic!("{named}: {found:?} instead of {wanted:?}, {:?}", case.error),
        }
    }
}

#[derive(Deserialize)]
struct Snippets {
    cases: Vec<Snippet>,
}

#[derive(Deserialize)]
struct Snippet {
    source: String,
    text: Option<String>,
    error: Option<String>,
}

#[test]
fn every_snippet_renders_as_transformers_does() {
    let expected = expected();
    let read = std::fs::read_to_string(folder().join("snippets.json")).unwrap();
    let snippets: Snippets = serde_json::from_str(&read).unwrap();
    assert!(snippets.cases.len() > 100);
    let messages = expected.conversations["several"].messages.clone();
    let conversation = Conversation { messages, ..Conversation::default() };
    let specials: Vec<(String, String)> = expected.specials.into_iter().collect();
    let mut wrong = Vec::new();
    for Snippet { source, text, error } in snippets.cases {
        let template = ChatTemplate::compile(&source, "a snippet", specials.clone(), None);
        let rendered = template.map_err(|error| error.sentence).and_then(|template| {
            let turns = conversation.messages.len();
            template.render(&conversation, turns, false).map_err(|refusal| refusal.to_string())
        });
        match (rendered, text) {
            (Ok(rendered), Some(text)) if rendered.text == text => {}
            (Err(_), None) => {}
            (found, wanted) => {
                wrong.push(format!("{source}\n  {found:?}\n  instead of {wanted:?} {error:?}"))
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Opens a set of one conversation.
fn opened(scratch: &Scratch, template: &str, talk: &Talk, train_on: TrainOn) -> Result<ExampleSets, String> {
    let written = |field: &Field| json(field);
    let messages: Vec<String> =
        talk.messages.iter().map(|message| json(&Field::Object(message.clone()))).collect();
    let tools = talk.tools.as_ref().map(|tools| format!(",\"tools\":{}", written(tools))).unwrap_or_default();
    let row = format!("{{\"messages\":[{}]{tools}}}\n", messages.join(","));
    let path = scratch.write("one.jsonl", row.as_bytes());
    let spec = ExampleSpec {
        path: vec![path],
        tokenizer: Some(folder().join("tokenizer.json")),
        template: Some(folder().join(format!("{template}.jinja")).to_str().unwrap().into()),
        date: Date::parse(&expected().date),
        vocab: 400,
        held_out: 0.0,
        train_on,
        ..ExampleSpec::default()
    };
    open(&spec).map_err(|error| error.sentence)
}

fn json(field: &Field) -> String {
    match field {
        Field::Null => "null".into(),
        Field::Bool(value) => value.to_string(),
        Field::Whole(value) => value.to_string(),
        Field::Number(value) => format!("{value:?}"),
        Field::Text(text) => serde_json::to_string(text).unwrap(),
        Field::Bytes(_) => unreachable!("JSON has no bytes"),
        Field::List(list) => format!("[{}]", list.iter().map(json).collect::<Vec<_>>().join(",")),
        Field::Object(Fields(fields)) => {
            let pairs = fields
                .iter()
                .map(|(name, field)| format!("{}:{}", serde_json::to_string(name).unwrap(), json(field)));
            format!("{{{}}}", pairs.collect::<Vec<_>>().join(","))
        }
    }
}

#[test]
fn generation_tags_give_the_tokens_and_the_mask_of_transformers() {
    let expected = expected();
    let scratch = Scratch::new("templates-mask");
    let mut compared = 0;
    for case in &expected.cases {
        let (Some(tokens), Some(mask)) = (&case.tokens, &case.mask) else { continue };
        if !mask.contains(&1) {
            continue;
        }
        let sets =
            opened(&scratch, &case.template, &expected.conversations[&case.conversation], TrainOn::Assistant);
        let sets = sets.unwrap();
        let example = sets.train.get(0);
        assert_eq!(example.tokens, tokens, "{} {}", case.template, case.conversation);
        let weights: Vec<f32> = mask.iter().map(|mask| f32::from(*mask)).collect();
        assert_eq!(example.weights, weights, "{} {}", case.template, case.conversation);
        compared += 1;
    }
    assert!(compared >= 4, "{compared} masks");
}

/// The learned spans of each example, joined by a bar.
fn learned(sets: &ExampleSets) -> Vec<String> {
    let example = |at: usize| {
        let spans = spans(&sets.vocabulary, sets.train.get(at));
        let learned: Vec<String> =
            spans.into_iter().filter(|span| span.is_trained).map(|span| span.text).collect();
        learned.join(" | ")
    };
    (0..sets.train.count()).map(example).collect()
}

#[test]
fn without_tags_the_mask_is_what_an_answer_adds() {
    let expected = expected();
    let scratch = Scratch::new("templates-learned");
    let several = ["A poet\nof 東京.", "In 1925.", "In \"Zürich\"."];
    let with = |before: &str, end: &str| several.map(|answer| format!("{before}{answer}{end}")).join(" | ");
    use TrainOn::{All, Assistant, Each, Last};
    #[rustfmt::skip]
    let cases = [
        ("chatml", "several", Assistant, vec![with("", "<|im_end|>")]),
        ("chatml", "several", Last, vec!["In \"Zürich\".<|im_end|>".into()]),
        ("chatml", "several", Each, several.map(|answer| format!("{answer}<|im_end|>")).to_vec()),
        ("llama-2", "several", Assistant, vec![with(" ", " </s>")]),
        ("llama-3", "several", Assistant, vec![with("", "<|eot_id|>")]),
        ("mistral", "several", Assistant, vec![with(" ", "</s>")]),
        ("gemma", "several", Assistant, vec![with("", "<end_of_turn>")]),
        ("zephyr", "several", Assistant, vec![with("", "</s>\n")]),
        ("zephyr", "several", Last, vec!["In \"Zürich\".</s>\n".into()]),
        ("alpaca", "several", Assistant, vec![with("", "</s>")]),
        ("phi", "one", Assistant, vec!["4<|end|>\n</s>".into()]),
        ("deepseek", "one", Assistant, vec!["4<｜end▁of▁sentence｜>".into()]),
        ("qwen-thinking", "one", Assistant, vec!["<think>\n\n</think>\n\n4<|im_end|>".into()]),
        ("qwen-thinking", "thinking", Each, vec![
            "<think>\n17 * 3 = 51\n</think>\n\n51<|im_end|>".into(),
            "<think>\n51 + 3\n</think>\n\n54<|im_end|>".into(),
        ]),
        ("qwen-thinking", "tools", Each, vec![
            "<think>\n\n</think>\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Zürich\", \
             \"days\": 2}}\n</tool_call><|im_end|>".into(),
            "<think>\n\n</think>\n\nGrey.<|im_end|>".into(),
        ]),
        ("chatml", "one", All, vec!["user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n".into()]),
    ];
    for (template, conversation, train_on, wanted) in cases {
        let sets = opened(&scratch, template, &expected.conversations[conversation], train_on);
        let sets = sets.unwrap_or_else(|error| panic!("{template} {conversation} {train_on:?}: {error}"));
        assert_eq!(learned(&sets), wanted, "{template} {conversation} {train_on:?}");
    }
}

#[test]
fn a_template_that_rewrites_earlier_turns_is_refused_by_name() {
    let expected = expected();
    let scratch = Scratch::new("templates-rewritten");
    for (template, conversation) in
        [("qwen-thinking", "several"), ("phi", "several"), ("qwen-thinking", "tools")]
    {
        let talk = &expected.conversations[conversation];
        let error = opened(&scratch, template, talk, TrainOn::Assistant).unwrap_err();
        for part in ["one.jsonl, line 1", template, "once more turns follow", "data.train_on=each"] {
            assert!(error.contains(part), "{template}: {error:?} lacks {part:?}");
        }
        let answers =
            talk.messages.iter().filter(|message| message.get("role") == Some(&"assistant".into())).count();
        assert_eq!(opened(&scratch, template, talk, TrainOn::Each).unwrap().train.count(), answers);
        assert_eq!(opened(&scratch, template, talk, TrainOn::Last).unwrap().train.count(), 1);
    }
    // Only the last answer is rendered with a thought, which the generation prompt opens in another way.
    let thinking = "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' and loop.last %}[]\
                    {% endif %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>[{% endif %}"
        .replace("[]", "(thought)");
    let path = scratch.write("thinking.jinja", thinking.as_bytes());
    let opened_with = |train_on| {
        let file = scratch.write("several.jsonl", br#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"},{"role":"assistant","content":"d"}]}"#);
        let spec = ExampleSpec {
            path: vec![file],
            tokenizer: Some(folder().join("tokenizer.json")),
            template: Some(path.clone()),
            vocab: 400,
            held_out: 0.0,
            train_on,
            ..ExampleSpec::default()
        };
        open(&spec).map_err(|error| error.sentence)
    };
    let error = opened_with(TrainOn::Assistant).unwrap_err();
    assert!(error.contains("message 2") && error.contains("data.train_on=each"), "{error}");
    assert_eq!(learned(&opened_with(TrainOn::Each).unwrap()), ["b</s>", "d</s>"]);
    // The instruction is rendered in the last message if that is a question, so the mask would not match generation.
    let error = opened(&scratch, "mistral", &expected.conversations["system"], TrainOn::Last).unwrap_err();
    assert!(error.contains("differently once the answer follows"), "{error}");
}
