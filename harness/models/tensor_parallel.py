"""Every layer split over several processes, the ranks, by transformers' own `tp_plan`: one device each, all at work.

All ranks run the same program on the same numbers. Randomness is data, and what the ranks add up or gather comes out
the same to the last bit on each, so that they take the same decisions without asking each other; `check_agreement` sees
to it after each generation. A model that is not split is a copy on every rank.

A rank knows itself by the variables that `torchrun` sets too: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from harness.config.errors import RunError, SettingError
from harness.models.quantization import stored_quantization

if TYPE_CHECKING:
    from harness.models.checkpoints import Checkpoint

# Loading may take one rank minutes longer than another; after that, a rank that waits so long waits for ever.
_TIMEOUT = timedelta(minutes=10)
# Ranks come out of a generation within one forward of each other.
_AGREEMENT_TIMEOUT = timedelta(minutes=1)

_BESIDE = "cannot be combined with tensor_parallel"

# Whose output holds the keys, so that splitting it splits the cache.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


@dataclasses.dataclass(frozen=True)
class World:
    """This process among the ranks; the only one where there are none."""

    rank: int
    size: int


# Beside the one that layers use, for words between the ranks: on the CPU, so that nothing waits for a GPU.
_control: dist.ProcessGroup | None = None


def world() -> World:
    """Which rank this process is, and of how many."""
    return World(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def check_plain(checkpoint: Checkpoint) -> None:
    """Raise a SettingError for weights that are quantized, or are to be: they cannot be split."""
    quantized = stored_quantization(checkpoint.config) or checkpoint.settings.quantization
    if quantized != "none":
        rule = f"{_BESIDE}: its weights are quantized ({quantized})"
        raise SettingError(checkpoint.role, rule, checkpoint.settings.name)


def check_split(checkpoint: Checkpoint, model: PreTrainedModel, num_ranks: int) -> None:
    """Refuse what cannot be split over so many ranks.

    Args:
        model: from `empty_model`.

    Raises:
        SettingError: a model without a plan, or heads that cannot be shared out.
    """
    role, settings, config = checkpoint.role, checkpoint.settings, checkpoint.config.get_text_config(decoder=True)
    if not model.tp_plan:
        raise SettingError(role, f"{_BESIDE}: transformers has no tp_plan for {type(model).__name__}", settings.name)
    heads = {"attention heads": getattr(config, "num_attention_heads", None)}
    heads["key and value heads"] = getattr(config, "num_key_value_heads", None)
    for what, number in heads.items():
        if isinstance(number, int) and number % num_ranks:
            rule = f"{_BESIDE} over {num_ranks} ranks, which cannot share its {number} {what} evenly"
            raise SettingError(role, rule, settings.name)


def bytes_per_rank(model: PreTrainedModel, num_ranks: int) -> int:
    """Bytes of weights and buffers on the rank that holds most: its part of what the plan splits, the rest in full.

    Args:
        model: from `empty_model`.
    """
    total = sum(buffer.nbytes for buffer in model.buffers())
    for name, parameter in model.named_parameters():
        dimension = _split_dimension(model.tp_plan, name, parameter)
        share = 1.0
        if dimension is not None:
            length = parameter.shape[dimension]
            share = math.ceil(length / num_ranks) / length
        total += round(parameter.nbytes * share)
    return total


def splits_cache(model: PreTrainedModel) -> bool:
    """Whether each rank keeps the keys and values of its own heads alone."""
    return any(
        name.rpartition(".")[2] in _KEY_PROJECTIONS and style == "colwise" for name, style in model.tp_plan.items()
    )


def join(device: torch.device, num_ranks: int) -> None:
    """Meet the other ranks, once a process. NCCL on a GPU, gloo on the CPU, whose cores the ranks share.

    Raises:
        RunError: this process is not one of so many, or they do not meet.
    """
    global _control
    if world().size != num_ranks:
        what = f"tensor_parallel needs {num_ranks} processes, this is one of {world().size}"
        raise RunError(f"{what}: run it by the command line, or by torchrun")
    if dist.is_initialized():
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // world().size))
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_TIMEOUT, device_id=device if on_gpu else None)
        _control = dist.new_group(backend="gloo", timeout=_AGREEMENT_TIMEOUT)
    except (RuntimeError, ValueError) as exception:
        raise RunError(f"the ranks of tensor_parallel do not meet: {_first_line(exception)}") from exception


def split_arguments(num_ranks: int) -> dict[str, Any]:
    """What `from_pretrained` needs to load this rank's part, after `join`."""
    return {"distributed_config": DistributedConfig(tp_size=num_ranks, tp_plan="auto")}


def check_agreement(tokens: list[list[int]]) -> None:
    """Raise a RunError unless all ranks generated the same tokens. Every rank must call it; without ranks it passes."""
    digests = _gather(hashlib.sha256(repr(tokens).encode()).hexdigest())
    if len(set(digests)) > 1:
        raise RunError(
            "the ranks of tensor_parallel generated different tokens: their devices do not round alike\n"
            "(draft.placement=tensor_parallel splits the draft as well, and all ranks then see the same numbers)"
        )


def sum_over_ranks(number: int) -> int:
    """Every rank must call it; without ranks it is the number itself."""
    return sum(_gather(number))


def ended_rank(exception: BaseException) -> RunError | None:
    """The failure of a rank that waited for another in vain, in one line; None for any other."""
    text = str(exception)
    waited = isinstance(exception, dist.DistBackendError) or "gloo" in text or "Connection closed by peer" in text
    if not dist.is_initialized() or not waited:
        return None
    # Without the place in gloo's source before it, and the advice after it.
    what = re.sub(r"^\[\S*\] ", "", _first_line(exception)).partition(". ")[0]
    return RunError(f"another rank of tensor_parallel ended or hangs ({what})")


def _gather(value: Any) -> list[Any]:
    if _control is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(_control)
    dist.all_gather_object(values, value, group=_control)
    return values


def _split_dimension(plan: dict[str, str], name: str, parameter: torch.Tensor) -> int | None:
    """Along which dimension the plan splits a parameter; None where every rank has all of it."""
    generic = re.sub(r"\.\d+\.", ".*.", name)
    owner, _, kind = generic.rpartition(".")
    style = plan.get(generic) or plan.get(owner) or ""
    if style.startswith("embedding"):
        return 0 if style == "embedding_rowwise" else 1
    if style == "grouped_gemm":
        return 0
    if "colwise" in style:
        # Weights are [..., outputs, inputs], biases [outputs].
        return max(0, parameter.ndim - 2)
    return parameter.ndim - 1 if "rowwise" in style and kind != "bias" else None


def _first_line(exception: BaseException) -> str:
    return (str(exception).strip().splitlines() or [type(exception).__name__])[0]
