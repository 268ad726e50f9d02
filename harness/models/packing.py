"""Loads into rooms, in order: how blocks of layers are shared out among devices."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence


def filled(loads: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """For each load, in order, the index of the first room that still has place; empty if the rooms do not suffice."""
    index, left = 0, rooms[0]
    where = []
    for load in loads:
        while load > left:
            index += 1
            if index == len(rooms):
                return []
            left = rooms[index]
        left -= load
        where.append(index)
    return where


def balanced(loads: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """As `filled`, with no room filled further than necessary."""

    def up_to(limit: int) -> list[int]:
        return filled(loads, [min(limit, room) for room in rooms])

    return up_to(bisect.bisect_left(range(max(rooms)), True, key=lambda limit: bool(up_to(limit))))


def roomiest(gpus: Sequence[int], room: Mapping[int | str, int], count: int) -> list[int]:
    """Those with the most room, the first where they are equal, in their own order."""
    return sorted(sorted(gpus, key=lambda gpu: (-room[gpu], gpu))[:count])
