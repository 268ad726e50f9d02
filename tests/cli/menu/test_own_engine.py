"""An engine in one file of the user's: every command that measures takes it, without a change of ours."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from in_process import QUICKEST_PAIR, Harness, results

# It repeats each prompt's last token. Its speculative arm gives three tokens at a time.
PARROT = textwrap.dedent(
    '''
    """An engine that repeats the last token of a prompt."""

    import time
    from dataclasses import dataclass

    from harness.config.engines import EngineSettings
    from harness.config.settings import require
    from harness.engines.record import EngineRecord, Opening


    @dataclass(frozen=True, kw_only=True)
    class ParrotSettings(EngineSettings):
        """Settings of the parrot: how many tokens it says in one breath."""

        name: str = "parrot"
        breath: int = 3

        def __post_init__(self) -> None:
            require(self.breath >= 1, "breath", "must be at least 1", self.breath)


    class Parrot(EngineRecord):
        name = "parrot"
        summary = "repeats the last token of the prompt"
        settings = ParrotSettings

        def open(self, opening: Opening):
            from harness.engines.protocol import Answered, Arm, BatchTimes, Engine

            class ParrotArm(Arm):
                def __init__(self, name: str, breath: int) -> None:
                    self.name = name
                    self.breath = breath

                def answer(self, requests, in_flight, extra=(), note_ended=None) -> Answered:
                    records = [request.record() for request in requests]
                    left = requests[0].decoding.max_new_tokens
                    times = []
                    started = time.perf_counter()
                    while left > 0:
                        size = min(left, self.breath)
                        times.append(time.perf_counter() - started)
                        for request, record in zip(requests, records):
                            record.add([request.prompt[-1]] * size, times[-1])
                        left -= size
                    batch = BatchTimes(times[0], len(requests) * self.breath, len(times) - 1)
                    return Answered(requests=records, seconds=times[-1], batch=batch)

            engine = Engine()
            engine.arms = [ParrotArm("regular", 1)]
            if opening.settings.draft is not None:
                breath = opening.settings.engine.breath
                engine.arms.append(ParrotArm("speculative", breath))
            engine.runner = "parrot"
            return engine
    '''
)
QUICK = [*QUICKEST_PAIR, "num_prompts=2", "num_warmup=0", "decoding=greedy", "tokens=9"]


@pytest.fixture
def parrot(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    # Modules are imported by name, once per process: each test has its own.
    file = tmp_path / f"{request.node.originalname}_parrot.py"
    file.write_text(PARROT)
    return f"./{file.name}:Parrot"


def test_latency(harness: Harness, parrot: str) -> None:
    outcome = harness("latency", *QUICK, f"engine={parrot}", "engine.breath=2")
    rows = results()
    assert set(rows["engine"]) == {parrot}
    assert set(rows["runner"]) == {"parrot"}
    assert set(rows["num_tokens"]) == {18}
    assert "2 of 2" in outcome.summary
    assert "engine.breath" in rows["settings"][1]


def test_its_mistakes_are_those_of_a_setting(harness: Harness, parrot: str) -> None:
    def refused(*typed: str) -> str:
        return harness.refused("latency", *QUICK, f"engine={parrot}", *typed)

    assert refused("engine.breath=0") == "engine.breath=0: must be at least 1"
    assert refused("engine.breth=2").startswith("engine.breth: no such setting (did you mean")
    assert refused("runner=static") == "runner=static: needs engine=local"
    assert refused("engine.url=http://h/v1") == "engine.url: needs engine=server"
    assert "there is no file" in harness.refused("latency", "engine=./nothing.py:Parrot")
    assert "must inherit from harness.engines.record.EngineRecord" in harness.refused(
        "latency", f"engine={parrot.replace('Parrot', 'ParrotSettings')}"
    )
