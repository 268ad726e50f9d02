"""The interface of a task of `eval`: its questions, where completions end, and how they are judged.

`drawn_tasks` and `lm_eval_tasks` have the two kinds of tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from harness.config.settings import ModelSettings


@dataclass(frozen=True)
class Problem:
    """One question. Seed and index determine the rest, and the random numbers of the answer.

    Attributes:
        index: counts from 0 within the seed.
        a, b: the operands of a drawn question; None for a question from a data set.
        expected: the correct answer.
        source_row: the row of the data set, from 0; None for a drawn question.
    """

    seed: int
    index: int
    a: int | None
    b: int | None
    expected: str
    prompt: str
    source_row: int | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.seed, self.index


class Judgement(NamedTuple):
    """The part of a completion that counts, the answer in it (None if there is none), and whether
    it is correct.
    """

    completion: str
    answer: str | None
    correct: bool


class Task(Protocol):
    """One kind of question.

    Attributes:
        ends: texts that end a completion; () for none.
        operands_column: the column `operands` of its rows; None for questions from a data set.
        metric_column: the column `metric`; None where answers are simply right or wrong.
    """

    ends: tuple[str, ...] = ()
    operands_column: str | None = None
    metric_column: str | None = None

    @property
    def origin(self) -> str | None:
        """Where the questions come from, in one line; None if there is nothing to say."""
        return None

    @property
    def digest(self) -> str | None:
        """12 hex digits of prompts and scores, where settings alone do not determine them; else
        None.
        """
        return None

    def problems(self, seed: int, count: int) -> list[Problem]:
        """`count` questions drawn by the seed; a longer list begins with the shorter one.

        Raises:
            SettingError: there are fewer questions, or their file cannot be read.
            RunError: their file is out of reach.
        """

    def judge(self, text: str, problem: Problem) -> Judgement:
        """Read and score a completion."""

    def check_answer_length(
        self,
        tokenizer: PreTrainedTokenizerBase,
        problems: Sequence[Problem],
        max_new_tokens: int,
    ) -> None:
        """Raise SettingError where a token limit would cut off a correct answer, as far as that is
        known.
        """
        return

    def published_accuracy(self, model: ModelSettings) -> Mapping[str, float]:
        """Accuracies that others measured for this model, by arm."""
        return {}


def tokens_with(tokenizer: PreTrainedTokenizerBase, ends: Sequence[str]) -> frozenset[int]:
    """Every token whose text contains one of these; BPE vocabularies have many with a line break."""
    single_tokens = [[token] for token in range(len(tokenizer))]
    texts = tokenizer.batch_decode(single_tokens, clean_up_tokenization_spaces=False)
    tokens = set()
    for token, text in enumerate(texts):
        if any(end in text for end in ends):
            tokens.add(token)
    return frozenset(tokens)
