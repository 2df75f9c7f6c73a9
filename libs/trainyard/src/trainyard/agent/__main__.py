"""`python -m trainyard.agent NODE_FOLDER`, or `--join` in a pod."""

import sys

from trainyard.agent.boot import main

sys.exit(main(sys.argv))
