"""Silence what libraries repeat thousands of times, each message at its source; every other warning stays."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import re
import sys
import warnings
from typing import Any

import transformers

# By logger, what its messages start with. None of them asks anything of the user.
_FLOODS = {
    # Once per layer and forward pass.
    "bitsandbytes.autograd._functions": "MatMul8bitLt: inputs will be cast",
    # On every CPU with AVX-512 BF16 where the `kernels` package is not installed.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
    # Once per GPU and attempt, when placement asks how many GPUs a model would need.
    "accelerate.utils.modeling": r"Device \d+ is not available, available devices are",
}


class _Drop(logging.Filter):
    """Lets everything pass but the messages that start as `pattern` says."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = re.compile(pattern)

    def filter(self, record: logging.LogRecord) -> bool:
        return self.pattern.match(record.getMessage()) is None


_FILTERS = {name: _Drop(pattern) for name, pattern in _FLOODS.items()}


def quiet_libraries() -> None:
    """Silence the known floods in this process; called by loading, any number of times.

    Progress bars of downloads and weight loading stay where stderr is a terminal.
    """
    for name, drop in _FILTERS.items():
        logging.getLogger(name).addFilter(drop)
    # The same message was a Python warning before bitsandbytes 0.50.
    warnings.filterwarnings("ignore", message=_FLOODS["bitsandbytes.autograd._functions"])
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
        # GGUF files have a bar of their own, which does not heed that switch.
        with contextlib.suppress(ImportError):
            gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
            if not isinstance(gguf.tqdm, functools.partial):
                gguf.tqdm = functools.partial(gguf.tqdm, disable=True)
