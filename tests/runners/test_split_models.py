"""Models split over two processes: prepared passes give the eager tokens, and a refusal of one rank is that of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM

from architectures import VOCABULARY
from chains import GREEDY, request, texts
from harness.config.run import RunnerName
from harness.config.settings import ModelSettings, PlacementSettings
from harness.decoding.decisions import Draw, Judge
from harness.decoding.loops import autoregressive, speculative
from harness.decoding.verify import verify
from harness.drafting.heads.drafter import HeadDrafter
from harness.drafting.heads.prepared import PreparedHead
from harness.engines.local.runner_choice import build_runner, first_possible
from harness.models.loading import LoadedModel
from harness.models.ranks import (
    check_agreement,
    compute_on_plain_parts,
    join,
    of_every_rank,
    of_rank_0,
    split_arguments,
)
from harness.runners.agreement import exchange_by
from harness.runners.checks import refusing
from harness.runners.compiled import PreparedRunner
from harness.runners.eager import EagerRunner
from harness.runners.prepared_calls import CompilationError, RunnerShapes
from harness.runners.slots import UnsupportedModelError
from harness.runners.static import StaticRunner
from pretended_gpus import pretended_gpus
from small_heads import eagle_head, layer_config, target_model
from tiny_checkpoints import VOCABULARY_SIZE, load_pair
from two_ranks import run_two_ranks

SaveModel = Callable[..., ModelSettings]
PROMPTS = [[3, 4, 5, 6, 7], [9, 10, 11]]
LENGTH = 8
SHAPES = RunnerShapes(
    batch_size=2,
    num_slots=60,
    widths=(1,),
    warp=GREEDY,
    decisions={1: [Draw(GREEDY)]},
    longest_prompt=8,
)


def split(settings: ModelSettings) -> LoadedModel:
    placement = PlacementSettings(strategy="tensor_parallel")
    return load_pair(settings, None, placement, "float32").target


def decode(runner: Any, device: str = "cpu", *, ahead: bool = False) -> list[list[int]]:
    what = request(PROMPTS, length=LENGTH)
    what = replace(what, uniforms=what.uniforms.to(device))
    return texts(autoregressive(runner, what, ahead, of_rank_0), len(PROMPTS))


class Recording:
    """Notes the captures and the replays of this process, in order; one capture may fail at its end."""

    def __init__(self, patch: pytest.MonkeyPatch, failing: int | None = None) -> None:
        self.events: list[str] = []
        capture = torch.cuda.graph
        replay = torch.cuda.CUDAGraph.replay

        @contextmanager
        def noted_capture(graph: Any, **options: Any) -> Iterator[None]:
            graph.number = len(self.events)
            self.events.append("capture")
            with capture(graph, **options):
                yield
            if graph.number == failing:
                raise RuntimeError("no graph")

        def noted_replay(graph: Any) -> None:
            self.events.append(f"replay of {graph.number}")
            replay(graph)

        patch.setattr(torch.cuda, "graph", noted_capture)
        patch.setattr(torch.cuda.CUDAGraph, "replay", noted_replay)


def capture(rank: int, settings: ModelSettings) -> None:
    loaded = split(settings)
    expected = decode(EagerRunner(loaded.model))
    with pretended_gpus(), pytest.MonkeyPatch.context() as patch:
        recording = Recording(patch)
        runner = PreparedRunner(loaded.model.to("cuda:0"), compiled=False, captured=True)
        runner.prepare(SHAPES)
        num_events = len(recording.events)
        for ahead in (False, True):
            assert decode(runner, "cuda:0", ahead=ahead) == expected
    decoding = recording.events[num_events:]
    # The prompts are read and each token but the first is decided by one replay.
    assert len(decoding) == 2 * LENGTH
    assert "capture" not in decoding
    first, second = of_every_rank(recording.events)
    assert first == second


def test_split_models_are_captured_and_replayed_in_the_same_order(
    save_model: SaveModel, tmp_path: Path
) -> None:
    settings = save_model("llama", tie_word_embeddings=True)
    run_two_ranks(partial(capture, settings=settings), tmp_path)


def draft_by_head(rank: int, directory: Path) -> None:
    """Decode by a head that uses the split embedding and output layer of its target."""
    join(torch.device("cpu"), 2)
    exchange_by(of_every_rank)
    target = AutoModelForCausalLM.from_pretrained(directory, **split_arguments(2)).eval()
    compute_on_plain_parts(target)
    head = eagle_head(layer_config("llama"), own_embedding=False, own_output=False)

    def records(runner: StaticRunner, drafter: HeadDrafter, device: str) -> list[Any]:
        what = request(PROMPTS, length=LENGTH)
        what = replace(what, uniforms=what.uniforms.to(device))
        ahead = device != "cpu"
        found = speculative(runner, drafter, what, 3, ahead=ahead, agree=of_rank_0)
        return [(record.rows, record.tokens, record.proposed) for record in found]

    drafter = head.drafter(target, GREEDY)
    expected = records(StaticRunner(target, hidden_layers=drafter.layers), drafter, "cpu")
    with pretended_gpus(), pytest.MonkeyPatch.context() as patch:
        recording = Recording(patch)
        target.to("cuda:0")
        head.to("cuda:0")
        drafter = head.drafter(target, GREEDY)
        runner = PreparedRunner(target, compiled=False, captured=True, hidden_layers=drafter.layers)
        runner.prepare(RunnerShapes(2, 60, (1, 4), (), GREEDY, {4: [Judge(GREEDY, verify)]}, 8))
        prepared = PreparedHead(
            head.drafter(target, GREEDY), target, VOCABULARY, compiled=False, captured=True
        )
        prepared.prepare(2, 60, (3,))
        drafter.prepared = prepared
        num_events = len(recording.events)
        assert records(runner, drafter, "cuda:0") == expected
    # The prompts, and a proposal and a verdict for each turn; the last one may offer nothing.
    assert len(recording.events) - num_events >= 2 * (len(expected) - 1)
    first, second = of_every_rank((expected, recording.events))
    assert first == second


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="splits vocabularies evenly alone"
)
def test_heads_of_split_models_are_captured_with_them(tmp_path: Path) -> None:
    target_model().save_pretrained(tmp_path)
    run_two_ranks(partial(draft_by_head, directory=tmp_path), tmp_path)


def fail_to_capture(rank: int, settings: ModelSettings) -> None:
    loaded = split(settings)
    expected = decode(EagerRunner(loaded.model))
    said: list[str] = []
    with pretended_gpus(), pytest.MonkeyPatch.context() as patch:
        # What was captured before has been replayed once, by both.
        recording = Recording(patch, failing=2 if rank == 1 else None)
        gpu = torch.device("cuda", 0)
        loaded = replace(loaded, model=loaded.model.to(gpu), input_device=gpu)
        runner, name = build_runner(loaded, "graphs_only", VOCABULARY_SIZE, said.append, SHAPES)
        assert decode(runner, "cuda:0") == expected
    assert name == "static"
    assert recording.events == ["capture", "replay of 0", "capture"]
    first, second = of_every_rank(said[-1])
    assert first == second
    assert (
        "cannot be captured: RuntimeError: no graph on rank 1; it runs with runner=static" in first
    )


def test_a_rank_that_cannot_capture_sends_both_to_the_next_runner(
    save_model: SaveModel, tmp_path: Path
) -> None:
    run_two_ranks(partial(fail_to_capture, settings=save_model("llama")), tmp_path)


def refuse(rank: int) -> None:
    join(torch.device("cpu"), 2)
    exchange_by(of_every_rank)
    refused: dict[RunnerName, tuple[int, type[UnsupportedModelError]]] = {
        "graphs": (1, CompilationError),
        "graphs_only": (0, UnsupportedModelError),
    }
    said: list[str] = []

    def build(runner: RunnerName) -> RunnerName:
        refusing_rank, refusal = refused.get(runner, (None, UnsupportedModelError))
        with refusing(refusal, "fails"):
            with refusing(refusal, "fails"):
                if rank == refusing_rank:
                    raise RuntimeError(runner)
            of_every_rank("more that all ranks must reach")
        return runner

    assert first_possible("model", "graphs", build, said.append) == ("static", "static")
    check_agreement([list(map(len, said))])
    assert (
        "fails: RuntimeError: graphs on rank 1, and fails: RuntimeError: graphs_only on rank 0"
        in said[-1]
    )


def test_a_refusal_of_one_rank_is_that_of_all(tmp_path: Path) -> None:
    run_two_ranks(refuse, tmp_path)


def run_parts_as_traced(part: Any, *_: Any, **__: Any) -> Any:
    """In place of inductor, for which each rank would need ten seconds."""
    return part.forward


def compile_parts(rank: int, settings: ModelSettings) -> None:
    # Its import takes a second, which the other tests need not spend.
    from torch._inductor import compile_fx

    compile_fx.compile_fx = run_parts_as_traced
    loaded = split(settings)
    runner = PreparedRunner(loaded.model, compiled=True, captured=False)
    runner.prepare(RunnerShapes(2, 60, (1,), (), GREEDY))
    written = decode(runner)
    assert written == decode(EagerRunner(loaded.model))
    check_agreement(written)


@pytest.mark.slow
def test_split_models_are_compiled(save_model: SaveModel, tmp_path: Path) -> None:
    settings = save_model("llama", tie_word_embeddings=True, num_hidden_layers=1)
    run_two_ranks(partial(compile_parts, settings=settings), tmp_path)
