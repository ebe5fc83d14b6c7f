"""The keys of a job file as the tables of docs/job-file.md, from the schema itself.

Other frameworks' names for them stand there too, and in docs/import.md those that are not modelled,
from `prism.jobs.jobspec.othernames`.

    python experiments/checks/job_keys.py

Writes them between the pages' markers; `tests/test_documentation.py` holds the pages against them.
"""

from pathlib import Path

from pydantic import BaseModel

from prism.jobs.job import Job, job_schema
from prism.jobs.jobspec.blocks import BLOCKS
from prism.jobs.jobspec.othernames import KEYS, UNMODELLED, VALUES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, IMPORT = DOCS / "job-file.md", DOCS / "import.md"
SCHEMA = job_schema()["$defs"]  # without defaults that follow from other keys
NAMES, END_NAMES = "<!-- names -->", "<!-- end of names -->"
BEGIN, END = "<!-- keys -->", "<!-- end of keys -->"
LEFT, END_LEFT = "<!-- not modelled -->", "<!-- end of not modelled -->"


def blocks_of(annotation):
    """Find the blocks in a field's type, however it is wrapped."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [b for part in getattr(annotation, "__args__", ()) for b in blocks_of(part)]


def rows_of(block, above=""):
    """List key, meaning, default of a block and of those inside it."""
    for name, field in block.model_fields.items():
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        known = SCHEMA.get(block.__name__, {"properties": {name: {}}})
        default = known["properties"][name].get("default")
        plain = default if isinstance(default, (bool, int, float, str)) else ""
        shown = str(plain).lower() if isinstance(plain, bool) else str(plain)
        yield f"| `{above}{name}` | {text} | {f'`{shown}`' if shown else ''} |"
        nested = blocks_of(field.annotation)
        many = "Mapping" in str(field.annotation) or "dict" in str(field.annotation)
        for inner in nested[:1]:
            yield from rows_of(inner, f"{above}{name}.{'NAME.' if many else ''}")


def tables():
    """Write all blocks, one table each."""
    for name in BLOCKS:
        field = Job.model_fields[name]
        yield f"\n### {name}\n\n{field.description}\n"
        yield "| key | meaning [unit, or what follows] | default |\n|---|---|---|"
        yield from rows_of(blocks_of(field.annotation)[0])


def names():
    """Write other frameworks' names and words by key."""
    yield "\n| Megatron, NeMo, torchtitan, DeepSpeed, Hugging Face | prism |\n|---|---|"
    for key, others in KEYS.items():
        yield f"| {', '.join(f'`{name}`' for name in others)} | `{key}` |"
    for key, values in VALUES.items():
        for value, others in values.items():
            words = ", ".join(f"`{name}`" for name in others)
            yield f"| {words} | `parallelism.{key}: {value}` |"


def left():
    """Write what changes the step time and is not modelled."""
    yield "\n| setting | what |\n|---|---|"
    for why in dict.fromkeys(UNMODELLED.values()):
        known = ", ".join(f"`{name}`" for name, reason in UNMODELLED.items() if reason == why)
        yield f"| {known} | {why} |"


def filled(page):
    """Put the tables of this commit between a page's markers."""
    for begin, end, lines in (
        (NAMES, END_NAMES, names()), (BEGIN, END, tables()), (LEFT, END_LEFT, left()),
    ):  # fmt: skip
        if begin not in page:
            continue
        before, rest = page.split(begin)
        page = before + begin + "\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1]
    return page


if __name__ == "__main__":
    for path in (PAGE, IMPORT):
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
