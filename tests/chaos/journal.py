"""Reads a coordinator's journal, independently of the daemon's own reader.

daemon/coordinator/journal.h has the format: a magic, then frames of length, checksum and a
serialized JournalRecord. Only commits are of interest here. A record that is torn at the end was
told to nobody and is left out.
"""

import collections
import struct

MAGIC = b"WSJRNL"

# Fields of internal.v1.JournalRecord and UpdateCommitted.
UPDATE_COMMITTED = 6
UPDATE_ID, VERSION, STEP = 2, 3, 4

Commit = collections.namedtuple("Commit", "update version step")


def _varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _fields(data):
    """(number, value) of each field of a serialized message; nested ones as bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(data, at)
        elif kind == 1:
            value, at = data[at : at + 8], at + 8
        elif kind == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        elif kind == 5:
            value, at = data[at : at + 4], at + 4
        else:
            raise ValueError(f"wire type {kind}")
        yield number, value


def parse(data):
    """Every Commit in the bytes of a journal, in order."""
    if not data:
        return []
    if not data.startswith(MAGIC):
        raise ValueError("no journal")
    commits = []
    at = len(MAGIC) + 2
    while at + 8 <= len(data):
        length, _ = struct.unpack_from("<II", data, at)
        payload = data[at + 8 : at + 8 + length]
        if len(payload) < length:
            break
        at += 8 + length
        for number, record in _fields(payload):
            if number != UPDATE_COMMITTED:
                continue
            fields = dict(_fields(record))
            commits.append(
                Commit(
                    fields.get(UPDATE_ID, b"").decode(),
                    fields.get(VERSION, 0),
                    fields.get(STEP, 0),
                )
            )
    return commits


def read(path):
    """Commits in the journal at `path`; none where there is no file."""
    try:
        with open(path, "rb") as file:
            return parse(file.read())
    except FileNotFoundError:
        return []
