"""The records of the two engines that run models in this process: our own decoding loop, and transformers' `generate`.

Nothing here imports torch until an engine is opened or a pair is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.config.methods import METHODS
from harness.config.settings import require
from harness.engines.record import EngineRecord, Opening

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.engines.protocol import Engine
    from harness.local.engine.pair import PlannedPair

# The model types of drafts that read the target's cache and have none of their own (Gemma 4's assistants).
_READ_TARGET_CACHE = ("gemma4_assistant", "gemma4_unified_assistant")


class Local(EngineRecord):
    """Our own decoding loop. It is the only engine that supports all runners and acceptance rules."""

    name = "local"
    summary = "harness's own decoding loop"
    own_loop = True
    loads_pair = True

    def check_pair(self, pair: PlannedPair, run: RunSettings) -> None:
        # The target is followed by the draft, if that is a model of its own.
        _, *drafts = pair.checkpoints
        for draft in drafts:
            rule = "reads the target's KV cache, which only engine=huggingface passes to it"
            reads_target = draft.config.model_type in _READ_TARGET_CACHE
            require(not reads_target, "draft", rule, draft.settings.name)
            rule = "has another tokenizer than the model: engine=huggingface may draft with both at temperature 0"
            require(pair.shares_tokenizer, "draft", rule, draft.settings.name)

    def open(self, opening: Opening) -> Engine:
        from harness.local.engine.engine import LocalEngine

        return LocalEngine(opening.load(), opening)


class HuggingFace(EngineRecord):
    """transformers' `generate`, whose assisted generation accepts one prompt at a time."""

    name = "huggingface"
    summary = "transformers' generate() and its assisted forms, one prompt at a time"
    loads_pair = True
    has_schedule = True

    def check(self, run: RunSettings) -> None:
        super().check(run)
        number = run.decoding.num_draft_tokens
        rule = "needs a draft model: transformers has no schedule for others"
        drafts_by_model = run.draft is not None and run.draft.method in ("model", "early_exit")
        require(number != "auto" or drafts_by_model, "decoding.num_draft_tokens", rule, number)
        rule = "must be 1 with engine=huggingface: assisted generation takes one prompt at a time"
        run.require_single_rows(rule)
        sampling = run.draft_sampling
        is_greedy = run.decoding.temperature == 0
        rule = "must be target with engine=huggingface, unless decoding.temperature=0"
        require(sampling != "greedy" or is_greedy, "draft.sampling", rule, sampling)
        if run.draft is not None:
            METHODS[run.draft.method].check_huggingface(run.draft)

    def check_pair(self, pair: PlannedPair, run: RunSettings) -> None:
        from harness.local.engine.huggingface import check_pair

        check_pair(pair, run.decoding)

    def open(self, opening: Opening) -> Engine:
        from harness.local.engine.huggingface import HuggingFaceEngine

        return HuggingFaceEngine(opening.load(), opening)
