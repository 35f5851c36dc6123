"""`python -m distaff`: the same as the command `distaff`."""

import sys

from distaff.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
