"""Files that would take all time or memory, or that no parser foresees, are refused in words."""

import json
import time
from itertools import pairwise

import pytest

TRAIN = (
    "python pretrain_gpt.py --num-layers 16 --hidden-size 4096 --num-attention-heads 32 "
    "--seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --vocab-size 32000 "
    "--tensor-model-parallel-size 2"
)
NEMO = (
    "trainer: {{num_nodes: 2, devices: 8, max_steps: 100}}\n"
    "model: {{num_layers: 4, hidden_size: 1024, num_attention_heads: 16, micro_batch_size: 1,\n"
    "  encoder_seq_length: 2048, vocab_size: 32000, global_batch_size: {batch},\n"
    "  tensor_model_parallel_size: {tp}, pipeline_model_parallel_size: 1}}\n"
)
DEEPSPEED = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, ' \
    '"zero_optimization": {"stage": STAGE}}'  # fmt: skip
N = 20_000
LINES = "".join(f"cat <<E{k}\n{'x' * 60}\n" for k in range(5000))
CHAIN = "".join(f"{b}: '{f'${{{a}}}' * 10}'\n" for a, b in pairwise("abcdefghi"))

# What takes exponentially or quadratically long where nothing bounds it: a line in front of the
# command, and whether the command is still understood.
GROWING = {
    "an array that doubles": ('A=(--x 1)\n' + 'A=("${A[@]}" "${A[@]}")\n' * 24, False),
    "an array that grows by itself": ('A=(--x 1)\n' + 'A+=("${A[@]}")\n' * 24, False),
    "a text that doubles": ("A=xxxxxxxx\n" + 'A="$A$A"\n' * 40, False),
    "loops in loops": ("for ((i=0;i<9999;i++)); do\nfor ((j=0;j<9999;j++)); do\nA=(x)\ndone\ndone",
                       False),
    "a long loop": ("for ((i=0;i<2000000000;i++)); do A=$i; done", False),
    "many variables": ("x=" + "$a" * 60_000, True),
    "braces that do not close": ("x=" + "${a" * 60_000, False),
    "commands that do not close": ("x=" + "$(" * 60_000, False),
    "defaults in defaults": ("x=" + "${a:-" * N + "}" * N, False),
    "here-documents without an end": (LINES, True),
    "a pattern that backtracks": (f"case '{'a' * 60}' in\n{'*a' * 40}b) x=1;;\nesac", True),
    "if in if": ("if [ 1 = 1 ]; then\n" * N, False),
    "case in case": ("case x in\nx)\n" * N, False),
    "loops inside each other": ("for x in a; do\n" * N, False),
    "a long formula": ("x=$((" + "1+" * N + "1))", True),
    "a number that grows": ("a=9\n" + "a=$((a*a*a))\n" * 40, True),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWING)
def test_a_script_has_bounds(run, tmp_path, name) -> None:
    head, understood = GROWING[name]
    (tmp_path / "train.sh").write_text(f"#!/bin/bash\n{head}\n{TRAIN}\n")
    start = time.process_time()
    status, out, err = run("import", tmp_path / "train.sh", "--gpus", "8", "--json")
    assert time.process_time() - start < 20
    assert status == (0 if understood else 2), err
    if understood:
        assert json.loads(out)["world_size"] == 8
    else:
        assert "train.sh" in err and len(err) < 1000


FORMULAS = {
    "9**9**9**9": None, "1<<99999999999": None, "1<<-1": None, "- -1": 1, "!1": None, "": None,
    "1/0": None, "1%0": None, "1//": None, "1 2": None, "0x": None, "'1'": None, "(" * 300: None,
    "-7/2+6": 3, "-7%4+4": 1, "9" * 4300: None, "2*(3+1)": 8, "3 > 2": 1, "\N{SNOWMAN}": None,
}  # fmt: skip


@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas_are_computed_or_left_open(run, tmp_path, formula) -> None:
    """As a shell does, of what `$(( ))` may hold here; what is left open is asked for."""
    text = TRAIN.replace("--num-layers 16", f"--num-layers $(({formula}))")
    (tmp_path / "train.sh").write_text(text)
    status, out, err = run("import", tmp_path / "train.sh", "--gpus", "8", "--json")
    value = FORMULAS[formula]
    assert status == (2 if value is None else 0), err
    if value is None:
        assert "train.sh:1" in err and "internal" not in err
    else:
        assert json.loads(out)["values"]["model.n_layers"] == value


ODD = {
    "references that multiply": ("a.yaml", f"a: xxxxxxxxxx\n{CHAIN}model: {{num_layers: 4}}\n"),
    "division by nothing": ("a.yaml", NEMO.format(batch=8, tp="'${divide:1,0}'")),
    "deep TOML": ("a.toml", f"[model]\na = {'[' * 5000}{']' * 5000}\n"),
    "deep tables": ("a.toml", f"[model]\n{'.'.join('a' * 5000)} = 1\n"),
    "deep JSON": ("a.json", '{"a":' * N + "1" + "}" * N),
    "deep lists": ("a.json", '{"a":' + "[" * N + "]" * N + "}"),
    "a number of 5,000 digits": ("a.json", f'{{"hidden_size": {"9" * 5000}}}'),
    "such a number in TOML": ("a.toml", f"[training]\nsteps = {'9' * 5000}\n"),
    "half a character": ("a.json", '{"model_type": "llama", "num_hidden_layers": "\\ud800"}'),
    "a large file": ("a.yaml", "model:\n" + "".join(f"  k{k}: {k}\n" for k in range(200_000))),
    "a long line of dots": ("a.log", f"  arg {'.' * 2_000_000} 3\n"),
    "long lines": ("a.log", f"  arg_a {' ' * 100_000}\n" * 8),
    "a script that reads memory": ("a.sh", "source /proc/self/mem\nsource /dev/zero\n"),
    "a script of a long name": ("a.sh", f"source {'x' * 300}.sh\nbash {'x/' * 3000}a.sh\n"),
    "memory": ("/proc/self/mem", None),
    "zeros": ("/dev/zero", None),
    "a tag": ("a.yaml", NEMO.format(batch=8, tp="!!int abc")),
    "another tag": ("a.yaml", NEMO.format(batch=8, tp="!!python/object:os.system x")),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_configuration_is_said(run, tmp_path, name) -> None:
    file, text = ODD[name]
    if text is not None:
        (tmp_path / file).write_text(text)
    start = time.process_time()
    status, _, err = run("import", tmp_path / file, "--json")
    assert time.process_time() - start < 20
    assert status == 2 and file in err and len(err) < 2000, err


BAD = ("true", "{a: b}", "1.5", ".inf", ".nan", "-2", "0", "abc", "2020-01-01", "[]", "1e400")


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("key", ["tp", "batch"])
def test_an_unusable_value_of_a_known_key_is_an_error(run, tmp_path, key, value) -> None:
    values = {"tp": 2, "batch": 64, key: value}
    (tmp_path / "nemo.yaml").write_text(NEMO.format(**values))
    status, _, err = run("import", tmp_path / "nemo.yaml")
    assert status == 2 and "nemo.yaml:" in err, err


@pytest.mark.parametrize("value", ["2", "null", "0x2"])
def test_a_usable_one_is_not(run, tmp_path, value) -> None:
    (tmp_path / "nemo.yaml").write_text(NEMO.format(tp=value, batch=64))
    assert run("import", tmp_path / "nemo.yaml")[0] == 0


@pytest.mark.parametrize("flag", [
    "--global-batch-size -5", "--train-iters -inf", "--train-iters nan", "--zero-stage 99",
    "--context-parallel-size", "--micro-batch-size 0", "--expert-model-parallel-size x",
    "--virtual-pipeline-model-parallel-size 1.5", "--nnodes two",
])  # fmt: skip
def test_so_is_one_of_a_flag(run, tmp_path, flag) -> None:
    (tmp_path / "train.sh").write_text(f"{TRAIN} {flag}\n")
    status, _, err = run("import", tmp_path / "train.sh", "--gpus", "8")
    assert status == 2 and "train.sh:1" in err and flag.split()[0] in err, err


@pytest.mark.parametrize("stage", ["99", "true", "-1", "1.5", "[3]"])
def test_a_stage_of_zero_is_one_of_four(run, tmp_path, stage) -> None:
    (tmp_path / "ds.json").write_text(DEEPSPEED.replace("STAGE", stage))
    words = ("import", tmp_path / "ds.json", "--gpus", "64", "--set", "model.name=llama3-8b")
    status, _, err = run(*words)
    assert status == 2 and "ds.json:1" in err and "stage" in err
    (tmp_path / "ds.json").write_text(DEEPSPEED.replace("STAGE", "3"))
    assert run(*words)[0] == 0


def test_a_word_that_is_no_number_is_text(run, tmp_path) -> None:
    (tmp_path / "train.sh").write_text(f"{TRAIN} --save _ --load .. --_ 3 -- 4 --- 5\n")
    assert run("import", tmp_path / "train.sh", "--gpus", "8")[0] == 0


@pytest.mark.parametrize("file", ["topology.conf", "topology.yaml"])
@pytest.mark.parametrize("sizes", ["0", "64,32", "1.5", "-1", "abc", "4,6", "9" * 20, "true",
                                   "2020-01-01", "!!int abc", ".inf", "null"])  # fmt: skip
def test_block_sizes_are_checked(run, tmp_path, file, sizes) -> None:
    nodes = {"b1": "n[0-15]", "b2": "n[16-31]"}
    lines = [f"BlockName={name} Nodes={hosts}\n" for name, hosts in nodes.items()]
    text = "".join(lines) + f"BlockSizes={sizes}\n"
    if file.endswith("yaml"):
        rows = ", ".join(f"{{block: {name}, nodes: '{hosts}'}}" for name, hosts in nodes.items())
        text = f"- topology: t\n  block: {{block_sizes: [{sizes}], blocks: [{rows}]}}\n"
    (tmp_path / file).write_text(text)
    status, _, err = run("import", tmp_path / file, "--job", "pipeline-8x32")
    assert status == 2 and file in err and "size" in err.lower(), err


TOPOLOGIES = {
    "a range beyond any cluster": "SwitchName=s Nodes=n[0-99999999999]\n",
    "ranges that multiply": "SwitchName=s Nodes=n[0-999][0-999][0-999]\n",
    "many ranges": "".join(f"SwitchName=s{k} Nodes=n{k}x[0-999999]\n" for k in range(20)),
    "a chain": "".join(f"SwitchName=s{k} Switches=s{k + 1}\n" for k in range(N))
    + f"SwitchName=s{N} Nodes=n[0-31]\n",
    "deep YAML": f"- topology: a\n  block: {'[' * 5000}{']' * 5000}\n",
    "large YAML": "- topology: a\n" + "  a: b\n" * 300_000,
    "a date": "- topology: a\n  tree: {switches: [{switch: 2020-01-01, nodes: [a]}]}\n",
    "an alias": "- topology: a\n  block: {blocks: [{block: b, nodes: *a}]}\n",
    "deep JSON": '{"items":' + "[" * N + "]" * N + "}",
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_topology_has_bounds(run, tmp_path, name) -> None:
    (tmp_path / "topology").write_text(TOPOLOGIES[name])
    start = time.process_time()
    status, _, err = run("import", tmp_path / "topology", "--job", "pipeline-8x32")
    assert time.process_time() - start < 20
    assert status == 2 and "topology" in err and len(err) < 1000, err
