"""The door to the other wing: all that the instrument may ask of models that run in this process.

Nothing else in the instrument reaches `harness.local`, for types included: a call imports the file that answers it.
Built-in methods, faults and engines of that wing are found by registries, through the names of their modules.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from harness.config.demand import Demand
from harness.config.run import RunSettings, Weights
from harness.config.settings import (
    DecodingSettings,
    DraftSettings,
    Dtype,
    ModelSettings,
    PlacementSettings,
)
from harness.engines.door.pairs import Pair, PlacedPair, PlannedPair
from harness.engines.door.plans import Machine, PairPlan, PassBytes, PretendedGpus, Roof
from harness.engines.door.profiles import Profile
from harness.engines.door.reading import TextReader
from harness.engines.door.reference import Reference
from harness.engines.door.serving import Service
from harness.engines.protocol import Engine, Question
from harness.engines.record import Preparation
from harness.engines.tokenizer import Tokenizer

# It imports torch and transformers. A process that is going to need them loads it at a time of its choice.
SLOWEST_MODULE = "harness.local.engine.engine"


def _local(name: str) -> Any:
    """A module of the other wing."""
    return importlib.import_module(f"harness.local.{name}")


def load_tokenizer(model: ModelSettings) -> Tokenizer:
    """The tokenizer of a model; torch is not imported where the tokenizer does not need it.

    Raises:
        SettingError, RunError: it is absent, gated or out of reach.
    """
    _local("models.quiet").quiet_libraries(loads_weights=False)
    return _local("models.tokenizers").load_tokenizer(model)


def plan_pair(
    target: ModelSettings,
    draft: DraftSettings | None,
    placement: PlacementSettings,
    dtype: Dtype = "auto",
    weights: Weights = "stored",
) -> PlannedPair:
    """Check everything about a pair that can be checked before its weights load.

    Args:
        weights: `random` needs no stored weights and no tokenizer: text is read byte by byte.

    Raises:
        SettingError: a setting that cannot hold for these models.
        RunError: a repository out of reach, a library that is missing or fails.
    """
    return _local("engine.pair").plan_pair(target, draft, placement, dtype, weights=weights)


def open_reference(
    pair: Pair, preparation: Preparation, never_drawn: Collection[int] = ()
) -> Reference:
    """The probabilities of a loaded pair, by eager runners beside those of an engine.

    Args:
        never_drawn: tokens that the engine under test never draws.
    """
    return _local("engine.reference").open_reference(pair, preparation, never_drawn)


def release_memory(devices: Sequence[Any]) -> None:
    """Give memory that is no longer used back to the GPUs among the devices."""
    _local("models.devices").release_memory(devices)


def check_hub_access(
    repository: str, file: str, revision: str | None, kind: Literal["model", "dataset"]
) -> None:
    """Ask the hub once for a repository whose file was never downloaded; raise its refusal."""
    _local("models.checkpoints").check_hub_access(repository, file, revision, kind)


def find_machine(settings: RunSettings, pretended: PretendedGpus | None) -> Machine:
    """The devices that `plan` plans for: pretended GPUs, or this machine's, or its main memory.

    Raises:
        SettingError: fewer GPUs than the placement asks for.
    """
    return _local("engine.planning").find_machine(settings, pretended)


def plan_on(
    machine: Machine, settings: RunSettings, prompt_length: int, draft_tokens: Iterable[int]
) -> PairPlan:
    """Place a pair on a machine by its configurations alone.

    Args:
        prompt_length: tokens of the longest prompt.
        draft_tokens: each K whose passes are of interest.

    Raises:
        SettingError: a setting that cannot hold for these models.
        RunError: a repository out of reach.
    """
    return _local("engine.planning").plan_on(machine, settings, prompt_length, draft_tokens)


def pass_bytes(placed: PlacedPair, demand: Demand, draft_tokens: Iterable[int]) -> PassBytes | None:
    """The bytes that passes of a pair read, for each K; None if the size of a cache is not known."""
    return _local("engine.planning").pass_bytes(placed, demand, draft_tokens)


def roofs(placed: PlacedPair, batch_size: int, num_tokens: int) -> Sequence[Roof]:
    """The least work of a step: of the target, then of a draft with its own weights.

    Args:
        num_tokens: in the cache of each row, on average over the run.
    """
    return _local("engine.planning").roofs(placed, batch_size, num_tokens)


def open_reader(
    pair: Pair, decoding: DecodingSettings, most: int, *, greedy_draft: bool = False
) -> TextReader:
    """A reader of texts that are there already.

    Args:
        decoding: temperature, top-k, top-p and rule of acceptance.
        most: the largest K.
        greedy_draft: whether the draft proposes its likeliest tokens, whatever its settings say.
    """
    return _local("engine.reading").PairReader(pair, decoding, most, greedy_draft=greedy_draft)


def profile_arms(engine: Engine, question: Question, directory: Path) -> Sequence[Profile]:
    """Run each arm for a few tokens under torch's profiler, and write `trace_<arm>.json.gz` into `directory`.

    It lists kernels, so that the models must be on a GPU.
    """
    return _local("engine.stopwatches").profile_arms(engine, question, directory)


def start_service(
    open_engine: Callable[[], Engine], tokenizer: Tokenizer, max_rows: int, max_waiting: int
) -> Service:
    """Start the thread that answers requests, and open its engine there.

    Args:
        max_rows: the most answers that are generated together.
        max_waiting: the most answers beyond these that may wait.

    Raises:
        Exception: any of `open_engine`.
    """
    service = _local("serving").LocalService
    return service(open_engine, tokenizer, max_rows, max_waiting)
