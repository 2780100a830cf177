//! The page: one self-contained document, made of the files in `page/`.
//!
//! Scripts and styles have a nonce that the content security policy names, and no others run: even a text that became markup
//! would do nothing. The script inserts texts as text nodes only.

use flatout_http::{Answer, random_word};

const DOCUMENT: &str = include_str!("../page/index.html");
const STYLE: &str = include_str!("../page/style.css");
/// Scripts in the order in which they are concatenated; each may use those before it.
const SCRIPTS: [&str; 10] = [
    include_str!("../page/elements.js"),
    include_str!("../page/words.js"),
    include_str!("../page/store.js"),
    include_str!("../page/chart.js"),
    include_str!("../page/curves.js"),
    include_str!("../page/samples.js"),
    include_str!("../page/run.js"),
    include_str!("../page/compare.js"),
    include_str!("../page/sweep.js"),
    include_str!("../page/main.js"),
];

pub fn answer() -> Answer {
    let word = random_word(16);
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{word}'; style-src 'nonce-{word}'; connect-src 'self'; img-src 'self' data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    Answer::whole(200, "text/html; charset=utf-8", document(&word)).with("content-security-policy", policy)
}

fn document(word: &str) -> String {
    let script = format!("(() => {{\n'use strict';\n{}}})();", SCRIPTS.join("\n"));
    DOCUMENT.replace("{word}", word).replace("{style}", STYLE).replace("{script}", &script)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_self_contained_and_inserts_texts_as_text() {
        let page = document("abc");
        for other in ["http://", "https://", "@import", "url("] {
            // The namespace of SVG is a name and not an address.
            let without = page.replace("http://www.w3.org/2000/svg", "");
            assert!(!without.contains(other), "the page names another document: {other}");
        }
        for markup in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            " style=\"",
        ] {
            assert!(!page.contains(markup), "{markup} is in the page");
        }
        assert_eq!(page.matches("nonce=\"abc\"").count(), 2);
        assert!(!page.contains("{script}") && !page.contains("{style}"));
    }
}
