"""Methods and rules that are not built in (`draft=./my_method.py:MyMethod`): their mistakes end the run with one line
that names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from harness.config.errors import HarnessError, RunError, in_one_line
from harness.config.failures import as_run_error
from harness.local.decoding.protocols import Drafter, NonFiniteError, Proposal
from harness.local.decoding.verify import Offer, Verdict
from harness.local.runners.wrapped import Replacing


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


def with_checked_shapes(drafter: Drafter, name: str) -> Drafter:
    """Return the drafter with a check: a RunError for a proposal of other shapes than `Proposal` has.

    Args:
        drafter: of a method that is not built in.
        name: the method, as the user typed it.
    """

    def checked(num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        with blaming(name, "propose"):
            proposal = drafter.propose(num_draft_tokens, uniforms)
        rule = _broken_rule(proposal, len(uniforms), num_draft_tokens)
        if rule is not None:
            raise RunError(f"draft={name}: propose() {rule}")
        return proposal

    replacing: Any = Replacing(drafter, propose=checked)
    return replacing


def _broken_rule(proposal: object, num_rows: int, most: int) -> str | None:
    """Return the rule that a proposal breaks, to follow `propose()`; None where it breaks none."""
    if not isinstance(proposal, Proposal):
        return f"must return a Proposal, not {type(proposal).__name__}"
    tokens = proposal.tokens
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.long:
        return "must give tokens as a tensor of int64"
    if tokens.dim() != 2 or len(tokens) != num_rows or tokens.shape[1] > most:
        return f"must give tokens [{num_rows}, at most {most}], not {list(tokens.shape)}"
    probabilities = proposal.probabilities
    if probabilities is not None and probabilities.shape[:-1] != tokens.shape:
        wanted = [*tokens.shape, "vocabulary"]
        return f"must give probabilities {wanted}, not {list(probabilities.shape)}"
    return None


def checked_rule(rule: Callable[[Offer], Verdict], name: str) -> Callable[[Offer], Verdict]:
    """Return the rule of acceptance with a check: a RunError for a verdict of other shapes than `Verdict` has.

    Args:
        name: the rule, as the user typed it.
    """

    def checked(offer: Offer) -> Verdict:
        with blaming(name, "verify", "decoding.rule"):
            verdict = rule(offer)
        if not isinstance(verdict, Verdict):
            wrong = f"must return a Verdict, not {type(verdict).__name__}"
            raise RunError(f"decoding.rule={name}: verify() {wrong}")
        num_rows, num_draft_tokens = offer.draft_tokens.shape
        shapes = {
            "num_accepted": (num_rows,),
            "next_token": (num_rows,),
            "target_probability": (num_rows, num_draft_tokens),
            "draft_probability": (num_rows, num_draft_tokens),
        }
        for part, shape in shapes.items():
            actual = tuple(getattr(verdict, part).shape)
            if actual != shape:
                wrong = f"must give a {part} of shape {list(shape)}, not {list(actual)}"
                raise RunError(f"decoding.rule={name}: verify() {wrong}")
        return verdict

    return checked
