"""The acceptance rules by their names. A rule decides which draft tokens are kept. A user may add one in a file.

This module imports no torch: it contains the path of each rule's function, which is imported when a run decodes. Every
statement about a rule, such as that it is lossless, follows from the rule's record. To add a rule, write a class here
and a function in `harness/local/decoding/verify.py`. If the rule has a setting, add a field to `DecodingSettings`.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from harness.config.registry import Record, Registry


class AcceptanceRule(Record):
    """An acceptance rule, chosen by `decoding.rule=NAME`.

    A user's rule is a subclass with a method `verify`, in a file (`decoding.rule=./fly.py:Fly`). The method is called
    after every pass of the target, for a whole batch. Its argument and result consist of tensors, none of which it may
    read on the host.

    Attributes:
        name: the name in `decoding.rule=`.
        lossless: whether the output follows the target's distribution at temperatures above 0.
        lossless_greedily: whether texts at temperature 0 are the target's texts; None if `lossless` decides this, too.
        tests_each_token: whether the acceptance of a token depends only on the test of this token and of those before
            it. Then the acceptance for a smaller K follows from the acceptance for K.
        redraws: whether each iteration uses new random numbers, not those that belong to the tokens' positions.
        closed_form: whether the acceptance of a given text can be computed from the text's probabilities.
        parameters: the rule's settings in `decoding`, with their defaults. A `lossless` rule is lossless at the
            defaults.
    """

    lossless: ClassVar[bool] = False
    lossless_greedily: ClassVar[bool | None] = None
    tests_each_token: ClassVar[bool] = False
    redraws: ClassVar[bool] = False
    closed_form: ClassVar[bool] = False
    parameters: ClassVar[Mapping[str, float]] = {}
    # The path of a built-in rule's function, which is imported when a run decodes. Empty for a class that has a method
    # `verify`.
    _path: ClassVar[str] = ""

    def is_lossless(self, temperature: float) -> bool:
        """Return whether the output follows the target's distribution at this temperature, with the default
        parameters.
        """
        if temperature == 0 and self.lossless_greedily is not None:
            return self.lossless_greedily
        return self.lossless

    def verify(self, offer: Any) -> Any:
        """Return the `Verdict` on an `Offer` (both are classes in `harness/local/decoding/verify.py`).

        Must be a pure function. The rule's parameters are passed as keyword arguments.
        """
        raise NotImplementedError

    def verification(self, chosen: Any) -> Callable[[Any], Any]:
        """Return the function from `Offer` to `Verdict`, with the values of the parameters in `DecodingSettings`."""
        function: Callable[..., Any] = (
            pkgutil.resolve_name(self._path) if self._path else self.verify
        )
        parameters = {name: getattr(chosen, name) for name in self.parameters}
        return functools.partial(function, **parameters) if parameters else function


class _Plain(AcceptanceRule):
    """The rule of Leviathan et al. 2023 and Chen et al. 2023: accept with min(1, target / draft)."""

    lossless = True
    tests_each_token = True
    closed_form = True
    _path = "harness.local.decoding.verify:verify"


class _Google(_Plain):
    """The rule of `_Plain` with the lenience of Leviathan et al., appendix A.5."""

    parameters: ClassVar[Mapping[str, float]] = {"lenience": 1.0}


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


# The parameters of the built-in rules, with their defaults.
PARAMETERS = {
    name: default for rule in RULES.all().values() for name, default in rule.parameters.items()
}


def changed_parameters(chosen: Any) -> dict[str, Any]:
    """Return the parameters of acceptance rules whose values in `DecodingSettings` or in a row are not the defaults."""
    # In a row, parameters without a column are in `settings`.
    further = getattr(chosen, "settings", None) or {}
    values = {
        name: getattr(chosen, name, further.get(f"decoding.{name}", default))
        for name, default in PARAMETERS.items()
    }
    return {name: value for name, value in values.items() if value not in (None, PARAMETERS[name])}


def tests_each_token(rule: str | None) -> bool:
    """Return whether the rule with this name, from a row, tests each token by itself.

    True for a user's rule that is not loaded in this process, and for None.
    """
    record = None if rule is None else RULES.loaded(rule)
    return record is None or record.tests_each_token
