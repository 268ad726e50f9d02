"""The tables of flags against the programs themselves."""

from __future__ import annotations

import re
import subprocess

from harness.servers.startup import LLAMA_CPP, VLLM, Startup
from real_servers import llama_server, vllm_python

_FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w.-]*")


def missing(startup: Startup, flags: set[str]) -> set[str]:
    return flags - {*startup.speculation, *startup.switches, *startup.refused}


def test_every_flag_of_llama_server_that_is_about_speculation_is_in_the_table() -> None:
    shown = subprocess.run([llama_server(), "--help"], capture_output=True, text=True).stdout
    section = shown.partition("----- speculative params")[2].partition("\n-----")[0]
    flags = flags_of(section)
    flags |= {name for name in flags_of(shown) if re.search("spec-|-spec$|draft|lookup", name)}
    assert len(flags) > 80
    assert not missing(LLAMA_CPP, flags)
    variables = set(re.findall(r"LLAMA_ARG_\w*(?:SPEC|DRAFT)\w*", shown))
    assert len(variables) > 10
    assert all(name.startswith(LLAMA_CPP.variables) for name in variables)


def flags_of(help_text: str) -> set[str]:
    """All spellings: lines of the help begin with them, and two spaces end them."""
    lines = re.findall(r"^(-.*?)(?:(?<!,)  |$)", help_text, re.MULTILINE)
    return {flag for line in lines for flag in _FLAG.findall(line)}


def test_every_flag_of_vllm_that_is_about_speculation_is_in_the_table() -> None:
    ask = [
        "from vllm.utils.argparse_utils import FlexibleArgumentParser",
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser",
        "actions = make_arg_parser(FlexibleArgumentParser())._actions",
        "print(*(name for action in actions for name in action.option_strings), sep='\\n')",
    ]
    shown = subprocess.run(
        [vllm_python(), "-c", "\n".join(ask)], capture_output=True, text=True
    ).stdout
    flags = {name for name in shown.split() if re.search("^-+spec|spec-|draft|^-sc$", name)}
    flags -= {"--specialize-active-lora"}  # of LoRA
    assert "--speculative-config" in flags
    assert not missing(VLLM, flags)
