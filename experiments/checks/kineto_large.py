"""Time and memory of reading a large profiler trace with the mix of events that real ones have.

The trace is read in a process of its own, whose peak memory is that of the whole interpreter.
Run from a checkout: python experiments/checks/kineto_large.py [--megabytes 300] [--broken]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MOST_S, MOST_GB = 5.0, 1.5
STEPS = 20
OPS, CALLS = 5, 2  # host ops around a kernel, runtime calls beside its launch


def event(cat: str, name: str, start: float, duration: float, thread: int, args: str) -> str:
    """One complete event as text; times in us."""
    return (
        f'{{"ph": "X", "cat": "{cat}", "name": "{name}", "pid": 1, "tid": {thread}, '
        f'"ts": {start:.3f}, "dur": {duration:.3f}, "args": {{{args}}}}},\n'
    )


def kernel(number: int, now: float) -> str:
    """Events of one launch: nested host ops, runtime calls, flow events and the kernel."""
    collective = number % 200 == 199
    names = ("c10d::allreduce_", "record_param_comms") if collective else ("aten::linear",)
    lines = [
        event(
            "cpu_op", names[k] if k < len(names) else f"aten::operator_{k}", now - 0.5 * (OPS - k),
            10.0 - k, 5, f'"External id": {number}, "Record function id": 0, "Sequence number": '
            f'{number}, "Fwd thread id": 1, "Ev Idx": {number * OPS + k}, "Input Dims": '
            '[[1024, 8192], [8192, 512], []], "Input type": ["float", "float", "Scalar"], '
            '"Call stack": "model.py(12): forward; layer.py(34): call"',
        )
        for k in range(OPS)
    ]  # fmt: skip
    ids = f'"External id": {number}, "cbid": 211, "correlation": {number}'
    lines += [
        event("cuda_runtime", "cudaStreamIsCapturing", now + k, 0.5, 5, f'"cbid": {k}')
        for k in range(CALLS)
    ]
    lines.append(event("cuda_runtime", "cudaLaunchKernel", now + CALLS, 2.0, 5, ids))
    lines += [
        f'{{"ph": "{ph}", "id": {number}, "pid": 1, "tid": 5, "ts": {now:.3f}, "cat": "ac2g", '
        '"name": "ac2g", "bp": "e"},\n'
        for ph in "sf"
    ]
    name = (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)" if collective
        else f"void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_{number % 97}x64_32x6_nn_align4>"
        "(cutlass_80_tensorop_s1688gemm_256x64_32x6_nn_align4::Params)"
    )  # fmt: skip
    stream = 21 if collective else 7
    lines.append(
        event("kernel", name, now + CALLS + 8.0, 9.0 + number % 7, stream, f'{ids}, "queued": 0, '
              f'"device": 0, "context": 1, "stream": {stream}, "registers per thread": 90, '
              '"shared memory": 49152, "blocks per SM": 2.37037, "warps per SM": 18.962963, '
              f'"grid": [{number % 97}, 1, 1], "block": [128, 1, 1], '
              '"est. achieved occupancy %": 30')
    )  # fmt: skip
    return "".join(lines)


def generate(path: Path, megabytes: float) -> None:
    """Write a trace of that size."""
    n = int(megabytes * 1e6 / len(kernel(150_000, 1e12))) // STEPS
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, ')
        file.write('"world_size": 8},\n"traceEvents": [\n')
        for step in range(STEPS):
            origin = 1e12 + step * n * 20.0
            file.write(event("user_annotation", f"ProfilerStep#{step}", origin, n * 20.0, 5, ""))
            for i in range(n):
                file.write(kernel(step * n + i, origin + 20.0 * i + 5.0))
        file.write('{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}\n]}')


def read(path: Path) -> None:
    """Read a trace and print what it took as JSON."""
    from prism.traces import read_trace

    begin, busy = time.perf_counter(), time.process_time()
    trace = read_trace(path)
    seconds = time.perf_counter() - begin
    busy = time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(
        json.dumps(
            {"s": seconds, "cpu": busy, "GB": peak, "rows": len(trace.ops), "notes": trace.notes}
        )
    )


def main() -> int:
    """Generate, read, print; the status is 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=300.0)
    parser.add_argument("--broken", action="store_true", help="cut the end off: salvage it")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read is not None:
        read(options.read)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        generate(path, options.megabytes)
        size = path.stat().st_size
        if options.broken:
            with path.open("r+b") as file:
                file.truncate(size - 1_000)
        command = [sys.executable, __file__, "--read", str(path)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    print(f"{size / 1e6:.0f} MB, {found['rows']:,} rows: read in {found['s']:.2f} s (at most "
          f"{MOST_S:g}; {found['cpu']:.2f} s of it computing), peak "
          f"memory {found['GB']:.2f} GB (at most {MOST_GB:g})")  # fmt: skip
    print(*(f"- {note}" for note in found["notes"]), sep="\n")
    bounded = options.megabytes <= 300.0 and not options.broken
    return int(bounded and (found["s"] > MOST_S or found["GB"] > MOST_GB))


if __name__ == "__main__":
    sys.exit(main())
