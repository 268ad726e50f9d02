#!/usr/bin/env bash
# Makes the pictures of `report` in the docs from real runs, which takes about ten minutes: docs/report.png (a sweep),
# docs/report-run.png (one run), docs/report-many.png (many drafts, on a telephone) and docs/report-servers.png (two
# servers, dark).
#
#     recipes/report_capture.sh [BROWSER]
#
# BROWSER is Chromium, or Chrome by its path. The figures in the pictures are those of the machine that made them.
set -euo pipefail
cd "$(dirname "$0")/.."
browser=${1:-chromium}
place=$(mktemp -d)
servers=()
trap 'kill "${servers[@]}" 2>/dev/null; rm -rf "$place"' EXIT

measure() { # DIRECTORY ARGUMENT...
    python -m harness latency -m hydra.sweep.dir="$place/$1" results.file=null "${@:2}"
}

serve() { # PORT ARGUMENT...
    python -m harness serve port="$1" "${@:2}" >"$place/$1.log" 2>&1 &
    servers+=($!)
    until curl --silent --fail --output /dev/null "http://127.0.0.1:$1/v1/models"; do sleep 1; done
}

picture() { # NAME SIZE DIRECTORY FLAG...
    python -m harness report "$place/$3" output="$place/$3"
    "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size="$2" "${@:4}" \
        --screenshot="$PWD/docs/$1.png" "file://$place/$3/report.html"
}

measure run K=4
picture report-run 1240,1180 run
measure sweep K=1,2,3,4,5,6,8,12 num_prompts=10
picture report 1240,960 sweep
measure many draft=tiny_draft,tiny_eagle3,suffix,lookup K=2,4,8 T=0,0.5 num_prompts=10 tokens=32
picture report-many 500,1500 many
serve 5711 draft=none
serve 5712
measure servers engine=server model=tiny batch_size=1,4 num_prompts=32 tokens=32 \
    engine.url=http://127.0.0.1:5712/v1 engine.regular_url=http://127.0.0.1:5711/v1
picture report-servers 1240,960 servers --force-dark-mode
