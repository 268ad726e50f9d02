#!/usr/bin/env bash
# Makes the virtual environment .venv with the package and its tested dependencies, and leaves it active:
#
#     . ./setup.sh
#
# Source it from bash or zsh, from any directory, as often as you like: it is quick when nothing has changed and repairs
# what an interrupted run left behind. HARNESS_PYTHON=/path/to/python chooses the interpreter of a new environment.
#
# A separate bash process does the work, so that the shell that sources this keeps its options, functions and
# variables; all that happens to it is the activation.

if [ -n "${BASH_VERSION-}" ]; then
    _harness_setup=${BASH_SOURCE[0]}
    if (return 0 2>/dev/null); then _harness_sourced=yes; else _harness_sourced=no; fi
elif [ -n "${ZSH_VERSION-}" ]; then
    # In quotes, because bash cannot parse it.
    eval '_harness_setup=${(%):-%x}'
    case ${ZSH_EVAL_CONTEXT-} in *file*) _harness_sourced=yes ;; *) _harness_sourced=no ;; esac
else
    echo "setup.sh: needs bash or zsh" >&2
    # shellcheck disable=SC2317
    return 1 2>/dev/null || exit 1
fi
# The bash process started below: whatever the shell thinks, it must never start another.
case ${1-} in --sourced) _harness_sourced=no ;; esac
case $_harness_setup in */*) ;; *) _harness_setup=./$_harness_setup ;; esac

if [ "$_harness_sourced" = yes ]; then
    unset -v _harness_sourced
    if command bash "$_harness_setup" --sourced </dev/null; then
        # shellcheck source=/dev/null
        . "${_harness_setup%/*}/.venv/bin/activate"
        unset -v _harness_setup
        return 0
    fi
    unset -v _harness_setup
    return 1
fi
if [ -n "${ZSH_VERSION-}" ]; then exec bash "$_harness_setup"; fi

# From here on: the separate bash process.
set -euo pipefail
unset -v CDPATH
root=$(cd "${_harness_setup%/*}" && pwd -P)
cd "$root"
venv=$root/.venv
stamp=$venv/installed
log=$venv/install.log
# A rebuild must not run on the interpreter that it removes.
PATH=${PATH//"$venv/bin:"/}

say() { printf 'setup.sh: %s\n' "$*" >&2; }

# What the environment depends on, in one line; fails where the environment cannot run Python.
fingerprint() {
    "$venv/bin/python" -ISc '
import hashlib, pathlib, sys
files = [pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
print(sys.version_info[:2], hashlib.sha256(b"".join(files)).hexdigest(), sys.argv[1])
' "$root" 2>/dev/null
}

# Whether the environment is whole and was made in this place: scripts inside it hold its path.
usable() {
    grep -qsF "$venv" "$venv/bin/activate" &&
        "$venv/bin/python" -c 'import sys, pip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null
}

# Sets `python` to the first interpreter that will do. The user's own python3 goes first. torch has no wheels for 3.15
# yet: there, or where there is no Python at all, uv fetches one if it is installed.
find_python() {
    local candidate version found="" without_venv=""
    for candidate in ${HARNESS_PYTHON:+"$HARNESS_PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        # A version manager's shim may be on PATH with nothing behind it, hence the trial run.
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=""
        case $version in
            3.11 | 3.12 | 3.13 | 3.14)
                if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
                    python=$candidate
                    return 0
                fi
                without_venv="${without_venv:+$without_venv, }$candidate"
                ;;
            ?*) found="${found:+$found, }$candidate is $version" ;;
        esac
        if [ -n "${HARNESS_PYTHON:-}" ]; then break; fi
    done
    if [ -z "${HARNESS_PYTHON:-}" ] && command -v uv >/dev/null; then
        say "fetching Python 3.13 with uv: ${found:-no python3} cannot be used"
        if uv python install --quiet 3.13 && python=$(uv python find --managed-python 3.13); then return 0; fi
    fi
    if [ -n "$without_venv" ]; then
        say "$without_venv: the venv module is missing"
    else
        say "needs Python 3.11 to 3.14; ${found:-no ${HARNESS_PYTHON:-python3} that runs} was found"
    fi
    say "on Ubuntu or Debian, ./machine-install.sh installs what is missing; elsewhere uv (pip install uv) does;" \
        "HARNESS_PYTHON=/path/to/python names another interpreter"
    return 1
}

# Prints the last line of the log every 15 seconds, until this script ends.
report() {
    local line
    # Its own streams: whoever waits for those of this script would wait for the last sleep, too.
    while sleep "${HARNESS_REPORT_S:-15}" >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        line=$(tail -n 1 "$log")
        say "installing for $SECONDS s: ${line:0:80}"
    done
}

# The value of pip's setting $1, where its files or variables have one.
pip_setting() { sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" <<<"$pip_settings" | tail -n 1; }

if ! [ -f "$stamp" ] || ! [ "$(fingerprint)" = "$(<"$stamp")" ]; then
    if ! usable; then
        find_python || exit 1
        say "making .venv with $("$python" --version 2>&1)"
        "$python" -m venv --clear "$venv" || { say "could not make $venv"; exit 1; }
    fi
    rm -f "$stamp"
    # pip takes the torch for the newest CUDA, with which an older driver uses no GPU.
    driver_cuda=$({ nvidia-smi || true; } 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]* Version: *\([0-9.]*\).*/\1/p')
    torch_cuda=$(sed -n 's/^default_torch_cuda=//p' machine-install.sh)
    if [ -n "$driver_cuda" ] && [ "${driver_cuda%%.*}" -lt "${torch_cuda%%.*}" ] && [ -z "${PIP_EXTRA_INDEX_URL-}" ]; then
        say "the NVIDIA driver supports CUDA $driver_cuda, and pip's torch needs $torch_cuda: update it, or remove .venv and" \
            "run PIP_EXTRA_INDEX_URL=$(sed -n 's/^torch_index=//p' machine-install.sh)/cu${driver_cuda%%.*}N . ./setup.sh" \
            "(./machine-install.sh says more)"
    fi
    pip_settings=$("$venv/bin/python" -m pip config list 2>/dev/null)
    # Without a driver CUDA would be gigabytes for nothing. Whoever has told pip where to look has chosen.
    indexes=()
    if [ "$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null &&
        ! grep -qE '(index-url|find-links|no-index)=' <<<"$pip_settings"; then
        cpu_index=$(sed -n 's/^torch_index=//p' machine-install.sh)/cpu
        indexes=(--extra-index-url "$cpu_index")
        say "no NVIDIA driver here: taking torch's CPU build; for another, remove .venv and run" \
            "PIP_EXTRA_INDEX_URL=${cpu_index%/cpu}/cu${torch_cuda/./} . ./setup.sh"
    fi
    say "installing the package and its dependencies into .venv; the first time takes minutes"
    # An index that does not answer is asked three times in all, also for what builds the package.
    export PIP_RETRIES=${PIP_RETRIES:-2}
    # Modules are compiled when they are first imported: most never are.
    install=("$venv/bin/python" -m pip install --no-compile --no-input --disable-pip-version-check)
    if command -v uv >/dev/null; then
        # Twice as fast. It does not read pip's configuration, and stops at the first index that has a package.
        install=(uv pip install --python "$venv/bin/python" --index-strategy unsafe-best-match)
        for option in index-url extra-index-url find-links constraint; do
            for value in $(pip_setting "$option"); do install+=("--$option" "$value"); done
        done
    fi
    report &
    reporting=$!
    disown
    trap 'kill "$reporting" 2>/dev/null' EXIT
    if ! "${install[@]}" ${indexes[@]+"${indexes[@]}"} --constraint constraints.txt --editable '.[dev]' >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        say "the installation failed; all that was printed is in .venv/install.log. Fix the cause and run it again"
        exit 1
    fi
    # Written last and in one step: an environment with a stamp is complete.
    fingerprint >"$stamp.new"
    mv -f "$stamp.new" "$stamp"
    say "ready"
fi
if [ "${1-}" != --sourced ]; then say "to activate the environment, source this file: . $root/setup.sh"; fi
