"""What a shell script gives its training command, each argument with the line it stands on.

Nothing is run: variables, arrays, defaults, arithmetic, `if` and `case` are followed; what a
program would print, and what only the environment knows, stays as it is written. Other scripts
that it reads or runs are followed where they are there.
"""

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from prism.common.errors import PrismError
from prism.common.files import read_head
from prism.jobs.importing.shellmath import COMPARE, MOST_FORMULA, evaluate
from prism.jobs.importing.shelltext import (
    FILE_LINES,
    Text,
    characters,
    closing,
    marked,
    plain,
    statements,
)
from prism.jobs.jobspec.othernames import understood

_SHELLS = {"bash", "sh", "zsh", "source", ".", "sbatch", "srun", "exec", "env"}
_MOST_SCRIPTS = 20  # that one leads to: two could read each other forever

_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"\w+|[@*#?]")
_LEADING = {"then", "else", "do", "{", "}", "export", "local", "declare", "readonly", "typeset",
            "exec", "time", "-a", "-x", "-r", "!"}  # fmt: skip


# $(IFS=', '; echo "${layers[*]}"): an array as text
_JOINED = re.compile(
    r"""\(\s*(?:(?:local\s+)?IFS=["']?([^"']*?)["']?\s*;\s*)?echo\s+"?\$\{(\w+)\[[*@]\]\}"?\s*\)"""
)
_COUNTED = re.compile(
    r"\(\(\s*(\w+)\s*=\s*([^;]+);\s*\w+\s*(<=?)\s*([^;]+);\s*(?:\+\+\w+|\w+\+\+)\s*\)\)"
)
UNSET = re.compile(r"\$\{?[A-Za-z_]\w*\}?")
# What a script may come to, far beyond any that launches a training: arrays that double each line
# would take all memory. Beyond is an error.
MOST_TURNS = 10_000  # of all loops
MOST_TEXT = 200_000  # characters of a variable
MOST_WORK = 5_000_000  # characters of all statements followed and of what they expand to
MOST_DEPTH = 50  # of `if`, `case`, loops, `bash -c` or ${a:-${b:-...}} inside each other
_DIGITS = 20  # of a number of 64 bits


class Shell:
    """A script's variables, and the commands that it comes to."""

    def __init__(self, given: dict[str, str], folder: Path | None, name: str) -> None:
        self.name, self.folder, self.files = name, folder, list[str]()
        self.turns = self.work = self.depth = 0
        self.missing: list[tuple[int, str]] = []
        self.exported: set[str] = set()
        self.variables: dict[str, list[Text]] = {k: [marked(v, 1)] for k, v in given.items()}
        self.commands: list[list[Text]] = []
        self.branches: list[list[bool]] = []  # of each open `if` or `case`: taken now, taken before
        self.subjects: list[str] = []

    def _refuse(self, line: int, what: str) -> NoReturn:
        number, line = divmod(line, FILE_LINES)
        place = f"{(self.name, *self.files)[number]}:{line}"
        raise PrismError(
            f"{place}: {what}, more than any script that launches a training; give the arguments "
            "that it comes to, such as the start of the log"
        )

    def _count(self, line: int, characters: int) -> None:
        """Count the work of following the script, and refuse too much."""
        self.work += characters + 1
        if self.work > MOST_WORK:
            self._refuse(line, f"here the script has come to {MOST_WORK:,} characters")

    @contextmanager
    def _inside(self, line: int) -> Iterator[None]:
        self.depth += 1
        if self.depth + len(self.branches) > MOST_DEPTH:
            self._refuse(line, f"{MOST_DEPTH} levels inside each other")
        yield
        self.depth -= 1

    def _store(self, name: str, fields: list[Text]) -> None:
        """Set a variable, or an array."""
        size = sum(map(len, fields)) + len(fields)
        if size > MOST_TEXT:
            line = next((field[0][1] for field in fields if field), 0)
            self._refuse(line, f"{name} grows beyond {MOST_TEXT:,} characters")
        self.variables[name] = fields

    def run(self, source: str) -> None:
        """Follow a script from its first statement to its last."""
        self._block(list(statements(characters(source, len(self.files) * FILE_LINES + 1))))

    def _block(self, statements: list[list[Text]]) -> None:
        """Follow statements, those of a counted loop as often as it counts."""
        i = 0
        while i < len(statements):
            words = [plain(word) for word in statements[i]]
            i += 1
            if words[0] != "for" or not all(now for now, _ in self.branches):
                self._statement(statements[i - 1])
                continue
            end, depth = i, 1
            while end < len(statements) and depth:
                depth += {"for": 1, "while": 1, "until": 1, "done": -1}.get(
                    plain(statements[end][0]), 0
                )
                end += 1
            self._loop(statements[i - 1], statements[i : end - 1])
            i = end

    def _loop(self, head: list[Text], body: list[list[Text]]) -> None:
        """Follow ``for ((i = 0; i < N; i++))`` and ``for x in a b``."""
        name, values, line = "", list[str](), head[0][0][1]
        counter = " ".join(map(plain, head[1:]))[:MOST_FORMULA]
        if (found := _COUNTED.fullmatch(counter)) is not None:
            name, start, stop = found[1], self._arithmetic(found[2]), self._arithmetic(found[4])
            if start is not None and stop is not None:
                stop = min(stop + (found[3] == "<="), start + MOST_TURNS + 1)
                values = [*map(str, range(start, stop))]
        elif len(head) > 2 and plain(head[2]) == "in":
            name = plain(head[1])
            values = [plain(field) for word in head[3:] for field in self.fields(word)]
        for value in values:
            self.turns += 1
            if self.turns > MOST_TURNS:
                self._refuse(line, f"loops of more than {MOST_TURNS:,} turns")
            self.variables[name] = [marked(value, line)]
            with self._inside(line):
                self._block(body)

    def _delegate(self, command: list[Text], given: list[str]) -> bool:
        """Follow the script that a command reads or runs; one that is not there is named."""
        words = [plain(word) for word in command]
        if "-c" in words[1:-1] and Path(words[words.index("-c") - 1]).name in _SHELLS:
            inner = [
                c for word in command[words.index("-c") + 1 :] for c in (*word, (" ", word[0][1]))
            ]
            with self._inside(command[0][0][1] if command[0] else 0):
                self._block(list(statements(inner)))
            return True
        if words[0] in ("echo", "cat", "mkdir"):
            return True
        n = next((k for k, word in enumerate(words) if word not in _SHELLS), len(words))
        reads = words[0] in ("source", ".")
        if n == len(words) or not (reads or re.search(r"\.(sh|slurm|sbatch)$", words[n])):
            return False
        script = words[n]
        path = self._found(script)
        if path is None and "activate" in script:  # a virtual environment's
            return True
        if path is None:
            name, how = Path(script).name[:60], "reads" if reads else "runs"
            told = f"{how} {name}, which is not there: what it sets is not known"
            self.missing.append((command[n][0][1] if command[n] else 0, told))
            if not reads:  # what it is given may say enough
                passed = [*given, *sorted(self.exported - set(given))]
                self.commands.append([*self._assigned(passed), *command[n + 1 :]])
            return not reads
        own = self.branches, self.subjects
        self.branches, self.subjects = [], []
        self.files.append(str(path))
        if not reads:
            for k, word in enumerate(command[n + 1 :], 1):
                self.variables[str(k)] = [word]
            self.variables["@"] = command[n + 1 :]
        self.run(read_head(path, str(path), MOST_TEXT).decode("utf-8", "replace"))
        self.branches, self.subjects = own
        return True

    def _assigned(self, names: Iterable[str]) -> list[Text]:
        """Give variables as words NAME=VALUE."""
        known = ((name, self.variables.get(name)) for name in names)
        return [marked(f"{name}=", v[0][0][1]) + v[0] for name, v in known if v and v[0]]

    def _found(self, script: str) -> Path | None:
        """Give the file of a script: as written, or by its end where only a machine knows more."""
        if self.folder is None or len(self.files) >= _MOST_SCRIPTS:
            return None
        tail = re.split(r"\$[({]?[^/]*", script)[-1].lstrip("/")
        for name in dict.fromkeys((script, tail, Path(tail).name)):
            path = self.folder / name
            with suppress(OSError):  # a folder without permission
                if name and os.path.isfile(path) and 0 < path.stat().st_size <= MOST_TEXT:
                    return path
        return None

    def _statement(self, words: list[Text]) -> None:
        first = plain(words[0])
        line = words[0][0][1] if words[0] else 0
        self._count(line, sum(map(len, words)))
        if len(self.branches) > MOST_DEPTH:
            self._refuse(line, f"{MOST_DEPTH} levels inside each other")
        if first in ("if", "elif"):
            self._condition(first, words[1:])
            return
        if first == "case":
            self.subjects.append(self._text(words[1]) if len(words) > 1 else "")
            self.branches.append([False, False])
            words = words[3:]
        elif first in ("fi", "esac") and self.branches:
            self.branches.pop()
            if first == "esac" and self.subjects:
                self.subjects.pop()
            return
        elif first == "else" and self.branches:
            self.branches[-1] = [not self.branches[-1][1], True]
        elif first == ";;" and self.branches:
            self.branches[-1][0] = False
            return
        if words and self.subjects and plain(words[-1]).endswith(")"):
            pattern = "".join(map(plain, words)).strip("()").replace('"', "")
            now, before = self.branches[-1]
            hits = (fnmatch.fnmatch(self.subjects[-1], one) for one in pattern.split("\1"))
            hit = not before and any(hits)
            self.branches[-1] = [hit, before or hit]
            return
        exports = plain(words[0]) == "export" if words else False
        while words and plain(words[0]) in _LEADING:
            words = words[1:]
        if not words or not all(now for now, _ in self.branches):
            return
        given = []
        while words and (found := _ASSIGN.match(plain(words[0]))):
            self._assign(found[1], bool(found[2]), words[0][found.end() :])
            given.append(found[1])
            words = words[1:]
        if exports:
            self.exported.update(given)
        command = [field for word in words for field in self.fields(word)]
        if [plain(word) for word in command[:2]] == ["printf", "-v"] and len(command) > 3:
            rest = iter(map(plain, command[4:]))
            text = re.sub("%[sd]", lambda _: next(rest, ""), plain(command[3]))
            self._store(plain(command[2]), [marked(text, line)])
        elif command and not self._delegate(command, given):
            self.commands.append([*self._assigned(filter(understood, given)), *command])

    def _condition(self, first: str, words: list[Text]) -> None:
        if first == "if":
            self.branches.append([False, False])
        now, before = self.branches[-1] if self.branches else [False, False]
        hit = not before and self._test([self._text(w) for w in words])
        if self.branches:
            self.branches[-1] = [hit, before or hit]

    def _test(self, words: list[str]) -> bool:
        """Evaluate `[ a = b ]` and its like; what needs a machine (files, commands) is false."""
        if words and words[0].startswith("(("):
            return bool(self._arithmetic(" ".join(words).strip("() ")))
        words = [w for w in words if w not in ("[", "[[", "]", "]]", "test", "then")]
        if words[:1] == ["!"]:
            return not self._test(words[1:])
        if words and words[0] in ("-z", "-n") and len(words) <= 2:
            # a variable of the environment is taken as not set: scripts give its default so
            empty = len(words) == 1 or not words[1] or UNSET.fullmatch(words[1]) is not None
            return empty == (words[0] == "-z")
        if len(words) == 3 and words[1] in ("=", "==", "!="):
            return fnmatch.fnmatchcase(words[0], words[2]) == (words[1] != "!=")
        if len(words) == 3 and words[1] in COMPARE:
            try:
                return COMPARE[words[1]](int(words[0]), int(words[2]))
            except ValueError:
                return False
        return words == ["true"]

    def _assign(self, name: str, more: bool, value: Text) -> None:
        if value[:1] and value[0][0] == "(":
            inner = [word for words in statements(value[1:-1], inside=True) for word in words]
            fields = [field for word in inner for field in self.fields(word)]
            self._store(name, (self.variables.get(name, []) if more else []) + fields)
            return
        old = [c for field in self.variables.get(name, []) for c in field] if more else []
        new = old + [c for k, f in enumerate(self.fields(value, split=False)) for c in
                     ([(" ", f[0][1])] if k and f else []) + f]  # fmt: skip
        self._store(name, [new])

    def _text(self, word: Text) -> str:
        return " ".join(map(plain, self.fields(word, split=False)))

    def fields(self, word: Text, split: bool = True) -> list[Text]:
        """Expand a word; what stands outside quotes is split at spaces."""
        fields: list[Text] = [[]]
        text, quote, i, kept = plain(word), "", 0, False

        def add(text: Text, whole: bool) -> None:
            nonlocal kept
            for c in text:
                if c[0] in " \t\n" and not whole:
                    if fields[-1]:
                        fields.append([])
                else:
                    fields[-1].append(c)
            kept |= whole

        while i < len(word):
            c, line = word[i]
            if c == "\\" and quote != "'":
                add(word[i + 1 : i + 2], True)
                i += 2
            elif c in "'\"" and quote in ("", c):
                quote = "" if quote else c
                kept, i = True, i + 1
            elif c == "$" and quote != "'" and i + 1 < len(word):
                found, i = self._expansion(word, text, i)
                self._count(line, sum(map(len, found)) + len(found))
                for k, field in enumerate(found):
                    if k:
                        fields.append([])
                    add(field, bool(quote) or not split)
            elif c == "`" and quote != "'":
                end = text.find("`", i + 1)
                add(marked("$()", line), True)
                i = end + 1 if end >= 0 else len(word)
            else:
                add([word[i]], True)
                i += 1
        return [field for field in fields if field or (kept and len(fields) == 1)]

    def _expansion(self, word: Text, text: str, i: int) -> tuple[list[Text], int]:
        """Give what `$...` at i stands for, as fields, and where it ends."""
        line, after = word[i][1], i + 1
        if text.startswith("((", after):
            end = closing(text, after, "(", ")")
            inside = text[after + 2 : end].removesuffix("))")
            value = self._arithmetic(inside)
            told = f"$(({inside}))" if value is None else str(value)
            return [marked(told, line)], end
        if text[after] == "(":
            end = closing(text, after, "(", ")")
            found = _JOINED.fullmatch(text, after, min(end, after + MOST_FORMULA))
            fields = self.variables.get(found[2], []) if found else []
            told = (found[1] or " ").join(map(plain, fields)) if found and fields else "$()"
            return [marked(told, line)], end
        if text[after] == "{":
            end = closing(text, after, "{", "}")
            return self._braces(word[after + 1 : end - 1], line), end
        found = _NAME.match(text, after)
        if not found:
            return [[word[i]]], after
        known = self.variables.get(found[0])
        if known and found[0] in ("@", "*"):
            return known, found.end()
        value_of = known[0] if known else marked(f"${found[0]}", line)
        return [value_of], found.end()

    def _braces(self, inside: Text, line: int) -> list[Text]:
        found = re.match(r"(\w+)(\[[^\]]*\])?(:?[-=?+])?", plain(inside))
        if not found:
            return [marked(f"${{{plain(inside)}}}", line)]
        known = self.variables.get(found[1])
        empty = known is not None and not plain([c for field in known for c in field])
        if found[3] and found[3][-1] in "-=" and (known is None or (empty and ":" in found[3])):
            with self._inside(line):
                return self.fields(inside[found.end() :], split=False)
        if known is None:
            return [] if found[2] else [marked(f"${{{found[1]}}}", line)]
        return known if found[2] else known[:1]

    def _arithmetic(self, text: str) -> int | None:
        def value_of(match: re.Match[str]) -> str:
            known = self.variables.get(match[1])
            return plain(known[0]) if known and len(known[0]) <= _DIGITS else "unknown"

        if len(text) > MOST_FORMULA:
            return None
        return evaluate(re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", value_of, text).strip())
