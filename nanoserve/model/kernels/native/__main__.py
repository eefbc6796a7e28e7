"""``python -m nanoserve.model.kernels.native [LEVEL ...]`` compiles the kernels in place."""

import sys

from nanoserve.model.kernels.native.build import main

if __name__ == "__main__":
    sys.exit(main())
