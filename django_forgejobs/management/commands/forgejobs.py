"""``manage.py forgejobs worker|reclaim|…``: every command of ours under one name that no other app has."""

from __future__ import annotations

from typing import Any

from django.core.management import load_command_class
from django.core.management.base import BaseCommand, CommandParser

from django_forgejobs.checks import COMMANDS
from django_forgejobs.management.base import Help


class Command(BaseCommand):
    """Hands the rest of the line to the command that it names."""

    help = "The commands of the job queue, under a name that no other app has."
    requires_system_checks = []

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """List the commands in the help."""
        lines = [f"  {name:<10} {_load(name).help.partition('. ')[0]}" for name in COMMANDS]
        kwargs |= {"epilog": "\n".join(["commands:", *lines]), "formatter_class": Help}
        return super().create_parser(prog_name, subcommand, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        """Take the name of a command, and whatever follows."""
        parser.add_argument("command", choices=COMMANDS, help="see below")
        parser.add_argument("arguments", nargs="...", help="of the command; try --help")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command as if it had been called by its own name."""
        command = _load(options["command"])
        called = getattr(self, "_called_from_command_line", False)
        command._called_from_command_line = called  # type: ignore[attr-defined]
        parser = command.create_parser("manage.py", f"forgejobs {options['command']}")
        parser.set_defaults(verbosity=options["verbosity"], no_color=options["no_color"])
        found = vars(parser.parse_args(options["arguments"]))
        command.execute(
            *found.pop("args", ()), **found, stdout=options.get("stdout"), stderr=options.get("stderr")
        )


def _load(name: str) -> BaseCommand:
    return load_command_class("django_forgejobs", COMMANDS[name])
