"""Tests `flatout serve` with the `openai` package and a small chat model, with a line PASS or FAIL per check.

    pip install openai
    python bench/serve_openai.py target/release/flatout

Needs no GPU and no network. If the package is missing it says so and exits with 0.
"""

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    import openai
except ImportError:
    print("skipped: the package openai is not installed")
    sys.exit(0)

from serving import Claims, Server, train_chat

QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is it?"}]


def refusal(call, **words):
    """The error of a call that must be refused."""
    try:
        call(**words)
    except openai.APIStatusError as error:
        return error
    return None


def completions(client, model, claims):
    make = client.completions.create
    plain = dict(model=model, prompt="the feather", max_tokens=12, seed=5)
    first = make(**plain)
    claims("the same seed gives the same text", make(**plain).choices[0].text == first.choices[0].text, repr(first.choices[0].text))
    seeds = {make(**{**plain, "seed": seed}).choices[0].text for seed in range(8)}
    claims("other seeds give other texts", len(seeds) > 4, len(seeds))
    pieces = list(make(**plain, stream=True, stream_options={"include_usage": True}))
    claims("a stream has the text of the whole answer",
           "".join(piece.choices[0].text for piece in pieces if piece.choices) == first.choices[0].text)
    claims("a stream ends with its usage", pieces[-1].usage == first.usage and not pieces[-1].choices, pieces[-1].usage.total_tokens)
    scored = make(**plain, logprobs=3, echo=True, temperature=0)
    lists = scored.choices[0].logprobs
    count = scored.usage.total_tokens
    claims("log-probabilities have an entry per token of the prompt and the text",
           [len(lists.tokens), len(lists.token_logprobs), len(lists.top_logprobs), len(lists.text_offset)] == [count] * 4, count)
    claims("the first token of a prompt has none", lists.token_logprobs[0] is None and all(p < 0 for p in lists.token_logprobs[1:]))
    drawn = scored.usage.completion_tokens
    claims("at temperature 0 every token is the likeliest",
           all(p == max(top.values()) for p, top in zip(lists.token_logprobs[-drawn:], lists.top_logprobs[-drawn:])))
    claims("the answer begins with the prompt that is echoed", scored.choices[0].text.startswith("the feather"))
    again = make(model=model, prompt=scored.choices[0].text, max_tokens=0, logprobs=0, echo=True)
    claims("max_tokens=0 scores a text and adds nothing", again.choices[0].text == scored.choices[0].text
           and again.usage.completion_tokens == 0)
    ending = dict(model=model, prompt="a", max_tokens=40, temperature=0, logit_bias={"1": -100, "3": -100}, logprobs=0)
    long = make(**ending).choices[0]
    middle = long.text[len(long.text) // 2:][:12]
    stopped = make(**ending, stop=["@@", middle])
    cut = stopped.choices[0]
    claims("a text ends before a string of stop", cut.text == long.text[:long.text.index(middle)] and cut.finish_reason == "stop")
    parts = list(make(**ending, stop=["@@", middle], stream=True, stream_options={"include_usage": True}))
    claims("the tokens of that string count in the usage, of an answer and of a stream",
           len(cut.logprobs.tokens) < stopped.usage.completion_tokens == parts[-1].usage.completion_tokens, stopped.usage.completion_tokens)
    claims("a text that reaches max_tokens has the reason length", long.finish_reason == "length")
    several = make(**{**plain, "prompt": ["the feather", "a table"]}, n=3)
    texts = [choice.text for choice in several.choices]
    claims("prompts times n choices, in order", [c.index for c in several.choices] == list(range(6)) and len(set(texts[:3])) > 1)
    claims("the first of n is the text of n=1", texts[0] == first.choices[0].text)
    ids = make(**{**plain, "prompt": [[5, 6, 7], [8, 9]]})
    claims("prompts may be token ids", len(ids.choices) == 2 and ids.usage.prompt_tokens == 5)
    return first.choices[0].text


def chat(client, model, claims):
    make = client.chat.completions.create
    # Bans the tokens that end an answer, which a small model samples too early.
    plain = dict(model=model, messages=QUESTION, max_completion_tokens=20, seed=3, logit_bias={"1": -100, "3": -100})
    whole = make(**plain)
    claims("an answer is a message of the assistant", whole.choices[0].message.role == "assistant", repr(whole.choices[0].message.content))
    parts = list(make(**plain, stream=True))
    claims("a stream of deltas has the text of the whole answer",
           "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content)
    claims("the first delta has the role and the last the reason", parts[0].choices[0].delta.role == "assistant"
           and parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason)
    ended = make(**{**plain, "logit_bias": {"3": 100}})
    claims("the token that ends a turn of the template ends the answer", ended.choices[0].finish_reason == "stop"
           and ended.choices[0].message.content == "" and ended.usage.completion_tokens == 1)
    scored = make(**plain, logprobs=True, top_logprobs=4, temperature=0).choices[0]
    claims("tokens of an answer have log-probabilities, with those of the likeliest tokens",
           len(scored.logprobs.content) == 20 and all(len(token.top_logprobs) == 4 and token.logprob <= 0 for token in scored.logprobs.content))
    claims("bytes of the tokens make the text",
           b"".join(bytes(token.bytes) for token in scored.logprobs.content).decode() == scored.message.content)
    several = make(**plain, n=4)
    claims("n answers", len({choice.message.content for choice in several.choices}) > 1 and len(several.choices) == 4)


def at_once(client, model, claims):
    """A response among concurrent requests equals the response alone."""
    def ask(number):
        return client.completions.create(model=model, prompt="the feather " * (1 + number % 7), max_tokens=24, seed=number,
                                         logprobs=1, echo=number % 3 == 0).choices[0].model_dump()
    alone = [ask(number) for number in range(24)]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, range(24)))
    claims("24 concurrent requests get the same responses as alone, to the last digit", alone == together)


def errors(client, model, claims):
    make, talk = client.completions.create, client.chat.completions.create
    for name, call, words, kind in [
        ("tools", talk, dict(messages=QUESTION, tools=[{"type": "function", "function": {"name": "f"}}]), openai.BadRequestError),
        ("response_format", talk, dict(messages=QUESTION, response_format={"type": "json_object"}), openai.BadRequestError),
        ("suffix", make, dict(prompt="a", suffix="b"), openai.BadRequestError),
        ("best_of", make, dict(prompt="a", best_of=3), openai.BadRequestError),
        ("temperature", make, dict(prompt="a", temperature=-1), openai.BadRequestError),
        ("model", make, dict(prompt="a", model="another"), openai.NotFoundError),
    ]:
        error = refusal(call, **{"model": model, **words})
        claims(f"{name} is refused by name", isinstance(error, kind) and error.param == name, error and error.body["message"])
    error = refusal(make, model=model, prompt=list(range(5)) * 100)
    claims("a prompt beyond the context is refused with a sentence",
           isinstance(error, openai.BadRequestError) and error.code == "context_length_exceeded", error and error.body["message"])
    seen = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}]
    error = refusal(talk, model=model, messages=seen)
    claims("an image at another address is refused", isinstance(error, openai.BadRequestError), error and error.body["message"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flatout", type=Path, help="the binary")
    binary = parser.parse_args().flatout.resolve()
    print(f"openai {openai.__version__}")
    claims = Claims()
    with tempfile.TemporaryDirectory() as scratch:
        run = train_chat(binary, Path(scratch) / "run")
        with Server(binary, run, "--tokens", "256", "--at-once", "6", key="secret") as server:
            client = openai.OpenAI(base_url=server.base_url, api_key="secret", max_retries=0)
            models = client.models.list().data
            claims("the model is listed", [model.id for model in models] == [server.model], server.model)
            completions(client, server.model, claims)
            chat(client, server.model, claims)
            at_once(client, server.model, claims)
            errors(client, server.model, claims)
            wrong = openai.OpenAI(base_url=server.base_url, api_key="wrong", max_retries=0)
            error = refusal(wrong.completions.create, model=server.model, prompt="a")
            claims("a wrong key is refused", isinstance(error, openai.AuthenticationError), error and error.body["message"])
            claims("it ends with code 0 when it is stopped", server.stop() == 0)
    return claims.end()


if __name__ == "__main__":
    sys.exit(main())
