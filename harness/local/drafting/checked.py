"""Checks what methods that are not built in propose (`draft=./my_method.py:MyMethod`).

A mistake then ends the run with one line that names the method. The checks read proposals on the
host, so only the first question of a run has them: what is timed later costs no more than a method
that is built in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from harness.config.errors import HarnessError, RunError, in_one_line
from harness.config.failures import as_run_error
from harness.local.decoding.protocols import Drafter, NonFiniteError, Proposal, Step
from harness.local.decoding.randomness import existing_index
from harness.local.drafting.text import Text, TextDrafter

# How far the sum of a distribution may be from 1: it is float32.
_TOLERANCE = 1e-3


@contextmanager
def blaming(name: str, call: str = "", setting: str = "draft") -> Iterator[None]:
    """Turns an exception of a user's code into a RunError that names it.

    Args:
        name: as the user typed it.
        call: the method that was called, `propose`, if that is known.
        setting: where the user typed the name, `draft` or `decoding.rule`.
    """
    try:
        yield
    # These have a message already, or get one further up.
    except (HarnessError, NonFiniteError):
        raise
    except Exception as error:
        # A failure of the machine, such as a lack of memory.
        if as_run_error(error) is not None:
            raise
        what = in_one_line(error)
        if call:
            what = f"{call}() raised " + f"{type(error).__name__}: {error}".splitlines()[0]
        raise RunError(f"{setting}={name}: {what}") from error


class CheckedText(Text):
    """A row's text whose continuations are checked.

    Args:
        text: of a method that is not built in.
        name: the method, as the user typed it.
        vocabulary_size: how many tokens the target has.
    """

    def __init__(self, text: Text, name: str, vocabulary_size: int) -> None:
        self._text = text
        self._name = name
        self._vocabulary_size = vocabulary_size

    def extend(self, tokens: Iterable[int]) -> None:
        with blaming(self._name, "extend"):
            self._text.extend(tokens)

    def continuation(self, most: int) -> list[int]:
        with blaming(self._name, "continuation"):
            found: Any = self._text.continuation(most)
        rule = None
        if not hasattr(found, "__len__"):
            rule = f"must return a list of tokens, not {type(found).__name__}"
        elif wrong := [token for token in found if not isinstance(token, Integral)]:
            rule = f"must give tokens as whole numbers, not {wrong[0]}"
        elif not all(0 <= token < self._vocabulary_size for token in found):
            rule = f"gives tokens outside the vocabulary of {self._vocabulary_size}"
        if rule is not None:
            raise RunError(f"draft={self._name}: continuation() {rule}")
        return list(found)


class CheckedDrafter(Drafter):
    """Passes every call on to another drafter, and checks its proposals. Trees pass unchecked.

    Each call raises RunError for an exception of that drafter, or for a proposal that breaks a
    rule.

    Args:
        drafter: of a method that is not built in.
        name: the method, as the user typed it.
        vocabulary_size: how many tokens the target has.
    """

    # Whatever the drafter itself says: the checks read proposals on the host, so that working ahead
    # of the host gains nothing.
    reads_verdicts = True

    def __init__(self, drafter: Drafter, name: str, vocabulary_size: int) -> None:
        self._drafter = drafter
        self._name = name
        self._vocabulary_size = vocabulary_size
        self._num_rows = 0
        self.layers = tuple(drafter.layers)
        if isinstance(drafter, TextDrafter):
            # For good: a drafter answers one question.
            new_text = drafter.new_text
            drafter.new_text = lambda: CheckedText(new_text(), name, vocabulary_size)

    def __getattr__(self, name: str) -> Any:
        """What only some drafters have, such as `propose_tree`."""
        return getattr(self._drafter, name)

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._num_rows = len(prompts)
        with blaming(self._name, "start"):
            self._drafter.start(prompts, first_tokens, step)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._num_rows += len(prompts)
        with blaming(self._name, "add"):
            self._drafter.add(prompts, first_tokens, step)

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        with blaming(self._name, "propose"):
            proposal = self._drafter.propose(num_draft_tokens, uniforms)
        rule = self._broken_rule(proposal, num_draft_tokens, uniforms)
        if rule is not None:
            raise RunError(f"draft={self._name}: propose() {rule}")
        return proposal

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        with blaming(self._name, "observe"):
            self._drafter.observe(num_accepted, next_tokens, step)

    def select(self, rows: Sequence[int]) -> None:
        self._num_rows = len(rows)
        with blaming(self._name, "select"):
            self._drafter.select(rows)

    def _broken_rule(self, proposal: object, most: int, uniforms: Tensor) -> str | None:
        """Return the rule that a proposal breaks, to follow `propose()`; None where it breaks none.

        Args:
            most: K, how many tokens were asked for.
        """
        if not isinstance(proposal, Proposal):
            return f"must return a Proposal, not {type(proposal).__name__}"
        tokens = proposal.tokens
        if not isinstance(tokens, Tensor) or tokens.dtype != torch.long:
            return "must give tokens as a tensor of int64"
        rows = self._num_rows
        if tokens.dim() != 2 or len(tokens) != rows or tokens.shape[1] > most:
            return f"must give tokens [{rows}, at most {most}], not {list(tokens.shape)}"
        if not ((tokens >= 0) & (tokens < self._vocabulary_size)).all():
            return f"gives tokens outside the vocabulary of {self._vocabulary_size}"
        width = tokens.shape[1]
        if proposal.lengths is not None:
            lengths = list(proposal.lengths)
            are_whole = all(length == int(length) for length in lengths)
            are_possible = are_whole and all(0 <= length <= width for length in lengths)
            if len(lengths) != rows or not are_possible:
                return f"must give lengths from 0 to {width}, one per row, not {lengths}"
        probabilities = proposal.probabilities
        if probabilities is None:
            return None
        # They must be distributions, from which these uniforms draw the proposed tokens.
        wanted = [*tokens.shape, self._vocabulary_size]
        if list(probabilities.shape) != wanted:
            return f"must give probabilities {wanted}, not {list(probabilities.shape)}"
        # Of what a row is not offered nothing is read.
        is_offered = torch.ones_like(tokens, dtype=torch.bool)
        if proposal.lengths is not None:
            limits = torch.tensor(list(proposal.lengths), device=tokens.device)
            is_offered = torch.arange(width, device=tokens.device) < limits.unsqueeze(1)
        offered = probabilities[is_offered]
        if not ((offered >= 0).all() and ((offered.sum(-1) - 1).abs() < _TOLERANCE).all()):
            rule = "each must be at least 0, their sum 1"
            return f"gives probabilities that are no distributions: {rule}"
        drawn = existing_index(probabilities, uniforms[:, :width])
        if not (drawn == tokens)[is_offered].all():
            return (
                "gives tokens that its probabilities and the uniforms do not draw: an answer would "
                "depend on other random numbers (use harness.local.decoding.randomness.existing_index)"
            )
        return None
