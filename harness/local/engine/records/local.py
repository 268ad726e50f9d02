"""This project's own decoding loop, over a pair that is loaded in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.config.engines import EngineSettings
from harness.config.settings import require
from harness.engines.record import EngineRecord, Opening

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.engines.protocol import Engine
    from harness.local.engine.pair import PlannedPair

# Drafts without a cache of their own (Gemma 4's assistants).
_READ_TARGET_CACHE = ("gemma4_assistant", "gemma4_unified_assistant")


class Local(EngineRecord[EngineSettings]):
    """The only engine with every runner, rule of acceptance and planted fault."""

    name = "local"
    summary = "our own loop"
    own_loop = True
    loads_pair = True
    takes_load = True

    def check_pair(self, pair: PlannedPair, run: RunSettings) -> None:
        rule = "reads the keys and values of its model, which transformers alone hands on: use engine=huggingface"
        for checkpoint in pair.checkpoints[1:]:
            reads_target = checkpoint.config.model_type in _READ_TARGET_CACHE
            require(not reads_target, "draft", rule, checkpoint.settings.name)

    def open(self, opening: Opening) -> Engine:
        from harness.local.engine.engine import LocalEngine
        from harness.local.engine.pair import Pair

        pair = opening.load()
        assert isinstance(pair, Pair)
        return LocalEngine(pair, opening)


RECORD = Local()
