"""The record of a way to draft: everything that the rest of the house needs to know about it.

A method is a subclass of `Method` in a file of `records/methods/`, in an installed package (entry point group
`harness.methods`), or in a file of the user's (`draft=./my_method.py:MyMethod`). What needs torch is imported inside
functions: names, settings and help are known without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from harness.config.errors import SettingError
from harness.config.settings import DraftSettings, require
from harness.menu.registry import Record

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from harness.config.run import RunSettings
    from harness.config.settings import DecodingSettings
    from harness.decoding.protocols import Drafter, Runner
    from harness.decoding.warp import AnyWarp, Warp
    from harness.drafting.blocks import Head
    from harness.drafting.heads import HeadCheckpoint
    from harness.drafting.plan import DraftPlan
    from harness.drafting.text import Text
    from harness.drafting.translated import Translation
    from harness.models.checkpoints import Checkpoint, ReadCheckpoint
    from harness.models.loading import LoadedModel
    from harness.models.sketch import Sketch

# From the target's warp.
MakeDrafter = Callable[["AnyWarp"], "Drafter"]


class LoadedPair(Protocol):
    """A target and what drafts for it, loaded; see `engines.pair.Pair`."""

    @property
    def target(self) -> LoadedModel:
        """The model whose output is wanted."""

    @property
    def draft(self) -> LoadedModel | None:
        """A model that drafts."""

    @property
    def head(self) -> Head | None:
        """A head that drafts."""

    @property
    def drafting(self) -> DraftSettings | None:
        """The settings of the draft."""

    @property
    def translation(self) -> Translation | None:
        """How a draft with another tokenizer is understood."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's."""


class DraftedPair(Protocol):
    """A planned pair, as far as engines ask about its draft; see `engines.pair.PlannedPair`."""

    @property
    def head(self) -> HeadCheckpoint | None:
        """A draft that is a head."""

    @property
    def draft_plan(self) -> DraftPlan | None:
        """The plan of the draft."""


class Method(Record):
    """One way to draft.

    Attributes:
        name: what `draft=` calls it.
        summary: what it proposes, in half a line, for help.
        settings: the dataclass of what can be set under `draft.`.
        memory: in a table of methods, where it holds no weights: `none`, or `shared` with the target.
        deterministic: whether its proposals come without probabilities; None where some do.
        trains: whether `distill` can train it.
        batches: whether it drafts for several prompts at once.
        follows: whether it can draft beside a text method in a hybrid; its drafters are then
            `FollowingDrafter`s.
        named: whether `draft=NAME` alone chooses it; False for models, which have names of their own.
    """

    summary: ClassVar[str]
    settings: ClassVar[type[DraftSettings]] = DraftSettings
    memory: ClassVar[str | None] = None
    deterministic: ClassVar[bool | None] = False
    trains: ClassVar[bool] = False
    batches: ClassVar[bool] = True
    follows: ClassVar[bool] = False
    named: ClassVar[bool] = True

    def choice(self, name: str) -> dict[str, Any] | None:
        """The settings that a name stands for, `early_exit_8`; None for a name that is not of this method."""
        return {} if name == self.name else None

    def check(self, run: RunSettings) -> None:
        """Raise a SettingError for a run that this way to draft is not for."""
        rule = f"must be 1: draft={self.name} takes one prompt at a time"
        require(self.batches or run.batch_size == 1, "batch_size", rule, run.batch_size)

    def plan(
        self, settings: Any, target: Checkpoint, read: ReadCheckpoint, weights: bool
    ) -> DraftPlan:
        """Plan the draft, before any weights load.

        Args:
            settings: of the class `settings`.
            target: the target's checkpoint.
            read: reads the checkpoint of another model.
            weights: whether stored weights will be needed.

        Raises:
            SettingError: a draft that does not go with the target.
        """
        from harness.drafting.plan import DraftPlan

        return DraftPlan(settings)

    def sketch(self, plan: DraftPlan, target: Checkpoint, dtype: torch.dtype) -> Sketch | None:
        """The sizes of a draft that is no model of its own; None where it holds nothing."""
        return None if plan.head is None else plan.head.sketch(dtype)

    def describe(self, settings: Any) -> str:
        """The weights that it holds, in a few words."""
        return "no weights"

    def layers(self, pair: LoadedPair) -> Sequence[int]:
        """The target's layers whose hidden states the drafters read."""
        return () if pair.head is None else pair.head.config.layers

    def model(self, pair: LoadedPair) -> LoadedModel | None:
        """The model that drafts and needs a runner, if one does."""
        return None

    def passes(
        self, pair: LoadedPair, numbers: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """The shapes that the runner of `model` is prepared for, where so many tokens are drafted.

        Returns the numbers of tokens that it is extended by, and those that it draws in one call.
        """
        return (1, 2), numbers

    def warp(self, settings: Any, pair: LoadedPair, of_target: Warp) -> AnyWarp:
        """The warp that the runner of `model` draws with, where the target's tokens are drawn with `of_target`."""
        return of_target

    def drafter(self, settings: Any, pair: LoadedPair, runner: Runner | None) -> MakeDrafter:
        """A function from the target's warp to a drafter.

        Args:
            settings: of the class `settings`.
            pair: the loaded models.
            runner: of `model`, if there is one.
        """
        raise NotImplementedError

    def vllm(self, planned: DraftedPair, settings: Any) -> dict[str, Any]:
        """Entries of vLLM's `speculative_config`.

        Raises:
            SettingError: vLLM has no such method, or not with these settings.
        """
        rule = "must be a model, a head, lookup, suffix or mtp with engine=vllm"
        raise SettingError("draft", rule, settings.name)

    def huggingface(
        self, pair: LoadedPair, settings: Any, decoding: DecodingSettings
    ) -> dict[str, Any]:
        """Keyword arguments of `generate` beyond those of every question."""
        return {}

    def check_huggingface(self, planned: DraftedPair, settings: Any, schedule: str) -> None:
        """Raise a SettingError unless `generate` can draft in this way."""
        rule = "must be a model, lookup or early_exit with engine=huggingface"
        raise SettingError("draft", rule, settings.name)


class TextMethod(Method):
    """A way to draft that reads nothing but the text: it makes a `Text` for each row."""

    memory = "none"
    deterministic = True

    def hybrid_defaults(self) -> dict[str, Any]:
        """The defaults that a hybrid has in place of the method's own."""
        return {}

    def texts(self, settings: Any, tokenizer: PreTrainedTokenizerBase) -> Callable[[], Text]:
        """A function that makes an empty text, for each row of each batch."""
        raise NotImplementedError

    def drafter(self, settings: Any, pair: LoadedPair, runner: Runner | None) -> MakeDrafter:
        """See `Method.drafter`."""
        from harness.drafting.text import TextDrafter

        new_text = self.texts(settings, pair.tokenizer)
        device = pair.target.input_device
        return lambda warp: TextDrafter(new_text, device)
