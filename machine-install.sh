#!/usr/bin/env bash
# Prepares a bare Ubuntu or Debian machine: git, Python with venv, and a C compiler with Python's headers, which compiled
# models need. On a GPU machine it checks the NVIDIA driver and the CUDA version that the driver supports, and starts the
# fabric manager if the GPUs are connected by NVSwitches.
#
#     ./machine-install.sh [--driver] [--dry-run]
#
#     --driver    install the recommended NVIDIA driver if none works; without it the driver is only checked
#     --dry-run   show what would be done, change nothing
#
# Every command that changes something is shown before it runs. Anything already installed is left alone, so it is safe
# to run this again. Exits with 0 when the machine is ready (a machine without a GPU is), 1 when something is left to do.
set -euo pipefail

# The CUDA version that the default build of the torch in constraints.txt is made for.
default_torch_cuda=13.0
# PyTorch has one index of wheels per CUDA version: cu126, cu130 and so on.
torch_index=https://download.pytorch.org/whl
torch_versions=https://pytorch.org/get-started/locally
# Where the system lists its devices; tests use another place.
pci_devices=${HARNESS_PCI_DEVICES:-/sys/bus/pci/devices}
systemd=${HARNESS_SYSTEMD:-/run/systemd/system}
modules_to_load=/etc/modules-load.d
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)

say() { printf '%s\n' "$*"; }
problems=()
problem() {
    problems+=("$1")
    say "  ! $1"
}

with_driver=no
dry_run=no
for argument in "$@"; do
    case $argument in
        --driver) with_driver=yes ;;
        --dry-run) dry_run=yes ;;
        -h | --help)
            sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *)
            say "machine-install.sh: $argument: no such option (--driver, --dry-run, --help)" >&2
            exit 2
            ;;
    esac
done

if ! command -v apt-get >/dev/null; then
    say "machine-install.sh: this system has no apt-get; install git, Python 3.11 to 3.14 with venv and, for a GPU," \
        "the NVIDIA driver with its own package manager" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
    as_root=(sudo)
    if [ "$dry_run" = no ] && ! command -v sudo >/dev/null; then
        say "machine-install.sh: must run as root, or sudo must be there" >&2
        exit 1
    fi
fi

# Shows a command that changes the machine, then runs it as root.
run() {
    say "  + ${as_root[*]:+${as_root[*]} }$*"
    if [ "$dry_run" = yes ]; then return 0; fi
    # The guard is for bash 4.3, to which an empty array is an unset one.
    ${as_root[@]+"${as_root[@]}"} "$@"
}

apt() { run env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -y -q "$@"; }

# The package lists are fetched once, and only where something has to be installed.
lists_fetched=no
fetch_lists() {
    if [ "$lists_fetched" = yes ]; then return 0; fi
    apt update || problem "apt-get update failed: see above"
    lists_fetched=yes
}

# The version of a package that apt would install; empty where it has none.
offered() { LC_ALL=C apt-cache policy "$1" 2>/dev/null | sed -n 's/^  Candidate: //p' | grep -v '^(none)$' || true; }

# --- Python and git ---------------------------------------------------------------------------------------------------

# Sets `python`. The same choice as in setup.sh: the code needs 3.11, and torch has no wheels for 3.15.
find_python() {
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$python" -c '
import ensurepip, sys, venv
sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then return 0; fi
    done
    python=""
    return 1
}

# The package of such a Python: the release's own python3 if it is one.
python_package() {
    local version
    case $(offered python3) in
        3.11.* | 3.12.* | 3.13.* | 3.14.*)
            echo python3
            return 0
            ;;
    esac
    for version in 3.14 3.13 3.12 3.11; do
        if [ -n "$(offered "python$version-venv")" ]; then
            echo "python$version"
            return 0
        fi
    done
    return 1
}

check_python() {
    local package packages=()
    say "Python and git"
    if ! command -v git >/dev/null; then packages+=(git ca-certificates); else say "  git: there"; fi
    if find_python; then
        say "  $("$python" --version) with venv: there"
    else
        say "  no Python 3.11 to 3.14 with venv"
        fetch_lists
        if package=$(python_package); then
            packages+=("$package" "$package-venv" "$package-dev")
        elif [ "$dry_run" = yes ]; then
            say "  would look for Python 3.14, 3.13, 3.12 and 3.11 once the package lists are there"
        else
            problem "this release offers no Python 3.11 to 3.14 (its python3 is $(offered python3)); install one by other \
means and name it: HARNESS_PYTHON=/path/to/python . ./setup.sh"
        fi
    fi
    if [ ${#packages[@]} -gt 0 ]; then
        fetch_lists
        apt install --no-install-recommends "${packages[@]}" || problem "could not install ${packages[*]}"
        if [ "$dry_run" = no ] && ! find_python; then problem "still no Python that setup.sh can use"; fi
    fi
}

# --- Compiler ---------------------------------------------------------------------------------------------------------

# Triton compiles C code that includes Python.h before its first kernel on a GPU, and torch compiles C++ on a CPU.
compiler_works() {
    local headers compiler
    headers=$("${python:-python3}" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null) || return 1
    # Python.h includes the headers of the C library too.
    for compiler in "gcc -x c" "g++ -x c++"; do
        # shellcheck disable=SC2086
        $compiler -E -I"$headers" - <<<'#include <Python.h>' >/dev/null 2>&1 || return 1
    done
}

check_compiler() {
    local packages=(gcc g++ libc6-dev)
    say "C compiler and Python.h"
    if compiler_works; then
        say "  gcc, g++ and the headers of the C library and of Python: there"
        return
    fi
    # A Python that a dry run found missing comes with its headers.
    if [ -n "$python" ]; then
        packages+=("$("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')")
    fi
    fetch_lists
    apt install --no-install-recommends "${packages[@]}" || problem "could not install ${packages[*]}"
    if [ "$dry_run" = no ] && ! compiler_works; then
        problem "gcc and g++ still cannot compile with the Python.h of $(command -v "${python:-python3}"); if that Python \
is not apt's, install its headers the way it was installed. Until then use runner=eager"
    fi
}

# --- GPU --------------------------------------------------------------------------------------------------------------

# How many NVIDIA devices of a PCI class there are: 0x03 display and 3D controllers, 0x0680 NVSwitches.
count_devices() {
    local device count=0
    for device in "$pci_devices"/*; do
        if [ -r "$device/vendor" ] && [ "$(<"$device/vendor")" = 0x10de ] && [[ $(<"$device/class") == "$1"* ]]; then
            count=$((count + 1))
        fi
    done
    echo "$count"
}

# Sets driver, gpus and driver_cuda; fails where no driver answers.
ask_driver() {
    local answer
    command -v nvidia-smi >/dev/null || return 1
    answer=$(nvidia-smi --query-gpu=driver_version,name --format=csv,noheader 2>/dev/null) || return 1
    driver=$(sed -n '1s/,.*//p' <<<"$answer")
    gpus=$(awk -F', *' '{ n[$2]++ } END { for (name in n) { printf "%s%d × %s", separator, n[name], name; separator = ", " } }' \
        <<<"$answer")
    driver_cuda=$(nvidia-smi | sed -n 's/.*CUDA[A-Za-z ]* Version: *\([0-9.]*\).*/\1/p')
    [ -n "$driver" ]
}

install_driver() {
    local flavour headers
    if command -v nvidia-smi >/dev/null && ! dpkg -S "$(readlink -f "$(command -v nvidia-smi)")" >/dev/null 2>&1; then
        problem "the NVIDIA driver here was not installed by apt; replace it in the way it was installed"
        return
    fi
    fetch_lists
    if [ -n "$(offered ubuntu-drivers-common)" ]; then
        apt install ubuntu-drivers-common || true
        run env DEBIAN_FRONTEND=noninteractive ubuntu-drivers install --gpgpu || { problem "ubuntu-drivers could not install a driver"; return; }
        # The compute packages bring no nvidia-smi; it comes in a package named like theirs.
        flavour=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' 'libnvidia-compute-*' 2>/dev/null |
            sed -n 's/^installed libnvidia-compute-//p' | sort -V | tail -n 1) || flavour=""
        if [ -n "$flavour" ]; then
            apt install "nvidia-utils-$flavour" || problem "could not install nvidia-utils-$flavour"
        elif [ "$dry_run" = yes ]; then
            say "  + (nvidia-utils of the same version)"
        fi
    elif [ -n "$(offered nvidia-driver)" ]; then
        headers=linux-headers-$(uname -r)
        if [ -z "$(offered "$headers")" ]; then headers=linux-headers-$(dpkg --print-architecture); fi
        apt install "$headers" nvidia-driver nvidia-smi || { problem "could not install nvidia-driver"; return; }
    else
        problem "apt offers no NVIDIA driver here; on Debian enable the components contrib and non-free"
        return
    fi
    if [ "$dry_run" = no ]; then problem "the new driver works after a reboot: reboot, then run this again"; fi
}

# Compares the CUDA version that the driver supports with the one that torch is built for. A driver supports every CUDA
# of the same major version.
check_cuda() {
    local torch_cuda=$default_torch_cuda what="the default build of torch" major=${driver_cuda%%.*} again
    again="PIP_EXTRA_INDEX_URL=$torch_index/cu${major:-13}N . ./setup.sh ($torch_versions lists the N there are)"
    if "$root/.venv/bin/python" -c 'import torch' 2>/dev/null; then
        torch_cuda=$("$root/.venv/bin/python" -c 'import torch; print(torch.version.cuda or "")')
        what="the torch in .venv"
    fi
    if [ -z "$torch_cuda" ]; then
        problem "the torch in .venv is built without CUDA and would not use the GPUs: remove .venv, then run $again"
    elif [ -z "$driver_cuda" ]; then
        say "  nvidia-smi does not say which CUDA version the driver supports; $what needs CUDA $torch_cuda"
    elif [ "$major" -lt "${torch_cuda%%.*}" ]; then
        problem "the driver supports CUDA up to $driver_cuda, $what needs $torch_cuda: install a newer driver, or take a \
torch for CUDA $major: remove .venv, then run $again"
        if [ "$with_driver" = yes ]; then install_driver; else say "    --driver installs the recommended driver"; fi
    else
        say "  CUDA: the driver supports $driver_cuda, $what needs $torch_cuda"
    fi
}

check_gpu() {
    local count
    say "GPU"
    count=$(count_devices 0x03)
    if ask_driver; then
        say "  $gpus, driver $driver"
        check_cuda
        check_fabric_manager
    elif [ "$count" = 0 ]; then
        say "  no NVIDIA GPU on this machine; everything runs on the CPU"
    elif [ "$with_driver" = yes ]; then
        say "  $count NVIDIA GPU(s), no driver that answers; installing the recommended one"
        install_driver
    else
        problem "$count NVIDIA GPU(s), but no driver that answers nvidia-smi; --driver installs the recommended one"
    fi
}

# --- Fabric manager ---------------------------------------------------------------------------------------------------

# The GPUs of an HGX board (A100, H100, H200, B200 SXM) cannot be used before the fabric manager has set up their
# switches: CUDA fails with error 802. It refuses to start with a driver of another version than its own.
check_fabric_manager() {
    local switches installed="" branch=${driver%%.*} choice changed=no
    switches=$(count_devices 0x0680)
    # The switches of the B200 generation are not PCI devices. (A GB200 is not meant: its switches are
    # in another machine.)
    local nvlink5=no
    if [[ $gpus =~ (^|[^G])B[23]00 ]]; then nvlink5=yes; fi
    if [ "$switches" = 0 ] && [ "$nvlink5" = no ]; then
        say "  no NVSwitch, no fabric manager needed"
        return
    fi
    say "  NVSwitch: the fabric manager must run, in version $driver like the driver"
    if ! [ -d "$systemd" ]; then
        say "  no systemd here (a container?): see that the fabric manager runs on the host"
        return
    fi
    if command -v nv-fabricmanager >/dev/null; then
        installed=$(nv-fabricmanager --version 2>/dev/null | grep -m 1 -oE '[0-9]+(\.[0-9]+)+') || installed=""
    fi
    if [ "$installed" != "$driver" ]; then
        say "  installed: ${installed:-none}"
        fetch_lists
        choice=$(apt-cache madison "nvidia-fabricmanager-$branch" nvidia-fabricmanager 2>/dev/null |
            awk -F' *[|] *' -v driver="$driver" '
                { gsub(/^ +| +$/, "", $1); rest = substr($2, length(driver) + 1, 1) }
                index($2, driver) == 1 && rest !~ /[0-9.]/ && !found++ { print $1 "=" $2 }') || choice=""
        if [ -z "$choice" ]; then
            problem "apt offers no fabric manager of version $driver; install nvidia-fabricmanager in exactly that version, \
or a driver for which there is one"
            return
        fi
        apt install --allow-downgrades "$choice" || { problem "could not install $choice"; return; }
        changed=yes
    fi
    if [ "$nvlink5" = yes ]; then
        # Its switches are managed through InfiniBand devices.
        if ! dpkg-query -W -f '${db:Status-Status}\n' nvlsm 2>/dev/null | grep -qx installed; then
            fetch_lists
            apt install nvlsm || problem "could not install nvlsm, which the switches of these GPUs need"
            changed=yes
        fi
        if ! grep -qsx ib_umad "$modules_to_load"/*; then
            run sh -c "echo ib_umad >$modules_to_load/ib_umad.conf"
            run modprobe ib_umad || problem "the kernel module ib_umad, which these switches need, does not load"
            changed=yes
        fi
    fi
    if [ "$changed" = no ] && systemctl is-enabled -q nvidia-fabricmanager && systemctl is-active -q nvidia-fabricmanager
    then
        say "  fabric manager $installed: running"
        return
    fi
    run systemctl enable nvidia-fabricmanager || true
    run systemctl restart nvidia-fabricmanager ||
        problem "the fabric manager does not start: journalctl -u nvidia-fabricmanager says why"
}

# --- All of it --------------------------------------------------------------------------------------------------------

check_python
check_compiler
check_gpu
if [ ${#problems[@]} -gt 0 ]; then
    say "Left to do"
    printf '  - %s\n' "${problems[@]}"
    exit 1
fi
if [ "$dry_run" = yes ]; then say "Dry run: nothing was changed"; else say "Ready. Next: . ./setup.sh"; fi
