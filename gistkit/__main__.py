"""``python -m gistkit``: the command ``gistkit``."""

import sys

from gistkit.cli import main

sys.exit(main())
