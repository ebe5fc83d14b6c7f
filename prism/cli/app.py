"""``prism``: the list of its commands, each of which is in `prism.cli.commands`.

The answer goes to stdout, everything else to stderr; with ``--json`` the answer is one object.
"""

from typing import Any

import click

import prism as package
from prism.cli.commands.compare import compare
from prism.cli.commands.estimate import estimate
from prism.cli.commands.fit import fit
from prism.cli.commands.measure import measure
from prism.cli.commands.place import place
from prism.cli.commands.rank import rank
from prism.cli.commands.replay import replay
from prism.cli.commands.report import report
from prism.cli.commands.schedule import schedule
from prism.cli.commands.show import show
from prism.cli.commands.sweep import sweep
from prism.cli.commands.timeline import timeline
from prism.cli.commands.validate import validate


class _InOrder(click.Group):
    """A group whose help lists the commands in the order of their work."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names as they were added."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an unknown option that names a key of the job is told how to set it."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            from prism.jobs.jobspec.messages import dotted_key

            command = error.ctx.command if error.ctx else self
            key = dotted_key(error.option_name.strip("-").replace("-", "_"))
            if key and any(param.name == "overrides" for param in command.params):
                text = f"No such option {error.option_name}; did you mean --set {key}=VALUE?"
                raise click.UsageError(text, error.ctx) from None
            raise


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
