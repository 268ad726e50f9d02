"""What `draft=` names, as something that makes a drafter for each question."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from harness.decoding.protocols import Drafter, Runner
from harness.decoding.warp import AnyWarp, Warp
from harness.drafting.dflash import BlockHead
from harness.drafting.lookup import LookupDrafter
from harness.drafting.model import ModelDrafter
from harness.drafting.suffix import SuffixDrafter
from harness.drafting.translated import TranslatedDrafter
from harness.models.early_exit import truncated
from harness.models.loading import LoadedModel
from harness.models.pair import Pair

MakeDrafter = Callable[[AnyWarp], Drafter]


def draft_model(pair: Pair) -> LoadedModel | None:
    """The model that drafts, if it is one: the draft, or the target's own first layers."""
    settings = pair.drafting
    if settings is None or settings.method != "early_exit" or settings.layers is None:
        return pair.draft
    return dataclasses.replace(
        pair.target, settings=settings, model=truncated(pair.target.model, settings.layers[0])
    )


def drafter_maker(pair: Pair, runner: Runner | None) -> MakeDrafter | None:
    """A function from the target's warp to a drafter; None without a draft.

    Args:
        runner: of `draft_model`, if there is one.
    """
    settings, device = pair.drafting, pair.target.input_device
    greedy = settings is not None and settings.sampling == "greedy"

    def draw_as(warp: AnyWarp) -> AnyWarp:
        return Warp(0) if greedy else warp

    if runner is not None and (translation := pair.translation) is not None:
        return lambda warp: TranslatedDrafter(runner, translation, draw_as(warp), device)
    if runner is not None:
        return lambda warp: ModelDrafter(runner, draw_as(warp), device)
    if pair.head is not None:
        head, target = pair.head, pair.target.model
        if isinstance(head, BlockHead) and settings is not None:
            return lambda warp: head.drafter(target, draw_as(warp), settings.least_chance)
        return lambda warp: head.drafter(target, draw_as(warp))
    if settings is None:
        return None
    if settings.method == "lookup":
        return lambda warp: LookupDrafter(settings.max_ngram, settings.min_ngram, device=device)
    if settings.shared:
        # One for all questions, because it searches the answers to those before.
        shared = SuffixDrafter(
            settings.least_chance, settings.max_depth, shared=True, device=device
        )
        return lambda warp: shared
    return lambda warp: SuffixDrafter(settings.least_chance, settings.max_depth, device=device)
