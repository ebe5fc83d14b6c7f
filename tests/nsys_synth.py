"""Exports as Nsight Systems writes them, of the job that `kineto_synth` makes up.

The same times as in the profiler's files go into the tables of ``nsys export --type sqlite``, so
that what is read can be held against what was put in. Tables and columns are those of its schema.
"""

from __future__ import annotations

import sqlite3

import numpy as np

EPOCH_NS = 1_790_000_000_000_000_000
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT);
CREATE TABLE ENUM_NSYS_EVENT_TYPE (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL,
  deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL,
  correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
  shortName INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL,
  gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL,
  blockZ INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL,
  deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL,
  correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL,
  srcKind INTEGER, dstKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL,
  eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL,
  returnValue INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (start INTEGER NOT NULL, end INTEGER NOT NULL,
  deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL,
  correlationId INTEGER, globalPid INTEGER, syncType INTEGER NOT NULL, eventId INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_CUDA_EVENT (deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
  streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, eventId INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL,
  text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
"""
_API = {
    "wait": "cudaStreamWaitEvent_v3020",
    "sync": "cudaStreamSynchronize_v3020",
    "copy_back": "cudaMemcpyAsync_v3020",
    "launch": "cudaLaunchKernel_v7000",
    "collective": "cudaLaunchKernelExC_v11060",
}


class Export:
    """A file being written: one process on one device or several."""

    def __init__(self, path, gpu="NVIDIA H100 80GB HBM3", epoch_ns=EPOCH_NS):
        path.unlink(missing_ok=True)
        self.path, self.ids = path, {}
        self.db = sqlite3.connect(path)
        self.db.execute("PRAGMA page_size = 512")
        self.db.executescript(SCHEMA)
        self.insert("TARGET_INFO_SESSION_START_TIME", epoch_ns, "", "")
        self.insert("TARGET_INFO_GPU", 0, 0, gpu)
        self.insert("META_DATA_EXPORT", "EXPORT_SCHEMA_VERSION", "3.16.1")
        for number, name in ((59, "NvtxPushPopRange"), (60, "NvtxStartEndRange")):
            self.insert("ENUM_NSYS_EVENT_TYPE", number, name, name)

    def insert(self, table, *values):
        marks = ",".join("?" * len(values))
        self.db.execute(f"INSERT INTO {table} VALUES ({marks})", values)

    def text(self, value):
        if value not in self.ids:
            self.ids[value] = len(self.ids) + 1
            self.insert("StringIds", self.ids[value], value)
        return self.ids[value]

    def close(self):
        self.db.commit()
        self.db.close()
        return self.path


def ns(us):
    return int(round(float(us) * 1000.0))


def add_rank(
    export, program, times, rank, device=0, pid=None, origin_us=1_000.0, step_name="step {}"
):
    """Write one rank's times; steps are ranges of this name (None: no marks)."""
    pid = (1 << 56) | ((4_000 + rank if pid is None else pid) << 24)
    tid = pid | 77
    correlation = 0

    def at(us):
        return ns(us + origin_us)

    def call(name, start, end, number):
        export.insert("CUPTI_ACTIVITY_KIND_RUNTIME", at(start), at(end), 0, tid, number,
                      export.text(name), 0)  # fmt: skip

    def span(text, start, end, registered=False):
        export.insert("NVTX_EVENTS", at(start), at(end), 59, None if registered else text, tid,
                      None, export.text(text) if registered else None, 0)  # fmt: skip

    for step in range(times.call.shape[0]):
        if step_name is not None:
            begin, until = times.step_start[step, rank], np.nanmax(times.call_end[step, rank]) + 2
            span(step_name.format(step + 10), begin, until)
        for i, c in enumerate(program):
            correlation += 2
            start, done = times.call[step, rank, i], times.call_end[step, rank, i]
            if c.do == "wait":
                call("cudaEventRecord_v3020", start - 0.6, start - 0.2, correlation)
                export.insert("CUPTI_ACTIVITY_KIND_CUDA_EVENT", device, 1, c.on_stream, correlation,
                              pid, i)  # fmt: skip
                call(_API["wait"], start, start + 0.4, correlation + 1)
                export.insert("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", at(start), at(start + 0.4),
                              device, 1, c.stream, correlation + 1, pid, 2, i)  # fmt: skip
                continue
            call(_API[c.do], start, done, correlation)
            if c.do == "sync":
                export.insert("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", at(start), at(done), device, 1,
                              c.stream, correlation, pid, 3, 0)  # fmt: skip
                continue
            first, last = at(times.start[step, rank, i]), at(times.end[step, rank, i])
            if c.name.startswith("Memcpy"):
                kind, ends = (1, (1, 2)) if "HtoD" in c.name else (2, (2, 0))
                export.insert("CUPTI_ACTIVITY_KIND_MEMCPY", first, last, device, 1, c.stream,
                              correlation, pid, 4096, kind, *ends)  # fmt: skip
                continue
            if c.do == "collective":
                span("c10d::allreduce_, seq = 4, op_id = 7", start - 3.0, start + 3.0, True)
            name = export.text(c.name)
            export.insert("CUPTI_ACTIVITY_KIND_KERNEL", first, last, device, 1, c.stream,
                          correlation, pid, name, name, i, 1, 1, 128, 1, 1)  # fmt: skip


def write(folder, program, times, offsets_us=None, together=False, **options):
    """Write one file a rank, or one with all ranks; returns the paths."""
    n_ranks = times.call.shape[1]
    if together:
        export = Export(folder / "all.sqlite")
        for rank in range(n_ranks):
            add_rank(export, program, times, rank, device=rank, **options)
        return [export.close()]
    paths = []
    for rank in range(n_ranks):
        export = Export(folder / f"report.{rank}.sqlite")
        shift = offsets_us[rank] if offsets_us is not None else 0.0
        add_rank(export, program, times, rank, origin_us=1_000.0 + shift, **options)
        paths.append(export.close())
    return paths
