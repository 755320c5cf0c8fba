import sys

from oapl.cli import main
from oapl.processes import end_with_lifeline

if __name__ == "__main__":
    end_with_lifeline()
    sys.exit(main())
