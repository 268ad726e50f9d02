#!/usr/bin/env bash
# Collects the wheels that a bare CUDA image lacks, so that the tests and benchmarks run there without a network. The
# image has Python, pip, pytest, numpy, pandas, scipy, sentencepiece, and torch, transformers and accelerate with all that
# they need (Jinja2, rich and psutil among it). Of bitsandbytes only the libraries for CUDA 13.0 and for CPUs are kept.
#
#     scripts/collect_gpu_wheels.sh [--python 3.12] [--machine x86_64] DIRECTORY [NAME...]
#
#     --python    the image's version of Python; by default that of the python3 that runs pip here
#     --machine   the image's machine type; by default this machine's
#     NAME        collect only these packages
#
# Versions are those pinned in constraints.txt. Needs python3 with pip here (HARNESS_PYTHON names another interpreter),
# and an index that pip can reach. Copy DIRECTORY and the tree to the image, then, in the tree:
#
#     python3 -m pip install --no-index --no-deps DIRECTORY/*.whl && python3 -m harness latency
set -euo pipefail

# What `import harness`, the tests and the benchmarks need beyond the image; report plots and sweep launchers are left out.
names=(
    annotated-types antlr4-python3-runtime bitsandbytes execnet gguf httpcore2 httpx2 hydra-core nvidia-ml-py omegaconf
    prompt_toolkit protobuf pydantic pydantic_core pyte pytest-timeout pytest-xdist truststore typing-inspection wcwidth
)
# Published as source only. They are pure Python, so a wheel built here installs anywhere.
built=" antlr4-python3-runtime "

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
fail() {
    printf 'collect_gpu_wheels.sh: %s\n' "$1" >&2
    exit "${2:-1}"
}

python=${HARNESS_PYTHON:-python3}
version="" machine=$(uname -m) arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --python | --machine)
            [ $# -gt 1 ] || fail "$1 needs a value" 2
            if [ "$1" = --python ]; then version=$2; else machine=$2; fi
            shift
            ;;
        -h | --help)
            sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        -*) fail "$1: no such option (--python, --machine, --help)" 2 ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
[ ${#arguments[@]} -gt 0 ] || fail "name the directory to collect into; --help explains" 2
directory=${arguments[0]}
if [ ${#arguments[@]} -gt 1 ]; then names=("${arguments[@]:1}"); fi
version=${version:-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')} || fail "$python does not run"
[[ $version =~ ^3\.[0-9]+$ ]] || fail "--python $version: must be like 3.12" 2

wheels=() sources=()
for name in "${names[@]}"; do
    pin=$(grep -i "^$name==" "$root/constraints.txt") || fail "constraints.txt pins no $name"
    if [[ $built == *" $name "* ]]; then sources+=("$pin"); else wheels+=("$pin"); fi
done
# pip takes a wheel's platform literally, and wheels are built for many versions of the C library.
platforms=(--platform "linux_$machine" --platform "manylinux2014_$machine")
for minor in {5..34}; do platforms+=(--platform "manylinux_2_${minor}_$machine"); done

mkdir -p "$directory"
if [ ${#wheels[@]} -gt 0 ]; then
    "$python" -m pip download --no-deps --only-binary :all: --implementation cp --python-version "$version" \
        "${platforms[@]}" --dest "$directory" "${wheels[@]}" || fail "pip could not download them all: see above"
fi
if [ ${#sources[@]} -gt 0 ]; then
    "$python" -m pip wheel --no-deps --wheel-dir "$directory" "${sources[@]}" || fail "pip could not build ${sources[*]}"
fi
for wheel in "$directory"/bitsandbytes-*.whl; do
    [ -e "$wheel" ] || continue
    "$python" "$root/scripts/slim_wheel.py" "$wheel" || fail "cannot leave libraries out of $wheel"
done
collected=("$directory"/*.whl)
printf '%d wheels for Python %s on %s are in %s\n' ${#collected[@]} "$version" "$machine" "$directory"
