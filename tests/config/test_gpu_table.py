"""The table of GPUs: each name that systems give is one row's."""

from __future__ import annotations

import re

import pytest

from harness.config.gpus import known_gpu, known_gpus


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        # An eighth of one has an eighth of its memory's speed.
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server"),
        ("NVIDIA RTX PRO 5000 Blackwell", "RTX PRO 5000"),
        ("NVIDIA RTX PRO 5000 Blackwell Generation Laptop GPU", None),
        ("NVIDIA RTX PRO 4500 Blackwell", "RTX PRO 4500"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti"),
        ("NVIDIA GeForce RTX 5070", "RTX 5070"),
        ("NVIDIA GeForce RTX 5060 Ti", "RTX 5060 Ti"),
        ("NVIDIA GeForce RTX 5060 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("AMD Radeon RX 7900 XT", "RX 7900 XT"),
        ("AMD Radeon RX 9070", "RX 9070"),
        ("AMD Radeon RX 9070 XT", "RX 9070 XT"),
        ("AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", "Strix Halo"),
        ("Intel(R) Arc(TM) B580 Graphics", "Arc B580"),
        ("Intel Arc Pro B60", "Arc Pro B60"),
        ("Apple M1, 8 cores", "Apple M1"),
        ("Apple M2 Ultra, 24 cores", "Apple M2 Ultra"),
        ("Apple M4 Max, 14 cores", "Apple M4 Max 14 cores"),
        ("Apple M4 Max, 16 cores", "Apple M4 Max 16 cores"),
        # Two speeds of memory have this name.
        ("Apple M5 Max, 18 cores", None),
        ("Apple M5, 10 cores", "Apple M5"),
    ],
)
def test_a_device_is_known_by_its_own_name(device: str, name: str | None) -> None:
    found = known_gpu(device)
    assert (found and found.name) == name


def test_no_two_rows_are_of_one_device() -> None:
    names = [gpu.name for gpu in known_gpus()]
    assert len(names) == len(set(names))
    assert {gpu.memory for gpu in known_gpus()} == {"own", "shared"}
    for gpu in known_gpus():
        assert re.compile(gpu.pattern)
        # Reading all of the memory takes 10 ms to 1 s.
        assert 1 < gpu.bandwidth_gb_s / gpu.memory_gb < 100
