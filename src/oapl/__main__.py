import sys

from oapl.cli import main

if __name__ == "__main__":
    sys.exit(main())
