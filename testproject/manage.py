"""Django's command line for the test project: `python -m testproject.manage COMMAND`."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Run a management command, also when started as a script from another directory."""
    checkout = str(Path(__file__).resolve().parent.parent)
    if checkout not in sys.path:
        sys.path.insert(0, checkout)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")

    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
