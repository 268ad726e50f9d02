#!/usr/bin/env bash
# The step of action.yml: installs the package, measures before and after, compares, and reports. All that it is told is
# in the variables that action.yml sets.
set -euo pipefail

# What is measured needs no token.
token=${GH_TOKEN:-}
unset -v GH_TOKEN
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
directory=$(mktemp -d "${RUNNER_TEMP:-/tmp}/harness.XXXXXX")
echo "directory=$directory" >>"$GITHUB_OUTPUT"

"$PYTHON" -m venv "$directory/venv"
"$directory/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${PACKAGE:-$root}"
harness=$directory/venv/bin/harness

# The arguments are the workflow's own text, with the quotes that a shell needs. The two settings come first, because a
# server's command may end them.
measure() {
    eval "\"$harness\" $COMMAND hydra.run.dir=\"$directory/$1\" results.file=\"$directory/$1.csv\" $2"
}

code=0
measure before "$BEFORE" || code=$?
# 3: measured, and cannot tell whether speculation pays.
if [ "$code" != 0 ] && [ "$code" != 3 ]; then exit "$code"; fi
code=0
measure after "$AFTER" || code=$?
if [ "$code" != 0 ] && [ "$code" != 3 ]; then exit "$code"; fi

compared=0
"$harness" regress "before=$directory/before.csv" "after=$directory/after.csv" "margin=$MARGIN" >"$directory/regress.txt" 2>&1 ||
    compared=$?
cat "$directory/regress.txt"
echo "exit-code=$compared" >>"$GITHUB_OUTPUT"

case $compared in
    0) answer="no loss beyond $MARGIN" ;;
    1) answer="a loss beyond $MARGIN" ;;
    3) answer="the runs cannot tell whether anything is worse" ;;
    *) answer="the runs cannot be compared" ;;
esac
{
    printf '**harness: %s**\n\n' "$answer"
    "$harness" report "$directory/after" format=row
    # shellcheck disable=SC2016
    printf '<details><summary>before and after</summary>\n\n```\n%s\n```\n</details>\n' "$(cat "$directory/regress.txt")"
} >"$directory/comment.md"
cat "$directory/comment.md" >>"$GITHUB_STEP_SUMMARY"

if [ "$COMMENT" = true ] && [ -n "${PULL_REQUEST:-}" ]; then
    # A second push replaces the comment of the first one.
    GH_TOKEN=$token gh pr comment "$PULL_REQUEST" --repo "$GITHUB_REPOSITORY" --body-file "$directory/comment.md" --edit-last --create-if-none
fi
if [ "$FAIL" = true ] && [ "$compared" != 0 ] && [ "$compared" != 3 ]; then exit "$compared"; fi
