"""Inference mode for functions that call each other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def inference(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function in inference mode, which is entered only where it is not on.

    torch's own decorator enters it in every call. An iteration makes several such calls, which would
    take half a percent of a small model's time.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return function(*arguments, **named)
        with torch.inference_mode():
            return function(*arguments, **named)

    return call
