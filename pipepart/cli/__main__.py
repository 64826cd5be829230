"""`python -m pipepart.cli` (for torchrun)."""

import sys

from pipepart.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
