"""`python -m torchair_scope`, and the command `torchair-scope`."""

from __future__ import annotations

import gc
import sys

from torchair_scope.analysis.extras import MissingPackageError, need


def main() -> None:
    """Run the command line; every error that a user can mend is a line, not a traceback."""
    # Looking for cycles among the many records of a large dump takes a third of the time.
    gc.set_threshold(50_000, 20, 100)
    try:
        need("typer")
        need("rich")
        from torchair_scope.cli import run

        status = run()
    except MissingPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
