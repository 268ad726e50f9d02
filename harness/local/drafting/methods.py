"""The ways to draft that this project has: their settings, and what the instrument and the pair ask
of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from harness.config.errors import SettingError
from harness.config.run import RunSettings, Weights
from harness.config.settings import (
    DecodingSettings,
    DraftSettings,
    ModelSettings,
    require,
    require_at_least,
)
from harness.local.drafting.method import DraftPlan, MakeDrafter, Method, Pair, TextMethod

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from harness.local.decoding.protocols import Runner
    from harness.local.decoding.warp import AnyWarp
    from harness.local.drafting.text import Text
    from harness.local.models.checkpoints import Checkpoint
    from harness.local.models.loading import LoadedModel
    from harness.local.models.sketch import Sketch

Sampling = Literal["target", "greedy"]


@dataclass(frozen=True, kw_only=True)
class SampledDraftSettings(DraftSettings):
    """Settings of every draft that samples its tokens from a distribution.

    Attributes:
        sampling: `target` draws draft tokens as the target's are drawn, `greedy` takes the
            likeliest.
    """

    sampling: Sampling = "target"

    def warp(self, target_warp: AnyWarp) -> AnyWarp:
        """Return the warp of the draft's logits, given the one of the target's."""
        from harness.local.decoding.warp import Warp

        return Warp(0) if self.sampling == "greedy" else target_warp


class SampledMethod(Method):
    """A way to draft by a head, or by a model that drafts token by token."""

    def drafter(
        self, settings: SampledDraftSettings, pair: Pair, runner: Runner | None
    ) -> MakeDrafter:
        """Return a function that makes drafters with the model of the runner, or with the pair's head."""
        from harness.local.drafting.heads.drafter import HeadDrafter
        from harness.local.drafting.model import ModelDrafter

        if runner is not None:
            device = pair.target.input_device
            return lambda warp: ModelDrafter(runner, settings.warp(warp), device)
        head = pair.head
        assert head is not None
        threshold = getattr(settings, "threshold", None) or 0.0  # 0 holds nothing back
        return lambda warp: HeadDrafter(head, settings.warp(warp), threshold)

    def huggingface(self, pair: Pair, settings: Any, decoding: DecodingSettings) -> dict[str, Any]:
        assert pair.head is not None
        return pair.head.huggingface(pair.target.model)


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


class ModelDraft(SampledMethod):
    """A model of its own, or a head; the configuration in a repository says which."""

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
        weights: Weights | None,
    ) -> DraftPlan:
        """Return a plan with the target itself, a head or a draft model, by its configuration."""
        from harness.local.drafting.heads.checkpoint import read_head
        from harness.local.models.random_weights import checkpoint_for

        identifying = [name for name in ModelSettings.__dataclass_fields__ if name != "name"]
        head = None
        needs_weights = weights == "stored"
        if all(getattr(target.settings, name) == getattr(settings, name) for name in identifying):
            plan = DraftPlan(settings)  # the target itself
        elif head := read_head(settings, target, layers=settings.layers, weights=needs_weights):
            plan = DraftPlan(settings, head=head)
        else:
            plan = DraftPlan(settings, checkpoint=checkpoint_for("draft", settings, weights))
        if settings.threshold is not None and not (head and head.config.confidence):
            rule = f"is for suffix and heads with a confidence head (DSpark), not for draft={settings.name}"
            raise SettingError("draft.threshold", rule, settings.threshold)
        return plan

    def sketch(self, plan: DraftPlan, target: Checkpoint, dtype: torch.dtype) -> Sketch | None:
        """Return the sizes of a head, and of a draft that is the target itself."""
        from harness.local.drafting.model import shared_sketch

        settings: Any = plan.settings
        if plan.head is None and plan.checkpoint is None:
            return shared_sketch(target, settings.name, dtype)
        return super().sketch(plan, target, dtype)

    def describe(self, settings: ModelDraftSettings) -> str:
        """Describe a draft that is the target itself; it is called for no other draft."""
        return "is the target itself: it shares its weights, always agrees and costs as much"

    def model(self, pair: Pair) -> LoadedModel | None:
        """Return the draft model, None if the draft is a head."""
        return pair.draft

    def widths(self, pair: Pair, numbers: Sequence[int]) -> Sequence[int]:
        """Return those of a model that drafts token by token, or of a parallel draft.

        A parallel draft reads up to K + 1 decided tokens with K - 1 masks, and draws nothing by itself.
        """
        from harness.local.drafting.model import mask_token

        if pair.draft is None or mask_token(pair.draft.model.config) is None:
            return super().widths(pair, numbers)
        return [2 * number for number in numbers] or [1]

    def drafter(
        self, settings: SampledDraftSettings, pair: Pair, runner: Runner | None
    ) -> MakeDrafter:
        """Return drafters with a head, in parallel, translated or plain, in this order."""
        from harness.local.drafting.model import ParallelDrafter, mask_token
        from harness.local.drafting.translated import TranslatedDrafter

        if pair.draft is None or runner is None:
            return super().drafter(settings, pair, runner)
        device = pair.target.input_device
        translation = pair.translation
        mask = mask_token(pair.draft.model.config)
        if mask is not None:
            rule = "drafts all tokens in one pass, and must have the model's tokenizer"
            require(translation is None, "draft", rule, settings.name)
            return lambda warp: ParallelDrafter(runner, settings.warp(warp), mask, device)
        if translation is not None:
            return lambda warp: TranslatedDrafter(runner, translation, settings.warp(warp), device)
        return super().drafter(settings, pair, runner)

    def huggingface(
        self, pair: Pair, settings: ModelDraftSettings, decoding: DecodingSettings
    ) -> dict[str, Any]:
        """Return the head, or the draft model with both tokenizers if the widths of their logits
        differ.
        """
        from harness.local.models.tokenizers import load_tokenizer, vocabulary_size

        if pair.draft is None:
            return super().huggingface(pair, settings, decoding)
        arguments: dict[str, Any] = {"assistant_model": pair.draft.model}
        widths = {vocabulary_size(loaded.model.config) for loaded in (pair.target, pair.draft)}
        if len(widths) > 1:
            # `generate` compares these widths to find out whether both have one tokenizer.
            other = load_tokenizer(pair.draft.settings, "draft")
            arguments |= {"tokenizer": pair.tokenizer, "assistant_tokenizer": other}
        return arguments


class Mtp(SampledMethod):
    """Layers that predict several tokens, as far as transformers reads them."""

    name = "mtp"
    summary = "the multi-token-prediction layers in the target's own checkpoint"
    settings = SampledDraftSettings

    def plan(
        self,
        settings: SampledDraftSettings,
        target: Checkpoint,
        weights: Weights | None,
    ) -> DraftPlan:
        """Return a plan with the head that the target's checkpoint holds."""
        from harness.local.drafting.heads.mtp import read_mtp

        return DraftPlan(
            settings, head=read_mtp(settings.name, target, weights=weights == "stored")
        )


@dataclass(frozen=True, kw_only=True)
class EarlyExitSettings(SampledDraftSettings):
    """Settings of `draft=early_exit`; `draft=early_exit_8` has 8 layers.

    Attributes:
        layers: how many of the target's layers draft; a quarter of them if None.
    """

    # One number in a tuple, because `draft.layers` of a head is a list.
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "must be one number: how many of the target's layers draft"
        require(self.layers is None or len(self.layers) == 1, "layers", rule, self.layers)

    @property
    def num_layers(self) -> int:
        """The number of layers that draft, in the settings of a plan."""
        assert self.layers is not None, "EarlyExit.plan fills it in"
        return self.layers[0]


class EarlyExit(SampledMethod):
    """The first layers of the target as a draft model without weights of its own."""

    name = "early_exit"
    summary = "the target's own first layers, a quarter of them; early_exit_8 has 8"
    settings = EarlyExitSettings
    memory = "shared"

    def choice(self, name: str) -> dict[str, Any] | None:
        """Return no settings for `early_exit`, and 8 layers for `early_exit_8`."""
        number = re.fullmatch(r"early_exit_(\d+)", name)
        return {"layers": [int(number[1])]} if number else super().choice(name)

    def plan(
        self,
        settings: EarlyExitSettings,
        target: Checkpoint,
        weights: Weights | None,
    ) -> DraftPlan:
        """Return a plan whose settings have the number of layers, a quarter if none was given."""
        from harness.local.drafting.model import truncated_config

        total = target.config.get_text_config(decoder=True).num_hidden_layers
        layers = settings.layers or (max(1, total // 4),)
        truncated_config(target.config, layers[0])  # for its errors
        return DraftPlan(dataclasses.replace(settings, layers=layers))

    def sketch(self, plan: DraftPlan, target: Checkpoint, dtype: torch.dtype) -> Sketch:
        """Return a sketch without weights: a cache, and the target's layers that are read."""
        from harness.local.drafting.model import shared_sketch, truncated_config

        settings: Any = plan.settings
        config = truncated_config(target.config, settings.num_layers)
        first_layers = dataclasses.replace(target, config=config)
        return shared_sketch(first_layers, settings.name, dtype)

    def describe(self, settings: EarlyExitSettings) -> str:
        number = settings.num_layers
        layers = "layer" if number == 1 else f"{number} layers"
        return f"the first {layers} of the model"

    def model(self, pair: Pair) -> LoadedModel:
        """Return the target's first layers as a model."""
        from harness.local.drafting.model import truncated

        settings: Any = pair.draft_settings
        shorter = truncated(pair.target.model, settings.num_layers)
        as_model = dataclasses.replace(pair.target.settings, name=settings.name)
        return dataclasses.replace(pair.target, settings=as_model, model=shorter)

    def huggingface(
        self, pair: Pair, settings: EarlyExitSettings, decoding: DecodingSettings
    ) -> dict[str, Any]:
        return {"assistant_early_exit": settings.num_layers}


@dataclass(frozen=True, kw_only=True)
class LookupSettings(DraftSettings):
    """Settings of `draft=lookup`.

    Attributes:
        max_ngram: tokens that must have occurred before, at most.
        min_ngram: tokens that must have occurred before, at least.
    """

    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, min_ngram=1)
        rule = f"must be at least draft.min_ngram={self.min_ngram}"
        require(self.max_ngram >= self.min_ngram, "max_ngram", rule, self.max_ngram)


class Lookup(TextMethod):
    """Proposes what followed the same n-gram the last time."""

    name = "lookup"
    summary = "what followed the same n-gram in prompt and output"
    settings = LookupSettings

    def texts(
        self, settings: LookupSettings, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Callable[[], Text]:
        """Return a function that makes an empty `LookupText`."""
        from harness.local.drafting.text import LookupText

        return lambda: LookupText(settings.max_ngram, settings.min_ngram)

    def huggingface(
        self, pair: Pair, settings: LookupSettings, decoding: DecodingSettings
    ) -> dict[str, Any]:
        return {
            "prompt_lookup_num_tokens": decoding.num_draft_tokens,
            "max_matching_ngram_size": settings.max_ngram,
        }

    def check_huggingface(self, settings: LookupSettings) -> None:
        """Refuse a least n-gram."""
        rule = "must be 1 with engine=huggingface: generate() tries single tokens too"
        require(settings.min_ngram == 1, "draft.min_ngram", rule, settings.min_ngram)


@dataclass(frozen=True, kw_only=True)
class SuffixSettings(DraftSettings):
    """Settings of `draft=suffix`.

    Attributes:
        threshold: a proposal ends where the estimated chance that all of it is accepted falls below
            this; 0.1 if None.
        max_depth: tokens of the longest sequence that is counted. It bounds the work per token.
        shared: also search the earlier answers of the run.
    """

    threshold: float | None = None
    max_depth: int = 24
    shared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, max_depth=1)
        require(0 <= self.least_chance <= 1, "threshold", "must be in [0, 1]", self.threshold)

    @property
    def least_chance(self) -> float:
        """The threshold, or its default."""
        return 0.1 if self.threshold is None else self.threshold


class Suffix(TextMethod):
    """Proposes the most frequent continuation of the longest match in prompt and output."""

    name = "suffix"
    summary = (
        "the most frequent continuations of the longest known suffix, as far as they are likely"
    )
    settings = SuffixSettings

    def drafter(self, settings: SuffixSettings, pair: Pair, runner: Runner | None) -> MakeDrafter:
        """Return a function that makes drafters, which share the earlier answers if so set."""
        from harness.local.drafting.text import SuffixTexts, TextDrafter

        texts = SuffixTexts(settings.max_depth, settings.least_chance, shared=settings.shared)
        device = pair.target.input_device
        return lambda warp: TextDrafter(texts.new, device, texts.begin_batch)


class Server(Method):
    """A server's own drafting, whatever that is."""

    name = "server"
    summary = "with engine=server: what that server drafts with"

    def check(self, run: RunSettings) -> None:
        """Refuse every engine but a server that also has an address without drafting."""
        rule = "needs engine=server with engine.regular_url"
        require(run.engine.has_two, "draft", rule, "server")
