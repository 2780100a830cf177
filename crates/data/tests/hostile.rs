//! Malicious templates and tokenisers, in a process limited to one or two gigabytes: each ends soon, with a text or an error,
//! and nothing aborts.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::scratch::Scratch;
use flatout_data::Vocabulary;
use flatout_data::examples::{ChatTemplate, Conversation, ExampleSpec, Refusal, TrainOn, open};
use flatout_data::formats::{Field, Fields, OnError};
use serde_json::{Value, json};

/// Limit on the address space of the process, in KiB, which includes mappings of threads and libraries.
const MOST_KIB: usize = 2_000_000;
/// Far longer than any of them takes on a busy machine.
const LONGEST: Duration = Duration::from_secs(60);

/// Runs an ignored test of this file in a process of its own under the limit.
fn limited(test: &str) {
    let limited = format!("ulimit -v {MOST_KIB}; exec \"$0\" \"$@\"");
    let program = std::env::current_exe().unwrap();
    let ran = Command::new("sh")
        .args(["-c", &limited])
        .arg(program)
        .args(["--ignored", "--exact", &format!("hostile::{test}"), "--nocapture", "--test-threads=1"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{}: {said}", ran.status);
    assert!(said.contains("1 passed"), "{said}");
}

#[test]
fn templates_stay_within_their_memory() {
    limited("templates");
}

#[test]
fn tokenisers_stay_within_their_memory() {
    limited("tokenisers");
}

fn conversation() -> Conversation {
    let message = |role: &str, content: &str| {
        Fields(vec![("role".into(), Field::from(role)), ("content".into(), Field::from(content))])
    };
    Conversation {
        messages: vec![message("user", "q"), message("assistant", "a")],
        ..Conversation::default()
    }
}

/// A template that doubles a text until it would have terabytes.
fn doubled(step: &str) -> String {
    format!(
        "{{% set ns = namespace(x='abcdefgh\\n', l=[1, 2, 3]) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ ns.x }}}}"
    )
}

#[test]
#[ignore = "run by templates_stay_within_their_memory, with less memory"]
fn templates() {
    let big = "{% set x = 'a' * 9999999 %}";
    let many = "{% set l = range(100000) | list %}";
    let exhausted = [
        doubled("{% set ns.x = ns.x ~ ns.x %}"),
        doubled("{% set ns.x = ns.x + ns.x %}"),
        doubled("{% set ns.x = ns.x * 2 %}"),
        doubled("{% set ns.x = [ns.x, ns.x] | join %}"),
        doubled("{% set ns.x = ns.x.join([ns.x, ns.x]) %}"),
        doubled("{% set ns.x = ns.x | replace('a', ns.x) %}"),
        doubled("{% set ns.x = ns.x.replace('a', ns.x) %}"),
        doubled("{% set ns.x = ns.x | replace('', ns.x) %}"),
        doubled("{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
        doubled("{% set ns.x = '{0}{0}'.format(ns.x) %}"),
        doubled("{% set ns.x = ns.x | indent(ns.x | length, true) %}"),
        doubled("{% set ns.x = [ns.x, ns.x] | string %}"),
        doubled("{% set ns.x = [ns.x, ns.x] | tojson %}"),
        doubled("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        doubled("{% set ns.l = ns.l + ns.l %}"),
        doubled("{% set ns.l = ns.l * 2 %}"),
        doubled("{% set ns.l = [ns.l, ns.l] | sum(start=[]) %}"),
        doubled("{% set ns.x = ns.x | list | join(ns.x) %}"),
        "{{ 'x' * 99999999999 }}".into(),
        "{{ [1] * 99999999999 }}".into(),
        "{{ 'a\nb' | indent(99999999999) }}".into(),
        "{{ 'a' | center(99999999999) }}".into(),
        "{{ 'a'.ljust(99999999999) }}".into(),
        "{{ 'a'.zfill(99999999999) }}".into(),
        "{{ 'a\tb'.expandtabs(99999999999) }}".into(),
        "{{ '%99999999999d' % 1 }}".into(),
        "{{ '%.99999999999f' % 1 }}".into(),
        "{{ '{:99999999999}'.format(1) }}".into(),
        "{{ [1] | batch(99999999999, 'x') | list }}".into(),
        "{{ [1] | slice(99999999999, 'x') | list }}".into(),
        format!("{big}{{{{ x | list }}}}"),
        format!("{big}{{% for i in range(99) %}}{{{{ x }}}}{{% endfor %}}"),
        format!(
            "{big}{{{{ x.split('a') }}}}{{{{ x.split('a') }}}}{{% for c in x %}}{{{{ c }}}}{{% endfor %}}"
        ),
        format!("{many}{{% for i in l %}}{{% for j in l %}}{{% set x = j %}}{{% endfor %}}{{% endfor %}}"),
        format!("{many}{{% for i in l %}}{{{{ l | sort | length }}}}{{% endfor %}}"),
        format!("{many}{{{{ l | unique | list | length }}}}"),
        format!("{many}{{{{ dict(l | batch(2)) | length }}}}"),
        format!("{many}{{% for i in l %}}{{{{ 'x' in l }}}}{{% endfor %}}"),
        "{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}".into(),
        "{% set ns = namespace() %}{% set ns.me = [ns] %}{{ ns ~ ns }}".into(),
        "{% set ns = namespace() %}{% set ns.me = {'a': ns} %}{{ ns | string | length }}".into(),
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}".into(),
        "{% set ns = namespace(x={}) %}{% for i in range(99999) %}{% set ns.x = {'a': ns.x} %}{% endfor %}"
            .into(),
        "{% set a = [a] %}{{ a }}".repeat(10_000),
        "{% for i in range(99999) %}{% for j in range(99) %}{% set n = namespace(a=1) %}{% endfor %}{% endfor %}".into(),
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".into(),
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}".into(),
        "{% macro m(x) %}{% call m(x) %}{{ caller() }}{% endcall %}{% endmacro %}{{ m(1) }}".into(),
        "{% for x in [[]] recursive %}{{ loop([[]]) }}{% endfor %}".into(),
        "{% macro m(x) %}{% set y = x ~ x %}{{ m(y) }}{% endmacro %}{{ m('abcdefgh' * 9999) }}".into(),
        // A loop that refers to the previous loop, which refers to the one before it.
        "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% for a in ns.x %}{% set ns.x = [loop] %}\
         {% endfor %}{% endfor %}"
            .into(),
        "{{ ('a' * 60000000).split('a') | length }}".into(),
        "{{ ('a' * 60000000).rsplit('a') | length }}".into(),
        "{{ ('a ' * 30000000).split() | length }}".into(),
        "{{ ('a ' * 30000000).rsplit() | length }}".into(),
        "{{ ('a\n' * 30000000).splitlines() | length }}".into(),
        "{{ [1] | slice(9999999) | list | length }}".into(),
        "{{ range(100000) | batch(1) | map('list') | map('batch', 1) | map('list') | list | string | length }}"
            .repeat(20),
        format!("{big}{{% for i in range(99999) %}}{{% set y = x | wordcount %}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% set y = x is lower %}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% set y = x.startswith((x, x)) %}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% set y = x | truncate(9999999) %}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% set y = x[::-1] %}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% set y = x.upper() %}}{{% endfor %}}"),
        "{{ '%.65536f' % 1 }}".into(),
        "{{ '{:.65536f}'.format(1.5) }}".into(),
    ];
    for source in &exhausted {
        match ended(source) {
            Err(Refusal::Exhausted(said)) => assert!(said.contains("more than"), "{source}: {said}"),
            other => panic!("{source}: {:.300}", format!("{other:?}")),
        }
    }
    // These may succeed or fail, but must neither panic nor use more memory.
    let least = "(-170141183460469231731687303715884105727 - 1)";
    let nan = "('nan' | float)";
    for source in [
        format!("{{{{ range(0, 5, {least}) | list }}}}{{{{ range({least}, 5) }}}}"),
        format!("{{{{ range(0, -{least}, -{least}) | list }}}}"),
        format!("{{{{ -{least} }}}}"),
        format!("{{{{ {least} // -1 }}}}"),
        format!("{{{{ {least} % -1 }}}}"),
        format!("{{{{ {least} | abs }}}}"),
        format!("{{{{ 'abc'[{least}:] }}}}{{{{ 'abc'[::{least}] }}}}{{{{ [1, 2][{least}] }}}}"),
        format!("{{{{ 'abc'.find('c', {least}) }}}}{{{{ 'abc' | truncate({least}) }}}}"),
        format!("{{{{ ([1, {nan}, 2, 0] * 300) | sort | length }}}}"),
        format!("{{{{ ([(1, {nan}), (0, 1), ({nan}, 2)] * 300) | sort | length }}}}"),
        "{{ ([1, 'a', none] * 300) | sort }}".into(),
        "{{ {1: 1, 'a': 2, none: 3} | tojson(sort_keys=true) }}".into(),
        "{{ '%.32768f' % 1.5 }}{{ '%.32768g' % 0.0001 }}{{ '%#.32768e' % 1 }}{{ '{:.32768%}'.format(0.1) }}".into(),
        "{% for a in [1, 2] %}{{ loop.changed(loop) }}{{ loop.cycle(loop, loop) }}{% endfor %}".into(),
        "{% set ns = namespace() %}{% for a in [1] %}{% set ns.l = loop %}{% endfor %}{{ ns.l.changed(ns.l) }}".into(),
        format!(
            "{big}{{% set ns = namespace(l=[]) %}}{{% for i in range(3000) %}}{{% set ns.l = ns.l + [{{}}[x]] %}}{{% endfor %}}"
        ),
        format!("{big}{{{{ raise_exception(x) }}}}"),
        format!("{big}{{{{ x.nothing.more }}}}{{{{ x | int }}}}"),
        format!("{{% macro m({}) %}}{{% endmacro %}}{{{{ m({}) }}}}", names(50_000, ""), names(50_000, "=1")),
        format!("{{{{ 1 | {}b }}}}", "a.".repeat(300_000)),
    ] {
        if let Err(refusal) = ended(&source) {
            assert!(refusal.to_string().len() < 1000, "{:.80}: {:.300}", source, refusal.to_string());
        }
    }
    // Long chains do not nest; deep nesting is refused when the template is parsed.
    let chained = |first: &str, next: &str| format!("{{{{ {first}{} }}}}", next.repeat(100_000));
    for source in [
        chained("1", " + 1"),
        chained("'a'", " ~ 'a'"),
        chained("1", " and 1"),
        chained("0", " or 0"),
        chained("1", " == 1"),
        chained("'a'", "|trim"),
        chained("1", " * 1"),
        format!("{{{{ 1{} }}}}", " if 0 else 1".repeat(80_000)),
        format!("{{{{ {}1 }}}}", "not ".repeat(100_000)),
        format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(50_000)),
    ] {
        assert!(ended(&source).is_ok(), "{:.40}: {:.300}", source, format!("{:?}", ended(&source)));
    }
    for source in [
        format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000)),
        format!("{{{{ {}1{} }}}}", "[".repeat(100_000), "]".repeat(100_000)),
        format!("{{{{ {}1{} }}}}", "{1:".repeat(100_000), "}".repeat(100_000)),
        format!("{{{{ {}1 }}}}", "-".repeat(100_000)),
        format!("{{{{ {}1{} }}}}", "a(".repeat(100_000), ")".repeat(100_000)),
        format!("{{{{ {}1{} }}}}", "a[".repeat(100_000), "]".repeat(100_000)),
        format!("{}{}", "{% if 1 %}".repeat(40_000), "{% endif %}".repeat(40_000)),
        format!("{}{}", "{% for a in b %}".repeat(30_000), "{% endfor %}".repeat(30_000)),
        format!("{{% set {}a{} = 1 %}}", "(".repeat(100_000), ")".repeat(100_000)),
        chained("1", " if 1"),
    ] {
        let error = ChatTemplate::compile(&source, "a test", vec![], None).unwrap_err();
        assert!(error.sentence.contains("nest"), "{:.40}: {error}", source);
    }
    let named = format!("{{{{ {} }}}}", "a".repeat(500_000));
    let error = ChatTemplate::compile(&named, "a test", vec![], None).unwrap_err();
    assert!(error.sentence.contains("a name has more than"), "{:.300}", error.sentence);
}

/// A list of different names, each followed by a text.
fn names(count: usize, behind: &str) -> String {
    (0..count).map(|number| format!("a{number}{behind}")).collect::<Vec<_>>().join(",")
}

/// Renders a template, and checks that it ends soon.
fn ended(source: &str) -> Result<usize, Refusal> {
    let since = Instant::now();
    let template = ChatTemplate::compile(source, "a test", vec![], None).unwrap();
    let rendered = template.render(&conversation(), 2, false);
    assert!(since.elapsed() < LONGEST, "{:.80} took {:?}", source, since.elapsed());
    rendered.map(|rendered| rendered.text.len())
}

/// A complete tokeniser with one part replaced.
fn with(scratch: &Scratch, part: &str, value: Value) -> String {
    let plain = Vocabulary::train(["the fox and the dog"].into_iter(), 260).unwrap().to_json();
    let mut file: Value = serde_json::from_str(&plain).unwrap();
    file[part] = value;
    scratch.write("tokenizer.json", file.to_string().as_bytes())
}

#[test]
#[ignore = "run by tokenisers_stay_within_their_memory, with less memory"]
fn tokenisers() {
    let scratch = Scratch::new("hostile-tokenisers");
    let replace =
        |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let text = |pattern: &str| json!({"String": pattern});
    let regex = |pattern: &str| json!({"Regex": pattern});
    let split = |pattern: Value, behavior: &str, invert: bool| json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert});
    let times = |list: &str, step: Value, count: usize| json!({"type": "Sequence", list: vec![step; count]});
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let repeated = |id: &str, count: usize| {
        let piece = json!({"Sequence": {"id": id, "type_id": 0}});
        let other = json!({"Sequence": {"id": "B", "type_id": 0}});
        json!({"type": "TemplateProcessing", "single": vec![piece.clone(); count], "pair": [piece, other], "special_tokens": {}})
    };
    let long = "x".repeat(5000);
    let mut parts = vec![
        ("normalizer", replace(text(""), "y")),
        ("normalizer", replace(regex(""), "y")),
        ("normalizer", replace(regex("z*"), "y")),
        ("normalizer", replace(text("a"), &long)),
        ("normalizer", json!({"type": "Prepend", "prepend": long})),
        ("normalizer", times("normalizers", replace(text("a"), "aaaaaaaa"), 20)),
        ("normalizer", times("normalizers", replace(regex("."), "ab"), 40)),
        ("normalizer", times("normalizers", replace(regex("$"), "aaaaaaaa"), 40)),
        ("normalizer", times("normalizers", json!({"type": "Prepend", "prepend": "aaaaaaaaaaaaaaaa"}), 2000)),
        ("normalizer", times("normalizers", json!({"type": "ByteLevel"}), 40)),
        ("normalizer", times("normalizers", json!({"type": "NFKD"}), 40)),
        ("pre_tokenizer", times("pretokenizers", bytes.clone(), 30)),
        ("decoder", times("decoders", replace(text("a"), "aaaaaaaa"), 20)),
        ("decoder", replace(text(""), "y")),
        ("normalizer", replace(regex("(a|a)*(?=b)"), "y")),
        ("pre_tokenizer", split(regex("(a|a)*(?=b)"), "Isolated", false)),
        ("pre_tokenizer", split(regex("(a*)*(?!a)b"), "Removed", true)),
        ("post_processor", repeated("A", 5000)),
        ("post_processor", json!({"type": "Sequence", "processors": vec![repeated("A", 6); 12]})),
        (
            "model",
            json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 1 << 30, "vocab": {"[UNK]": 2, "<bos>": 0, "<eos>": 1, "b": 3}}),
        ),
        (
            "added_tokens",
            json!([{"id": 0, "content": "", "single_word": false, "lstrip": true, "rstrip": true, "normalized": true, "special": false}]),
        ),
    ];
    for behavior in ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"] {
        for invert in [false, true] {
            for pattern in [text(""), regex(""), regex("z*"), regex("^"), regex("(?=a)")] {
                parts.push(("pre_tokenizer", split(pattern, behavior, invert)));
            }
        }
    }
    assert!(parts.len() >= 60);
    let rows: String = (0..400)
        .map(|row| {
            let question = if row % 2 == 0 { "a".repeat(500) } else { format!("Ünï {row} ﷺ") };
            json!({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "a b"}]})
                .to_string()
                + "\n"
        })
        .collect();
    let path = scratch.write("rows.jsonl", rows.as_bytes());
    for (part, value) in parts {
        let named = format!("{part} {:.100}", value.to_string());
        let since = Instant::now();
        let tokenizer = with(&scratch, part, value);
        if let Ok(vocabulary) = Vocabulary::load(Path::new(&tokenizer)) {
            for text in ["", "a", "Ünï ﷺ", &"a".repeat(1 << 14), &" ".repeat(1 << 14)] {
                if let Ok(tokens) = vocabulary.encode(text) {
                    vocabulary.decode(&tokens);
                }
                let _ = vocabulary.encode_prompts(&[text.into()]);
            }
        }
        // A tokeniser that fails on every row is one error, although rows may be skipped.
        let mut spec = ExampleSpec {
            path: vec![path.clone()],
            tokenizer: Some(tokenizer.into()),
            template: Some("{% for m in messages %}{{ m.content }}{% endfor %}".into()),
            held_out: 0.0,
            max_tokens: 4096,
            workers: 2,
            ..ExampleSpec::default()
        };
        spec.read.on_error = OnError::Skip;
        if let Err(error) = open(&spec) {
            assert!(error.is_input() && error.sentence.ends_with('.'), "{named}: {error}");
        }
        assert!(since.elapsed() < LONGEST, "{named} took {:?}", since.elapsed());
    }
}

#[test]
fn a_template_that_fails_on_every_row_fails_once() {
    let scratch = Scratch::new("hostile-once");
    let row = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]});
    let path = scratch.write("rows.jsonl", (row.to_string() + "\n").repeat(3000).as_bytes());
    let spec = |template: &str| {
        let mut spec = ExampleSpec {
            path: vec![path.clone()],
            template: Some(template.into()),
            held_out: 0.0,
            vocab: 400,
            workers: 2,
            ..ExampleSpec::default()
        };
        spec.read.on_error = OnError::Skip;
        spec
    };
    let slow = "{% for a in range(9999) %}{% for b in range(9999) %}{% set x = b %}{% endfor %}{% endfor %}";
    let since = Instant::now();
    let error = open(&spec(slow)).unwrap_err().sentence;
    assert!(since.elapsed() < LONGEST, "{:?}", since.elapsed());
    assert!(error.contains("instructions") && error.contains("rows.jsonl, line"), "{error}");
    assert!(!error.contains("on_error=skip"), "{error}");
    let dated = "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}";
    let error = open(&spec(dated)).unwrap_err().sentence;
    assert!(error.contains("data.date=2025-01-31") && !error.contains("give another template"), "{error}");
}

#[test]
fn a_row_that_is_too_much_for_the_template_is_left_out_alone() {
    let scratch = Scratch::new("hostile-row");
    let turns = |count: usize| -> Vec<Value> {
        let turn = |at: usize| {
            let role = ["user", "assistant"][at % 2];
            json!({"role": role, "content": format!("turn {at}")})
        };
        (0..count).map(turn).collect()
    };
    let deep = format!("{}1{}", "[".repeat(110), "]".repeat(110));
    let deep: Value = serde_json::from_str(&deep).unwrap();
    let rows = [
        json!({"messages": turns(2)}),
        json!({"messages": turns(3000)}),
        json!({"messages": turns(2), "tools": [deep]}),
        json!({"messages": turns(4)}),
    ];
    let rows: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let template = "{% for m in messages %}{% for n in messages %}{% if n.content == m.content and not tools %}\
                    {{ n.content }}{% endif %}{% endfor %}{% endfor %}";
    let mut spec = ExampleSpec {
        path: vec![scratch.write("rows.jsonl", rows.as_bytes())],
        template: Some(template.into()),
        train_on: TrainOn::All,
        held_out: 0.0,
        vocab: 400,
        ..ExampleSpec::default()
    };
    spec.read.on_error = OnError::Skip;
    let sets = open(&spec).unwrap();
    assert_eq!((sets.train.count(), sets.description.unusable.len()), (2, 1), "{:?}", sets.description);
    spec.read.on_error = OnError::Fail;
    let error = open(&spec).unwrap_err().sentence;
    assert!(error.contains("rows.jsonl, line 2") && error.contains("data.on_error=skip"), "{error}");
}
