"""A shell script's text: characters with their lines, words and statements."""

import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator

FILE_LINES = 1_000_000
"""More than the lines of a file: those of the second script that is read count from here."""
Text = list[tuple[str, int]]
"""Characters, each with its line; those of the k-th script that is read from k * `FILE_LINES`."""
_PATTERNS = re.compile(r"^[ \t]*[\w\"*.-]+([ \t]*\|[ \t]*[\w\"*.-]+)+\)", re.M)


def plain(text: Text) -> str:
    """Give the characters alone."""
    return "".join(c for c, _ in text)


def marked(text: str, line: int) -> Text:
    """Put text on a line."""
    return [(c, line) for c in text]


_DOCUMENT = re.compile(r"(?<!<)<<-?[ ]*['\"]?(\w+)")


def _without_documents(source: str) -> str:
    """Leave out here-documents that end, the line that begins one from there on."""
    lines = source.split("\n")
    ends = defaultdict[str, list[int]](list)
    for number, line in enumerate(lines):
        ends[line.strip(" \t")].append(number)
    out, i = list[str](), 0
    while i < len(lines):
        found, end = _DOCUMENT.search(lines[i]), None
        if found is not None:
            at = ends.get(found[1], [])
            k = bisect(at, i)
            end = at[k] if k < len(at) else None
        if found is None or end is None:
            out.append(lines[i])
            i += 1
            continue
        out += [lines[i][: found.start()], *[""] * (end - i)]
        i = end + 1
    return "\n".join(out)


def characters(source: str, first: int) -> Text:
    """Give a script's characters without comments, here-documents and broken lines."""
    source = _without_documents(source.replace("\r\n", "\n"))
    # patterns of `case`, so that a bar parts commands everywhere else
    source = _PATTERNS.sub(lambda m: m[0].replace("|", "\1"), source)
    out: Text = []
    line, i, quote = first, 0, ""
    while i < len(source):
        c = source[i]
        if c == "\\" and quote != "'" and source[i + 1 : i + 2] == "\n":
            i, line = i + 2, line + 1
            continue
        if c == "\\" and quote != "'":
            out += marked(source[i : i + 2], line)
            i += 2
            continue
        if c in "'\"" and quote in ("", c):
            quote = "" if quote else c
        if c == "#" and not quote and (not out or out[-1][0] in " \t\n;("):
            while i < len(source) and source[i] != "\n":
                i += 1
            continue
        out.append((c, line))
        line += c == "\n"
        i += 1
    return out


def statements(text: Text, inside: bool = False) -> Iterator[list[Text]]:
    """Split into statements of words, quotes kept; inside an array, newlines part words only."""
    words: list[Text] = []
    word: Text = []
    quote, depth, i = "", 0, 0

    def end() -> None:
        nonlocal word
        if word:
            words.append(word)
        word = []

    while i < len(text):
        c = text[i][0]
        if c == "\\" and quote != "'":
            word += text[i : i + 2]
            i += 2
            continue
        if c in "'\"`" and quote in ("", c):
            quote = "" if quote else c
        opened = bool(word) and word[-1][0] in "$=("
        if not quote and c in "({" and (depth or opened):
            depth += 1
        elif not quote and c in ")}" and depth:
            depth -= 1
        elif not quote and not depth and c == ")":  # a pattern of `case`
            word.append(text[i])
            end()
            yield words
            words = []
            i += 1
            continue
        elif not quote and not depth and (c in " \t" or (inside and c == "\n")):
            end()
            i += 1
            continue
        elif not quote and not depth and c in "\n;|&" and not inside:
            if c in "&" and word and word[-1][0] in "><":
                word.append(text[i])
                i += 1
                continue
            end()
            if words:
                yield words
            words = []
            if plain(text[i : i + 2]) == ";;":
                yield [text[i : i + 2]]
                i += 1
            i += 1
            continue
        word.append(text[i])
        i += 1
    end()
    if words:
        yield words


def closing(text: str, start: int, opens: str, closes: str) -> int:
    """Give where a bracket that opens at `start` is closed, or one behind the end."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == opens) - (text[i] == closes)
        if not depth:
            return i + 1
    return len(text) + 1
