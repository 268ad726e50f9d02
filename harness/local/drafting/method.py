"""The ways to draft. Each is described by a `Method`: its name, settings and rules (in the base class `MethodRecord`),
and the functions that plan a draft and make drafters. Users can write a method in a file
(`draft=./my_method.py:MyMethod`).

Everything that needs torch is imported inside functions, so that names, settings and help need no torch.

A run calls the functions of a method in this order:

    check      with the settings alone
    plan       before weights load
    layers     while the pair is prepared
    drafter    when the arm's calls are made

With the engine `huggingface`, `check_huggingface` is called just before `check`, also with the settings alone, and
`huggingface` replaces `layers` and `drafter`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from harness.config.methods import MethodRecord
from harness.config.run import RunSettings, WeightsSource
from harness.config.settings import (
    DecodingSettings,
    DraftSettings,
    ModelSettings,
    require,
    require_at_least,
)
from harness.local.models.tokenizers import vocabulary_size

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from harness.local.decoding.protocols import Drafter, Runner, TensorDrafter
    from harness.local.decoding.warp import AnyWarp
    from harness.local.drafting.heads.checkpoint import HeadCheckpoint
    from harness.local.drafting.heads.head import Head
    from harness.local.drafting.text import Text
    from harness.local.models.checkpoints import Checkpoint
    from harness.local.models.loading import LoadedModel

# A function that returns a new drafter, given the warp of the target's logits.
MakeDrafter = Callable[["AnyWarp"], "Drafter | TensorDrafter"]

# The rule that a SettingError states if transformers' own generation cannot draft with the chosen method.
FOR_HUGGINGFACE = "must be a model, lookup or early_exit with engine=huggingface"


@dataclass(frozen=True)
class DraftPlan:
    """A draft whose weights are not loaded yet: its settings, and the checkpoint of its model or head. A draft without
    weights, such as `lookup`, has only settings.

    Attributes:
        settings: the draft's settings. `Method.plan` has filled in values that the user left open. None without a
            draft.
        checkpoint: the draft model's checkpoint; None if there is no draft model.
        head: the draft head's checkpoint; None if there is no head.
    """

    settings: DraftSettings | None
    checkpoint: Checkpoint | None = None
    head: HeadCheckpoint | None = None


@dataclass(frozen=True)
class Pair:
    """A loaded pair: the target, its draft if there is one, and the target's tokenizer.

    Attributes:
        target: the model whose output is wanted.
        draft: the draft model; None if the draft is a head, if its method has no weights, or without a draft.
        tokenizer: the target's tokenizer.
        head: the draft head, which reads the target's hidden states; None if the draft is no head.
        draft_settings: the draft's settings, whatever its kind; None without a draft.
    """

    target: LoadedModel
    draft: LoadedModel | None
    tokenizer: PreTrainedTokenizerBase
    head: Head | None = None
    draft_settings: DraftSettings | None = None

    @property
    def devices(self) -> list[torch.device]:
        """All devices that hold a layer of the target or of the draft, without repetitions; the target's come first."""
        devices = list(self.target.devices)
        if self.draft is not None:
            devices += self.draft.devices
        if self.head is not None:
            devices.append(next(self.head.parameters()).device)
        return list(dict.fromkeys(devices))

    @property
    def vocabulary_size(self) -> int:
        """V, the width to which the logits of both models are cut: the smaller of the two models' widths. A model may
        pad its outputs beyond the tokens of its tokenizer, and the two models may pad to different widths.
        """
        models = [self.target] if self.draft is None else [self.target, self.draft]
        return min(vocabulary_size(loaded.model.config) for loaded in models)

    def stop_tokens(self) -> frozenset[int]:
        """The ids of the tokens with which the target ends a text; an empty set if none are configured.

        They are those of the target's generation configuration. Unless that configuration has a list, the tokenizer's
        token that ends a text is one of them too.
        """
        generation = self.target.model.generation_config
        configured = generation.eos_token_id if generation else None
        ids: Any = configured
        if not isinstance(configured, list):
            ids = [configured, self.tokenizer.eos_token_id]
        return frozenset(int(token) for token in ids if token is not None)


class Method(MethodRecord):
    """A way to draft. Adds to `MethodRecord` the functions that plan a draft and make drafters."""

    def plan(
        self,
        settings: Any,
        target: Checkpoint,
        weights: WeightsSource | None,
    ) -> DraftPlan:
        """Plan the draft, before any weights load.

        Args:
            settings: the user's settings, an object of the class `self.settings`.
            target: the target's checkpoint.
            weights: the run's setting `weights`. None if the pair is only planned: then no weights are needed.

        Raises:
            SettingError: the draft does not fit the target.
        """
        return DraftPlan(settings)

    def layers(self, pair: Pair) -> Sequence[int]:
        """Return the target's layers whose hidden states the drafters read: 0 for the embedding, i for the output of
        layer i. Empty if the drafters read none.
        """
        return () if pair.head is None else pair.head.config.target_layers

    def drafter(self, settings: Any, pair: Pair, runner: Runner | None) -> MakeDrafter:
        """Return a function that makes a drafter, given the warp of the target's logits.

        The returned function may be called several times. So work that all drafters share is done before it is
        returned.

        Args:
            settings: the settings as `plan` completed them, an object of the class `self.settings`.
            pair: the loaded models.
            runner: the draft model's runner; None without a draft model.
        """
        raise NotImplementedError("drafter()")

    def huggingface(self, pair: Pair, settings: Any, decoding: DecodingSettings) -> dict[str, Any]:
        """Return the arguments that make transformers' `generate` draft in this way. If `generate` cannot draft in this
        way, raise NotImplementedError.
        """
        raise NotImplementedError

    def check_huggingface(self, settings: Any) -> None:
        """Raise a SettingError if the method's class does not override `huggingface`."""
        is_supported = type(self).huggingface is not Method.huggingface
        require(is_supported, "draft", FOR_HUGGINGFACE, settings.name)


class TextMethod(Method):
    """A way to draft that reads only the text of a row. Each row has a `Text`, which guesses how the row continues."""

    def texts(self, settings: Any, tokenizer: PreTrainedTokenizerBase) -> Callable[[], Text]:
        """Return a function that makes an empty `Text`. The returned function is called for each row of each batch."""
        raise NotImplementedError

    def drafter(self, settings: Any, pair: Pair, runner: Runner | None) -> MakeDrafter:
        """Return a function that makes a `TextDrafter`. The function ignores the warp, because a `Text` draws nothing
        from logits.
        """
        from harness.local.drafting.text import TextDrafter

        new_text = self.texts(settings, pair.tokenizer)
        return lambda warp: TextDrafter(new_text)


@dataclass(frozen=True, kw_only=True)
class SampledDraftSettings(DraftSettings):
    """Settings of every draft that samples its tokens from a distribution.

    Attributes:
        sampling: `target` draws draft tokens as the target's are drawn, `greedy` takes the
            likeliest.
    """

    sampling: Literal["target", "greedy"] = "target"


class SampledMethod(Method):
    """A way to draft with a head, or with a model that drafts token by token."""

    def drafter(
        self, settings: SampledDraftSettings, pair: Pair, runner: Runner | None
    ) -> MakeDrafter:
        """Return a function that makes drafters. They use the pair's head or, without a head, the draft model that
        `runner` runs.
        """
        from harness.local.decoding.warp import Warp
        from harness.local.drafting.heads.drafter import HeadDrafter
        from harness.local.drafting.model import ModelDrafter

        def make(target_warp: AnyWarp) -> TensorDrafter:
            warp = Warp(temperature=0) if settings.sampling == "greedy" else target_warp
            if pair.head is not None:
                return HeadDrafter(pair.head, warp)
            assert runner is not None
            return ModelDrafter(runner, warp)

        return make


@dataclass(frozen=True, kw_only=True)
class ModelDraftSettings(SampledDraftSettings, ModelSettings):
    """Settings of a draft model or a head, that is, of a draft with its own weights.

    Attributes:
        layers: for a head: the hidden states of the target that it reads, if its configuration does not name them or
            names others.
    """

    method: str = "model"
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # The chain of `super()` calls ends in `DraftSettings`, before `ModelSettings`.
        ModelSettings.__post_init__(self)
        require(self.gpus in (None, 1), "gpus", "must be 1: a draft is whole on one GPU", self.gpus)


class ModelDraft(SampledMethod):
    """A draft model or a head. The configuration in the draft's repository shows which of the two it is."""

    name = "model"
    summary = (
        "token by token; a head (EAGLE-3, DFlash, DSpark, Medusa) in the format of its writer; a model with another"
        " tokenizer by engine=huggingface"
    )
    settings = ModelDraftSettings
    named = False

    def plan(
        self,
        settings: ModelDraftSettings,
        target: Checkpoint,
        weights: WeightsSource | None,
    ) -> DraftPlan:
        """Return a plan with a head or a draft model, according to the repository's configuration.

        Raises:
            SettingError: the draft does not fit the target, or `draft.layers` is set for a draft model.
            RunError: files cannot be fetched or read.
        """
        from harness.local.drafting.heads.checkpoint import read_head
        from harness.local.models.random_weights import checkpoint_for

        head = read_head(settings, target, layers=settings.layers, weights=weights == "stored")
        checkpoint = checkpoint_for("draft", settings, weights) if head is None else None
        rule = f"is for heads and early_exit, and draft={settings.name} is a model"
        require(head is not None or settings.layers is None, "draft.layers", rule, settings.layers)
        return DraftPlan(settings, checkpoint, head)

    def huggingface(
        self, pair: Pair, settings: ModelDraftSettings, decoding: DecodingSettings
    ) -> dict[str, Any]:
        """Return the argument for the draft model and, if the two models' logits have different widths, the arguments
        for both tokenizers.
        """
        from harness.local.models.tokenizers import load_tokenizer

        assert pair.draft is not None
        arguments: dict[str, Any] = {"assistant_model": pair.draft.model}
        widths = {vocabulary_size(loaded.model.config) for loaded in (pair.target, pair.draft)}
        if len(widths) > 1:
            # If the widths differ, `generate` assumes that the models have different tokenizers, and requires both.
            other = load_tokenizer(pair.draft.settings, "draft")
            arguments |= {"tokenizer": pair.tokenizer, "assistant_tokenizer": other}
        return arguments


class Mtp(SampledMethod):
    """Drafts with the multi-token-prediction layer in the target's checkpoint, if transformers can read it."""

    name = "mtp"
    summary = "the multi-token-prediction layers in the target's own checkpoint"
    settings = SampledDraftSettings

    def plan(
        self,
        settings: SampledDraftSettings,
        target: Checkpoint,
        weights: WeightsSource | None,
    ) -> DraftPlan:
        """Return a plan with the layer in the target's checkpoint, used as a head. Raises as `read_mtp` does."""
        from harness.local.drafting.heads.mtp import read_mtp

        return DraftPlan(
            settings, head=read_mtp(settings.name, target, weights=weights == "stored")
        )


@dataclass(frozen=True, kw_only=True)
class EarlyExitSettings(DraftSettings):
    """Settings of `draft=early_exit`. `draft=early_exit_8` chooses 8 layers.

    Attributes:
        layers: one number, how many of the target's first layers draft; a quarter of them if None.
    """

    # A tuple of one number, because `draft.layers` is a list for heads.
    layers: tuple[int, ...] | None = None


class EarlyExit(Method):
    """Drafts with the target's own first layers. Only transformers' assisted generation can do this.

    LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710) trains models whose first layers predict well.
    """

    name = "early_exit"
    summary = "with engine=huggingface: the target's own first layers, a quarter of them; early_exit_8 has 8"
    settings = EarlyExitSettings

    def choice(self, name: str) -> dict[str, Any] | None:
        """Return {} for `early_exit`, {"layers": [8]} for `early_exit_8`, and None for a name of another method."""
        number = re.fullmatch(r"early_exit_(\d+)", name)
        return {"layers": [int(number[1])]} if number else super().choice(name)

    def check(self, run: RunSettings) -> None:
        """Raise a SettingError unless the engine is `huggingface`."""
        assert run.draft is not None
        is_theirs = run.engine.name == "huggingface"
        require(is_theirs, "draft", "needs engine=huggingface", run.draft.name)

    def plan(
        self,
        settings: EarlyExitSettings,
        target: Checkpoint,
        weights: WeightsSource | None,
    ) -> DraftPlan:
        """Return a plan whose settings contain the number of layers: a quarter of the target's layers if the user chose
        no number.

        Raises:
            SettingError: the user chose several numbers, or one that is not from 1 to the target's number of layers
                minus 1.
        """
        total = target.config.get_text_config(decoder=True).num_hidden_layers
        layers = (max(1, total // 4),) if settings.layers is None else settings.layers
        rule = f"must be one number from 1 to {total - 1}: the target has {total} layers"
        is_possible = len(layers) == 1 and 1 <= layers[0] < total
        require(is_possible, "draft.layers", rule, [*layers])
        return DraftPlan(dataclasses.replace(settings, layers=layers))

    def huggingface(self, pair: Pair, settings: Any, decoding: DecodingSettings) -> dict[str, Any]:
        return {"assistant_model": pair.target.model, "assistant_early_exit": settings.layers[0]}


@dataclass(frozen=True, kw_only=True)
class LookupSettings(DraftSettings):
    """Settings of `draft=lookup`.

    Attributes:
        max_ngram: length of the longest n-gram that is looked up.
    """

    max_ngram: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, max_ngram=1)


class Lookup(TextMethod):
    """Proposes the tokens that followed the last earlier occurrence of the n-gram at the end of the text."""

    name = "lookup"
    summary = "what followed the same n-gram in prompt and output"
    settings = LookupSettings

    def texts(
        self, settings: LookupSettings, tokenizer: PreTrainedTokenizerBase
    ) -> Callable[[], Text]:
        from harness.local.drafting.text import LookupText

        return lambda: LookupText(settings.max_ngram)

    def huggingface(
        self, pair: Pair, settings: LookupSettings, decoding: DecodingSettings
    ) -> dict[str, Any]:
        return {
            "prompt_lookup_num_tokens": decoding.num_draft_tokens,
            "max_matching_ngram_size": settings.max_ngram,
        }


class ServerDraft(Method):
    """A draft that a server was started with. This program knows nothing about it."""

    name = "server"
    summary = "with engine=server: what that server drafts with"

    def check(self, run: RunSettings) -> None:
        """Raise a SettingError unless the run has two servers, or one address (`engine.url`) if the command asks only
        the speculative arm.
        """
        needed = "engine.url" if run.ASKS_SPECULATIVE_ALONE else "engine.regular_url"
        is_alone = run.ASKS_SPECULATIVE_ALONE and run.engine.url is not None
        require(
            run.engine.has_two or is_alone, "draft", f"needs engine=server with {needed}", "server"
        )
