//! The server with a small model, over HTTP: responses, streams, bad input, clients that disconnect.

mod client;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Fixture, sse};

/// A request in which the tokens that end a text are banned, because a small model samples them early.
fn endless(more: Value) -> Value {
    let mut body = json!({ "prompt": "the feather", "max_tokens": 12, "seed": 5, "logit_bias": { "1": -100, "3": -100 } });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn texts_are_delivered_whole_and_as_streams() {
    let fixture = Fixture::new(None);
    let (status, whole) = fixture.post("/v1/completions", &endless(json!({})));
    assert_eq!(status, 200, "{whole}");
    assert_eq!(
        (whole["object"].as_str(), whole["choices"][0]["finish_reason"].as_str()),
        (Some("text_completion"), Some("length"))
    );
    assert_eq!(whole["usage"]["completion_tokens"], 12);
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let (_, again) = fixture.post("/v1/completions", &endless(json!({ "model": fixture.name() })));
    assert_eq!(again["choices"], whole["choices"], "the same seed draws the same text");
    let parts = sse(&fixture.post_raw(
        "/v1/completions",
        &endless(json!({ "stream": true, "stream_options": { "include_usage": true } })),
    ));
    let streamed: String = parts.iter().filter_map(|part| part["choices"][0]["text"].as_str()).collect();
    assert_eq!(streamed, text);
    assert_eq!(parts.last().unwrap()["usage"], whole["usage"]);
    let (_, both) =
        fixture.post("/v1/completions", &endless(json!({ "prompt": ["the feather", [5, 6, 7]], "n": 2 })));
    assert_eq!(both["choices"].as_array().unwrap().len(), 4);
    assert_eq!(both["choices"][0]["text"], text, "the first of n is the text of n=1");
    assert_ne!(both["choices"][1]["text"], text);
    let (_, equal) =
        fixture.post("/v1/completions", &endless(json!({ "prompt": ["the feather", "the feather"] })));
    let of = |answer: &Value, choice: usize| answer["choices"][choice]["text"].clone();
    assert_eq!(
        (of(&equal, 0), of(&equal, 1)),
        (of(&both, 0), of(&both, 1)),
        "equal prompts are continued as one prompt is several times"
    );
}

#[test]
fn log_probabilities_are_of_the_prompt_and_the_text() {
    let fixture = Fixture::new(None);
    let body = endless(json!({ "logprobs": 3, "echo": true, "temperature": 0 }));
    let (_, scored_text) = fixture.post("/v1/completions", &body);
    let (choice, usage) = (&scored_text["choices"][0], &scored_text["usage"]);
    let count = usage["total_tokens"].as_u64().unwrap() as usize;
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(choice["logprobs"][list].as_array().unwrap().len(), count, "{list}");
    }
    assert!(
        choice["logprobs"]["token_logprobs"][0].is_null()
            && choice["text"].as_str().unwrap().starts_with("the feather")
    );
    // The prompt alone has the same log-probabilities.
    let scored = json!({ "prompt": "the feather", "max_tokens": 0, "echo": true, "logprobs": 0 });
    let (_, scored) = fixture.post("/v1/completions", &scored);
    assert_eq!(
        (&scored["choices"][0]["text"], &scored["usage"]["completion_tokens"]),
        (&json!("the feather"), &json!(0))
    );
    let numbers = |value: &Value| -> Vec<f64> {
        value["logprobs"]["token_logprobs"].as_array().unwrap().iter().filter_map(Value::as_f64).collect()
    };
    let (drawn, scored) = (numbers(choice), numbers(&scored["choices"][0]));
    assert!(scored.len() > 1 && drawn.starts_with(&scored), "{drawn:?} {scored:?}");
    // A text that ends at its first token has that token in its lists.
    let (_, ended) =
        fixture.post("/v1/completions", &json!({ "prompt": "a", "logprobs": 1, "logit_bias": { "1": 100 } }));
    assert_eq!(ended["choices"][0]["logprobs"]["tokens"], json!(["<eos>"]));
    assert_eq!(
        (ended["choices"][0]["text"].as_str(), ended["usage"]["completion_tokens"].as_u64()),
        (Some(""), Some(1))
    );
}

#[test]
fn usage_counts_the_tokens_of_a_string_that_ends_a_text() {
    let fixture = Fixture::new(None);
    let plain = |more: Value| {
        let mut body = endless(json!({ "temperature": 0, "max_tokens": 40, "logprobs": 0 }));
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fixture.post("/v1/completions", &body).1
    };
    let whole = plain(json!({}));
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let stop: String = text.chars().skip(text.chars().count() / 2).take(12).collect();
    let ended = plain(json!({ "stop": stop }));
    assert_eq!(ended["choices"][0]["finish_reason"], "stop", "{ended}");
    let drawn = ended["usage"]["completion_tokens"].as_u64().unwrap();
    // The stop string is complete with the last of these tokens and not before.
    let with_most = |most: u64| plain(json!({ "stop": stop, "max_tokens": most }));
    assert_eq!(with_most(drawn)["choices"], ended["choices"]);
    assert_eq!(with_most(drawn - 1)["choices"][0]["finish_reason"], "length");
    let kept = ended["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len() as u64;
    assert!(kept + 1 < drawn, "{kept} tokens of the text and more than one of {stop:?} make {drawn}");
    let parts = sse(&fixture.post_raw(
        "/v1/completions",
        &endless(json!({ "temperature": 0, "max_tokens": 40, "stop": stop, "stream": true,
            "stream_options": { "include_usage": true } })),
    ));
    assert_eq!(parts.last().unwrap()["usage"], ended["usage"]);
}

#[test]
fn answers_are_messages_of_the_assistant() {
    let fixture = Fixture::new(None);
    let mut body = json!({ "messages": [{ "role": "system", "content": "be brief" }, { "role": "user", "content": "what?" }],
        "max_completion_tokens": 10, "seed": 1, "logprobs": true, "top_logprobs": 2, "logit_bias": { "1": -100, "3": -100 } });
    let (status, whole) = fixture.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{whole}");
    let message = &whole["choices"][0]["message"];
    assert_eq!(
        (whole["object"].as_str(), message["role"].as_str()),
        (Some("chat.completion"), Some("assistant"))
    );
    assert_eq!(whole["choices"][0]["logprobs"]["content"].as_array().unwrap().len(), 10);
    body["stream"] = true.into();
    let parts = sse(&fixture.post_raw("/v1/chat/completions", &body));
    assert_eq!(parts[0]["choices"][0]["delta"]["role"], "assistant");
    let streamed: String =
        parts.iter().filter_map(|part| part["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, message["content"].as_str().unwrap());
    body["logit_bias"] = json!({ "3": 100 });
    body["stream"] = false.into();
    let (_, ended) = fixture.post("/v1/chat/completions", &body);
    assert_eq!(
        (&ended["choices"][0]["message"]["content"], &ended["choices"][0]["finish_reason"]),
        (&json!(""), &json!("stop"))
    );
    let seen = json!([{ "type": "image_url", "image_url": { "url": "data:image/png;base64,AAAA" } }]);
    let (status, refused) =
        fixture.post("/v1/chat/completions", &json!({ "messages": [{ "role": "user", "content": seen }] }));
    assert!(
        status == 400 && refused["error"]["message"].as_str().unwrap().contains("sees no images"),
        "{refused}"
    );
}

#[test]
fn bad_requests_get_a_sentence_and_do_no_harm() {
    let fixture = Fixture::new(Some("secret"));
    let long = vec![5; 200];
    for (path, body, status, sentence) in [
        ("/v1/completions", "{\"prompt\": ".to_string(), 400, "not JSON"),
        ("/v1/completions", "[".repeat(100_000), 400, "not JSON"),
        ("/v1/completions", "\u{0}\u{1}".into(), 400, "not JSON"),
        ("/v1/completions", "[]".into(), 400, "must be a JSON object"),
        ("/v1/completions", "{}".into(), 400, "`prompt` is missing"),
        (
            "/v1/completions",
            json!({ "prompt": long }).to_string(),
            400,
            "200 tokens, and this server reads 96",
        ),
        ("/v1/completions", json!({ "prompt": "a".repeat(1 << 20) }).to_string(), 400, "has 1048576 bytes"),
        ("/tokenize", json!({ "prompt": "a".repeat(1 << 20) }).to_string(), 400, "has 1048576 bytes"),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user", "content": "a".repeat(1 << 20) }] }).to_string(),
            400,
            "has 1048576 bytes",
        ),
        ("/v1/completions", json!({ "prompt": [4_000_000] }).to_string(), 400, "not one of the vocabulary's"),
        ("/v1/completions", json!({ "prompt": [[]] }).to_string(), 400, "without tokens"),
        ("/v1/completions", json!({ "prompt": "a", "model": "x" }).to_string(), 404, "there is no model"),
        ("/v1/completions", json!({ "prompt": vec!["a"; 100], "n": 100 }).to_string(), 400, "10000 texts"),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user" }] }).to_string(),
            400,
            "has no content",
        ),
        ("/v1/embeddings", "{}".into(), 404, "there is nothing here"),
        ("/v1/models", "{}".into(), 405, "use GET"),
        ("/health", "{}".into(), 405, "use GET"),
        ("/v1/completions", " ".repeat(5 << 20), 413, "larger than"),
    ] {
        let (found, response) = fixture.post_text(path, &body);
        assert_eq!(found, status, "{path}: {response}");
        let response: Value = serde_json::from_str(&response).expect("JSON");
        assert!(response["error"]["message"].as_str().unwrap().contains(sentence), "{sentence}: {response}");
        assert!(response["error"]["type"].is_string());
    }
    let with = |head: &str| {
        fixture.ask(&format!("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}\r\n"))
    };
    assert!(with("Authorization: Bearer secret\r\n").starts_with("HTTP/1.1 200"));
    let health = "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer secret\r\n\r\n";
    assert!(fixture.ask(health).ends_with("{\"status\":\"ok\"}"));
    for wrong in [
        "",
        "Authorization: Bearer secre\r\n",
        "Authorization: secret\r\n",
        "Authorization: Bearer \u{e9}\r\n",
    ] {
        let response = with(wrong);
        assert!(response.starts_with("HTTP/1.1 401") && response.contains("invalid_api_key"), "{response}");
    }
    let huge = format!("Authorization: Bearer secret\r\nX: {}\r\n", "y".repeat(1 << 20));
    assert!(!with(&huge).starts_with("HTTP/1.1 200"));
    let (status, _) = fixture.post("/v1/completions", &endless(json!({})));
    assert_eq!(status, 200, "the server still works");
}

#[test]
fn a_client_that_disconnects_frees_its_lane() {
    let fixture = Fixture::new(None);
    // More requests than lanes, with the longest texts, each abandoned after its first message.
    for _ in 0..6 {
        let body = endless(json!({ "max_tokens": 1_000_000, "stream": true, "n": 4 })).to_string();
        let mut stream = fixture.connect();
        let head =
            format!("Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {}", body.len());
        stream
            .write_all(format!("POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}").as_bytes())
            .unwrap();
        let mut start = [0; 300];
        stream.read_exact(&mut start).unwrap();
    }
    // A client that disconnects while it waits for a whole response.
    let body = endless(json!({ "max_tokens": 1_000_000, "n": 100 })).to_string();
    let mut stream = fixture.connect();
    let head = format!("Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {}", body.len());
    stream.write_all(format!("POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}").as_bytes()).unwrap();
    drop(stream);
    let (status, _) = fixture.post("/v1/completions", &endless(json!({})));
    assert_eq!(status, 200);
    let began = Instant::now();
    while fixture
        .lines()
        .iter()
        .filter(|line| line.contains(" done") || line.contains("left by its client"))
        .count()
        < 8
    {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", fixture.lines());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_request_to_a_full_queue_is_to_be_sent_again() {
    let fixture = Fixture::new(None);
    let mut open = vec![];
    for _ in 0..3 {
        let body = endless(json!({ "max_tokens": 1_000_000, "n": 128, "stream": true })).to_string();
        let mut stream = fixture.connect();
        let head = format!(
            "Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}",
            body.len()
        );
        stream
            .write_all(format!("POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}").as_bytes())
            .unwrap();
        let mut line = [0; 12];
        stream.read_exact(&mut line).unwrap();
        open.push((stream, String::from_utf8_lossy(&line).into_owned()));
    }
    assert!(open.iter().any(|(_, line)| line == "HTTP/1.1 429"), "{open:?}");
    let (refused, _) = open.iter_mut().find(|(_, line)| line == "HTTP/1.1 429").unwrap();
    let mut rest = String::new();
    refused.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("retry-after: 1") && rest.contains("rate_limit_error"), "{rest}");
}

#[test]
fn a_stop_waits_for_running_requests_and_no_longer() {
    let mut fixture = Fixture::new(None);
    let body = endless(json!({ "max_tokens": 60, "stream": true, "n": 8 })).to_string();
    let mut stream = fixture.connect();
    let head = format!(
        "Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}",
        body.len()
    );
    stream.write_all(format!("POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}").as_bytes()).unwrap();
    let mut seen = vec![0; 300];
    stream.read_exact(&mut seen).unwrap();
    let began = Instant::now();
    fixture.stop();
    stream.read_to_end(&mut seen).unwrap();
    assert!(String::from_utf8_lossy(&seen).contains("data: [DONE]"), "{}", String::from_utf8_lossy(&seen));
    assert!(began.elapsed() < Duration::from_secs(20));
}
