"""The choice among torch's kernels for attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Compute attention with other kernels than cuDNN's within this block.

    On Hopper and Blackwell torch 2.11 prefers cuDNN, which makes a plan for every size that it has
    not seen. That takes long where sizes change from pass to pass.
    """
    enabled = cudnn_sdp_enabled()
    enable_cudnn_sdp(False)
    try:
        yield
    finally:
        enable_cudnn_sdp(enabled)
