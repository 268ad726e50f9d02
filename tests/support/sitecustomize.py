"""Imported by every interpreter that the tests start: `tests/support` is in their PYTHONPATH."""

from time_limit import print_stacks_when_asked

print_stacks_when_asked()
