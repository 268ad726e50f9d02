"""A closed engine is gone before the next one allocates, although nothing is collected meanwhile."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.commands.latency.record import LatencySettings
from harness.commands.run import run_command
from harness.config.demand import Demand
from harness.config.errors import RunError
from harness.config.run import RunnerName
from harness.config.settings import DecodingSettings, ModelSettings, PromptSettings
from harness.engines.keeper import PairKeeper
from harness.engines.protocol import Engine
from harness.engines.record import Preparation
from harness.local.drafting.method import Pair
from harness.local.engine.engine import LocalArm, LocalEngine
from harness.local.engine.huggingface import HuggingFaceEngine
from some_questions import question_of
from some_settings import settings_of
from tiny_checkpoints import as_draft, load
from traced import run_as_traced

DECODING = DecodingSettings(max_new_tokens=6, num_draft_tokens=2)
QUESTION = question_of([[5, 6, 7]], DECODING)


@pytest.fixture
def without_collections() -> Iterator[None]:
    """The collector is off, as while a job is timed: nothing is freed that only it would find."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def pair(save_model: Callable[..., ModelSettings]) -> Pair:
    target = save_model(num_hidden_layers=1, max_position_embeddings=64)
    draft = save_model("gpt2", n_layer=1, vocab_size=320, n_positions=64)
    return load(target, draft)


def use(engine: Engine) -> None:
    for arm in engine.arms:
        arm.answer(QUESTION.requests, 1)
    engine.weights.reference.logits_along([[5, 6, 7]], [[0]])


@pytest.mark.parametrize("runner", ["eager", "compiled"])
def test_our_engine_is_freed_and_its_buffers_whoever_holds_an_arm(
    pair: Pair, runner: RunnerName, monkeypatch: pytest.MonkeyPatch, without_collections: None
) -> None:
    run_as_traced(monkeypatch)
    before = tensor_bytes()
    engine = LocalEngine(pair, Preparation(decoding=DECODING, runner=runner, longest_prompt=8))
    use(engine)
    assert engine.runners.draft is not None
    kept = (engine, engine.runners.target, engine.runners.draft, engine.arms[0])
    refs = [weakref.ref(one) for one in kept]
    arm = engine.arms[1]
    assert tensor_bytes() > before
    engine.close()
    # Two vectors of counts and of frequencies are left, and no cache.
    assert tensor_bytes() - before < 10_000
    del engine, kept, arm
    assert [ref() for ref in refs] == [None] * 4


def test_hugging_faces_engine_is_freed(pair: Pair, without_collections: None) -> None:
    greedy = DecodingSettings(max_new_tokens=6, num_draft_tokens=2, temperature=0.0)
    engine = HuggingFaceEngine(pair, Preparation(decoding=greedy, longest_prompt=8))
    assert not isinstance(engine, LocalEngine)
    use(engine)
    refs = [weakref.ref(engine), weakref.ref(engine.weights.reference)]
    engine.close()
    del engine
    assert [ref() for ref in refs] == [None, None]


def test_jobs_of_one_worker_need_no_more_memory_than_the_first(
    save_model: Callable[..., ModelSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without_collections: None,
) -> None:
    peaks: list[int] = []
    begin = LocalArm.begin

    def noted(arm: LocalArm, *arguments: Any) -> Any:
        peaks[-1] = max(peaks[-1], tensor_bytes())
        return begin(arm, *arguments)

    monkeypatch.setattr(LocalArm, "begin", noted)
    monkeypatch.chdir(tmp_path)
    target = save_model(num_hidden_layers=1)
    draft = save_model("gpt2", n_layer=1, vocab_size=320)
    keeper = PairKeeper()
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    for number in range(3):
        directory = tmp_path / str(number)
        directory.mkdir()
        peaks.append(0)
        settings = settings_of(
            LatencySettings,
            model=target,
            draft=as_draft(draft),
            decoding=DECODING,
            num_prompts=2,
            prompts=PromptSettings(name="two", file=str(tmp_path / "prompts.txt")),
        )
        run_command("latency", settings, directory, keeper)
    assert peaks[0] > 0
    assert max(peaks[2:]) <= peaks[1]


def tensor_bytes() -> int:
    """The bytes of all tensors in memory, each storage counted once."""
    storages = {}
    for value in gc.get_objects():
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_a_kept_pair_stays_where_it_fits_and_is_placed_again_where_it_does_not(
    save_model: Callable[..., ModelSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of a sweep may need more memory than the one before, whose pair is loaded."""
    free = {"cpu": 10**9}
    monkeypatch.setattr("harness.local.engine.pair.free_memory", lambda gpus: dict(free))
    target = save_model(num_hidden_layers=1, max_position_embeddings=64)
    settings = settings_of(LatencySettings, model=target, draft=None, resume=False)
    keeper = PairKeeper()

    def demand(batch_size: int) -> Demand:
        return Demand(batch_size, 8, 8, 2, "eager")

    placed = keeper.place(settings, demand(1))
    loaded = keeper.load()
    # What the weights took is not free any more, and is not needed again.
    free["cpu"] = 10**6
    assert keeper.place(settings, demand(8)) is placed
    assert keeper.load() is loaded
    free["cpu"] = 10**9
    with pytest.raises(RunError, match=r"does not fit in .* KV caches"):
        keeper.place(settings, demand(10**7))
    assert keeper.place(settings, demand(1)) is not placed
    assert keeper.load() is not loaded
