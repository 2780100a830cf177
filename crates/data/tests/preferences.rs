//! Tests from files to compared answers: formats, invalid rows, lengths, splits, and pairs that stay together.

use std::collections::HashMap;
use std::sync::Arc;

use crate::scratch::Scratch;
use flatout_data::examples::{ExampleKind, ExampleSets, ExampleSpec, TooLong, TrainOn, open, spans};
use flatout_data::formats::OnError;
use flatout_data::{BatchLimits, LayoutOptions, Lengths, SourceKind, UpdateOptions, Updates, arrange, once};

fn pairs(path: &str) -> ExampleSpec {
    ExampleSpec {
        task: ExampleKind::Pairs,
        path: vec![path.into()],
        held_out: 0.0,
        vocab: 400,
        ..ExampleSpec::default()
    }
}

/// The tokens of an example that are only read, and those that are learned.
fn read_and_learned(sets: &ExampleSets, at: usize) -> (String, String) {
    let spans = spans(&sets.vocabulary, sets.train.get(at));
    let of = |trained: bool| -> String {
        spans.iter().filter(|span| span.is_trained == trained).map(|span| span.text.as_str()).collect()
    };
    (of(false), of(true))
}

#[test]
fn forms_and_formats_give_the_same_pairs() {
    let scratch = Scratch::new("preference-forms");
    let rows = |row: fn(&str, &str, &str) -> String| -> String {
        (0..4).map(|i| row(&format!("Say {i}."), &format!("Yes {i}."), &format!("No {i}.")) + "\n").collect()
    };
    let jsonl = [
        rows(|q, c, r| {
            format!(
                r#"{{"prompt":[{{"role":"user","content":"{q}"}}],"chosen":[{{"role":"assistant","content":"{c}"}}],"rejected":[{{"role":"assistant","content":"{r}"}}]}}"#
            )
        }),
        rows(|q, c, r| {
            format!(
                r#"{{"messages":[{{"role":"user","content":"{q}"}},{{"role":"assistant","content":"{c}"}}],"rejected_response":"{r}"}}"#
            )
        }),
        rows(|q, c, r| {
            format!(
                r#"{{"conversations":[{{"from":"human","value":"{q}"}}],"chosen":{{"from":"gpt","value":"{c}"}},"rejected":{{"from":"gpt","value":"{r}"}}}}"#
            )
        }),
        rows(|q, c, r| format!(r#"{{"instruction":"{q}","chosen":"{c}","rejected":"{r}"}}"#)),
    ];
    let mut first: Option<ExampleSets> = None;
    for (number, text) in jsonl.iter().enumerate() {
        let path = scratch.write(&format!("{number}.jsonl"), text.as_bytes());
        let sets = open(&pairs(&path)).unwrap();
        assert_eq!((sets.train.count(), sets.train.units(), sets.description.train), (8, 4, 4));
        let (read, learned) = read_and_learned(&sets, 2);
        assert!(read.contains("Say 1.") && learned == "Yes 1.<|im_end|>", "{read} {learned}");
        assert_eq!(read_and_learned(&sets, 3), (read, "No 1.<|im_end|>".into()));
        match &first {
            None => first = Some(sets),
            Some(first) => {
                assert!(first.train == sets.train && first.mark == sets.mark, "form {number} is the same");
            }
        }
    }
    // A table of texts: prompts and answers without turns.
    let csv = scratch.write(
        "a.csv",
        b"prompt,chosen,rejected\n\"The sky is\",\" blue.\",\" green.\"\nGrass is, green., blue.\n",
    );
    let sets = open(&pairs(&csv)).unwrap();
    let (read, learned) = read_and_learned(&sets, 0);
    assert!(read.ends_with("The sky is") && learned.starts_with(" blue."), "{read:?} {learned:?}");
    assert!(sets.description.schema[0].contains("`prompt`, `chosen` and `rejected`"));
    let judged = scratch.write("kto.jsonl", b"{\"prompt\":\"a b\",\"completion\":\" c\",\"label\":true}\n{\"prompt\":\"a b\",\"completion\":\" d\",\"label\":false}\n");
    let sets = open(&ExampleSpec { task: ExampleKind::Judged, ..pairs(&judged) }).unwrap();
    let labels: Vec<Option<u32>> = sets.train.iter().map(|example| example.label).collect();
    assert_eq!((labels, sets.train.together()), (vec![Some(1), Some(0)], 1));
}

#[test]
fn wrong_pairs_are_named_by_their_line_or_counted() {
    let scratch = Scratch::new("preference-wrong");
    let good = r#"{"prompt":"The sky is","chosen":" blue.","rejected":" green."}"#;
    let cases = [
        (
            r#"{"prompt":"a","chosen":"b","rejected":"b"}"#,
            "both answers are equal",
            "answers that cannot be compared",
        ),
        (r#"{"prompt":"a","chosen":"b","rejected":""}"#, "`rejected` is empty", "nothing to learn"),
        (r#"{"prompt":"a","chosen":"b"}"#, "no field `rejected`", "field missing"),
        (r#"{"prompt":"","chosen":"b","rejected":"c"}"#, "`prompt` is empty", "empty"),
        (
            r#"{"prompt":"a","chosen":{"role":"user","content":"b"},"rejected":"c"}"#,
            "no first message in common",
            "answers that cannot be compared",
        ),
        (
            r#"{"prompt":"a","chosen":[{"role":"assistant"}],"rejected":"c"}"#,
            "has no `content`",
            "field null",
        ),
    ];
    for (number, (row, words, reason)) in cases.into_iter().enumerate() {
        let path = scratch.write(&format!("{number}.jsonl"), format!("{good}\n{row}\n{good}\n").as_bytes());
        let error = open(&pairs(&path)).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("line 2"), "{row}: {error}");
        assert!(error.contains("data.on_error=skip"), "{error}");
        let mut spec = pairs(&path);
        spec.read.on_error = OnError::Skip;
        let sets = open(&spec).unwrap();
        assert_eq!((sets.train.units(), sets.description.unusable.len()), (2, 1), "{row}");
        assert_eq!(sets.description.unusable[0].0, reason, "{row}");
    }
    let first = scratch.write("first.jsonl", b"{\"text\":\"a\"}\n");
    let error = open(&pairs(&first)).unwrap_err().to_string();
    assert!(error.contains("pairs are read from"), "{error}");
    let each = open(&ExampleSpec { train_on: TrainOn::Each, ..pairs(&first) }).unwrap_err().to_string();
    assert!(each.contains("answers are compared whole"), "{each}");
}

#[test]
fn the_prompt_is_never_cut_and_answers_are_at_their_ends() {
    let scratch = Scratch::new("preference-lengths");
    let row = |prompt: &str, chosen: &str, rejected: &str| {
        format!(r#"{{"prompt":"{prompt}","chosen":"{chosen}","rejected":"{rejected}"}}"#) + "\n"
    };
    let letters = |n: usize| "abcdefghijklmnopqrstuvwxyz".chars().cycle().take(n).collect::<String>();
    let text = [
        row(&letters(5), " xy", " yx"),
        row(&letters(5), &format!(" q{}", letters(40)), " b"),
        row(&letters(60), " a", " b"),
        // The part in which these differ is cut off.
        row(&letters(5), &format!("{}x", letters(60)), &format!("{}y", letters(60))),
    ];
    let path = scratch.write("a.jsonl", text.concat().as_bytes());
    // Every byte is a token.
    let spec = ExampleSpec { vocab: 260, max_tokens: 30, ..pairs(&path) };
    let sets = open(&spec).unwrap();
    assert_eq!((sets.train.units(), sets.description.cut, sets.description.too_long), (2, 1, 2));
    assert!(sets.train.iter().all(|example| example.tokens.len() <= 30 && example.is_supervised()));
    assert_eq!(sets.train.len_of(2), 30);
    let skipped = open(&ExampleSpec { too_long: TooLong::Skip, ..spec.clone() }).unwrap();
    assert_eq!((skipped.train.units(), skipped.description.too_long), (1, 3));
    let error = open(&ExampleSpec { too_long: TooLong::Fail, ..spec }).unwrap_err().to_string();
    assert!(error.contains("line 2") && error.contains("data.max_tokens is 30"), "{error}");
}

fn synthetic() -> ExampleSpec {
    ExampleSpec {
        task: ExampleKind::Pairs,
        source: SourceKind::Synthetic,
        rows: 300,
        held_out: 0.2,
        vocab: 400,
        ..ExampleSpec::default()
    }
}

#[test]
fn pairs_are_on_one_side_and_in_one_micro_batch() {
    let mut sets = open(&synthetic()).unwrap();
    assert_eq!(sets.train.count() % 2 + sets.held_out.count() % 2, 0);
    assert!(sets.held_out.units() > 30 && sets.train.units() > 150);
    for table in [&sets.train, &sets.held_out] {
        for pair in 0..table.units() {
            let [chosen, rejected] = [2 * pair, 2 * pair + 1].map(|at| table.get(at));
            let prompt = |weights: &[f32]| weights.iter().position(|weight| *weight > 0.0).unwrap();
            let (own, other) = (prompt(chosen.weights), prompt(rejected.weights));
            assert_eq!(chosen.tokens[..own], rejected.tokens[..other], "they follow the same prompt");
        }
    }
    let manner = |is_packed: bool, shares_prefixes: bool, is_sorted: bool| LayoutOptions {
        is_packed,
        has_buckets: true,
        is_sorted,
        reads_learned: true,
        shares_prefixes,
        always_sees: false,
    };
    let mut orders: Vec<Vec<usize>> = vec![];
    for (is_packed, shares, is_sorted) in
        [(true, false, false), (true, true, false), (false, false, false), (false, false, true)]
    {
        if shares {
            sets.train.share_prefixes();
        }
        let lengths = Lengths::of(&sets.train).unwrap();
        for rows in [2, 8] {
            let limits = BatchLimits { batch: 16, rows, context: 64, block: 1, together: 2 };
            let arrangement = arrange(&lengths, limits, manner(is_packed, shares, is_sorted));
            assert_eq!(arrangement.layout.together(), 2);
            assert_eq!(arrangement.shared > 0.2, shares, "{}", arrangement.words());
            let options = UpdateOptions {
                seed: 5,
                batch: 8,
                layout: arrangement.layout.clone(),
                is_sorted,
                class_weights: vec![],
            };
            let table = Arc::new(sets.train.clone());
            let mut updates = Updates::new(table.clone(), options, Updates::start(&table, 5)).unwrap();
            let mut order = vec![];
            for update in 0..2 * table.units().div_ceil(8) {
                let parts = updates.next_update().parts;
                for part in &parts {
                    let mut seen: HashMap<u64, Vec<usize>> = HashMap::new();
                    for (sample, number) in part.samples.iter().zip(&part.numbers) {
                        seen.entry(sample / 2).or_default().push(*number);
                    }
                    let is_whole = |pair: &Vec<usize>| {
                        pair.len() == 2 && pair[0] + 1 == pair[1] && pair[0].is_multiple_of(2)
                    };
                    assert!(seen.values().all(is_whole), "update {update}: {seen:?}");
                }
                let mut of_update: Vec<(u64, usize)> = parts
                    .iter()
                    .flat_map(|part| part.samples.iter().copied().zip(part.numbers.iter().copied()))
                    .collect();
                of_update.sort_unstable();
                assert_eq!(of_update.len(), 16, "eight pairs");
                order.extend(of_update.into_iter().map(|(_, number)| number));
            }
            if !is_sorted {
                orders.push(order);
            }
            let read: usize =
                once(&table, 10, &arrangement.layout, &[]).iter().map(|part| part.samples.len()).sum();
            assert_eq!(read, 20, "ten pairs are evaluated");
        }
    }
    assert!(orders.iter().all(|order| *order == orders[0]), "no layout changes the order of pairs");
}

#[test]
fn judgements_are_drawn_of_both_kinds() {
    let sets = open(&ExampleSpec { task: ExampleKind::Judged, ..synthetic() }).unwrap();
    let wanted = sets.train.iter().filter(|example| example.label == Some(1)).count();
    assert!((sets.train.count() / 3..2 * sets.train.count() / 3).contains(&wanted));
    assert_eq!(sets.train.mismatched(64).count(), sets.train.count());
}
