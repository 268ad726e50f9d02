"""Log-probabilities that the service returns, against those of the target read by transformers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.cli.menu.names import PACKAGE
from planted_faults import planted
from served import served

pytest.importorskip("fastapi", reason="specharness[serve] is not installed")
httpx = pytest.importorskip("httpx2")

TINY = PACKAGE / "local" / "models" / "shipped" / "tiny"
PROMPTS = ["Once upon a time", "12 + 30 =", "The fox", "In a small village"]
# Rounding of passes over one token, several, and a whole text.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("serve")
    with served(directory, "batch_size=4", "max_logprobs=960") as started:
        yield started


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def exact(model: Any, token_ids: list[int]) -> torch.Tensor:
    """The target's log-probabilities [n - 1, V] of every next token."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)


def ask(url: str, body: dict[str, Any], path: str = "/v1/completions") -> Any:
    answer = httpx.post(url + path, json=body, timeout=None)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def stream(url: str, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
    asked = {"json": {**body, "stream": True}, "timeout": None}
    with httpx.stream("POST", url + path, **asked) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


def check_parallel_lists(choice: Any, prompt: list[int], expected: torch.Tensor, num: int) -> None:
    """The four lists of a completion: `num` tokens before which come those of `prompt`."""
    found = choice["logprobs"]
    tokens = choice["token_ids"]
    assert len(tokens) == num
    assert {len(listed) for listed in found.values()} == {num}
    for place, (token, logprob) in enumerate(zip(tokens, found["token_logprobs"], strict=True)):
        distribution = expected[len(prompt) - 1 + place]
        assert logprob == pytest.approx(float(distribution[token]), abs=TOLERANCE)
        likeliest = distribution.topk(3).values.tolist()
        shown = sorted(found["top_logprobs"][place].values(), reverse=True)
        assert shown[:3] == pytest.approx(likeliest, abs=TOLERANCE)
        assert found["top_logprobs"][place][found["tokens"][place]] == logprob
        begin = found["text_offset"][place]
        text = found["tokens"][place]
        if not text.startswith("<|"):  # special tokens are no part of the text
            assert choice["text"][begin : begin + len(text)] == text


@pytest.mark.parametrize("arm", ["", "/regular"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "top_k": 5}])
def test_answers_in_one_batch(
    url: str, tokenizer: Any, model: Any, arm: str, sampling: dict[str, Any]
) -> None:
    """Raw ones whatever the sampling, for those that ask; all texts are the same as without."""
    common = {"max_tokens": 20, "seed": 3, "ignore_eos": True, "return_token_ids": True, **sampling}
    plain = [{"prompt": prompt, **common} for prompt in PROMPTS]
    bodies = [plain[0], {**plain[1], "logprobs": 3}, plain[2], {**plain[3], "logprobs": 3}]
    with ThreadPoolExecutor(4) as pool:
        choices = list(pool.map(lambda body: ask(url + arm, body), bodies))
        without = list(pool.map(lambda body: ask(url + arm, body), plain))
    assert [one["text"] for one in choices] == [one["text"] for one in without]
    assert [one["logprobs"] is None for one in choices] == [True, False, True, False]
    for choice in (choices[1], choices[3]):
        prompt = choice["prompt_token_ids"]
        check_parallel_lists(choice, prompt, exact(model, prompt + choice["token_ids"]), 20)


def test_a_stream_has_an_entry_for_each_token_of_a_burst(url: str) -> None:
    body = {
        "prompt": PROMPTS[0],
        "max_tokens": 30,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": True,
    }
    body["return_token_ids"] = True
    whole = ask(url, body)
    chunks = stream(url, body)
    sizes = [len(chunk["token_ids"]) for chunk in chunks]
    assert max(sizes) > 2
    assert sizes == [len(chunk["logprobs"]["tokens"]) for chunk in chunks]
    for name, expected in whole["logprobs"].items():
        joined = [one for chunk in chunks for one in chunk["logprobs"][name]]
        if name in ("token_logprobs", "top_logprobs"):
            continue
        assert joined == expected, name
    values = [one for chunk in chunks for one in chunk["logprobs"]["token_logprobs"]]
    assert values == pytest.approx(whole["logprobs"]["token_logprobs"], abs=TOLERANCE)


@pytest.mark.parametrize("is_stream", [False, True])
def test_chats(url: str, tokenizer: Any, model: Any, is_stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "temperature": 0.7, "seed": 5, "max_tokens": 16,
            "logprobs": True, "top_logprobs": 2, "return_token_ids": True}  # fmt: skip
    path = "/v1/chat/completions"
    chunks = stream(url, body, path) if is_stream else [ask(url, body, path)]
    prompt = chunks[0]["prompt_token_ids"]
    tokens = [token for chunk in chunks for token in chunk["token_ids"]]
    content = [entry for chunk in chunks for entry in chunk["logprobs"]["content"]]
    expected = exact(model, prompt + tokens)[len(prompt) - 1 :]
    assert len(content) == len(tokens)
    for token, entry, distribution in zip(tokens, content, expected, strict=True):
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["token"] == tokenizer.decode([token])
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] == pytest.approx(float(distribution[token]), abs=TOLERANCE)
        values, ids = distribution.topk(2)
        assert [one["token"] for one in entry["top_logprobs"]] == [
            tokenizer.decode([one]) for one in ids.tolist()
        ]
        shown = [one["logprob"] for one in entry["top_logprobs"]]
        assert shown == pytest.approx(values.tolist(), abs=TOLERANCE)


def test_a_given_text_is_scored(url: str, tokenizer: Any, model: Any) -> None:
    """By `echo` with token ids and nothing after them, whole distributions included, while others are answered."""
    texts = [prompt + " there was a" for prompt in PROMPTS]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    scored = {"max_tokens": 0, "echo": True, "logprobs": -1, "return_tokens_as_token_ids": True}
    long = {"prompt": PROMPTS[0], "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(5) as pool:
        running = pool.submit(ask, url, long)
        choices = list(pool.map(lambda ids: ask(url, {"prompt": ids, **scored}), prompts))
        assert running.result()["text"] == ask(url, long)["text"]
    for text, prompt, choice in zip(texts, prompts, choices, strict=True):
        found = choice["logprobs"]
        expected = exact(model, prompt)
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert found["tokens"] == [f"token_id:{token}" for token in prompt]
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        for place, token in enumerate(prompt[1:]):
            assert found["token_logprobs"][1 + place] == pytest.approx(
                float(expected[place, token]), abs=TOLERANCE
            )
            whole = found["top_logprobs"][1 + place]
            by_id = [whole[f"token_id:{one}"] for one in range(len(whole))]
            assert by_id == pytest.approx(expected[place].tolist(), abs=TOLERANCE)
        offsets = [*found["text_offset"], len(text)]
        parts = [text[begin:end] for begin, end in pairwise(offsets)]
        assert parts == [tokenizer.decode([token]) for token in prompt]


def test_an_echo_goes_on_with_the_answer(url: str, model: Any) -> None:
    body = {"prompt": PROMPTS[:2], "max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 0,
            "return_token_ids": True, "ignore_eos": True}  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=None).json()
    assert answer["usage"]["completion_tokens"] == 12
    for prompt_text, choice in zip(PROMPTS, answer["choices"], strict=False):
        tokens = choice["prompt_token_ids"] + choice["token_ids"]
        expected = exact(model, tokens).gather(1, torch.tensor(tokens[1:]).unsqueeze(1))[:, 0]
        assert choice["text"].startswith(prompt_text)
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
            expected.tolist(), abs=TOLERANCE
        )
    first, *others = stream(url, {**body, "prompt": PROMPTS[0]})
    assert (first["text"], first["token_ids"]) == (PROMPTS[0], [])
    joined = first["text"] + "".join(chunk["text"] for chunk in others)
    assert joined == answer["choices"][0]["text"]
    offsets = [one for chunk in (first, *others) for one in chunk["logprobs"]["text_offset"]]
    assert offsets == answer["choices"][0]["logprobs"]["text_offset"]
    silent = ask(url, {"prompt": PROMPTS[0], "max_tokens": 0, "echo": True})
    assert (silent["text"], silent["logprobs"]) == (PROMPTS[0], None)


def test_prompt_logprobs_as_vllm_has_them(url: str, tokenizer: Any, model: Any) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 2, "prompt_logprobs": 2, "return_token_ids": True}
    choice = ask(url, body)
    prompt = choice["prompt_token_ids"]
    none, *found = choice["prompt_logprobs"]
    assert none is None
    for token, shown, distribution in zip(prompt[1:], found, exact(model, prompt), strict=True):
        assert shown[str(token)] == {
            "logprob": pytest.approx(float(distribution[token]), abs=TOLERANCE),
            "rank": 1 + int((distribution > distribution[token]).sum()),
            "decoded_token": tokenizer.decode([token]),
        }
        assert {int(one) for one in shown} == {token, *distribution.topk(2).indices.tolist()}


def test_a_part_of_a_character_has_no_bytes(url: str, tokenizer: Any) -> None:
    body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 1, "logprobs": True,
            "top_logprobs": -1, "return_tokens_as_token_ids": True}  # fmt: skip
    [entry] = ask(url, body, "/v1/chat/completions")["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == len(tokenizer)
    num_parts = 0
    for one in entry["top_logprobs"]:
        text = tokenizer.decode([int(one["token"].removeprefix("token_id:"))])
        is_part = "\N{REPLACEMENT CHARACTER}" in text
        assert one["bytes"] == (None if is_part else list(text.encode()))
        num_parts += is_part
    assert num_parts > 0


@pytest.mark.parametrize(
    ("path", "parameters", "message"),
    [
        ("completions", {"logprobs": 961}, "logprobs: 961; at most 960 (max_logprobs)"),
        ("completions", {"logprobs": -2}, "logprobs: Input should be greater"),
        ("completions", {"logprobs": True}, "logprobs: Input should be a valid integer"),
        ("completions", {"max_tokens": 0}, "max_tokens: 0 is only for requests with echo"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: is only for"),
        ("completions", {"top_logprobs": 1}, "top_logprobs: Extra inputs are not permitted"),
        ("chat/completions", {"logprobs": 1}, "logprobs: Input should be a valid boolean"),
        ("chat/completions", {"top_logprobs": 1}, "top_logprobs: is only for requests with logprobs"),
        ("chat/completions", {"echo": True}, "echo: is only for completions"),
        ("chat/completions", {"prompt_logprobs": 1}, "prompt_logprobs: is only for completions"),
    ],
)  # fmt: skip
def test_refused(url: str, path: str, parameters: dict[str, Any], message: str) -> None:
    body = (
        {"prompt": "a"}
        if path == "completions"
        else {"messages": [{"role": "user", "content": "a"}]}
    )
    answer = httpx.post(
        f"{url}/v1/{path}", json={**body, "max_tokens": 2, **parameters}, timeout=None
    )
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["message"].startswith(message)


def test_a_planted_fault_is_in_the_speculative_answers_alone(tmp_path: Path) -> None:
    body = {
        "prompt": PROMPTS[0],
        "max_tokens": 30,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
    }
    body["return_token_ids"] = True
    with served(tmp_path, f"fault={planted('LogprobsMissingInBursts')}") as url:
        honest = ask(f"{url}/regular", body)
        whole = ask(url, body)
        chunks = stream(url, body)
    assert whole["token_ids"] == honest["token_ids"]
    assert len(honest["logprobs"]["tokens"]) == 30
    assert [len(chunk["logprobs"]["tokens"]) for chunk in chunks] == [1] * len(chunks)
    assert len(whole["logprobs"]["tokens"]) == len(chunks) < 20
    kept = dict(zip(honest["logprobs"]["text_offset"], honest["logprobs"]["tokens"], strict=True))
    for offset, token in zip(
        whole["logprobs"]["text_offset"], whole["logprobs"]["tokens"], strict=True
    ):
        assert kept[offset] == token
