"""Lists of hosts as Slurm, MPI, PBS, LSF and launchers write them."""

import json
import re

import pytest
from job_invariants import BUDGETS

JOB = ("--set", "cluster={gpus_per_node: 1, nodes: 8}")
FEW = ("--replicates", 64, "--seed", 1, "--json", "-q")
# four stages of two replicas each; a node of the last one, the longest, is slow
PLACE = """
model: {durations: {forward_s: [1.0, 1.0, 1.0, 1.5], backward_s: [2.0, 2.0, 2.0, 3.0]}}
parallelism: {pp: 4, microbatches: 8}
cluster: {nodes: 4, gpus_per_node: 1}
variability: {library: none, effects: {rank: {cv: 0.001}}}
"""


@pytest.fixture
def placed(run, tmp_path, monkeypatch):
    """Place a job of four nodes whose host of a name is slow: where that is found to be."""
    for place, value in BUDGETS.items():  # of what is best nothing is asked
        monkeypatch.setattr(place, value)
    (tmp_path / "job.yaml").write_text(PLACE)

    def where(name, hosts, *more):
        status, out, err = run("place", tmp_path / "job.yaml", "--at", name, "--slowdown", "1.5",
                               "--hosts", hosts, *FEW[2:], *more)  # fmt: skip
        assert "Traceback" not in err
        return status, json.loads(out)["slow_nodes"][0] if status == 0 else err

    return where


FOUR = [
    "node[001-003,7]",  # squeue, SLURM_JOB_NODELIST
    "NodeList=node[001-003,7]",  # scontrol show job
    "node001\nnode002\nnode003\nnode7\n",  # scontrol show hostnames
    "node001 slots=8\nnode002 slots=8 max_slots=8\nnode003\nnode7 slots=8\n",  # Open MPI
    "node001:8\nnode002:8\n# spare\nnode003:8\n\nnode7:8\n",  # MPICH, torchrun
    "node001\nnode001\nnode002\nnode002\nnode003\nnode7\nnode7\n",  # PBS_NODEFILE
    "login\n"
    + "".join(f"{name}\n" * 8 for name in ("node001", "node002", "node003", "node7")),  # LSF
    "login 1 node001 42 node002 42 node003 42 node7 42",  # LSB_MCPU_HOSTS
    "rank 2=node003 slot=0\nrank 0=node001 slot=0\nrank 1=node002 slot=0-3\nrank 3=node7 slot=0",
    "-w node001,node002,node[003,7]",  # pdsh
    "node[001-002]\nnode[003,7]",
    'export NODES="node[001-003],node7"',
    "LSB_HOSTS='node001 node001 node002 node003 node003 node7'",
    "login node001 node001 node002 node002 node003 node003 node7 node7",
    "exec_host = node001/0*8+node002/0*8+node003/0*8+node7/0*8",  # PBS, Torque
    "(node001:ncpus=8:ngpus=4)+(node002:ncpus=8)+(node003:ncpus=8)+(node7:ncpus=8)",  # exec_vnode
    "node001:8 binding=user:0,1\nnode002:8 binding=user:0,1\nnode003:8\nnode7:8",  # Hydra
    "pdsh -w node[001-005,7] -x node[004-005]",
    "node[001-005,7-9/3]!node[004-005]",  # ClusterShell
    "0: node001\n3: node7\n2: node003\n1: node002\n",  # srun -l hostname
]


@pytest.mark.parametrize("text", FOUR)
def test_the_same_four_hosts(placed, tmp_path, text):
    (tmp_path / "hosts").write_text(text)
    for name, node in (("node001", 0), ("node003", 2), ("node7", 3)):
        status, found = placed(name, tmp_path / "hosts")
        assert status == 0, found
        assert found["node"] == node and found["before"]["slot"] == node


def test_a_list_may_be_given_as_it_is(placed):
    names = "job-worker-[0-3].job.ns.svc"
    assert placed("job-worker-2.job.ns.svc", names)[1]["node"] == 2
    assert placed("r2n9-ib", "r[1-2]n[9-10]-ib")[1]["node"] == 2


def test_nodes_of_scontrol_are_those_that_can_run_a_job(placed, tmp_path):
    """Both forms; states as slurm.schedmd.com/scontrol.html lists them."""
    states = {"n1": "IDLE", "n2": "MIXED+CLOUD", "n3": "DOWN*", "n4": "IDLE+DRAIN",
              "n5": "ALLOCATED", "n6": "IDLE*", "n7": "IDLE+MAINT", "n8": "X+DRAIN",
              "n9": "IDLE"}  # fmt: skip
    for apart in ("\n   ", " "):
        rows = (f"NodeName={n} Arch=x86_64 CPUTot=64{apart}OS=Linux{apart}State={s} Weight=1"
                for n, s in states.items())  # fmt: skip
        (tmp_path / "hosts").write_text("\n\n".join(rows) + "\n")
        for name, node in (("n1", 0), ("n2", 1), ("n5", 2), ("n9", 3)):
            assert placed(name, tmp_path / "hosts")[1]["node"] == node
        assert placed("n3", tmp_path / "hosts")[0] == 2


@pytest.mark.parametrize("text", [
    "n[1-", "n1]", "n[[1]]", "n[3-1]", "n[a-b]", "n[]", "n[0-99999999999]", "n[1-9999][1-9999]",
    "%%garbage[[", "no-such-file.txt", ".", "n[1-3]",
])  # fmt: skip
def test_what_is_no_list_of_four_hosts_is_refused(placed, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    status, said = placed("n1", text)
    assert status == 2 and len(said.splitlines()) == 1


def test_launchers_files_hold_one_order(placed, tmp_path):
    """All files put the same host at a rank, and prism reads that order back."""
    out = tmp_path / "out"
    status, found = placed("gpu3", "gpu[0-3]", "-o", out)
    assert status == 0, found
    slots = [line.split(",") for line in (out / "hosts.csv").read_text().splitlines()[1:]]
    hosts = [row[2] for row in slots]
    assert sorted(hosts) == ["gpu0", "gpu1", "gpu2", "gpu3"]
    assert hosts.index("gpu3") == found["after"]["slot"] != 3
    for name in ("hostfile.txt", "slurm_hostfile.txt", "openmpi_hostfile.txt"):
        assert re.findall(r"gpu\d", (out / name).read_text()) == hosts
        (tmp_path / "back").write_text((out / name).read_text())
        assert placed("gpu3", tmp_path / "back")[1]["node"] == hosts.index("gpu3")
    ranks = re.findall(r"rank (\d+)=(\w+) slot=(\d+)", (out / "rankfile.txt").read_text())
    assert [(int(a), b, int(c)) for a, b, c in ranks] == [(i, h, 0) for i, h in enumerate(hosts)]


def test_a_placement_that_was_written_is_one_that_a_job_takes(run, placed, tmp_path):
    assert placed("gpu3", "gpu[0-3]", "-o", tmp_path / "out")[0] == 0
    slow = ("--set", "cluster.node_slowdowns={3: 1.5}")

    def mean(*more):
        status, out, err = run("estimate", tmp_path / "job.yaml", *slow, *FEW, *more)
        assert status == 0, err
        return json.loads(out)["step_time"]["mean"]

    moved = mean("--set", f"cluster.hosts={tmp_path / 'out' / 'hosts.csv'}")
    assert moved < 0.9 * mean()
    (tmp_path / "order").write_text("[3,1,2,0]\n")
    assert mean("--set", f"cluster.hosts={tmp_path / 'order'}") < 0.9 * mean()
    (tmp_path / "order").write_text("gpu[0-3]\n")
    order = f"cluster.hosts={tmp_path / 'order'}"
    status, _, err = run("estimate", tmp_path / "job.yaml", *FEW, "--set", order)
    assert status == 2 and "gpu0" in err
