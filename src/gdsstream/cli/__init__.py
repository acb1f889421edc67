"""The `gdsstream` command: one file a subcommand, each imported only when it is called.

A command file parses arguments, calls a module of the library that knows nothing of click, and hands a `Report` to
`output.emit`. So `gdsstream --help` needs neither torch nor a driver, and every command can be used as a library.

Exit codes: 0 fine; 1 the command ran and found a problem; 2 wrong usage or input; 3 it could not be done (a
GdsStreamError, in one line on stderr); 130 interrupted.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from gdsstream import __version__
from gdsstream.errors import GdsStreamError

COULD_NOT = 3
INTERRUPTED = 130

# In the order in which a newcomer needs them; the summaries are here so that --help imports none of the commands.
COMMANDS = {
    "doctor": "Can this path do native GPUDirect Storage, and what is in the way?",
    "topo": "Which drives, NICs and GPUs sit near each other?",
    "limits": "The ceiling of each station between a path and a GPU; which binds.",
    "tune": "Find the fastest settings for a path, and keep them as a profile.",
    "plan": "What streaming a checkpoint will cost at a number of tokens.",
    "stats": "Counters of a running process, or of a saved report.",
    "pack": "Rewrite a checkpoint layer by layer, aligned and with checksums.",
    "verify": "Compare a packed checkpoint with its checksums, at full speed.",
}


class _Commands(click.Group):
    """Subcommands by name, imported when they run; the library's errors as exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"gdsstream.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GdsStreamError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(COULD_NOT)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
def main() -> None:
    """Stream model layers and dataset shards from NVMe to GPUs: know the machine, tune it, plan a run, watch it.

    New here? Run these three, in this order:

    \b
      gdsstream doctor /data/model.safetensors   what the machine and this path can do
      gdsstream tune   /data/model.safetensors   the fastest settings, kept as a profile
      gdsstream plan   /data/model --tokens 8192 what streaming the model will cost

    Every command takes --json, for scripts. Exit codes: 0 fine, 1 a problem was found, 2 wrong usage,
    3 it could not be done, 130 interrupted.
    """


__all__ = ["COMMANDS", "main"]
