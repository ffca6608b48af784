"""python -m toolrl"""

import sys

from toolrl import main

if __name__ == "__main__":
    sys.exit(main())
