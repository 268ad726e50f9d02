"""Compiled parts that run as they were traced: to compile each takes seconds."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import GraphModule


def run_as_traced(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """Replace inductor, and forget what it has compiled; the parts that it would compile from now on."""
    parts: list[GraphModule] = []

    def compile_fx(part: GraphModule, examples: list[Tensor], **_: object) -> Callable[..., Any]:
        assert all(isinstance(example, FakeTensor) for example in examples), (
            "weights would be kept with the code"
        )
        parts.append(part)
        return part.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    monkeypatch.setattr("harness.local.runners.compiled._compiled", {})
    return parts


def run_untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave parts as they are: torch cannot trace over the tensors of a pretended GPU."""
    compile_call = "harness.local.runners.compiled.compile_call"
    monkeypatch.setattr(compile_call, lambda part, inputs: part.function)
