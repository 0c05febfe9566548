"""Finds the shared memory in which an address of this process lies."""

from __future__ import annotations

import dataclasses
import os
import stat
from typing import Dict, List, Optional, Tuple

_FOLDER = "/dev/shm/"
_GONE = " (deleted)"


@dataclasses.dataclass(frozen=True)
class Mapping:
    # As shm_open takes it; empty: it has none, and `fd` is a descriptor of it.
    name: str
    fd: int
    # Where the beginning of the memory would be mapped, and its size.
    start: int
    size: int
    # What of it is mapped here.
    first: int
    last: int


class SharedMappings:
    """Mappings of shared memory, as they are now: by its name where it still has one (torch's file_system
    strategy, multiprocessing.shared_memory), else by a descriptor of it that this process has open (torch's
    file_descriptor strategy, memfds)."""

    def __init__(self, open_files: bool = True) -> None:
        """open_files: also those without a name."""
        self._found: List[Mapping] = []
        # Without a name: what to look for among the descriptors, and start, first and last of the mapping.
        unnamed: List[Tuple[int, int, int, int]] = []
        with open("/proc/self/maps") as maps:
            for line in maps:
                if _FOLDER not in line and "/memfd:" not in line:
                    continue
                fields = line.rstrip("\n").split(None, 5)
                path = fields[5] if len(fields) == 6 else ""
                # 's': other processes see writes.
                if not path.startswith((_FOLDER, "/memfd:")) or fields[1][3] != "s":
                    continue
                first, last = (int(end, 16) for end in fields[0].split("-"))
                start = first - int(fields[2], 16)
                name = path[len(_FOLDER) :]
                if path.startswith(_FOLDER) and not path.endswith(_GONE) and "/" not in name:
                    try:
                        held = os.stat(path)
                    except OSError:
                        continue
                    if held.st_ino == int(fields[4]):
                        self._found.append(Mapping("/" + name, -1, start, held.st_size, first, last))
                elif open_files and path.endswith(_GONE):
                    unnamed.append((int(fields[4]), start, first, last))
        if not unnamed:
            return
        files = _open_files()
        for inode, start, first, last in unnamed:
            fd, size = files.get(inode, (-1, 0))
            if fd >= 0:
                self._found.append(Mapping("", fd, start, size, first, last))

    def find(self, address: int, size: int) -> Optional[Mapping]:
        for mapping in self._found:
            if mapping.first <= address and address + size <= mapping.last:
                if address + size <= mapping.start + mapping.size:
                    return mapping
        return None


def _open_files() -> Dict[int, Tuple[int, int]]:
    """inode -> (descriptor, size) of the memory without a name that this process has open."""
    found: Dict[int, Tuple[int, int]] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{entry}")
            held = os.fstat(int(entry))
        except OSError:
            continue
        if link.startswith((_FOLDER, "/memfd:")) and link.endswith(_GONE) and stat.S_ISREG(held.st_mode):
            found[held.st_ino] = (int(entry), held.st_size)
    return found
