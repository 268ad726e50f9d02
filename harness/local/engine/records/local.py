"""This project's own decoding loop, over a pair that is loaded in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.config.engines import EngineSettings
from harness.engines.record import EngineRecord, Opening

if TYPE_CHECKING:
    from harness.engines.protocol import Engine


class Local(EngineRecord[EngineSettings]):
    """The only engine with every runner, rule of acceptance and planted fault."""

    name = "local"
    summary = "our own loop"
    own_loop = True
    loads_pair = True
    takes_load = True

    def open(self, opening: Opening) -> Engine:
        from harness.local.engine.engine import LocalEngine
        from harness.local.engine.pair import Pair

        pair = opening.load()
        assert isinstance(pair, Pair)
        return LocalEngine(pair, opening)


RECORD = Local()
