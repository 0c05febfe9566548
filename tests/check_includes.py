#!/usr/bin/env python3
"""Checks who includes what: an include from a lower room to a higher one is a defect.

Usage: check_includes.py [ROOT]
Prints `file:line: sentence` for every breach and exits with 1 if there is one. Reads the files
that git tracks under ROOT (default: this repository).
"""

import pathlib
import re
import subprocess
import sys

# What each room may include of this project, itself apart. client/ctl is a room of its own:
# it draws plans, so it alone of client/ may see schedule/.
ALLOWED = {
    "proto": {"schedule", "transport"},
    "schedule": set(),
    "transport": set(),
    "daemon": {"proto", "schedule", "transport"},
    "client": {"proto", "transport"},
    "client/ctl": {"client", "proto", "schedule", "transport"},
    "tests": {"client", "daemon", "proto", "schedule", "transport"},
}

# What proto/ may see of lower rooms, to write it as messages: errors with their reasons, and plans.
PROTO_MAY_SEE = {
    "schedule/catalog.h",
    "schedule/describe.h",
    "schedule/error.h",
    "schedule/models.h",
    "schedule/transfer_schedule.h",
    "transport/error.h",
}

# Headers of the accelerator, and the only folders that may see them: those that use it, and that
# which stands in for it.
DEVICE_HEADERS = re.compile(r"^(cuda\w*|nccl\w*|nv\w+|driver_types|curand\w*)(\.h|\.cuh)$|^(cuda|nv)/")
DEVICE_FOLDERS = ("transport/cuda/", "transport/nccl/", "tests/gpu/")

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')
SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".c", ".hpp", ".cpp"}


def room_of(path):
    """The room that a path belongs to, or None: "client/ctl/x.cc" -> "client/ctl"."""
    for room in sorted(ALLOWED, key=len, reverse=True):
        if path.startswith(room + "/"):
            return room
    return None


def breach(path, included, quoted):
    """Why `path` may not include `included`; None when it may."""
    if DEVICE_HEADERS.search(included) and not path.startswith(DEVICE_FOLDERS):
        return f"{included}: headers of CUDA and NCCL belong in transport/cuda and transport/nccl"
    if not quoted or included.startswith("weightsync/v1/"):
        # Generated from proto/. schedule/ and transport/ know nothing of messages.
        if included.startswith("weightsync/v1/") and room_of(path) in ("schedule", "transport"):
            return f"{included}: {room_of(path)}/ knows nothing of proto/"
        return None
    source, target = room_of(path), room_of(included)
    if source is None or target is None or source == target:
        return None
    if target in ALLOWED[source]:
        if source == "proto" and included not in PROTO_MAY_SEE:
            return f"{included}: proto/ may see only {', '.join(sorted(PROTO_MAY_SEE))}"
        return None
    return f"{included}: {source}/ may not include from {target}/"


def tracked_files(root):
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
    )
    return [path for path in listing.stdout.split("\0") if path]


def check(root, paths=None):
    """Returns the breaches in the files as a list of "file:line: sentence"."""
    breaches = []
    for path in paths if paths is not None else tracked_files(root):
        if pathlib.PurePath(path).suffix not in SUFFIXES or not (root / path).is_file():
            continue
        text = (root / path).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            match = INCLUDE.match(line)
            if not match:
                continue
            sentence = breach(path, match[1] or match[2], quoted=match[1] is not None)
            if sentence:
                breaches.append(f"{path}:{number}: {sentence}")
    return breaches


def main(arguments):
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).parent.parent)
    breaches = check(root.resolve())
    for line in breaches:
        print(line)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
