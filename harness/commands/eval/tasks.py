"""The questions of `eval`: products of two operands that are drawn at random.

This file also defines where a completion ends, and how the answer is read from it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.config.errors import SettingError
from harness.config.model_names import without_suffixes
from harness.config.settings import ModelSettings
from harness.engines.tokenizer import TextTokenizer, Tokenizer
from harness.results.published import multiplication_accuracy

# A completion ends at the end of its line.
ENDS = ("\n",)

# Reads -5, 1,234 and 12; a sign must touch the digits, and exactly three digits follow a comma.
_INTEGER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)")

# Only this many characters of a line are read. A model may write an integer of more than 4300 digits, which Python
# refuses to read.
_LONGEST_LINE = 4000

# The operands and the quantization for which accuracies were published.
_PUBLISHED = ((1, 99), "none")


@dataclass(frozen=True)
class Problem:
    """One question: a product. Its seed and index determine the operands, and the random numbers for the answer.

    Attributes:
        index: the number of the question within its seed, from 0.
        a, b: the operands.
    """

    seed: int
    index: int
    a: int
    b: int

    @property
    def key(self) -> tuple[int, int]:
        """The seed and the index, which identify the question."""
        return self.seed, self.index

    @property
    def expected(self) -> int:
        """The correct answer."""
        return self.a * self.b

    @property
    def prompt(self) -> str:
        """Three solved questions and then this question, as in the evaluation that came with llama-ssp. The model
        should continue with the answer and end the line.
        """
        return f"8 * 12 = 96\n25 * 4 = 100\n37 * 85 = 3145\n{self.a} * {self.b} ="


def drawn_problems(
    operands: tuple[int, ...], seed: int, count: int, replacement: bool = False
) -> list[Problem]:
    """Questions drawn uniformly at random. With the same seed, a longer list begins with the shorter one.

    Args:
        operands: the lowest and the highest operand; both are included.
        count: number of questions.
        replacement: whether a question may be drawn again before all others were drawn. Without replacement, drawing
            starts anew once all questions were drawn.
    """
    pairs = itertools.islice(_pairs(operands, seed, count, replacement), count)
    return [Problem(seed, index, a, b) for index, (a, b) in enumerate(pairs)]


def _pairs(
    operands: tuple[int, ...], seed: int, num_at_once: int, replacement: bool
) -> Iterator[tuple[int, int]]:
    """Draw pairs of operands without end.

    Args:
        num_at_once: how many pairs are drawn in one call of the generator. The sequence does not depend on it.
    """
    low, high = operands
    num_different = (high - low + 1) ** 2
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    seen: set[tuple[int, int]] = set()
    while True:
        drawn = generator.integers(low, high, size=(num_at_once, 2), endpoint=True)
        for a, b in drawn.tolist():
            if len(seen) == num_different:
                seen.clear()
            if replacement or (a, b) not in seen:
                seen.add((a, b))
                yield a, b


def check_answer_length(
    tokenizer: Tokenizer, problems: Sequence[Problem], max_new_tokens: int
) -> None:
    """Raise a SettingError unless every expected answer fits into `max_new_tokens`. `problems` must not be empty.

    If only the server has the tokenizer, each character of an answer is taken for a token: no tokenizer needs more for
    digits.
    """
    lengths = []
    for problem in problems:
        answer = f" {problem.expected}"
        if isinstance(tokenizer, TextTokenizer):
            lengths.append(len(answer))
        else:
            num_in_prompt = len(tokenizer.encode(problem.prompt))
            lengths.append(len(tokenizer.encode(problem.prompt + answer)) - num_in_prompt)
    needed = max(lengths)
    if needed > max_new_tokens:
        longest = problems[lengths.index(needed)].expected
        rule = f"must be at least {needed}: the answer {longest} would be cut off"
        raise SettingError("decoding.max_new_tokens", rule, max_new_tokens)


def published_accuracies(operands: Sequence[int], model: ModelSettings) -> Mapping[str, float]:
    """The accuracies that others published for this model, by arm; empty if there are none."""
    is_published = (tuple(operands), model.quantization) == _PUBLISHED
    return multiplication_accuracy(without_suffixes(model.name)) if is_published else {}


def parse_answer(completion: str) -> tuple[str, int | None]:
    """The first line of a completion, and the first integer in this line (None if there is none)."""
    line = completion.partition("\n")[0]
    match = _INTEGER.search(line[:_LONGEST_LINE])
    return line, int(match[0].replace(",", "")) if match else None


def tokens_with(tokenizer: Tokenizer, ends: Sequence[str]) -> frozenset[int]:
    """Every token whose text contains one of the ends. A BPE vocabulary has many with a line break, such as a full stop
    with the line break after it.

    Empty for a server whose tokens are unknown here (`TextTokenizer`).
    """
    if isinstance(tokenizer, TextTokenizer):
        return frozenset()
    texts = (
        tokenizer.decode([token], clean_up_tokenization_spaces=False)
        for token in range(len(tokenizer))
    )
    return frozenset(token for token, text in enumerate(texts) if any(end in text for end in ends))
