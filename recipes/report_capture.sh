#!/usr/bin/env bash
# Makes the picture of `report` in the README from a real sweep, which takes some minutes: docs/report.png.
#
#     recipes/report_capture.sh [BROWSER]
#
# BROWSER is Chromium, or Chrome by its path. The figures in the picture are those of the machine that made it.
set -euo pipefail
cd "$(dirname "$0")/.."
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python -m harness latency +experiment=tiny hydra.sweep.dir="$place" results.file=null
python -m harness report "$place" output="$place"
"${1:-chromium}" --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1100,1180 \
    --screenshot="$PWD/docs/report.png" "file://$place/report.html"
