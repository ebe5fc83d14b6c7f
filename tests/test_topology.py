"""Topologies of Slurm and Kubernetes as places of a job's hosts.

Formats: slurm.schedmd.com/topology.conf.html and topology.yaml.html; labels of NVIDIA Topograph,
docs.nvidia.com/topograph/reference/node-labels-and-annotations.
"""

import json

import pytest
from drawn_steps import draw_steps

from prism import load_job

TREE = """
# three racks under two spines
SwitchName=root Switches=spine[1-2]
SwitchName=spine1 Switches=leaf[1-2] LinkSpeed=400
SwitchName=spine2 Switches=leaf[3-4]
SwitchName=leaf1 Nodes=n[01-04]
SwitchName=leaf2 Nodes=n[05-08]
SwitchName=leaf3 \\
  Nodes=n[09-12]
switchname=leaf4 nodes=n[13-16]
"""
BLOCK = "BlockName=b1 Nodes=n[01-04]\nBlockName=b2 Nodes=n[05-08]\nBlockName=b3 Nodes=n[09-12]\n" \
    "BlockName=b4 Nodes=n[13-16]\nBlockSizes=4,8\n"  # fmt: skip
YAML_TREE = """
- topology: flat1
  cluster_default: false
  flat: true
- topology: t1
  cluster_default: true
  tree:
    switches:
      - {switch: root, children: "spine[1-2]"}
      - {switch: spine1, children: "leaf[1-2]"}
      - {switch: spine2, children: "leaf[3-4]"}
      - {switch: leaf1, nodes: "n[01-04]"}
      - {switch: leaf2, nodes: "n[05-08]"}
      - {switch: leaf3, nodes: "n[09-12]"}
      - {switch: leaf4, nodes: "n[13-16]"}
"""
YAML_BLOCK = """
- topology: b
  cluster_default: true
  block:
    block_sizes: [4, 8]
    blocks:
      - {block: b1, nodes: "n[01-04]"}
      - {block: b2, nodes: "n[05-08]"}
      - {block: b3, nodes: "n[09-12]"}
      - {block: b4, nodes: "n[13-16]"}
"""
HOSTS = [f"n{k:02}" for k in range(1, 17)]
KEYS = {"nodes": 16, "leaf_nodes": 4, "tiers": {"leaf": {"gpus": 32}, "spine": {"gpus": 64}}}


def labels(prefix, names):
    items = []
    for k, host in enumerate(HOSTS):
        units = (f"l{k // 4}", f"s{k // 8}", "core")
        own = {f"{prefix}{name}": unit for name, unit in zip(names, units, strict=True)}
        items.append({"metadata": {"name": host, "labels": own | {"zone": "z"}}})
    return json.dumps({"kind": "List", "items": items})


NEW = labels("fabric.topograph.run/tier-", "012")
OLD = labels("network.topology.nvidia.com/", ("leaf", "spine", "core"))


def job_of(n_nodes):
    return load_job("llama3-70b-fsdp-512").replace({
        "parallelism": {"dp": 8 * n_nodes}, "cluster": {"nodes": n_nodes},
    })  # fmt: skip


def write(path, text):
    path.write_text(text)
    return path


@pytest.fixture
def placed(run, tmp_path):
    """Place hosts by a topology through the command: what it adds to `cluster`, their names."""

    def place(job, text, hosts, said=None):
        write(tmp_path / "topology", text)
        size = {
            "parallelism": {"dp": job.parallelism.dp},
            "cluster": {
                "nodes": job.cluster.nodes,
                "nvlink_domain_gpus": job.cluster.nvlink_domain_gpus,
            },
        }
        write(tmp_path / "job.yaml", json.dumps({"base": "llama3-70b-fsdp-512", **size}))
        write(tmp_path / "hosts", "\n".join(hosts) + "\n")
        status, out, err = run(
            "import",
            tmp_path / "topology",
            "--job",
            tmp_path / "job.yaml",
            "--hosts",
            tmp_path / "hosts",
            "-o",
            tmp_path / "placed.yaml",
            "--json",
        )
        if said is not None:
            assert (status, out) == (2, "") and said in err, err
            return None
        assert status == 0, err
        found = json.loads(out)
        return found["cluster"], found["hosts"], load_job(tmp_path / "placed.yaml")

    return place


@pytest.mark.parametrize("text", [TREE, YAML_TREE, NEW, OLD])
def test_trees_become_tiers(placed, text):
    keys, names, _ = placed(job_of(16), text, HOSTS)
    assert keys == KEYS and names == HOSTS


BLOCKS = {"nodes": 16, "tiers": {"block": {"gpus": 32}, "aggregate2": {"gpus": 64}}}


@pytest.mark.parametrize("text", [BLOCK, YAML_BLOCK])
def test_blocks_become_tiers_or_nvlink_domains(placed, text):
    assert placed(job_of(16), text, HOSTS)[0] == BLOCKS
    rack = job_of(16).replace("cluster.nvlink_domain_gpus=32")  # a device joined beyond a node
    assert placed(rack, text, HOSTS)[0] == {
        "nodes": 16, "nvlink_domain_gpus": 32, "tiers": {"aggregate2": {"gpus": 64}}
    }  # fmt: skip


def test_accelerator_labels_are_nvlink_domains(placed):
    table = json.loads(NEW)
    for k, item in enumerate(table["items"]):
        item["metadata"]["labels"]["accelerator.topograph.run/domain"] = f"d{k // 2}"
    assert placed(job_of(16), json.dumps(table), HOSTS)[0] == KEYS | {"nvlink_domain_gpus": 16}


PADDED = "BlockName=b1 Nodes=n[01-03],{0}1\nBlockName=b2 Nodes={0}[2-5]\n" \
    "BlockName=b3 Nodes=n[04-07]\nBlockName=b4 Nodes=n[08-10],{0}6\nBlockSizes=4,8\n"  # fmt: skip


@pytest.mark.parametrize("named", ["fake0", "fake-0", "fake00"])
@pytest.mark.parametrize("yaml", [False, True])
def test_nodes_that_fill_up_blocks_are_no_hosts(run, tmp_path, named, yaml):
    """Of Topograph, whose pool is Slurm's partition fake; blocks keep their places and sizes."""
    text = PADDED.format(named)
    if yaml:
        rows = [line.split() for line in text.splitlines()[:4]]
        blocks = [{"block": b.partition("=")[2], "nodes": n.partition("=")[2]} for b, n in rows]
        block = json.dumps({"block_sizes": [4, 8], "blocks": blocks})
        text = f"- topology: b\n  block: {block}\n"
    write(tmp_path / "topology", text)
    write(tmp_path / "job.yaml", json.dumps(
        {"base": "llama3-70b-fsdp-512", "parallelism": {"dp": 80}, "cluster": {"nodes": 10}}
    ))  # fmt: skip
    command = ("import", tmp_path / "topology", "--job", tmp_path / "job.yaml", "--json")
    status, out, err = run(*command)
    assert status == 0, err
    found = json.loads(out)
    assert [name for name in found["hosts"] if name] == HOSTS[:10]
    assert found["padding"] == [f"{named}{k}" for k in range(1, 7)]
    assert found["cluster"]["tiers"] == {"block": {"gpus": 32}, "aggregate2": {"gpus": 64}}
    hosts = ",".join(HOSTS[:9]) + f",{named}1"
    assert run(*command, "--hosts", hosts)[0] == 2


BARE = {
    "no metadata.labels": {}, "null": {"labels": None}, "others": {"labels": {"zone": "z"}},
    "empty": {"labels": {"fabric.topograph.run/tier-0": ""}},
}  # fmt: skip


@pytest.mark.parametrize("bare", BARE.values(), ids=BARE)
def test_a_node_without_labels_is_no_host(placed, bare):
    """As a cluster's control plane, which is first in the list."""
    table = json.loads(NEW)
    table["items"].insert(0, {"metadata": {"name": "control"} | bare})
    assert placed(job_of(16), json.dumps(table), HOSTS)[0] == KEYS
    placed(job_of(16), json.dumps(table), ["control", *HOSTS[:15]], "control")
    placed(job_of(64), json.dumps(table), HOSTS, "64")


@pytest.mark.parametrize("lacks", [0, 1, 2])
def test_a_level_counts_where_all_hosts_of_the_job_have_it(placed, lacks):
    table = json.loads(NEW)
    del table["items"][-1]["metadata"]["labels"][f"fabric.topograph.run/tier-{lacks}"]
    assert placed(job_of(15), json.dumps(table), HOSTS[:15])[0]["tiers"] == KEYS["tiers"]
    placed(job_of(16), json.dumps(table), HOSTS, "n16")
    for item in table["items"]:
        item["metadata"]["labels"].pop(f"fabric.topograph.run/tier-{lacks}", None)
    tiers = [("leaf", 32), ("spine", 64)]
    found = placed(job_of(16), json.dumps(table), HOSTS)[0]["tiers"]
    assert found == {name: {"gpus": n} for k, (name, n) in enumerate(tiers) if k != lacks}


@pytest.mark.parametrize("order", [HOSTS[::-1], HOSTS[::2] + HOSTS[1::2], HOSTS[:2] + HOSTS[6:13]])
def test_hosts_of_one_switch_share_its_unit(placed, order):
    """Any order, any part of the cluster: places agree with the switches, host by host."""
    keys, names, job = placed(job_of(len(order)), TREE, order)
    place = {name: k for k, name in enumerate(names) if name}
    assert sorted(place) == sorted(order) and keys["nodes"] == len(names) == job.cluster.nodes
    assert [names[k] for k in keys.get("hosts", range(len(order)))] == order
    for hosts, level in ((4, "leaf"), (8, "spine")):
        size = keys["tiers"][level]["gpus"] // 8
        for a in order:
            for b in order:
                together = HOSTS.index(a) // hosts == HOSTS.index(b) // hosts
                assert together == (place[a] // size == place[b] // size)


def test_what_leaves_a_leaf_takes_longer(placed):
    """Gradients of replicas on one leaf against the same ones strewn over two."""
    slow = {"tiers": {"leaf": {"gpus": 32, "oversubscription": 8.0}}}
    ideal = {}
    for name, order in (("in order", HOSTS[:8]), ("strewn", HOSTS[:8:2] + HOSTS[1:8:2])):
        job = placed(job_of(8), TREE, order)[2].replace({"cluster": slow})
        ideal[name] = float(draw_steps(job, 64, 1).ideal_step_time)
    flat = float(draw_steps(job_of(8), 64, 1).ideal_step_time)
    assert flat < ideal["in order"] <= ideal["strewn"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("SwitchName=a Switches=b\nSwitchName=b Switches=a\nSwitchName=c Nodes=n1", "above itself"),
     ("SwitchName=a Switches=x", "not described"), ("hello", "no topology is recognised"),
     ('{"items": 3}', "items: "), ('{"items": [{"metadata": {}}]}', "items.0.metadata.name: "),
     ('{"items": [{"metadata": {"name": "n1", "labels": 3}}]}', "items.0.metadata.labels: "),
     ("- topology: a\n  flat: true\n", "alike"),
     ("BlockName=a Nodes=n[1-2\n", ":1"), ("BlockName=a Nodes=n1\nBlockSizes=0", ":2"),
     ("- topology: a\n  tree: 3\n", "topology.yaml")],
)  # fmt: skip
def test_what_is_no_topology_is_refused(placed, text, said):
    placed(job_of(1), text, ["n1"], said)


def test_the_command_writes_a_job_that_places(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "topology.conf", TREE)
    base = ["base: llama3-70b-fsdp-512", "parallelism: {dp: 72}", "cluster: {nodes: 9}"]
    write(tmp_path / "job.yaml", "\n".join(base) + "\n")
    out = run("import", "topology.conf", "--job", "job.yaml", "--hosts", "n[01-02,07-13]",
              "-o", "placed.yaml", "--json")  # fmt: skip
    found = json.loads(out[1])
    assert out[0] == 0 and found["cluster"]["tiers"]["leaf"] == {"gpus": 32}
    job = load_job(tmp_path / "placed.yaml")
    assert job.cluster.nodes == found["cluster"]["nodes"] and job.world_size == 72
    assert (tmp_path / "placed-hosts.txt").read_text().split()[:2] == ["n01", "n02"]
    code, _, err = run("place", "placed.yaml", "--hosts", "placed-hosts.txt", "--at", "n08",
                       "--slowdown", "1.2", "-o", "best", "--seed", "1", "-q")  # fmt: skip
    assert code == 0, err
    assert "n08" in (tmp_path / "best" / "hosts.csv").read_text()
    assert run("import", "topology.conf", "--job", "job.yaml", "--hosts", "n[01-09],x")[0] == 2
    assert run("import", "topology.conf", "--job", "job.yaml", "--gpus", "8")[0] == 2
    assert run("import", "job.yaml", "--hosts", "n1")[0] == 2


def test_a_list_of_hosts_that_is_there_is_not_written_over(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "topology.conf", TREE)
    write(tmp_path / "placed-hosts.txt", "mine\n")
    write(tmp_path / "job.yaml", "base: llama3-70b-fsdp-512\nparallelism: {dp: 72}\n"
          "cluster: {nodes: 9}\n")  # fmt: skip
    words = ("import", "topology.conf", "--job", "job.yaml", "--hosts", "n[01-02,07-13]",
             "-o", "placed.yaml")  # fmt: skip
    code, _, err = run(*words)
    assert code == 2 and "placed-hosts.txt" in err
    assert (tmp_path / "placed-hosts.txt").read_text() == "mine\n"
    (tmp_path / "placed-hosts.txt").unlink()
    assert [run(*words)[0] for _ in range(2)] == [0, 0]
