"""The record of a way to draft: its settings and rules (`MethodRecord`), and its work.

Those of this project are in `methods`, and one's own in a file (`draft=./my_method.py:MyMethod`). What
needs torch is imported inside functions: names, settings and help are known without it.

A run calls it in this order: `check` with the settings alone, `plan` and `sketch` before weights
load, `layers`, `model` and `widths` while the pair is prepared, and `drafter` when it
decodes. Hugging Face's engine asks for transformers' words instead: `huggingface`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from harness.config.methods import FOR_HUGGINGFACE, METHODS, MethodRecord
from harness.config.settings import DraftSettings, require
from harness.local.models.tokenizers import max_context, vocabulary_size

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from harness.config.run import Weights
    from harness.config.settings import DecodingSettings
    from harness.local.decoding.protocols import Drafter, Runner
    from harness.local.decoding.warp import AnyWarp
    from harness.local.drafting.heads.checkpoint import HeadCheckpoint
    from harness.local.drafting.heads.head import Head
    from harness.local.drafting.text import Text
    from harness.local.drafting.translated import Translation
    from harness.local.models.checkpoints import Checkpoint
    from harness.local.models.loading import LoadedModel
    from harness.local.models.sketch import Sketch

# Makes a drafter, given the warp of the target's logits.
MakeDrafter = Callable[["AnyWarp"], "Drafter"]


@dataclass(frozen=True)
class DraftPlan:
    """A draft before any weights load: which checkpoint or head it is. One that needs no weights of
    its own, as `lookup` or the target itself, has settings alone.

    Attributes:
        settings: the draft's, in which the plan has filled in what the user left open; None without
            a draft.
        checkpoint: the draft model, where it has weights of its own.
        head: the draft head, which reads the target's hidden states.
    """

    settings: DraftSettings | None
    checkpoint: Checkpoint | None = None
    head: HeadCheckpoint | None = None


@dataclass(frozen=True)
class Pair:
    """A loaded pair: the target, its draft if there is one, and the target's tokenizer.

    Attributes:
        target: the model whose output is wanted.
        draft: the model that drafts, if one does. With shared weights its `model` is the target's.
        head: the head on the target's hidden states that drafts, if one does.
        draft_settings: of the draft, whether model, head or text method; None without one.
        translation: between the tokenizers, of a draft with another one.
    """

    target: LoadedModel
    draft: LoadedModel | None
    tokenizer: PreTrainedTokenizerBase
    head: Head | None = None
    draft_settings: DraftSettings | None = None
    translation: Translation | None = None

    @property
    def devices(self) -> list[torch.device]:
        """Every device with a layer of either, the target's first."""
        devices = list(self.target.devices)
        if self.draft is not None:
            devices += self.draft.devices
        if self.head is not None:
            devices.append(next(self.head.parameters()).device)
        return list(dict.fromkeys(devices))

    @property
    def vocabulary_size(self) -> int:
        """V, the width to which logits are cut: outputs may be padded beyond it, each model's
        differently.

        With a draft of another tokenizer it is the target's own.
        """
        width = vocabulary_size(self.target.model.config)
        if self.draft is None or self.translation is not None:
            return width
        return min(width, vocabulary_size(self.draft.model.config))

    @property
    def context(self) -> int | None:
        """The most tokens of a row, prompt included, that both models take; None for any number."""
        models = [self.target] if self.draft is None else [self.target, self.draft]
        contexts = [max_context(loaded.model.config) for loaded in models]
        return min((context for context in contexts if context is not None), default=None)

    def stop_tokens(self) -> frozenset[int]:
        """The token ids at which the target ends a text by itself."""
        generation = self.target.model.generation_config
        configured = generation.eos_token_id if generation else None
        ids: Any = configured
        if not isinstance(configured, list):
            ids = [configured, self.tokenizer.eos_token_id]
        return frozenset(int(token) for token in ids if token is not None)


class Method(MethodRecord):
    """One way to draft.

    Attributes:
        deterministic: whether its proposals come without probabilities; None if only some do.
    """

    deterministic: ClassVar[bool | None] = False

    def plan(
        self,
        settings: Any,
        target: Checkpoint,
        weights: Weights | None,
    ) -> DraftPlan:
        """Plan the draft, before any weights load.

        Args:
            settings: an object of the class `settings`, as typed by the user.
            target: the target's checkpoint.
            weights: of the run; None for a pair on paper, which needs none.

        Raises:
            SettingError: a draft that does not go with the target.
        """
        return DraftPlan(settings)

    def sketch(self, plan: DraftPlan, target: Checkpoint, dtype: torch.dtype) -> Sketch | None:
        """Return the sizes of a draft that is no model of its own; None if it holds nothing."""
        return None if plan.head is None else plan.head.sketch(dtype)

    def describe(self, settings: Any) -> str:
        """Return a few words about the weights of the draft."""
        return "no weights"

    def layers(self, pair: Pair) -> Sequence[int]:
        """Return the numbers of the target's layers whose hidden states the drafters read."""
        return () if pair.head is None else pair.head.config.layers

    def model(self, pair: Pair) -> LoadedModel | None:
        """Return the model that drafts, for which a runner is made; None if no model drafts."""
        return None

    def widths(self, pair: Pair, numbers: Sequence[int]) -> Sequence[int]:
        """Return the numbers of tokens that the runner of `model` is extended by.

        Args:
            numbers: every number of draft tokens, K, that the run may use.
        """
        return (1, 2)

    def drafter(self, settings: Any, pair: Pair, runner: Runner | None) -> MakeDrafter:
        """Return a function that makes a drafter, given the warp of the target's logits.

        Args:
            settings: an object of the class `settings`, completed by `plan`.
            pair: the loaded models.
            runner: the runner of `model`, if there is one.
        """
        raise NotImplementedError

    def huggingface(self, pair: Pair, settings: Any, decoding: DecodingSettings) -> dict[str, Any]:
        """Return the arguments of transformers' `generate` that make it draft in this way."""
        raise NotImplementedError

    def check_huggingface(self, settings: Any) -> None:
        has_words = type(self).huggingface is not Method.huggingface
        require(has_words, "draft", FOR_HUGGINGFACE, settings.name)


class TextMethod(Method):
    """A way to draft that reads nothing but the text; it makes a `Text` for each row."""

    memory = "none"
    deterministic = True

    def texts(self, settings: Any, tokenizer: PreTrainedTokenizerBase) -> Callable[[], Text]:
        """Return a function that makes an empty `Text`; it is called for each row of each batch."""
        raise NotImplementedError

    def drafter(self, settings: Any, pair: Pair, runner: Runner | None) -> MakeDrafter:
        """Return a function that makes a `TextDrafter`, whatever the warp."""
        from harness.local.drafting.text import TextDrafter

        new_text = self.texts(settings, pair.tokenizer)
        device = pair.target.input_device
        return lambda warp: TextDrafter(new_text, device)


def method_of(draft: DraftSettings) -> Method:
    """The way to draft that the settings are for."""
    method = METHODS[draft.method]
    assert isinstance(method, Method)
    return method
