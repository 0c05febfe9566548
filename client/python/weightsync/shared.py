"""Finds the POSIX shared memory in which an address of this process lies."""

from __future__ import annotations

import dataclasses
import os
from typing import List, Optional

_FOLDER = "/dev/shm/"


@dataclasses.dataclass(frozen=True)
class Mapping:
    # As shm_open takes it.
    name: str
    # Where the beginning of the memory would be mapped, and its size.
    start: int
    size: int
    # What of it is mapped here.
    first: int
    last: int


class SharedMappings:
    """Mappings of shared memory that still has its name, as they are now."""

    def __init__(self) -> None:
        self._found: List[Mapping] = []
        with open("/proc/self/maps") as maps:
            for line in maps:
                if _FOLDER not in line:
                    continue
                fields = line.rstrip("\n").split(None, 5)
                path = fields[5] if len(fields) == 6 else ""
                # A file without a name shows as "… (deleted)"; 's': other processes see writes.
                if not path.startswith(_FOLDER) or "/" in path[len(_FOLDER) :] or fields[1][3] != "s":
                    continue
                first, last = (int(end, 16) for end in fields[0].split("-"))
                try:
                    held = os.stat(path)
                except OSError:
                    continue
                if held.st_ino != int(fields[4]):
                    continue
                start = first - int(fields[2], 16)
                self._found.append(Mapping("/" + path[len(_FOLDER) :], start, held.st_size, first, last))

    def find(self, address: int, size: int) -> Optional[Mapping]:
        for mapping in self._found:
            if mapping.first <= address and address + size <= mapping.last:
                if address + size <= mapping.start + mapping.size:
                    return mapping
        return None
