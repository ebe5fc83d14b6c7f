"""OpenMetrics text: against the grammar of its specification, and against the JSON."""

import json
import math
import re
from datetime import datetime

import pytest

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


JOB = """
model: {durations: {forward_s: 1.0, backward_s: 2.0}}
parallelism: {pp: 2, dp: 2, microbatches: 4}
cluster: {nodes: 1, gpus_per_node: 4}
variability: {effects: {rank: {cv: 0.02}}}
"""


@pytest.fixture
def told(run, tmp_path):
    """JSON and OpenMetrics of an estimate of a job whose name holds anything."""
    (job := tmp_path / 'a"b\\c\nd.yaml').write_text(JOB)
    code, out, err = run(
        "estimate", job, "--replicates", "128", "--run-replicates", "200", "--seed", "1",
        "--steps", "1000", "--deadline", "4.4h", "--start", "2026-01-05", "--json",
        "--openmetrics", tmp_path / "run.prom",
    )  # fmt: skip
    assert code == 0, err
    return json.loads(out), (tmp_path / "run.prom").read_text()


def test_an_estimate_is_what_its_json_says(told):
    figures, text = told
    found = parse(text)
    for key in ("step_time", "time_to_train"):
        values = by_quantile(found[f"prism_{key}_seconds"])
        assert values == {str(int(q[1:]) / 100): figures[key][q] for q in figures[key]
                          if re.fullmatch(r"p\d+", q) and figures[key][q] is not None}  # fmt: skip
        assert len(values) >= 3
        assert list(found[f"prism_{key}_mean_seconds"]["values"].values()) == [figures[key]["mean"]]
    assert [*found["prism_steps"]["values"].values()] == [1000.0]
    assert [*found["prism_done_by_deadline_ratio"]["values"].values()] == [
        figures["finish_by"]["probability"]
    ]
    date = datetime.fromisoformat(figures["finish_date"]["date"]).timestamp()
    assert by_quantile(found["prism_finish_timestamp_seconds"]) == {"0.9": date}
    for family in found.values():
        for labels, value in family["values"].items():
            label = dict(labels)["job"].encode().decode("unicode_escape")
            assert label == figures["job"] == 'a"b\\c\nd' and math.isfinite(value)
    # what the parser refuses
    for bad in (text.replace("# EOF\n", ""), text.replace("_ratio ratio", "_ratio percent"),
                text.replace('job="', "job=", 1), text.replace(" 1000.0", " x")):  # fmt: skip
        assert bad != text
        with pytest.raises((AssertionError, AttributeError, ValueError)):
            parse(bad)


def test_a_place_that_cannot_be_written_is_told_first(run, tmp_path):
    code, out, err = run("estimate", "pipeline-8x32", "--openmetrics", tmp_path / "no" / "x.prom")
    assert (code, out) == (2, "") and "x.prom" in err
