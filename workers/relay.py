"""`python -m workers.relay CONFIG [--section.key value]...`: `cusearch worker relay` in a checkout."""

import sys

from cusearch_async.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["worker", "relay"]
    main()
