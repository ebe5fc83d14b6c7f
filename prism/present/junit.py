"""What a gate of a comparison finds, as JUnit XML for continuous integration.

Elements and attributes are those that Jenkins' and GitLab's readers share: a ``testsuite`` with its
counts, a ``testcase`` for each check, a ``failure`` in those that fail.
"""

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from prism.common.text import format_duration, format_share, percent_change, visible


def junit_xml(figures: Mapping[str, Any]) -> str:
    """Write the gate of a comparison's figures, a test case for each mean that was checked."""
    gate = figures["gate"]
    checks, limit = gate["checks"], format_share(gate["fail_if_slower"])
    failed = sum(check["verdict"] == "slower" for check in checks)
    counts = {"tests": str(len(checks)), "failures": str(failed), "errors": "0", "skipped": "0"}
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "prism compare"} | counts)
    sides = " against ".join(visible(str(figures[side]["name"])) for side in "ba")
    for check in checks:
        name = f"{check['quantity']} {check['figure']}: {sides}, at most {limit} slower"
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": "prism.compare", "name": name, "time": "0"}
        )
        change = percent_change(check["relative"], check["relative_ci"])
        a, b = (format_duration(check[side]) for side in "ab")
        text = f"{check['verdict']}: {a} -> {b}, {change} (95 % interval)"
        if check["verdict"] == "slower":
            ElementTree.SubElement(case, "failure", {"message": text, "type": "slower"})
        else:
            ElementTree.SubElement(case, "system-out").text = text
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False).join(
        ('<?xml version="1.0" encoding="UTF-8"?>\n', "\n")
    )
