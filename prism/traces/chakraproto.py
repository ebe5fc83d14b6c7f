"""Chakra execution traces in protobuf (``.et``), decoded into columns.

The few fields that prism reads are described at run time by their published numbers, so that
neither a compiler nor Chakra itself is needed; all others are passed over. Left out: tensors,
storage operations, and what a node means (chakra.py).

References
----------
.. [1] MLCommons Chakra, schema/protobuf/et_def.proto, https://github.com/mlcommons/chakra
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from prism.common.errors import PrismError
from prism.traces.protosniff import read_varint

NODE_TYPES = {4: "COMP", 5: "COMM_SEND", 6: "COMM_RECV", 7: "COMM_COLL"}
"""Types of node that a device executes."""

COLLECTIVES = {
    0: "all_reduce", 1: "all_reduce", 2: "all_gather", 3: "all_gather", 4: "broadcast",
    5: "broadcast", 6: "all_to_all", 7: "reduce_scatter", 8: "reduce_scatter", 9: "all_reduce",
}  # fmt: skip
"""Op kind by Chakra's CollectiveCommType; reductions and gathers as `kernelnames` has them."""

_MOST_BYTES = 1 << 26  # of one node: protobuf itself refuses 2 GiB
# name: (number, kind); kinds are those of google.protobuf's FieldDescriptorProto
_NODE = {"id": (1, "UINT64"), "name": (2, "STRING"), "type": (3, "INT32"),
         "start": (6, "UINT64"), "duration": (7, "UINT64"), "attr": (10, "Attr")}  # fmt: skip
_ATTR = {"name": (1, "STRING"), "int32_val": (7, "INT32"), "int64_val": (9, "INT64"),
         "uint32_val": (11, "UINT32"), "uint64_val": (13, "UINT64"), "sint32_val": (15, "SINT32"),
         "sint64_val": (17, "SINT64"), "bool_val": (27, "BOOL"),
         "string_val": (29, "STRING")}  # fmt: skip
_META = {"version": (1, "STRING"), "attr": (2, "Attr")}
_FILE = {"metadata": (1, "Meta"), "nodes": (2, "Node")}
_WANTED = frozenset(
    {"is_cpu_op", "comm_type", "comm_size", "pg_name", "stream", "tid", "rank", "world_size"}
)


@lru_cache(maxsize=1)
def _file_class() -> Any:
    """Class of a whole file as one message; ImportError where protobuf is not installed."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="prism_chakra.proto", package="prism_chakra", syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for title, fields in (("Attr", _ATTR), ("Node", _NODE), ("Meta", _META), ("File", _FILE)):
        message = file.message_type.add(name=title)
        for name, (number, kind) in fields.items():
            one = message.field.add(name=name, number=number, label=kinds.LABEL_OPTIONAL)
            if kind in ("Attr", "Node", "Meta"):
                one.label, one.type = kinds.LABEL_REPEATED, kinds.TYPE_MESSAGE
                one.type_name = f".prism_chakra.{kind}"
            else:
                one.type = getattr(kinds, f"TYPE_{kind}")
                if title == "Attr" and name != "name":
                    one.oneof_index = 0
        if title == "Attr":
            message.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("prism_chakra.File"))


def decode(data: bytes, source: str) -> tuple[str, dict[str, Any], list[dict[str, Any]], bool]:
    """Decode a file."""
    try:
        whole = _file_class()()
    except ImportError as error:
        raise PrismError(
            f"{source}: is a Chakra execution trace, and reading one needs protobuf: pip install "
            "'protobuf>=5'"
        ) from error
    from google.protobuf.message import DecodeError

    parts, cut = _messages(data)
    if len(parts) < 2:
        raise PrismError(
            f"{source}: a Chakra execution trace that ends before its first node; copy it again"
        )
    # one message with all others inside is decoded at once
    joined = b"".join(b"\x0a" * (not i) + b"\x12" * (i > 0) + part for i, part in enumerate(parts))
    try:
        whole.MergeFromString(joined)
    except (DecodeError, RecursionError) as error:
        raise PrismError(
            f"{source}: a message of the Chakra execution trace cannot be decoded ({error}); "
            "expected mlcommons/chakra's et_def.proto; write the trace again by chakra_converter"
        ) from error
    meta = whole.metadata[0]
    return meta.version, dict(_values(meta.attr)), [_node(node) for node in whole.nodes], cut


def _messages(data: bytes) -> tuple[list[bytes], bool]:
    """Split a file into its messages, each with its length before it; and whether the end lacks."""
    parts: list[bytes] = []
    at = 0
    while at < len(data):
        try:
            size, start = read_varint(data, at)
        except (IndexError, ValueError):
            return parts, True
        if size > _MOST_BYTES or start + size > len(data):
            return parts, True
        parts.append(data[at : start + size])
        at = start + size
    return parts, False


def _node(node: Any) -> dict[str, Any]:
    """Fields of a node that prism reads."""
    return {
        "name": node.name, "type": node.type, "start": node.start, "duration": node.duration,
        **dict(_values(node.attr)),
    }  # fmt: skip


def _values(attributes: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of the attributes that prism reads."""
    for attribute in attributes:
        name = attribute.name
        if name in _WANTED:
            kind = attribute.WhichOneof("value")
            if kind is not None:
                yield name, getattr(attribute, kind)
