"""Silences messages that libraries repeat thousands of times. All other warnings are still shown."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

# By logger, how a message begins. The user need not act on any of them.
_FLOODS = {
    # From transformers' assisted generation, about arguments that it adds itself.
    "transformers.generation.utils": (
        "Passing `generation_config` together with generation-related arguments"
    ),
    # Not needed, because prompts are compared with the context: a longer text is cut, or refused with our own message.
    "transformers.tokenization_utils_base": "Token indices sequence length is longer than",
    # About a GPU that is only planned for.
    "accelerate.utils.modeling": "Device ",
    # Once per layer and forward pass.
    "bitsandbytes.autograd._functions": "MatMul8bitLt: inputs will be cast",
    # On every CPU with AVX-512 BF16 where the `kernels` package is not installed.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
}


# The title of the table in which transformers lists tensors that do not fit a model. If weights are missing, an error
# of ours says so in one line. Other tensors, such as multi-token-prediction layers, are not part of the model.
_REPORT = " LOAD REPORT"

# How Python warnings begin.
_WARNINGS = (
    # Shown with every compilation on a GPU, even for models in half precision. float32 is the user's choice.
    "TensorFloat32 tensor cores for float32",
)


# Weights of more bytes than this load for so long that a progress bar is worth a line.
_LONG_LOADING = 10**10


def _matters(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return _REPORT not in message and not message.startswith(_FLOODS.get(record.name, "\0"))


def quiet_libraries(*, loads_weights: bool = True) -> None:
    """Silence the known floods in this process. Called before a model is planned or loaded; may be called several
    times.

    The progress bars of weights that load are silenced too, because they would disturb our own line about progress. The
    bars of downloads, which may take an hour, are shown if stderr is a terminal.

    Args:
        loads_weights: whether weights will be loaded, so that the bar of GGUF files is silenced, too.
    """
    for name in (*_FLOODS, "transformers.modeling_utils"):
        logging.getLogger(name).addFilter(_matters)
    # The same message was a Python warning before bitsandbytes 0.50.
    for message in (_FLOODS["bitsandbytes.autograd._functions"], *_WARNINGS):
        warnings.filterwarnings("ignore", message=message)
    import transformers
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    shows_downloads = sys.stderr.isatty() and not are_progress_bars_disabled()
    # This switches off both kinds of bars.
    transformers.utils.logging.disable_progress_bar()
    if shows_downloads:
        enable_progress_bars()
    if loads_weights:
        # The bar of GGUF files ignores this switch. Only for runs that load weights, because its module imports torch.
        with contextlib.suppress(ImportError):
            gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
            gguf.tqdm = functools.partial(gguf.tqdm, disable=True)


@contextlib.contextmanager
def loading_bar(num_bytes: int) -> Iterator[None]:
    """Show transformers' bar while weights load, if they are large and stderr is a terminal."""
    import transformers

    is_shown = num_bytes > _LONG_LOADING and sys.stderr.isatty()
    if is_shown:
        transformers.utils.logging.enable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            quiet_libraries()
