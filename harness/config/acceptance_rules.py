"""The acceptance rules by their names. A rule decides which draft tokens are kept. A user may add one in a file.

This module imports no torch: it contains the path of each rule's function, which is imported when a run decodes. Every
statement about a rule, such as that it is lossless, follows from the rule's record. To add a rule, write a class here,
list it in `RULES`, and write a function in `harness/local/decoding/verify.py`.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any, ClassVar

from harness.config.registry import Record, Registry


class AcceptanceRule(Record):
    """An acceptance rule, chosen by `decoding.rule=NAME`.

    A user's rule is a subclass with a method `verify`, in a file (`decoding.rule=./fly.py:Fly`). The method is called
    after every pass of the target, for a whole batch. Its argument and result consist of tensors. If it reads one of
    them on the host, the run decodes without prepared calls, which are faster.

    Attributes:
        name: the name in `decoding.rule=`.
        lossless: whether the output follows the target's distribution at temperatures above 0 (and at 0, unless
            `lossless_greedily` says otherwise).
        lossless_greedily: whether texts at temperature 0 are the target's texts; None if `lossless` decides this, too.
        tests_each_token: whether the acceptance of a token depends only on the test of this token and of those before
            it. Then the acceptance for a smaller K follows from the acceptance for K.
        redraws: whether each iteration uses new random numbers, not those that belong to the tokens' positions.
        closed_form: whether the acceptance of a given text can be computed from the text's probabilities.
        takes_lenience: whether it has the setting `decoding.lenience`. A `lossless` rule is lossless at lenience 1.
    """

    lossless: ClassVar[bool] = False
    lossless_greedily: ClassVar[bool | None] = None
    tests_each_token: ClassVar[bool] = False
    redraws: ClassVar[bool] = False
    closed_form: ClassVar[bool] = False
    takes_lenience: ClassVar[bool] = False
    # The path of a built-in rule's function, which is imported when a run decodes. Empty for a class that has a method
    # `verify`.
    _path: ClassVar[str] = ""

    def is_lossless(self, temperature: float) -> bool:
        """Return whether the output follows the target's distribution at this temperature and lenience 1."""
        if temperature == 0 and self.lossless_greedily is not None:
            return self.lossless_greedily
        return self.lossless

    def verify(self, offer: Any) -> Any:
        """Return the `Verdict` on an `Offer` (both are classes in `harness/local/decoding/verify.py`).

        Must be a pure function. It also gets `lenience` as a keyword argument if the rule takes it.
        """
        raise NotImplementedError

    def verification(self, chosen: Any) -> Callable[[Any], Any]:
        """Return the function from `Offer` to `Verdict`, with the lenience in `DecodingSettings`."""
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
    """The rule of `_Plain` with the lenience of Leviathan et al., appendix A.5: l in min(1, target / (l draft))."""

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
    """Return whether the rule with this name, from a row, tests each token by itself.

    True for a user's rule that is not loaded in this process, and for None: nothing is known then, and most rules do.
    """
    record = None if rule is None else RULES.loaded(rule)
    return record is None or record.tests_each_token
