"""setup.sh, machine-install.sh and collect_gpu_wheels.sh, run for real in a copy of the tree.

Nothing is fetched: where setup.sh would have pip install, a stand-in for pip writes down that it was called.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from wording import mentions

ROOT = Path(__file__).parents[1]
# Programs that the scripts call, for a PATH that holds nothing else.
TOOLS = (
    "apt-cache awk bash cat dirname env grep id mv readlink rm sed sleep sort tail uname".split()
)

Source = Callable[..., subprocess.CompletedProcess[str]]

PIP = """
import os, pathlib, sys, time
tree = pathlib.Path(sys.prefix).parent
if sys.argv[1] == "config":
    told = tree / "pip-config"
    print(told.read_text() if told.exists() else "global.index-url='https://some'")
    sys.exit()
with open(tree / "pip-calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
if (tree / "pip-waits").exists():
    print("Collecting torch", flush=True)
    time.sleep(1)
if (tree / "pip-fails").exists():
    sys.exit("no space left on device")
print("Successfully installed a lot of packages")
"""


def run(
    *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    ours = ("HARNESS_", "VIRTUAL_ENV")
    others = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    words = [str(word) for word in command]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(words, cwd=cwd, env=others | dict(env or {}), **streams)


def executable(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def tools(directory: Path, *leave_out: str) -> Path:
    """A directory with links to the tools that the scripts call, to be all of PATH."""
    directory.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found and name not in leave_out:
            (directory / name).symlink_to(found)
    return directory


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that setup.sh reads, in a directory whose name needs quoting."""
    copy = tmp_path / "a tree"
    copy.mkdir()
    for name in ["setup.sh", "machine-install.sh", "pyproject.toml", "constraints.txt"]:
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture
def prepared(tree: Path) -> Path:
    """The tree with an environment that an interrupted run left: Python and pip are there, packages are not."""
    made = run(sys.executable, "-m", "venv", "--without-pip", tree / ".venv")
    assert made.returncode == 0, made.stderr
    (packages,) = (tree / ".venv").glob("lib/python*/site-packages")
    (packages / "pip").mkdir()
    (packages / "pip" / "__init__.py").touch()
    (packages / "pip" / "__main__.py").write_text(PIP, encoding="utf-8")
    return tree


def pip_calls(tree: Path) -> int:
    calls = tree / "pip-calls"
    return len(calls.read_text(encoding="utf-8").splitlines()) if calls.exists() else 0


@pytest.fixture(params=["bash", "zsh"])
def source(request: pytest.FixtureRequest) -> Source:
    """Runs commands in a shell without start-up files, with `$SETUP` and `$TREE` set."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")

    def sourced(tree: Path, commands: str, **env: str) -> subprocess.CompletedProcess[str]:
        options = ["--norc", "--noprofile"] if shell == "bash" else ["-f"]
        places = {"SETUP": str(tree / "setup.sh"), "TREE": str(tree)}
        return run(shell, *options, "-c", commands, cwd=tree.parent, env=places | env)

    return sourced


def test_sourced_again_from_anywhere_installs_once_and_leaves_the_environment_active(
    prepared: Path, source: Source
) -> None:
    python = str(prepared / ".venv/bin/python")
    shown = source(prepared, '. "$SETUP" && cd "$TREE" && . ./setup.sh && command -v python && pwd')
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines() == [python, str(prepared)]
    again = source(prepared, '. "$SETUP" && command -v python')
    assert (again.stdout.strip(), again.stderr) == (python, "")
    assert pip_calls(prepared) == 1


def test_the_shell_is_left_as_it_was(prepared: Path, source: Source) -> None:
    """Options, functions, variables and positional parameters, but for what every activation sets."""
    state = """
        state() {
            set +o
            if [ -n "${ZSH_VERSION-}" ]; then eval 'print -l "${(@ok)parameters}" "${(@ok)functions}"'
            else compgen -v; compgen -A function; fi
        }
        set -eu
        set -- one two
        state >"$TREE/before"
        . "$SETUP"
        state >"$TREE/after"
        echo "$*"
    """
    shown = source(prepared, state)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip() == "one two"
    before, after = (
        set((prepared / name).read_text().splitlines()) for name in ("before", "after")
    )
    assert before <= after
    activation = {"deactivate", "VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "PS1"}
    assert {name for name in after - before if not name.startswith("_OLD_VIRTUAL")} <= activation


@pytest.mark.parametrize(("cuda", "warns"), [("12.8", True), ("13.0", False)])
def test_a_driver_that_is_older_than_the_torch_is_noticed_before_it_is_fetched(
    prepared: Path, tmp_path: Path, cuda: str, warns: bool
) -> None:
    executable(tmp_path / "nvidia-smi", f"#!/bin/sh\necho '| CUDA Version: {cuda}     |'\n")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    shown = run("bash", prepared / "setup.sh", env={"PATH": path, "PIP_EXTRA_INDEX_URL": ""})
    assert shown.returncode == 0, shown.stderr
    assert ("supports CUDA 12.8, and pip's torch needs 13.0" in shown.stderr) == warns
    assert ("PIP_EXTRA_INDEX_URL=" in shown.stderr) == warns


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_a_change_of_the_dependencies_installs_again(prepared: Path, changed: str) -> None:
    run("bash", prepared / "setup.sh")
    with (prepared / changed).open("a", encoding="utf-8") as file:
        file.write("# another version\n")
    run("bash", prepared / "setup.sh")
    assert pip_calls(prepared) == 2


def test_a_failed_installation_is_told_and_mended_by_the_next_run(
    prepared: Path, source: Source
) -> None:
    (prepared / "pip-fails").touch()
    failed = source(prepared, '. "$SETUP"; echo "status $?, active ${VIRTUAL_ENV-no}"')
    assert failed.stdout.strip() == "status 1, active no"
    assert "no space left on device" in failed.stderr

    (prepared / "pip-fails").unlink()
    mended = source(prepared, '. "$SETUP" && command -v python')
    assert mended.stdout.strip() == str(prepared / ".venv/bin/python")
    assert pip_calls(prepared) == 2


def test_a_long_installation_shows_where_it_is(prepared: Path) -> None:
    pip = prepared / "pip-waits"
    pip.touch()
    shown = run("bash", prepared / "setup.sh", env={"HARNESS_REPORT_S": "0.1"})
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"installing for \d+ s: Collecting torch$", shown.stderr, re.MULTILINE)


def test_uv_installs_where_it_is_there_with_what_pip_was_told(
    prepared: Path, tmp_path: Path
) -> None:
    told = "global.find-links='/wheels'\nglobal.extra-index-url='https://a https://b'\n"
    (prepared / "pip-config").write_text(told)
    directory = tmp_path / "with uv"
    directory.mkdir()
    executable(directory / "uv", f'#!/bin/sh\necho "$*" >"{tmp_path}/uv-call"\n')
    path = f"{directory}{os.pathsep}{os.environ['PATH']}"
    shown = run("bash", prepared / "setup.sh", env={"PATH": path})
    assert shown.returncode == 0, shown.stderr
    call = (tmp_path / "uv-call").read_text()
    assert "--extra-index-url https://a --extra-index-url https://b --find-links /wheels" in call
    assert "--constraint constraints.txt --editable .[dev]" in call
    assert pip_calls(prepared) == 0


def test_an_environment_that_was_moved_is_made_again(prepared: Path) -> None:
    run("bash", prepared / "setup.sh")
    moved = prepared.rename(prepared.with_name("elsewhere"))
    # The new environment has the real pip, which is kept from the network and so fails.
    shown = run(
        "bash", moved / "setup.sh", env={"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    )
    assert "making .venv with Python" in shown.stderr
    assert shown.returncode == 1
    assert str(moved) in (moved / ".venv/bin/activate").read_text(encoding="utf-8")
    assert not (moved / ".venv/installed").exists()


@pytest.mark.parametrize(
    ("python", "said"),
    [
        pytest.param(None, "no python3 that runs", id="none"),
        pytest.param("echo 3.9", "python3 is 3.9", id="too old"),
        pytest.param("echo 3.15", "python3 is 3.15", id="too new"),
        pytest.param(
            'case "$2" in *ensurepip*) exit 1 ;; esac; echo 3.12',
            "the venv module is missing",
            id="no venv",
        ),
    ],
)
def test_without_a_python_it_says_what_is_missing(
    tree: Path, python: str | None, said: str
) -> None:
    path = tools(tree.parent / "tools")
    if python is not None:
        executable(path / "python3", f"#!{shutil.which('bash')}\n{python}\n")
    shown = run("bash", tree / "setup.sh", env={"PATH": str(path)})
    assert shown.returncode == 1
    assert said in shown.stderr
    assert "machine-install.sh" in shown.stderr
    assert not (tree / ".venv").exists()


def test_uv_fetches_a_python_where_there_is_none_that_will_do(tree: Path) -> None:
    path = tools(tree.parent / "tools")
    executable(path / "python3", f"#!{shutil.which('bash')}\necho 3.15\n")
    uv = f"""#!{shutil.which("bash")}
        echo "$*" >>"{tree}/uv-calls"
        case "$2" in find) echo "{tree}/fetched" ;; esac
    """
    executable(path / "uv", uv)
    # The interpreter that was fetched makes no environment here, which ends the script.
    executable(tree / "fetched", f"#!{shutil.which('bash')}\necho Python 3.13.9\ntest $1 != -m\n")
    shown = run("bash", tree / "setup.sh", env={"PATH": str(path)})
    assert shown.returncode == 1
    assert "fetching Python 3.13 with uv: python3 is 3.15 cannot be used" in shown.stderr
    assert "making .venv with Python 3.13.9" in shown.stderr
    calls = (tree / "uv-calls").read_text(encoding="utf-8").splitlines()
    assert calls == ["python install --quiet 3.13", "python find --managed-python 3.13"]


@pytest.mark.parametrize(
    ("has_driver", "configured", "of_cpus"),
    [(False, "", True), (True, "", False), (False, "global.find-links='/opt/wheels'", False)],
)
def test_without_a_driver_torch_is_taken_without_cuda(
    prepared: Path, has_driver: bool, configured: str, of_cpus: bool
) -> None:
    path = tools(prepared.parent / "tools")
    if has_driver:
        executable(path / "nvidia-smi", f"#!{shutil.which('bash')}\necho 'CUDA Version: 13.0 '\n")
    (prepared / "pip-config").write_text(configured, encoding="utf-8")
    shown = run("bash", prepared / "setup.sh", env={"PATH": str(path)})
    assert shown.returncode == 0, shown.stderr
    *_, installing = (prepared / "pip-calls").read_text(encoding="utf-8").splitlines()
    on_linux = sys.platform == "linux"
    assert (
        ("--extra-index-url" in installing)
        == ("CPU build" in shown.stderr)
        == (of_cpus and on_linux)
    )


# --- machine-install.sh -----------------------------------------------------------------------------------------------


class Machine:
    """A machine made of stand-ins: apt that offers what is asked of it, PCI devices, a driver, systemd."""

    def __init__(self, directory: Path) -> None:
        self.path = tools(directory / "tools", "apt-cache")
        self.devices = directory / "devices"
        self.devices.mkdir()
        self.systemd = directory / "systemd"
        self.systemd.mkdir()
        self.script = directory / "a tree/machine-install.sh"
        # A real interpreter with venv, and git.
        for name, real in [("python3", sys.executable), ("git", shutil.which("git"))]:
            self.command(name, f'exec "{real}" "$@"')
        # What changes the machine must not run in a dry run.
        self.command("sudo", 'exec "$@"')
        for name in ["gcc", "g++"]:
            self.command(name, "exit 0")
        for name in ["apt-get", "modprobe", "ubuntu-drivers"]:
            self.command(name, f'echo "{name} $*" >>"{directory}/changes"')
        self.changes = directory / "changes"
        self.command("apt-cache", 'if [ "$1" = policy ]; then echo "  Candidate: 1.0"; fi')
        self.command("dpkg-query", "exit 1")
        self.command("systemctl", "exit 3")

    def command(self, name: str, body: str) -> None:
        executable(self.path / name, f"#!/usr/bin/env bash\n{body}\n")

    def device(self, address: str, pci_class: str) -> None:
        directory = self.devices / address
        directory.mkdir()
        (directory / "vendor").write_text("0x10de\n", encoding="utf-8")
        (directory / "class").write_text(f"{pci_class}\n", encoding="utf-8")

    def driver(self, version: str, cuda: str, name: str, count: int = 8) -> None:
        rows = "\\n".join([f"{version}, {name}"] * count)
        header = f"| NVIDIA-SMI {version}  Driver Version: {version}  CUDA Version: {cuda}     |"
        body = f"if [ $# -gt 0 ]; then echo -e '{rows}'; else echo '{header}'; fi"
        self.command("nvidia-smi", body)

    def install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        places = {
            "PATH": str(self.path),
            "HARNESS_PCI_DEVICES": str(self.devices),
            "HARNESS_SYSTEMD": str(self.systemd),
        }
        return run(self.script, *arguments, env=places)


@pytest.fixture
def machine(tree: Path) -> Machine:
    return Machine(tree.parent)


GPU = "0x030200"
NVSWITCH = "0x068000"


MADISON = """cat <<'E'
nvidia-fabricmanager-580 | 580.95.05-1 | somewhere Packages
nvidia-fabricmanager-580 | 580.95.050-1 | somewhere Packages
nvidia-fabricmanager | 580.65.06-0ubuntu1 | somewhere Packages
E"""
OLD_PYTHON = (
    'case "$2" in python3) echo "  Candidate: 3.10.6-1" ;; '
    'python3.12-venv) echo "  Candidate: 3.12.3" ;; *) echo "  Candidate: (none)" ;; esac'
)


def without_python(machine: Machine) -> None:
    (machine.path / "python3").unlink()
    machine.command("apt-cache", OLD_PYTHON)


def with_a_driver(machine: Machine, cuda: str) -> None:
    machine.device("0000:01:00.0", GPU)
    machine.driver("570.133.20", cuda, "NVIDIA A40", count=2)


def with_switches(machine: Machine, driver: str) -> None:
    machine.device("0000:01:00.0", GPU)
    machine.device("0000:07:00.0", NVSWITCH)
    machine.driver(driver, "13.0", "NVIDIA H100 80GB HBM3")
    machine.command("apt-cache", MADISON)


def with_boards(machine: Machine, name: str) -> None:
    machine.driver("580.95.05", "13.0", name)
    machine.command("apt-cache", MADISON)


COMPILER = f"gcc g++ libc6-dev python3.{sys.version_info.minor}-dev"
MANAGER = "install --allow-downgrades nvidia-fabricmanager"
# What a machine is like; the exit code there; what is said, and after ! what is not.
MACHINES: dict[str, tuple[Callable[[Machine], None], int, str]] = {
    "no GPU": (lambda m: None, 0, "no NVIDIA GPU; !  + "),
    "no apt": (lambda m: (m.path / "apt-get").unlink(), 1, "no apt-get; !  + "),
    "no driver": (lambda m: m.device("1", GPU), 1, "1 NVIDIA GPU(s), but no driver; !  + "),
    "no Python": (without_python, 0, "python3.12 python3.12-venv python3.12-dev"),
    "no C compiler": (lambda m: m.command("gcc", "exit 1"), 0, COMPILER),
    "no C++ compiler": (lambda m: m.command("g++", "exit 1"), 0, COMPILER),
    # An older driver may be kept with wheels of its own CUDA version.
    "old CUDA": (lambda m: with_a_driver(m, "12.8"), 1, "2 × NVIDIA A40; PIP_EXTRA_INDEX_URL="),
    "same CUDA": (lambda m: with_a_driver(m, "13.0"), 0, "no NVSwitch; !PIP_EXTRA_INDEX_URL="),
    "newer CUDA": (lambda m: with_a_driver(m, "13.2"), 0, "no NVSwitch; !PIP_EXTRA_INDEX_URL="),
    "switches": (
        lambda m: with_switches(m, "580.65.06"),
        0,
        f"{MANAGER}=580.65.06-0ubuntu1; systemctl enable nvidia-fabricmanager; !nvlsm",
    ),
    "no manager": (lambda m: with_switches(m, "580.95.0"), 1, f"version 580.95.0; !{MANAGER}"),
    "B200": (lambda m: with_boards(m, "NVIDIA B200"), 0, f"nvlsm; {MANAGER}-580=580.95.05-1"),
    "GB200": (lambda m: with_boards(m, "NVIDIA GB200"), 0, f"!nvlsm; !{MANAGER}"),
}


@pytest.mark.parametrize(("prepare", "code", "words"), MACHINES.values(), ids=MACHINES)
def test_machine_install_knows_what_to_do(
    machine: Machine, prepare: Callable[[Machine], None], code: int, words: str
) -> None:
    prepare(machine)
    shown = machine.install("--dry-run")
    printed = shown.stdout + shown.stderr
    assert shown.returncode == code, printed
    for word in words.split("; "):
        assert (word.removeprefix("!") in printed) != word.startswith("!"), word
    assert not machine.changes.exists()


def test_machine_install_offers_a_driver_when_asked(machine: Machine) -> None:
    machine.device("0000:01:00.0", GPU)
    shown = machine.install("--dry-run", "--driver")
    assert shown.returncode == 0, shown.stdout
    assert "ubuntu-drivers install --gpgpu" in shown.stdout
    assert machine.install("--drivers").returncode == 2
    assert not machine.changes.exists()


def test_machine_install_compiles_with_the_headers_of_the_python_it_found(
    machine: Machine, tmp_path: Path
) -> None:
    called = tmp_path / "called"
    machine.command("gcc", f'echo "$*" >"{called}"; [ "$(cat)" = "#include <Python.h>" ]')
    assert machine.install("--dry-run").returncode == 0
    assert f"-I{sysconfig.get_path('include')} " in called.read_text(encoding="utf-8")


def test_machine_install_says_when_the_compiler_still_does_not_work(machine: Machine) -> None:
    machine.command("gcc", "exit 1")
    shown = machine.install()
    assert shown.returncode == 1
    assert mentions(shown.stdout, "cannot compile", "Python.h")
    assert "gcc g++ libc6-dev" in machine.changes.read_text(encoding="utf-8")


def test_machine_install_leaves_a_running_fabric_manager_alone(machine: Machine) -> None:
    with_switches(machine, "580.95.05")
    machine.command("nv-fabricmanager", 'echo "Fabric Manager version is : 580.95.05"')
    machine.command("systemctl", "exit 0")
    shown = machine.install()
    assert shown.returncode == 0, shown.stdout
    assert "fabric manager 580.95.05: running" in shown.stdout
    assert not machine.changes.exists()


# --- collect_gpu_wheels.sh --------------------------------------------------------------------------------------------


@pytest.fixture
def collect(tmp_path: Path) -> Source:
    """Runs the script with a Python that only writes down how pip was called, in `pip-calls`."""
    python = executable(
        tmp_path / "python",
        f"""#!/usr/bin/env bash
if [ "$1" = -c ]; then echo 3.11; exit; fi
echo "$*" >>"{tmp_path}/pip-calls"
touch "{tmp_path}/wheels/$3.whl"
""",
    )
    script = ROOT / "scripts/collect_gpu_wheels.sh"
    return lambda *arguments: run(
        script, *arguments, cwd=tmp_path, env={"HARNESS_PYTHON": str(python)}
    )


def test_wheels_are_downloaded_with_the_pinned_versions_for_the_python_of_the_image(
    collect: Source, tmp_path: Path
) -> None:
    shown = collect("--python", "3.12", "--machine", "aarch64", "wheels")
    assert shown.returncode == 0, shown.stderr
    download, build = (tmp_path / "pip-calls").read_text(encoding="utf-8").splitlines()
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    words = download.split()
    assert {word for word in words if "==" in word} <= set(pins)
    assert {"--no-deps", "--only-binary", "manylinux_2_28_aarch64"} <= set(words)
    assert words[words.index("--python-version") + 1] == "3.12"
    assert any(word.startswith("hydra-core==") for word in words)
    assert not any(word.startswith(("torch==", "antlr4")) for word in words)
    assert build.startswith("-m pip wheel --no-deps")
    assert "antlr4-python3-runtime==" in build
    assert "2 wheels for Python 3.12 on aarch64" in shown.stdout


def test_bitsandbytes_keeps_the_libraries_of_one_cuda_and_of_cpus(tmp_path: Path) -> None:
    names = ["cpu.so", "cuda118.so", "cuda130.so", "rocm64.so"]
    libraries = [f"bitsandbytes/libbitsandbytes_{name}" for name in names]
    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    record = "bitsandbytes-1.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*libraries, "bitsandbytes/__init__.py"]:
            archive.writestr(name, "content")
        archive.writestr(record, "".join(f"{name},sha256=x,7\n" for name in libraries))
    subprocess.run([sys.executable, ROOT / "scripts/slim_wheel.py", wheel], check=True)
    kept = {libraries[0], libraries[2]}
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == {*kept, "bitsandbytes/__init__.py", record}
        lines = archive.read(record).decode().splitlines()
    assert {line.partition(",")[0] for line in lines} == kept


def test_wheels_of_chosen_packages_alone(collect: Source, tmp_path: Path) -> None:
    assert collect("wheels", "rich").returncode == 0
    (download,) = (tmp_path / "pip-calls").read_text(encoding="utf-8").splitlines()
    assert [word.partition("==")[0] for word in download.split() if "==" in word] == ["rich"]
    assert "--python-version 3.11" in download


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--pyhton", "3.12", "wheels"], 2, "--pyhton: no such option"),
        (["--python", "twelve", "wheels"], 2, "must be like 3.12"),
        (["wheels", "no-such-package"], 1, "constraints.txt pins no no-such-package"),
    ],
)
def test_wheels_are_refused_in_one_line(
    collect: Source, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    shown = collect(*arguments)
    assert shown.returncode == code
    assert said in shown.stderr
    assert len(shown.stderr.splitlines()) == 1
    assert not (tmp_path / "pip-calls").exists()
