"""Attention of a few queries over long caches: five kernels against the least time that reading the cache takes.

    python benchmarks/attention.py [--slots 4096 16384 32768] [--batch 1 8] [--queries 1 5] [--out FILE]

Rows have different lengths, as in a batch that speculates, so every kernel gets a mask, or makes one from the lengths:

- packed: torch's scaled_dot_product_attention over packed heads that share keys, as `local/runners/attention.py` does,
  with the kernel that torch prefers (cuDNN's on Hopper and Blackwell);
- packed, without cuDNN: the same with torch's other kernels, on a GPU; runners take the faster of both;
- enable_gqa: the same function, which shares keys between heads itself;
- flex: torch's flex_attention, compiled for each shape, with a block mask from the lengths;
- products: two matrix products around a softmax.

Each is given over the floor: the bytes of keys and values over the measured rate of a large copy. Kernels go through
so many copies of the cache that none stays in the device's caches, as the layers of a model do, and on a GPU in a CUDA
graph, so that launches do not count. Each is compared with the same in float64. --out also writes JSON lines.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from harness.local.engine.roofline import copy_bandwidth
from harness.local.models.devices import synchronize
from harness.local.runners.attention import packed_attention, without_cudnn
from harness.local.runners.graphs import GraphRecorder
from harness.reporting.table import Table

# Query heads, key heads, width.
HEADS = ((32, 32, 128), (32, 8, 128), (64, 8, 128))
# More than the caches of any device in use; a CPU that is not quiet is given less work.
COLD_BYTES = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}
SECONDS = {"cuda": 0.05, "cpu": 0.2}
# Of the norm: bfloat16 rounds scores and outputs.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}

_NO_CUDNN = "packed, without cuDNN"

Kernel = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    slots: int
    batch_size: int
    queries: int
    heads: int
    key_heads: int
    size: int

    @property
    def num_numbers(self) -> int:
        """The numbers in keys and values."""
        return 2 * self.batch_size * self.key_heads * self.slots * self.size


class Inputs:
    """Queries [B, heads, n, D] and what every kernel needs besides the cache."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, share = shape, shape.heads // shape.key_heads
        make = functools.partial(torch.randn, device=device, dtype=dtype)
        self.queries = make(shape.batch_size, shape.heads, shape.queries, shape.size)
        cache = shape.batch_size, shape.key_heads, shape.slots, shape.size
        num_copies = -(-COLD_BYTES[device.type] // (shape.num_numbers * dtype.itemsize))
        self.caches = [(make(cache), make(cache)) for _ in range(num_copies)]
        # All rows are nearly full, so that no kernel can leave out much.
        starts = shape.slots - shape.queries - 3 * torch.arange(shape.batch_size, device=device)
        seen = (
            torch.arange(shape.slots, device=device)
            <= (starts[:, None] + torch.arange(shape.queries, device=device))[..., None]
        )
        mask = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
        self.mask = mask.unsqueeze(1)  # [B, 1, n, S]
        self.packed_mask = mask.repeat(1, share, 1).unsqueeze(1)  # [B, 1, share * n, S]
        self.packed = self.queries.reshape(shape.batch_size, shape.key_heads, -1, shape.size)
        self._starts = starts

    def kernels(self) -> dict[str, Callable[[], Kernel]]:
        """Functions that make them; keys and values [B, key heads, S, D] -> [B, heads, n, D]."""
        others = (
            {} if self.queries.device.type == "cpu" else {_NO_CUDNN: lambda: self._pack_otherwise}
        )
        return {
            "packed": lambda: self._pack,
            **others,
            "enable_gqa": lambda: self._share,
            "flex": self._flex,
            "products": lambda: self._multiply,
        }

    def _pack(self, keys: Tensor, values: Tensor) -> Tensor:
        return packed_attention(torch.nn.Identity(), self.queries, keys, values, self.packed_mask)[
            0
        ].transpose(1, 2)

    def _pack_otherwise(self, keys: Tensor, values: Tensor) -> Tensor:
        with without_cudnn():
            return self._pack(keys, values)

    def _share(self, keys: Tensor, values: Tensor) -> Tensor:
        return scaled_dot_product_attention(
            self.queries, keys, values, attn_mask=self.mask, enable_gqa=True
        )

    def _flex(self) -> Kernel:
        shape, starts = self.shape, self._starts
        sizes = shape.batch_size, None, shape.queries, shape.slots
        blocks = create_block_mask(
            lambda b, h, query, slot: slot <= starts[b] + query, *sizes, device=starts.device
        )
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda keys, values: compiled(
            self.queries, keys, values, block_mask=blocks, enable_gqa=True
        )

    def _multiply(self, keys: Tensor, values: Tensor) -> Tensor:
        scores = self.packed @ keys.transpose(2, 3) * self.shape.size**-0.5 + self.packed_mask
        return (scores.softmax(-1) @ values).view_as(self.queries)

    def exact(self) -> Tensor:
        """In float64, over the first cache; row by row, because a whole one may not fit."""
        found = []
        for row, (keys, values) in enumerate(zip(*self.caches[0], strict=True)):
            scores = (
                self.packed[row].double() @ keys.double().transpose(1, 2) * self.shape.size**-0.5
            )
            found.append((scores + self.packed_mask[row].double()).softmax(-1) @ values.double())
        return torch.stack(found).view_as(self.queries)

    def seconds(self, kernel: Kernel) -> float:
        """The median time of one call."""
        device = self.queries.device
        call: Callable[[], Any] = lambda: tuple(kernel(*cache) for cache in self.caches)  # noqa: E731
        if device.type == "cuda":
            graph, _ = GraphRecorder(device)(call)
            call = graph.replay
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=SECONDS[device.type]).median / len(self.caches)


@torch.inference_mode()
def measure(shapes: Sequence[Shape], device: torch.device) -> list[dict[str, Any]]:
    """A line for each shape: milliseconds, and errors over the norm, by kernel; a reason where one fails.

    A capture that fails ends it: the process cannot rely on another one.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rate, lines = copy_bandwidth(device), []
    for shape in shapes:
        torch.manual_seed(0)
        torch.compiler.reset()  # or flex_attention is compiled for any shape from the second one on
        inputs = Inputs(shape, device, dtype)
        exact = inputs.exact()
        line: dict[str, Any] = {**asdict(shape), "ms": {}, "error": {}, "failed": {}}
        line["floor_ms"] = 1000 * shape.num_numbers * dtype.itemsize / rate if rate else None
        for name, make in inputs.kernels().items():
            try:
                kernel = make()
                error = float((kernel(*inputs.caches[0]).double() - exact).norm() / exact.norm())
                line["ms"][name], line["error"][name] = 1000 * inputs.seconds(kernel), error
                if not error <= TOLERANCE[dtype]:
                    line["failed"][name] = f"wrong by {error:.1%}"
            except Exception as exception:  # a device or a torch without this kernel
                line["failed"][name] = f"{type(exception).__name__}: {exception}".splitlines()[0][
                    :200
                ]
                synchronize([device])
            if GraphRecorder.has_failed:
                return [*lines, line]
        lines.append(line)
    return lines


def shapes(
    slots: Sequence[int],
    batches: Sequence[int],
    queries: Sequence[int],
    heads: Sequence[tuple[int, int, int]] = HEADS,
) -> list[Shape]:
    """All combinations."""
    return [
        Shape(num_slots, batch, num_queries, *of_heads)
        for of_heads, num_slots, batch, num_queries in product(heads, slots, batches, queries)
    ]


def table(about: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each shape."""
    names = list(dict.fromkeys(name for line in lines for name in (*line["ms"], *line["failed"])))

    def cell(line: Mapping[str, Any], name: str) -> str:
        if name in line["failed"]:
            return "fails"
        floor, ms = line["floor_ms"], line["ms"][name]
        return f"{ms:.3f}" + (f" ({ms / floor:.2f}×)" if floor else "")

    rows = [
        (f"{line['heads']}, {line['key_heads']}, {line['size']}", f"{line['slots']:,}", line["batch_size"],
         line["queries"], "" if line["floor_ms"] is None else f"{line['floor_ms']:.3f}",
         *(cell(line, name) for name in names))
        for line in lines
    ]  # fmt: skip
    reasons = dict.fromkeys(
        f"{name}: {reason}" for line in lines for name, reason in line["failed"].items()
    )
    errors = [error for line in lines for error in line["error"].values()]
    return common.table(
        f"attention on {about['devices']}, ms and times of the floor",
        ["heads, keys,\nwidth", "slots", "batch", "queries", "floor\nms", *names],
        rows,
        [f"largest error of a norm against float64: {max(errors):.1e}" if errors else "", *reasons],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    for name, default in default_sizes(on_gpu).items():
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    parser.add_argument("--out", type=Path, help="append the figures to this file, as JSON lines")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    lines = measure(shapes(options.slots, options.batch, options.queries), device)
    common.print_tables(table({"devices": common.device_name()}, lines))
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def default_sizes(on_gpu: bool) -> dict[str, list[int]]:
    """The sizes for `shapes`; on a CPU a few that take seconds."""
    if on_gpu:
        return {"slots": [4096, 16_384, 32_768], "batch": [1, 8], "queries": [1, 5]}
    return {"slots": [1024], "batch": [2], "queries": [1, 5]}


if __name__ == "__main__":
    main()
