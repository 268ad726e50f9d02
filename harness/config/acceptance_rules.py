"""Rules of acceptance by name: which draft tokens are kept. The built-in ones, and those in files of the user's own.

What needs torch is named by its path, and imported when a run decodes.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any, ClassVar

from harness.config.registry import Record, Registry


class AcceptanceRule(Record):
    """A rule of acceptance, chosen by `decoding.rule=NAME`.

    A user's own rule is a subclass with `verify`, in a file (`decoding.rule=./fly.py:Fly`). It is called after every
    pass of the target, for a whole batch: tensors in, tensors out, without reading one on the host.

    Attributes:
        name: its name in `decoding.rule=`.
        lossless: whether the output follows the target's distribution at temperatures above 0.
        lossless_greedily: whether texts at temperature 0 are the target's; None where `lossless` holds for them too.
        tests_each_token: whether a token's acceptance depends only on its test and those before it, so that the number
            accepted of fewer than K tokens follows from that of K.
        redraws: whether each iteration takes new random numbers for its draft tokens.
        takes_lenience: whether it divides the ratio target / draft by `decoding.lenience`.
    """

    lossless: ClassVar[bool] = False
    lossless_greedily: ClassVar[bool | None] = None
    tests_each_token: ClassVar[bool] = False
    redraws: ClassVar[bool] = False
    takes_lenience: ClassVar[bool] = False

    def is_lossless(self, temperature: float) -> bool:
        """Whether the output follows the target's distribution with these settings, at lenience 1."""
        if temperature == 0 and self.lossless_greedily is not None:
            return self.lossless_greedily
        return self.lossless

    def verify(self, offer: Any) -> Any:
        """Return the `Verdict` over an `Offer` (`harness/local/decoding/verify.py`): a pure function."""
        raise NotImplementedError

    def verification(self) -> Callable[[Any], Any]:
        """The function that judges proposals, the same one at every call."""
        return self.verify


class _Plain(AcceptanceRule):
    """The rule of Leviathan et al. 2023 and Chen et al. 2023: accept with min(1, target / draft)."""

    lossless = True
    tests_each_token = True
    path = "harness.local.decoding.verify:verify"

    def verification(self) -> Callable[[Any], Any]:
        function: Callable[[Any], Any] = pkgutil.resolve_name(self.path)
        return function


class _Google(_Plain):
    """The same with the lenience of Leviathan et al., appendix A.5."""

    takes_lenience = True


class _Block(_Plain):
    """Block verification."""

    tests_each_token = False
    redraws = True
    path = "harness.local.decoding.verify:verify_block"


class _Typical(_Plain):
    """Typical acceptance of Medusa. Greedily it changes nothing, and is called lossy all the same."""

    lossless = False
    path = "harness.local.decoding.verify:verify_typical"


RULES = Registry(
    "rule",
    AcceptanceRule,
    {
        "deepmind": _Plain,
        "google": _Google,
        "block": _Block,
        "typical": _Typical,
    },
)


def tests_each_token(rule: str | None) -> bool:
    """Whether the rule of a row tests each token by itself; so does one that is not known here."""
    record = None if rule is None else RULES.loaded(rule)
    return record is None or record.tests_each_token
