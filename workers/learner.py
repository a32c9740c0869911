"""`python -m workers.learner CONFIG [--section.key value]...` in a checkout; an installed package starts the same."""

import sys

from cusearch_async.processes.start import main

if __name__ == "__main__":
    sys.argv.insert(1, "learner")
    main()
