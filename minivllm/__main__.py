"""`python -m minivllm`: the same as the command `minivllm`."""

import sys

from minivllm.cli import main

sys.exit(main())
