"""``prism``: the list of its commands, each of which is in `prism.cli.commands`.

The answer goes to stdout, everything else to stderr; with ``--json`` the answer is one object.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

import prism as package
from prism.common.resultfiles import KINDS

COMMANDS = (
    *("import", *dict.fromkeys(kind.command for kind in KINDS.values())),
    *("explore", "report", "schedule", "show"),
)
"""Names of all commands, in the order in which they are listed."""


class _Commands(click.Group):
    """The commands, each of which is imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command:
        """Return a command by its name."""
        if name not in COMMANDS:
            near = get_close_matches(name, COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else "prism --help lists them"
            ctx.fail(f"No such command {name}; {hint}")
        module = "import_job" if name == "import" else name  # the name of no module can be that
        found: click.Command = getattr(import_module(f"prism.cli.commands.{module}"), module)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an unknown option that is a key of the job gets its --set."""
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


_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=_Commands, context_settings=_HELP)
@click.version_option(package.__version__, prog_name="prism")
def prism() -> None:
    """How long a distributed training run takes, with what probability, and why that varies."""
