"""Reads README.md's code blocks, so that tests can hold it to its word."""

import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language, text=None):
    """The contents of all fenced blocks of one language, in order."""
    text = README.read_text(encoding="utf-8") if text is None else text
    return [match[2] for match in _BLOCK.finditer(text) if match[1] == language]


def commands(program, text=None):
    """The command lines of the sh blocks that begin with `program`, as lists of words.

    A line that ends in a backslash, or inside a quoted word, goes on with the next one.
    """
    found = []
    for block in blocks("sh", text):
        pending = ""
        for line in block.splitlines():
            pending = f"{pending}\n{line}" if pending else line
            if pending.endswith("\\"):
                pending = pending[:-1]
                continue
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:
                # An open quote.
                continue
            pending = ""
            if words and words[0] == program:
                found.append(words)
        if pending.strip():
            raise ValueError(f"README.md: a command does not end: {pending!r}")
    return found
