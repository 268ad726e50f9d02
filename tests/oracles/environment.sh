#!/usr/bin/env bash
# Makes a virtual environment with speculators, whose own modules the tests in this directory compare with:
#
#   tests/oracles/environment.sh DIRECTORY [PYTHON]
#   DIRECTORY/bin/python -m pytest -n 0 tests/oracles
#
# speculators needs an older transformers than this project, so it has an environment of its own. That one sees the
# packages of PYTHON's environment (by default the one that is active) after its own, so torch is not installed twice.
set -euo pipefail

directory=${1:?usage: environment.sh DIRECTORY [PYTHON]}
python=${2:-python}
packages='import sysconfig; print(sysconfig.get_path("purelib"))'

"$python" -c "import torch" || { echo "activate the project's environment first, or name its python" >&2; exit 1; }
shared=$("$python" -c "$packages")
"$python" -m venv "$directory"
own=$("$directory/bin/python" -c "$packages")
echo "$shared" >"$own/zz_shared.pth"
install=("$directory/bin/python" -m pip install --quiet)
"${install[@]}" "transformers==5.19.0"
"${install[@]}" --no-deps "speculators==0.9.0" "hs-connectors==0.9.0"
"${install[@]}" openai loguru pydantic-settings aiohttp "datasets<=5.1.0" httpx
