"""The code that compiled passes get on a GPU, generated where there is none."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks/trace_for_cuda.py"
# Keys or values of a layer, of the script's model.
CACHE_SIZE = 2 * 512 * 8


@pytest.mark.slow
@pytest.mark.skipif(
    torch.version.cuda is None or importlib.util.find_spec("triton") is None,
    reason="needs torch's CUDA build with triton",
)
@pytest.mark.parametrize(
    ("width", "most_kernels", "num_products"),
    # A product of one row is a kernel of Triton, fused with what surrounds it.
    [(1, 9, 0), (5, 8, 7)],
)
def test_a_layer_is_few_kernels_and_copies_no_cache(
    width: int, most_kernels: int, num_products: int
) -> None:
    shown = subprocess.run(
        [sys.executable, str(SCRIPT), "--width", str(width)],
        cwd=ROOT,
        # Nothing is compiled that a pool of processes would be needed for, and one may take minutes to end.
        env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    before, layer, after = map(json.loads, shown.stdout.splitlines())
    # The angles of rotary embeddings are a product with torch 2.11.
    assert before["libraries"] in ([], ["mm"])
    assert layer["triton"] <= most_kernels
    attention = [name for name in layer["libraries"] if "attention" in name]
    assert len(attention) == 1
    assert len(layer["libraries"]) - 1 == num_products
    for part in (before, layer, after):
        assert all(math.prod(shape) < CACHE_SIZE for shape in part["allocated"])
