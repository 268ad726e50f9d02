"""Loading and running says nothing thousands of times, and still says what matters."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from harness.config.settings import Dtype, ModelSettings, PlacementSettings, Quantization
from harness.local.models.quiet import loading_bar, quiet_libraries
from tiny_checkpoints import load_pair

ROOT = Path(__file__).parents[3]
PROMPT = torch.tensor([[1, 2, 3]])


def test_importing_the_room_does_nothing() -> None:
    script = """
        import logging, sys, torch
        before = logging.root.handlers[:]
        import harness.local.engine.pair, harness.local.models.devices
        assert not torch.cuda.is_initialized()
        assert not logging.getLogger("bitsandbytes.autograd._functions").filters
        assert "bitsandbytes" not in sys.modules
        assert logging.root.handlers == before
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_quantized_models_run_quietly(
    save_model: Callable[..., ModelSettings],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = save_model()

    @torch.no_grad()
    def run_quantized(quantization: Quantization, dtype: Dtype) -> None:
        quantized = dataclasses.replace(settings, quantization=quantization)
        load_pair(quantized, None, PlacementSettings(), dtype).target.model(PROMPT)

    capfd.readouterr()  # of saving
    run_quantized("8bit", "float32")
    run_quantized("4bit", "bfloat16")
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    # That there is something to silence.
    monkeypatch.setattr("harness.local.models.quiet._matters", lambda record: True)
    monkeypatch.setattr(logging.getLogger("bitsandbytes.autograd._functions"), "filters", [])
    run_quantized("8bit", "bfloat16")
    assert caplog.text.count("MatMul8bitLt: inputs will be cast") == 3 * 7


@pytest.mark.parametrize(("name", "is_said"), [("lm_head.extra", False), ("lm_head.weight", True)])
def test_tensors_that_a_model_has_no_place_for_are_no_report(
    save_model: Callable[..., ModelSettings],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_said: bool,
) -> None:
    """Such as layers for multi-token prediction; tensors that are missing are reported."""
    quiet_libraries()
    directory = Path(save_model().repository)
    tensors = load_file(directory / "model.safetensors")
    tensors.pop(name, None)
    if not is_said:
        tensors[name] = torch.zeros(1)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    AutoModelForCausalLM.from_pretrained(directory)
    assert ("LOAD REPORT" in caplog.text) == is_said


@pytest.mark.parametrize(("size", "is_shown"), [(10**10, False), (10**10 + 1, True)])
def test_a_bar_is_shown_while_many_bytes_load(
    size: int, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    quiet_libraries()
    with loading_bar(size):
        assert transformers.utils.logging.is_progress_bar_enabled() == is_shown
    assert not transformers.utils.logging.is_progress_bar_enabled()
