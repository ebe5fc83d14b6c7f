"""OpenMetrics text: against the grammar of its specification, and against the JSON."""

import json
import math
import re
from datetime import datetime

import pytest

from prism.present.openmetrics import openmetrics_text

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
STRING = r'"((?:[^"\\\n]|\\["\\n])*)"'
META = re.compile(rf"# (TYPE|HELP|UNIT) ({NAME}) (.+)")
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (\S+)")
LABEL = re.compile(rf"({NAME})={STRING}(?:,|$)")


def parse(text):
    """Read families by name: metadata, and values by labels; refuse what the grammar has not."""
    assert text.endswith("# EOF\n") and "\r" not in text
    families, current = {}, None
    for line in text.removesuffix("# EOF\n").splitlines():
        meta = META.fullmatch(line)
        if meta:
            kind, name, value = meta.groups()
            if name != current:  # families are contiguous, each there once
                assert name not in families
                current, families[name] = name, {"values": {}}
            assert kind not in families[name] and not families[name]["values"]
            families[name][kind] = value
            continue
        name, labels, value = SAMPLE.fullmatch(line).groups()
        assert name == current and "#" not in value
        pairs = LABEL.findall(labels)
        assert "".join(f'{k}="{v}",' for k, v in pairs) == labels + ","
        keys = tuple(sorted(pairs))
        assert keys not in families[name]["values"]
        families[name]["values"][keys] = float(value)
    for name, family in families.items():
        assert family["TYPE"] == "gauge" and family["values"]
        unit = family.get("UNIT")
        assert unit is None or name.endswith(f"_{unit}")
        assert unit is not None or not name.endswith(("_seconds", "_ratio"))
    return families


def by_quantile(family):
    return {dict(labels)["quantile"]: value for labels, value in family["values"].items()}


def test_an_estimate_is_what_its_json_says(run, tmp_path):
    path = tmp_path / "run.prom"
    code, out, err = run(
        "estimate", "pipeline-8x32", "--replicates", "128", "--run-replicates", "200", "--seed",
        "1", "--steps", "1000", "--deadline", "34h", "--start", "2026-01-05", "--json",
        "--openmetrics", path,
    )  # fmt: skip
    assert code == 0, err
    figures, found = json.loads(out), parse(path.read_text())
    for key in ("step_time", "time_to_train"):
        values = by_quantile(found[f"prism_{key}_seconds"])
        assert values == {str(int(q[1:]) / 100): figures[key][q] for q in figures[key]
                          if re.fullmatch(r"p\d+", q) and figures[key][q] is not None}  # fmt: skip
        assert len(values) >= 3
    assert [*found["prism_steps"]["values"].values()] == [1000.0]
    assert [*found["prism_done_by_deadline_ratio"]["values"].values()] == [
        figures["finish_by"]["probability"]
    ]
    date = datetime.fromisoformat(figures["finish_date"]["date"]).timestamp()
    assert by_quantile(found["prism_finish_timestamp_seconds"]) == {"0.9": date}


def test_names_that_hold_anything():
    figures = {"job": 'a"b\\c\nd\x1b', "step_time": {"mean": 1.0, "p50": 1e-9, "p95": None}}
    found = parse(openmetrics_text(figures))
    ((labels, value),) = found["prism_step_time_seconds"]["values"].items()
    assert value == 1e-9
    label = dict(labels)["job"]
    assert label.encode().decode("unicode_escape") == 'a"b\\c\nd\\u001b'
    assert set(found) == {"prism_step_time_seconds", "prism_step_time_mean_seconds"}


def test_the_parser_refuses_what_is_wrong():
    good = openmetrics_text({"job": "a", "steps": 3, "mfu": 0.5})
    assert parse(good)
    for bad in (good.replace("# EOF\n", ""), good.replace("_ratio ratio", "_ratio percent"),
                good.replace('job="a"', "job=a"), good.replace(" 3.0", " x")):  # fmt: skip
        assert bad != good
        with pytest.raises((AssertionError, AttributeError, ValueError)):
            parse(bad)
    assert math.isfinite(next(iter(parse(good)["prism_mfu_ratio"]["values"].values())))


def test_a_place_that_cannot_be_written_is_told_first(run, tmp_path):
    code, out, err = run("estimate", "pipeline-8x32", "--openmetrics", tmp_path / "no" / "x.prom")
    assert (code, out) == (2, "") and "no folder" in err
