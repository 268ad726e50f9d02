from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fakes import MarkovRunner
from harness.config.errors import RunError
from harness.engines.divergence import Divergence, first_divergence, text_divergence
from harness.engines.door.reading import Margin
from tiny_checkpoints import make_tokenizer

CHAIN = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.5, 0.25, 0.25]])


class FakeEngine:
    vocabulary_size = 3

    def margin(self, token_ids: list[int], wanted: int, other: int) -> Margin:
        logits = MarkovRunner(CHAIN).start([token_ids]).logits[0]
        return Margin(float(logits[wanted] - logits[other]), 0.25)


ENGINE: Any = FakeEngine()


def test_the_first_difference_comes_with_its_margin() -> None:
    found = first_divergence(ENGINE, [0], [1, 2, 0, 1], [1, 2, 1, 2])
    assert found.position == 2
    assert found.logit_margin == pytest.approx(torch.tensor(0.5 / 0.25).log().item())
    assert found.logit_tolerance == 0.25
    assert found.excess == pytest.approx(math.log(2) / 0.25)
    assert Divergence(2, -0.5, 0.25).excess == 2
    assert Divergence(2).excess == math.inf


def test_a_text_that_ends_earlier_parts_there_and_a_foreign_token_is_an_error() -> None:
    assert first_divergence(ENGINE, [0], [1, 2], [1]) == Divergence(1)
    assert first_divergence(ENGINE, [0], [1, 2], [1, 2]) is None
    for expected, actual in (([1, 3], [1, 0]), ([1, 0], [1, 3])):
        with pytest.raises(RunError, match="token 3 is not in the model's vocabulary of 3 tokens"):
            first_divergence(ENGINE, [0], expected, actual)


def test_without_a_reference_there_is_a_place_and_no_margin() -> None:
    assert first_divergence(None, [0], [1, 2, 0], [1, 1, 0]) == Divergence(1)


TOKENIZER = make_tokenizer((" the",))
PROMPT = TOKENIZER.encode("a")


class Writer:
    """A reference over single bytes, which greedily writes a text and would rather write `x` than anything else."""

    def __init__(self, text: str) -> None:
        self._tokens = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
        self.num_calls = 0

    def logits_along(self, prompts: list[list[int]], texts: list[list[int]]) -> np.ndarray:
        self.num_calls += 1
        [prompt], [text] = prompts, texts
        logits = np.zeros((1, len(text), len(TOKENIZER)))
        logits[:, :, TOKENIZER.encode("x")] = 1.0
        for index in range(len(text)):
            place = min(len(prompt) + index - len(PROMPT), len(self._tokens) - 1)
            logits[0, index, self._tokens[place]] = 3.0
        return logits

    def margin(self, token_ids: list[int], wanted: int, other: int) -> Margin:
        [[logits]] = self.logits_along([token_ids], [[0]])
        return Margin(float(logits[wanted] - logits[other]), 0.25)


def parted(own: str, text: str, num_tokens: int = 9) -> Divergence | None:
    return text_divergence(Writer(own), TOKENIZER, PROMPT, text, num_tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [("bcdé", 9), ("bcdé", 5), ("bcd", 4), ("bcd\ufffd", 4), ("bc", 2), ("", 0)],
)
def test_a_text_is_the_references_own_as_far_as_it_goes(text: str, num_tokens: int) -> None:
    """The last character is two tokens. Its first byte alone is no text, or a mark of some servers."""
    assert parted("bcdé", text, num_tokens) is None


@pytest.mark.parametrize(("text", "num_tokens", "position"), [("", 9, 0), ("bc", 3, 2)])
def test_a_text_that_ends_although_the_reference_goes_on_parts_from_it(
    text: str, num_tokens: int, position: int
) -> None:
    assert parted("bcdé", text, num_tokens) == Divergence(position)


def test_a_text_parts_from_the_references_own_with_a_margin() -> None:
    assert parted("bcdé", "bcxé") == Divergence(2, 2.0, 0.25)
    assert parted("bcdé", "bczé") == Divergence(2, 3.0, 0.25)


def test_a_last_token_that_goes_on_further_is_another_one() -> None:
    """The reference writes ` the` as one token, of which a server's text has the beginning."""
    assert parted("b the", "b t", 2) == Divergence(1, 3.0, 0.25)


def test_a_text_is_read_once_and_again_where_the_reference_cuts_it_otherwise() -> None:
    writer: Any = Writer("b" * 30)
    assert text_divergence(writer, TOKENIZER, PROMPT, "b" * 30, 30) is None
    assert writer.num_calls == 1
    bytes_alone: Any = Writer("b")
    bytes_alone._tokens = [token for letter in "b the" for token in TOKENIZER.encode(letter)]
    assert text_divergence(bytes_alone, TOKENIZER, PROMPT, "b the", 5) is None
    assert bytes_alone.num_calls == 2


@pytest.mark.parametrize("text", ["bcz", "bcxz"])
def test_behind_the_end_of_a_text_no_margin_is_told(text: str) -> None:
    """A server may keep the model from ending, and goes on in its own way then."""
    assert parted("bc", "bc") is None
    found = parted("bc", text)
    assert found.logit_margin is None
