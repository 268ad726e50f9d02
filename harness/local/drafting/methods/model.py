"""A draft model, or a head on the target's hidden states; the configuration in a repository says
which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings, DraftSettings, ModelSettings, require
from harness.local.drafting.method import (
    LoadedPair,
    MakeDrafter,
    Method,
)

if TYPE_CHECKING:
    from harness.local.decoding.protocols import Runner
    from harness.local.decoding.warp import AnyWarp
    from harness.local.drafting.heads.find import DraftPlan
    from harness.local.models.checkpoints import Checkpoint, ReadCheckpoint
    from harness.local.models.loading import LoadedModel

Sampling = Literal["target", "greedy"]


@dataclass(frozen=True, kw_only=True)
class SampledDraftSettings(DraftSettings):
    """Settings of every draft that samples its tokens from a distribution.

    Attributes:
        sampling: `target` draws draft tokens as the target's are drawn, `greedy` takes the
            likeliest.
    """

    sampling: Sampling = "target"

    def warp(self, of_target: AnyWarp) -> AnyWarp:
        """Return the warp of the draft's logits, given the one of the target's."""
        from harness.local.decoding.warp import Warp

        return Warp(0) if self.sampling == "greedy" else of_target


@dataclass(frozen=True, kw_only=True)
class ModelDraftSettings(SampledDraftSettings, ModelSettings):
    """Settings of a draft model or a head: a draft with weights of its own.

    Attributes:
        layers: of a head: the hidden states it reads, where they are not those that its
            configuration names.
        threshold: of a head with a confidence head (DSpark): a proposal ends where the chance that
            a token is accepted falls below this; None holds nothing back.
    """

    method: str = "model"
    layers: tuple[int, ...] | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ModelSettings.__post_init__(self)
        require(self.gpus in (None, 1), "gpus", "must be 1: a draft is whole on one GPU", self.gpus)
        known = self.threshold is None or 0 <= self.threshold <= 1
        require(known, "threshold", "must be in [0, 1]", self.threshold)


class ModelDraft(Method):
    """A model of its own, or a head."""

    name = "model"
    summary = (
        "token by token, a parallel draft (PARD) in one pass; a head in the format of its writer, "
        "a model also with another tokenizer"
    )
    settings = ModelDraftSettings
    named = False

    def plan(
        self,
        settings: ModelDraftSettings,
        target: Checkpoint,
        read_checkpoint: ReadCheckpoint,
        needs_weights: bool,
    ) -> DraftPlan:
        """Return a plan with the target itself, a head or a draft model, by its configuration."""
        from harness.local.drafting.heads.find import DraftPlan, read_head
        from harness.local.drafting.parallel import checked_mask
        from harness.local.drafting.registry import HEADS

        identifying = [name for name in ModelSettings.__dataclass_fields__ if name != "name"]
        if all(getattr(target.settings, name) == getattr(settings, name) for name in identifying):
            plan = DraftPlan(settings, shares_target=True)
        else:
            kinds = HEADS.all().values()
            head = read_head(settings, target, kinds, layers=settings.layers, weights=needs_weights)
            if head is not None:
                plan = DraftPlan(settings, head=head)
            else:
                checkpoint = read_checkpoint("draft", settings)
                mask = checked_mask(settings.name, checkpoint.config)
                plan = DraftPlan(settings, checkpoint=checkpoint, mask_token=mask)
        if settings.threshold is not None and not (plan.head and plan.head.config.confidence):
            rule = f"is for suffix and heads with a confidence head (DSpark), not for draft={settings.name}"
            raise SettingError("draft.threshold", rule, settings.threshold)
        return plan

    def describe(self, settings: ModelDraftSettings) -> str:
        """Describe a draft that is the target itself: no other draft is asked."""
        return "is the target itself: it shares its weights, always agrees and costs as much"

    def model(self, pair: LoadedPair) -> LoadedModel | None:
        """Return the draft model, None if the draft is a head."""
        return pair.draft

    def widths(self, pair: LoadedPair, numbers: Sequence[int]) -> Sequence[int]:
        """Return those of a model that drafts token by token, or of a parallel draft.

        A parallel draft reads up to K decided tokens with K masks, and draws nothing by itself.
        """
        from harness.local.drafting.parallel import mask_token

        if pair.draft is None or mask_token(pair.draft.model.config) is None:
            return super().widths(pair, numbers)
        return [2 * number for number in numbers] or [1]

    def drafter(
        self, settings: ModelDraftSettings, pair: LoadedPair, runner: Runner | None
    ) -> MakeDrafter:
        """Return drafters with a head, in parallel, translated or plain, in this order."""
        from harness.local.drafting.model import ModelDrafter
        from harness.local.drafting.parallel import ParallelDrafter, mask_token
        from harness.local.drafting.translated import TranslatedDrafter

        head = pair.head
        if head is not None:
            target = pair.target.model
            threshold = settings.threshold or 0.0  # 0 holds nothing back
            return lambda warp: head.drafter(target, settings.warp(warp), threshold)
        assert pair.draft is not None
        assert runner is not None
        device = pair.target.input_device
        mask = mask_token(pair.draft.model.config)
        if mask is not None:
            rule = "drafts all tokens in one pass, and must have the model's tokenizer"
            require(pair.translation is None, "draft", rule, settings.name)
            return lambda warp: ParallelDrafter(runner, settings.warp(warp), mask, device)
        translation = pair.translation
        if translation is not None:
            return lambda warp: TranslatedDrafter(runner, translation, settings.warp(warp), device)
        return lambda warp: ModelDrafter(runner, settings.warp(warp), device)

    def huggingface(
        self, pair: LoadedPair, settings: ModelDraftSettings, decoding: DecodingSettings
    ) -> dict[str, Any]:
        """Return the head, or the draft model with both tokenizers if the widths of their logits
        differ.
        """
        from harness.local.models.tokenizers import load_tokenizer, vocabulary_size

        if pair.head is not None:
            return pair.head.huggingface(pair.target.model)
        assert pair.draft is not None
        arguments: dict[str, Any] = {"assistant_model": pair.draft.model}
        widths = {vocabulary_size(loaded.model.config) for loaded in (pair.target, pair.draft)}
        if len(widths) > 1:
            # `generate` compares these widths to find out whether both have one tokenizer.
            other = load_tokenizer(pair.draft.settings, "draft")
            arguments |= {"tokenizer": pair.tokenizer, "assistant_tokenizer": other}
        return arguments


RECORD = ModelDraft()
