"""How often draft tokens were accepted: the counts behind every acceptance figure, as vLLM and AIPerf define them, and
what servers print of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from harness.results.schema import RunRow


class Rejection(NamedTuple):
    """A draft token that the target rejected, at a position in the new text, from 0.

    The probabilities are those of the rejected token; None from an engine that does not report them.
    """

    position: int
    rejected: str
    target_probability: float | None
    draft_probability: float | None
    replacement: str


class Printed(NamedTuple):
    """A figure that a program prints.

    Attributes:
        program: as the column `server` begins.
        name: the program's words.
        column: ours that is computed alike (`docs/counted.md`).
        form: of each number.
    """

    program: str
    name: str
    column: str
    form: str


PRINTED = (
    Printed("vLLM", "Mean acceptance length", "mean_acceptance_length", ".2f"),
    Printed("vLLM", "Per-position acceptance rate", "marginal_acceptance_by_position", ".3f"),
    Printed("vLLM", "Avg Draft acceptance rate", "acceptance_rate", ".1%"),
    Printed("llama.cpp", "draft acceptance", "acceptance_rate", ".5f"),
    Printed("llama.cpp", "mean len", "mean_acceptance_length", ".2f"),
    # Over all of its verifications.
    Printed("SGLang", "accept len", "tokens_per_iteration", ".2f"),
    Printed("TensorRT-LLM", "acceptance_length", "mean_acceptance_length", ".2f"),
)


def as_printed(row: RunRow) -> dict[str, str]:
    """The figures of a row as its server prints them, by name; empty where its program is not known."""
    figures = {}
    for printed in PRINTED:
        value = getattr(row, printed.column, None)
        if value is not None and (row.server or "").startswith(printed.program):
            numbers = value if isinstance(value, list) else [value]
            figures[printed.name] = ", ".join(f"{number:{printed.form}}" for number in numbers)
    return figures
