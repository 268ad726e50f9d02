#!/usr/bin/env bash
# The README's first answer: two real llama.cpp servers with the shipped pair as GGUF files, started from one command.
# Needs a llama-server of 2026 (with --spec-type) on the PATH, or in LLAMA_SERVER, and a quiet machine.
#
#   recipes/server_capture.sh [DIRECTORY]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
directory=${1:-$(mktemp -d)}
mkdir -p "$directory"
cd "$root"
python -m recipes.tiny_gguf "$directory"
cd "$directory"
ln -sf "$(command -v "${LLAMA_SERVER:-llama-server}")" llama-server
COLUMNS=100 PATH=$directory:$PATH harness latency prompts=tiny chat=false temperature=0 \
    -- llama-server -m tiny.gguf -md tiny_draft.gguf --spec-type draft-simple --spec-draft-n-max 4 -np 1 -c 512
