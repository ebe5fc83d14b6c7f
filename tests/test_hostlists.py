"""Lists of hosts as Slurm, MPI, PBS and launchers write them."""

import re

import pytest

from prism import PrismError
from prism.cluster.nodes.hosts import read_host_list
from prism.jobs.hostfiles import host_order, launcher_files, read_hosts
from prism.jobs.hostlists import read_hosts_text


@pytest.mark.parametrize(
    "text",
    [
        "node[001-003,7]",  # squeue, SLURM_JOB_NODELIST
        "NodeList=node[001-003,7]",  # scontrol show job
        "node001\nnode002\nnode003\nnode7\n",  # scontrol show hostnames
        "node001 slots=8\nnode002 slots=8 max_slots=8\nnode003\nnode7 slots=8\n",  # Open MPI
        "node001:8\nnode002:8\n# spare\nnode003:8\n\nnode7:8\n",  # MPICH, torchrun
        "node001\nnode001\nnode002\nnode002\nnode003\nnode7\nnode7\n",  # PBS_NODEFILE
        "-w node001,node002,node[003,7]",  # pdsh
        "node[001-002]\nnode[003,7]",
        'export NODES="node[001-003],node7"',
    ],
)
def test_the_same_four_hosts(text):
    assert read_hosts_text(text, "-") == ["node001", "node002", "node003", "node7"]


def test_kubeflow_and_racks():
    text = "job-worker-0.job.ns.svc slots=8\njob-worker-1.job.ns.svc slots=8\n"
    names = ["job-worker-0.job.ns.svc", "job-worker-1.job.ns.svc"]
    assert read_hosts_text(text, "-") == names
    assert read_hosts_text("r[1-2]n[9-10]-ib", "-") == ["r1n9-ib", "r1n10-ib", "r2n9-ib",
                                                        "r2n10-ib"]  # fmt: skip


@pytest.mark.parametrize("text", ["n[1-", "n1]", "n[[1]]", "n[3-1]", "n[a-b]", "n[]",
                                  "n[0-99999999999]", "n[1-9999][1-9999]"])  # fmt: skip
def test_refused(text):
    with pytest.raises(PrismError) as error:
        read_hosts_text(text, "list")
    assert "list" in str(error.value) and "\n" not in str(error.value)


def test_where_hosts_are_taken(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("gpu[1-4]\n")
    assert read_host_list(str(path), 4) == read_host_list("gpu[1-4]", 4) == ["gpu1", "gpu2", "gpu3",
                                                                            "gpu4"]  # fmt: skip
    path.write_text(host_order([2, 0, 1]))
    assert read_hosts(path) == [2, 0, 1]
    path.write_text("[0-2],7\n")
    assert read_hosts(path) == [0, 1, 2, 7]
    path.write_text("gpu[1-4]\n")
    with pytest.raises(PrismError, match="'gpu1'"):
        read_hosts(path)


def test_launchers_files_hold_one_order():
    """All files put the same host at a rank; what prism reads back is that order."""
    names, order, per_node = {k: f"gpu{k:02d}" for k in range(20)}, [7, 0, 19, 3], 8
    files = launcher_files(order, names, per_node)
    hosts = [names[node] for node in order]
    whole = [host for host in hosts for _ in range(per_node)]
    for name in ("slurm_hostfile.txt", "openmpi_hostfile.txt", "mpich_hostfile.txt"):
        assert read_hosts_text(files[name], name) == hosts
    assert files["slurm_hostfile.txt"].split() == whole
    ranks = [re.fullmatch(r"rank (\d+)=(\w+) slot=(\d+)", x).groups()
             for x in files["rankfile.txt"].splitlines()]  # fmt: skip
    assert [(int(a), b, int(c)) for a, b, c in ranks] == [
        (rank, host, rank % per_node) for rank, host in enumerate(whole)
    ]
    assert launcher_files([7, 20], names, per_node) == {}  # node 20 has no name


@pytest.mark.parametrize("given", ["", "%%garbage[[", "no-such-file.txt", "."])
def test_what_is_neither_a_file_nor_a_list_is_told(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PrismError) as error:
        read_host_list(given, 4)
    assert repr(given) in str(error.value)


def test_nodes_of_scontrol_are_those_that_can_run_a_job():
    """Both forms; states as slurm.schedmd.com/scontrol.html lists them."""
    states = {"n1": "IDLE", "n2": "MIXED+CLOUD", "n3": "DOWN*", "n4": "IDLE+DRAIN",
              "n5": "ALLOCATED", "n6": "IDLE*", "n7": "IDLE+MAINT", "n8": "X+DRAIN"}  # fmt: skip
    for apart in ("\n   ", " "):
        rows = (f"NodeName={n} Arch=x86_64 CPUTot=64{apart}OS=Linux{apart}State={s} Weight=1"
                for n, s in states.items())  # fmt: skip
        assert read_hosts_text("\n\n".join(rows) + "\n", "-") == ["n1", "n2", "n5"]
