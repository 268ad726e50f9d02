"""Rules of acceptance by name: which draft tokens are kept. The built-in ones, and those in files of the user's own.

What needs torch is named by its path, and imported when a run decodes. What is said of a rule anywhere follows from
its record: a new one is a class here and a function in `harness/local/decoding/verify.py`. A setting of its own is a
field of `DecodingSettings` too.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Mapping
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
        closed_form: whether the acceptance of a given text follows from the text's probabilities.
        parameters: its settings in `decoding`, with the defaults; at these a `lossless` rule is lossless.
    """

    lossless: ClassVar[bool] = False
    lossless_greedily: ClassVar[bool | None] = None
    tests_each_token: ClassVar[bool] = False
    redraws: ClassVar[bool] = False
    closed_form: ClassVar[bool] = False
    parameters: ClassVar[Mapping[str, float]] = {}
    # The place of a built-in rule's function, which is imported when a run decodes.
    _path: ClassVar[str] = ""

    def is_lossless(self, temperature: float) -> bool:
        """Whether the output follows the target's distribution at this temperature, with the default parameters."""
        if temperature == 0 and self.lossless_greedily is not None:
            return self.lossless_greedily
        return self.lossless

    def verify(self, offer: Any) -> Any:
        """Return the `Verdict` over an `Offer` (`harness/local/decoding/verify.py`): a pure function, which takes the
        rule's parameters by name.
        """
        raise NotImplementedError

    def verification(self, chosen: Any) -> Callable[[Any], Any]:
        """The function that judges proposals, with the parameters of these `DecodingSettings`."""
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
    """The same with the lenience of Leviathan et al., appendix A.5."""

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
    """The parameters of rules that are not at their defaults, of settings or of a row."""
    # A row has those without a column in `settings`.
    further = getattr(chosen, "settings", None) or {}
    values = {
        name: getattr(chosen, name, further.get(f"decoding.{name}", default))
        for name, default in PARAMETERS.items()
    }
    return {name: value for name, value in values.items() if value not in (None, PARAMETERS[name])}


def tests_each_token(rule: str | None) -> bool:
    """Whether the rule of a row tests each token by itself; so does one that is not known here."""
    record = None if rule is None else RULES.loaded(rule)
    return record is None or record.tests_each_token
