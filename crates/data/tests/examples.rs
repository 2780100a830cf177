//! Tests from files to examples: every schema and format, invalid rows, classes, splits, lengths.

use std::slice::from_ref;

use crate::scratch::Scratch;
use flatout_data::examples::{
    ExampleKind, ExampleSets, ExampleSpec, TooLong, TrainOn, class_names, open, open_reporting, spans,
};
use flatout_data::formats::OnError;
use flatout_data::{Example, SourceKind};

fn chat(paths: &[String]) -> ExampleSpec {
    ExampleSpec { path: paths.to_vec(), held_out: 0.0, vocab: 400, ..ExampleSpec::default() }
}

fn classes(paths: &[String]) -> ExampleSpec {
    ExampleSpec { task: ExampleKind::Classes, ..chat(paths) }
}

fn skipping(mut spec: ExampleSpec) -> ExampleSpec {
    spec.read.on_error = OnError::Skip;
    spec
}

fn texts(sets: &ExampleSets) -> Vec<String> {
    sets.train.iter().map(|example| sets.vocabulary.spell_out(example.tokens)).collect()
}

fn learned(sets: &ExampleSets, example: Example<'_>) -> String {
    let spans = spans(&sets.vocabulary, example).into_iter().filter(|span| span.is_trained);
    spans.map(|span| span.text).collect::<Vec<_>>().join("|")
}

#[test]
fn every_schema_gives_the_same_examples() {
    let scratch = Scratch::new("examples-schemas");
    let asked = ["What is 2 + 2?", "Name a colour."];
    let answers = ["4", "Blue."];
    let write = |name: &str, row: fn(&str, &str) -> String, header: &str| {
        let rows: String = (0..2).map(|at| row(asked[at], answers[at]) + "\n").collect();
        scratch.write(name, format!("{header}{rows}").as_bytes())
    };
    let files = [
        (
            "messages",
            write(
                "messages.jsonl",
                |q, a| {
                    format!(
                        r#"{{"messages":[{{"role":"user","content":"{q}"}},{{"role":"assistant","content":"{a}"}}]}}"#
                    )
                },
                "",
            ),
        ),
        (
            "messages",
            write(
                "parts.jsonl",
                |q, a| {
                    format!(
                        r#"{{"id":7,"messages":[{{"role":"user","content":[{{"type":"text","text":"{q}"}}]}},{{"content":"{a}","role":"assistant"}}]}}"#
                    )
                },
                "",
            ),
        ),
        (
            "ShareGPT",
            write(
                "share.jsonl",
                |q, a| {
                    format!(
                        r#"{{"conversations":[{{"from":"human","value":"{q}"}},{{"from":"gpt","value":"{a}"}}]}}"#
                    )
                },
                "",
            ),
        ),
        (
            "Alpaca",
            write("alpaca.jsonl", |q, a| format!(r#"{{"instruction":"{q}","input":"","output":"{a}"}}"#), ""),
        ),
        ("Alpaca", write("alpaca.csv", |q, a| format!("\"{q}\",,\"{a}\""), "instruction,input,output\n")),
        (
            "messages",
            write(
                "json-in-csv.tsv",
                |q, a| {
                    format!(
                        r#""[{{""role"":""user"",""content"":""{q}""}},{{""role"":""assistant"",""content"":""{a}""}}]""#
                    )
                },
                "messages\n",
            ),
        ),
        (
            "`prompt` and `completion`",
            write(
                "lists.jsonl",
                |q, a| {
                    format!(
                        r#"{{"prompt":[{{"role":"user","content":"{q}"}}],"completion":[{{"role":"assistant","content":"{a}"}}]}}"#
                    )
                },
                "",
            ),
        ),
    ];
    let wanted = open(&chat(&[files[0].1.clone()])).unwrap();
    assert_eq!(
        texts(&wanted)[0],
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    );
    assert_eq!(learned(&wanted, wanted.train.get(1)), "Blue.<|im_end|>");
    assert_eq!(wanted.description.template.as_deref(), Some("data.template=chatml"));
    for (schema, file) in files {
        let sets = open(&chat(from_ref(&file))).unwrap();
        assert!(sets.description.schema[0].contains(schema), "{file}: {:?}", sets.description.schema);
        assert_eq!(texts(&sets), texts(&wanted), "{file}");
        assert_eq!(sets.train, wanted.train, "{file}");
    }
}

#[test]
fn a_prompt_is_followed_by_its_completion_and_an_end() {
    let scratch = Scratch::new("examples-plain");
    let row =
        "{\"prompt\":\"2 + 2 = \",\"completion\":\"4\"}\n{\"prompt\":\"\",\"completion\":\"a text alone\"}\n";
    let path = scratch.write("a.jsonl", row.as_bytes());
    let sets = open(&chat(from_ref(&path))).unwrap();
    assert_eq!(texts(&sets), ["<bos>2 + 2 = 4<eos>", "<bos>a text alone<eos>"]);
    assert_eq!(learned(&sets, sets.train.get(0)), "4<eos>");
    let all = open(&ExampleSpec { train_on: TrainOn::All, ..chat(&[path]) }).unwrap();
    assert_eq!(learned(&all, all.train.get(0)), "2 + 2 = 4<eos>");
}

#[test]
fn turns_of_tools_and_of_weight_0_are_read_only() {
    let scratch = Scratch::new("examples-turns");
    let rows = r#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":"q"},{"role":"assistant","content":"one","weight":0},{"role":"user","content":"r"},{"role":"assistant","content":"two","weight":1}]}
{"conversations":[{"from":"system","value":"s"},{"from":"human","value":"q"},{"from":"function_call","value":"call"},{"from":"observation","value":"seen"},{"from":"gpt","value":"done"}]}
"#;
    let path = scratch.write("a.jsonl", rows.lines().next().unwrap().as_bytes());
    let other = scratch.write("b.jsonl", rows.lines().nth(1).unwrap().as_bytes());
    let sets = open(&chat(&[path, other])).unwrap();
    assert_eq!(learned(&sets, sets.train.get(0)), "two<|im_end|>");
    assert_eq!(learned(&sets, sets.train.get(1)), "call<|im_end|>|done<|im_end|>");
    assert_eq!(sets.description.schema.len(), 2);
}

/// A file whose second row is invalid, parts of the error, and the reason under which skipped rows are counted.
type Bad = (&'static str, Vec<u8>, &'static [&'static str], &'static str);

#[rustfmt::skip]
fn bad_chats() -> Vec<Bad> {
    let row = |line: &str| {
        let good = r#"{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}"#;
        format!("{good}\n{line}\n{good}\n").into_bytes()
    };
    let turns = |turns: &str| row(&format!(r#"{{"messages":[{turns}]}}"#));
    let alpaca = |line: &str| format!("{{\"instruction\":\"q\",\"output\":\"a\"}}\n{line}\n").into_bytes();
    let pairs = |line: &str| format!("{{\"prompt\":\"q\",\"completion\":\"a\"}}\n{line}\n").into_bytes();
    vec![
        ("a.jsonl", row(r#"{"messages":["#), &["a.jsonl, line 2: this is not JSON"], "broken JSON"),
        ("a.jsonl", row(r#"["messages"]"#), &["line 2", "not an object"], "not a JSON object"),
        ("a.jsonl", [row("").as_slice(), b"{\"messages\":\"\xff\"}\n"].concat(), &["line 4", "not UTF-8"], "not UTF-8"),
        ("a.jsonl", row(r#"{"text":"q"}"#), &["line 2", "no field `messages`", "only `text`"], "field missing"),
        ("a.jsonl", row(r#"{"messages":"hello"}"#), &["line 2", "`messages` is a string, not a list"], "not a conversation"),
        ("a.jsonl", row(r#"{"messages":{"role":"user"}}"#), &["line 2", "is an object, not a list"], "not a conversation"),
        ("a.jsonl", row(r#"{"messages":[]}"#), &["line 2", "`messages` is empty"], "not a conversation"),
        ("a.jsonl", turns(r#""hello""#), &["line 2", "message 1 of `messages` is a string, not an object"], "not a conversation"),
        ("a.jsonl", turns(r#"{"content":"q"}"#), &["line 2", "message 1 of `messages` has no `role`", "only `content`"], "unknown role"),
        ("a.jsonl", turns(r#"{"role":7,"content":"q"}"#), &["line 2", "the role of message 1 is a number"], "unknown role"),
        ("a.jsonl", turns(r#"{"role":"user","content":"q"},{"role":"narrator","content":"a"}"#), &["line 2", "message 2 has the role `narrator`", "system, developer, user, assistant, tool"], "unknown role"),
        ("a.jsonl", turns(r#"{"role":"user","content":"q"},{"role":"assistant"}"#), &["line 2", "message 2 of `messages` has no `content`"], "field null"),
        ("a.jsonl", turns(r#"{"role":"user","content":null},{"role":"assistant","content":"a"}"#), &["line 2", "message 1", "that is null"], "field null"),
        ("a.jsonl", turns(r#"{"role":"user","content":7},{"role":"assistant","content":"a"}"#), &["line 2", "the content of message 1 is a number"], "field not a string"),
        ("a.jsonl", turns(r#"{"role":"user","content":[{"type":"image","image":"x"}]},{"role":"assistant","content":"a"}"#), &["line 2", "a part of the type `image`"], "form not supported"),
        ("a.jsonl", turns(r#"{"role":"user","content":"q"},{"role":"assistant","content":" \n"}"#), &["line 2", "the assistant's message 2 is empty"], "empty"),
        ("a.jsonl", turns(r#"{"role":"user","content":"q\u0000"},{"role":"assistant","content":"a"}"#), &["line 2", "message 1 has a character"], "NUL character"),
        ("a.jsonl", turns(r#"{"role":"user","content":"q"},{"role":"assistant","content":"","tool_calls":"call"}"#), &["line 2", "`tool_calls` of message 2 is a string"], "not a conversation"),
        ("a.jsonl", turns(r#"{"role":"user","content":"q"}"#), &["line 2", "no answer of the assistant to learn from"], "nothing to learn"),
        ("a.jsonl", row(r#"{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}],"tools":7}"#), &["line 2", "the field `tools` is a number"], "not a conversation"),
        ("a.jsonl", alpaca(r#"{"instruction":"q","output":""}"#), &["line 2", "the field `output` is empty"], "nothing to learn"),
        ("a.jsonl", alpaca(r#"{"instruction":null,"output":"a"}"#), &["line 2", "the field `instruction` is null"], "field null"),
        ("a.jsonl", pairs(r#"{"prompt":"q"}"#), &["line 2", "no field `completion`"], "field missing"),
        ("a.jsonl", pairs(r#"{"prompt":["q"],"completion":"a"}"#), &["line 2", "message 1 of `prompt` is a string, not an object"], "not a conversation"),
        ("a.csv", b"prompt,completion\nq,a\nq\n".to_vec(), &["a.csv, line 3", "1 columns instead of 2"], "wrong number of columns"),
    ]
}

#[rustfmt::skip]
fn bad_classes() -> Vec<Bad> {
    let row = |line: &str| {
        let good = r#"{"text":"t","label":"no"}"#.to_string() + "\n" + r#"{"text":"u","label":"yes"}"#;
        format!("{good}\n{line}\n{good}\n").into_bytes()
    };
    vec![
        ("a.jsonl", row(r#"{"text":"x"}"#), &["a.jsonl, line 3: the row has no field `label`"], "field missing"),
        ("a.jsonl", row(r#"{"label":"no"}"#), &["line 3", "no field `text`, only `label`"], "field missing"),
        ("a.jsonl", row(r#"{"text":"x","label":null}"#), &["line 3", "the label `label` is null"], "label that is not a class"),
        ("a.jsonl", row(r#"{"text":"x","label":""}"#), &["line 3", "the label `label` is empty"], "label that is not a class"),
        ("a.jsonl", row(r#"{"text":"x","label":["no"]}"#), &["line 3", "the label `label` is a list"], "label that is not a class"),
        ("a.jsonl", row(r#"{"text":"x","label":0.5}"#), &["line 3", "is 0.5, and a class is a name or a whole number"], "label that is not a class"),
        ("a.jsonl", row(r#"{"text":"x","label":"maybe"}"#), &["line 3", "no other row has the label `maybe`"], "label that is not a class"),
        ("a.jsonl", row(r#"{"text":"","label":"no"}"#), &["line 3", "the field `text` is empty"], "empty"),
        ("a.jsonl", row(r#"{"text":" \n","label":"no"}"#), &["line 3", "the field `text` is empty"], "empty"),
        ("a.jsonl", row(r#"{"text":null,"label":"no"}"#), &["line 3", "the field `text` is null"], "field null"),
        ("a.jsonl", row(r#"{"text":7,"label":"no"}"#), &["line 3", "the field `text` is a number, not a string"], "field not a string"),
        ("a.jsonl", row(r#"{"text":"a\u0000b","label":"no"}"#), &["line 3", "NUL"], "NUL character"),
        ("a.csv", b"text,label\nt,no\nu,yes\nt,no\nv,yes\nx,\xff\n".to_vec(), &["a.csv, line 6", "not UTF-8"], "not UTF-8"),
        ("a.tsv", b"text\tlabel\nt\tno\nu\tyes\nt\tno\nv\tyes\nx\t\"no\n".to_vec(), &["a.tsv, line 6", "never closed"], "wrong quotes"),
    ]
}

#[test]
fn every_bad_row_is_named_by_file_and_line_or_skipped_and_counted() {
    let scratch = Scratch::new("examples-bad");
    let chats = bad_chats().into_iter().map(|bad| (ExampleKind::Chat, bad));
    let all: Vec<_> = chats.chain(bad_classes().into_iter().map(|bad| (ExampleKind::Classes, bad))).collect();
    assert!(all.len() >= 35);
    for (task, (file, bytes, says, counted)) in all {
        let path = scratch.write(file, &bytes);
        let spec = ExampleSpec { task, ..chat(&[path]) };
        let error = open(&spec).expect_err(says[0]);
        assert!(
            error.is_input() && error.sentence.ends_with('.') && !error.sentence.contains('\n'),
            "{error}"
        );
        for part in says {
            assert!(error.sentence.contains(part), "{error} lacks {part:?}");
        }
        assert!(error.sentence.contains("data.on_error=skip"), "{error}");
        let sets = open(&skipping(spec)).unwrap_or_else(|error| panic!("{says:?}: {error}"));
        assert!(sets.train.count() >= 1);
        let [(reason, 1, place)] = sets.description.unusable.as_slice() else {
            panic!("{says:?}: {:?}", sets.description.unusable)
        };
        assert_eq!(reason, counted, "{says:?}");
        assert!(place.contains(", line "), "{place}");
    }
}

#[test]
fn errors_of_a_whole_set_are_named() {
    let scratch = Scratch::new("examples-whole");
    let write = |name: &str, text: &str| scratch.write(name, text.as_bytes());
    let one = write("one.jsonl", "{\"text\":\"a\",\"label\":1}\n{\"text\":\"b\",\"label\":1}\n");
    let two = write(
        "two.jsonl",
        "{\"text\":\"a\",\"label\":0}\n{\"text\":\"b\",\"label\":1}\n{\"text\":\"c\",\"label\":2}\n",
    );
    let unknown = write("unknown.jsonl", "{\"body\":\"a\"}\n");
    let text = write("a.txt", "some text\n");
    let empty = write("empty.jsonl", "");
    let named = |names: [&str; 2]| names.map(String::from).to_vec();
    let cases: Vec<(ExampleSpec, &[&str])> = vec![
        (classes(from_ref(&one)), &["Every row of", "one.jsonl has the label `1`"]),
        (
            ExampleSpec { classes: named(["no", "yes"]), ..classes(from_ref(&two)) },
            &["two.jsonl, line 3", "the label 2 is beyond the 2 classes"],
        ),
        (
            ExampleSpec { classes: named(["a", "a"]), ..classes(from_ref(&two)) },
            &["data.classes has `a` twice"],
        ),
        (
            ExampleSpec { label: Some("kind".into()), ..classes(from_ref(&two)) },
            &["line 1", "no field `kind`"],
        ),
        (
            ExampleSpec { group: Some("doc".into()), ..classes(from_ref(&two)) },
            &["line 1", "no field `doc`, which data.group names"],
        ),
        (ExampleSpec { max_tokens: 2, ..classes(&[two]) }, &["data.max_tokens=2 leaves no room"]),
        (chat(from_ref(&unknown)), &["unknown.jsonl, line 1", "the fields `body`", "`messages`"]),
        (skipping(chat(&[unknown])), &["There is no example to learn from", "1 left out"]),
        (chat(&[text]), &["a.txt is plain text"]),
        (chat(&[empty]), &["empty.jsonl", "no row in it"]),
        (ExampleSpec { classes: named(["a", "b"]), ..chat(from_ref(&one)) }, &["data.task=chat has none"]),
        (ExampleSpec { fold: Some((2, 2)), ..classes(from_ref(&one)) }, &["There is no fold 2 of 2"]),
        (ExampleSpec { max_tokens: 1, ..chat(from_ref(&one)) }, &["nothing to predict"]),
        (ExampleSpec { source: SourceKind::Synthetic, ..chat(&[one]) }, &["no use for data.path"]),
    ];
    for (spec, says) in cases {
        let error = open(&spec).expect_err(says[0]).sentence;
        assert!(says.iter().all(|part| error.contains(part)), "{error:?} lacks one of {says:?}");
    }
}

#[test]
fn long_examples_are_cut_skipped_or_refused() {
    let scratch = Scratch::new("examples-long");
    let row = |q: &str, a: &str| format!("{{\"prompt\":\"{q}\",\"completion\":\"{a}\"}}\n");
    let text = row("q", "short") + &row("q", &"long ".repeat(40)) + &row(&"long ".repeat(40), "a");
    let path = scratch.write("a.jsonl", text.as_bytes());
    // Without repeated words, every byte is a token.
    let spec = |too_long| ExampleSpec { too_long, max_tokens: 20, vocab: 260, ..chat(from_ref(&path)) };
    let cut = open(&spec(TooLong::Cut)).unwrap();
    assert_eq!((cut.train.count(), cut.description.cut, cut.description.too_long), (2, 1, 1));
    assert_eq!(cut.train.len_of(1), 20);
    let skipped = open(&spec(TooLong::Skip)).unwrap();
    assert_eq!((skipped.train.count(), skipped.description.cut, skipped.description.too_long), (1, 0, 2));
    let error = open(&spec(TooLong::Fail)).unwrap_err().sentence;
    assert!(error.contains("a.jsonl, line 2: the row has 203 tokens and data.max_tokens is 20"), "{error}");
    let pair = scratch.write(
        "b.jsonl",
        format!("{{\"text_a\":\"{0}\",\"text_b\":\"b\",\"label\":0}}\n", "x".repeat(50)).repeat(2).as_bytes(),
    );
    let classes = |too_long| ExampleSpec {
        too_long,
        max_tokens: 20,
        vocab: 258,
        classes: vec!["n".into(), "y".into()],
        ..classes(from_ref(&pair))
    };
    let cut = open(&classes(TooLong::Cut)).unwrap();
    assert_eq!((cut.train.len_of(0), cut.description.cut), (20, 2));
    assert!(texts(&cut)[0].ends_with("x<eos>b<eos>"), "{:?}", texts(&cut));
    assert!(open(&classes(TooLong::Fail)).unwrap_err().sentence.contains("line 1: the row has 54 tokens"));
}

fn reviews(scratch: &Scratch, rows: usize) -> String {
    let row = |at: usize| {
        format!("review {at} of book {},{},{}\n", at % 10, ["bad", "good", "fine"][at % 3], at % 10)
    };
    let rows: String = (0..rows).map(row).collect();
    scratch.write("reviews.csv", format!("text,label,book\n{rows}").as_bytes())
}

#[test]
fn classes_are_collected_sorted_or_given_and_counted() {
    let scratch = Scratch::new("examples-classes");
    let path = reviews(&scratch, 60);
    let collected = open(&classes(from_ref(&path))).unwrap();
    assert_eq!(collected.classes, ["bad", "fine", "good"]);
    assert_eq!(collected.train.get(1).label, Some(2));
    assert_eq!(
        collected.description.classes.iter().map(|class| class.train).collect::<Vec<_>>(),
        [20, 20, 20]
    );
    assert!(collected.train.iter().all(|example| example.is_supervised()));
    let given = ["good", "bad", "fine", "odd"].map(String::from).to_vec();
    let given = open(&ExampleSpec { classes: given, ..classes(&[path]) }).unwrap();
    assert_eq!(given.train.get(1).label, Some(0));
    assert_eq!(given.description.classes[3].train, 0);
    let unlabelled = scratch.write("new.csv", b"text\nwhat of this\n");
    let spec = ExampleSpec { unlabelled: true, ..classes(&[unlabelled]) };
    assert_eq!(open(&spec).unwrap().train.get(0).label, None);
}

#[test]
fn rows_of_a_group_are_on_one_side_and_folds_are_a_partition() {
    let scratch = Scratch::new("examples-sides");
    let path = reviews(&scratch, 200);
    let grouped = ExampleSpec { group: Some("book".into()), held_out: 0.3, ..classes(from_ref(&path)) };
    let sets = open(&grouped).unwrap();
    let books = |sets: &ExampleSets, held: bool| {
        let table = if held { &sets.held_out } else { &sets.train };
        let mut books: Vec<char> = table
            .iter()
            .map(|example| sets.vocabulary.decode(example.tokens).chars().next_back().unwrap())
            .collect();
        books.sort_unstable();
        books.dedup();
        books
    };
    let (train, held_out) = (books(&sets, false), books(&sets, true));
    assert!(!train.is_empty() && !held_out.is_empty());
    assert!(train.iter().all(|book| !held_out.contains(book)), "{train:?} {held_out:?}");
    let mut places = Vec::new();
    for part in 0..4 {
        let spec = ExampleSpec { fold: Some((part, 4)), ..classes(from_ref(&path)) };
        let sets = open(&spec).unwrap();
        assert_eq!(sets.train.count() + sets.held_out.count(), 200);
        assert!(sets.held_out.count() > 20, "fold {part} has {}", sets.held_out.count());
        places.extend(sets.held_out_places.iter().map(|place| place.line));
    }
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), 200);
}

#[test]
fn any_number_of_workers_gives_the_same_examples() {
    for task in [ExampleKind::Chat, ExampleKind::Classes] {
        let spec = |workers| ExampleSpec {
            task,
            rows: 5000,
            vocab: 500,
            held_out: 0.1,
            seed: 3,
            workers,
            ..ExampleSpec::default()
        };
        let one = open(&spec(1)).unwrap();
        assert_eq!(one.train.count() + one.held_out.count(), 5000);
        let share = one.held_out.count() as f64 / 5000.0;
        assert!((0.06..0.14).contains(&share), "{share} held out");
        for workers in [2, 5] {
            let many = open(&spec(workers)).unwrap();
            assert!(many.train == one.train && many.held_out == one.held_out && many.mark == one.mark);
        }
        assert_ne!(open(&ExampleSpec { seed: 4, ..spec(2) }).unwrap().mark, one.mark);
    }
}

#[test]
fn held_out_files_replace_the_held_out_share() {
    let scratch = Scratch::new("examples-apart");
    let row = |at: usize, label: &str| format!("{{\"text\":\"text number {at}\",\"label\":\"{label}\"}}\n");
    let many: String = (0..40).map(|at| row(at, ["no", "yes"][at % 2])).collect();
    let train = scratch.write("train.jsonl", (many + &row(40, "maybe")).as_bytes());
    let apart = |text: &str| {
        let path = scratch.write("apart.jsonl", text.as_bytes());
        ExampleSpec { held_out: 0.2, held_out_path: vec![path], ..classes(from_ref(&train)) }
    };
    let spec = apart(&(row(100, "yes") + &row(3, "no") + &row(101, "no")));
    let mut told = Vec::new();
    let sets = open_reporting(&spec, &mut |event| told.push(format!("{event:?}"))).unwrap();
    assert_eq!((sets.train.count(), sets.held_out.count()), (41, 3));
    // A class of a single training row is accepted, because evaluation has separate files.
    assert_eq!(sets.classes, ["maybe", "no", "yes"]);
    assert_eq!(class_names(&spec).unwrap(), sets.classes);
    let alone = skipping(classes(from_ref(&train)));
    assert_eq!(class_names(&alone).unwrap(), open(&alone).unwrap().classes);
    let labels: Vec<_> = sets.held_out.iter().map(|example| example.label).collect();
    assert_eq!(labels, [Some(2), Some(1), Some(1)]);
    assert!(sets.held_out_places.iter().all(|place| place.to_string().contains("apart.jsonl")));
    assert_eq!((sets.description.files, sets.description.rows), (2, 44));
    assert!(told.iter().any(|said| said.contains("1 of 3 examples")), "{told:?}");
    let unknown = open(&apart(&row(1, "perhaps"))).unwrap_err().sentence;
    assert!(unknown.contains("apart.jsonl, line 1: the label `perhaps` is none of the classes"), "{unknown}");
    let empty = open(&skipping(apart("{\"text\":\"x\",\"label\":\"perhaps\"}\n"))).unwrap_err().sentence;
    assert!(empty.contains("no example to evaluate on") && empty.contains("data.held_out_path"), "{empty}");

    let talk = |at: usize| format!("{{\"prompt\":\"Question {at}?\",\"completion\":\"Answer {at}.\"}}\n");
    let train = scratch.write("talk.jsonl", (0..30).map(talk).collect::<String>().as_bytes());
    let apart = scratch.write("talk-apart.jsonl", talk(99).as_bytes());
    let sets =
        open(&ExampleSpec { held_out: 0.5, held_out_path: vec![apart], ..chat(from_ref(&train)) }).unwrap();
    assert_eq!((sets.train.count(), sets.held_out.count()), (30, 1));
    assert_eq!(learned(&sets, sets.held_out.get(0)), "Answer 99.<eos>");
    let whole = open(&chat(from_ref(&train))).unwrap();
    assert_eq!(sets.train, whole.train);
}
