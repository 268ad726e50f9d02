"""The problems of `eval`, drawn by seed, and the answers read from completions."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from harness.config.errors import SettingError
from harness.experiments.tasks import Task

# A sign counts if it touches the digits; a comma groups thousands if exactly three digits follow each.
_INTEGER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)")

# Python refuses to read integers of more than 4300 digits, and a model may well go on and on.
_LONGEST_LINE = 4000


@dataclass(frozen=True)
class Problem:
    """One problem. `index` counts from 0 within its seed; seed and index determine the rest and the random numbers.

    Attributes:
        a, b: operands; None for a question from a data set,
        source_row: where it is this row, from 0.
    """

    seed: int
    index: int
    a: int | None
    b: int | None
    expected: int | str
    prompt: str
    source_row: int | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.seed, self.index


def draw_problems(task: Task, operands: tuple[int, ...], seed: int, count: int) -> list[Problem]:
    """`count` problems with both operands drawn uniformly from `operands` (lowest and highest).

    A longer list begins with the shorter one, so that more problems of a seed only add to those answered before.
    """
    low, high = operands
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    drawn = generator.integers(low, high, size=(count, 2), endpoint=True).tolist()
    return [
        Problem(seed, index, a, b, task.expected(a, b), task.prompt(a, b))
        for index, (a, b) in enumerate(drawn)
    ]


def draw_rows(source: str, num_rows: int, seed: int, count: int) -> list[int]:
    """`count` rows in an order drawn by the seed; a longer list begins with the shorter one.

    Raises SettingError for more than there are.
    """
    if count > num_rows:
        raise SettingError("num_prompts", f"{source} has only {num_rows} questions", count)
    order = list(range(num_rows))
    random.Random(seed).shuffle(order)
    return order[:count]


def read_answer(completion: str) -> tuple[str, int | None]:
    """A completion's first line, and the first integer in it; None if there is none. `1,234` is one integer."""
    line = completion.partition("\n")[0]
    match = _INTEGER.search(line[:_LONGEST_LINE])
    return line, int(match[0].replace(",", "")) if match else None


def tokens_with(tokenizer: PreTrainedTokenizerBase, ends: Sequence[str]) -> frozenset[int]:
    """Every token whose text contains one of these; BPE vocabularies have many with a line break."""
    texts = tokenizer.batch_decode(
        [[token] for token in range(len(tokenizer))], clean_up_tokenization_spaces=False
    )
    return frozenset(token for token, text in enumerate(texts) if any(end in text for end in ends))


def check_answer_length(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], max_new_tokens: int
) -> None:
    """Refuse a token limit that would cut a correct answer off, which would then count as wrong.

    Raises:
        SettingError: with the longest answer and the tokens that it takes.
    """
    prompts = tokenizer([problem.prompt for problem in problems])["input_ids"]
    answered = tokenizer([f"{problem.prompt} {problem.expected}" for problem in problems])[
        "input_ids"
    ]
    lengths = [len(whole) - len(prompt) for prompt, whole in zip(prompts, answered, strict=True)]
    if (needed := max(lengths)) > max_new_tokens:
        raise SettingError(
            "decoding.max_new_tokens",
            f"the answer {problems[lengths.index(needed)].expected} takes {needed} tokens and would be cut off",
            max_new_tokens,
        )
