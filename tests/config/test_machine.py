"""How many cores may be used, who shares them, and which GPUs there are."""

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from harness.config import installation, machine
from harness.config.gpus import known_gpu


def cgroup(directory: Path, groups: str, files: dict[str, str]) -> dict[str, Path]:
    """A cgroup file system; the arguments of `cpu_quota` for it."""
    for name, text in files.items():
        file = directory / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    (directory / "groups").write_text(groups)
    return {"root": directory / "fs", "groups": directory / "groups"}


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        pytest.param("0::/\n", {"cpu.max": "150000 100000"}, 1.5, id="container"),
        pytest.param("0::/\n", {"cpu.max": "max 100000"}, None, id="unlimited"),
        pytest.param("0::/\n", {}, None, id="root group"),
        pytest.param(
            "0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 50000", "cpu.max": "max 100000"}, 4.0,
            id="limit of an outer group",
        ),
        pytest.param(
            "3:memory:/m\n2:cpu,cpuacct:/docker/x\n0::/\n",
            {
                "cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000",
                "cpu/m/cpu.cfs_quota_us": "50000", "cpu/m/cpu.cfs_period_us": "100000",
            }, 2.5,
            id="version 1",
        ),
        pytest.param("0::/a:b\n", {"a:b/cpu.max": "150000 100000"}, 1.5, id="colon"),
    ],
)  # fmt: skip
def test_the_quota_is_that_of_the_tightest_group(
    tmp_path: Path, groups: str, files: dict[str, str], quota: float | None
) -> None:
    assert machine.cpu_quota(**cgroup(tmp_path, groups, files)) == quota


def test_processes_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_usable_cores", lambda: 16)
    for typed, num_processes, expected in (
        (None, 4, "4"),
        (None, 32, "1"),
        (None, 1, None),
        ("3", 4, "3"),
    ):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if typed is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", typed)
        machine.share_cores(num_processes)
        assert os.environ.get("OMP_NUM_THREADS") == expected


def test_cores_that_other_programs_keep_busy_are_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_usable_cores", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5}, raising=False)
    for busy, num_free in (([0, 3, 2, 99, 99, 0], 4), ([100, 0, 0, 0, 0, 97], 2), ([100] * 6, 1)):
        monkeypatch.setattr(psutil, "cpu_percent", lambda *_, busy=busy, **__: busy)
        assert machine.num_free_cores() == num_free


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        ('{"url": "file:///my%20files/specharness-0.3.0.whl"}', "'/my files/specharness-0.3.0.whl[gguf]'"),
        (
            '{"url": "https://h/o/r.git", "vcs_info": {"vcs": "git", "commit_id": "1a2b"}}',
            "'specharness[gguf] @ git+https://h/o/r.git@1a2b'",
        ),
        ('{"url": "https://h/specharness-1.whl"}', "'specharness[gguf] @ https://h/specharness-1.whl'"),
        (None, "'WHEEL_FILE[gguf]'"),
    ],
)  # fmt: skip
def test_extras_come_from_where_the_package_did(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, noted: str | None, command: str
) -> None:
    root = Path(__file__).parents[2]
    assert installation.install_command("gguf") == f"pip install -e '{root}[gguf]'"
    monkeypatch.setattr(installation, "PACKAGE", tmp_path / "harness")
    distribution = SimpleNamespace(read_text=lambda name: noted)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)
    assert installation.install_command("gguf") == f"pip install {command}"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [("processor\t: 0\nmodel name\t: AMD EPYC\n", "AMD EPYC"), ("", "x86"), (None, "x86")],
)
def test_a_processor_has_its_model_name_or_else_its_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpuinfo: str | None, name: str
) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.processor", lambda: "x86")
    assert machine.cpu_name.__wrapped__() == name


@pytest.mark.parametrize(
    ("name", "cores", "expected"),
    [
        ("Apple M4 Max", "16", "Apple M4 Max, 16 cores"),
        ("Apple M4 Max", None, "Apple M4 Max"),
        ("Intel(R) Core(TM) i9", "8", "Intel(R) Core(TM) i9"),
        (None, None, None),
    ],
)
def test_a_mac_has_its_processors_name_and_cores(
    monkeypatch: pytest.MonkeyPatch, name: str | None, cores: str | None, expected: str | None
) -> None:
    known = {"machdep.cpu.brand_string": name, "hw.physicalcpu": cores}
    monkeypatch.setattr(machine, "output_of", lambda command: known[command[-1]])
    assert machine._of_mac() == expected


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is remembered of this machine's GPUs, and nothing of what a test pretends stays."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine._all_gpus.cache_clear()
    yield
    machine._all_gpus.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_gpus_are_counted_without_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The driver's management library, with two GPUs.
    monkeypatch.setattr("pynvml.nvmlInit", lambda: None)
    monkeypatch.setattr("pynvml.nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr("pynvml.nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr("pynvml.nvmlDeviceGetName", lambda handle: f"NVIDIA H{handle}")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert machine.gpu_names() == ["NVIDIA H0", "NVIDIA H1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.gpu_names() == ["NVIDIA H1"]
    # For CUDA a negative index ends the list.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert machine.gpu_names() == []
    # So does the index of a GPU that is not there.
    for indices in ("1,-1,0", "1,2,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", indices)
        assert machine.gpu_names() == ["NVIDIA H1"]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("printed", "visible", "names"),
    [
        ("GPU A\nGPU B", None, ["GPU A", "GPU B"]),
        ("GPU A\nGPU B", "1", ["GPU B"]),
        # Nobody can name them, so that what is visible stands for itself, as the ids of GPUs do.
        (None, "1,GPU-7,MIG-8", ["1", "GPU-7", "MIG-8"]),
    ],
)
def test_without_its_library_a_driver_is_asked_by_torch(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    printed: str | None,
    visible: str | None,
    names: list[str],
) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(1)

    monkeypatch.setattr("pynvml.nvmlInit", fail)
    monkeypatch.setattr(machine, "_DRIVER", tmp_path)
    asked = []
    monkeypatch.setattr(machine, "output_of", lambda *given, **_: asked.append(given[1]) or printed)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpu_names() == names
    assert "CUDA_VISIBLE_DEVICES" not in asked[0]
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "absent")
    machine._all_gpus.cache_clear()
    assert machine._all_gpus() == []


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server"),
        ("NVIDIA RTX PRO 5000 Blackwell Generation Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("AMD Radeon RX 7900 XT", "RX 7900 XT"),
        ("AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", "Strix Halo"),
        ("Intel(R) Arc(TM) B580 Graphics", "Arc B580"),
        ("Apple M2 Ultra, 24 cores", "Apple M2 Ultra"),
        ("Apple M4 Max, 14 cores", "Apple M4 Max 14 cores"),
        ("Apple M4 Max, 16 cores", "Apple M4 Max 16 cores"),
        # Two speeds of memory have this name.
        ("Apple M5 Max, 18 cores", None),
    ],
)
def test_a_device_is_known_by_its_own_name(device: str, name: str | None) -> None:
    found = known_gpu(device)
    assert (found and found.name) == name
