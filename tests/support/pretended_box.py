"""A machine with a GPU where there is none: every interpreter that has this directory in its PYTHONPATH, and
PRETENDED_GPUS in its environment, is on `pretended_gpus` for its whole life, and so is all that it starts.

So programs that start processes of their own run as they would on a GPU, `benchmarks/gpu_suite.py` above all:

    PYTHONPATH=tests/support PRETENDED_GPUS=1 python benchmarks/gpu_suite.py --minutes 60 --out DIR

They know nothing of it. Presets have the architectures of their names in small sizes, because the numbers are a CPU's.
What stays to be seen on a real GPU:

- nothing is compiled: what is to be compiled runs as it is;
- 4-bit weights do not load: bitsandbytes' parameter is a kind of tensor itself, and so is one on a pretended GPU;
- models are not split over GPU and main memory, whose hooks (accelerate's) make such parameters, too;
- attention has one kernel, whatever cuDNN is told;
- memory is without end, nothing is subtracted from it, and peaks are the process's.
"""

import os
import resource
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

NAME = "pretended GPU"
_MEMORY = 80 * 2**30
# The largest values of an architecture, which has two heads of keys; any number of heads divides the hidden size.
_LARGEST = {"num_hidden_layers": 4, "hidden_size": 96, "intermediate_size": 192}
_LARGEST |= {"vocab_size": 512, "draft_vocab_size": 384}
_HEAD_SIZE = 16

_for_life = ExitStack()


def enter() -> None:
    """Be on a pretended GPU until the process ends."""
    # Other threads are not on it.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    from harness.local.models.quiet import quiet_libraries

    quiet_libraries()
    import bitsandbytes  # noqa: F401  # before there is a GPU, for which it would load another library
    import torch
    from transformers import PreTrainedModel

    from harness.config.settings import ModelSettings
    from pretended_gpus import pretended_gpus
    from traced import run_untraced

    _for_life.enter_context(pretended_gpus())
    patch = _for_life.enter_context(pytest.MonkeyPatch.context())
    for name, member in _members().items():
        patch.setattr(torch.cuda, name, member)
    patch.setattr(torch, "Generator", _generator(torch.Generator))
    run_untraced(patch)
    # transformers compiles a static cache's passes by itself.
    patch.setattr(torch, "compile", _uncompiled)
    # Without CUDA's library torch would ask each operation for an event.
    load = vars(PreTrainedModel)["from_pretrained"].__func__
    patch.setattr(PreTrainedModel, "from_pretrained", classmethod(partial(_load_by_names, load)))
    check = ModelSettings.__post_init__

    def check_and_shrink(settings: ModelSettings) -> None:
        check(settings)
        if settings.architecture is not None:
            object.__setattr__(settings, "architecture", small(settings.architecture))

    patch.setattr(ModelSettings, "__post_init__", check_and_shrink)


def small(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """The same architecture in a small size; of a small one, itself."""
    found = dict(architecture)
    for name, value in architecture.items():
        if isinstance(value, Mapping):
            found[name] = small(value)
        elif name in _LARGEST:
            found[name] = min(value, _LARGEST[name])
        elif name.endswith("_token_id"):
            found[name] = 0
    if "num_key_value_heads" in architecture:
        heads, key_heads = architecture["num_attention_heads"], architecture["num_key_value_heads"]
        found |= {"num_attention_heads": 2 * heads // key_heads, "num_key_value_heads": 2}
        found["head_dim"] = _HEAD_SIZE
    return found


def _members() -> dict[str, Any]:
    """The members of `torch.cuda` that say what there is, by name."""
    properties = SimpleNamespace(
        name=NAME, total_memory=_MEMORY, major=9, minor=0, multi_processor_count=1, uuid="pretended"
    )
    return {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: properties,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "max_memory_allocated": lambda device=None: _peak_bytes(),
        "mem_get_info": lambda device=None: (_MEMORY, _MEMORY),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "memory_snapshot": list,
        "reset_peak_memory_stats": lambda device=None: None,
    }


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _generator(original: Any) -> Any:
    class Generator(original):
        """Of a CPU, whichever device it is for."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return original.__new__(cls, "cpu")

    return Generator


def _uncompiled(function: Any = None, **options: Any) -> Any:
    return (lambda decorated: decorated) if function is None else function


def _load_by_names(load: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Load with devices by name: torch without CUDA knows no number of one."""
    if places := kwargs.get("device_map"):
        names = {place: f"cuda:{place}" for place in places.values() if isinstance(place, int)}
        kwargs["device_map"] = {part: names.get(place, place) for part, place in places.items()}
    return load(cls, *args, **kwargs)
