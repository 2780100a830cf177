//! Templates and tokenisers that mean harm, by the dozen, in a process that may not have more than a gigabyte or two: each
//! ends soon, with a text or a sentence, and nothing is aborted.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::scratch::Scratch;
use flatout_data::Vocabulary;
use flatout_data::examples::{ChatTemplate, Conversation, ExampleSpec, Refusal, open};
use flatout_data::formats::{Field, Fields, OnError};
use serde_json::{Value, json};

/// Address space of the process, in KiB: what its threads and libraries map counts too.
const MOST_KIB: usize = 2_000_000;
/// Far longer than any of it takes on a busy machine.
const LONGEST: Duration = Duration::from_secs(60);

/// Runs an ignored test of this file by itself under the limit.
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
fn templates_keep_to_their_memory() {
    limited("templates");
}

#[test]
fn tokenisers_keep_to_their_memory() {
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

/// Doubles a text so often that it would have terabytes.
fn doubled(step: &str) -> String {
    format!(
        "{{% set ns = namespace(x='abcdefgh\\n', l=[1, 2, 3]) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ ns.x }}}}"
    )
}

#[test]
#[ignore = "run by templates_keep_to_their_memory, with less memory"]
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
    ];
    for source in &exhausted {
        match ended(source) {
            Err(Refusal::Exhausted(said)) => assert!(said.contains("more than"), "{source}: {said}"),
            other => panic!("{source}: {:.300}", format!("{other:?}")),
        }
    }
    // Long chains are long, not deep; what is deep is refused when the template is read.
    let chained = |first: &str, next: &str| format!("{{{{ {first}{} }}}}", next.repeat(100_000));
    for source in [
        chained("1", " + 1"),
        chained("'a'", " ~ 'a'"),
        chained("1", " and 1"),
        chained("0", " or 0"),
        chained("1", " == 1"),
        chained("'a'", "|trim"),
        chained("1", " * 1"),
        chained("1", " if 0 else 1"),
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
        format!("{}{}", "{% if 1 %}".repeat(50_000), "{% endif %}".repeat(50_000)),
        format!("{}{}", "{% for a in b %}".repeat(30_000), "{% endfor %}".repeat(30_000)),
        format!("{{% set {}a{} = 1 %}}", "(".repeat(100_000), ")".repeat(100_000)),
    ] {
        let error = ChatTemplate::compile(&source, "a test", vec![], None).unwrap_err();
        assert!(error.sentence.contains("deep in one another"), "{:.40}: {error}", source);
    }
}

/// Renders a template, and checks that it ends soon.
fn ended(source: &str) -> Result<usize, Refusal> {
    let since = Instant::now();
    let template = ChatTemplate::compile(source, "a test", vec![], None).unwrap();
    let rendered = template.render(&conversation(), 2, false);
    assert!(since.elapsed() < LONGEST, "{:.80} took {:?}", source, since.elapsed());
    rendered.map(|rendered| rendered.text.len())
}

/// A whole tokeniser with one part replaced.
fn with(scratch: &Scratch, part: &str, value: Value) -> String {
    let plain = Vocabulary::train(["the fox and the dog"].into_iter(), 260).unwrap().to_json();
    let mut file: Value = serde_json::from_str(&plain).unwrap();
    file[part] = value;
    scratch.write("tokenizer.json", file.to_string().as_bytes())
}

#[test]
#[ignore = "run by tokenisers_keep_to_their_memory, with less memory"]
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
        // Rows may be left out, and a tokeniser that fails on all of them fails once.
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
