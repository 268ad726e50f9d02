"""Rules of acceptance by name, which decide which draft tokens are kept: the built-in rules, and the user's own.

This module imports no torch: it names each rule's function by its path, and the function is imported when a run
decodes. All that the instrument says of a rule follows from the rule's record. A new rule is a class here and a
function in `harness/local/decoding/verify.py`.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any, ClassVar

from harness.config.registry import Record, Registry


class AcceptanceRule(Record):
    """A rule of acceptance, chosen by `decoding.rule=NAME`.

    A user's own rule is a subclass with a method `verify`, in a file (`decoding.rule=./fly.py:Fly`). The method is
    called after every pass of the target, for a whole batch. It gets and returns tensors, and must not read one on the
    host.

    Attributes:
        name: the name in `decoding.rule=`.
        lossless: whether the output follows the target's distribution at temperatures above 0.
        lossless_greedily: whether texts at temperature 0 are the target's; None if `lossless` also holds for these.
        tests_each_token: whether a token's acceptance depends only on its own test and the tests before it. The number
            accepted of fewer than K tokens then follows from the number accepted of K.
        redraws: whether each iteration draws new random numbers for its draft tokens.
        closed_form: whether the acceptance of a given text can be computed from the text's probabilities.
        takes_lenience: whether it has the setting `decoding.lenience`. A `lossless` rule is lossless at lenience 1.
    """

    lossless: ClassVar[bool] = False
    lossless_greedily: ClassVar[bool | None] = None
    tests_each_token: ClassVar[bool] = False
    redraws: ClassVar[bool] = False
    closed_form: ClassVar[bool] = False
    takes_lenience: ClassVar[bool] = False
    # Where the function of a built-in rule is. It is imported when a run decodes. Empty for a rule with its own
    # `verify`.
    _path: ClassVar[str] = ""

    def is_lossless(self, temperature: float) -> bool:
        """Return whether the output follows the target's distribution at this temperature and lenience 1."""
        if temperature == 0 and self.lossless_greedily is not None:
            return self.lossless_greedily
        return self.lossless

    def verify(self, offer: Any) -> Any:
        """Return the `Verdict` over an `Offer` (both are in `harness/local/decoding/verify.py`).

        A pure function, which also gets `lenience` if the rule takes it.
        """
        raise NotImplementedError

    def verification(self, chosen: Any) -> Callable[[Any], Any]:
        """Return the function that judges an `Offer`, with the lenience that these `DecodingSettings` have."""
        function: Callable[..., Any] = (
            pkgutil.resolve_name(self._path) if self._path else self.verify
        )
        if not self.takes_lenience:
            return function
        return functools.partial(function, lenience=chosen.lenience)


class _Plain(AcceptanceRule):
    """The rule of Leviathan et al. 2023 and Chen et al. 2023: accept with min(1, target / draft)."""

    lossless = True
    tests_each_token = True
    closed_form = True
    _path = "harness.local.decoding.verify:verify"


class _Google(_Plain):
    """The rule of `_Plain` with the lenience of Leviathan et al., appendix A.5."""

    takes_lenience = True


class _Block(_Plain):
    """Block verification (Sun et al. 2024)."""

    tests_each_token = False
    redraws = True
    _path = "harness.local.decoding.verify:verify_block"


RULES = Registry(
    "rule",
    AcceptanceRule,
    {
        "deepmind": _Plain,
        "google": _Google,
        "block": _Block,
    },
)


def changed_lenience(chosen: Any) -> float | None:
    """Return the lenience of `DecodingSettings` or of a row; None if it is 1, or the row has none."""
    lenience: float | None = getattr(chosen, "lenience", None)
    return None if lenience == 1 else lenience


def tests_each_token(rule: str | None) -> bool:
    """Return whether the rule of a row tests each token by itself.

    Also true for rules that are not loaded here and for rows without a rule.
    """
    record = None if rule is None else RULES.loaded(rule)
    return record is None or record.tests_each_token
