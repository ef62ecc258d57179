"""`python -m tamis.cli`: the same as the `tamis` command."""

import sys

from tamis.cli import main

sys.exit(main())
