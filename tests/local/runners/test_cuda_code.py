"""The code that compiled passes get on a GPU, generated where there is none."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks/trace_for_cuda.py"
# Keys or values of a layer, of the script's model.
CACHE_SIZE = 2 * 512 * 8


HAS_CUDA = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="needs torch's CUDA build with triton")


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize(
    ("width", "most_kernels", "num_products"),
    # A product of one row is a kernel of Triton, fused with what surrounds it.
    [(1, 9, 0), (5, 8, 7)],
)
def test_a_layer_is_few_kernels_and_copies_no_cache(
    width: int, most_kernels: int, num_products: int
) -> None:
    before, layer, after = parts("--width", str(width))
    # The angles of rotary embeddings are a product with torch 2.11.
    assert before["libraries"] in ([], ["mm"])
    assert layer["triton"] <= most_kernels
    attention = [name for name in layer["libraries"] if "attention" in name]
    assert len(attention) == 1
    assert len(layer["libraries"]) - 1 == num_products
    for part in (before, layer, after):
        assert all(math.prod(shape) < CACHE_SIZE for shape in part["allocated"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "least_parts"),
    # A part for each token that is drafted, and more where its layers are many; equal ones once.
    [("eagle3", 2), ("domino", 3), ("mtp", 3), ("mtp_moe", 3), ("gemma4", 3)],
)
def test_proposals_of_heads_are_compiled_to_their_end(kind: str, least_parts: int) -> None:
    """Assistants with centroids, layers in Qwen's layout with and without experts: to their code with torch's CUDA
    build, to what is compiled without it.
    """
    if not HAS_CUDA:
        parts_of_head = runpy.run_path(str(SCRIPT))["parts_of_head"]
        traced = parts_of_head(kind, 1, 3, 64, torch.bfloat16)
        calls = [node for part in traced for node in part.graph.nodes if node.op == "call_function"]
        assert len(calls) > 100
        return
    generated = parts("--head", kind, "--width", "3", "--slots", "64")
    assert len(generated) >= least_parts
    for part in generated:
        assert part["triton"] + len(part["libraries"]) > 0


def parts(*words: str) -> list[dict[str, Any]]:
    """What the script prints of each part."""
    shown = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        cwd=ROOT,
        # Nothing is compiled that a pool of processes would be needed for, and one may take minutes to end.
        env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines()]
