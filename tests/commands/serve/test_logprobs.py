"""Log-probabilities that the service returns, against those of the target read by transformers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.config.installation import PACKAGE
from served import CLIENT, served

pytest.importorskip("fastapi", reason="specharness[serve] is not installed")

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
    answer = CLIENT.post(url + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def stream(url: str, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
    with CLIENT.stream("POST", url + path, json={**body, "stream": True}) as response:
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


@pytest.mark.parametrize(
    ("arm", "sampling"),
    [("/regular", {"temperature": 0}), ("", {"temperature": 0.8, "top_k": 5})],
)
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
    body = {"prompt": PROMPTS[0], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": 2, "return_token_ids": True}
    whole = ask(url, body)
    chunks = stream(url, body)
    sizes = [len(chunk["token_ids"]) for chunk in chunks]
    assert max(sizes) > 2
    assert sizes == [len(chunk["logprobs"]["tokens"]) for chunk in chunks]
    for name in ("tokens", "text_offset"):
        joined = [one for chunk in chunks for one in chunk["logprobs"][name]]
        assert joined == whole["logprobs"][name]
    values = [one for chunk in chunks for one in chunk["logprobs"]["token_logprobs"]]
    assert values == pytest.approx(whole["logprobs"]["token_logprobs"], abs=TOLERANCE)


def test_given_texts_are_scored_while_others_are_answered(
    url: str, tokenizer: Any, model: Any
) -> None:
    """Token ids with whole distributions, by name too, and an answer behind them."""
    prompts = [tokenizer(prompt + " there was a")["input_ids"] for prompt in PROMPTS]
    scored = {"max_tokens": 1, "prompt_logprobs": -1, "logprobs": -1, "temperature": 0}
    scored |= {"return_tokens_as_token_ids": True, "return_token_ids": True, "ignore_eos": True}
    long = {"prompt": PROMPTS[0], "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(5) as pool:
        running = pool.submit(ask, url, long)
        choices = list(pool.map(lambda ids: ask(url, {"prompt": ids, **scored}), prompts))
        assert running.result()["text"] == ask(url, long)["text"]
    for prompt, choice in zip(prompts, choices, strict=True):
        [answer] = choice["token_ids"]
        expected = exact(model, [*prompt, answer]).tolist()
        found = [by_id for by_id in choice["prompt_logprobs"] if by_id is not None]
        assert len(found) == len(prompt) - 1
        for distribution, by_id in zip(expected[:-1], found, strict=True):
            shown = [by_id[str(token)]["logprob"] for token in range(len(by_id))]
            assert shown == pytest.approx(distribution, abs=TOLERANCE)
        [by_name] = choice["logprobs"]["top_logprobs"]
        shown = [by_name[f"token_id:{token}"] for token in range(len(by_name))]
        assert shown == pytest.approx(expected[-1], abs=TOLERANCE)
        assert choice["logprobs"]["tokens"] == [f"token_id:{answer}"]


@pytest.mark.parametrize(
    ("path", "parameters", "message"),
    [
        ("completions", {"logprobs": 961}, "logprobs: 961; at most 960 (max_logprobs)"),
        ("completions", {"logprobs": -2}, "logprobs: Input should be greater"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: is only for"),
        ("chat/completions", {"prompt_logprobs": 1}, "prompt_logprobs: Extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_refused(url: str, path: str, parameters: dict[str, Any], message: str) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    body = {"prompt": "a"} if path == "completions" else chat
    answer = CLIENT.post(f"{url}/v1/{path}", json={**body, "max_tokens": 2, **parameters})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
