"""The runners of a loaded pair, prepared for the questions of a run, and its drafters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.config.run import RunnerName
from harness.engines.record import Preparation
from harness.local.decoding.protocols import Drafter, Runner
from harness.local.decoding.tree_decision import TreeJudge
from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.heads.drafter import HeadDrafter
from harness.local.drafting.heads.prepared import PreparedHead
from harness.local.drafting.method import MakeDrafter
from harness.local.drafting.registry import method_of
from harness.local.drafting.trees.prepared_trees import PreparedTrees
from harness.local.engine.pair import Pair
from harness.local.engine.rules import decisions_of, tree_rule_of, warp_of
from harness.local.engine.runner_choice import PREPARED, build_runner, first_possible, resolve
from harness.local.models.loading import LoadedModel
from harness.local.models.tokenizers import vocabulary_size
from harness.local.runners.compiled import PreparedRunner
from harness.local.runners.prepared_calls import RunnerShapes
from harness.local.runners.shared_prefix import sharing
from harness.local.runners.slots import UnsupportedModelError
from harness.local.runners.tree_passes import TreeDemand
from harness.results.schema import RunnerNames


@dataclass(frozen=True, kw_only=True)
class PairRunners:
    """The runners and drafters of a loaded pair.

    Attributes:
        pair: the models.
        target: the target's runner.
        draft: the runner of the model that drafts, if one does.
        draft_model: that model.
        head: the prepared proposals of a head, if one drafts and can be prepared.
        names: of the target's runner and the draft's.
        make_drafter: makes a drafter for a warp; None without a draft. Its drafters may share what
            they learned of earlier answers (`draft.shared=true`).
        num_choices: the numbers of draft tokens that `auto` chooses from.
        works_ahead: whether loops queue a turn before the host has read the one before it. Only a
            GPU that runs prepared shapes would otherwise wait for the host.
        setup_seconds: how long compiling and capturing took.
    """

    pair: Pair
    target: Runner
    draft: Runner | None
    draft_model: LoadedModel | None
    head: PreparedHead | None
    names: RunnerNames
    make_drafter: MakeDrafter | None
    num_choices: Sequence[int]
    works_ahead: bool
    setup_seconds: float

    def new_drafters(self) -> MakeDrafter | None:
        """Another `make_drafter`, whose drafters share nothing with those of the first."""
        make = _drafters(self.pair, self.target, self.draft)
        if make is None:
            return None
        return make if self.head is None else functools.partial(_with_prepared, make, self.head)

    def clear(self) -> None:
        """Zero caches that further batches use again, after logits that are not finite."""
        self.target.clear()
        if self.draft is not None:
            self.draft.clear()
        if self.head is not None:
            self.head.clear()

    def close(self) -> None:
        """Give back caches, compiled calls and graphs, even where something still refers to the
        runners.
        """
        self.target.close()
        if self.draft is not None:
            self.draft.close()
        if self.head is not None:
            self.head.close()


def open_runners(pair: Pair, preparation: Preparation) -> PairRunners:
    """Build the runners of a pair: one for the target, one for a draft model, or a head's
    proposals.

    Raises:
        SettingError: for a runner that the devices do not have, or a model that it cannot read.
    """
    settings = pair.draft_settings
    if settings is not None:
        preparation = replace(preparation, most_nodes=settings.most_nodes)  # 0 for chains
    target, target_name = _target_runner(pair, preparation)
    draft: Runner | None = None
    # A draft without a runner, such as a text method, goes by the target's.
    draft_name = target_name
    draft_model = None if settings is None else method_of(settings).model(pair)
    if draft_model is not None:
        draft, draft_name = _draft_runner(pair, draft_model, preparation)
    prepared: list[PreparedRunner | PreparedHead] = []
    prepared += [runner for runner in (target, draft) if isinstance(runner, PreparedRunner)]
    if preparation.share_prefix:
        target = sharing(target)
        draft = None if draft is None else sharing(draft)
    head: PreparedHead | None = None
    make = _drafters(pair, target, draft)
    if make is not None and pair.head is not None:
        head, head_name = _prepared_head(pair, make, preparation, target_name)
        # Where nothing is prepared, the head goes by the target's runner.
        if prepared or head is not None:
            draft_name = head_name
        if head is not None:
            prepared.append(head)
            make = functools.partial(_with_prepared, make, head)
    most = preparation.decoding.most_draft_tokens
    numbers = preparation.numbers_drafted if prepared else range(1, most + 1)
    return PairRunners(
        pair=pair,
        target=target,
        draft=draft,
        draft_model=draft_model,
        head=head,
        names=RunnerNames(target_name, draft_name),
        make_drafter=make,
        num_choices=[0, *numbers],
        works_ahead=bool(prepared) and pair.target.input_device.type == "cuda",
        setup_seconds=sum(one.setup_seconds for one in prepared),
    )


def _drafters(pair: Pair, target: Runner, draft: Runner | None) -> MakeDrafter | None:
    """Make drafters of a pair, which may read the target's cache; None without a draft."""
    settings = pair.draft_settings
    if settings is None:
        return None
    make = method_of(settings).drafter(settings, pair, draft)

    def make_reading(warp: AnyWarp) -> Drafter:
        drafter = make(warp)
        if getattr(drafter, "cached_layers", ()):  # a class of the user's may lack it
            drafter.target_runner = target
        return drafter

    return make_reading


def _target_runner(pair: Pair, preparation: Preparation) -> tuple[Runner, RunnerName]:
    """The target's runner and its name, prepared to step, and to verify chains or trees."""
    decoding = preparation.decoding
    draft_settings = pair.draft_settings
    method = None if draft_settings is None else method_of(draft_settings)
    warp = warp_of(decoding)
    widths = [1]
    trees = TreeDemand()
    if preparation.most_nodes:
        judge = TreeJudge(warp, tree_rule_of(decoding, preparation.fault))
        # A tree is verified together with the token before it.
        num_tokens = preparation.most_nodes + 1
        trees = TreeDemand((num_tokens,), num_tokens, [judge])
    elif method is not None:
        # A proposal is verified together with the token before it.
        widths += [number + 1 for number in preparation.numbers_drafted]
    deterministic = False if method is None else method.deterministic
    decisions = decisions_of(decoding, preparation.fault, widths, deterministic=deterministic)
    shapes = RunnerShapes(
        batch_size=preparation.batch_size,
        num_slots=preparation.num_slots,
        widths=widths,
        warp=warp,
        decisions=decisions,
        longest_prompt=preparation.longest_prompt,
        trees=trees,
    )
    hidden_layers = () if method is None else tuple(method.layers(pair))
    return build_runner(
        pair.target,
        preparation.runner,
        pair.vocabulary_size,
        preparation.say,
        shapes,
        hidden_layers,
    )


def _draft_runner(
    pair: Pair, model: LoadedModel, preparation: Preparation
) -> tuple[Runner, RunnerName]:
    """The runner of the model that drafts, and its name."""
    size = pair.vocabulary_size
    if pair.translation is not None:
        # Its logits are those of its own tokens.
        size = vocabulary_size(model.model.config)
    draft_settings = pair.draft_settings
    assert draft_settings is not None
    method = method_of(draft_settings)
    passes = method.passes(pair, preparation.numbers_drafted)
    # The widest pass may begin at the last draft token, which needs the last but one of the
    # target's slots, and reaches `widest - 1` slots beyond it.
    widest = max(passes.widths)
    shapes = RunnerShapes(
        batch_size=preparation.batch_size,
        num_slots=preparation.num_slots + widest - 2,
        widths=passes.widths,
        num_drawn=passes.num_drawn,
        warp=method.warp(draft_settings, pair, warp_of(preparation.decoding)),
        longest_prompt=preparation.longest_prompt,
    )
    return build_runner(model, preparation.runner, size, preparation.say, shapes, role="draft")


def _prepared_head(
    pair: Pair, make_drafter: MakeDrafter, preparation: Preparation, target_name: RunnerName
) -> tuple[PreparedHead | None, RunnerName]:
    """The prepared proposals of a pair's head, and the name of their runner; None where it drafts
    eagerly.

    Args:
        make_drafter: makes a drafter over the head.
        target_name: of the target's runner.
    """
    assert pair.draft_settings is not None

    def build(chosen: RunnerName) -> PreparedHead | None:
        if chosen not in PREPARED or not preparation.numbers_drafted:
            return None
        drafter = make_drafter(warp_of(preparation.decoding))
        if not isinstance(drafter, HeadDrafter):
            raise UnsupportedModelError("drafts by code of its own")
        if drafter.cached_layers and target_name not in PREPARED:
            raise UnsupportedModelError(f"reads the model's cache, with runner={target_name}")
        kind = PreparedTrees if drafter.budget else PreparedHead
        prepared = kind(
            drafter,
            pair.target.model,
            pair.vocabulary_size,
            compiled=chosen != "graphs_only",
            captured=chosen != "compiled",
        )
        prepared.prepare(preparation.batch_size, preparation.num_slots, preparation.numbers_drafted)
        return prepared

    chosen = resolve(preparation.runner, [pair.target.input_device])
    return first_possible(pair.draft_settings.name, chosen, build, preparation.say)


def _with_prepared(make_drafter: MakeDrafter, head: PreparedHead, warp: AnyWarp) -> Drafter:
    """A drafter whose head drafts by the prepared proposals."""
    drafter = make_drafter(warp)
    assert isinstance(drafter, HeadDrafter)  # `_prepared_head` prepares no other
    drafter.prepared = head
    return drafter
