"""Reads a coordinator's journal, independently of the daemon's own reader.

daemon/coordinator/journal.h has the format: a magic, then frames of length, checksum and a
serialized JournalRecord; the top bit of a length is no part of it. How updates were decided is of
interest here. A record that is torn at the end was told to nobody and is left out.
"""

import collections
import struct

MAGIC = b"WSJRNL"

# Fields of internal.v1.JournalRecord, UpdateCommitted and UpdateEnded.
UPDATE_COMMITTED, UPDATE_ENDED, ADOPTED = 6, 7, 14
UPDATE_ID, VERSION, STEP = 2, 3, 4
TERM = 2  # of Adopted
ACTIVE, SUPERSEDED, LOST = 4, 7, 8

Commit = collections.namedtuple("Commit", "update version step")
# It ended without a commit.
Abort = collections.namedtuple("Abort", "update")
# From here on what the nodes held is what was known.
Adopted = collections.namedtuple("Adopted", "term")


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


def frames(data):
    """(offset, payload) of each whole record in the bytes of a journal."""
    if not data:
        return
    if not data.startswith(MAGIC):
        raise ValueError("no journal")
    at = len(MAGIC) + 2
    while at + 8 <= len(data):
        length, _ = struct.unpack_from("<II", data, at)
        length &= 0x7FFFFFFF  # the rest says what was appended together
        payload = data[at + 8 : at + 8 + length]
        if len(payload) < length:
            return
        yield at, payload
        at += 8 + length


def parse(data):
    """Every Commit, Abort and Adopted in the bytes of a journal, in order."""
    records = []
    for _, payload in frames(data):
        for number, record in _fields(payload):
            if number not in (UPDATE_COMMITTED, UPDATE_ENDED, ADOPTED):
                continue
            fields = dict(_fields(record))
            if number == ADOPTED:
                records.append(Adopted(fields.get(TERM, 0)))
                continue
            update = fields.get(UPDATE_ID, b"").decode()
            if number == UPDATE_COMMITTED:
                records.append(Commit(update, fields.get(VERSION, 0), fields.get(STEP, 0)))
            elif not (fields.get(ACTIVE) or fields.get(SUPERSEDED) or fields.get(LOST)):
                records.append(Abort(update))
    return records


def commits(records):
    return [record for record in records if isinstance(record, Commit)]


def read_all(path):
    """The records of the journal at `path`; none where there is no file."""
    try:
        with open(path, "rb") as file:
            return parse(file.read())
    except FileNotFoundError:
        return []


def read(path):
    """The commits of them."""
    return commits(read_all(path))
