"""Chooses among torch's kernels for attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp


@contextmanager
def without_plans() -> Iterator[None]:
    """Keep cuDNN from attention whose sizes change from pass to pass.

    On Hopper and Blackwell torch 2.11 prefers it, and it makes a plan for every size that it has
    not seen.
    """
    enabled = cudnn_sdp_enabled()
    enable_cudnn_sdp(False)
    try:
        yield
    finally:
        enable_cudnn_sdp(enabled)
