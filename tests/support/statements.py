"""What holds for the statements of any page."""

from __future__ import annotations

from collections.abc import Sequence

from harness.results.judging.statement import Statement


def incoherent(statements: Sequence[Statement]) -> list[str]:
    """Return what is wrong: a conclusion against a reason or without bounds, a reason that is missing, or statements
    about one reference that are read together and do not have one family.
    """
    wrong = []
    families: dict[int, set[int]] = {}
    for statement in statements:
        is_founded = statement.interval.has_bounds or statement.evidence
        if statement.is_conclusion and (statement.why or not is_founded):
            wrong.append(f"a conclusion without a foundation: {statement}")
        if not statement.is_conclusion and not (statement.why or statement.interval.has_bounds):
            wrong.append(f"open without bounds or a reason: {statement}")
        # Those about one reference are read together, and all changes.
        row = statement.subject if statement.reference is None else statement.reference
        reading = id(row) if statement.kind in ("pays", "compared") else 0
        if statement.kind in ("pays", "compared", "changed", "margin"):
            families.setdefault(reading, set()).add(statement.family)
    compared_with = {id(statement.reference) for statement in statements if statement.reference}
    for reading in families.keys() & {0, *compared_with}:
        if len(families[reading]) > 1:
            wrong.append(f"several families: {families[reading]}")
    return wrong
