"""Settings, rules of acceptance, synthetic acceptance in each of its shapes, and failures of the machine in words."""

import errno
import math
import os
from typing import Any, ClassVar

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError

from harness.cli.conversion import from_config
from harness.commands.latency.record import LatencySettings
from harness.commands.recovery.record import RecoverySettings
from harness.config.acceptance_rules import AcceptanceRule
from harness.config.errors import RunError, SettingError
from harness.config.failures import as_run_error, explained
from harness.config.settings import DecodingSettings, ModelSettings

MODEL = {"name": "m", "repository": "a/b"}
COMPLETE: dict[str, Any] = {
    "model": MODEL,
    "draft": {"name": "none"},
    "decoding": {"temperature": 1},
    "placement": {},
    "prompts": {"name": "p", "file": "p.txt"},
    "results": {"file": "r.csv"},
}


def test_a_complete_mapping_becomes_settings() -> None:
    settings = from_config(LatencySettings, {**COMPLETE, "seed": 2**63 - 1})
    assert settings.draft is None
    assert settings.seed == 2**63 - 1
    assert settings.decoding.temperature == 1.0
    assert isinstance(settings.decoding.temperature, float)
    assert settings.model == ModelSettings(name="m", repository="a/b")


# What is changed of a complete mapping, and how its refusal begins.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": {"name": "m"}}, "model.repository: must be set"),
    ({"model": "7B"}, "model=7B: must be a group of settings"),
    ({"seed": 2**63}, f"seed={2**63}: must be below 2^63"),
]


def test_a_preset_of_ones_own_that_is_wrong_names_setting_rule_and_value() -> None:
    for changes, message in WRONG:
        with pytest.raises(SettingError) as caught:
            from_config(LatencySettings, {**COMPLETE, **changes})
        assert str(caught.value).startswith(message)


def test_a_wrong_word_in_a_list_is_named_alone() -> None:
    with pytest.raises(SettingError) as caught:
        from_config(RecoverySettings, {"samplings": ["top_k", "top_9"]})
    assert str(caught.value).startswith("samplings=top_9: each must be one of as_asked, ")


def test_lenience_is_lossy_and_googles_alone() -> None:
    assert not DecodingSettings(rule="google").lossy
    assert DecodingSettings(rule="google", lenience=0.9).lossy
    with pytest.raises(SettingError, match=r"decoding\.rule=google"):
        DecodingSettings(lenience=0.9)


class Honest(AcceptanceRule):
    lossless = True


class HonestWhenDrawn(Honest):
    lossless_greedily: ClassVar[bool | None] = False


def test_a_model_is_known_by_the_name_that_a_server_has_for_it() -> None:
    for served, is_it in [
        ("tiny.gguf", True),
        ("/models/Tiny.gguf", True),
        ("m (org/Tiny-1.1B)", True),
        ("m", False),
        ("tiny_draft.gguf", False),
        ("tiny-1.1b-q4_k_m.gguf", False),
    ]:
        assert ModelSettings(name="tiny", repository="org/Tiny-1.1B").is_served_as(served) == is_it


@pytest.mark.parametrize(
    ("rule", "greedily", "drawn"),
    [(AcceptanceRule(), False, False), (Honest(), True, True), (HonestWhenDrawn(), False, True)],
)
def test_a_rule_is_greedily_what_it_is_otherwise_unless_it_says_so(
    rule: AcceptanceRule, greedily: bool, drawn: bool
) -> None:
    assert rule.is_lossless(0.0) is greedily
    assert rule.is_lossless(0.7) is drawn


@pytest.mark.parametrize("asked", [math.nan, 1.5, -0.1, (), (0.5, 2.0)])
def test_a_rate_is_a_probability(asked: Any) -> None:
    with pytest.raises(SettingError, match=r"must be in \[0, 1\]"):
        DecodingSettings(synthetic_acceptance=asked)


# As torch and others raise them.
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.64 GiB of which 1.20 GiB is "
    "free. Including non-PyTorch memory, this process has 22.43 GiB memory in use."
)
ERROR_802 = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error 802: system not yet initialized"
)
DISK_FULL = "Error while serializing: I/O error: No space left on device (os error 28)"


def said(exception: BaseException) -> str:
    error = as_run_error(exception)
    assert error is not None
    assert len(str(error).splitlines()) <= 2
    return str(error)


def test_a_known_failure_is_said_in_a_line_or_two() -> None:
    for exception, words in [
        (
            torch.OutOfMemoryError(OUT_OF_MEMORY),
            "out of GPU memory on GPU 1: 2.00 GiB wanted, 1.20 GiB of 23.64 GiB free\n",
        ),
        (torch.OutOfMemoryError(OUT_OF_MEMORY), "batch_size"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), "out of GPU memory\n"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out of GPU memory"),
        (MemoryError(), "out of main memory, "),
        (RuntimeError(ERROR_802), "sudo systemctl start nvidia-fabricmanager"),
        (RuntimeError(ERROR_802), "machine-install.sh"),
        (
            RuntimeError("The NVIDIA driver on your system is too old (found 1)"),
            "driver is too old",
        ),
        (RuntimeError("CUDA error: no kernel image is available"), "does not support this GPU"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/b"), "the disk is full: /a/b"),
        (RuntimeError(DISK_FULL), f"the disk is full: {DISK_FULL}"),
        (RunError("as it is"), "as it is"),
    ]:
        assert words in said(exception)


def test_main_memory_exhausted_for_real() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**15, dtype=torch.uint8)
    assert said(raised.value).startswith("out of main memory: 1000000.0 GB wanted, ")


def test_unknown_failures_stay_what_they_are() -> None:
    for exception in [
        ValueError("a bug"),
        RuntimeError("shape mismatch"),
        OSError(errno.ENOENT, "absent"),
        KeyError("802"),
    ]:
        assert as_run_error(exception) is None


@pytest.mark.gpu
def test_gpu_out_of_memory_for_real() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(10**14, dtype=torch.uint8, device="cuda")
    assert "on GPU 0: " in said(raised.value)
    assert "wanted" in said(raised.value)


def test_an_interruption_behind_an_error_of_a_library_is_what_is_raised() -> None:
    """A signal while weights load came out of torch as "trying to pop from empty mode stack"."""
    settings = ModelSettings(name="tiny", repository="tiny")
    error = RuntimeError("trying to pop from empty mode stack")
    # As Python sets it for an error that is raised while another one is handled.
    error.__context__ = ValueError()
    error.__context__.__context__ = interruption = KeyboardInterrupt("stopped by SIGTERM")
    assert explained(error, "model", settings) is interruption


def test_a_repository_without_a_file_was_reached() -> None:
    settings = ModelSettings(name="a/b", repository="a/b")
    missing = OSError("a/b does not appear to have a file named config.json. Checkout ...")
    kind = type("EntryNotFoundError", (HfHubHTTPError,), {"__init__": lambda _: None})
    missing.__cause__ = kind()
    error = explained(missing, "model", settings)
    assert "model: a/b cannot be loaded: a/b does not appear to have a file" in str(error)
