"""Checks the methods and acceptance rules that users write (`draft=./my_method.py:MyMethod`).

A mistake in a user's code ends the run with a one-line message that names this code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

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
    """Return the method that these settings configure."""
    method = METHODS[draft.method]
    assert isinstance(method, Method)
    return method


def drafters_of(draft: DraftSettings, pair: Pair, runner: Runner | None) -> MakeDrafter:
    """Return a function that makes drafters, as `Method.drafter` does. The proposals of a user's `Drafter` are checked.

    A user's `TensorDrafter` is not wrapped, because it runs within captured calls. The code that makes these calls
    turns its exceptions into errors that name the method (`blaming_method`).

    Args:
        runner: the draft model's runner; None without a draft model.

    Raises:
        RunError: the user's method failed. The returned function raises it too.
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
        return CheckedDrafter(drafter, draft.name)

    return make_checked


class CheckedDrafter(Proxy):
    """Wraps the drafter of a user's method. `propose` raises a RunError if the user's `propose` fails, or if it returns
    `tokens` or `probabilities` of another shape than `Proposal` states.

    Args:
        name: the method's name, as the user typed it.
    """

    def __init__(self, drafter: Drafter, name: str) -> None:
        super().__init__(drafter)
        self._name = name

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        with blaming(self._name, call="propose"):
            proposal: Proposal = self._wrapped.propose(num_draft_tokens, uniforms)
            width = min(proposal.tokens.shape[-1], num_draft_tokens)
            _require_shape(proposal, "tokens", len(uniforms), width)
            if proposal.probabilities is not None:
                size = proposal.probabilities.shape[-1]
                _require_shape(proposal, "probabilities", len(uniforms), width, size)
        return proposal


@contextmanager
def blaming(name: str, call: str = "", setting: str = "draft") -> Iterator[None]:
    """Turn an exception of a block that calls a user's code into a RunError that names this code.

    Exceptions that the user's code did not cause pass unchanged: our own errors, logits that are not finite,
    unsupported models, and failures of the machine.

    Args:
        name: the name of the method or rule, as the user typed it.
        call: the user's function that the block calls, such as `propose`; "" if it is not known.
        setting: the setting in which the user typed the name, `draft` or `decoding.rule`.
    """
    try:
        yield
    # These exceptions have a message already, or a caller adds one.
    except (HarnessError, NonFiniteError, UnsupportedModelError):
        raise
    except Exception as error:
        # A caller adds the message for a failure of the machine, such as a lack of memory.
        if as_run_error(error) is not None:
            raise
        what = in_one_line(error)
        if call:
            what = f"{call}(): {what}"
        raise RunError(f"{setting}={name}: {what}") from error


def blaming_method(draft: DraftSettings | None) -> AbstractContextManager[None]:
    """Return `blaming` for a user's method. For a built-in method, and for None, return a context that does nothing."""
    if draft is None or METHODS.is_built_in(draft.method):
        return nullcontext()
    return blaming(draft.name)


def checked_rule(rule: Callable[[Offer], Verdict], name: str) -> Callable[[Offer], Verdict]:
    """Return a function that calls a user's acceptance rule and checks its verdict. It raises a RunError if the rule
    fails, or if a tensor of the verdict is not [B].

    Args:
        name: the rule's name, as the user typed it.
    """

    def checked(offer: Offer) -> Verdict:
        with blaming(name, call="verify", setting="decoding.rule"):
            verdict = rule(offer)
            for part in Verdict._fields:
                _require_shape(verdict, part, len(offer.draft_tokens))
        return verdict

    return checked


def _require_shape(owner: object, part: str, *shape: int) -> None:
    """Raise a ValueError if the shape of the tensor `owner.part` is not `shape`."""
    actual = getattr(owner, part).shape
    if actual != shape:
        raise ValueError(f"{part} of shape {list(actual)}, not {list(shape)}")
