"""What follows from what a row of a table states: bytes of weights, bandwidth, tokens of a short answer."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

from harness.config.gpus import known_gpu, known_gpus
from harness.config.sizes import least_parameters
from harness.results.claims.identities import SHORT_ANSWER
from harness.results.claims.stated import Printed, Stated

# Bits of a weight by its type's name; fewer where nothing says more.
_BITS = (
    (4, r"(fp|int|q|w)_?4|4.?bit|awq|gptq"),
    (8, r"(fp|int|q|w)_?8|8.?bit"),
    (16, r"(f|fp|float)_?(16|32)|(16|32).?bit|half"),
)
_LEAST_BITS = 1.5
# What `device` may hold beside a count.
_NAMES_OF_DEVICES = re.compile(
    r"\b(?:(?:rtx|gtx|rx|arc|radeon|geforce|quadro|tesla|pro|w)\s?)+[a-z]?\d+\w*|\b(?!x|tp|dp|pp)[a-z]{1,2}\d+\w*|\b\d+\s?(?:gi?b|w)\b",
    re.IGNORECASE,
)
_NUMBER_OF_DEVICES = re.compile(
    r"^\W*(\d+)\s*[×x*]?\s*(?=[\w#])|[×x*]\s*(\d+)|\b(?:tp|dp|pp)\W?(\d+)|(\d+)[\s-]*(?:gpus?|cards|devices)\b",
    re.IGNORECASE,
)
# Names of machines with any number of devices.
_SEVERAL = re.compile(r"\b(dgx|hgx|node|nodes|pod|cluster|server)\b|nvl\s?\d\d", re.IGNORECASE)


def completed(row: Stated) -> Stated:
    """The row with what follows from its settings: gigabytes of weights, bandwidth, and tokens of a short answer."""
    numbers = {
        "max_new_tokens": Printed(SHORT_ANSWER, SHORT_ANSWER, ""),
        "thousand": Printed(1000, 1000, "1000"),
        **row.numbers,
    }
    if "batch_size" in numbers:
        low, high, text, _ = numbers["batch_size"]
        numbers["thousand_batch_size"] = Printed(1000 * low, 1000 * high, text)
    device = row.settings.get("devices", "")
    parameters = _least_parameters(row.settings.get("model", "")) if device else None
    rates = _bandwidths(device)
    if parameters is not None and rates and not _SEVERAL.search(device):
        dtype = row.settings.get("regular_dtype", row.settings.get("dtype", ""))
        precision = f"{dtype} {row.settings['model']}".lower()
        bits = next((bits for bits, pattern in _BITS if re.search(pattern, precision)), _LEAST_BITS)
        num_devices = _num_devices(row)
        if num_devices is None:
            numbers["of several"] = Printed(1, 1, "")
        rate = max(rates) * (num_devices or 1)
        size = parameters * bits / 8e9
        numbers["gigabytes"] = Printed(size, size, f"{size:.3g}")
        numbers["bandwidth"] = Printed(rate, rate, f"{rate:g}")
    return replace(row, numbers=numbers)


@functools.cache
def _least_parameters(model: str) -> float | None:
    return least_parameters(model)


@functools.cache
def _bandwidths(device: str) -> tuple[float, ...]:
    """Of the device, or of all that have its name: `H100` may be any of them."""
    known = known_gpu(device)
    named = [gpu for gpu in known_gpus() if re.search(rf"{gpu.name.split()[0]}\b", device)]
    return tuple(gpu.bandwidth_gb_s for gpu in ([known] if known else named))


def _num_devices(row: Stated) -> float | None:
    """How many devices there are; None where nothing says so."""
    stated = [
        row.numbers[name].high for name in ("num_devices", "tensor_parallel") if name in row.numbers
    ]
    # The numbers of a GPU's name count nothing: `RTX 4090`, `MI300X`, `80GB`.
    text = _NAMES_OF_DEVICES.sub("#", row.settings.get("devices", ""))
    for count in _NUMBER_OF_DEVICES.finditer(text):
        stated.append(float(next(filter(None, count.groups()))))
    if re.search(r"\b(single|one)\b", text, re.IGNORECASE):
        stated.append(1)
    return max(stated, default=None)
