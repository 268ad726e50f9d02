"""Methods and rules that are not built in (`draft=./my_method.py:MyMethod`): their mistakes end the run with one line
that names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from harness.config.errors import HarnessError, RunError, in_one_line
from harness.config.failures import as_run_error
from harness.config.methods import METHODS
from harness.config.settings import DraftSettings
from harness.local.decoding.protocols import (
    Drafter,
    NonFiniteError,
    Proposal,
    Runner,
    TensorDrafter,
)
from harness.local.decoding.verify import Offer, Verdict
from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.method import MakeDrafter, Method, Pair
from harness.local.runners.base import Proxy, UnsupportedModelError


def method_of(draft: DraftSettings) -> Method:
    """The way to draft that the settings are for."""
    method = METHODS[draft.method]
    assert isinstance(method, Method)
    return method


def drafters_of(draft: DraftSettings, pair: Pair, runner: Runner | None) -> MakeDrafter:
    """What `Method.drafter` returns. Drafters of a method that is not built in are checked.

    One of tensors is called within a captured call: its mistakes are blamed where that is made.
    """
    with blaming_method(draft):
        make = method_of(draft).drafter(draft, pair, runner)
    if METHODS.is_built_in(draft.method):
        return make

    def make_checked(warp: AnyWarp) -> Drafter | TensorDrafter:
        with blaming(draft.name):
            drafter = make(warp)
        if isinstance(drafter, TensorDrafter):
            return drafter
        checked: Any = CheckedDrafter(drafter, draft.name)
        return checked

    return make_checked


class CheckedDrafter(Proxy):
    """A drafter of such a method, with a RunError for a proposal of other shapes than `Proposal` has.

    Args:
        name: as the user typed it.
    """

    def __init__(self, drafter: Drafter, name: str) -> None:
        super().__init__(drafter)
        self._name = name

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        with blaming(self._name, "propose"):
            proposal: Proposal = self._wrapped.propose(num_draft_tokens, uniforms)
            width = min(proposal.tokens.shape[-1], num_draft_tokens)
            _require_shape(proposal, "tokens", len(uniforms), width)
            if proposal.probabilities is not None:
                size = proposal.probabilities.shape[-1]
                _require_shape(proposal, "probabilities", len(uniforms), width, size)
        return proposal


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
    except (HarnessError, NonFiniteError, UnsupportedModelError):
        raise
    except Exception as error:
        # A failure of the machine, such as a lack of memory.
        if as_run_error(error) is not None:
            raise
        what = in_one_line(error)
        if call:
            what = f"{call}(): {what}"
        raise RunError(f"{setting}={name}: {what}") from error


def blaming_method(draft: DraftSettings | None) -> AbstractContextManager[None]:
    """As `blaming`, of a method that is not built in; otherwise exceptions stay as they are."""
    if draft is None or METHODS.is_built_in(draft.method):
        return nullcontext()
    return blaming(draft.name)


def checked_rule(rule: Callable[[Offer], Verdict], name: str) -> Callable[[Offer], Verdict]:
    """Return the rule of acceptance with a check: a RunError for a verdict of other shapes than `Verdict` has.

    Args:
        name: the rule, as the user typed it.
    """

    def checked(offer: Offer) -> Verdict:
        with blaming(name, "verify", "decoding.rule"):
            verdict = rule(offer)
            for part in Verdict._fields:
                _require_shape(verdict, part, len(offer.draft_tokens))
        return verdict

    return checked


def _require_shape(owner: object, part: str, *shape: int) -> None:
    """Raise a ValueError for a tensor of another shape."""
    actual = getattr(owner, part).shape
    if actual != shape:
        raise ValueError(f"{part} of shape {list(actual)}, not {list(shape)}")
