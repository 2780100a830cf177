//! Converts a `tokenizer.json` to the tokeniser metadata of GGUF files.
//!
//! llama.cpp has built-in tokenisers that are selected by name, and splits texts by rules that are also selected by name. A
//! tokeniser that equals none of them is refused: it would produce other tokens than those the model learned.

use std::collections::{HashMap, HashSet};

use flatout_models::library::gguf::{Metadata, Value};
use serde_json::Value as Json;

/// Facts about tokens that a file has in addition to their list.
pub struct TokenFacts {
    /// Rows of the embedding, which may exceed the tokeniser's number of tokens.
    pub rows: usize,
    pub bos: u32,
    pub eos: u32,
    /// A further token that ends an answer.
    pub end_of_turn: Option<u32>,
    /// The unknown and the padding token, if the tokeniser has them.
    pub unknown: Option<u32>,
    pub padding: Option<u32>,
    pub chat_template: Option<String>,
}

/// Token types.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// The metadata of a tokeniser, or the reason why llama.cpp has no equal one.
pub fn describe(file: &Json, facts: &TokenFacts) -> Result<Metadata, String> {
    let model = &file["model"];
    // Files from before the field existed contain only BPE.
    let kind = model["type"].as_str().or(model["merges"].is_array().then_some("BPE"));
    if kind != Some("BPE") {
        return Err(format!(
            "its tokeniser is a {}, and llama.cpp's for these models are byte-level BPE and SentencePiece's BPE: export a run that was \
             trained on text (data.path=...)",
            kind.unwrap_or("model without a name")
        ));
    }
    if model["dropout"].as_f64().is_some_and(|dropout| dropout > 0.0) {
        return Err("its tokeniser drops merges at random".into());
    }
    let merges = merges(model)?;
    let is_sentence_piece = model["byte_fallback"].as_bool() == Some(true);
    let (tokens, types) = tokens(file, facts.rows, is_sentence_piece)?;
    let text = |text: &str| Value::String(text.into());
    let mut all: Vec<(&str, Value)> = vec![];
    match is_sentence_piece {
        true => {
            let scores = scores(file, &merges, &tokens)?;
            let prefix = space_prefix(file)?;
            all.push(("ggml.model", text("llama")));
            all.push(("ggml.pre", text("default")));
            all.push(("ggml.add_space_prefix", Value::Bool(prefix)));
            all.push(("ggml.scores", Value::F32s(scores)));
        }
        false => {
            all.push(("ggml.model", text("gpt2")));
            all.push(("ggml.pre", text(splitting(file)?)));
            let joined = merges.iter().map(|[left, right]| format!("{left} {right}")).collect();
            all.push(("ggml.merges", Value::Strings(joined)));
        }
    }
    all.push(("ggml.tokens", Value::Strings(tokens)));
    all.push(("ggml.token_type", Value::I32s(types)));
    all.push(("ggml.bos_token_id", Value::U32(facts.bos)));
    all.push(("ggml.eos_token_id", Value::U32(facts.eos)));
    all.extend(facts.end_of_turn.map(|token| ("ggml.eot_token_id", Value::U32(token))));
    all.extend(facts.unknown.map(|token| ("ggml.unknown_token_id", Value::U32(token))));
    all.extend(facts.padding.map(|token| ("ggml.padding_token_id", Value::U32(token))));
    let [first, last] = around(&file["post_processor"]);
    all.push(("ggml.add_bos_token", Value::Bool(first == Some(facts.bos))));
    all.push(("ggml.add_eos_token", Value::Bool(last == Some(facts.eos))));
    all.extend(facts.chat_template.as_ref().map(|template| ("chat_template", text(template))));
    Ok(all.into_iter().map(|(key, value)| (format!("tokenizer.{key}"), value)).collect())
}

/// Every row's token and its type; rows after the tokeniser's last token get placeholder names and are never read.
fn tokens(file: &Json, rows: usize, is_sentence_piece: bool) -> Result<(Vec<String>, Vec<i32>), String> {
    let mut tokens: Vec<String> = (0..rows).map(|row| format!("[PAD{row}]")).collect();
    let mut types = vec![UNUSED; rows];
    let mut put = |id: Option<u64>, token: &str, kind: i32| {
        let place = id.and_then(|id| usize::try_from(id).ok()).filter(|id| *id < rows);
        let place = place.ok_or_else(|| format!("its token {token:?} has no row among {rows}"))?;
        tokens[place] = token.to_string();
        types[place] = kind;
        Ok::<(), String>(())
    };
    let unknown = file["model"]["unk_token"].as_str();
    let vocabulary = file["model"]["vocab"].as_object().ok_or("its tokeniser has no list of tokens")?;
    for (token, id) in vocabulary {
        let kind = match () {
            () if is_sentence_piece && unknown == Some(token) => UNKNOWN,
            () if is_sentence_piece && is_byte(token) => BYTE,
            () => NORMAL,
        };
        put(id.as_u64(), token, kind)?;
    }
    for added in file["added_tokens"].as_array().into_iter().flatten() {
        let token = added["content"].as_str().unwrap_or_default();
        if is_sentence_piece && unknown == Some(token) {
            continue;
        }
        match added["special"].as_bool() {
            Some(true) => put(added["id"].as_u64(), token, CONTROL)?,
            // They are searched in the text itself, where spaces are plain spaces.
            _ if is_sentence_piece => {
                put(added["id"].as_u64(), &token.replace('\u{2581}', " "), USER_DEFINED)?
            }
            _ => put(added["id"].as_u64(), token, USER_DEFINED)?,
        }
    }
    // A file in which two rows have the same text does not load.
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for (row, token) in tokens.iter().enumerate() {
        if let Some(other) = seen.insert(token, row) {
            return Err(format!("its tokens {other} and {row} are both spelled {token:?}"));
        }
    }
    Ok((tokens, types))
}

/// Whether a token is a byte in SentencePiece's notation: `<0x0A>`.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

/// Merges, in either of the two forms that files have.
fn merges(model: &Json) -> Result<Vec<[String; 2]>, String> {
    let pair = |merge: &Json| match merge {
        Json::String(both) => both.split_once(' ').map(|(left, right)| [left.to_string(), right.to_string()]),
        Json::Array(both) => match both.as_slice() {
            [left, right] => Some([left.as_str()?.to_string(), right.as_str()?.to_string()]),
            _ => None,
        },
        _ => None,
    };
    let all = model["merges"].as_array().ok_or("its tokeniser has no merges")?;
    all.iter()
        .map(pair)
        .collect::<Option<_>>()
        .ok_or_else(|| "its tokeniser has a merge that is not a pair".into())
}

/// A pre-tokenisation rule of llama.cpp, and its form in a `tokenizer.json`.
struct Splitting {
    name: &'static str,
    /// The pre-tokeniser's parts in order, without those that only encode bytes.
    parts: &'static [PreTokenizer],
    /// Whether words that are tokens are taken whole, without regard to merges.
    ignores_merges: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum PreTokenizer {
    /// The regular expression of GPT-2's byte-level pre-tokeniser.
    Gpt2,
    /// Splits off every digit.
    Digits,
    /// Words are the matches of a regular expression.
    Expression(&'static str),
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const SPLITTINGS: [Splitting; 5] = [
    Splitting { name: "gpt-2", parts: &[PreTokenizer::Gpt2], ignores_merges: false },
    Splitting { name: "smollm", parts: &[PreTokenizer::Digits, PreTokenizer::Gpt2], ignores_merges: false },
    Splitting { name: "llama-bpe", parts: &[PreTokenizer::Expression(LLAMA3)], ignores_merges: true },
    Splitting { name: "dbrx", parts: &[PreTokenizer::Expression(LLAMA3)], ignores_merges: false },
    Splitting { name: "qwen2", parts: &[PreTokenizer::Expression(QWEN2)], ignores_merges: false },
];

/// llama.cpp's name of the rule by which a byte-level tokeniser splits.
fn splitting(file: &Json) -> Result<&'static str, String> {
    let normalizer = &file["normalizer"];
    let parts = parts(&file["pre_tokenizer"]);
    let ignores_merges = file["model"]["ignore_merges"].as_bool() == Some(true);
    let fits = |known: &&Splitting| {
        let same = |(known, own): (&PreTokenizer, &&Json)| known.is(own);
        known.parts.len() == parts.len()
            && known.parts.iter().zip(&parts).all(same)
            && known.ignores_merges == ignores_merges
    };
    let found = SPLITTINGS.iter().find(fits);
    // Texts are nearly always in NFC already; Qwen's files ask for it and llama.cpp's Qwen tokeniser does not.
    let is_composed = normalizer["type"] == "NFC" && found.is_some_and(|found| found.name == "qwen2");
    let spells_bytes = bytes(&file["pre_tokenizer"]).is_some_and(|part| part["add_prefix_space"] != true);
    match found {
        Some(found) if spells_bytes && (normalizer.is_null() || is_composed) => Ok(found.name),
        _ => Err(format!(
            "its tokeniser splits texts as none of llama.cpp's does that are known here ({}): texts would become other \
             tokens than it learned",
            SPLITTINGS.map(|known| known.name).join(", ")
        )),
    }
}

/// The parts of a pre-tokeniser that split.
fn parts(pre_tokenizer: &Json) -> Vec<&Json> {
    let all = match pre_tokenizer["pretokenizers"].as_array() {
        Some(parts) => parts.iter().collect(),
        None => vec![pre_tokenizer],
    };
    all.into_iter().filter(|part| !(part["type"] == "ByteLevel" && part["use_regex"] == false)).collect()
}

/// The part that encodes bytes.
fn bytes(pre_tokenizer: &Json) -> Option<&Json> {
    let all = pre_tokenizer["pretokenizers"].as_array();
    let mut all = all.into_iter().flatten().chain([pre_tokenizer]);
    all.find(|part| part["type"] == "ByteLevel")
}

impl PreTokenizer {
    fn is(&self, part: &Json) -> bool {
        match self {
            PreTokenizer::Gpt2 => part["type"] == "ByteLevel",
            PreTokenizer::Digits => part["type"] == "Digits" && part["individual_digits"] == true,
            PreTokenizer::Expression(expression) => {
                part["type"] == "Split"
                    && part["pattern"]["Regex"] == *expression
                    && part["behavior"] == "Isolated"
                    && part["invert"] != true
            }
        }
    }
}

/// Merge scores of SentencePiece's tokeniser: a token's score is the position of the first merge that produces it. SentencePiece
/// merges any two tokens whose concatenation is a token, so the file must contain exactly these merges, in the order of the
/// tokens they produce.
fn scores(file: &Json, merges: &[[String; 2]], tokens: &[String]) -> Result<Vec<f32>, String> {
    let vocabulary = file["model"]["vocab"].as_object().ok_or("its tokeniser has no list of tokens")?;
    // The pairs of tokens whose concatenation is a given token.
    let pairs = |token: &str| {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        cuts.filter(|(left, right)| vocabulary.contains_key(*left) && vocabulary.contains_key(*right)).count()
    };
    let mut made: HashMap<String, usize> = HashMap::new();
    let mut count: HashMap<String, usize> = HashMap::new();
    let mut last = 0;
    let unequal = |why: String| {
        format!(
            "its merges are not those of a SentencePiece model, which llama.cpp's tokeniser follows: {why}"
        )
    };
    for (place, pair) in merges.iter().enumerate() {
        let token = pair.concat();
        let first = *made.entry(token.clone()).or_insert(place);
        if first < last {
            return Err(unequal(format!("{token:?} is made by merges that are not consecutive")));
        }
        last = first;
        *count.entry(token).or_default() += 1;
    }
    let incomplete =
        count.iter().filter(|(token, listed)| pairs(token) != **listed).map(|(token, _)| token).min();
    if let Some(token) = incomplete {
        return Err(unequal(format!("{token:?} can be merged from other tokens as well")));
    }
    // Added tokens are matched before anything is merged.
    let added =
        file["added_tokens"].as_array().into_iter().flatten().filter_map(|added| added["content"].as_str());
    let added: HashSet<&str> = added.collect();
    let is_unmade =
        |token: &&String| !made.contains_key(*token) && !added.contains(token.as_str()) && pairs(token) > 0;
    let unmade = vocabulary.keys().find(is_unmade);
    if let Some(token) = unmade {
        return Err(unequal(format!("{token:?} is made by no merge")));
    }
    let score = |token: &String| made.get(token).map_or(0.0, |place| -(*place as f32));
    Ok(tokens.iter().map(score).collect())
}

/// Whether a space is put before texts, for a tokeniser that encodes spaces as SentencePiece does.
fn space_prefix(file: &Json) -> Result<bool, String> {
    let normalizers = match file["normalizer"]["normalizers"].as_array() {
        Some(all) => all.iter().collect(),
        None => vec![&file["normalizer"]],
    };
    let (mut replaces, mut prepends, mut other) = (false, false, None);
    for part in normalizers {
        match part["type"].as_str() {
            Some("Replace") if part["pattern"]["String"] == " " && part["content"] == "\u{2581}" => {
                replaces = true
            }
            Some("Prepend") if part["prepend"] == "\u{2581}" => prepends = true,
            None if part.is_null() => {}
            kind => other = kind,
        }
    }
    let splitter = &file["pre_tokenizer"];
    match splitter["type"].as_str() {
        None => {}
        // By the library's defaults, it splits and puts a space before every part.
        Some("Metaspace") if splitter["replacement"] == "\u{2581}" && splitter["split"] == false => {
            replaces = true;
            prepends = splitter["prepend_scheme"] != "never";
        }
        Some("Metaspace") => other = Some("Metaspace that splits"),
        // No space is left to split at once all were replaced.
        Some("Split") if splitter["pattern"]["String"] == " " && replaces => {}
        kind => other = kind,
    }
    match other {
        Some(kind) => {
            Err(format!("its tokeniser has a {kind}, which SentencePiece's tokeniser in llama.cpp lacks"))
        }
        None if !replaces => Err("its tokeniser does not spell spaces as SentencePiece does".into()),
        None => Ok(prepends),
    }
}

/// The tokens that the tokeniser's own file puts before and after a text.
fn around(processor: &Json) -> [Option<u32>; 2] {
    let parts = processor["processors"].as_array();
    let template =
        parts.into_iter().flatten().chain([processor]).find(|part| part["type"] == "TemplateProcessing");
    let Some(template) = template else { return [None; 2] };
    let token = |piece: Option<&Json>| {
        let name = piece?["SpecialToken"]["id"].as_str()?;
        u32::try_from(template["special_tokens"][name]["ids"][0].as_u64()?).ok()
    };
    let single = template["single"].as_array();
    [token(single.and_then(|all| all.first())), token(single.and_then(|all| all.last()))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn facts() -> TokenFacts {
        TokenFacts {
            rows: 8,
            bos: 0,
            eos: 1,
            end_of_turn: None,
            unknown: None,
            padding: None,
            chat_template: None,
        }
    }

    fn byte_level(pre_tokenizer: Json) -> Json {
        json!({
            "added_tokens": [
                { "id": 0, "content": "<bos>", "special": true },
                { "id": 1, "content": "<eos>", "special": true },
                { "id": 6, "content": "<turn>", "special": false },
            ],
            "normalizer": null,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": null,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "byte_fallback": false, "ignore_merges": false,
                "vocab": { "<bos>": 0, "<eos>": 1, "a": 2, "b": 3, "ab": 4, "Ġ": 5 },
                "merges": [["a", "b"]],
            },
        })
    }

    fn gpt2() -> Json {
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true })
    }

    fn sequence(first: Json) -> Json {
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": false });
        json!({ "type": "Sequence", "pretokenizers": [first, bytes] })
    }

    fn split(expression: &str) -> Json {
        json!({ "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false })
    }

    fn value(metadata: &Metadata, key: &str) -> Option<Value> {
        let found = metadata.iter().find(|(known, _)| known.strip_prefix("tokenizer.") == Some(key));
        found.map(|(_, value)| value.clone())
    }

    #[test]
    fn every_row_of_the_embedding_has_a_token() {
        let described = describe(&byte_level(gpt2()), &facts()).unwrap();
        let tokens = ["<bos>", "<eos>", "a", "b", "ab", "Ġ", "<turn>", "[PAD7]"].map(String::from).to_vec();
        assert_eq!(value(&described, "ggml.tokens"), Some(Value::Strings(tokens)));
        let types = vec![CONTROL, CONTROL, NORMAL, NORMAL, NORMAL, NORMAL, USER_DEFINED, UNUSED];
        assert_eq!(value(&described, "ggml.token_type"), Some(Value::I32s(types)));
        assert_eq!(value(&described, "ggml.merges"), Some(Value::Strings(vec!["a b".into()])));
        assert_eq!(value(&described, "ggml.add_bos_token"), Some(Value::Bool(false)));
        let few = describe(&byte_level(gpt2()), &TokenFacts { rows: 5, ..facts() }).unwrap_err();
        assert!(few.contains("has no row among 5"), "{few}");
        let mut twice = byte_level(gpt2());
        twice["model"]["vocab"] = json!({ "<bos>": 0, "<eos>": 1, "a": 2, "b": 3, "ab": 4, "[PAD7]": 5 });
        assert!(describe(&twice, &facts()).unwrap_err().contains("are both spelled \"[PAD7]\""));
    }

    #[test]
    fn rules_of_splitting_are_known_by_name_or_refused() {
        let digits = json!({ "type": "Digits", "individual_digits": true });
        let smollm = json!({ "type": "Sequence", "pretokenizers": [digits, gpt2()] });
        let name =
            |file: &Json| describe(file, &facts()).map(|described| value(&described, "ggml.pre").unwrap());
        let text = |text: &str| Ok(Value::String(text.into()));
        assert_eq!(name(&byte_level(gpt2())), text("gpt-2"));
        assert_eq!(name(&byte_level(smollm)), text("smollm"));
        assert_eq!(name(&byte_level(sequence(split(LLAMA3)))), text("dbrx"));
        let mut llama3 = byte_level(sequence(split(LLAMA3)));
        llama3["model"]["ignore_merges"] = json!(true);
        assert_eq!(name(&llama3), text("llama-bpe"));
        let mut qwen = byte_level(sequence(split(QWEN2)));
        qwen["normalizer"] = json!({ "type": "NFC" });
        assert_eq!(name(&qwen), text("qwen2"));

        let mut composed = byte_level(gpt2());
        composed["normalizer"] = json!({ "type": "NFC" });
        let mut spaced = byte_level(gpt2());
        spaced["pre_tokenizer"]["add_prefix_space"] = json!(true);
        let mut merged = byte_level(sequence(split(QWEN2)));
        merged["model"]["ignore_merges"] = json!(true);
        let none = byte_level(json!({ "type": "Whitespace" }));
        let other = byte_level(sequence(split(r"\w+")));
        for file in [composed, spaced, merged, none, other] {
            assert!(name(&file).unwrap_err().contains("splits texts as none of llama.cpp's"), "{file}");
        }
        let mut words = byte_level(gpt2());
        words["model"]["type"] = json!("WordLevel");
        assert!(name(&words).unwrap_err().contains("its tokeniser is a WordLevel"));
    }

    #[test]
    fn texts_begin_with_the_tokenisers_bos() {
        let mut file = byte_level(gpt2());
        let piece = |name: &str| json!({ "SpecialToken": { "id": name, "type_id": 0 } });
        let template = json!({
            "type": "TemplateProcessing",
            "single": [piece("<bos>"), { "Sequence": { "id": "A", "type_id": 0 } }],
            "special_tokens": { "<bos>": { "id": "<bos>", "ids": [0], "tokens": ["<bos>"] } },
        });
        file["post_processor"] =
            json!({ "type": "Sequence", "processors": [{ "type": "ByteLevel" }, template] });
        let described = describe(&file, &facts()).unwrap();
        assert_eq!(value(&described, "ggml.add_bos_token"), Some(Value::Bool(true)));
        assert_eq!(value(&described, "ggml.add_eos_token"), Some(Value::Bool(false)));
        let plain = describe(&byte_level(gpt2()), &facts()).unwrap();
        assert_eq!(value(&plain, "ggml.add_bos_token"), Some(Value::Bool(false)));
    }

    #[test]
    fn unknown_and_padding_tokens_are_written_where_there_are_some() {
        let keys = ["ggml.unknown_token_id", "ggml.padding_token_id"];
        let none = describe(&byte_level(gpt2()), &facts()).unwrap();
        assert_eq!(keys.map(|key| value(&none, key)), [None, None]);
        let both = TokenFacts { unknown: Some(0), padding: Some(6), ..facts() };
        let both = describe(&byte_level(gpt2()), &both).unwrap();
        assert_eq!(keys.map(|key| value(&both, key)), [Some(Value::U32(0)), Some(Value::U32(6))]);
    }

    fn sentence_piece() -> Json {
        json!({
            "added_tokens": [{ "id": 0, "content": "<unk>", "special": true }, { "id": 1, "content": "<s>", "special": true }],
            "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
            "pre_tokenizer": { "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious", "invert": false },
            "model": {
                "type": "BPE", "byte_fallback": true, "unk_token": "<unk>",
                "vocab": { "<unk>": 0, "<s>": 1, "<0x0A>": 2, "ab": 3, "abb": 4, "▁": 5, "a": 6, "b": 7, "bb": 8 },
                "merges": ["a b", "b b", "ab b", "a bb"],
            },
        })
    }

    #[test]
    fn sentence_pieces_are_merged_by_score() {
        let facts = TokenFacts { rows: 9, ..facts() };
        let described = describe(&sentence_piece(), &facts).unwrap();
        assert_eq!(value(&described, "ggml.model"), Some(Value::String("llama".into())));
        let scores = vec![0.0, 0.0, 0.0, 0.0, -2.0, 0.0, 0.0, 0.0, -1.0];
        assert_eq!(value(&described, "ggml.scores"), Some(Value::F32s(scores)));
        let types = vec![UNKNOWN, CONTROL, BYTE, NORMAL, NORMAL, NORMAL, NORMAL, NORMAL, NORMAL];
        assert_eq!(value(&described, "ggml.token_type"), Some(Value::I32s(types)));
        assert_eq!(value(&described, "ggml.add_space_prefix"), Some(Value::Bool(false)));

        // The library's defaults: it splits, and a space comes first.
        let prefix = |metaspace: Json| {
            let mut file = sentence_piece();
            file["normalizer"] = json!(null);
            file["pre_tokenizer"] = metaspace;
            describe(&file, &facts).map(|described| value(&described, "ggml.add_space_prefix").unwrap())
        };
        let metaspace = |more: Json| {
            let mut all = json!({ "type": "Metaspace", "replacement": "▁" });
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            prefix(all)
        };
        for (more, expected) in [
            (json!({ "split": false }), true),
            (json!({ "split": false, "prepend_scheme": "always" }), true),
            (json!({ "split": false, "prepend_scheme": "first" }), true),
            (json!({ "split": false, "prepend_scheme": "never" }), false),
        ] {
            assert_eq!(metaspace(more.clone()), Ok(Value::Bool(expected)), "{more}");
        }
        for more in [json!({}), json!({ "prepend_scheme": "never" }), json!({ "split": true })] {
            assert!(metaspace(more.clone()).unwrap_err().contains("has a Metaspace that splits"), "{more}");
        }

        let mut incomplete = sentence_piece();
        incomplete["model"]["merges"] = json!(["a b", "b b", "ab b"]);
        assert!(
            describe(&incomplete, &facts)
                .unwrap_err()
                .contains("\"abb\" can be merged from other tokens as well")
        );
        let mut apart = sentence_piece();
        apart["model"]["merges"] = json!(["ab b", "a b", "b b", "a bb"]);
        assert!(
            describe(&apart, &facts)
                .unwrap_err()
                .contains("\"abb\" is made by merges that are not consecutive")
        );
        let mut spaceless = sentence_piece();
        spaceless["normalizer"] = json!(null);
        spaceless["pre_tokenizer"] = json!(null);
        assert!(describe(&spaceless, &facts).unwrap_err().contains("does not spell spaces"));
    }
}
