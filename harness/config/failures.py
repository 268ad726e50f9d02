"""Explains exceptions of torch, CUDA, the hub and the file system in one or two lines."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import psutil

from harness.config.amounts import amount
from harness.config.errors import HarnessError, RunError, SettingError
from harness.config.installation import is_installed
from harness.config.settings import ModelSettings

# Explanations of CUDA's errors. A key is a regular expression that matches the error's message.
_CUDA = {
    r"802(?s:.*)system not yet initialized": (
        "CUDA error 802, system not yet initialized: this machine's NVSwitch needs the fabric"
        " manager\nstart it with `sudo systemctl start nvidia-fabricmanager`"
        " (machine-install.sh installs it)"
    ),
    r"driver version is insufficient|driver on your system is too old": (
        "the NVIDIA driver is too old for this build of torch (CUDA {cuda})\n"
        "update the driver (machine-install.sh says how), or install torch for an older CUDA"
    ),
    r"no kernel image is available": (
        "this build of torch ({torch}) does not support this GPU: install one that"
        " does\n(https://pytorch.org/get-started/locally)"
    ),
}
# In the texts below, `name` stands for the repository, `page` for its address on the hub, `line` for the first line of
# the exception, and `nor_here` for a note that there is no such directory here either (or for nothing).
_LOGIN = "log in with `hf auth login` (formerly `huggingface-cli login`) or set HF_TOKEN"
_ABSENT = "{name} has not been downloaded, and HF_HUB_OFFLINE forbids fetching{nor_here}"
_UNREACHABLE = (
    "{name} cannot be fetched, the hub is out of reach: check the network{nor_here}\n"
    "(what was downloaded before loads with HF_HUB_OFFLINE=1; a directory needs no network)"
)
_REFUSED = "the hub refuses {name}: {line}"
# Names of the classes of errors that the hub's clients raise if the hub is out of reach. `TransportError` is from httpx
# or its successor.
_UNREACHABLE_ERRORS = (
    "LocalEntryNotFoundError",
    "ConnectionError",
    "TimeoutError",
    "TransportError",
)
# Explanations of exceptions about a repository. A key is the name of the exception's class, or part of its message. The
# order matters: the first match decides.
_REPOSITORY = {
    # torch's own message advises to load the file with weights_only=False, which would run the code.
    "weights_only": (
        "{name} holds pickled code, which can run any code: fetch or convert it as safetensors"
    ),
    # The repository was reached, but lacks the file.
    "does not appear to have a file named": "{name} cannot be loaded: {line}",
    "GatedRepoError": (
        f"{{name}} is gated: ask for access at https://huggingface.co/{{page}}, then {_LOGIN}"
    ),
    "RepositoryNotFoundError": (
        f"{{name}} is not on the hub, or is private: check the name, or {_LOGIN}{{nor_here}}"
    ),
    "OfflineModeIsEnabled": _ABSENT,
    **dict.fromkeys(_UNREACHABLE_ERRORS, _UNREACHABLE),
    "HfHubHTTPError": _REFUSED,
    "SafetensorError": "a weights file of {name} is damaged ({line}): fetch it again",
    "does not recognize this architecture": (
        "transformers {transformers} does not know the architecture of {name}: "
        "pip install --upgrade transformers"
    ),
    "ignore_mismatched_sizes": (
        "the weights of {name} have other shapes than its configuration says"
    ),
}


def as_run_error(exception: BaseException) -> RunError | None:
    """Return an error with one or two lines for a known failure of this machine; None for any other exception.

    Known failures are exhausted memory, a full disk, a tokenizer library that panics, and CUDA that does not start or
    does not support the GPU. A RunError is returned as it is. The caller raises the result `from` the exception.
    """
    if isinstance(exception, RunError):
        return exception
    text = str(exception)
    # Recognised by name, because no module exports the class.
    if type(exception).__name__ == "PanicException":
        return RunError(f"the tokenizer's library panicked: {first_line(exception)}")
    # If torch is not imported, as in a run that only measures servers, the error cannot be torch's.
    torch: Any = sys.modules.get("torch")
    torch_error = None if torch is None else _of_torch(exception, torch)
    if torch_error is not None:
        return torch_error
    is_memory_error = re.search("can't allocate memory|not enough memory", text)
    if is_memory_error or isinstance(exception, MemoryError):
        wanted = re.search(r"tried to allocate (\d+) bytes", text)
        size = f": {amount(int(wanted[1]))} wanted" if wanted else ""
        free = amount(psutil.virtual_memory().available)
        return RunError(f"out of main memory{size}, {free} free")
    full_disk = isinstance(exception, OSError) and exception.errno == errno.ENOSPC
    if full_disk or os.strerror(errno.ENOSPC) in text:
        full = getattr(exception, "filename", None) or first_line(exception)
        return RunError(f"the disk is full: {full}\n(HF_HOME chooses where downloaded weights go)")
    return None


def _of_torch(exception: BaseException, torch: Any) -> RunError | None:
    """Return an error with one or two lines for a known failure of torch or its GPUs; None for any other exception."""
    text = str(exception)
    is_memory_error = re.search(r"CUDA.*out of memory|CUBLAS_STATUS_ALLOC", text)
    if is_memory_error or isinstance(exception, torch.OutOfMemoryError):
        wanted = re.search(r"Tried to allocate ([\d.]+ \wi?B)", text)
        free = re.search(
            r"GPU (\d+) has a total capacity of ([\d.]+ \wi?B) of which ([\d.]+ \wi?B) is free",
            text,
        )
        sizes = f": {wanted[1]} wanted" if wanted else ""
        if wanted and free:
            # ` on GPU 0: 2.00 GiB wanted, 1.20 GiB of 23.64 GiB free`
            sizes = f" on GPU {free[1]}: {wanted[1]} wanted, {free[3]} of {free[2]} free"
        settings = "a smaller batch_size, fewer decoding.max_new_tokens, model.quantization=4bit"
        return RunError(f"out of GPU memory{sizes}\nwhat helps: {settings}, more GPUs")
    for pattern, meaning in _CUDA.items():
        if re.search(pattern, text):
            return RunError(meaning.format(cuda=torch.version.cuda, torch=torch.__version__))
    return None


def explain(
    exception: BaseException,
    role: str,
    settings: ModelSettings,
    kind: Literal["model", "dataset"] = "model",
) -> HarnessError | None:
    """Return an error with one or two lines that explain why a repository cannot be read; None for an unknown failure.

    If the exception or one of its causes is a known failure of the machine (`as_run_error`), that is returned.

    Args:
        role: `model`, `draft`, or the setting that names the repository.
        settings: the model whose repository was read.
        kind: whether the repository contains a model or a data set.
    """
    chain = list(_chain(exception))
    for link in chain:
        machine_error = as_run_error(link)
        if machine_error is not None:
            return machine_error
    # Libraries raise general errors from the one that names the cause, so the classes of the whole chain are evidence.
    class_names = {ancestor.__name__ for link in chain for ancestor in type(link).__mro__}
    evidence = " ".join([*class_names, str(exception)])
    setting_error = _wrong_setting(evidence, role, settings)
    if setting_error is not None:
        return setting_error
    name = settings.repository
    meaning = next((meaning for sign, meaning in _REPOSITORY.items() if sign in evidence), None)
    # Those who read a repository have imported huggingface_hub already.
    if meaning == _UNREACHABLE and not Path(name).is_dir():
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            meaning = _ABSENT
    if meaning is None and isinstance(exception, OSError | ValueError | ImportError | RuntimeError):
        meaning = "{name} cannot be loaded: {line}"
    if meaning is None:
        return None
    page = f"datasets/{name}" if kind == "dataset" else name
    nor_here = ""
    # If the user typed the repository's name, perhaps with suffixes, a directory may have been meant. The name of a
    # preset differs from that of its repository.
    may_be_directory = kind == "model" and settings.name.startswith(name)
    if may_be_directory and not Path(name).is_dir():
        nor_here = f"; nor is there a directory {name} in {Path.cwd()}"
    line = first_line(exception)
    transformers_version = version("transformers") if is_installed("transformers") else None
    sentence = meaning.format(
        name=name, page=page, line=line, nor_here=nor_here, transformers=transformers_version
    )
    return RunError(f"{role}: {sentence}")


def explained(exception: Exception, role: str, settings: ModelSettings) -> BaseException:
    """Return the exception to raise in place of one that was raised when a repository was read.

    It is the first of these that exists: a KeyboardInterrupt in the exception's context; an explanation (`explain`),
    which is a HarnessError; the exception itself, which may be of any class.
    """
    underneath = exception.__context__
    while underneath is not None:
        # If Ctrl-C interrupts torch's stack of modes, torch raises an error about that stack.
        if isinstance(underneath, KeyboardInterrupt):
            return underneath
        underneath = underneath.__context__
    return explain(exception, role, settings) or exception


def _wrong_setting(evidence: str, role: str, settings: ModelSettings) -> SettingError | None:
    """Return the error for a wrong setting if that is the cause, otherwise None.

    Args:
        evidence: the names of the exceptions' classes, and the message, in one text.
    """
    name = settings.repository
    if "RevisionNotFoundError" in evidence:
        rule = f"must be a branch, a tag or a commit of {name}"
        return SettingError(f"{role}.revision", rule, settings.revision)
    if "HFValidationError" in evidence:
        rule = "must be a preset, a directory or a hub repository (owner/name)"
        return SettingError(role, rule, name)
    if "trust_remote_code" in evidence:
        rule = f"must be true to run the code that {name} brings; read it first"
        return SettingError(f"{role}.trust_remote_code", rule, settings.trust_remote_code)
    return None


def explain_configuration(
    exception: BaseException, role: str, settings: ModelSettings
) -> HarnessError:
    """Return an error that explains why a configuration cannot be used.

    Unlike `explain` it never returns None, because transformers may raise any exception for a damaged configuration.
    """
    error = explain(exception, role, settings)
    if error is not None:
        return error
    cause = " ".join(str(exception).split()) or type(exception).__name__
    if isinstance(exception, KeyError | AttributeError | TypeError):
        cause = f"{type(exception).__name__}: {cause}"
    unusable = f"the configuration of {settings.repository} cannot be used"
    return RunError(f"{role}: {unusable}: {cause[:250]}")


def first_line(exception: BaseException) -> str:
    """Return the first line of the message that is not empty; if there is none, the name of the exception's class."""
    lines = [line.strip() for line in str(exception).splitlines() if line.strip()]
    return lines[0] if lines else type(exception).__name__


def _chain(exception: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception and then those exceptions that a traceback would show above it."""
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:
        seen.add(id(exception))
        yield exception
        if exception.__cause__ is None and exception.__suppress_context__:
            return  # raised `from None`
        exception = exception.__cause__ or exception.__context__
