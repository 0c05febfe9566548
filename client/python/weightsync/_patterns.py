r"""Patterns of RE2, compiled with Python's `re`.

The two agree about most of what names need; this refuses or rewrites the rest, so that a list of rules means the
same here and in `weightsyncctl names` (client/ctl/testdata/names_cases.json holds the two together):

  - rewritten: [[:alpha:]] and its like, \z, \Q…\E, \x{10FFFF}, {,3} (RE2 takes that as it stands)
  - refused, since RE2 has not got it: look-around, back references, (?>…), (?x), q++, \Z, \u0061, q{1001}
  - refused, since `re` has not got it: \pL, \C, [[:^alpha:]], (?U), and (?i) with letters outside of ASCII

\w, \d, \s and \b are of ASCII, as RE2's are.
"""

from __future__ import annotations

import re
from .errors import invalid

_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "ascii": r"\x00-\x7f",
    "blank": r"\t ",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\t\n\v\f\r ",
    "upper": "A-Z",
    "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}
_MOST_REPEATS = 1000
_BOTH_ESCAPE = "AbBdDsSwWnrtfvaz"


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def none(self, what: str, instead: str = "") -> Exception:
        return invalid("PATTERN_INVALID", f"{self.pattern!r}: RE2 has no {what}{instead and '; ' + instead}.")

    def only_re2(self, what: str, instead: str) -> Exception:
        return invalid(
            "PATTERN_INVALID", f"{self.pattern!r}: {what} is RE2's alone, Python has nothing for it; {instead}."
        )

    def take(self, expression: str) -> str:
        """What matches here, and goes on behind it; "" when nothing does."""
        match = re.compile(expression, re.DOTALL).match(self.pattern, self.at)
        if match is None:
            return ""
        self.at = match.end()
        return match[0]

    def escape(self, in_class: bool) -> str:
        if self.take(r"\\Q"):
            if in_class:
                raise self.none(r"\Q in a class")
            text = self.take(r".*?(?=\\E)|.*")
            self.take(r"\\E")
            return re.escape(text)
        braced = self.take(r"\\x\{[0-9A-Fa-f]+\}")
        if braced:
            value = int(braced[3:-1], 16)
            if value > 0x10FFFF:
                raise self.none(braced)
            return re.escape(chr(value))
        found = self.take(r"\\(?:x[0-9A-Fa-f]{2}|0[0-7]{0,2}|.|$)")
        letter = found[1:2]
        if not letter:
            raise self.none("backslash at the end")
        if letter in "pPC" and not in_class or letter in "pP":
            raise self.only_re2(found, "write the characters as a class")
        if in_class and letter in "bBAz":
            raise self.none(f"{found} in a class")
        if letter == "Z":
            raise self.none(r"\Z", r"\z is the end")
        if letter == "z":
            return r"\Z"
        if letter.isdigit() and letter != "0":
            raise self.none(found, "a pattern cannot refer back to a group")
        if letter == "_":
            return letter
        if (letter.isalnum() and letter not in _BOTH_ESCAPE + "x0") or not letter.isascii():
            raise self.none(found)
        return found

    def character_class(self) -> str:
        out = self.take(r"\[\^?")
        out += re.escape(self.take(r"\]"))
        while self.at < len(self.pattern):
            named = self.take(r"\[:\^?\w*:\]")
            if named:
                name = named[2:-2]
                if name[:1] == "^" and name[1:] in _CLASSES:
                    raise self.only_re2(named, "write the characters that are meant")
                if name not in _CLASSES:
                    raise self.none(named)
                out += _CLASSES[name]
            elif self.pattern[self.at] == "\\":
                out += self.escape(in_class=True)
            else:
                c = self.take(".")
                if c == "]":
                    return out + c
                # `re` keeps doubled ones of these for sets of its own.
                out += "\\" + c if c in "[&|~" else c
        raise invalid("PATTERN_INVALID", f"{self.pattern!r}: a class is not closed.")

    def group(self) -> str:
        if not self.take(r"\(\?"):
            return self.take(r"\(")
        out = self.take(r":|P<")
        if out:
            return "(?" + out
        flags = self.take(r"[A-Za-z]*(?:-[A-Za-z]+)?(?=[:)])")
        if not flags:
            raise self.none("(?" + (self.take(r"<[=!]|P=|.") or ""))
        if "U" in flags:
            raise self.only_re2(f"(?{flags}", "write the lazy repetitions: *?, +?")
        for flag in flags:
            if flag not in "ims-":
                raise self.none(f"(?{flags}")
        if "i" in flags.partition("-")[0] and not self.pattern.isascii():
            raise invalid(
                "PATTERN_INVALID",
                f"{self.pattern!r}: with (?i) only letters of ASCII are compared here; write the others as classes.",
            )
        return "(?" + flags

    def repetition(self) -> str:
        out = self.take(r"[*+?]|\{\d+(?:,\d*)?\}")
        if any(int(number) > _MOST_REPEATS for number in re.findall(r"\d+", out)):
            raise self.none(out, f"{_MOST_REPEATS} times are the most")
        if self.take(r"\+"):
            raise self.none(out + "+")
        return out + self.take(r"\?")

    def whole(self) -> str:
        out = ""
        while self.at < len(self.pattern):
            c = self.pattern[self.at]
            if c == "\\":
                out += self.escape(in_class=False)
            elif c == "[":
                out += self.character_class()
            elif c == "(":
                out += self.group()
            elif c in "*+?" or re.compile(r"\{\d+(?:,\d*)?\}").match(self.pattern, self.at):
                out += self.repetition()
            elif c == "{":
                self.at += 1
                out += r"\{"
            elif c == "$":
                self.at += 1
                # `re`'s is true before a line's end, too.
                out += "$" if re.search(r"\(\?[a-z]*m", self.pattern) else r"\Z"
            else:
                self.at += 1
                out += c
        return out


def compile_pattern(pattern: str) -> "re.Pattern[str]":
    """INVALID_ARGUMENT (PATTERN_INVALID): see the module."""
    translated = _Reader(pattern).whole()
    try:
        return re.compile(translated, re.ASCII)
    except re.error as error:
        raise invalid("PATTERN_INVALID", f"{pattern!r}: {error}.") from None
