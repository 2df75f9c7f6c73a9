"""`python -m trainyard.agent NODE_FOLDER`."""

import sys

from trainyard.agent.boot import main

sys.exit(main(sys.argv))
