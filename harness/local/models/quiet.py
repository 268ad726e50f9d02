"""Silences messages of libraries that appear again and again and need no action. All other warnings are still shown."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

# For each logger, the beginning of the message that is silenced. The user need not act on any of these messages.
_FLOODS = {
    # transformers' assisted generation complains about arguments that it adds itself.
    "transformers.generation.utils": (
        "Passing `generation_config` together with generation-related arguments"
    ),
    # Not needed, because harness compares prompts with the model's context: it cuts longer texts, or refuses them with
    # its own message.
    "transformers.tokenization_utils_base": "Token indices sequence length is longer than",
    # This is about a hypothetical GPU, for which a run only plans.
    "accelerate.utils.modeling": "Device ",
    # This appears once per layer and forward pass.
    "bitsandbytes.autograd._functions": "MatMul8bitLt: inputs will be cast",
    # This appears on every CPU with AVX-512 BF16 if the package `kernels` is not installed.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
}


# The title of the table in which transformers lists missing and superfluous tensors. The table is not needed: if
# weights are missing, harness reports that in one line. Superfluous tensors, such as multi-token-prediction layers, are
# not part of the model.
_REPORT = " LOAD REPORT"

# The beginnings of Python warnings that are silenced.
_WARNINGS = (
    # This appears with every compilation on a GPU, even for models in half precision. It advises against float32, which
    # is the user's choice.
    "TensorFloat32 tensor cores for float32",
)


# A progress bar is shown while weights of more bytes than this load.
_LONG_LOADING = 10**10


def _matters(record: logging.LogRecord) -> bool:
    """Whether a message of a library is shown."""
    message = record.getMessage()
    # No message begins with "\0", so loggers that are not in `_FLOODS` keep all of their messages.
    return _REPORT not in message and not message.startswith(_FLOODS.get(record.name, "\0"))


def quiet_libraries(*, loads_weights: bool = True) -> None:
    """Silence the known messages in this process. This is called before a model is planned or loaded, and may be called
    several times.

    The progress bars of loading weights are silenced too, because they would disturb harness's own progress line. The
    progress bars of downloads, which may take an hour, are shown if stderr is a terminal, unless the user has switched
    them off.

    Args:
        loads_weights: whether weights may be loaded. If so, the progress bar of GGUF files is silenced too, which
            imports torch.
    """
    for name in (*_FLOODS, "transformers.modeling_utils"):
        logging.getLogger(name).addFilter(_matters)
    # Before bitsandbytes 0.50, its message was a Python warning.
    for message in (_FLOODS["bitsandbytes.autograd._functions"], *_WARNINGS):
        warnings.filterwarnings("ignore", message=message)
    import transformers
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    shows_downloads = sys.stderr.isatty() and not are_progress_bars_disabled()
    # This switches off the bars of loading and the bars of downloads.
    transformers.utils.logging.disable_progress_bar()
    if shows_downloads:
        enable_progress_bars()
    if loads_weights:
        # The bar of GGUF files ignores this switch, so it is replaced. Its module imports torch.
        with contextlib.suppress(ImportError):
            gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
            gguf.tqdm = functools.partial(gguf.tqdm, disable=True)


@contextlib.contextmanager
def loading_bar(num_bytes: int) -> Iterator[None]:
    """Show transformers' progress bar while the block loads weights, if they are large and stderr is a terminal.

    Args:
        num_bytes: the size of the weights.
    """
    import transformers

    is_shown = num_bytes > _LONG_LOADING and sys.stderr.isatty()
    if is_shown:
        transformers.utils.logging.enable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            # This switches the bar off again.
            quiet_libraries()
