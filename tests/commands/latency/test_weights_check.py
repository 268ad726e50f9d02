"""An engine that loads the weights itself is compared with what they say, by `latency` itself."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from in_process import Harness, results

SHIPPED = Path(__file__).parents[3] / "harness" / "models" / "shipped"
# Our own loop as an engine that loads the weights itself, those of its draft from a directory.
ENGINE = """
    import dataclasses
    from harness.engines.record import EngineRecord

    class Other(EngineRecord):
        name = "other"
        summary = "our own loop, with a draft from a directory"
        loads_weights = True

        def open(self, opening):
            from harness.engines.local.engine import LocalEngine
            from harness.engines.pair import plan_pair
            from harness.models.case import Demand

            settings = opening.settings
            draft = dataclasses.replace(settings.draft, repository={draft!r})
            planned = plan_pair(settings.model, draft, settings.placement, settings.dtype)
            pair = planned.place(Demand(1, 128, 64, 4, "eager")).load()
            return LocalEngine(pair, dataclasses.replace(opening, runner="static"))
"""
QUICK = ["num_prompts=12", "batch_size=12", "num_warmup=0", "decoding.max_new_tokens=64"]


@pytest.mark.parametrize("levels", [None, 2])
def test_a_drafter_is_compared_with_its_weights(
    harness: Harness, tmp_path: Path, levels: int | None
) -> None:
    """Weights of five values each are not those of the draft."""
    directory = tmp_path / "draft"
    shutil.copytree(SHIPPED / "tiny_draft", directory)
    if levels is not None:
        weights = load_file(directory / "model.safetensors")
        for name, tensor in weights.items():
            if tensor.dim() == 2:
                step = tensor.float().abs().amax(1, keepdim=True) / levels
                weights[name] = ((tensor.float() / step).round() * step).to(tensor.dtype)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    # Modules are imported by name, once per process.
    file = tmp_path / f"engine_with_{levels}.py"
    file.write_text(textwrap.dedent(ENGINE).format(draft=str(directory)))
    outcome = harness("latency", *QUICK, f"engine=./{file.name}:Other")
    row = results().iloc[-1]
    is_whole = levels is None
    assert row.health == ("as its weights say" if is_whole else "broken")
    assert row.served_tokens_per_iteration == pytest.approx(row.tokens_per_iteration)
    low, high = row.weights_tokens_per_iteration_low, row.weights_tokens_per_iteration_high
    assert (low < row.tokens_per_iteration < high) == is_whole
    assert ("The drafter is broken" in outcome.stdout) != is_whole


def test_a_trial_is_not_compared(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "engine_of_trial.py"
    file.write_text(textwrap.dedent(ENGINE).format(draft=str(SHIPPED / "tiny_draft")))
    outcome = harness("latency", "test=true", f"engine=./{file.name}:Other")
    assert "reading the answers" not in outcome.stderr
    assert results().health.isna().all()
