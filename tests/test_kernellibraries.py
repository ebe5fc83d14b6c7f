"""Libraries from HTA's kernel tables and from nccl-tests; and the samples that documents show."""

import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tables_made

import prism

SAMPLES = Path(__file__).parents[1] / "experiments" / "samples"


@pytest.fixture
def ask(run):
    """Status, JSON and messages of a command."""

    def call(*words):
        status, out, err = run(*words, "--json", "-q")
        return status, json.loads(out) if status == 0 else None, err

    return call


@pytest.mark.parametrize("unit", ["us", "ns"])  # HTA's ns are the trace's us
def test_moments_come_back(tmp_path, unit, ask):
    rows = tables_made.durations(seed=3)
    path = tmp_path / "anything.txt"
    tables_made.hta_table(rows, unit=unit).to_csv(path, index=False)
    model = tmp_path / "library.nc"
    status, found, text = ask("fit", path, "-o", model)
    assert status == 0 and found["kind"] == "library" and "moments alone" in text
    library = prism.load_library(model)
    for name, _, _, _ in rows[::2]:
        mine = np.concatenate([x for n, _, _, x in rows if n == name]) * 1e-6
        row = next(k for k in found["kernels"] if k["name"] == name)
        assert row["n"] == mine.size and row["mean"] == pytest.approx(mine.mean(), rel=1e-12)
        assert row["cv"] == pytest.approx(mine.std(ddof=1) / mine.mean(), rel=1e-9)
        entry = next(e for e in library.entries if e.startswith("kernel/") and e.endswith(name))
        assert library.distribution(entry).cv == pytest.approx(row["cv"], rel=1e-6)
    assert "others" not in {k["name"] for k in found["kernels"]}
    assert ask("show", path)[1]["kind"] == "kernels"
    status, _, text = ask("replay", path)
    assert status == 2 and f"{path}: " in text


SUM = ["Time (%)", "Total Time ({})", "Instances", "Avg ({})", "Med ({})", "Min ({})", "Max ({})",
       "StdDev ({})", "Name"]  # fmt: skip
BEFORE = "Generating SQLite file r.sqlite from r.nsys-rep\nProcessing [r.sqlite] with [x.py]...\n\n"
AFTER = (
    "\nProcessing [r.sqlite] with [y.py]...\n\nTime (%),Total Time (ns),Num Calls,Name\n1,2,3,x\n"
)


@pytest.mark.parametrize(("unit", "second"), [("ns", 1e9), ("us", 1e6)])
@pytest.mark.parametrize(("before", "after"), [("", ""), (BEFORE, AFTER)])
def test_the_table_of_nsys_stats(tmp_path, ask, unit, second, before, after):
    rows = [row for row in tables_made.durations(seed=3) if row[2] == 0]
    scale = 1e-6 * second
    table = [[1.0, x.sum() * scale, x.size, x.mean() * scale, np.median(x) * scale,
              x.min() * scale, x.max() * scale, x.std(ddof=1) * scale, f"{name}(int, int)"]
             for name, _, _, x in rows]  # fmt: skip
    text = pd.DataFrame(table, columns=[name.format(unit) for name in SUM]).to_csv(index=False)
    path = tmp_path / "sum.csv"
    path.write_text(before + text + after)
    status, found, _ = ask("fit", path)
    assert status == 0 and found["kind"] == "library"
    for name, kind, _, x in rows:
        row = next(k for k in found["kernels"] if k["name"].startswith(name))
        assert row["n"] == x.size and row["mean"] == pytest.approx(1e-6 * x.mean(), rel=1e-9)
        assert row["cv"] == pytest.approx(x.std(ddof=1) / x.mean(), rel=1e-9)
        assert (row["op_kind"] == "all_reduce") == (kind == "COMMUNICATION")
    assert ask("compare", path, path)[0] == ask("replay", path)[0] == 2
    path.write_text(text.replace(f"StdDev ({unit})", "Spread"))
    assert "sqlite" in ask("fit", path)[2]


def test_tables_that_are_none(tmp_path, ask):
    table = tables_made.hta_table(tables_made.durations())
    path = tmp_path / "t.csv"
    table.assign(**{"min (us)": 1e9}).to_csv(path, index=False)
    assert "not in order" in ask("fit", path)[2]
    table.assign(stddev=1e200).to_csv(path, index=False)
    assert ask("fit", path)[0] == 2 and "deviation" in ask("show", path)[2]
    table.drop(columns="stddev").to_csv(path, index=False)
    assert "no column std" in ask("fit", path)[2]


def test_a_line_comes_back_exactly(tmp_path, ask):
    path = tmp_path / "out.log"
    path.write_text(tables_made.nccl_tests(latency=12e-6, bandwidth=150e9))
    status, found, _ = ask("fit", path)
    row = found["collectives"][0]
    assert status == 0 and (row["hosts"], row["gpus"]) == (2, 16)
    assert row["latency_s"] == pytest.approx(12e-6, rel=1e-3)  # printed with 4 digits behind us
    assert row["bus_bytes_per_s"] == pytest.approx(150e9, rel=1e-3)


def test_intervals_of_a_line_cover(tmp_path, ask):
    """Of 20 noisy sets of three runs, nearly all intervals of 95 % hold the truth."""
    inside, spread = np.zeros(2), []
    for trial in range(20):
        for seed in range(3):
            text = tables_made.nccl_tests(noise=0.02, seed=1_000 * trial + seed, high=64 << 20)
            (tmp_path / f"{seed}.txt").write_text(text)
        row = ask("fit", tmp_path)[1]["collectives"][0]
        for k, (name, truth) in enumerate((("latency_ci", 20e-6), ("bus_ci", 200e9))):
            low, high = row[name]
            inside[k] += low < truth < high
        spread.append(row["repeat_cv"])
        assert row["latency_ci"][1] - row["latency_ci"][0] < 4e-6
    assert (inside >= 15).all() and np.mean(spread) == pytest.approx(0.02, rel=0.35)


def test_a_folder_of_tests_and_links_in_a_job(tmp_path, ask):
    for name, hosts in (("one", ("a",)), ("two", ("a", "b"))):
        (tmp_path / name).write_text(tables_made.nccl_tests(hosts=hosts, noise=0.01))
    found = ask("show", tmp_path)[1]
    assert found["kind"] == "collectives" and set(found["links"]) == {"nvlink", "network"}
    values = [f"cluster.links.network.{k}={v}" for k, v in found["links"]["network"].items()]
    job = prism.load_job("llama3-70b-fsdp-512", values)
    assert job.cluster.links.network.efficiency == 1.0


def collective(ask, path, text):
    """What is fitted to a text: its one line, and the links."""
    path.write_text(text)
    status, found, err = ask("fit", path)
    assert status == 0, err
    (row,) = found["collectives"]
    return row, found["links"]


def test_other_writers_of_the_same_table(tmp_path, ask):
    """With a time of day, the processor's time, or without a name; rccl-tests' JSON and CSV."""
    text, path = tables_made.nccl_tests(hosts=("a",)), tmp_path / "a.txt"
    row, links = collective(ask, path, text)
    stamped = [
        f"{line}            timestamp" if line.lstrip("# ").startswith("size")
        else f"{line}  2026-07-10 11:02:00" if line.lstrip()[:1].isdigit() else line
        for line in text.splitlines()
    ]  # fmt: skip
    unnamed = text.replace("# Collective test starting: all_reduce_perf\n", "")
    heads = [line for line in text.splitlines() if line.lstrip("# ").startswith("size")]
    cpu = text.replace(heads[0], heads[0].replace(" time ", " cputime "))
    assert unnamed != text != cpu
    for other in ("\n".join(stamped), unnamed, cpu):
        assert collective(ask, path, other) == (row, links)
    keys = ("name", "size", "type", "redop", "inPlace", "time", "algBw", "busBw", "#wrong", "gpus")
    rows = []
    for cells in (line.split() for line in text.splitlines() if line.lstrip()[:1].isdigit()):
        for place, at in ((0, 5), (1, 9)):
            time, algorithm, bus = map(float, cells[at : at + 3])
            values = ("AllReduce", int(cells[0]), "float", "sum", place, time, algorithm, bus, 0, 8)
            rows.append(dict(zip(keys, values, strict=True)))
    lines = "\n".join(json.dumps(dict(sorted(row.items()))) for row in rows)
    table = "\n".join([",".join(keys), *(",".join(map(str, r.values())) for r in rows)])
    for name, other in (("a.json", lines), ("a.csv", table)):
        assert collective(ask, tmp_path / name, other) == (row, links)


def test_a_test_is_named_by_what_its_bus_carries_or_not_at_all(tmp_path, ask):
    text = tables_made.nccl_tests(name="all_gather")
    unnamed = text.replace("# Collective test starting: all_gather_perf\n", "")
    assert collective(ask, tmp_path / "a.txt", unnamed)[0]["name"] == "collective"
    assert collective(ask, tmp_path / "AllGather-16.txt", unnamed)[0]["name"] == "all_gather"
    for hosts in (("a",), [f"n{i}" for i in range(16)]):
        text = tables_made.nccl_tests(name="reduce_scatter", hosts=hosts)
        unnamed = text.replace("# Collective test starting: reduce_scatter_perf\n", "")
        assert collective(ask, tmp_path / "a.txt", unnamed)[0]["name"] == "reduce_scatter"


def nccl_json(text, version=2, key="time"):
    """What nccl-tests writes with -J beside a text: its arguments, devices and results."""
    devices = re.findall(r"Rank +(\d+) .* on +(\S+) device", text)
    results = []
    for cells in (line.split() for line in text.splitlines() if line.lstrip()[:1].isdigit()):
        row = {"size": int(cells[0]), "count": int(cells[1]), "type": cells[2], "redop": cells[3],
               "root": "    -1"}  # fmt: skip
        for place, at in (("out_of_place", 5), ("in_place", 9)):
            values = map(float, cells[at : at + 4])
            row[place] = dict(zip((key, "alg_bw", "bus_bw", "nwrong"), values, strict=True))
            row[f"{place}_per_iter"] = {"min_us": 1.0, "times_us": [1.0, 2.0]}
        results.append({**row, "actual_iterations": 20, "experiment_name": ""})
    config = {"nthreads": 1, "ngpus": 1, "devices": [
        {"rank": int(rank), "group": 0, "pid": 1, "hostname": host, "device": 0,
         "device_info": "NVIDIA"} for rank, host in devices]}  # fmt: skip
    return {
        "version": version, "start_time": "2026-07-10 11:02:00", "args": ["all_reduce_perf", "-J"],
        "env": ["PATH=/bin"], "nccl_version": 22907, "config": config, "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"}, "errors": [], "end_time": "",
    }  # fmt: skip


def test_the_json_of_nccl_tests(tmp_path, ask):
    text, path = tables_made.nccl_tests(hosts=("a", "b")), tmp_path / "a.json"
    row, links = collective(ask, tmp_path / "a.txt", text)
    assert row["name"] == "all_reduce" and row["hosts"] == 2 and row["gpus"] == 16
    whole = nccl_json(text)
    plain = json.dumps(whole, separators=(",", ":"))
    assert collective(ask, path, plain) == (row, links)
    assert collective(ask, path, json.dumps(whole, indent=2)) == (row, links)
    assert collective(ask, path, json.dumps(nccl_json(text, key="cpu_time"))) == (row, links)
    cut = plain[: plain.index('"out_of_bounds"') - 400]  # within the last result
    found, _ = collective(ask, path, cut)
    assert found["n"] == row["n"] - 2 and found["hosts"] == 2
    per_gpu = json.loads(plain)  # one process of a host has eight GPUs
    per_gpu["config"] |= {"ngpus": 8, "devices": per_gpu["config"]["devices"][::8]}
    assert collective(ask, path, json.dumps(per_gpu)) == (row, links)
    for name in ("out_of_place", "in_place"):
        for result in whole["results"]:
            result[name] = None
    path.write_text(json.dumps({**whole, "errors": ["unhandled system error"]}))
    status, _, err = ask("fit", path)
    assert status == 2 and "unhandled system error" in err


def test_columns_of_single_iterations(tmp_path, ask):
    text = tables_made.nccl_tests()
    row, links = collective(ask, tmp_path / "a.txt", text)
    lines = []
    for line in text.splitlines():
        cells = line.split()
        if cells[:1] and cells[0].isdigit():
            more = ["1.00", "99999.0", "7.1", "0.5"]
            line = " ".join([*cells[:9], *more, *cells[9:], *more])
        elif cells[:2] == ["#", "size"]:
            more = ["i_min", "i_max", "i_p99", "i_cv%"]
            line = " ".join([*cells[:10], *more, *cells[10:], *more])
        lines.append(line)
    assert collective(ask, tmp_path / "a.txt", "\n".join(lines)) == (row, links)


def test_a_run_that_failed_says_why(tmp_path, ask):
    text = tables_made.nccl_tests()
    head = text[: text.index("#  ", text.index("Using devices") + 900)]
    failure = "n1: Test NCCL failure common.cu:958 'unhandled system error / connect timed out'\n"
    path = tmp_path / "a.txt"
    for output in (head + failure, text.split("(GB/s)\n")[0] + "(GB/s)\n" + failure):
        path.write_text(output)
        status, _, err = ask("fit", path)
        assert status == 2 and "connect timed out" in err
    path.write_text(tables_made.nccl_tests(hosts=("a",), per_host=1))
    status, _, err = ask("fit", path)
    assert status == 2 and "MPI=1" in err and "one process" in err


@pytest.mark.parametrize(("bandwidth", "tier"), [(850e9, "nvlink"), (150e9, "network")])
def test_a_rack_of_nvl72_is_one_nvlink_domain(tmp_path, ask, bandwidth, tier):
    hosts = [f"gb{i:02d}" for i in range(18)]
    text = tables_made.nccl_tests(hosts=hosts, per_host=4, bandwidth=bandwidth)
    text = text.replace("[0x19] NVIDIA", "[0x19] NVIDIA GB200")
    assert set(collective(ask, tmp_path / "a.txt", text)[1]) == {tier}


def test_processes_that_tested_their_own_gpu_are_named(tmp_path, ask):
    text = tables_made.nccl_tests(hosts=("a",), per_host=1)
    path = tmp_path / "a.txt"
    path.write_text(text + text)
    status, _, err = ask("fit", path)
    assert status == 2 and "MPI=1" in err


def test_one_size_is_no_line(tmp_path, ask):
    path = tmp_path / "one.txt"
    path.write_text(tables_made.nccl_tests(low=1 << 20, high=1 << 20))
    assert "two sizes" in ask("fit", path)[2]
    assert ask("fit", SAMPLES / "nodelist.txt")[0] == 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [("nsys", "trace"), ("chakra", "trace"), ("hta_kernels.csv", "library"),
     ("all_reduce.txt", "library")],
)  # fmt: skip
def test_samples(name, kind, ask):
    status, found, _ = ask("fit", SAMPLES / name)
    assert status == 0 and found["kind"] == kind
    assert ask("show", SAMPLES / name)[0] == 0
    assert ask("replay", SAMPLES / name)[0] == (0 if kind == "trace" else 2)


def test_samples_are_what_their_script_writes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SAMPLES))
    sys.modules.pop("make", None)
    import make

    monkeypatch.setattr(make, "HERE", tmp_path)
    make.main()
    made = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".sqlite"]
    assert len(made) == 8
    for path in made:
        there = SAMPLES / path.relative_to(tmp_path)
        assert (
            hashlib.sha256(path.read_bytes()).digest()
            == hashlib.sha256(there.read_bytes()).digest()
        ), path.name
