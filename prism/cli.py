"""``prism``: the list of its commands, each of which is in `prism.commands`.

The answer goes to stdout, everything else to stderr; with ``--json`` the answer is one object.
"""

import click

import prism as package
from prism.commands.compare import compare
from prism.commands.estimate import estimate
from prism.commands.fit import fit
from prism.commands.measure import measure
from prism.commands.place import place
from prism.commands.rank import rank
from prism.commands.replay import replay
from prism.commands.report import report
from prism.commands.schedule import schedule
from prism.commands.show import show
from prism.commands.sweep import sweep
from prism.commands.timeline import timeline
from prism.commands.validate import validate


class _InOrder(click.Group):
    """A group whose help lists the commands in the order of their work."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names as they were added."""
        return list(self.commands)


@click.group(
    cls=_InOrder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package.__version__, prog_name="prism")
def prism() -> None:
    """How long a distributed training run takes, with what probability, and why that varies."""


_COMMANDS = (
    *(estimate, rank, place, sweep, timeline),
    *(fit, replay, validate, measure),
    *(compare, report, schedule, show),
)
for _command in _COMMANDS:
    prism.add_command(_command)
