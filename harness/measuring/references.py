"""The model's own probabilities, against which the answers of a run are checked."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from harness.config.demand import Demand
from harness.config.errors import HarnessError, SettingError
from harness.config.installation import require_local
from harness.config.model_names import SERVED
from harness.config.run import RunSettings
from harness.engines.divergence import Divergence, text_divergence
from harness.engines.door import local
from harness.engines.door.reference import Reference
from harness.engines.protocol import Engine
from harness.engines.record import Preparation
from harness.engines.registry import engine_of
from harness.engines.tokenizer import AnyPair, ServedPair, tokens_as_served
from harness.measuring.progress import say

# The room that is planned where an engine has no weights here and they load for checks alone: the
# most rows of a batch, and tokens of each.
REFERENCE_BATCH = 64
REFERENCE_TOKENS = 128


class References:
    """Gives the reference that fits: the open engine's own, else its target, loaded here once.

    There is none for a server that makes chats of prompts, which reads other tokens than the model
    would here, or holds its answers to a grammar, nor for one whose model cannot be loaded here.

    Raises (each method):
        RunError: the models of an engine that computes here do not fit.
    """

    def __init__(self, settings: RunSettings, planned: AnyPair, engine: Engine) -> None:
        self._settings = settings
        self._planned = planned
        self._engine = engine

    def for_tokens(self) -> Reference | None:
        """The reference for token ids; None also where the engine does not report them."""
        if not all(arm.traits.reports_token_ids for arm in self._engine.arms):
            return None
        return self.for_texts()

    def for_texts(self) -> Reference | None:
        """The reference for texts, whose tokens may be unknown; None where there is none."""
        if self._settings.engine.beyond_model is not None:
            return None
        weights = self._engine.weights
        return self._loaded if weights is None else weights.reference

    def text_divergence(
        self, prompt: Sequence[int], text: str, num_tokens: int
    ) -> Divergence | None:
        """Where a greedy text of the speculative arm, or of the only one, leaves the model's own.

        Call it only where `for_texts` gives a reference.

        Args:
            num_tokens: the most that the text has.
        """
        reference = self.for_texts()
        assert reference is not None
        tokenizer = self._planned.tokenizer
        if not self._engine.arms[-1].traits.takes_token_ids:
            prompt = tokens_as_served(tokenizer, prompt)
        return text_divergence(reference, tokenizer, prompt, text, num_tokens)

    @functools.cached_property
    def _loaded(self) -> Reference | None:
        """The target, loaded here; None, after a message, where that of a server cannot be loaded."""
        settings = self._settings
        if settings.model.repository == SERVED:
            say("no exact distribution: model= names the weights that are served")
            return None
        try:
            require_local("model", settings.model.name)
        except SettingError as error:
            say(f"no exact distribution: {error}")
            return None
        computes_here = engine_of(settings).computes_here
        demand = Demand(
            batch_size=REFERENCE_BATCH,
            prompt_tokens=REFERENCE_TOKENS,
            new_tokens=0,
            num_draft_tokens=0,
            runner="eager",
        )
        try:
            planned = self._planned
            if isinstance(planned, ServedPair):
                planned = local("engine.pair").plan_pair(
                    settings.model, None, settings.placement, settings.dtype
                )
            pair = planned.place(demand, force=settings.force).load()
        except HarnessError as error:
            if computes_here:
                raise
            say(f"model={settings.model.name} cannot be loaded here: {error}")
            return None
        never_drawn = set().union(*(arm.traits.never_drawn for arm in self._engine.arms))
        preparation = Preparation(decoding=settings.decoding)
        reference: Reference = local("engine.reference").open_reference(
            pair, preparation, never_drawn
        )
        return reference
