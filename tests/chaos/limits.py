"""Memory limits of control groups, version 2 or 1, and small disks."""

import os
import subprocess
import tempfile
import time


class Group:
    def __init__(self, path, limit_file, usage_file, unlimited):
        self._path, self._limit, self._usage = path, limit_file, usage_file
        self._unlimited = unlimited
        os.makedirs(path, exist_ok=True)

    def enter(self):
        """In a child before exec."""
        with open(f"{self._path}/cgroup.procs", "w") as file:
            file.write("0")

    def limit_to_usage(self, more):
        """From now on the group gets `more` bytes beyond what it has."""
        with open(f"{self._path}/{self._usage}") as file:
            usage = int(file.read())
        self._set(str(usage + more))

    def unlimit(self):
        self._set(self._unlimited)

    def _set(self, value):
        with open(f"{self._path}/{self._limit}", "w") as file:
            file.write(value)

    def destroy(self):
        for _ in range(50):
            try:
                os.rmdir(self._path)
                return
            except OSError:
                time.sleep(0.02)


class Memory:
    """Where groups can be made."""

    def __init__(self, root, version):
        self._root, self._version = root, version

    def group(self, name):
        path = f"{self._root}/wschaos{os.getpid()}-{name}"
        if self._version == 2:
            return Group(path, "memory.max", "memory.current", "max")
        return Group(path, "memory.limit_in_bytes", "memory.usage_in_bytes", "-1")


def memory():
    """A Memory, or why there is none."""
    candidates = [("/sys/fs/cgroup", 2, "memory.max"), ("/sys/fs/cgroup/unified", 2, "memory.max")]
    candidates.append(("/sys/fs/cgroup/memory", 1, "memory.limit_in_bytes"))
    for root, version, limit in candidates:
        probe = f"{root}/wsprobe{os.getpid()}"
        try:
            os.mkdir(probe)
        except OSError:
            continue
        there = os.path.exists(f"{probe}/{limit}")
        os.rmdir(probe)
        if there:
            return Memory(root, version), ""
    return None, "no control group with a memory limit can be made here"


def mount_small_disk(path, size="1m"):
    os.makedirs(path, exist_ok=True)
    return (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "wschaos", path],
            stderr=subprocess.DEVNULL,
        ).returncode
        == 0
    )


def small_disks():
    """Whether they can be made: without one nobody's disk may be filled."""
    with tempfile.TemporaryDirectory(prefix="wsprobe.") as path:
        there = mount_small_disk(path)
        if there:
            unmount(path)
        return there


def unmount(path):
    subprocess.run(["umount", "-l", path], stderr=subprocess.DEVNULL)


def fill_disk(path):
    """Takes all that is left."""
    try:
        with open(f"{path}/ballast", "wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
    except OSError:
        pass


def free_disk(path):
    try:
        os.unlink(f"{path}/ballast")
    except FileNotFoundError:
        pass
