"""The records of this wing's engines, our own decoding loop and transformers' `generate`, without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.config.methods import METHODS
from harness.config.settings import require
from harness.engines.record import EngineRecord, Opening

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.engines.protocol import Engine
    from harness.local.engine.pair import PlannedPair

# Drafts without a cache of their own (Gemma 4's assistants).
_READ_TARGET_CACHE = ("gemma4_assistant", "gemma4_unified_assistant")


class Local(EngineRecord):
    """The only engine with every runner, rule of acceptance and planted fault."""

    name = "local"
    summary = "our own loop"
    own_loop = True
    loads_pair = True

    def check_pair(self, pair: PlannedPair, run: RunSettings) -> None:
        rule = "reads the keys and values of its model, which transformers alone hands on: use engine=huggingface"
        for checkpoint in pair.checkpoints[1:]:
            reads_target = checkpoint.config.model_type in _READ_TARGET_CACHE
            require(not reads_target, "draft", rule, checkpoint.settings.name)
        rule = "has another tokenizer than the model: engine=huggingface drafts with both"
        require(pair.shares_tokenizer, "draft", rule, pair.checkpoints[-1].settings.name)

    def open(self, opening: Opening) -> Engine:
        from harness.local.engine.engine import LocalEngine

        pair: Any = opening.load()
        return LocalEngine(pair, opening)


class HuggingFace(EngineRecord):
    """One prompt at a time, because assisted generation takes no more."""

    name = "huggingface"
    summary = "transformers' generate() and its assisted forms, one prompt at a time"
    loads_pair = True
    has_schedule = True

    def check(self, run: RunSettings) -> None:
        super().check(run)
        number = run.decoding.num_draft_tokens
        rule = "needs a draft model: transformers has no schedule for others"
        has_model = run.draft is not None and run.draft.method in ("model", "early_exit")
        require(number != "auto" or has_model, "decoding.num_draft_tokens", rule, number)
        rule = "must be 1 with engine=huggingface: assisted generation takes one prompt at a time"
        run.require_single_rows(rule)
        sampling = None if run.draft is None else run.draft.sampling
        is_drawn = run.decoding.temperature > 0
        rule = "must be target with engine=huggingface, unless decoding.temperature=0"
        require(sampling != "greedy" or not is_drawn, "draft.sampling", rule, sampling)
        if run.draft is not None:
            METHODS[run.draft.method].check_huggingface(run.draft)

    def check_pair(self, pair: PlannedPair, run: RunSettings) -> None:
        from harness.local.engine.huggingface import check_pair

        check_pair(pair, run.decoding)

    def open(self, opening: Opening) -> Engine:
        from harness.local.engine.huggingface import HuggingFaceEngine

        pair: Any = opening.load()
        return HuggingFaceEngine(pair, opening)
