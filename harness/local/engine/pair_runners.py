"""The runners of a loaded pair, prepared for the questions of a run, and its drafters."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.run import RunnerName
from harness.engines.record import Preparation
from harness.local.decoding.protocols import Drafter, Runner
from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.heads.drafter import CompiledDraft, HeadDrafter
from harness.local.drafting.method import MakeDrafter, method_of
from harness.local.engine.pair import Pair
from harness.local.engine.rules import warp_of
from harness.local.engine.runner_choice import Reading, build_runner
from harness.local.models.loading import LoadedModel
from harness.local.models.tokenizers import vocabulary_size
from harness.local.runners.slots import UnsupportedModelError
from harness.local.runners.static import StaticRunner
from harness.results.schema import RunnerNames


@dataclass(frozen=True, kw_only=True)
class PairRunners:
    """The runners and drafters of a loaded pair.

    Attributes:
        pair: the models.
        target: the target's runner.
        draft: the runner of the model that drafts, if one does.
        draft_model: that model.
        compiled_draft: the compiled proposals of a head, if one drafts and could be compiled.
        names: of the target's runner and the draft's.
        make_drafter: makes a drafter for a warp; None without a draft. Its drafters may share what
            they learned of earlier answers (`draft.shared=true`).
        num_choices: the numbers of draft tokens that `auto` chooses from.
        setup_seconds: how long compiling took.
    """

    pair: Pair
    target: Runner
    draft: Runner | None
    draft_model: LoadedModel | None
    compiled_draft: CompiledDraft | None
    names: RunnerNames
    make_drafter: MakeDrafter | None
    num_choices: Sequence[int]
    setup_seconds: float

    def new_drafters(self) -> MakeDrafter | None:
        """Another `make_drafter`, whose drafters share nothing with those of the first."""
        return _drafters(self.pair, self.draft, self.compiled_draft)

    def clear(self) -> None:
        """Zero caches that further batches use again, after logits that are not finite."""
        self.target.clear()
        if self.draft is not None:
            self.draft.clear()
        if self.compiled_draft is not None:
            self.compiled_draft.cache.clear()

    def close(self) -> None:
        """Give back caches and compiled calls, even where something still refers to the runners."""
        self.target.close()
        if self.draft is not None:
            self.draft.close()
        if self.compiled_draft is not None:
            self.compiled_draft.close()


def open_runners(pair: Pair, preparation: Preparation) -> PairRunners:
    """Build the runners of a pair: one for the target, one for a draft model, or a head's
    proposals.

    Raises:
        SettingError: for a model that the runner cannot read.
    """
    settings = pair.draft_settings
    target, target_name = _target_runner(pair, preparation)
    draft: Runner | None = None
    # A draft without a runner, such as a text method, goes by the target's.
    draft_name = target_name
    draft_model = None if settings is None else method_of(settings).model(pair)
    if draft_model is not None:
        draft, draft_name = _draft_runner(pair, draft_model, preparation)
    compiled: list[StaticRunner | CompiledDraft] = []
    for runner in (target, draft):
        if isinstance(runner, StaticRunner) and runner.setup_seconds:
            compiled.append(runner)
    compiled_draft: CompiledDraft | None = None
    if pair.head is not None and target_name == "compiled":
        compiled_draft = _compiled_draft(pair, preparation)
        draft_name = "static"
        if compiled_draft is not None:
            draft_name = "compiled"
            compiled.append(compiled_draft)
    if compiled:
        # Tracing leaves garbage with the caches in it, which would stay: `timing` freezes what exists.
        gc.collect()
    most = preparation.decoding.most_draft_tokens
    numbers = preparation.numbers_drafted if compiled else range(1, most + 1)
    return PairRunners(
        pair=pair,
        target=target,
        draft=draft,
        draft_model=draft_model,
        compiled_draft=compiled_draft,
        names=RunnerNames(target_name, draft_name),
        make_drafter=_drafters(pair, draft, compiled_draft),
        num_choices=[0, *numbers],
        setup_seconds=sum(part.setup_seconds for part in compiled),
    )


def _drafters(
    pair: Pair, draft: Runner | None, compiled_draft: CompiledDraft | None = None
) -> MakeDrafter | None:
    """Make drafters of a pair, which draft by compiled proposals if there are any; None without a draft."""
    settings = pair.draft_settings
    if settings is None:
        return None
    make = method_of(settings).drafter(settings, pair, draft)
    if compiled_draft is None:
        return make
    return functools.partial(_with_compiled, make, compiled_draft)


def _with_compiled(make: MakeDrafter, compiled_draft: CompiledDraft, warp: AnyWarp) -> Drafter:
    drafter = make(warp)
    assert isinstance(drafter, HeadDrafter)  # no other has compiled proposals
    drafter.compiled = compiled_draft
    return drafter


def _target_runner(pair: Pair, preparation: Preparation) -> tuple[Runner, RunnerName]:
    """The target's runner and its name, for single tokens and for verifying proposals."""
    draft_settings = pair.draft_settings
    method = None if draft_settings is None else method_of(draft_settings)
    widths = [1]
    if method is not None:
        # A proposal is verified together with the token before it.
        widths += [number + 1 for number in preparation.numbers_drafted]
    reading = Reading(
        "model",
        pair.vocabulary_size,
        preparation.batch_size,
        preparation.num_slots,
        widths,
        hidden_layers=() if method is None else tuple(method.layers(pair)),
        shares_prefix=preparation.share_prefix,
    )
    return build_runner(pair.target, preparation.runner, reading, preparation.say)


def _draft_runner(
    pair: Pair, model: LoadedModel, preparation: Preparation
) -> tuple[Runner, RunnerName]:
    """The runner of the model that drafts, and its name."""
    size = pair.vocabulary_size
    if pair.translation is not None:
        # Its logits are those of its own tokens.
        size = vocabulary_size(model.model.config)
    assert pair.draft_settings is not None
    widths = method_of(pair.draft_settings).widths(pair, preparation.numbers_drafted)
    # The widest pass may begin at the last draft token, which needs the last but one of the
    # target's slots, and reaches `widest - 1` slots beyond it.
    num_slots = preparation.num_slots + max(widths) - 2
    reading = Reading(
        "draft",
        size,
        preparation.batch_size,
        num_slots,
        widths,
        shares_prefix=preparation.share_prefix,
    )
    return build_runner(model, preparation.runner, reading, preparation.say)


def _compiled_draft(pair: Pair, preparation: Preparation) -> CompiledDraft | None:
    """The compiled proposals of a pair's head; None where it drafts eagerly, of which the user is told."""
    make = _drafters(pair, None)
    most = max(preparation.numbers_drafted, default=0)
    if make is None or not most:
        return None
    drafter = make(warp_of(preparation.decoding))
    assert isinstance(drafter, HeadDrafter)
    try:
        return CompiledDraft(
            drafter,
            pair.target.model,
            preparation.batch_size,
            preparation.num_slots,
            most,
        )
    except UnsupportedModelError as reason:
        assert pair.draft_settings is not None
        preparation.say(f"{pair.draft_settings.name} {reason}; it drafts eagerly")
        return None
