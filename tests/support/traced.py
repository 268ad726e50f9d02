"""Compiled parts that run as they were traced: to compile each takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import GraphModule

from harness.local.runners.compiled import CompiledCall


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


def run_by_dynamo(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Compile as on GPUs, with dynamo's graph run as it is; the options that torch.compile is given from now on."""
    asked: dict[str, Any] = {}
    original = torch.compile

    def as_traced(call: Any, **options: Any) -> Any:
        asked.update(options)
        return original(call, backend="eager", fullgraph=options["fullgraph"], dynamic=False)

    monkeypatch.setattr("torch.compile", as_traced)
    on_gpu = property(lambda self: True, lambda self, value: None)
    monkeypatch.setattr(CompiledCall, "_on_gpu", on_gpu, raising=False)
    return asked


def assert_static(written: Sequence[Tensor]) -> None:
    """Torch records no graph of a call that writes to other tensors."""
    assert written
    assert all(hasattr(tensor, "_dynamo_static_input_type") for tensor in written)
